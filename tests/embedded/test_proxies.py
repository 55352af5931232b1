"""Events through real proxies on loopback: selection by route, cooldown, accounts and passwords.

No request with a proxy route is sent directly, and no password is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.embedded.proxy_servers import PASSWORD, USER, Proxy, Target

from penstock.claims.sql import SqlClaims
from penstock.claims.sql_proxies import SqlProxies
from penstock.cli.main import main
from penstock.config import files as config
from penstock.config.schema import ProxyPoolConfig
from penstock.fetching.proxies import Proxies
from penstock.fetching.stage import FetchOptions, FetchStage
from penstock.intake.accept import new_id, push
from penstock.model import ErrorClass, Failure, Route
from penstock.net.guard import Guard, parse_allow
from penstock.net.http import CurlFetcher, HttpOptions
from penstock.ports import Response
from penstock.rules import pace
from penstock.rules.events import event_of
from penstock.rules.proxies import PoolExhausted
from penstock.runtime.process import WorkerProcess
from penstock.runtime.stores import open_stores
from penstock.stores.sqlite import Database


class Time:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.at = 1_700_000_000.0

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds
        await asyncio.sleep(0)


class Rig:
    """The fetch stage with real pools. Proxy health is stored in a real database."""

    def __init__(
        self,
        target: Target,
        fetcher: CurlFetcher,
        time: Time,
        db: Database,
        pools: dict[str, ProxyPoolConfig],
        robots: Literal["obey", "ignore"],
    ) -> None:
        self.target, self.fetcher, self.time = target, fetcher, time
        self.health = SqlProxies(db, time)
        claims = SqlClaims(db, time, pace.Limits(rate=None), random.Random(1))
        self.proxies = Proxies(pools, self.health, fetcher, time, random.Random(2))
        self.stage = FetchStage(
            fetcher, claims, claims, time, FetchOptions(robots=robots), self.proxies
        )

    async def fetch(self, path: str, *, turn: int = 0, **route: Any) -> Response:
        return await self.stage.fetch(
            event_of(self.target.url(path), id_=new_id(), route=Route(**route)), None, turn=turn
        )

    async def fails(self, path: str, *, turn: int = 0, **route: Any) -> Failure:
        with pytest.raises(Failure) as caught:
            await self.fetch(path, turn=turn, **route)
        return caught.value


@contextlib.asynccontextmanager
async def rig(
    target: Target,
    pools: dict[str, ProxyPoolConfig],
    *,
    robots: Literal["obey", "ignore"] = "ignore",
    allow: str = "127.0.0.1:*",
) -> AsyncIterator[Rig]:
    guard, time, db = Guard(parse_allow(allow)), Time(), Database(":memory:")
    fetcher = CurlFetcher(guard, HttpOptions())
    made = Rig(target, fetcher, time, db, pools, robots)
    try:
        yield made
    finally:
        await made.proxies.close()
        await made.stage.close()
        await fetcher.close()
        guard.close()
        db.close_now()


def pool(*members: Proxy | str, **more: Any) -> ProxyPoolConfig:
    return ProxyPoolConfig(urls=tuple(m if isinstance(m, str) else m.dsn for m in members), **more)


# -- selection by route ----------------------------------------------------------------------------


# ruff: noqa: SIM117 (a pool needs the ports of open proxies)


async def test_the_route_selects_the_pool_and_an_event_without_a_route_uses_no_proxy() -> None:
    async with (
        Target() as t,
        Proxy(exit_="127.0.0.11") as de,
        Proxy("socks5", exit_="127.0.0.12") as home,
    ):
        async with rig(
            t, {"de": pool(de, geo=("de",)), "home": pool(home, account=("alice",))}, robots="obey"
        ) as r:
            assert (await r.fetch("/geo", geo="DE")).status == 200
            assert (await r.fetch("/name", pool="de")).status == 200
            assert (await r.fetch("/account", account="alice")).status == 200
            assert t.direct == 0, "robots.txt included"
            assert (await r.fetch("/plain")).status == 200
            assert {path: t.peers(path) for path in ("/geo", "/name", "/account", "/plain")} == {
                "/geo": ["127.0.0.11"],
                "/name": ["127.0.0.11"],
                "/account": ["127.0.0.12"],
                "/plain": ["127.0.0.1"],
            }
            assert home.connects == [f"127.0.0.1:{t.port}"]


async def test_a_proxy_gets_the_checked_address_and_never_the_name() -> None:
    async with (
        Target() as t,
        Proxy(exit_="127.0.0.11") as http,
        Proxy("socks5", exit_="127.0.0.12") as socks,
    ):
        async with rig(t, {"a": pool(http), "b": pool(socks)}) as r:
            r.fetcher.guard._resolver = _resolve
            r.fetcher.guard._allow = parse_allow("127.0.0.1:*,shop.test:*")
            for name in "ab":
                event = event_of(
                    f"http://shop.test:{t.port}/x", id_=new_id(), route=Route(pool=name)
                )
                assert (await r.stage.fetch(event, None)).status == 200
            assert http.connects == socks.connects == [f"127.0.0.1:{t.port}"]
            assert [a.headers["host"] for a in t.asked] == [f"shop.test:{t.port}"] * 2


async def _resolve(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ({"pool": "nowhere"}, "there is no proxy pool 'nowhere'"),
        ({"geo": "fr"}, "no proxy pool serves geo 'fr'"),
        ({"account": "bob"}, "no proxy pool serves account 'bob'"),
        ({"pool": "de", "geo": "fr"}, "proxy pool 'de' does not serve geo 'fr'"),
    ],
)
async def test_a_route_without_a_pool_is_permanent_and_sends_no_request(
    route: dict[str, str], expected: str
) -> None:
    async with Target() as t, Proxy() as p, rig(t, {"de": pool(p, geo=("de",))}) as r:
        failure = await r.fails("/", turn=0, **route)
        assert (failure.kind, failure.reason) == (ErrorClass.PERMANENT, expected)
        r.stage._proxies = None  # no proxy configuration
        assert (await r.fails("/", pool="de")).reason == "there is no proxy pool 'de'"
        assert (t.asked, p.connects) == ([], [])


async def test_requests_are_spread_by_weight() -> None:
    async with (
        Target() as t,
        Proxy(exit_="127.0.0.11") as a,
        Proxy(exit_="127.0.0.12") as b,
        rig(t, {"p": pool(a.dsn + " 3", b.dsn)}) as r,
    ):
        for i in range(80):
            await r.fetch(f"/{i}", pool="p")
        spread = Counter(t.peers())
        assert spread.total() == 80
        assert 50 <= spread["127.0.0.11"] <= 70, "about three quarters"


# -- failures --------------------------------------------------------------------------------------


async def test_an_unreachable_proxy_is_uncharged_and_its_cooldown_doubles() -> None:
    async with Target() as t, Proxy(exit_="127.0.0.11") as well, Proxy() as gone:
        await gone.stop()
        async with rig(t, {"p": pool(gone.dsn + " 1000", well, cooldown=30.0)}) as r:
            assert (await r.fetch("/1", pool="p")).status == 200, (
                "the other proxy was used in the same attempt"
            )
            ((key, health),) = r.health.view.items()
            assert key[1] == "*", "the failure applies to all hosts"
            assert (health.failures, health.until) == (1, r.time.at + 30)
            r.time.at += 29
            await r.fetch("/2", pool="p")
            assert next(iter(r.health.view.values())).failures == 1, "not tried during its cooldown"
            for failures, rest in ((2, 60), (3, 120)):
                r.time.at = health.until + 1
                await r.fetch(f"/f{failures}", pool="p")
                health = next(iter(r.health.view.values()))
                assert (health.failures, health.until) == (failures, r.time.at + rest)
            r.time.at = health.until + 1
            await gone.start()
            gone.exit = "127.0.0.12"
            await r.fetch("/back", pool="p")
            assert t.peers("/back") == ["127.0.0.12"]
            assert next(iter(r.health.view.values())).failures == 1, "a success halves the failures"
            assert t.direct == 0


async def test_an_exhausted_pool_delays_the_event_and_no_request_is_sent_directly() -> None:
    async with Target() as t, Proxy() as a, Proxy("socks5") as b:
        await a.stop()
        await b.stop()
        async with rig(t, {"p": pool(a, b), "other": pool(a)}) as r:
            failure = await r.fails("/", pool="p")
            assert isinstance(failure, PoolExhausted)
            assert "proxy pool 'p' exhausted: every proxy cools down" in failure.reason
            assert "the proxy did not let us through" in failure.reason
            assert failure.after is not None
            assert 25 < failure.after <= 33.1
            assert isinstance(await r.fails("/", pool="other"), PoolExhausted), (
                "health belongs to the proxy, not to the pool"
            )
            assert t.asked == []


async def test_an_exhausted_pool_keeps_the_progress_of_a_redirect_chain() -> None:
    async with Target() as t, Proxy() as a:
        await a.stop()
        async with rig(t, {"p": pool(a)}) as r:
            event = event_of(t.url("/"), id_=new_id(), route=Route(pool="p"))
            for _ in range(2):
                with pytest.raises(PoolExhausted) as caught:
                    await r.stage.fetch(event, None, progress=b"progress")
                assert caught.value.progress == b"progress"


async def test_a_wrong_password_is_a_failure_of_the_proxy_for_http_and_socks() -> None:
    async with Target() as t, Proxy() as http, Proxy("socks5") as socks:
        http.password = socks.password = "changed"
        pools = {
            "h": pool(http.dsn.replace("changed", "old-one")),
            "s": pool(socks.dsn.replace("changed", "old-one")),
        }
        async with rig(t, pools) as r:
            for name in "hs":
                failure = await r.fails("/", pool=name)
                assert isinstance(failure, PoolExhausted), failure.reason
                assert "old-one" not in failure.reason + failure.detail
            assert {host for _, host in r.health.view} == {"*"}
            assert (http.rejected, socks.rejected) == (1, 1)
            assert t.asked == []


@pytest.mark.parametrize("kind", ["http", "socks5"])
async def test_a_proxy_that_cannot_reach_a_host_cools_down_for_that_host_only(kind: str) -> None:
    async with (
        Target() as t,
        Target() as other,
        Proxy(kind, exit_="127.0.0.11") as p,
        rig(t, {"p": pool(p)}) as r,
    ):
        r.fetcher.guard._allow = parse_allow("127.0.0.1:*,shop.test:*")
        r.fetcher.guard._resolver = _resolve
        p.mood = "refuse"
        event = event_of(f"http://shop.test:{t.port}/", id_=new_id(), route=Route(pool="p"))
        with pytest.raises(Failure) as caught:
            await r.stage.fetch(event, None)
        assert caught.value.kind is ErrorClass.TRANSIENT
        assert not isinstance(caught.value, PoolExhausted)
        assert [host for _, host in r.health.view] == [f"shop.test:{t.port}"]
        p.mood = ""
        with pytest.raises(PoolExhausted):
            await r.stage.fetch(event, None)
        elsewhere = event_of(other.url("/"), id_=new_id(), route=Route(pool="p"))
        assert (await r.stage.fetch(elsewhere, None)).status == 200
        assert t.direct == other.direct == 0


async def test_a_403_starts_the_cooldown_of_a_proxy_and_a_404_does_not() -> None:
    async with (
        Target() as t,
        Proxy(exit_="127.0.0.11") as a,
        Proxy(exit_="127.0.0.12") as b,
        rig(t, {"p": pool(a.dsn + " 1000", b)}) as r,
    ):
        t.answers["127.0.0.11/x"] = (403, [], "no")
        t.answers["/gone"] = (404, [], "no")
        assert (await r.fails("/gone", pool="p")).kind is ErrorClass.NOT_FOUND
        assert not r.health.view
        failure = await r.fails("/x", pool="p")
        assert (failure.kind, failure.reason) == (ErrorClass.BLOCKED, "HTTP 403")
        assert "through http://***@127.0.0.1" in failure.detail
        assert (await r.fetch("/x", pool="p")).status == 200
        assert t.peers("/x") == ["127.0.0.11", "127.0.0.12"]


async def test_a_proxy_with_a_cooldown_of_zero_is_used_again_after_a_403() -> None:
    async with (
        Target() as t,
        Proxy(exit_="127.0.0.11") as p,
        rig(t, {"p": pool(p, cooldown=0.0)}) as r,
    ):
        t.answers["/x"] = (403, [], "no")
        for _ in range(3):
            assert (await r.fails("/x", pool="p")).kind is ErrorClass.BLOCKED
        assert len(t.peers("/x")) == 3


async def test_a_proxy_failure_for_robots_does_not_block_the_site_for_other_routes() -> None:
    async with Target() as t, Proxy() as gone, rig(t, {"p": pool(gone)}, robots="obey") as r:
        await gone.stop()
        assert isinstance(await r.fails("/", pool="p"), PoolExhausted)
        assert (await r.fetch("/")).status == 200


async def test_a_private_proxy_that_is_not_allowed_gets_no_connection() -> None:
    async with (
        Target() as t,
        Proxy() as p,
        rig(t, {"p": pool(p)}, allow=f"127.0.0.1:{t.port}") as r,
    ):
        failure = await r.fails("/", pool="p")
        assert isinstance(failure, PoolExhausted)
        assert "the proxy's own address: forbidden address: not a public address" in failure.reason
        assert (p.connects, p.rejected, t.asked) == ([], 0, [])


async def test_other_workers_see_proxy_health_after_a_refresh() -> None:
    async with Target() as t, Proxy() as gone, rig(t, {"p": pool(gone)}) as r:
        await gone.stop()
        await r.fails("/", pool="p")
        other = SqlProxies(r.health.db, r.time)
        assert not other.view
        await other.refresh()
        assert other.view == r.health.view
        r.time.at += 31
        ((member, _, label, *_),) = r.health.troubled()
        await r.health.worked(member, "h", label)
        await other.refresh()
        assert not other.view, "recovered"


# -- blocked: the next pool ------------------------------------------------------------------------


async def test_each_further_try_uses_the_next_pool_and_then_the_first_again() -> None:
    async with (
        Target() as t,
        Proxy(exit_="127.0.0.11") as a,
        Proxy(exit_="127.0.0.12") as b,
        rig(t, {"a": pool(a, next="b"), "b": pool(b)}) as r,
    ):
        for turn in range(3):
            await r.fetch("/x", turn=turn, pool="a")
        assert t.peers() == ["127.0.0.11", "127.0.0.12", "127.0.0.11"]


# -- accounts --------------------------------------------------------------------------------------


async def test_an_account_keeps_its_proxy_until_it_fails_and_has_its_own_cookies() -> None:
    exits = [f"127.0.0.{n}" for n in range(11, 16)]
    async with contextlib.AsyncExitStack() as stack:
        t = await stack.enter_async_context(Target())
        members = [await stack.enter_async_context(Proxy(exit_=e)) for e in exits]
        r = await stack.enter_async_context(rig(t, {"p": pool(*members)}))
        names = [f"account-{suffix}" for suffix in "abcdefghijkl"]
        for name in names:
            t.answers[f"/login/{name}"] = (
                200,
                [f"set-cookie: sid={name}; Path=/", "set-cookie: b=2; Path=/other"],
                Target.PAGE,
            )
            answer = await r.fetch(f"/login/{name}", pool="p", account=name)
            assert "set-cookie" not in answer.headers, "a session token is not stored with the page"
        for _ in range(3):
            for name in names:
                await r.fetch(f"/see/{name}", pool="p", account=name)
        for name in names:
            assert len(set(t.peers(f"/see/{name}") + t.peers(f"/login/{name}"))) == 1
            assert all(a.cookies == {f"sid={name}"} for a in t.asked if a.path == f"/see/{name}")
        assert len(set(t.peers())) > 2, "the accounts are spread over the proxies"
        await r.fetch("/see/anonymous", pool="p")
        await r.fetch("/see/direct")
        assert all(not a.cookies for a in t.asked[-2:])

        victim = names[0]
        lost = t.peers(f"/see/{victim}")[0]
        before = {name: t.peers(f"/see/{name}")[0] for name in names}
        await members[exits.index(lost)].stop()
        for name in names:
            await r.fetch(f"/after/{name}", pool="p", account=name)
        assert {name: t.peers(f"/after/{name}")[0] for name in names if before[name] != lost} == {
            n: p for n, p in before.items() if p != lost
        }
        assert t.peers(f"/after/{victim}") != [lost]
        assert next(a.cookies for a in t.asked if a.path == f"/after/{victim}") == {f"sid={victim}"}


async def test_without_an_account_cookies_are_kept_for_one_redirect_chain_only() -> None:
    async with Target() as t, rig(t, {}) as r:
        t.answers["/a"] = (302, ["location: /b", "set-cookie: step=1"], "")
        t.answers["/b"] = (200, ["set-cookie: kept=no"], Target.PAGE)
        await r.fetch("/a")
        await r.fetch("/c")
        assert [(a.path, a.cookies) for a in t.asked] == [
            ("/a", set()),
            ("/b", {"step=1"}),
            ("/c", set()),
        ]


@pytest.fixture
def _long_list_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event waits 2 s for a proxy list. This machine may pause for longer."""
    monkeypatch.setattr("penstock.fetching.proxies.LIST_WAIT", 60.0)


