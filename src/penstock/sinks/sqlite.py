"""Records as rows of a SQLite table, one per key or one per record.

They are written to a separate file, or in the transaction of the ledger's file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw

from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Reopen, Row
from penstock.private_files import create_file, make_directory
from penstock.sinks.append_file import probe_file
from penstock.sinks.columns import ORDER, ColumnTable, PositionedSink
from penstock.sinks.common import (
    PREFIX,
    PROVENANCE_COLUMNS,
    REST,
    Flat,
    file_url,
    json_text,
    option_max_columns,
)
from penstock.stores.sql import Tx
from penstock.stores.sqlite_connection import Connection, read_only

_PENSTOCK_COLUMNS = dict.fromkeys(PROVENANCE_COLUMNS, "TEXT") | {
    PREFIX + "version": "INTEGER",
    PREFIX + "fetched_at": "",
    ORDER: "INTEGER",
    REST: "TEXT",
}
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_MAX_EXACT = 1 << 53  # above this, a REAL column rounds an integer


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class SqliteTable(ColumnTable):
    own_columns = _PENSTOCK_COLUMNS
    table_kinds = ("table",)
    not_unique = apsw.ConstraintError
    quoted = staticmethod(_quoted)

    def __init__(self, name: str, *, append: bool, max_columns: int) -> None:
        index = _quoted(f"{PREFIX}{name}_key")
        super().__init__(name, index=index, append=append, max_columns=max_columns)
        self._version: int | None = None  # version of the schema. None to read the table again.
        self._kind: str | None = None  # "table", "view", or None if there is no relation
        self._folded: set[bytes] = set()  # all names of the table, as SQLite compares them

    def _create_columns_table(self, tx: Tx) -> None:
        tx.execute(
            "CREATE TABLE IF NOT EXISTS _penstock_columns "
            "(of TEXT, name TEXT, PRIMARY KEY (of, name)) WITHOUT ROWID"
        )
        self._version = None

    def write(self, tx: Tx, rows: Sequence[Row]) -> None:
        """Write rows in order.

        If the caller rolls the transaction back, the next write reads the schema again.
        """
        try:
            super().write(tx, rows)
        # The schema changed: by another process, or by a change of this process that was rolled
        # back.
        except apsw.SQLError:
            self._version = None
            super().write(tx, rows)

    # -- schema ------------------------------------------------------------------------------------

    def _load(self, tx: Tx) -> str | None:
        version = tx.execute("PRAGMA schema_version").get
        if version == self._version:
            return self._kind
        self._kind = tx.execute(
            "SELECT type FROM sqlite_schema "
            "WHERE name = ?1 COLLATE NOCASE AND type IN ('table', 'view')",
            (self.name,),
        ).get
        found = tx.execute(
            "SELECT name, type, hidden FROM pragma_table_xinfo(?)", (self.name,)
        ).fetchall()
        self._types = {name: _affinity(declared) for name, declared, hidden in found if hidden == 0}
        self._folded = {_fold(name) for name, _, _ in found}
        has_columns_table = tx.execute(
            "SELECT 1 FROM sqlite_schema WHERE name = '_penstock_columns'"
        ).get
        managed_rows = (
            list(tx.execute("SELECT name FROM _penstock_columns WHERE of = ?", (self.name,)))
            if has_columns_table
            else []
        )
        self._managed = [name for (name,) in managed_rows if name in self._types]
        self._insert = self._insert_statement()
        self._version = version
        return self._kind

    def _fit(self, tx: Tx, flats: Sequence[Flat]) -> None:
        """Add columns, with their type by the first value.

        Fields that cannot have a column move to the rest: if there are too many, or names differ
        only by case.
        """
        managed, new, folded = set(self._managed), dict[str, str](), set(self._folded)
        undecided = set[str]()
        penstock_columns = {_fold(name) for name in _PENSTOCK_COLUMNS}
        columns_left = self.max_columns - len(folded | penstock_columns)
        for flat in flats:
            for name in list(flat.fields):
                if name in managed:
                    continue
                value = flat.fields[name]
                if name in new:
                    if name in undecided and value is not None:
                        new[name] = _column_type(value)
                        undecided.discard(name)
                elif name in self._types:  # a column of another application, filled from now on
                    new[name] = ""
                elif (
                    _fold(name) not in folded | penstock_columns
                    and columns_left > 0
                    and "\0" not in name
                ):
                    new[name] = _column_type(value)
                    if value is None:
                        undecided.add(name)
                    folded.add(_fold(name))
                    columns_left -= 1
                else:
                    why = "or a name that differs from another by case only"
                    self._move_to_rest(flat, name, why)
        if new or not self._managed:
            self._add_columns(tx, new)
            self._version = None  # the change is not valid until the caller commits

    def _record_columns(self, tx: Tx, wanted: Iterable[str], missing: Mapping[str, str]) -> None:
        self._create_columns_table(tx)
        tx.executemany(
            "INSERT OR IGNORE INTO _penstock_columns (of, name) VALUES (?, ?)",
            [(self.name, name) for name in wanted],
        )

    def _cell(self, value: Any, kind: str) -> tuple[Any, bool]:
        if isinstance(value, dict | list):
            return json_text(value), True
        if isinstance(value, bool):
            return int(value), True
        too_large = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
        return str(value) if too_large else value, not _altered(value, kind)


def _fold(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass").lower()  # ASCII letters only, as in SQLite


def _column_type(value: Any) -> str:
    if isinstance(value, int):  # bool too
        return "INTEGER" if -(1 << 63) <= value < 1 << 63 else "TEXT"
    return "" if value is None else "REAL" if isinstance(value, float) else "TEXT"


def _affinity(declared: str) -> str:
    """Return the affinity of a declared type, by the five rules of SQLite."""
    kind = declared.upper()
    if "INT" in kind:
        return "INTEGER"
    if any(part in kind for part in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if not kind or "BLOB" in kind:
        return ""
    return "REAL" if any(part in kind for part in ("REAL", "FLOA", "DOUB")) else "NUMERIC"


def _altered(value: Any, affinity: str) -> bool:
    """Return True if the column changes the value: a numeric column changes "007" to 7."""
    if affinity in ("", "TEXT"):
        return False
    if isinstance(value, str):
        return _NUMBER.fullmatch(value) is not None
    return isinstance(value, int) and (
        abs(value) >= 1 << 63 or (affinity == "REAL" and abs(value) > _MAX_EXACT)
    )


class SqliteSink(PositionedSink):
    """SQLite sink. Through the outbox: `open`, then `write`. In the ledger's file: `prepare_in`
    once, then `write_in`, without the outbox.
    """

    def __init__(self, name: str, path: Path, table: ColumnTable) -> None:
        super().__init__(name, str(path), "_penstock_position", table)
        self.path, self.private = path, False
        self._db: Connection | None = None
        self._opened_file: os.stat_result | None = None

    def open(self, position: int, mark: str) -> str:
        self.close()
        self.notice = ""
        with _outages(self.path):
            if self.private:
                make_directory(self.path.parent)
                create_file(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = db = Connection(str(self.path))
            db.set_busy_timeout(5000)
            # The journal mode of the file is kept. With a rollback journal, only EXTRA is safe
            # after a power failure.
            db.execute("PRAGMA synchronous = EXTRA")
            with _transaction(db) as tx:
                tx.execute(
                    "CREATE TABLE IF NOT EXISTS _penstock_position "
                    "(sink TEXT, id TEXT, n INTEGER NOT NULL, PRIMARY KEY (sink, id)) WITHOUT ROWID"
                )
                self._resume(tx, position, mark)
                self.table.prepare(tx, adopt=True)
            self._opened_file = os.stat(self.path)
        return self._id

    def write(self, rows: Sequence[Row]) -> str:
        if self._db is None or self._opened_file is None:
            raise Reopen(f"{self.path} is not open")
        with _outages(self.path):
            try:
                in_place = os.path.samestat(os.stat(self.path), self._opened_file)
            except FileNotFoundError:
                in_place = False
            if not in_place:
                raise Reopen(f"{self.path} was moved or removed")
            with _transaction(self._db) as tx:
                self._write_new_rows(tx, rows)
        self.notice = self.notice or self.table.notice
        return self._id

    def close(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            db.close()

    def probe(self) -> None:
        """See ports.ProbedSink.probe."""
        probe_file(self.path)
        if self.path.exists():
            with _outages(self.path):
                db = read_only(str(self.path), 2.0)
                try:
                    db.execute("SELECT count(*) FROM sqlite_schema").fetchall()
                finally:
                    db.close()

    # -- in the ledger's transaction ---------------------------------------------------------------

    def shares(self, url: str) -> bool:
        """Return True if the table is in this store's file, so that both commit together."""
        if not url.startswith("sqlite:"):
            return False
        file = Path(url.removeprefix("sqlite:").removeprefix("//"))
        return os.path.realpath(file) == os.path.realpath(self.path) or (
            file.exists() and self.path.exists() and file.samefile(self.path)
        )

    def prepare_in(self, tx: Tx) -> None:
        """Prepare the table before the first `write_in`, in a transaction of the ledger's file.

        Raise ConfigError if the table is one of the ledger's own.
        """
        self.table.prepare(tx, adopt=False)

    def write_in(self, tx: Tx, rows: Sequence[Row]) -> None:
        """Write rows in the caller's transaction, together with the success of their event."""
        if rows:
            self.table.write(tx, rows)
            self.notice = self.notice or self.table.notice


