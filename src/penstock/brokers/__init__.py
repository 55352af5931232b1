"""Brokers: one adapter, one module."""
