"""Embedded broker in one SQLite file.

It has topics, groups, leases with fencing, delays, priorities and fairness between keys.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.brokers.dead_copies import dead_copy
from penstock.brokers.sql import Group, SqlQueue, SqlSubscription
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Clock, Delivery, Out, Published, Subscription, TopicSpec
from penstock.rules.handout import allot
from penstock.rules.priority import LOWEST, WEIGHTS, class_of
from penstock.stores.context import Context
from penstock.stores.sql import Tx
from penstock.stores.sqlite import Database

SCHEMA = """
CREATE TABLE topic(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, ordered INTEGER NOT NULL,
    max_depth INTEGER, retention REAL NOT NULL, paused TEXT,
  letters INTEGER NOT NULL DEFAULT 0);
CREATE TABLE grp(id INTEGER PRIMARY KEY, topic INTEGER NOT NULL, name TEXT NOT NULL, ready INTEGER
    NOT NULL DEFAULT 0, leased INTEGER NOT NULL DEFAULT 0,
  delayed INTEGER NOT NULL DEFAULT 0, UNIQUE(topic, name));
-- AUTOINCREMENT: with a reused number, a late settle could remove another message.
CREATE TABLE message(seq INTEGER PRIMARY KEY AUTOINCREMENT, topic INTEGER NOT NULL, id TEXT NOT
    NULL, key TEXT NOT NULL, prio INTEGER NOT NULL,
  headers TEXT, body BLOB NOT NULL, at REAL NOT NULL);
CREATE TABLE queue(grp INTEGER NOT NULL, seq INTEGER NOT NULL, prio INTEGER NOT NULL, key TEXT NOT
    NULL, state INTEGER NOT NULL,
  at REAL NOT NULL DEFAULT 0, owner TEXT, token INTEGER NOT NULL DEFAULT 0,
  deliveries INTEGER NOT NULL DEFAULT 0, PRIMARY KEY(grp, seq)) WITHOUT ROWID;
CREATE INDEX queue_ready ON queue(grp, prio, key, seq) WHERE state=0;
CREATE INDEX queue_leased ON queue(grp, at) WHERE state=1;
CREATE INDEX queue_delayed ON queue(grp, at) WHERE state=2;
-- One row per key with messages. `receive` picks keys, then their oldest messages. So its cost does
-- not depend on the depth.
CREATE TABLE keyq(grp INTEGER NOT NULL, prio INTEGER NOT NULL, key TEXT NOT NULL, ready INTEGER NOT
    NULL, next_at REAL NOT NULL, PRIMARY KEY(grp,
  prio, key)) WITHOUT ROWID;
