"""Sends single requests: slots and blocks of their hosts, and the report of each response."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeVar

import msgspec

from penstock.model import ErrorClass, Failure, Reason
from penstock.ports import Clock, Fetcher, Pace, Response
from penstock.rules.pace import LATE, MAX_RETRY_AFTER, parse_retry_after
from penstock.rules.reasons import sentence
from penstock.rules.verdict import breach
from penstock.rules.waiting import HOST

K = TypeVar("K")
V = TypeVar("V")
Sleep = Callable[[float], Awaitable[None]]
REDIRECTS = frozenset({301, 302, 303, 307, 308})


class FetchOptions(msgspec.Struct, frozen=True, kw_only=True):
    agent: str = "Penstock"  # product token that robots.txt rules are matched against
    robots: Literal["obey", "ignore"] = "obey"
    robots_redirects: int = 5
    robots_in_memory: int = 8192  # origins
    max_redirects: int = 10
    allow_downgrade: bool = False  # https → http
    # Seconds that a redirect may wait for its slot. If the slot is later, the event is delayed and
    # continues with this redirect.
    hop_wait: float = 30.0
    # Seconds that a page may wait for a new slot after its own was used for robots.txt. If the slot
    # is later, the event is delayed.
    slot_wait: float = 30.0
    key_by: Literal["host", "domain"] = "host"
    soft_404: bool = False


def keep(cache: dict[K, V], key: K, value: V, limit: int) -> None:
    """Put a value into a cache. At the limit, drop the oldest entry."""
    cache.pop(key, None)
    if len(cache) >= limit:
        del cache[next(iter(cache))]
    cache[key] = value


def host_paused(host: str, *, after: float | None = MAX_RETRY_AFTER) -> Failure:
    """Return the failure of a request to a host that is paused until an operator resumes it."""
    return Failure(
        ErrorClass.THROTTLED,
        sentence(Reason.HOST_PAUSED, host),
        code=Reason.HOST_PAUSED,
        after=after,
        waits_for=HOST + host,
    )


class Sender:
    """Sends requests through the egress object, within the limits of each host."""

    def __init__(self, fetcher: Fetcher, pace: Pace, clock: Clock) -> None:
        self._fetcher, self._pace, self._clock = fetcher, pace, clock

    async def send(
        self,
        url: str,
        host: str,
        method: str,
        headers: Mapping[str, str],
        body: bytes | None,
        proxy: str | None,
        response: Response | None = None,
    ) -> Response:
        if response is None:
            if self._pace.blocked_until(host) > self._clock.now():
                # An operator may have resumed the host since the last refresh. Read its state
                # first, because the event could be delayed for a long time.
                await self._pace.refresh()
            if (wait := self._pace.blocked_until(host) - self._clock.now()) > 0:
                if wait == math.inf:
                    raise host_paused(host)
                raise breach(Reason.HELD, host, after=min(wait, MAX_RETRY_AFTER))
            response = await self._fetcher.fetch(
                url, method=method, headers=headers, body=body, proxy=proxy
            )
        status = response.status
        value = response.headers.get("retry-after") if status in (429, 503) else None
        after = parse_retry_after(value, self._clock.now()) if value else None
        await self._pace.report(host, status=status, retry_after=after, seconds=response.seconds)
        return response

    async def wait_for_slot(self, host: str, max_wait: float, sleep: Sleep) -> None:
        while True:
            slot = (await self._pace.reserve({host: 1}, within=max_wait))[host][0]
            wait = slot - self._clock.now()
            if wait > max_wait:
                if self._pace.blocked_until(host) == math.inf:
                    raise host_paused(host)
                raise Failure(
                    ErrorClass.THROTTLED,
                    sentence(Reason.SLOT_FAR, host),
                    code=Reason.SLOT_FAR,
                    after=wait,
                )
            if wait <= 0:
                return
            await sleep(wait)
            if self._clock.now() <= slot + LATE:
                return
            # The caller's sleep took longer than the slot is valid, and could do so every time.
            sleep = self._clock.sleep
