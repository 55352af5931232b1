"""PostgreSQL as a broker."""

from penstock.brokers.postgres.queue import open_broker

__all__ = ["open_broker"]
