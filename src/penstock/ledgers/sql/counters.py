"""Counters of the ledger, and recent ends for the breaker, in SQL."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.ledgers.sql.ledger import LedgerTable

TALLY_SECONDS = 5  # seconds of recent ends in one bucket


class SqlCounters(LedgerTable):
    """Counters. Reading them takes the same time for any number of events."""

    def pending(self, topic: str) -> int:
        """Return the number of events of a topic that are accepted and not ended, in O(1)."""
        return (
            self._tx.execute(
                "SELECT coalesce(sum(n), 0) FROM counter WHERE topic=?"
                " AND name IN ('pending','delayed','in_flight','writing')",
                (topic,),
            ).get
            or 0
        )

    def total(self, *names: str) -> int:
        """Return the sum of these counters over all topics."""
        return (
            self._tx.execute(
                "SELECT coalesce(sum(n), 0) FROM counter"
                f" WHERE name IN ({','.join('?' * len(names))})",
                names,
            ).get
            or 0
        )

    def topics(self) -> list[str]:
        """Return the topics that have a counter."""
        return [topic for (topic,) in self._tx.execute("SELECT DISTINCT topic FROM counter")]

    def record_ends(self, ends: Mapping[tuple[str, str], int], now: float) -> None:
        bucket = int(now / TALLY_SECONDS)
        # In the same order everywhere, so that transactions do not wait for each other in a circle.
        self._tx.executemany(
            "INSERT INTO ends VALUES(?,?,?,?) ON CONFLICT(what, bucket, class) DO UPDATE"
            " SET n=ends.n+excluded.n",
            [(what, bucket, kind, n) for (what, kind), n in sorted(ends.items()) if n],
        )

    def recent_ends(self, what: str, seconds: float, now: float) -> dict[str, int]:
        """Return the ends of the last `seconds` by class."""
        rows = self._tx.execute(
            "SELECT class, sum(n) FROM ends WHERE what=? AND bucket>? GROUP BY class",
            (what, int((now - seconds) / TALLY_SECONDS)),
        )
        return {kind: int(n) for kind, n in rows}

    def add(self, topic: str, deltas: Mapping[str, int]) -> None:
        self._count(topic, deltas)

    def reset_ends(self, what: str) -> None:
        self._tx.execute("DELETE FROM ends WHERE what=?", (what,))

    def entered(self) -> int | None:
        return self._ledger.entered(self._tx)
