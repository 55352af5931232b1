"""robots.txt of origins: loads the rules, caches them, and checks URLs."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.fetching.sending import REDIRECTS, FetchOptions, Sender, keep
from penstock.model import ErrorClass, Failure, Reason
from penstock.net.guard import NotResolved
from penstock.ports import Clock, Pace, RobotsCache
from penstock.rules import robots as rules
from penstock.rules.identity import BadUrl, canonical_url, host_key, origin
from penstock.rules.proxies import ProxyFailed
from penstock.rules.verdict import breach, oversized

# Bytes of memory for the rules of all origins in one worker. The fleet's cache has the other rules.
RULES_IN_MEMORY = 32 << 20
_UNREACHABLE = 0  # status of an unreachable robots.txt, as defined by ports.RobotsCache


class CachedRules(msgspec.Struct, frozen=True):
    """Rules of one origin in this worker's memory."""

    robots: rules.Robots
    status: int
    until: float  # when the entry expires
    size: int  # bytes of memory


class RobotsTxt:
    """robots.txt of all origins that one worker requests."""

    def __init__(
        self, sender: Sender, cache: RobotsCache, pace: Pace, clock: Clock, options: FetchOptions
    ) -> None:
        self._sender, self._cache, self._pace, self._clock = sender, cache, pace, clock
        self._options = options
        self._known: dict[str, CachedRules] = {}
        self._size = 0  # bytes of memory of the known rules
        self._parsing = asyncio.Lock()  # parses large files one after the other, to bound memory
        self._loading: dict[str, asyncio.Task[CachedRules]] = {}
        # Origin -> (URL, hop) of a request that was delayed after a redirect. The retry continues
        # there. Otherwise a redirect to a slow host would never end.
        self._delayed: dict[str, tuple[str, int]] = {}
        self._failures: dict[str, int] = {}  # origin -> failures in a row

    def cached(self, site: str) -> CachedRules | None:
        """Return the cached rules of an origin, even if they have expired."""
        return self._known.get(site)

    def applies(self, host: str) -> bool:
        """Return True if the robots.txt of this host is obeyed."""
        return self._options.robots == "obey" and not self._cache.exempt(host)

    def allows_now(self, url: str, host: str) -> bool:
        """Return True if the URL is allowed, and no request is needed to know that."""
        if not self.applies(host):
            return True
        known = self._known.get(url[: url.find("/", 8)])
        return (
            known is not None
            and 200 <= known.status < 500
            and known.until > self._clock.now()
            and (
                known.robots is rules.ALLOW_ALL
                or known.robots.allows(self._options.agent, url, canonical=True)
            )
        )

    async def check(self, url: str, host: str, proxy: str | None) -> bool:
        """Return True if a request was sent for robots.txt.

        Raise Failure if robots.txt forbids the URL, or could not be fetched.
        """
        now = self._clock.now()
        known, sent = await self.load(origin(url), proxy)
        if known.robots is rules.ALLOW_ALL:
            return sent
        if known.status == _UNREACHABLE or known.status >= 500:
            raise breach(
                Reason.ROBOTS_LATER,
                f"{host} answered {known.status}" if known.status else host,
                after=max(known.until - now, 1.0),
            )
        if not known.robots.allows(self._options.agent, url, canonical=True):
            raise breach(Reason.ROBOTS)
        return sent

    async def load(self, site: str, proxy: str | None) -> tuple[CachedRules, bool]:
        """Return the rules of an origin, and whether a request was sent.

        The rules come from this worker's memory, the fleet's cache or the site. Concurrent calls
        for one origin share one request.
        """
        known = self._known.get(site)
        if known is not None and known.until > self._clock.now():
            return known, False
        while True:
            if (task := self._running_load(site)) is None:
                stored = await self._cache.robots(site)
                if stored is not None and stored[2] > self._clock.now():
                    return await self._keep(site, *stored), False
                task = self._running_load(site)  # another call may have started a request
            if task is None:
                break
            try:
                return await asyncio.shield(task), True
            except ProxyFailed:
                pass  # the request used another event's proxy. This event's proxy may work.
        task = self._loading[site] = asyncio.ensure_future(self._fetch(site, proxy))
        task.add_done_callback(lambda t: self._load_ended(site, t))
        return await asyncio.shield(task), True

    def _running_load(self, site: str) -> asyncio.Task[CachedRules] | None:
        """Return the task that fetches this origin's robots.txt, or None if no task is running.

        A finished task may still be registered. Waiting for it would repeat its failure in an
        endless loop.
        """
        task = self._loading.get(site)
        return None if task is None or task.done() else task

    def _load_ended(self, site: str, task: asyncio.Task[CachedRules]) -> None:
        if self._loading.get(site) is task:
            del self._loading[site]
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, even if no caller waits for it

    async def close(self) -> None:
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- fetching ----------------------------------------------------------------------------------

    async def _keep(self, site: str, body: bytes | None, status: int, until: float) -> CachedRules:
        known = await self._parse(site, body or b"", status, until)
        await self._remember(site, known)
        return known

    async def _parse(self, site: str, body: bytes, status: int, until: float) -> CachedRules:
        """Return the rules. A large file is parsed in a thread, so that the loop continues.

        Many events of one site may load its file from the fleet's cache together. The first parses
        it for all of them.
        """

        def parse() -> rules.Robots:
            return rules.from_answer(status or None, body).only_for(self._options.agent)

        if len(body) <= rules.QUICK_BYTES:
            robots = parse()
            return CachedRules(robots, status, until, robots.size)
        async with self._parsing:
            known = self._known.get(site)
            if known is not None and known.until >= until:
                return known
            robots = await asyncio.to_thread(parse)
            await self._remember(site, known := CachedRules(robots, status, until, robots.size))
        return known

    async def _remember(self, site: str, known: CachedRules) -> None:
        if (old := self._known.pop(site, None)) is not None:
            self._size -= old.size
        self._size += known.size
        self._known[site] = known
        # The newest entry stays, even if it is too large alone: the next event of its site needs
        # it.
        while len(self._known) > 1 and (
            self._size > RULES_IN_MEMORY or len(self._known) > self._options.robots_in_memory
        ):
            self._size -= self._known.pop(next(iter(self._known))).size
        if 200 <= known.status < 500:
            await self._pace.crawl_delay(
                host_key(site + "/", self._options.key_by),
                known.robots.crawl_delay(self._options.agent),
            )

    async def _fetch(self, site: str, proxy: str | None) -> CachedRules:
        status, body = await self._request(site, proxy)
        failures = self._failures.pop(site, 0)
        if status == _UNREACHABLE or status >= 500:
            keep(self._failures, site, failures + 1, self._options.robots_in_memory)
            ttl = rules.ttl(status or None, failures)
        else:
            ttl = rules.ttl(status)
        until = self._clock.now() + ttl
        # The rules are parsed first. A file that stops this worker is not stored, so that a restart
        # does not meet it again.
        known = await self._parse(site, body or b"", status, until)
        await self._cache.keep_robots(site, body, status, until)
        await self._remember(site, known)
        return known

    async def _request(self, site: str, proxy: str | None) -> tuple[int, bytes | None]:
        """Return status and body of a robots.txt. Follow its redirects."""
        o = self._options
        url, first_hop = self._delayed.pop(site, (site + "/robots.txt", 0))
        for hop in range(first_hop, o.robots_redirects + 1):
            host = host_key(url, o.key_by)
            try:
                # The first request uses the slot of the page.
                if hop > first_hop or host != host_key(site, o.key_by):
                    await self._sender.wait_for_slot(host, o.hop_wait, self._clock.sleep)
                response = await self._sender.send(url, host, "GET", {}, None, proxy)
            except ProxyFailed:
                raise  # the failure of a proxy has no meaning for the site
            except Failure as e:
                if not hop and isinstance(e, NotResolved):
                    # The host does not exist, so it has no robots.txt rules. Fail the page with the
                    # same error now.
                    raise
                # SLOW depends on the load of this worker, so it is not stored.
                if (e.kind is ErrorClass.TRANSIENT and e.code is not Reason.SLOW) or oversized(e):
                    return _UNREACHABLE, None
                if e.kind is ErrorClass.PERMANENT:
                    if not hop:
                        raise  # the page has the same origin and would fail with the same error
                    # The redirect leads to a URL that is not fetched. That counts as a site without
                    # robots.txt (RFC 9309, 2.3.1.2).
                    return 404, None
                if hop and e.kind is ErrorClass.THROTTLED:
                    keep(self._delayed, site, (url, hop), o.robots_in_memory)
                if e.waits_for:
                    raise
                raise Failure(
                    e.kind,
                    f"robots.txt: {e.reason}",
                    code=e.code,
                    after=e.after,
                    status=e.status,
                    detail=e.detail,
                ) from e
            location = response.headers.get("location") if response.status in REDIRECTS else None
            if location is None:
                if response.status == 429:
                    # 429 is a 4xx status, but it must not count as "no robots.txt".
                    return 503, None
                found = 200 <= response.status < 300
                return response.status, response.body[: rules.MAX_BYTES + 1] if found else None
            try:
                url = canonical_url(location, url)
            except BadUrl:
                return 404, None
        return 404, None
