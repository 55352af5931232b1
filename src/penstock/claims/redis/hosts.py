"""State of hosts, cached robots.txt and exceptions from rules, on Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from penstock.claims.redis import scripts as lua
from penstock.ports import CachedRobots, Clock, Exempt
from penstock.rules import pace
from penstock.stores.redis import Blocking, Server

_encode = msgspec.msgpack.Encoder().encode
_state = msgspec.msgpack.Decoder(pace.HostState).decode
Names: TypeAlias = list[bytes]
_noted = msgspec.msgpack.Decoder(Exempt).decode


def aside(state: pace.HostState, now: float) -> tuple[str, str]:
    """Return the two values that every worker reads ten times a second.

    The first is "until since" if the host is throttled, blocked or paused. The second is the host's
    own concurrency, or "-" if only its rate or burst is set. Each is "" if it does not apply.
    """
    held = pace.held_until(state)
    slowed = f"{held!r} {state.slower_since!r}" if state.penalty > 1 or held > now else ""
    own = state.rate is not None or state.burst is not None or state.concurrency is not None
    return slowed, ("-" if state.concurrency is None else str(state.concurrency)) if own else ""


class RedisHosts:
    """Hosts on Redis. The calls take no part in the ledger's transaction."""

    def __init__(self, server: Server, base: str, clock: Clock) -> None:
        self.base, self.clock = base, clock
        self._server = Blocking(server)

    def reserve(self, wants: Mapping[str, int], within: float) -> Mapping[str, Sequence[float]]:
        raise AssertionError("slots on Redis are reserved outside the ledger's transaction")

    # -- states ------------------------------------------------------------------------------------

    def state(self, host: str) -> pace.HostState:
        raw = self._server.command("HGET", self.base + ":host", host)
        return pace.HostState() if raw is None else _state(raw)

    def change(
        self, host: str, change: Callable[[pace.HostState], pace.HostState]
    ) -> pace.HostState:
        seen: bytes = self._server.command("HGET", self.base + ":host", host) or b""
        while True:
            after = change(_state(seen) if seen else pace.HostState())
            (answer,) = self._server.run(
                lua.KEEP, [self.base], host, seen, _encode(after), *aside(after, self.clock.now())
            )
            if answer == 1:
                return after
            seen = answer

    def list(self, limit: int) -> dict[str, pace.HostState]:
        """Return hosts with a state. Blocked hosts and hosts with own limits come first."""
        names: Names = []
        for kind in ("slowed", "own"):
            names += sorted(self._server.command("HKEYS", f"{self.base}:{kind}"))
        cursor: Any = 0
        while len(set(names)) < limit:
            cursor, some = self._server.command("HSCAN", self.base + ":host", cursor, "COUNT", 500)
            names += sorted(some)
            if cursor == 0:
                break
        chosen = [*dict.fromkeys(names)][:limit]
        if not chosen:
            return {}
        states = self._server.command("HMGET", self.base + ":host", *chosen)
        return {
            name.decode(): _state(raw)
            for name, raw in zip(chosen, states, strict=True)
            if raw is not None
        }

    def robots(self, host: str) -> Sequence[CachedRobots]:
        found = []
        for origin in (f"{scheme}://{host}" for scheme in ("https", "http")):
            body, status, until = self._server.command(
                "HMGET", f"{self.base}:robots:{origin}", "body", "status", "until"
            )
            if status is not None:
                found.append(CachedRobots(origin, int(status), float(until), body or b""))
        return found

    # -- exceptions --------------------------------------------------------------------------------

    def exceptions(
        self, hosts: Sequence[str] | None = None, *, ended: bool = False, limit: int = 1000
    ) -> Sequence[Exempt]:
        rows = self._server.command("HGETALL", self.base + ":noted")
        numbered = sorted(
            ((int(n), _noted(raw)) for n, raw in rows.items() if n != b"n"),
            reverse=True,
            key=lambda pair: pair[0],
        )
        chosen = [
            r
            for _, r in numbered
            if (ended or r.ended is None) and (hosts is None or r.host in hosts)
        ]
        return chosen[:limit]

    def add_exception(
        self, kind: str, host: str, reason: str, who: str, *, once: bool = False
    ) -> None:
        now = self.clock.now()
        row = _encode(Exempt(kind, host, reason, who, now, now if once else None))
        self._server.run(lua.NOTE, [self.base], kind, host, repr(now), row, int(not once))

    def end_exception(self, kind: str, host: str) -> bool:
        return bool(self._server.run(lua.END, [self.base], kind, host, repr(self.clock.now())))

    def close(self) -> None:
        self._server.close()
