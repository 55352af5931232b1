"""Routes that live workers serve, in SQL."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.ports import Clock
from penstock.rules.routes import ServedPool
from penstock.stores.sql import SqlStore, SqlTable, Tx

SCHEMA = """
-- Proxy pools of live workers, as JSON. A worker without pools has no row.
CREATE TABLE serving(worker TEXT PRIMARY KEY, until REAL NOT NULL, pools TEXT NOT NULL)
  WITHOUT ROWID;
"""
_decode = msgspec.json.Decoder(list[ServedPool]).decode


class SqlRoutes(SqlTable):
    """Implements ports.RouteTable."""

    @staticmethod
    def create(db: SqlStore) -> None:
        """Create the table if it does not exist. A store of release 0.1.0 has none."""
        db.part("routes", SCHEMA)

    def __init__(self, tx: Tx, clock: Clock) -> None:
        self._tx, self._clock = tx, clock

    def announce(self, worker: str, pools: Sequence[ServedPool], seconds: float) -> None:
        now = self._clock.now()
        self._tx.execute("DELETE FROM serving WHERE until<?", (now,))
        self._tx.execute(
            "INSERT INTO serving VALUES(?,?,?) ON CONFLICT(worker) DO UPDATE"
            " SET until=excluded.until, pools=excluded.pools",
            (worker, now + seconds, msgspec.json.encode(pools).decode()),
        )

    def withdraw(self, worker: str) -> None:
        self._tx.execute("DELETE FROM serving WHERE worker=?", (worker,))

    def served(self) -> dict[str, list[ServedPool]]:
        rows = self._tx.execute(
            "SELECT worker, pools FROM serving WHERE until>?", (self._clock.now(),)
        )
        return {worker: _decode(pools) for worker, pools in rows}
