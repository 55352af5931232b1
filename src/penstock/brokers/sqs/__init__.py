"""Amazon SQS as a broker."""

from penstock.brokers.sqs.broker import CAPS, open_broker

__all__ = ["CAPS", "open_broker"]
