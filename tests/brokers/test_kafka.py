"""Kafka: the suite every broker passes, on a real server. What only Kafka promises is in the files
beside this one.
"""

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
    limit = 180.0  # a killed server takes a while to come back

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
