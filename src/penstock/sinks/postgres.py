"""Records as rows of a PostgreSQL table, one per key or one per record.

They are written over a separate connection, or in the ledger's transaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg import errors

from penstock.config.options import check_names
from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Reopen, Row
from penstock.sinks.columns import PositionedSink
from penstock.sinks.common import PREFIX, option_max_columns
from penstock.sinks.postgres_table import PostgresTable, quoted, savepoint
from penstock.stores.postgres.connection import Wire
from penstock.stores.postgres.url import Address, refusal
from penstock.stores.sql import Tx

PUBLIC = "public"
_OPTIONS = ("table", "schema", "mode", "max_columns")
MAX_COLUMNS = 400  # a row of more long texts does not fit into a block of the server (8 kB)


# Both columns are NULL without the schema. The second column is NULL without the table.
_PRIVILEGES = """
SELECT (SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = ?1),
  (SELECT has_table_privilege(c.oid, 'INSERT') FROM pg_class c
   JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = ?1 AND c.relname = ?2)
"""


class PostgresSink(PositionedSink):
    """PostgreSQL sink. Through the outbox: `open`, then `write`. In the ledger's database:
    `prepare_in` once, then `write_in`, without the outbox.
    """

    # If two machines write to this sink, one waits here, and then finds its rows written.
    lock = " FOR UPDATE"

    def __init__(self, address: Address, table: PostgresTable) -> None:
        table_name = table.name if table.schema == PUBLIC else f"{table.schema}.{table.name}"
        name = f"{address.label}?table={table_name}"
        super().__init__(name, name, f"{quoted(table.schema)}._penstock_position", table)
        self.address, self._schema = address, table.schema
        # The outbox deletes rows that this sink has confirmed, so commits must be durable.
        self._wire = Wire(address.options, {"synchronous_commit": "on"})
        self._prepared = False

    def open(self, position: int, mark: str) -> str:
        self.close()
        self.notice = ""
        try:
            self._wire.open()
        except psycopg.Error as e:
            error = refusal(e, self.address, self._schema)
            raise StoreUnavailable(error.message, hint=error.hint) from e
        with self._transaction() as tx:
            self.table.prepare(tx, adopt=True)
            # UniqueViolation: another process creates the table at the same time.
            with contextlib.suppress(errors.UniqueViolation), savepoint(tx):
                tx.execute(
                    f"CREATE TABLE IF NOT EXISTS {self._positions} "
                    "(sink text, id text, n bigint NOT NULL, PRIMARY KEY (sink, id))"
                )
            self._resume(tx, position, mark)
        return self._id

    def write(self, rows: Sequence[Row]) -> str:
        if not self._wire.is_open:
            raise Reopen(f"{self.name} is not open")
        with self._transaction() as tx:
            self._write_new_rows(tx, rows)
        self.notice = self.table.notice or self.notice
        return self._id

    def close(self) -> None:
        self._wire.close()

    def probe(self) -> None:
        """See ports.ProbedSink.probe."""
        wire = Wire(self.address.options, {"lock_timeout": "2s", "statement_timeout": "5s"})
        try:
            wire.open()
            may_create, may_insert = wire.execute(_PRIVILEGES, (self._schema, self.table.name)).get
        except psycopg.Error as e:
            error = refusal(e, self.address, self._schema)
            raise StoreUnavailable(error.message, hint=error.hint) from e
        finally:
            wire.close()
        if may_insert is False or (may_insert is None and not may_create):
            raise StoreUnavailable(
                f"{self.name}: this user may not write to the table",
                hint=f"GRANT INSERT, UPDATE, DELETE ON {self._schema}.{self.table.name}, "
                f"or CREATE ON SCHEMA {self._schema}, to this user",
            )

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
            hint = "check the server's log, free space and permissions. Rows wait until then"
            raise StoreUnavailable(f"{self.name}: {_line(e)}", hint=hint) from e

    # -- in the ledger's transaction ---------------------------------------------------------------

    def shares(self, url: str) -> bool:
        """Return True if the table is in this database, so that both commit together."""
        return url.startswith(("postgres:", "postgresql:")) and _database_of(
            Address.parse(url)
        ) == _database_of(self.address)

    def prepare_in(self, tx: Tx) -> None:
        """Prepare the table before the first `write_in`, in a transaction of the ledger's database.

        Raise ConfigError if the table belongs to another application.
        """
        self.table.prepare(tx, adopt=False)
        self._prepared = True

    def write_in(self, tx: Tx, rows: Sequence[Row]) -> None:
        """Write rows in the caller's transaction, together with the success of their event."""
        if not rows:
            return
        try:
            if not self._prepared:
                self.prepare_in(tx)
            self.table.write(tx, rows)
        except psycopg.ProgrammingError as e:
            # Another program changed the tables. The next write reads them again.
            self._prepared = False
            raise StoreUnavailable(
                f"{self.name}: {_line(e)}",
                hint="do not change the tables of a sink and their _penstock columns",
            ) from e
        self.notice = self.table.notice or self.notice


def _line(e: BaseException) -> str:
    return str(e).strip().partition("\n")[0]


def _database_of(address: Address) -> tuple[str, str, str]:
    """Return host, port and database. One database under two names counts as two."""
    o = address.options
    return (
        str(o.get("host") or o.get("hostaddr") or "localhost"),
        str(o.get("port") or "5432"),
        str(o.get("dbname") or o.get("user") or ""),
    )


def open_sink(url: str, options: Mapping[str, Any], base: Path) -> PostgresSink:
    """Create the sink of `postgres://user@host/db?table=products`. Does not connect yet.

    Raise ConfigError if the URL or an option is not valid.
    """
    server, _, query = url.partition("?")
    parts = parse_qsl(query, keep_blank_values=True)
    connection_options = urlencode(
        [(name, value) for name, value in parts if name not in _OPTIONS], quote_via=quote
    )
    address = Address.parse(f"{server}?{connection_options}" if connection_options else server)
    given: dict[str, Any] = (
        {"max_columns": MAX_COLUMNS}
        | {name: value for name, value in parts if name in _OPTIONS}
        | dict(options)
    )
    check_names(f"sink {address.label}", given, _OPTIONS)
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
            hint = (
                f"add ?{what}=products, with at most 63 bytes. "
                f"Names that begin with pg_ or {PREFIX} are reserved"
            )
            raise ConfigError(
                f"sink {address.label}: {name!r} cannot be the name of its {what}", hint=hint
            )
    if mode not in ("upsert", "append"):
        raise ConfigError(
            f"sink {address.label}: mode is {mode!r}",
            hint="use upsert (one row per key, the newest) or append (one row per record)",
        )
    return PostgresSink(
        address,
        PostgresTable(
            schema,
            table,
            append=mode == "append",
            max_columns=option_max_columns(address.label, given, limit=1590),
        ),
    )
