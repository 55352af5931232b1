"""Adapters for what tells us that something changed outside: one source, one module."""
