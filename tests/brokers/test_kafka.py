"""Kafka: the conformance suite on a real server. See the other Kafka files for its own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.brokers.kafka_rig import die, open_kafka, sweep
from tests.brokers.served import Served

from penstock.brokers.kafka.broker import KafkaBroker
from penstock.ports import Broker

pytestmark = pytest.mark.server("kafka")


class TestKafka(Served):
    name = "kafka"
    lease = 1.0
    patience = 0.3
    slack = 0.6
    limit = 180.0  # seconds. A killed server starts slowly.

    @pytest.fixture(autouse=True)
    def _swept(self, _its_server: None) -> Iterator[None]:
        yield
        sweep(self.served.url)

    async def open(self) -> Broker:
        return open_kafka(self.url)

    async def reopen(self, broker: Broker) -> Broker:
        assert isinstance(broker, KafkaBroker)
        await die(broker)
        return open_kafka(self.url, broker.topics.namespace)
