"""Redis Streams as a broker."""

from penstock.brokers.redis.broker import CAPS, open_broker

__all__ = ["CAPS", "open_broker"]
