"""Decoder for PostgreSQL's logical replication messages (pgoutput, protocol 1 and 2).

Streaming of uncommitted transactions is not supported. Does no I/O.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import msgspec

from penstock.rules.json_limits import check_values

EPOCH = 946_684_800.0  # 2000-01-01: the server counts microseconds from this date
_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">BQQq")
_MESSAGE = struct.Struct(">BQ")
_TRUNCATE = struct.Struct(">IB")
_COLUMN_TYPE = struct.Struct(">Ii")  # the type's oid, and its modifier
_INT, _SHORT, _LSN = struct.Struct(">I"), struct.Struct(">H"), struct.Struct(">Q")
_STREAMING = frozenset(b"SEcA")
_TWO_PHASE = frozenset(b"bPKrp")
_TIMESTAMP = re.compile(
    r"(\d{4,6}-\d\d-\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)(?:([+-]\d\d)(:\d\d(?::\d\d)?)?)?"
)


class BadChange(Exception):
    """The bytes are not a message of the requested protocol. The text is one readable sentence."""


class Begin(msgspec.Struct, frozen=True):
    # LSN of the commit. It is known at the start, because only committed transactions are sent.
    commit: int
    at: float  # epoch seconds of the commit
    xid: int


class Commit(msgspec.Struct, frozen=True):
    commit: int
    end: int  # LSN after the commit, which is the one to confirm
    at: float


class Origin(msgspec.Struct, frozen=True):
    lsn: int
    name: str


class Column(msgspec.Struct, frozen=True):
    name: str
    oid: int  # of the column's type
    key: bool  # part of the replica identity


class Relation(msgspec.Struct, frozen=True):
    oid: int
    schema: str
    name: str
    identity: str  # d default, n nothing, f full, i index
    columns: tuple[Column, ...]

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"


class Type(msgspec.Struct, frozen=True):
    oid: int
    schema: str
    name: str


class Insert(msgspec.Struct, frozen=True):
    relation: Relation
    row: dict[str, Any]


class Update(msgspec.Struct, frozen=True):
    """An updated row.

    `old` depends on the table's replica identity. It is the old row, the old key, or None if the
    key did not change.
    """

    relation: Relation
    row: dict[str, Any]
    old: dict[str, Any] | None
    # Columns with large unchanged values. The log does not have these values, nor does `row`.
    unchanged: tuple[str, ...]


class Delete(msgspec.Struct, frozen=True):
    relation: Relation
    old: dict[str, Any]


class Truncate(msgspec.Struct, frozen=True):
    relations: tuple[Relation, ...]
    cascade: bool
    restart: bool


class Emitted(msgspec.Struct, frozen=True):
    """A message of pg_logical_emit_message."""

    transactional: bool
    lsn: int
    prefix: str
    body: bytes


Change: TypeAlias = (
    Begin | Commit | Origin | Relation | Type | Insert | Update | Delete | Truncate | Emitted
)


class _Message:
    """Bytes of one message. `at` is the offset of the next field."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 1

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        found = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return found

    def text(self) -> str:
        start, end = self.at, self.data.find(b"\0", self.at)
        if end < 0:
            raise BadChange(f"a change of {len(self.data)} bytes is cut off")
        self.at = end + 1
        return str(self.data[start:end], "utf-8", "replace")

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]


