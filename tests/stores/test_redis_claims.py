"""Claims, slots, robots.txt and proxy health on a real Redis server. Each claim and slot has one
owner, and the whole fleet shares the state.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.servers import Handle

from penstock.claims.redis import claims as adapter
from penstock.claims.redis.claims import FleetClock, RedisClaims
from penstock.clock import SystemClock
from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.operate.hosts import apply_configured_exceptions, ignore_robots, obey_robots
from penstock.ports import ClaimChange, Clock
from penstock.rules import pace
from penstock.rules.proxies import ANY_HOST
from penstock.stores.redis import Server

pytestmark = pytest.mark.server("redis")


class Fleet:
    """One namespace on the server with any number of workers."""

    def __init__(self, url: str) -> None:
        self.url, self.prefix = url, f"c{uuid.uuid4().hex[:8]}"
        self.opened: list[RedisClaims] = []

    def worker(self, clock: Clock | None = None, **limits: float) -> RedisClaims:
        usual = msgspec.convert({"rate": 10.0, "jitter": 0.0, **limits}, pace.Limits)
        claims = RedisClaims(
            Server(self.url, evictable=False),
            self.prefix,
            clock or SystemClock(),
            usual,
            random.Random(1),
        )
        self.opened.append(claims)
        return claims

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for claims in self.opened:
            await claims.close()

    def processes(self, script: str, n: int) -> list[list[Any]]:
        """Run `n` processes that start together, and return the JSON that each printed."""
        code = PREAMBLE + script
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code, self.url, self.prefix, f"w{i}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(n)
        ]
        for p in started:
            assert p.stdout is not None
            assert p.stdout.readline() == "ready\n"
        for p in started:
            assert p.stdin is not None
            p.stdin.write("go\n")
            p.stdin.flush()
        answers = [json.loads(p.communicate(timeout=120)[0]) for p in started]
        assert [p.returncode for p in started] == [0] * n
        return answers


PREAMBLE = """
import asyncio, json, random, sys
from penstock.claims.redis.claims import RedisClaims
from penstock.clock import SystemClock
from penstock.ports import ClaimChange
from penstock.rules import pace
from penstock.stores.redis import Server
url, prefix, me = sys.argv[1:]
server, limits = Server(url, evictable=False), pace.Limits(rate=200.0, jitter=0.0)
claims = RedisClaims(server, prefix, SystemClock(), limits, random.Random(1))
async def main(work):
    await claims.refresh()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(await work()))
    await claims.close()
"""


@pytest.fixture
def fleet(server: Callable[[str], Handle]) -> Fleet:
    return Fleet(server("redis").url)


# -- claims ----------------------------------------------------------------------------------------


async def test_a_claim_is_taken_only_from_the_expected_owner_and_may_be_repeated(
    fleet: Fleet,
) -> None:
    async with fleet:
        c = fleet.worker()
        assert await c.take(
            [ClaimChange(b"u1", "e1", None, None), ClaimChange(b"u2", "e2", "g2", None)]
        ) == [True, True]
        assert await c.take([ClaimChange(b"u1", "e1", None, None)]) == [True], (
            "a worker repeats the call if its answer was lost"
        )
        assert await c.take(
            [
                ClaimChange(b"u1", "e3", None, None),
                ClaimChange(b"u1", "e3", "e1", "other"),
                ClaimChange(b"u2", "e4", "e2", "e2"),
            ]
        ) == [False, False, True]
        held = await c.holders([b"u1", b"u2", b"nobody"])
        assert {key: (h.owner, h.good, h.next) for key, h in held.items()} == {
            b"u1": ("e1", None, None),
            b"u2": ("e4", "e2", None),
        }
        assert await c.holders([]) == {}
        assert await c.take([]) == []


async def test_the_next_event_is_set_only_for_the_current_owner_and_cleared_with_it(
    fleet: Fleet,
) -> None:
    async with fleet:
        c = fleet.worker()
        await c.take([ClaimChange(b"u", "e1", None, None)])
        assert not await c.set_next(b"u", "e2", "another")
        assert not await c.set_next(b"never seen", "e2", "e1")
        assert await c.set_next(b"u", "e2", "e1")
        assert (await c.holders([b"u"]))[b"u"].next == "e2"
        assert await c.take([ClaimChange(b"u", "e1", None, None)]) == [True]
        assert (await c.holders([b"u"]))[b"u"].next == "e2", (
            "the owner took its claim again, which keeps the next event"
        )
        assert await c.take([ClaimChange(b"u", "e2", "e1", "e1")]) == [True]
        held = (await c.holders([b"u"]))[b"u"]
        assert (held.owner, held.good, held.next) == ("e2", "e1", None)


async def test_pruning_removes_old_claims_and_keeps_young_ones(fleet: Fleet) -> None:
    async with fleet:
        c = fleet.worker()
        await c.take([ClaimChange(b"%d" % i, "e", None, None) for i in range(2500)])
        between = SystemClock().now()
        await c.take([ClaimChange(b"young", "e", None, None)])
        await c.prune(between)
        assert list(await c.holders([b"0", b"2499", b"young"])) == [b"young"]


def test_one_of_two_processes_that_race_for_a_claim_gets_it(fleet: Fleet) -> None:
    script = """
