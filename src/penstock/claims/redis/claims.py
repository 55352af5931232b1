"""Claims on URLs, state and slots of hosts, robots.txt and exceptions on Redis, for a fleet.

This process decides a change on the state that it last read. The server writes the change only if
the state is still the same. Otherwise the server returns the current state, and the process decides
again. So a batch needs one round trip if no other process changed the same hosts.

Times are times of the server. A machine with a wrong clock therefore requests no host too early.
See `rules` for the decisions and `claims.redis.scripts` for the Lua.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.claims.redis import scripts as lua
from penstock.claims.redis.proxies import RedisProxies
from penstock.claims.views import MEMORY, HostView, usual_limits
from penstock.ports import CachedRobots, ClaimChange, Clock, Exempt, Holder
from penstock.rules import pace
from penstock.stores.context import Context
from penstock.stores.redis import Argument, Blocking, Layout, Server

VERSION = 1  # of the keys
MEASURED = 60.0  # seconds after which a measurement of the server's clock is replaced
KEPT_ROBOTS = 7 * 86400.0  # seconds that a cached robots.txt is kept after it has expired
_encode = msgspec.msgpack.Encoder().encode
_state = msgspec.msgpack.Decoder(pace.HostState).decode
_noted = msgspec.msgpack.Decoder(Exempt).decode
_claim = msgspec.msgpack.Decoder(tuple[str, str, str]).decode


class FleetClock:
    """Time of the Redis server.

    `offset` is the clock difference that the round-trip time cannot explain.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self.offset = clock, 0.0
        self._width, self._at = math.inf, -math.inf

    def now(self) -> float:
        return self._clock.now() + self.offset

    def local(self, moment: float) -> float:
        return moment - self.offset

    def compared(self, asked: float, server: float, answered: float) -> None:
        """Update the offset from one measurement.

        The server's clock had the value `server` at some time between `asked` and `answered`. The
        measurement with the shortest round trip is used for up to `MEASURED` seconds.
        """
        if answered - asked <= self._width or answered - self._at > MEASURED:
            self._width, self._at = answered - asked, answered
            # The smallest and the largest possible lead of the server's clock, in seconds.
            ahead, behind = server - answered, server - asked
            self.offset = 0.0 if ahead <= 0.0 <= behind else ahead if ahead > 0.0 else behind


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
        names = [
            name
            for kind in ("slowed", "own")
            for name in sorted(self._server.command("HKEYS", f"{self.base}:{kind}"))
        ]
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


