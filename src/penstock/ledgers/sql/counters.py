"""Counters of the ledger, in SQL."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.ledgers.sql.ledger import LedgerTable


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

    def topics_with(self, name: str) -> list[str]:
        rows = self._tx.execute("SELECT topic FROM counter WHERE name=? AND n>0", (name,))
        return [topic for (topic,) in rows]

    def add(self, topic: str, deltas: Mapping[str, int]) -> None:
        self._count(topic, deltas)

    def entered(self) -> int | None:
        return self._ledger.entered(self._tx)
