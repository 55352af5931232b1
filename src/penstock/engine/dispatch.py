"""Chooses which admitted deliveries start now: concurrency, slots and spacing per host.

Does no I/O and never waits. Slots are reserved by `admission`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

import msgspec

from penstock.model import Event
from penstock.ports import Admitted, Cancellable, Delivery, Extracted, Pace, PageMeta, Response
from penstock.rules.pace import LATE

# Share of the interval that is kept after a late request. Below 1, so that the host catches up.
KEPT = 0.95
SOON = 0.005  # seconds. A shorter wait is not worth a timer.
REMEMBERED = 8192  # hosts. Above this, hosts without a request in the last 60 s are dropped.


class Item:
    """A delivery held by this worker, from `receive` until its outcome is committed."""

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
        self.begun = 0.0  # time of the counted start, 0 until `begin` has counted it
        self.asks = False  # False if no request is sent, for example if a stored page is extracted
        self.slot = math.inf  # time at which the request may start, inf if it need not wait
        self.given = math.inf  # time at which the slot was requested
        self.timer: asyncio.TimerHandle | None = None
        self.task: Cancellable | None = None  # request or task in progress
        self.meta: PageMeta | None = None
        self.body: bytes = b""
        self.response: Response | None = None
        self.extracted: Extracted | None = None


class Chosen(msgspec.Struct):
    """Result of `Turns.choose`."""

    start: list[Item]
    late: list[Item]  # deliveries whose slot has passed or was voided: reserve a new slot
    early: list[tuple[Item, float]]  # deliveries with the seconds to wait before the next try


class Turns:
    """Queue of admitted deliveries. A delivery that waits here holds no permit.

    `pace` returns the limits of each host. If `paced` is False, requests to a host are spaced only
    after a delivery of that host had to wait for a slot.
    """

    def __init__(self, pace: Pace, *, paced: bool, window: int, concurrency: int) -> None:
        self._pace, self._paced, self._window, self._concurrency = (
            pace,
            paced,
            window,
            concurrency,
        )
        self.ready: deque[Item] = deque()  # deliveries that can start when a permit is free
        self._asking: dict[str, int] = {}  # host key -> requests in flight
        self._crowd: dict[str, deque[Item]] = {}  # host key -> deliveries over its limit
        # Host key -> (slot, start) of the last request, for hosts whose requests are spaced.
        self._sent: dict[str, tuple[float, float]] = {}

    def choose(self, permits: int, now: float) -> Chosen:
        """Take up to `permits` deliveries that may start now."""
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
        """Free the item's place at its host. The host's next waiting delivery is chosen first."""
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

    # -- fair shares: deliveries of a slow host must not fill the prefetch window ------------------

    @property
    def crowded(self) -> bool:
        """True if deliveries wait because their host is at its concurrency limit."""
        return bool(self._crowd)

    @property
    def mixed(self) -> bool:
        """True if requests to more than one host are in flight."""
        return len(self._asking) > 1

    def full(self) -> list[str]:
        """Return the hosts whose waiting deliveries use their whole share of the window."""
        return [key for key, crowd in self._crowd.items() if len(crowd) >= self._share(key)]

    def excess(self) -> list[Item]:
        """Remove and return the newest waiting deliveries beyond each host's share."""
        return [
            crowd.pop()
            for key, crowd in self._crowd.items()
            for _ in range(len(crowd) - self._share(key))
        ]

    def _share(self, key: str) -> int:
        """Return the host's share: proportional to its concurrency limit, at most a quarter."""
        limit = self._pace.concurrency(key)
        return max(1, min(limit * (self._window // max(1, self._concurrency)), self._window // 4))

    def _call_up(self, key: str) -> None:
        """Make the host's longest-waiting delivery ready.

        Called when a place at the host is free, or when the chosen delivery could not use it.
        """
        if self._crowd and (crowd := self._crowd.get(key)):
            self.ready.appendleft(crowd.popleft())
            if not crowd:
                del self._crowd[key]

    def _too_soon(self, key: str, slot: float, now: float) -> float:
        """Return the seconds until the host may get the request. If 0, record the request.

        After a late request, keep most of the interval. Otherwise several requests would start
        together.
        """
        last, sent = self._sent.get(key, (slot, 0.0))
        # At most the host's interval: the time between two slots may also be long because the host
        # had no work, or because this worker was slow.
        gap = self._pace.gap(key)
        due = sent + KEPT * min(slot - last, gap)
        if due > now + SOON:
            return due - now
        if len(self._sent) > REMEMBERED:
            self._sent = {host: pair for host, pair in self._sent.items() if pair[1] > now - 60.0}
        self._sent[key] = slot, now
        return 0.0
