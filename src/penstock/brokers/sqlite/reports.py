"""Reports of the embedded broker: counts, waiting messages, leases of each worker. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.brokers.sql import BoundSqlQueue
from penstock.rules.priority import LOWEST


class SqliteReports(BoundSqlQueue):
    """The reports of the queue in one transaction."""

    def _figures(self, topic: str, group: str) -> tuple[int, int, int, float | None]:
        row = self.tx.execute(
            "SELECT g.id, g.ready, g.leased, g.delayed FROM grp g JOIN topic t ON t.id=g.topic"
            " WHERE t.name=? AND g.name=?",
            (topic, group),
        ).get
        if row is None:
            return 0, 0, 0, None
        oldest = self.tx.execute(
            "SELECT m.at FROM queue q JOIN message m ON m.seq=q.seq WHERE q.grp=? ORDER BY q.seq"
            " LIMIT 1",
            (row[0],),
        ).get
        return row[1], row[2], row[3], oldest

    def _waiting(
        self, topic: str, limit: int
    ) -> Iterable[tuple[str, str, bytes, str | None, int, float]]:
        return self.tx.execute(
            "SELECT m.id, m.key, m.body, m.headers, m.prio, coalesce((SELECT min(at) FROM queue q"
            " WHERE q.seq=m.seq AND q.state=2), 0.0) FROM message m"
            " JOIN topic t ON t.id=m.topic WHERE t.name=? AND (EXISTS(SELECT 1 FROM grp g"
            " JOIN queue q ON q.grp=g.id AND q.seq=m.seq WHERE g.topic=t.id)"
            " OR NOT EXISTS(SELECT 1 FROM grp g WHERE g.topic=t.id)) ORDER BY m.seq LIMIT ?",
            (topic, limit),
        )

    def _noted(self) -> Iterable[tuple[str, str, int, int, int, int]]:
        return self.tx.execute(
            "SELECT t.name, g.name, g.id, g.ready, g.leased, g.delayed FROM grp g"
            " JOIN topic t ON t.id=g.topic ORDER BY 1, 2"
        ).fetchall()

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
                    "SELECT key, sum(ready) AS n FROM keyq WHERE grp=? AND ready>0 GROUP BY key"
                    " ORDER BY n DESC, key LIMIT ?",
                    (g.id, limit),
                ).fetchall()
            )
        total = (
            "SELECT coalesce(sum(ready), 0) FROM keyq WHERE grp=? AND prio BETWEEN 0 AND ?"
            " AND key=?"
        )
        return {key: self.tx.execute(total, (g.id, LOWEST, key)).get for key in keys}

    def leases_by_worker(self, limit: int) -> dict[str, int]:
        """Return how many deliveries each worker holds. Reads at most `limit` leases of a group.

        A group never has more leases than the sum of the fleet's prefetch windows.
        """
        held = Counter(
            owner
            for (group,) in self.tx.execute("SELECT id FROM grp WHERE leased>0").fetchall()
            for (owner,) in self.tx.execute(
                "SELECT owner FROM queue WHERE grp=? AND state=1 LIMIT ?", (group, limit)
            )
        )
        return dict(held)

    def oldest(self, limit: int) -> float | None:
        """Return when the oldest message that is ready or leased was published.

        If the first `limit` messages are all delayed, use the oldest of them.
        """
        oldest: float | None = self.tx.execute(
            "SELECT min(at) FROM message WHERE seq IN (SELECT"
            " (SELECT coalesce(min(seq) FILTER (WHERE state<>2), min(seq)) FROM"
            " (SELECT seq, state FROM queue WHERE grp=g.id ORDER BY seq LIMIT ?))"
            " FROM grp g WHERE g.name='main' AND g.ready+g.leased>0)",
            (limit,),
        ).get
        return oldest
