"""Budgets of pages, bytes and links: who is charged, who waits, and who is released."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.embedded.test_books import Rig

from penstock.model import Link
from penstock.ports import MAX_CAUSES
from penstock.rules import pace
from penstock.rules.budgets import DAY, Limits, Run, day_end, day_of, describe, key_of
from penstock.rules.links import pack
from penstock.rules.routes import ServedPool
from penstock.rules.waiting import RECHECK

SITE = "http://shop.test/"


class Rigs:
    """Makes workers on one store. Each worker has its own limits and its own run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.first: Rig | None = None

    def __call__(self, run: str = "r1", **limits: int) -> Rig:
        started = self.first.clock.now() if self.first else 0.0
        rig = Rig(
            self.directory,
            worker=f"w{run}{len(limits)}{sum(limits.values())}",
            base=self.first,
            run=Run(run, started),
            budgets=Limits(**limits),  # type: ignore[arg-type]
        )
        self.first = self.first or rig
        return rig


@pytest.fixture
def rigs(tmp_path: Path) -> Rigs:
    return Rigs(tmp_path)


async def push(rig: Rig, *names: str, host: str = "shop.test") -> None:
    for name in names:
        await rig.accept(name, url=f"http://{host}/{name}")


async def started(rig: Rig) -> list[str]:
    return sorted([e.id for _, e, _, _ in await rig.start()])


async def start_all(rig: Rig) -> int:
    """Start all events that are due. A worker receives a part of them at a time."""
    found = 0
    while held := await rig.receive(500):
        found += len(await rig.begin(await rig.admit(held)))
    return found


async def waits(rig: Rig) -> dict[str, int]:
    return await rig.uow.read(lambda tx: tx.maintenance.waits())


async def refresh(rig: Rig) -> int:
    return await rig.engine.budgets.refresh()


def used(rig: Rig, what: str) -> int:
    key = key_of(what, rig.clock.now())
    return rig.uow.snapshot(lambda tx: tx.budgets.used([key])[key])


def accepted(rig: Rig) -> list[str]:
    """Return the paths of all followed links."""
    rows = rig.sql("SELECT url FROM event WHERE source LIKE 'follow:%' ORDER BY n")
    return [url.removeprefix(SITE) for (url,) in rows]


# -- the start of pushed events --------------------------------------------------------------------


async def test_pushed_events_over_the_budget_of_their_host_wait_for_an_operator(
    rigs: Rigs,
) -> None:
    rig = rigs(pages_per_host=2)
    await push(rig, "a", "b", "c", "d")
    await push(rig, "x", host="other.test")
    assert await started(rig) == ["a", "b", "x"]
    assert await waits(rig) == {"budget:pages:host:shop.test": 2}
    assert used(rig, "pages:host:shop.test") == 2
    row = rig.row("c")
    assert (row["status"], row["attempts"], row["starts"]) == ("delayed", 0, 0)
    assert row["reason"] == "the budget pages:host:shop.test is used up"
    assert await refresh(rig) == 0
    more = rigs(run="r2", pages_per_host=3)
    assert await refresh(more) == 1
    assert await started(more) == ["c"]
    unlimited = rigs(run="r3")
    assert await refresh(unlimited) == 1
    assert await started(unlimited) == ["d"]
    assert await waits(rig) == {}
    rig.assert_queued()


async def test_events_over_a_budget_take_no_slot_of_their_host(tmp_path: Path) -> None:
    rig = Rig(tmp_path, limits=pace.Limits(rate=1.0), budgets=Limits(pages_per_host=1))
    await push(rig, "a")
    await start_all(rig)
    began = rig.clock.now()
    await push(rig, *(f"e{n}" for n in range(50)))
    while held := await rig.receive(500):
        assert await rig.admit(held) == []
    assert await waits(rig) == {"budget:pages:host:shop.test": 50}
    assert rig.row("e49")["not_before"] == began + RECHECK
    assert used(rig, "pages:host:shop.test") == 1
    rig.assert_queued()


