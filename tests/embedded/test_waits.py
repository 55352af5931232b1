"""Delayed events that wait for more than time: a paused host, a route, a budget."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from tests.embedded.test_books import Rig

from penstock.engine.links import MAX_CHARACTERS
from penstock.engine.maintenance import abandon
from penstock.engine.publishing import requeue
from penstock.model import Link
from penstock.operate.waiting import stuck_in
from penstock.ports import Accepted, Transaction
from penstock.rules.events import event_of
from penstock.rules.links import pack

HOST = "host:shop.example"


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def waits(rig: Rig) -> dict[str, int]:
    return await rig.uow.read(lambda tx: tx.maintenance.waits())


async def park(rig: Rig, *ids: str, until: float = 3600.0) -> None:
    for i, id_ in enumerate(ids):
        await rig.accept(id_, url=f"http://shop.example/{id_}{i}")
    for begun in await rig.start():
        await rig.conclude(
            begun, "park", reason="paused", waits_for=HOST, until=rig.clock.now() + until
        )


async def test_events_are_counted_by_the_cause_of_their_wait(rig: Rig) -> None:
    assert await waits(rig) == {}
    await park(rig, "e1", "e2")
    assert await waits(rig) == {HOST: 2}
    assert rig.row("e1")["status"] == "delayed"
    assert rig.row("e1")["attempts"] == 0


async def test_a_run_ends_although_links_wait_behind_an_event_that_waits(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_pending=1)
    await rig.accept("e1", url="http://shop.example/e1")
    (begun,) = await rig.start("e1")
    await rig.succeed(begun, links=["http://shop.example/a", "http://shop.example/b"])
    feeder = rig.lifecycle.feeder
    assert await rig.uow.read(feeder.can_feed)
    assert await feeder.feed()
    assert not await rig.uow.read(feeder.can_feed)
    for begun in await rig.start():
        await rig.conclude(
            begun, "park", reason="paused", waits_for=HOST, until=rig.clock.now() + 3600
        )
    # A message on another topic could not be read. That topic has room, and no link waits for it.
    await rig.uow.write(lambda tx: tx.counters.add("pages", {"unreadable": 1}))
    assert not await rig.uow.read(feeder.can_feed)
    assert not await feeder.feed()
    (wait,) = await rig.uow.read(partial(stuck_in, can_feed=feeder.can_feed))
    assert wait.cause == HOST


async def test_links_that_are_too_deep_do_not_wait(tmp_path: Path) -> None:
    rig = Rig(tmp_path, follow_depth=0)
    await rig.accept("e1", url="http://shop.example/e1")
    (begun,) = await rig.start("e1")
    urls = [f"http://shop.example/{n}" for n in range(700)]
    more = pack([Link(url=url, extractor="page") for url in urls[500:]])
    await rig.succeed(begun, links=urls[:500], more_links=more)
    assert rig.count("followed_too_deep") == 700
    assert rig.count("links_waiting") == 0


async def test_one_transaction_decides_few_links_with_long_urls(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.accept("e1", url="http://shop.example/e1")
    (begun,) = await rig.start("e1")
    urls = [f"http://shop.example/{n}?{'%41' * 2700}" for n in range(200)]
    more = pack([Link(url=url, extractor="page") for url in urls[100:]])
    await rig.succeed(begun, links=urls[:100], more_links=more)
    followed = [0, rig.count("followed")]
    while await rig.lifecycle.feeder.feed():
        followed.append(rig.count("followed"))
    most = MAX_CHARACTERS // len(urls[0]) + 1
    assert {after - before for before, after in pairwise(followed)} <= set(range(1, most + 1))
    assert rig.count("followed") == len(urls)
    assert rig.count("links_waiting") == 0


async def test_damaged_links_are_counted_and_do_not_stop_the_others(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_pending=10)
    await rig.accept("e1", url="http://shop.example/e1")
    (begun,) = await rig.start("e1")
    await rig.uow.write(lambda tx: tx.links.store(1, "requests", [(3, b"damaged")]))
    more = pack([Link(url="http://shop.example/a", extractor="page")])
    await rig.succeed(begun, links=["http://shop.example/b"], more_links=more)
    while await rig.lifecycle.feeder.feed():
        pass
    assert rig.count("followed_bad") == 3
    assert rig.count("followed") == 2
    assert rig.count("links_waiting") == 0


async def test_links_that_wait_are_dropped_if_follow_depth_is_lowered(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_pending=1)
    await rig.accept("e1", url="http://shop.example/e1")
    (begun,) = await rig.start("e1")
    await rig.succeed(begun, links=["http://shop.example/a", "http://shop.example/b"])
    assert rig.count("links_waiting") == 2
    flat = Rig(tmp_path, worker="w2", base=rig, follow_depth=0)
    await flat.lifecycle.feeder.feed()
    assert rig.count("followed_too_deep") == 2
    assert rig.count("links_waiting") == 0


@pytest.mark.parametrize("limit", [1, 2, 5, 9, 10, 11, 100])
async def test_links_leave_a_place_to_pushed_events(tmp_path: Path, limit: int) -> None:
    rig = Rig(tmp_path, max_pending=limit)
    await rig.accept("e1", url="http://shop.example/e1")
    (begun,) = await rig.start("e1")
    await rig.succeed(begun, links=[f"http://shop.example/{n}" for n in range(200)])
    while await rig.lifecycle.feeder.feed():
        pass
    open_ = rig.count("pending")
    assert open_ == max(1, limit * 9 // 10)
    event = event_of("http://shop.example/pushed", id_="e2")
    (answer,) = await rig.lifecycle.accept([event])
    assert answer is (Accepted.NEW if limit > 1 else Accepted.FULL)


async def test_an_event_that_starts_again_waits_for_nothing(rig: Rig) -> None:
    await park(rig, "e1", until=60.0)
    rig.clock.advance(61.0)
    (begun,) = await rig.start("e1")  # the ledger row is still `delayed`
    assert await waits(rig) == {}
    await rig.succeed(begun)
    assert rig.row("e1")["waits_for"] is None


async def test_a_due_event_waits_for_nothing(rig: Rig) -> None:
    await park(rig, "e1", "e2")
    n = rig.row("e1")["n"]
    await rig.uow.write(lambda tx: tx.maintenance.make_due([n], rig.clock.now()))
    assert await waits(rig) == {HOST: 1}
    rig.clock.advance(3601.0)
    await rig.maintenance.release_due()
    assert await waits(rig) == {}
    assert rig.status("e1", "e2") == "pending pending"


async def test_a_delay_of_an_unstarted_event_has_a_cause_until_it_is_redriven(rig: Rig) -> None:
    await rig.accept("e1")
    ((_, e, _),) = await rig.admit()
    now = rig.clock.now()

    def delay(tx: Transaction) -> None:
        state = tx.lookup.states([e.id])[e.id]
        tx.events.delay(e, state, now + 3600.0, "paused", now, waits_for=HOST)

    await rig.uow.write(delay)
    assert await waits(rig) == {HOST: 1}

    def abandon_and_redrive(tx: Transaction) -> None:
        event = tx.maintenance.waiting(e.id)
        assert event is not None
        abandon(tx, event, "purged", now)
        assert tx.maintenance.waits() == {}
        requeue(tx, event.n, e, event.envelope, was="dead", reason="redriven", now=now)

    await rig.uow.write(abandon_and_redrive)
    assert await waits(rig) == {}
    assert rig.status("e1") == "pending"
