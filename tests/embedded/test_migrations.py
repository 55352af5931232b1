"""Migrations of an SQLite store: progress, resumption after a kill, and refusals."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from tests.migrating import (
    MIGRATIONS,
    ROWS_BEFORE,
    TRANSACTIONS,
    check_migrated,
    make_old,
    migrated_steps,
    run_killed,
)

from penstock.errors import StoreRefused
from penstock.locks import WorkerLock
from penstock.stores import migrations as package
from penstock.stores.migrations.runner import migrate
from penstock.stores.migrations.upgrade import Observer, upgrade
from penstock.stores.migrations.versions import migration_modules, migrations, newest
from penstock.stores.sqlite import Database


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = str(tmp_path / "a.db")
    db = Database(path)
    make_old(db)
    db.close_now()
    return path


def test_migrations_have_consecutive_numbers_and_the_newest_is_the_last() -> None:
    files = sorted(path.stem for path in Path(package.__path__[0]).glob("m*.py"))
    numbers = [int(re.fullmatch(r"m(\d{4})_\w+", name)[1]) for name in files]  # type: ignore[index]
    assert numbers == list(range(2, 2 + len(numbers)))
    assert list(migration_modules()) == [m.number for m in migrations()] == numbers
    assert newest() == 1 + len(numbers)
    assert all(m.title and m.part for m in migrations())


def test_a_store_without_a_version_gets_every_migration_in_order(file: str) -> None:
    db = Database(file)
    steps = migrated_steps(db)
    assert [(s.migration.number, s.step, s.rows) for s in steps] == [
        (2, 0, 0),
        *[(2, 1, 10)] * 5,
        (2, 1, 0),
        (2, 2, 0),
        (3, 0, 0),
        (4, 0, 0),
    ]
    assert len(steps) == TRANSACTIONS
    assert sum(s.rows for s in steps) == ROWS_BEFORE
    check_migrated(db)
    assert migrated_steps(db) == []
    db.close_now()


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 7, 9, 12, 14, 15, 16, 18])
def test_a_migration_that_was_killed_resumes(file: str, moment: int) -> None:
    run_killed(file, moment)
    db = Database(file)
    assert len(migrated_steps(db)) == TRANSACTIONS - (moment + 1) // 2
    check_migrated(db)
    db.close_now()
    # The backup has the state before the first step, not the state after the kill.
    copy = Database(f"{file}.before-v4")
    version = copy.version()
    assert version is not None
    assert (version.number, version.target) == (1, None)
    size, _ = copy.table_size("item")
    assert size == ROWS_BEFORE
    copy.close_now()


def test_an_incomplete_migration_is_refused_by_every_release(file: str) -> None:
    run_killed(file, 5)
    db = Database(file)
    with pytest.raises(StoreRefused, match="store version"):
        db.part("items", "")
    versions = dict(db.read_now(lambda tx: tx.execute("SELECT * FROM part").fetchall()))
    assert versions["items"] == 4  # release 0.1.0 compares this number with 1
    with pytest.raises(StoreRefused, match="newer release"):
        migrate(db, MIGRATIONS[:2])
    migrate(db, MIGRATIONS)
    check_migrated(db)
    db.close_now()


def test_several_processes_can_migrate_together(file: str) -> None:
    stores = [Database(file) for _ in range(3)]
    threads = [threading.Thread(target=migrated_steps, args=(db,)) for db in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for db in stores:
        check_migrated(db)
        db.close_now()


def test_a_worker_that_starts_during_the_backup_refuses_the_migration(
    file: str, tmp_path: Path
) -> None:
    lock = WorkerLock(tmp_path / "workers", "shop-1-17-0a1b2c")

    class StartWorker(Observer):
        def copied(self, pages: int, total: int) -> None:
            assert lock.acquire()

    db = Database(file)
    before = db.version()
    with pytest.raises(StoreRefused, match="pid 17 on host shop-1"):
        upgrade(db, tmp_path / "workers", chosen=MIGRATIONS, observer=StartWorker())
    assert db.version() == before
    lock.release()
    upgrade(db, tmp_path / "workers", chosen=MIGRATIONS)
    check_migrated(db)
    db.close_now()


def test_a_new_store_has_the_newest_version_and_needs_no_migration(tmp_path: Path) -> None:
    db = Database(str(tmp_path / "a.db"))
    migrate(db)
    assert db.read_now(lambda tx: tx.execute("SELECT * FROM part").fetchall()) == []
    db.part("items", "CREATE TABLE item(n INTEGER PRIMARY KEY)")
    rows = db.read_now(lambda tx: tx.execute("SELECT * FROM part").fetchall())
    assert dict(rows) == {"items": newest(), "store": newest()}
    migrate(db)
    db.close_now()
