"""Claims, slots, robots.txt and proxy health on a real Redis server. Each claim and slot has one
owner, and the whole fleet shares the state.
"""

from __future__ import annotations

import asyncio
import json
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
from penstock.ports import ClaimChange, Clock
from penstock.rules import pace
from penstock.stores.redis import Server
from penstock.testing.claims_rig import LIMITS, ClaimsWorker, ExternalClaimsWorker
from penstock.testing.claims_suite import ClaimsConformance

pytestmark = pytest.mark.server("redis")


class TestRedisClaims(ClaimsConformance):
    @pytest.fixture(autouse=True)
    def _namespace(self, server: Callable[[str], Handle]) -> None:
        self.url, self.prefix = server("redis").url, f"c{uuid.uuid4().hex[:8]}"

    async def open(self) -> ClaimsWorker:
        claims = RedisClaims(
            Server(self.url, evictable=False),
            self.prefix,
            SystemClock(),
            LIMITS,
            random.Random(1),
        )
        self.at_end(claims.close)
        return ExternalClaimsWorker(claims, claims.hosts, claims, claims.proxies)


# -- promises of Redis only ------------------------------------------------------------------------


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
