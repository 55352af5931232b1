"""Broker in PostgreSQL: topics, groups, leases with fencing, delays, priorities, fairness of keys.

It runs in the ledger's transaction or in its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.brokers.dead_copies import dead_copy
from penstock.brokers.postgres import statements as sql
from penstock.brokers.postgres.notify import Listener
from penstock.brokers.postgres.reports import Figures
from penstock.brokers.postgres.statements import NEVER
from penstock.brokers.sql import Group, SqlSubscription
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Clock, Delivery, Out, Published, Subscription, TopicSpec
from penstock.rules.handout import allot
from penstock.rules.priority import WEIGHTS, class_of
from penstock.stores.context import Context
from penstock.stores.postgres.arrays import bigints, byteas, doubles, texts
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx

POLL_INTERVAL = 1.0  # longest wait in seconds without a check: a notification may be lost
CONTENTION_DELAY = (
    0.02  # seconds before the next attempt if other processes had locked all messages
)
# Seconds for which a topic's `max_depth` is cached. Another process may change it.
TOPIC_CACHE_SECONDS = 5.0


class _Topic(msgspec.Struct, frozen=True):
    id: int
    max_depth: int | None
    until: float  # when this cache entry expires


class _Received(msgspec.Struct):
    deliveries: list[Delivery]
    contended: bool  # there were messages, but other processes had locked all of them
    next_at: float | None  # when the next message is due, if known


class PostgresBroker(Figures):
    """Implements ports.Broker.

    Methods that end in `_in` run in the caller's ledger transaction, on the store's thread.
    """

    def __init__(self, db: PostgresStore, clock: Clock) -> None:
        self.db = db
        super().__init__(db, clock, sql.SCHEMA)
        # Messages requested so far, by group. It decides which priority class has its turn.
        self._requested: Counter[int] = Counter()
        self.listener = Listener(db)

    # -- topology ----------------------------------------------------------------------------------

    def ensure_in(self, tx: Tx, topology: Sequence[TopicSpec]) -> list[str]:
        drift = []
        for t in topology:
            id_, ordered = tx.execute(
                "INSERT INTO topic(name, ordered, max_depth, retention) VALUES(?,?,?,?)"
                " ON CONFLICT(name) DO UPDATE SET max_depth=excluded.max_depth,"
                " retention=excluded.retention RETURNING id, ordered",
                (t.name, t.ordered, t.max_depth, t.retention),
            ).get
            if ordered != t.ordered:
                drift.append(
                    f"topic {t.name}: ordered is {ordered} in the store "
                    f"and {t.ordered} in the configuration; purge it to change that"
                )
            for g in t.groups:
                tx.execute(
                    "INSERT INTO grp(topic, name) VALUES(?,?) ON CONFLICT DO NOTHING", (id_, g)
                )
        self._topics.clear()
        self._groups.clear()
        return drift

    def _topic(self, tx: Tx, name: str) -> _Topic:
        self._forget_after_rollback()
        now = self.clock.now()
        known: _Topic | None = self._topics.get(name)
        if known is None or known.until < now:
            row = tx.execute("SELECT id, max_depth FROM topic WHERE name=?", (name,)).get
            if row is None:
                row = tx.execute(
                    "INSERT INTO topic(name, ordered, max_depth, retention)"
                    " VALUES(?,false,NULL,86400) RETURNING id, max_depth",
                    (name,),
                ).get
            known = self._topics[name] = _Topic(row[0], row[1], now + TOPIC_CACHE_SECONDS)
        return known

    def _group(self, tx: Tx, topic: str, group: str) -> Group:
        self._forget_after_rollback()
        known = self._groups.get((topic, group))
        if known is None:
            query = (
                "SELECT g.id, t.id, t.ordered FROM grp g JOIN topic t ON t.id=g.topic"
                " WHERE t.name=? AND g.name=?"
            )
            row = tx.execute(query, (topic, group)).get
            if row is None:
                tx.execute(
                    "INSERT INTO grp(topic, name) VALUES(?,?) ON CONFLICT DO NOTHING",
                    (self._topic(tx, topic).id, group),
                )
                row = tx.execute(query, (topic, group)).get
            known = self._groups[topic, group] = Group(*row)
        return known

    # -- publishing --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        if not batch:
            return []
        begun = False

        def work(tx: Tx) -> list[Published]:
            nonlocal begun
            begun = True
            return self.publish_in(tx, batch)

        try:
            answers = await self.db.write(work)
        except StoreUnavailable:
            if not begun:  # no statement was sent
                raise
            # The lost reply may be the reply to COMMIT.
            return [Published.UNKNOWN] * len(batch)
        self.wake(m.topic for m in batch)
        return answers

    def place_in(self, tx: Tx, batch: Sequence[Out]) -> list[tuple[Published, int]]:
        answers: list[tuple[Published, int]] = []
        room: dict[str, int | None] = {}
        placed: list[tuple[int, Out]] = []  # index of its answer, message
        for m in batch:
            if m.topic not in room:
                topic = self._topic(tx, m.topic)
                room[m.topic] = (
                    None if topic.max_depth is None else topic.max_depth - self._depth(tx, topic.id)
                )
            left = room[m.topic]
            if not _storable(m):
                answers.append((Published.FAILED, 0))
            elif left is not None and left <= 0:
                answers.append((Published.FULL, 0))
            else:
                room[m.topic] = None if left is None else left - 1
                placed.append((len(answers), m))
                answers.append((Published.OK, 0))
        if placed:
            outs = [m for _, m in placed]
            seqs = tx.execute(
                sql.PUBLISH,
                (
                    bigints([self._topics[m.topic].id for m in outs]),
                    texts([m.id for m in outs]),
                    texts([m.key for m in outs]),
                    # A message with an unknown class would never be received.
                    bigints([class_of(m.priority) for m in outs]),
                    texts(
                        [
                            msgspec.json.encode(m.headers).decode() if m.headers else None
                            for m in outs
                        ]
                    ),
                    byteas([m.body for m in outs]),
                    doubles([m.not_before for m in outs]),
                    self.clock.now(),
                ),
            )
            self.listener.tell_in(tx, {m.topic for m in outs})
            for (at, _), (seq,) in zip(placed, seqs.fetchall(), strict=True):
                answers[at] = (Published.OK, seq)
        return answers

    def _depth(self, tx: Tx, topic: int) -> int:
        deepest = (
            "SELECT max(n) FROM (SELECT sum(k.ready+k.leased+k.delayed)::bigint AS n"
            " FROM grp g JOIN keyq k ON k.grp=g.id WHERE g.topic=? GROUP BY g.id) s"
        )
        return int(tx.execute(deepest, (topic,)).get or 0)

    def wake(self, topics: Iterable[str]) -> None:
        """Wake receivers here and notify other processes. Call it after a commit, on the loop."""
        self.listener.wake(topics)

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        return PostgresSubscription(self, topic, group, owner, lease)

    def receive_in(
        self,
        tx: Tx,
        topic: str,
        group: str,
        limit: int,
        *,
        owner: str,
        lease: float,
        per_key: int | None = None,
    ) -> list[Delivery]:
        return self.take_in(
            tx, topic, group, limit, owner=owner, lease=lease, per_key=per_key
        ).deliveries

    def take_in(
        self,
        tx: Tx,
        topic: str,
        group: str,
        limit: int,
        *,
        owner: str,
        lease: float,
        per_key: int | None = None,
    ) -> _Received:
        """As `receive_in`, with the reason for an empty result. Never waits for a lock."""
        g, now = self._group(tx, topic, group), self.clock.now()
        outlook, listed = (
            tx.execute(sql.OUTLOOK, (g.id, now)),
            tx.execute(sql.KEYS, (g.id, now, limit)),
        )
        paused, due = outlook.get
        if paused:
            return _Received([], False, None)
        if due and tx.execute(sql.REQUEUE_DUE, (g.id, now, g.ordered)).get:
            listed = tx.execute(sql.KEYS, (g.id, now, limit))
        keys: list[list[tuple[str, int]]] = [[] for _ in WEIGHTS]
        for prio, key, ready in listed.fetchall():
            keys[prio].append((key, ready))
        chosen = allot(keys, self._requested[g.id], limit, 1 if g.ordered else per_key or limit)
        self._requested[g.id] += limit
        if not chosen:
            return _Received([], due, tx.execute(sql.NEXT, (g.id, now)).get)
        rows = tx.execute(
            sql.LEASE,
            (
                g.id,
                now,
                bigints([prio for prio, _ in chosen]),
                texts([key for _, key in chosen]),
                bigints(list(chosen.values())),
                now + lease,
                owner,
                NEVER if g.ordered else now,
            ),
        ).fetchall()
        got = [
            Delivery(
                topic=topic,
                group=group,
                id=id_,
                key=key,
                body=body,
                headers=msgspec.json.decode(headers) if headers else {},
                position=seq,
                token=token,
                deliveries=deliveries,
                priority=prio,
            )
            for seq, key, id_, headers, body, deliveries, token, prio in rows
        ]
        return _Received(got, not got, None)

    def hold_in(self, tx: Tx, topic: str, group: str, until: Mapping[str, float]) -> None:
        g = self._group(tx, topic, group)
        held = [(key, prio, at) for key, at in until.items() for prio in range(len(WEIGHTS))]
        tx.execute(  # also inserts keys and priority classes that have no messages yet
            "INSERT INTO keyq(grp, prio, key, ready, leased, delayed, next_at)"
            " SELECT ?1, prio, key, 0, 0, 0, at FROM unnest(?2::bigint[], ?3::text[],"
            " ?4::float8[]) AS u(prio, key, at)"
            " ON CONFLICT(grp, prio, key) DO UPDATE SET next_at=excluded.next_at"
            " WHERE keyq.next_at<excluded.next_at",
            (
                g.id,
                bigints([p for _, p, _ in held]),
                texts([k for k, _, _ in held]),
                doubles([at for _, _, at in held]),
            ),
        )

    def reclaim_in(self, tx: Tx, owner: str) -> list[str]:
        """End the leases of a worker that has stopped. Return the ids of its messages."""
        groups = tx.execute(
            "SELECT g.id, t.ordered FROM grp g JOIN topic t ON t.id=g.topic ORDER BY g.id"
        ).fetchall()
        found = [
            tx.execute(sql.RECLAIM, (g, owner, self.clock.now(), ordered)) for g, ordered in groups
        ]
        return [id_ for answer in found for (id_,) in answer.fetchall()]

    def holds_in(self, tx: Tx, deliveries: Sequence[Delivery]) -> list[bool]:
        """Return for each delivery whether its lease is still valid."""
        if not deliveries:
            return []
        groups = [self._group(tx, d.topic, d.group).id for d in deliveries]
        found = tx.execute(
            sql.HELD,
            (
                bigints(groups),
                bigints([d.position for d in deliveries]),
                bigints([d.token for d in deliveries]),
            ),
        ).fetchall()
        held = set(found)
        return [(g, d.position, d.token) in held for g, d in zip(groups, deliveries, strict=True)]

    # -- settling ----------------------------------------------------------------------------------

    def settle_in(self, tx: Tx, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        now = self.clock.now()
        # By group: (position, token) -> index of its first item. A repeated item is ignored.
        first: dict[Group, dict[tuple[int, int], int]] = {}
        for n, (d, _) in enumerate(items):
            first.setdefault(self._group(tx, d.topic, d.group), {}).setdefault(
                (d.position, d.token), n
            )
        sent = []
        for g, numbers in first.items():
            acts = [_act(items[n][1], now) for n in numbers.values()]
            bindings = (
                g.id,
                bigints([seq for seq, _ in numbers]),
                bigints([token for _, token in numbers]),
                bigints([act for act, _ in acts]),
                doubles([due for _, due in acts]),
                now,
                g.ordered,
            )
            sent.append((numbers, tx.execute(sql.SETTLE, bindings)))
        answers = [False] * len(items)
        letters: list[Out] = []
        for numbers, settled in sent:
            done = {seq for (seq,) in settled.fetchall()}
            for (seq, _), n in numbers.items():
                d, outcome = items[n]
                answers[n] = seq in done
                if answers[n] and isinstance(outcome, Dead):
                    letters.append(dead_copy(d, outcome.reason))
        if letters:
            self.publish_in(tx, letters)
            for topic, n in Counter(m.topic for m in letters).items():
                tx.execute("UPDATE topic SET letters=letters+? WHERE name=?", (n, topic))
        if any(isinstance(outcome, Release | Retry) for _, outcome in items):
            self.listener.defer_notification({d.topic for d, _ in items})
        return answers

    def extend_in(
        self, tx: Tx, topic: str, group: str, deliveries: Sequence[Delivery], until: float
    ) -> list[bool]:
        g = self._group(tx, topic, group)
        found = tx.execute(
            sql.EXTEND,
            (
                g.id,
                bigints([d.position for d in deliveries]),
                bigints([d.token for d in deliveries]),
                until,
            ),
        ).fetchall()
        kept = set(found)
        return [(d.position, d.token) in kept for d in deliveries]

    # -- operator commands -------------------------------------------------------------------------

    def purge_in(self, tx: Tx, topic: str) -> int:
        """Lock the keys first, so that no process delivers messages that are being deleted."""
        t = self._topic(tx, topic).id
        tx.execute(
            "SELECT 1 FROM keyq WHERE grp IN (SELECT id FROM grp WHERE topic=?) FOR UPDATE", (t,)
        )
        tx.execute(
            "DELETE FROM queue WHERE state<>1 AND grp IN (SELECT id FROM grp WHERE topic=?)", (t,)
        )
        tx.execute(
            "UPDATE keyq SET ready=0, delayed=0 WHERE grp IN (SELECT id FROM grp WHERE topic=?)",
            (t,),
        )
        gone = tx.execute(
            "WITH d AS (DELETE FROM message m WHERE m.topic=?1 AND NOT EXISTS(SELECT 1 FROM grp g"
            " JOIN queue q ON q.grp=g.id AND q.seq=m.seq WHERE g.topic=?1)"
            " RETURNING 1) SELECT count(*) FROM d",
            (t,),
        )
        tx.execute("UPDATE topic SET letters=0 WHERE id=?", (t,))
        return int(gone.get)

    def hasten_in(self, tx: Tx, topic: str, group: str, key: str, positions: Sequence[int]) -> None:
        """End the hold of a key, and make these delayed messages of the key due now."""
        g, now = self._group(tx, topic, group), self.clock.now()
        tx.execute(
            "UPDATE keyq SET next_at=?1 WHERE grp=?2 AND prio BETWEEN 0 AND 2 AND key=?3"
            " AND next_at>?1",
            (now, g.id, key),
        )
        tx.execute(
            "UPDATE queue SET at=?1 WHERE grp=?2 AND seq=ANY(?3::bigint[]) AND state=2 AND at>?1",
            (now, g.id, bigints(positions)),
        )
        self.listener.defer_notification([topic])

    def pause_in(self, tx: Tx, topic: str, reason: str | None) -> bool:
        """Pause a topic, or resume it if `reason` is None. Return False if it does not exist."""
        self.listener.defer_notification([topic])
        return (
            tx.execute("UPDATE topic SET paused=? WHERE name=? RETURNING id", (reason, topic)).get
            is not None
        )

    # -- history -----------------------------------------------------------------------------------

    def replay_in(self, tx: Tx, topic: str, group: str, since: float) -> int:
        g = self._group(tx, topic, group)
        self.listener.tell_in(tx, [topic])
        return int(tx.execute(sql.REPLAY, (g.id, g.topic, since, g.ordered, self.clock.now())).get)

    def prune_in(self, tx: Tx, limit: int = 2000) -> int:
        """Delete messages older than the retention that all groups have settled.

        Each call handles a limited number of messages.
        """
        last = tx.execute(
            "SELECT max(seq) FROM (SELECT seq FROM message WHERE seq>? ORDER BY seq LIMIT ?) s",
            (self._pruned, 4 * limit),
        ).get
        if last is None:
            self._pruned = 0
            return 0
        now = self.clock.now()
        gone = int(tx.execute(sql.PRUNE, (now, self._pruned, last)).get)
        self._pruned = last
        tx.execute(
            "DELETE FROM keyq WHERE (grp, prio, key) IN (SELECT grp, prio, key FROM keyq"
            " WHERE ready=0 AND leased=0 AND delayed=0 AND next_at<?"
            " LIMIT ? FOR UPDATE SKIP LOCKED)",
            (now - 60.0, limit),
        )
        return gone

    async def close(self) -> None:
        """Stop listening. The caller that opened the store closes it."""
        await self.listener.close()


def _act(outcome: Outcome, now: float) -> tuple[int, float]:
    match outcome:
        case Retry(delay=delay):
            return 1, now + delay
        case Release():
            return 2, 0.0
        case Ack() | Dead():
            return 0, 0.0


def _storable(m: Out) -> bool:
    """Return False if PostgreSQL cannot store the message: its text may not contain NUL.

    Headers are stored as JSON, which escapes NUL.
    """
    try:
        return b"\0" not in (m.id + m.key).encode() and msgspec.json.encode(m.headers) is not None
    except UnicodeEncodeError:
        return False


class PostgresSubscription(SqlSubscription):
    def __init__(
        self, broker: PostgresBroker, topic: str, group: str, owner: str, lease: float
    ) -> None:
        super().__init__(broker, topic, group, owner, lease)
        self.broker = broker
        self._wake = broker.listener.waiter(topic)

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        b = self.broker
        until = b.clock.now() + wait

        def work(tx: Tx) -> _Received:
            return b.take_in(
                tx,
                self.topic,
                self.group,
                limit,
                owner=self.owner,
                lease=self.lease,
                per_key=per_key,
            )

        while True:
            self._wake.clear()
            got = await b.db.write(work, durable=False, alone=False)
            if got.contended:  # the fleet's lock waits for the processes that hold row locks
                got = await b.db.write(work, durable=False)
            if got.deliveries:
                return got.deliveries
            now = b.clock.now()
            if now >= until:
                return []
            b.listener.start()
            pause = (
                CONTENTION_DELAY
                if got.contended
                else POLL_INTERVAL
                if got.next_at is None
                else max(0.01, got.next_at - now)
            )
            await self._pause(min(until - now, POLL_INTERVAL, pause))

    async def close(self) -> None:
        with contextlib.suppress(ValueError):
            self.broker.listener.remove_waiter(self.topic, self._wake)


def open_broker(url: str, context: Context) -> PostgresBroker:
    store: Any = context.store(url)
    return PostgresBroker(store, context.clock)
