"""Two machines share one PostgreSQL: broker, ledger, claims, pages and the product table."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import SHOP, Project, Target, wait_for
from tests.servers import Handle

from penstock.testing.web import ends_dead

pytestmark = pytest.mark.server("postgres")
DEAD_SHARE = 0.02


class Machines:
    """Two project directories that share only the server."""

    def __init__(self, first: Project, tmp_path: Path, url: str) -> None:
        self.url, self.namespace = url, f"t{first.mark[:12]}"
        other = tmp_path / "other"
        other.mkdir()
        self.all = [first, Project(other)]
        for project in self.all:
            project.write(
                "shop.py", SHOP.replace("jsonl:products.jsonl", f"{url}?table={self.namespace}")
            )
            project.set(
                broker_url=url,
                namespace=self.namespace,
                lease="2s",
                fetch_concurrency="16",
                fetch_prefetch="32",
            )

    def allow(self, port: int) -> None:
        for project in self.all:
            project.allow(port)

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as db:
            cursor = db.execute(text)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture
def machines(
    project: Project, tmp_path: Path, server: Callable[[str], Handle]
) -> Iterator[Machines]:
    made = Machines(project, tmp_path, server("postgres").url)
    yield made
    made.all[1].close()
    made.sql(f"DROP SCHEMA IF EXISTS {made.namespace} CASCADE")
    made.sql(f"DROP TABLE IF EXISTS public.{made.namespace}")


def check(machines: Machines, target: Target, *, crashes: int) -> None:
    first, second = machines.all
    pages = target.pages
    dead = {n for n in range(pages) if ends_dead(n, DEAD_SHARE)}
    total = first.total()
    assert total == second.total(), "both machines see the same ledger"
    assert (total["accepted"], total["success"], total["dead"]) == (
        pages,
        pages - len(dead),
        len(dead),
    ), total
    rows = machines.sql(f"SELECT sku, title, _penstock_url FROM public.{machines.namespace}")
    written = Counter(sku for sku, _, _ in rows)
    assert set(written) == {f"T-{n}" for n in range(pages) if n not in dead}
    assert set(written.values()) == {1}
    assert all(url.rpartition("/p/")[2] == sku.removeprefix("T-") for sku, _, url in rows)
    asked = target.asked()
    assert max(asked.values()) <= 1 + crashes
    held = "SELECT coalesce(sum(ready+leased+delayed), 0) FROM"
    assert machines.sql(
        f"{held} {machines.namespace}.keyq k JOIN {machines.namespace}.grp g ON g.id=k.grp"
    ) == [(0,)]
    first.doctor()


@pytest.mark.slow
def test_two_machines_that_are_killed_repeatedly_write_every_product_as_one_row(
    machines: Machines, target: Callable[..., Target], project: Project, seed: int
) -> None:
    rng = random.Random(seed)
    web = target(pages=1500, dead_share=DEAD_SHARE, delay=0.02)
    machines.allow(web.port)
    project.push(*web.urls)
    kills = 6
    for _ in range(kills):
        begun = web.lines()
        running = [
            machine.start("run", "shop.py", "--until-idle", "--log-level", "warning")
            for machine in machines.all
        ]
        share = rng.randrange(20, 200)
        wait_for(
            lambda: all(r.ended for r in running) or web.lines() - begun >= share,  # noqa: B023
            running[0].output,
            every=0.002,
        )
        time.sleep(rng.uniform(0.0, 0.02))
        for each in running:
            each.kill()
    done = [machine.start("run", "shop.py", "--until-idle") for machine in machines.all]
    for each in done:
        assert each.wait(300.0) in (0, 1), each.output
    check(machines, web, crashes=kills)


def test_with_one_variable_a_machine_shows_the_pages_and_events_of_the_other(
    machines: Machines, target: Callable[..., Target], project: Project
) -> None:
    web = target(pages=40, dead_share=0.0)
    machines.allow(web.port)
    first, second = machines.all
    first.push(*web.urls)
    second.run()
    assert first.total()["success"] == 40
    shown = first.good("pages", "show", web.urls[3])
    assert "T-3" in shown
    listed = json.loads(first.good("pages", "ls", "--json"))
    assert listed["total"]["pages"] == 40
    assert first.event(web.urls[3])["status"] == "success"
    assert not (first.dir / ".penstock" / "penstock.db").exists()
    first.push(web.urls[3], options=("--force",))
    first.run()  # the page is unchanged: no new row
    assert machines.sql(f"SELECT count(*) FROM public.{machines.namespace}") == [(40,)]
    assert json.loads(first.good("topics", "stats", "--json"))["topics"]
    for machine in machines.all:
        machine.doctor()
