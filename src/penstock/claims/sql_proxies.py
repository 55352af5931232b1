"""Health of proxies per host in SQL, shared by the fleet.

URLs of proxies are not stored. See `rules.proxies` for the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.ports import Clock
from penstock.rules import proxies as rules
from penstock.stores.sql import SqlStore, Tx

SCHEMA = """
-- Only what had trouble: a proxy that always worked has no row. `failures` 0 tells other workers that it recovered; upkeep removes it later.
CREATE TABLE proxy_health(proxy TEXT NOT NULL, host TEXT NOT NULL, label TEXT NOT NULL, failures INTEGER NOT NULL, until REAL NOT NULL, at REAL NOT NULL,
  reason TEXT NOT NULL, changed REAL NOT NULL, PRIMARY KEY(proxy, host)) WITHOUT ROWID;
CREATE INDEX proxy_changed ON proxy_health(changed);
CREATE TABLE proxy_list(pool TEXT PRIMARY KEY, at REAL NOT NULL, members INTEGER NOT NULL, error TEXT NOT NULL) WITHOUT ROWID;
"""
_OVERLAP = 5.0  # seconds that are read again, because a writer's clock or commit may be late


class SqlProxies:
    """Implements ports.ProxyHealth."""

    def __init__(self, db: SqlStore, clock: Clock) -> None:
        self.db, self.clock = db, clock
        self._view: dict[tuple[str, str], rules.Health] = {}
        self._seen = 0.0
        db.part("proxies", 1, SCHEMA)

    @property
    def view(self) -> Mapping[tuple[str, str], rules.Health]:
        return self._view

    async def failed(
        self,
        proxy: str,
        host: str,
        label: str,
        *,
        cooldown: float,
        longest: float,
        reason: str,
        least: float = 0.0,
    ) -> None:
        def work(tx: Tx) -> rules.Health:
            now = self.clock.now()
            health = rules.failed(
                _health(tx, proxy, host),
                now,
                cooldown=cooldown,
                longest=longest,
                reason=reason,
                least=least,
            )
            _keep(tx, proxy, host, label, health, now)
            return health

        self._view[proxy, host] = await self.db.write(work, durable=False)

    async def worked(self, proxy: str, host: str, label: str) -> None:
        """Reduce the recorded failures of the proxy.

        Writes only if the proxy has failures and its cool-down has ended.
        """
        for where in (host, rules.ANY_HOST):
            known = self._view.get((proxy, where))
            if known is not None and known.until <= self.clock.now():
                await self._forgive(proxy, where, label)

    async def _forgive(self, proxy: str, host: str, label: str) -> None:
        def work(tx: Tx) -> rules.Health | None:
            now = self.clock.now()
            before = _health(tx, proxy, host)
            if before is None:
                return None
            after = rules.worked(before, now)
            if after != before:
                _keep(tx, proxy, host, label, after, now)
            return after

        self._take(proxy, host, await self.db.write(work, durable=False))

    async def refresh(self) -> None:
        """Read changes of other workers since the last call into the local view."""
        sql = "SELECT proxy, host, failures, until, at, reason, changed FROM proxy_health WHERE changed>? ORDER BY changed"
        rows = await self.db.read(lambda tx: tx.execute(sql, (self._seen - _OVERLAP,)).fetchall())
        for proxy, host, failures, until, at, reason, changed in rows:
            self._take(
                proxy, host, rules.Health(failures=failures, until=until, at=at, reason=reason)
            )
            self._seen = max(self._seen, changed)

    def _take(self, proxy: str, host: str, health: rules.Health | None) -> None:
        if health is None or not health.failures:
            self._view.pop((proxy, host), None)
        else:
            self._view[proxy, host] = health

    async def listed(self, pool: str, members: int, error: str) -> None:
        sql = "INSERT INTO proxy_list VALUES(?,?,?,?) ON CONFLICT(pool) DO UPDATE SET at=excluded.at, members=excluded.members, error=excluded.error"
        await self.db.write(
            lambda tx: tx.execute(sql, (pool, self.clock.now(), members, error)), durable=False
        )

    async def prune(self) -> None:
        before = self.clock.now() - rules.FORGET
        await self.db.write(
            lambda tx: tx.execute(
                "DELETE FROM proxy_health WHERE changed<? AND until<?", (before, before)
            ),
            durable=False,
        )
        self._view = {
            key: h for key, h in self._view.items() if h.at >= before or h.until >= before
        }

    # -- for `penstock proxies ls`

    def troubled_in(self, tx: Tx) -> list[tuple[str, str, str, int, float, float, str]]:
        """Return (proxy, host, label, failures, until, at, reason) of each failing proxy."""
        found: list[tuple[str, str, str, int, float, float, str]] = tx.execute(
            "SELECT proxy, host, label, failures, until, at, reason FROM proxy_health WHERE failures>0 ORDER BY until DESC, proxy, host"
        ).fetchall()
        return found

    def lists_in(self, tx: Tx) -> dict[str, tuple[float, int, str]]:
        return {
            pool: (at, members, error)
            for pool, at, members, error in tx.execute(
                "SELECT pool, at, members, error FROM proxy_list"
            )
        }


def _health(tx: Tx, proxy: str, host: str) -> rules.Health | None:
    row = tx.execute(
        "SELECT failures, until, at, reason FROM proxy_health WHERE proxy=? AND host=?",
        (proxy, host),
    ).get
    return (
        None
        if row is None
        else rules.Health(failures=row[0], until=row[1], at=row[2], reason=row[3])
    )


def _keep(tx: Tx, proxy: str, host: str, label: str, health: rules.Health, now: float) -> None:
    tx.execute(
        "INSERT INTO proxy_health VALUES(?,?,?,?,?,?,?,?) ON CONFLICT(proxy, host) DO UPDATE SET label=excluded.label, failures=excluded.failures,"
        " until=excluded.until, at=excluded.at, reason=excluded.reason, changed=excluded.changed",
        (proxy, host, label, health.failures, health.until, health.at, health.reason[:200], now),
    )
