"""An existing Kafka topic as a source, `kafka://host:9092/topic`: its messages become findings, and
the position is our cursor. No format is read here.

    kafka://host:9092/orders?start=latest&format=debezium&operations=c,u,d
    kafka+ssl://user:password@host:9093/orders?sasl=scram-sha-512&ca=/etc/ca.pem

No group is joined: partitions are assigned, and what was read is noted in the ledger with what
became of it. With `group=NAME` the offsets are also committed under that name, for tools that watch
lag; they are never read back.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from penstock.authoring.pipeline import SourceSpec
from penstock.config import units
from penstock.errors import ConfigError, SourceDown, UsageError
from penstock.ports import Batch, Finding
from penstock.sources.base import BATCH, BaseSource, SourceContext
from penstock.sources.kafka.client import Client
from penstock.sources.kafka.messages import FORMATS, OPERATIONS, Message, Reading
from penstock.stores.kafka import Topic, parse

T = TypeVar("T")
REFRESH = 15.0  # how often somebody may have added partitions
BATCH_BYTES = 4 << 20  # a batch ends with the message that passes it
_GROUP = "penstock-source"  # the library wants one; nothing is committed under it


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next offset of each partition, and which topic of which cluster they are of."""

    topic: str  # its id where servers give one, else ""
    cluster: str
    at: dict[int, int]
    lost: int = 0  # messages that retention deleted before they were read

    def text(self) -> str:
        places = ", ".join(f"{p}:{offset}" for p, offset in sorted(self.at.items())[:32]) + (
            ", …" if len(self.at) > 32 else ""
        )
        return f"at {places or 'no partition'}" + (
            f"; {self.lost} messages were deleted unread" if self.lost else ""
        )


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Cursor).decode


class Options(msgspec.Struct, frozen=True, kw_only=True):
    format: str = "auto"
    operations: frozenset[str] = frozenset("cru")
    tombstones: bool = False
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
        expected="some of c, r, u, d, t, m with commas between them",
        read=_operations,
    ),
    "tombstones": units.FLAG,
    "group": units.texts(r"[^\s,]{1,249}", "the name of a consumer group"),
    "start": units.choices("earliest", "latest"),
}