@pytest.mark.parametrize("limit", ["pages_per_day", "bytes_per_day"])
async def test_a_stored_page_needs_no_budget(rigs: Rigs, limit: str) -> None:
    rig = rigs("r1", **{limit: 1})
    await push(rig, "a")
    (begun,) = await rig.start("a")
    rig.engine.traffic.count(None, 10)
    await rig.conclude(begun, "release", body=b"x")
    assert await started(rig) == ["a"]


async def test_a_retry_is_not_charged_again(rigs: Rigs) -> None:
    rig = rigs(pages_per_host=2, pages_per_day=2, pages_per_run=2)
    await push(rig, "a")
    for _ in range(5):
        (begun,) = await rig.start("a")
        await rig.conclude(begun, "retry", reason="HTTP 500", until=rig.clock.now() + 20)
        rig.clock.advance(30.0)
    assert used(rig, "pages:host:shop.test") == used(rig, "pages:run:r1") == 1
    assert used(rig, "pages:day") == 1


async def test_a_budget_is_exact_in_one_batch_and_over_workers(rigs: Rigs) -> None:
    rig = rigs(pages_per_run=5)
    other = rigs(pages_per_run=5)
    await push(rig, *(f"e{n}" for n in range(20)))
    first = await rig.admit(await rig.receive(10))
    second = await other.admit(await other.receive(10))
    begun = [*await rig.begin(first[:4]), *await other.begin(second)]
    begun += await rig.begin(first[4:])
    assert len(begun) == 5
    assert used(rig, "pages:run:r1") == 5
    assert await waits(rig) == {"budget:pages:run:r1": 15}
    rig.assert_queued()


async def test_a_new_run_has_a_new_budget_and_takes_the_events_of_the_last_one(
    rigs: Rigs,
) -> None:
    rig = rigs(pages_per_run=1)
    await push(rig, "a", "b", "c")
    assert await started(rig) == ["a"]
    assert await refresh(rig) == 0
    second = rigs(run="r2", pages_per_run=1)
    assert await refresh(second) == 1
    assert await started(second) == ["b"]
    assert await waits(rig) == {"budget:pages:run:r1": 1}


async def test_a_daily_budget_delays_the_rest_until_the_utc_day_ends(rigs: Rigs) -> None:
    rig = rigs(pages_per_day=1)
    rig.clock.advance(DAY / 2)
    ends = day_end(rig.clock.now())
    await push(rig, "a", "b")
    (begun,) = await rig.start("a")
    await rig.succeed(begun)
    assert rig.row("b")["not_before"] == ends
    assert await waits(rig) == {"budget:pages:day": 1}
    rig.clock.advance(ends - rig.clock.now() - 1.0)
    assert await refresh(rig) == 0
    assert await started(rig) == []
    rig.clock.advance(1.5)
    assert await started(rig) == ["b"]
    assert await waits(rig) == {}


async def test_an_event_is_released_behind_1000_budgets_that_are_used_up(rigs: Rigs) -> None:
    rig = rigs(pages_per_host=1, pages_per_run=10_000)
    for n in range(MAX_CAUSES + 1):
        await push(rig, f"a{n}", f"b{n}", host=f"h{n}.test")
    assert await start_all(rig) == MAX_CAUSES + 1
    # This event waits for the run of an earlier command, after all hosts in the order of causes.
    assert len(await waits(rig)) == MAX_CAUSES + 1
    earlier = rigs(run="r0", pages_per_run=1)
    await push(earlier, "a", "late", host="other.test")
    assert await started(earlier) == ["a"]
    for _ in range(2):  # each call reads up to 1,000 budgets
        if await refresh(rig):
            break
    assert await started(rig) == ["late"]
    await push(earlier, "later", host="other.test")
    assert await started(earlier) == []
    assert await rig.engine.budgets.refresh_all() == 1
    assert await rig.engine.budgets.refresh_all() == 0
    rig.assert_queued()


async def test_budgets_that_are_used_up_cause_no_transaction_every_second(rigs: Rigs) -> None:
    rig = rigs(pages_per_host=1)
    for n in range(20):
        await push(rig, f"a{n}", f"b{n}", host=f"h{n}.test")
    await started(rig)
    written = []
    write = rig.uow.write

    async def counted(*args: Any, **kwargs: Any) -> Any:
        written.append(args)
        return await write(*args, **kwargs)

    rig.uow.write = counted  # type: ignore[method-assign]
    assert await refresh(rig) == 0
    assert written == []


