"""The SQL of one PostgreSQL table that records fill: its columns, their types, the upsert. Runs in
the caller's transaction; opens nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import errors

from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Row
from penstock.sinks.common import PREFIX, PROVENANCE_COLUMNS, REST, Flat, flatten, json_text
from penstock.stores.sql import Tx

_ORDER = PREFIX + "order"
_KEY = PREFIX + "key"
# json, not jsonb, for the rest: it keeps the text as it is, and only it may hold a \u0000.
_OURS = dict.fromkeys(PROVENANCE_COLUMNS, "text") | {
    PREFIX + "version": "bigint",
    PREFIX + "fetched_at": "double precision",
    _ORDER: "bigint",
    REST: "json",
}
_BOOKS = "_penstock_columns"
_LONGEST_NAME = 63  # bytes; the server would cut a longer one and let two fields meet in one column
_LONGEST_KEY = 1000  # characters; an index entry must fit a third of a block
_TAKEN = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid", ""})
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
_EXACT = 1 << 53  # beyond it a double rounds an integer
_BUSY = "3s"  # how long a change of the table waits for those who read it
# What the table itself has against a row: a check, a domain, a row that is wider than a block. Not
# an outage.
_REFUSED = (
    psycopg.DataError,
    psycopg.IntegrityError,
    errors.ProgramLimitExceeded,
    errors.RaiseException,
    errors.CannotCoerce,
    errors.DatatypeMismatch,
)


class Table:
    def __init__(self, schema: str, name: str, *, append: bool, max_columns: int) -> None:
        self.schema, self.name, self.append, self.max_columns = schema, name, append, max_columns
        self.notice = ""
        self._types: dict[str, str] = {}  # by name: the server's name of the type
        self._managed: list[
            str
        ] = []  # columns that records fill: a newer row sets those it lacks to null, and no others
        self._made: set[str] = set()  # of these, the ones we made: only their type is ours to widen
        self._unbending: set[str] = (
            set()
        )  # columns that could not be widened or added when we tried
        self._insert = ""

    @property
    def _target(self) -> str:
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    @property
    def _books(self) -> str:
        return f"{quoted(self.schema)}.{_BOOKS}"

    def prepare(self, tx: Tx, *, adopt: bool) -> None:
        """Bookkeeping, and the index that fits the mode. `adopt`: a table somebody else made may be
        filled too. Raises ConfigError.
        """
        self._unbending.clear()
        try:
            with savepoint(tx):
                tx.execute(
                    f"CREATE TABLE IF NOT EXISTS {self._books} (of text, name text, made boolean NOT NULL, PRIMARY KEY (of, name))"
                )
        except errors.InvalidSchemaName as e:
            raise ConfigError(
                f"there is no schema {self.schema!r} for the table {self.name}",
                hint=f"CREATE SCHEMA {self.schema}, or another ?schema=",
            ) from e
        except errors.InsufficientPrivilege as e:
            raise ConfigError(
                f"no permission to make tables in the schema {self.schema!r}",
                hint=f"GRANT CREATE, USAGE ON SCHEMA {self.schema} TO this user",
            ) from e
        except errors.UniqueViolation:  # another process makes it at this very moment
            pass
        kind = self._load(tx)
        if kind is None:
            return
        if kind not in ("r", "p"):
            raise ConfigError(
                f"{self.name} is a view or something else that is no table; a sink fills a table",
                hint="choose another name with ?table=",
            )
        if not adopt:
            self._refuse_strangers()
        try:
            with savepoint(tx):
                self._widen(tx, {})
        except errors.InsufficientPrivilege as e:
            raise ConfigError(
                f"the table {self.name} cannot be changed by this user: its columns {PREFIX}… are missing or its index is",
                hint=f"ALTER TABLE {self.schema}.{self.name} OWNER TO this user, or choose another name with ?table=",
            ) from e

    def write(self, tx: Tx, rows: Sequence[Row]) -> None:
        """In order. What the table refuses of a row is kept as JSON in its rest; only a row that is
        refused even so is an error.
        """
        if self._load(tx) is None:
            self._types = {}
        self._refuse_strangers()
        flats = [(row, flatten(row.body)) for row in rows]
        new, wider = self._changes(flat for _, flat in flats if self.append or not flat.deleted)
        if new or wider or not self._managed:
            self._change(tx, new, wider)
            for _, flat in flats:
                for name in [
                    n for n in flat.fields if n not in self._types and flat.fields[n] is not None
                ]:
                    flat.rest[name] = flat.fields.pop(name)
        for removes, some in itertools.groupby(
            flats, lambda pair: pair[1].deleted and not self.append
        ):
            if removes:
                delete = f"DELETE FROM {self._target} WHERE {quoted(_KEY)} = ? AND coalesce({quoted(_ORDER)}, 0) <= ?"
                tx.executemany(delete, [(key_text(row.key), row.order) for row, _ in some])
            else:
                self._write_all(tx, list(some))

    def _write_all(self, tx: Tx, flats: Sequence[tuple[Row, Flat]]) -> None:
        bound = [self._bindings(row, flat) for row, flat in flats]
        try:
            with savepoint(tx):
                tx.executemany(self._insert, bound)
        except _REFUSED:
            for row, flat in flats:
                self._write_alone(tx, row, flat)

    def _write_alone(self, tx: Tx, row: Row, flat: Flat) -> None:
        try:
            with savepoint(tx):
                tx.execute(self._insert, self._bindings(row, flat))
            return
        except _REFUSED as e:
            first = _line(e)
        self.notice = (
            f"table {self.name}: it refuses some values ({first}); they are kept as JSON in {REST}"
        )
        flat.rest.update(flat.fields)
        flat.fields.clear()
        try:
            with savepoint(tx):
                tx.execute(self._insert, self._bindings(row, flat))
        except _REFUSED as e:
            raise StoreUnavailable(
                f"the table {self.name} refuses the row of {row.key[:100]!r}: {_line(e)}",
                hint="drop that constraint or give its column a default; rows wait until then",
            ) from e

    def _refuse_strangers(self) -> None:
        if self._types and not self._managed:
            raise ConfigError(
                f"the table {self.name} belongs to somebody else",
                hint="choose another name with ?table=",
            )

    # -- schema ------------------------------------------------------------------------------------

    def _load(self, tx: Tx) -> str | None:
        """The table as it is now (another process may have added to it); what kind of relation it
        is, None where there is none.
        """
        found = tx.execute(
            f"SELECT c.relkind::text, a.attname, t.typname, a.attgenerated <> '' OR a.attidentity = 'a', b.made FROM pg_catalog.pg_class c"
            f" JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
            f" LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
            f" LEFT JOIN pg_catalog.pg_type t ON t.oid = a.atttypid"
            f" LEFT JOIN {self._books} b ON b.of = c.relname AND b.name = a.attname WHERE n.nspname = ? AND c.relname = ? ORDER BY a.attnum",
            (self.schema, self.name),
        ).fetchall()
        self._types = {
            name: "" if fixed else kind for _, name, kind, fixed, _ in found if name is not None
        }
        self._managed = [
            name for _, name, _, fixed, made in found if made is not None and not fixed
        ]
        self._made = {name for _, name, _, _, made in found if made}
        self._prepare_insert()
        return found[0][0] if found else None

    def _changes(self, flats: Iterable[Flat]) -> tuple[dict[str, str], dict[str, str]]:
        """Columns to add, and columns to widen, with their types. What cannot have a column moves
        to the rest.
        """
        managed, new, wider = set(self._managed), dict[str, str](), dict[str, str]()
        room = self.max_columns - len(set(self._types) | set(_OURS))
        for flat in flats:
            for name in list(flat.fields):
                value = flat.fields[name]
                if name in managed:
                    if (
                        self._types[name] == "int8"
                        and name in self._made
                        and name not in self._unbending
                        and _outgrows(value)
                    ):
                        wider[name] = "numeric"
                elif value is None:  # no column before there is a value that says which
                    pass
                elif name in new:
                    if new[name] == "bigint" and _outgrows(value):
                        new[name] = "numeric"
                elif self._types.get(name):  # a column somebody else made, filled from now on
                    new[name] = ""
                elif (
                    name not in self._types
                    and room > 0
                    and name not in self._unbending
                    and _may_be_a_name(name)
                ):
                    new[name] = _declared(value)
                    room -= 1
                else:
                    flat.rest[name] = flat.fields.pop(name)
                    why = f"max_columns = {self.max_columns}, a name that is too long or not allowed, or a table that is busy or not ours to change"
                    self.notice = f"table {self.name}: some fields can have no column ({why}) and are kept as JSON in {REST}"
        return new, wider

    def _change(self, tx: Tx, new: Mapping[str, str], wider: Mapping[str, str]) -> None:
        """Where somebody reads the table for long, or a view stands on the column, it stays as it
        is and the values go to the rest.
        """
        try:
            with savepoint(tx):
                patience = tx.execute("SELECT current_setting('lock_timeout')").get
                tx.execute(f"SET LOCAL lock_timeout = '{_BUSY}'")
                for name, kind in wider.items():
                    tx.execute(
                        f"ALTER TABLE {self._target} ALTER COLUMN {quoted(name)} TYPE {kind}"
                    )
                self._widen(tx, new)
                tx.execute("SELECT set_config('lock_timeout', ?, true)", (patience,))
        except (
            errors.LockNotAvailable,
            errors.FeatureNotSupported,
            errors.InsufficientPrivilege,
            errors.ProgramLimitExceeded,
            errors.TooManyColumns,
        ) as e:
            if not self._managed:
                raise StoreUnavailable(
                    f"the table {self.name} cannot be made or changed: {_line(e)}",
                    hint="free it, or give this user the right to",
                ) from e
            self._unbending |= {*new, *wider}
            self.notice = f"table {self.name} could not be changed ({_line(e)}): new fields are kept as JSON in {REST} until the next start"
            self._load(tx)

    def _widen(self, tx: Tx, new: Mapping[str, str]) -> None:
        wanted = dict(new) | _OURS
        missing = {name: declared for name, declared in wanted.items() if name not in self._types}
        if not self._types:
            tx.execute(
                f"CREATE TABLE {self._target} ({', '.join(f'{quoted(name)} {declared}' for name, declared in missing.items())})"
            )
        elif missing:
            tx.execute(
                f"ALTER TABLE {self._target} {', '.join(f'ADD COLUMN {quoted(name)} {declared}' for name, declared in missing.items())}"
            )
        tx.executemany(
            f"INSERT INTO {self._books} (of, name, made) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            [(self.name, name, name in missing) for name in wanted if name not in self._managed],
        )
        index = (
            PREFIX + hashlib.sha256(self.name.encode()).hexdigest()[:16] + "_key"
        )  # made from the name, never longer than a name may be
        if self.append:
            tx.execute(f"DROP INDEX IF EXISTS {quoted(self.schema)}.{index}")
        else:
            try:
                tx.execute(
                    f"CREATE UNIQUE INDEX IF NOT EXISTS {index} ON {self._target} ({quoted(_KEY)})"
                ).fetchall()
            except errors.UniqueViolation as e:
                hint = "it was filled with mode=append: keep that mode, or choose another ?table="
                raise ConfigError(
                    f"the table {self.name} holds several rows of one key", hint=hint
                ) from e
        self._load(tx)

    def _prepare_insert(self) -> None:
        """Every value goes as text, and the server reads it as its column's type: one statement,
        whatever the rows hold. A connection keeps what it prepared, with the types of then: where
        they are others now, the text must be another one too.
        """
        names = self._managed
        types = zlib.crc32(" ".join(self._types[name] for name in names).encode())
        insert = f"/* {types:08x} */ INSERT INTO {self._target} AS _penstock_row ({', '.join(map(quoted, names))}) VALUES"
        self._insert = f"{insert} ({', '.join('?' * len(names))})"
        if not self.append:
            taken = ", ".join(
                f"{quoted(name)} = excluded.{quoted(name)}" for name in names if name != _KEY
            )
            order = quoted(_ORDER)
            self._insert += f" ON CONFLICT ({quoted(_KEY)}) DO UPDATE SET {taken} WHERE excluded.{order} >= coalesce(_penstock_row.{order}, excluded.{order})"

    # -- values ------------------------------------------------------------------------------------

    def _bindings(self, row: Row, flat: Flat) -> list[str | None]:
        values = flat.fields | flat.provenance
        values[_KEY], values[_ORDER] = key_text(row.key), row.order
        rest = dict(flat.rest)
        bound = dict[str, str | None]()
        for name in self._managed:
            value = values.get(name)
            bound[name], exact = (None, True) if value is None else _cell(value, self._types[name])
            if not exact and name in flat.fields:
                rest[name] = value  # the cell holds what its type can; the rest, what was extracted
        bound[REST] = json_text(rest) if rest else None
        return [bound[name] for name in self._managed]


def key_text(key: str) -> str:
    """The key as a cell that an index takes; one that is too long, or holds what text cannot, is
    told apart by its hash.
    """
    if len(key) <= _LONGEST_KEY and "\0" not in key:
        return key
    return f"{key[: _LONGEST_KEY - 70].replace(chr(0), '�')}…{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _cell(value: Any, kind: str) -> tuple[str | None, bool]:
    """What a column of this type holds for a value, as text, and whether that is all of it."""
    match _KINDS.get(kind, "other"):
        case "json":
            text = json_text(value)
            clean = (
                re.sub(r"(?<!\\)((?:\\\\)*)\\u0000", r"\1�", text) if "\\u0000" in text else text
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
            return repr(float(value)), exact and abs(value) <= _EXACT
        except OverflowError:
            return None, False
    return (
        json_text(value),
        exact,
    )  # digits as JSON has them: no limit on their number, and floats as short as they can be


def _outgrows(value: Any) -> bool:
    """A number that a bigint cannot hold."""
    if isinstance(value, float):
        return not value.is_integer() or abs(value) >= 1 << 63
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 63


def _declared(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "numeric" if _outgrows(value) else "bigint"
        case float():
            return "double precision"
        case dict() | list():
            return "jsonb"
    return "text"


def _may_be_a_name(name: str) -> bool:
    return (
        name not in _TAKEN
        and "\0" not in name
        and len(name.encode("utf-8", "surrogatepass")) <= _LONGEST_NAME
    )


def quoted(name: str) -> str:
    """As an identifier that holds nothing but letters, digits and escapes: whoever looks for a `?`
    or a quote in the statement finds none of ours.
    """
    if re.fullmatch(r"\w+", name):
        return f'"{name}"'
    return 'U&"' + re.sub(r"\W", lambda found: f"\\+{ord(found[0]):06x}", name) + '"'


@contextlib.contextmanager
def savepoint(tx: Tx) -> Iterator[None]:
    """What fails inside leaves the transaction as it was before."""
    tx.execute("SAVEPOINT penstock_table")
    try:
        yield
        tx.execute("RELEASE SAVEPOINT penstock_table").fetchall()  # looks at every answer before it
    except psycopg.Error:
        tx.execute("ROLLBACK TO SAVEPOINT penstock_table").fetchall()
        raise


def _line(e: BaseException) -> str:
    return str(e).partition("\n")[0]