CREATE INDEX keyq_next ON keyq(grp, prio, next_at) WHERE ready>0;
CREATE TABLE token(n INTEGER NOT NULL);
INSERT INTO token VALUES(0);
"""
READY, LEASED, DELAYED = 0, 1, 2
CLASSES = range(len(WEIGHTS))
# Ordered topics use one priority class. With several, a message could overtake an earlier message
# of its key.
ORDERED_CLASS = 1
NEVER = 1e18  # `next_at` of an ordered key while one of its messages is leased
POLL_INTERVAL = 0.1  # seconds between two checks for messages of other processes


class SqliteBroker(SqlQueue):
    """Implements ports.Broker. Methods that end in `_in` run in the caller's ledger transaction."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self.db: Database = db
        super().__init__(db, clock, SCHEMA)
        self._receivers: dict[str, list[asyncio.Event]] = defaultdict(list)
        # Messages requested so far, by group. It decides which priority class has its turn.
        self._requested: dict[int, int] = defaultdict(int)

    # -- topology ----------------------------------------------------------------------------------

    def ensure_in(self, tx: Tx, topology: Sequence[TopicSpec]) -> list[str]:
        drift = []
        for t in topology:
            found = tx.execute(
                "SELECT id, ordered, max_depth FROM topic WHERE name=?", (t.name,)
            ).get
            if found is None:
                tx.execute(
                    "INSERT INTO topic(name, ordered, max_depth, retention) VALUES(?,?,?,?)",
                    (t.name, t.ordered, t.max_depth, t.retention),
                )
                found = (tx.last_insert_rowid(), t.ordered, t.max_depth)
            if bool(found[1]) != t.ordered:
                drift.append(
                    f"topic {t.name}: ordered is {bool(found[1])} in the store "
                    f"and {t.ordered} in the configuration; purge it to change that"
                )
            tx.execute(
                "UPDATE topic SET max_depth=?, retention=? WHERE id=?",
                (t.max_depth, t.retention, found[0]),
            )
            for g in t.groups:
                tx.execute("INSERT OR IGNORE INTO grp(topic, name) VALUES(?,?)", (found[0], g))
        self._topics.clear()
        self._groups.clear()
        return drift

    def _topic(self, tx: Tx, name: str) -> int:
        self._forget_after_rollback()
        known: int | None = self._topics.get(name)
        if known is None:
            known = tx.execute("SELECT id FROM topic WHERE name=?", (name,)).get
            if known is None:
                tx.execute(
                    "INSERT INTO topic(name, ordered, max_depth, retention) VALUES(?,0,NULL,86400)",
                    (name,),
                )
                return tx.last_insert_rowid()
            self._topics[name] = known
        return known

    def _group(self, tx: Tx, topic: str, group: str) -> Group:
        self._forget_after_rollback()
        known = self._groups.get((topic, group))
        if known is None:
            t = self._topic(tx, topic)
            row = tx.execute(
                "SELECT g.id, t.ordered FROM grp g JOIN topic t ON t.id=g.topic WHERE g.topic=?"
                " AND g.name=?",
                (t, group),
            ).get
            if row is None:
                tx.execute("INSERT INTO grp(topic, name) VALUES(?,?)", (t, group))
                return Group(
                    tx.last_insert_rowid(),
                    t,
                    bool(tx.execute("SELECT ordered FROM topic WHERE id=?", (t,)).get),
                )
            known = self._groups[topic, group] = Group(row[0], t, bool(row[1]))
        return known

    # -- publishing --------------------------------------------------------------------------------

    def place_in(self, tx: Tx, batch: Sequence[Out]) -> list[tuple[Published, int]]:
        answers: list[tuple[Published, int]] = []
        now = self.clock.now()
        topics: dict[str, tuple[int, list[tuple[int, bool]], int | None]] = {}
        added: dict[int, list[int]] = {}
        keys: dict[tuple[int, int, str], int] = defaultdict(int)
        for m in batch:
            if m.topic not in topics:
                t = self._topic(tx, m.topic)
                limit, ordered = tx.execute(
                    "SELECT max_depth, ordered FROM topic WHERE id=?", (t,)
                ).get
                groups = [
                    (g, bool(ordered))
                    for (g,) in tx.execute("SELECT id FROM grp WHERE topic=?", (t,))
                ]
                room = (
                    None
                    if limit is None
                    else limit
                    - (
                        tx.execute(
                            "SELECT max(ready+leased+delayed) FROM grp WHERE topic=?", (t,)
                        ).get
                        or 0
                    )
                )
                topics[m.topic] = (t, groups, room)
            t, groups, room = topics[m.topic]
            if room is not None:
                if room <= 0:
                    answers.append((Published.FULL, 0))
                    continue
                topics[m.topic] = (t, groups, room - 1)
            headers = msgspec.json.encode(m.headers).decode() if m.headers else None
            rank = class_of(m.priority)
            tx.execute(
                "INSERT INTO message(topic, id, key, prio, headers, body, at)"
                " VALUES(?,?,?,?,?,?,?)",
                (t, m.id, m.key, rank, headers, m.body, now),
            )
            seq = tx.last_insert_rowid()
            later = m.not_before > now
            for g, ordered in groups:
                prio = ORDERED_CLASS if ordered else rank
                tx.execute(
                    "INSERT INTO queue(grp, seq, prio, key, state, at) VALUES(?,?,?,?,?,?)",
                    (
                        g,
                        seq,
                        prio,
                        m.key,
                        DELAYED if later else READY,
                        m.not_before if later else 0.0,
                    ),
                )
                counts = added.setdefault(g, [0, 0])
                counts[later] += 1
                if not later:
                    keys[g, prio, m.key] += 1
            answers.append((Published.OK, seq))
        for g, (ready, delayed) in added.items():
            tx.execute(
                "UPDATE grp SET ready=ready+?, delayed=delayed+? WHERE id=?", (ready, delayed, g)
            )
        self._add_ready(tx, keys)
        return answers

    def _add_ready(self, tx: Tx, keys: Mapping[tuple[int, int, str], int]) -> None:
        if keys:
            # A new key is placed behind the waiting keys. Otherwise a stream of new keys would
            # starve them.
            now = self.clock.now()
            tx.executemany(
                "INSERT INTO keyq(grp, prio, key, ready, next_at) VALUES(?,?,?,?,?)"
                " ON CONFLICT DO UPDATE SET ready=ready+excluded.ready",
                [(g, p, k, n, now) for (g, p, k), n in keys.items()],
            )

    def wake(self, topics: Iterable[str]) -> None:
        """Wake the waiting receivers of this process. Other processes poll."""
        for topic in set(topics):
            for event in self._receivers.get(topic, ()):
                event.set()

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        return SqliteSubscription(self, topic, group, owner, lease)

    def has_work(self, tx: Tx, topic: str, group: str) -> bool:
        """Return True if a message may be ready now. Reads only, in O(log n)."""
        g = self._groups.get((topic, group))
        if g is None:
            return True
        now = self.clock.now()
        found = tx.execute(
            """SELECT (SELECT paused FROM topic WHERE id=?) IS NULL AND (
                 EXISTS(SELECT 1 FROM keyq WHERE grp=?2 AND prio=0 AND ready>0 AND next_at<=?3)
              OR EXISTS(SELECT 1 FROM keyq WHERE grp=?2 AND prio=1 AND ready>0 AND next_at<=?3)
              OR EXISTS(SELECT 1 FROM keyq WHERE grp=?2 AND prio=2 AND ready>0 AND next_at<=?3)
              OR EXISTS(SELECT 1 FROM queue WHERE grp=?2 AND state=1 AND at<=?3) OR EXISTS(SELECT 1
                  FROM queue WHERE grp=?2 AND state=2 AND at<=?3))""",
            (g.topic, g.id, now),
        ).get
        return bool(found)

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
        g = self._group(tx, topic, group)
        if tx.execute("SELECT paused FROM topic WHERE id=?", (g.topic,)).get is not None:
            return []
        now = self.clock.now()
        self._requeue_due(tx, g, now)
        keys = [
            tx.execute(
                "SELECT key, ready FROM keyq WHERE grp=? AND prio=? AND ready>0 AND next_at<=?"
                " ORDER BY next_at LIMIT ?",
                (g.id, prio, now, limit),
            ).fetchall()
            for prio in CLASSES
        ]
        allotted = allot(keys, self._requested[g.id], limit, 1 if g.ordered else per_key or limit)
        self._requested[g.id] += limit
        if not allotted:
            return []
        picked: list[tuple[int, int, str, str, str | None, bytes, int]] = []
        for (prio, key), n in allotted.items():
            picked += tx.execute(
                "SELECT q.prio, q.seq, q.key, m.id, m.headers, m.body, q.deliveries"
                " FROM queue q INDEXED BY queue_ready JOIN message m ON m.seq=q.seq"
                " WHERE q.grp=? AND q.prio=? AND q.key=? AND q.state=0 ORDER BY q.seq LIMIT ?",
                (g.id, prio, key, n),
            ).fetchall()
        # Messages published together are near each other in every table. In this order, a batch
        # touches few database pages.
        picked.sort()
        token = tx.execute("UPDATE token SET n=n+1 RETURNING n").get
        tx.execute(
            "UPDATE queue SET state=1, at=?, owner=?, token=?, deliveries=deliveries+1 WHERE grp=?"
            " AND seq IN (SELECT value FROM json_each(?))",
            (now + lease, owner, token, g.id, str([seq for _, seq, *_ in picked])),
        )
        tx.executemany(
            "UPDATE keyq SET ready=ready-?, next_at=? WHERE grp=? AND prio=? AND key=?",
            [
                (n, NEVER if g.ordered else now, g.id, prio, key)
                for (prio, key), n in allotted.items()
            ],
        )
        tx.execute(
            "UPDATE grp SET ready=ready-?1, leased=leased+?1 WHERE id=?2", (len(picked), g.id)
        )
        return [
            Delivery(
                topic=topic,
                group=group,
                id=id_,
                key=key,
                body=body,
                headers=msgspec.json.decode(headers) if headers else {},
                position=seq,
                token=token,
                deliveries=before + 1,
            )
            for _, seq, key, id_, headers, body, before in picked
        ]

    def _requeue_due(self, tx: Tx, g: Group, now: float) -> None:
        """Make delayed messages ready that are due, and leased messages whose lease expired."""
        for state, counter in ((DELAYED, "delayed"), (LEASED, "leased")):
            # The state is part of the SQL text: SQLite uses a partial index only if the query
            # repeats its condition.
            rows = tx.execute(
                f"SELECT seq, prio, key, deliveries FROM queue WHERE grp=? AND state={state}"
                f" AND at<=? ORDER BY at LIMIT 1000",
                (g.id, now),
            ).fetchall()
            if rows:
                self._make_ready(tx, g, rows, counter)

    def _make_ready(
        self, tx: Tx, g: Group, rows: Sequence[tuple[int, int, str, int]], counter: str
    ) -> None:
        tx.executemany(
            "UPDATE queue SET state=0, at=0, owner=NULL, token=0 WHERE grp=? AND seq=?",
            [(g.id, seq) for seq, *_ in rows],
        )
        keys: dict[tuple[int, int, str], int] = defaultdict(int)
        for _, prio, key, _ in rows:
            keys[g.id, prio, key] += 1
        self._add_ready(tx, keys)
        # Unlock a key only for a message that was delivered. A message that was only delayed must
        # not unlock the key: another message of that key may be leased.
        if g.ordered:
            self._unlock(tx, [(g.id, prio, key) for _, prio, key, deliveries in rows if deliveries])
        tx.execute(
            f"UPDATE grp SET ready=ready+?1, {counter}={counter}-?1 WHERE id=?2", (len(rows), g.id)
        )

    def _unlock(self, tx: Tx, keys: Iterable[tuple[int, int, str]]) -> None:
        now = self.clock.now()
        tx.executemany(
            "UPDATE keyq SET next_at=? WHERE grp=? AND prio=? AND key=?", [(now, *k) for k in keys]
        )

    def hold_in(self, tx: Tx, topic: str, group: str, until: Mapping[str, float]) -> None:
        g = self._group(tx, topic, group)
        tx.executemany(  # also inserts keys and priority classes that have no messages yet
            "INSERT INTO keyq(grp, prio, key, ready, next_at) VALUES(?,?,?,0,?)"
            " ON CONFLICT DO UPDATE SET next_at=max(next_at, excluded.next_at)",
            [(g.id, prio, key, at) for key, at in until.items() for prio in CLASSES],
        )

    def reclaim_in(self, tx: Tx, owner: str) -> list[str]:
        """End the leases of a worker that has stopped. Return the ids of its messages."""
        ids: list[str] = []
        for gid, topic, ordered in tx.execute(
            "SELECT g.id, g.topic, t.ordered FROM grp g JOIN topic t ON t.id=g.topic"
            " WHERE g.leased>0"
        ).fetchall():
            rows = tx.execute(
                "SELECT q.seq, q.prio, q.key, q.deliveries, m.id FROM queue q"
                " JOIN message m ON m.seq=q.seq WHERE q.grp=? AND q.state=1 AND q.owner=?",
                (gid, owner),
            ).fetchall()
            if rows:
                self._make_ready(
                    tx, Group(gid, topic, bool(ordered)), [r[:4] for r in rows], "leased"
                )
                ids += [r[4] for r in rows]
        return ids

    def holds_in(self, tx: Tx, deliveries: Sequence[Delivery]) -> list[bool]:
        """Return for each delivery whether its lease is still valid."""
        held: dict[int, set[int]] = {}
        for token, (g, positions) in self._by_lease(tx, deliveries).items():
            held_now = (
                "SELECT json_group_array(q.seq) FROM json_each(?) CROSS JOIN queue q ON"
                " q.grp=? AND q.seq=value WHERE q.token=? AND q.state=1"
            )
            held[token] = set(
                msgspec.json.decode(tx.execute(held_now, (str(positions), g.id, token)).get)
            )
        return [d.position in held[d.token] for d in deliveries]

    def _by_lease(
        self, tx: Tx, deliveries: Iterable[Delivery]
    ) -> dict[int, tuple[Group, list[int]]]:
        """Group deliveries by lease token. Return the group and the positions of each token.

        Messages that were received together have the same token.
        """
        by_token: dict[int, tuple[Group, list[int]]] = {}
        for d in deliveries:
            if d.token not in by_token:
                by_token[d.token] = self._group(tx, d.topic, d.group), []
            by_token[d.token][1].append(d.position)
        return by_token

    # -- settling ----------------------------------------------------------------------------------

    def settle_in(self, tx: Tx, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        if all(type(outcome) is Ack for _, outcome in items) and self._ack(
            tx, [d for d, _ in items]
        ):
            return [True] * len(items)
        now = self.clock.now()
        answers: list[bool] = []
        deltas: dict[Group, list[int]] = {}  # changes of ready, leased and delayed
        keys: dict[tuple[int, int, str], int] = defaultdict(int)
        unlock: list[tuple[int, int, str]] = []
        for d, outcome in items:
            g = self._group(tx, d.topic, d.group)
            match outcome:
                case Ack() | Dead():
                    tx.execute(
                        "DELETE FROM queue WHERE grp=? AND seq=? AND token=? AND state=1",
                        (g.id, d.position, d.token),
                    )
                    delta = (0, -1, 0)
                case Retry(delay=delay):
                    tx.execute(
                        "UPDATE queue SET state=2, at=?, owner=NULL, token=0 WHERE grp=? AND seq=?"
                        " AND token=? AND state=1",
                        (now + delay, g.id, d.position, d.token),
                    )
                    delta = (0, -1, 1)
                case Release():
                    tx.execute(
                        "UPDATE queue SET state=0, at=0, owner=NULL, token=0,"
                        " deliveries=deliveries-1 WHERE grp=? AND seq=? AND token=? AND state=1",
                        (g.id, d.position, d.token),
                    )
                    delta = (1, -1, 0)
            applied = tx.changes() == 1
            answers.append(applied)
            if not applied:
                continue
            sums = deltas.setdefault(g, [0, 0, 0])
            for i in range(3):
                sums[i] += delta[i]
            if isinstance(outcome, Release):
                prio = tx.execute(
                    "SELECT prio FROM queue WHERE grp=? AND seq=?", (g.id, d.position)
                ).get
                keys[g.id, prio, d.key] += 1
            if isinstance(outcome, Dead):
                copy = dead_copy(d, outcome.reason)
                self.publish_in(tx, [copy])
                tx.execute("UPDATE topic SET letters=letters+1 WHERE name=?", (copy.topic,))
            # A retry keeps its key locked: the next message of the key waits for it.
            if g.ordered and not isinstance(outcome, Retry):
                unlock.append((g.id, ORDERED_CLASS, d.key))
        for g, (ready, leased, delayed) in deltas.items():
            tx.execute(
                "UPDATE grp SET ready=ready+?, leased=leased+?, delayed=delayed+? WHERE id=?",
                (ready, leased, delayed, g.id),
            )
        self._add_ready(tx, keys)
        self._unlock(tx, unlock)
        return answers

    def extend_in(
        self, tx: Tx, topic: str, group: str, deliveries: Sequence[Delivery], until: float
    ) -> list[bool]:
        g = self._group(tx, topic, group)
        answers = []
        for d in deliveries:
            tx.execute(
                "UPDATE queue SET at=? WHERE grp=? AND seq=? AND token=? AND state=1",
                (until, g.id, d.position, d.token),
            )
            answers.append(tx.changes() == 1)
        return answers

    def _ack(self, tx: Tx, deliveries: Sequence[Delivery]) -> bool:
        """Ack all deliveries. Return False if a lease was lost. Then none is acked."""
        tx.execute("SAVEPOINT ack")
        by_token = self._by_lease(tx, deliveries)
        for token, (g, positions) in by_token.items():
            tx.execute(
                "DELETE FROM queue WHERE grp=? AND token=? AND state=1 AND seq IN (SELECT value"
                " FROM json_each(?))",
                (g.id, token, str(positions)),
            )
            if tx.changes() < len(positions):
                tx.execute("ROLLBACK TO ack; RELEASE ack")
                return False
        tx.execute("RELEASE ack")
        for g, positions in by_token.values():
            tx.execute("UPDATE grp SET leased=leased-? WHERE id=?", (len(positions), g.id))
        if any(g.ordered for g, _ in by_token.values()):
            self._unlock(
                tx,
                [
                    (by_token[d.token][0].id, ORDERED_CLASS, d.key)
                    for d in deliveries
                    if by_token[d.token][0].ordered
                ],
            )
        return True

    # -- reports and operator commands -------------------------------------------------------------

    def _figures(self, tx: Tx, topic: str, group: str) -> tuple[int, int, int, float | None]:
        row = tx.execute(
            "SELECT g.id, g.ready, g.leased, g.delayed FROM grp g JOIN topic t ON t.id=g.topic"
            " WHERE t.name=? AND g.name=?",
            (topic, group),
        ).get
        if row is None:
            return 0, 0, 0, None
        oldest = tx.execute(
            "SELECT m.at FROM queue q JOIN message m ON m.seq=q.seq WHERE q.grp=? ORDER BY q.seq"
            " LIMIT 1",
            (row[0],),
        ).get
        return row[1], row[2], row[3], oldest

    def _waiting(
        self, tx: Tx, topic: str, limit: int
    ) -> Iterable[tuple[str, str, bytes, str | None, int, float]]:
        return tx.execute(
            "SELECT m.id, m.key, m.body, m.headers, m.prio, coalesce((SELECT min(at) FROM queue q"
            " WHERE q.seq=m.seq AND q.state=2), 0.0) FROM message m"
            " JOIN topic t ON t.id=m.topic WHERE t.name=? AND (EXISTS(SELECT 1 FROM grp g"
            " JOIN queue q ON q.grp=g.id AND q.seq=m.seq WHERE g.topic=t.id)"
            " OR NOT EXISTS(SELECT 1 FROM grp g WHERE g.topic=t.id)) ORDER BY m.seq LIMIT ?",
            (topic, limit),
        )

    def _noted(self, tx: Tx) -> Iterable[tuple[str, str, int, int, int, int]]:
        return tx.execute(
            "SELECT t.name, g.name, g.id, g.ready, g.leased, g.delayed FROM grp g"
            " JOIN topic t ON t.id=g.topic ORDER BY 1, 2"
        ).fetchall()

    def purge_in(self, tx: Tx, topic: str) -> int:
        t = self._topic(tx, topic)
        deleted = tx.execute(
            "SELECT count(*) FROM message WHERE topic=?1 AND seq NOT IN (SELECT seq FROM queue"
            " WHERE state=1)",
            (t,),
        ).get
        tx.execute(
            "DELETE FROM queue WHERE state<>1 AND grp IN (SELECT id FROM grp WHERE topic=?)", (t,)
        )
        tx.execute("DELETE FROM keyq WHERE grp IN (SELECT id FROM grp WHERE topic=?)", (t,))
        tx.execute("DELETE FROM message WHERE topic=? AND seq NOT IN (SELECT seq FROM queue)", (t,))
        tx.execute("UPDATE grp SET ready=0, delayed=0 WHERE topic=?", (t,))
        tx.execute("UPDATE topic SET letters=0 WHERE id=?", (t,))
        return int(deleted)

    def depths_in(
        self,
        tx: Tx,
        topic: str,
        group: str,
        keys: Sequence[str] | None = None,
        *,
        limit: int = 1000,
    ) -> dict[str, int]:
        """Return the number of ready messages by key: of `keys`, or of the `limit` deepest keys."""
        g = self._group(tx, topic, group)
        if keys is None:
            return dict(
                tx.execute(
                    "SELECT key, sum(ready) AS n FROM keyq WHERE grp=? AND ready>0 GROUP BY key"
                    " ORDER BY n DESC, key LIMIT ?",
                    (g.id, limit),
                ).fetchall()
            )
        total = (
            "SELECT coalesce(sum(ready), 0) FROM keyq WHERE grp=? AND prio BETWEEN 0 AND ?"
            " AND key=?"
        )
        return {key: tx.execute(total, (g.id, LOWEST, key)).get for key in keys}

    def hasten_in(self, tx: Tx, topic: str, group: str, key: str, positions: Sequence[int]) -> None:
        """End the hold of a key, and make these delayed messages of the key due now."""
        g, now = self._group(tx, topic, group), self.clock.now()
        tx.executemany(
            "UPDATE keyq SET next_at=? WHERE grp=? AND prio=? AND key=? AND next_at>?1",
            [(now, g.id, prio, key) for prio in CLASSES],
        )
        tx.executemany(
            "UPDATE queue SET at=? WHERE grp=? AND seq=? AND state=2 AND at>?1",
            [(now, g.id, seq) for seq in positions],
        )

    def pause_in(self, tx: Tx, topic: str, reason: str | None) -> bool:
        """Pause a topic, or resume it if `reason` is None. Return False if it does not exist."""
        tx.execute("UPDATE topic SET paused=? WHERE name=?", (reason, topic))
        return tx.changes() == 1

    def running_in(self, tx: Tx, limit: int) -> dict[str, int]:
        """Return how many deliveries each worker holds. Reads at most `limit` leases of a group.

        A group never has more leases than the sum of the fleet's prefetch windows.
        """
        held: Counter[str] = Counter()
        for (group,) in tx.execute("SELECT id FROM grp WHERE leased>0").fetchall():
            held.update(
                owner
                for (owner,) in tx.execute(
                    "SELECT owner FROM queue WHERE grp=? AND state=1 LIMIT ?", (group, limit)
                )
            )
        return dict(held)

    def leased_in(self, tx: Tx, limit: int) -> list[str]:
        """Return the ids of leased messages."""
        leased = (
            "SELECT m.id FROM queue q JOIN message m ON m.seq=q.seq WHERE q.state=1"
            " AND q.grp IN (SELECT id FROM grp WHERE leased>0) LIMIT ?"
        )
        return [id_ for (id_,) in tx.execute(leased, (limit,))]

    def oldest_in(self, tx: Tx, limit: int) -> float | None:
        """Return when the oldest message that is ready or leased was published.

        If the first `limit` messages are all delayed, use the oldest of them.
        """
        found: float | None = None
        for (group,) in tx.execute(
            "SELECT g.id FROM grp g JOIN topic t ON t.id=g.topic WHERE g.name='main'"
            " AND g.ready+g.leased>0"
        ).fetchall():
            rows = tx.execute(
                "SELECT seq, state FROM queue WHERE grp=? ORDER BY seq LIMIT ?", (group, limit)
            ).fetchall()
            seq = next(
                (seq for seq, state in rows if state != DELAYED), rows[0][0] if rows else None
            )
            at = (
                None
                if seq is None
                else tx.execute("SELECT at FROM message WHERE seq=?", (seq,)).get
            )
            if at is not None and (found is None or at < found):
                found = at
        return found

    # -- history -----------------------------------------------------------------------------------

    def replay_in(self, tx: Tx, topic: str, group: str, since: float) -> int:
        g = self._group(tx, topic, group)
        prio = ORDERED_CLASS if g.ordered else None
        rows = tx.execute(
            "SELECT seq, coalesce(?, prio), key FROM message m WHERE topic=? AND at>=?"
            " AND NOT EXISTS(SELECT 1 FROM queue q WHERE q.grp=? AND q.seq=m.seq)",
            (prio, g.topic, since, g.id),
        ).fetchall()
        tx.executemany(
            "INSERT INTO queue(grp, seq, prio, key, state) VALUES(?,?,?,?,0)",
            [(g.id, *r) for r in rows],
        )
        keys: dict[tuple[int, int, str], int] = defaultdict(int)
        for _, p, key in rows:
            keys[g.id, p, key] += 1
        self._add_ready(tx, keys)
        tx.execute("UPDATE grp SET ready=ready+? WHERE id=?", (len(rows), g.id))
        return len(rows)

    def prune_in(self, tx: Tx, limit: int = 2000) -> int:
        """Delete messages older than the retention that all groups have settled.

        Each call handles a limited number of messages.
        """
        now = self.clock.now()
        keep: dict[int, float] = dict(tx.execute("SELECT id, retention FROM topic").fetchall())
        youngest = now - min(keep.values(), default=0.0)
        rows = tx.execute(
            "SELECT seq, topic, at FROM message WHERE seq>? ORDER BY seq LIMIT ?",
            (self._pruned, 4 * limit),
        ).fetchall()
        deleted = []
        self._pruned = rows[-1][0] if len(rows) == 4 * limit else 0
        for seq, topic, at in rows:
            if at > youngest:  # messages are in order of time, so the next ones are newer
                self._pruned = 0
                break
            if (
                at < now - keep[topic]
                and tx.execute(
                    "SELECT 1 FROM grp g JOIN queue q ON q.grp=g.id AND q.seq=? WHERE g.topic=?",
                    (seq, topic),
                ).get
                is None
            ):
                deleted.append((seq, topic))
        tx.executemany("DELETE FROM message WHERE seq=?", [(seq,) for seq, _ in deleted])
        tx.executemany(
            "UPDATE topic SET letters=letters-1 WHERE id=? AND letters>0",
            [(topic,) for _, topic in deleted],
        )
        n = len(deleted)
        tx.execute(
            "DELETE FROM keyq WHERE (grp, prio, key) IN (SELECT grp, prio, key FROM keyq"
            " WHERE ready<=0 AND next_at<? LIMIT ?)",
            (self.clock.now() - 60, limit),
        )
        return n

    async def close(self) -> None:
        """Do nothing: the caller that opened the database closes it."""


class SqliteSubscription(SqlSubscription):
    def __init__(
        self, broker: SqliteBroker, topic: str, group: str, owner: str, lease: float
    ) -> None:
        super().__init__(broker, topic, group, owner, lease)
        self.broker = broker
        self._wake = asyncio.Event()
        self._expects_more = False
        broker._receivers[topic].append(self._wake)

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        b = self.broker
        until = b.clock.now() + wait
        while True:
            self._wake.clear()
            if self._expects_more or await b.db.read(
                lambda tx: b.has_work(tx, self.topic, self.group)
            ):
                got = await b.db.write(
                    lambda tx: b.receive_in(
                        tx,
                        self.topic,
                        self.group,
                        limit,
                        owner=self.owner,
                        lease=self.lease,
                        per_key=per_key,
                    ),
                    durable=False,
                )
                # After a full batch there are probably more messages. Then the next call does not
                # check first.
                self._expects_more = len(got) == limit
                if got:
                    return got
            left = until - b.clock.now()
            if left <= 0:
                return []
            await self._pause(min(left, POLL_INTERVAL))

    async def close(self) -> None:
        receivers = self.broker._receivers[self.topic]
        if self._wake in receivers:
            receivers.remove(self._wake)


def open_broker(url: str, context: Context) -> SqliteBroker:
    return SqliteBroker(context.database(url), context.clock)
