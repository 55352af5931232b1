"""Fetch, extract and sink as separate processes over one state directory: the same rows as one process would write, whoever is killed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.e2e.harness import SHOP, Project, Running, Site, Target, product, wait_for

ROLES = ("fetch", "extract", "sink")
PAGES = 1500


def ends(project: Project) -> int:
    total = project.total()
    return total["success"] + total["dead"] + total["duplicate"]


def stop(*running: Running) -> None:
    for each in running:
        each.signal(15)
    for each in running:
        assert each.wait() == 0, each.said


def test_three_processes_with_one_role_each_write_every_row_once(project: Project, target: Callable[..., Target]) -> None:
    web = target(pages=300, dead_share=0.02)
    project.push(*web.urls)
    running = [project.start("run", "shop.py", "--role", role) for role in ROLES]
    wait_for(lambda: any(r.ended for r in running) or ends(project) == 300, "all ends", 60, 0.2)
    wait_for(lambda: len(project.rows()) == 294, "all rows")
    stop(*running)
    total = project.total()
    assert (total["success"], total["dead"]) == (294, 6)
    assert len({row["sku"] for row in project.rows()}) == len(project.rows()) == 294
    assert set(web.asked().values()) == {1}
    project.doctor()


@pytest.mark.slow
def test_each_role_may_be_killed_on_the_way_and_started_again(project: Project, target: Callable[..., Target], seed: int) -> None:
    rng = random.Random(seed)
    project.set(fetch_concurrency="16", fetch_prefetch="64")
    web = target(pages=PAGES, delay=0.05)
    project.push(*web.urls)
    running = {role: project.start("run", "shop.py", "--role", role) for role in ROLES}
    kills = 0
    for role in (*ROLES, *rng.sample(ROLES, 3)):
        begun = ends(project)
        share = rng.randrange(20, 150)
        wait_for(lambda begun=begun, share=share: ends(project) >= min(PAGES, begun + share), f"progress: {[r.said for r in running.values()]}", 60, 0.05)
        running[role].kill()
        kills += 1
        running[role] = project.start("run", "shop.py", "--role", role)
    wait_for(lambda: ends(project) == PAGES, f"all ends: {[r.said for r in running.values()]}", 90, 0.2)
    wait_for(lambda: len(project.rows()) == PAGES, "all rows")
    stop(*running.values())
    assert project.total()["success"] == PAGES
    assert sorted(row["sku"] for row in project.rows()) == sorted(f"T-{n}" for n in range(PAGES))
    asked = web.asked()
    assert max(asked.values()) <= 1 + kills
    assert sum(asked.values()) <= PAGES + kills * 64, "a page that was known was fetched again"
    project.doctor()
    project.nothing_runs()


def test_what_dies_in_the_extract_role_can_be_seen_and_put_back_to_work(project: Project, site: Site) -> None:
    """A message on `pages` is not the event: the dead letter must hold the event all the same."""
    project.write("shop.py", SHOP.replace('"sku":', '"bad": 1 / int(page.url[-1]),\n        "sku":'))
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
    running = [project.start("run", "shop.py", "--role", "fetch"), project.start("run", "shop.py", "--role", "extract,sink")]
    wait_for(lambda: project.total()["success"] == 3, f"all succeed: {[r.said for r in running]}", every=0.1)
    wait_for(lambda: len(project.rows()) == 3, "all rows")
    stop(*running)
    project.doctor()


def test_what_split_roles_left_half_done_is_finished_by_whoever_comes_without_another_fetch(project: Project, target: Callable[..., Target]) -> None:
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