# -- lists -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_long_list_wait")
async def test_a_providers_list_is_refreshed_and_kept_if_the_refresh_fails() -> None:
    async with (
        Target() as t,
        Target() as provider,
        Proxy(exit_="127.0.0.11") as a,
        Proxy(exit_="127.0.0.12") as b,
    ):
        provider.answers["/list?key=SECRET"] = (
            200,
            [],
            f"# yours\n127.0.0.1:{a.port}:{USER}:{PASSWORD}\n",
        )
        async with rig(
            t, {"p": ProxyPoolConfig(list_url=provider.url("/list?key=SECRET"), list_every=60.0)}
        ) as r:

            def listed() -> bool:
                return r.health.lists()["p"][0] == r.time.at

            await r.fetch("/1", pool="p")
            await r.fetch("/2", pool="p")
            assert len(provider.asked) == 1
            provider.answers["/list?key=SECRET"] = (200, [], f"{b.dsn}\n")
            r.time.at += 61
            await r.fetch("/3", pool="p")  # starts the refresh and uses the old list
            await _until(listed)
            assert len(provider.asked) == 2
            await r.fetch("/4", pool="p")
            provider.answers["/list?key=SECRET"] = (500, [], "")
            r.time.at += 61
            await r.fetch("/5", pool="p")
            await _until(listed)
            assert len(provider.asked) == 3
            await r.fetch("/6", pool="p")
            assert t.peers() == ["127.0.0.11"] * 3 + ["127.0.0.12"] * 3
            assert r.health.lists()["p"][1:] == (1, "its list: HTTP 500")


