"""Claims, slots, robots.txt and proxy health on a real Redis server: taken once, given once, and
known to the whole fleet.
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

import msgspec
import pytest
from tests.servers import Handle

from penstock.claims.redis.claims import FleetClock, RedisClaims
from penstock.clock import SystemClock
from penstock.errors import StoreUnavailable, Unreachable
from penstock.operate.hosts import apply_configured_exceptions, ignore_robots, obey_robots
from penstock.ports import ClaimChange, Clock
from penstock.rules import pace
from penstock.rules.proxies import ANY_HOST
from penstock.stores.redis import Server

pytestmark = pytest.mark.server("redis")
NO_TX = None


class Fleet:
    """One namespace on the server, and any number of workers in it."""

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

    def processes(self, script: str, n: int) -> list[list[object]]:
        """What each of `n` processes printed as JSON; all begin when the last one is ready."""
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
claims = RedisClaims(Server(url, evictable=False), prefix, SystemClock(), pace.Limits(rate=200.0, jitter=0.0), random.Random(1))
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


async def test_a_claim_is_taken_only_from_the_owner_that_was_seen_and_asking_again_changes_nothing(
    fleet: Fleet,
) -> None:
    async with fleet:
        c = fleet.worker()
        assert await c.take(
            [ClaimChange(b"u1", "e1", None, None), ClaimChange(b"u2", "e2", "g2", None)]
        ) == [True, True]
        assert await c.take([ClaimChange(b"u1", "e1", None, None)]) == [True], (
            "the answer was lost, it may be"
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


async def test_the_next_one_is_noted_with_the_owner_it_waits_for_and_goes_with_it(
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
        assert (await c.holders([b"u"]))[b"u"].next == "e2", "it was its owner's already"
        assert await c.take([ClaimChange(b"u", "e2", "e1", "e1")]) == [True]
        held = (await c.holders([b"u"]))[b"u"]
        assert (held.owner, held.good, held.next) == ("e2", "e1", None)


async def test_old_claims_are_forgotten_and_young_ones_kept(fleet: Fleet) -> None:
    async with fleet:
        c = fleet.worker()
        await c.take([ClaimChange(b"%d" % i, "e", None, None) for i in range(2500)])
        between = SystemClock().now()
        await c.take([ClaimChange(b"young", "e", None, None)])
        await c.prune(between)
        assert list(await c.holders([b"0", b"2499", b"young"])) == [b"young"]


def test_of_two_processes_that_race_for_a_claim_one_gets_it(fleet: Fleet) -> None:
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


# -- pace ------------------------------------------------------------------------------------------


def test_four_processes_get_each_slot_once_and_none_too_close_to_another(fleet: Fleet) -> None:
    script = """
async def work():
    slots = []
    for i in range(25):
        got = await claims.reserve({"a.test": 3, "b.test": 1})
        slots += [["a.test", s] for s in got["a.test"]] + [["b.test", s] for s in got["b.test"]]
    return slots
