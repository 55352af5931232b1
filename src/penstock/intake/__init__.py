"""Turns findings of sources, webhooks and commands into accepted events."""