@pytest.mark.usefixtures("_long_list_wait")
async def test_an_unavailable_or_invalid_list_is_an_exhausted_pool() -> None:
    async with (
        Target() as t,
        Target() as provider,
        rig(t, {"p": ProxyPoolConfig(list_url=provider.url("/?key=SECRET"))}) as r,
    ):
        for body, expected in (
            ("", "HTTP 500"),
            ("nonsense", "proxy 1: it is neither a URL nor host:port"),
            ("# none", "it is empty"),
        ):
            provider.answers["/?key=SECRET"] = (200 if body else 500, [], body)
            failure = await r.fails("/", pool="p")
            assert isinstance(failure, PoolExhausted)
            assert failure.reason == f"proxy pool 'p' exhausted: no proxies (its list: {expected})"
            r.time.at += 31
        assert t.asked == []


async def _until(true: Any) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(0.005)


# -- the whole pipeline ----------------------------------------------------------------------------

SHOP = """
from penstock import Page, Pipeline
shop = Pipeline("shop")
@shop.extract(version=1)
def page(page: Page):
    yield {"title": page.css("h1::text").get()}
shop.sink("jsonl:out.jsonl")
"""


class Project:
    """A directory with a pipeline and a penstock.toml. Workers run in this process in real time."""

    def __init__(self, tmp: Path, monkeypatch: pytest.MonkeyPatch, toml: str, *ports: int) -> None:
        self.dir = tmp
        (tmp / "shop.py").write_text(SHOP)
        allow = ",".join(f"127.0.0.1:{p}" for p in ports)
        common = (
            f'robots = "ignore"\n[pace]\nrate = "unlimited"\n[net]\nallow = "{allow}"\n'
            '[extract]\nisolation = "none"\n'
        )
        (tmp / "penstock.toml").write_text(common + toml)
        monkeypatch.chdir(tmp)

    async def push(self, *urls: str, **route: Any) -> None:
        stores = open_stores(self.config)
        try:
            await push(stores.lifecycle, urls, clock=stores.clock, route=Route(**route))
        finally:
            stores.close()

    @property
    def config(self) -> config.Config:
        return config.load({}, {}, self.dir).config

    async def run(self) -> int:
        running = WorkerProcess(
            self.config, self.dir / "shop.py", roles=frozenset({"fetch", "extract", "sink"})
        )
        return await running.run(asyncio.Event(), until_idle=True)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        running, stop = (
            WorkerProcess(
                self.config, self.dir / "shop.py", roles=frozenset({"fetch", "extract", "sink"})
            ),
            asyncio.Event(),
        )
        task = asyncio.create_task(running.run(stop))
        try:
            yield
        finally:
            stop.set()
            await task

    def query(self, sql: str) -> list[Any]:
        stores = open_stores(self.config, inline=True)
        try:
            rows: list[Any] = stores.db.read_now(lambda tx: tx.execute(sql).fetchall())
            return rows
        finally:
            stores.close()

    def written(self) -> bytes:
        """Return all bytes in the state directory and in the sink's file."""
        return b"".join(
            p.read_bytes()
            for p in sorted(self.dir.rglob("*"))
            if p.is_file() and p.name not in ("penstock.toml", "shop.py")
        )


