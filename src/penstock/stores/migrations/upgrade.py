"""Upgrade of one store: waits for other workers, makes a backup of a file, and migrates."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import apsw

from penstock.errors import StoreRefused, StoreUnavailable
from penstock.locks import FileLock
from penstock.private_files import create_file
from penstock.stores.migrations.base import Migration
from penstock.stores.migrations.other_workers import (
    OtherWorker,
    other_workers,
    refuse_other_workers,
)
from penstock.stores.migrations.plan import Plan, make_plan
from penstock.stores.migrations.runner import BATCH, Progress, migrate
from penstock.stores.sql import SqlStore
from penstock.stores.sqlite_connection import read_only

log = logging.getLogger("penstock")
POLL_INTERVAL = 0.2  # seconds between two checks of a lock or of other workers
BACKUP_PAGES = 4096  # pages of the database file that are copied between two progress reports


class Observer:
    """Receives the progress of an upgrade. This one ignores it."""

    def waiting(self, workers: Sequence[OtherWorker]) -> None:
        """Called before each wait for these workers."""

    def copied(self, pages: int, total: int) -> None:
        """Called after each part of the backup."""

    def progressed(self, progress: Progress) -> None:
        """Called after each transaction."""


def upgrade(
    store: SqlStore,
    workers_directory: Path,
    *,
    chosen: Sequence[Migration] | None = None,
    batch: int = BATCH,
    wait: bool = False,
    observer: Observer | None = None,
) -> Plan | None:
    """Migrate a store to the newest version. Return the plan that was carried out.

    Return None if the store is new. With `wait`, waits until workers of other releases have
    stopped. Otherwise raises StoreRefused if there are any. Also raises StoreRefused if a newer
    release has changed the store, or if the disk has no space for the backup.
    """
    observer = observer or Observer()
    while True:
        with _alone(store):
            plan = make_plan(store, chosen)
            if plan is None or not plan.missing:
                return plan
            found = other_workers(store, workers_directory)
            if not found and plan.backup is not None:
                _refuse_full_disk(plan)
                _back_up(store, Path(plan.backup), observer)
                # A worker may have started while the file was copied.
                found = other_workers(store, workers_directory)
            if not found:
                migrate(store, chosen, batch=batch, on_progress=observer.progressed)
                return plan
        if not wait:
            refuse_other_workers(store.path, found)
        observer.waiting(found)
        time.sleep(POLL_INTERVAL)


def upgrade_file(store: SqlStore, workers_directory: Path) -> None:
    """Migrate an SQLite file when a command opens it. Log one line if it was changed."""
    version = store.version()
    if version is None or version.is_current:
        return
    started = time.monotonic()
    plan = upgrade(store, workers_directory)
    if plan is not None and plan.missing:
        log.warning("%s", result_sentence(plan, time.monotonic() - started))


def result_sentence(plan: Plan, seconds: float) -> str:
    backup = f". The backup is {plan.backup}" if plan.backup else ""
    return (
        f"{plan.label} was migrated from store version {plan.found} to {plan.to} "
        f"in {seconds:.1f} s{backup}"
    )


@contextlib.contextmanager
def _alone(store: SqlStore) -> Iterator[None]:
    """Hold the lock file of migrations, if the store is a file.

    Two processes could run the steps together, but only one of them may make the backup.
    """
    if store.file is None:
        yield
        return
    lock = FileLock(f"{store.file}.migrating")
    waiting = False
    while not lock.try_acquire():
        if not waiting:
            log.warning("another process migrates %s. This command waits for it", store.path)
        waiting = True
        time.sleep(POLL_INTERVAL)
    try:
        yield
    finally:
        lock.release(remove=True)


def _refuse_full_disk(plan: Plan) -> None:
    free = shutil.disk_usage(Path(plan.label).parent).free
    if free < plan.disk:
        raise StoreRefused(
            f"the migration of {plan.label} needs about {plan.disk / 1e6:,.0f} MB of disk space "
            f"with its backup, and {free / 1e6:,.0f} MB are free",
            hint="free disk space, or move the state directory to a larger disk",
        )


def _back_up(store: SqlStore, to: Path, observer: Observer) -> None:
    """Copy the file with SQLite's backup. The copy has its name only when it is complete."""
    partial = to.with_name(to.name + ".part")
    try:
        partial.unlink(missing_ok=True)
        create_file(partial)
        source, target = read_only(store.path, 30.0), apsw.Connection(str(partial))
        try:
            # An incomplete copy is never used, so it needs no journal. See the fsync below.
            target.execute("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF").fetchall()
            with target.backup("main", source, "main") as copy:
                while not copy.done:
                    copy.step(BACKUP_PAGES)
                    observer.copied(copy.page_count - copy.remaining, copy.page_count)
        finally:
            target.close()
            source.close()
        for path, flags in ((partial, os.O_RDWR), (to.parent, os.O_RDONLY)):
            if path is not partial:
                partial.replace(to)
            fd = os.open(path, flags)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except (apsw.Error, OSError) as e:
        raise StoreUnavailable(
            f"the backup of {store.path} cannot be written to {to}: {e}",
            hint="free disk space or repair permissions, and run the command again",
        ) from e
