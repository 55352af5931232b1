"""Claims on URLs, slots of hosts and robots.txt bodies on Redis, for a fleet. The decisions are in
rules/, the Lua in redis_scripts.

A change is decided here, on the state as it was last seen, and kept by the server only if that is
still the state (else decided again on what it is now): one round trip for a batch where nobody was
quicker. Moments are the server's: a machine whose clock is off asks no host too early.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.claims.redis import scripts as lua
from penstock.claims.redis.hosts import RedisHosts, aside
from penstock.claims.redis.proxies import RedisProxies
from penstock.ports import ClaimChange, Clock, Holder
from penstock.rules import pace
from penstock.stores.context import Context
from penstock.stores.redis import Argument, Server

MEMORY = 8192  # hosts whose last state this process remembers
MEASURED = 60.0  # seconds after which the server's clock is compared anew
KEPT_ROBOTS = 7 * 86400.0  # seconds beyond its time that a cached robots.txt can be looked at
_encode = msgspec.msgpack.Encoder().encode
_state = msgspec.msgpack.Decoder(pace.HostState).decode
_claim = msgspec.msgpack.Decoder(tuple[str, str, str]).decode


class FleetClock:
    """The server's time, for those whose own clock shows another. Between asking and answer lies
    some time: what could be that is no difference.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self.offset = clock, 0.0
        self._width, self._at = math.inf, -math.inf

    def now(self) -> float:
        return self._clock.now() + self.offset

    def local(self, moment: float) -> float:
        return moment - self.offset

    def compared(self, asked: float, server: float, answered: float) -> None:
        """The server's clock stood at `server` at some moment between `asked` and `answered`. The
        narrowest of these counts for a while.
        """
        if answered - asked <= self._width or answered - self._at > MEASURED:
            self._width, self._at = answered - asked, answered
            ahead, behind = (
                server - answered,
                server - asked,
            )  # it is at least, and at most, so far ahead of us
            self.offset = 0.0 if ahead <= 0.0 <= behind else ahead if ahead > 0.0 else behind


class RedisClaims:
    """Implements ports.Pace and ports.RobotsCache; claims are taken by compare-and-set, outside the
    books' transaction.
    """

    def __init__(
        self, server: Server, prefix: str, clock: Clock, limits: pace.Limits, rng: random.Random
    ) -> None:
        self.server, self.clock, self.limits, self.rng = server, FleetClock(clock), limits, rng
        self.base = lua.base_of(prefix)
        self.hosts = RedisHosts(server, self.base, clock)
        self.proxies = RedisProxies(server, self.base, clock)
        self._own_clock = clock
        self._known: dict[str, bytes] = {}  # hosts' states as they were last seen
        self._version = b""
        self._gaps: dict[str, float] = {}
        self._slowed: dict[str, float] = {}
        self._voided: dict[str, float] = {}
        self._own: dict[str, int] = {}
        self._exempt: frozenset[str] = frozenset()

    # -- claims ------------------------------------------------------------------------------------

    async def holders(self, keys: Sequence[bytes]) -> dict[bytes, Holder]:
        """Of those that are claimed."""
        if not keys:
            return {}
        rows = await self.server.command("HMGET", self.base + ":url", *keys)
        found = {}
        for key, raw in zip(keys, rows, strict=True):
            if raw is not None:
                owner, good, following = _claim(raw)
                found[key] = Holder(owner, good or None, following or None)
        return found

    async def take(self, changes: Sequence[ClaimChange]) -> list[bool]:
        """Take claims whose owner is as expected, by compare-and-set."""
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
            if len(self._gaps) > MEMORY:
                self._gaps.clear()
            self._gaps[host] = pace.interval(state, self.limits)
            jitter = [self.rng.random() for _ in range(wants[host])]
            after, slots[host] = pace.reserve(
                state, self.limits, self.clock.now(), wants[host], jitter, within
            )
            return after

        await self._change(list(wants), change)
        return {host: [self.clock.local(slot) for slot in slots[host]] for host in wants}

    async def report(
        self, host: str, *, status: int, retry_after: float | None, seconds: float
    ) -> None:
        """Free of any write while the host is content: only throttling, and recovery from it, are
        news.
        """
        if status in (429, 503) or host in self._slowed:
            states = await self._change(
                [host],
                lambda _, state: pace.report(
                    state, self.limits, self.clock.now(), status, retry_after, seconds
                ),
            )
            self._slowed[host] = pace.held_until(states[host])
            self._void(host, states[host].slower_since)

    async def crawl_delay(self, host: str, seconds: float | None) -> None:
        def change(host: str, state: pace.HostState) -> pace.HostState:
            if state.crawl_delay == seconds:
                return state
            now = self.clock.now()
            state = msgspec.structs.replace(state, crawl_delay=seconds, slower_since=now)
            if seconds:  # robots.txt itself was a request, a moment ago
                state = msgspec.structs.replace(
                    state, tat=max(state.tat, now + pace.interval(state, self.limits))
                )
            return state

        states = await self._change([host], change)
        if seconds:
            self._void(host, states[host].slower_since)

    async def _change(
        self, hosts: Sequence[str], decide: Callable[[str, pace.HostState], pace.HostState]
    ) -> dict[str, pace.HostState]:
        """Decided on what we last saw of each; where that is old, on what it has become, until it
        is kept.
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

    def gap(self, host: str) -> float:
        """Seconds between two requests to the host, when slots were last given; 0 is unlimited."""
        return self._gaps.get(host, 0.0)

    def voided(self, host: str) -> float:
        at = self._voided.get(host, 0.0)
        return self.clock.local(at) if at else 0.0

    def _void(self, host: str, at: float) -> None:
        if len(self._voided) > MEMORY:  # no slot is given this far ahead
            old = self.clock.now() - 60.0
            self._voided = {h: at for h, at in self._voided.items() if at > old}
        self._voided[host] = max(at, self._voided.get(host, 0.0))

    def blocked_until(self, host: str) -> float:
        until = self._slowed.get(host, 0.0)
        return self.clock.local(until) if until else 0.0

    def concurrency(self, host: str) -> int:
        return self._own.get(host, self.limits.concurrency)

    async def refresh(self) -> None:
        """Bring the local view up to date; the worker calls it several times a second."""
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
            if until > before.get(host, 0.0):  # by another worker, it may be
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

    def exempt(self, host: str) -> bool:
        return host in self._exempt

    async def keep_robots(self, origin: str, body: bytes | None, status: int, until: float) -> None:
        gone = until + KEPT_ROBOTS
        await self.server.run(
            lua.ROBOTS,
            [self.base],
            origin,
            status,
            repr(until),
            int(min(gone, 1e11) * 1000),
            *([] if body is None else [body]),
        )

    async def close(self) -> None:
        self.hosts.close()
        self.proxies.close()
        await self.server.close()


def open_claims(url: str, context: Context) -> RedisClaims:
    """No I/O. What expires here is only a cache, so a server that evicts what expires does no harm."""
    c = context.config.pace
    limits = pace.Limits(
        rate=None if c.rate == math.inf else c.rate, burst=c.burst, concurrency=c.concurrency
    )
    return RedisClaims(
        Server(url, evictable=False),
        context.config.namespace or "penstock",
        context.clock,
        limits,
        context.rng,
    )
