"""The version of a store: its rows in the table `part`, and the newest version of this release."""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Iterable
from importlib import import_module

from msgspec import Struct

from penstock.errors import StoreRefused
from penstock.stores.migrations.base import Migration
from penstock.stores.sql import Tx

FIRST = 1  # the version of a store of release 0.1.0, which has no row `store`
ROWS = "SELECT name, version FROM part"
# Rows of the table `part` that are not the name of a part. The last three exist only while a
# migration is incomplete: the version at its end, the completed steps of the current migration, and
# the last key of the current backfill.
STORE, TARGET, STEP, KEY = "store", "migration to", "migration step", "migration key"
_FILE = re.compile(r"m(\d{4})_\w+")


class StoreVersion(Struct, frozen=True):
    """The version of one store, and the progress of an incomplete migration."""

    number: int
    parts: frozenset[str]
    target: int | None = None  # None if no migration is incomplete
    step: int = 0
    key: int | None = None

    @property
    def is_current(self) -> bool:
        """True if this release can use the store."""
        return self.number == newest() and self.target is None


def parse(rows: Iterable[tuple[str, int]]) -> StoreVersion | None:
    """Return the version in the rows of the table `part`, or None for a new store."""
    found = dict(rows)
    if not found:
        return None
    return StoreVersion(
        found.pop(STORE, FIRST),
        target=found.pop(TARGET, None),
        step=found.pop(STEP, 0),
        key=found.pop(KEY, None),
        parts=frozenset(found),
    )


def read_version(tx: Tx) -> StoreVersion | None:
    """Return the version of the store, or None for a new store."""
    return parse(tx.execute(ROWS).fetchall())


@functools.cache
def migration_modules() -> dict[int, str]:
    """Return the module of each migration in this package, in the order of their numbers."""
    package = __name__.rpartition(".")[0]
    found = [
        (int(match[1]), f"{package}.{module.name}")
        for module in pkgutil.iter_modules(import_module(package).__path__)
        if (match := _FILE.fullmatch(module.name))
    ]
    return dict(sorted(found))


def newest() -> int:
    """Return the version of a store that this release creates."""
    return max(migration_modules(), default=FIRST)


def migrations() -> tuple[Migration, ...]:
    """Import all migrations. Only a migration needs them, so that other commands start faster."""
    return tuple(import_module(name).MIGRATION for name in migration_modules().values())


def refuse_newer(label: str, version: StoreVersion, known: int) -> None:
    """Raise StoreRefused if a newer release has changed the store."""
    found = max(version.number, version.target or 0)
    if found > known:
        raise StoreRefused(
            f"{label} has store version {found}, and this release knows only version {known}. "
            "A newer release has changed it",
            hint="run that release, or restore the backup that it made before the change",
        )


def refuse_other(label: str, version: StoreVersion, known: int) -> None:
    """Raise StoreRefused if the store has another version, or an incomplete migration."""
    refuse_newer(label, version, known)
    if version.number < known or version.target is not None:
        state = "its migration is not complete" if version.target else "an older release made it"
        raise StoreRefused(
            f"{label} has store version {version.number}, and this release needs version {known}: "
            f"{state}",
            hint="stop all workers, make a backup, and run `penstock migrate`",
        )
