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

EPOCH = 946_684_800.0  # 2000-01-01: the server counts microseconds from this date
_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">BQQq")
_MESSAGE = struct.Struct(">BQ")
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


class Decoder:
    """Decoder of one connection. It caches the latest definition of each table."""

    def __init__(self) -> None:
        self._relations: dict[int, tuple[Relation, list[Callable[[str], Any]]]] = {}

    def decode(self, data: bytes) -> Change:
        """Decode one message. Raises BadChange for any invalid bytes, and no other exception."""
        try:
            read = _READERS.get(data[0])
            if read is None:
                _raise_unsupported(data[0])
            change, at = read(self, data)
        except (struct.error, IndexError):
            raise BadChange(f"a change of {len(data)} bytes is cut off") from None
        if at != len(data):
            raise BadChange(f"a change of {len(data)} bytes has {len(data) - at} too many")
        return change

    def _begin(self, data: bytes) -> tuple[Change, int]:
        commit, at, xid = _BEGIN.unpack_from(data, 1)
        return Begin(commit, EPOCH + at / 1e6, xid), 21

    def _commit(self, data: bytes) -> tuple[Change, int]:
        _, commit, end, at = _COMMIT.unpack_from(data, 1)
        return Commit(commit, end, EPOCH + at / 1e6), 26

    def _origin(self, data: bytes) -> tuple[Change, int]:
        (lsn,) = _LSN.unpack_from(data, 1)
        name, at = _text(data, 9)
        return Origin(lsn, name), at

    def _relation(self, data: bytes) -> tuple[Change, int]:
        (oid,) = _INT.unpack_from(data, 1)
        schema, at = _text(data, 5)
        name, at = _text(data, at)
        identity = chr(data[at])
        (count,) = _SHORT.unpack_from(data, at + 1)
        at += 3
        columns = []
        for _ in range(count):
            flags = data[at]
            column, at = _text(data, at + 1)
            (kind,) = _INT.unpack_from(data, at)
            at += 8
            columns.append(Column(column, kind, bool(flags & 1)))
        relation = Relation(oid, schema or "pg_catalog", name, identity, tuple(columns))
        if at <= len(data):  # an incomplete definition is not cached
            self._relations[oid] = (
                relation,
                [_VALUES.get(column.oid, _unconverted) for column in columns],
            )
        return relation, at

    def _type(self, data: bytes) -> tuple[Change, int]:
        (oid,) = _INT.unpack_from(data, 1)
        schema, at = _text(data, 5)
        name, at = _text(data, at)
        return Type(oid, schema or "pg_catalog", name), at

    def _insert(self, data: bytes) -> tuple[Change, int]:
        relation, values = self._cached_relation(data)
        _expect(data, 5, b"N")
        row, _, at = _tuple(data, 6, relation, values)
        return Insert(relation, row), at

    def _update(self, data: bytes) -> tuple[Change, int]:
        relation, values = self._cached_relation(data)
        old, at, has_old_row = None, 5, False
        if data[at] in b"KO":
            has_old_row = data[at] == 0x4F
            old, _, at = _tuple(data, at + 1, relation, values)
            if not has_old_row:
                old = _key_of(relation, old)
        _expect(data, at, b"N")
        row, unchanged, at = _tuple(data, at + 1, relation, values)
        # With REPLICA IDENTITY FULL, the old row has the unchanged values.
        if has_old_row and unchanged and old is not None:
            row |= {name: old[name] for name in unchanged if name in old}
            unchanged = tuple(name for name in unchanged if name not in old)
        return Update(relation, row, old, unchanged), at

    def _delete(self, data: bytes) -> tuple[Change, int]:
        relation, values = self._cached_relation(data)
        if data[5] not in b"KO":
            raise BadChange("a deletion has neither a key nor a row")
        old, _, at = _tuple(data, 6, relation, values)
        return Delete(relation, old if data[5] == 0x4F else _key_of(relation, old)), at

    def _truncate(self, data: bytes) -> tuple[Change, int]:
        (count,) = _INT.unpack_from(data, 1)
        flags, at = data[5], 6
        if count > len(data) // 4:
            raise BadChange(f"a truncation of {count} tables has {len(data)} bytes")
        relations = []
        for _ in range(count):
            relations.append(self._cached_relation(data, at)[0])
            at += 4
        return Truncate(tuple(relations), bool(flags & 1), bool(flags & 2)), at

    def _emitted(self, data: bytes) -> tuple[Change, int]:
        flags, lsn = _MESSAGE.unpack_from(data, 1)
        prefix, at = _text(data, 10)
        (size,) = _INT.unpack_from(data, at)
        at += 4
        return Emitted(bool(flags & 1), lsn, prefix, bytes(data[at : at + size])), at + size

    def _cached_relation(
        self, data: bytes, at: int = 1
    ) -> tuple[Relation, list[Callable[[str], Any]]]:
        (oid,) = _INT.unpack_from(data, at)
        found = self._relations.get(oid)
        if found is None:
            raise BadChange(f"a change of table {oid}, which the server has not described")
        return found


_READERS: dict[int, Callable[[Decoder, bytes], tuple[Change, int]]] = {
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
    data: bytes, at: int, relation: Relation, values: list[Callable[[str], Any]]
) -> tuple[dict[str, Any], tuple[str, ...], int]:
    """Return the values, the names of unchanged columns, and the offset of the tuple's end."""
    (count,) = _SHORT.unpack_from(data, at)
    at += 2
    if count != len(values):
        raise BadChange(
            f"a row of {relation.label} has {count} columns, and the table has {len(values)}"
        )
    row: dict[str, Any] = {}
    unchanged: list[str] = []
    for column, value in zip(relation.columns, values, strict=True):
        kind = data[at]
        at += 1
        if kind == 0x74:  # t: text
            (size,) = _INT.unpack_from(data, at)
            at += 4
            end = at + size
            if end > len(data):
                raise BadChange(f"a change of {len(data)} bytes is cut off")
            row[column.name] = value(str(data[at:end], "utf-8", "replace"))
            at = end
        elif kind == 0x6E:  # n: null
            row[column.name] = None
        elif kind == 0x75:  # u: unchanged, and too large to repeat
            unchanged.append(column.name)
        else:
            raise BadChange(
                f"column {column.name} of {relation.label} has format {chr(kind)!r}, "
                "which was not requested"
            )
    return row, tuple(unchanged), at


def _key_of(relation: Relation, row: dict[str, Any]) -> dict[str, Any]:
    """Return the key columns only.

    The server sends null for the other columns, even if they have a value.
    """
    return {
        column.name: row[column.name]
        for column in relation.columns
        if column.key and column.name in row
    }


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.find(b"\0", at)
    if end < 0:
        raise BadChange(f"a change of {len(data)} bytes is cut off")
    return str(data[at:end], "utf-8", "replace"), end + 1


def _expect(data: bytes, at: int, kind: bytes) -> None:
    if data[at] != kind[0]:
        raise BadChange(f"a change has {chr(data[at])!r} instead of the start of its new row")


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
    try:
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