@pytest.mark.slow
async def test_events_of_an_exhausted_pool_wait_uncharged_until_max_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Target() as t, Proxy() as gone:
        await gone.stop()
        toml = (
            f'[retry]\nmax_age = "4s"\n[proxies.p]\nurls = ["{gone.dsn}"]\n'
            'cooldown = "200ms"\ncooldown_max = "300ms"\n'
        )
        project = Project(tmp_path, monkeypatch, toml, t.port, gone.port)

        def ended() -> int:
            ((count,),) = project.query(
                "SELECT count(*) FROM event WHERE status IN ('success', 'dead')"
            )
            return int(count)

        async with project.running():
            await project.push(t.url("/direct/0"))
            # The worker has started, so its start does not count towards the age of the events.
            await _until(lambda: ended() == 1)
            await project.push(t.url("/one"), t.url("/two"), pool="p")
            await project.push(t.url("/unknown"), pool="nosuch")
            await project.push(*[t.url(f"/direct/{n}") for n in range(1, 5)])
            await _until(lambda: ended() == 8)
        assert {a.path.rstrip("01234") for a in t.asked} == {"/direct/"}, (
            "no event with a pool was fetched directly"
        )
        rows = {
            url.rpartition("/")[2]: (status, reason, attempts)
            for url, status, reason, attempts in project.query(
                "SELECT url, status, reason, attempts FROM event"
            )
        }
        assert rows["unknown"][:2] == ("dead", "there is no proxy pool 'nosuch'")
        for name in ("one", "two"):
            status, reason, attempts = rows[name]
            assert (status, attempts) == ("dead", 1), "only the last failure is charged"
            assert reason.startswith("too old to wait any longer: proxy pool 'p'")
        parked = [
            reason
            for (reason,) in project.query("SELECT reason FROM history WHERE status='delayed'")
        ]
        assert "no live worker serves pool 'nosuch'" in parked, "it waits until max_age too"
        others = [reason for reason in parked if "nosuch" not in reason]
        assert len(others) >= 2
        assert all("proxy pool 'p'" in reason for reason in others)


