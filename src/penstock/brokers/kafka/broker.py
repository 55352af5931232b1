"""Kafka broker: one server-side topic per priority class, retry delay and for dead letters.

Messages are settled in any order. The other modules: `url` (the URL and its options),
`topics` (server-side names, offsets), `producer`, `consumer`, `group_reader`,
`entries` (buffered messages), `message` (message format), `history` (reading without
a group).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from penstock.brokers.dead_copies import dead_headers
from penstock.brokers.kafka.entries import BufferedMessage, Partition
from penstock.brokers.kafka.group_reader import GroupReader
from penstock.brokers.kafka.history import read
from penstock.brokers.kafka.message import ID, compose, read_message
from penstock.brokers.kafka.producer import BatchProducer, Message
from penstock.brokers.kafka.topics import EARLIEST, LATEST, Layout, PartitionLag, Topics, at_time
from penstock.brokers.kafka.url import Settings, parse
from penstock.errors import ConfigError, StoreUnavailable
from penstock.model import Dead, Outcome, Release, Retry
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
from penstock.rules.priority import LOWEST
from penstock.rules.watermark import Window
from penstock.stores.context import Context

T = TypeVar("T")
CAPS = Capabilities(order_per_key="native", delay="emulated", replay=True, lease="connection")
_topic_of = attrgetter("topic")
_ENVELOPE_BYTES = 65536  # bytes reserved for the headers, key and framing of a message


class KafkaBroker:
    """Implements ports.Broker, and adds `lag`, `alarms` and more options of `replay`."""

    def __init__(self, settings: Settings, namespace: str, clock: Clock) -> None:
        self.settings, self.clock = settings, clock
        self.caps = msgspec.structs.replace(CAPS, max_body=settings.max_message - _ENVELOPE_BYTES)
        self.topics = Topics(settings, namespace)
        self.producer = BatchProducer(settings)
        self._readers: dict[tuple[str, str], GroupReader] = {}
        self._opening = asyncio.Lock()
        self._thread: ThreadPoolExecutor | None = None

    async def _run_admin(self, work: Callable[..., T], *args: Any) -> T:
        """Run a blocking call to the servers in the admin thread, one at a time."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-admin")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def layout(self, topic: str) -> Layout:
        known = self.topics.layouts.get(topic)
        return known if known is not None else await self._run_admin(self.topics.layout, topic)

    # -- topology and publishing -------------------------------------------------------------------

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        return await self._run_admin(self.topics.ensure, topology)

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        for topic in set(map(_topic_of, batch)) - self.topics.layouts.keys():
            await self.layout(topic)
        return await self.producer.send(
            len(batch), partial(self._compose_all, batch, self.clock.now())
        )

    def _compose_all(self, batch: Sequence[Out], now: float) -> Iterator[Message]:
        topic, plan = "", None
        names: tuple[str, ...] = ()
        for m in batch:
            if m.topic != topic or plan is None:
                topic, plan = m.topic, self.topics.layouts[m.topic]
                names = plan.names
            priority, key = m.priority, m.key
            if m.not_before > now or not 0 <= priority <= LOWEST or m.headers or not key.isascii():
                yield self._compose_special(plan, m, now)
            else:  # nearly all messages
                yield names[priority], m.body, key, {ID: m.id}

    def _compose_special(self, plan: Layout, m: Out, now: float) -> Message:
        """Compose a message with a due time, an unknown priority, headers or a non-ASCII key."""
        server_topic, level = (
            plan.for_priority(m.priority),
            plan.retry_topic_for(m.not_before - now),
        )
        later = m.not_before if m.not_before > now else 0.0
        if level is None:
            return compose(server_topic.name, m.id, m.key, m.body, m.headers, not_before=later)
        return compose(
            level.name,
            m.id,
            m.key,
            m.body,
            m.headers,
            not_before=later,
            priority=server_topic.priority,
        )

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        return KafkaSubscription(self, topic, group, owner, lease)

    async def reader(self, topic: str, group: str, lease: float) -> GroupReader:
        """Return the reader of the topic and group in this process. Open it if necessary.

        Subscriptions share it, so that a released message is ready for another subscription.
        """
        reader = self._readers.get((topic, group))
        if reader is None or reader.ended:
            plan = await self.layout(topic)
            async with self._opening:
                reader = self._readers.get((topic, group))
                if reader is None or reader.ended:
                    reader = GroupReader(
                        self.settings,
                        plan,
                        group,
                        self.topics.group_id(topic, group),
                        self.clock,
                        lease=lease,
                        forward_early=self._forward_early,
                    )
                    reader.retention = self.topics.retention
                    self._readers[topic, group] = reader
        return reader

    async def _forward_early(self, reader: GroupReader, e: BufferedMessage) -> None:
        """Move a message that is not due to the next retry topic, then settle it here."""
        answers = await self.producer.send_all([self._retry_message(reader, e, e.not_before)])
        if answers == [Published.OK]:
            reader.mark_settled(e)
            await reader.commit()
        else:
            reader.return_to_backlog(e, self.clock.now() + 1.0)  # then it is forwarded again

    def _retry_message(self, reader: GroupReader, e: BufferedMessage, not_before: float) -> Message:
        server_topic = reader.plan.retry_topic_for(not_before - self.clock.now())
        assert server_topic is not None
        return compose(
            server_topic.name,
            e.id,
            e.key,
            e.body,
            e.headers,
            not_before=not_before,
            group=reader.group,
            priority=e.priority,
        )

    async def settle(
        self, reader: GroupReader, items: Sequence[tuple[Delivery, Outcome]]
    ) -> list[bool]:
        now = self.clock.now()
        parts, others = reader.acknowledge(items)
        finished = len(others) < len(items) - parts.count(None)
        if others:
            finished = await self._settle_others(reader, others, now) or finished
        if finished:
            await reader.commit()
        return [part is not None and part.commit_confirmed for part in parts]

    async def _settle_others(
        self, reader: GroupReader, others: Sequence[tuple[BufferedMessage, Outcome]], now: float
    ) -> bool:
        """Settle items that are not acks. Return True if some of them must be committed."""
        sends: list[Message] = []
        for e, outcome in others:
            if isinstance(outcome, Dead):
                headers = dead_headers(e, outcome.reason)
                sends.append(compose(reader.plan.dead, e.id, e.key, e.body, headers))
            elif (
                isinstance(outcome, Retry)
                and reader.plan.retry_topic_for(outcome.delay) is not None
            ):
                sends.append(self._retry_message(reader, e, now + outcome.delay))
        if sends:
            answers: Sequence[Published] = ()  # stays empty if `send_all` raises or is cancelled
            try:
                answers = await self.producer.send_all(sends)
            finally:
                if answers.count(Published.OK) < len(sends):
                    for e, _ in others:
                        e.settling = False
            if answers.count(Published.OK) < len(sends):
                raise StoreUnavailable(
                    "Kafka did not confirm a retry or a dead letter",
                    hint="check that all Kafka servers are up: the settle is retried automatically",
                )
        finished = False
        for e, outcome in others:
            match outcome:
                case Release():
                    reader.return_to_backlog(e)
                case Retry(delay=delay) if reader.plan.retry_topic_for(delay) is None:
                    reader.return_to_backlog(e, now + delay if delay > 0 else 0.0)
                case Retry() | Dead():
                    reader.mark_settled(e)
                    finished = True
        return finished

    # -- figures -----------------------------------------------------------------------------------

    async def lag(self, topic: str, group: str) -> Sequence[PartitionLag]:
        """Return the offsets of the group in each partition.

        `PartitionLag.lag` counts all unsettled messages, including those in flight.
        """
        plan = await self.layout(topic)
        return await self._run_admin(
            self.topics.read_lags,
            topic,
            group,
            [server_topic.name for server_topic in plan.server_topics],
        )

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
        plan = await self.layout(topic)
        lags = await self.lag(topic, group)
        delays = {server_topic.name: server_topic.delay for server_topic in plan.server_topics}
        reader = self._readers.get((topic, group))
        out = len(reader.handed_out) if reader is not None else 0
        delayed = sum(r.lag for r in lags if delays[r.topic])
        ready = sum(r.lag for r in lags if not delays[r.topic])
        if reader is not None:
            waiting = reader.delayed_count()
            delayed, ready = delayed + waiting, ready - waiting
        dead = (
            await self._run_admin(self._count_dead, plan)
            if plan.dead != plan.for_priority(1).name
            else 0
        )
        oldest = await self._run_admin(
            self._oldest, [r for r in lags if r.lag and not delays[r.topic]]
        )
        age = None if oldest is None else max(0.0, self.clock.now() - oldest)
        return Stats(
            ready=max(0, ready - out),
            delayed=delayed,
            in_flight=out,
            dead=dead,
            oldest_age=age,
            exact=False,
        )

    def _count_dead(self, plan: Layout) -> int:
        partitions = self.topics.partitions([plan.dead])
        low, end = (
            self.topics.offsets(partitions, EARLIEST),
            self.topics.offsets(partitions, LATEST),
        )
        return sum(end[at].offset - low[at].offset for at in end)

    def _oldest(self, lags: Sequence[PartitionLag]) -> float | None:
        spans = {(r.topic, r.partition): (r.start, r.end) for r in lags}
        return min((m.timestamp()[1] / 1000 for m in read(self.settings, spans, 1)), default=None)

    async def alarms(self) -> Sequence[str]:
        """Return warnings about unsettled messages that retention will soon delete.

        Only topics that this process reads are checked.
        """
        return [text for reader in self._readers.values() for text in reader.alarms().values()]

    # -- peek and purge ----------------------------------------------------------------------------

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """Return unsettled messages of the topic's first group, oldest first."""
        plan = await self.layout(topic)
        return await self._run_admin(self._peek, plan, limit)

    def _peek(self, plan: Layout, limit: int) -> list[Out]:
        lags = {
            (r.topic, r.partition): r
            for r in self.topics.read_lags(
                plan.topic,
                self._first_group(plan.topic),
                [server_topic.name for server_topic in plan.server_topics],
            )
        }
        found = []
        for m in read(
            self.settings,
            {at: (r.start, r.end) for at, r in lags.items()},
            limit + max((len(r.ahead) for r in lags.values()), default=0),
        ):
            if m.offset() in lags[m.topic(), m.partition()].ahead:
                continue
            e = _decode(plan, m)
            out = Out(
                topic=plan.topic,
                id=e.id,
                key=e.key,
                body=e.body,
                headers=e.headers,
                priority=e.priority,
                not_before=e.not_before,
            )
            found.append((e.published_at, m.topic(), m.partition(), m.offset(), out))
        return [out for *_, out in sorted(found, key=lambda item: item[:4])[:limit]]

    def _first_group(self, topic: str) -> str:
        groups = self.topics.groups.get(topic) or {"main"}
        return "main" if "main" in groups else min(groups)

    async def purge(self, topic: str) -> int:
        plan = await self.layout(topic)
        removed, ends = await self._run_admin(self._purge, plan)
        for (name, _), reader in self._readers.items():
            if name == topic:
                reader.drop_deleted(ends)
        return removed

    def _purge(self, plan: Layout) -> tuple[int, dict[tuple[str, int], int]]:
        lags = self.topics.read_lags(
            plan.topic,
            self._first_group(plan.topic),
            [server_topic.name for server_topic in plan.server_topics],
        )
        ends = {(r.topic, r.partition): r.end for r in lags if r.end > r.low}
        self.topics.delete_before(ends)
        return sum(r.lag for r in lags), ends

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
        plan = await self.layout(topic)
        starts, lags = await self._run_admin(self._replay_starts, plan, group, since, offsets)
        if not await self._run_admin(self.topics.is_active, topic, group):
            await self._run_admin(self.topics.set_offsets, topic, group, starts)
            return sum(
                max(0, r.start - starts[at]) + len(r.ahead)
                for at, r in lags.items()
                if at in starts
            )
        if not plan.retries:
            raise ConfigError(
                f"group {group} has members that read {topic},"
                " and only a group without members can be replayed",
                hint="stop its workers, or replay into another group",
            )
        reader = self._readers.get((topic, group))
        settled = {
            at: (starts[at], max([r.start, *(o + 1 for o in r.ahead)]))
            for at, r in lags.items()
            if at in starts
        }
        known = {at: (r.start, r.ahead) for at, r in lags.items()}
        if reader is not None:
            known |= {at: held for at, held in reader.progress().items() if at in known}
        return await self._copy_settled(plan, group, settled, known)

    def _replay_starts(
        self, plan: Layout, group: str, since: float, offsets: Mapping[int, int] | None
    ) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], PartitionLag]]:
        names = [server_topic.name for server_topic in plan.classes]
        lags = {(r.topic, r.partition): r for r in self.topics.read_lags(plan.topic, group, names)}
        if offsets is not None:
            bare = plan.for_priority(1).name
            return {
                (bare, p): min(max(o, lags[bare, p].low), lags[bare, p].end)
                for p, o in offsets.items()
                if (bare, p) in lags
            }, lags
        if since <= 0:
            return {at: r.low for at, r in lags.items()}, lags
        found = self.topics.offsets(self.topics.partitions(names), at_time(since))
        return {
            at: info.offset if info.offset >= 0 else lags[at].end for at, info in found.items()
        }, lags

    async def _copy_settled(
        self,
        plan: Layout,
        group: str,
        spans: Mapping[tuple[str, int], tuple[int, int]],
        known: Mapping[tuple[str, int], Any],
    ) -> int:
        """Copy settled messages to the retry topic with a delay of 0 s. Return their number.

        The topics themselves are not changed, so that the next replay finds each message once.
        """

        def settled() -> list[Message]:
            found = []
            for m in read(self.settings, spans, 1 << 60):
                start, ahead = known[m.topic(), m.partition()]
                if m.offset() < start or m.offset() in ahead:
                    e = _decode(plan, m)
                    if not e.target_group or e.target_group == group:
                        found.append(
                            compose(
                                plan.retries[0].name,
                                e.id,
                                e.key,
                                e.body,
                                e.headers,
                                group=group,
                                priority=e.priority,
                            )
                        )
            return found

        messages = await self._run_admin(settled)
        for i in range(0, len(messages), 1000):
            if any(
                answer is not Published.OK
                for answer in await self.producer.send_all(messages[i : i + 1000])
            ):
                raise StoreUnavailable(
                    f"replay of {plan.topic} stopped after about {i} of {len(messages)} messages",
                    hint="start it again: repeated messages have the same id",
                )
        return len(messages)

    async def close(self) -> None:
        readers, self._readers = list(self._readers.values()), {}
        await asyncio.gather(*(reader.close() for reader in readers))
        await self.producer.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


