"""A PostgreSQL change stream under SIGKILL: every inserted row becomes exactly one event."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import signal
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.e2e.harness import Project, wait_for
from tests.servers import Handle

pytestmark = pytest.mark.server("postgres")
KILLS, TRANSACTIONS, ROWS = 10, 100, 100


class Database:
    """A new database of this test, with a table of requests."""

    def __init__(self, url: str) -> None:
        self.name = f"test_{secrets.token_hex(6)}"
        self.url = url.rpartition("/")[0] + "/" + self.name
        self._server = url
        self._admin = psycopg.connect(url, autocommit=True)
        self._admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.name)))
        self.db = psycopg.connect(self.url, autocommit=True)
        self.db.execute("CREATE TABLE scrape_requests(id bigserial PRIMARY KEY, url text NOT NULL)")

    def reconnect(self) -> None:
        self._admin.close()
        self.db.close()
        self._admin, self.db = (
            psycopg.connect(self._server, autocommit=True),
            psycopg.connect(self.url, autocommit=True),
        )

    def slots(self) -> list[tuple[Any, ...]]:
        return self._admin.execute(
            "SELECT slot_name, active FROM pg_replication_slots WHERE database=%s", (self.name,)
        ).fetchall()

    def insert(self, start: int, rows: int) -> None:
        with self.db.transaction():
            self.db.execute(
                (
                    "INSERT INTO scrape_requests(url) SELECT 'https://shop.test/p/' || n "
                    "FROM generate_series(%s::int, %s::int) n"
                ),
                (start, start + rows - 1),
            )

    def close(self) -> None:
        self.db.close()
        wait_for(lambda: not any(active for _, active in self.slots()), "no reader uses the slot")
        self._admin.execute(
            (
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
                "WHERE database=%s"
            ),
            (self.name,),
        )
        self._admin.execute(
            sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(self.name))
        )
        self._admin.close()


@pytest.fixture
def database(server: Callable[[str], Handle], project: Project) -> Iterator[Database]:
    database = Database(server("postgres").url)
    yield database
    project.close()  # end all readers
    database.close()


def pipeline(database: Database) -> str:
    url = database.url.replace("postgres:", "postgres+cdc:")
    return (
        'from penstock import Pipeline\n\nshop = Pipeline("shop")\n'
        "shop.extract(name='product')(lambda page: None)\n"
        f'shop.source("{url}", name="asked")\nshop.sink("jsonl:products.jsonl")\n'
    )


def accepted(project: Project) -> int:
    """Count the accepted events while another process writes.

    Return 0 if the ledger does not exist yet, or while a new process opens a killed one's ledger.
    """
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(
            sqlite3.connect(f"file:{project.dir}/.penstock/penstock.db?mode=ro", uri=True)
        ) as ledger,
    ):
        return int(ledger.execute("SELECT count(*) FROM event").fetchone()[0])
    return 0


def test_ten_thousand_rows_are_ten_thousand_events_with_a_reader_killed_ten_times(
    project: Project, database: Database
) -> None:
    rng = random.Random(6)
    project.write("shop.py", pipeline(database))
    project.set(namespace=database.name)
    run = ("run", "shop.py", "--role", "source")
    reader = project.start(*run)
    wait_for(
        lambda: reader.ended or any(active for _, active in database.slots()),
        "the slot is read",
        120,
    )
    written = killed = 0
    for round_ in range(KILLS):
        for _ in range(TRANSACTIONS // KILLS):
            database.insert(written + 1, ROWS)
            written += ROWS
        goal = round_ * 1000 + rng.randrange(1, 1000)
        wait_for(
            lambda reader=reader, goal=goal: reader.ended or accepted(project) >= goal,
            f"{goal} events",
            120,
            0.001,
        )
        assert not reader.ended, reader.output
        reader.kill()
        killed += 1
        reader = project.start(*run)
    wait_for(lambda: reader.ended or accepted(project) >= written, "all of them", 180, 0.05)
    wait_for(
        lambda: (
            json.loads(project.good("sources", "ls", "--json", "-p", "shop.py"))["sources"][0][
                "backlog"
            ]
            == 0
        ),
        "the backlog is empty",
        120,
        0.5,
    )
    reader.signal(signal.SIGTERM)
    assert reader.wait() == 0, reader.output
    assert (killed, written) == (KILLS, TRANSACTIONS * ROWS)
    with sqlite3.connect(f"file:{project.dir}/.penstock/penstock.db?mode=ro", uri=True) as ledger:
        assert ledger.execute(
            "SELECT count(*), count(DISTINCT url), count(DISTINCT id) FROM event"
        ).fetchone() == (written, written, written)
    ledger.close()
    state = json.loads(project.good("sources", "ls", "--json", "-p", "shop.py"))["sources"][0]
    assert state["events"] == written
    assert state["error"] is None
    assert project.total()["accepted"] == written


def test_a_replication_slot_is_created_listed_and_dropped_by_command(
    project: Project, database: Database
) -> None:
    project.write("shop.py", pipeline(database))
    project.write("penstock.toml", f'pipeline = "shop.py"\nnamespace = "{database.name}"\n')
    assert f"asked: slot {database.name}_asked keeps changes from" in project.good(
        "sources", "slots", "create"
    )
    database.insert(1, 3)
    (own, *_) = json.loads(project.good("sources", "slots", "ls", "--json"))["slots"]
    assert (own["name"], own["source"], own["active"]) == (f"{database.name}_asked", "asked", False)
    assert own["behind"] > 0
    assert "no reader" in project.good("sources", "slots", "ls")
    shown = project.good("sources", "test", "asked")
    assert "preview: 3 events would be published" in shown
    reader = project.start("run", "--role", "source")
    wait_for(
        lambda: reader.ended or any(active for _, active in database.slots()),
        "the slot is read",
        120,
    )
    wait_for(
        lambda: reader.ended or accepted(project) == 3,
        "the rows inserted after the slot was created",
    )
    reader.signal(signal.SIGTERM)
    assert reader.wait() == 0, reader.output
    assert "its slot is dropped" in project.good("sources", "slots", "drop", "asked")
    assert not database.slots()
    again = project.penstock("sources", "slots", "drop", "asked")
    assert (again.code, "there was no slot" in again.out) == (5, True)
    unknown = project.penstock("sources", "slots", "drop", "other")
    assert unknown.code == 2
    assert "there are: asked" in unknown.err


def test_a_reader_continues_after_its_database_server_was_killed_and_restarted(
    project: Project, database: Database, server: Callable[[str], Handle]
) -> None:
    project.write("shop.py", pipeline(database))
    project.set(namespace=database.name)
    reader = project.start("run", "shop.py", "--role", "source")
    wait_for(
        lambda: reader.ended or any(active for _, active in database.slots()),
        "the slot is read",
        120,
    )
    database.insert(1, 500)
    server("postgres").kill()
    wait_for(
        lambda: reader.ended or "it is tried again" in reader.output,
        "the reader logs that the server is down",
    )
    server("postgres").start()
    database.reconnect()
    database.insert(501, 500)
    wait_for(lambda: reader.ended or accepted(project) == 1000, "all of them", 180, 0.05)
    reader.signal(signal.SIGTERM)
    assert reader.wait() == 0, reader.output
    assert "Traceback" not in reader.output
    assert project.total()["accepted"] == 1000


def test_rows_of_a_polled_table_are_each_one_event_although_the_reader_is_killed(
    project: Project, database: Database
) -> None:
    database.db.execute("ALTER TABLE scrape_requests ADD COLUMN penstock_taken_at timestamptz")
    project.write("shop.py", pipeline(database).replace("postgres+cdc:", "postgres+table:"))
    run = ("run", "shop.py", "--role", "source")
    database.insert(1, 5000)
    for goal in (1, 2500, 4001):
        reader = project.start(*run)
        wait_for(
            lambda reader=reader, goal=goal: reader.ended or taken(database) >= goal,
            f"{goal} rows",
            120,
            0.001,
        )
        assert not reader.ended, reader.output
        reader.kill()
    database.insert(5001, 1000)
    reader = project.start(*run)
    wait_for(lambda: reader.ended or taken(database) == 6000, "all of them", 180, 0.05)
    reader.signal(signal.SIGTERM)
    assert reader.wait() == 0, reader.output
    with sqlite3.connect(f"file:{project.dir}/.penstock/penstock.db?mode=ro", uri=True) as ledger:
        assert ledger.execute("SELECT count(*), count(DISTINCT url) FROM event").fetchone() == (
            6000,
            6000,
        )
    ledger.close()


def taken(database: Database) -> int:
    found = database.db.execute(
        "SELECT count(*) FROM scrape_requests WHERE penstock_taken_at IS NOT NULL"
    ).fetchone()
    assert found is not None
    return int(found[0])
