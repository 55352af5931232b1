"""Kafka as a broker: what is published goes to a topic per class, what is received is settled in
any order; retries and dead letters have topics.

The parts: `kafka_dsn` (the URL and its options), `kafka_topics` (server-side names, offsets),
`kafka_producer`, `kafka_consumer`, `kafka_backlog` (turns and waits), `kafka_history` (reading
without a group).
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

from penstock.brokers.kafka.entries import Entry, Partition
from penstock.brokers.kafka.group_reader import Reader
from penstock.brokers.kafka.history import read
from penstock.brokers.kafka.message import ID, compose, read_message
from penstock.brokers.kafka.producer import Message, Outbound
from penstock.brokers.kafka.topics import EARLIEST, LATEST, Layout, Reach, Topics, at_time
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
CAPS = Capabilities(
    order_per_key="native",
    strict_priority="none",
    delay="emulated",
    replay=True,
    bounded=False,
    counts_deliveries=False,
    hold_keys=False,
    exact_stats=False,
    transactional=False,
    lease="connection",
)
_topic_of = attrgetter("topic")
_ENVELOPE = 65536  # bytes of a message that are not its body: headers, key, framing


class KafkaBroker:
    """Implements ports.Broker, with `lag`, `alarms` and more ways to replay."""

    def __init__(self, settings: Settings, namespace: str, clock: Clock) -> None:
        self.settings, self.clock = settings, clock
        self.caps = msgspec.structs.replace(CAPS, max_body=settings.max_message - _ENVELOPE)
        self.topics = Topics(settings, namespace)
        self.outbound = Outbound(settings)
        self._readers: dict[tuple[str, str], Reader] = {}
        self._opening = asyncio.Lock()
        self._thread: ThreadPoolExecutor | None = None

    async def _ask(self, work: Callable[..., T], *args: Any) -> T:
        """Questions to the servers wait in a thread of their own, one at a time."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-admin")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def layout(self, topic: str) -> Layout:
        known = self.topics.layouts.get(topic)
        return known if known is not None else await self._ask(self.topics.layout, topic)

    # -- topology and publishing -------------------------------------------------------------------

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        return await self._ask(self.topics.ensure, topology)

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        for topic in set(map(_topic_of, batch)) - self.topics.layouts.keys():
            await self.layout(topic)
        return await self.outbound.send(
            len(batch), partial(self._composed, batch, self.clock.now())
        )

    def _composed(self, batch: Sequence[Out], now: float) -> Iterator[Message]:
        topic, plan = "", None
        names: tuple[str, ...] = ()
        for m in batch:
            if m.topic != topic or plan is None:
                topic, plan = m.topic, self.topics.layouts[m.topic]
                names = plan.names
            priority, key = m.priority, m.key
            if m.not_before > now or not 0 <= priority <= LOWEST or m.headers or not key.isascii():
                yield self._special(plan, m, now)
            else:  # nearly always
                yield names[priority], m.body, key, {ID: m.id}

    def _special(self, plan: Layout, m: Out, now: float) -> Message:
        """One for later, of a class that there is not, or with more to say."""
        place, level = plan.of(m.priority), plan.level(m.not_before - now)
        later = m.not_before if m.not_before > now else 0.0
        if level is None:
            return compose(place.name, m.id, m.key, m.body, m.headers, not_before=later)
        return compose(
            level.name, m.id, m.key, m.body, m.headers, not_before=later, priority=place.priority
        )

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        return KafkaSubscription(self, topic, group, owner, lease)

    async def reader(self, topic: str, group: str, lease: float) -> Reader:
        """One for each topic and group in this process: what one subscription gives back, another
        may have at once.
        """
        reader = self._readers.get((topic, group))
        if reader is None or reader.ended:
            plan = await self.layout(topic)
            async with self._opening:
                reader = self._readers.get((topic, group))
                if reader is None or reader.ended:
                    reader = Reader(
                        self.settings,
                        plan,
                        group,
                        self.topics.group(topic, group),
                        self.clock,
                        lease=lease,
                        send_on=self._send_on,
                    )
                    reader.retention = self.topics.retention
                    self._readers[topic, group] = reader
        return reader

    async def _send_on(self, reader: Reader, e: Entry) -> None:
        """It came before its time: the next retry topic, and then it is settled here."""
        answers = await self.outbound.send_all([self._again(reader, e, e.not_before)])
        if answers == [Published.OK]:
            reader.finish(e)
            await reader.save()
        else:
            reader.put_back(e, self.clock.now() + 1.0)  # and tried again

    def _again(self, reader: Reader, e: Entry, not_before: float) -> Message:
        place = reader.plan.level(not_before - self.clock.now())
        assert place is not None
        return compose(
            place.name,
            e.id,
            e.key,
            e.body,
            e.headers,
            not_before=not_before,
            group=reader.group,
            priority=e.priority,
        )

    async def settle(self, reader: Reader, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        now = self.clock.now()
        parts, others = reader.acknowledge(items)
        finished = len(others) < len(items) - parts.count(None)
        if others:
            finished = await self._settle_others(reader, others, now) or finished
        if finished:
            await reader.save()
        return [part is not None and part.saved for part in parts]

    async def _settle_others(
        self, reader: Reader, others: Sequence[tuple[Entry, Outcome]], now: float
    ) -> bool:
        """True: some of them are finished, and to be saved."""
        sends: list[Message] = []
        for e, outcome in others:
            if isinstance(outcome, Dead):
                marks = {"penstock-reason": outcome.reason, "penstock-position": str(e.position)}
                sends.append(compose(reader.plan.dead, e.id, e.key, e.body, {**e.headers, **marks}))
            elif isinstance(outcome, Retry) and reader.plan.level(outcome.delay) is not None:
                sends.append(self._again(reader, e, now + outcome.delay))
        if sends:
            answers: Sequence[Published] = ()
            try:
                answers = await self.outbound.send_all(sends)
            finally:
                if answers.count(Published.OK) < len(sends):
                    for e, _ in others:
                        e.settling = False
            if answers.count(Published.OK) < len(sends):
                raise StoreUnavailable(
                    "Kafka did not confirm a retry or a dead letter",
                    hint="it is tried again; see whether all servers are up",
                )
        finished = False
        for e, outcome in others:
            match outcome:
                case Release():
                    reader.put_back(e)
                case Retry(delay=delay) if reader.plan.level(delay) is None:
                    reader.put_back(e, now + delay if delay > 0 else 0.0)
                case Retry() | Dead():
                    reader.finish(e)
                    finished = True
        return finished

    # -- figures -----------------------------------------------------------------------------------

    async def lag(self, topic: str, group: str) -> Sequence[Reach]:
        """Where the group stands, partition by partition; `Reach.lag` counts what is not settled,
        in flight or not.
        """
        plan = await self.layout(topic)
        return await self._ask(
            self.topics.reach, topic, group, [place.name for place in plan.places]
        )

    async def stats(self, topic: str, group: str) -> Stats:
        plan = await self.layout(topic)
        reaches = await self.lag(topic, group)
        delays = {place.name: place.delay for place in plan.places}
        reader = self._readers.get((topic, group))
        out = len(reader.out) if reader is not None else 0
        delayed = sum(r.lag for r in reaches if delays[r.topic])
        ready = sum(r.lag for r in reaches if not delays[r.topic])
        if reader is not None:
            waiting = reader.waiting()
            delayed, ready = delayed + waiting, ready - waiting
        dead = await self._ask(self._letters, plan) if plan.dead != plan.of(1).name else 0
        oldest = await self._ask(
            self._oldest, [r for r in reaches if r.lag and not delays[r.topic]]
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

    def _letters(self, plan: Layout) -> int:
        partitions = self.topics.partitions([plan.dead])
        low, end = (
            self.topics.offsets(partitions, EARLIEST),
            self.topics.offsets(partitions, LATEST),
        )
        return sum(end[at].offset - low[at].offset for at in end)

    def _oldest(self, reaches: Sequence[Reach]) -> float | None:
        spans = {(r.topic, r.partition): (r.start, r.end) for r in reaches}
        return min((m.timestamp()[1] / 1000 for m in read(self.settings, spans, 1)), default=None)

    async def alarms(self) -> Sequence[str]:
        """What somebody should know now: unread work that retention is about to delete, in the
        topics this process reads.
        """
        return [text for reader in self._readers.values() for text in reader.alarms().values()]

    # -- looking and removing ----------------------------------------------------------------------

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """What waits for the first of the topic's groups, oldest first."""
        plan = await self.layout(topic)
        return await self._ask(self._peek, plan, limit)

    def _peek(self, plan: Layout, limit: int) -> list[Out]:
        reaches = {
            (r.topic, r.partition): r
            for r in self.topics.reach(
                plan.topic, self._first_group(plan.topic), [place.name for place in plan.places]
            )
        }
        found = []
        for m in read(
            self.settings,
            {at: (r.start, r.end) for at, r in reaches.items()},
            limit + max((len(r.ahead) for r in reaches.values()), default=0),
        ):
            if m.offset() in reaches[m.topic(), m.partition()].ahead:
                continue
            e = _loose(plan, m)
            out = Out(
                topic=plan.topic,
                id=e.id,
                key=e.key,
                body=e.body,
                headers=e.headers,
                priority=e.priority,
                not_before=e.not_before,
            )
            found.append((e.at, m.topic(), m.partition(), m.offset(), out))
        return [out for *_, out in sorted(found, key=lambda item: item[:4])[:limit]]

    def _first_group(self, topic: str) -> str:
        groups = self.topics.groups.get(topic) or {"main"}
        return "main" if "main" in groups else min(groups)

    async def purge(self, topic: str) -> int:
        plan = await self.layout(topic)
        removed, ends = await self._ask(self._purge, plan)
        for (name, _), reader in self._readers.items():
            if name == topic:
                reader.forget(ends)
        return removed

    def _purge(self, plan: Layout) -> tuple[int, dict[tuple[str, int], int]]:
        reaches = self.topics.reach(
            plan.topic, self._first_group(plan.topic), [place.name for place in plan.places]
        )
        ends = {(r.topic, r.partition): r.end for r in reaches if r.end > r.low}
        self.topics.truncate(ends)
        return sum(r.lag for r in reaches), ends

    # -- history -----------------------------------------------------------------------------------

    async def replay(
        self,
        topic: str,
        group: str,
        *,
        since: float = 0.0,
        offsets: Mapping[int, int] | None = None,
    ) -> int:
        """Everything published since then (0: all that is kept), or from these offsets of the bare
        topic on, by partition, to `group` once more.

        A group that nobody reads is moved back, and nothing is copied. One with members gets
        copies, with the same ids, of what it has settled.
        """
        plan = await self.layout(topic)
        starts, reaches = await self._ask(self._starts, plan, group, since, offsets)
        if not await self._ask(self.topics.is_active, topic, group):
            await self._ask(self.topics.move, topic, group, starts)
            return sum(
                max(0, r.start - starts[at]) + len(r.ahead)
                for at, r in reaches.items()
                if at in starts
            )
        if not plan.retries:
            raise ConfigError(
                f"group {group} reads {topic} now, and only a group without members can be moved",
                hint="stop its workers, or replay into another group",
            )
        reader = self._readers.get((topic, group))
        settled = {
            at: (starts[at], max([r.start, *(o + 1 for o in r.ahead)]))
            for at, r in reaches.items()
            if at in starts
        }
        known = {at: (r.start, r.ahead) for at, r in reaches.items()}
        if reader is not None:
            known |= {at: held for at, held in reader.settled().items() if at in known}
        return await self._copy(plan, group, settled, known)

    def _starts(
        self, plan: Layout, group: str, since: float, offsets: Mapping[int, int] | None
    ) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], Reach]]:
        names = [place.name for place in plan.classes]
        reaches = {(r.topic, r.partition): r for r in self.topics.reach(plan.topic, group, names)}
        if offsets is not None:
            bare = plan.of(1).name
            return {
                (bare, p): min(max(o, reaches[bare, p].low), reaches[bare, p].end)
                for p, o in offsets.items()
                if (bare, p) in reaches
            }, reaches
        if since <= 0:
            return {at: r.low for at, r in reaches.items()}, reaches
        found = self.topics.offsets(self.topics.partitions(names), at_time(since))
        return {
            at: info.offset if info.offset >= 0 else reaches[at].end for at, info in found.items()
        }, reaches

    async def _copy(
        self,
        plan: Layout,
        group: str,
        spans: Mapping[tuple[str, int], tuple[int, int]],
        known: Mapping[tuple[str, int], Any],
    ) -> int:
        """Through the retry topic that waits 0 s: history itself stays as it is, so that the next
        replay finds each event once.
        """

        def settled() -> list[Message]:
            found = []
            for m in read(self.settings, spans, 1 << 60):
                start, ahead = known[m.topic(), m.partition()]
                if m.offset() < start or m.offset() in ahead:
                    e = _loose(plan, m)
                    if not e.meant or e.meant == group:
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

        messages = await self._ask(settled)
        for i in range(0, len(messages), 1000):
            if any(
                answer is not Published.OK
                for answer in await self.outbound.send_all(messages[i : i + 1000])
            ):
                raise StoreUnavailable(
                    f"replay of {plan.topic} ended after about {i} of {len(messages)} messages",
                    hint="start it again: what comes twice has the same id",
                )
        return len(messages)

    async def close(self) -> None:
        readers, self._readers = list(self._readers.values()), {}
        await asyncio.gather(*(reader.close() for reader in readers))
        await self.outbound.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


class KafkaSubscription:
    """Implements ports.Subscription, and `holds`. A lease lasts as long as its partition is ours;
    time alone does not end it.
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
        self._reader: Reader | None = None

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
        """Is its partition still ours, as far as this process knows?"""
        return self._reader is not None and self._reader.holds(d) is not None

    async def hold(self, until: Mapping[str, float]) -> None:
        """A no-op: what is held would hold the watermark. The books put such keys off instead."""

    async def close(self) -> None:
        """What this subscription still has is given back to the others of this process."""
        if self._reader is not None:
            for e in [e for e in self._reader.out.values() if e.holder is self and not e.settling]:
                self._reader.put_back(e)


def _loose(plan: Layout, m: Any) -> Entry:
    """A message read without a group."""
    place = next(place for place in plan.places if place.name == m.topic())
    return read_message(m, Partition(place, m.partition(), Window(0, 0), plan.topic, ""))


def open_broker(url: str, context: Context) -> KafkaBroker:
    return KafkaBroker(
        parse(url, os.environ), context.config.namespace or "penstock", context.clock
    )
