"""A clock that moves only when a test advances it. It never reads the real time."""

from __future__ import annotations

import asyncio
import heapq

# Seconds since the epoch: a realistic value, so tests use real magnitudes.
START = 1_700_000_000.0


class ManualClock:
    """Implements ports.Clock. `sleep` ends when a test advances the clock far enough.

    Sleepers wake in the order of their times.
    """

    def __init__(self, now: float = START) -> None:
        self._now = now
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0  # sleepers so far

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward and wake all sleepers that are due.

        They run at the caller's next await.
        """
        if seconds < 0:
            raise ValueError("the clock cannot move backwards: create another clock")
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, sleeper = heapq.heappop(self._sleepers)
            if not sleeper.done():
                sleeper.set_result(None)

    async def elapse(self, seconds: float) -> None:
        """Move the time forward from sleeper to sleeper, and let each run at its own time.

        So a task that a sleeper starts can sleep and wake within the same span.
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
        self._count += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._count, sleeper))
        await sleeper

    @property
    def sleeping(self) -> int:
        """Number of tasks that wait for a later time."""
        return sum(not sleeper.done() for _, _, sleeper in self._sleepers)

    @staticmethod
    async def _settle() -> None:
        """Run all tasks that are ready. Work in other threads is not awaited."""
        for _ in range(20):
            await asyncio.sleep(0)
