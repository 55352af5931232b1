"""What is remembered of hosts, for people: states, cached robots.txt, and exceptions with their reasons. Workers only ever look at sql.py's view of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.claims.sql import SqlClaims
from penstock.rules import pace
from penstock.stores.sql import Tx

EVERYWHERE = "*"  # the host of an exception that the configuration makes
ROBOTS = "robots"
_decode = msgspec.msgpack.Decoder(pace.HostState).decode


class Noted(msgspec.Struct, frozen=True):
    """One exception: which rule is not kept where, who said so and why, and from when to when."""

    kind: str
    host: str
    reason: str
    who: str
    at: float
    ended: float | None


class Kept(msgspec.Struct, frozen=True):
    """A robots.txt in the cache. Status 0: it could not be reached."""

    origin: str
    status: int
    until: float
    body: bytes


class SqlHosts:
    def __init__(self, claims: SqlClaims) -> None:
        self.claims = claims

    # -- states ------------------------------------------------------------------------------------------------------------

    def state_in(self, tx: Tx, host: str) -> pace.HostState:
        return self.claims.state_in(tx, host)

    def change_in(self, tx: Tx, host: str, change: Callable[[pace.HostState], pace.HostState]) -> pace.HostState:
        state = change(self.claims.state_in(tx, host))
        self.claims.keep_in(tx, host, state)
        return state

    def listed_in(self, tx: Tx, limit: int) -> dict[str, pace.HostState]:
        """Hosts with a state: those that are held back or have limits of their own first."""
        found: dict[str, pace.HostState] = {}
        for where in ("slowed=1", "own=1", "1=1"):
            if len(found) < limit:
                rows = tx.execute(f"SELECT host, state FROM host WHERE {where} ORDER BY host LIMIT ?", (limit,))
                found |= {host: _decode(raw) for host, raw in rows if host not in found}
        return dict(list(found.items())[:limit])

    def robots_in(self, tx: Tx, host: str) -> list[Kept]:
        origins = [f"{scheme}://{host}" for scheme in ("https", "http")]
        rows = tx.execute("SELECT origin, status, until, body FROM robots WHERE origin IN (?,?) ORDER BY origin DESC", origins)
        return [Kept(origin, status, until, body or b"") for origin, status, until, body in rows]

    # -- exceptions --------------------------------------------------------------------------------------------------------

    def exceptions_in(self, tx: Tx, hosts: Sequence[str] | None = None, *, ended: bool = False, limit: int = 1000) -> list[Noted]:
        """Of these hosts, or of all; those that hold, or with `ended` the past ones too. The newest first."""
        where = ["1=1"] if ended else ["ended IS NULL"]
        if hosts is not None:
            where.append(f"host IN ({','.join('?' * len(hosts))})")
        sql = f"SELECT kind, host, reason, who, at, ended FROM exception WHERE {' AND '.join(where)} ORDER BY n DESC LIMIT ?"
        return [Noted(*row) for row in tx.execute(sql, (*(hosts or ()), limit))]

    def note_in(self, tx: Tx, kind: str, host: str, reason: str, who: str, *, at_once: bool = False) -> None:
        """From now on, in place of one that holds; `at_once`: for this one time only."""
        now = self.claims.clock.now()
        if not at_once:
            self.end_in(tx, kind, host)
        tx.execute("INSERT INTO exception(kind, host, reason, who, at, ended) VALUES(?,?,?,?,?,?)", (kind, host, reason, who, now, now if at_once else None))

    def end_in(self, tx: Tx, kind: str, host: str) -> bool:
        tx.execute("UPDATE exception SET ended=? WHERE kind=? AND host=? AND ended IS NULL", (self.claims.clock.now(), kind, host))
        return tx.changes() > 0

    def ignore_robots_in(self, tx: Tx, host: str, reason: str, who: str) -> None:
        self.note_in(tx, ROBOTS, host, reason, who)
        self.change_in(tx, host, lambda state: msgspec.structs.replace(state, ignores_robots=True))

    def obey_robots_in(self, tx: Tx, host: str) -> bool:
        """False: it was obeyed all along."""
        self.change_in(tx, host, lambda state: msgspec.structs.replace(state, ignores_robots=False))
        return self.end_in(tx, ROBOTS, host)

    def configured_in(self, tx: Tx, reasons: Mapping[str, str], who: str) -> None:
        """Exceptions that the configuration makes everywhere: a kind with a reason holds, one with an empty reason does not (any more)."""
        held = {noted.kind: noted.reason for noted in self.exceptions_in(tx, [EVERYWHERE])}
        for kind, reason in reasons.items():
            if reason and held.get(kind) != reason:
                self.note_in(tx, kind, EVERYWHERE, reason, who)
            elif not reason and kind in held:
                self.end_in(tx, kind, EVERYWHERE)