async def test_a_process_that_does_not_fetch_leaves_events_of_a_run_to_others(
    rigs: Rigs,
) -> None:
    rig = rigs(pages_per_run=1)
    await push(rig, "a", "b")
    assert await started(rig) == ["a"]
    sink = rigs(run="r2", pages_per_run=1)
    assert await sink.engine.budgets.refresh(fetches=False) == 0
    assert await waits(rig) == {"budget:pages:run:r1": 1}
    assert await sink.engine.budgets.refresh(fetches=True) == 1


async def test_a_worker_without_a_pool_leaves_events_of_its_budget_to_others(
    tmp_path: Path,
) -> None:
    pools = (ServedPool(name="home"),)
    rig = Rig(tmp_path, budgets=Limits(pool_bytes={"home": 100}), pools=pools)
    rig.engine.traffic.use("home", "http://proxy")
    rig.engine.traffic.count("http://proxy", 100)
    await rig.accept("a")
    (begun,) = await rig.start("a")
    cause, until = "budget:bytes:pool:home", day_end(rig.clock.now())
    await rig.conclude(begun, "park", reason="used up", waits_for=cause, until=until)
    assert await refresh(rig) == 0
    without_pool = Rig(tmp_path, worker="w2", base=rig, budgets=Limits(pages_per_day=9))
    assert await refresh(without_pool) == 0
    assert await waits(rig) == {cause: 1}
    unlimited = Rig(tmp_path, worker="w3", base=rig, budgets=Limits(), pools=pools)
    assert await refresh(unlimited) == 1


async def test_many_budgets_are_released_in_few_transactions(rigs: Rigs) -> None:
    rig = rigs(pages_per_host=1)
    for n in range(60):
        await push(rig, *(f"e{n}.{i}" for i in range(4)), host=f"h{n}.test")
    await start_all(rig)
    more = rigs(run="r2", pages_per_host=3)
    assert await refresh(more) == 120
    assert await start_all(more) == 120
    assert sum((await waits(rig)).values()) == 60
    rig.assert_queued()


async def test_a_worker_without_limits_sends_no_statement_for_budgets(rigs: Rigs) -> None:
    rig = rigs()
    await push(rig, "a")
    (begun,) = await rig.start("a")
    await rig.succeed(begun, links=[SITE + "p/1", SITE + "calendar/2026/11"])
    assert rig.sql("SELECT * FROM budget") == []
    assert rig.engine.meter is None


# -- links -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "counter"),
    [
        ("pages_per_host", "followed_over_host"),
        ("pages_per_trace", "followed_over_trace"),
        ("pages_per_run", "followed_over_run"),
    ],
)
async def test_links_over_a_budget_are_counted_and_not_accepted(
    rigs: Rigs, limit: str, counter: str
) -> None:
    rig = rigs("r1", **{limit: 4})
    await push(rig, "a")
    (begun,) = await rig.start("a")
    await rig.succeed(begun, links=[f"{SITE}{n}" for n in range(100)])
    assert accepted(rig) == ["0", "1", "2"]
    assert rig.count(counter) == 97
    children = await rig.start()
    assert len(children) == 3, "a link was charged when it was accepted"
    await rig.succeed(children[0], links=[SITE + "1", SITE + "200"])
    assert (rig.count(counter), rig.count("followed_seen")) == (98, 1)
    assert await waits(rig) == {}


async def test_links_over_a_budget_leave_no_counters_of_templates(rigs: Rigs) -> None:
    rig = rigs(pages_per_host=1, traps=5)
    await push(rig, "a")
    (begun,) = await rig.start("a")
    await rig.succeed(begun, links=[f"{SITE}2026/11/{n}-headline" for n in range(30)])
    assert accepted(rig) == []
    assert rig.sql("SELECT what FROM budget") == [("pages:host:shop.test",)]


