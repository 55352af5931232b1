"""Source for unread rows of a PostgreSQL table, for servers without logical decoding.

Rows are locked while they are read, and marked as taken only when the ledger has accepted them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import SourceDown
from penstock.model import mint
from penstock.ports import Batch, Finding
from penstock.sources.base import BATCH, BaseSource, SourceContext
from penstock.sources.postgres import pgoutput
from penstock.sources.postgres.settings import TableSettings, as_text, identifier, inline
from penstock.sources.postgres.slot import KEY_COLUMNS, error_text
from penstock.stores.postgres.url import OLDEST, refusal

POLL_INTERVAL = 1.0  # seconds between two polls, if `every` is not set
# Seconds of idle time after which an empty batch is yielded, even if `every` is longer.
IDLE_REPORT_INTERVAL = 2.0
# Values are read as text, so the session sets their text format. There is no timeout, because rows
# stay locked while the queue is full.
SESSION = {
    "datestyle": "ISO",
    "timezone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "idle_in_transaction_session_timeout": "0",
    "statement_timeout": "0",
}
_COLUMNS = (
    "SELECT attname, atttypid::bigint, format_type(atttypid, atttypmod) FROM pg_attribute"
    " WHERE attrelid=to_regclass(%s) AND attnum>0 AND NOT attisdropped ORDER BY attnum"
)


class TableSource(BaseSource):
    """Source that polls the table until it is stopped.

    `every` is the time between two polls of a table without unread rows. If `listen` is set, a
    NOTIFY starts the next poll immediately.
    """

    def __init__(self, spec: SourceSpec, context: SourceContext, settings: TableSettings) -> None:
        super().__init__(spec, context)
        self.settings = settings
        self._poll_interval, self.every = spec.every or POLL_INTERVAL, None

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        try:
            async with await self._connect() as connection:
                unread = await _UnreadRows.find(self.settings, connection)
                if self.settings.listen:
                    await connection.execute(f"LISTEN {identifier(self.settings.listen)}")
                while True:
                    await connection.execute("BEGIN")
                    rows = await unread.select(BATCH, lock=True)
                    if rows:
                        # A row may have several megabytes of JSON.
                        findings = await asyncio.to_thread(unread.findings, rows)
                        yield Batch(findings=findings)
                        await unread.take(rows)
                    await connection.execute("COMMIT")
                    if len(rows) == BATCH:
                        continue
                    due = time.monotonic() + self._poll_interval
                    yield Batch(idle=True, lag=0.0, backlog=0)
                    while (left := due - time.monotonic()) > 0:
                        if await _notified(connection, min(left, IDLE_REPORT_INTERVAL)):
                            break
                        if left > IDLE_REPORT_INTERVAL:
                            yield Batch(idle=True, lag=0.0, backlog=0)
        except psycopg.Error as e:
            raise self._error(e) from None

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        try:
            async with await self._connect() as connection:
                unread = await _UnreadRows.find(self.settings, connection)
                return unread.findings(await unread.select(limit, lock=False))
        except psycopg.Error as e:
            raise self._error(e) from None

    def describe(self, cursor: bytes | None) -> str:
        return "at the rows that are not taken"

    async def _connect(self) -> AsyncConnection[tuple[Any, ...]]:
        """Connect to the server. Raises SourceDown."""
        try:
            connection = await AsyncConnection.connect(
                autocommit=True, **self.settings.address.options
            )
        except psycopg.Error as e:
            error = refusal(e, self.settings.address, "")
            raise SourceDown(f"source {self.name}: {error.message}", hint=error.hint) from None
        try:
            if connection.info.server_version < OLDEST:
                raise SourceDown(
                    f"source {self.name}: {self.settings.address.label} runs PostgreSQL "
                    f"{connection.info.server_version // 10000}",
                    hint=f"Penstock needs {OLDEST // 10000} or newer",
                )
            await connection.execute(
                "; ".join(f"SET {name} = '{value}'" for name, value in SESSION.items())
            )
        except BaseException:
            await connection.close()
            raise
        return connection

    def _error(self, e: psycopg.Error) -> SourceDown:
        s, text = self.settings, error_text(self.settings, e)
        if e.sqlstate == "42501":
            user, right = (
                s.address.options.get("user") or "the user",
                "DELETE" if s.done == "delete" else "UPDATE",
            )
            return SourceDown(
                f"source {self.name}: {text}",
                hint=f"as its owner: GRANT SELECT, {right} ON {s.table.quoted} TO {user}",
            )
        return SourceDown(
            f"source {self.name}: {s.address.label}: {text}", hint="it is retried automatically"
        )


class _UnreadRows:
    """Unread rows of the table."""

    def __init__(
        self,
        s: TableSettings,
        connection: AsyncConnection[tuple[Any, ...]],
        key: list[str],
        columns: list[tuple[str, int, str]],
        server: str,
    ) -> None:
        self._s, self._connection, self._key, self._server = s, connection, key, server
        self._columns = [(name, oid) for name, oid, _ in columns]
        kinds = {name: kind for name, _, kind in columns}
        self._row = ", ".join(f"%s::{kinds[name]}" for name in key)

    @classmethod
    async def find(
        cls, s: TableSettings, connection: AsyncConnection[tuple[Any, ...]]
    ) -> _UnreadRows:
        """Read the table's key and columns. Raises SourceDown if one of them is missing."""
        columns = await _all(connection, _COLUMNS, (s.table.quoted,))
        names = [name for name, _, _ in columns]
        if not columns:
            raise SourceDown(
                f"source {s.source}: there is no table {s.table.label} in {s.address.label}",
                hint="create it, or name another table (table=…)",
            )
        key = list(s.key) or [
            name for name, _ in await _all(connection, KEY_COLUMNS, (s.table.quoted,))
        ]
        if not key:
            raise SourceDown(
                f"source {s.source}: {s.table.label} has no primary key, "
                "which is needed to identify a row",
                hint=f"ALTER TABLE {s.table.label} ADD PRIMARY KEY …, "
                'or set key = "…" to the columns that identify a row',
            )
        kind = "timestamptz" if s.done == "mark" else f"text NOT NULL DEFAULT '{s.waiting}'"
        for name in [*key, *([s.column] if s.column else [])]:
            if name not in names:
                hint = (
                    f"ALTER TABLE {s.table.label} ADD COLUMN {name} {kind}"
                    if name == s.column
                    else f"it has {', '.join(names)}"
                )
                raise SourceDown(
                    f"source {s.source}: {s.table.label} has no column {name}", hint=hint
                )
        database = (await _all(connection, "SELECT current_database()"))[0][0]
        try:
            server = (
                await _all(connection, "SELECT system_identifier::text FROM pg_control_system()")
            )[0][0]
        except psycopg.errors.InsufficientPrivilege:
            server = s.address.label
        return cls(s, connection, key, columns, f"{server}/{database}")

    async def select(self, limit: int, *, lock: bool) -> list[tuple[Any, ...]]:
        """Return key, version and columns of up to `limit` unread rows.

        Rows that other transactions have locked are skipped if `lock` is set.
        """
        s = self._s
        selected = as_text(name for name, _ in self._columns)
        # Order by the columns of the table, because the selected values are text.
        order = ", ".join(f"r.{inline(name)}" for name in self._key)
        where = {
            "mark": f"WHERE {inline(s.column)} IS NULL",
            "status": f"WHERE {inline(s.column)} = %s",
            "delete": "",
        }[s.done]
        statement = (
            f"SELECT {as_text(self._key)}, xmin::text, {selected}"
            f" FROM {s.table.inline} AS r {where} ORDER BY {order} LIMIT {limit}"
        )
        return await _all(
            self._connection,
            statement + (" FOR UPDATE SKIP LOCKED" if lock else ""),
            [s.waiting] if s.done == "status" else [],
        )

    def findings(self, rows: Sequence[Sequence[Any]]) -> list[Finding]:
        return [self._finding(row) for row in rows]

    def _finding(self, row: Sequence[Any]) -> Finding:
        key, version, values = row[: len(self._key)], row[len(self._key)], row[len(self._key) + 1 :]
        payload = pgoutput.row_of(self._columns, values)
        payload["_table"] = {
            "table": self._s.table.label,
            "key": dict(zip(self._key, key, strict=True)),
        }
        # The id includes the row's version. A row that was reset to unread is a new finding. The
        # same row after a crash is not.
        return Finding(
            id=mint("table", self._server, self._s.table.label, *map(str, key), version),
            cause=f"{self._s.table.label}: {', '.join(map(str, key))}",
            payload=payload,
        )

    async def take(self, rows: Sequence[Sequence[Any]]) -> None:
        """Mark, update or delete the rows according to `done`, so that they are not read again."""
        s, column = self._s, inline(self._s.column)
        listed = ", ".join([f"({self._row})"] * len(rows))
        which = f"({', '.join(map(inline, self._key))}) IN ({listed})"
        keys = [part for row in rows for part in row[: len(self._key)]]
        change = {
            "delete": f"DELETE FROM {s.table.inline}",
            "mark": f"UPDATE {s.table.inline} SET {column} = now()",
            "status": f"UPDATE {s.table.inline} SET {column} = %s",
        }[s.done]
        await self._connection.execute(
            f"{change} WHERE {which}", [s.taken, *keys] if s.done == "status" else keys
        )


async def _all(
    connection: AsyncConnection[tuple[Any, ...]], statement: str, parameters: Sequence[Any] = ()
) -> list[tuple[Any, ...]]:
    return list(await (await connection.execute(statement, parameters)).fetchall())


async def _notified(connection: AsyncConnection[tuple[Any, ...]], seconds: float) -> bool:
    """Wait for a NOTIFY, at most `seconds`. Return False if none came. A NOTIFY may be lost."""
    async for _ in connection.notifies(timeout=seconds, stop_after=1):
        return True
    return False
