"""What is remembered of hosts, for people: states, cached robots.txt, and exceptions with their
reasons. Workers only ever look at sql.py's view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.claims.hosts import Hosts, Kept
from penstock.claims.sql import SqlClaims
from penstock.ports import Exempt
from penstock.rules import pace
from penstock.stores.sql import Tx

_decode = msgspec.msgpack.Decoder(pace.HostState).decode


class SqlHosts(Hosts):
    def __init__(self, claims: SqlClaims) -> None:
        self.claims = claims

    # -- states ------------------------------------------------------------------------------------

    def state_in(self, tx: Tx, host: str) -> pace.HostState:
        return self.claims.state_in(tx, host)

    def change_in(
        self, tx: Tx, host: str, change: Callable[[pace.HostState], pace.HostState]
    ) -> pace.HostState:
        state = change(self.claims.state_in(tx, host))
        self.claims.keep_in(tx, host, state)
        return state

    def listed_in(self, tx: Tx, limit: int) -> dict[str, pace.HostState]:
        """Hosts with a state: those that are held back or have limits of their own first."""
        found: dict[str, pace.HostState] = {}
        for where in ("slowed=1", "own=1", "1=1"):
            if len(found) < limit:
                rows = tx.execute(
                    f"SELECT host, state FROM host WHERE {where} ORDER BY host LIMIT ?", (limit,)
                )
                found |= {host: _decode(raw) for host, raw in rows if host not in found}
        return dict(list(found.items())[:limit])

    def robots_in(self, tx: Tx, host: str) -> list[Kept]:
        origins = [f"{scheme}://{host}" for scheme in ("https", "http")]
        rows = tx.execute(
            "SELECT origin, status, until, body FROM robots WHERE origin IN (?,?) ORDER BY origin DESC",
            origins,
        )
        return [Kept(origin, status, until, body or b"") for origin, status, until, body in rows]

    # -- exceptions --------------------------------------------------------------------------------

    def exceptions_in(
        self, tx: Tx, hosts: Sequence[str] | None = None, *, ended: bool = False, limit: int = 1000
    ) -> list[Exempt]:
        where = ["1=1"] if ended else ["ended IS NULL"]
        if hosts is not None:
            where.append(f"host IN ({','.join('?' * len(hosts))})")
        sql = f"SELECT kind, host, reason, who, at, ended FROM exception WHERE {' AND '.join(where)} ORDER BY n DESC LIMIT ?"
        return [Exempt(*row) for row in tx.execute(sql, (*(hosts or ()), limit))]

    def note_in(
        self, tx: Tx, kind: str, host: str, reason: str, who: str, *, at_once: bool = False
    ) -> None:
        now = self.claims.clock.now()
        if not at_once:
            self.end_in(tx, kind, host)
        tx.execute(
            "INSERT INTO exception(kind, host, reason, who, at, ended) VALUES(?,?,?,?,?,?)",
            (kind, host, reason, who, now, now if at_once else None),
        )

    def end_in(self, tx: Tx, kind: str, host: str) -> bool:
        tx.execute(
            "UPDATE exception SET ended=? WHERE kind=? AND host=? AND ended IS NULL",
            (self.claims.clock.now(), kind, host),
        )
        return tx.changes() > 0
