"""Common parts of table sinks: the columns that records fill, and the position of a sink."""

from __future__ import annotations

import abc
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.ports import Reopen, Row
from penstock.sinks.common import PREFIX, REST, Flat, flatten, json_text
from penstock.stores.sql import Tx

ORDER = PREFIX + "order"
KEY = PREFIX + "key"


class ColumnTable(abc.ABC):
    """SQL of one table that records fill. It runs in the caller's transaction."""

    own_columns: dict[str, str]  # columns of Penstock -> type
    table_kinds: tuple[str, ...]  # kinds of relations that records can fill
    not_unique: type[Exception]  # error of the database if the index cannot be created
    quoted: Callable[[str], str]  # quotes an identifier

    def __init__(
        self, name: str, *, schema: str = "", index: str, append: bool, max_columns: int
    ) -> None:
        """`index` is the quoted name of the index on the key. `schema` ends with a dot."""
        self.name, self.append, self.max_columns = name, append, max_columns
        self.notice = ""
        self._target = schema + self.quoted(name)
        self._schema, self._index = schema, index
        self._types: dict[str, str] = {}  # by name: the type, as far as `_cell` needs it
        # Columns that records fill. A newer row sets missing ones to null, but no other columns.
        self._managed: list[str] = []
        self._insert = ""
        self._delete = (
            f"DELETE FROM {self._target} WHERE {self.quoted(KEY)} = ? "
            f"AND coalesce({self.quoted(ORDER)}, 0) <= ?"
        )

    # -- what each database does in its own way ----------------------------------------------------

    @abc.abstractmethod
    def _create_columns_table(self, tx: Tx) -> None:
        """Create the table that lists the columns that records fill, if it does not exist."""

    @abc.abstractmethod
    def _load(self, tx: Tx) -> str | None:
        """Read the current columns, which another process may have changed.

        Return the kind of the relation, or None if it does not exist.
        """

    @abc.abstractmethod
    def _fit(self, tx: Tx, flats: Sequence[Flat]) -> None:
        """Add the columns that these records need. Other fields move to the rest."""

    @abc.abstractmethod
    def _record_columns(self, tx: Tx, wanted: Iterable[str], missing: Mapping[str, str]) -> None:
        """Record the columns that records fill. `missing` are those that were added now."""

    @abc.abstractmethod
    def _cell(self, value: Any, kind: str) -> tuple[Any, bool]:
        """Return the value for a column of this type, and whether the column keeps it exactly."""

    def _key(self, key: str) -> str:
        """Return a record key as the text of the key column."""
        return key

    def _insert_rows(self, tx: Tx, flats: Sequence[tuple[Row, Flat]]) -> None:
        tx.executemany(self._insert, [self._bindings(row, flat) for row, flat in flats])

    def prepare(self, tx: Tx, *, adopt: bool) -> None:
        """Create the table of columns, and the index for the mode.

        With `adopt`, an existing table of another application is filled too. Raise ConfigError if
        the table cannot be created or used.
        """
        self._create_columns_table(tx)
        kind = self._load(tx)
        if kind is None:
            return
        if kind not in self.table_kinds:
            raise ConfigError(
                f"{self.name} is a view or another relation, but a sink needs a table",
                hint="choose another name with ?table=",
            )
        if not adopt:
            self._refuse_other_tables()
        self._add_own_columns(tx)

    # -- columns -----------------------------------------------------------------------------------

    def _refuse_other_tables(self) -> None:
        if self._types and not self._managed:
            raise ConfigError(
                f"the table {self.name} belongs to another application",
                hint="choose another name with ?table=",
            )

    def _move_to_rest(self, flat: Flat, name: str, why: str) -> None:
        """Keep a field that can have no column in the rest."""
        flat.rest[name] = flat.fields.pop(name)
        self.notice = (
            f"table {self.name}: some fields can have no column (max_columns = "
            f"{self.max_columns}, {why}) and are kept as JSON in {REST}"
        )

    def _add_own_columns(self, tx: Tx) -> None:
        """Add the sink's own columns and its index to an existing table."""
        self._add_columns(tx, {})

    def _add_columns(self, tx: Tx, new: Mapping[str, str]) -> None:
        """Create the table, or add the missing columns. Create the index for the mode."""
        wanted = {**new, **self.own_columns}
        missing = {name: declared for name, declared in wanted.items() if name not in self._types}
        columns = [f"{self.quoted(name)} {declared}" for name, declared in missing.items()]
        if not self._types:
            tx.execute(f"CREATE TABLE {self._target} ({', '.join(columns)})")
        else:
            for column in columns:
                tx.execute(f"ALTER TABLE {self._target} ADD COLUMN {column}")
        self._record_columns(tx, wanted, missing)
        if self.append:
            tx.execute(f"DROP INDEX IF EXISTS {self._schema}{self._index}")
        else:
            try:
                tx.execute(
                    f"CREATE UNIQUE INDEX IF NOT EXISTS {self._index} "
                    f"ON {self._target} ({self.quoted(KEY)})"
                ).fetchall()
            except self.not_unique as e:
                hint = "keep mode=append, with which it was filled, or choose another ?table="
                raise ConfigError(
                    f"the table {self.name} has several rows of one key", hint=hint
                ) from e
        self._load(tx)

    def _insert_statement(self) -> str:
        names = [self.quoted(name) for name in self._managed]
        insert = (
            f"INSERT INTO {self._target} AS _penstock_row ({', '.join(names)}) "
            f"VALUES ({', '.join('?' * len(names))})"
        )
        if self.append:
            return insert
        key, order = self.quoted(KEY), self.quoted(ORDER)
        assignments = ", ".join(f"{name} = excluded.{name}" for name in names if name != key)
        return (
            f"{insert} ON CONFLICT ({key}) DO UPDATE SET {assignments} "
            f"WHERE excluded.{order} >= coalesce(_penstock_row.{order}, excluded.{order})"
        )

    # -- rows --------------------------------------------------------------------------------------

    def write(self, tx: Tx, rows: Sequence[Row]) -> None:
        """Write rows in order."""
        self._load(tx)
        self._refuse_other_tables()
        flats = [(row, flatten(row.body)) for row in rows]
        self._fit(tx, [flat for _, flat in flats if self.append or not flat.deleted])
        for removes, group in itertools.groupby(
            flats, lambda pair: pair[1].deleted and not self.append
        ):
            if removes:
                tx.executemany(self._delete, [(self._key(row.key), row.order) for row, _ in group])
            else:
                self._insert_rows(tx, list(group))

    def _bindings(self, row: Row, flat: Flat) -> list[Any]:
        values = flat.fields | flat.provenance
        values[KEY], values[ORDER] = self._key(row.key), row.order
        rest = dict(flat.rest)
        bound = dict[str, Any]()
        for name in self._managed:
            value = values.get(name)
            bound[name], exact = (
                (None, True) if value is None else self._cell(value, self._types[name])
            )
            if not exact and name in flat.fields:
                # The cell has the value as far as its type allows, the rest the extracted value.
                rest[name] = value
        bound[REST] = json_text(rest) if rest else None
        return [bound[name] for name in self._managed]


