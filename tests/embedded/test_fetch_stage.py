"""The fetch stage with the real client: robots, conditional requests, redirects and slots."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import math
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.fetching import redirects
from penstock.fetching.robots import RobotsTxt
from penstock.fetching.sending import Sender
from penstock.fetching.stage import FetchOptions, FetchStage
from penstock.model import Ask, ErrorClass, Event, Failure, Route
from penstock.net.cookies import Jar
from penstock.net.guard import Guard, parse_allow
from penstock.net.http import CurlFetcher, HttpOptions
from penstock.ports import Baseline, Response
from penstock.rules import pace as rules
from penstock.rules import robots
from penstock.rules.identity import canonical_url, host_key
from penstock.testing.web import Reply, Request, Web, reply, tagged


class Time:
    """A clock that a sleep advances, so that no test here waits."""

    def __init__(self) -> None:
        self.at = 1_000_000.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds
        await asyncio.sleep(0)


class Hosts:
    """ports.Pace and ports.RobotsCache in memory. They decide by the real rules."""

    def __init__(self, time: Time, limits: rules.Limits) -> None:
        self.time, self.limits = time, limits
        self.states: dict[str, rules.HostState] = {}
        self.slots: list[tuple[str, float]] = []
        self.reports: list[tuple[str, int, float | None]] = []
        self.cached_robots: dict[str, tuple[bytes | None, int, float]] = {}
        self.lookups = 0
        self.exempted: set[str] = set()
        self.voids: dict[str, float] = {}

    def state(self, host: str) -> rules.HostState:
        return self.states.get(host, rules.HostState())

    async def reserve(
        self, wants: Mapping[str, int], *, within: float | None = None
    ) -> Mapping[str, Sequence[float]]:
        given = {}
        for host, n in wants.items():
            self.states[host], given[host] = rules.reserve(
                self.state(host), self.limits, self.time.now(), n, within=within
            )
            self.slots += [(host, slot) for slot in given[host]]
        return given

    async def report(
        self, host: str, *, status: int, retry_after: float | None, seconds: float
    ) -> None:
        self.reports.append((host, status, retry_after))
        self.states[host] = rules.report(
            self.state(host), self.limits, self.time.now(), status, retry_after, seconds
        )

    async def pause(self, host: str) -> None:
        self.states[host] = msgspec.structs.replace(self.state(host), paused_until=math.inf)

    async def crawl_delay(self, host: str, seconds: float | None) -> None:
        self.states[host] = msgspec.structs.replace(self.state(host), crawl_delay=seconds)
        if seconds:
            self.voids[host] = self.time.now()

    def voided(self, host: str) -> float:
        return self.voids.get(host, 0.0)

    def blocked_until(self, host: str) -> float:
        return self.state(host).blocked_until

    def concurrency(self, host: str) -> int:
        return self.limits.concurrency

    def gap(self, host: str) -> float:
        return rules.interval(self.state(host), self.limits)

    async def refresh(self) -> None:
        pass

    def exempt(self, host: str) -> bool:
        return host in self.exempted

    async def robots(self, origin: str) -> tuple[bytes | None, int, float] | None:
        self.lookups += 1
        return self.cached_robots.get(origin)

    async def keep_robots(self, origin: str, body: bytes | None, status: int, until: float) -> None:
        self.cached_robots[origin] = body, status, until


class Rig:
    def __init__(
        self, web: Web, fetcher: CurlFetcher, options: FetchOptions, limits: rules.Limits
    ) -> None:
        self.web, self.time, self.fetcher = web, Time(), fetcher
        self.hosts = Hosts(self.time, limits)
        self.stage = FetchStage(fetcher, self.hosts, self.hosts, self.time, options)
        self.key = host_key(web.url())

    async def fetch(
        self,
        path: str,
        *,
        ask: Ask | None = None,
        baseline: Baseline | None = None,
        force: bool = False,
        progress: bytes = b"",
    ) -> Response:
        url = canonical_url(path if "://" in path else self.web.url(path))
        event = Event(id="e", url=url, key=host_key(url), ask=ask or Ask(), force=force)
        return await self.stage.fetch(event, baseline, progress=progress)

    async def answer(
        self, event: Event, baseline: Baseline | None = None
    ) -> Response | BaseException | None:
        """Fetch without a task, as the worker does. Return None if the request needs a task."""
        future: asyncio.Future[Response | BaseException] = (
            asyncio.get_running_loop().create_future()
        )
        running = self.stage.start(event, baseline, future.set_result)
        if isinstance(running.part, asyncio.Task):
            running.cancel()
            return None
        return await future

    def event(self, path: str, **more: Any) -> Event:
        return Event(id="e", url=self.web.url(path), key=self.key, **more)

    async def fails(self, path: str, *, ask: Ask | None = None, progress: bytes = b"") -> Failure:
        with pytest.raises(Failure) as caught:
            await self.fetch(path, ask=ask, progress=progress)
        return caught.value


@contextlib.asynccontextmanager
async def rig(
    *, limits: rules.Limits | None = None, ca_file: str | None = None, **options: Any
) -> AsyncIterator[Rig]:
    """A web server on 127.0.0.1. Its other ports and 127.0.0.2 are allowed too."""
    async with Web() as web:
        guard = Guard(parse_allow("127.0.0.1:*,127.0.0.2:*"))
        fetcher = CurlFetcher(guard, HttpOptions(ca_file=ca_file))
        r = Rig(web, fetcher, FetchOptions(**options), limits or rules.Limits(rate=None))
        try:
            yield r
        finally:
            await r.stage.close()
            await fetcher.close()
            guard.close()


def to(location: str, status: int = 302) -> Reply:
    return Reply(status, {"location": location})


PAGE = "<html><body>a page that is too long to count as a challenge page</body></html>"


# -- robots ----------------------------------------------------------------------------------------


async def test_robots_is_requested_once_and_obeyed() -> None:
    async with rig() as r:
        r.web.route(
            "/robots.txt",
            reply(
                "User-agent: *\nDisallow: /private\nUser-agent: penstock\nDisallow: /bot\n",
                "text/plain",
            ),
        )
        r.web.route("/*", PAGE)
        for path in ("/a", "/private", "/b"):  # only the group with our name applies
            assert (await r.fetch(path)).status == 200
        failure = await r.fails("/bot/x")
        assert (failure.kind, failure.reason) == (ErrorClass.PERMANENT, "robots.txt disallows it")
        assert r.web.counts["/robots.txt"] == 1
        assert r.web.counts["/bot/x"] == 0
        assert r.hosts.lookups == 1


async def test_concurrent_fetches_cause_one_robots_request() -> None:
    async with rig() as r:
        r.web.route(
            "/robots.txt",
            Reply(
                200, {"content-type": "text/plain"}, b"User-agent: *\nDisallow: /no\n", delay=0.1
            ),
        )
        r.web.route("/*", PAGE)
        answers = await asyncio.gather(
            *(r.fetch(f"/{i}") for i in range(20)), r.fetch("/no"), return_exceptions=True
        )
        assert [a.status for a in answers if isinstance(a, Response)] == [200] * 20
        assert isinstance(answers[-1], Failure)
        assert r.web.counts["/robots.txt"] == 1


async def test_cancelling_the_fetch_that_requests_robots_does_not_fail_other_fetches() -> None:
    async with rig() as r:
        asked, may_answer = asyncio.Event(), asyncio.Event()

        async def robots(request: Request) -> Reply:
            asked.set()
            await may_answer.wait()
            return Reply(404)

        r.web.route("/robots.txt", robots)
        r.web.route("/*", PAGE)
        first, second = (asyncio.create_task(r.fetch(p)) for p in ("/1", "/2"))
        await asked.wait()
        first.cancel()
        await asyncio.sleep(0)
        may_answer.set()
        assert (await second).status == 200
        assert first.cancelled()


async def test_a_cached_robots_is_used_until_it_expires() -> None:
    async with rig() as r:
        r.hosts.cached_robots[r.web.url("")] = (
            b"User-agent: *\nDisallow: /no\n",
            200,
            r.time.now() + 100,
        )
        r.web.route("/*", PAGE)
        assert (await r.fetch("/yes")).status == 200
        assert (await r.fails("/no")).kind is ErrorClass.PERMANENT
        assert r.web.counts["/robots.txt"] == 0
        r.time.at += 200  # the cached copy has expired
        r.web.route("/robots.txt", reply("User-agent: *\nDisallow: /yes\n", "text/plain"))
        assert (await r.fails("/yes")).kind is ErrorClass.PERMANENT
        assert r.web.counts["/robots.txt"] == 1


async def test_concurrent_fetches_parse_a_large_stored_robots_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed = []
    parse = robots.from_answer

    def counted(status: int | None, body: bytes = b"") -> robots.Robots:
        parsed.append(len(body))
        return parse(status, body)

    monkeypatch.setattr(robots, "from_answer", counted)
    # The rules take more memory than this.
    monkeypatch.setattr("penstock.fetching.robots.RULES_IN_MEMORY", 1 << 20)
    async with rig() as r:
        body = b"User-agent: *\n" + b"".join(b"Allow:/%x\n" % n for n in range(45_000))
        r.hosts.cached_robots[r.web.url("")] = (body, 200, r.time.now() + 3600)
        r.web.route("/*", PAGE)
        for _ in range(2):
            await asyncio.gather(*[r.fetch(f"/{n}") for n in range(10)])
        assert parsed == [len(body)]


async def test_the_rules_of_many_small_robots_files_have_a_limit_on_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.fetching.robots.RULES_IN_MEMORY", 1 << 20)
    async with rig() as r:
        body = b"User-agent: *\n" + b"".join(b"Disallow: /*%d\n" % n for n in range(900))
        assert len(body) <= robots.QUICK_BYTES
        sender = Sender(r.fetcher, r.hosts, r.time)
        robots_txt = RobotsTxt(sender, r.hosts, r.hosts, r.time, FetchOptions())
        sites = [f"http://{n}.test" for n in range(20)]
        for site in sites:
            r.hosts.cached_robots[site] = (body, 200, r.time.now() + 3600)
            await robots_txt.load(site, None)
        known = [known.robots for site in sites if (known := robots_txt.cached(site))]
        assert 1 <= len(known) < len(sites)
        assert sum(rules.size for rules in known) <= 1 << 20


@pytest.mark.parametrize(
    ("status", "allowed"),
    [(404, True), (403, True), (410, True), (500, False), (503, False), (429, False)],
)
async def test_a_missing_robots_allows_all_and_a_failing_one_forbids_temporarily(
    status: int, allowed: bool
) -> None:
    async with rig() as r:
        r.web.route("/robots.txt", reply("User-agent: *\nDisallow: /\n", "text/plain", status))
        r.web.route("/*", PAGE)
        if allowed:
            assert (await r.fetch("/a")).status == 200
            return
        failure = await r.fails("/a")
        assert failure.kind is ErrorClass.TRANSIENT
        assert failure.after == pytest.approx(60.0)
        assert r.web.counts["/a"] == 0
        r.time.at += 61
        assert (await r.fails("/a")).after == pytest.approx(120.0)  # the wait doubles
        assert r.web.counts["/robots.txt"] == 2


async def test_an_unreachable_robots_forbids_temporarily() -> None:
    async with rig() as r:
        r.web.route("/robots.txt", Reply(drop=True))
        r.web.route("/*", PAGE)
        failure = await r.fails("/a")
        assert failure.kind is ErrorClass.TRANSIENT
        assert failure.after == pytest.approx(60.0)


@pytest.mark.parametrize(
    "answer",
    [
        Reply(200, {}, b"#" * (17 << 20)),
        Reply(200, {"content-encoding": "gzip"}, gzip.compress(b"#" * (17 << 20))),
        Reply(200, {"x": "y" * 100_000}, b""),
    ],
    ids=["body", "decoded", "headers"],
)
async def test_an_oversized_robots_forbids_temporarily_and_is_fetched_once(
    answer: Reply,
) -> None:
    async with rig() as r:
        r.web.route("/robots.txt", answer)
        r.web.route("/*", PAGE)
        for path in ("/a", "/b"):
            failure = await r.fails(path)
            assert failure.kind is ErrorClass.TRANSIENT
            assert failure.after == pytest.approx(60.0)
        assert r.web.counts == {"/robots.txt": 1}


async def test_an_unresolvable_name_fails_without_a_delay_and_caches_no_robots() -> None:
    async def resolver(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async with rig() as r:
        guard = Guard(resolver=resolver)
        fetcher = CurlFetcher(guard)
        r.stage = FetchStage(fetcher, r.hosts, r.hosts, r.time, FetchOptions())
        for _ in range(2):
            failure = await r.fails("http://nowhere.test/a")
            assert (failure.kind, failure.reason, failure.after) == (
                ErrorClass.TRANSIENT,
                "the name does not exist",
                None,
            )
        assert not r.hosts.cached_robots
        await fetcher.close()
        guard.close()


async def test_robots_is_followed_through_at_most_five_redirects() -> None:
    async with rig() as r:
        r.web.route("/robots.txt", to("/r1", 301))
        for i in range(1, 5):
            r.web.route(f"/r{i}", to(f"/r{i + 1}"))
        r.web.route("/r5", reply("User-agent: *\nDisallow: /no\n", "text/plain"))
        r.web.route("/*", PAGE)
        assert (await r.fails("/no")).kind is ErrorClass.PERMANENT
    async with rig() as r:
        r.web.route("/robots.txt", to("/robots.txt", 301))
        r.web.route("/*", PAGE)
        assert (await r.fetch("/a")).status == 200  # RFC 9309: treat robots.txt as unavailable
        assert r.web.counts["/robots.txt"] == 6


async def test_robots_can_be_ignored_by_setting_or_for_one_host_by_exception() -> None:
    async with rig(robots="ignore") as r:
        r.web.route("/*", PAGE)
        assert (await r.fetch("/a")).status == 200
        assert r.web.counts["/robots.txt"] == 0
    async with Web() as web:
        web.route("/robots.txt", reply("User-agent: *\nDisallow: /\n", "text/plain"))
        web.route("/*", PAGE)
        async with rig() as r:
            r.hosts.exempted.add(host_key(web.url()))
            r.web.route("/robots.txt", reply("User-agent: *\nDisallow: /\n", "text/plain"))
            assert (await r.fetch(web.url("/a"))).status == 200
            assert (await r.fails("/a")).kind is ErrorClass.PERMANENT


async def test_a_crawl_delay_sets_the_interval_and_delays_the_event_uncharged() -> None:
    async with rig() as r:
        r.web.route("/robots.txt", reply("User-agent: *\nCrawl-delay: 7\n", "text/plain"))
        r.web.route("/*", PAGE)
        with pytest.raises(Failure) as caught:
            await r.fetch("/a")
        assert (caught.value.kind, caught.value.status) == (ErrorClass.THROTTLED, None), (
            "no attempt is charged"
        )
        assert "robots.txt asks for more time" in caught.value.reason
        assert r.hosts.states[r.key].crawl_delay == 7.0
        assert r.hosts.slots == []
        await r.fetch("/a")
        assert r.web.counts == {"/robots.txt": 1, "/a": 1}


async def test_the_page_waits_for_a_second_slot_after_robots_used_the_first() -> None:
    async with rig(limits=rules.Limits(rate=1.0, jitter=0.0)) as r:
        r.web.route("/*", PAGE)
        await r.hosts.reserve({r.key: 1})  # the event's slot, as the worker reserves it
        await r.fetch("/a")
        assert r.time.slept == [pytest.approx(1.0)]
        await r.fetch("/b")
        assert len(r.time.slept) == 1  # robots.txt is cached now


async def test_a_page_whose_slot_robots_used_is_delayed_if_the_next_slot_is_far() -> None:
    async with rig(limits=rules.Limits(rate=0.05, jitter=0.0), slot_wait=10.0) as r:
        r.web.route("/*", PAGE)
        await r.hosts.reserve({r.key: 1})
        failure = await r.fails("/a")
        assert (failure.kind, failure.status) == (ErrorClass.THROTTLED, None)
        assert failure.after == pytest.approx(20.0)
        assert r.time.slept == []
        (slot,) = (await r.hosts.reserve({r.key: 1}))[r.key]
        assert slot == pytest.approx(r.time.now() + 20.0), (
            "the slot that the failure named is still free"
        )
        await r.fetch("/a")
        assert r.web.counts == {"/robots.txt": 1, "/a": 1}


async def test_fetch_waits_for_slots_with_the_sleep_function_of_the_caller() -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        r.time.at += seconds

    async with rig(limits=rules.Limits(rate=1.0, jitter=0.0)) as r:
        r.web.route("/a", to("/b"))
        r.web.route("/*", PAGE)
        await r.hosts.reserve({r.key: 1})
        await r.stage.fetch(r.event("/a"), None, sleep=sleep)
        assert waited == [pytest.approx(1.0), pytest.approx(1.0)], (
            "after robots.txt, and for the redirect"
        )
        assert r.time.slept == []


# -- conditional requests --------------------------------------------------------------------------


async def test_a_baseline_makes_the_request_conditional_unless_forced() -> None:
    seen: list[Mapping[str, str]] = []

    def page(request: Request) -> Reply:
        seen.append(request.headers)
        return tagged(request, reply(PAGE))

    async with rig(robots="ignore") as r:
        r.web.route("/a", page)
        first = await r.fetch("/a")
        base = Baseline(etag=first.headers["etag"], last_modified="Tue, 14 Nov 2023 22:13:20 GMT")
        again = await r.fetch("/a", baseline=base)
        assert (again.status, again.body) == (304, b"")
        assert seen[1]["if-none-match"] == base.etag
        assert seen[1]["if-modified-since"] == base.last_modified
        assert (await r.fetch("/a", baseline=base, force=True)).status == 200
        assert "if-none-match" not in seen[2]


async def test_a_304_to_an_unconditional_request_is_a_failure() -> None:
    async with rig(robots="ignore") as r:
        r.web.route("/a", Reply(304))
        assert (await r.fails("/a")).kind is ErrorClass.TRANSIENT


# -- redirects -------------------------------------------------------------------------------------


async def test_redirects_are_followed_and_reported_as_hops() -> None:
    async with rig() as r:
        r.web.route("/a", to("b?x=1#there", 301))
        r.web.route("/b", to("/c/../d", 308))
        r.web.route("/d", PAGE)
        answer = await r.fetch("/a")
        assert answer.url == r.web.url("/d")
        assert [(h.url, h.status) for h in answer.hops] == [
            (r.web.url("/a"), 301),
            (r.web.url("/b?x=1"), 308),
        ]
        # The status of robots.txt, then of every response.
        assert [status for _, status, _ in r.hosts.reports] == [404, 301, 308, 200]


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("/a", "leads back to itself"),
        ("http://[", "not a URL"),
        ("file:///etc/passwd", "scheme is not http"),
        ("", "leads back to itself"),
        ("http://user:secret@127.0.0.1/", "user name or password"),
        ("/" + "x" * 20_000, "longer than"),
        ("/" + "x" * 200_000, "larger than"),
    ],
)
async def test_a_redirect_to_an_invalid_url_is_permanent(location: str, reason: str) -> None:
    async with rig() as r:
        r.web.route("/a", to(location))
        failure = await r.fails("/a")
        assert failure.kind is ErrorClass.PERMANENT, failure.reason
        assert reason in failure.reason or "too large" in failure.reason, failure.reason
        assert "secret" not in failure.reason


async def test_endless_redirects_fail_after_ten() -> None:
    async with rig(robots="ignore") as r:
        r.web.route("/n/*", lambda q: to(f"/n/{int(q.path[3:]) + 1}"))
        failure = await r.fails("/n/0")
        assert (failure.kind, failure.reason) == (
            ErrorClass.PERMANENT,
            "too many redirects: more than 10",
        )
        assert sum(r.web.counts.values()) == 11


async def test_a_loop_of_two_redirects_fails_after_two_requests() -> None:
    async with rig(robots="ignore") as r:
        r.web.route("/a", to("/b"))
        r.web.route("/b", to("/a"))
        assert "leads back" in (await r.fails("/a")).reason
        assert sum(r.web.counts.values()) == 2


async def test_a_redirect_to_a_forbidden_address_is_refused_before_any_connection() -> None:
    async with Web(lambda q: reply(PAGE), host="127.0.0.3") as inward, rig(robots="ignore") as r:
        r.web.route("/a", to(inward.url("/secret")))
        r.web.route("/b", to(f"http://0x7f000003:{inward.port}/"))
        for path in ("/a", "/b"):
            failure = await r.fails(path)
            assert (failure.kind, "forbidden address" in failure.reason) == (
                ErrorClass.PERMANENT,
                True,
            )
        assert not inward.entries


async def test_robots_and_rate_limit_of_a_redirects_host_apply() -> None:
    async with Web() as other, rig(limits=rules.Limits(rate=1.0, jitter=0.0)) as r:
        other.route("/robots.txt", reply("User-agent: *\nDisallow: /no\n", "text/plain"))
        other.route("/yes", PAGE)
        key = host_key(other.url())
        r.web.route("/1", to(other.url("/no")))
        r.web.route("/2", to(other.url("/yes")))
        assert (await r.fails("/1")).reason == "robots.txt disallows it"
        assert other.counts["/no"] == 0
        assert (await r.fetch("/2")).status == 200
        slots = [slot for host, slot in r.hosts.slots if host == key]
        assert len(slots) >= 2
        assert all(b - a >= 1.0 for a, b in itertools.pairwise(slots))


async def test_an_event_is_delayed_if_the_slot_for_its_redirect_is_far() -> None:
    async with rig(robots="ignore", limits=rules.Limits(rate=0.01, jitter=0.0)) as r:
        r.web.route("/a", to("/b"))
        await r.hosts.reserve({r.key: 1})
        failure = await r.fails("/a")
        assert failure.kind is ErrorClass.THROTTLED
        assert failure.after == pytest.approx(100.0)
        assert r.web.counts["/b"] == 0


async def test_a_delayed_redirect_chain_continues_and_repeats_no_request() -> None:
    async with rig(limits=rules.Limits(rate=1 / 60, jitter=0.0), robots="ignore") as r:
        r.web.route("/a", to("/b"))
        r.web.route("/b", Reply(302, {"location": "/c", "set-cookie": "seen=b"}))
        r.web.route("/c", PAGE)
        await r.hosts.reserve({r.key: 1})
        progress = b""
        for _ in range(2):
            failure = await r.fails("/a", progress=progress)
            assert failure.kind is ErrorClass.THROTTLED
            progress = failure.progress
            assert progress
            r.time.at += failure.after or 0.0
            await r.hosts.reserve({r.key: 1})  # as the worker does before a retry
        answer = await r.fetch("/a", progress=progress)
        assert (answer.url, [hop.url for hop in answer.hops]) == (
            r.web.url("/c"),
            [r.web.url("/a"), r.web.url("/b")],
        )
        assert r.web.counts == {"/a": 1, "/b": 1, "/c": 1}
        assert (await r.fails("/a")).kind is ErrorClass.THROTTLED, (
            "the next fetch starts at the first URL"
        )


async def test_a_chain_delayed_for_another_host_waits_for_a_slot_of_that_host() -> None:
    async with rig(limits=rules.Limits(rate=1 / 60, jitter=0.0), robots="ignore") as r:
        other = await r.web.listen()
        r.web.route("/a", to(r.web.url("/b", port=other)))
        r.web.route("/b", PAGE)
        await r.hosts.reserve({f"127.0.0.1:{other}": 2})
        progress = b""
        for n in (2, 1):  # slots that other events have reserved
            failure = await r.fails("/a", progress=progress)
            assert failure.after == pytest.approx(60.0 * n)
            progress = failure.progress
            r.time.at += 60.0
        assert (await r.fetch("/a", progress=progress)).status == 200
        assert r.web.counts == {"/a": 1, "/b": 1}
        assert r.hosts.slots[-1] == (f"127.0.0.1:{other}", r.time.now())


async def test_a_delayed_chain_keeps_cookies_and_loops_but_checks_robots_again() -> None:
    seen: list[str] = []

    def target(request: Request) -> Reply:
        seen.append(request.headers.get("cookie", ""))
        return to("/a")

    async with rig(limits=rules.Limits(rate=1 / 60, jitter=0.0), robots="ignore") as r:
        r.web.route("/a", Reply(302, {"location": "/b", "set-cookie": "seen=a; Path=/"}))
        r.web.route("/b", target)
        await r.hosts.reserve({r.key: 1})
        progress = (await r.fails("/a")).progress
        r.time.at += 60.0
        await r.hosts.reserve({r.key: 1})
        failure = await r.fails("/a", progress=progress)
        assert seen == ["seen=a"]
        assert failure.kind is ErrorClass.THROTTLED, "the request of /a has another cookie now"
    async with rig(limits=rules.Limits(rate=1 / 60, jitter=0.0)) as r:
        r.web.route("/robots.txt", "User-agent: *\nDisallow: /b")
        r.web.route("/b", PAGE)
        moved = msgspec.msgpack.decode(progress) | {"url": r.web.url("/b"), "has_cookies": False}
        r.time.at += 60.0
        forbidden = await r.fails("/a", progress=msgspec.msgpack.encode(moved))
        assert forbidden.reason == "robots.txt disallows it"
        assert r.web.counts["/b"] == 0


async def test_an_expired_or_unreadable_progress_starts_from_the_first_url() -> None:
    async with rig(robots="ignore", limits=rules.Limits(rate=None)) as r:
        r.web.route("/a", PAGE)
        r.web.route("/b", "wrong")
        chain = redirects.RedirectChain(
            r.web.url("/b"), r.key, "GET", None, {}, False, None, [], set()
        )

        def saved(due: float) -> bytes:
            return redirects.save(chain, None, due, r.event("/a"), redirects.KeptCookies())

        for progress in (b"\xc1", b"\x80", saved(r.time.now() - 601.0)):
            assert (await r.fetch("/a", progress=progress)).url == r.web.url("/a")
        assert (await r.fetch("/a", progress=saved(r.time.now()))).url == r.web.url("/b")
        # An older release stored cookies in the ledger.
        jar = Jar()
        jar.store(chain.url, {"set-cookie": "session=1"}, 1.0)
        old = msgspec.msgpack.decode(saved(r.time.now())) | {"cookies": jar.cookies}
        answer = await r.fetch("/a", progress=msgspec.msgpack.encode(old))
        assert answer.url == r.web.url("/a")


async def test_another_worker_starts_a_delayed_chain_with_cookies_again() -> None:
    async with rig(limits=rules.Limits(rate=1 / 60, jitter=0.0), robots="ignore") as r:
        r.web.route("/a", Reply(302, {"location": "/b", "set-cookie": "seen=PLANTED; Path=/"}))
        r.web.route("/b", PAGE)
        await r.hosts.reserve({r.key: 1})
        progress = (await r.fails("/a")).progress
        assert b"/b" in progress
        assert b"PLANTED" not in progress, "the ledger gets no cookies"
        r.stage._kept_cookies = redirects.KeptCookies()  # as in another worker
        r.time.at += 60.0
        await r.hosts.reserve({r.key: 1})
        progress = (await r.fails("/a", progress=progress)).progress
        assert r.web.counts == {"/a": 2}
        r.time.at += 60.0
        await r.hosts.reserve({r.key: 1})
        assert (await r.fetch("/a", progress=progress)).url == r.web.url("/b")
        assert r.web.counts == {"/a": 2, "/b": 1}


def test_the_progress_has_no_cookies_and_a_limited_size() -> None:
    def jar_with(*lines: str) -> Jar:
        jar = Jar()
        for line in lines:
            jar.store("https://shop.test/", {"set-cookie": line}, 1.0)
        return jar

    def chain_with(jar: Jar) -> redirects.RedirectChain:
        return redirects.RedirectChain(
            "https://shop.test/b", "shop.test", "GET", None, {}, False, jar, [], set()
        )

    event, kept = Event(id="e", url="https://shop.test/a", key="shop.test"), redirects.KeptCookies()
    small = jar_with("session=secret")
    assert b"secret" not in redirects.save(chain_with(small), small, 1.0, event, kept)
    assert kept.find("e", 1.0) is None, "an account keeps its own cookies"
    chain = chain_with(small)
    raw = redirects.save(chain, None, 1.0, event, kept)
    assert raw
    assert b"secret" not in raw
    assert kept.find("e", 1.0) is small
    assert kept.find("e", 602.0) is None
    chain.headers = {"x": "y" * redirects.MAX_PROGRESS}
    assert redirects.save(chain, None, 1.0, event, kept) == b""
    large = jar_with(*(f"c{n}={'x' * 4000}" for n in range(20)))
    assert redirects.save(chain_with(large), None, 1.0, event, kept) == b""
    for n in range(redirects.MAX_KEPT + 1):
        assert kept.keep(str(n), small, 10.0)
    assert kept.find("0", 1.0) is None
    assert kept.find("1", 1.0) is small


async def test_an_unconditional_second_request_for_a_page_waits_for_its_own_slot() -> None:
    async with rig(limits=rules.Limits(rate=1 / 60, jitter=0.0), robots="ignore") as r:
        r.web.route("/a", lambda request: tagged(request, reply(PAGE)))
        await r.hosts.reserve({r.key: 1})
        baseline = Baseline(etag=(await r.fetch("/a")).headers["etag"])
        with pytest.raises(Failure) as caught:
            await r.stage.fetch(r.event("/a"), None, again=True)
        assert caught.value.after == pytest.approx(60.0)
        r.time.at += 60.0
        await r.hosts.reserve({r.key: 1})
        again = await r.stage.fetch(r.event("/a"), baseline, progress=caught.value.progress)
        assert again.status == 200, (
            "the retry stays unconditional, or the server would answer 304 each time"
        )
        assert r.web.counts == {"/a": 2}


async def test_a_redirected_robots_is_fetched_on_a_slow_host_too() -> None:
    async with rig(limits=rules.Limits(rate=1 / 60, jitter=0.0)) as r:
        r.web.route("/robots.txt", to("/robots-2.txt"))
        r.web.route("/robots-2.txt", reply("User-agent: *\nDisallow: /no\n", "text/plain"))
        r.web.route("/*", PAGE)
        await r.hosts.reserve({r.key: 1})
        for _ in range(2):
            r.time.at += (await r.fails("/a")).after or 0.0
            await r.hosts.reserve({r.key: 1})
        assert (await r.fetch("/a")).status == 200
        assert (await r.fails("/no")).reason == "robots.txt disallows it"
        assert r.web.counts == {"/robots.txt": 1, "/robots-2.txt": 1, "/a": 1}


async def test_credentials_are_not_sent_to_another_origin() -> None:
    seen: list[Mapping[str, str]] = []

    def page(request: Request) -> Reply:
        seen.append(request.headers)
        return reply(PAGE)

    ask = Ask(
        headers={
            "Authorization": "Bearer secret",
            "Cookie": "s=1",
            "X-Api-Key": "k",
            "Accept-Language": "de",
        }
    )
    async with Web(page) as other, rig(robots="ignore") as r:
        r.web.route("/same", to("/here"))
        r.web.route("/here", page)
        r.web.route("/away", to(other.url("/back")))
        await r.fetch("/same", ask=ask)
        assert seen[0]["authorization"] == "Bearer secret"
        assert seen[0]["x-api-key"] == "k"
        await r.fetch("/away", ask=ask)
        assert not {"authorization", "cookie", "x-api-key"} & set(seen[1])
        assert seen[1]["accept-language"] == "de"


@pytest.mark.parametrize(
    ("method", "status", "expected"),
    [
        ("POST", 301, "GET"),
        ("POST", 302, "GET"),
        ("POST", 303, "GET"),
        ("POST", 307, "POST"),
        ("POST", 308, "POST"),
        ("PUT", 301, "PUT"),
        ("PUT", 303, "GET"),
        ("HEAD", 303, "HEAD"),
    ],
)
async def test_the_method_changes_after_a_redirect_as_in_browsers(
    method: str, status: int, expected: str
) -> None:
    seen: list[Request] = []

    def page(request: Request) -> Reply:
        seen.append(request)
        return reply(PAGE)

    body = None if method == "HEAD" else b'{"q":1}'
    ask = Ask(
        method=method, body=body, headers={"Content-Type": "application/json"} if body else {}
    )
    async with rig(robots="ignore") as r:
        r.web.route("/a", lambda q: to("/b", status))
        r.web.route("/b", page)
        await r.fetch("/a", ask=ask)
        assert seen[0].method == expected
        assert seen[0].body == (body if expected == method and body else b"")
        assert ("content-type" in seen[0].headers) is (expected == method and body is not None)


async def test_a_request_body_is_not_sent_to_another_origin() -> None:
    async with Web(lambda q: reply(PAGE)) as other, rig(robots="ignore") as r:
        r.web.route("/a", lambda q: to(other.url("/b"), 307))
        assert (
            await r.fails("/a", ask=Ask(method="POST", body=b"secret"))
        ).kind is ErrorClass.PERMANENT
        assert not other.entries


async def test_a_redirect_from_https_to_http_is_followed_only_if_allowed(tmp_path: Path) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(  # noqa: ASYNC221
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-keyout",
            key,
            "-out",
            cert,
            "-subj",
            "/CN=t",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    for allowed in (False, True):
        async with rig(robots="ignore", ca_file=cert, allow_downgrade=allowed) as r:

            def redirect(request: Request, target: str = r.web.url("/plain")) -> Reply:
                return to(target)

            port = await r.web.listen(tls=context, handler=redirect)
            r.web.route("/plain", PAGE)
            if allowed:
                assert (await r.fetch(f"https://127.0.0.1:{port}/")).status == 200
            else:
                failure = await r.fails(f"https://127.0.0.1:{port}/")
                assert (failure.kind, failure.reason) == (
                    ErrorClass.PERMANENT,
                    "a redirect leads from https to http",
                )
                assert r.web.counts["/plain"] == 0


# -- pace and verdicts -----------------------------------------------------------------------------


async def test_a_429_blocks_the_host_and_the_next_request_is_not_sent() -> None:
    async with rig(robots="ignore") as r:
        r.web.route("/a", reply("slow down", "text/plain", 429, retry_after="5"))
        r.web.route("/b", PAGE)
        failure = await r.fails("/a")
        assert (failure.kind, failure.after, failure.status) == (ErrorClass.THROTTLED, 5.0, 429)
        assert r.hosts.reports == [(r.key, 429, 5.0)]
        r.time.at += 2
        failure = await r.fails("/b")
        assert failure.kind is ErrorClass.THROTTLED
        assert failure.after == pytest.approx(3.0)
        assert r.key in failure.reason
        assert r.web.counts["/b"] == 0
        r.time.at += 3.1
        assert (await r.fetch("/b")).status == 200


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (reply("gone", "text/plain", 410), ErrorClass.NOT_FOUND),
        (reply("no", "text/plain", 403), ErrorClass.BLOCKED),
        (reply("oops", "text/plain", 502), ErrorClass.TRANSIENT),
        (reply("", status=200), ErrorClass.BLOCKED),
        (reply("<title>Just a moment...</title>"), ErrorClass.BLOCKED),
        (Reply(302), ErrorClass.PERMANENT),
        (Reply(drop=True), ErrorClass.TRANSIENT),
    ],
)
async def test_every_response_has_its_error_class(answer: Reply, kind: ErrorClass) -> None:
    async with rig(robots="ignore") as r:
        r.web.route("/a", answer)
        assert (await r.fails("/a")).kind is kind


# -- without a task --------------------------------------------------------------------------------


@pytest.fixture
def _target_cache_never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checked origin needs no task for 1 s. This machine may pause for longer."""
    monkeypatch.setattr("penstock.net.http._TARGET_TTL", 3600.0)


