"""One pipeline on every broker: killed workers and killed brokers lose and repeat no row."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import pytest
from tests.e2e.harness import Project, Target, wait_for
from tests.e2e.layouts import Server, lay_out, layouts
from tests.e2e.test_kill import DEAD_SHARE, check, check_starts

PAGES, KILLS, BROKER_KILLS, WORKERS = 5000, 50, 5, 3
CONCURRENCY, HELD, DELAY = 8, 16, 0.25
# Servers that are also killed. ElasticMQ is not: it keeps its queues in memory.
KILLED = ("redis", "rabbitmq", "kafka", "postgres")


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts("redis", "rabbitmq", "kafka", "sqs", "postgres"))
def test_fifty_killed_workers_and_five_killed_brokers_lose_nothing(
    project: Project, target: Callable[..., Target], server: Server, seed: int, layout: str
) -> None:
    rng = random.Random(seed)
    lay_out(project, layout, server, quick=True)
    # In Kafka one host is one partition, and one worker reads that partition.
    share = WORKERS if layout == "kafka" else 1
    held = HELD * share
    project.set(fetch_concurrency=str(CONCURRENCY * share), fetch_prefetch=str(held), lease="2s")
    web = target(pages=PAGES, dead_share=DEAD_SHARE, delay=DELAY)
    project.push(*web.urls)
    broker = server(layout) if layout in KILLED else None
    running = project.start(
        "run", "shop.py", "--until-idle", "--workers", str(WORKERS), "--log-level", "error"
    )
    for kill in range(KILLS):
        begun = web.lines()
        # Late kills must leave work for the last kill.
        limit = max(2, (PAGES - begun) // (KILLS - kill + 10))
        some = rng.randrange(1, limit)
        wait_for(
            lambda begun=begun, some=some: running.ended or web.lines() - begun >= some,
            f"{some} requests: {running.output}",
            300,
        )

        def workers(begun: int = begun, limit: int = limit) -> list[int]:
            """Return the workers if all run, or if waiting longer would leave too little work."""
            found = project.tree()[0]
            return found if len(found) == WORKERS or web.lines() - begun >= limit else []

        found = wait_for(
            lambda: running.ended or workers(), "as many workers as asked for", 180, every=0.02
        )
        assert not running.ended, f"all was done after {kill} kills: {running.output}"
        os.kill(rng.choice(found), signal.SIGKILL)
        if broker is not None and kill % (KILLS // BROKER_KILLS) == 5:
            broker.kill()
            broker.start()
    assert running.wait(400) in (0, 1), running.output
    check(
        project.status(),
        web.log,
        project.dir / "products.jsonl",
        pages=PAGES,
        crashes=KILLS,
        at_once=held,
    )
    if layout != "postgres":  # a killed server may lose a start, but never an end
        check_starts(project, web)
    project.nothing_runs()