async def test_a_blocked_event_is_retried_with_the_next_pool_and_the_same_envelope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Target() as t, Proxy(exit_="127.0.0.11") as a, Proxy(exit_="127.0.0.12") as b:
        for path in ("/x", "/stay"):
            t.answers["127.0.0.11" + path] = (403, [], "no")
        toml = (
            f'[retry]\nbase = "30ms"\n[proxies.a]\nurls = "{a.dsn}"\nnext = "b"\n'
            f'cooldown = "10ms"\n[proxies.b]\nurls = "{b.dsn}"\n'
        )
        project = Project(tmp_path, monkeypatch, toml, t.port, a.port, b.port)
        await project.push(t.url("/x"), pool="a")
        before = project.query("SELECT body FROM envelope")
        assert await project.run() == 0
        assert t.peers() == ["127.0.0.11", "127.0.0.12"]
        assert project.query("SELECT body FROM envelope") == before

        (tmp_path / "penstock.toml").write_text(
            (tmp_path / "penstock.toml")
            .read_text()
            .replace("[retry]", "[retry]\nnext_pool = false")
        )
        await project.push(t.url("/stay"), pool="a")
        assert await project.run() == 1
        assert set(t.peers("/stay")) == {"127.0.0.11"}
        assert len(t.peers("/stay")) == 4


