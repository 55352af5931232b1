"""Fetches one event: robots.txt, conditional headers, redirects, slots and the outcome.

Opens no sockets, stores nothing and does not retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import msgspec

from penstock.fetching.proxies import Proxies
from penstock.model import ErrorClass, Event, Failure, Reason
from penstock.net.cookies import Jar
from penstock.net.guard import NotResolved
from penstock.ports import (
    Baseline,
    Cancellable,
    Clock,
    DirectFetcher,
    Done,
    Fetcher,
    Hop,
    Pace,
    Response,
    RobotsCache,
)
from penstock.rules import proxies
from penstock.rules import robots as rules
from penstock.rules.identity import BadUrl, canonical_url, host_key, origin
from penstock.rules.pace import LATE, MAX_RETRY_AFTER, parse_retry_after
from penstock.rules.reasons import sentence
from penstock.rules.verdict import Breach, breach, judge, oversized

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Headers that may be sent to another origin after a redirect. They do not identify the client.
_CROSS_ORIGIN_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "accept-language",
        "if-modified-since",
        "if-none-match",
        "user-agent",
    }
)
Sleep = Callable[[float], Awaitable[None]]
_UNREACHABLE = 0  # status of an unreachable robots.txt, as defined by ports.RobotsCache
_MAX_DELAYED_CHAINS = 8192  # above this, the oldest delayed redirect chain is dropped
# Seconds after the retry of a delayed chain is due. After that, the chain starts from the event's
# URL again.
_CHAIN_RETENTION = 600.0


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


class _CachedRobots(msgspec.Struct, frozen=True):
    robots: rules.Robots
    status: int
    until: float  # when the entry expires


class _RedirectChain(msgspec.Struct):
    """State of one request while redirects are followed."""

    url: str
    host: str
    method: str
    body: bytes | None
    headers: dict[str, str]
    conditional: bool
    jar: Jar | None
    hops: list[Hop] = []
    seen: set[tuple[str, str, str]] = set()  # (method, URL, cookies) of the requests sent
    until: float = 0.0  # when the state of a delayed chain expires


class FetchStage:
    """Fetches events: `begin` for the common case without a task, `fetch` for every case.

    The caller waits for the slot of the event's own host. Every further request reserves another
    slot (I8).
    """

    def __init__(
        self,
        fetcher: Fetcher,
        robots_cache: RobotsCache,
        pace: Pace,
        clock: Clock,
        options: FetchOptions | None = None,
        proxies: Proxies | None = None,
    ) -> None:
        self._fetcher, self._cache, self._pace, self._clock, self._proxies = (
            fetcher,
            robots_cache,
            pace,
            clock,
            proxies,
        )
        self._direct = fetcher if isinstance(fetcher, DirectFetcher) else None
        self._options = options or FetchOptions()
        self._robots: dict[str, _CachedRobots] = {}
        self._loading: dict[str, asyncio.Task[_CachedRobots]] = {}
        # Event id -> redirect chain, and origin -> (URL, hop) of a robots.txt request. Kept in this
        # worker's memory. Without them, each retry would start from the first URL, and a chain on a
        # slow host would never end.
        self._delayed_chains: dict[str, _RedirectChain] = {}
        self._delayed_robots: dict[str, tuple[str, int]] = {}
        # Origin -> consecutive failures to read its robots.txt.
        self._robots_failures: dict[str, int] = {}

    @property
    def key_by(self) -> Literal["host", "domain"]:
        return self._options.key_by

    def begin(self, event: Event, baseline: Baseline | None, done: Done) -> Cancellable | None:
        """Send the request without a task, if only the response has to be waited for.

        That is a GET without body, proxy and account, of a host that is not blocked and whose
        cached robots.txt allows it. `done` gets the response, and `is_final` decides if more
        requests are needed. Return None if no request was sent. Then call `fetch`.
        """
        ask, route, url, host = event.ask, event.route, event.url, event.key
        if (
            self._direct is None
            or ask.method != "GET"
            or ask.body is not None
            or route.account
            or proxies.needs_proxy(route)
        ):
            return None
        if event.id in self._delayed_chains:
            return None
        if self._options.robots == "obey" and not self._cache.exempt(host):
            known = self._robots.get(url[: url.find("/", 8)])
            if known is None or known.until <= self._clock.now() or not (200 <= known.status < 500):
                return None
            if known.robots is not rules.ALLOW_ALL and not known.robots.allows(
                self._options.agent, url, canonical=True
            ):
                return None
        if self._pace.blocked_until(host):
            return None
        return self._direct.begin(url, self._headers(event, baseline)[0], done)

    def is_final(self, event: Event, response: Response) -> bool:
        """Return True if this response to the request of `begin` is the final one.

        Return False if `fetch` must continue: the status is not 2xx, or the host is blocked. Raise
        Failure if the response is 2xx, but its content means a failure.
        """
        if not 200 <= response.status < 300 or self._pace.blocked_until(event.key):
            return False
        verdict = judge(
            response.status,
            response.headers,
            response.body,
            now=0.0,
            soft_404=self._options.soft_404,
        )
        if verdict is not None:
            raise verdict.failure()
        return True

    async def fetch(
        self,
        event: Event,
        baseline: Baseline | None,
        *,
        turn: int = 0,
        proxy: str | None = None,
        answer: Response | None = None,
        sleep: Sleep | None = None,
        again: bool = False,
    ) -> Response:
        """Return the final, successful response with its redirects. Raise Failure otherwise.

        If the event's route needs a proxy, requests are only sent through one.

        `turn` is how often the event was blocked. It selects the next pool of the route.
        `answer` is the response to the first request, if `begin` has sent it.
        `sleep` waits for a slot. A caller can pass a function that frees its permit.
        `again` is True if the event's slot has already been used.
        """
        sleep = sleep or self._clock.sleep
        if proxy is not None or not proxies.needs_proxy(event.route):
            return await self._fetch_chain(event, baseline, proxy, sleep, answer, again)
        if self._proxies is None:
            proxies.plan({}, event.route, key=event.id)  # raises Failure: there is no pool
            raise AssertionError
        return await self._proxies.through(
            event, turn, lambda dsn: self._fetch_chain(event, baseline, dsn, sleep, again=again)
        )

    async def _fetch_chain(
        self,
        event: Event,
        baseline: Baseline | None,
        proxy: str | None,
        sleep: Sleep,
        answer: Response | None = None,
        again: bool = False,
    ) -> Response:
        account, o = event.route.account, self._options
        account_jar = self._proxies.jar(account) if account and self._proxies is not None else None
        started = self._clock.now()
        chain = self._delayed_chains.pop(event.id, None)
        if chain is None or chain.until < started or answer is not None:
            # Without an account, only cookies that are set during the redirects are sent.
            chain = _RedirectChain(
                event.url,
                event.key,
                event.ask.method,
                event.ask.body,
                *self._headers(event, baseline),
                account_jar,
            )
        # The caller waited for the slot of the event's host. A delayed chain may be at another one.
        has_slot = chain.host == event.key and not again
        while True:
            try:
                if not has_slot:
                    await self._wait_for_slot(chain.host, o.hop_wait, sleep)
                if (
                    answer is None
                    and o.robots == "obey"
                    and not self._cache.exempt(chain.host)
                    and await self._check_robots(chain.url, chain.host, proxy)
                ):
                    # robots.txt used the slot, and its crawl delay voided all slots of the host.
                    # Delay the event. Otherwise all waiting events would wait here in turn.
                    if not chain.hops and self._pace.voided(chain.host) >= started:
                        raise breach(
                            Breach.HELD,
                            f"{chain.host}: robots.txt asks for more time between requests",
                            after=0.1,
                        )
                    await self._wait_for_slot(
                        chain.host, o.hop_wait if chain.hops else o.slot_wait, sleep
                    )
                cookies = self._cookies(chain, chain.url)
                response = await self._send(
                    chain.url,
                    chain.host,
                    chain.method,
                    {**chain.headers, "cookie": cookies} if cookies else chain.headers,
                    chain.body,
                    proxy,
                    answer,
                )
                answer, has_slot = None, False
            except proxies.ProxyFailed as e:
                # Do not start a chain again with another proxy now: its first host was already
                # requested.
                e.own = e.own and not chain.hops
                raise
            except Failure as e:
                if (chain.hops or again) and e.kind is ErrorClass.THROTTLED:
                    self._save_progress(event.id, chain, e.after or 0.0)
                raise
            location = response.headers.get("location") if response.status in _REDIRECTS else None
            if "set-cookie" in response.headers and (
                account_jar is not None or location is not None
            ):
                chain.jar = Jar() if chain.jar is None else chain.jar
                chain.jar.store(chain.url, response.headers, self._clock.now())
            if location is None:
                break
            chain.hops.append(
                Hop(
                    url=chain.url,
                    status=response.status,
                    peer=response.peer,
                    seconds=response.seconds,
                )
            )
            if len(chain.hops) > o.max_redirects:
                raise breach(
                    Breach.REDIRECTS, f"more than {o.max_redirects}", status=response.status
                )
            chain.seen.add((chain.method, chain.url, cookies))
            self._redirect_to(
                chain, self._redirect_target(chain.url, location, response.status), response.status
            )
        verdict = judge(
            response.status,
            response.headers,
            response.body,
            now=self._clock.now(),
            method=chain.method,
            conditional=chain.conditional,
            soft_404=o.soft_404,
        )
        if verdict is not None:
            raise verdict.failure()
        # Remove an account's cookies, so that they are not written to the page store or the ledger.
        if account_jar is not None and "set-cookie" in response.headers:
            response = msgspec.structs.replace(
                response, headers={k: v for k, v in response.headers.items() if k != "set-cookie"}
            )
        return msgspec.structs.replace(response, hops=tuple(chain.hops)) if chain.hops else response

    def _redirect_to(self, chain: _RedirectChain, target: str, status: int) -> None:
        """Update the request for the next hop of a redirect. Raise Failure if it is not allowed."""
        if (chain.method == "POST" and status in (301, 302)) or (
            chain.method not in ("GET", "HEAD") and status == 303
        ):
            chain.method, chain.body = "GET", None
            chain.headers = {k: v for k, v in chain.headers.items() if not k.startswith("content-")}
        if origin(target) != origin(chain.url):
            if chain.body is not None:
                raise breach(
                    Breach.NOWHERE, "the request's body would go to another origin", status=status
                )
            chain.headers = {k: v for k, v in chain.headers.items() if k in _CROSS_ORIGIN_HEADERS}
        if (chain.method, target, self._cookies(chain, target)) in chain.seen:
            raise breach(Breach.LOOP, status=status)
        chain.url, chain.host = target, host_key(target, self._options.key_by)

    def _cookies(self, chain: _RedirectChain, url: str) -> str:
        return (
            chain.jar.header(url, self._clock.now())
            if chain.jar and "cookie" not in chain.headers
            else ""
        )

    def _save_progress(self, event: str, chain: _RedirectChain, after: float) -> None:
        """Save how far a delayed redirect chain came, so that the retry does not repeat requests.

        Called if a host of the chain is throttled, or its slot is too late.
        """
        chain.until = self._clock.now() + after + _CHAIN_RETENTION
        if len(self._delayed_chains) >= _MAX_DELAYED_CHAINS:
            del self._delayed_chains[next(iter(self._delayed_chains))]
        self._delayed_chains[event] = chain

    async def robots(self, url: str, *, proxy: str | None = None) -> rules.Robots:
        """Return the robots.txt rules of this URL's origin. Fetch them if they are not cached.

        Used by `penstock fetch` and by sources that search for sitemaps.
        """
        site = origin(url)
        known = self._robots.get(site)
        if known is None or known.until <= self._clock.now():
            known, _ = await self._load_robots(site, proxy)
        return known.robots

    def remembered(self, url: str) -> tuple[rules.Robots, int] | None:
        """Return the cached robots.txt rules of this URL's origin and their HTTP status.

        Return None if they are not cached. Sends no request.
        """
        known = self._robots.get(origin(url))
        return None if known is None else (known.robots, known.status)

    async def close(self) -> None:
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- sending

    def _headers(self, event: Event, baseline: Baseline | None) -> tuple[dict[str, str], bool]:
        """Return the headers with lower-case names, and whether the request is conditional.

        Add conditional headers only if an unchanged page is sufficient.
        """
        headers = {k.lower(): v for k, v in event.ask.headers.items()} if event.ask.headers else {}
        if baseline is not None and not event.force and event.ask.method in ("GET", "HEAD"):
            if baseline.etag:
                headers.setdefault("if-none-match", baseline.etag)
            if baseline.last_modified:
                headers.setdefault("if-modified-since", baseline.last_modified)
        return headers, "if-none-match" in headers or "if-modified-since" in headers

    async def _send(
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
                raise breach(Breach.HELD, host, after=min(wait, MAX_RETRY_AFTER))
            response = await self._fetcher.fetch(
                url, method=method, headers=headers, body=body, proxy=proxy
            )
        status = response.status
        value = response.headers.get("retry-after") if status in (429, 503) else None
        after = parse_retry_after(value, self._clock.now()) if value else None
        await self._pace.report(host, status=status, retry_after=after, seconds=response.seconds)
        return response

    async def _wait_for_slot(self, host: str, max_wait: float, sleep: Sleep) -> None:
        while True:
            slot = (await self._pace.reserve({host: 1}, within=max_wait))[host][0]
            wait = slot - self._clock.now()
            if wait > max_wait:
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

    def _redirect_target(self, url: str, location: str, status: int) -> str:
        try:
            # Header values are decoded as Latin-1, but servers send non-ASCII URLs as UTF-8.
            location = location.encode("latin-1").decode("utf-8")
        except UnicodeError:
            pass
        try:
            target = canonical_url(location, url)
        except BadUrl as e:
            raise breach(Breach.NOWHERE, e.reason, status=status) from None
        if (
            url.startswith("https:")
            and target.startswith("http:")
            and not self._options.allow_downgrade
        ):
            raise breach(Breach.DOWNGRADE, status=status)
        return target

    # -- robots

    async def _check_robots(self, url: str, host: str, proxy: str | None) -> bool:
        """Return True if a request was sent for robots.txt.

        Raise Failure if robots.txt forbids the URL, or could not be fetched.
        """
        site, spent, now = origin(url), False, self._clock.now()
        known = self._robots.get(site)
        if known is None or known.until <= now:
            known, spent = await self._load_robots(site, proxy)
        if known.robots is rules.ALLOW_ALL:
            return spent
        if known.status == _UNREACHABLE or known.status >= 500:
            raise breach(
                Breach.ROBOTS_LATER,
                f"{host} answered {known.status}" if known.status else host,
                after=max(known.until - now, 1.0),
            )
        if not known.robots.allows(self._options.agent, url, canonical=True):
            raise breach(Breach.ROBOTS)
        return spent

    async def _load_robots(self, site: str, proxy: str | None) -> tuple[_CachedRobots, bool]:
        """Return the rules from the fleet's cache or the site, and whether a request was sent.

        Concurrent calls for one origin share one request.
        """
        while True:
            if (task := self._running_load(site)) is None:
                stored = await self._cache.robots(site)
                if stored is not None and stored[2] > self._clock.now():
                    return await self._cache_robots(site, *stored), False
                task = self._running_load(site)  # another call may have started a request
            if task is None:
                break
            try:
                return await asyncio.shield(task), True
            except proxies.ProxyFailed:
                pass  # the request used another event's proxy. This event's proxy may work.
        task = self._loading[site] = asyncio.ensure_future(self._fetch_robots(site, proxy))
        task.add_done_callback(lambda t: self._load_ended(site, t))
        return await asyncio.shield(task), True

    def _running_load(self, site: str) -> asyncio.Task[_CachedRobots] | None:
        """Return the task that fetches this origin's robots.txt, or None if no task is running.

        A finished task may still be registered. Waiting for it would repeat its failure in an
        endless loop.
        """
        task = self._loading.get(site)
        return None if task is None or task.done() else task

    def _load_ended(self, site: str, task: asyncio.Task[_CachedRobots]) -> None:
        if self._loading.get(site) is task:
            del self._loading[site]
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, even if no caller waits for it

    async def _cache_robots(
        self, site: str, body: bytes | None, status: int, until: float
    ) -> _CachedRobots:
        robots = rules.from_answer(status or None, body or b"")
        known = _CachedRobots(robots, status, until)
        if len(self._robots) >= self._options.robots_in_memory:
            del self._robots[next(iter(self._robots))]
        self._robots.pop(site, None)
        self._robots[site] = known
        if 200 <= status < 500:
            await self._pace.crawl_delay(
                host_key(site + "/", self._options.key_by), robots.crawl_delay(self._options.agent)
            )
        return known

    async def _fetch_robots(self, site: str, proxy: str | None) -> _CachedRobots:
        status, body = await self._request_robots(site, proxy)
        if status == _UNREACHABLE or status >= 500:
            failures = self._robots_failures.pop(site, 0)
            if len(self._robots_failures) >= self._options.robots_in_memory:
                del self._robots_failures[next(iter(self._robots_failures))]
            self._robots_failures[site] = failures + 1
            keep = rules.ttl(status or None, failures)
        else:
            self._robots_failures.pop(site, None)
            keep = rules.ttl(status)
        until = self._clock.now() + keep
        await self._cache.keep_robots(site, body, status, until)
        return await self._cache_robots(site, body, status, until)

    async def _request_robots(self, site: str, proxy: str | None) -> tuple[int, bytes | None]:
        url, first_hop = self._delayed_robots.pop(site, (site + "/robots.txt", 0))
        for hop in range(first_hop, self._options.robots_redirects + 1):
            host = host_key(url, self._options.key_by)
            try:
                # The first request uses the slot of the page.
                if hop > first_hop or host != host_key(site, self._options.key_by):
                    await self._wait_for_slot(host, self._options.hop_wait, self._clock.sleep)
                response = await self._send(url, host, "GET", {}, None, proxy)
            except proxies.ProxyFailed:
                raise  # the failure of a proxy has no meaning for the site
            except Failure as e:
                if not hop and isinstance(e, NotResolved):
                    # The host does not exist, so it has no robots.txt rules. Fail the page with the
                    # same error now.
                    raise
                if e.kind is ErrorClass.TRANSIENT or oversized(e):
                    return _UNREACHABLE, None
                if hop and e.kind is ErrorClass.PERMANENT:
                    # The redirect leads to a URL that is not fetched. That counts as a site without
                    # robots.txt (RFC 9309, 2.3.1.2).
                    return 404, None
                if e.kind is ErrorClass.PERMANENT:
                    raise  # the page has the same origin and would fail with the same error
                if hop and e.kind is ErrorClass.THROTTLED:
                    if len(self._delayed_robots) >= self._options.robots_in_memory:
                        self._delayed_robots.clear()
                    self._delayed_robots[site] = url, hop  # the retry continues here
                raise Failure(
                    e.kind,
                    f"robots.txt: {e.reason}",
                    after=e.after,
                    status=e.status,
                    detail=e.detail,
                ) from e
            location = response.headers.get("location") if response.status in _REDIRECTS else None
            if location is None:
                if response.status == 429:
                    # 429 is a 4xx status, but it must not count as "no robots.txt".
                    return 503, None
                return response.status, response.body[
                    : rules.MAX_BYTES + 1
                ] if 200 <= response.status < 300 else None
            try:
                url = canonical_url(location, url)
            except BadUrl:
                return 404, None
        return 404, None