@pytest.mark.usefixtures("_target_cache_never_expires")
async def test_a_request_to_a_checked_origin_with_cached_robots_needs_no_task() -> None:
    async with rig() as r:
        r.web.route("/robots.txt", reply("User-agent: *\nDisallow: /no\n", "text/plain"))
        r.web.route("/*", PAGE)
        r.web.route("/b", lambda request: tagged(request, reply(PAGE)))
        assert await r.answer(r.event("/a")) is None  # neither robots.txt nor the address is cached
        await r.fetch("/a")
        got = await r.answer(r.event("/b"))
        assert isinstance(got, Response)
        assert (got.status, got.body) == (200, PAGE.encode())
        again = await r.answer(r.event("/b"), Baseline(etag=got.headers["etag"]))
        assert isinstance(again, Response)
        # The stage does not have the page that the 304 refers to.
        assert again.status == 304
        for event in (
            r.event("/no/x"),
            r.event("/c", ask=Ask(method="POST", body=b"x")),
            r.event("/c", ask=Ask(headers={"host": "elsewhere"})),
            r.event("/c", route=Route(account="me")),
            r.event("/c", route=Route(pool="far")),
        ):
            assert await r.answer(event) is None
        await r.hosts.report(r.key, status=429, retry_after=5.0, seconds=0.0)
        assert await r.answer(r.event("/c")) is None
        assert r.web.counts["/no/x"] == r.web.counts["/c"] == 0


