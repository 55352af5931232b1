"""SQLite as an embedded broker."""

from penstock.brokers.sqlite.broker import SqliteBroker, open_broker

__all__ = ["SqliteBroker", "open_broker"]
