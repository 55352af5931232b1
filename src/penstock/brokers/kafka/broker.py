"""Kafka broker: one server-side topic per priority class, retry delay and for dead letters.

Messages are settled in any order. The other modules: `url` (the URL and its options),
`topics` (server-side names, offsets), `producer`, `consumer`, `group_reader`, `commits`,
`entries` (buffered messages), `message` (message format).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.brokers.kafka.entries import BufferedMessage, Partition
from penstock.brokers.kafka.group_reader import GroupReader
from penstock.brokers.kafka.message import ID, compose, read_message
from penstock.brokers.kafka.producer import BatchProducer, Message
from penstock.brokers.kafka.topics import (
    NORMAL,
    Layout,
    PartitionLag,
    TopicAndPartition,
    Topics,
)
from penstock.brokers.kafka.url import Settings, explained, parse
from penstock.errors import ConfigError, StoreUnavailable
from penstock.model import Outcome
from penstock.ports import (
    Capabilities,
    Clock,
    Delivery,
    Out,
    Published,
    Stats,
    Subscription,
    TopicSpec,
)
from penstock.rules.priority import LOWEST, class_of
from penstock.rules.watermark import Window
from penstock.stores.context import Context
from penstock.stores.kafka_access import error_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
CAPS = Capabilities(order_per_key="native", delay="emulated", replay=True, lease="connection")
_POLL_WAIT = 0.2  # seconds of one poll without a group
Spans = Mapping[TopicAndPartition, tuple[int, int]]  # first offset, and the offset after the last
_ENVELOPE_BYTES = 65536  # bytes reserved for the headers, key and framing of a message


class KafkaBroker:
    """Implements ports.Broker, and adds `lag`, `alarms` and more options of `replay`."""

    def __init__(self, settings: Settings, namespace: str, clock: Clock) -> None:
        self.settings, self.clock = settings, clock
        self.caps = msgspec.structs.replace(CAPS, max_body=settings.max_message - _ENVELOPE_BYTES)
        self.topics = Topics(settings, namespace)
        self.producer = BatchProducer(settings)
        self._readers: dict[tuple[str, str], GroupReader] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-admin")

    async def _run_admin(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a blocking call to the servers in the admin thread, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def layout(self, topic: str) -> Layout:
        known = self.topics.layouts.get(topic)
        return known if known is not None else await self._run_admin(self.topics.layout, topic)

    # -- topology and publishing -------------------------------------------------------------------

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        return await self._run_admin(self.topics.ensure, topology)

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        for topic in {m.topic for m in batch} - self.topics.layouts.keys():
            await self.layout(topic)
        now = self.clock.now()
        return await self.producer.send([self._compose(m, now) for m in batch])

    def _compose(self, m: Out, now: float) -> Message:
        plan, due = self.topics.layouts[m.topic], m.not_before <= now
        if due and 0 <= m.priority <= LOWEST and not m.headers and m.key.isascii():
            return plan.names[m.priority], m.body, m.key, {ID: m.id}  # nearly all messages
        priority = class_of(m.priority)
        if due:
            return compose(plan.names[priority], m)
        level = plan.retry_topic_for(m.not_before - now)
        if level is None:
            return compose(plan.names[priority], m, not_before=m.not_before)
        return compose(level.name, m, not_before=m.not_before, priority=priority)

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        return KafkaSubscription(self, topic, group, lease)

    async def reader(self, topic: str, group: str, lease: float) -> GroupReader:
        """Return the reader of the topic and group in this process. Open it if necessary.

        Subscriptions share it, so that a released message is ready for another subscription.
        """
        plan = await self.layout(topic)
        reader = self._readers.get((topic, group))
        if reader is None or reader.ended.done():
            reader = self._readers[topic, group] = GroupReader(
                self.settings,
                plan,
                group,
                self.clock,
                self.producer,
                self.topics.retention,
                group_id=self.topics.group_id(topic, group),
                lease=lease,
            )
        return reader

    # -- figures -----------------------------------------------------------------------------------

    async def lag(self, topic: str, group: str) -> Sequence[PartitionLag]:
        """Return the offsets of the group in each partition.

        `PartitionLag.lag` counts all unsettled messages, including those in flight.
        """
        _, lags = await self._layout_and_lags(topic, group)
        return list(lags.values())

    async def _layout_and_lags(
        self, topic: str, group: str
    ) -> tuple[Layout, dict[TopicAndPartition, PartitionLag]]:
        plan = await self.layout(topic)
        return plan, await self._run_admin(self.topics.read_lags, plan, group)

    async def partitions(self, topic: str, group: str) -> list[dict[str, object]]:
        """Return the lag of each partition, for `penstock topics stats --json`."""
        return [
            {
                "name": r.topic,
                "partition": r.partition,
                "end": r.end,
                "committed": r.committed,
                "lag": r.lag,
            }
            for r in await self.lag(topic, group)
        ]

    async def stats(self, topic: str, group: str) -> Stats:
        plan, lags = await self._layout_and_lags(topic, group)
        reader = self._readers.get((topic, group))
        in_flight = len(reader.handed_out) if reader is not None else 0
        waiting = reader.delayed_count() if reader is not None else 0
        delays = {server_topic.name: server_topic.delay for server_topic in plan.server_topics}
        due = {at: r for at, r in lags.items() if not delays[r.topic]}
        ready = sum(r.lag for r in due.values()) - waiting
        dead = await self._run_admin(
            self.topics.bounds, [plan.dead] if plan.dead != plan.names[NORMAL] else []
        )
        first = await self._read(plan, {at: (r.start, r.end) for at, r in due.items() if r.lag}, 1)
        oldest = min((e.published_at for e in first), default=None)
        return Stats(
            ready=max(0, ready - in_flight),
            delayed=sum(r.lag for at, r in lags.items() if at not in due) + waiting,
            in_flight=in_flight,
            dead=sum(end - low for low, end in dead.values()),
            oldest_age=None if oldest is None else max(0.0, self.clock.now() - oldest),
            exact=False,
        )

    async def _read(self, plan: Layout, spans: Spans, limit: int) -> list[BufferedMessage]:
        return await self._run_admin(_read_spans, self.settings, plan, spans, limit)

    async def alarms(self) -> Sequence[str]:
        """Return warnings about unsettled messages that retention will soon delete.

        Only topics that this process reads are checked.
        """
        return [text for reader in self._readers.values() for text in reader.alarms().values()]

    # -- peek and purge ----------------------------------------------------------------------------

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """Return unsettled messages of the topic's first group, oldest first."""
        plan, lags = await self._layout_and_lags(topic, self._first_group(topic))
        spans = {at: (r.start, r.end) for at, r in lags.items()}
        settled = max((len(r.ahead) for r in lags.values()), default=0)
        found = [
            e
            for e in await self._read(plan, spans, limit + settled)
            if e.offset not in lags[e.part.topic_partition].ahead
        ]
        found.sort(key=lambda e: (e.published_at, *e.part.topic_partition, e.offset))
        return [
            Out(
                topic=plan.topic,
                id=e.id,
                key=e.key,
                body=e.body,
                headers=e.headers,
                priority=e.priority,
                not_before=e.not_before,
            )
            for e in found[:limit]
        ]

    def _first_group(self, topic: str) -> str:
        groups = self.topics.groups.get(topic) or {"main"}
        return "main" if "main" in groups else min(groups)

    async def purge(self, topic: str) -> int:
        _, lags = await self._layout_and_lags(topic, self._first_group(topic))
        ends = {at: r.end for at, r in lags.items() if r.end > r.low}
        await self._run_admin(self.topics.delete_before, ends)
        for (name, _), reader in self._readers.items():
            if name == topic:
                reader.drop_deleted(ends)
        return sum(r.lag for r in lags.values())

    # -- history -----------------------------------------------------------------------------------

    async def replay(
        self,
        topic: str,
        group: str,
        *,
        since: float = 0.0,
        offsets: Mapping[int, int] | None = None,
    ) -> int:
        """Deliver messages to `group` again. Return the number of messages.

        `since` is the publishing time of the first message, or 0 for all retained messages.
        `offsets` maps partitions of the bare topic to a first offset, and replaces `since`.

        If the group has no members, its offsets are moved back and no message is copied. If it has
        members, the messages that it has settled are copied, with the same ids.
        """
        plan, found_lags = await self._layout_and_lags(topic, group)
        lags = {at: r for at, r in found_lags.items() if r.topic in plan.names}
        if offsets is not None:
            bare = plan.names[NORMAL]
            starts = {
                at: min(max(offset, r.low), r.end)
                for p, offset in offsets.items()
                if (r := lags.get(at := (bare, p))) is not None
            }
        elif since > 0:
            found = await self._run_admin(self.topics.first_since, plan.names, since)
            starts = {at: offset if offset >= 0 else lags[at].end for at, offset in found.items()}
        else:
            starts = {at: r.low for at, r in lags.items()}
        if not await self._run_admin(self.topics.is_active, topic, group):
            await self._run_admin(self.topics.set_offsets, topic, group, starts)
            return sum(
                max(0, lags[at].start - start) + len(lags[at].ahead) for at, start in starts.items()
            )
        if not plan.retries:
            raise ConfigError(
                f"group {group} has members that read {topic},"
                " and only a group without members can be replayed",
                hint="stop its workers, or replay into another group",
            )
        return await self._copy_settled(plan, group, starts, lags)

    async def _copy_settled(
        self,
        plan: Layout,
        group: str,
        starts: Mapping[TopicAndPartition, int],
        lags: Mapping[TopicAndPartition, PartitionLag],
    ) -> int:
        """Copy settled messages to the retry topic with a delay of 0 s. Return their number.

        The topics themselves are not changed, so that the next replay finds each message once.
        """
        spans = {
            at: (start, max([lags[at].start, *(offset + 1 for offset in lags[at].ahead)]))
            for at, start in starts.items()
        }
        # the watermark of each partition, and the settled offsets above it, committed or not
        known = {at: (r.start, r.ahead) for at, r in lags.items()}
        if (reader := self._readers.get((plan.topic, group))) is not None:
            known |= {
                at: (part.window.watermark, part.window.ahead)
                for at, part in reader.partitions.items()
            }
        copies = []
        for e in await self._read(plan, spans, 1 << 60):
            watermark, ahead = known[e.part.topic_partition]
            if (e.offset < watermark or e.offset in ahead) and e.target_group in ("", group):
                copies.append(compose(plan.retries[0].name, e, group=group, priority=e.priority))
        for i in range(0, len(copies), 1000):
            answers = await self.producer.send(copies[i : i + 1000])
            if set(answers) != {Published.OK}:
                raise StoreUnavailable(
                    f"replay of {plan.topic} stopped after about {i} of {len(copies)} messages",
                    hint="start it again: repeated messages have the same id",
                )
        return len(copies)

    async def close(self) -> None:
        readers, self._readers = list(self._readers.values()), {}
        await asyncio.gather(*(reader.close() for reader in readers))
        await self.producer.close()
        self._thread.shutdown(wait=False)


