"""Messages of the PostgreSQL broker inside one transaction: publish, receive, settle, report.

The transaction is the ledger's or the broker's own. It runs on the store's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.brokers.dead_copies import dead_copy
from penstock.brokers.postgres import statements as sql
from penstock.brokers.postgres.notify import Notifier
from penstock.brokers.sql import NEVER, BoundSqlQueue, Group, SqlQueue
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Delivery, Out, Published
from penstock.rules.handout import allot
from penstock.rules.priority import WEIGHTS, class_of
from penstock.stores.postgres.arrays import bigints, byteas, doubles, texts
from penstock.stores.sql import Tx


class Received(msgspec.Struct):
    """Result of a receive, with the reason for an empty one."""

    deliveries: list[Delivery]
    contended: bool  # there were messages, but other processes had locked all of them
    next_at: float | None  # when the next message is due, if known


class PostgresQueue(BoundSqlQueue):
    """Implements the queue in one transaction."""

    def __init__(self, tx: Tx, queue: SqlQueue, notifier: Notifier) -> None:
        super().__init__(tx, queue)
        self._notifier = notifier

    # -- publishing --------------------------------------------------------------------------------

    def enqueue(self, batch: Sequence[Out]) -> list[tuple[Published, int]]:
        answers: list[tuple[Published, int]] = []
        room: dict[str, int | None] = {}
        placed: list[tuple[int, Out]] = []  # index of its answer, message
        for m in batch:
            if m.topic not in room:
                topic = self.topic(m.topic)
                room[m.topic] = (
                    None if topic.max_depth is None else topic.max_depth - self._depth(topic.id)
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
            seqs = self.tx.execute(
                sql.PUBLISH,
                (
                    bigints([self.queue.topics[m.topic].id for m in outs]),
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
            self._notifier.notify_in(self.tx, {m.topic for m in outs})
            for (at, _), (seq,) in zip(placed, seqs.fetchall(), strict=True):
                answers[at] = (Published.OK, seq)
        return answers

    def _depth(self, topic: int) -> int:
        deepest = self.tx.execute(
            "SELECT max(n) FROM (SELECT sum(k.ready+k.leased+k.delayed)::bigint AS n"
            " FROM grp g JOIN keyq k ON k.grp=g.id WHERE g.topic=? GROUP BY g.id) s",
            (topic,),
        )
        return int(deepest.get or 0)

    # -- receiving ---------------------------------------------------------------------------------

    def receive(
        self,
        topic: str,
        group: str,
        limit: int,
        *,
        owner: str,
        lease: float,
        per_key: int | None = None,
    ) -> Received:
        """Deliver messages. Never waits for a lock."""
        g, now = self.group(topic, group), self.clock.now()
        outlook, listed = (
            self.tx.execute(sql.OUTLOOK, (g.id, now)),
            self.tx.execute(sql.KEYS, (g.id, now, limit)),
        )
        paused, due = outlook.get
        if paused:
            return Received([], False, None)
        if due and self.tx.execute(sql.REQUEUE_DUE, (g.id, now, g.ordered)).get:
            listed = self.tx.execute(sql.KEYS, (g.id, now, limit))
        keys: list[list[tuple[str, int]]] = [[] for _ in WEIGHTS]
        for prio, key, ready in listed.fetchall():
            keys[prio].append((key, ready))
        chosen = allot(
            keys, self.queue.requested[g.id], limit, 1 if g.ordered else per_key or limit
        )
        self.queue.requested[g.id] += limit
        if not chosen:
            return Received([], due, self.tx.execute(sql.NEXT, (g.id, now)).get)
        rows = self.tx.execute(
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
        return Received(got, not got, None)

    def hold_keys(self, topic: str, group: str, until: Mapping[str, float]) -> None:
        g = self.group(topic, group)
        held = [(key, prio, at) for key, at in until.items() for prio in range(len(WEIGHTS))]
        self.tx.execute(  # also inserts keys and priority classes that have no messages yet
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

    def reclaim(self, worker: str) -> list[str]:
        groups = self.tx.execute(
            "SELECT g.id, t.ordered FROM grp g JOIN topic t ON t.id=g.topic ORDER BY g.id"
        ).fetchall()
        found = [
            self.tx.execute(sql.RECLAIM, (g, worker, self.clock.now(), ordered))
            for g, ordered in groups
        ]
        return [id_ for answer in found for (id_,) in answer.fetchall()]

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        if not deliveries:
            return []
        groups = [self.group(d.topic, d.group).id for d in deliveries]
        held = set(
            self.tx.execute(
                sql.HELD,
                (
                    bigints(groups),
                    bigints([d.position for d in deliveries]),
                    bigints([d.token for d in deliveries]),
                ),
            ).fetchall()
        )
        return [(g, d.position, d.token) in held for g, d in zip(groups, deliveries, strict=True)]

    # -- settling ----------------------------------------------------------------------------------

    def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        now = self.clock.now()
        # By group: (position, token) -> index of its first item. A repeated item is ignored.
        first: dict[Group, dict[tuple[int, int], int]] = {}
        for n, (d, _) in enumerate(items):
            first.setdefault(self.group(d.topic, d.group), {}).setdefault((d.position, d.token), n)
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
            sent.append((numbers, self.tx.execute(sql.SETTLE, bindings)))
        answers = [False] * len(items)
        copies: list[Out] = []
        for numbers, settled in sent:
            done = {seq for (seq,) in settled.fetchall()}
            for (seq, _), n in numbers.items():
                d, outcome = items[n]
                answers[n] = seq in done
                if answers[n] and isinstance(outcome, Dead):
                    copies.append(dead_copy(d, outcome.reason))
        if copies:
            self.publish(copies)
            for topic, n in Counter(m.topic for m in copies).items():
                self.tx.execute("UPDATE topic SET letters=letters+? WHERE name=?", (n, topic))
        if any(isinstance(outcome, Release | Retry) for _, outcome in items):
            self._notifier.defer_notification({d.topic for d, _ in items})
        return answers

    def extend(
        self, topic: str, group: str, deliveries: Sequence[Delivery], until: float
    ) -> list[bool]:
        g = self.group(topic, group)
        kept = set(
            self.tx.execute(
                sql.EXTEND,
                (
                    g.id,
                    bigints([d.position for d in deliveries]),
                    bigints([d.token for d in deliveries]),
                    until,
                ),
            ).fetchall()
        )
        return [(d.position, d.token) in kept for d in deliveries]

    # -- operator commands -------------------------------------------------------------------------

    def purge(self, topic: str) -> int:
        """Lock the keys first, so that no process delivers messages that are being deleted."""
        t = self.topic(topic).id
        self.tx.execute(
            "SELECT 1 FROM keyq WHERE grp IN (SELECT id FROM grp WHERE topic=?) FOR UPDATE", (t,)
        )
        self.tx.execute(
            "DELETE FROM queue WHERE state<>1 AND grp IN (SELECT id FROM grp WHERE topic=?)", (t,)
        )
        self.tx.execute(
            "UPDATE keyq SET ready=0, delayed=0 WHERE grp IN (SELECT id FROM grp WHERE topic=?)",
            (t,),
        )
        gone = self.tx.execute(
            "WITH d AS (DELETE FROM message m WHERE m.topic=?1 AND NOT EXISTS(SELECT 1 FROM grp g"
            " JOIN queue q ON q.grp=g.id AND q.seq=m.seq WHERE g.topic=?1)"
            " RETURNING 1) SELECT count(*) FROM d",
            (t,),
        )
        self.tx.execute("UPDATE topic SET letters=0 WHERE id=?", (t,))
        return int(gone.get)

    def make_due(
        self, topic: str, group: str, key: str, messages: Sequence[tuple[int, int]]
    ) -> None:
        g, now = self.group(topic, group), self.clock.now()
        self.tx.execute(
            "UPDATE keyq SET next_at=?1 WHERE grp=?2 AND prio BETWEEN 0 AND 2 AND key=?3"
            " AND next_at>?1",
            (now, g.id, key),
        )
        self.tx.execute(
            "UPDATE queue SET at=?1 WHERE grp=?2 AND seq=ANY(?3::bigint[]) AND state=2 AND at>?1",
            (now, g.id, bigints([seq for _, seq in messages])),
        )
        self._notifier.defer_notification([topic])

    def pause(self, topic: str, reason: str | None) -> bool:
        self._notifier.defer_notification([topic])
        return super().pause(topic, reason)

    # -- history -----------------------------------------------------------------------------------

    def replay(self, topic: str, group: str, since: float) -> int:
        g = self.group(topic, group)
        self._notifier.notify_in(self.tx, [topic])
        return int(
            self.tx.execute(sql.REPLAY, (g.id, g.topic, since, g.ordered, self.clock.now())).get
        )

    def prune(self, limit: int = 2000) -> int:
        """Delete messages older than the retention that all groups have settled.

        Each call handles a limited number of messages.
        """
        last = self.tx.execute(
            "SELECT max(seq) FROM (SELECT seq FROM message WHERE seq>? ORDER BY seq LIMIT ?) s",
            (self.queue.pruned, 4 * limit),
        ).get
        if last is None:
            self.queue.pruned = 0
            return 0
        now = self.clock.now()
        gone = int(self.tx.execute(sql.PRUNE, (now, self.queue.pruned, last)).get)
        self.queue.pruned = last
        self.tx.execute(
            "DELETE FROM keyq WHERE (grp, prio, key) IN (SELECT grp, prio, key FROM keyq"
            " WHERE ready=0 AND leased=0 AND delayed=0 AND next_at<?"
            " LIMIT ? FOR UPDATE SKIP LOCKED)",
            (now - 60.0, limit),
        )
        return gone

    # -- reports -----------------------------------------------------------------------------------

    def _figures(self, topic: str, group: str) -> tuple[int, int, int, float | None]:
        ready, leased, delayed = self.tx.execute(
            f"SELECT {sql.SUMS} FROM topic t JOIN grp g ON g.topic=t.id JOIN keyq k ON k.grp=g.id"
            f" WHERE t.name=? AND g.name=?",
            (topic, group),
        ).get
        oldest = self.tx.execute(
            "SELECT m.at FROM topic t JOIN grp g ON g.topic=t.id JOIN LATERAL (SELECT seq"
            " FROM queue WHERE grp=g.id ORDER BY seq LIMIT 1) q ON true"
            " JOIN message m ON m.seq=q.seq WHERE t.name=? AND g.name=?",
            (topic, group),
        ).get
        return ready, leased, delayed, oldest

    def _waiting(
        self, topic: str, limit: int
    ) -> Iterable[tuple[str, str, bytes, str | None, int, float]]:
        return self.tx.execute(
            "SELECT m.id, m.key, m.body, m.headers, m.prio, coalesce((SELECT min(q.at) FROM grp g"
            " JOIN queue q ON q.grp=g.id AND q.seq=m.seq"
            " WHERE g.topic=t.id AND q.state=2), 0.0) FROM topic t JOIN message m ON m.topic=t.id"
            " WHERE t.name=? AND ("
            " EXISTS(SELECT 1 FROM grp g JOIN queue q ON q.grp=g.id AND q.seq=m.seq"
            " WHERE g.topic=t.id OFFSET 0)"
            " OR NOT EXISTS(SELECT 1 FROM grp g WHERE g.topic=t.id))"
            " ORDER BY m.seq LIMIT ?",
            (topic, limit),
        )

    def depths(
        self,
        topic: str,
        group: str,
        keys: Sequence[str] | None = None,
        *,
        limit: int = 1000,
    ) -> dict[str, int]:
        """Return the number of ready messages by key: of `keys`, or of the `limit` deepest keys."""
        g = self.group(topic, group)
        if keys is None:
            return dict(
                self.tx.execute(
                    "SELECT key, sum(ready)::bigint AS n FROM keyq WHERE grp=? AND ready>0"
                    " GROUP BY key ORDER BY n DESC, key LIMIT ?",
                    (g.id, limit),
                ).fetchall()
            )
        found = self.tx.execute(
            "SELECT key, sum(ready)::bigint FROM keyq WHERE grp=? AND prio BETWEEN 0 AND 2"
            " AND key=ANY(?::text[]) GROUP BY key",
            (g.id, texts(keys)),
        )
        return dict.fromkeys(keys, 0) | dict(found.fetchall())

    def leases_by_worker(self, limit: int) -> dict[str, int]:
        """Return how many deliveries each worker holds. Reads at most `limit` leases of a group.

        A group never has more leases than the sum of the fleet's prefetch windows.
        """
        return dict(
            self.tx.execute(
                "SELECT owner, count(*) FROM grp g JOIN LATERAL (SELECT owner FROM queue"
                " WHERE grp=g.id AND state=1 LIMIT ?) q ON true GROUP BY owner",
                (limit,),
            ).fetchall()
        )

    def oldest(self, limit: int) -> float | None:
        """Return when the oldest message that is ready or leased was published.

        If the first `limit` messages are all delayed, use the oldest of them.
        """
        found: float | None = self.tx.execute(
            "SELECT min(m.at) FROM grp g JOIN LATERAL (SELECT coalesce(min(seq) FILTER (WHERE"
            " state<>2), min(seq)) AS seq FROM"
            " (SELECT seq, state FROM queue WHERE grp=g.id ORDER BY seq LIMIT ?) s) o ON true"
            " JOIN message m ON m.seq=o.seq"
            " WHERE g.name='main' AND EXISTS(SELECT 1 FROM keyq k WHERE k.grp=g.id"
            " AND k.ready+k.leased>0)",
            (limit,),
        ).get
        return found

    def _noted(self) -> Iterable[tuple[str, str, int, int, int, int]]:
        return self.tx.execute(
            f"SELECT t.name, g.name, g.id, {sql.SUMS} FROM topic t"
            f" JOIN grp g ON g.topic=t.id LEFT JOIN keyq k ON k.grp=g.id"
            " GROUP BY t.name, g.name, g.id ORDER BY t.name, g.name"
        ).fetchall()


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