async def test_a_redriven_event_starts_from_its_first_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Target() as t, Proxy(exit_="127.0.0.11") as a, Proxy(exit_="127.0.0.12") as b:
        t.answers["/x"] = (403, [], "no")
        toml = (
            f'[retry]\nbase = "20ms"\nbudget = 1\n[proxies.a]\nurls = "{a.dsn}"\nnext = "b"\n'
            'cooldown = "1ms"\n'
        )
        toml += f'[proxies.b]\nurls = "{b.dsn}"\ncooldown = "1ms"\n'
        project = Project(tmp_path, monkeypatch, toml, t.port, a.port, b.port)
        await project.push(t.url("/x"), pool="a")
        assert await project.run() == 1
        stores = open_stores(project.config)
        try:
            ((id_,),) = await stores.db.read(
                lambda tx: tx.execute("SELECT event FROM dead").fetchall()
            )
            assert await stores.dead_letters.redrive([id_]) == 1
        finally:
            stores.close()
        assert await project.run() == 1
        assert t.peers() == ["127.0.0.11", "127.0.0.12"] * 2


@pytest.mark.usefixtures("_long_list_wait")
async def test_no_password_is_written_logged_or_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    async with contextlib.AsyncExitStack() as stack:
        t, provider = [await stack.enter_async_context(Target()) for _ in range(2)]
        good, blocked, refusing, gone = [
            await stack.enter_async_context(Proxy(exit_=f"127.0.0.{n}")) for n in range(11, 15)
        ]
        wrong = await stack.enter_async_context(Proxy("socks5"))
        refusing.mood = "refuse"
        wrong.user = "another-user"
        await gone.stop()
        t.answers["/block"] = (403, [], "no")
        t.answers["/login"] = (200, ["set-cookie: sid=COOKIE-PLANTED"], Target.PAGE)
        provider.answers["/l?key=LISTKEY-PLANTED"] = (200, [], good.dsn)
        wrong_dsn = f"socks5://{USER}:{PASSWORD}@127.0.0.1:{wrong.port}"
        toml = (
            '[retry]\nbase = "20ms"\nbudget = 1\nmax_age = "1s"\n'
            f'[proxies.good]\nurls = "{good.dsn}"\ncooldown = "1ms"\n'
            f'[proxies.blocked]\nurls = "{blocked.dsn}"\ncooldown = "1ms"\n'
            f'[proxies.refusing]\nurls = "{refusing.dsn}"\n'
            f'cooldown = "10ms"\n[proxies.wrong]\nurls = ["{wrong_dsn}", "{gone.dsn}"]\n'
            'cooldown = "100ms"\ncooldown_max = "200ms"\n'
            f'[proxies.list]\nlist_url = "{provider.url("/l?key=LISTKEY-PLANTED")}"\n'
        )
        project = Project(
            tmp_path,
            monkeypatch,
            toml,
            t.port,
            provider.port,
            *(p.port for p in (good, blocked, refusing, wrong, gone)),
        )
        await project.push(t.url("/fine"), pool="good")
        await project.push(t.url("/block"), pool="blocked")
        await project.push(t.url("/listed"), pool="list")
        await project.push(t.url("/login"), pool="good", account="alice")
        await project.push(t.url("/tunnel"), pool="refusing")
        await project.push(t.url("/never"), pool="wrong")
        assert await project.run() == 1
        ended = {
            url.rpartition("/")[2]: status
            for url, status in project.query("SELECT url, status FROM event")
        }
        assert ended == {
            "fine": "success",
            "listed": "success",
            "login": "success",
            "block": "dead",
            "tunnel": "dead",
            "never": "dead",
        }
        assert t.direct == 0
        assert project.query("SELECT failures FROM proxy_health"), "the run recorded proxy failures"
        for args in (
            ["proxies", "ls"],
            ["proxies", "ls", "--json"],
            ["proxies", "test", "--url", t.url("/ip"), "--json"],
            ["config", "show", "--origin"],
            ["config", "show", "--json"],
            ["status"],
            ["status", "--json"],
            ["dlq", "ls"],
            ["dlq", "ls", "--json"],
            ["trace", t.url("/block")],
            ["trace", t.url("/never"), "--json"],
            ["events", "ls", "--json"],
        ):
            await asyncio.to_thread(main, args)
        shown = capfd.readouterr()
        everything = (
            project.written() + shown.out.encode() + shown.err.encode() + caplog.text.encode()
        )
        assert b"http://***@127.0.0.1" in everything, "masked labels were written"
        for secret in (PASSWORD, USER, "LISTKEY-PLANTED", "COOKIE-PLANTED"):
            assert secret.encode() not in everything, secret


