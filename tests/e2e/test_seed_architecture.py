"""PostgreSQL → Debezium → Kafka → Penstock → Kafka → JDBC sink → PostgreSQL, under SIGKILL."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import Project, Target, wait_for
from tests.e2e.layouts import lay_out
from tests.servers import Handle

ROWS = 1000
BATCH = 20  # rows of one INSERT
KILLS = ("workers", "connect", "workers", "workers", "connect", "workers")
PIPELINE = """
from penstock import Page, Pipeline

shop = Pipeline({name!r})
shop.source("kafka://{broker}/{requests}", connect={source!r})
shop.sink("kafka://{broker}/{products}?key=sku", connect={sink!r})

@shop.extract(match="*/p/*", key="sku")
def product(page: Page):
    yield {{
        "sku": page.css("[data-sku]::attr(data-sku)").get(),
        "title": page.css("h1::text").get(),
        "priority": page.event.priority,
        "asked": page.event.data["id"],
    }}
"""


class Estate:
    """Two tables with two topics between them, under names that only this test uses."""

    def __init__(self, project: Project, server: Callable[[str], Handle]) -> None:
        self.id = "s" + uuid.uuid4().hex[:8]
        self.project, self.database = project, server("postgres").url
        self.requests, self.products = f"{self.id}_requests", f"{self.id}_products"
        project.set(connect_url=server("connect").url)
        self.sql(
            f"CREATE TABLE {self.requests} (id bigserial PRIMARY KEY, url text NOT NULL, asked "
            "timestamptz NOT NULL DEFAULT clock_timestamp())"
        )
        source = {
            "kind": "debezium-postgres",
            "database": self.database,
            "table": f"public.{self.requests}",
            "route": {"priority": "high"},
            "partitions": 4,
        }
        sink = {"kind": "jdbc-postgres", "database": self.database, "table": self.products}
        broker, topic = (
            server("kafka").url.removeprefix("kafka://"),
            f"{self.id}.public.{self.requests}",
        )
        text = PIPELINE.format(
            name=self.id,
            broker=broker,
            requests=topic,
            products=self.products,
            source=source,
            sink=sink,
        )
        project.write("shop.py", text)

    def sql(self, statement: str, *args: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database, autocommit=True) as connection:
            cursor = connection.execute(statement, *args)
            return cursor.fetchall() if cursor.description else []

    def insert(self, urls: list[str]) -> None:
        self.sql(f"INSERT INTO {self.requests} (url) SELECT * FROM unnest(%s::text[])", (urls,))

    def rows(self) -> int:
        try:
            return int(self.sql(f"SELECT count(*) FROM {self.products}")[0][0])
        except psycopg.errors.UndefinedTable:
            return 0

    def close(self) -> None:
        self.project.penstock("connect", "delete", "--all", "--yes", "--pipeline", self.id)
        slots = f"FROM pg_replication_slots WHERE slot_name LIKE '%{self.id}%'"
        wait_for(lambda: not self.sql(f"SELECT 1 {slots} AND active"), "the slot is free", 180, 0.2)
        self.sql(f"SELECT pg_drop_replication_slot(slot_name) {slots}")
        self.sql(f"DROP TABLE IF EXISTS {self.requests}, {self.products}")


@pytest.fixture
def estate(project: Project, server: Callable[[str], Handle]) -> Iterator[Estate]:
    made = Estate(project, server)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.server("postgres", "kafka", "connect")
@pytest.mark.parametrize("layout", ["embedded", "kafka"])
def test_a_thousand_rows_are_a_thousand_results_with_killed_connect_and_workers(
    project: Project,
    estate: Estate,
    target: Callable[..., Target],
    server: Callable[[str], Handle],
    seed: int,
    layout: str,
) -> None:
    rng = random.Random(seed)
    lay_out(project, layout, server, quick=True)
    project.set(lease="3s", fetch_concurrency="16", fetch_prefetch="32")
    web = target(pages=ROWS, delay=0.02)
    project.good("connect", "apply", "shop.py")
    run = ("run", "shop.py", "--workers", "2", "--log-level", "warning")
    running = project.start(*run)
    urls, kills = list(web.urls), list(KILLS)
    rng.shuffle(urls)
    at = sorted(rng.sample(range(2, ROWS // BATCH - 2), len(kills)))
    for n in range(0, ROWS, BATCH):
        estate.insert(urls[n : n + BATCH])
        if at and n // BATCH >= at[0]:
            at.pop(0)
            if kills.pop(0) == "connect":
                server("connect").kill()
                estate.insert([])  # the replication slot keeps the WAL while no connector reads it
                server("connect").start()
            else:
                done = web.lines()
                wait_for(
                    lambda done=done, all_=n + BATCH: web.lines() > done or done >= all_,
                    f"a request is sent: {running.output}",
                    240,
                    0.005,
                )
                running.kill()
                running = project.start(*run)
        time.sleep(rng.uniform(0, 0.05))  # random times between inserts
    assert not kills
    wait_for(lambda: estate.rows() >= ROWS, f"{ROWS} result rows: {running.output}", 400, 0.25)
    wait_for(lambda: project.total()["success"] == ROWS, f"all ended: {running.output}", 240, 0.5)
    assert estate.rows() == ROWS
    found = estate.sql(
        f"SELECT p.sku, p.priority, p.asked, r.url FROM {estate.products} p "
        f"JOIN {estate.requests} r ON r.id = p.asked"
    )
    assert len(found) == ROWS
    assert all(
        sku == "T-" + url.rpartition("/p/")[2] and priority == 0 for sku, priority, _, url in found
    )
    total = project.total()
    assert (total["accepted"], total["success"], total["dead"], total["duplicate"]) == (
        ROWS,
        ROWS,
        0,
        0,
    ), total
    asked = web.asked()
    assert set(asked) == {f"/p/{n}" for n in range(ROWS)}
    assert max(asked.values()) <= 1 + KILLS.count("workers"), asked.most_common(3)
    states = json.loads(project.good("connect", "status", "--pipeline", estate.id, "--json"))[
        "connectors"
    ]
    assert [(c["state"], [t["state"] for t in c["tasks"]]) for c in states] == [
        ("RUNNING", ["RUNNING"])
    ] * 2
    assert project.good("connect", "apply", "shop.py").endswith(
        "no connector differs, so none was sent\n"
    )
