"""Source for an existing Kafka topic, `kafka://host:9092/topic`: its messages become findings.

    kafka://host:9092/orders?start=latest&format=debezium&operations=c,u,d
    kafka+ssl://user:password@host:9093/orders?sasl=scram-sha-512&ca=/etc/ca.pem

The source does not join a consumer group. It assigns all partitions to itself, and the ledger
records the offsets as the cursor. With `group=NAME` the offsets are also committed under that name,
for tools that monitor lag. The source never reads them back. See `messages` for the formats.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.config import units
from penstock.errors import ConfigError, SourceDown, UsageError
from penstock.ports import Batch, Finding
from penstock.sources.base import BATCH, BaseSource, SourceContext
from penstock.sources.kafka.client import Client
from penstock.sources.kafka.messages import (
    FORMATS,
    OPERATIONS,
    Message,
    MessageOptions,
    MessageReader,
)
from penstock.stores.kafka import Topic, parse

T = TypeVar("T")
REFRESH_INTERVAL = 15.0  # seconds between two checks for added partitions
BATCH_BYTES = 4 << 20  # a batch ends with the message that exceeds this memory
_GROUP = "penstock-source"  # librdkafka requires a group, but no offset is committed under it


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next offset of each partition, with the ids of the topic and its cluster."""

    topic: str  # id of the topic, or "" if the server has no topic ids
    cluster: str
    at: dict[int, int]
    lost: int = 0  # messages that retention deleted before they were read

    def text(self) -> str:
        offsets = ", ".join(f"{p}:{offset}" for p, offset in sorted(self.at.items())[:32]) + (
            ", …" if len(self.at) > 32 else ""
        )
        return f"at {offsets or 'no partition'}" + (
            f"; {self.lost} messages were deleted unread" if self.lost else ""
        )


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Cursor).decode


class KafkaOptions(MessageOptions, frozen=True, kw_only=True):
    group: str = ""
    start: str = "earliest"


def _operations(value: object) -> frozenset[str]:
    found = frozenset(units.words(value))
    if not found or not found <= set(OPERATIONS):
        raise ValueError(value)
    return found


OPTIONS: dict[str, units.Kind] = {
    "format": units.choices(*FORMATS),
    "operations": units.Kind(
        name="list of operations",
        expected="some of c, r, u, d, t, m, separated by commas",
        read=_operations,
    ),
    "tombstones": units.FLAG,
    "group": units.texts(r"[^\s,]{1,249}", "the name of a consumer group"),
    "start": units.choices("earliest", "latest"),
}


