"""An old store with three migrations, and a child process that kills itself while it migrates.

Run as `python -m tests.migrating STORE MOMENT`. STORE is an SQLite file, or URL#NAMESPACE of
PostgreSQL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from penstock.stores.migrations.base import Backfill, Migration, Sql
from penstock.stores.migrations.runner import Progress
from penstock.stores.migrations.upgrade import Observer, upgrade
from penstock.stores.migrations.versions import ROWS
from penstock.stores.sql import SqlStore, Tx
from penstock.stores.sqlite import Database

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
ROWS_BEFORE, BATCH = 50, 10
# A repeated or missed batch of this backfill leaves another number in its rows.
MIGRATIONS = (
    Migration(
        number=2,
        title="count the visits of each item",
        part="items",
        steps=(
            Sql("ALTER TABLE item ADD COLUMN visits INTEGER NOT NULL DEFAULT 0"),
            Backfill("item", "n", "UPDATE item SET visits=visits+n WHERE n>?1 AND n<=?2"),
            Sql("CREATE TABLE place(name TEXT PRIMARY KEY); CREATE INDEX visited ON item(visits)"),
        ),
    ),
    Migration(number=3, title="change absent tables", part="other", steps=(Sql("oops"),)),
    Migration(
        number=4,
        title="add a place",
        part="items",
        steps=(Sql("INSERT INTO place VALUES('first; -- place')"),),
    ),
)
TRANSACTIONS = 10  # three SQL steps, five full batches and an empty one, and one migration to skip


def open_store(place: str) -> SqlStore:
    url, _, namespace = place.partition("#")
    if not namespace:
        return Database(place)
    from penstock.stores.postgres.store import PostgresStore

    return PostgresStore(url, namespace=namespace)


def make_old(store: SqlStore) -> None:
    """Create the tables of a store without a version row, as release 0.1.0 does."""
    store.part("items", "CREATE TABLE item(n INTEGER PRIMARY KEY, name TEXT NOT NULL)")

    def fill(tx: Tx) -> None:
        tx.execute("DELETE FROM part WHERE name='store'")
        tx.execute("UPDATE part SET version=1")
        tx.executemany("INSERT INTO item VALUES(?,'x')", [(3 * n,) for n in range(ROWS_BEFORE)])

    store.write_now(fill)


def check_migrated(store: SqlStore) -> None:
    def check(tx: Tx) -> None:
        assert dict(tx.execute(ROWS).fetchall()) == {"items": 4, "store": 4}
        rows = tx.execute("SELECT n, visits FROM item ORDER BY n").fetchall()
        assert rows == [(3 * n, 3 * n) for n in range(ROWS_BEFORE)]
        assert tx.execute("SELECT name FROM place").fetchall() == [("first; -- place",)]

    store.read_now(check)


def run_killed(place: str, moment: int) -> None:
    """Migrate in a child process that is killed at this moment: before or after a COMMIT."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.migrating", place, str(moment)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def _main(place: str, moment: int) -> None:
    store: Any = open_store(place)
    transaction, after_commit = moment // 2, moment % 2
    write_now, count = store.write_now, 0

    def counted(work: Callable[[Tx], T]) -> T:
        nonlocal count
        count += 1

        def killed(tx: Tx) -> T:
            result = work(tx)
            if count > transaction and not after_commit:
                tx.execute("SELECT count(*) FROM part").fetchall()  # the server has the statements
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        found: T = write_now(killed)
        if count > transaction:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    store.write_now = counted
    migrated_steps(store)


def migrated_steps(store: SqlStore) -> list[Progress]:
    class Steps(Observer):
        def progressed(self, progress: Progress) -> None:
            steps.append(progress)

    steps: list[Progress] = []
    upgrade(store, Path("no-workers"), chosen=MIGRATIONS, batch=BATCH, observer=Steps())
    return steps


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
