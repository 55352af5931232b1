"""Limits of hosts, robots.txt, and health of proxies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from penstock.rules.pace import HostState
from penstock.rules.proxies import Health


class RobotsCache(Protocol):
    """Cache of robots.txt bodies per origin, shared by the fleet. Each entry has an expiry time."""

    async def robots(self, origin: str) -> tuple[bytes | None, int, float] | None:
        """Return (body, HTTP status, expiry time), or None if the origin is not cached.

        The status is 0 if the server could not be reached.
        """

    async def keep_robots(self, origin: str, body: bytes | None, status: int, until: float) -> None:
        """Cache a robots.txt until a time. Replaces the entry of the origin. May be repeated."""

    def exempt(self, host: str) -> bool:
        """Return True if the host's robots.txt is not obeyed because of a recorded exception.

        Reads a local copy that is at most 100 ms old.
        """


class Pace(Protocol):
    """Slots: the times at which the fleet may request a host. Each slot is assigned once."""

    async def reserve(
        self, wants: Mapping[str, int], *, within: float | None = None
    ) -> Mapping[str, Sequence[float]]:
        """Reserve slots (host key -> number). Return their times in order, in epoch seconds.

        Slots more than `within` seconds away are returned but not reserved.
        """

    async def report(
        self, host: str, *, status: int, retry_after: float | None, seconds: float
    ) -> None:
        """Record a response of the host. Throttling blocks the host for every worker.

        If the host is not blocked (`blocked_until` is 0), only a 429 or 503 has to be reported.
        """

    async def crawl_delay(self, host: str, seconds: float | None) -> None:
        """Set the crawl delay of robots.txt in seconds, or None if it has no crawl delay.

        It applies to every worker from the next reservation on.
        """

    async def pause(self, host: str) -> None:
        """Stop requests to the host for every worker until an operator resumes it.

        May be repeated.
        """

    def blocked_until(self, host: str) -> float:
        """Return the time until which the host is blocked, or 0. It is inf until a resume.

        Reads a local copy that is at most 100 ms old, for a last check before sending.
        """

    def voided(self, host: str) -> float:
        """Return when the host's interval became longer, or 0. Reads a local copy.

        Slots that were reserved before that time must not be used.
        """

    def concurrency(self, host: str) -> int:
        """Return how many requests to the host may be in flight in one worker.

        Reads a local copy.
        """

    def gap(self, host: str) -> float:
        """Return the interval in seconds, as of the last reservation. 0 means unlimited."""

    async def refresh(self) -> None:
        """Update the local copies."""


class Exempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception from a rule for one host."""

    kind: str  # rule that is not obeyed
    host: str
    reason: str
    who: str  # operator who added the exception
    at: float  # start time
    ended: float | None = None  # end time, None while the exception applies


class ProxyHealth(Protocol):
    """Failures of proxies per host, or for all hosts (`*`). The fleet shares them.

    A proxy is identified by an id and a label that contain no secret.
    """

    @property
    def view(self) -> Mapping[tuple[str, str], Health]:
        """(proxy, host) -> Health of all proxies with failures.

        A local copy that is at most a few seconds old.
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
    ) -> None:
        """Record a failure of a proxy."""

    async def worked(self, proxy: str, host: str, label: str) -> None:
        """Record that a proxy worked."""

    async def listed(self, pool: str, members: int, error: str) -> None:
        """Record the result of fetching a pool's list, for operators."""


class CachedRobots(msgspec.Struct, frozen=True):
    """A cached robots.txt."""

    origin: str
    status: int  # HTTP status, 0 if the server could not be reached
    until: float  # expiry time
    body: bytes


class HostTable(Protocol):
    """State of hosts and exceptions from rules, for operators.

    On Redis these calls are not part of the transaction.
    """

    def reserve(self, wants: Mapping[str, int], within: float) -> Mapping[str, Sequence[float]]:
        """Reserve slots as `Pace.reserve` does, inside the transaction."""

    def state(self, host: str) -> HostState: ...

    def change(self, host: str, change: Callable[[HostState], HostState]) -> HostState:
        """Replace the state of a host. `change` may run twice."""

    def list(self, limit: int) -> dict[str, HostState]:
        """Return hosts with a state. Blocked hosts and hosts with special limits come first."""

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
        """Start an exception. It replaces a current one. With `once`, it ends immediately."""

    def end_exception(self, kind: str, host: str) -> bool:
        """End an exception. Return False if the host has no such exception."""