class KafkaSource(BaseSource):
    def __init__(
        self, spec: SourceSpec, context: SourceContext, topic: Topic, chosen: KafkaOptions
    ) -> None:
        super().__init__(spec, context)
        self.topic, self.options = topic, chosen
        self.every = None
        self.refresh = REFRESH_INTERVAL
        # A gap that was raised as an error already. The next attempt continues after it.
        self._reported_gap: str = ""

    def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        return self._batches(cursor, commit=bool(self.options.group))

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        found: list[Finding] = []
        async with aclosing(self._batches(cursor, commit=False)) as batches:
            async for batch in batches:
                found += batch.findings
                if len(found) >= limit or batch.idle:
                    break
        return found[:limit]

    async def _batches(self, cursor: bytes | None, *, commit: bool) -> AsyncGenerator[Batch, None]:
        client = Client(self.topic, self.options.group or _GROUP)
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"kafka-{self.name}")

        async def run(work: Callable[..., T], *args: Any) -> T:
            return await asyncio.get_running_loop().run_in_executor(thread, work, *args)

        try:
            recorded = await run(self._start, client, cursor)
            if cursor is None or _pack(recorded) != cursor:
                yield Batch(cursor=_pack(recorded))
            committed: Mapping[int, int] = {}
            refreshed_at = time.monotonic()
            reader = MessageReader(
                format=self.options.format,
                operations=self.options.operations,
                tombstones=self.options.tombstones,
                cluster=recorded.cluster,
                topic_id=recorded.topic,
            )
            while True:
                if time.monotonic() - refreshed_at > self.refresh:
                    refreshed_at = time.monotonic()
                    await run(client.add_new_partitions)
                messages, findings = await run(_read_batch, client, reader)
                at = dict(client.at)
                moved = at != recorded.at
                recorded = msgspec.structs.replace(recorded, at=at)
                idle = not messages and client.is_at_end
                last = messages[-1].at if messages else None
                lag = None if last is None else max(0.0, self.context.clock.now() - last)
                yield Batch(
                    findings=findings,
                    cursor=_pack(recorded) if moved else None,
                    idle=idle,
                    lag=0.0 if idle else lag,
                    backlog=client.backlog(),
                )
                if commit and at != committed:
                    committed = at
                    await run(client.commit, at)
        finally:
            try:
                await run(client.close)
            finally:
                thread.shutdown(wait=False)

    # -- start offsets: in the client's thread -----------------------------------------------------

    def _start(self, client: Client, raw: bytes | None) -> Cursor:
        """Assign the partitions at their start offsets, and return these as a cursor.

        Raises SourceDown once for each gap: messages that were deleted unread, or another topic
        with the same name.
        """
        cluster, topic_id, ranges = client.open()
        recorded = _read_cursor(raw, self.name)
        gaps: list[str] = []
        lost = recorded.lost if recorded is not None else 0
        if recorded is not None and (recorded.topic, recorded.cluster) != (topic_id, cluster):
            gaps.append(
                "this topic is not the one that was read before, but another of the same name"
            )
            recorded = None
        at: dict[int, int] = {}
        for p, (low, high) in ranges.items():
            if recorded is None:
                at[p] = high if self.options.start == "latest" and not gaps else low
            elif p not in recorded.at:  # an added partition is read from its start
                at[p] = low
            elif recorded.at[p] < low:
                gaps.append(
                    f"partition {p} starts with offset {low} and was read up to {recorded.at[p]}: "
                    f"{low - recorded.at[p]} messages were deleted unread"
                )
                lost += low - recorded.at[p]
                at[p] = low
            elif recorded.at[p] > high:
                gaps.append(
                    f"partition {p} ends with offset {high} and was read up to {recorded.at[p]}: "
                    "it was truncated"
                )
                at[p] = high
            else:
                at[p] = recorded.at[p]
        if gaps and self._reported_gap != (text := "; ".join(gaps)):
            self._reported_gap = text
            hint = (
                "reading continues with the messages that exist. To prevent this, use a longer "
                "retention.ms, or stop the source for a shorter time"
            )
            raise SourceDown(f"{self.topic.label}: {text}", hint=hint, after=1.0)
        self._reported_gap = ""
        client.assign(at)
        return Cursor(topic=topic_id, cluster=cluster, at=at, lost=lost)

    # -- for operators -----------------------------------------------------------------------------

    async def place(self, to: str) -> bytes | None:
        return await asyncio.to_thread(self._cursor_for, to.strip())

    def _cursor_for(self, to: str) -> bytes:
        client = Client(self.topic, _GROUP)
        try:
            cluster, topic_id, ranges = client.open()
            if to in ("now", "end", "latest"):
                at = {p: high for p, (_, high) in ranges.items()}
            elif to == "earliest":
                at = {p: low for p, (low, _) in ranges.items()}
            elif re.fullmatch(r"(\d+:)?\d+(,\s*\d+:\d+)*", to):
                at = self._offsets(to, ranges)
            else:
                at = client.offsets_at(self._time(to), ranges)
        finally:
            client.close()
        return _pack(Cursor(topic=topic_id, cluster=cluster, at=at))

    def _offsets(self, to: str, ranges: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        pairs = [part.strip().rpartition(":") for part in to.split(",")]
        at = {int(p or 0): int(offset) for p, _, offset in pairs}
        example = ",".join(f"{p}:{low}" for p, (low, _) in sorted(ranges.items())[:8])
        if at.keys() != ranges.keys():
            odd = sorted(at.keys() ^ ranges.keys())[0]
            raise UsageError(
                f"{self.topic.label} has {len(ranges)} partitions, "
                f"and {to!r} does not fit partition {odd}",
                hint=f"for example `--to {example}`",
            )
        for p, offset in at.items():
            low, high = ranges[p]
            if not low <= offset <= high:
                raise UsageError(
                    f"partition {p} of {self.topic.label} has the offsets {low} to {high}, "
                    f"not {offset}",
                    hint=f"for example `--to {example}`",
                )
        return at

    def _time(self, to: str) -> float:
        with suppress(ValueError):
            return self.context.clock.now() - units.duration(to)
        try:
            time_given = datetime.fromisoformat(to)
        except ValueError:
            raise UsageError(
                f"{to!r} is not a position in a topic",
                hint="use now, end, 0:1500,1:1498 (partition:offset), 2026-11-16T04:00 (UTC), "
                "or an age such as 2h",
            ) from None
        return (time_given if time_given.tzinfo else time_given.replace(tzinfo=UTC)).timestamp()

    def describe(self, cursor: bytes | None) -> str:
        if cursor is None:
            return (
                "at the start"
                if self.options.start == "earliest"
                else "not read yet, starts with the next message"
            )
        return _read_cursor(cursor, self.name).text()  # type: ignore[union-attr]


def _read_batch(client: Client, reader: MessageReader) -> tuple[list[Message], list[Finding]]:
    """Read and parse a batch in the client's thread.

    Parsing a thousand JSON messages takes 0.1 s, which would block the event loop.
    """
    messages = client.take(BATCH, BATCH_BYTES)
    return messages, [finding for m in messages if (finding := reader.finding(m)) is not None]


def _read_cursor(raw: bytes | None, name: str) -> Cursor | None:
    try:
        return None if raw is None else _unpack(raw)
    except msgspec.MsgspecError:
        raise SourceDown(
            f"the position of source {name} is not one of a Kafka topic",
            hint=f"run `penstock sources reset {name} --to start`, or rename the source",
        ) from None


def open_source(spec: SourceSpec, context: SourceContext) -> KafkaSource:
    """Create the source without connecting to the server. Raises ConfigError."""
    topic, given = parse(spec.url, spec.options, OPTIONS, where=f"source {spec.name}")
    if spec.every is not None:
        raise ConfigError(
            f"source {spec.name}: a Kafka topic is read continuously and has no `every`",
            hint="remove `every`",
        )
    return KafkaSource(spec, context, topic, KafkaOptions(**given))
