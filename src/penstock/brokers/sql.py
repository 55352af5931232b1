"""Common parts of the brokers in SQL: capabilities, statistics, subscription and bound queue.

Each database has its own code for delivery and settling.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.clock import nap
from penstock.model import Outcome
from penstock.ports import (
    Capabilities,
    Clock,
    Delivery,
    EventState,
    Out,
    Published,
    QueueAudit,
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


class Group(msgspec.Struct, frozen=True):
    """A consumer group of a topic."""

    id: int
    topic: int
    ordered: bool


class SqlQueue(ABC):
    """A message queue in an SQL store.

    Methods that end in `_in` run inside the caller's transaction, usually a ledger transaction.
    Each database implements the abstract methods in its own SQL.
    """

    caps = CAPS
    db: SqlStore

    def __init__(self, db: SqlStore, clock: Clock, schema: str) -> None:
        self.clock = clock
        self._groups: dict[tuple[str, str], Group] = {}
        self._topics: dict[str, Any] = {}
        self._rollbacks = db.rollbacks
        self._pruned = 0
        db.part("broker", 1, schema)

    def caps_of(self, topic: str) -> Capabilities:
        return self.caps

    async def partitions(self, topic: str, group: str) -> list[dict[str, object]]:
        return []

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        return await self.db.write(lambda tx: self.ensure_in(tx, topology))

    def has_in(self, tx: Tx, names: Sequence[str]) -> bool:
        return {name for (name,) in tx.execute("SELECT name FROM topic")}.issuperset(names)

    def _forget_after_rollback(self) -> None:
        """Clear the cache of topics and groups after a rollback.

        The transaction that was rolled back may have inserted a cached topic or group. The store
        may then assign its number again.
        """
        if self._rollbacks != self.db.rollbacks:
            self._rollbacks = self.db.rollbacks
            self._topics.clear()
            self._groups.clear()

    # -- reading -----------------------------------------------------------------------------------

    async def stats(self, topic: str, group: str) -> Stats:
        return await self.db.read(lambda tx: self.stats_in(tx, topic, group))

    def stats_in(self, tx: Tx, topic: str, group: str) -> Stats:
        ready, leased, delayed, oldest = self._figures(tx, topic, group)
        dead = tx.execute("SELECT letters FROM topic WHERE name=?", (topic + ".dead",)).get or 0
        age = None if oldest is None else max(0.0, self.clock.now() - oldest)
        return Stats(
            ready=ready, delayed=delayed, in_flight=leased, dead=dead, oldest_age=age, exact=True
        )

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        return await self.db.read(lambda tx: self.peek_in(tx, topic, limit))

    def peek_in(self, tx: Tx, topic: str, limit: int) -> list[Out]:
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
            for id_, key, body, headers, prio, at in self._waiting(tx, topic, limit)
        ]

    def groups_in(self, tx: Tx) -> list[tuple[str, str]]:
        """Return (topic, consumer group) of all groups."""
        return tx.execute(
            "SELECT t.name, g.name FROM topic t JOIN grp g ON g.topic=t.id ORDER BY t.name, g.name"
        ).fetchall()

    def paused_in(self, tx: Tx) -> dict[str, str]:
        """Return paused topic -> reason."""
        return dict(
            tx.execute("SELECT name, paused FROM topic WHERE paused IS NOT NULL").fetchall()
        )

    def audit_in(self, tx: Tx, now: float) -> QueueAudit:
        groups = []
        for topic, group, gid, ready, leased, delayed in self._noted(tx):
            counted: dict[int, int] = dict(
                tx.execute(
                    "SELECT state, count(*) FROM queue WHERE grp=? GROUP BY state", (gid,)
                ).fetchall()
            )
            groups.append(
                (
                    topic,
                    group,
                    (ready, leased, delayed),
                    (counted.get(0, 0), counted.get(1, 0), counted.get(2, 0)),
                )
            )
        open_ = "SELECT id FROM event WHERE status IN ('pending','delayed','in_flight','writing')"
        queued = "SELECT m.id FROM queue q JOIN message m ON m.seq=q.seq WHERE q.grp IN (SELECT id FROM grp WHERE name='main')"
        unqueued = [id_ for (id_,) in tx.execute(f"{open_} EXCEPT {queued}")]
        return QueueAudit(
            unqueued=unqueued[:5],
            unqueued_count=len(unqueued),
            lingering_count=int(
                tx.execute(f"SELECT count(*) FROM ({queued} EXCEPT {open_}) s").get
            ),
            groups=groups,
            expired=int(
                tx.execute("SELECT count(*) FROM queue WHERE state=1 AND at<?", (now,)).get
            ),
        )

    # -- changing ----------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        answers = await self.db.write(lambda tx: self.publish_in(tx, batch))
        self.wake(m.topic for m in batch)
        return answers

    def publish_in(self, tx: Tx, batch: Sequence[Out]) -> list[Published]:
        return [answer for answer, _ in self.place_in(tx, batch)]

    async def purge(self, topic: str) -> int:
        return await self.db.write(lambda tx: self.purge_in(tx, topic))

    async def replay(
        self, topic: str, group: str, *, since: float, offsets: Mapping[int, int] | None = None
    ) -> int:
        assert offsets is None, "only topics with partitions have offsets"
        n = await self.db.write(lambda tx: self.replay_in(tx, topic, group, since))
        self.wake([topic])
        return n

    # -- implemented for each database -------------------------------------------------------------

    @abstractmethod
    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def wake(self, topics: Iterable[str]) -> None: ...

    @abstractmethod
    def ensure_in(self, tx: Tx, topology: Sequence[TopicSpec]) -> list[str]: ...

    @abstractmethod
    def place_in(self, tx: Tx, batch: Sequence[Out]) -> list[tuple[Published, int]]:
        """Publish messages. Return each result with the position of the message."""

    @abstractmethod
    def settle_in(self, tx: Tx, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]: ...

    @abstractmethod
    def hold_in(self, tx: Tx, topic: str, group: str, until: Mapping[str, float]) -> None: ...

    @abstractmethod
    def extend_in(
        self, tx: Tx, topic: str, group: str, deliveries: Sequence[Delivery], until: float
    ) -> list[bool]: ...

    @abstractmethod
    def purge_in(self, tx: Tx, topic: str) -> int:
        """Delete all messages of a topic except those in flight. Return how many.

        Messages that are kept for replay are also deleted.
        """

    @abstractmethod
    def replay_in(self, tx: Tx, topic: str, group: str, since: float) -> int: ...

    @abstractmethod
    def holds_in(self, tx: Tx, deliveries: Sequence[Delivery]) -> list[bool]: ...

    @abstractmethod
    def reclaim_in(self, tx: Tx, owner: str) -> list[str]: ...

    @abstractmethod
    def pause_in(self, tx: Tx, topic: str, reason: str | None) -> bool: ...

    @abstractmethod
    def hasten_in(
        self, tx: Tx, topic: str, group: str, key: str, positions: Sequence[int]
    ) -> None: ...

    @abstractmethod
    def prune_in(self, tx: Tx, limit: int = 2000) -> int: ...

    @abstractmethod
    def running_in(self, tx: Tx, limit: int) -> dict[str, int]: ...

    @abstractmethod
    def leased_in(self, tx: Tx, limit: int) -> list[str]: ...

    @abstractmethod
    def oldest_in(self, tx: Tx, limit: int) -> float | None: ...

    @abstractmethod
    def depths_in(
        self,
        tx: Tx,
        topic: str,
        group: str,
        keys: Sequence[str] | None = None,
        *,
        limit: int = 1000,
    ) -> dict[str, int]: ...

    @abstractmethod
    def _figures(self, tx: Tx, topic: str, group: str) -> tuple[int, int, int, float | None]:
        """Return the numbers of ready, leased and delayed messages, and the time of the oldest."""

    @abstractmethod
    def _waiting(
        self, tx: Tx, topic: str, limit: int
    ) -> Iterable[tuple[str, str, bytes, str | None, int, float]]:
        """Yield (id, key, body, headers, priority, not_before) of messages, oldest first."""

    @abstractmethod
    def _noted(self, tx: Tx) -> Iterable[tuple[str, str, int, int, int, int]]:
        """Yield (topic, group, group id, ready, leased, delayed) from the counters."""


class SqlSubscription:
    """A subscription. Implements ports.Subscription except `receive` and `close`."""

    _wake: asyncio.Event

    def __init__(self, queue: SqlQueue, topic: str, group: str, owner: str, lease: float) -> None:
        self._queue, self.topic, self.group, self.owner, self.lease = (
            queue,
            topic,
            group,
            owner,
            lease,
        )

    async def _pause(self, seconds: float) -> None:
        await nap(self._queue.clock, seconds, self._wake)

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        answers = await self._queue.db.write(lambda tx: self._queue.settle_in(tx, items))
        self._queue.wake([self.topic])
        return answers

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        until = self._queue.clock.now() + seconds
        return await self._queue.db.write(
            lambda tx: self._queue.extend_in(tx, self.topic, self.group, deliveries, until),
            durable=False,
        )

    async def hold(self, until: Mapping[str, float]) -> None:
        if until:
            await self._queue.db.write(
                lambda tx: self._queue.hold_in(tx, self.topic, self.group, until), durable=False
            )


class BoundSqlQueue:
    """The queue of a broker that shares the ledger's store, bound to one transaction."""

    def __init__(self, tx: Tx, queue: SqlQueue) -> None:
        self._tx, self._queue = tx, queue

    def enqueue(self, batch: Sequence[Out]) -> list[tuple[Published, int]]:
        return self._queue.place_in(self._tx, batch)

    def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        return self._queue.settle_in(self._tx, items)

    def settle_undurably(self, items: Sequence[tuple[Delivery, Outcome]]) -> None:
        self._queue.settle_in(self._tx, items)

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return self._queue.holds_in(self._tx, deliveries)

    def defer_copy(self, delivery: Delivery, state: EventState, now: float) -> None:
        return None

    def may_start(self, rows: Sequence[int]) -> list[bool]:
        return [True] * len(rows)

    def hold_keys(self, topic: str, group: str, until: Mapping[str, float]) -> None:
        self._queue.hold_in(self._tx, topic, group, until)

    def reclaim(self, worker: str) -> list[str]:
        return self._queue.reclaim_in(self._tx, worker)

    def pause(self, topic: str, reason: str | None) -> bool:
        return self._queue.pause_in(self._tx, topic, reason)

    def paused(self) -> dict[str, str]:
        return self._queue.paused_in(self._tx)

    def make_due(self, topic: str, group: str, key: str, positions: Sequence[int]) -> None:
        self._queue.hasten_in(self._tx, topic, group, key, positions)

    def prune(self) -> int:
        return self._queue.prune_in(self._tx)

    # -- reports -----------------------------------------------------------------------------------

    def groups(self) -> list[tuple[str, str]]:
        return self._queue.groups_in(self._tx)

    def leases_by_worker(self, limit: int) -> dict[str, int]:
        return self._queue.running_in(self._tx, limit)

    def oldest(self, limit: int) -> float | None:
        return self._queue.oldest_in(self._tx, limit)

    def leased_ids(self, limit: int) -> list[str]:
        return self._queue.leased_in(self._tx, limit)

    def depths(
        self, topic: str, group: str, keys: Sequence[str] | None = None, *, limit: int = 1000
    ) -> dict[str, int]:
        return self._queue.depths_in(self._tx, topic, group, keys, limit=limit)

    def audit(self, now: float) -> QueueAudit:
        return self._queue.audit_in(self._tx, now)
