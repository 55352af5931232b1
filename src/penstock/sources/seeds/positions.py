"""Positions of a seed source's objects, and their cursor: about fifty bytes for each object."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from penstock.errors import SourceDown
from penstock.sources.seeds.files import short_hash

# Positions of objects that no longer exist, but may appear again. The most recent are kept.
MAX_VANISHED = 10_000


class ObjectPosition(msgspec.Struct, frozen=True, array_like=True):
    """Position in one object."""

    stamp: bytes  # hash of the object's metadata when it was read
    offset: int = 0  # start of the next record
    line: int = 1
    size: int = 0
    generation: int = 0  # number of times that the object got other content
    sum: int = 0  # checksum of the bytes before the offset
    tail: int = 0  # checksum of the last 4096 of these bytes, if the offset is over 64 MiB
    done: bool = False  # True if the object was read to its end


class Last(msgspec.Struct, frozen=True, array_like=True):
    """Position in the last object that was read, for `describe`."""

    name: str = ""
    line: int = 1
    done: bool = False
    lists: int = 0


class _Head(msgspec.Struct, array_like=True):
    version: int
    last: Last


class _Packed(_Head, array_like=True):
    marks: dict[bytes, ObjectPosition]


_decode = msgspec.msgpack.Decoder(_Packed).decode
# `describe` runs with every batch, so it decodes only the head of the cursor.
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_encode = msgspec.msgpack.Encoder().encode
_VERSION = 1


def last_position(cursor: bytes | None) -> Last:
    try:
        return Last() if cursor is None else _decode_head(cursor).last
    except msgspec.MsgspecError:
        return Last()


class ObjectPositions:
    def __init__(self, cursor: bytes | None = None) -> None:
        """Decode a cursor. Raises SourceDown if this version cannot read it."""
        self._last = ""
        self._positions: dict[bytes, ObjectPosition] = {}
        if cursor is None:
            return
        try:
            packed = _decode(cursor)
        except msgspec.MsgspecError:
            packed = None
        if packed is None or packed.version != _VERSION:
            raise SourceDown(
                "its position has a format that this version does not know",
                hint="run `penstock sources reset NAME --to start` (or `--to end`)",
            )
        self._last, self._positions = packed.last.name, packed.marks

    def __len__(self) -> int:
        return len(self._positions)

    def get(self, name: str) -> ObjectPosition | None:
        return self._positions.get(short_hash(name))

    def put(self, name: str, position: ObjectPosition) -> None:
        self._last = name
        self._positions[short_hash(name)] = position

    def keep(self, names: Collection[str]) -> None:
        """Remove positions of other objects, except the last 10,000, which may appear again."""
        existing = {short_hash(name) for name in names}
        vanished = [key for key in self._positions if key not in existing]
        for key in vanished[: max(0, len(vanished) - MAX_VANISHED)]:
            del self._positions[key]

    def encode(self) -> bytes:
        position = self.get(self._last)
        last = (
            Last()
            if position is None
            else Last(self._last, position.line, position.done, len(self._positions))
        )
        return _encode(_Packed(_VERSION, last, self._positions))
