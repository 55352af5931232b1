"""Plan of a migration: the missing steps, with an estimate of time and disk space."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from penstock.stores.migrations.base import Backfill, Migration, Sql
from penstock.stores.migrations.versions import FIRST, migrations, newest, refuse_newer
from penstock.stores.sql import SqlStore

# Rough rates of a small server. The estimate is an order of magnitude, not a promise.
ROWS_PER_SECOND = 50_000
BYTES_PER_SECOND = 100e6
# A table whose rows a statement reads or changes. ADD COLUMN and CREATE TABLE do not touch rows.
_TABLE = re.compile(
    r"\bCREATE (?:UNIQUE )?INDEX (?:IF NOT EXISTS )?\w+ ON (\w+)|\bUPDATE (\w+)|\bFROM (\w+)",
    re.IGNORECASE,
)


class Plan(Struct, frozen=True):
    """Migrations that a store needs. `missing` is empty if it has the newest version."""

    label: str
    found: int  # the version now
    to: int
    missing: tuple[Migration, ...]
    rows: int = 0  # rows that the steps read or change
    backfilled: int = 0  # rows that backfills change, for a progress bar
    disk: int = 0  # bytes, with the backup
    seconds: float = 0.0
    backup: str | None = None  # the file to which the store is copied first


def make_plan(store: SqlStore, chosen: Sequence[Migration] | None = None) -> Plan | None:
    """Return the plan for a store, or None if it has no tables yet.

    Raises StoreRefused if a newer release has changed the store.
    """
    version = store.version()
    if version is None:
        return None
    to = newest() if chosen is None else max((m.number for m in chosen), default=FIRST)
    refuse_newer(store.path, version, to)
    if version.number == to:
        return Plan(store.path, to, to, ())
    numbered = migrations() if chosen is None else chosen
    missing = tuple(m for m in numbered if m.number > version.number)
    rows = disk = backfilled = 0
    for step in (s for m in missing if m.part in version.parts for s in m.steps):
        for table in _tables(step):
            table_rows, table_bytes = store.table_size(table)
            rows, disk = rows + table_rows, disk + table_bytes
            backfilled += table_rows if isinstance(step, Backfill) else 0
    copied, backup = 0, None
    # The backup of an incomplete migration was made before its first step.
    if store.file is not None and version.target is None:
        copied = sum(f.stat().st_size for f in _files(store) if f.exists())
        backup = f"{store.path}.before-v{to}"
    return Plan(
        store.path,
        version.number,
        to,
        missing,
        rows=rows,
        backfilled=backfilled,
        disk=disk + copied,
        seconds=rows / ROWS_PER_SECOND + copied / BYTES_PER_SECOND,
        backup=backup,
    )


def _tables(step: Sql | Backfill) -> list[str]:
    """Return a table for each time that the step reads or changes all its rows."""
    if isinstance(step, Backfill):
        return [step.table]
    return [next(filter(None, names)) for names in _TABLE.findall(step.text)]


def _files(store: SqlStore) -> list[Path]:
    assert store.file is not None
    return [store.file, Path(f"{store.file}-wal")]
