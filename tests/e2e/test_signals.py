"""SIGTERM finishes what is in flight and exits 0; a second signal leaves at once. Either way
nothing is lost.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.harness import Project, Site, Target, product, wait_for

from penstock.testing.web import Reply, Request


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_drains_and_exits_0_and_no_event_is_ever_started_twice(
    project: Project, target: Callable[..., Target], workers: str
) -> None:
    project.set(fetch_concurrency="32", fetch_prefetch="64")
    web = target(pages=600, delay=0.3)
    project.push(*web.urls)
    running = project.start("run", "shop.py", "--workers", workers)
    wait_for(lambda: web.lines() > 100, f"requests in flight: {running.said}")
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.said
    project.nothing_runs()

    total = project.total()
    assert total["in_flight"] == 0, (
        total,
        running.said,
        project.events("--status", "in_flight")[:2],
    )
    assert 0 < total["success"] < 600
    assert total["pending"] + total["delayed"] + total["success"] == 600, total
    assert Counter(e["starts"] for e in project.events("--status", "success")) == {
        1: total["success"]
    }
    assert Counter(e["starts"] for e in project.events("--status", "pending")) == {
        0: total["pending"]
    }
    assert len(project.rows()) == total["success"], (
        "a success whose row was not written before the exit"
    )
    project.doctor()

    project.run("--workers", workers)
    assert project.total()["success"] == 600
    assert Counter(e["starts"] for e in project.events()) == {1: 600}
    assert Counter(web.asked().values()) == {1: 600}
    assert len({row["sku"] for row in project.rows()}) == len(project.rows()) == 600


@pytest.mark.parametrize(
    ("workers", "number"), [("1", signal.SIGINT), ("2", signal.SIGINT), ("2", signal.SIGTERM)]
)
def test_a_signal_to_the_whole_group_is_one_signal_and_drains(
    project: Project, target: Callable[..., Target], workers: str, number: int
) -> None:
    """A terminal (Ctrl-C) and a service manager signal every process; the supervisor must not make
    a second signal of it.
    """
    web = target(pages=400, delay=0.5)
    project.push(*web.urls)
    running = project.start("run", "shop.py", "--workers", workers)
    wait_for(lambda: web.lines() > 20, f"requests in flight: {running.said}")
    os.killpg(running.pid, number)
    assert running.wait() == 0, running.said
    total = project.total()
    assert total["in_flight"] == 0, "work was dropped, not drained"
    assert sum(web.asked().values()) == total["success"]
    assert all(e["starts"] <= 1 for e in project.events())
    project.doctor()


@pytest.mark.slow
def test_a_signal_while_the_workers_are_being_started_ends_them_all(project: Project) -> None:
    for everybody in (False, True) * 2:
        running = project.start("run", "shop.py", "--workers", "8")
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        wait_for(
            lambda: running.ended or children.read_text(),  # noqa: B023
            f"the first of them: {running.said}",
            every=0.0,
        )
        (os.killpg if everybody else os.kill)(running.pid, signal.SIGTERM)
        assert running.wait() == 0, running.said
        assert "Traceback" not in running.said
        project.nothing_runs()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_signal_leaves_at_once_and_the_next_run_takes_the_work_back(
    project: Project, site: Site, workers: str
) -> None:
    stuck = True

    def slow(request: Request) -> Reply:
        return Reply(
            200,
            {"content-type": "text/html"},
            product(request.path[3:]).encode(),
            delay=60.0 if stuck else 0.0,
        )

    site.serve("/p/*", slow)
    project.push(*(site.url(f"/p/{n}") for n in range(30)))
    running = project.start("run", "shop.py", "--workers", workers)
    wait_for(
        lambda: len([e for e in site.web.entries if e.path.startswith("/p/")]) == 30,
        f"all are being fetched: {running.said}",
    )
    wait_for(
        lambda: len(project.tree()[1]) == int(workers),
        f"all of them are there to be told: {running.said}",
        every=0.05,
    )
    running.signal(signal.SIGTERM)
    wait_for(
        lambda: running.ended or running.said.count("draining") == int(workers),
        f"it was told: {running.said}",
    )
    time.sleep(0.5)  # it waits for its pages: their grace is 25 s
    assert not running.ended
    running.signal(signal.SIGTERM)
    running.wait(20)  # less than the grace
    project.nothing_runs()
    stuck = False
    project.run()
    assert project.total()["success"] == 30
    assert sorted(row["sku"] for row in project.rows()) == sorted(f"S-{n}" for n in range(30))
    assert {e["starts"] for e in project.events()} == {2}
    project.doctor()


def test_what_is_not_done_within_the_grace_is_released_and_costs_no_attempt(
    project: Project, site: Site
) -> None:
    stuck = True

    def slow(request: Request) -> Reply:
        return Reply(
            200,
            {"content-type": "text/html"},
            product(request.path[3:]).encode(),
            delay=60.0 if stuck else 0.0,
        )

    site.serve("/p/*", slow)
    project.set(grace="1s")
    project.push(*(site.url(f"/p/{n}") for n in range(5)))
    running = project.start("run", "shop.py")
    wait_for(
        lambda: len([e for e in site.web.entries if e.path.startswith("/p/")]) == 5,
        f"all are being fetched: {running.said}",
    )
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.said
    total = project.total()
    assert (total["pending"], total["in_flight"]) == (5, 0)
    assert {e["retry_count"] for e in project.events()} == {0}
    stuck = False
    project.run()
    assert project.total()["success"] == 5
    project.doctor()
