"""Health of proxies per host in SQL, shared by the fleet.

URLs of proxies are not stored. See `rules.proxies` for the decisions.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.claims.views import ProxyView
from penstock.ports import Clock
from penstock.rules import proxies as rules
from penstock.stores.sql import SqlStore, Tx

SCHEMA = """
-- A proxy that always worked has no row. `failures` 0 tells other workers that it recovered.
-- Maintenance deletes such a row later.
CREATE TABLE proxy_health(proxy TEXT NOT NULL, host TEXT NOT NULL, label TEXT NOT NULL,
  failures INTEGER NOT NULL, until REAL NOT NULL, at REAL NOT NULL,
  reason TEXT NOT NULL, changed REAL NOT NULL, PRIMARY KEY(proxy, host)) WITHOUT ROWID;
CREATE INDEX proxy_changed ON proxy_health(changed);
CREATE TABLE proxy_list(pool TEXT PRIMARY KEY, at REAL NOT NULL, members INTEGER NOT NULL,
  error TEXT NOT NULL) WITHOUT ROWID;
"""


class SqlProxies(ProxyView):
    """Implements ports.ProxyHealth."""

    def __init__(self, db: SqlStore, clock: Clock) -> None:
        super().__init__(clock)
        self.db = db
        db.part("proxies", SCHEMA)

    async def _change(
        self,
        proxy: str,
        host: str,
        label: str,
        decide: Callable[[rules.Health | None], rules.Health | None],
    ) -> None:
        def work(tx: Tx) -> rules.Health | None:
            row = tx.execute(
                "SELECT failures, until, at, reason FROM proxy_health WHERE proxy=? AND host=?",
                (proxy, host),
            ).get
            before = None if row is None else _health(*row)
            after = decide(before)
            if after is not None and after != before:
                tx.execute(
                    "INSERT INTO proxy_health VALUES(?,?,?,?,?,?,?,?) ON CONFLICT(proxy, host)"
                    " DO UPDATE SET label=excluded.label, failures=excluded.failures,"
                    " until=excluded.until, at=excluded.at, reason=excluded.reason,"
                    " changed=excluded.changed",
                    (proxy, host, label, *msgspec.structs.astuple(after), self.clock.now()),
                )
            return after

        self._show((proxy, host), await self.db.write(work, durable=False))

    async def refresh(self) -> None:
        """Read changes of other workers since the last call into the local view."""
        since = self._seen - self.overlap
        rows = await self.db.read(
            lambda tx: tx.execute(
                "SELECT changed, proxy, host, failures, until, at, reason FROM proxy_health"
                " WHERE changed>? ORDER BY changed",
                (since,),
            ).fetchall()
        )
        for changed, proxy, host, *health in rows:
            self._show((proxy, host), _health(*health))
            self._seen = max(self._seen, changed)

    async def listed(self, pool: str, members: int, error: str) -> None:
        row = (pool, self.clock.now(), members, error)
        await self.db.write(
            lambda tx: tx.execute(
                "INSERT INTO proxy_list VALUES(?,?,?,?) ON CONFLICT(pool) DO UPDATE"
                " SET at=excluded.at, members=excluded.members, error=excluded.error",
                row,
            ),
            durable=False,
        )

    async def prune(self) -> None:
        before = self.clock.now() - rules.FORGET
        await self.db.write(
            lambda tx: tx.execute(
                "DELETE FROM proxy_health WHERE changed<?1 AND until<?1", (before,)
            ),
            durable=False,
        )
        self._forget(before)

    # -- for `penstock proxies ls`

    def troubled(self) -> list[tuple[str, str, str, int, float, float, str]]:
        """Return (proxy, host, label, failures, until, at, reason) of each failing proxy."""
        return self.db.moment(
            lambda tx: tx.execute(
                "SELECT proxy, host, label, failures, until, at, reason FROM proxy_health"
                " WHERE failures>0 ORDER BY until DESC, proxy, host"
            ).fetchall()
        )

    def lists(self) -> dict[str, tuple[float, int, str]]:
        """Return (time, number of members, error) of the last fetch of each pool's list."""
        rows = self.db.moment(
            lambda tx: tx.execute("SELECT pool, at, members, error FROM proxy_list").fetchall()
        )
        return {pool: (at, members, error) for pool, at, members, error in rows}


def _health(failures: int, until: float, at: float, reason: str) -> rules.Health:
    return rules.Health(failures=failures, until=until, at=at, reason=reason)
