"""Reads the rows that tables have when a slot is created, in batches by key under one snapshot.

Also converts changes of the log into findings, without the inserts that these rows include.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import SourceDown
from penstock.model import mint
from penstock.ports import Finding
from penstock.sources.base import BATCH
from penstock.sources.postgres import pgoutput
from penstock.sources.postgres.position import Part, Reading, saw
from penstock.sources.postgres.settings import CdcSettings, TableName, as_text, inline
from penstock.sources.postgres.slot import KEY_COLUMNS, columns, rows

_INTEGER_TYPES = ("smallint", "integer", "bigint")


class Snapshot:
    """Transaction that reads existing rows. Close its connection to end it."""

    def __init__(self, s: CdcSettings, connection: Any, exported: str | None) -> None:
        """`exported` is the snapshot that the slot exported when it was created.

        If it is None, a snapshot is taken now. `parts` describes that snapshot.
        """
        self._s, self._connection = s, connection
        rows(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if exported is not None:
            rows(connection, "SET TRANSACTION SNAPSHOT %s", (exported,))
        # The transaction is idle while the queue is full.
        rows(connection, "SET LOCAL idle_in_transaction_session_timeout = 0")
        kind = (
            "pg_current_snapshot"
            if connection.server_version >= 130000
            else "txid_current_snapshot"
        )
        self._snapshot = rows(connection, f"SELECT {kind}()::text")[0][0]
        # Part of the id: several databases of a server may have the same tables and keys.
        self._database = rows(connection, "SELECT current_database()")[0][0]
        self._exact = exported is not None

    def parts(self, reading: Reading) -> list[Part]:
        """Describe the snapshot. The list is empty for the slot's own, whose rows the log lacks."""
        if self._exact:
            return []
        upto = pgoutput.lsn_of(rows(self._connection, "SELECT pg_current_wal_lsn()::text")[0][0])
        return [Part(reading.table, reading.after, self._snapshot, upto)]

    def batches(
        self, start: Reading, system: str
    ) -> Iterator[tuple[list[Finding], Reading | None]]:
        """Yield (findings, next position) for each batch. The last next position is None."""
        after = start.after
        for number in range(start.table, len(self._s.tables)):
            table = self._s.tables[number]
            key = key_of(self._s, self._connection, table)
            names = columns(self._connection, table)
            # Order by the columns of the table, because the selected values are text.
            order = ", ".join(f"r.{inline(name)}" for name, _ in key)
            selected = as_text(name for name, _ in (*key, *names))
            while True:
                where = "" if after is None else f"WHERE ({order}) > ({_placeholders(key)})"
                statement = (
                    f"SELECT {selected} FROM {table.inline} AS r {where}"
                    f" ORDER BY {order} LIMIT {BATCH}"
                )
                found = rows(self._connection, statement, after or ())
                if not found:
                    break
                id_parts = ("cdc", system, "snapshot", self._database, table.label)
                findings = [
                    Finding(
                        id=mint(*id_parts, *row[: len(key)]),
                        cause=f"{table.label}: there at the start",
                        payload={
                            **pgoutput.row_of(names, row[len(key) :]),
                            "_cdc": {"op": "read", "table": table.label},
                        },
                    )
                    for row in found
                ]
                after = list(found[-1][: len(key)])
                yield findings, Reading(number, after)
                if len(found) < BATCH:
                    break
            after = None
        yield [], None


def key_of(s: CdcSettings, connection: Any, table: TableName) -> list[tuple[str, str]]:
    """Return (name, type) of the key columns. Raises SourceDown if there is no primary key."""
    key = rows(connection, KEY_COLUMNS, (table.quoted,))
    if not key:
        raise SourceDown(
            f"source {s.source}: {table.label} has no primary key, "
            "so its existing rows cannot be read in batches",
            hint="ALTER TABLE … ADD PRIMARY KEY, or snapshot = false",
        )
    return key


