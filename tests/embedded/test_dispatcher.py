"""Dispatcher on the embedded store: which events start while permits are scarce."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.embedded.test_books import Rig

from penstock.engine.dispatcher import Dispatcher
from penstock.engine.inflight import InflightEvent, State, read_delivery
from penstock.engine.outage import Outage
from penstock.engine.settings import Options
from penstock.engine.window import PrefetchWindow
from penstock.rules import pace
from penstock.rules.events import event_of


class Permits:
    """A dispatcher with `total` permits. Its handlers run until a test finishes them."""

    def __init__(self, rig: Rig, total: int) -> None:
        self.rig, self.total = rig, total
        options = Options(concurrency=total, window=4 * total, start_linger=0.0)
        outage = Outage(rig.clock)
        self.window = PrefetchWindow(
            rig.sub,
            options,
            rig.clock,
            outage,
            stage="fetch",
            host_by="host",
            paused=lambda: None,
        )
        self.dispatcher = Dispatcher(
            rig.admission, rig.claims, self.window, options, rig.clock, outage, stage="fetch"
        )
        self.running: list[InflightEvent] = []
        self.started: list[str] = []  # URLs, in the order of the starts

    def start(self, item: InflightEvent) -> None:
        item.task = asyncio.get_running_loop().create_future()
        self.running.append(item)
        self.started.append(item.event.url)

    async def accept(self, host: str, n: int, path: str = "") -> None:
        """Accept and admit `n` events of a host."""
        await self.accept_all([f"http://{host}/{path}{k}" for k in range(n)])

    async def accept_all(self, urls: Sequence[str]) -> None:
        await self.rig.lifecycle.accept([event_of(url, id_=url) for url in urls])
        items = []
        for d in await self.rig.receive(len(urls)):
            item = self.window.held[d.position] = read_delivery(d, "fetch", "host")
            items.append(item)
        await self.dispatcher.admit(items)
        await self.settle()

    async def settle(self) -> None:
        """Wait until the dispatcher has stopped starting events."""
        before = -1
        while before != len(self.started):
            before = len(self.started)
            for _ in range(5):
                await asyncio.sleep(0.005)

    async def finish(self, n: int, host: str) -> None:
        """Finish the `n` oldest requests of a host."""
        for item in [i for i in self.running if i.event.key == host][:n]:
            self.running.remove(item)
            item.task = None
            item.state = State.OUTCOME
            self.dispatcher.finish(item)
        await self.settle()

    def held(self) -> Counter[str]:
        return Counter(item.event.key for item in self.running)


@contextlib.asynccontextmanager
async def permits(
    directory: Path, total: int, limits: pace.Limits | None = None
) -> AsyncIterator[Permits]:
    limits = limits or pace.Limits(rate=None, concurrency=total)
    rig = Rig(directory, limits=limits, lease=86400.0)  # nothing extends the leases
    made = Permits(rig, total)
    task = asyncio.create_task(made.dispatcher.run(made.start))
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_one_host_uses_all_permits_again_after_another_host_ended(tmp_path: Path) -> None:
    async with permits(tmp_path, 16) as p:
        await p.accept("big.test", 20)
        assert p.held() == {"big.test": 16}
        await p.accept("other.test", 1)
        await p.accept("big.test", 40, path="more")
        await p.finish(6, "big.test")
        assert p.held() == {"big.test": 14, "other.test": 1}
        await p.finish(1, "other.test")
        await p.finish(5, "big.test")
        assert p.held() == {"big.test": 16}


async def test_one_slow_host_uses_all_permits(tmp_path: Path) -> None:
    async with permits(tmp_path, 16) as p:
        await p.accept("big.test", 60)
        p.rig.clock.advance(10)
        p.dispatcher.scarcity()
        await p.finish(6, "big.test")
        assert p.held() == {"big.test": 16}
        # When another host comes, the slow one leaves it a part of the permits.
        await p.accept("other.test", 8)
        p.rig.clock.advance(10)
        p.dispatcher.scarcity()
        await p.finish(8, "big.test")
        assert p.held()["other.test"] >= 4


async def test_events_of_a_host_start_in_their_order_while_permits_are_scarce(
    tmp_path: Path,
) -> None:
    async with permits(tmp_path, 7, pace.Limits(rate=None, concurrency=2)) as p:
        for host, n in (("a.test", 2), ("c.test", 2), ("e1.e.test", 1), ("e2.e.test", 1)):
            await p.accept(host, n)
        await p.accept("c.test", 3, path="later")
        await p.accept("e1.e.test", 1, path="later")
        for host in ("a.test", "c.test", "a.test", "c.test", "c.test"):
            await p.finish(1, host)
        started = [url for url in p.started if "/c.test/later" in url]
        assert started == [f"http://c.test/later{n}" for n in range(3)]


async def test_a_freed_permit_costs_little_with_many_returning_handlers(tmp_path: Path) -> None:
    """A site with many hosts can make hundreds of handlers wait in the middle of a request."""
    async with permits(tmp_path, 256) as p:
        await p.accept("other.test", 1)
        sleeping: list[InflightEvent] = []
        for n in range(4):
            before = len(p.running)
            await p.accept_all([f"http://h{n}-{k}.evil.test/" for k in range(200)])
            if n < 3:
                sleeping += p.running[before:]
                for item in p.running[before:]:
                    p.dispatcher.leave_permit(item)
        returning = [
            asyncio.create_task(p.dispatcher.take_permit_again(item, 0.0)) for item in sleeping
        ]
        await p.settle()
        assert sum(not task.done() for task in returning) > 500
        used = time.process_time()
        await p.finish(1, "other.test")
        used = time.process_time() - used
        for task in returning:
            task.cancel()
        await asyncio.gather(*returning, return_exceptions=True)
        assert used < 0.03, "0.1 s if each handler counts the permits"


@pytest.mark.parametrize(("seconds", "kept"), [(2.0, True), (5.0, False)])
async def test_only_slow_requests_make_the_worker_release_waiting_events(
    tmp_path: Path, seconds: float, kept: bool
) -> None:
    async with permits(tmp_path, 16) as p:
        urls = [f"http://h{n}.test/{k}" for k in range(10) for n in range(10)]
        await p.rig.lifecycle.accept([event_of(url, id_=url) for url in urls])
        receiving = asyncio.create_task(p.window.run(p.dispatcher))
        await p.settle()
        before = dict(p.window.held)
        assert len(before) == 64
        for _ in range(round(seconds / 0.05)):
            p.rig.clock.advance(0.05)
            await asyncio.sleep(0.001)
        await p.settle()
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        assert (p.window.held == before) is kept


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("total", [1, 2, 7])
async def test_every_event_starts_and_every_permit_is_given_back(
    tmp_path: Path, total: int, seed: int
) -> None:
    """Requests end, wait for slots, and are cancelled in a random order."""
    rng = random.Random(seed)
    async with permits(tmp_path, total, pace.Limits(rate=None, concurrency=2)) as p:
        dispatcher, urls = p.dispatcher, [f"http://h{n % 5}.d{n % 3}.test/{n}" for n in range(40)]
        returning: dict[asyncio.Task[None], InflightEvent] = {}
        for n in range(0, 40, 10):
            await p.accept_all(urls[n : n + 10])
            for _ in range(40):
                match rng.randrange(5):
                    case 0 | 1 if p.running:
                        await p.finish(1, rng.choice(p.running).event.key)
                    case 2 if p.running:
                        item = p.running.pop(rng.randrange(len(p.running)))
                        dispatcher.leave_permit(item)
                        wait = dispatcher.take_permit_again(item, rng.choice([0.0, 1.0]))
                        returning[asyncio.create_task(wait)] = item
                    case 3 if returning and rng.random() < 0.3:
                        rng.choice(list(returning)).cancel()
                    case _:
                        p.rig.clock.advance(rng.choice([0.1, 1.0, 4.0]))
                        dispatcher.scarcity()
                await asyncio.sleep(0)
                for task in [task for task in returning if task.done()]:
                    p.running.append(returning.pop(task))
        async with asyncio.timeout(20):
            while p.running or returning or len(p.started) < len(urls):
                p.rig.clock.advance(1.0)
                if p.running:
                    await p.finish(1, p.running[0].event.key)
                await p.settle()
                for task in [task for task in returning if task.done()]:
                    p.running.append(returning.pop(task))
        assert sorted(p.started) == sorted(urls)
        assert (dispatcher.active, dispatcher._returning) == (0, 0)
        assert not dispatcher._in_flight
        assert not dispatcher._sleeping
