"""Runs extractors, in this process or in sandboxed child processes."""