class Decoder:
    """Decoder of one connection. It caches the latest definition of each table."""

    def __init__(self) -> None:
        self._relations: dict[int, tuple[Relation, list[Callable[[str], Any]]]] = {}

    def decode(self, data: bytes) -> Change:
        """Decode one message. Raises BadChange for any invalid bytes, and no other exception."""
        m = _Message(data)
        try:
            read = _READERS.get(data[0])
            if read is None:
                _raise_unsupported(data[0])
            change = read(self, m)
        except (struct.error, IndexError):
            raise BadChange(f"a change of {len(data)} bytes is cut off") from None
        if m.at != len(data):
            raise BadChange(f"a change of {len(data)} bytes has {len(data) - m.at} too many")
        return change

    def _begin(self, m: _Message) -> Change:
        commit, at, xid = m.unpack(_BEGIN)
        return Begin(commit, EPOCH + at / 1e6, xid)

    def _commit(self, m: _Message) -> Change:
        _, commit, end, at = m.unpack(_COMMIT)
        return Commit(commit, end, EPOCH + at / 1e6)

    def _origin(self, m: _Message) -> Change:
        return Origin(m.unpack(_LSN)[0], m.text())

    def _relation(self, m: _Message) -> Change:
        (oid,) = m.unpack(_INT)
        schema, name, identity = m.text() or "pg_catalog", m.text(), chr(m.byte())
        columns = []
        for _ in range(*m.unpack(_SHORT)):
            flags, column = m.byte(), m.text()
            kind, _ = m.unpack(_COLUMN_TYPE)
            columns.append(Column(column, kind, bool(flags & 1)))
        relation = Relation(oid, schema, name, identity, tuple(columns))
        self._relations[oid] = (
            relation,
            [_VALUES.get(column.oid, _unconverted) for column in columns],
        )
        return relation

    def _type(self, m: _Message) -> Change:
        return Type(m.unpack(_INT)[0], m.text() or "pg_catalog", m.text())

    def _insert(self, m: _Message) -> Change:
        relation, values = self._cached_relation(m)
        row, _ = _new_row(m, relation, values)
        return Insert(relation, row)

    def _update(self, m: _Message) -> Change:
        relation, values = self._cached_relation(m)
        old, has_old_row = None, m.data[m.at] == 0x4F
        if m.data[m.at] in b"KO":
            old = _old_row(m, relation, values)
        row, unchanged = _new_row(m, relation, values)
        # With REPLICA IDENTITY FULL, the old row has the unchanged values.
        if has_old_row and unchanged and old is not None:
            row |= {name: old[name] for name in unchanged if name in old}
            unchanged = tuple(name for name in unchanged if name not in old)
        return Update(relation, row, old, unchanged)

    def _delete(self, m: _Message) -> Change:
        relation, values = self._cached_relation(m)
        if m.data[m.at] not in b"KO":
            raise BadChange("a deletion has neither a key nor a row")
        return Delete(relation, _old_row(m, relation, values))

    def _truncate(self, m: _Message) -> Change:
        count, flags = m.unpack(_TRUNCATE)
        if count > len(m.data) // 4:
            raise BadChange(f"a truncation of {count} tables has {len(m.data)} bytes")
        relations = tuple(self._cached_relation(m)[0] for _ in range(count))
        return Truncate(relations, bool(flags & 1), bool(flags & 2))

    def _emitted(self, m: _Message) -> Change:
        flags, lsn = m.unpack(_MESSAGE)
        prefix, (size,) = m.text(), m.unpack(_INT)
        start, m.at = m.at, m.at + size
        return Emitted(bool(flags & 1), lsn, prefix, bytes(m.data[start : m.at]))

    def _cached_relation(self, m: _Message) -> tuple[Relation, list[Callable[[str], Any]]]:
        (oid,) = m.unpack(_INT)
        found = self._relations.get(oid)
        if found is None:
            raise BadChange(f"a change of table {oid}, which the server has not described")
        return found


_READERS: dict[int, Callable[[Decoder, _Message], Change]] = {
    ord("B"): Decoder._begin,
    ord("C"): Decoder._commit,
    ord("O"): Decoder._origin,
    ord("R"): Decoder._relation,
    ord("Y"): Decoder._type,
    ord("I"): Decoder._insert,
    ord("U"): Decoder._update,
    ord("D"): Decoder._delete,
    ord("T"): Decoder._truncate,
    ord("M"): Decoder._emitted,
}


# -- parts of messages -----------------------------------------------------------------------------


