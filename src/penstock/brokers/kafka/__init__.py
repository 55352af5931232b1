"""Kafka as a broker."""

from penstock.brokers.kafka.broker import CAPS, open_broker

__all__ = ["CAPS", "open_broker"]
