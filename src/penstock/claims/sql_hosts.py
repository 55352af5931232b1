"""State of hosts, cached robots.txt and exceptions from rules, in SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.claims.sql import SqlClaims
from penstock.ports import CachedRobots, Exempt
from penstock.rules import pace
from penstock.stores.sql import Tx

_decode = msgspec.msgpack.Decoder(pace.HostState).decode


class SqlHosts:
    """Hosts inside one transaction.

    Workers read a cached view of the same table in `claims.sql`.
    """

    def __init__(self, tx: Tx, claims: SqlClaims) -> None:
        self._tx, self._claims = tx, claims

    def reserve(self, wants: Mapping[str, int], within: float) -> Mapping[str, Sequence[float]]:
        return self._claims.reserve_in(self._tx, wants, within=within)

    # -- states ------------------------------------------------------------------------------------

    def state(self, host: str) -> pace.HostState:
        return self._claims.state_in(self._tx, host)

    def change(
        self, host: str, change: Callable[[pace.HostState], pace.HostState]
    ) -> pace.HostState:
        state = change(self._claims.state_in(self._tx, host))
        self._claims.keep_in(self._tx, host, state)
        return state

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
        sql = (
            "SELECT kind, host, reason, who, at, ended FROM exception"
            f" WHERE {' AND '.join(where)} ORDER BY n DESC LIMIT ?"
        )
        return [Exempt(*row) for row in self._tx.execute(sql, (*(hosts or ()), limit))]

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
