"""Messages of the embedded broker inside one transaction: publish, receive and settle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.brokers.dead_copies import dead_copy
from penstock.brokers.sql import DELAYED, LEASED, NEVER, ORDERED_CLASS, READY, Group
from penstock.brokers.sqlite.reports import SqliteReports
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Delivery, Out, Published
from penstock.rules.handout import allot
from penstock.rules.priority import WEIGHTS, class_of

CLASSES = range(len(WEIGHTS))


class SqliteQueue(SqliteReports):
    """Implements the queue in one transaction."""

    # -- publishing --------------------------------------------------------------------------------

    def enqueue(self, batch: Sequence[Out]) -> list[tuple[Published, int]]:
        answers: list[tuple[Published, int]] = []
        now = self.clock.now()
        topics: dict[str, tuple[int, list[tuple[int, bool]], int | None]] = {}
        added: dict[int, list[int]] = {}
        keys: Counter[tuple[int, int, str]] = Counter()
        for m in batch:
            if m.topic not in topics:
                t = self.topic(m.topic).id
                limit, ordered = self.tx.execute(
                    "SELECT max_depth, ordered FROM topic WHERE id=?", (t,)
                ).get
                groups = [
                    (g, bool(ordered))
                    for (g,) in self.tx.execute("SELECT id FROM grp WHERE topic=?", (t,))
                ]
                deepest = "SELECT max(ready+leased+delayed) FROM grp WHERE topic=?"
                room = None if limit is None else limit - (self.tx.execute(deepest, (t,)).get or 0)
                topics[m.topic] = (t, groups, room)
            t, groups, room = topics[m.topic]
            if room is not None:
                if room <= 0:
                    answers.append((Published.FULL, 0))
                    continue
                topics[m.topic] = (t, groups, room - 1)
            headers = msgspec.json.encode(m.headers).decode() if m.headers else None
            rank = class_of(m.priority)
            self.tx.execute(
                "INSERT INTO message(topic, id, key, prio, headers, body, at)"
                " VALUES(?,?,?,?,?,?,?)",
                (t, m.id, m.key, rank, headers, m.body, now),
            )
            seq = self.tx.last_insert_rowid()
            later = m.not_before > now
            for g, ordered in groups:
                prio = ORDERED_CLASS if ordered else rank
                self.tx.execute(
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
                added.setdefault(g, [0, 0])[later] += 1
                if not later:
                    keys[g, prio, m.key] += 1
            answers.append((Published.OK, seq))
        for g, (ready, delayed) in added.items():
            self.tx.execute(
                "UPDATE grp SET ready=ready+?, delayed=delayed+? WHERE id=?", (ready, delayed, g)
            )
        self._add_ready(keys)
        return answers

    def _add_ready(self, keys: Mapping[tuple[int, int, str], int]) -> None:
        if keys:
            # A new key is placed behind the waiting keys. Otherwise a stream of new keys would
            # starve them.
            now = self.clock.now()
            self.tx.executemany(
                "INSERT INTO keyq(grp, prio, key, ready, next_at) VALUES(?,?,?,?,?)"
                " ON CONFLICT DO UPDATE SET ready=ready+excluded.ready",
                [(g, p, k, n, now) for (g, p, k), n in keys.items()],
            )

    # -- receiving ---------------------------------------------------------------------------------

    def has_work(self, topic: str, group: str) -> bool:
        """Return True if a message may be ready now. Reads only, in O(log n)."""
        self.queue.forget_after_rollback()
        g = self.queue.groups.get((topic, group))
        if g is None:
            return True
        return bool(
            self.tx.execute(
                """SELECT (SELECT paused FROM topic WHERE id=?) IS NULL AND (
                 EXISTS(SELECT 1 FROM keyq WHERE grp=?2 AND prio=0 AND ready>0 AND next_at<=?3)
              OR EXISTS(SELECT 1 FROM keyq WHERE grp=?2 AND prio=1 AND ready>0 AND next_at<=?3)
              OR EXISTS(SELECT 1 FROM keyq WHERE grp=?2 AND prio=2 AND ready>0 AND next_at<=?3)
              OR EXISTS(SELECT 1 FROM queue WHERE grp=?2 AND state=1 AND at<=?3) OR EXISTS(SELECT 1
                  FROM queue WHERE grp=?2 AND state=2 AND at<=?3))""",
                (g.topic, g.id, self.clock.now()),
            ).get
        )

    def receive(
        self,
        topic: str,
        group: str,
        limit: int,
        *,
        owner: str,
        lease: float,
        per_key: int | None = None,
    ) -> list[Delivery]:
        g = self.group(topic, group)
        if self.tx.execute("SELECT paused FROM topic WHERE id=?", (g.topic,)).get is not None:
            return []
        now = self.clock.now()
        self._requeue_due(g, now)
        keys = [
            self.tx.execute(
                "SELECT key, ready FROM keyq WHERE grp=? AND prio=? AND ready>0 AND next_at<=?"
                " ORDER BY next_at LIMIT ?",
                (g.id, prio, now, limit),
            ).fetchall()
            for prio in CLASSES
        ]
        allotted = allot(
            keys, self.queue.requested[g.id], limit, 1 if g.ordered else per_key or limit
        )
        self.queue.requested[g.id] += limit
        if not allotted:
            return []
        picked: list[tuple[int, int, str, str, str | None, bytes, int]] = []
        for (prio, key), n in allotted.items():
            picked += self.tx.execute(
                "SELECT q.prio, q.seq, q.key, m.id, m.headers, m.body, q.deliveries"
                " FROM queue q INDEXED BY queue_ready JOIN message m ON m.seq=q.seq"
                " WHERE q.grp=? AND q.prio=? AND q.key=? AND q.state=0 ORDER BY q.seq LIMIT ?",
                (g.id, prio, key, n),
            ).fetchall()
        # Messages published together are near each other in every table. In this order, a batch
        # touches few database pages.
        picked.sort()
        token = self.tx.execute("UPDATE token SET n=n+1 RETURNING n").get
        self.tx.execute(
            "UPDATE queue SET state=1, at=?, owner=?, token=?, deliveries=deliveries+1 WHERE grp=?"
            " AND seq IN (SELECT value FROM json_each(?))",
            (now + lease, owner, token, g.id, str([seq for _, seq, *_ in picked])),
        )
        self.tx.executemany(
            "UPDATE keyq SET ready=ready-?, next_at=? WHERE grp=? AND prio=? AND key=?",
            [
                (n, NEVER if g.ordered else now, g.id, prio, key)
                for (prio, key), n in allotted.items()
            ],
        )
        self.tx.execute(
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
                priority=prio,
            )
            for prio, seq, key, id_, headers, body, before in picked
        ]

    def _requeue_due(self, g: Group, now: float) -> None:
        """Make delayed messages ready that are due, and leased messages whose lease expired."""
        for state, counter in ((DELAYED, "delayed"), (LEASED, "leased")):
            # The state is part of the SQL text: SQLite uses a partial index only if the query
            # repeats its condition.
            rows = self.tx.execute(
                f"SELECT seq, prio, key, deliveries FROM queue WHERE grp=? AND state={state}"
                f" AND at<=? ORDER BY at LIMIT 1000",
                (g.id, now),
            ).fetchall()
            if rows:
                self._make_ready(g, rows, counter)

    def _make_ready(
        self, g: Group, rows: Sequence[tuple[int, int, str, int]], counter: str
    ) -> None:
        self.tx.executemany(
            "UPDATE queue SET state=0, at=0, owner=NULL, token=0 WHERE grp=? AND seq=?",
            [(g.id, seq) for seq, *_ in rows],
        )
        self._add_ready(Counter((g.id, prio, key) for _, prio, key, _ in rows))
        # Unlock a key only for a message that was delivered. A message that was only delayed must
        # not unlock the key: another message of that key may be leased.
        if g.ordered:
            self._unlock([(g.id, prio, key) for _, prio, key, deliveries in rows if deliveries])
        self.tx.execute(
            f"UPDATE grp SET ready=ready+?1, {counter}={counter}-?1 WHERE id=?2", (len(rows), g.id)
        )

    def _unlock(self, keys: Iterable[tuple[int, int, str]]) -> None:
        now = self.clock.now()
        self.tx.executemany(
            "UPDATE keyq SET next_at=? WHERE grp=? AND prio=? AND key=?", [(now, *k) for k in keys]
        )

    def hold_keys(self, topic: str, group: str, until: Mapping[str, float]) -> None:
        g = self.group(topic, group)
        self.tx.executemany(  # also inserts keys and priority classes that have no messages yet
            "INSERT INTO keyq(grp, prio, key, ready, next_at) VALUES(?,?,?,0,?)"
            " ON CONFLICT DO UPDATE SET next_at=max(next_at, excluded.next_at)",
            [(g.id, prio, key, at) for key, at in until.items() for prio in CLASSES],
        )

    def reclaim(self, worker: str) -> list[str]:
        ids: list[str] = []
        for gid, topic, ordered in self.tx.execute(
            "SELECT g.id, g.topic, t.ordered FROM grp g JOIN topic t ON t.id=g.topic"
            " WHERE g.leased>0"
        ).fetchall():
            rows = self.tx.execute(
                "SELECT q.seq, q.prio, q.key, q.deliveries, m.id FROM queue q"
                " JOIN message m ON m.seq=q.seq WHERE q.grp=? AND q.state=1 AND q.owner=?",
                (gid, worker),
            ).fetchall()
            if rows:
                self._make_ready(Group(gid, topic, bool(ordered)), [r[:4] for r in rows], "leased")
                ids += [r[4] for r in rows]
        return ids

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        held: dict[int, set[int]] = {}
        for token, (g, positions) in self._by_lease(deliveries).items():
            held_now = self.tx.execute(
                "SELECT json_group_array(q.seq) FROM json_each(?) CROSS JOIN queue q ON"
                " q.grp=? AND q.seq=value WHERE q.token=? AND q.state=1",
                (str(positions), g.id, token),
            )
            held[token] = set(msgspec.json.decode(held_now.get))
        return [d.position in held[d.token] for d in deliveries]

    def _by_lease(self, deliveries: Iterable[Delivery]) -> dict[int, tuple[Group, list[int]]]:
        """Group deliveries by lease token. Return the group and the positions of each token.

        Messages that were received together have the same token.
        """
        by_token: dict[int, tuple[Group, list[int]]] = {}
        for d in deliveries:
            if d.token not in by_token:
                by_token[d.token] = self.group(d.topic, d.group), []
            by_token[d.token][1].append(d.position)
        return by_token

    # -- settling ----------------------------------------------------------------------------------

    def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        if all(type(outcome) is Ack for _, outcome in items) and self._ack([d for d, _ in items]):
            return [True] * len(items)
        now = self.clock.now()
        answers: list[bool] = []
        deltas: dict[Group, list[int]] = {}  # changes of ready, leased and delayed
        keys: Counter[tuple[int, int, str]] = Counter()
        unlock: list[tuple[int, int, str]] = []
        for d, outcome in items:
            g = self.group(d.topic, d.group)
            match outcome:
                case Ack() | Dead():
                    self.tx.execute(
                        "DELETE FROM queue WHERE grp=? AND seq=? AND token=? AND state=1",
                        (g.id, d.position, d.token),
                    )
                    delta = (0, -1, 0)
                case Retry(delay=delay):
                    self.tx.execute(
                        "UPDATE queue SET state=2, at=?, owner=NULL, token=0 WHERE grp=? AND seq=?"
                        " AND token=? AND state=1",
                        (now + delay, g.id, d.position, d.token),
                    )
                    delta = (0, -1, 1)
                case Release():
                    self.tx.execute(
                        "UPDATE queue SET state=0, at=0, owner=NULL, token=0,"
                        " deliveries=deliveries-1 WHERE grp=? AND seq=? AND token=? AND state=1",
                        (g.id, d.position, d.token),
                    )
                    delta = (1, -1, 0)
            applied = self.tx.changes() == 1
            answers.append(applied)
            if not applied:
                continue
            sums = deltas.setdefault(g, [0, 0, 0])
            for i in range(3):
                sums[i] += delta[i]
            if isinstance(outcome, Release):
                prio = self.tx.execute(
                    "SELECT prio FROM queue WHERE grp=? AND seq=?", (g.id, d.position)
                ).get
                keys[g.id, prio, d.key] += 1
            if isinstance(outcome, Dead):
                copy = dead_copy(d, outcome.reason)
                self.publish([copy])
                self.tx.execute("UPDATE topic SET letters=letters+1 WHERE name=?", (copy.topic,))
            # A retry keeps its key locked: the next message of the key waits for it.
            if g.ordered and not isinstance(outcome, Retry):
                unlock.append((g.id, ORDERED_CLASS, d.key))
        for g, (ready, leased, delayed) in deltas.items():
            self.tx.execute(
                "UPDATE grp SET ready=ready+?, leased=leased+?, delayed=delayed+? WHERE id=?",
                (ready, leased, delayed, g.id),
            )
        self._add_ready(keys)
        self._unlock(unlock)
        return answers

    def extend(
        self, topic: str, group: str, deliveries: Sequence[Delivery], until: float
    ) -> list[bool]:
        g = self.group(topic, group)
        return self.tx.each(
            "UPDATE queue SET at=? WHERE grp=? AND seq=? AND token=? AND state=1",
            [(until, g.id, d.position, d.token) for d in deliveries],
        )

    def _ack(self, deliveries: Sequence[Delivery]) -> bool:
        """Ack all deliveries. Return False if a lease was lost. Then none is acked."""
        by_token = self._by_lease(deliveries)  # may insert a group, which must stay
        self.tx.execute("SAVEPOINT ack")
        for token, (g, positions) in by_token.items():
            self.tx.execute(
                "DELETE FROM queue WHERE grp=? AND token=? AND state=1 AND seq IN (SELECT value"
                " FROM json_each(?))",
                (g.id, token, str(positions)),
            )
            if self.tx.changes() < len(positions):
                self.tx.execute("ROLLBACK TO ack; RELEASE ack")
                return False
        self.tx.execute("RELEASE ack")
        for g, positions in by_token.values():
            self.tx.execute("UPDATE grp SET leased=leased-? WHERE id=?", (len(positions), g.id))
        self._unlock(
            [
                (g.id, ORDERED_CLASS, d.key)
                for d in deliveries
                if (g := by_token[d.token][0]).ordered
            ]
        )
        return True

    # -- operator commands -------------------------------------------------------------------------

    def purge(self, topic: str) -> int:
        t = self.topic(topic).id
        deleted = self.tx.execute(
            "SELECT count(*) FROM message WHERE topic=?1 AND seq NOT IN (SELECT seq FROM queue"
            " WHERE state=1)",
            (t,),
        ).get
        self.tx.execute(
            "DELETE FROM queue WHERE state<>1 AND grp IN (SELECT id FROM grp WHERE topic=?)", (t,)
        )
        self.tx.execute("DELETE FROM keyq WHERE grp IN (SELECT id FROM grp WHERE topic=?)", (t,))
        self.tx.execute(
            "DELETE FROM message WHERE topic=? AND seq NOT IN (SELECT seq FROM queue)", (t,)
        )
        self.tx.execute("UPDATE grp SET ready=0, delayed=0 WHERE topic=?", (t,))
        self.tx.execute("UPDATE topic SET letters=0 WHERE id=?", (t,))
        return int(deleted)

    def make_due(
        self, topic: str, group: str, key: str, messages: Sequence[tuple[int, int]]
    ) -> None:
        g, now = self.group(topic, group), self.clock.now()
        self.tx.executemany(
            "UPDATE keyq SET next_at=? WHERE grp=? AND prio=? AND key=? AND next_at>?1",
            [(now, g.id, prio, key) for prio in CLASSES],
        )
        self.tx.executemany(
            "UPDATE queue SET at=? WHERE grp=? AND seq=? AND state=2 AND at>?1",
            [(now, g.id, seq) for _, seq in messages],
        )

    # -- history -----------------------------------------------------------------------------------

    def replay(self, topic: str, group: str, since: float) -> int:
        g = self.group(topic, group)
        rows = self.tx.execute(
            "SELECT seq, coalesce(?, prio), key FROM message m WHERE topic=? AND at>=?"
            " AND NOT EXISTS(SELECT 1 FROM queue q WHERE q.grp=? AND q.seq=m.seq)",
            (ORDERED_CLASS if g.ordered else None, g.topic, since, g.id),
        ).fetchall()
        self.tx.executemany(
            "INSERT INTO queue(grp, seq, prio, key, state) VALUES(?,?,?,?,0)",
            [(g.id, *r) for r in rows],
        )
        self._add_ready(Counter((g.id, prio, key) for _, prio, key in rows))
        self.tx.execute("UPDATE grp SET ready=ready+? WHERE id=?", (len(rows), g.id))
        return len(rows)

    def prune(self, limit: int = 2000) -> int:
        """Delete messages older than the retention that all groups have settled.

        Each call handles a limited number of messages.
        """
        now = self.clock.now()
        keep: dict[int, float] = dict(self.tx.execute("SELECT id, retention FROM topic").fetchall())
        youngest = now - min(keep.values(), default=0.0)
        rows = self.tx.execute(
            "SELECT seq, topic, at FROM message WHERE seq>? ORDER BY seq LIMIT ?",
            (self.queue.pruned, 4 * limit),
        ).fetchall()
        deleted = []
        self.queue.pruned = rows[-1][0] if len(rows) == 4 * limit else 0
        for seq, topic, at in rows:
            if at > youngest:  # messages are in order of time, so the next ones are newer
                self.queue.pruned = 0
                break
            if (
                at < now - keep[topic]
                and self.tx.execute(
                    "SELECT 1 FROM grp g JOIN queue q ON q.grp=g.id AND q.seq=? WHERE g.topic=?",
                    (seq, topic),
                ).get
                is None
            ):
                deleted.append((seq, topic))
        self.tx.executemany("DELETE FROM message WHERE seq=?", [(seq,) for seq, _ in deleted])
        self.tx.executemany(
            "UPDATE topic SET letters=letters-1 WHERE id=? AND letters>0",
            [(topic,) for _, topic in deleted],
        )
        self.tx.execute(
            "DELETE FROM keyq WHERE (grp, prio, key) IN (SELECT grp, prio, key FROM keyq"
            " WHERE ready<=0 AND next_at<? LIMIT ?)",
            (now - 60, limit),
        )
        return len(deleted)
