"""Brokers that lie apart from the ledger's store: what the books decide is noted in their
transaction, and told to the brokers after it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.model import Ack, Outcome, Retry
from penstock.ports import (
    Broker,
    Capabilities,
    Clock,
    Delivery,
    Out,
    Published,
    QueueAudit,
    Stats,
    Subscription,
    TopicSpec,
)

SCHEMA = """
-- What is to be published: entered with the row it belongs to, gone when the broker has confirmed it. `sender` is at it until `claimed`.
CREATE TABLE outgoing(n INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, prio INTEGER NOT NULL,
  headers TEXT, body BLOB NOT NULL, due REAL NOT NULL, claimed REAL NOT NULL);
CREATE INDEX outgoing_due ON outgoing(due);
CREATE INDEX outgoing_id ON outgoing(id);
CREATE TABLE pausing(topic TEXT PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID;
-- Workers that are alive until then, as far as the others know: an event that one of them has in flight is left to it.
CREATE TABLE member(worker TEXT PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID;
"""
PATIENCE = 15.0  # seconds that a message is left to whoever entered it; then anybody publishes it
ASIDE = 10.0  # a longer wait is spent here and not in the broker
BATCH = 500
REMEMBERED = 0.5  # seconds for which a topic's being paused is remembered
GROUP = "main"
log = logging.getLogger("penstock.relay")


class After(msgspec.Struct):
    """What a transaction decided, to be done once it is committed."""

    sent: list[int] = []  # rows it removed, since the brokers have confirmed their messages
    outs: list[tuple[int, Out]] = []
    settles: list[tuple[Delivery, Outcome]] = []


class Relay:
    """The books' side of brokers apart. Publishing and settling repeat until they are heard; what
    we die with is made up for when the message comes back.
    """

    apart = True

    def __init__(
        self, store: Any, carriers: Mapping[str, Broker], clock: Clock, *, worker: str, lease: float
    ) -> None:
        self.store, self.clock, self.worker, self.lease = store, clock, worker, lease
        self._carriers = dict(carriers)
        self._subscriptions: dict[tuple[str, str], RelayedSubscription] = {}
        self._after: After | None = None
        self._published: set[int] = (
            set()
        )  # rows of confirmed messages, removed by the next transaction
        self._too_large: list[tuple[int, Out]] = []  # refused for their size
        self._unsettled: list[tuple[Delivery, Outcome]] = []  # decided, and not told yet
        self._next_due = 0.0  # of what was put aside, as far as we know
        self._paused: dict[str, str] = {}
        self._paused_at = 0.0
        self._looked = 0.0
        store.part("relay", 1, SCHEMA)

    def carrier(self, topic: str) -> Broker:
        return self._carriers[topic.removesuffix(".dead")]

    def caps_of(self, topic: str) -> Capabilities:
        return self.carrier(topic).caps

    @property
    def brokers(self) -> list[Broker]:
        return list({id(b): b for b in self._carriers.values()}.values())

    # -- life --------------------------------------------------------------------------------------

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        drift: list[str] = []
        for broker in self.brokers:
            drift += await broker.ensure([t for t in topology if self.carrier(t.name) is broker])
        return drift

    async def close(self) -> None:
        for broker in self.brokers:
            await broker.close()

    # -- in the books' transaction -----------------------------------------------------------------

    @contextlib.contextmanager
    def collecting(self, tx: Any) -> Iterator[After]:
        """One job of the books: what it decides is gathered here, and is good only if it commits."""
        self._after = after = After(sent=list(self._published))
        try:
            if after.sent:
                tx.executemany("DELETE FROM outgoing WHERE n=?", [(n,) for n in after.sent])
            yield after
        finally:
            self._after = None

    def place_in(self, tx: Any, batch: Sequence[Out]) -> list[tuple[Published, int]]:
        now = self.clock.now()
        answers = []
        for m in batch:
            headers = msgspec.json.encode(m.headers).decode() if m.headers else None
            later = m.not_before > now
            tx.execute(
                "INSERT INTO outgoing(topic, id, key, prio, headers, body, due, claimed) VALUES(?,?,?,?,?,?,?,?)",
                (
                    m.topic,
                    m.id,
                    m.key,
                    m.priority,
                    headers,
                    m.body,
                    m.not_before if later else now,
                    0.0 if later else now + PATIENCE,
                ),
            )
            n = tx.last_insert_rowid()
            if not later and self._after is not None:
                self._after.outs.append((n, m))
            elif later:
                self._next_due = min(self._next_due or m.not_before, m.not_before)
            answers.append((Published.OK, n))
        return answers

    def settle_in(self, tx: Any, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        now = self.clock.now()
        assert self._after is not None, "settled outside of the books' jobs"
        for d, outcome in items:
            if isinstance(outcome, Retry) and outcome.delay > ASIDE:
                self.place_in(tx, [_again(d, now + outcome.delay)])
                outcome = Ack()
            self._after.settles.append((d, outcome))
        return [True] * len(items)

    def holds_in(self, tx: Any, deliveries: Sequence[Delivery]) -> list[bool]:
        """As far as this process knows; the ledger's fence is the one that counts."""
        return [self._subscriptions[d.topic, d.group].holds(d) for d in deliveries]

    def busy_in(self, tx: Any, n: int) -> bool:
        """Is a living worker at this event? Then what just arrived is a copy of its message."""
        found = tx.execute(
            "SELECT 1 FROM event e JOIN member m ON m.worker=e.worker WHERE e.n=? AND e.status IN ('in_flight','writing') AND m.until>?",
            (n, self.clock.now()),
        ).get
        return found is not None

    def at_hand_in(self, tx: Any, n: int, id_: str) -> bool:
        """Is its message still to be published, or a living worker at it?"""
        return (
            self.busy_in(tx, n)
            or tx.execute("SELECT 1 FROM outgoing WHERE id=? LIMIT 1", (id_,)).get is not None
        )

    def beat_in(self, tx: Any) -> None:
        """We are alive."""
        tx.execute(
            "INSERT INTO member VALUES(?,?) ON CONFLICT(worker) DO UPDATE SET until=excluded.until",
            (self.worker, self.clock.now() + self.lease),
        )

    def leave_in(self, tx: Any, worker: str) -> None:
        tx.execute("DELETE FROM member WHERE worker=?", (worker,))

    def reclaim_in(self, tx: Any, owner: str) -> list[str]:
        """A worker known to be gone. What it held comes back from the broker, which knows nothing
        of our locks.
        """
        self.leave_in(tx, owner)
        return []

    def hold_in(self, tx: Any, topic: str, group: str, until: Mapping[str, float]) -> None:
        """Brokers apart hand out what there is; who has no slot soon is put aside."""

    def pause_in(self, tx: Any, topic: str, reason: str | None) -> bool:
        if topic.removesuffix(".dead") not in self._carriers:
            return False
        self._paused_at = 0.0
        if reason is None:
            tx.execute("DELETE FROM pausing WHERE topic=?", (topic,))
        else:
            tx.execute(
                "INSERT INTO pausing VALUES(?,?) ON CONFLICT(topic) DO UPDATE SET reason=excluded.reason",
                (topic, reason),
            )
        return True

    def paused_in(self, tx: Any) -> dict[str, str]:
        return dict(tx.execute("SELECT topic, reason FROM pausing").fetchall())

    def running_in(self, tx: Any, limit: int) -> dict[str, int]:
        """Workers that are alive; how much each holds is the broker's to know."""
        return {
            worker: 0
            for (worker,) in tx.execute(
                "SELECT worker FROM member WHERE until>? LIMIT ?", (self.clock.now(), limit)
            )
        }

    def oldest_in(self, tx: Any, limit: int) -> float | None:
        """When the oldest message that is due and unconfirmed was; those in the broker's hands are
        in its own figures.
        """
        found: float | None = tx.execute(
            "SELECT min(due) FROM outgoing WHERE due<=?", (self.clock.now(),)
        ).get
        return found

    def leased_in(self, tx: Any, limit: int) -> list[str]:
        """The ids of what living workers have in flight."""
        found = "SELECT e.id FROM event e JOIN member m ON m.worker=e.worker WHERE e.status='in_flight' LIMIT ?"
        return [id_ for (id_,) in tx.execute(found, (limit,))]

    def audit_in(self, tx: Any, now: float) -> QueueAudit:
        """The brokers' own queues cannot be counted from here."""
        return QueueAudit(unqueued=[], unqueued_count=0, lingering_count=0, groups=[], expired=0)

    def depths_in(
        self,
        tx: Any,
        topic: str,
        group: str,
        keys: Sequence[str] | None = None,
        *,
        limit: int = 1000,
    ) -> dict[str, int]:
        """What is pending, by host, from the books: looks at all events, so it is for people."""
        pending = "SELECT host, count(*) AS n FROM event WHERE topic=? AND status='pending'"
        if keys is None:
            return dict(
                tx.execute(
                    f"{pending} GROUP BY host ORDER BY n DESC, host LIMIT ?", (topic, limit)
                ).fetchall()
            )
        return {
            key: tx.execute(
                "SELECT count(*) FROM event WHERE topic=? AND status='pending' AND host=?",
                (topic, key),
            ).get
            for key in keys
        }

    def hasten_in(
        self, tx: Any, topic: str, group: str, key: str, positions: Sequence[int]
    ) -> None:
        """What was put aside for this key is due now."""
        now = self.clock.now()
        tx.execute(
            "UPDATE outgoing SET due=? WHERE topic=? AND key=? AND due>?", (now, topic, key, now)
        )

    def prune_in(self, tx: Any, limit: int = 2000) -> int:
        """Members long gone; the brokers keep their own house."""
        tx.execute("DELETE FROM member WHERE until<?", (self.clock.now() - 3600.0,))
        return 0

    def wake(self, topics: Iterable[str]) -> None:
        """The brokers wake their own receivers."""

    # -- after the commit --------------------------------------------------------------------------

    async def follow_up(self, after: After) -> None:
        """Publish, then settle. Neither can undo what is in the books: what fails here is repeated
        by `tick`, by us or by another.
        """
        self._published.difference_update(after.sent)
        if after.outs:
            await self._publish(after.outs)
        await self._settle(after.settles)

    async def _settle(self, items: Iterable[tuple[Delivery, Outcome]]) -> None:
        """What the broker does not hear now it is told again: where a lease ends only with the
        connection, nothing would come back as long as we live.
        """
        groups: dict[tuple[str, str], list[tuple[Delivery, Outcome]]] = defaultdict(list)
        for d, outcome in items:
            groups[d.topic, d.group].append((d, outcome))
        for key, some in groups.items():
            try:
                await self._subscriptions[key].carrier.settle(some)
            except PenstockError as e:
                log.warning(
                    "%d deliveries of %s are not settled yet: %s", len(some), key[0], e.message
                )
                self._unsettled += some

    async def _publish(self, rows: Sequence[tuple[int, Out]]) -> None:
        """What is not confirmed keeps its row, and is published again."""
        by_carrier: dict[int, list[tuple[int, Out]]] = defaultdict(list)
        for n, out in rows:
            by_carrier[id(self.carrier(out.topic))].append((n, out))
        for some in by_carrier.values():
            for i in range(0, len(some), BATCH):
                batch = some[i : i + BATCH]
                try:
                    answers = await self.carrier(batch[0][1].topic).publish(
                        [out for _, out in batch]
                    )
                except (
                    PenstockError
                ) as e:  # away, or it refuses us now: the books have it either way
                    log.warning("%d messages wait for the broker: %s", len(batch), e.message)
                    continue
                self._published.update(
                    n
                    for (n, _), answer in zip(batch, answers, strict=True)
                    if answer is Published.OK
                )
                self._too_large += [
                    row
                    for row, answer in zip(batch, answers, strict=True)
                    if answer is Published.FAILED and self._is_too_large(row[1])
                ]

    def _is_too_large(self, out: Out) -> bool:
        """What is larger than the broker always takes, and was refused, is refused for that."""
        largest = self.caps_of(out.topic).max_body
        return largest is not None and len(out.body) > largest

    def too_large(self) -> list[tuple[int, Out]]:
        """Rows that no broker will ever take, each told once."""
        found, self._too_large = self._too_large, []
        return found

    def forget_in(self, tx: Any, n: int) -> None:
        tx.execute("DELETE FROM outgoing WHERE n=?", (n,))

    async def tick(self) -> None:
        """Several times a second: publish what is due, ours or left behind by others."""
        now = self.clock.now()
        if not (now >= self._looked + 1.0 or (self._next_due and now >= self._next_due)):
            return
        self._looked = now
        if self._unsettled:
            again, self._unsettled = self._unsettled, []
            await self._settle(again)
        due, self._next_due = await self.store.read(self._due)
        if due or self._published:
            rows, after = await self.store.write(self._take, durable=False)
            self._published.difference_update(after.sent)
            if rows:
                await self._publish(rows)

    def _due(self, tx: Any) -> tuple[bool, float]:
        now = self.clock.now()
        due = (
            tx.execute("SELECT 1 FROM outgoing WHERE due<=? AND claimed<=? LIMIT 1", (now, now)).get
            is not None
        )
        return due, tx.execute("SELECT min(due) FROM outgoing WHERE due>?", (now,)).get or 0.0

    def _take(self, tx: Any) -> tuple[list[tuple[int, Out]], After]:
        with self.collecting(tx) as after:
            now = self.clock.now()
            found = tx.execute(
                "SELECT n, topic, id, key, prio, headers, body FROM outgoing WHERE due<=? AND claimed<=? ORDER BY due LIMIT ?",
                (now, now, BATCH),
            ).fetchall()
            tx.executemany(
                "UPDATE outgoing SET claimed=? WHERE n=?",
                [(now + PATIENCE, row[0]) for row in found],
            )
            rows = [
                (
                    n,
                    Out(
                        topic=topic,
                        id=id_,
                        key=key,
                        priority=prio,
                        headers=msgspec.json.decode(headers) if headers else {},
                        body=body,
                    ),
                )
                for n, topic, id_, key, prio, headers, body in found
            ]
            return rows, after

    async def tidy(self) -> None:
        """Before the end: rows of confirmed messages go, and our name with them."""

        def work(tx: Any) -> After:
            with self.collecting(tx) as after:
                self.leave_in(tx, self.worker)
                return after

        after = await self.store.write(work, durable=False)
        self._published.difference_update(after.sent)

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        made = RelayedSubscription(
            self, topic, self.carrier(topic).subscribe(topic, group, owner=owner, lease=lease)
        )
        self._subscriptions[topic, group] = made
        return made

    async def paused(self, topic: str) -> bool:
        if self.clock.now() > self._paused_at + REMEMBERED:
            self._paused = await self.store.read(self.paused_in)
            self._paused_at = self.clock.now()
        return topic in self._paused

    async def partitions(self, topic: str, group: str) -> list[dict[str, Any]]:
        """Where the group stands in each, on a broker that has partitions."""
        lag = getattr(self.carrier(topic), "lag", None)
        if lag is None:
            return []
        return [
            {
                "name": r.topic,
                "partition": r.partition,
                "end": r.end,
                "committed": r.committed,
                "lag": r.lag,
            }
            for r in await lag(topic, group)
        ]

    async def empty(self) -> bool:
        """Do the brokers say that nothing waits, is delayed or in flight on any topic?"""
        for topic in self._carriers:
            if await self.paused(topic):
                return False
            s = await self.stats(topic, GROUP)
            if s.ready or s.delayed or s.in_flight:
                return False
        return True

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        return await self.carrier(topic).peek(topic, limit)

    async def purge(self, topic: str) -> int:
        def work(tx: Any) -> int:
            tx.execute("DELETE FROM outgoing WHERE topic=?", (topic,))
            return int(tx.changes())

        removed: int = await self.store.write(work)
        return removed + await self.carrier(topic).purge(topic)

    async def replay(self, topic: str, group: str, *, since: float, **more: Any) -> int:
        """`more` is the carrier's own: Kafka takes offsets."""
        return await self.carrier(topic).replay(topic, group, since=since, **more)

    def groups_in(self, tx: Any) -> list[tuple[str, str]]:
        return [(topic, GROUP) for topic in sorted(self._carriers)]

    async def stats(self, topic: str, group: str) -> Stats:
        return await self.carrier(topic).stats(topic, group)


class RelayedSubscription:
    """The carrier's own, stopped where the books have the topic paused."""

    def __init__(self, relay: Relay, topic: str, carrier: Subscription) -> None:
        self._relay, self._topic, self.carrier = relay, topic, carrier

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        if await self._relay.paused(self._topic):
            await self._relay.clock.sleep(wait)
            return []
        return await self.carrier.receive(limit, wait, per_key=per_key)

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        return await self.carrier.settle(items)

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        return await self.carrier.extend(deliveries, seconds)

    async def hold(self, until: Mapping[str, float]) -> None:
        await self.carrier.hold(until)

    def holds(self, delivery: Delivery) -> bool:
        known = getattr(self.carrier, "holds", None)
        return True if known is None else bool(known(delivery))

    async def close(self) -> None:
        await self.carrier.close()


def _again(d: Delivery, due: float) -> Out:
    return Out(
        topic=d.topic,
        id=d.id,
        key=d.key,
        body=d.body,
        headers=d.headers,
        priority=d.priority,
        not_before=due,
    )
