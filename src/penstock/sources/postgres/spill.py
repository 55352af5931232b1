"""Limit on the WAL that a slot may hold, and the spill file for findings beyond the queue.

The server may discard WAL whose findings are in the spill file. The findings are in order and have
checksums. A second file records the offset up to which they are accepted.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from pathlib import Path
from typing import Literal

import msgspec

from penstock.config import units
from penstock.errors import SourceDown
from penstock.ports import Finding
from penstock.private_files import make_directory, open_own
from penstock.sources.postgres.settings import CdcSettings
from penstock.sources.postgres.slot import Slot

log = logging.getLogger("penstock")
_HEAD = struct.Struct(">II")  # length, checksum
_ACCEPTED = struct.Struct(">QI")  # accepted bytes, checksum
MAX_FRAME = 256 << 20  # bytes: a larger length means that the file is damaged
# Checks in a row that find the queue full and unread before reading may stop. Elapsed time would
# also count a suspended machine.
FULL_CHECKS = 12


class Frame(msgspec.Struct):
    """Findings of one chunk, with the position after them."""

    findings: list[Finding]
    lsn: int
    done: int
    at: float | None


class Spill:
    """Spill file of one source. Only the source's reader has it open.

    An incomplete last frame, after a power cut, was never confirmed to the server. It is removed.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self._file = self._accepted_file = -1  # descriptors, -1 if not open
        self.size = self.accepted = self.read_to = 0
        if path.exists():
            self._open()
            self._check()

    @property
    def active(self) -> bool:
        """True if the file has findings that are not accepted."""
        return self.accepted < self.size

    @property
    def full(self) -> bool:
        return self.size >= self.limit

    def append(self, frame: Frame, *, queued: bool = False) -> int:
        """Append a frame and return the offset of its end. Raises OSError.

        `queued`: its findings are also in the queue, so `next` skips the frame. It is needed only
        after a restart.
        """
        if self._file < 0:
            self._open()
        body = msgspec.json.encode(frame)
        raw = _HEAD.pack(len(body), zlib.crc32(body)) + body
        written = 0
        while written < len(raw):
            written += os.pwrite(self._file, raw[written:], self.size + written)
        self.size += len(raw)
        if queued:
            self.read_to = self.size
        return self.size

    def sync(self) -> None:
        """Make appended frames durable. Raises OSError."""
        if self._file >= 0:
            os.fdatasync(self._file)

    def next(self) -> tuple[Frame, int] | None:
        """Return the next frame and the offset of its end, or None at the end of the file."""
        if (found := self._frame(self.read_to)) is not None:
            self.read_to = found[1]
        return found

    def accept(self, end: int) -> None:
        """Record that frames up to `end` are in the ledger. Truncate the file if none is left."""
        if self._file < 0:
            return
        self.accepted = max(self.accepted, end)
        emptied = self.accepted >= self.size
        # Before the truncation: an offset beyond the end of the emptied file would hide frames
        # that are appended later.
        self._record(0 if emptied else self.accepted)
        if emptied:
            os.ftruncate(self._file, 0)
            self.size = self.read_to = 0

    def last(self) -> tuple[int, int] | None:
        """Return the position (lsn, done) after the last frame, or None if there is no frame."""
        at, found = self.accepted, None
        while (frame := self._frame(at)) is not None:
            found, at = (frame[0].lsn, frame[0].done), frame[1]
        return found

    def close(self) -> None:
        for number in (self._file, self._accepted_file):
            if number >= 0:
                os.close(number)
        self._file = self._accepted_file = -1

    def _record(self, accepted: int) -> None:
        self.accepted = accepted
        os.pwrite(
            self._accepted_file,
            _ACCEPTED.pack(accepted, zlib.crc32(accepted.to_bytes(8, "big"))),
            0,
        )

    def _open(self) -> None:
        make_directory(self.path.parent)
        # Only the owner may read it: it holds rows of the user's database.
        self._file = open_own(self.path, os.O_RDWR | os.O_CREAT)
        self._accepted_file = open_own(self.path.with_suffix(".place"), os.O_RDWR | os.O_CREAT)

    def _check(self) -> None:
        """Read the accepted offset, and truncate the file after its last complete frame."""
        self.size = os.fstat(self._file).st_size
        raw = os.pread(self._accepted_file, _ACCEPTED.size, 0)
        if len(raw) == _ACCEPTED.size:
            place, checksum = _ACCEPTED.unpack(raw)
            self.accepted = (
                place
                if checksum == zlib.crc32(place.to_bytes(8, "big")) and place <= self.size
                else 0
            )
        at = self.read_to = self.accepted
        while (found := self._frame(at)) is not None:
            at = found[1]
        self.size = at
        os.ftruncate(self._file, at)
        self._record(self.accepted)

    def _frame(self, at: int) -> tuple[Frame, int] | None:
        if at + _HEAD.size > self.size:  # also if the file is not open
            return None
        size, checksum = _HEAD.unpack(os.pread(self._file, _HEAD.size, at))
        end = at + _HEAD.size + size
        if size > MAX_FRAME or end > self.size:
            return None
        body = os.pread(self._file, size, at + _HEAD.size)
        if zlib.crc32(body) != checksum:
            return None
        try:
            return msgspec.json.decode(body, type=Frame), end
        except msgspec.MsgspecError:
            return None