def _tuple(
    m: _Message, relation: Relation, values: list[Callable[[str], Any]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values, and the names of unchanged columns."""
    (count,) = m.unpack(_SHORT)
    if count != len(values):
        raise BadChange(
            f"a row of {relation.label} has {count} columns, and the table has {len(values)}"
        )
    row: dict[str, Any] = {}
    unchanged: list[str] = []
    data, at = m.data, m.at
    for column, value in zip(relation.columns, values, strict=True):
        kind = data[at]
        at += 1
        if kind == 0x74:  # t: text
            (size,) = _INT.unpack_from(data, at)
            start, at = at + 4, at + 4 + size
            if at > len(data):
                raise BadChange(f"a change of {len(data)} bytes is cut off")
            row[column.name] = value(str(data[start:at], "utf-8", "replace"))
        elif kind == 0x6E:  # n: null
            row[column.name] = None
        elif kind == 0x75:  # u: unchanged, and too large to repeat
            unchanged.append(column.name)
        else:
            raise BadChange(
                f"column {column.name} of {relation.label} has format {chr(kind)!r}, "
                "which was not requested"
            )
    m.at = at
    return row, tuple(unchanged)


def _new_row(
    m: _Message, relation: Relation, values: list[Callable[[str], Any]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    if (kind := m.byte()) != 0x4E:  # N
        raise BadChange(f"a change has {chr(kind)!r} instead of the start of its new row")
    return _tuple(m, relation, values)


def _old_row(m: _Message, relation: Relation, values: list[Callable[[str], Any]]) -> dict[str, Any]:
    """Return the old row, or only its key columns if the message has no others.

    Then the server sends null for the other columns, even if they have a value.
    """
    kind = m.byte()
    row, _ = _tuple(m, relation, values)
    if kind == 0x4F:  # O
        return row
    return {
        column.name: row[column.name]
        for column in relation.columns
        if column.key and column.name in row
    }


def _raise_unsupported(kind: int) -> NoReturn:
    if kind in _STREAMING:
        raise BadChange(
            "the server sends transactions that are not committed yet, which was not requested"
        )
    if kind in _TWO_PHASE:
        raise BadChange("the server sends prepared transactions, which was not requested")
    raise BadChange(f"a change has the unknown kind {chr(kind)!r}")


# -- text to values, by the type's oid -------------------------------------------------------------


def _unconverted(text: str) -> str:
    return text


def _bool(text: str) -> Any:
    # The log has t and f. A row that is read by SELECT has true and false.
    return True if text in ("t", "true") else False if text in ("f", "false") else text


def _integer(text: str) -> Any:
    try:
        return int(text) if len(text) <= 20 else text
    except ValueError:
        return text


def _real(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text  # JSON cannot represent NaN and infinity


def _json(text: str) -> Any:
    """Decode a value. A value that is not JSON, or that has too many values, stays text."""
    try:
        check_values(text.encode("utf-8", "replace"))
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return text


def iso_time(text: str) -> str:
    """Convert to ISO 8601. Values without that form (infinity, years BC) are returned unchanged."""
    found = _TIMESTAMP.fullmatch(text)
    if found is None:
        return text
    zone = f"{found[3]}{found[4] or ':00'}" if found[3] else ""
    return f"{found[1]}T{found[2]}{zone}"


def _hex(text: str) -> str:
    return text[2:] if text.startswith("\\x") else text


_VALUES: dict[int, Callable[[str], Any]] = {
    16: _bool,
    17: _hex,
    20: _integer,
    21: _integer,
    23: _integer,
    26: _integer,  # oid
    700: _real,
    701: _real,
    114: _json,
    3802: _json,
    1114: iso_time,
    1184: iso_time,
}


def row_of(columns: Sequence[tuple[str, int]], texts: Sequence[str | None]) -> dict[str, Any]:
    """Convert the values of a row as the decoder does, for a row that is read by SELECT.

    `columns` has (name, type oid) of each value.
    """
    return {
        name: None if text is None else _VALUES.get(oid, _unconverted)(text)
        for (name, oid), text in zip(columns, texts, strict=True)
    }


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_of(text: str) -> int:
    """Parse an LSN such as 0/16B3748. Raises ValueError."""
    if not re.fullmatch(r"[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}", text):
        raise ValueError(text)
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)
