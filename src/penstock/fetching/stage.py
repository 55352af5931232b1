"""Fetches one event: robots.txt, conditional headers, redirects, slots and the outcome.

Opens no sockets, stores nothing and does not retry.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Literal

import msgspec

from penstock.fetching import redirects
from penstock.fetching.proxies import Proxies
from penstock.fetching.redirects import RedirectChain
from penstock.fetching.robots import RobotsTxt
from penstock.fetching.sending import REDIRECTS, FetchOptions, Sender, Sleep
from penstock.model import ErrorClass, Event, Failure, Reason
from penstock.net.cookies import Jar
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
from penstock.rules.identity import BadUrl, canonical_url, host_key, origin
from penstock.rules.reasons import sentence
from penstock.rules.robots import Robots
from penstock.rules.routes import needs_proxy
from penstock.rules.verdict import breach, judge

__all__ = ["FetchOptions", "FetchStage"]

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


class _Running(msgspec.Struct, eq=False):
    """A fetch in progress: its only request, or the task of the whole fetch."""

    stage: FetchStage
    event: Event
    baseline: Baseline | None
    done: Done
    turn: int
    sleep: Sleep | None
    again: bool
    progress: bytes
    part: Cancellable | None = None

    def cancel(self) -> None:
        if self.part is not None:
            self.part.cancel()

    def on_response(self, answer: Response | BaseException) -> None:
        """Deliver the result of a request without a task, or continue with it in a task."""
        try:
            if isinstance(answer, Response) and not self.stage.is_final(self.event, answer):
                self.start_task(answer)
                return
        except Exception as e:
            answer = e
        self.done(answer)

    def start_task(self, answer: Response | None = None) -> None:
        self.part = task = asyncio.ensure_future(
            self.stage.fetch(
                self.event,
                self.baseline,
                turn=self.turn,
                answer=answer,
                sleep=self.sleep,
                again=self.again,
                progress=self.progress,
            )
        )
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[Response]) -> None:
        if task.cancelled():
            self.done(asyncio.CancelledError())
        else:
            self.done(task.exception() or task.result())


class FetchStage:
    """Fetches events: `start` for the worker, `fetch` for sources and commands.

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
        self._pace, self._clock, self._proxies = pace, clock, proxies
        self._direct = fetcher if isinstance(fetcher, DirectFetcher) else None
        self._options = options or FetchOptions()
        self._kept_cookies = redirects.KeptCookies()
        self._sender = Sender(fetcher, pace, clock)
        self._robots = RobotsTxt(self._sender, robots_cache, pace, clock, self._options)

    @property
    def key_by(self) -> Literal["host", "domain"]:
        return self._options.key_by

    def start(
        self,
        event: Event,
        baseline: Baseline | None,
        done: Done,
        *,
        turn: int = 0,
        sleep: Sleep | None = None,
        again: bool = False,
        progress: bytes = b"",
    ) -> _Running:
        """See ports.PageFetcher."""
        running = _Running(self, event, baseline, done, turn, sleep, again, progress)
        if (
            not again
            and not progress
            and self._needs_one_request(event)
            and self._direct is not None
        ):
            headers, _ = self._headers(event, baseline)
            running.part = self._direct.begin(event.url, headers, running.on_response)
        if running.part is None:
            running.start_task()
        return running

    def _needs_one_request(self, event: Event) -> bool:
        """Return True if only the response has to be waited for.

        That is a GET without body, proxy and account, of a host that is not blocked and whose
        cached robots.txt allows it. The response may still be a redirect.
        """
        ask, route = event.ask, event.route
        return (
            ask.method == "GET"
            and ask.body is None
            and not route.account
            and not needs_proxy(route)
            and not route.render
            and not self._pace.blocked_until(event.key)
            and self._robots.allows_now(event.url, event.key)
        )

    def is_final(self, event: Event, response: Response) -> bool:
        """Return True if this response to a request without a task is the final one.

        Return False if `fetch` must continue: the status is not 2xx, or the host is blocked. Raise
        Failure if the response is 2xx, but its content means a failure.
        """
        if not 200 <= response.status < 300 or self._pace.blocked_until(event.key):
            return False
        failure = judge(
            response.status,
            response.headers,
            response.body,
            now=0.0,
            soft_404=self._options.soft_404,
        )
        if failure is not None:
            raise failure
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
        progress: bytes = b"",
    ) -> Response:
        """Return the final, successful response with its redirects. Raise Failure otherwise.

        If the event's route needs a proxy, requests are only sent through one.

        `turn` is how often the event was blocked. It selects the next pool of the route.
        `answer` is the response to the first request, if `start` has sent it.
        `sleep` waits for a slot. A caller can pass a function that frees its permit.
        `again` is True if the event's slot has already been used.
        `progress` is that of an earlier failure. Its redirects are continued.
        """
        sleep = sleep or self._clock.sleep
        if event.route.render:
            raise Failure(ErrorClass.PERMANENT, sentence(Reason.RENDER), code=Reason.RENDER)
        send = partial(
            self._fetch_chain, event, baseline, sleep=sleep, again=again, progress=progress
        )
        try:
            if proxy is not None or not needs_proxy(event.route):
                return await send(proxy, answer=answer)
            if self._proxies is None:
                proxies.plan({}, event.route, key=event.id)  # raises Failure: there is no pool
                raise AssertionError
            return await self._proxies.through(event, turn, send)
        except Failure as e:
            # If nothing was sent, for example because the pool is exhausted, the chain is where it
            # was.
            if e.kind is ErrorClass.THROTTLED and e.status is None:
                e.progress = e.progress or progress
            raise

    async def _fetch_chain(
        self,
        event: Event,
        baseline: Baseline | None,
        proxy: str | None,
        sleep: Sleep,
        answer: Response | None = None,
        again: bool = False,
        progress: bytes = b"",
    ) -> Response:
        account, o = event.route.account, self._options
        account_jar = self._proxies.jar(account) if account and self._proxies is not None else None
        started = self._clock.now()
        chain = redirects.resume(
            progress, event, account_jar, self._kept_cookies, key_by=o.key_by, now=started
        )
        if chain is None:
            # Without an account, only cookies that are set during the redirects are sent.
            chain = RedirectChain(
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
                    await self._sender.wait_for_slot(chain.host, o.hop_wait, sleep)
                if (
                    answer is None
                    and self._robots.applies(chain.host)
                    and await self._robots.check(chain.url, chain.host, proxy)
                ):
                    # robots.txt used the slot, and its crawl delay voided all slots of the host.
                    # Delay the event. Otherwise all waiting events would wait here in turn.
                    if not chain.hops and self._pace.voided(chain.host) >= started:
                        raise breach(
                            Reason.HELD,
                            f"{chain.host}: robots.txt asks for more time between requests",
                            after=0.1,
                        )
                    await self._sender.wait_for_slot(
                        chain.host, o.hop_wait if chain.hops else o.slot_wait, sleep
                    )
                cookies = self._cookies(chain, chain.url)
                headers = {**chain.headers, "cookie": cookies} if cookies else chain.headers
                response = await self._sender.send(
                    chain.url, chain.host, chain.method, headers, chain.body, proxy, answer
                )
                answer, has_slot = None, False
            except proxies.ProxyFailed as e:
                # Do not start a chain again with another proxy now: its first host was already
                # requested.
                e.own = e.own and not chain.hops
                raise
            except Failure as e:
                # The next attempt, maybe of another worker, does not repeat these requests.
                if (chain.hops or again) and e.kind is ErrorClass.THROTTLED:
                    due = self._clock.now() + (e.after or 0.0)
                    e.progress = redirects.save(chain, account_jar, due, event, self._kept_cookies)
                raise
            location = response.headers.get("location") if response.status in REDIRECTS else None
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
                    Reason.REDIRECTS, f"more than {o.max_redirects}", status=response.status
                )
            chain.seen.add(redirects.mark(chain.method, chain.url, cookies))
            self._redirect_to(
                chain, self._redirect_target(chain.url, location, response.status), response.status
            )
        failure = judge(
            response.status,
            response.headers,
            response.body,
            now=self._clock.now(),
            method=chain.method,
            conditional=chain.conditional,
            soft_404=o.soft_404,
        )
        if failure is not None:
            raise failure
        # Remove an account's cookies, so that they are not written to the page store or the ledger.
        if account_jar is not None and "set-cookie" in response.headers:
            response = msgspec.structs.replace(
                response, headers={k: v for k, v in response.headers.items() if k != "set-cookie"}
            )
        return msgspec.structs.replace(response, hops=tuple(chain.hops)) if chain.hops else response

    def _redirect_to(self, chain: RedirectChain, target: str, status: int) -> None:
        """Update the request for the next hop of a redirect. Raise Failure if it is not allowed."""
        if (chain.method == "POST" and status in (301, 302)) or (
            chain.method not in ("GET", "HEAD") and status == 303
        ):
            chain.method, chain.body = "GET", None
            chain.headers = {k: v for k, v in chain.headers.items() if not k.startswith("content-")}
        if origin(target) != origin(chain.url):
            if chain.body is not None:
                raise breach(
                    Reason.NOWHERE, "the request's body would go to another origin", status=status
                )
            chain.headers = {k: v for k, v in chain.headers.items() if k in _CROSS_ORIGIN_HEADERS}
        if redirects.mark(chain.method, target, self._cookies(chain, target)) in chain.seen:
            raise breach(Reason.LOOP, status=status)
        chain.url, chain.host = target, host_key(target, self._options.key_by)

    def _cookies(self, chain: RedirectChain, url: str) -> str:
        return (
            chain.jar.header(url, self._clock.now())
            if chain.jar and "cookie" not in chain.headers
            else ""
        )

    async def close(self) -> None:
        await self._robots.close()

    def remembered(self, url: str) -> tuple[Robots, int] | None:
        """Return the cached robots.txt rules of this URL's origin and their HTTP status.

        Return None if they are not cached. Sends no request.
        """
        known = self._robots.cached(origin(url))
        return None if known is None else (known.robots, known.status)

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

    def _redirect_target(self, url: str, location: str, status: int) -> str:
        try:
            # Header values are decoded as Latin-1, but servers send non-ASCII URLs as UTF-8.
            location = location.encode("latin-1").decode("utf-8")
        except UnicodeError:
            pass
        try:
            target = canonical_url(location, url)
        except BadUrl as e:
            raise breach(Reason.NOWHERE, e.reason, status=status) from None
        if (
            url.startswith("https:")
            and target.startswith("http:")
            and not self._options.allow_downgrade
        ):
            raise breach(Reason.DOWNGRADE, status=status)
        return target
