"""Pages whose extraction kills, hangs or floods its process.

Exactly these pages end dead, with a readable reason. No other event is charged.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import apsw
import pytest
from tests.e2e.harness import SHOP, Project, Target, wait_for

PAGES = 500
PIPELINE = """
import os, signal, sys
from penstock import Page, Pipeline

shop = Pipeline("shop")

def segfault(): os.kill(os.getpid(), signal.SIGSEGV)
def loop():
    while True: pass
def allocate():
    hoard = []
    while True: hoard.append(bytearray(1 << 20))
def leave_with_0(): os._exit(0)
def leave_with_3(): os._exit(3)
def sys_exit(): sys.exit("enough")
def recurse(): recurse()
def flood(): return "x" * (4 << 20)

KINDS = {31: segfault, 97: loop, 140: allocate, 201: leave_with_0, 256: leave_with_3,
         333: sys_exit, 404: recurse, 480: flood}

@shop.extract(match="*/p/*", key="sku")
def product(page: Page):
    n = int(page.url.rpartition("/")[2])
    extra = KINDS[n]() if n in KINDS else None
    yield {"sku": page.css("[data-sku]::attr(data-sku)").get(), "extra": extra}

shop.sink("jsonl:products.jsonl")
"""
REASONS = {
    "31": "killed by SIGSEGV",
    "97": "ran longer than 2 s",
    "140": "ran out of memory",
    "201": "exited with status 0",
    "256": "exited with status 3",
    "333": "SystemExit.*enough",
    "404": "RecursionError",
    "480": "more than 1048576 bytes of output",
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_eight_kinds_of_poison_pages_end_dead_and_all_other_pages_succeed_uncharged(
    project: Project, target: Callable[..., Target], processes: int
) -> None:
    project.write("shop.py", PIPELINE)
    project.set(
        extract_seconds="2s",
        extract_memory="256MiB",
        extract_output="1MiB",
        extract_processes=str(processes),
    )
    web = target(pages=PAGES)
    project.push(*web.urls)
    running = project.start("run", "shop.py")
    wait_for(
        lambda: running.ended or sum(project.total()[k] for k in ("success", "dead")) == PAGES,
        f"all ends: {running.output}",
        240,
        0.25,
    )
    assert not running.ended, running.output
    workers = project.status()["workers"]
    assert [w["alive"] for w in workers] == [True], workers
    running.signal(15)
    assert running.wait() == 0, running.output

    dead_letters = project.dead_letters()
    assert set(dead_letters) == set(REASONS)
    for page, wanted in REASONS.items():
        assert re.search(wanted, dead_letters[page]["reason"]), (page, dead_letters[page]["reason"])
        assert dead_letters[page]["stage"] == "extract"
        assert "\n" not in dead_letters[page]["reason"]
    rows = project.rows()
    assert sorted(row["sku"] for row in rows) == sorted(
        f"T-{n}" for n in range(PAGES) if str(n) not in REASONS
    )
    assert all(count == 1 for count in web.asked().values()), (
        "a page was fetched again because of its neighbour"
    )
    for event in project.events():
        assert event["starts"] == 1, event
        assert event["retry_count"] == (event["status"] == "dead"), (
            "an event other than the poison pages was charged"
        )
    assert "in product" in project.good(
        "dlq", "show", dead_letters["404"]["event_id"]
    ) or "recurse" in project.good("dlq", "show", dead_letters["404"]["event_id"])
    project.doctor()


def test_a_poison_page_succeeds_after_the_extractor_is_fixed_and_dlq_retry(
    project: Project, target: Callable[..., Target]
) -> None:
    project.write("shop.py", PIPELINE.replace("31: segfault", "1: leave_with_3"))
    web = target(pages=3)
    project.push(*web.urls)
    project.run(expect=1)
    assert set(project.dead_letters()) == {"1"}
    project.write("shop.py", PIPELINE)
    project.good("dlq", "retry", "--all")
    project.run()
    assert sorted(row["sku"] for row in project.rows()) == ["T-0", "T-1", "T-2"]
    assert project.dead_letters() == {}
    assert project.total()["success"] == 3
    project.doctor()


def test_an_end_that_the_ledger_rejects_twice_does_not_hold_back_other_ends(
    project: Project, target: Callable[..., Target]
) -> None:
    """A trigger rejects every end of one event. All ends of its batch are still recorded."""
    project.write("shop.py", SHOP)
    project.set(grace="1s")
    web = target(pages=20)
    project.push(*web.urls)
    rejected = web.urls[7]
    with contextlib.closing(apsw.Connection(str(project.dir / ".penstock/penstock.db"))) as db:
        db.execute(
            "CREATE TRIGGER reject BEFORE UPDATE ON event WHEN NEW.status IN ('success', 'dead')"
            f" AND NEW.url = '{rejected}' BEGIN SELECT RAISE(ABORT, 'rejected by a test'); END"
        )
    running = project.start("run", "shop.py")
    wait_for(
        lambda: running.ended or project.total()["success"] == 19, f"19 ends: {running.output}"
    )
    assert not running.ended, running.output
    running.signal(15)
    assert running.wait() == 0, running.output
    assert running.output.count("rejected by a test") >= 2
    (left,) = [e for e in project.events() if e["status"] != "success"]
    assert (left["url"], left["status"]) == (rejected, "pending")
    assert len({row["sku"] for row in project.rows()}) == 19
