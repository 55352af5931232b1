"""Workers of this release beside workers of a release whose envelope version is one higher."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.harness import Project, Target, wait_for
from tests.e2e.layouts import Server, lay_out, layouts

NEWER = (sys.executable, str(Path(__file__).with_name("newer_release.py")))
LAYOUTS = ("embedded", "apart", "redis", "rabbitmq", "kafka", "sqs", "postgres")


@contextmanager
def newer_release(project: Project) -> Iterator[None]:
    """Run the commands of the block as the newer release."""
    before, project.command = project.command, NEWER
    yield
    project.command = before


def ended(project: Project) -> int:
    total = project.total()
    return total["success"] + total["dead"] + total["duplicate"]


def assert_nothing_lost(project: Project, web: Target) -> None:
    total = project.total()
    assert (total["success"], total["accepted"]) == (web.pages, web.pages)
    assert project.dead_letters() == {}
    wait_for(lambda: project.written() == web.pages, "all rows are written")
    assert Counter(row["sku"] for row in project.rows()) == {f"T-{n}": 1 for n in range(web.pages)}
    assert web.asked() == {f"/p/{n}": 1 for n in range(web.pages)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts(*LAYOUTS))
def test_events_of_a_newer_release_wait_for_its_workers_and_none_is_lost_or_dead(
    project: Project, target: Callable[..., Target], server: Server, layout: str
) -> None:
    lay_out(project, layout, server)
    web = target(pages=40)
    old = project.start("run", "shop.py")
    with newer_release(project):
        project.push(*web.urls[:20])
    project.push(*web.urls[20:30])
    wait_for(lambda: project.total()["success"] == 10, "the older events end", every=0.3)
    wait_for(lambda: "newer than version 1" in old.output, "a sentence in the log")
    total = project.total()
    assert (total["dead"], total["success"], total["accepted"]) == (0, 10, 30)
    with newer_release(project):
        new = project.start("run", "shop.py")
        project.push(*web.urls[30:])
    wait_for(lambda: ended(project) == 40, "all events end", 600.0, every=0.5)
    assert_nothing_lost(project, web)
    assert old.output.count("newer than version 1") == 1, "it is logged once"
    for running in (old, new):
        assert not running.ended, running.output
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.output


def test_a_page_with_a_newer_envelope_waits_for_a_newer_extractor(
    project: Project, target: Callable[..., Target]
) -> None:
    web = target(pages=10)
    old = project.start("run", "shop.py", "--role", "extract,sink")
    with newer_release(project):
        project.push(*web.urls)
        fetch = project.start("run", "shop.py", "--role", "fetch")
    wait_for(lambda: "newer than version 1" in old.output, "a sentence in the log")
    assert project.total()["dead"] == 0
    with newer_release(project):
        project.start("run", "shop.py", "--role", "extract,sink")
    wait_for(lambda: ended(project) == 10, "all events end", 120.0, every=0.5)
    assert_nothing_lost(project, web)
    assert not fetch.ended, fetch.output


def test_status_and_trace_name_the_reason_of_an_event_that_waits(
    project: Project, target: Callable[..., Target]
) -> None:
    web = target(pages=1)
    with newer_release(project):
        project.push(*web.urls)
    project.start("run", "shop.py")
    reason = "waiting for a newer worker: envelope version 2 is newer than version 1"
    wait_for(lambda: reason in project.good("status"), "status has the reason", every=0.3)
    event = project.event(web.urls[0])
    assert event["status"] in ("delayed", "pending")
    assert reason in {step["reason"] for step in event["history"]}
