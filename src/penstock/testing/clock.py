"""A clock that stands still until told otherwise, for tests and the simulation. Nothing here knows
what time it really is.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools

START = (
    1_700_000_000.0  # a plausible moment, so that arithmetic on epochs is exercised as it will be
)


class ManualClock:
    """Implements ports.Clock. `sleep` ends when somebody advances far enough; sleepers wake in the
    order of their times.
    """

    def __init__(self, now: float = START) -> None:
        self._now = now
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Jump; whoever should have woken on the way wakes now. They run when the caller next
        awaits.
        """
        if seconds < 0:
            raise ValueError("time does not run backwards; make another clock for that")
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, sleeper = heapq.heappop(self._sleepers)
            if not sleeper.done():
                sleeper.set_result(None)

    async def elapse(self, seconds: float) -> None:
        """As `advance`, but stops at every sleeper on the way and lets it run at its own time: what
        it starts may sleep within the span.
        """
        until = self._now + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            self.advance(max(0.0, self._sleepers[0][0] - self._now))
            await self._settle()
        self.advance(max(0.0, until - self._now))
        await self._settle()

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._count), sleeper))
        await sleeper

    @property
    def sleeping(self) -> int:
        """Who still waits for a later time."""
        return sum(not sleeper.done() for _, _, sleeper in self._sleepers)

    @staticmethod
    async def _settle() -> None:
        """Let everything that can run without time passing run; work handed to real threads is not
        waited for.
        """
        for _ in range(20):
            await asyncio.sleep(0)
