"""Limit on the memory of all response bodies in progress. No sockets, no decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# Bytes. Bodies up to this size are not counted: there are many, but their total size is small.
MIN_COUNTED_BYTES = 1 << 16


class CountedExchange(Protocol):
    """Exchange as seen by `BodyMemory`."""

    counted_bytes: int  # bytes of its body that are counted
    paused_at: float  # when it was paused, 0 if it is not paused

    def resume(self, waited: float) -> None: ...


class BodyMemory:
    """Limits the memory of response bodies in progress.

    Above the limit one exchange may continue, so that at least one can finish. The others are
    paused when they receive data, until an exchange ends.
    """

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self.limit, self.held_bytes = limit, 0
        self._now = now
        self._over_limit: CountedExchange | None = None
        self._paused: dict[CountedExchange, None] = {}

    def may_grow(self, ex: CountedExchange) -> bool:
        """Return True if the exchange may continue above the limit, False if it is paused."""
        if self._over_limit is None:
            self._over_limit = ex
            self.count(ex, max(1, ex.counted_bytes))  # a counted exchange calls `remove` at its end
        if self._over_limit is ex:
            return True
        if not ex.paused_at:
            ex.paused_at = self._now()
            self._paused[ex] = None
        return False

    def count(self, ex: CountedExchange, size: int) -> None:
        self.held_bytes += size - ex.counted_bytes
        ex.counted_bytes = size

    def remove(self, ex: CountedExchange) -> None:
        """Remove an ended exchange, and resume paused ones if possible.

        Only needed for an exchange that is counted or paused.
        """
        self.held_bytes -= ex.counted_bytes
        ex.counted_bytes, ex.paused_at = 0, 0.0
        self._paused.pop(ex, None)
        if self._over_limit is ex:
            self._over_limit = None
        if self._paused and (self._over_limit is None or self.held_bytes <= self.limit):
            paused, self._paused, now = self._paused, {}, self._now()
            for other in paused:
                waited, other.paused_at = now - other.paused_at, 0.0
                other.resume(waited)
