"""Claims on URLs, state of hosts and robots.txt bodies, in SQL. The decisions are in rules/."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.claims.views import HostView, usual_limits
from penstock.ports import CachedRobots, ClaimChange, Clock, Exempt, Holder
from penstock.rules import pace
from penstock.stores.context import Context
from penstock.stores.sql import SqlStore, Tx

SCHEMA = """
-- Owner of a URL, the last success before the owner, and the event delayed to the window's end.
-- A row is written once per fetch. The ledger row of the owner has its progress.
CREATE TABLE claim(url_key BLOB PRIMARY KEY, owner TEXT NOT NULL, good TEXT, next TEXT,
  at REAL NOT NULL) WITHOUT ROWID;
-- Every worker reads the columns after the state ten times a second: blocked hosts, and hosts with
-- their own limits.
CREATE TABLE host(host TEXT PRIMARY KEY, state BLOB NOT NULL, blocked_until REAL NOT NULL,
  slowed INTEGER NOT NULL, own INTEGER NOT NULL, concurrency INTEGER) WITHOUT ROWID;
CREATE INDEX host_slowed ON host(slowed) WHERE slowed=1;
CREATE INDEX host_own ON host(own) WHERE own=1;
-- Rules that are not obeyed at a host, with reason, operator, start and end.
CREATE TABLE exception(n INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, host TEXT NOT NULL,
  reason TEXT NOT NULL, who TEXT NOT NULL, at REAL NOT NULL, ended REAL);
CREATE UNIQUE INDEX exception_open ON exception(kind, host) WHERE ended IS NULL;
CREATE TABLE robots(origin TEXT PRIMARY KEY, body BLOB, status INTEGER NOT NULL,
  until REAL NOT NULL) WITHOUT ROWID;
