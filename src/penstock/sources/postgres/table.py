"""Rows of a PostgreSQL table that wait to be taken, for servers without logical decoding: locked,
handed over, and marked only when they are accepted.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from penstock.authoring.pipeline import SourceSpec
from penstock.errors import SourceDown
from penstock.model import mint
from penstock.ports import Batch, Finding
from penstock.sources.base import BATCH, BaseSource, SourceContext
from penstock.sources.postgres import pgoutput
from penstock.sources.postgres.settings import ClaimSettings, identifier, inline
from penstock.stores.postgres.url import OLDEST, refusal

EVERY = 1.0  # seconds between two looks, where nothing else is said
WORD = 2.0  # seconds after which a word is given, whatever `every` is
# Values are read from their text, so the session says how they are written. Rows stay locked while
# the queue is full, however long that is.
SESSION = {
    "datestyle": "ISO",
    "timezone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "idle_in_transaction_session_timeout": "0",
    "statement_timeout": "0",
}
_KEY = (
    "SELECT a.attname FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(number, place)"
    " JOIN pg_attribute a ON a.attrelid=i.indrelid AND a.attnum=k.number WHERE i.indrelid=to_regclass(%s) AND i.indisprimary ORDER BY k.place"
)
_COLUMNS = (
    "SELECT attname, atttypid::bigint, format_type(atttypid, atttypmod) FROM pg_attribute"
    " WHERE attrelid=to_regclass(%s) AND attnum>0 AND NOT attisdropped ORDER BY attnum"
)


class TableSource(BaseSource):
    """It goes on for ever: `every` is between two looks at an empty table, and where it listens, a
    NOTIFY makes it look at once.
    """

    def __init__(self, spec: SourceSpec, context: SourceContext, settings: ClaimSettings) -> None:
        super().__init__(spec, context)
        self.settings = settings
        self._every, self.every = spec.every or EVERY, None

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        try:
            async with await self._connect() as connection:
                queue = await _Waiting.find(self.settings, connection)
                if self.settings.listen:
                    await connection.execute(f"LISTEN {identifier(self.settings.listen)}")
                while True:
                    await connection.execute("BEGIN")
                    rows = await queue.some(BATCH, lock=True)
                    if rows:
                        yield Batch(findings=[queue.finding(row) for row in rows])
                        await queue.take(rows)
                    await connection.execute("COMMIT")
                    if len(rows) == BATCH:
                        continue
                    due = time.monotonic() + self._every
                    yield Batch(idle=True, lag=0.0, backlog=0)
                    while (left := due - time.monotonic()) > 0:
                        if await _notified(connection, min(left, WORD)):
                            break
                        if left > WORD:
                            yield Batch(idle=True, lag=0.0, backlog=0)
        except psycopg.Error as e:
            raise self._trouble(e) from None

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        try:
            async with await self._connect() as connection:
                queue = await _Waiting.find(self.settings, connection)
                return [queue.finding(row) for row in await queue.some(limit, lock=False)]
        except psycopg.Error as e:
            raise self._trouble(e) from None

    def describe(self, cursor: bytes | None) -> str:
        return "at the rows that nobody has taken"

    async def _connect(self) -> AsyncConnection[tuple[Any, ...]]:
        """Raises SourceDown."""
        try:
            connection = await AsyncConnection.connect(
                autocommit=True, **self.settings.address.options
            )
        except psycopg.Error as e:
            why = refusal(e, self.settings.address, "")
            raise SourceDown(f"source {self.name}: {why.message}", hint=why.hint) from None
        try:
            if connection.info.server_version < OLDEST:
                raise SourceDown(
                    f"source {self.name}: {self.settings.address.label} runs PostgreSQL {connection.info.server_version // 10000}",
                    hint=f"Penstock needs {OLDEST // 10000} or newer",
                )
            await connection.execute(
                "; ".join(f"SET {name} = '{value}'" for name, value in SESSION.items())
            )
        except BaseException:
            await connection.close()
            raise
        return connection

    def _trouble(self, e: psycopg.Error) -> SourceDown:
        s = self.settings
        said = s.address.without_secrets((str(e).strip().splitlines() or [type(e).__name__])[0])
        if e.sqlstate == "42501":
            user, right = (
                s.address.options.get("user") or "the user",
                "DELETE" if s.done == "delete" else "UPDATE",
            )
            return SourceDown(
                f"source {self.name}: {said}",
                hint=f"as its owner: GRANT SELECT, {right} ON {s.table.quoted} TO {user}",
            )
        return SourceDown(
            f"source {self.name}: {s.address.label}: {said}", hint="it is tried again by itself"
        )


class _Waiting:
    """The rows that wait, as one table has them."""

    def __init__(
        self,
        s: ClaimSettings,
        connection: AsyncConnection[tuple[Any, ...]],
        key: list[str],
        columns: list[tuple[str, int, str]],
        server: str,
    ) -> None:
        self._s, self._connection, self._key, self._columns, self._server = (
            s,
            connection,
            key,
            columns,
            server,
        )
        kinds = {name: kind for name, _, kind in columns}
        self._row = ", ".join(f"%s::{kinds[name]}" for name in key)

    @classmethod
    async def find(cls, s: ClaimSettings, connection: AsyncConnection[tuple[Any, ...]]) -> _Waiting:
        """Raises SourceDown with what is missing."""
        columns = await _all(connection, _COLUMNS, (s.table.quoted,))
        names = [name for name, _, _ in columns]
        if not columns:
            raise SourceDown(
                f"source {s.source}: there is no table {s.table.label} in {s.address.label}",
                hint="create it, or name another one (table=…)",
            )
        key = list(s.key) or [name for (name,) in await _all(connection, _KEY, (s.table.quoted,))]
        if not key:
            raise SourceDown(
                f"source {s.source}: {s.table.label} has no primary key, and without one a row cannot be known again",
                hint=f'ALTER TABLE {s.table.label} ADD PRIMARY KEY …, or key = "…" with the columns that name a row',
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

    async def some(self, limit: int, *, lock: bool) -> list[tuple[Any, ...]]:
        """Key, version and columns of each. Rows that others have locked are passed over."""
        s = self._s
        keys = ", ".join(f"{inline(name)}::text" for name in self._key)
        told = ", ".join(f"{inline(name)}::text" for name, _, _ in self._columns)
        order = ", ".join(
            f"r.{inline(name)}" for name in self._key
        )  # not by what is selected, which is text
        statement = f"SELECT {keys}, xmin::text, {told} FROM {s.table.inline} AS r{self._where()} ORDER BY {order} LIMIT {limit}"
        return await _all(
            self._connection,
            statement + (" FOR UPDATE SKIP LOCKED" if lock else ""),
            [s.waiting] if s.done == "status" else [],
        )

    def _where(self) -> str:
        column = inline(self._s.column)
        return {
            "mark": f" WHERE {column} IS NULL",
            "status": f" WHERE {column} = %s",
            "delete": "",
        }[self._s.done]

    def finding(self, row: Sequence[Any]) -> Finding:
        key, version, values = row[: len(self._key)], row[len(self._key)], row[len(self._key) + 1 :]
        payload: dict[str, Any] = {
            name: pgoutput.value(oid, text)
            for (name, oid, _), text in zip(self._columns, values, strict=True)
        }
        payload["_table"] = {"table": self._s.table.label, "key": _key(self._key, key)}
        # With the row's version: a row that somebody puts back is a new cause, the same row after a
        # crash is not.
        id_ = mint(
            "table", self._server, self._s.table.label, *[str(part) for part in key], version
        )
        return Finding(
            id=id_, cause=f"{self._s.table.label}: {', '.join(map(str, key))}", payload=payload
        )

    async def take(self, rows: Sequence[Sequence[Any]]) -> None:
        s, column = self._s, inline(self._s.column)
        which = f"({', '.join(map(inline, self._key))}) IN ({', '.join([f'({self._row})'] * len(rows))})"
        keys = [part for row in rows for part in row[: len(self._key)]]
        if s.done == "delete":
            await self._connection.execute(f"DELETE FROM {s.table.inline} WHERE {which}", keys)
        elif s.done == "mark":
            await self._connection.execute(
                f"UPDATE {s.table.inline} SET {column} = now() WHERE {which}", keys
            )
        else:
            await self._connection.execute(
                f"UPDATE {s.table.inline} SET {column} = %s WHERE {which}", [s.taken, *keys]
            )


def _key(names: Sequence[str], values: Sequence[Any]) -> Mapping[str, Any]:
    return dict(zip(names, values, strict=True))


async def _all(
    connection: AsyncConnection[tuple[Any, ...]], statement: str, parameters: Sequence[Any] = ()
) -> list[tuple[Any, ...]]:
    return list(await (await connection.execute(statement, parameters)).fetchall())


async def _notified(connection: AsyncConnection[tuple[Any, ...]], seconds: float) -> bool:
    """Something is said to have changed; a hint, and it may be lost."""
    async for _ in connection.notifies(timeout=seconds, stop_after=1):
        return True
    return False