@pytest.mark.usefixtures("_target_cache_never_expires")
async def test_a_response_that_is_not_final_is_continued_and_not_requested_again() -> None:
    async with rig() as r:
        r.web.route("/*", PAGE)
        r.web.route("/a", to("/b"))
        r.web.route("/busy", reply("slow down", "text/plain", 429, retry_after="5"))
        await r.fetch("/")
        event = r.event("/a")
        last = await r.answer(event)
        assert isinstance(last, Response)
        assert ([hop.url for hop in last.hops], last.url) == ([event.url], r.web.url("/b"))
        assert (r.web.counts["/a"], r.web.counts["/b"]) == (1, 1)

        failure = await r.answer(r.event("/busy"))
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.after) == (ErrorClass.THROTTLED, 5.0)
        assert r.hosts.reports[-1] == (r.key, 429, 5.0)
        assert r.web.counts["/busy"] == 1


@pytest.mark.usefixtures("_target_cache_never_expires")
async def test_a_response_that_arrives_after_its_host_was_blocked_is_reported() -> None:
    async with rig() as r:
        r.web.route("/*", PAGE)
        await r.fetch("/")
        answer = asyncio.ensure_future(r.answer(r.event("/b")))
        await asyncio.sleep(0)  # the request is sent
        await r.hosts.report(r.key, status=429, retry_after=5.0, seconds=0.0)
        assert isinstance(await answer, Response)
        assert r.hosts.reports[-1] == (r.key, 200, None)


@pytest.mark.usefixtures("_target_cache_never_expires")
async def test_a_page_fetched_without_a_task_is_checked_for_challenges_too() -> None:
    async with rig(robots="ignore") as r:
        r.web.route("/*", PAGE)
        r.web.route("/a", reply("<title>Just a moment...</title>"))
        await r.fetch("/")
        got = await r.answer(r.event("/a"))
        assert isinstance(got, Failure)
        assert "challenge page" in got.reason
