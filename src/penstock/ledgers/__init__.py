"""Ledgers: the authority on what happened to a URL."""
