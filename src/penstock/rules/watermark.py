"""Watermark of a partition whose messages are settled in any order.

An adapter adds received messages, settles finished ones, and commits `watermark` with `metadata()`.
Pure: no broker, clock or thread.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
# Offsets above the watermark that fit into the metadata: 2 KiB of bits, less than 3 KiB as text.
# Kafka accepts 4 KiB.
SPAN = 16_384
_VERSION = "1:"


class Window(Generic[T]):
    """One partition under one assignment, with a value for each open offset.

    Gaps (compaction, transaction markers) count as settled.
    """

    __slots__ = ("_settled_before", "epoch", "next", "open")

    def __init__(self, epoch: int, start: int, settled: Iterable[int] = ()) -> None:
        # Number of the assignment. Deliveries of another assignment do not change this window.
        self.epoch = epoch
        self.next = start  # lowest offset that is not received yet
        # Received and unsettled, ascending. Settling an offset deletes it.
        self.open: dict[int, T] = {}
        # Settled before this assignment. Some may not be received again yet.
        self._settled_before = set(settled)

    @property
    def watermark(self) -> int:
        """Return the lowest unsettled offset, or the next offset if all are settled."""
        return next(iter(self.open), self.next)

    @property
    def ahead(self) -> frozenset[int]:
        """Return the settled offsets above the watermark."""
        return frozenset(self._settled_earlier()) | {
            offset for offset in range(self.watermark, self.next) if offset not in self.open
        }

    def _settled_earlier(self) -> set[int]:
        """Return offsets settled before this assignment that are not received again yet.

        Offsets below `next` are removed, because the window itself has them now.
        """
        if self._settled_before:
            self._settled_before = {
                offset for offset in self._settled_before if offset >= self.next
            }
        return self._settled_before

    def __len__(self) -> int:
        return len(self.open)

    def add(self, offset: int, value: T) -> bool:
        """Add a received offset. Return False if it must not be delivered.

        That is if it was settled before a restart, or is below the window.
        """
        if offset < self.next:
            return False
        self.next = offset + 1
        if self._settled_before and offset in self._settled_before:
            return False
        self.open[offset] = value
        return True

    def add_run(self, first: int, values: Sequence[T]) -> bool:
        """Add offsets without a gap, starting with `first`.

        Return False, and add none, if one of them may be settled.
        """
        if first < self.next or self._settled_earlier():
            return False
        opened = self.open
        for offset, value in enumerate(values, first):
            opened[offset] = value
        self.next = first + len(values)
        return True

    def settle(self, offset: int, epoch: int) -> bool:
        """Settle an offset. Return False if it is not open, or belongs to another assignment."""
        if epoch != self.epoch or offset not in self.open:
            return False
        del self.open[offset]
        return True

    def metadata(self) -> str:
        """Return the settled offsets above the watermark as text, "" if there are none."""
        low, earlier = self.watermark, self._settled_earlier()
        if self.next - low == len(self.open) and not earlier:
            return ""
        flags = bytearray(b"1") * min(SPAN, self.next - low)
        for offset in self.open:
            if offset - low >= SPAN:
                break
            flags[offset - low] = 48
        for offset in earlier:
            index = offset - low
            if index < SPAN:
                flags.extend(b"0" * (index + 1 - len(flags)))
                flags[index] = 49
        flags.reverse()
        bits = int(flags or b"0", 2).to_bytes(SPAN // 8, "little").rstrip(b"\0")
        return _VERSION + base64.b64encode(zlib.compress(bits, 1)).decode() if bits else ""


def settled_ahead(watermark: int, metadata: str | None) -> frozenset[int]:
    """Return the offsets that `metadata()` encoded.

    Return an empty set for text of another program or version. Then more messages are repeated, but
    no message is lost.
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
    if not unpack.eof:  # longer than any metadata of this module, or truncated
        return frozenset()
    return frozenset(
        watermark + 8 * index + bit
        for index, byte in enumerate(bits)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    )
