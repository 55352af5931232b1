"""Records as rows of a PostgreSQL table: one per key (or one per record), over a connection of its
own or in the books' transaction. Not the ledger.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg import errors

from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Reopen, Row
from penstock.sinks.common import PREFIX, option_max_columns
from penstock.sinks.postgres_table import Table, quoted, savepoint
from penstock.stores.postgres.connection import Wire
from penstock.stores.postgres.url import Address, refusal
from penstock.stores.sql import Tx

PUBLIC = "public"
_OPTIONS = ("table", "schema", "mode", "max_columns")
MAX_COLUMNS = 400  # a row of more long texts than this does not fit the server's block of 8 kB


class PostgresSink:
    """Through the outbox: `open`, `write`. In the ledger's own database: `prepare_in` once, then
    `write_in`, and the outbox is not needed.

    The position lies in the target itself and moves in the transaction that writes the rows, so a
    batch that comes again writes nothing. It is kept under an id that the ledger notes as the mark:
    a ledger that starts anew counts from one again, and is a stranger here.
    """

    def __init__(
        self,
        address: Address,
        table: Table,
        *,
        new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self.address, self.table, self.notice = address, table, ""
        self.name = f"{address.label}?table={table.name if table.schema == PUBLIC else f'{table.schema}.{table.name}'}"
        self._new_id = new_id
        self._wire = Wire(
            address.options, {"synchronous_commit": "on"}
        )  # the outbox forgets what we say is written
        self._id = ""
        self._sql: dict[str, str] = {}
        self._prepared = False

    def open(self, position: int, mark: str) -> str:
        self.close()
        self.notice = ""
        positions = f"{quoted(self.table.schema)}._penstock_position"
        try:
            self._wire.open()
        except psycopg.Error as e:
            told = refusal(e, self.address, self.table.schema)
            raise StoreUnavailable(told.message, hint=told.hint) from e
        with self._transaction() as tx:
            self.table.prepare(tx, adopt=True)
            with (
                contextlib.suppress(errors.UniqueViolation),
                savepoint(tx),
            ):  # another process makes it at this very moment
                tx.execute(
                    f"CREATE TABLE IF NOT EXISTS {positions} (sink text, id text, n bigint NOT NULL, PRIMARY KEY (sink, id))"
                )
            self._sql = {
                "reached": f"SELECT n FROM {positions} WHERE sink = ? AND id = ? FOR UPDATE",
                "note": f"INSERT INTO {positions} (sink, id, n) VALUES (?, ?, ?) ON CONFLICT (sink, id) DO UPDATE SET n = excluded.n",
            }
            reached = self._reached(tx, mark) if mark else None
            self._id = mark if reached is not None else self._new_id()
            if mark and reached is None:
                self.notice = f"{self.name} is not the database that row {position} was written to: going on from there"
            elif reached is not None and reached < position:
                self.notice = f"{self.name} is older than row {position} (it has {reached}): going on from there"
            if reached is None or reached < position:
                tx.execute(self._sql["note"], (self.name, self._id, position))
        return self._id

    def write(self, rows: Sequence[Row]) -> str:
        if not self._wire.is_open:
            raise Reopen(f"{self.name} is not open")
        with self._transaction() as tx:
            reached = self._reached(tx, self._id)
            if reached is None:
                raise Reopen(f"{self.name} forgot its position")
            fresh = [row for row in rows if row.n > reached]
            if fresh:
                self.table.write(tx, fresh)
                tx.execute(self._sql["note"], (self.name, self._id, fresh[-1].n))
        self.notice = self.table.notice or self.notice
        return self._id

    def close(self) -> None:
        self._wire.close()

    def _reached(self, tx: Tx, mark: str) -> int | None:
        """Also the lock: where two machines feed this sink at once, one waits here and then finds
        its rows written.
        """
        found: int | None = tx.execute(self._sql["reached"], (self.name, mark)).get
        return found

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Tx]:
        wire = self._wire
        try:
            wire.execute("BEGIN")
            try:
                yield wire
                wire.execute("COMMIT").fetchall()
            except BaseException:
                with contextlib.suppress(psycopg.Error):
                    wire.execute("ROLLBACK").fetchall()
                raise
        except errors.UndefinedTable as e:
            raise Reopen(f"{self.name}: its tables were removed ({_line(e)})") from e
        except psycopg.Error as e:
            hint = (
                "check that server's log, its free space and its permissions; rows wait until then"
            )
            raise StoreUnavailable(f"{self.name}: {_line(e)}", hint=hint) from e

    # -- in the books' transaction -----------------------------------------------------------------

    def shares(self, url: str) -> bool:
        """The table lies in the database of this store, so both may commit at once."""
        return url.startswith(("postgres:", "postgresql:")) and _place(
            Address.parse(url)
        ) == _place(self.address)

    def prepare_in(self, tx: Tx) -> None:
        """Before the first `write_in`, in a transaction of the ledger's database. Raises
        ConfigError: the table is somebody else's.
        """
        self.table.prepare(tx, adopt=False)
        self._prepared = True

    def write_in(self, tx: Tx, rows: Sequence[Row]) -> None:
        """The same rows in the caller's transaction, which is what makes them one with the success
        of their event.
        """
        if not rows:
            return
        try:
            if not self._prepared:
                self.prepare_in(tx)
            self.table.write(tx, rows)
        except (
            psycopg.ProgrammingError
        ) as e:  # somebody changed the tables under us: the next try looks at them anew
            self._prepared = False
            raise StoreUnavailable(
                f"{self.name}: {_line(e)}",
                hint="leave the tables of a sink and their _penstock columns as they are",
            ) from e
        self.notice = self.table.notice or self.notice


def _line(e: BaseException) -> str:
    return str(e).strip().partition("\n")[0]


def _place(address: Address) -> tuple[str, str, str]:
    """Which database it is. The same one under two names is taken for two."""
    o = address.options
    return (
        str(o.get("host") or o.get("hostaddr") or "localhost"),
        str(o.get("port") or "5432"),
        str(o.get("dbname") or o.get("user") or ""),
    )


def open_sink(url: str, options: Mapping[str, Any], base: Path) -> PostgresSink:
    """`postgres://user@host/db?table=products`. Checks, and connects to nothing yet. Raises
    ConfigError.
    """
    server, _, query = url.partition("?")
    parts = parse_qsl(query, keep_blank_values=True)
    theirs = urlencode(
        [(name, value) for name, value in parts if name not in _OPTIONS], quote_via=quote
    )
    address = Address.parse(f"{server}?{theirs}" if theirs else server)
    given: dict[str, Any] = (
        {"max_columns": MAX_COLUMNS}
        | {name: value for name, value in parts if name in _OPTIONS}
        | dict(options)
    )
    for name in given:
        if name not in _OPTIONS:
            raise ConfigError(
                f"sink {address.label}: unknown option {name!r}",
                hint=f"postgres sinks know: {', '.join(_OPTIONS)}",
            )
    table, schema, mode = (
        str(given.get("table", "records")),
        str(given.get("schema", PUBLIC)),
        given.get("mode", "upsert"),
    )
    for what, name in (("table", table), ("schema", schema)):
        if (
            not name
            or "\0" in name
            or len(name.encode("utf-8", "surrogatepass")) > 63
            or name.startswith(("pg_", PREFIX))
        ):
            hint = f"add ?{what}=products; 63 bytes at most, and names that begin with pg_ or {PREFIX} are taken"
            raise ConfigError(
                f"sink {address.label}: {name!r} cannot be the name of its {what}", hint=hint
            )
    if mode not in ("upsert", "append"):
        raise ConfigError(
            f"sink {address.label}: mode is {mode!r}",
            hint="upsert (one row per key, the newest) or append (one row per record)",
        )
    return PostgresSink(
        address,
        Table(
            schema,
            table,
            append=mode == "append",
            max_columns=option_max_columns(address.label, given, most=1590),
        ),
    )
