"""Topics on a real Kafka server, and a producer, for tests of the Kafka source and sink."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import Producer, TopicPartition, admin

from penstock.authoring.pipeline import Pipeline
from penstock.clock import SystemClock
from penstock.config import files as configuration
from penstock.fetching.source_client import SourceWeb
from penstock.ports import Batch, Finding
from penstock.sources.base import SourceContext
from penstock.sources.kafka.source import KafkaSource, open_source

_api: Any = admin


class Ground:
    """A Kafka server. `sweep` deletes the topics that were created here."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.servers = url.removeprefix("kafka://")
        self.admin = _api.AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        self._made: list[str] = []
        self._producer: Producer | None = None

    def topic(self, partitions: int = 1, **config: str) -> str:
        name = f"t{uuid.uuid4().hex[:12]}.changes"
        self.make(name, partitions, **config)
        return name

    def make(self, name: str, partitions: int = 1, **config: str) -> None:
        new = _api.NewTopic(
            name,
            num_partitions=partitions,
            replication_factor=1,
            config={k.replace("_", "."): v for k, v in config.items()},
        )
        self.admin.create_topics([new])[name].result(20)
        self._made.append(name)

    def remove(self, *names: str) -> None:
        for future in (
            self.admin.delete_topics(list(names), operation_timeout=20) if names else {}
        ).values():
            future.result(30)
        self._made = [name for name in self._made if name not in names]

    def ends(self, topic: str) -> dict[TopicPartition, Any]:
        """Return the `list_offsets` request for the end of a topic with one partition."""
        return {TopicPartition(topic, 0): _api.OffsetSpec.latest()}

    def mine(self, name: str) -> None:
        """Let `sweep` delete a topic that other code creates."""
        self._made.append(name)

    def sweep(self) -> None:
        there = self.admin.list_topics(timeout=20).topics
        self.remove(*[name for name in self._made if name in there])

    def write(
        self, topic: str, values: Iterable[Any], *, partition: int | None = None, **more: Any
    ) -> None:
        """Write values: bytes unchanged, None as a tombstone, other values as JSON."""
        for value in values:
            raw = value if value is None or isinstance(value, bytes) else msgspec.json.encode(value)
            self.queue(
                topic, raw, **({} if partition is None else {"partition": partition}), **more
            )
        self.flush()

    def queue(self, topic: str, value: bytes | None, **more: Any) -> None:
        if self._producer is None:
            self._producer = Producer(
                {
                    "bootstrap.servers": self.servers,
                    "linger.ms": 5,
                    "message.max.bytes": 2 << 20,
                    "log_level": 0,
                }
            )
        self._producer.produce(topic, value, **more)
        self._producer.poll(0)

    def flush(self) -> None:
        assert self._producer is not None
        assert self._producer.flush(30) == 0
        self._producer = None

    def source(self, topic: str, **options: Any) -> KafkaSource:
        pipeline = Pipeline("test")
        pipeline.source(f"{self.url}/{topic}", **options)
        return open_source(pipeline.sources[0], context())


def context() -> SourceContext:
    return SourceContext(
        configuration.load({}, {}, Path.cwd()).config,
        SystemClock(),
        random.Random(7),
        SourceWeb(),
        Path.cwd(),
    )


async def until_idle(
    source: KafkaSource, cursor: bytes | None = None, *, batches: list[Batch] | None = None
) -> tuple[list[Finding], bytes | None]:
    """Accept batches until the source is idle. Return the findings and the last cursor."""
    found: list[Finding] = []
    rounds = source.read(cursor)
    try:
        async for batch in rounds:
            found += batch.findings
            cursor = batch.cursor if batch.cursor is not None else cursor
            if batches is not None:
                batches.append(batch)
            if batch.idle:
                return found, cursor
    finally:
        await rounds.aclose()
    raise AssertionError("the source ended before it was idle")


def numbers(findings: Sequence[Finding]) -> list[int]:
    return [f.payload["n"] for f in findings]
