"""What the PostgreSQL broker says about itself: figures, what waits, who holds what. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.brokers import postgres_sql as sql
from penstock.ports import Clock, Out, QueueAudit, Stats
from penstock.stores.postgres import PostgresStore
from penstock.stores.postgres_arrays import texts
from penstock.stores.sql import Tx


class Group(msgspec.Struct, frozen=True):
    id: int
    topic: int
    ordered: bool


class Figures:
    """The looking half of the broker; methods that end in `_in` run inside a caller's transaction."""

    db: PostgresStore
    clock: Clock

    def _group(self, tx: Tx, topic: str, group: str) -> Group:
        raise NotImplementedError

    async def stats(self, topic: str, group: str) -> Stats:
        return await self.db.read(lambda tx: self.stats_in(tx, topic, group))

    def stats_in(self, tx: Tx, topic: str, group: str) -> Stats:
        ready, leased, delayed = tx.execute(
            f"SELECT {sql.SUMS} FROM topic t JOIN grp g ON g.topic=t.id JOIN keyq k ON k.grp=g.id WHERE t.name=? AND g.name=?", (topic, group)
        ).get
        oldest = tx.execute(
            "SELECT m.at FROM topic t JOIN grp g ON g.topic=t.id JOIN LATERAL (SELECT seq FROM queue WHERE grp=g.id ORDER BY seq LIMIT 1) q ON true"
            " JOIN message m ON m.seq=q.seq WHERE t.name=? AND g.name=?",
            (topic, group),
        ).get
        dead = tx.execute("SELECT letters FROM topic WHERE name=?", (topic + ".dead",)).get or 0
        age = None if oldest is None else max(0.0, self.clock.now() - oldest)
        return Stats(ready=ready, delayed=delayed, in_flight=leased, dead=dead, oldest_age=age, exact=True)

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        return await self.db.read(lambda tx: self.peek_in(tx, topic, limit))

    def peek_in(self, tx: Tx, topic: str, limit: int) -> list[Out]:
        rows = tx.execute(
            "SELECT m.id, m.key, m.body, m.headers, m.prio, coalesce((SELECT min(q.at) FROM grp g JOIN queue q ON q.grp=g.id AND q.seq=m.seq"
            " WHERE g.topic=t.id AND q.state=2), 0.0) FROM topic t JOIN message m ON m.topic=t.id WHERE t.name=? AND ("
            " EXISTS(SELECT 1 FROM grp g JOIN queue q ON q.grp=g.id AND q.seq=m.seq WHERE g.topic=t.id OFFSET 0)"
            " OR NOT EXISTS(SELECT 1 FROM grp g WHERE g.topic=t.id))"
            " ORDER BY m.seq LIMIT ?",
            (topic, limit),
        )
        return [
            Out(topic=topic, id=id_, key=key, body=body, headers=msgspec.json.decode(headers) if headers else {}, priority=prio, not_before=at)
            for id_, key, body, headers, prio, at in rows
        ]

    def groups_in(self, tx: Tx) -> list[tuple[str, str]]:
        """(topic, group) of everything that is handed out."""
        return tx.execute("SELECT t.name, g.name FROM topic t JOIN grp g ON g.topic=t.id ORDER BY t.name, g.name").fetchall()

    def depths_in(self, tx: Tx, topic: str, group: str, keys: Sequence[str] | None = None, *, limit: int = 1000) -> dict[str, int]:
        """What is ready, by key: of these keys, or of those with most."""
        g = self._group(tx, topic, group)
        if keys is None:
            most = "SELECT key, sum(ready)::bigint AS n FROM keyq WHERE grp=? AND ready>0 GROUP BY key ORDER BY n DESC, key LIMIT ?"
            return dict(tx.execute(most, (g.id, limit)).fetchall())
        asked = "SELECT key, sum(ready)::bigint FROM keyq WHERE grp=? AND prio BETWEEN 0 AND 2 AND key=ANY(?::text[]) GROUP BY key"
        found: dict[str, int] = dict(tx.execute(asked, (g.id, texts(keys))).fetchall())
        return {key: found.get(key, 0) for key in keys}

    def paused_in(self, tx: Tx) -> dict[str, str]:
        """Topic → why."""
        return dict(tx.execute("SELECT name, paused FROM topic WHERE paused IS NOT NULL").fetchall())

    def running_in(self, tx: Tx, limit: int) -> dict[str, int]:
        """How many deliveries each worker holds, looking at `limit` of a group; there are never more than the fleet's windows together."""
        held = "SELECT owner, count(*) FROM grp g JOIN LATERAL (SELECT owner FROM queue WHERE grp=g.id AND state=1 LIMIT ?) q ON true GROUP BY owner"
        return dict(tx.execute(held, (limit,)).fetchall())

    def leased_in(self, tx: Tx, limit: int) -> list[str]:
        """The ids of what is handed out."""
        leased = "SELECT m.id FROM queue q JOIN message m ON m.seq=q.seq WHERE q.state=1 AND q.grp IN (SELECT id FROM grp) LIMIT ?"
        return [id_ for (id_,) in tx.execute(leased, (limit,))]

    def oldest_in(self, tx: Tx, limit: int) -> float | None:
        """When the oldest message that is ready or leased was queued; behind more than `limit` delayed ones, the oldest of these."""
        found: float | None = tx.execute(
            "SELECT min(m.at) FROM grp g JOIN LATERAL (SELECT coalesce(min(seq) FILTER (WHERE state<>2), min(seq)) AS seq FROM"
            " (SELECT seq, state FROM queue WHERE grp=g.id ORDER BY seq LIMIT ?) s) o ON true JOIN message m ON m.seq=o.seq"
            " WHERE g.name='main' AND EXISTS(SELECT 1 FROM keyq k WHERE k.grp=g.id AND k.ready+k.leased>0)",
            (limit,),
        ).get
        return found

    def audit_in(self, tx: Tx, now: float) -> QueueAudit:
        groups = []
        noted = tx.execute(
            f"SELECT t.name, g.name, {sql.SUMS} FROM topic t JOIN grp g ON g.topic=t.id LEFT JOIN keyq k ON k.grp=g.id"
            " GROUP BY t.name, g.name ORDER BY t.name, g.name"
        ).fetchall()
        for topic, group, ready, leased, delayed in noted:
            counted: dict[int, int] = dict(
                tx.execute("SELECT state, count(*) FROM queue WHERE grp=? GROUP BY state", (self._group(tx, topic, group).id,)).fetchall()
            )
            groups.append((topic, group, (ready, leased, delayed), (counted.get(0, 0), counted.get(1, 0), counted.get(2, 0))))
        open_ = "SELECT id FROM event WHERE status IN ('pending','delayed','in_flight','writing')"
        queued = "SELECT m.id FROM queue q JOIN message m ON m.seq=q.seq WHERE q.grp IN (SELECT id FROM grp WHERE name='main')"
        unqueued = [id_ for (id_,) in tx.execute(f"{open_} EXCEPT {queued}")]
        return QueueAudit(
            unqueued=unqueued[:5],
            unqueued_count=len(unqueued),
            lingering_count=int(tx.execute(f"SELECT count(*) FROM ({queued} EXCEPT {open_}) s").get),
            groups=groups,
            expired=int(tx.execute("SELECT count(*) FROM queue WHERE state=1 AND at<?", (now,)).get),
        )