asyncio.run(main(work))
"""
    given = [tuple(pair) for answers in fleet.processes(script, 4) for pair in answers]  # type: ignore[arg-type]
    assert Counter(host for host, _ in given) == {"a.test": 300, "b.test": 100}
    for name in ("a.test", "b.test"):
        slots = sorted(slot for host, slot in given if host == name)
        assert min(b - a for a, b in pairwise(slots)) > 1 / 200 - 1e-5


async def test_slots_far_away_are_told_but_not_given(fleet: Fleet) -> None:
    async with fleet:
        c, other = fleet.worker(rate=0.01), fleet.worker(rate=0.01)
        before = SystemClock().now()
        (slots,) = (await c.reserve({"a.test": 5}, within=250.0)).values()
        assert before - 0.1 <= slots[0] <= SystemClock().now() + 0.1
        assert [round(s - slots[0]) for s in slots] == [0, 100, 200, 300, 400]
        ((following,),) = (await other.reserve({"a.test": 1})).values()
        assert following == pytest.approx(slots[3], abs=0.1), (
            "only those within the time were given"
        )
        assert c.gap("a.test") == 100.0


async def test_a_throttled_host_is_left_alone_by_every_worker_and_what_was_given_before_is_void(
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


async def test_a_content_host_costs_no_write_and_a_penalty_ends_after_enough_successes(
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


async def test_a_crawl_delay_holds_for_all_from_the_next_reservation_on(fleet: Fleet) -> None:
    async with fleet:
        c, other = fleet.worker(), fleet.worker()
        await other.reserve({"a.test": 1})
        before = SystemClock().now()
        await c.crawl_delay("a.test", 2.0)
        assert c.voided("a.test") > 0
        slots = (await other.reserve({"a.test": 2}))["a.test"]
        assert slots[1] - slots[0] == pytest.approx(2.0, abs=0.001)
        assert slots[0] > before + 1.9, "robots.txt itself was a request"
        await c.crawl_delay("a.test", None)
        assert c.hosts.state("a.test").crawl_delay is None


class Wrong:
    """A clock that is off."""

    def __init__(self, by: float) -> None:
        self.by = by

    def now(self) -> float:
        return SystemClock().now() + self.by

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("by", [-3600.0, -7.0, 7.0, 3600.0])
async def test_a_worker_whose_clock_is_off_asks_no_host_too_early(fleet: Fleet, by: float) -> None:
    async with fleet:
        right, wrong = fleet.worker(rate=2.0), fleet.worker(Wrong(by), rate=2.0)
        while (
            abs(wrong.clock.offset + by) > 0.05
        ):  # until a question was answered quickly: no clock is compared better than that
            await wrong.refresh()
        moments = []
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


def test_what_could_be_the_way_there_and_back_is_no_difference_of_clocks() -> None:
    clock = FleetClock(SystemClock())
    for asked, server, answered, offset in [
        (100.0, 100.2, 100.4, 0.0),
        (100.0, 105.0, 100.2, 4.8),  # narrower, and so believed
        (100.0, 100.1, 100.5, 4.8),  # wider: no better than what is known
        (200.0, 190.0, 200.5, -10.0),  # the other is old by now
    ]:
        clock.compared(asked, server, answered)
        assert clock.offset == pytest.approx(offset)


# -- for people ------------------------------------------------------------------------------------


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


async def test_a_decision_of_a_person_and_one_of_a_worker_both_count(fleet: Fleet) -> None:
    async with fleet:
        c = fleet.worker()
        await c.reserve({"a.test": 1})
        c.hosts.change("a.test", lambda s: msgspec.structs.replace(s, rate=math.inf))
        slots = (await c.reserve({"a.test": 3}))["a.test"]
        assert len(set(slots)) == 1, (
            "unlimited from now on, though the worker remembered another state"
        )


async def test_exceptions_are_kept_with_their_reasons_and_ended_not_deleted(fleet: Fleet) -> None:
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
            ("b.test", "just once", False), ("a.test", "ours indeed", True), ("a.test", "ours", False),
        ]  # fmt: skip
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


async def test_a_robots_file_is_cached_for_all_with_its_status_and_time(fleet: Fleet) -> None:
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


async def test_trouble_with_a_proxy_is_known_to_all_and_forgiven_by_success(fleet: Fleet) -> None:
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
        assert [row[:4] for row in mine.troubled_in(NO_TX)] == [
            ("p1", ANY_HOST, "proxy one", 1),
            ("p1", "a.test", "proxy one", 2),
        ]
        await theirs.worked("p1", "a.test", "proxy one")
        await theirs.worked("p1", "a.test", "proxy one")
        assert set(theirs.view) == {("p1", ANY_HOST)}, "that one still cools down"
        await mine.refresh()
        assert set(mine.view) == {("p1", ANY_HOST)}
        await mine.failed("p1", "a.test", "proxy one", cooldown=0.0, longest=60.0, reason="again")
        assert mine.view["p1", "a.test"].failures == 1
        await mine.listed("pool", 3, "")
        assert {pool: row[1:] for pool, row in theirs.lists_in(NO_TX).items()} == {"pool": (3, "")}
        await mine.prune()
        assert len(mine.view) == 2, "nothing of it is old"


# -- outages ---------------------------------------------------------------------------------------


async def test_a_server_that_is_away_is_said_so_and_what_it_knew_is_still_there_when_it_is_back(
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
        assert slot > first[-1], "no slot is given twice"


async def test_a_call_that_is_cancelled_ends_in_whichever_moment_that_is(fleet: Fleet) -> None:
    """A worker's chores are cancelled once, at its end: one that went on would keep it from ending."""
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
            assert task.cancelled(), f"cancelled {turns % 20} turns after it began, it goes on"
