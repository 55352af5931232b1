"""Events whose route this worker does not serve, with the embedded broker and an external one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.embedded.test_books import URL, Rig, assert_books_balance
from tests.embedded.test_relay import ApartRig

from penstock.engine.routes import LIFETIME
from penstock.model import Route, encode_event
from penstock.operate.waiting import stuck_in, waits_in
from penstock.ports import Out, Transaction
from penstock.rules.events import event_of
from penstock.rules.routes import ServedPool
from penstock.rules.waiting import RECHECK

HOME = ServedPool(name="home", geo=("us",))
CAUSE = "route:pool=home"


@pytest.fixture(params=[Rig, ApartRig])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    """A worker without proxy pools."""
    made: Rig = request.param(tmp_path)
    return made


def worker_with(rig: Rig, *pools: ServedPool, worker: str = "w2") -> Rig:
    """Return another worker on the same store, with these pools."""
    return type(rig)(rig.directory, worker=worker, base=rig, pools=pools)


async def wait(rig: Rig, seconds: float) -> None:
    if isinstance(rig, ApartRig):
        await rig.later(seconds)
    else:
        rig.clock.advance(seconds)
        await rig.maintenance.release_due()
    assert_books_balance(rig)


async def waits(rig: Rig) -> dict[str, int]:
    return await rig.uow.read(lambda tx: tx.maintenance.waits())


async def test_an_event_whose_route_no_live_worker_serves_waits_with_that_reason(rig: Rig) -> None:
    await rig.accept("e1", route=Route(pool="home", geo="us"))
    await rig.accept("e2", url="https://shop.test/p/2")
    (begun,) = await rig.start("e2")
    await rig.succeed(begun)
    row = rig.row("e1")
    assert (row["status"], row["attempts"], row["starts"]) == ("delayed", 0, 0)
    assert row["reason"] == "no live worker serves pool 'home' and geo 'us'"
    assert row["waits_for"] == "route:pool=home,geo=us"
    assert rig.sql("SELECT count(*) FROM claim WHERE owner='e1'") == [(0,)], (
        "an event without the route may fetch the URL"
    )
    (stuck,) = await rig.uow.read(stuck_in)
    assert stuck.what == "no live worker serves the route pool=home,geo=us"
    assert stuck.next_step == "start a worker with [proxies.home] in its configuration"
    await wait(rig, RECHECK / 2)
    assert await rig.receive() == []


async def test_a_worker_that_serves_the_route_makes_the_events_due_at_its_start(rig: Rig) -> None:
    ids = [f"e{n}" for n in range(5)]
    for id_ in ids:
        await rig.accept(id_, url=f"https://{id_}.test/", route=Route(pool="home"))
    await rig.accept("other", route=Route(pool="office"))
    assert await rig.start() == []
    assert await waits(rig) == {CAUSE: 5, "route:pool=office": 1}
    second = worker_with(rig, HOME)
    assert await second.engine.routes.announce() == 5
    await wait(second, 1.0)
    assert await waits(rig) == {"route:pool=office": 1}
    assert sorted(e.id for _, e, _, _ in await second.start()) == ids
    assert await second.engine.routes.announce() == 0


async def test_a_worker_finds_the_events_of_its_route_behind_many_paused_hosts(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    events = [event_of(f"https://h{n}.test/", id_=f"h{n}") for n in range(1001)]
    await rig.lifecycle.accept(events)

    def delay(tx: Transaction) -> None:
        now = rig.clock.now()
        for id_, state in tx.lookup.states([e.id for e in events]).items():
            event = event_of(f"https://{id_}.test/", id_=id_)
            tx.events.delay(event, state, now + RECHECK, "", now, waits_for=f"host:{id_}.test")

    await rig.uow.write(delay)
    await rig.accept("e1", route=Route(pool="home"))
    await rig.admit([d for d in await rig.receive(2000) if d.id == "e1"])
    assert await worker_with(rig, HOME).engine.routes.announce() == 1


async def test_a_message_of_another_program_is_made_due_although_its_key_is_no_host(
    tmp_path: Path,
) -> None:
    rig = ApartRig(tmp_path)
    event = msgspec.structs.replace(event_of(URL, id_="x1"), route=Route(pool="home"))
    body = encode_event(event)
    await rig.line.publish([Out(topic="requests", id="x1", key="customer 7", body=body)])
    assert await rig.start() == []
    assert await waits(rig) == {CAUSE: 1}
    second = worker_with(rig, HOME)
    assert await second.engine.routes.announce() == 1
    await wait(second, 1.0)
    await second.start("x1")


async def test_a_worker_leaves_an_event_to_a_live_worker_that_serves_its_route(rig: Rig) -> None:
    second = worker_with(rig, HOME)
    await second.engine.routes.announce()
    await rig.accept("e1", route=Route(geo="US"))
    for _ in range(3):
        assert await rig.start() == [], "this worker has no pool"
        assert rig.row("e1")["reason"] == "left to another worker, which serves geo 'US'"
        assert await rig.uow.read(waits_in) == []
        assert await rig.uow.read(stuck_in) == []
        assert await second.engine.routes.release() == 1
        await wait(rig, 1.0)
    (begun,) = await second.start("e1")
    await second.succeed(begun)
    assert (rig.status("e1"), rig.row("e1")["attempts"]) == ("success", 0)


async def test_an_event_that_a_live_worker_serves_does_not_end_at_max_age(rig: Rig) -> None:
    second = worker_with(rig, HOME)
    first = type(rig)(rig.directory, worker="w9", base=rig, max_age=3600.0)
    await first.accept("e1", route=Route(pool="home"))
    rig.clock.advance(7200.0)
    await second.engine.routes.announce()
    if isinstance(first, ApartRig):
        first.beat()
    assert await first.start() == []
    assert rig.status("e1") == "delayed"


@pytest.mark.parametrize("how", ["crashes", "stops"])
async def test_events_wait_for_the_route_after_its_only_worker_has_ended(
    rig: Rig, how: str
) -> None:
    second = worker_with(rig, HOME)
    await second.engine.routes.announce()
    if how == "stops":
        await second.engine.routes.withdraw()
    else:
        await wait(rig, LIFETIME + 1.0)
    await rig.accept("e1", route=Route(pool="home"))
    assert await rig.start() == []
    assert await waits(rig) == {CAUSE: 1}


async def test_an_event_that_waits_for_a_route_ends_at_max_age(rig: Rig) -> None:
    first = type(rig)(rig.directory, worker="w9", base=rig, max_age=3600.0)
    await first.accept("e1", route=Route(pool="home"))
    assert await first.start() == []
    assert await waits(rig) == {CAUSE: 1}
    await wait(first, 3599.0)
    assert await first.start() == []
    await wait(first, 2.0)
    # The fetch stage ends it as dead: there is no such pool.
    (begun,) = await first.start("e1")
    await first.die(begun, "there is no proxy pool 'home'")
    assert (rig.status("e1"), await waits(rig)) == ("dead", {})
    assert await first.dead_letters.redrive(["e1"]) == 1
    assert await first.start() == []
    assert await waits(rig) == {CAUSE: 1}, "the age of a redriven event counts from the redrive"


async def test_an_accepted_event_with_render_waits_for_a_renderer(rig: Rig) -> None:
    event = msgspec.structs.replace(
        event_of("https://shop.test/p/1", id_="e1"), route=Route(pool="home", render=True)
    )
    message = Out(topic="requests", id="e1", key=event.key, body=encode_event(event))
    await rig.uow.write(lambda tx: tx.queue.enqueue([message]))
    second = worker_with(rig, HOME)
    assert await second.start() == []
    row = rig.row("e1")
    assert (row["status"], row["waits_for"]) == ("delayed", "render")
    assert row["reason"] == "render=true asks for a browser, and this release has no renderer"
    assert await second.engine.routes.announce() == 0
    assert_books_balance(rig)


async def test_a_stored_page_is_extracted_by_a_worker_without_the_route(rig: Rig) -> None:
    second = worker_with(rig, HOME)
    await second.engine.routes.announce()
    await rig.accept("e1", route=Route(pool="home"))
    (begun,) = await second.start("e1")
    await second.conclude(begun, "retry", body=b"page", until=rig.clock.now() + 1.0)
    await second.engine.routes.withdraw()
    await wait(rig, 2.0)
    (again,) = await rig.start("e1")
    await rig.succeed(again)
    assert rig.status("e1") == "success"
