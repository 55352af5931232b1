"""Values that describe a migration."""

from __future__ import annotations

import msgspec


class Sql(msgspec.Struct, frozen=True):
    """Statements in the shared dialect, separated by semicolons."""

    text: str


class Backfill(msgspec.Struct, frozen=True):
    """A statement that runs for ranges of an integer column: ?1 < key <= ?2."""

    table: str
    key: str
    sql: str


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """Changes from the version before `number` to `number`."""

    number: int
    title: str
    part: str
    steps: tuple[Sql | Backfill, ...]