class KafkaSource(BaseSource):
    def __init__(
        self, spec: SourceSpec, context: SourceContext, topic: Topic, chosen: Options
    ) -> None:
        super().__init__(spec, context)
        self.topic, self.options = topic, chosen
        self.every = None
        self.refresh = REFRESH
        self._told: str = ""  # a gap that was raised once already: now we go on behind it

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        async for batch in self._batches(cursor, commit=bool(self.options.group)):
            yield batch

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        found: list[Finding] = []
        batches = self._batches(cursor, commit=False)
        try:
            async for batch in batches:
                found += batch.findings
                if len(found) >= limit or batch.idle:
                    break
        finally:
            await batches.aclose()
        return found[:limit]

    async def _batches(self, cursor: bytes | None, *, commit: bool) -> AsyncGenerator[Batch, None]:
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"kafka-{self.name}")
        client = Client(self.topic, self.options.group or _GROUP)

        async def run(work: Callable[..., T], *args: Any) -> T:
            return await asyncio.get_running_loop().run_in_executor(thread, work, *args)

        try:
            noted = await run(self._begin, client, cursor)
            if cursor is None or _pack(noted) != cursor:
                yield Batch(cursor=_pack(noted))
            committed: Mapping[int, int] = {}
            looked = time.monotonic()
            reading = self._reading(noted)
            while True:
                if time.monotonic() - looked > self.refresh:
                    looked = time.monotonic()
                    await run(client.look_for_partitions)
                messages, findings = await run(_take, client, reading)
                at = dict(client.at)
                moved = at != noted.at
                noted = msgspec.structs.replace(noted, at=at)
                idle = not messages and client.is_at_the_end
                now = self.context.clock.now()
                lag = (
                    0.0
                    if idle
                    else max((now - m.at for m in messages[-1:] if m.at is not None), default=None)
                )
                yield Batch(
                    findings=findings,
                    cursor=_pack(noted) if moved else None,
                    idle=idle,
                    lag=None if lag is None else max(0.0, lag),
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

    def _reading(self, at: Cursor) -> Reading:
        o = self.options
        return Reading(
            format=o.format,
            operations=o.operations,
            tombstones=o.tombstones,
            cluster=at.cluster,
            topic_id=at.topic,
        )

    # -- where to begin: in the client's thread ----------------------------------------------------

    def _begin(self, client: Client, raw: bytes | None) -> Cursor:
        cluster, topic_id, spans = client.open()
        noted = _read_cursor(raw, self.name)
        gaps: list[str] = []
        lost = noted.lost if noted is not None else 0
        if noted is not None and (noted.topic, noted.cluster) != (topic_id, cluster):
            gaps.append("it is not the topic that was read before, but another of the same name")
            noted = None
        at: dict[int, int] = {}
        for p, (low, high) in spans.items():
            if noted is None:
                at[p] = high if self.options.start == "latest" and not gaps else low
            elif p not in noted.at:  # added since: everything in it is new
                at[p] = low
            elif noted.at[p] < low:
                gaps.append(
                    f"partition {p} begins with offset {low} and was read up to {noted.at[p]}: {low - noted.at[p]} messages were deleted unread"
                )
                lost += low - noted.at[p]
                at[p] = low
            elif noted.at[p] > high:
                gaps.append(
                    f"partition {p} ends with offset {high} and was read up to {noted.at[p]}: it was cut"
                )
                at[p] = high
            else:
                at[p] = noted.at[p]
        if gaps and self._told != (told := "; ".join(gaps)):
            self._told = told
            hint = "reading goes on from what is there; a longer retention.ms, or a source that is not stopped for so long, keeps it from happening again"
            raise SourceDown(f"{self.topic.label}: {told}", hint=hint, after=1.0)
        self._told = ""
        client.assign(at)
        return Cursor(topic=topic_id, cluster=cluster, at=at, lost=lost)

    # -- for people --------------------------------------------------------------------------------

    async def place(self, to: str) -> bytes | None:
        return await asyncio.to_thread(self._place, to.strip())

    def _place(self, to: str) -> bytes:
        client = Client(self.topic, _GROUP)
        try:
            cluster, topic_id, spans = client.open()
            if to in ("now", "end", "latest"):
                at = {p: high for p, (_, high) in spans.items()}
            elif to == "earliest":
                at = {p: low for p, (low, _) in spans.items()}
            elif re.fullmatch(r"(\d+:)?\d+(,\s*\d+:\d+)*", to):
                at = self._offsets(to, spans)
            else:
                at = client.at_time(self._time(to), spans)
        finally:
            client.close()
        return _pack(Cursor(topic=topic_id, cluster=cluster, at=at))

    def _offsets(self, to: str, spans: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        pairs = [part.strip().rpartition(":") for part in to.split(",")]
        at = {int(p or 0): int(offset) for p, _, offset in pairs}
        example = ",".join(f"{p}:{low}" for p, (low, _) in sorted(spans.items())[:8])
        if at.keys() != spans.keys():
            odd = sorted(at.keys() ^ spans.keys())[0]
            raise UsageError(
                f"{self.topic.label} has {len(spans)} partitions, and {to!r} is no place for partition {odd}",
                hint=f"--to {example}",
            )
        for p, offset in at.items():
            low, high = spans[p]
            if not low <= offset <= high:
                raise UsageError(
                    f"partition {p} of {self.topic.label} has the offsets {low} to {high}, not {offset}",
                    hint=f"--to {example}",
                )
        return at

    def _time(self, to: str) -> float:
        try:
            return self.context.clock.now() - units.duration(to)
        except ValueError:
            pass
        try:
            when = datetime.fromisoformat(to)
        except ValueError:
            raise UsageError(
                f"{to!r} is no place in a topic",
                hint="now, end, 0:1500,1:1498 (partition:offset), 2026-11-16T04:00 (UTC), or how long ago: 2h",
            ) from None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

    def describe(self, cursor: bytes | None) -> str:
        if cursor is None:
            return (
                "at the start"
                if self.options.start == "earliest"
                else "not read yet; begins with what comes next"
            )
        return _read_cursor(cursor, self.name).text()  # type: ignore[union-attr]


def _take(client: Client, reading: Reading) -> tuple[list[Message], list[Finding]]:
    """Read here too: a thousand messages of JSON are a tenth of a second that the loop has better
    use for.
    """
    messages = client.take(BATCH, BATCH_BYTES)
    return messages, [finding for m in messages if (finding := reading.finding(m)) is not None]


def _read_cursor(raw: bytes | None, name: str) -> Cursor | None:
    try:
        return None if raw is None else _unpack(raw)
    except msgspec.MsgspecError:
        raise SourceDown(
            f"the position of source {name} is none of a Kafka topic",
            hint=f"penstock sources reset {name} --to start, or give it another name",
        ) from None


def open_source(spec: SourceSpec, context: SourceContext) -> KafkaSource:
    """Connects to nothing yet. Raises ConfigError."""
    topic, given = parse(spec.url, spec.options, OPTIONS, where=f"source {spec.name}")
    if spec.every is not None:
        raise ConfigError(
            f"source {spec.name}: a topic is read as it grows, and has no rounds",
            hint="leave out every",
        )
    return KafkaSource(spec, context, topic, Options(**given))
