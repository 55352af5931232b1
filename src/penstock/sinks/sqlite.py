"""Records as rows of a SQLite table, one per key or one per record.

They are written to a separate file, or in the transaction of the ledger's file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw

from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Reopen, Row
from penstock.sinks.common import (
    PREFIX,
    PROVENANCE_COLUMNS,
    REST,
    Flat,
    file_url,
    flatten,
    json_text,
    option_max_columns,
)

_ORDER = PREFIX + "order"
_KEY = PREFIX + "key"
_PENSTOCK_COLUMNS = dict.fromkeys(PROVENANCE_COLUMNS, "TEXT") | {
    PREFIX + "version": "INTEGER",
    PREFIX + "fetched_at": "",
    _ORDER: "INTEGER",
    REST: "TEXT",
}
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_MAX_EXACT = 1 << 53  # above this, a REAL column rounds an integer


class Table:
    """SQL of one table. Every method runs in the transaction of the given cursor."""

    def __init__(self, name: str, *, append: bool, max_columns: int) -> None:
        self.name, self.append, self.max_columns = name, append, max_columns
        self.notice = ""
        self._version: int | None = None  # version of the schema below. None to read it again.
        self._types: dict[str, str] = {}  # exact name -> affinity, "" for none
        self._folded: set[bytes] = set()  # all names of the table, as SQLite compares them
        # Columns that records fill. A newer row sets missing ones to null, but no other columns.
        self._managed: list[str] = []
        self._insert = ""
        order = _quoted(_ORDER)
        self._delete = (
            f"DELETE FROM {_quoted(name)} WHERE {_quoted(_KEY)} = ?1 AND ifnull({order}, ?2) <= ?2"
        )

    def prepare(self, cursor: apsw.Cursor, *, adopt: bool) -> None:
        """Create the table of columns, and the index for the mode.

        With `adopt`, an existing table of another application is filled too. Raise ConfigError if
        the table cannot be used.
        """
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS _penstock_columns "
            "(of TEXT, name TEXT, PRIMARY KEY (of, name)) WITHOUT ROWID"
        )
        self._version = None
        kind = cursor.execute(
            "SELECT type FROM sqlite_schema "
            "WHERE name = ?1 COLLATE NOCASE AND type IN ('table', 'view')",
            (self.name,),
        ).get
        if kind is None:
            return
        self._load(cursor)
        if kind != "table":
            raise ConfigError(
                f"{self.name} is a view, but a sink needs a table",
                hint="choose another name with ?table=",
            )
        if not adopt:
            self._refuse_other_tables()
        self._add_columns(cursor, {})

    def write(self, cursor: apsw.Cursor, rows: Sequence[Row]) -> None:
        """Write rows in order.

        If the caller rolls the transaction back, the next write reads the schema again.
        """
        try:
            self._write(cursor, rows)
        # The schema changed: by another process, or by a change of this process that was rolled
        # back.
        except apsw.SQLError:
            self._version = None
            self._write(cursor, rows)

    def _write(self, cursor: apsw.Cursor, rows: Sequence[Row]) -> None:
        if self._version is None or self._version != cursor.execute("PRAGMA schema_version").get:
            self._load(cursor)
        self._refuse_other_tables()
        flats = [(row, flatten(row.body)) for row in rows]
        new = self._new_columns(flat for _, flat in flats if self.append or not flat.deleted)
        if new or not self._managed:
            self._add_columns(cursor, new)
            self._version = None  # the change is not valid until the caller commits
        for removes, group in itertools.groupby(
            flats, lambda pair: pair[1].deleted and not self.append
        ):
            if removes:
                cursor.executemany(self._delete, [(row.key, row.order) for row, _ in group])
            else:
                cursor.executemany(self._insert, [self._bindings(row, flat) for row, flat in group])

    def _refuse_other_tables(self) -> None:
        if self._types and not self._managed:
            raise ConfigError(
                f"the table {self.name} belongs to another application",
                hint="choose another name with ?table=",
            )

    # -- schema ------------------------------------------------------------------------------------

    def _load(self, cursor: apsw.Cursor) -> None:
        found = list(
            cursor.execute("SELECT name, type, hidden FROM pragma_table_xinfo(?)", (self.name,))
        )
        self._types = {name: _affinity(declared) for name, declared, hidden in found if hidden == 0}
        self._folded = {_fold(name) for name, _, _ in found}
        has_columns_table = cursor.execute(
            "SELECT 1 FROM sqlite_schema WHERE name = '_penstock_columns'"
        ).get
        managed_rows = (
            list(cursor.execute("SELECT name FROM _penstock_columns WHERE of = ?", (self.name,)))
            if has_columns_table
            else []
        )
        self._managed = [name for (name,) in managed_rows if name in self._types]
        self._prepare_insert()
        self._version = cursor.execute("PRAGMA schema_version").get

    def _new_columns(self, flats: Iterable[Flat]) -> dict[str, str]:
        """Return the columns to add, with their type by the first value.

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
                    flat.rest[name] = flat.fields.pop(name)
                    self.notice = (
                        f"table {self.name}: some fields can have no column (max_columns = "
                        f"{self.max_columns}, or a name that differs from another by case only) "
                        f"and are kept as JSON in {REST}"
                    )
        return new

    def _add_columns(self, cursor: apsw.Cursor, new: Mapping[str, str]) -> None:
        wanted = dict(new) | _PENSTOCK_COLUMNS
        missing = {name: declared for name, declared in wanted.items() if name not in self._types}
        if not self._types:
            columns = ", ".join(f"{_quoted(name)} {declared}" for name, declared in missing.items())
            cursor.execute(f"CREATE TABLE {_quoted(self.name)} ({columns})")
        else:
            for name, declared in missing.items():
                cursor.execute(
                    f"ALTER TABLE {_quoted(self.name)} ADD COLUMN {_quoted(name)} {declared}"
                )
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS _penstock_columns "
            "(of TEXT, name TEXT, PRIMARY KEY (of, name)) WITHOUT ROWID"
        )
        cursor.executemany(
            "INSERT OR IGNORE INTO _penstock_columns (of, name) VALUES (?, ?)",
            [(self.name, name) for name in wanted],
        )
        index = _quoted(f"{PREFIX}{self.name}_key")
        if self.append:
            cursor.execute(f"DROP INDEX IF EXISTS {index}")
        else:
            try:
                cursor.execute(
                    f"CREATE UNIQUE INDEX IF NOT EXISTS {index} "
                    f"ON {_quoted(self.name)} ({_quoted(_KEY)})"
                )
            except apsw.ConstraintError as e:
                hint = "keep mode=append, with which it was filled, or choose another ?table="
                raise ConfigError(
                    f"the table {self.name} has several rows of one key", hint=hint
                ) from e
        self._load(cursor)

    def _prepare_insert(self) -> None:
        names = self._managed
        self._insert = (
            f"INSERT INTO {_quoted(self.name)} AS _penstock_row ({', '.join(map(_quoted, names))}) "
            f"VALUES ({', '.join('?' * len(names))})"
        )
        if not self.append:
            assignments = ", ".join(
                f"{_quoted(name)} = excluded.{_quoted(name)}" for name in names if name != _KEY
            )
            order = _quoted(_ORDER)
            self._insert += (
                f" ON CONFLICT ({_quoted(_KEY)}) DO UPDATE SET {assignments} "
                f"WHERE excluded.{order} >= ifnull(_penstock_row.{order}, excluded.{order})"
            )

    # -- values ------------------------------------------------------------------------------------

    def _bindings(self, row: Row, flat: Flat) -> tuple[Any, ...]:
        values = flat.fields | flat.provenance
        values[_KEY], values[_ORDER] = row.key, row.order
        rest = dict(flat.rest)
        bound = dict[str, Any]()
        for name in self._managed:
            value = values.get(name)
            if isinstance(value, dict | list):
                value = json_text(value)
            elif isinstance(value, bool):
                value = int(value)
            elif value is not None and name in flat.fields and _altered(value, self._types[name]):
                # SQLite changes the value in the cell. The rest has the extracted value.
                rest[name] = value
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                value = str(value)
            bound[name] = value
        bound[REST] = json_text(rest) if rest else None
        return tuple(bound[name] for name in self._managed)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


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


