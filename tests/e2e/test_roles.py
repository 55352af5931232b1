"""Fetch, extract and sink as separate processes over one state directory.

They write the same rows as one process, even if processes are killed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.e2e.harness import SHOP, Project, Running, Site, Target, product, wait_for
from tests.e2e.layouts import Server, lay_out

ROLES = ("fetch", "extract", "sink")
PAGES = 1500
NOISE = f"<p>{random.Random(1).randbytes(10_000).hex()}</p>"  # at least 10 kB after compression

WAITS_WHILE_LOADED = """
import pathlib, time

pathlib.Path("loading").touch()
while not pathlib.Path("continue").exists():
    time.sleep(0.05)
"""


def ends(project: Project) -> int:
    total = project.total()
    return total["success"] + total["dead"] + total["duplicate"]


def stop(*running: Running) -> None:
    for each in running:
        each.signal(15)
    for each in running:
        assert each.wait() == 0, each.output


def test_three_processes_with_one_role_each_write_every_row_once(
    project: Project, target: Callable[..., Target]
) -> None:
    web = target(pages=300, dead_share=0.02)
    project.push(*web.urls)
    running = [project.start("run", "shop.py", "--role", role) for role in ROLES]
    wait_for(lambda: any(r.ended for r in running) or ends(project) == 300, "all ends", 180, 0.2)
    wait_for(lambda: project.written() == 294, "all rows")
    stop(*running)
    total = project.total()
    assert (total["success"], total["dead"]) == (294, 6)
    assert len({row["sku"] for row in project.rows()}) == len(project.rows()) == 294
    assert set(web.asked().values()) == {1}
    project.doctor()


@pytest.mark.slow
def test_every_row_is_written_once_although_each_role_is_killed_and_restarted(
    project: Project, target: Callable[..., Target], seed: int
) -> None:
    rng = random.Random(seed)
    project.set(fetch_concurrency="16", fetch_prefetch="64")
    web = target(pages=PAGES, delay=0.05)
    project.push(*web.urls)
    running = {role: project.start("run", "shop.py", "--role", role) for role in ROLES}
    kills = 0
    for role in (*ROLES, *rng.sample(ROLES, 3)):
        begun = ends(project)
        share = rng.randrange(20, 150)
        wait_for(
            lambda begun=begun, share=share: ends(project) >= min(PAGES, begun + share),
            f"progress: {[r.output for r in running.values()]}",
            180,
            0.05,
        )
        running[role].kill()
        kills += 1
        running[role] = project.start("run", "shop.py", "--role", role)
    wait_for(
        lambda: ends(project) == PAGES,
        f"all ends: {[r.output for r in running.values()]}",
        240,
        0.2,
    )
    wait_for(lambda: project.written() == PAGES, "all rows")
    stop(*running.values())
    assert project.total()["success"] == PAGES
    assert sorted(row["sku"] for row in project.rows()) == sorted(f"T-{n}" for n in range(PAGES))
    asked = web.asked()
    assert max(asked.values()) <= 1 + kills
    assert sum(asked.values()) <= PAGES + kills * 64, "a stored page was fetched again"
    project.doctor()
    project.nothing_runs()


@pytest.mark.parametrize("options", [("--role", "fetch"), ("--workers", "2")])
def test_a_sigterm_during_the_start_ends_the_run_with_exit_code_0(
    project: Project, options: tuple[str, ...]
) -> None:
    """The pipeline waits while it is loaded, so that the signal arrives before the work begins."""
    project.write("shop.py", WAITS_WHILE_LOADED + SHOP)
    running = project.start("run", "shop.py", *options)
    wait_for((project.dir / "loading").exists, "the start", every=0.05)
    running.signal(15)
    project.write("continue", "")
    assert running.wait() == 0, running.output
    assert "Traceback" not in running.output
    project.nothing_runs()


def test_an_event_that_ends_dead_in_the_extract_role_can_be_shown_and_redriven(
    project: Project, site: Site
) -> None:
    """A message on `pages` is not an event, but its dead letter must contain the event."""
    project.write(
        "shop.py", SHOP.replace('"sku":', '"bad": 1 / int(page.url[-1]),\n        "sku":')
    )
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(3)]
    project.push(*urls)
    running = [project.start("run", "shop.py", "--role", role) for role in ROLES]
    wait_for(lambda: ends(project) == 3, f"all ends: {[r.output for r in running]}", every=0.1)
    stop(*running)
    assert set(project.dead_letters()) == {"0"}
    assert "ZeroDivisionError" in project.dead_letters()["0"]["reason"]
    assert urls[0] in project.good("dlq", "show", urls[0])
    project.write("shop.py", SHOP)
    project.good("dlq", "retry", "--all")
    running = [
        project.start("run", "shop.py", "--role", "fetch"),
        project.start("run", "shop.py", "--role", "extract,sink"),
    ]
    wait_for(
        lambda: project.total()["success"] == 3,
        f"all succeed: {[r.output for r in running]}",
        every=0.1,
    )
    wait_for(lambda: project.written() == 3, "all rows")
    stop(*running)
    project.doctor()


def test_pages_that_a_killed_fetch_role_handed_over_are_finished_without_a_fetch(
    project: Project, target: Callable[..., Target]
) -> None:
    web = target(pages=100)
    project.push(*web.urls)
    fetch = project.start("run", "shop.py", "--role", "fetch")
    wait_for(lambda: sum(web.asked().values()) == 100, "all fetched", every=0.1)
    wait_for(lambda: project.total()["in_flight"] == 0, "all handed over", every=0.1)
    fetch.kill()
    project.run("--workers", "2")
    assert project.total()["success"] == 100
    assert len(project.rows()) == 100
    assert set(web.asked().values()) == {1}
    project.doctor()


def handed(project: Project, count: int) -> list[dict[str, Any]]:
    """Return the messages on `pages` if there are `count`, otherwise an empty list."""
    found: list[dict[str, Any]] = json.loads(project.good("topics", "peek", "pages", "--json"))[
        "messages"
    ]
    return found if len(found) == count else []


def hand_over(project: Project, *urls: str) -> dict[str, int]:
    """Fetch `urls`, publish them on `pages`, and stop the fetch process.

    Return the size of each message on `pages` by URL.
    """
    project.push(*urls)
    fetch = project.start("run", "shop.py", "--role", "fetch")
    messages = wait_for(
        lambda: handed(project, len(urls)), f"all handed over: {fetch.output}", every=0.2
    )
    stop(fetch)
    return {m["url"]: m["size"] for m in messages}


def test_a_message_on_pages_contains_a_reference_and_not_the_page_by_default(
    project: Project, site: Site
) -> None:
    url = site.serve("/p/1", product(1, more=NOISE))
    assert hand_over(project, url)[url] < len(NOISE) / 4


@pytest.mark.parametrize("layout", ["embedded", "apart"])
def test_small_pages_are_inlined_in_the_message_and_need_no_page_store(
    project: Project, site: Site, server: Server, layout: str
) -> None:
    """The large page is a reference. Its event waits for the store, without a second fetch."""
    lay_out(project, layout, server)
    project.set(pages_inline_max="8KiB", retry_base="3s")
    small = [site.serve(f"/p/{n}", product(n)) for n in range(5)]
    large = site.serve("/p/large", product("large", more=NOISE))
    hand_over(project, *small, large)
    pages, away = project.dir / ".penstock" / "pages", project.dir / "away"
    assert list(pages.glob("*.seg")), "inlined pages are stored as well"
    pages.rename(away)
    rest = project.start("run", "shop.py", "--role", "extract,sink")
    wait_for(lambda: project.written() == 5, f"rows of the small ones: {rest.output}", every=0.1)
    wait_for(
        lambda: project.event(large)["status"] == "delayed",
        f"the large one missed its page: {rest.output}",
        every=0.2,
    )
    stop(rest)
    assert {row["sku"] for row in project.rows()} == {f"S-{n}" for n in range(5)}
    away.rename(pages)
    project.run("--role", "extract,sink")
    assert {row["sku"] for row in project.rows()} == {"S-large", *(f"S-{n}" for n in range(5))}
    assert [len(site.asked(f"/p/{n}")) for n in (*range(5), "large")] == [1] * 6
    project.doctor()


@pytest.mark.parametrize("layout", ["embedded", "apart"])
def test_a_redelivered_request_publishes_its_stored_page_again_without_a_fetch(
    project: Project, site: Site, server: Server, layout: str
) -> None:
    lay_out(project, layout, server)
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(3)]
    hand_over(project, *urls)
    # A broker redelivers the same way if a crash prevented the settle.
    project.good("topics", "rewind", "requests", "--group", "main")
    fetch = project.start("run", "shop.py", "--role", "fetch")
    wait_for(lambda: handed(project, 6), f"all handed over again: {fetch.output}", every=0.2)
    stop(fetch)
    project.run("--role", "extract,sink")
    assert sorted(row["sku"] for row in project.rows()) == ["S-0", "S-1", "S-2"]
    assert [len(site.asked(f"/p/{n}")) for n in range(3)] == [1] * 3
    project.doctor()
