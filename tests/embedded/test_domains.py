"""Limits, pauses and robots exceptions of single hosts, set by a command and applied by workers.

Also the limit on requests in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.output import console
from penstock.config import files as config
from penstock.intake.accept import push
from penstock.rules.identity import host_key
from penstock.runtime.process import WorkerProcess
from penstock.runtime.stores import open_stores
from penstock.testing.web import Reply, Request, Web, reply

PAGE = "<html><body><h1>a page that is too long to count as a challenge page</h1></body></html>"
SHOP = """
from penstock import Pipeline
shop = Pipeline("shop")
@shop.extract
def page(page):
    yield {"title": page.css("h1::text").get()}
shop.sink("jsonl:out.jsonl")
"""


class Project:
    """A directory with a pipeline. Workers run in this process, commands on a thread."""

    def __init__(
        self,
        tmp: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        toml: str = "",
        rate: str = "unlimited",
        concurrency: int = 8,
    ) -> None:
        self.dir, self._capfd = tmp, capfd
        (tmp / "shop.py").write_text(SHOP)
        common = (
            f'durability = "process"\n[extract]\nisolation = "none"\n[pace]\nrate = "{rate}"\n'
            f"concurrency = {concurrency}\n"
            '[net]\nallow = "127.0.0.1:*,127.0.0.2:*"\n'
        )
        (tmp / "penstock.toml").write_text(common + toml)
        monkeypatch.chdir(tmp)

    @property
    def config(self) -> config.Config:
        return config.load({}, {}, self.dir).config

    async def push(self, *urls: str) -> None:
        stores = open_stores(self.config)
        try:
            await push(stores.lifecycle, urls, clock=stores.clock)
        finally:
            stores.close()

    async def text(self, *args: str, code: int = 0) -> str:
        console.cache_clear()
        self._capfd.readouterr()
        found = await asyncio.to_thread(main, ["domains", *args])
        shown = self._capfd.readouterr()
        assert found == code, shown
        return shown.out + shown.err

    async def __call__(self, *args: str) -> Any:
        return json.loads(await self.text(*args, "--json"))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[WorkerProcess]:
        running = WorkerProcess(
            self.config, self.dir / "shop.py", roles=frozenset({"fetch", "extract", "sink"})
        )
        stop = asyncio.Event()
        task = asyncio.create_task(running.run(stop))
        try:
            yield running
        finally:
            stop.set()
            await task

    async def run(self) -> None:
        running = WorkerProcess(
            self.config, self.dir / "shop.py", roles=frozenset({"fetch", "extract", "sink"})
        )
        await running.run(asyncio.Event(), until_idle=True)

    def rows(self, sql: str) -> list[Any]:
        stores = open_stores(self.config, inline=True)
        try:
            found: list[Any] = stores.db.read_now(lambda tx: tx.execute(sql).fetchall())
            return found
        finally:
            stores.close()


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Any:
    return lambda **more: Project(tmp_path, monkeypatch, capfd, **more)


async def until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until a condition is true. The time limit only ends a hang."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the condition did not become true"
        await asyncio.sleep(0.02)


async def wait_until_quiet(web: Web) -> None:
    """Wait until the server gets no request for 1.5 s.

    Sleeps in many short steps: one long sleep could pass while the machine is suspended.
    """
    seen = -1
    while seen != len(web.entries):
        seen = len(web.entries)
        for _ in range(15):
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def lateness() -> AsyncIterator[list[float]]:
    """Measure the longest delay of the event loop. Gaps between requests may vary by that much."""
    worst = [0.0]

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            worst[0] = max(worst[0], time.monotonic() - before - 0.01)

    task = asyncio.create_task(watch())
    try:
        yield worst
    finally:
        task.cancel()


# -- commands --------------------------------------------------------------------------------------


async def test_a_paused_host_gets_no_request_and_resume_makes_its_events_due(
    project: Any,
) -> None:
    async with Web() as web:
        web.route("/*", PAGE)
        domains = project()
        await domains.push(*(web.url(f"/{n}") for n in range(20)))
        key = f"127.0.0.1:{web.port}"
        shown_host = await domains("pause", key, "--for", "1h")
        assert (shown_host["state"], shown_host["paused"], shown_host["queued"]) == (
            "paused",
            True,
            20,
        )
        async with domains.running():
            # No server listens on that address, so the event fails. It shows that the worker runs.
            await domains.push(web.url("/other", host="127.0.0.2"))
            await until(
                lambda: (
                    domains.rows(
                        "SELECT 1 FROM event WHERE status='delayed' "
                        "AND reason LIKE 'waiting for a slot%'"
                    )
                    != []
                )
            )
            await asyncio.sleep(0.5)
            assert web.entries == []
            assert "is resumed" in await domains.text("resume", web.url("/any/page"))
            await until(
                lambda: domains.rows("SELECT count(*) FROM event WHERE status='success'") == [(20,)]
            )
        assert (await domains("show", key))["paused"] is False


async def test_a_pause_stops_the_requests_of_a_running_worker(project: Any) -> None:
    async with Web() as web:
        web.route("/robots.txt", reply("", "text/plain"))
        web.route("/p/*", PAGE)
        domains = project(rate="20")
        await domains.push(*(web.url(f"/p/{n}") for n in range(200)))
        async with domains.running() as worker:
            await until(lambda: len(web.entries) > 5)
            await domains.text("pause", web.url())
            claims, key = worker.stores.claims, host_key(web.url())
            await until(lambda: claims.blocked_until(key) > 0)
            before = len(web.entries)
            await wait_until_quiet(web)
            assert len(web.entries) - before <= claims.concurrency(key), (
                "only the requests in progress when the worker has seen the pause"
            )
            assert len(web.entries) < 200
        assert (await domains("show", web.url()))["paused_until"] is None, "until it is resumed"


async def test_hosts_of_one_registrable_domain_share_a_limit_if_pace_is_by_domain(
    project: Any,
) -> None:
    async with Web() as web:
        other = await web.listen()  # an address is one domain for all ports
        web.route("/*", PAGE)
        domains = project(rate="10")
        written = domains.dir / "penstock.toml"
        written.write_text(written.read_text().replace("[pace]", '[pace]\nby = "domain"'))
        await domains.push(
            *(web.url(f"/{n}", port=port) for n in range(5) for port in (web.port, other))
        )
        async with lateness() as worst:
            await domains.run()
        at = sorted(e.at / 1e6 for e in web.entries)
        assert (len(at), at[-1] - at[0] >= 0.95 * 1.1 - worst[0]) == (12, True), (
            "two robots.txt and ten pages, at ten a second"
        )
        assert (await domains("show", web.url()))["host"] == "127.0.0.1"
        assert (await domains("limit", "https://www.shop.co.uk/p/1", "2"))["host"] == "shop.co.uk"


async def test_a_limit_applies_to_one_host_and_a_new_limit_makes_its_events_due(
    project: Any,
) -> None:
    async with Web() as web, Web(host="127.0.0.2") as other:
        for w in (web, other):
            w.route("/*", PAGE)
        domains = project()
        shown_host = await domains("limit", web.url(), "10/s", "--burst", "1")
        assert (shown_host["rate"], shown_host["own"]) == (
            10.0,
            {"rate": 10.0, "burst": 1, "concurrency": None},
        )
        await domains.push(
            *(web.url(f"/{n}") for n in range(8)), *(other.url(f"/{n}") for n in range(8))
        )
        async with lateness() as worst:
            await domains.run()
        at = sorted(e.at / 1e6 for e in web.entries)
        assert at[-1] - at[0] >= 0.75 - worst[0], (
            "nine requests, robots.txt included, at ten a second"
        )
        unlimited = sorted(e.at / 1e6 for e in other.entries)
        assert statistics.median(b - a for a, b in itertools.pairwise(unlimited)) < 0.05, (
            "the other host has no limit"
        )
        await domains("limit", web.url(), "1/h")
        await domains.push(*(web.url(f"/later/{n}") for n in range(5)))
        async with domains.running():
            await until(
                lambda: domains.rows("SELECT count(*) FROM event WHERE status='delayed'")[0][0] >= 4
            )
            shown_host = await domains("limit", web.url(), "default")
            assert (shown_host["rate"], shown_host["own"]["rate"]) == (None, None)
            await until(
                lambda: domains.rows("SELECT count(*) FROM event WHERE status='success'") == [(21,)]
            )


@pytest.mark.slow
async def test_robots_is_ignored_for_one_host_until_a_command_obeys_it_again(
    project: Any,
) -> None:
    async with Web() as web:
        web.route(
            "/robots.txt", reply("User-agent: *\nDisallow: /\nCrawl-delay: 5\n", "text/plain")
        )
        web.route("/*", PAGE)
        domains = project()
        assert "needs a reason" in await domains.text("robots", web.url(), "ignore", code=2)
        await domains.push(web.url("/1"))
        await domains.run()
        assert domains.rows("SELECT status, reason FROM event") == [
            ("dead", "robots.txt disallows it")
        ]
        shown_host = await domains("robots", web.url(), "ignore", "--reason", "our own shop")
        assert (shown_host["robots"], shown_host["crawl_delay"], shown_host["interval"]) == (
            "ignore",
            5.0,
            0.0,
        ), "the crawl delay is ignored too"
        async with domains.running() as worker:
            await domains.push(web.url("/2"), web.url("/3"))
            await until(lambda: web.counts["/2"] + web.counts["/3"] == 2)
            shown_host = await domains("robots", web.url(), "obey")
            assert (shown_host["robots"], shown_host["interval"]) == ("obey", 5.0)
            await until(lambda: not worker.stores.claims.exempt(host_key(web.url())))
            await domains.push(web.url("/4"))
            await until(
                lambda: domains.rows("SELECT status FROM event WHERE url LIKE '%/4'") == [("dead",)]
            )
        assert web.counts["/4"] == 0
        (recorded,) = shown_host["exceptions"]
        assert (recorded["kind"], recorded["reason"]) == ("robots", "our own shop")
        assert recorded["at"] < recorded["ended"]
        assert "@" in recorded["who"]


async def test_exceptions_from_the_configuration_are_recorded_and_end_when_removed(
    project: Any,
) -> None:
    async with Web() as web:
        web.route("/*", PAGE)
        domains = project(toml="[proxies.p]\nurls = 'http://127.0.0.1:9'\n")
        domains.dir.joinpath("penstock.toml").write_text(
            domains.dir.joinpath("penstock.toml")
            .read_text()
            .replace("[net]\n", "[net]\nremote_dns = true\n")
        )
        await domains.push(web.url("/1"))
        await domains.run()
        listed = await domains("ls")
        assert [(e["kind"], e["host"]) for e in listed["exceptions"]] == [("remote_dns", "*")]
        assert "all hosts: net.remote_dns = true" in await domains.text("ls")
        domains.dir.joinpath("penstock.toml").write_text(
            domains.dir.joinpath("penstock.toml").read_text().replace("remote_dns = true\n", "")
        )
        await domains.push(web.url("/2"))
        await domains.run()
        assert (await domains("ls"))["exceptions"] == []


async def test_blocked_hosts_are_listed_first_and_resume_keeps_a_retry_after(
    project: Any,
) -> None:
    async with Web() as web:
        web.route("/busy", Reply(429, {"retry-after": "300"}))
        domains = project()
        await domains.push(
            web.url("/busy"),
            "http://many.example/1",
            "http://many.example/2",
            "http://aaa.example/1",
        )
        await domains.text("pause", "many.example")
        await domains.text("pause", "aaa.example")
        async with domains.running():
            await until(
                lambda: (
                    domains.rows("SELECT 1 FROM event WHERE status='delayed' AND url LIKE '%/busy'")
                    != []
                )
            )
        (first,) = (await domains("ls", "--limit", "1"))["domains"]
        assert first["state"] != "ok"
        by_host = {d["host"]: d for d in (await domains("ls"))["domains"]}
        blocked = by_host[f"127.0.0.1:{web.port}"]
        assert (blocked["state"], blocked["last_status"], blocked["throttles"]) == (
            "blocked",
            429,
            1,
        )
        assert by_host["many.example"]["state"] == "paused"
        assert [r["status"] for r in blocked["robots_txt"]] == [404]
        assert "is still blocked until" in await domains.text("resume", web.url())
        assert (await domains("show", web.url()))["state"] == "blocked"
        for bad in (
            ["limit", "x.example"],
            ["limit", "x.example", "9x"],
            ["pause", "x.example", "--for", "long"],
            ["show", "bad host"],
        ):
            assert "Error:" in await domains.text(*bad, code=2)


# -- requests in flight ----------------------------------------------------------------------------


def gauge(limit: int) -> tuple[Callable[[Request], Awaitable[Reply]], list[int]]:
    """Return a page handler and the highest number of its concurrent requests.

    The page answers 0.1 s after `limit` requests have been in progress together.
    """
    now, seen, full = 0, [0], asyncio.Event()

    async def slow(request: Request) -> Reply:
        nonlocal now
        now += 1
        seen[0] = max(seen[0], now)
        if now == limit:
            full.set()
        await full.wait()
        await asyncio.sleep(0.1)
        now -= 1
        return reply(PAGE)

    return slow, seen


async def test_concurrent_requests_stay_within_the_limit_of_each_host(
    project: Any,
) -> None:
    (slow, peak), (other_slow, other_peak) = gauge(8), gauge(2)
    async with Web() as web, Web(host="127.0.0.2") as other:
        web.route("/p/*", slow)
        other.route("/p/*", other_slow)
        domains = project(toml='[fetch]\nconcurrency = 24\nprefetch = 48\n[retry]\nbase = "10ms"\n')
        await domains.text("limit", other.url(), "--concurrency", "2")
        await domains.push(
            *(web.url(f"/p/{n}") for n in range(60)), *(other.url(f"/p/{n}") for n in range(20))
        )
        await domains.run()
        assert domains.rows("SELECT status, count(*) FROM event GROUP BY status") == [
            ("success", 80)
        ]
        assert peak[0] == 8, "the limit was reached and not exceeded"
        assert other_peak[0] == 2


@pytest.mark.slow
async def test_a_host_that_hangs_does_not_fill_the_prefetch_window(project: Any) -> None:
    async with Web() as web, Web(host="127.0.0.2") as other:
        hung = asyncio.Event()

        async def hang(request: Request) -> Reply:
            await hung.wait()
            return reply(PAGE)

        web.route("/p/*", hang)
        other.route("/p/*", PAGE)
        domains = project(toml="[fetch]\nconcurrency = 16\nprefetch = 64\n")
        await domains.push(*(web.url(f"/p/{n}") for n in range(1000)))
        async with domains.running():
            await until(lambda: sum(web.counts.values()) >= 8)
            await domains.push(*(other.url(f"/p/{n}") for n in range(300)))
            await until(lambda: sum(other.counts.values()) > 300)
            hung.set()


@pytest.mark.slow
async def test_events_that_missed_their_slot_behind_a_hanging_host_get_new_slots(
    project: Any,
) -> None:
    """The limit on requests in flight delays many events. Later they must not start together."""
    async with Web() as web:
        hung = asyncio.Event()

        async def hang(request: Request) -> Reply:
            await hung.wait()
            return reply(PAGE)

        web.route("/p/*", hang)
        domains = project(rate="10", concurrency=2)
        await domains.push(*(web.url(f"/p/{n}") for n in range(30)))
        async with domains.running():
            await until(lambda: sum(web.counts.values()) >= 3)
            await asyncio.sleep(2.0)
            assert sum(web.counts.values()) == 3, "robots.txt and two pages"
            hung.set()
            await until(lambda: sum(web.counts.values()) == 31)
        at = sorted(e.at / 1e6 for e in web.entries)[3:]
        for i in range(len(at) - 10):
            assert at[i + 10] - at[i] > 0.5, (
                "ten requests a second: a busy machine may delay some, but not start all together"
            )
