"""Limits of hosts, robots.txt and health of proxies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from penstock.rules.pace import HostState
from penstock.rules.proxies import Health


class RobotsCache(Protocol):
    """robots.txt bodies per origin, shared by the fleet, with the time they are good until."""

    async def robots(self, origin: str) -> tuple[bytes | None, int, float] | None:
        """(body, HTTP status or 0 for unreachable, good until); None: not known."""

    async def keep_robots(
        self, origin: str, body: bytes | None, status: int, until: float
    ) -> None: ...

    def exempt(self, host: str) -> bool:
        """Is there a recorded exception, so that this host's robots.txt is not obeyed? A local view
        at most 100 ms old.
        """


class Pace(Protocol):
    """Slots: WHEN a host may be asked, fleet-wide. Each slot is given once."""

    async def reserve(
        self, wants: Mapping[str, int], *, within: float | None = None
    ) -> Mapping[str, Sequence[float]]:
        """For each host, that many moments (epoch seconds), in order; those more than `within`
        seconds away are told, but not given.
        """

    async def report(
        self, host: str, *, status: int, retry_after: float | None, seconds: float
    ) -> None:
        """What the host answered: throttling blocks the host for every worker. Of a host that
        nobody holds back (`blocked_until` is 0) only a 429 or 503 is news.
        """

    async def crawl_delay(self, host: str, seconds: float | None) -> None:
        """What robots.txt asks for between two requests (None: nothing); holds for every worker
        from the next reservation on.
        """

    def blocked_until(self, host: str) -> float:
        """0, or when the host may be asked again; a local view at most 100 ms old, for a last look
        before sending.
        """

    def voided(self, host: str) -> float:
        """0, or when the host was found to want more time between requests: a slot given out before
        that is not to be used. A local view.
        """

    def concurrency(self, host: str) -> int:
        """How many requests to the host may be in flight in one worker; a local view like the
        above.
        """

    def gap(self, host: str) -> float:
        """Return the seconds between two requests, as of the last reservation. 0 is unlimited."""

    async def refresh(self) -> None:
        """Bring the local view up to date."""


class Exempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One exception: which rule is not kept where, who said so and why, and from when to when."""

    kind: str
    host: str
    reason: str
    who: str
    at: float
    ended: float | None = None


class ProxyHealth(Protocol):
    """Trouble with proxies, per host (`*`: with any), shared by the fleet. Proxies go by an id and
    a label that hold no secret.
    """

    @property
    def view(self) -> Mapping[tuple[str, str], Health]:
        """(proxy, host) → rules.proxies.Health of all that had trouble; a local view at most
        seconds old.
        """

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
    ) -> None: ...

    async def worked(self, proxy: str, host: str, label: str) -> None: ...

    async def listed(self, pool: str, members: int, error: str) -> None:
        """What became of fetching a pool's list; for people."""


class CachedRobots(msgspec.Struct, frozen=True):
    """A cached robots.txt. Status 0 means that it could not be reached."""

    origin: str
    status: int
    until: float
    body: bytes


class HostTable(Protocol):
    """State of hosts and exceptions from rules, for operators.

    On Redis these calls take no part in the transaction.
    """

    def reserve(self, wants: Mapping[str, int], within: float) -> Mapping[str, Sequence[float]]:
        """Reserve slots as `Pace.reserve` does, inside the transaction."""

    def state(self, host: str) -> HostState: ...

    def change(self, host: str, change: Callable[[HostState], HostState]) -> HostState:
        """Replace the state of a host. `change` may run twice."""

    def list(self, limit: int) -> dict[str, HostState]:
        """Return hosts with a state. Blocked hosts and hosts with own limits come first."""

    def robots(self, host: str) -> Sequence[CachedRobots]: ...

    def exceptions(
        self, hosts: Sequence[str] | None = None, *, ended: bool = False, limit: int = 1000
    ) -> Sequence[Exempt]:
        """Return exceptions of these hosts, or of all, newest first.

        With `ended`, past exceptions are included.
        """

    def add_exception(
        self, kind: str, host: str, reason: str, who: str, *, once: bool = False
    ) -> None:
        """Start an exception. It replaces a current one. `once`: it ends at the same time."""

    def end_exception(self, kind: str, host: str) -> bool:
        """End an exception. Return False if there was none."""
