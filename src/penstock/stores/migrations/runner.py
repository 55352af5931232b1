"""Runs the migrations of a store, step by step.

Each step is one transaction that also records the progress. So a migration continues after a crash,
and two processes can run it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from penstock.stores.migrations.base import Backfill, Migration
from penstock.stores.migrations.versions import (
    FIRST,
    KEY,
    STEP,
    STORE,
    TARGET,
    StoreVersion,
    migrations,
    read_version,
    refuse_newer,
)
from penstock.stores.sql import SqlStore, Tx

BATCH = 2000  # rows of a backfill in one transaction
_LOWEST = -(1 << 63)  # below every integer key
_SET = "INSERT INTO part VALUES(?,?) ON CONFLICT(name) DO UPDATE SET version=excluded.version"


class Progress(Struct, frozen=True):
    """One committed transaction of a migration."""

    migration: Migration
    step: int  # index of the step
    rows: int = 0  # rows that a backfill has changed in this transaction
    done: bool = False  # True if the migration has ended


def migrate(
    store: SqlStore,
    chosen: Sequence[Migration] | None = None,
    *,
    batch: int = BATCH,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Run all missing migrations. Does nothing if the store is new or has the newest version.

    Raises StoreRefused if a newer release has changed the store.
    """
    numbered = migrations() if chosen is None else tuple(chosen)
    while (done := store.write_now(lambda tx: _advance(store, tx, numbered, batch))) is not None:
        on_progress(done)


def _advance(store: SqlStore, tx: Tx, numbered: Sequence[Migration], batch: int) -> Progress | None:
    """Run the next step in this transaction. Return None if no migration is missing."""
    version = read_version(tx)
    if version is None:
        return None
    last = max((m.number for m in numbered), default=FIRST)
    refuse_newer(store.path, version, last)
    migration = next((m for m in numbered if m.number > version.number), None)
    if migration is None:
        return None
    if version.target != last:
        # Release 0.1.0 compares the versions of its parts, so it does not open the store from now.
        own = (STORE, TARGET, STEP, KEY)
        tx.execute("UPDATE part SET version=? WHERE name NOT IN (?,?,?,?)", (last, *own))
        tx.execute(_SET, (TARGET, last))
    steps = migration.steps if migration.part in version.parts else ()
    rows, ended = 0, True
    if version.step < len(steps):
        step = steps[version.step]
        if isinstance(step, Backfill):
            rows, ended = _backfill(tx, step, version, batch)
        else:
            for statement in store.statements(step.text):
                tx.execute(statement).fetchall()
    if ended:
        tx.execute("DELETE FROM part WHERE name=?", (KEY,))
        tx.execute(_SET, (STEP, version.step + 1))
    done = ended and version.step + 1 >= len(steps)
    if done:
        tx.execute(_SET, (STORE, migration.number))
        tx.execute("DELETE FROM part WHERE name=?", (STEP,))
        if migration.number == last:
            tx.execute("DELETE FROM part WHERE name=?", (TARGET,))
    return Progress(migration, version.step, rows, done)


def _backfill(tx: Tx, step: Backfill, version: StoreVersion, batch: int) -> tuple[int, bool]:
    """Change the next rows. Return their number, and True if no row is left."""
    after = _LOWEST if version.key is None else version.key
    rows, upper = tx.execute(
        f"SELECT count(*), max(k) FROM (SELECT {step.key} AS k FROM {step.table}"
        f" WHERE {step.key}>? ORDER BY {step.key} LIMIT ?) t",
        (after, batch),
    ).get
    if rows:
        tx.execute(step.sql, (after, upper)).fetchall()
        tx.execute(_SET, (KEY, upper))
    return rows, rows < batch