class RedisClaims(HostView):
    """Implements ports.Pace, ports.RobotsCache and ports.ExternalClaims.

    Claims are taken by compare-and-set, outside the ledger's transaction.
    """

    def __init__(
        self, server: Server, prefix: str, clock: Clock, limits: pace.Limits, rng: random.Random
    ) -> None:
        self.server, self.clock = server, FleetClock(clock)
        super().__init__(self.clock.now, limits, rng)
        self.base = lua.base_of(prefix)
        self.hosts = RedisHosts(server, self.base, clock)
        self.proxies = RedisProxies(server, self.base, clock)
        self._own_clock = clock
        self._known: dict[str, bytes] = {}  # host -> encoded state that was last read or written
        self._version = b""

    # -- claims ------------------------------------------------------------------------------------

    async def holders(self, keys: Sequence[bytes]) -> dict[bytes, Holder]:
        """Return the holders of the URL keys that are claimed."""
        if not keys:
            return {}
        rows = await self.server.command("HMGET", self.base + ":url", *keys)
        claims = {key: _claim(raw) for key, raw in zip(keys, rows, strict=True) if raw is not None}
        return {
            key: Holder(owner, good or None, following or None)
            for key, (owner, good, following) in claims.items()
        }

    async def take(self, changes: Sequence[ClaimChange]) -> list[bool]:
        """Take claims by compare-and-set.

        A result is False if the claim has neither the expected owner nor the new one.
        """
        if not changes:
            return []
        args: list[Argument] = [self.clock.now()]
        for c in changes:
            args += (c.key, c.owner, c.last_success or "", c.expected or "")
        return [bool(n) for n in await self.server.run(lua.TAKE, [self.base], *args)]

    async def set_next(self, key: bytes, id: str, expected_owner: str) -> bool:
        return bool(await self.server.run(lua.NEXT, [self.base], key, id, expected_owner))

    async def prune(self, before: float, limit: int = 5000) -> None:
        for _ in range(0, limit, 1000):
            if await self.server.run(lua.PRUNE, [self.base], before, 1000) < 1000:
                break

    # -- pace --------------------------------------------------------------------------------------

    async def reserve(
        self, wants: Mapping[str, int], *, within: float | None = None
    ) -> Mapping[str, Sequence[float]]:
        slots: dict[str, Sequence[float]] = {}

        def change(host: str, state: pace.HostState) -> pace.HostState:
            after, slots[host] = self.next_slots(host, state, wants[host], self._now(), within)
            return after

        await self._change(list(wants), change)
        return {host: [self.clock.local(slot) for slot in slots[host]] for host in wants}

    async def _change_state(
        self, host: str, decide: Callable[[pace.HostState], pace.HostState]
    ) -> pace.HostState:
        return (await self._change([host], lambda _, state: decide(state)))[host]

    async def _change(
        self, hosts: Sequence[str], decide: Callable[[str, pace.HostState], pace.HostState]
    ) -> dict[str, pace.HostState]:
        """Change the states of hosts by compare-and-set. Return the new states.

        `decide` first gets the cached state. If another process has changed the state on the
        server, `decide` is called again with that state, until the server accepts the change.
        """
        if not self._version:
            await self.refresh()
        if len(self._known) > MEMORY:
            self._known.clear()
        after: dict[str, pace.HostState] = {}
        left = list(hosts)
        while left:
            args: list[Argument] = []
            written = []
            for host in left:
                seen = self._known.get(host, b"")
                before = _state(seen) if seen else pace.HostState()
                after[host] = decide(host, before)
                raw = seen if after[host] == before else _encode(after[host])
                written.append(raw)
                args += (host, seen, raw, *aside(after[host], self.clock.now()))
            lost = []
            for host, raw, answer in zip(
                left, written, await self.server.run(lua.KEEP, [self.base], *args), strict=True
            ):
                self._known[host] = raw if answer == 1 else answer
                if answer != 1:
                    lost.append(host)
            left = lost
        return after

    def _local(self, moment: float) -> float:
        return self.clock.local(moment)

    @property
    def skew(self) -> float:
        """See runtime.assembly.ClaimServer."""
        return self.clock.offset

    async def refresh(self) -> None:
        """Read the shared state of hosts into the local view, and compare the clocks.

        A worker calls it ten times a second. The server sends the state only if it has changed.
        """
        asked = self._own_clock.now()
        seconds, micros, version, *view = await self.server.run(
            lua.LOOK, [self.base], self._version
        )
        self.clock.compared(asked, int(seconds) + int(micros) / 1e6, self._own_clock.now())
        self._version = version
        if not view:
            return
        before, self._slowed = self._slowed, {}
        for name, value in zip(view[0][::2], view[0][1::2], strict=True):
            host, (until, since) = name.decode(), (float(n) for n in value.split())
            self._slowed[host] = until
            # The host is blocked for longer than before. Another worker may have blocked it.
            if until > before.get(host, 0.0):
                self._void(host, since)
        self._own = {
            host.decode(): int(n)
            for host, n in zip(view[1][::2], view[1][1::2], strict=True)
            if n != b"-"
        }
        self._exempt = frozenset(host.decode() for host in view[2])

    # -- robots ------------------------------------------------------------------------------------

    async def robots(self, origin: str) -> tuple[bytes | None, int, float] | None:
        body, status, until = await self.server.command(
            "HMGET", f"{self.base}:robots:{origin}", "body", "status", "until"
        )
        return None if status is None else (body, int(status), float(until))

    async def keep_robots(self, origin: str, body: bytes | None, status: int, until: float) -> None:
        await self.server.run(
            lua.ROBOTS,
            [self.base],
            origin,
            status,
            repr(until),
            int(min(until + KEPT_ROBOTS, 1e11) * 1000),
            *([] if body is None else [body]),
        )

    async def close(self) -> None:
        self.hosts.close()
        self.proxies.close()
        await self.server.close()


def layout_of(namespace: str) -> Layout:
    """Return the version of the claims' keys. `scripts` describes the keys."""
    base = lua.base_of(namespace)
    return Layout(namespace, "claims", VERSION, (f"{base}:url", f"{base}:host"))


def open_claims(url: str, context: Context) -> RedisClaims:
    """Return the claims without I/O.

    Only cached robots.txt files have an expiry time. So a server may evict keys that expire.
    """
    namespace = context.config.namespace or "penstock"
    return RedisClaims(
        Server(url, evictable=False, layout=layout_of(namespace)),
        namespace,
        context.clock,
        usual_limits(context.config.pace),
        context.rng,
    )
