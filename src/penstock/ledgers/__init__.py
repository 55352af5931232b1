"""Ledgers: the durable record of all events, which decides what happened to a URL."""
