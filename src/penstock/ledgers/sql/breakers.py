"""Recent ends of events and open breakers, in SQL."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.ports import OpenBreaker
from penstock.stores.sql import SqlTable, Tx

BUCKET = 5  # seconds of recent ends in one row


class SqlBreakers(SqlTable):
    """Implements ports.Breakers."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def record_ends(self, ends: Mapping[tuple[str, str], int], now: float) -> None:
        bucket = int(now / BUCKET)
        # In the same order everywhere, so that transactions do not wait for each other in a circle.
        self._tx.executemany(
            "INSERT INTO ends VALUES(?,?,?,?) ON CONFLICT(what, bucket, class) DO UPDATE"
            " SET n=ends.n+excluded.n",
            [(what, bucket, kind, n) for (what, kind), n in sorted(ends.items()) if n],
        )

    def recent_ends(self, what: str, seconds: float, now: float) -> dict[str, int]:
        rows = self._tx.execute(
            "SELECT class, sum(n) FROM ends WHERE what=? AND bucket>? GROUP BY class",
            (what, int((now - seconds) / BUCKET)),
        )
        return {kind: int(n) for kind, n in rows}

    def reset_ends(self, what: str) -> None:
        self._tx.execute("DELETE FROM ends WHERE what=?", (what,))

    def active_hosts(self, seconds: float, now: float) -> set[str]:
        rows = self._tx.execute(
            "SELECT DISTINCT what FROM ends WHERE what LIKE 'host:%' AND bucket>?",
            (int((now - seconds) / BUCKET),),
        )
        return {what for (what,) in rows}

    def open(
        self, what: str, error_class: str, reason: str, now: float, *, counted: bool = True
    ) -> bool:
        self._tx.execute(
            "INSERT INTO breaker VALUES(?,?,?,?,?) ON CONFLICT(what) DO NOTHING",
            (what, error_class, reason, now, int(counted)),
        )
        return self._tx.changes() == 1

    def close(self, what: str) -> bool:
        self.reset_ends(what)
        self._tx.execute("DELETE FROM breaker WHERE what=?", (what,))
        return self._tx.changes() == 1

    def opened(self) -> list[OpenBreaker]:
        rows = self._tx.execute(
            "SELECT what, class, reason, at, counted FROM breaker ORDER BY at, what"
        )
        return [
            OpenBreaker(what, kind, reason, at, bool(counted))
            for what, kind, reason, at, counted in rows
        ]

    def stop_counting(self) -> None:
        self._tx.execute("UPDATE breaker SET counted=0")

    def prune(self, before: float) -> None:
        self._tx.execute("DELETE FROM ends WHERE bucket<?", (int(before / BUCKET),))
