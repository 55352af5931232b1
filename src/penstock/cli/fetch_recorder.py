"""Wrappers that record each step of `penstock fetch`: waits for slots, robots.txt and exchanges."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.model import ErrorClass, Failure

if TYPE_CHECKING:
    from penstock.ports import Response


class PaceRecorder:
    """Wrapper of the store's slots and robots cache.

    It records the waits, and where each robots.txt came from.
    """

    def __init__(self, claims: Any, clock: Any) -> None:
        self._claims, self._clock = claims, clock
        self.waits: list[tuple[str, float]] = []  # (host, seconds)
        self.sources: dict[str, str] = {}  # origin -> "cache" or "site"
        self.loading = False  # True while robots.txt and its redirects are fetched
        self.report, self.crawl_delay, self.blocked_until = (
            claims.report,
            claims.crawl_delay,
            claims.blocked_until,
        )
        self.refresh, self.pause = claims.refresh, claims.pause
        self.concurrency, self.exempt, self.gap = claims.concurrency, claims.exempt, claims.gap

    async def reserve(
        self, wants: Mapping[str, int], *, within: float | None = None
    ) -> Mapping[str, Sequence[float]]:
        slots: Mapping[str, Sequence[float]] = await self._claims.reserve(wants, within=within)
        self.waits += [
            (host, max(0.0, slot - self._clock.now()))
            for host, times in slots.items()
            for slot in times
        ]
        return slots

    def voided(self, host: str) -> float:
        """Always return 0: `penstock fetch` waits for its slot and is never rescheduled."""
        return 0.0

    async def robots(self, origin: str) -> tuple[bytes | None, int, float] | None:
        stored: tuple[bytes | None, int, float] | None = await self._claims.robots(origin)
        is_fresh = stored is not None and stored[2] > self._clock.now()
        self.sources[origin], self.loading = "cache" if is_fresh else "site", not is_fresh
        return stored

    async def keep_robots(self, origin: str, body: bytes | None, status: int, until: float) -> None:
        self.loading = False
        await self._claims.keep_robots(origin, body, status, until)


class HttpClient(Protocol):
    """The methods and attributes of the HTTP client that the wrapper uses."""

    options: Any
    guard: Any

    async def fetch(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        proxy: str | None = None,
    ) -> Response: ...
    async def close(self) -> None: ...


class FetchRecorder:
    """Wrapper of the HTTP client. It records each exchange, the guard's verdict and the times."""

    def __init__(self, fetcher: HttpClient, pace: PaceRecorder) -> None:
        self._fetcher, self._pace = fetcher, pace
        self.exchanges: list[dict[str, Any]] = []
        self.last: Response | None = None  # last response for the page, with any status

    async def fetch(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        proxy: str | None = None,
    ) -> Response:
        from penstock.rules.proxies import parse_member, scrub

        exchange: dict[str, Any] = {
            "for": "robots.txt" if self._pace.loading else "page",
            "method": method,
            "url": url,
            "status": None,
            "peer": None,
            "proxy": parse_member(proxy).label if proxy else None,
            "guard": None,
            "dns": None,
            "connect": None,
            "first_byte": None,
            "total": None,
        }
        self.exchanges.append(exchange)
        if exchange["for"] == "page":
            self.last = None
        exchange["dns"], exchange["guard"], _ = await guard_verdict(
            self._fetcher, url, through_proxy=proxy is not None
        )
        start = time.monotonic()
        try:
            response = await self._fetcher.fetch(
                url, method=method, headers=headers, body=body, proxy=proxy
            )
        except Failure as e:
            exchange |= {
                "error": scrub(e.reason, proxy) if proxy else e.reason,
                "total": time.monotonic() - start,
            }
            raise
        exchange |= {
            "status": response.status,
            "peer": response.peer,
            "http_version": response.http_version,
            "connect": response.connect,
            "first_byte": response.first_byte,
            "total": response.seconds,
        }
        if exchange["for"] == "page":
            self.last = response
        return response

    async def close(self) -> None:
        await self._fetcher.close()


async def guard_verdict(
    fetcher: HttpClient, url: str, *, through_proxy: bool = False
) -> tuple[float, dict[str, Any], Failure | None]:
    """Return the seconds, the guard's verdict, and the failure or None.

    The client connects to the addresses found here, because the guard caches its answers.
    """
    start, failure = time.monotonic(), None
    try:
        unchecked = through_proxy and fetcher.options.remote_dns
        target = fetcher.guard.check_url(url) if unchecked else await fetcher.guard.resolve(url)
        verdict = {
            "verdict": "allowed",
            "addresses": list(target.addresses),
            "reason": "the proxy resolves the name" if unchecked else "",
        }
    except Failure as e:
        verdict_name, failure = "refused" if e.kind is ErrorClass.PERMANENT else "unresolved", e
        verdict = {"verdict": verdict_name, "addresses": [], "reason": e.reason}
    return time.monotonic() - start, verdict, failure
