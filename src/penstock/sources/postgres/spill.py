"""A file that takes findings when the queue does not, so that the server may let go of its log; in
order, checked, with its own position.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import msgspec

from penstock.ports import Finding

_HEAD = struct.Struct(">II")  # length, checksum
_PLACE = struct.Struct(">QI")  # how far it is accepted, checksum
LARGEST = 256 << 20  # a frame beyond it is no frame


class Frame(msgspec.Struct):
    """One batch, as it would have been handed over."""

    findings: list[Finding]
    lsn: int
    done: int
    at: float | None


class Spill:
    """One owner at a time (the reader of the source). A torn end, from a power cut, was never
    confirmed to the server and is cut off.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self._file: int | None = None
        self._place: int | None = None
        self.size = self.accepted = self.read_to = 0
        if path.exists():
            self._open()
            self._check()

    @property
    def active(self) -> bool:
        """There is something in it that is not accepted."""
        return self.accepted < self.size

    @property
    def unread(self) -> bool:
        return self.read_to < self.size

    @property
    def full(self) -> bool:
        return self.size >= self.limit

    def append(self, frame: Frame, *, seen: bool = False) -> int:
        """Where it ends in the file. `seen`: it is handed over in memory already and is here for a
        restart only. Raises OSError.
        """
        if self._file is None:
            self._open()
        assert self._file is not None
        body = msgspec.json.encode(frame)
        raw = _HEAD.pack(len(body), zlib.crc32(body)) + body
        written = 0
        while written < len(raw):
            written += os.pwrite(self._file, raw[written:], self.size + written)
        self.size += len(raw)
        if seen:
            self.read_to = self.size
        return self.size

    def sync(self) -> None:
        """Durable when it returns. Raises OSError."""
        if self._file is not None:
            os.fdatasync(self._file)

    def next(self) -> tuple[Frame, int] | None:
        """The next one and where it ends; None at the end."""
        found = self._frame(self.read_to)
        if found is None:
            return None
        self.read_to = found[1]
        return found

    def accept(self, end: int) -> None:
        """Everything up to here is in the ledger. An emptied file is given back to the disk."""
        if self._file is None:
            return
        self.accepted = max(self.accepted, end)
        emptied = self.accepted >= self.size
        self._note(
            0 if emptied else self.accepted
        )  # first: a place behind the end of a file that then grows again would hide what is in it
        if emptied:
            os.ftruncate(self._file, 0)
            self.size = self.read_to = 0

    def last(self) -> tuple[int, int] | None:
        """The position behind the last frame."""
        at, found = self.accepted, None
        while (frame := self._frame(at)) is not None:
            found, at = (frame[0].lsn, frame[0].done), frame[1]
        return found

    def close(self) -> None:
        for number in (self._file, self._place):
            if number is not None:
                os.close(number)
        self._file = self._place = None

    def _note(self, accepted: int) -> None:
        assert self._place is not None
        self.accepted = accepted
        os.pwrite(self._place, _PLACE.pack(accepted, zlib.crc32(accepted.to_bytes(8, "big"))), 0)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(
            self.path, os.O_RDWR | os.O_CREAT, 0o600
        )  # rows of the user's database
        self._place = os.open(self.path.with_suffix(".place"), os.O_RDWR | os.O_CREAT, 0o600)

    def _check(self) -> None:
        """How much of what is there is whole, and how much of that is accepted."""
        assert self._file is not None
        assert self._place is not None
        self.size = os.fstat(self._file).st_size
        raw = os.pread(self._place, _PLACE.size, 0)
        if len(raw) == _PLACE.size:
            place, checksum = _PLACE.unpack(raw)
            self.accepted = (
                place
                if checksum == zlib.crc32(place.to_bytes(8, "big")) and place <= self.size
                else 0
            )
        at = self.accepted
        while (found := self._frame(at)) is not None:
            at = found[1]
        self.size = at
        self.read_to = self.accepted
        os.ftruncate(self._file, at)
        self._note(self.accepted)

    def _frame(self, at: int) -> tuple[Frame, int] | None:
        assert self._file is not None or at >= self.size
        if self._file is None or at + _HEAD.size > self.size:
            return None
        size, checksum = _HEAD.unpack(os.pread(self._file, _HEAD.size, at))
        end = at + _HEAD.size + size
        if size > LARGEST or end > self.size:
            return None
        body = os.pread(self._file, size, at + _HEAD.size)
        if zlib.crc32(body) != checksum:
            return None
        try:
            return msgspec.json.decode(body, type=Frame), end
        except msgspec.MsgspecError:
            return None
