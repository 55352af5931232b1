"""Sinks: targets of records."""