@pytest.mark.parametrize("limit", ["pages_per_trace", "pages_per_run"])
async def test_links_over_a_budget_leave_no_counters_of_their_hosts(rigs: Rigs, limit: str) -> None:
    rig = rigs("r1", pages_per_host=10, **{limit: 1})
    await push(rig, "a")
    (begun,) = await rig.start("a")
    await rig.succeed(begun, links=[f"http://h{n}.shop.test/" for n in range(30)])
    assert accepted(rig) == []
    hosts = rig.sql("SELECT what FROM budget WHERE what LIKE 'pages:host:%'")
    assert hosts == [("pages:host:shop.test",)]


async def test_a_refused_link_is_accepted_after_the_limit_was_raised(rigs: Rigs) -> None:
    rig = rigs(pages_per_host=3)
    await push(rig, "a")
    (begun,) = await rig.start("a")
    await rig.succeed(begun, links=[SITE + "1", SITE + "2", SITE + "3"])
    raised = rigs(run="r2", pages_per_host=4)
    one, _ = await raised.start()
    await raised.succeed(one, links=[SITE + "3", SITE + "4"])
    assert accepted(rig) == ["1", "2", "3"]
    assert rig.count("followed_over_host") == 2


async def test_only_the_first_links_of_a_page_are_followed(rigs: Rigs) -> None:
    rig = rigs(links_per_page=3)
    await push(rig, "a")
    (begun,) = await rig.start("a")
    await rig.succeed(begun, links=[f"{SITE}{n}" for n in range(10)])
    assert accepted(rig) == ["0", "1", "2"]
    assert rig.count("followed_over_page") == 7


async def test_the_limit_of_a_page_also_counts_its_packed_links(rigs: Rigs) -> None:
    rig = rigs(links_per_page=130)
    await push(rig, "a")
    (begun,) = await rig.start("a")
    links = [Link(url=f"{SITE}{n}", extractor="x") for n in range(255)]
    await rig.conclude(begun, "success", body=b"page", links=links[:5], more_links=pack(links[5:]))
    while await rig.lifecycle.feeder.feed():
        pass
    assert sorted(accepted(rig), key=int) == [str(n) for n in range(130)]
    assert rig.count("followed_over_page") == 125


async def test_a_link_of_an_earlier_run_is_charged_to_the_run_that_fetches_it(
    rigs: Rigs,
) -> None:
    rig = rigs(pages_per_run=4)
    await push(rig, "a")
    (begun,) = await rig.start("a")
    await rig.succeed(begun, links=[f"{SITE}{n}" for n in range(3)])
    rig.clock.advance(5.0)
    second = rigs(run="r2", pages_per_run=2)
    assert len(await second.start()) == 2
    assert used(rig, "pages:run:r2") == 2
    assert await waits(rig) == {"budget:pages:run:r2": 1}


async def test_the_day_is_charged_for_a_link_when_it_starts(rigs: Rigs) -> None:
    rig = rigs(pages_per_day=2)
    await push(rig, "a")
    (begun,) = await rig.start("a")
    await rig.succeed(begun, links=[f"{SITE}{n}" for n in range(3)])
    assert used(rig, "pages:day") == 1
    assert len(await rig.start()) == 1
    assert await waits(rig) == {"budget:pages:day": 2}


async def test_an_undone_page_charges_nothing(rigs: Rigs) -> None:
    rig = rigs(pages_per_host=10)
    await push(rig, "a")
    (begun,) = await rig.start("a")
    d, e, a, fence = begun
    await rig.succeed((d, e, a, fence + 1), links=[SITE + "1"])
    assert used(rig, "pages:host:shop.test") == 1
    assert accepted(rig) == []


# -- traps -----------------------------------------------------------------------------------------