"""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(pace.HostState).decode


class SqlClaims(HostView):
    """Slots of hosts and the cache of robots.txt. Implements ports.Pace and ports.RobotsCache."""

    def __init__(self, db: SqlStore, clock: Clock, limits: pace.Limits, rng: random.Random) -> None:
        super().__init__(clock.now, limits, rng)
        self.db, self.clock = db, clock
        self.pruned = b""  # URL key after which the next prune continues
        db.part("claims", SCHEMA)

    # -- pace --------------------------------------------------------------------------------------

    async def reserve(
        self, wants: Mapping[str, int], *, within: float | None = None
    ) -> Mapping[str, Sequence[float]]:
        return await self.db.write(
            lambda tx: SqlHosts(tx, self).reserve(wants, within), durable=False
        )

    async def _change_state(
        self, host: str, decide: Callable[[pace.HostState], pace.HostState]
    ) -> pace.HostState:
        return await self.db.write(
            lambda tx: SqlHosts(tx, self).change(host, decide), durable=False
        )

    async def refresh(self) -> None:
        """Read the shared state of hosts into the local view.

        A worker calls it ten times a second.
        """
        before = self._slowed
        self._slowed, self._own, self._exempt = await self.db.read(_look)
        # Hosts that are blocked for longer than before. Another worker may have blocked them.
        told = [host for host, until in self._slowed.items() if until > before.get(host, 0.0)]
        if told:
            for host, since in await self.db.read(
                lambda tx: [(name, SqlHosts(tx, self).state(name).slower_since) for name in told]
            ):
                self._void(host, since)

    # -- robots ------------------------------------------------------------------------------------

    async def robots(self, origin: str) -> tuple[bytes | None, int, float] | None:
        return await self.db.read(
            lambda tx: (
                tx.execute("SELECT body, status, until FROM robots WHERE origin=?", (origin,)).get
            )
        )

    async def keep_robots(self, origin: str, body: bytes | None, status: int, until: float) -> None:
        await self.db.write(
            lambda tx: tx.execute(
                "INSERT INTO robots VALUES(?,?,?,?) ON CONFLICT(origin) DO UPDATE"
                " SET body=excluded.body, status=excluded.status, until=excluded.until",
                (origin, body, status, until),
            ),
            durable=False,
        )


def _look(tx: Tx) -> tuple[dict[str, float], dict[str, int], frozenset[str]]:
    return (
        dict(tx.execute("SELECT host, blocked_until FROM host WHERE slowed=1").fetchall()),
        dict(
            tx.execute(
                "SELECT host, concurrency FROM host WHERE own=1 AND concurrency IS NOT NULL"
            ).fetchall()
        ),
        frozenset(
            host
            for (host,) in tx.execute(
                "SELECT host FROM exception WHERE kind='robots' AND ended IS NULL"
            )
        ),
    )


class SqlClaimTable:
    """Claims inside one transaction."""

    def __init__(self, tx: Tx, claims: SqlClaims) -> None:
        self._tx, self._claims = tx, claims

    def holder(self, key: bytes) -> Holder | None:
        row = self._tx.execute("SELECT owner, good, next FROM claim WHERE url_key=?", (key,)).get
        return None if row is None else Holder(*row)

    def holders(self, keys: Sequence[bytes]) -> dict[bytes, Holder | None]:
        holders: dict[bytes, Holder | None] = dict.fromkeys(keys)
        for key, *row in self._tx.executemany(
            "SELECT url_key, owner, good, next FROM claim WHERE url_key=?",
            [(key,) for key in holders],
        ).fetchall():
            holders[bytes(key)] = Holder(*row)
        return holders

    def acquire(self, wanted: Mapping[bytes, str], now: float) -> list[bytes]:
        inserted = self._tx.each(
            "INSERT INTO claim(url_key, owner, at) VALUES(?,?,?) ON CONFLICT(url_key) DO NOTHING",
            [(key, owner, now) for key, owner in wanted.items()],
        )
        return [key for key, ours in zip(wanted, inserted, strict=True) if ours]

    def take_over(self, changes: Sequence[ClaimChange], now: float) -> None:
        self._tx.executemany(
            "INSERT INTO claim(url_key, owner, good, at) VALUES(?,?,?,?) ON CONFLICT(url_key)"
            " DO UPDATE SET owner=excluded.owner, good=excluded.good, next=NULL, at=excluded.at",
            [(c.key, c.owner, c.last_success, now) for c in changes],
        )

    def set_next(self, key: bytes, id: str) -> None:
        self._tx.execute("UPDATE claim SET next=? WHERE url_key=?", (id, key))

    def references(self, key: bytes, id: str) -> bool:
        holder = self.holder(key)
        return holder is not None and id in (holder.owner, holder.good)

    def prune(self, before: float, limit: int = 5000) -> None:
        """Delete old claims of a part of the table. The next call continues after it."""
        part = self._tx.execute(
            "SELECT url_key FROM claim WHERE url_key>? ORDER BY url_key LIMIT ?",
            (self._claims.pruned, limit),
        ).fetchall()
        if part:
            self._tx.execute(
                "DELETE FROM claim WHERE url_key>? AND url_key<=? AND at<?",
                (self._claims.pruned, part[-1][0], before),
            )
        self._tx.execute("DELETE FROM exception WHERE ended<?", (before,))
        self._claims.pruned = part[-1][0] if part else b""


class SqlHosts:
    """Hosts inside one transaction.

    Workers read a cached view of the same table in `SqlClaims`.
    """

    def __init__(self, tx: Tx, claims: SqlClaims) -> None:
        self._tx, self._claims = tx, claims

    def reserve(
        self, wants: Mapping[str, int], within: float | None
    ) -> Mapping[str, Sequence[float]]:
        now = self._claims.clock.now()
        slots: dict[str, Sequence[float]] = {}
        known = dict(
            self._tx.executemany(
                "SELECT host, state FROM host WHERE host=?", [(host,) for host in wants]
            ).fetchall()
        )
        for host, n in wants.items():
            state = _decode(known[host]) if host in known else pace.HostState()
            after, slots[host] = self._claims.next_slots(host, state, n, now, within)
            if after != state:
                self._keep(host, after)
        return slots

    # -- states ------------------------------------------------------------------------------------

    def state(self, host: str) -> pace.HostState:
        raw = self._tx.execute("SELECT state FROM host WHERE host=?", (host,)).get
        return pace.HostState() if raw is None else _decode(raw)

    def change(
        self, host: str, change: Callable[[pace.HostState], pace.HostState]
    ) -> pace.HostState:
        """As HostTable.change. If `change` returns its argument, the state is not written."""
        before = self.state(host)
        after = change(before)
        if after is not before:
            self._keep(host, after)
        return after

    def _keep(self, host: str, state: pace.HostState) -> None:
        held = pace.held_until(state)
        own = state.rate is not None or state.burst is not None or state.concurrency is not None
        self._tx.execute(
            "INSERT INTO host VALUES(?,?,?,?,?,?) ON CONFLICT(host) DO UPDATE"
            " SET state=excluded.state, blocked_until=excluded.blocked_until,"
            " slowed=excluded.slowed, own=excluded.own, concurrency=excluded.concurrency",
            (
                host,
                _encode(state),
                held,
                int(state.penalty > 1 or held > self._claims.clock.now()),
                int(own),
                state.concurrency,
            ),
        )

    def list(self, limit: int) -> dict[str, pace.HostState]:
        """Return hosts with a state. Blocked hosts and hosts with own limits come first."""
        found: dict[str, pace.HostState] = {}
        for where in ("slowed=1", "own=1", "1=1"):
            if len(found) < limit:
                rows = self._tx.execute(
                    f"SELECT host, state FROM host WHERE {where} ORDER BY host LIMIT ?", (limit,)
                )
                found |= {host: _decode(raw) for host, raw in rows if host not in found}
        return dict([*found.items()][:limit])

    def robots(self, host: str) -> Sequence[CachedRobots]:
        origins = [f"{scheme}://{host}" for scheme in ("https", "http")]
        rows = self._tx.execute(
            "SELECT origin, status, until, body FROM robots WHERE origin IN (?,?)"
            " ORDER BY origin DESC",
            origins,
        )
        return [
            CachedRobots(origin, status, until, body or b"") for origin, status, until, body in rows
        ]

    # -- exceptions --------------------------------------------------------------------------------

    def exceptions(
        self, hosts: Sequence[str] | None = None, *, ended: bool = False, limit: int = 1000
    ) -> Sequence[Exempt]:
        where = ["1=1"] if ended else ["ended IS NULL"]
        if hosts is not None:
            where.append(f"host IN ({','.join('?' * len(hosts))})")
        rows = self._tx.execute(
            "SELECT kind, host, reason, who, at, ended FROM exception"
            f" WHERE {' AND '.join(where)} ORDER BY n DESC LIMIT ?",
            (*(hosts or ()), limit),
        )
        return [Exempt(*row) for row in rows]

    def add_exception(
        self, kind: str, host: str, reason: str, who: str, *, once: bool = False
    ) -> None:
        now = self._claims.clock.now()
        if not once:
            self.end_exception(kind, host)
        self._tx.execute(
            "INSERT INTO exception(kind, host, reason, who, at, ended) VALUES(?,?,?,?,?,?)",
            (kind, host, reason, who, now, now if once else None),
        )

    def end_exception(self, kind: str, host: str) -> bool:
        self._tx.execute(
            "UPDATE exception SET ended=? WHERE kind=? AND host=? AND ended IS NULL",
            (self._claims.clock.now(), kind, host),
        )
        return self._tx.changes() > 0


def open_claims(url: str, context: Context) -> SqlClaims:
    """Open the claims in an SQLite file or in PostgreSQL."""
    limits = usual_limits(context.config.pace)
    return SqlClaims(context.store(url), context.clock, limits, context.rng)
