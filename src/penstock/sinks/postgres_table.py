"""SQL of one PostgreSQL table that records fill: columns, their types and the upsert.

Runs in the caller's transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import errors

from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Row
from penstock.sinks.columns import ORDER, ColumnTable
from penstock.sinks.common import PREFIX, PROVENANCE_COLUMNS, REST, Flat, json_text
from penstock.stores.sql import Tx

# json, not jsonb, for the rest: json keeps the text unchanged, and only json may contain \u0000.
_PENSTOCK_COLUMNS = dict.fromkeys(PROVENANCE_COLUMNS, "text") | {
    PREFIX + "version": "bigint",
    PREFIX + "fetched_at": "double precision",
    ORDER: "bigint",
    REST: "json",
}
_COLUMNS_TABLE = "_penstock_columns"
# Bytes. The server would truncate a longer name, and two fields could use one column.
_MAX_NAME_BYTES = 63
_MAX_KEY_CHARACTERS = 1000  # characters. An index entry must fit into a third of a block.
_SYSTEM_COLUMNS = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid", ""})
_INTEGERS = {"int2": 1 << 15, "int4": 1 << 31, "int8": 1 << 63}
_KINDS = dict.fromkeys(_INTEGERS, "int") | {
    "numeric": "numeric",
    "float4": "float",
    "float8": "float",
    "bool": "bool",
    "json": "json",
    "jsonb": "json",
}
_KINDS |= dict.fromkeys(("text", "varchar", "bpchar"), "text")
_NUMBER = re.compile(
    r"\s*[+-]?(\d{1,1000}\.?\d{0,1000}|\.\d{1,1000})([eE][+-]?\d{1,3})?\s*", re.ASCII
)
_MAX_EXACT = 1 << 53  # above this, a double rounds an integer
_LOCK_TIMEOUT = "3s"  # how long a change of the table waits for transactions that use the table
# Errors of the table for one row: a check, a domain, a row that is wider than a block. They are not
# an outage.
_ROW_ERRORS = (
    psycopg.DataError,
    psycopg.IntegrityError,
    errors.ProgramLimitExceeded,
    errors.RaiseException,
    errors.CannotCoerce,
    errors.DatatypeMismatch,
)


def quoted(name: str) -> str:
    """Return a quoted identifier of letters, digits and escapes only.

    So it never contains a `?` or a quote, which statements are searched for.
    """
    if re.fullmatch(r"\w+", name):
        return f'"{name}"'
    return 'U&"' + re.sub(r"\W", lambda found: f"\\+{ord(found[0]):06x}", name) + '"'


class PostgresTable(ColumnTable):
    own_columns = _PENSTOCK_COLUMNS
    table_kinds = ("r", "p")
    not_unique = errors.UniqueViolation
    quoted = staticmethod(quoted)

    def __init__(self, schema: str, name: str, *, append: bool, max_columns: int) -> None:
        # A hash of the name, which is never too long for an index name.
        index = PREFIX + hashlib.sha256(name.encode()).hexdigest()[:16] + "_key"
        super().__init__(
            name, schema=quoted(schema) + ".", index=index, append=append, max_columns=max_columns
        )
        self.schema = schema
        self._made: set[str] = set()  # managed columns created by this sink, whose type may change
        # Columns that could not be widened or added.
        self._unchangeable: set[str] = set()
        self._columns_table = f"{quoted(schema)}.{_COLUMNS_TABLE}"

    def _create_columns_table(self, tx: Tx) -> None:
        self._unchangeable.clear()
        try:
            with savepoint(tx):
                tx.execute(
                    f"CREATE TABLE IF NOT EXISTS {self._columns_table} "
                    "(of text, name text, made boolean NOT NULL, PRIMARY KEY (of, name))"
                )
        except errors.InvalidSchemaName as e:
            raise ConfigError(
                f"there is no schema {self.schema!r} for the table {self.name}",
                hint=f"run CREATE SCHEMA {self.schema}, or use another ?schema=",
            ) from e
        except errors.InsufficientPrivilege as e:
            raise ConfigError(
                f"no permission to create tables in the schema {self.schema!r}",
                hint=f"run GRANT CREATE, USAGE ON SCHEMA {self.schema} TO this user",
            ) from e
        except errors.UniqueViolation:  # another process creates it at the same time
            pass

    def _add_own_columns(self, tx: Tx) -> None:
        try:
            with savepoint(tx):
                super()._add_own_columns(tx)
        except errors.InsufficientPrivilege as e:
            raise ConfigError(
                f"this user cannot change the table {self.name}: "
                f"its columns {PREFIX}… or its index are missing",
                hint=f"run ALTER TABLE {self.schema}.{self.name} OWNER TO this user, "
                "or choose another name with ?table=",
            ) from e

    def _fit(self, tx: Tx, flats: Sequence[Flat]) -> None:
        """Add and widen columns. Values that the table rejects are kept as JSON in the rest."""
        new, wider = self._needed_changes(flats)
        if new or wider or not self._managed:
            self._change_table(tx, new, wider)
            for flat in flats:
                for name in [
                    n for n in flat.fields if n not in self._types and flat.fields[n] is not None
                ]:
                    flat.rest[name] = flat.fields.pop(name)

    def _insert_rows(self, tx: Tx, flats: Sequence[tuple[Row, Flat]]) -> None:
        try:
            with savepoint(tx):
                super()._insert_rows(tx, flats)
        except _ROW_ERRORS:
            for row, flat in flats:
                self._write_alone(tx, row, flat)

    def _write_alone(self, tx: Tx, row: Row, flat: Flat) -> None:
        try:
            with savepoint(tx):
                tx.execute(self._insert, self._bindings(row, flat))
            return
        except _ROW_ERRORS as e:
            first_error = _line(e)
        self.notice = (
            f"table {self.name}: it refuses some values ({first_error}), "
            f"which are kept as JSON in {REST}"
        )
        flat.rest.update(flat.fields)
        flat.fields.clear()
        try:
            with savepoint(tx):
                tx.execute(self._insert, self._bindings(row, flat))
        except _ROW_ERRORS as e:
            raise StoreUnavailable(
                f"the table {self.name} refuses the row of {row.key[:100]!r}: {_line(e)}",
                hint="drop that constraint or give its column a default. Rows wait until then",
            ) from e

    # -- schema ------------------------------------------------------------------------------------

    def _load(self, tx: Tx) -> str | None:
        found = tx.execute(
            f"SELECT c.relkind::text, a.attname, t.typname,"
            f" a.attgenerated <> '' OR a.attidentity = 'a', b.made FROM pg_catalog.pg_class c"
            f" JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
            f" LEFT JOIN pg_catalog.pg_attribute a"
            f" ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
            f" LEFT JOIN pg_catalog.pg_type t ON t.oid = a.atttypid"
            f" LEFT JOIN {self._columns_table} b ON b.of = c.relname AND b.name = a.attname"
            f" WHERE n.nspname = ? AND c.relname = ? ORDER BY a.attnum",
            (self.schema, self.name),
        ).fetchall()
        self._types = {
            name: "" if fixed else kind for _, name, kind, fixed, _ in found if name is not None
        }
        self._managed = [
            name for _, name, _, fixed, made in found if made is not None and not fixed
        ]
        self._made = {name for _, name, _, _, made in found if made}
        # Every value is sent as text, and the server converts it to the type of its column. So one
        # statement is enough for all rows. A connection caches prepared statements by their text
        # with the types of that time. The comment gives changed types another text.
        types = zlib.crc32(" ".join(self._types[name] for name in self._managed).encode())
        self._insert = f"/* {types:08x} */ {self._insert_statement()}"
        return found[0][0] if found else None

    def _needed_changes(self, flats: Iterable[Flat]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the columns to add and the columns to widen, with their types.

        Fields that cannot have a column move to the rest.
        """
        managed, new, wider = set(self._managed), dict[str, str](), dict[str, str]()
        columns_left = self.max_columns - len(set(self._types) | set(_PENSTOCK_COLUMNS))
        for flat in flats:
            for name in list(flat.fields):
                value = flat.fields[name]
                if name in managed:
                    if (
                        self._types[name] == "int8"
                        and name in self._made
                        and name not in self._unchangeable
                        and _exceeds_bigint(value)
                    ):
                        wider[name] = "numeric"
                elif value is None:  # the first value that is not null decides the type
                    pass
                elif name in new:
                    if new[name] == "bigint" and _exceeds_bigint(value):
                        new[name] = "numeric"
                elif self._types.get(name):  # a column of another application, filled from now on
                    new[name] = ""
                elif (
                    name not in self._types
                    and columns_left > 0
                    and name not in self._unchangeable
                    and _is_valid_name(name)
                ):
                    new[name] = _column_type(value)
                    columns_left -= 1
                else:
                    why = (
                        "a name that is too long or not allowed, or a table that is busy or not "
                        "owned by this user"
                    )
                    self._move_to_rest(flat, name, why)
        return new, wider

    def _change_table(self, tx: Tx, new: Mapping[str, str], wider: Mapping[str, str]) -> None:
        """Add and widen columns.

        If a transaction uses the table for long, or a view needs the column, the table stays
        unchanged and the values are kept in the rest.
        """
        try:
            with savepoint(tx):
                lock_timeout = tx.execute("SELECT current_setting('lock_timeout')").get
                tx.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
                for name, kind in wider.items():
                    tx.execute(
                        f"ALTER TABLE {self._target} ALTER COLUMN {quoted(name)} TYPE {kind}"
                    )
                self._add_columns(tx, new)
                tx.execute("SELECT set_config('lock_timeout', ?, true)", (lock_timeout,))
        except (
            errors.LockNotAvailable,
            errors.FeatureNotSupported,
            errors.InsufficientPrivilege,
            errors.ProgramLimitExceeded,
            errors.TooManyColumns,
        ) as e:
            if not self._managed:
                raise StoreUnavailable(
                    f"the table {self.name} cannot be created or changed: {_line(e)}",
                    hint="end the transactions that use it, or give this user the right to",
                ) from e
            self._unchangeable |= {*new, *wider}
            self.notice = (
                f"table {self.name} could not be changed ({_line(e)}): "
                f"new fields are kept as JSON in {REST} until the next start"
            )
            self._load(tx)

    def _record_columns(self, tx: Tx, wanted: Iterable[str], missing: Mapping[str, str]) -> None:
        tx.executemany(
            f"INSERT INTO {self._columns_table} (of, name, made) VALUES (?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            [(self.name, name, name in missing) for name in wanted if name not in self._managed],
        )

    # -- values ------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        """Return the key as text for an index.

        A key that is too long or contains NUL is shortened, without NUL, and gets a hash of the
        whole key.
        """
        if len(key) <= _MAX_KEY_CHARACTERS and "\0" not in key:
            return key
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{key[: _MAX_KEY_CHARACTERS - 70].replace(chr(0), '�')}…{digest}"

    def _cell(self, value: Any, kind: str) -> tuple[str | None, bool]:
        match _KINDS.get(kind, "other"):
            case "json":
                text = json_text(value)
                clean = (
                    re.sub(r"(?<!\\)((?:\\\\)*)\\u0000", r"\1�", text)
                    if "\\u0000" in text
                    else text
                )
                return clean, clean == text
            case "int" | "numeric" | "float" as family:
                return _number(value, family, _INTEGERS.get(kind, 0))
            case "bool":
                return (str(value).lower(), True) if isinstance(value, bool) else (None, False)
        text = value if isinstance(value, str) else json_text(value)
        return text.replace("\0", "�"), "\0" not in text


def _number(value: Any, family: str, bound: int) -> tuple[str | None, bool]:
    exact = not isinstance(value, str | bool)
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            return None, False
        value = (
            float(value)
            if family == "float" or not re.fullmatch(r"\s*[+-]?\d+\s*", value)
            else int(value)
        )
    if isinstance(value, bool):
        value = int(value)
    if not isinstance(value, int | float) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        return None, False
    if family == "int":
        if isinstance(value, float) and not value.is_integer():
            return None, False
        value = int(value)
        return (str(value), exact) if -bound <= value < bound else (None, False)
    if family == "float" and isinstance(value, int):
        try:
            return repr(float(value)), exact and abs(value) <= _MAX_EXACT
        except OverflowError:
            return None, False
    # Digits as in JSON: any number of them, and floats in their shortest form.
    return json_text(value), exact


def _exceeds_bigint(value: Any) -> bool:
    """Return True for a number that does not fit into a bigint."""
    if isinstance(value, float):
        return not value.is_integer() or abs(value) >= 1 << 63
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 63


def _column_type(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "numeric" if _exceeds_bigint(value) else "bigint"
        case float():
            return "double precision"
        case dict() | list():
            return "jsonb"
    return "text"


def _is_valid_name(name: str) -> bool:
    return (
        name not in _SYSTEM_COLUMNS
        and "\0" not in name
        and len(name.encode("utf-8", "surrogatepass")) <= _MAX_NAME_BYTES
    )


@contextlib.contextmanager
def savepoint(tx: Tx) -> Iterator[None]:
    """Roll back to the state before, if a statement inside fails."""
    tx.execute("SAVEPOINT penstock_table")
    try:
        yield
        tx.execute("RELEASE SAVEPOINT penstock_table").fetchall()  # reads all results before it
    except psycopg.Error:
        tx.execute("ROLLBACK TO SAVEPOINT penstock_table").fetchall()
        raise


def _line(e: BaseException) -> str:
    return str(e).partition("\n")[0]
