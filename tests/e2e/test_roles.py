"""Fetch, extract and sink as separate processes over one state directory: the same rows as one
process would write, whoever is killed.
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
NOISE = f"<p>{random.Random(1).randbytes(10_000).hex()}</p>"  # 10 kB however well it is compressed


def ends(project: Project) -> int:
    total = project.total()
    return total["success"] + total["dead"] + total["duplicate"]


def stop(*running: Running) -> None:
    for each in running:
        each.signal(15)
    for each in running:
        assert each.wait() == 0, each.said


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
def test_each_role_may_be_killed_on_the_way_and_started_again(
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
            f"progress: {[r.said for r in running.values()]}",
            180,
            0.05,
        )
        running[role].kill()
        kills += 1
        running[role] = project.start("run", "shop.py", "--role", role)
    wait_for(
        lambda: ends(project) == PAGES, f"all ends: {[r.said for r in running.values()]}", 240, 0.2
    )
    wait_for(lambda: project.written() == PAGES, "all rows")
    stop(*running.values())
    assert project.total()["success"] == PAGES
    assert sorted(row["sku"] for row in project.rows()) == sorted(f"T-{n}" for n in range(PAGES))
    asked = web.asked()
    assert max(asked.values()) <= 1 + kills
    assert sum(asked.values()) <= PAGES + kills * 64, "a page that was known was fetched again"
    project.doctor()
    project.nothing_runs()


def test_what_dies_in_the_extract_role_can_be_seen_and_put_back_to_work(
    project: Project, site: Site
) -> None:
    """A message on `pages` is not the event: the dead letter must hold the event all the same."""
    project.write(
        "shop.py", SHOP.replace('"sku":', '"bad": 1 / int(page.url[-1]),\n        "sku":')
    )
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(3)]
    project.push(*urls)
    running = [project.start("run", "shop.py", "--role", role) for role in ROLES]
    wait_for(lambda: ends(project) == 3, f"all ends: {[r.said for r in running]}", every=0.1)
    stop(*running)
    assert set(project.letters()) == {"0"}
    assert "ZeroDivisionError" in project.letters()["0"]["reason"]
    assert urls[0] in project.good("dlq", "show", urls[0])
    project.write("shop.py", SHOP)
    project.good("dlq", "retry", "--all")
    running = [
        project.start("run", "shop.py", "--role", "fetch"),
        project.start("run", "shop.py", "--role", "extract,sink"),
    ]
    wait_for(
        lambda: project.total()["success"] == 3,
        f"all succeed: {[r.said for r in running]}",
        every=0.1,
    )
    wait_for(lambda: project.written() == 3, "all rows")
    stop(*running)
    project.doctor()


def test_what_split_roles_left_half_done_is_finished_by_whoever_comes_without_another_fetch(
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
    """The messages on `pages`, once there are so many."""
    found: list[dict[str, Any]] = json.loads(project.good("topics", "peek", "pages", "--json"))[
        "messages"
    ]
    return found if len(found) == count else []


def hand_over(project: Project, *urls: str) -> dict[str, int]:
    """Fetched and handed over, and the fetching process is gone. The size of the message on
    `pages`, by URL.
    """
    project.push(*urls)
    fetch = project.start("run", "shop.py", "--role", "fetch")
    messages = wait_for(
        lambda: handed(project, len(urls)), f"all handed over: {fetch.said}", every=0.2
    )
    stop(fetch)
    return {m["url"]: m["size"] for m in messages}


def test_a_page_travels_as_a_reference_unless_told_otherwise(project: Project, site: Site) -> None:
    url = site.serve("/p/1", product(1, more=NOISE))
    assert hand_over(project, url)[url] < len(NOISE) / 4


@pytest.mark.parametrize("layout", ["embedded", "apart"])
def test_small_pages_travel_in_the_message_and_need_no_page_store(
    project: Project, site: Site, server: Server, layout: str
) -> None:
    """The large one is a reference all the same: it waits for the store, and nothing is fetched
    twice.
    """
    lay_out(project, layout, server)
    project.set(pages_inline_max="8KiB", retry_base="3s")
    small = [site.serve(f"/p/{n}", product(n)) for n in range(5)]
    large = site.serve("/p/large", product("large", more=NOISE))
    hand_over(project, *small, large)
    pages, away = project.dir / ".penstock" / "pages", project.dir / "away"
    assert list(pages.glob("*.seg")), "what travels is stored as well"
    pages.rename(away)
    rest = project.start("run", "shop.py", "--role", "extract,sink")
    wait_for(lambda: project.written() == 5, f"rows of the small ones: {rest.said}", every=0.1)
    wait_for(
        lambda: project.event(large)["status"] == "delayed",
        f"the large one missed its page: {rest.said}",
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
def test_a_request_that_comes_again_after_its_page_was_handed_over_is_handed_over_again(
    project: Project, site: Site, server: Server, layout: str
) -> None:
    lay_out(project, layout, server)
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(3)]
    hand_over(project, *urls)
    project.good(
        "topics", "rewind", "requests", "--group", "main"
    )  # as a broker does that was not told of the end before a crash
    fetch = project.start("run", "shop.py", "--role", "fetch")
    wait_for(lambda: handed(project, 6), f"all handed over again: {fetch.said}", every=0.2)
    stop(fetch)
    project.run("--role", "extract,sink")
    assert sorted(row["sku"] for row in project.rows()) == ["S-0", "S-1", "S-2"]
    assert [len(site.asked(f"/p/{n}")) for n in range(3)] == [1] * 3
    project.doctor()
