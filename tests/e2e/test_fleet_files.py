"""Two machines with file sinks and one ledger in PostgreSQL.

A row is only in the file of the machine that held the sink's lock.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import Project, Running, Target, wait_for
from tests.servers import Handle

pytestmark = pytest.mark.server("postgres")
HERE = "(SELECT oid FROM pg_database WHERE datname=current_database())"
HOLDERS = (
    "SELECT pid FROM pg_locks WHERE locktype='advisory' AND objsubid=1 AND granted "
    f"AND database={HERE}"
)


class Machines:
    """Two project directories that share only the server. The sink is `jsonl:products.jsonl`."""

    def __init__(self, first: Project, tmp_path: Path, url: str) -> None:
        self.url, self.namespace = url, f"t{first.mark[:12]}"
        other = tmp_path / "other"
        other.mkdir()
        self.all = [first, Project(other)]
        self.all[1].write("shop.py", (first.dir / "shop.py").read_text())
        for project in self.all:
            project.set(
                broker_url=url,
                namespace=self.namespace,
                lease="2s",
                fetch_concurrency="8",
                fetch_prefetch="16",
            )

    def start(self, web: Target) -> list[Running]:
        for machine in self.all:
            machine.allow(web.port)
        return [
            machine.start("run", "shop.py", "--until-idle", "--log-level", "warning")
            for machine in self.all
        ]

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as db:
            cursor = db.execute(text)
            return cursor.fetchall() if cursor.description else []

    def lines(self) -> list[int]:
        files = [machine.dir / "products.jsonl" for machine in self.all]
        return [file.read_bytes().count(b"\n") if file.exists() else 0 for file in files]


@pytest.fixture
def machines(
    project: Project, tmp_path: Path, server: Callable[[str], Handle]
) -> Iterator[Machines]:
    made = Machines(project, tmp_path, server("postgres").url)
    yield made
    made.all[1].close()
    made.sql(f"DROP SCHEMA IF EXISTS {made.namespace} CASCADE")


def check(machines: Machines, web: Target) -> None:
    total = machines.all[0].total()
    assert (total["accepted"], total["success"]) == (web.pages, web.pages), total
    written = Counter(row["sku"] for machine in machines.all for row in machine.rows())
    assert set(written) == {f"T-{n}" for n in range(web.pages)}
    assert set(written.values()) == {1}, {sku: n for sku, n in written.items() if n > 1}
    for machine in machines.all:
        assert [sink["backlog"] for sink in machine.status()["sinks"]] == [0]
        machine.doctor()


def test_one_of_two_machines_writes_all_rows_of_a_file_sink(
    machines: Machines, target: Callable[..., Target], project: Project
) -> None:
    web = target(pages=400, delay=0.05)
    project.push(*web.urls)
    for each in machines.start(web):
        assert each.wait() == 0, each.output
    assert min(machines.lines()) == 0, "the holder keeps the lock"
    check(machines, web)


def test_the_other_machine_continues_a_killed_holders_sink_with_each_row_once(
    machines: Machines, target: Callable[..., Target], project: Project, seed: int
) -> None:
    rng = random.Random(seed)
    web = target(pages=1500, delay=0.05)
    project.push(*web.urls)
    running = machines.start(web)
    for _ in range(4):
        before = machines.lines()
        wait_for(
            lambda: machines.lines() != before or all(r.ended for r in running),  # noqa: B023
            running[0].output,
            every=0.002,
        )
        writing = next(
            (i for i, (a, b) in enumerate(zip(before, machines.lines(), strict=True)) if a != b), 0
        )
        time.sleep(rng.uniform(0.0, 0.05))  # at a random point between two marks
        running[writing].kill()
        other = machines.lines()[1 - writing]
        wait_for(
            lambda: machines.lines()[1 - writing] > other or running[1 - writing].ended,  # noqa: B023
            running[1 - writing].output,
        )
        running[writing] = machines.all[writing].start(
            "run", "shop.py", "--until-idle", "--log-level", "warning"
        )
    for each in running:
        assert each.wait() == 0, each.output
    assert min(machines.lines()) > 0, "each machine has written rows"
    check(machines, web)


def test_a_holder_whose_lock_connection_is_cut_loses_and_repeats_no_row(
    machines: Machines, target: Callable[..., Target], project: Project
) -> None:
    web = target(pages=1500, delay=0.05)
    project.push(*web.urls)
    running = machines.start(web)
    cuts = 0
    while cuts < 12 and not all(r.ended for r in running):
        before = machines.lines()
        wait_for(
            lambda: machines.lines() != before or all(r.ended for r in running),  # noqa: B023
            running[0].output,
            every=0.002,
        )
        cuts += len(machines.sql(f"SELECT pg_terminate_backend(pid) FROM ({HOLDERS}) AS holder"))
    assert cuts > 2
    for each in running:
        assert each.wait() == 0, each.output
    check(machines, web)
