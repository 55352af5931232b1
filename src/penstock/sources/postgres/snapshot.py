"""The rows that are in the tables when a slot is made, read by key in batches under one snapshot,
and which later inserts they include.
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
from penstock.sources.postgres.settings import CdcSettings, inline
from penstock.sources.postgres.slot import columns, key_columns, rows

_WHOLE = ("smallint", "integer", "bigint")


class Snapshot:
    """One connection in one transaction. Close the connection to end it."""

    def __init__(self, s: CdcSettings, connection: Any, exported: str | None) -> None:
        """`exported`: the snapshot of the slot's own moment; without it one of now is taken, which
        `part` describes.
        """
        self._s, self._connection = s, connection
        rows(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if exported is not None:
            rows(connection, "SET TRANSACTION SNAPSHOT %s", (exported,))
        rows(
            connection, "SET LOCAL idle_in_transaction_session_timeout = 0"
        )  # it lasts as long as the queue is full
        kind = (
            "pg_current_snapshot"
            if connection.server_version >= 130000
            else "txid_current_snapshot"
        )
        self._snapshot = rows(connection, f"SELECT {kind}()::text")[0][0]
        self._database = rows(connection, "SELECT current_database()")[0][
            0
        ]  # a server has several, with the same tables and keys
        self._exact = exported is not None

    def part(self, reading: Reading, upto: int) -> Part | None:
        """None: under the slot's own snapshot nothing is in both."""
        return None if self._exact else Part(reading.table, reading.after, self._snapshot, upto)

    def batches(
        self, start: Reading, system: str
    ) -> Iterator[tuple[list[Finding], Reading | None]]:
        """(rows, what comes next; None: nothing)."""
        after = start.after
        for number in range(start.table, len(self._s.tables)):
            table = self._s.tables[number]
            key = key_of(self._s, self._connection, number)
            names = columns(self._connection, table)
            order = ", ".join(
                f"r.{inline(name)}" for name, _ in key
            )  # not by what is selected, which is text
            told = ", ".join(f"{inline(name)}::text" for name, _ in names)
            keys = ", ".join(f"{inline(name)}::text" for name, _ in key)
            while True:
                where = "" if after is None else f"WHERE ({order}) > ({_placeholders(key)})"
                statement = f"SELECT {keys}, {told} FROM {table.inline} AS r {where} ORDER BY {order} LIMIT {BATCH}"
                found = rows(self._connection, statement, after or ())
                if not found:
                    break
                findings = []
                for row in found:
                    values = {
                        name: pgoutput.value(oid, text)
                        for (name, oid), text in zip(names, row[len(key) :], strict=True)
                    }
                    payload = {**values, "_cdc": {"op": "read", "table": table.label}}
                    id_ = mint(
                        "cdc", system, "snapshot", self._database, table.label, *row[: len(key)]
                    )
                    findings.append(
                        Finding(id=id_, cause=f"{table.label}: there at the start", payload=payload)
                    )
                after = list(found[-1][: len(key)])
                yield findings, Reading(number, after)
                if len(found) < BATCH:
                    break
            after = None
        yield [], None


def key_of(s: CdcSettings, connection: Any, number: int) -> list[tuple[str, str]]:
    """Raises SourceDown."""
    key = key_columns(s, connection, s.tables[number])
    if not key:
        raise SourceDown(
            f"source {s.source}: {s.tables[number].label} has no primary key, and what is there cannot be read in pieces without one",
            hint="ALTER TABLE … ADD PRIMARY KEY, or snapshot = false",
        )
    return key


class Included:
    """Which inserts of the log were read with the table already."""

    def __init__(self, s: CdcSettings, parts: Sequence[Part], connection: Any) -> None:
        self._parts, self._connection = parts, connection
        self._numbers = {table.label: number for number, table in enumerate(s.tables)}
        self._keys = [key_of(s, connection, number) for number in range(len(s.tables))]
        self._upto = max((part.upto for part in parts), default=0)

    def __call__(self, commit: int, xid: int, table: str, row: dict[str, Any]) -> bool:
        if (
            commit > self._upto
            or table not in self._numbers
            or not any(saw(part.snapshot, xid) for part in self._parts)
        ):
            return False
        behind = [*self._behind(self._numbers[table], row), False]
        return any(
            behind[i] and not behind[i + 1] and saw(part.snapshot, xid)
            for i, part in enumerate(self._parts)
        )

    def _behind(self, number: int, row: dict[str, Any]) -> list[bool]:
        """For each part, whether the row comes after its beginning."""
        key = self._keys[number]
        told = [f"\\x{row[name]}" if kind == "bytea" else str(row[name]) for name, kind in key]
        starts = [
            part.after for part in self._parts if part.table == number and part.after is not None
        ]
        after = iter(self._after(key, told, starts) if starts else ())
        return [
            next(after) if part.table == number and part.after is not None else number >= part.table
            for part in self._parts
        ]

    def _after(
        self, key: Sequence[tuple[str, str]], told: list[str], starts: list[list[str]]
    ) -> Sequence[bool]:
        if all(kind in _WHOLE for _, kind in key):
            return [tuple(map(int, told)) > tuple(map(int, start)) for start in starts]
        # The server alone knows its collations.
        asked = ", ".join(f"({_placeholders(key)}) > ({_placeholders(key)})" for _ in starts)
        return rows(
            self._connection,
            f"SELECT {asked}",
            [value for start in starts for value in (*told, *start)],
        )[0]


def upto_now(connection: Any) -> int:
    return pgoutput.lsn_of(rows(connection, "SELECT pg_current_wal_lsn()::text")[0][0])


def _placeholders(key: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"%s::{kind}" for _, kind in key)
