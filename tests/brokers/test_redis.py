"""Redis Streams: the suite every broker passes, and what only this adapter promises."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from tests.servers import Handle

from penstock.brokers.redis import RedisBroker
from penstock.clock import SystemClock
from penstock.ports import Broker
from penstock.stores.redis import Server
from penstock.testing.conformance import BrokerConformance

pytestmark = pytest.mark.server("redis")


def fresh(url: str, prefix: str = "") -> RedisBroker:
    return RedisBroker(Server(url, evictable=False), prefix or f"t{uuid.uuid4().hex[:8]}", SystemClock())


class TestRedis(BrokerConformance):
    lease = 1.0
    slack = 0.4

    @pytest.fixture(autouse=True)
    def _place(self, server: Callable[[str], Handle]) -> None:
        self.url = server("redis").url

    async def open(self) -> Broker:
        self.broker = fresh(self.url)
        return self.broker

    async def reopen(self, broker: Broker) -> Broker:
        await broker.close()
        return fresh(self.url, self.broker.prefix)
