"""Parts of a migration: SQL statements, and backfills that run in batches."""

from __future__ import annotations

from msgspec import Struct


class Sql(Struct, frozen=True):
    """Statements of shared SQL, separated by `;`. They run in one transaction."""

    text: str


class Backfill(Struct, frozen=True):
    """A statement that changes old rows of `table`, in batches of one transaction each.

    `key` is an indexed integer column. `sql` changes the rows with `?1` < key <= `?2`.
    """

    table: str
    key: str
    sql: str


class Migration(Struct, frozen=True, kw_only=True):
    """The change from store version `number - 1` to `number`.

    `part` is the name that the adapter gives to `SqlStore.part`. A store without that part has no
    such tables. Then no step runs, and only the version changes.
    """

    number: int
    title: str
    part: str
    steps: tuple[Sql | Backfill, ...] = ()