@contextlib.contextmanager
def _outages(path: Path) -> Iterator[None]:
    try:
        yield
    except apsw.Error as e:
        hint = (
            "choose another file"
            if isinstance(e, apsw.NotADBError)
            else "check free space, permissions and which other programs have it open"
        )
        raise StoreUnavailable(
            f"{path}: {type(e).__name__.removesuffix('Error')}: {e}", hint=hint
        ) from e


@contextlib.contextmanager
def _transaction(db: Connection) -> Iterator[Tx]:
    tx = db.tx
    tx.execute("BEGIN IMMEDIATE")
    try:
        yield tx
        tx.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            tx.execute("ROLLBACK")
        raise


_OPTIONS = ("table", "mode", "max_columns")


def open_sink(url: str, options: Mapping[str, Any], base: Path) -> SqliteSink:
    """Create the sink of `sqlite:products.db?table=products`. Opens no file yet.

    Raise ConfigError if the URL or an option is not valid.
    """
    path, given = file_url(url, options, base, scheme="sqlite", known=_OPTIONS)
    table, mode = str(given.get("table", "records")), given.get("mode", "upsert")
    if not table or "\0" in table or table.lower().startswith(("sqlite_", PREFIX)):
        hint = f"add ?table=products. Names that begin with sqlite_ or {PREFIX} are reserved"
        raise ConfigError(f"sink {url!r}: {table!r} cannot be the name of its table", hint=hint)
    if mode not in ("upsert", "append"):
        raise ConfigError(
            f"sink {url!r}: mode is {mode!r}",
            hint="use upsert (one row per key, the newest) or append (one row per record)",
        )
    max_columns = option_max_columns(url, given, limit=1990)
    return SqliteSink(
        url, path, SqliteTable(table, append=mode == "append", max_columns=max_columns)
    )
