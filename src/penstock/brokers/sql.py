"""Common parts of the brokers in SQL: capabilities, the queue in a transaction, the subscription.

Each database has its own code for delivery and settling.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from penstock.brokers.dead_copies import DEAD
from penstock.clock import wait
from penstock.model import Outcome
from penstock.ports import (
    Capabilities,
    Clock,
    Delivery,
    EventState,
    Out,
    Published,
    Queue,
    QueueAudit,
    QueueReports,
    Stats,
    Subscription,
    TopicSpec,
)
from penstock.stores.sql import SqlStore, Tx

CAPS = Capabilities(
    order_per_key="native",
    delay="native",
    replay=True,
    bounded=True,
    counts_deliveries=True,
    hold_keys=True,
    exact_stats=True,
    transactional=True,
)
READY, LEASED, DELAYED = 0, 1, 2  # states of a message in a group's queue
# Ordered topics use one priority class. With several, a message could overtake an earlier message
# of its key.
ORDERED_CLASS = 1
NEVER = 1e18  # `next_at` of an ordered key while one of its messages is leased
# Seconds for which a topic is cached. Another process may change its `max_depth`, which SQLite
# reads again for each publish.
TOPIC_CACHE_SECONDS = 5.0


class Topic(msgspec.Struct, frozen=True):
    """A cached topic."""

    id: int
    max_depth: int | None
    until: float  # when this cache entry expires


class Group(msgspec.Struct, frozen=True):
    """A consumer group of a topic."""

    id: int
    topic: int
    ordered: bool


class SqlQueue(ABC):
    """A message queue in an SQL store. Implements ports.Broker.

    `bind` returns the queue inside one transaction, usually a ledger transaction.
    """

    caps = CAPS
    db: SqlStore

    def __init__(self, db: SqlStore, clock: Clock, schema: str) -> None:
        self.clock = clock
        self.groups: dict[tuple[str, str], Group] = {}
        self.topics: dict[str, Topic] = {}
        # Messages requested so far, by group. It decides which priority class has its turn.
        self.requested: Counter[int] = Counter()
        self.waiters: dict[str, set[asyncio.Event]] = defaultdict(set)  # of receivers, by topic
        self.pruned = 0  # the last position that `prune` has checked
        self._rollbacks = db.rollbacks
        db.part("broker", schema)

    @abstractmethod
    def bind(self, tx: Tx) -> BoundSqlQueue: ...

    @abstractmethod
    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription: ...

    @abstractmethod
    async def close(self) -> None: ...

    def wake(self, topics: Iterable[str]) -> None:
        """Wake the waiting receivers of this process. Call it after a commit, on the loop."""
        for topic in set(topics):
            for event in self.waiters.get(topic, ()):
                event.set()

    def caps_of(self, topic: str) -> Capabilities:
        return self.caps

    async def partitions(self, topic: str, group: str) -> list[dict[str, object]]:
        return []

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        return await self.db.write(lambda tx: self.bind(tx).ensure(topology))

    async def stats(self, topic: str, group: str) -> Stats:
        return await self.db.read(lambda tx: self.bind(tx).stats(topic, group))

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        return await self.db.read(lambda tx: self.bind(tx).peek(topic, limit))

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        answers = await self.db.write(lambda tx: self.bind(tx).publish(batch))
        self.wake(m.topic for m in batch)
        return answers

    async def purge(self, topic: str) -> int:
        return await self.db.write(lambda tx: self.bind(tx).purge(topic))

    async def replay(
        self, topic: str, group: str, *, since: float, offsets: Mapping[int, int] | None = None
    ) -> int:
        assert offsets is None, "only topics with partitions have offsets"
        n = await self.db.write(lambda tx: self.bind(tx).replay(topic, group, since))
        self.wake([topic])
        return n

    def forget_after_rollback(self) -> None:
        """Clear the cache of topics and groups after a rollback.

        The transaction that was rolled back may have inserted a cached topic or group. The store
        may then assign its number again.
        """
        if self._rollbacks != self.db.rollbacks:
            self._rollbacks = self.db.rollbacks
            self.topics.clear()
            self.groups.clear()


class BoundSqlQueue(Queue, QueueReports):
    """The queue inside one transaction. Each database implements the abstract methods."""

    def __init__(self, tx: Tx, queue: SqlQueue) -> None:
        self.tx, self.queue, self.clock = tx, queue, queue.clock

    # -- topology ----------------------------------------------------------------------------------

    def has(self, names: Sequence[str]) -> bool:
        return {name for (name,) in self.tx.execute("SELECT name FROM topic")}.issuperset(names)

    def ensure(self, topology: Sequence[TopicSpec]) -> list[str]:
        drift = []
        for t in topology:
            id_, ordered = self.tx.execute(
                "INSERT INTO topic(name, ordered, max_depth, retention) VALUES(?,?,?,?)"
                " ON CONFLICT(name) DO UPDATE SET max_depth=excluded.max_depth,"
                " retention=excluded.retention RETURNING id, ordered",
                (t.name, t.ordered, t.max_depth, t.retention),
            ).get
            if bool(ordered) != t.ordered:
                drift.append(
                    f"topic {t.name}: ordered is {bool(ordered)} in the store "
                    f"and {t.ordered} in the configuration; purge it to change that"
                )
            for g in t.groups:
                self._add_group(id_, g)
        self.queue.topics.clear()
        self.queue.groups.clear()
        return drift

    def _add_group(self, topic: int, group: str) -> None:
        self.tx.execute(
            "INSERT INTO grp(topic, name) VALUES(?,?) ON CONFLICT DO NOTHING", (topic, group)
        )

    def topic(self, name: str) -> Topic:
        """Return a topic. Create it if it does not exist."""
        self.queue.forget_after_rollback()
        now = self.clock.now()
        known = self.queue.topics.get(name)
        if known is None or known.until < now:
            row = self.tx.execute("SELECT id, max_depth FROM topic WHERE name=?", (name,)).get
            if row is None:
                row = self.tx.execute(
                    "INSERT INTO topic(name, ordered, max_depth, retention) VALUES(?,?,NULL,86400)"
                    " RETURNING id, max_depth",
                    (name, False),
                ).get
            known = self.queue.topics[name] = Topic(row[0], row[1], now + TOPIC_CACHE_SECONDS)
        return known

    def group(self, topic: str, group: str) -> Group:
        """Return a group. Create it and its topic if they do not exist."""
        self.queue.forget_after_rollback()
        known = self.queue.groups.get((topic, group))
        if known is None:
            query = (
                "SELECT g.id, t.id, t.ordered FROM grp g JOIN topic t ON t.id=g.topic"
                " WHERE t.name=? AND g.name=?"
            )
            row = self.tx.execute(query, (topic, group)).get
            if row is None:
                self._add_group(self.topic(topic).id, group)
                row = self.tx.execute(query, (topic, group)).get
            known = self.queue.groups[topic, group] = Group(row[0], row[1], bool(row[2]))
        return known

    # -- messages ----------------------------------------------------------------------------------

    def publish(self, batch: Sequence[Out]) -> list[Published]:
        return [answer for answer, _ in self.enqueue(batch)]

    def settle_undurably(self, items: Sequence[tuple[Delivery, Outcome]]) -> None:
        self.settle(items)

    def defer_copy(self, delivery: Delivery, state: EventState, now: float) -> None:
        return None

    def may_start(self, rows: Sequence[int]) -> list[bool]:
        return [True] * len(rows)

    @abstractmethod
    def extend(
        self, topic: str, group: str, deliveries: Sequence[Delivery], until: float
    ) -> list[bool]: ...

    @abstractmethod
    def replay(self, topic: str, group: str, since: float) -> int: ...

    @abstractmethod
    def purge(self, topic: str) -> int:
        """Delete all messages of a topic except those in flight. Return how many.

        Messages that are kept for replay are also deleted.
        """

    def pause(self, topic: str, reason: str | None) -> bool:
        updated = self.tx.execute(
            "UPDATE topic SET paused=? WHERE name=? RETURNING id", (reason, topic)
        )
        return updated.get is not None

    def paused(self) -> dict[str, str]:
        return dict(
            self.tx.execute("SELECT name, paused FROM topic WHERE paused IS NOT NULL").fetchall()
        )

    # -- reports -----------------------------------------------------------------------------------

    def stats(self, topic: str, group: str) -> Stats:
        ready, leased, delayed, oldest = self._figures(topic, group)
        dead = self.tx.execute("SELECT letters FROM topic WHERE name=?", (topic + DEAD,)).get
        age = None if oldest is None else max(0.0, self.clock.now() - oldest)
        return Stats(
            ready=ready,
            delayed=delayed,
            in_flight=leased,
            dead=dead or 0,
            oldest_age=age,
            exact=True,
        )

    def peek(self, topic: str, limit: int) -> list[Out]:
        return [
            Out(
                topic=topic,
                id=id_,
                key=key,
                body=body,
                headers=msgspec.json.decode(headers) if headers else {},
                priority=prio,
                not_before=at,
            )
            for id_, key, body, headers, prio, at in self._waiting(topic, limit)
        ]

    def groups(self) -> list[tuple[str, str]]:
        return self.tx.execute(
            "SELECT t.name, g.name FROM topic t JOIN grp g ON g.topic=t.id ORDER BY t.name, g.name"
        ).fetchall()

    def leased_ids(self, limit: int) -> list[str]:
        leased = self.tx.execute(
            "SELECT m.id FROM queue q JOIN message m ON m.seq=q.seq WHERE q.state=1"
            " AND q.grp IN (SELECT id FROM grp) LIMIT ?",
            (limit,),
        )
        return [id_ for (id_,) in leased]

    def audit(self, now: float) -> QueueAudit:
        counted: dict[tuple[int, int], int] = {
            (gid, state): n
            for gid, state, n in self.tx.execute(
                "SELECT grp, state, count(*) FROM queue GROUP BY grp, state"
            )
        }
        queued = self.tx.execute(
            "SELECT m.id FROM queue q JOIN message m ON m.seq=q.seq"
            " WHERE q.grp IN (SELECT id FROM grp WHERE name='main')"
        )
        expired = self.tx.execute("SELECT count(*) FROM queue WHERE state=1 AND at<?", (now,))
        return QueueAudit(
            queued=frozenset(id_ for (id_,) in queued),
            groups=[
                (
                    topic,
                    group,
                    (ready, leased, delayed),
                    (
                        counted.get((gid, READY), 0),
                        counted.get((gid, LEASED), 0),
                        counted.get((gid, DELAYED), 0),
                    ),
                )
                for topic, group, gid, ready, leased, delayed in self._noted()
            ],
            expired=int(expired.get),
        )

    @abstractmethod
    def _figures(self, topic: str, group: str) -> tuple[int, int, int, float | None]:
        """Return the numbers of ready, leased and delayed messages, and the time of the oldest."""

    @abstractmethod
    def _waiting(
        self, topic: str, limit: int
    ) -> Iterable[tuple[str, str, bytes, str | None, int, float]]:
        """Yield (id, key, body, headers, priority, not_before) of messages, oldest first."""

    @abstractmethod
    def _noted(self) -> Iterable[tuple[str, str, int, int, int, int]]:
        """Yield (topic, group, group id, ready, leased, delayed) from the counters."""


Q = TypeVar("Q", bound=SqlQueue)


class SqlSubscription(Generic[Q]):
    """A subscription. Implements ports.Subscription except `receive`."""

    def __init__(self, queue: Q, topic: str, group: str, owner: str, lease: float) -> None:
        self._queue, self.topic, self.group = queue, topic, group
        self.owner, self.lease = owner, lease
        self._wake = asyncio.Event()
        queue.waiters[topic].add(self._wake)

    async def _pause(self, seconds: float) -> None:
        await wait(self._queue.clock, self._wake, seconds)

    async def close(self) -> None:
        self._queue.waiters[self.topic].discard(self._wake)

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        answers = await self._queue.db.write(lambda tx: self._queue.bind(tx).settle(items))
        self._queue.wake([self.topic])
        return answers

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        until = self._queue.clock.now() + seconds
        return await self._queue.db.write(
            lambda tx: self._queue.bind(tx).extend(self.topic, self.group, deliveries, until),
            durable=False,
        )

    async def hold(self, until: Mapping[str, float]) -> None:
        if until:
            await self._queue.db.write(
                lambda tx: self._queue.bind(tx).hold_keys(self.topic, self.group, until),
                durable=False,
            )
