"""One event to one answer: robots, conditional headers, redirects hop by hop, pace, verdict. No
sockets, no retries, no storing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import msgspec

from penstock.fetching.proxies import Proxies
from penstock.model import ErrorClass, Event, Failure
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
from penstock.rules.verdict import Breach, breach, judge, oversized

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# What may go along to another origin: it says what we can read, not who we are.
_HARMLESS = frozenset(
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
_UNREACHABLE = 0  # as ports.RobotsCache has it
_REMEMBERED, _RETURNS = (
    8192,
    600.0,
)  # chains that were put off half-way, and seconds beyond its time after which one begins anew


class FetchOptions(msgspec.Struct, frozen=True, kw_only=True):
    agent: str = "Penstock"  # the product token that robots.txt knows us by
    robots: Literal["obey", "ignore"] = "obey"
    robots_redirects: int = 5
    robots_in_memory: int = 8192  # origins
    max_redirects: int = 10
    allow_downgrade: bool = False  # https → http
    # seconds a redirect may wait for its slot; beyond that the event is put off, and goes on from
    # there
    hop_wait: float = 30.0
    slot_wait: float = (
        30.0  # the same for the page whose slot went to robots.txt; beyond that it is put off
    )
    key_by: Literal["host", "domain"] = "host"
    soft_404: bool = False


class _Known(msgspec.Struct, frozen=True):
    robots: rules.Robots
    status: int
    until: float


class _Way(msgspec.Struct):
    """How far a request has come, redirect by redirect."""

    url: str
    host: str
    method: str
    body: bytes | None
    headers: dict[str, str]
    conditional: bool
    jar: Jar | None
    hops: list[Hop] = []
    seen: set[tuple[str, str, str]] = set()
    until: float = 0.0  # put off: after that it is forgotten


class FetchStage:
    """The slot of the event's own host was awaited before `fetch` is called; every further request
    takes one of its own (I8).
    """

    def __init__(
        self, fetcher: Fetcher, robots_cache: RobotsCache, pace: Pace, clock: Clock, options: FetchOptions | None = None, proxies: Proxies | None = None
    ) -> None:  # fmt: skip
        self._fetcher, self._cache, self._pace, self._clock, self._proxies = (
            fetcher,
            robots_cache,
            pace,
            clock,
            proxies,
        )
        self._direct = fetcher if isinstance(fetcher, DirectFetcher) else None
        self._options = options or FetchOptions()
        self._robots: dict[str, _Known] = {}
        self._loading: dict[str, asyncio.Task[_Known]] = {}
        # By event and by origin, in the memory of this worker: begun anew each time, a chain on a
        # slow host would never come to its end.
        self._halfway: dict[str, _Way] = {}
        self._robots_at: dict[str, tuple[str, int]] = {}
        self._misses: dict[
            str, int
        ] = {}  # origins whose robots.txt cannot be reached, and how often in a row

    @property
    def key_by(self) -> Literal["host", "domain"]:
        return self._options.key_by

    def begin(self, event: Event, baseline: Baseline | None, done: Done) -> Cancellable | None:
        """Without a task, where there is nothing to wait for but the answer: a GET, no proxy, no
        account, robots.txt known and in favour, the host held back by nobody. `done` gets what
        came; `is_final` says whether that is all. None, and nothing was sent: `fetch` has to see to
        it.
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
        if event.id in self._halfway:
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
        """Is this answer, to what `begin` sent, the one to go on with? False: there is more to do,
        by `fetch`. Raises Failure by its verdict.
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
        self, event: Event, baseline: Baseline | None, *, turn: int = 0, proxy: str | None = None, answer: Response | None = None,
        sleep: Sleep | None = None, again: bool = False,
    ) -> Response:  # fmt: skip
        """The final answer, with the hops that led to it; its verdict is good. Raises Failure for
        everything else.

        An event whose route asks for a proxy goes through one or not at all. `turn`: how often it
        was blocked, so which of its pools is next. `answer`: to its first request, where `begin`
        has sent that. `sleep`: how to wait for a slot, where the caller has other use for the time.
        `again`: its slot was used already.
        """
        sleep = sleep or self._clock.sleep
        if proxy is not None or not proxies.needs_proxy(event.route):
            return await self._walk(event, baseline, proxy, sleep, answer, again)
        if self._proxies is None:
            proxies.plan({}, event.route, key=event.id)  # raises: there is no such pool
            raise AssertionError
        return await self._proxies.through(
            event, turn, lambda dsn: self._walk(event, baseline, dsn, sleep, again=again)
        )

    async def _walk(
        self, event: Event, baseline: Baseline | None, proxy: str | None, sleep: Sleep, answer: Response | None = None, again: bool = False
    ) -> Response:  # fmt: skip
        account, o = event.route.account, self._options
        session = self._proxies.jar(account) if account and self._proxies is not None else None
        started = self._clock.now()
        way = self._halfway.pop(event.id, None)
        if way is None or way.until < started or answer is not None:
            # Without an account there is no jar, but for what a chain of redirects sets on its way.
            way = _Way(
                event.url,
                event.key,
                event.ask.method,
                event.ask.body,
                *self._headers(event, baseline),
                session,
            )
        slotted = (
            way.host == event.key and not again
        )  # where it goes on with its own host, it has a slot of that
        while True:
            try:
                if not slotted:
                    await self._take_slot(way.host, o.hop_wait, sleep)
                if (
                    answer is None
                    and o.robots == "obey"
                    and not self._cache.exempt(way.host)
                    and await self._permit(way.url, way.host, proxy)
                ):
                    if (
                        not way.hops and self._pace.voided(way.host) >= started
                    ):  # all that waited for it would wait here, one crawl delay after the other
                        raise breach(
                            Breach.HELD,
                            f"{way.host}: robots.txt asks for more time between requests",
                            after=0.1,
                        )
                    await self._take_slot(
                        way.host, o.hop_wait if way.hops else o.slot_wait, sleep
                    )  # robots.txt was fetched in ours
                cookies = self._cookies(way, way.url)
                response = await self._send(
                    way.url,
                    way.host,
                    way.method,
                    {**way.headers, "cookie": cookies} if cookies else way.headers,
                    way.body,
                    proxy,
                    answer,
                )
                answer, slotted = None, False
            except proxies.ProxyFailed as e:
                e.own = (
                    e.own and not way.hops
                )  # a chain is not begun again at once: its first host was asked already
                raise
            except Failure as e:
                if (way.hops or again) and e.kind is ErrorClass.THROTTLED:
                    self._keep(event.id, way, e.after or 0.0)
                raise
            location = response.headers.get("location") if response.status in _REDIRECTS else None
            if "set-cookie" in response.headers and (session is not None or location is not None):
                way.jar = Jar() if way.jar is None else way.jar
                way.jar.store(way.url, response.headers, self._clock.now())
            if location is None:
                break
            way.hops.append(
                Hop(
                    url=way.url,
                    status=response.status,
                    peer=response.peer,
                    seconds=response.seconds,
                )
            )
            if len(way.hops) > o.max_redirects:
                raise breach(
                    Breach.REDIRECTS, f"more than {o.max_redirects}", status=response.status
                )
            way.seen.add((way.method, way.url, cookies))
            self._turn_to(way, self._follow(way.url, location, response.status), response.status)
        verdict = judge(
            response.status, response.headers, response.body, now=self._clock.now(), method=way.method, conditional=way.conditional, soft_404=o.soft_404
        )  # fmt: skip
        if verdict is not None:
            raise verdict.failure()
        if (
            session is not None and "set-cookie" in response.headers
        ):  # an account's, which no page store or ledger need know
            response = msgspec.structs.replace(
                response, headers={k: v for k, v in response.headers.items() if k != "set-cookie"}
            )
        return msgspec.structs.replace(response, hops=tuple(way.hops)) if way.hops else response

    def _turn_to(self, way: _Way, target: str, status: int) -> None:
        """What is left of the request after this redirect. Raises Failure."""
        if (way.method == "POST" and status in (301, 302)) or (
            way.method not in ("GET", "HEAD") and status == 303
        ):
            way.method, way.body = "GET", None
            way.headers = {k: v for k, v in way.headers.items() if not k.startswith("content-")}
        if origin(target) != origin(way.url):
            if way.body is not None:
                raise breach(
                    Breach.NOWHERE, "the request's body would go to another origin", status=status
                )
            way.headers = {k: v for k, v in way.headers.items() if k in _HARMLESS}
        if (way.method, target, self._cookies(way, target)) in way.seen:
            raise breach(Breach.LOOP, status=status)
        way.url, way.host = target, host_key(target, self._options.key_by)

    def _cookies(self, way: _Way, url: str) -> str:
        return (
            way.jar.header(url, self._clock.now())
            if way.jar and "cookie" not in way.headers
            else ""
        )

    def _keep(self, event: str, way: _Way, after: float) -> None:
        """It was told to come back: the hosts behind it have answered, and are not asked again."""
        way.until = self._clock.now() + after + _RETURNS
        if len(self._halfway) >= _REMEMBERED:
            del self._halfway[next(iter(self._halfway))]
        self._halfway[event] = way

    async def robots(self, url: str, *, proxy: str | None = None) -> rules.Robots:
        """The rules for this URL's origin, fetched if need be: for `penstock fetch`, and for
        sources that look for sitemaps.
        """
        start = origin(url)
        known = self._robots.get(start)
        if known is None or known.until <= self._clock.now():
            known, _ = await self._load(start, proxy)
        return known.robots

    def remembered(self, url: str) -> tuple[rules.Robots, int] | None:
        """The rules that were last applied to this URL's origin, and the status they came with;
        nothing is fetched.
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
        """Lower-case names. Conditional only where an unchanged page would be good enough."""
        headers = {k.lower(): v for k, v in event.ask.headers.items()} if event.ask.headers else {}
        if baseline is not None and not event.force and event.ask.method in ("GET", "HEAD"):
            if baseline.etag:
                headers.setdefault("if-none-match", baseline.etag)
            if baseline.last_modified:
                headers.setdefault("if-modified-since", baseline.last_modified)
        return headers, "if-none-match" in headers or "if-modified-since" in headers

    async def _send(
        self, url: str, host: str, method: str, headers: Mapping[str, str], body: bytes | None, proxy: str | None, response: Response | None = None
    ) -> Response:  # fmt: skip
        if response is None:
            if self._pace.blocked_until(host) > self._clock.now():
                # an operator may have resumed it since the last look: put off now, it would be for
                # long
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

    async def _take_slot(self, host: str, patience: float, sleep: Sleep) -> None:
        while True:
            slot = (await self._pace.reserve({host: 1}, within=patience))[host][0]
            wait = slot - self._clock.now()
            if wait > patience:
                raise Failure(
                    ErrorClass.THROTTLED,
                    f"the next slot of {host} is too far away to wait for",
                    after=wait,
                )
            if wait <= 0:
                return
            await sleep(wait)
            if self._clock.now() <= slot + LATE:
                return
            sleep = (
                self._clock.sleep
            )  # the caller's took longer than the slot lasts, and might each time

    def _follow(self, url: str, location: str, status: int) -> str:
        try:
            location = location.encode("latin-1").decode(
                "utf-8"
            )  # headers are read as Latin-1; what servers write raw is UTF-8
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

    async def _permit(self, url: str, host: str, proxy: str | None) -> bool:
        """Raises Failure where robots.txt forbids. True: a request was spent on finding out."""
        start, spent, now = origin(url), False, self._clock.now()
        known = self._robots.get(start)
        if known is None or known.until <= now:
            known, spent = await self._load(start, proxy)
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

    async def _load(self, start: str, proxy: str | None) -> tuple[_Known, bool]:
        """From the fleet's cache, or from the site: once, however many ask."""
        while True:
            if (task := self._under_way(start)) is None:
                stored = await self._cache.robots(start)
                if stored is not None and stored[2] > self._clock.now():
                    return await self._learn(start, *stored), False
                task = self._under_way(start)  # another may have begun meanwhile
            if task is None:
                break
            try:
                return await asyncio.shield(task), True
            except proxies.ProxyFailed:
                pass  # that was the other's proxy; ours may do better
        task = self._loading[start] = asyncio.ensure_future(self._fetch_robots(start, proxy))
        task.add_done_callback(lambda t: self._loaded(start, t))
        return await asyncio.shield(task), True

    def _under_way(self, start: str) -> asyncio.Task[_Known] | None:
        """One that is done, but not yet taken off the list, is nothing to wait for: asked again at
        once, it would fail again at once, for ever.
        """
        task = self._loading.get(start)
        return None if task is None or task.done() else task

    def _loaded(self, start: str, task: asyncio.Task[_Known]) -> None:
        if self._loading.get(start) is task:
            del self._loading[start]
        if not task.cancelled():
            task.exception()  # whoever waited has it; where nobody waits any more, it is not news

    async def _learn(self, start: str, body: bytes | None, status: int, until: float) -> _Known:
        robots = rules.from_answer(status or None, body or b"")
        known = _Known(robots, status, until)
        if len(self._robots) >= self._options.robots_in_memory:
            del self._robots[next(iter(self._robots))]
        self._robots.pop(start, None)
        self._robots[start] = known
        if 200 <= status < 500:
            await self._pace.crawl_delay(
                host_key(start + "/", self._options.key_by), robots.crawl_delay(self._options.agent)
            )
        return known

    async def _fetch_robots(self, start: str, proxy: str | None) -> _Known:
        status, body = await self._ask_robots(start, proxy)
        if status == _UNREACHABLE or status >= 500:
            misses = self._misses.pop(start, 0)
            if len(self._misses) >= self._options.robots_in_memory:
                del self._misses[next(iter(self._misses))]
            self._misses[start] = misses + 1
            keep = rules.ttl(status or None, misses)
        else:
            self._misses.pop(start, None)
            keep = rules.ttl(status)
        until = self._clock.now() + keep
        await self._cache.keep_robots(start, body, status, until)
        return await self._learn(start, body, status, until)

    async def _ask_robots(self, start: str, proxy: str | None) -> tuple[int, bytes | None]:
        url, begun = self._robots_at.pop(start, (start + "/robots.txt", 0))
        for hop in range(begun, self._options.robots_redirects + 1):
            host = host_key(url, self._options.key_by)
            try:
                if hop > begun or host != host_key(
                    start, self._options.key_by
                ):  # the first has the slot of the page
                    await self._take_slot(host, self._options.hop_wait, self._clock.sleep)
                response = await self._send(url, host, "GET", {}, None, proxy)
            except proxies.ProxyFailed:
                raise  # says nothing about the site
            except Failure as e:
                if not hop and isinstance(e, NotResolved):
                    # there is no host, so there is none whose wishes are unknown: the page fails by
                    # that name too, and at once
                    raise
                if e.kind is ErrorClass.TRANSIENT or oversized(e):
                    return _UNREACHABLE, None
                if hop and e.kind is ErrorClass.PERMANENT:
                    return (
                        404,
                        None,
                    )  # it leads where we do not go: there is none (RFC 9309, 2.3.1.2)
                if e.kind is ErrorClass.PERMANENT:
                    raise  # the page would fare no better: same origin, same answer
                if hop and e.kind is ErrorClass.THROTTLED:
                    if len(self._robots_at) >= self._options.robots_in_memory:
                        self._robots_at.clear()
                    self._robots_at[start] = url, hop  # to go on from
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
                    return 503, None  # "not now" is no permission, though it is a 4xx
                return response.status, response.body[
                    : rules.MAX_BYTES + 1
                ] if 200 <= response.status < 300 else None
            try:
                url = canonical_url(location, url)
            except BadUrl:
                return 404, None
        return 404, None
