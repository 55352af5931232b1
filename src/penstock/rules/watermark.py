"""How far a partition is settled when its messages are settled in any order: a window of offsets,
its watermark, and that as a line of text.

No broker, clock or thread lives here: an adapter adds what it receives, settles what is finished,
and commits `watermark` with `metadata()`.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
# offsets above the watermark that fit into the text: 2 KiB of bits, less than 3 KiB as text, of the
# 4 KiB that Kafka takes
SPAN = 16_384
_VERSION = "1:"


class Window(Generic[T]):
    """One partition under one assignment, with something kept for each open offset. Gaps
    (compaction, transaction markers) count as settled.
    """

    __slots__ = ("_before", "epoch", "next", "open")

    def __init__(self, epoch: int, start: int, settled: Iterable[int] = ()) -> None:
        self.epoch = (
            epoch  # of the assignment: what was handed out under another one changes nothing
        )
        self.next = start  # the lowest offset that was not received yet
        self.open: dict[
            int, T
        ] = {}  # received and not settled, ascending; to settle one is to delete it
        self._before = set(
            settled
        )  # settled before this assignment, and perhaps not received again yet

    @property
    def watermark(self) -> int:
        """Everything below is settled; where nothing is open, the next offset after the last one
        settled.
        """
        return next(iter(self.open), self.next)

    @property
    def ahead(self) -> frozenset[int]:
        """What is settled above the watermark."""
        return frozenset(self._passed()) | {
            offset for offset in range(self.watermark, self.next) if offset not in self.open
        }

    def _passed(self) -> set[int]:
        """Settled before this assignment, and still to come. What is below `next` is one of the
        window's own by now.
        """
        if self._before:
            self._before = {offset for offset in self._before if offset >= self.next}
        return self._before

    def __len__(self) -> int:
        return len(self.open)

    def __contains__(self, offset: int) -> bool:
        """Is it open: received and not settled?"""
        return offset in self.open

    def add(self, offset: int, what: T) -> bool:
        """It was received. False: it is known as settled (before a restart), or is behind the
        window, and must not be handed out.
        """
        if offset < self.next:
            return False
        self.next = offset + 1
        if self._before and offset in self._before:
            return False
        self.open[offset] = what
        return True

    def add_run(self, first: int, some: Sequence[T]) -> bool:
        """The same for offsets without a gap, from `first` on, at once. False: one of them may be
        settled, and nothing was added.
        """
        if first < self.next or self._passed():
            return False
        opened = self.open
        for offset, what in enumerate(some, first):
            opened[offset] = what
        self.next = first + len(some)
        return True

    def settle(self, offset: int, epoch: int) -> bool:
        """False: it is not open, or was handed out under another assignment; nothing changed."""
        if epoch != self.epoch or offset not in self.open:
            return False
        del self.open[offset]
        return True

    def metadata(self) -> str:
        """What is settled above the watermark, to be committed with it; empty where nothing is."""
        low, passed = self.watermark, self._passed()
        if self.next - low == len(self.open) and not passed:
            return ""
        flags = bytearray(b"1") * min(SPAN, self.next - low)
        for offset in self.open:
            if offset - low >= SPAN:
                break
            flags[offset - low] = 48
        for offset in passed:
            place = offset - low
            if place < SPAN:
                flags.extend(b"0" * (place + 1 - len(flags)))
                flags[place] = 49
        flags.reverse()
        bits = int(flags or b"0", 2).to_bytes(SPAN // 8, "little").rstrip(b"\0")
        return _VERSION + base64.b64encode(zlib.compress(bits, 1)).decode() if bits else ""


def settled_ahead(watermark: int, metadata: str | None) -> frozenset[int]:
    """The offsets that `metadata()` told of. Text of another program or another version says
    nothing: then more is repeated, and nothing is lost.
    """
    if not metadata or not metadata.startswith(_VERSION):
        return frozenset()
    try:
        unpack = zlib.decompressobj()
        bits = unpack.decompress(
            base64.b64decode(metadata[len(_VERSION) :], validate=True), SPAN // 8
        )
    except (binascii.Error, zlib.error, ValueError):
        return frozenset()
    if not unpack.eof:  # longer than anything we write, or cut off
        return frozenset()
    return frozenset(
        watermark + 8 * place + bit
        for place, byte in enumerate(bits)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    )
