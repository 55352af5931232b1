"""Builds a running process from the configuration. The only package that names adapters."""
