"""One pipeline on every broker: equal rows, and equal output of `status`, `trace` and `dlq`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.harness import SHOP, Project, Target, wait_for
from tests.e2e.layouts import Server, lay_out, layouts

from penstock.testing.web import ends_dead

PAGES, DEAD_SHARE = 60, 0.1
ALL = ("apart", "redis", "rabbitmq", "kafka", "sqs", "postgres", "redis+postgres", "rabbitmq+kafka")
POISON = """
import os, signal
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/p/*", key="sku")
def product(page: Page):
    if page.url.endswith("/p/7"):
        os.kill(os.getpid(), signal.SIGKILL)
    yield {"sku": page.css("[data-sku]::attr(data-sku)").get()}

shop.sink("jsonl:products.jsonl")
"""


def answers(project: Project, web: Target) -> dict[str, Any]:
    """Return the output of the commands without the parts that differ from run to run.

    Ids, times, ports and workers are left out.
    """
    status = project.status()

    def history(n: int) -> list[tuple[str, str | None]]:
        steps = project.trace(web.urls[n])["events"][0]["history"]
        return [
            (step["status"], step["reason"])
            for step in steps
            if step["reason"] != "its time has come"
        ]

    return {
        "total": status["total"],
        "rows": Counter(row["sku"] for row in project.rows()),
        "dlq": sorted(
            (page, dead_letter["stage"], dead_letter["class"], dead_letter["reason"])
            for page, dead_letter in project.dead_letters().items()
        ),
        "success": history(next(n for n in range(1, PAGES) if not ends_dead(n, DEAD_SHARE))),
        "dead": history(next(n for n in range(PAGES) if ends_dead(n, DEAD_SHARE))),
        "asked": web.asked(),
    }


def run(project: Project, web: Target) -> dict[str, Any]:
    project.push(*web.urls)
    project.push(web.urls[0])  # the same page again, as a duplicate
    done = project.penstock("run", "shop.py", "--until-idle")
    assert done.code == 1, done.output  # some end dead
    return answers(project, web)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return the result of the embedded default, which all layouts are compared with."""
    directory = tmp_path_factory.mktemp("embedded")
    project, web = Project(directory), Target(directory, pages=PAGES, dead_share=DEAD_SHARE)
    project.write("shop.py", SHOP)
    project.allow(web.port)
    try:
        yield run(project, web)
    finally:
        project.close()
        web.close()


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts(*ALL))
def test_every_layout_gives_the_same_results_as_the_embedded_default(
    project: Project,
    target: Callable[..., Target],
    server: Server,
    embedded: dict[str, Any],
    layout: str,
) -> None:
    lay_out(project, layout, server)
    assert run(project, target(pages=PAGES, dead_share=DEAD_SHARE)) == embedded


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", layouts("apart", "sqs", "postgres", "redis+postgres", "rabbitmq+kafka")
)
def test_roles_in_separate_processes_write_every_row_once_on_any_broker(
    project: Project, target: Callable[..., Target], server: Server, layout: str
) -> None:
    lay_out(project, layout, server)
    web = target(pages=100, dead_share=DEAD_SHARE)
    project.push(*web.urls)
    running = [
        project.start("run", "shop.py", "--role", role) for role in ("fetch", "extract", "sink")
    ]
    alive = {f"T-{n}" for n in range(100) if not ends_dead(n, DEAD_SHARE)}
    wait_for(
        lambda: any(r.ended for r in running) or project.written() == len(alive),
        f"all rows: {[r.output for r in running]}",
        180,
        0.2,
    )
    wait_for(lambda: project.total()["dead"] == 100 - len(alive), "all ends", 120, 0.2)
    for each in running:
        each.signal(15)
    for each in running:
        assert each.wait() == 0, each.output
    assert sorted(row["sku"] for row in project.rows()) == sorted(alive)
    assert set(web.asked().values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts(*ALL))
def test_a_message_that_kills_every_worker_ends_dead_and_the_others_succeed(
    project: Project, target: Callable[..., Target], server: Server, layout: str
) -> None:
    lay_out(project, layout, server, quick=True)
    project.write("shop.py", POISON)
    project.set(
        extract_isolation="none",
        fetch_prefetch="50",
        fetch_concurrency="50",
        lease="2s",
        pace_rate="unlimited",
    )
    web = target(pages=50)
    project.push(*web.urls)
    done = project.penstock("run", "shop.py", "--until-idle", "--workers", "4", timeout=480)
    assert done.code == 1, done.output
    assert project.total()["success"] == 49, done.output
    dead_letters = project.dead_letters()
    assert set(dead_letters) == {"7"}
    assert "SIGKILL" in dead_letters["7"]["reason"]
    assert Counter(row["sku"] for row in project.rows()) == {
        f"T-{n}": 1 for n in range(50) if n != 7
    }


GARBAGE = """
import asyncio, os
from pathlib import Path
from penstock.config import files as config
from penstock.runtime.stores import open_stores
from penstock.ports import Out

async def main():
    variables = {k: v for k, v in os.environ.items() if k.startswith("PENSTOCK_")}
    stores = open_stores(config.load({}, variables, Path.cwd()).config)
    await stores.start()
    broker = stores.topics if stores.relay is None else stores.relay.broker("requests")
    body = b"\\x00not an event\\xff"
    answers = await broker.publish([Out(topic="requests", id="stranger", key="k", body=body)])
    assert list(answers) == ["ok"], answers
    await stores.stop()
    stores.close()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts(*ALL))
def test_a_message_that_is_not_an_event_becomes_a_dead_letter_on_any_broker(
    project: Project, target: Callable[..., Target], server: Server, layout: str
) -> None:
    lay_out(project, layout, server)
    web = target(pages=5)
    subprocess.run(
        [sys.executable, "-c", GARBAGE], cwd=project.dir, env=project.env, check=True, timeout=240
    )
    project.push(*web.urls)
    running = project.start("run", "shop.py")
    dead_letters = wait_for(
        lambda: json.loads(project.good("dlq", "ls", "--all", "--json"))["letters"],
        f"a dead letter: {running.output}",
        120,
        0.2,
    )
    wait_for(lambda: project.total()["success"] == 5, f"the others: {running.output}", 120, 0.2)
    running.signal(15)
    assert running.wait() == 0, running.output
    assert [(dead_letter["stage"], dead_letter["class"]) for dead_letter in dead_letters] == [
        ("intake", "permanent")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts(*ALL))
def test_the_demo_runs_on_any_broker_by_environment_variables_alone(
    project: Project, server: Server, layout: str
) -> None:
    lay_out(project, layout, server)
    running, there = project.start("demo"), project_of_demo(project)

    def dead() -> bool:
        status = there.penstock("status", "--json") if there.dir.exists() else None
        return (
            status is not None and status.code == 0 and json.loads(status.out)["total"]["dead"] == 1
        )

    wait_for(
        lambda: running.ended or dead(),
        f"the page that is broken on purpose: {running.output}",
        180,
        0.3,
    )
    running.signal(signal.SIGINT)
    assert running.wait() == 0, running.output  # 0: there are records
    total = there.total()
    assert total["success"] > 0
    assert total["dead"] == 1, "the page that is broken on purpose"


def project_of_demo(project: Project) -> Project:
    there = Project(project.dir / "penstock-demo")
    there.env = {
        name: value
        for name, value in project.env.items()
        if name not in ("PENSTOCK_PACE_RATE", "PENSTOCK_RETRY_BASE")
    }
    return there
