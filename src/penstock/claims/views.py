"""Local views of the hosts and of the proxy health that a fleet shares, for all claims stores."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.config.schema import PaceConfig
from penstock.ports import Clock
from penstock.rules import pace, proxies

MEMORY = 8192  # maximum number of hosts about which a process caches one kind of data


def usual_limits(configured: PaceConfig) -> pace.Limits:
    """Return the limits of hosts that have no own limits."""
    return pace.Limits(
        rate=None if configured.rate == math.inf else configured.rate,
        burst=configured.burst,
        concurrency=configured.concurrency,
    )


class HostView:
    """Cached state of hosts. Implements ports.Pace and ports.RobotsCache in part.

    A subclass reads the shared state in `refresh` and changes it in `_change_state`.
    """

    def __init__(self, now: Callable[[], float], limits: pace.Limits, rng: random.Random) -> None:
        self.limits, self.rng, self._now = limits, rng, now
        self._gaps: dict[str, float] = {}  # host -> interval when slots were last reserved
        # Throttled or paused host -> time before which no request is sent to it.
        self._slowed: dict[str, float] = {}
        # Host -> time when its interval grew. Slots that were reserved before are too close
        # together.
        self._voided: dict[str, float] = {}
        self._own: dict[str, int] = {}  # host -> its own limit on requests in flight
        self._exempt: frozenset[str] = frozenset()  # hosts whose robots.txt is not obeyed

    async def _change_state(
        self, host: str, decide: Callable[[pace.HostState], pace.HostState]
    ) -> pace.HostState:
        """Change the state of a host and return it. `decide` may run twice.

        If `decide` returns its argument, the state is not written.
        """
        raise NotImplementedError

    def next_slots(
        self, host: str, state: pace.HostState, n: int, now: float, within: float | None
    ) -> tuple[pace.HostState, Sequence[float]]:
        """Return the state after `n` reservations and their slots.

        Cache the host's interval, and until when it is blocked.
        """
        held = pace.held_until(state)
        if held > now or host in self._slowed:
            self._slowed[host] = held
        if len(self._gaps) > MEMORY:
            self._gaps.clear()
        self._gaps[host] = pace.interval(state, self.limits)
        jitter = [self.rng.random() for _ in range(n)]
        return pace.reserve(state, self.limits, now, n, jitter, within)

    async def report(
        self, host: str, *, status: int, retry_after: float | None, seconds: float
    ) -> None:
        """Update the host's state after a response.

        Writes only if the status is 429 or 503, or if the host is throttled or paused.
        """
        if status in (429, 503) or host in self._slowed:
            state = await self._change_state(
                host,
                lambda state: pace.report(
                    state, self.limits, self._now(), status, retry_after, seconds
                ),
            )
            self._slowed[host] = pace.held_until(state)
            self._void(host, state.slower_since)

    async def pause(self, host: str) -> None:
        await self._change_state(
            host, lambda state: msgspec.structs.replace(state, paused_until=math.inf)
        )
        self._slowed[host] = math.inf

    async def crawl_delay(self, host: str, seconds: float | None) -> None:
        def decide(state: pace.HostState) -> pace.HostState:
            if state.crawl_delay == seconds:
                return state
            now = self._now()
            state = msgspec.structs.replace(state, crawl_delay=seconds, slower_since=now)
            # The request for robots.txt was just sent, so the delay begins now.
            if seconds:
                tat = max(state.tat, now + pace.interval(state, self.limits))
                state = msgspec.structs.replace(state, tat=tat)
            return state

        state = await self._change_state(host, decide)
        if seconds:
            self._void(host, state.slower_since)

    def gap(self, host: str) -> float:
        """Return the host's interval in seconds at the last reservation. 0 means unlimited."""
        return self._gaps.get(host, 0.0)

    def voided(self, host: str) -> float:
        at = self._voided.get(host, 0.0)
        return self._local(at) if at else 0.0

    def _void(self, host: str, at: float) -> None:
        # Drop entries older than 60 s. No slot is reserved that far ahead.
        if len(self._voided) > MEMORY:
            old = self._now() - 60.0
            self._voided = {h: at for h, at in self._voided.items() if at > old}
        self._voided[host] = max(at, self._voided.get(host, 0.0))

    def blocked_until(self, host: str) -> float:
        until = self._slowed.get(host, 0.0)
        return self._local(until) if until else 0.0

    def _local(self, moment: float) -> float:
        """Return a time of the shared state as a time of this machine's clock."""
        return moment

    def concurrency(self, host: str) -> int:
        return self._own.get(host, self.limits.concurrency)

    def exempt(self, host: str) -> bool:
        return host in self._exempt


class ProxyView:
    """Cached health of proxies. Implements ports.ProxyHealth in part.

    A subclass reads the shared health in `refresh` and changes it in `_change`.
    """

    overlap = 5.0  # seconds that are read again, because a writer's clock or commit may be late

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._view: dict[tuple[str, str], proxies.Health] = {}
        self._seen = 0.0

    @property
    def view(self) -> Mapping[tuple[str, str], proxies.Health]:
        return self._view

    async def _change(
        self,
        proxy: str,
        host: str,
        label: str,
        decide: Callable[[proxies.Health | None], proxies.Health | None],
    ) -> None:
        """Change the health of a proxy, if `decide` returns another one. It may run twice."""
        raise NotImplementedError

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
        await self._change(
            proxy,
            host,
            label,
            lambda before: proxies.failed(
                before,
                self.clock.now(),
                cooldown=cooldown,
                longest=longest,
                reason=reason[:200],
                least=least,
            ),
        )

    async def worked(self, proxy: str, host: str, label: str) -> None:
        """Reduce the recorded failures of the proxy.

        Writes only if the proxy has failures and its cool-down has ended.
        """

        def decide(before: proxies.Health | None) -> proxies.Health | None:
            return None if before is None else proxies.worked(before, self.clock.now())

        for where in (host, proxies.ANY_HOST):
            known = self._view.get((proxy, where))
            if known is not None and known.until <= self.clock.now():
                await self._change(proxy, where, label, decide)

    def _show(self, key: tuple[str, str], health: proxies.Health | None) -> None:
        """Put the current health of (proxy, host) into the view."""
        if health is None or not health.failures:
            self._view.pop(key, None)
        else:
            self._view[key] = health

    def _forget(self, before: float) -> None:
        self._view = {
            key: h for key, h in self._view.items() if h.at >= before or h.until >= before
        }
