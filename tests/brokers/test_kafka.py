"""Kafka: the suite every broker passes, on a real server, and what only Kafka promises."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import pytest
from tests.servers import Handle

from penstock.brokers.kafka import KafkaBroker
from penstock.brokers.kafka_dsn import parse
from penstock.clock import SystemClock
from penstock.ports import Broker
from penstock.testing.conformance import BrokerConformance
from penstock.testing.proxy import Proxy

pytestmark = pytest.mark.server("kafka")
OPTIONS = "?partitions=2&retry_levels=5s&session=2s&grace=1s&timeout=4s"


def open_kafka(url: str, namespace: str = "", options: str = OPTIONS) -> KafkaBroker:
    return KafkaBroker(parse(url + options, {}), namespace or f"t{uuid.uuid4().hex[:12]}", SystemClock())


async def die(broker: KafkaBroker) -> None:
    """As if its process had been killed: nothing more is committed or published."""
    for reader in broker._readers.values():
        reader.member.abandoned = True
    await broker.close()


class TestKafka(BrokerConformance):
    lease = 1.0
    patience = 0.3
    slack = 0.6

    @pytest.fixture(autouse=True)
    def _place(self, server: Callable[[str], Handle]) -> None:
        self.server = server("kafka")
        self.url = self.server.url

    async def open(self) -> Broker:
        return open_kafka(self.url)

    async def reopen(self, broker: Broker) -> Broker:
        assert isinstance(broker, KafkaBroker)
        await die(broker)
        return open_kafka(self.url, broker.topics.namespace)

    async def stop_server(self) -> None:
        await asyncio.to_thread(self.server.kill)

    async def start_server(self) -> None:
        await asyncio.to_thread(self.server.start)

    def in_front(self) -> Proxy:
        return Proxy("127.0.0.1", self.server.ports("behind"), listen=self.server.ports("proxied"))

    async def open_through(self, proxy: Proxy) -> Broker:
        return open_kafka(f"kafka://{proxy.host}:{proxy.port}", options=OPTIONS)