async def test_proxies_ls_shows_pool_health_and_proxies_test_tries_each_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Target() as t, Proxy(exit_="127.0.0.11") as good, Proxy() as gone:
        await gone.stop()
        t.answers["/ip"] = (200, [], '{"origin": "203.0.113.9"}')
        toml = f'[proxies.p]\nurls = ["{good.dsn} 2", "{gone.dsn}"]\ngeo = "de"\n'
        project = Project(tmp_path, monkeypatch, toml, t.port, good.port, gone.port)
        assert await asyncio.to_thread(main, ["proxies", "ls", "--json"]) == 0, (
            "it works without a state directory"
        )
        document = json.loads(capfd.readouterr().out)
        assert [m["weight"] for m in document["pools"][0]["members"]] == [2, 1]
        # Each event uses the second proxy with a probability of one third, until it has failed.
        await project.push(*[t.url(f"/{n}") for n in range(60)], geo="de")
        await project.run()
        assert await asyncio.to_thread(main, ["proxies", "ls", "--json"]) == 0
        (p,) = json.loads(capfd.readouterr().out)["pools"]
        assert (p["pool"], p["geo"]) == ("p", ["de"])
        well, ill = p["members"]
        assert well["trouble"] == []
        assert [(x["host"], x["state"]) for x in ill["trouble"]] == [("*", "cooling")]
        assert (
            await asyncio.to_thread(main, ["proxies", "test", "p", "--url", t.url("/ip"), "--json"])
            == 1
        )
        results = json.loads(capfd.readouterr().out)["results"]
        assert [(x["verdict"], x["status"], x["exit"]) for x in results] == [
            ("ok", 200, "203.0.113.9"),
            ("failed", None, None),
        ]
        assert results[1]["reason"] == "the proxy did not let us through"
        assert await asyncio.to_thread(main, ["proxies", "test", "q"]) == 2
        assert "pools: p" in capfd.readouterr().err
