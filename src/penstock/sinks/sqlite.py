"""Records as rows of a SQLite table: one per key (or one per record), in a file of its own or in
the caller's transaction. Not the ledger, not the broker.
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
_OURS = dict.fromkeys(PROVENANCE_COLUMNS, "TEXT") | {
    PREFIX + "version": "INTEGER",
    PREFIX + "fetched_at": "",
    _ORDER: "INTEGER",
    REST: "TEXT",
}
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_EXACT = 1 << 53  # beyond it a REAL column rounds an integer


class Table:
    """The SQL of one table, on whatever cursor it is given; every method runs inside the caller's
    transaction.
    """

    def __init__(self, name: str, *, append: bool, max_columns: int) -> None:
        self.name, self.append, self.max_columns = name, append, max_columns
        self.notice = ""
        self._version: int | None = None  # the schema the rest was read from; None: read it again
        self._types: dict[str, str] = {}  # by exact name: affinity, "" for none
        self._folded: set[bytes] = set()  # every name the table has, as SQLite compares them
        self._managed: list[
            str
        ] = []  # columns that records fill: a newer row sets those it lacks to null, and no others
        self._insert = ""
        order = _q(_ORDER)
        self._delete = f"DELETE FROM {_q(name)} WHERE {_q(_KEY)} = ?1 AND ifnull({order}, ?2) <= ?2"

    def prepare(self, cursor: apsw.Cursor, *, adopt: bool) -> None:
        """Bookkeeping, and the index that fits the mode. `adopt`: a table somebody else made may be
        filled too. Raises ConfigError.
        """
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS _penstock_columns (of TEXT, name TEXT, PRIMARY KEY (of, name)) WITHOUT ROWID"
        )
        self._version = None
        kind = cursor.execute(
            "SELECT type FROM sqlite_schema WHERE name = ?1 COLLATE NOCASE AND type IN ('table', 'view')",
            (self.name,),
        ).get
        if kind is None:
            return
        self._load(cursor)
        if kind != "table":
            raise ConfigError(
                f"{self.name} is a view; a sink fills a table",
                hint="choose another name with ?table=",
            )
        if not adopt:
            self._refuse_strangers()
        self._widen(cursor, {})

    def write(self, cursor: apsw.Cursor, rows: Sequence[Row]) -> None:
        """In order. A rolled back transaction leaves nothing behind, not even here."""
        try:
            self._write(cursor, rows)
        except (
            apsw.SQLError
        ):  # the schema moved under us (another process; our own change, rolled back)
            self._version = None
            self._write(cursor, rows)

    def _write(self, cursor: apsw.Cursor, rows: Sequence[Row]) -> None:
        if self._version is None or self._version != cursor.execute("PRAGMA schema_version").get:
            self._load(cursor)
        self._refuse_strangers()
        flats = [(row, flatten(row.body)) for row in rows]
        new = self._new_columns(flat for _, flat in flats if self.append or not flat.deleted)
        if new or not self._managed:
            self._widen(cursor, new)
            self._version = None  # until the caller commits this is only what may become true
        for removes, some in itertools.groupby(
            flats, lambda pair: pair[1].deleted and not self.append
        ):
            if removes:
                cursor.executemany(self._delete, [(row.key, row.order) for row, _ in some])
            else:
                cursor.executemany(self._insert, [self._bindings(row, flat) for row, flat in some])

    def _refuse_strangers(self) -> None:
        if self._types and not self._managed:
            raise ConfigError(
                f"the table {self.name} belongs to somebody else",
                hint="choose another name with ?table=",
            )

    # -- schema ------------------------------------------------------------------------------------

    def _load(self, cursor: apsw.Cursor) -> None:
        found = list(
            cursor.execute("SELECT name, type, hidden FROM pragma_table_xinfo(?)", (self.name,))
        )
        self._types = {name: _affinity(declared) for name, declared, hidden in found if hidden == 0}
        self._folded = {_fold(name) for name, _, _ in found}
        has_books = cursor.execute(
            "SELECT 1 FROM sqlite_schema WHERE name = '_penstock_columns'"
        ).get
        mine = (
            list(cursor.execute("SELECT name FROM _penstock_columns WHERE of = ?", (self.name,)))
            if has_books
            else []
        )
        self._managed = [name for (name,) in mine if name in self._types]
        self._prepare_insert()
        self._version = cursor.execute("PRAGMA schema_version").get

    def _new_columns(self, flats: Iterable[Flat]) -> dict[str, str]:
        """Fields to add, with their type by the first value. What cannot have a column (too many,
        same name but for case) moves to the rest.
        """
        managed, new, folded = set(self._managed), dict[str, str](), set(self._folded)
        undecided = set[str]()
        ours = {_fold(name) for name in _OURS}
        room = self.max_columns - len(folded | ours)
        for flat in flats:
            for name in list(flat.fields):
                if name in managed:
                    continue
                value = flat.fields[name]
                if name in new:
                    if name in undecided and value is not None:
                        new[name] = _declared(value)
                        undecided.discard(name)
                elif name in self._types:  # a column somebody else made, filled from now on
                    new[name] = ""
                elif _fold(name) not in folded | ours and room > 0 and "\0" not in name:
                    new[name] = _declared(value)
                    if value is None:
                        undecided.add(name)
                    folded.add(_fold(name))
                    room -= 1
                else:
                    flat.rest[name] = flat.fields.pop(name)
                    why = f"max_columns = {self.max_columns}, or a name that differs from another by case only"
                    self.notice = f"table {self.name}: some fields can have no column ({why}) and are kept as JSON in {REST}"
        return new

    def _widen(self, cursor: apsw.Cursor, new: Mapping[str, str]) -> None:
        wanted = dict(new) | _OURS
        missing = {name: declared for name, declared in wanted.items() if name not in self._types}
        if not self._types:
            cursor.execute(
                f"CREATE TABLE {_q(self.name)} ({', '.join(f'{_q(name)} {declared}' for name, declared in missing.items())})"
            )
        else:
            for name, declared in missing.items():
                cursor.execute(f"ALTER TABLE {_q(self.name)} ADD COLUMN {_q(name)} {declared}")
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS _penstock_columns (of TEXT, name TEXT, PRIMARY KEY (of, name)) WITHOUT ROWID"
        )
        cursor.executemany(
            "INSERT OR IGNORE INTO _penstock_columns (of, name) VALUES (?, ?)",
            [(self.name, name) for name in wanted],
        )
        index = _q(f"{PREFIX}{self.name}_key")
        if self.append:
            cursor.execute(f"DROP INDEX IF EXISTS {index}")
        else:
            try:
                cursor.execute(
                    f"CREATE UNIQUE INDEX IF NOT EXISTS {index} ON {_q(self.name)} ({_q(_KEY)})"
                )
            except apsw.ConstraintError as e:
                hint = "it was filled with mode=append: keep that mode, or choose another ?table="
                raise ConfigError(
                    f"the table {self.name} holds several rows of one key", hint=hint
                ) from e
        self._load(cursor)

    def _prepare_insert(self) -> None:
        names = self._managed
        self._insert = f"INSERT INTO {_q(self.name)} AS _penstock_row ({', '.join(map(_q, names))}) VALUES ({', '.join('?' * len(names))})"
        if not self.append:
            taken = ", ".join(f"{_q(name)} = excluded.{_q(name)}" for name in names if name != _KEY)
            order = _q(_ORDER)
            self._insert += f" ON CONFLICT ({_q(_KEY)}) DO UPDATE SET {taken} WHERE excluded.{order} >= ifnull(_penstock_row.{order}, excluded.{order})"

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
                rest[name] = (
                    value  # the cell holds what SQLite makes of it; the rest, what was extracted
                )
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                value = str(value)
            bound[name] = value
        bound[REST] = json_text(rest) if rest else None
        return tuple(bound[name] for name in self._managed)


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _fold(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass").lower()  # bytes: ASCII only, as SQLite does


def _declared(value: Any) -> str:
    if isinstance(value, int):  # bool too
        return "INTEGER" if -(1 << 63) <= value < 1 << 63 else "TEXT"
    return "" if value is None else "REAL" if isinstance(value, float) else "TEXT"


def _affinity(declared: str) -> str:
    """SQLite's own five rules."""
    kind = declared.upper()
    if "INT" in kind:
        return "INTEGER"
    if any(part in kind for part in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if not kind or "BLOB" in kind:
        return ""
    return "REAL" if any(part in kind for part in ("REAL", "FLOA", "DOUB")) else "NUMERIC"


def _altered(value: Any, affinity: str) -> bool:
    """A numeric column turns text that looks like a number into one: "007" would come back as 7."""
    if affinity in ("", "TEXT"):
        return False
    if isinstance(value, str):
        return _NUMBER.fullmatch(value) is not None
    return isinstance(value, int) and (
        abs(value) >= 1 << 63 or (affinity == "REAL" and abs(value) > _EXACT)
    )


class SqliteSink:
    """Through the outbox: `open`, `write`. In the ledger's own file: `prepare_in` once, then
    `write_in`, and the outbox is not needed.

    The position lies in the target itself and moves in the transaction that writes the rows, so a
    batch that comes again writes nothing. It is kept under an id that the ledger notes as the mark:
    a ledger that starts anew counts from one again, and is a stranger here.
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
        self._is: os.stat_result | None = None

    def open(self, position: int, mark: str) -> str:
        self.close()
        self.notice = ""
        with _outages(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = db = apsw.Connection(str(self.path))
            db.set_busy_timeout(5000)
            db.execute(
                "PRAGMA synchronous = EXTRA"
            )  # the file's own journal mode stays; with a rollback journal only EXTRA survives a power cut
            with _transaction(db) as cursor:
                cursor.execute(
                    "CREATE TABLE IF NOT EXISTS _penstock_position (sink TEXT, id TEXT, n INTEGER NOT NULL, PRIMARY KEY (sink, id)) WITHOUT ROWID"
                )
                reached = (
                    cursor.execute(
                        "SELECT n FROM _penstock_position WHERE sink = ? AND id = ?",
                        (self.name, mark),
                    ).get
                    if mark
                    else None
                )
                self._id = mark if reached is not None else self._new_id()
                if mark and reached is None:
                    self.notice = f"{self.path} is not the database that row {position} was written to: going on from there"
                elif reached is not None and reached < position:
                    self.notice = f"{self.path} is older than row {position} (it has {reached}): going on from there"
                if reached is None or reached < position:
                    cursor.execute(
                        "INSERT OR REPLACE INTO _penstock_position (sink, id, n) VALUES (?, ?, ?)",
                        (self.name, self._id, position),
                    )
                self.table.prepare(cursor, adopt=True)
            self._is = os.stat(self.path)
        return self._id

    def write(self, rows: Sequence[Row]) -> str:
        if self._db is None or self._is is None:
            raise Reopen(f"{self.path} is not open")
        with _outages(self.path):
            try:
                in_place = os.path.samestat(os.stat(self.path), self._is)
            except FileNotFoundError:
                in_place = False
            if not in_place:
                raise Reopen(f"{self.path} was moved or removed")
            with _transaction(self._db) as cursor:
                reached = cursor.execute(
                    "SELECT n FROM _penstock_position WHERE sink = ? AND id = ?",
                    (self.name, self._id),
                ).get
                if reached is None:
                    raise Reopen(f"{self.path} forgot its position")
                fresh = [row for row in rows if row.n > reached]
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
        """Before the first `write_in`, in a transaction of the ledger's file. Raises ConfigError:
        the table is one of the ledger's own.
        """
        self.table.prepare(cursor, adopt=False)

    def write_in(self, cursor: apsw.Cursor, rows: Sequence[Row]) -> None:
        """The same rows in the caller's transaction, which is what makes them one with the success
        of their event.
        """
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
            else "check free space, permissions and who else has it open"
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
    """The sink's table lies in the ledger's own file, so both commit at once. False for what is no
    sqlite URL.
    """
    if not url.startswith("sqlite:"):
        return False
    path, _ = file_url(url, {}, base, scheme="sqlite", known=_OPTIONS)
    return os.path.realpath(path) == os.path.realpath(store_path) or (
        path.exists() and store_path.exists() and path.samefile(store_path)
    )


_OPTIONS = ("table", "mode", "max_columns")


def open_sink(url: str, options: Mapping[str, Any], base: Path) -> SqliteSink:
    """`sqlite:products.db?table=products`. Checks, and opens nothing yet. Raises ConfigError."""
    path, given = file_url(url, options, base, scheme="sqlite", known=_OPTIONS)
    table, mode = str(given.get("table", "records")), given.get("mode", "upsert")
    if not table or "\0" in table or table.lower().startswith(("sqlite_", PREFIX)):
        hint = f"add ?table=products; names that begin with sqlite_ or {PREFIX} are taken"
        raise ConfigError(f"sink {url!r}: {table!r} cannot be the name of its table", hint=hint)
    if mode not in ("upsert", "append"):
        raise ConfigError(
            f"sink {url!r}: mode is {mode!r}",
            hint="upsert (one row per key, the newest) or append (one row per record)",
        )
    return SqliteSink(
        url,
        path,
        table,
        append=mode == "append",
        max_columns=option_max_columns(url, given, most=1990),
    )