class KafkaSubscription:
    """Implements ports.Subscription, and adds `holds`.

    A lease lasts as long as this process owns the partition. It has no time limit.
    """

    def __init__(self, broker: KafkaBroker, topic: str, group: str, lease: float) -> None:
        self.broker, self.topic, self.group, self.lease = broker, topic, group, lease
        self._reader: GroupReader | None = None

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        if self._reader is None or self._reader.ended.done():
            self._reader = await self.broker.reader(self.topic, self.group, self.lease)
        return await self._reader.receive(limit, wait, per_key, self)

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        if self._reader is None:
            return [False] * len(items)
        return await self._reader.settle(items)

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        return [self.holds(d) for d in deliveries]

    def holds(self, d: Delivery) -> bool:
        """Return True if this process still owns the partition, as far as it knows."""
        return self._reader is not None and self._reader.holds(d)

    async def hold(self, until: Mapping[str, float]) -> None:
        """Do nothing: held messages would stop the watermark. The ledger delays them instead."""

    async def close(self) -> None:
        """Release unsettled deliveries, for the other subscriptions of this process."""
        if self._reader is not None:
            self._reader.release_all(self)


def _read_spans(
    settings: Settings, plan: Layout, spans: Spans, limit: int
) -> list[BufferedMessage]:
    """Return messages of these partitions, each from its first offset to before its second.

    Uses no consumer group and commits no offsets. Returns at most `limit` messages of each
    partition. Messages of different partitions are in no order. Blocks, so call it in a thread.
    """
    found: list[BufferedMessage] = []
    open_spans = {at: span for at, span in spans.items() if span[0] < span[1]}
    if not open_spans or limit <= 0:
        return found
    conf = {
        "group.id": "penstock-look",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 50,
        # The span may end with offsets that have no message, such as a transaction marker.
        "enable.partition.eof": True,
    }
    consumer = Consumer(
        settings.client()
        | conf
        | {"queued.min.messages": min(100_000, 2 * limit)}
        | settings.rdkafka
    )
    parts = {at: Partition(plan, *at, Window(0, 0), "") for at in open_spans}
    try:
        left = dict.fromkeys(open_spans, limit)
        consumer.assign([TopicPartition(*at, span[0]) for at, span in open_spans.items()])
        until = time.monotonic() + settings.timeout
        while left and time.monotonic() < until:
            batch: list[Any] = consumer.consume(min(500, sum(left.values())), _POLL_WAIT)
            for m in batch:
                until = time.monotonic() + settings.timeout
                error, at, offset = m.error(), (m.topic(), m.partition()), m.offset()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise explained(StoreUnavailable, settings, error, f"reading {m.topic()}")
                if at not in left or (error is not None and offset < open_spans[at][1]):
                    continue  # an early end of the partition: this replica is behind its leader
                if error is None and offset < open_spans[at][1]:
                    found.append(read_message(m, parts[at]))
                    left[at] -= 1
                if error is not None or left[at] == 0 or offset + 1 >= open_spans[at][1]:
                    del left[at]
                    consumer.incremental_unassign([TopicPartition(*at)])
    except KafkaException as e:
        raise explained(StoreUnavailable, settings, error_of(e), "reading") from e
    finally:
        consumer.close()
    return found


def open_broker(url: str, context: Context) -> KafkaBroker:
    return KafkaBroker(
        parse(url, os.environ), context.config.namespace or "penstock", context.clock
    )
