"""Kafka topics as a source."""

from penstock.sources.kafka.source import open_source

__all__ = ["open_source"]
