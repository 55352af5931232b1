"""How much of all answers under way is held in memory at once, and who has to wait for room. No
sockets, no decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

SMALL = (
    1 << 16
)  # bytes: bodies up to that are not counted; there are many of them, and all together they are little


class Held(Protocol):
    """An exchange as it is seen here."""

    counted: int
    since: float  # waits; 0: it does not

    def go_on(self, waited: float) -> None: ...


class Bodies:
    """Once `room` is full, one exchange goes on beyond it, so that there is an end; the others wait
    until something has ended.
    """

    def __init__(self, room: int, now: Callable[[], float]) -> None:
        self.room, self.held = room, 0
        self._now = now
        self._beyond: Held | None = None
        self._waiting: dict[Held, None] = {}

    def lets(self, ex: Held) -> bool:
        """May it take more, though the room is full? False: it is told to go on later."""
        if self._beyond is None:
            self._beyond = ex
            self.count(ex, max(1, ex.counted))  # so that its end is told
        if self._beyond is ex:
            return True
        if not ex.since:
            ex.since = self._now()
            self._waiting[ex] = None
        return False

    def count(self, ex: Held, size: int) -> None:
        self.held += size - ex.counted
        ex.counted = size

    def leave(self, ex: Held) -> None:
        """It has ended, whichever way. One that was never counted and does not wait need not say
        so.
        """
        self.held -= ex.counted
        ex.counted, ex.since = 0, 0.0
        self._waiting.pop(ex, None)
        if self._beyond is ex:
            self._beyond = None
        if self._waiting and (self._beyond is None or self.held <= self.room):
            waiting, self._waiting, now = self._waiting, {}, self._now()
            for other in waiting:
                waited, other.since = now - other.since, 0.0
                other.go_on(waited)