class SqliteSink:
    """SQLite sink. Through the outbox: `open`, then `write`. In the ledger's file: `prepare_in`
    once, then `write_in`, without the outbox.

    The position is in the target file and changes in the transaction that writes the rows. So a
    repeated batch writes nothing. The position is stored under an id, which the ledger records as
    the mark. A new ledger counts from 1 again, so it must not use the position of another one.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        table: str,
        *,
        append: bool,
        max_columns: int,
        new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self.name, self.path, self.notice = name, path, ""
        self.table = Table(table, append=append, max_columns=max_columns)
        self._new_id = new_id
        self._db: apsw.Connection | None = None
        self._id = ""
        self._opened_file: os.stat_result | None = None

    def open(self, position: int, mark: str) -> str:
        self.close()
        self.notice = ""
        with _outages(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = db = apsw.Connection(str(self.path))
            db.set_busy_timeout(5000)
            # The journal mode of the file is kept. With a rollback journal, only EXTRA is safe
            # after a power failure.
            db.execute("PRAGMA synchronous = EXTRA")
            with _transaction(db) as cursor:
                cursor.execute(
                    "CREATE TABLE IF NOT EXISTS _penstock_position "
                    "(sink TEXT, id TEXT, n INTEGER NOT NULL, PRIMARY KEY (sink, id)) WITHOUT ROWID"
                )
                last_row = (
                    cursor.execute(
                        "SELECT n FROM _penstock_position WHERE sink = ? AND id = ?",
                        (self.name, mark),
                    ).get
                    if mark
                    else None
                )
                self._id = mark if last_row is not None else self._new_id()
                if mark and last_row is None:
                    self.notice = (
                        f"{self.path} is not the database that row {position} was written to: "
                        "continuing after that row"
                    )
                elif last_row is not None and last_row < position:
                    self.notice = (
                        f"{self.path} is older than row {position} (its last row is {last_row}): "
                        f"continuing after row {position}"
                    )
                if last_row is None or last_row < position:
                    cursor.execute(
                        "INSERT OR REPLACE INTO _penstock_position (sink, id, n) VALUES (?, ?, ?)",
                        (self.name, self._id, position),
                    )
                self.table.prepare(cursor, adopt=True)
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
            with _transaction(self._db) as cursor:
                last_row = cursor.execute(
                    "SELECT n FROM _penstock_position WHERE sink = ? AND id = ?",
                    (self.name, self._id),
                ).get
                if last_row is None:
                    raise Reopen(f"{self.path} has lost its position")
                fresh = [row for row in rows if row.n > last_row]
                if fresh:
                    self.table.write(cursor, fresh)
                    cursor.execute(
                        "UPDATE _penstock_position SET n = ? WHERE sink = ? AND id = ?",
                        (fresh[-1].n, self.name, self._id),
                    )
        self.notice = self.notice or self.table.notice
        return self._id

    def close(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            db.close()

    def prepare_in(self, cursor: apsw.Cursor) -> None:
        """Prepare the table before the first `write_in`, in a transaction of the ledger's file.

        Raise ConfigError if the table is one of the ledger's own.
        """
        self.table.prepare(cursor, adopt=False)

    def write_in(self, cursor: apsw.Cursor, rows: Sequence[Row]) -> None:
        """Write rows in the caller's transaction, together with the success of their event."""
        if rows:
            self.table.write(cursor, rows)
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
def _transaction(db: apsw.Connection) -> Iterator[apsw.Cursor]:
    cursor = db.cursor()
    cursor.execute("BEGIN IMMEDIATE")
    try:
        yield cursor
        cursor.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            cursor.execute("ROLLBACK")
        raise


def is_transactional(url: str, store_path: Path, base: Path) -> bool:
    """Return True if the sink's table is in the ledger's file, so that both commit together.

    Return False for other URLs than sqlite.
    """
    if not url.startswith("sqlite:"):
        return False
    path, _ = file_url(url, {}, base, scheme="sqlite", known=_OPTIONS)
    return os.path.realpath(path) == os.path.realpath(store_path) or (
        path.exists() and store_path.exists() and path.samefile(store_path)
    )


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
    return SqliteSink(
        url,
        path,
        table,
        append=mode == "append",
        max_columns=option_max_columns(url, given, limit=1990),
    )
