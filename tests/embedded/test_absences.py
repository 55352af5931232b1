"""Absent pages in the ledger: visits, waiting removals, known URLs, fences and retention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.embedded.test_books import Begun, Rig, assert_books_balance, record
from tests.embedded.test_message_versions import newer_release

from penstock.engine import gone as removing
from penstock.model import Record, page_id
from penstock.ports import End, PageMeta
from penstock.rules.gone import HOUR, Limits

HOST = "shop.test"
KEYS = {"product": (1, ("sku",))}
LIMITS = Limits(settle=60.0)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, window=0.0, settle=0.0, keys=KEYS, gone=LIMITS, hooks=True)


def url(n: int) -> str:
    return f"https://{HOST}/p/{n}"


async def start(rig: Rig, n: int, **more: Any) -> Begun:
    """Start a new event of page `n`."""
    rig.clock.advance(1.0)
    id_ = f"{n}-{rig.clock.now():.0f}"
    await rig.accept(id_, url=url(n), **more)
    (begun,) = await rig.start()
    return begun


async def end(rig: Rig, begun: Begun, **more: Any) -> End:
    d, e, a, fence = begun
    made = End(event=e, delivery=d, fence=fence, row=a.row, stage="fetch", **more)
    await rig.lifecycle.conclude([made])
    assert_books_balance(rig)
    return made


async def page(rig: Rig, n: int, *records: Record, **more: Any) -> None:
    """Visit page `n`, which has these records."""
    begun = await start(rig, n, **more)
    b = begun[2].baseline
    body = b"".join(r.fields for r in records)
    meta = PageMeta(
        page=page_id(body),
        url=url(n),
        status=200,
        headers={},
        fetched_at=rig.clock.now(),
        size=len(body),
        first=b is None or not b.extractors,
    )
    await end(rig, begun, outcome="success", records=records, meta=meta, extractors="product@1")


async def absent(rig: Rig, n: int, status: int = 410, **more: Any) -> End:
    """Visit page `n`, which answers 404 or 410."""
    return await end_absent(rig, await start(rig, n, **more), status)


async def end_absent(rig: Rig, begun: Begun, status: int) -> End:
    return await end(
        rig,
        begun,
        outcome="absent",
        response_status=status,
        reason=f"HTTP {status}",
        error_class="not_found",
        fingerprint="f",
    )


def known(rig: Rig) -> int:
    return int(sum(n for (n,) in rig.sql("SELECT known FROM known_host WHERE host=?", HOST)))


def removed(rig: Rig) -> list[str]:
    return [line["sku"] for line in rig.lines() if line["_penstock"].get("deleted")]


def states(rig: Rig) -> list[str]:
    return [state for (state,) in rig.sql("SELECT state FROM absent ORDER BY event")]


async def shop(rig: Rig, count: int) -> None:
    for n in range(count):
        await page(rig, n, record(f"S-{n}"))


async def test_a_removal_waits_until_the_host_has_settled_and_is_applied_once(rig: Rig) -> None:
    await shop(rig, 3)
    await absent(rig, 0)
    rig.clock.advance(30.0)
    await absent(rig, 1)
    rig.clock.advance(31.0)
    assert not await rig.engine.removals.settle(), "the second page was absent 31 s ago"
    assert removed(rig) == []
    rig.clock.advance(30.0)
    assert await rig.engine.removals.settle()
    assert sorted(removed(rig)) == ["S-0", "S-1"]
    assert not await rig.other().engine.removals.settle()
    assert states(rig) == ["gone", "gone"]
    assert (rig.count("gone"), rig.count("missing"), rig.count("success")) == (2, 0, 5)
    assert len(await rig.uow.read(lambda tx: tx.outbox.changes(10))) == 2, "hooks see them"
    assert_books_balance(rig)


async def test_a_host_that_loses_pages_all_the_time_settles_after_an_hour(rig: Rig) -> None:
    await shop(rig, 200)
    for n in range(70):
        await absent(rig, n)
        rig.clock.advance(HOUR / 60)
        await rig.engine.removals.settle()
    assert 50 <= len(removed(rig)) < 70


async def test_no_page_of_a_burst_is_removed_before_an_approval(rig: Rig) -> None:
    await shop(rig, 20)
    for n in range(8):
        await absent(rig, n)
        await rig.engine.removals.settle()
    assert not await rig.engine.removals.settle(idle=True)
    assert states(rig) == ["held"] * 8
    rig.clock.advance(10 * HOUR)
    await absent(rig, 8)  # a later removal joins those that wait
    assert not await rig.engine.removals.settle(idle=True)
    assert removed(rig) == []
    (held,) = await rig.uow.read(lambda tx: tx.absences.held())
    assert (held.host, held.urls, held.known) == (HOST, 9, 20)

    await page(rig, 3, record("S-3"))  # the page has returned
    until = rig.clock.now() + HOUR
    assert await rig.uow.write(lambda tx: tx.absences.approve(HOST, until)) == 8
    assert await rig.engine.removals.settle()
    assert len(removed(rig)) == 8
    assert "S-3" not in removed(rig)
    await absent(rig, 9)
    assert await rig.engine.removals.settle(), "the approval lasts for an hour"
    for n in range(10, 20):
        await absent(rig, n)
    rig.clock.advance(2 * HOUR)  # no worker has run in this time
    assert not await rig.engine.removals.settle()
    assert len(removed(rig)) == 9, "the approval has expired"


async def test_removals_of_one_hour_are_added_up(rig: Rig) -> None:
    await shop(rig, 20)
    for n in range(6):
        await absent(rig, n)
    assert await rig.engine.removals.settle(idle=True)
    assert len(removed(rig)) == 6, "30 % of 20"
    await absent(rig, 6)
    assert not await rig.engine.removals.settle(idle=True)
    assert len(removed(rig)) == 6


async def test_a_host_whose_pages_have_all_returned_is_held_no_longer(rig: Rig) -> None:
    await shop(rig, 5)
    for n in range(5):
        await absent(rig, n)
    await rig.engine.removals.settle(idle=True)
    assert states(rig) == ["held"] * 5
    for n in range(5):
        await page(rig, n, record(f"S-{n}"))
    assert await rig.uow.read(lambda tx: tx.absences.held()) == []
    await rig.uow.write(lambda tx: tx.maintenance.prune(0.0, lambda key, id_: True))
    assert states(rig) == []
    await absent(rig, 0)
    assert await rig.engine.removals.settle(idle=True)
    assert removed(rig) == ["S-0"]


async def test_an_outdated_worker_records_no_absence(rig: Rig) -> None:
    await shop(rig, 1)
    begun = await start(rig, 0)
    d, e, a, fence = begun
    stale = End(
        event=e,
        delivery=d,
        fence=fence - 1,
        row=a.row,
        outcome="absent",
        response_status=410,
        error_class="not_found",
        stage="fetch",
    )
    assert await rig.lifecycle.conclude([stale]) == [False]
    assert states(rig) == []


async def test_an_absent_page_without_a_success_is_dead(rig: Rig) -> None:
    made = await absent(rig, 0, 404)
    assert (made.outcome, made.result) == ("dead", "")
    assert rig.sql("SELECT class, reason FROM dead") == [("not_found", "HTTP 404")]
    assert known(rig) == 0


async def test_known_urls_are_counted_once_until_they_are_gone_or_forgotten(rig: Rig) -> None:
    for _ in range(2):
        await shop(rig, 3)
        await page(rig, 3, record("S-3"), force=True)
        assert known(rig) == 4
    await absent(rig, 0)
    await rig.engine.removals.settle(idle=True)
    assert known(rig) == 3
    await absent(rig, 0)
    assert known(rig) == 3
    await page(rig, 0, record("S-0"))
    assert known(rig) == 4
    await absent(rig, 1)
    await rig.engine.removals.settle(idle=True)
    rig.clock.advance(1.0)
    await rig.uow.write(lambda tx: tx.maintenance.prune(rig.clock.now(), lambda key, id_: False))
    assert rig.sql("SELECT count(*) FROM event") == [(0,)]
    assert known(rig) == 0


async def test_a_forced_visit_of_a_missing_page_does_not_count_its_url_again(rig: Rig) -> None:
    await shop(rig, 1)
    assert (await absent(rig, 0, 404)).result == "missing"
    await page(rig, 0, record("S-0"), force=True)
    assert known(rig) == 1
    await absent(rig, 0)
    await rig.engine.removals.settle(idle=True)
    await page(rig, 0, record("S-0"), force=True)
    assert known(rig) == 1


REMOVED: list[dict[str, Any]] = [{"change": "removed"}, {"_cdc": {"op": "d"}}]


@pytest.mark.parametrize("data", REMOVED, ids=["sitemap", "table"])
async def test_a_duplicate_that_reports_the_removal_counts_for_its_owners_visit(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    rig = Rig(tmp_path, window=60.0, settle=2.0, keys=KEYS, gone=LIMITS)
    await page(rig, 0, record("S-0"))
    rig.clock.advance(100.0)
    await rig.accept("update", url=url(0))
    await rig.accept("delete", url=url(0), data=data)
    (begun,) = await rig.start("update")
    assert rig.status("delete") == "duplicate"
    await end_absent(rig, begun, 404)
    assert await rig.engine.removals.settle(idle=True)
    assert removed(rig) == ["S-0"]


@pytest.mark.parametrize("data", REMOVED, ids=["sitemap", "table"])
async def test_a_removal_that_is_reported_after_the_get_is_visited_later(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    rig = Rig(tmp_path, window=60.0, settle=2.0, keys=KEYS, gone=LIMITS)
    await page(rig, 0, record("S-0"))
    rig.clock.advance(1.0)
    await rig.accept("delete", url=url(0), data=data)
    assert await rig.start() == []
    assert rig.status("delete") == "delayed"
    rig.clock.advance(60.0)
    (begun,) = await rig.start("delete")
    await end_absent(rig, begun, 404)
    assert await rig.engine.removals.settle(idle=True)
    assert removed(rig) == ["S-0"]


async def test_hosts_that_have_not_settled_do_not_hide_other_hosts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removing, "HOSTS", 2)
    hosts = ["a.test", "b.test", "c.test"]
    for n, host in enumerate(hosts):
        monkeypatch.setitem(globals(), "HOST", host)
        await page(rig, n, record(f"S-{n}"))
    await absent(rig, 2)
    rig.clock.advance(60.0)
    for n, host in enumerate(hosts[:2]):
        monkeypatch.setitem(globals(), "HOST", host)
        await absent(rig, n)
    assert [await rig.engine.removals.settle() for _ in range(2)] == [False, True]
    assert removed(rig) == ["S-2"]
    assert await rig.engine.removals.settle(idle=True)
    assert sorted(removed(rig)) == ["S-0", "S-1", "S-2"]


async def test_an_older_worker_leaves_the_removal_of_a_newer_event_to_newer_workers(
    rig: Rig,
) -> None:
    await shop(rig, 2)
    with newer_release():
        await absent(rig, 0)
    await absent(rig, 1)
    assert await rig.engine.removals.settle(idle=True)
    assert removed(rig) == ["S-1"]
    assert not await rig.engine.removals.settle(idle=True)
    with newer_release():
        assert await rig.engine.removals.settle(idle=True)
    assert removed(rig) == ["S-1", "S-0"]
    assert_books_balance(rig)


async def test_retention_keeps_the_events_of_waiting_removals(rig: Rig) -> None:
    await shop(rig, 1)
    await absent(rig, 0)
    rig.clock.advance(1.0)
    await rig.uow.write(lambda tx: tx.maintenance.prune(rig.clock.now(), lambda key, id_: False))
    assert rig.sql("SELECT count(*) FROM event") == [(1,)]
    assert await rig.engine.removals.settle(idle=True)
    assert removed(rig) == ["S-0"]


LONG = "x" * 700


@pytest.mark.parametrize(
    ("key", "fields", "names", "line"),
    [
        ("a", {"sku": "a", "price": 1}, ("sku",), {"sku": "a"}),
        (LONG, {"sku": LONG, "price": 1}, ("sku",), {"sku": LONG}),
        (f"s|{LONG}", {"shop": "s", "sku": LONG}, ("shop", "sku"), {"shop": "s", "sku": LONG}),
        (url(0), {"price": 1}, (), {}),
    ],
    ids=["short", "long", "two fields", "URL"],
)
async def test_a_removal_has_the_key_of_its_record(
    tmp_path: Path, key: str, fields: dict[str, Any], names: Sequence[str], line: dict[str, Any]
) -> None:
    rig = Rig(tmp_path, window=0.0, settle=0.0, keys={"product": (7, tuple(names))})
    raw = msgspec.json.encode(fields)
    made = msgspec.structs.replace(record(), key=key, fields=raw, hash=page_id(raw).encode())
    await page(rig, 0, made)
    await absent(rig, 0)
    await rig.engine.removals.settle(idle=True)
    last = rig.lines()[-1]
    origin = last.pop("_penstock")
    assert last == line
    assert (origin["key"], origin["version"], origin["deleted"]) == (key, 7, True)
    assert rig.sql("SELECT key FROM outbox ORDER BY n")[-1] == (key,)
