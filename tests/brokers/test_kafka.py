"""Kafka: the suite every broker passes, on a real server, and what only Kafka promises."""

from __future__ import annotations

import uuid

import pytest
from tests.brokers.served import Served

from penstock.brokers.kafka import KafkaBroker
from penstock.brokers.kafka_dsn import parse
from penstock.clock import SystemClock
from penstock.ports import Broker

pytestmark = pytest.mark.server("kafka")
OPTIONS = "?partitions=2&retry_levels=5s&session=2s&grace=1s&timeout=4s"


def open_kafka(url: str, namespace: str = "", options: str = OPTIONS) -> KafkaBroker:
    return KafkaBroker(parse(url + options, {}), namespace or f"t{uuid.uuid4().hex[:12]}", SystemClock())


async def die(broker: KafkaBroker) -> None:
    """As if its process had been killed: nothing more is committed or published."""
    for reader in broker._readers.values():
        reader.member.abandoned = True
    await broker.close()


class TestKafka(Served):
    name = "kafka"
    lease = 1.0
    patience = 0.3
    slack = 0.6

    async def open(self) -> Broker:
        return open_kafka(self.url)

    async def reopen(self, broker: Broker) -> Broker:
        assert isinstance(broker, KafkaBroker)
        await die(broker)
        return open_kafka(self.url, broker.topics.namespace)