async def work():
    won = []
    for i in range(300):
        won += await claims.take([ClaimChange(b"u%d" % i, f"{me}-{i}", None, None)])
    return won
asyncio.run(main(work))
"""
    for answers in zip(*fleet.processes(script, 2), strict=True):
        assert sorted(answers) == [False, True]


# -- slots and limits ------------------------------------------------------------------------------


def test_four_processes_reserve_different_slots_at_the_configured_interval(fleet: Fleet) -> None:
    script = """
async def work():
    slots = []
    for i in range(25):
        got = await claims.reserve({"a.test": 3, "b.test": 1})
        slots += [["a.test", s] for s in got["a.test"]] + [["b.test", s] for s in got["b.test"]]
    return slots
asyncio.run(main(work))
"""
    given = [tuple(pair) for answers in fleet.processes(script, 4) for pair in answers]
    assert Counter(host for host, _ in given) == {"a.test": 300, "b.test": 100}
    for name in ("a.test", "b.test"):
        slots = sorted(slot for host, slot in given if host == name)
        assert min(b - a for a, b in pairwise(slots)) > 1 / 200 - 1e-5


async def test_slots_beyond_the_time_limit_are_returned_but_not_reserved(fleet: Fleet) -> None:
    async with fleet:
        c, other = fleet.worker(rate=0.01), fleet.worker(rate=0.01)
        before = SystemClock().now()
        (slots,) = (await c.reserve({"a.test": 5}, within=250.0)).values()
        assert before - 0.1 <= slots[0] <= SystemClock().now() + 0.1
        assert [round(s - slots[0]) for s in slots] == [0, 100, 200, 300, 400]
        ((following,),) = (await other.reserve({"a.test": 1})).values()
        assert following == pytest.approx(slots[3], abs=0.1), (
            "only the slots within the time limit were reserved"
        )
        assert c.gap("a.test") == 100.0


async def test_a_throttled_host_is_blocked_in_every_worker_and_older_slots_are_void(
    fleet: Fleet,
) -> None:
    async with fleet:
        c, other = fleet.worker(), fleet.worker()
        await other.refresh()
        before = SystemClock().now()
        await c.report("a.test", status=429, retry_after=30.0, seconds=0.1)
        assert before + 29.9 <= c.blocked_until("a.test") <= SystemClock().now() + 30.1
        assert other.blocked_until("a.test") == 0.0
        await other.refresh()
        assert other.blocked_until("a.test") == pytest.approx(c.blocked_until("a.test"), abs=0.1)
        assert other.voided("a.test") >= before - 1
        ((slot,),) = (await other.reserve({"a.test": 1})).values()
        assert slot >= other.blocked_until("a.test") - 0.001
        assert other.blocked_until("b.test") == other.voided("b.test") == 0.0


async def test_a_success_changes_no_host_state_and_enough_successes_end_a_penalty(
    fleet: Fleet,
) -> None:
    async with fleet:
        c, other = fleet.worker(), fleet.worker()
        await c.refresh()
        await c.report("a.test", status=200, retry_after=None, seconds=0.1)
        assert c.hosts.state("a.test") == pace.HostState()
        await c.report("a.test", status=503, retry_after=None, seconds=0.1)
        await other.refresh()
        assert c.hosts.state("a.test").penalty == 2.0
        for worker in [c, other, c, other, c]:
            await worker.report("a.test", status=200, retry_after=None, seconds=0.1)
        assert c.hosts.state("a.test").penalty == 1.0
        assert c.hosts.state("a.test").throttles == 1


async def test_a_crawl_delay_applies_to_all_workers_from_the_next_reservation(fleet: Fleet) -> None:
    async with fleet:
        c, other = fleet.worker(), fleet.worker()
        await other.reserve({"a.test": 1})
        before = SystemClock().now()
        await c.crawl_delay("a.test", 2.0)
        assert c.voided("a.test") > 0
        slots = (await other.reserve({"a.test": 2}))["a.test"]
        assert slots[1] - slots[0] == pytest.approx(2.0, abs=0.001)
        assert slots[0] > before + 1.9, "the request for robots.txt used a slot"
        await c.crawl_delay("a.test", None)
        assert c.hosts.state("a.test").crawl_delay is None


class Wrong:
    """A clock that is wrong by `by` seconds."""

    def __init__(self, by: float) -> None:
        self.by = by

    def now(self) -> float:
        return SystemClock().now() + self.by

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("by", [-3600.0, -7.0, 7.0, 3600.0])
async def test_a_worker_with_a_wrong_clock_requests_no_host_too_early(
    fleet: Fleet, by: float
) -> None:
    async with fleet:
        right, wrong = fleet.worker(rate=2.0), fleet.worker(Wrong(by), rate=2.0)
        # Repeat until one round trip was short, because it limits the accuracy of the offset.
        while abs(wrong.clock.offset + by) > 0.05:
            await wrong.refresh()
        moments: list[float] = []
        for _ in range(4):
            moments += (await right.reserve({"a.test": 1}))["a.test"]
            moments += [slot - by for slot in (await wrong.reserve({"a.test": 1}))["a.test"]]
        assert min(b - a for a, b in pairwise(sorted(moments))) > 0.4
        assert max(moments) < SystemClock().now() + 10
        await right.report("a.test", status=429, retry_after=30.0, seconds=0.0)
        await wrong.refresh()
        assert wrong.blocked_until("a.test") - by == pytest.approx(
            right.blocked_until("a.test"), abs=0.5
        )


def test_the_clock_offset_ignores_differences_within_the_round_trip() -> None:
    clock = FleetClock(SystemClock())
    for asked, server, answered, offset in [
        (100.0, 100.2, 100.4, 0.0),
        (100.0, 105.0, 100.2, 4.8),  # a shorter round trip replaces the offset
        (100.0, 100.1, 100.5, 4.8),  # a longer round trip is ignored
        (200.0, 190.0, 200.5, -10.0),  # the older measurement has expired
    ]:
        clock.compared(asked, server, answered)
        assert clock.offset == pytest.approx(offset)


# -- operator commands -----------------------------------------------------------------------------


async def test_limits_and_pauses_of_one_host_reach_every_worker(fleet: Fleet) -> None:
    async with fleet:
        c, other = fleet.worker(concurrency=8), fleet.worker(concurrency=8)
        hosts = c.hosts
        hosts.change("a.test", lambda s: pace.limited(s, c.limits, 2.0, None, 3))
        hosts.change("b.test", lambda s: msgspec.structs.replace(s, paused_until=math.inf))
        await other.reserve({"c.test": 1})
        await other.refresh()
        assert (other.concurrency("a.test"), other.concurrency("b.test")) == (3, 8)
        assert other.blocked_until("b.test") == math.inf
        assert list(hosts.list(10)) == ["b.test", "a.test", "c.test"]
        assert list(hosts.list(1)) == ["b.test"]
        hosts.change("b.test", lambda s: msgspec.structs.replace(s, paused_until=0.0))
        hosts.change("a.test", lambda s: pace.limited(s, c.limits, None, None, None))
        await other.refresh()
        assert (other.concurrency("a.test"), other.blocked_until("b.test")) == (8, 0.0)


async def test_a_limit_set_by_an_operator_replaces_the_cached_state_of_a_worker(
    fleet: Fleet,
) -> None:
    async with fleet:
        c = fleet.worker()
        await c.reserve({"a.test": 1})
        c.hosts.change("a.test", lambda s: msgspec.structs.replace(s, rate=math.inf))
        slots = (await c.reserve({"a.test": 3}))["a.test"]
        assert len(set(slots)) == 1, "unlimited, although the worker had cached another state"


async def test_exceptions_keep_their_reasons_and_are_ended_instead_of_deleted(fleet: Fleet) -> None:
    async with fleet:
        c, other = fleet.worker(), fleet.worker()
        hosts = c.hosts
        ignore_robots(hosts, "a.test", "ours", "me")
        ignore_robots(hosts, "a.test", "ours indeed", "you")
        hosts.add_exception("robots", "b.test", "just once", "me", once=True)
        await other.refresh()
        assert (other.exempt("a.test"), other.exempt("b.test")) == (True, False)
        assert hosts.state("a.test").ignores_robots
        assert [(e.host, e.reason, e.who) for e in hosts.exceptions()] == [
            ("a.test", "ours indeed", "you")
        ]
        every = hosts.exceptions(ended=True)
        assert [(e.host, e.reason, e.ended is None) for e in every] == [
            ("b.test", "just once", False),
            ("a.test", "ours indeed", True),
            ("a.test", "ours", False),
        ]
        assert [e.reason for e in hosts.exceptions(["b.test"], ended=True)] == ["just once"]
        assert obey_robots(hosts, "a.test")
        assert not obey_robots(hosts, "a.test")
        await other.refresh()
        assert not other.exempt("a.test")
        apply_configured_exceptions(hosts, {"private": "a test", "remote_dns": ""}, "me")
        apply_configured_exceptions(hosts, {"private": "a test", "remote_dns": ""}, "me")
        assert [(e.kind, e.host) for e in hosts.exceptions()] == [("private", "*")]
        apply_configured_exceptions(hosts, {"private": ""}, "me")
        assert hosts.exceptions() == []
        await c.prune(SystemClock().now() + 1)
        assert hosts.exceptions(ended=True) == []


async def test_a_robots_file_is_cached_for_all_workers_with_its_status_and_expiry(
    fleet: Fleet,
) -> None:
    async with fleet:
        c, other = fleet.worker(), fleet.worker()
        assert await c.robots("https://a.test") is None
        until = SystemClock().now() + 3600.25
        await c.keep_robots("https://a.test", b"User-agent: *\nDisallow: /\xff", 200, until)
        await c.keep_robots("http://a.test", None, 0, until)
        assert await other.robots("https://a.test") == (
            b"User-agent: *\nDisallow: /\xff",
            200,
            until,
        )
        assert await other.robots("http://a.test") == (None, 0, until)
        assert [(k.origin, k.status) for k in c.hosts.robots("a.test")] == [
            ("https://a.test", 200),
            ("http://a.test", 0),
        ]


async def test_proxy_failures_are_shared_by_all_workers_and_cleared_by_success(
    fleet: Fleet,
) -> None:
    async with fleet:
        mine, theirs = fleet.worker().proxies, fleet.worker().proxies
        await mine.failed("p1", "a.test", "proxy one", cooldown=0.0, longest=60.0, reason="refused")
        await mine.failed("p1", "a.test", "proxy one", cooldown=0.0, longest=60.0, reason="refused")
        await theirs.failed("p1", ANY_HOST, "proxy one", cooldown=50.0, longest=60.0, reason="dead")
        await theirs.refresh()
        assert {key: h.failures for key, h in theirs.view.items()} == {
            ("p1", "a.test"): 2,
            ("p1", ANY_HOST): 1,
        }
        assert [row[:4] for row in mine.troubled()] == [
            ("p1", ANY_HOST, "proxy one", 1),
            ("p1", "a.test", "proxy one", 2),
        ]
        await theirs.worked("p1", "a.test", "proxy one")
        await theirs.worked("p1", "a.test", "proxy one")
        assert set(theirs.view) == {("p1", ANY_HOST)}, "the proxy still cools down for all hosts"
        await mine.refresh()
        assert set(mine.view) == {("p1", ANY_HOST)}
        await mine.failed("p1", "a.test", "proxy one", cooldown=0.0, longest=60.0, reason="again")
        assert mine.view["p1", "a.test"].failures == 1
        await mine.listed("pool", 3, "")
        assert {pool: row[1:] for pool, row in theirs.lists().items()} == {"pool": (3, "")}
        await mine.prune()
        assert len(mine.view) == 2, "all entries are young"


# -- outages ---------------------------------------------------------------------------------------


async def test_calls_raise_while_the_server_is_down_and_its_data_survives(
    fleet: Fleet, server: Callable[[str], Handle]
) -> None:
    async with fleet:
        c = fleet.worker()
        await c.take([ClaimChange(b"u", "e1", None, None)])
        first = (await c.reserve({"a.test": 10}))["a.test"]
        server("redis").kill()
        for call in (
            c.take([ClaimChange(b"u", "e2", None, "e1")]),
            c.reserve({"a.test": 1}),
            c.refresh(),
            c.robots("https://a.test"),
        ):
            with pytest.raises(StoreUnavailable):
                await call
        with pytest.raises(Unreachable):
            c.hosts.state("a.test")
        server("redis").start()
        assert (await c.holders([b"u"]))[b"u"].owner == "e1"
        ((slot,),) = (await c.reserve({"a.test": 1})).values()
        assert slot > first[-1], "no slot is reserved twice"


async def test_a_call_ends_when_it_is_cancelled_at_any_moment(fleet: Fleet) -> None:
    """A worker cancels its background tasks once. A task that continued would block its end."""
    async with fleet:
        claims = fleet.worker()
        await claims.refresh()

        going = True

        async def chores() -> None:
            while going:
                await claims.refresh()

        for turns in range(60):
            task = asyncio.create_task(chores())
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=5)
            going = bool(done)
            await asyncio.wait([task])
            assert task.cancelled(), f"the task continued after a cancel in turn {turns % 20}"


# -- versions of the keys --------------------------------------------------------------------------


async def test_claims_of_a_newer_release_are_refused_by_workers_and_by_commands(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = f"c{uuid.uuid4().hex[:8]}"

    def of_release() -> RedisClaims:
        server = Server(fleet.url, evictable=False, layout=adapter.layout_of(namespace))
        return RedisClaims(server, namespace, SystemClock(), pace.Limits(), random.Random(1))

    monkeypatch.setattr(adapter, "VERSION", 2)
    newer = of_release()
    await newer.reserve({"shop.test": 1}, within=10.0)
    await newer.close()
    monkeypatch.undo()
    older = of_release()
    with pytest.raises(ConfigError, match=r"the claims keys .* have version 2"):
        await older.reserve({"shop.test": 1}, within=10.0)
    with pytest.raises(ConfigError, match=r"the claims keys .* have version 2"):
        older.hosts.state("shop.test")
    await older.close()
