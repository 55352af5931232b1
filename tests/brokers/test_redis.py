"""Redis Streams: the suite every broker passes, and what only this adapter promises."""

from __future__ import annotations

import uuid

import pytest
from tests.brokers.served import Served

from penstock.brokers.redis import RedisBroker
from penstock.clock import SystemClock
from penstock.ports import Broker
from penstock.stores.redis import Server

pytestmark = pytest.mark.server("redis")


def fresh(url: str, prefix: str = "") -> RedisBroker:
    return RedisBroker(Server(url, evictable=False), prefix or f"t{uuid.uuid4().hex[:8]}", SystemClock())


class TestRedis(Served):
    name = "redis"
    lease = 1.0
    slack = 0.4

    async def open(self) -> Broker:
        self.broker = fresh(self.url)
        return self.broker

    async def reopen(self, broker: Broker) -> Broker:
        await broker.close()
        return fresh(self.url, self.broker.prefix)
