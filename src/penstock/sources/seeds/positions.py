"""How far each object of a seed source was read, as the bytes of its position: some fifty for each
object, whatever its size.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from penstock.errors import SourceDown
from penstock.sources.seeds.formats import short

VANISHED = (
    10_000  # objects that are not there any more, and may come back: the last ones are remembered
)


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """One object."""

    stamp: bytes  # what was seen of it from outside when it was read
    offset: int = 0  # where the next record begins
    line: int = 1
    size: int = 0
    generation: int = 0  # how often another content took the name over
    sum: int = 0  # of the bytes before the offset
    tail: int = 0  # of the last of them, where reading all again would take long
    done: bool = False  # nothing is left in what was seen


class Last(msgspec.Struct, frozen=True, array_like=True):
    """Where reading stands, for people."""

    name: str = ""
    line: int = 1
    done: bool = False
    lists: int = 0


class _Head(msgspec.Struct, array_like=True):
    version: int
    last: Last


class _Packed(_Head, array_like=True):
    marks: dict[bytes, Mark]


_decode = msgspec.msgpack.Decoder(_Packed).decode
_decode_head = msgspec.msgpack.Decoder(
    _Head
).decode  # it is said with every batch, so the rest is not looked at
_encode = msgspec.msgpack.Encoder().encode
_VERSION = 1


def last_of(cursor: bytes) -> Last:
    try:
        return _decode_head(cursor).last
    except msgspec.MsgspecError:
        return Last()


class Marks:
    def __init__(self, cursor: bytes | None = None) -> None:
        """Raises SourceDown."""
        self._last = ""
        self._marks: dict[bytes, Mark] = {}
        if cursor is None:
            return
        try:
            packed = _decode(cursor)
        except msgspec.MsgspecError:
            packed = None
        if packed is None or packed.version != _VERSION:
            raise SourceDown(
                "its position is not of a kind that this version writes",
                hint="penstock sources reset NAME --to start, or --to end",
            )
        self._last, self._marks = packed.last.name, packed.marks

    def __len__(self) -> int:
        return len(self._marks)

    def get(self, name: str) -> Mark | None:
        return self._marks.get(short(name))

    def put(self, name: str, mark: Mark) -> None:
        self._last = name
        self._marks[short(name)] = mark

    def keep(self, names: Collection[str]) -> None:
        """Of what is not among them, only the last are remembered: they may only have been away."""
        there = {short(name) for name in names}
        vanished = [key for key in self._marks if key not in there]
        for key in vanished[: max(0, len(vanished) - VANISHED)]:
            del self._marks[key]

    def encode(self) -> bytes:
        mark = self.get(self._last)
        last = Last() if mark is None else Last(self._last, mark.line, mark.done, len(self._marks))
        return _encode(_Packed(_VERSION, last, self._marks))
