"""SIGTERM finishes events in flight and exits with 0. A second signal exits immediately.

In both cases no event is lost.
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
def test_sigterm_finishes_events_in_flight_exits_with_0_and_starts_no_event_twice(
    project: Project, target: Callable[..., Target], workers: str
) -> None:
    project.set(fetch_concurrency="32", fetch_prefetch="64")
    web = target(pages=600, delay=0.3)
    project.push(*web.urls)
    running = project.start("run", "shop.py", "--workers", workers)
    wait_for(lambda: web.lines() > 100, f"requests in flight: {running.output}")
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.output
    project.nothing_runs()

    total = project.total()
    assert total["in_flight"] == 0, (
        total,
        running.output,
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
def test_a_signal_to_the_process_group_finishes_events_in_flight(
    project: Project, target: Callable[..., Target], workers: str, number: int
) -> None:
    """A terminal (Ctrl-C) and a service manager signal every process of the group.

    The supervisor must not treat that as a second signal.
    """
    web = target(pages=400, delay=0.5)
    project.push(*web.urls)
    running = project.start("run", "shop.py", "--workers", workers)
    wait_for(lambda: web.lines() > 20, f"requests in flight: {running.output}")
    os.killpg(running.pid, number)
    assert running.wait() == 0, running.output
    total = project.total()
    assert total["in_flight"] == 0, "work was dropped, not drained"
    assert sum(web.asked().values()) == total["success"]
    assert all(e["starts"] <= 1 for e in project.events())
    project.doctor()


@pytest.mark.slow
def test_a_signal_during_the_start_of_the_workers_ends_all_of_them(project: Project) -> None:
    for process_group in (False, True) * 2:
        running = project.start("run", "shop.py", "--workers", "8")
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        wait_for(
            lambda: running.ended or children.read_text(),  # noqa: B023
            f"the first of them: {running.output}",
            every=0.0,
        )
        (os.killpg if process_group else os.kill)(running.pid, signal.SIGTERM)
        assert running.wait() == 0, running.output
        assert "Traceback" not in running.output
        project.nothing_runs()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_signal_exits_before_the_grace_and_the_next_run_does_the_work(
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
        f"all are being fetched: {running.output}",
    )
    wait_for(
        lambda: len(project.tree()[1]) == int(workers),
        f"all workers have started: {running.output}",
        every=0.05,
    )
    running.signal(signal.SIGTERM)
    wait_for(
        lambda: running.ended or running.output.count("draining") == int(workers),
        f"all workers are draining: {running.output}",
    )
    time.sleep(0.5)  # the run waits for its pages: the grace is 25 s
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


def test_events_unfinished_after_the_grace_are_released_without_a_charged_attempt(
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
        f"all are being fetched: {running.output}",
    )
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.output
    total = project.total()
    assert (total["pending"], total["in_flight"]) == (5, 0)
    assert {e["retry_count"] for e in project.events()} == {0}
    stuck = False
    project.run()
    assert project.total()["success"] == 5
    project.doctor()
