"""Reports of the PostgreSQL broker: counts, waiting messages, leases of each worker. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.brokers.postgres import statements as sql
from penstock.brokers.sql import BoundSqlQueue
from penstock.stores.postgres.arrays import texts


class PostgresReports(BoundSqlQueue):
    """The reports of the queue in one transaction."""

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
            most = (
                "SELECT key, sum(ready)::bigint AS n FROM keyq WHERE grp=? AND ready>0"
                " GROUP BY key ORDER BY n DESC, key LIMIT ?"
            )
            return dict(self.tx.execute(most, (g.id, limit)).fetchall())
        query = (
            "SELECT key, sum(ready)::bigint FROM keyq WHERE grp=? AND prio BETWEEN 0 AND 2"
            " AND key=ANY(?::text[]) GROUP BY key"
        )
        found: dict[str, int] = dict(self.tx.execute(query, (g.id, texts(keys))).fetchall())
        return {key: found.get(key, 0) for key in keys}

    def leases_by_worker(self, limit: int) -> dict[str, int]:
        """Return how many deliveries each worker holds. Reads at most `limit` leases of a group.

        A group never has more leases than the sum of the fleet's prefetch windows.
        """
        held = (
            "SELECT owner, count(*) FROM grp g JOIN LATERAL (SELECT owner FROM queue"
            " WHERE grp=g.id AND state=1 LIMIT ?) q ON true GROUP BY owner"
        )
        return dict(self.tx.execute(held, (limit,)).fetchall())

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
