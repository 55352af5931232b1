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

    def record_ends(self, topic: str, ended: int, dead: int, now: float) -> None:
        self._tx.execute(
            "INSERT INTO tally VALUES(?,?,?,?) ON CONFLICT(topic, bucket) DO UPDATE"
            " SET ended=tally.ended+excluded.ended, dead=tally.dead+excluded.dead",
            (topic, int(now / TALLY_SECONDS), ended, dead),
        )

    def recent_ends(self, topic: str, seconds: float, now: float) -> tuple[int, int]:
        """Return (ended, dead) events of the last `seconds`."""
        row = self._tx.execute(
            "SELECT coalesce(sum(ended),0), coalesce(sum(dead),0) FROM tally WHERE topic=?"
            " AND bucket>?",
            (topic, int((now - seconds) / TALLY_SECONDS)),
        ).get
        return int(row[0]), int(row[1])

    def add(self, topic: str, deltas: Mapping[str, int]) -> None:
        self._count(topic, deltas)

    def reset_ends(self, topic: str) -> None:
        self._tx.execute("DELETE FROM tally WHERE topic=?", (topic,))

    def entered(self) -> int | None:
        return self._ledger.entered(self._tx)
