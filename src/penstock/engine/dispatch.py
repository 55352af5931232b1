"""Whose turn it is among the admitted: requests in flight per host, slots that still stand, and the
distance to the one before. No I/O, no waiting.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

import msgspec

from penstock.model import Event
from penstock.ports import Admitted, Cancellable, Delivery, Extracted, Pace, PageMeta, Response
from penstock.rules.pace import LATE

KEPT = 0.95  # of the distance between two slots, where the first went late: so that it catches up
SOON = 0.005  # a distance this short is not worth a timer
REMEMBERED = 8192  # hosts


class Item:
    """One held delivery, from receive until the books have its end."""

    __slots__ = (
        "admitted",
        "asks",
        "begun",
        "body",
        "delivery",
        "event",
        "extracted",
        "fence",
        "given",
        "meta",
        "response",
        "slot",
        "task",
        "timer",
    )

    def __init__(self, delivery: Delivery, event: Event) -> None:
        self.delivery, self.event = delivery, event
        self.admitted = Admitted(verdict="go")
        self.fence = 0
        self.begun = 0.0
        self.asks = False  # its host, and not only for an extraction of what is stored
        self.slot = math.inf  # where it had to wait for one
        self.given = math.inf  # when it got it
        self.timer: asyncio.TimerHandle | None = None
        self.task: Cancellable | None = (
            None  # what is under way for it; a request without a task too
        )
        self.meta: PageMeta | None = None
        self.body: bytes = b""
        self.response: Response | None = None
        self.extracted: Extracted | None = None


class Chosen(msgspec.Struct):
    """Who starts now; who missed its slot and needs another; who has to keep its distance for so
    many seconds.
    """

    start: list[Item]
    late: list[Item]
    early: list[tuple[Item, float]]


class Turns:
    """What waits here holds no permit. `pace` knows each host's limits."""

    def __init__(self, pace: Pace, *, paced: bool, window: int, concurrency: int) -> None:
        self._pace, self._paced, self._window, self._concurrency = (
            pace,
            paced,
            window,
            concurrency,
        )
        self.ready: deque[Item] = deque()
        self._asking: dict[str, int] = {}  # hosts with requests in flight, and how many
        self._crowd: dict[str, deque[Item]] = {}  # ready, but their host has as many as it may have
        self._sent: dict[
            str, tuple[float, float]
        ] = {}  # by host, where it has a limit: the slot used last, and when

    def choose(self, permits: int, now: float) -> Chosen:
        chosen = Chosen([], [], [])
        start, ready, asking, limit, voided = (
            chosen.start,
            self.ready,
            self._asking,
            self._pace.concurrency,
            self._pace.voided,
        )
        stale = now - LATE
        while ready and len(start) < permits:
            item = ready.popleft()
            if item.asks:
                key = item.event.key
                n = asking.get(key, 0)
                if n and n >= limit(key):
                    self._crowd.setdefault(key, deque()).append(item)
                    continue
                if item.slot < stale or item.given < voided(key):
                    chosen.late.append(item)
                    self._call_up(key)
                    continue
                if (self._paced or item.slot < math.inf or key in self._sent) and (
                    wait := self._too_soon(key, item.admitted.slot, now)
                ):
                    chosen.early.append((item, wait))
                    self._call_up(key)
                    continue
                asking[key] = n + 1
            start.append(item)
        return chosen

    def leave(self, item: Item) -> None:
        """It started, and is done with its host: the next in the crowd goes first."""
        if not item.asks:
            return
        key = item.event.key
        n = self._asking[key] - 1
        if n:
            self._asking[key] = n
        else:
            del self._asking[key]
        self._call_up(key)

    def clear(self) -> None:
        self.ready.clear()
        self._crowd.clear()

    # -- crowds: a slow host must not fill the window with events that wait for their turn, while ot

    @property
    def crowded(self) -> bool:
        return bool(self._crowd)

    @property
    def mixed(self) -> bool:
        """More than one host is being asked."""
        return len(self._asking) > 1

    def full(self) -> list[str]:
        """Hosts that have their share of the window waiting here."""
        return [key for key, crowd in self._crowd.items() if len(crowd) >= self._share(key)]

    def excess(self) -> list[Item]:
        """Taken out: what waits beyond its host's share."""
        return [
            crowd.pop()
            for key, crowd in self._crowd.items()
            for _ in range(len(crowd) - self._share(key))
        ]

    def _share(self, key: str) -> int:
        """As many places for each request that the host may have in flight as there are for any."""
        limit = self._pace.concurrency(key)
        return max(1, min(limit * (self._window // max(1, self._concurrency)), self._window // 4))

    def _call_up(self, key: str) -> None:
        """One of the crowd takes the place of one that left, or that could not use it: nobody else
        would call them.
        """
        if self._crowd and (crowd := self._crowd.get(key)):
            self.ready.appendleft(crowd.popleft())
            if not crowd:
                del self._crowd[key]

    def _too_soon(self, key: str, slot: float, now: float) -> float:
        """Seconds until it may go. Where the one before went late, this one keeps its distance, or
        several would go at once.
        """
        last, sent = self._sent.get(key, (slot, 0.0))
        # No more than the host's own gap: slots that lie apart because there was nothing to do, or
        # we were slow, need no distance.
        gap = self._pace.gap(key)
        due = sent + KEPT * min(slot - last, gap)
        if due > now + SOON:
            return due - now
        if len(self._sent) > REMEMBERED:
            self._sent = {host: pair for host, pair in self._sent.items() if pair[1] > now - 60.0}
        self._sent[key] = slot, now
        return 0.0
