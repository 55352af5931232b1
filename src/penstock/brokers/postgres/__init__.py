"""PostgreSQL as a broker."""

from penstock.brokers.postgres.broker import open_broker

__all__ = ["open_broker"]
