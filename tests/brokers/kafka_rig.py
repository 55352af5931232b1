"""Kafka brokers for tests: a new namespace each, short timeouts and few partitions."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka.admin import AdminClient

from penstock.brokers.kafka.broker import KafkaBroker
from penstock.brokers.kafka.url import parse
from penstock.clock import SystemClock
from penstock.ports import Clock, Delivery, Out, Published, Subscription

OPTIONS = "partitions=2&retry_levels=5s&session=6s&grace=1s&timeout=8s"


def open_kafka(
    url: str,
    namespace: str = "",
    options: str = "",
    *,
    env: Mapping[str, str] | None = None,
    clock: Clock | None = None,
) -> KafkaBroker:
    return KafkaBroker(
        parse(f"{url}?{OPTIONS}&{options}", env or {}),
        namespace or f"t{uuid.uuid4().hex[:12]}",
        clock or SystemClock(),
    )


def sweep(url: str) -> None:
    """Delete the topics of these tests.

    A killed server reads all of its topics during its next start.
    """
    client = AdminClient({"bootstrap.servers": url.removeprefix("kafka://"), "log_level": 0})
    ours = [
        topic
        for topic in client.list_topics(timeout=20).topics
        if re.match(r"t[0-9a-f]{12}\.", topic)
    ]
    for future in (client.delete_topics(ours, operation_timeout=20) if ours else {}).values():
        future.result(30)


async def die(broker: KafkaBroker) -> None:
    """Close the broker like a killed process: it stops committing and publishing."""
    for reader in broker._readers.values():
        reader.consumer.abandoned = True
    await broker.close()


async def fill(broker: KafkaBroker, ids: Sequence[str], topic: str = "t", **more: Any) -> None:
    """Publish one message per id. The key is the id without its digits: `a` for `a1`."""
    outs = []
    for id_ in ids:
        fields = {"key": id_.rstrip("0123456789"), "body": id_.encode(), **more}
        outs.append(Out(topic=topic, id=id_, **fields))
    assert set(await broker.publish(outs)) <= {Published.OK}


async def take(sub: Subscription, n: int, wait: float = 20.0) -> list[Delivery]:
    """Receive `n` deliveries, or stop after `wait` seconds without a delivery."""
    got: list[Delivery] = []
    while len(got) < n and (some := await sub.receive(n - len(got), wait)):
        got += some
    return got
