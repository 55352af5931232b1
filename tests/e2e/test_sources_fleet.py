"""A source of two machines that share a ledger in PostgreSQL.

One machine reads it, the other takes over, and an operator pauses and resets it from either.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import Project, Running, wait_for
from tests.servers import Handle

pytestmark = [pytest.mark.server("postgres"), pytest.mark.slow]
PIPELINE = """
import penstock
from penstock import Page

shop = penstock.Pipeline("shop")

@shop.extract(match="*/p/*", key="sku")
def product(page: Page) -> dict:
    return {"sku": page.url}

shop.source("seeds:INBOX/", name="list", every="200ms")
shop.sink("jsonl:products.jsonl")
"""
FILES, LINES = 3, 500


@pytest.fixture
def machines(
    project: Project, tmp_path: Path, server: Callable[[str], Handle]
) -> Iterator[list[Project]]:
    url, namespace = server("postgres").url, f"t{project.mark[:12]}"
    (tmp_path / "other").mkdir()
    (project.dir / "inbox").mkdir()
    made = [project, Project(tmp_path / "other")]
    for each in made:
        each.set(broker_url=url, namespace=namespace, lease="2s")
        each.write("shop.py", PIPELINE.replace("INBOX", str(project.dir / "inbox")))
    yield made
    made[1].close()
    with psycopg.connect(url) as db:
        db.execute(f"DROP SCHEMA IF EXISTS {namespace} CASCADE")


def state(project: Project) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        project.good("sources", "ls", "--pipeline", "shop.py", "--json")
    )["sources"][0]
    return found


def reading(project: Project, running: list[Running]) -> int:
    """Return the number of the running reader, counted from 1, or 0 if it has ended."""
    parts = (state(project)["worker"] or "").split("-")
    return next((n for n, r in enumerate(running, 1) if str(r.pid) in parts), 0)


def test_the_other_machine_continues_a_source_whose_reader_is_killed(
    machines: list[Project],
) -> None:
    first = machines[0]
    running = [each.start("run", "shop.py", "--role", "source") for each in machines]
    for number in range(FILES):
        first.write(
            f"inbox/{number}.txt",
            "".join(f"https://shop.test/p/{number}/{n}\n" for n in range(LINES)),
        )
        wait_for(
            lambda goal=number * LINES + 1: (
                any(r.ended for r in running) or state(first)["events"] >= goal
            ),
            "the list is begun",
            120,
            0.2,
        )
        assert not any(r.ended for r in running), [r.output for r in running]
        # One check only: a reader that was suspended longer than its lease may have changed by
        # the next check.
        reader = wait_for(lambda: reading(first, running), "one of them reads", every=0.2) - 1
        running[reader].kill()
        running[reader] = machines[reader].start("run", "shop.py", "--role", "source")
    wait_for(lambda: state(first)["events"] >= FILES * LINES, "all of it", 180, 0.3)

    machines[1].good("sources", "pause", "list", "--pipeline", "shop.py", "--reason", "holidays")
    wait_for(lambda: state(first)["paused"] == "holidays", "paused", 60, 0.2)
    first.write("inbox/late.txt", "https://shop.test/p/late\n")
    first.good("sources", "reset", "list", "--to", "start", "--pipeline", "shop.py")
    assert state(machines[1])["events"] == FILES * LINES
    machines[1].good("sources", "resume", "list", "--pipeline", "shop.py")
    wait_for(
        lambda: state(first)["events"] == FILES * LINES + 1,
        "the line written during the pause",
        120,
        0.2,
    )
    wait_for(
        lambda: state(first)["known"] >= FILES * LINES, "the earlier lines are known", 120, 0.2
    )
    assert set(Counter(event["url"] for event in first.events()).values()) == {1}
    assert first.total()["accepted"] == FILES * LINES + 1
    for each in running:
        each.kill()