class WalLimit:
    """Actions by the WAL that the slot holds, as a share of `max_lag`.

    At one half, log a warning. At three quarters with a full queue, start the spill file. At the
    limit, end reading if the spill file is full too and the queue stays full.
    """

    def __init__(self, s: CdcSettings) -> None:
        self._s = s
        self._warned = False
        self._full_checks = self._taken = 0

    def check(
        self, slot: Slot, spill: Spill, *, full: bool, taken: int
    ) -> Literal["on", "spill", "end"]:
        """Return whether to continue, to start the spill file, or to end reading.

        `full`: the queue is full. Only then is this reader the cause of the WAL that is held.
        `taken`: number of chunks that were taken from the queue. A queue that is full only at one
        check is normal if the reader is faster than intake.
        """
        s = self._s
        self._full_checks = self._full_checks + 1 if full and taken == self._taken else 0
        self._taken = taken
        if slot.held < s.max_lag // 2:
            self._warned = False
        elif not self._warned:
            self._warned = True
            behind = (
                "because its reader is behind"
                if slot.backlog >= slot.held // 2
                else "because a transaction has been open for a long time"
            )
            log.warning(
                "source %s: slot %s holds %s of WAL on the server, %s (the limit is %s)",
                s.source,
                s.slot,
                _size(slot.held),
                "because the queue is full" if full else behind,
                units.write_size(s.max_lag),
            )
        # Use `held` and not `backlog`: a large transaction that is not accepted yet holds the WAL
        # from its beginning on.
        stays_full = self._full_checks >= FULL_CHECKS
        if stays_full and slot.held >= s.max_lag and (not s.max_spill or spill.full):
            return "end"
        if full and slot.held >= s.max_lag * 3 // 4 and not spill.active and s.max_spill:
            return "spill"
        return "on"

    def exceeded(self, slot: Slot) -> SourceDown:
        """Log the error and return it. It is raised only when the full queue has been read."""
        s = self._s
        what = (
            f"source {s.source}: slot {s.slot} holds {_size(slot.held)} of WAL, "
            f"the limit is {units.write_size(s.max_lag)}"
        )
        if s.on_limit == "drop":
            log.error("%s: dropping the slot, later changes are not read", what)
            return SourceDown(
                f"{what}, so it was dropped",
                hint=f"run `penstock sources reset {s.source} --to start` to create a new slot",
            )
        log.error("%s, and the queue stays full: reading stops", what)
        return SourceDown(
            f"{what}, and the queue stays full",
            hint="see `penstock status` for what fills the queue, raise max_lag or max_spill, or "
            'set on_limit = "drop" to drop the slot instead',
        )


def _size(count: int) -> str:
    return units.write_size(count >> 20 << 20)