class KafkaSubscription:
    """Implements ports.Subscription, and adds `holds`.

    A lease lasts as long as this process owns the partition. It has no time limit.
    """

    def __init__(
        self, broker: KafkaBroker, topic: str, group: str, owner: str, lease: float
    ) -> None:
        self.broker, self.topic, self.group, self.owner, self.lease = (
            broker,
            topic,
            group,
            owner,
            lease,
        )
        self._reader: GroupReader | None = None

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        if self._reader is None or self._reader.ended:
            self._reader = await self.broker.reader(self.topic, self.group, self.lease)
        return await self._reader.receive(limit, wait, per_key, self)

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        if self._reader is None:
            return [False] * len(items)
        return await self.broker.settle(self._reader, items)

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        return [self.holds(d) for d in deliveries]

    def holds(self, d: Delivery) -> bool:
        """Return True if this process still owns the partition, as far as it knows."""
        return self._reader is not None and self._reader.find_held(d) is not None

    async def hold(self, until: Mapping[str, float]) -> None:
        """Do nothing: held messages would stop the watermark. The ledger delays them instead."""

    async def close(self) -> None:
        """Release unsettled deliveries, for the other subscriptions of this process."""
        if self._reader is not None:
            for e in [
                e for e in self._reader.handed_out.values() if e.holder is self and not e.settling
            ]:
                self._reader.return_to_backlog(e)


def _decode(plan: Layout, m: Any) -> BufferedMessage:
    """Decode a message that was read without a consumer group."""
    place = next(
        server_topic for server_topic in plan.server_topics if server_topic.name == m.topic()
    )
    return read_message(m, Partition(place, m.partition(), Window(0, 0), plan.topic, ""))


def open_broker(url: str, context: Context) -> KafkaBroker:
    return KafkaBroker(
        parse(url, os.environ), context.config.namespace or "penstock", context.clock
    )
