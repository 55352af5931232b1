"""Tests of the claims conformance suite: slots, throttling, operators' limits, robots, proxies."""

from __future__ import annotations

import asyncio
import math
import random
from itertools import pairwise

import msgspec

from penstock.rules import pace
from penstock.rules.proxies import ANY_HOST
from penstock.testing.claims_rig import LIMITS, RATE, ClaimsRig, ClaimsWorker
from penstock.testing.store_rig import sentence

GAP = 1 / RATE
ROUNDING = 1e-4  # seconds
HOST, OTHER = "shop.test", "other.test"


class ClaimsOfHosts(ClaimsRig):
    """Tests of the state of hosts and proxies, which the whole fleet shares."""

    # -- slots -------------------------------------------------------------------------------------

    @sentence()
    async def test_the_fleet_shares_the_slots_of_a_host_at_its_interval(
        self, one: ClaimsWorker
    ) -> None:
        workers = [one, await self.open(), await self.open()]
        await asyncio.gather(*(worker.access.refresh() for worker in workers))
        start = self.now()
        batches = await asyncio.gather(
            *(self.slots(worker, HOST, 3) for _ in range(5) for worker in workers)
        )
        slots = sorted(slot for batch in batches for slot in batch)
        assert len(slots) == 45
        assert slots[0] >= start - self.accuracy
        assert all(b - a >= GAP - ROUNDING for a, b in pairwise(slots))
        assert slots[-1] <= self.now() + 45 * GAP + self.accuracy, "no slot is wasted"
        assert one.access.gap(HOST) == GAP
        for batch in batches:
            assert batch == sorted(batch)

    @sentence()
    async def test_no_window_has_more_slots_than_burst_and_rate_allow(
        self, one: ClaimsWorker
    ) -> None:
        burst, dice = 4, random.Random(1)
        await one.with_hosts(
            lambda hosts: hosts.change(HOST, lambda s: pace.limited(s, LIMITS, RATE, burst, None))
        )
        workers = [one, await self.open()]
        slots: list[float] = []
        for _ in range(25):
            slots += await self.slots(dice.choice(workers), HOST, dice.randrange(1, 6))
            await self.sleep(dice.choice([0.0, 0.0, 0.02, 0.1]))
        slots.sort()
        for i, first in enumerate(slots):
            for n, last in enumerate(slots[i:], 1):
                assert n <= burst + (last - first) * RATE + ROUNDING, (first, last, n)

    @sentence()
    async def test_the_slots_of_a_host_do_not_delay_another_host(self, one: ClaimsWorker) -> None:
        wants = {HOST: 20, OTHER: 1}
        slots = await one.access.reserve(wants)
        assert {host: len(given) for host, given in slots.items()} == wants
        assert self.near(slots[OTHER][0], slots[HOST][0])
        assert slots[HOST][-1] - slots[HOST][0] >= 19 * GAP - ROUNDING

    @sentence()
    async def test_slots_beyond_the_time_limit_are_returned_but_not_reserved(
        self, one: ClaimsWorker
    ) -> None:
        two = await self.open()
        slow = 0.01  # requests per second
        await one.with_hosts(
            lambda hosts: hosts.change(HOST, lambda s: pace.limited(s, LIMITS, slow, None, None))
        )
        (slots,) = (await one.access.reserve({HOST: 5}, within=250.0)).values()
        assert [round(slot - slots[0]) for slot in slots] == [0, 100, 200, 300, 400]
        (following,) = await self.slots(two, HOST)
        assert self.near(following, slots[3])

    async def _killed_with_reserved_slots(self, worker: ClaimsWorker) -> None:
        await self.slots(worker, HOST, 600)  # slots of one minute

    @sentence(killed_after=_killed_with_reserved_slots)
    async def test_slots_of_a_killed_worker_are_not_assigned_again(self, one: ClaimsWorker) -> None:
        (slot,) = await self.slots(one, HOST)
        assert slot > self.now() + 5.0

    # -- throttling --------------------------------------------------------------------------------

    @sentence()
    async def test_retry_after_blocks_the_host_for_the_whole_fleet(self, one: ClaimsWorker) -> None:
        two = await self.open()
        await two.access.refresh()
        before = self.now()
        await one.access.report(HOST, status=429, retry_after=30.0, seconds=0.1)
        assert self.near(one.access.blocked_until(HOST), before + 30.0)
        await two.access.refresh()
        for worker in (one, two, await self.open()):
            await worker.access.refresh()
            assert self.near(worker.access.blocked_until(HOST), before + 30.0)
            assert worker.access.voided(HOST) >= before - self.accuracy, "older slots are void"
            (slot,) = await self.slots(worker, HOST)
            assert slot >= worker.access.blocked_until(HOST) - ROUNDING
            assert worker.access.blocked_until(OTHER) == worker.access.voided(OTHER) == 0.0
        assert self.near((await self.slots(two, OTHER))[0], self.now())

    @sentence()
    async def test_a_shorter_retry_after_does_not_shorten_a_block(self, one: ClaimsWorker) -> None:
        two, before = await self.open(), self.now()
        await one.access.report(HOST, status=503, retry_after=30.0, seconds=0.1)
        await two.access.report(HOST, status=503, retry_after=5.0, seconds=0.1)
        await one.access.refresh()
        assert self.near(one.access.blocked_until(HOST), before + 30.0)

    @sentence()
    async def test_a_penalty_grows_with_each_incident_and_ends_with_successes(
        self, one: ClaimsWorker
    ) -> None:
        two = await self.open()
        await one.access.refresh()

        async def state() -> pace.HostState:
            return await one.with_hosts(lambda hosts: hosts.state(HOST))

        await one.access.report(HOST, status=200, retry_after=None, seconds=0.1)
        assert await state() == pace.HostState(), "a success of a free host is not written"
        await one.access.report(HOST, status=503, retry_after=None, seconds=0.1)
        assert (await state()).penalty == 2.0
        await two.access.refresh()
        for worker in (one, two, one, two, one):
            await worker.access.report(HOST, status=200, retry_after=None, seconds=0.1)
        after = await state()
        assert (after.penalty, after.throttles) == (1.0, 1)

    @sentence()
    async def test_a_crawl_delay_applies_to_all_workers_from_the_next_slot(
        self, one: ClaimsWorker
    ) -> None:
        two = await self.open()
        await self.slots(two, HOST)
        before = self.now()
        await one.access.crawl_delay(HOST, 2.0)
        assert one.access.voided(HOST) > 0
        first, second = await self.slots(two, HOST, 2)
        assert first >= before + 1.9, "the request for robots.txt used a slot"
        assert abs(second - first - 2.0) < ROUNDING
        await one.access.crawl_delay(HOST, None)
        assert (await two.with_hosts(lambda hosts: hosts.state(HOST))).crawl_delay is None

    # -- operators ---------------------------------------------------------------------------------

    @sentence()
    async def test_limits_and_pauses_of_one_host_reach_every_worker(
        self, one: ClaimsWorker
    ) -> None:
        two = await self.open()
        await self.slots(two, "c.test")

        async def change(host: str, **fields: float | int | None) -> None:
            await one.with_hosts(
                lambda hosts: hosts.change(host, lambda s: msgspec.structs.replace(s, **fields))
            )
            await two.access.refresh()

        async def listed(limit: int) -> list[str]:
            return list(await one.with_hosts(lambda hosts: hosts.list(limit)))

        await change("a.test", concurrency=3)
        await change("b.test", paused_until=math.inf)
        assert two.access.concurrency("a.test") == 3
        assert two.access.concurrency("b.test") == LIMITS.concurrency
        assert two.access.blocked_until("b.test") == math.inf
        assert await listed(10) == ["b.test", "a.test", "c.test"]
        assert await listed(1) == ["b.test"]
        await change("a.test", concurrency=None)
        await change("b.test", paused_until=0.0)
        assert two.access.concurrency("a.test") == LIMITS.concurrency
        assert two.access.blocked_until("b.test") == 0.0

    @sentence()
    async def test_a_pause_by_one_worker_is_known_to_another_at_its_next_reservation(
        self, one: ClaimsWorker
    ) -> None:
        two = await self.open()
        await self.slots(two, HOST)
        await one.access.pause(HOST)
        await one.access.pause(HOST)
        assert one.access.blocked_until(HOST) == math.inf
        await self.slots(two, HOST)
        assert two.access.blocked_until(HOST) == math.inf, "without a refresh"
        await one.with_hosts(
            lambda hosts: hosts.change(HOST, lambda s: msgspec.structs.replace(s, paused_until=0.0))
        )
        await self.slots(two, HOST)
        assert two.access.blocked_until(HOST) < math.inf

    @sentence()
    async def test_a_paused_host_is_blocked_for_the_fleet_until_it_is_resumed(
        self, one: ClaimsWorker
    ) -> None:
        two = await self.open()
        await one.access.report(HOST, status=429, retry_after=30.0, seconds=0.1)
        for _ in range(2):
            await one.access.pause(HOST)
        assert one.access.blocked_until(HOST) == math.inf
        await two.access.refresh()
        assert two.access.blocked_until(HOST) == math.inf
        assert two.access.blocked_until(OTHER) == 0.0
        await one.with_hosts(
            lambda hosts: hosts.change(HOST, lambda s: msgspec.structs.replace(s, paused_until=0.0))
        )
        await two.access.refresh()
        assert self.near(two.access.blocked_until(HOST), self.now() + 30.0), (
            "a resume keeps the host's own Retry-After"
        )

    @sentence()
    async def test_an_operators_limit_replaces_the_state_that_a_worker_has_cached(
        self, one: ClaimsWorker
    ) -> None:
        await self.slots(one, HOST)
        await one.with_hosts(
            lambda hosts: hosts.change(HOST, lambda s: msgspec.structs.replace(s, rate=math.inf))
        )
        assert len(set(await self.slots(one, HOST, 3))) == 1, "the host has no limit"

    @sentence()
    async def test_exceptions_keep_their_reasons_and_are_ended_instead_of_deleted(
        self, one: ClaimsWorker
    ) -> None:
        two = await self.open()

        async def add(host: str, reason: str, once: bool = False) -> None:
            await one.with_hosts(
                lambda hosts: hosts.add_exception("robots", host, reason, "me", once=once)
            )

        async def exceptions(
            hosts: list[str] | None = None, ended: bool = False
        ) -> list[tuple[str, str, bool]]:
            found = await one.with_hosts(lambda table: table.exceptions(hosts, ended=ended))
            return [(e.host, e.reason, e.ended is None) for e in found]

        await add("a.test", "a reason")
        await add("a.test", "a better reason")
        await add("b.test", "just once", once=True)
        await two.access.refresh()
        assert (two.access.exempt("a.test"), two.access.exempt("b.test")) == (True, False)
        assert await exceptions() == [("a.test", "a better reason", True)]
        every = [
            ("b.test", "just once", False),
            ("a.test", "a better reason", True),
            ("a.test", "a reason", False),
        ]
        assert await exceptions(ended=True) == every
        assert await exceptions(["b.test"], ended=True) == every[:1]
        assert await one.with_hosts(lambda hosts: hosts.end_exception("robots", "a.test"))
        assert not await one.with_hosts(lambda hosts: hosts.end_exception("robots", "a.test"))
        await two.access.refresh()
        assert not two.access.exempt("a.test")
        assert await exceptions() == []
        await self.sleep(0.01)
        await one.prune(self.now() + 1.0)
        assert await exceptions(ended=True) == []

    @sentence()
    async def test_a_robots_file_is_cached_for_all_workers_with_its_status_and_expiry(
        self, one: ClaimsWorker
    ) -> None:
        two, until = await self.open(), self.now() + 3600.25
        secure, plain = f"https://{HOST}", f"http://{HOST}"
        assert await one.access.robots(secure) is None
        await one.access.keep_robots(secure, b"old", 200, until)
        await one.access.keep_robots(secure, b"Disallow: /\xff\x00", 200, until)
        await one.access.keep_robots(plain, None, 0, until)
        assert await two.access.robots(secure) == (b"Disallow: /\xff\x00", 200, until)
        assert await two.access.robots(plain) == (None, 0, until)
        assert await two.access.robots(f"https://{OTHER}") is None
        cached = await two.with_hosts(lambda hosts: hosts.robots(HOST))
        assert [(found.origin, found.status) for found in cached] == [(secure, 200), (plain, 0)]

    # -- proxies -----------------------------------------------------------------------------------

    @sentence()
    async def test_proxy_failures_are_shared_by_all_workers_and_cleared_by_success(
        self, one: ClaimsWorker
    ) -> None:
        mine, theirs = one.proxies, (await self.open()).proxies

        async def failed(proxies: object, host: str, cooldown: float) -> None:
            worker = mine if proxies is mine else theirs
            await worker.failed(
                "p1", host, "proxy one", cooldown=cooldown, longest=60.0, reason="refused"
            )

        await failed(mine, HOST, 0.0)
        await failed(mine, HOST, 0.0)
        await failed(theirs, ANY_HOST, 50.0)
        await theirs.refresh()
        assert {key: health.failures for key, health in theirs.view.items()} == {
            ("p1", HOST): 2,
            ("p1", ANY_HOST): 1,
        }
        assert self.near(theirs.view["p1", ANY_HOST].until, self.now() + 50.0)
        await theirs.worked("p1", HOST, "proxy one")
        await theirs.worked("p1", HOST, "proxy one")
        assert set(theirs.view) == {("p1", ANY_HOST)}, "the proxy still cools down for all hosts"
        await mine.refresh()
        assert set(mine.view) == {("p1", ANY_HOST)}
        await failed(mine, HOST, 0.0)
        assert mine.view["p1", HOST].failures == 1
        await mine.prune()
        assert len(mine.view) == 2, "all entries are young"