async def test_a_template_with_a_date_gets_its_limit_in_each_trace(
    rigs: Rigs, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(traps=3)
    for n, name in enumerate(("a", "b")):
        await push(rig, name)
        (begun,) = await rig.start(name)
        days = [f"{SITE}day/2026-1{n}-{day:02}" for day in range(1, 10)]
        await rig.succeed(begun, links=[*days, SITE + "p/1" + name])
        for child in await rig.start():
            await rig.succeed(child, links=[days[0], days[8]])
    assert len(accepted(rig)) == 8
    assert rig.count("followed_trap_date") == 12 + 8
    with caplog.at_level(logging.WARNING, "penstock.budgets"):
        await refresh(rig)
        await refresh(rig)
    assert [r.getMessage() for r in caplog.records] == [
        f"crawler trap (date): stopped following links of {SITE}day/{{date}}"
    ]
    (trap,) = await rig.uow.read(lambda tx: tx.budgets.traps())
    assert (trap.template, trap.kind, trap.links) == (SITE + "day/{date}", "date", 20)


# -- bytes -----------------------------------------------------------------------------------------


async def test_bytes_of_the_day_delay_all_starts_and_are_shared_by_the_fleet(
    rigs: Rigs,
) -> None:
    rig = rigs(bytes_per_day=1000)
    other = rigs(run="r2", bytes_per_day=1000)
    await push(rig, "a", "b")
    rig.engine.traffic.count(None, 999)
    await refresh(rig)
    assert used(rig, "bytes:day") == 999
    (begun,) = await rig.begin(await rig.admit(await rig.receive(1)))
    await rig.succeed(begun)
    rig.engine.traffic.count(None, 1)  # not saved yet, and known to this worker
    assert await started(rig) == []
    assert await waits(rig) == {"budget:bytes:day": 1}
    await refresh(rig)
    await push(rig, "c")
    await refresh(other)
    assert await started(other) == []
    rig.clock.advance(day_end(rig.clock.now()) - rig.clock.now() + 1.0)
    assert await started(other) == ["b", "c"]


async def test_bytes_are_not_lost_if_they_cannot_be_saved(rigs: Rigs) -> None:
    rig = rigs(bytes_per_day=1000)
    rig.engine.traffic.count(None, 10)

    class Down:
        async def write(self, *_: object, **__: object) -> None:
            raise OSError("down")

    with pytest.raises(OSError, match="down"):
        await rig.engine.traffic.save(Down())  # type: ignore[arg-type]
    rig.engine.traffic.count(None, 5)
    await refresh(rig)
    assert used(rig, "bytes:day") == 15


def test_a_day_is_a_day_of_utc() -> None:
    assert (day_of(0.0), day_of(DAY - 0.001), day_of(DAY)) == (
        "1970-01-01",
        "1970-01-01",
        "1970-01-02",
    )
    assert day_of(1_795_000_000.0) == "2026-11-18"
    assert day_end(1.0) == day_end(DAY - 1) == DAY


@pytest.mark.parametrize(
    ("what", "option"),
    [
        ("pages:host:a.test", "limits.pages_per_host"),
        ("pages:trace:t1", "limits.pages_per_trace"),
        ("pages:run:r1", "limits.pages_per_run"),
        ("pages:day", "limits.pages_per_day"),
        ("bytes:day", "limits.bytes_per_day"),
        ("bytes:pool:home", "proxies.home.bytes_per_day"),
    ],
)
def test_the_next_step_of_each_budget_names_its_option(what: str, option: str) -> None:
    sentence, step = describe(what)
    assert option in step
    assert "used up" in sentence


async def test_budgets_and_traps_also_stop_links_that_waited_for_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_pending=3, budgets=Limits(pages_per_trace=13, traps=500))
    await rig.accept("a", url=f"{SITE}s/fedcba98765432109876/x")
    (begun,) = await rig.start("a")
    token = "0123456789abcdef0123"
    with_session = [f"{SITE}s/{token}/{n}" for n in range(2)]
    await rig.succeed(begun, links=[*with_session, *(f"{SITE}{n}" for n in range(98))])
    for _ in range(50):
        while await rig.lifecycle.feeder.feed():
            pass
        for child in await rig.start():
            await rig.succeed(child)
    assert len(accepted(rig)) == 12
    assert rig.count("followed_over_trace") == 88
    assert rig.count("links_waiting") == 0
    sessions = rig.sql("SELECT used FROM budget WHERE what LIKE 'trap:session:%'")
    assert sessions == [(1,), (1,)]
