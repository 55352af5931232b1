"""SQS: the suite every broker passes, against a real server, and what only this adapter promises."""

from __future__ import annotations

import uuid

import pytest
from tests.brokers.served import Served

from penstock.brokers import sqs_wire as wire
from penstock.brokers.sqs import SqsBroker
from penstock.clock import SystemClock
from penstock.ports import Broker

pytestmark = pytest.mark.server("sqs")


def opened(url: str, namespace: str) -> SqsBroker:
    return SqsBroker(wire.parse(url + "&poll=1", namespace), SystemClock())


async def removed(broker: SqsBroker) -> None:
    """The queues of a namespace, whose names begin alike."""
    for url in (await broker.call("list_queues", QueueNamePrefix=broker.place.prefix + "-")).get("QueueUrls", []):
        await broker.call("delete_queue", QueueUrl=url)


class TestSqs(Served):
    name = "sqs"
    volatile = True
    lease = 4.0  # longer than the longest delay of the suite and its slack
    patience = 0.3
    slack = 1.2  # SQS counts whole seconds

    async def open(self) -> Broker:
        self.namespace = "t" + uuid.uuid4().hex[:10]
        self.opened = [opened(self.url, self.namespace)]
        return self.opened[0]

    async def reopen(self, broker: Broker) -> Broker:
        self.opened.append(opened(self.url, self.namespace))
        return self.opened[-1]

    async def shut(self, broker: Broker) -> None:
        await removed(self.opened[-1])
        for each in self.opened:
            await each.close()
