"""Builds a running process from the configuration. The only room that names adapters."""