class Included:
    """Decides whether an insert of the log was already read as an existing row."""

    def __init__(self, s: CdcSettings, parts: Sequence[Part], connection: Any) -> None:
        self._parts, self._connection = parts, connection
        self._numbers = {table.label: number for number, table in enumerate(s.tables)}
        self._keys = [key_of(s, connection, table) for table in s.tables]
        self._upto = max((part.upto for part in parts), default=0)

    def __call__(self, commit: int, xid: int, table: str, row: dict[str, Any]) -> bool:
        if (
            commit > self._upto
            or table not in self._numbers
            or not any(saw(part.snapshot, xid) for part in self._parts)
        ):
            return False
        after = [*self._is_after_starts(self._numbers[table], row), False]
        return any(
            after[i] and not after[i + 1] and saw(part.snapshot, xid)
            for i, part in enumerate(self._parts)
        )

    def _is_after_starts(self, number: int, row: dict[str, Any]) -> list[bool]:
        """Return for each part whether the row comes after the start of the part."""
        key = self._keys[number]
        values = [f"\\x{row[name]}" if kind == "bytea" else str(row[name]) for name, kind in key]
        starts = [
            part.after for part in self._parts if part.table == number and part.after is not None
        ]
        after = iter(self._is_greater(key, values, starts) if starts else ())
        return [
            next(after) if part.table == number and part.after is not None else number >= part.table
            for part in self._parts
        ]

    def _is_greater(
        self, key: Sequence[tuple[str, str]], values: list[str], starts: list[list[str]]
    ) -> Sequence[bool]:
        """Return for each start whether the key values are greater."""
        if all(kind in _INTEGER_TYPES for _, kind in key):
            return [tuple(map(int, values)) > tuple(map(int, start)) for start in starts]
        # Only the server can compare by its collations.
        compared = ", ".join(f"({_placeholders(key)}) > ({_placeholders(key)})" for _ in starts)
        compared_values = [value for start in starts for value in (*values, *start)]
        return list(rows(self._connection, f"SELECT {compared}", compared_values)[0])


OPERATIONS: dict[type, str] = {
    pgoutput.Insert: "insert",
    pgoutput.Update: "update",
    pgoutput.Delete: "delete",
}


def row_of_change(change: pgoutput.Insert | pgoutput.Update | pgoutput.Delete) -> dict[str, Any]:
    """Return the new row, or the columns of a deleted row that the log has."""
    return change.old if isinstance(change, pgoutput.Delete) else change.row


class Findings:
    """Converts changes of the log: which changes are used, their payload and id."""

    def __init__(self, s: CdcSettings, system: str, included: Included | None) -> None:
        """`included` decides which inserts were already read as existing rows."""
        self._operations, self._labels = s.operations, {table.label for table in s.tables}
        self._system, self._publication, self._included = system, s.publication, included

    def of(
        self,
        begin: pgoutput.Begin,
        index: int,
        change: pgoutput.Insert | pgoutput.Update | pgoutput.Delete,
    ) -> Finding | None:
        """Return the finding, or None if the change is not configured or is known already."""
        operation, label = OPERATIONS[type(change)], change.relation.label
        if operation not in self._operations or label not in self._labels:
            return None
        if (
            self._included is not None
            and isinstance(change, pgoutput.Insert)
            and self._included(begin.commit, begin.xid, label, change.row)
        ):
            return None
        lsn = pgoutput.lsn_text(begin.commit)
        meta: dict[str, Any] = {
            "op": operation,
            "table": label,
            "lsn": lsn,
            "index": index,
            "xid": begin.xid,
            "at": begin.at,
        }
        if isinstance(change, pgoutput.Update):
            if change.old is not None:
                meta["old"] = change.old
            if change.unchanged:
                meta["unchanged"] = list(change.unchanged)
        return Finding(
            # The index counts changes of this publication. In another publication the same number
            # means another change, so the publication is part of the id.
            id=mint("cdc", self._system, self._publication, lsn, str(index)),
            cause=f"{label}: {operation} at {lsn}",
            payload={**row_of_change(change), "_cdc": meta},
            at=begin.at,
        )


def _placeholders(key: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"%s::{kind}" for _, kind in key)