class PositionedSink:
    """Sink that writes to a table, and its position to the same database.

    The position changes in the transaction that writes the rows. So a repeated batch writes
    nothing. The position is stored under an id, which the ledger records as the mark. A new ledger
    counts from 1 again, so it must not use the position of another one.
    """

    lock = ""  # end of the query that reads the position

    def __init__(self, name: str, place: str, positions: str, table: ColumnTable) -> None:
        """`place` names the target in messages. `positions` is the quoted table of positions."""
        self.name, self.place, self.table, self.notice = name, place, table, ""
        self._positions, self._id = positions, ""

    def _last_row(self, tx: Tx, mark: str) -> int | None:
        """Return the last row that was written under this id, or None if there is no position."""
        found: int | None = tx.execute(
            f"SELECT n FROM {self._positions} WHERE sink = ? AND id = ?{self.lock}",
            (self.name, mark),
        ).get
        return found

    def _set_position(self, tx: Tx, n: int) -> None:
        tx.execute(
            f"INSERT INTO {self._positions} (sink, id, n) VALUES (?, ?, ?) "
            "ON CONFLICT (sink, id) DO UPDATE SET n = excluded.n",
            (self.name, self._id, n),
        )

    def _resume(self, tx: Tx, position: int, mark: str) -> None:
        """Continue after the ledger's position, under the id of `mark` if the target knows it."""
        last_row = self._last_row(tx, mark) if mark else None
        self._id = mark if last_row is not None else secrets.token_hex(8)
        if mark and last_row is None:
            self.notice = (
                f"{self.place} is not the database that row {position} was written to: "
                "continuing after that row"
            )
        elif last_row is not None and last_row < position:
            self.notice = (
                f"{self.place} is older than row {position} (its last row is {last_row}): "
                f"continuing after row {position}"
            )
        if last_row is None or last_row < position:
            self._set_position(tx, position)

    def _write_new_rows(self, tx: Tx, rows: Sequence[Row]) -> None:
        """Write the rows after the position, and the new position."""
        last_row = self._last_row(tx, self._id)
        if last_row is None:
            raise Reopen(f"{self.place} has lost its position")
        new_rows = [row for row in rows if row.n > last_row]
        if new_rows:
            self.table.write(tx, new_rows)
            self._set_position(tx, new_rows[-1].n)
