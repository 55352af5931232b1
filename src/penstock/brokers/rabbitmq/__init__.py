"""RabbitMQ as a broker."""

from penstock.brokers.rabbitmq.broker import CAPS, open_broker

__all__ = ["CAPS", "open_broker"]
