"""The same pipeline on every layout of servers, by environment variables alone: kills of workers and of brokers lose nothing and write nothing twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.e2e.harness import Project, Target
from tests.e2e.test_kill import CONCURRENCY, DEAD_SHARE, HELD, check, check_starts, run_and_kill
from tests.servers import Handle

PAGES = 2000
Server = Callable[[str], Handle]
# Which server carries the requests; what it cannot keep lies in files of this machine, or in Postgres.
LAYOUTS = [
    pytest.param("apart", id="sqlite apart"),
    pytest.param("redis", marks=pytest.mark.server("redis")),
    pytest.param("rabbitmq", marks=pytest.mark.server("rabbitmq")),
    pytest.param("kafka", marks=pytest.mark.server("kafka")),
    pytest.param("postgres", marks=pytest.mark.server("postgres")),
    pytest.param("redis+postgres", marks=pytest.mark.server("redis", "postgres")),
]


def lay_out(project: Project, layout: str, server: Server) -> None:
    """Environment variables, and nothing else."""
    state = project.dir / ".penstock"
    files = {"ledger_url": f"sqlite:{state}/ledger.db", "claims_url": f"sqlite:{state}/ledger.db", "pages_url": f"file:{state}/pages"}
    project.set(namespace=f"t{project.mark[:12]}")
    match layout:
        case "apart":
            project.set(broker_url=f"sqlite:{state}/broker.db", **files)
        case "redis" | "rabbitmq" | "kafka" | "sqs":
            project.set(broker_url=server(layout).url, **files)
        case "redis+postgres":
            project.set(broker_url=server("redis").url, ledger_url=server("postgres").url, claims_url=server("postgres").url, pages_url=files["pages_url"])
        case "postgres":
            project.set(broker_url=server(layout).url)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_workers_killed_at_random_lose_nothing_on_any_broker(project: Project, target: Callable[..., Target], server: Server, seed: int, layout: str) -> None:
    rng = random.Random(seed)
    lay_out(project, layout, server)
    project.set(fetch_concurrency=str(CONCURRENCY), fetch_prefetch=str(HELD), lease="2s")
    web = target(pages=PAGES, dead_share=DEAD_SHARE, delay=0.02)
    project.push(*web.urls)

    def strike(pid: int, running: Any) -> None:
        running.kill()

    kills = 8
    for _ in range(kills):
        run_and_kill(project, web, rng, ("--workers", "2"), strike)
    done = project.penstock("run", "shop.py", "--until-idle", "--workers", "2")
    assert done.code in (0, 1), done.said
    check(project.status(), web.log, project.dir / "products.jsonl", pages=PAGES, crashes=kills, at_once=2 * HELD)
    check_starts(project, web)
    project.nothing_runs()
