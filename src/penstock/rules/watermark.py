"""How far a partition is settled when its messages are settled in any order: a window of offsets, its watermark, and that as a line of text.

No broker, clock or thread lives here: an adapter adds what it receives, settles what is finished, and commits `watermark` with `metadata()`.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections import deque
from collections.abc import Iterable

SPAN = 16_384  # offsets above the watermark that fit into the text: 2 KiB of bits, less than 3 KiB as text, of the 4 KiB that Kafka takes
_VERSION = "1:"


class Window:
    """One partition under one assignment. Only offsets that were received count; gaps (compaction, transaction markers) are passed over."""

    __slots__ = ("_ahead", "_open", "_order", "epoch", "next")

    def __init__(self, epoch: int, start: int, settled: Iterable[int] = ()) -> None:
        self.epoch = epoch  # of the assignment: what was handed out under another one changes nothing
        self.next = start  # the lowest offset that was not received yet
        self._order: deque[int] = deque()  # received, from the watermark on, ascending
        self._open: set[int] = set()  # received and not settled
        self._ahead: set[int] = set(settled)  # settled, above the watermark

    @property
    def watermark(self) -> int:
        """Everything below is settled; where nothing is open, the next offset after the last one settled."""
        return self._order[0] if self._order else self.next

    @property
    def span(self) -> int:
        """From the watermark to what was received last. An adapter stops receiving at SPAN, or a restart would repeat what does not fit."""
        return self.next - self.watermark

    @property
    def ahead(self) -> frozenset[int]:
        """What is settled above the watermark."""
        return frozenset(self._ahead)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, offset: int) -> bool:
        """Is it open: received and not settled?"""
        return offset in self._open

    def add(self, offset: int) -> bool:
        """It was received. False: it is known as settled (before a restart), or is behind the window, and must not be handed out."""
        if offset < self.next:
            return False
        self.next = offset + 1
        if offset in self._ahead:
            if self._order:
                self._order.append(offset)
            else:
                self._ahead.discard(offset)
            return False
        self._order.append(offset)
        self._open.add(offset)
        return True

    def settle(self, offset: int, epoch: int) -> bool:
        """False: it is not open, or was handed out under another assignment; nothing changed."""
        if epoch != self.epoch or offset not in self._open:
            return False
        self._open.remove(offset)
        order, ahead = self._order, self._ahead
        if order[0] != offset:
            ahead.add(offset)
            return True
        order.popleft()
        while order and order[0] in ahead:
            ahead.remove(order.popleft())
        return True

    def metadata(self) -> str:
        """What is settled above the watermark, to be committed with it; empty where nothing is."""
        low = self.watermark
        bits = bytearray()
        for offset in self._ahead:
            place, bit = divmod(offset - low, 8)
            if 0 <= place < SPAN // 8:
                if place >= len(bits):
                    bits.extend(bytes(place + 1 - len(bits)))
                bits[place] |= 1 << bit
        return _VERSION + base64.b64encode(zlib.compress(bits, 1)).decode() if bits else ""


def settled_ahead(watermark: int, metadata: str | None) -> frozenset[int]:
    """The offsets that `metadata()` told of. Text of another program or another version says nothing: then more is repeated, and nothing is lost."""
    if not metadata or not metadata.startswith(_VERSION):
        return frozenset()
    try:
        unpack = zlib.decompressobj()
        bits = unpack.decompress(base64.b64decode(metadata[len(_VERSION) :], validate=True), SPAN // 8)
    except (binascii.Error, zlib.error, ValueError):
        return frozenset()
    if not unpack.eof:  # longer than anything we write, or cut off
        return frozenset()
    return frozenset(watermark + 8 * place + bit for place, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1)
