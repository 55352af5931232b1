"""The real clock. Everything else is given one, so that it can be given another."""

from __future__ import annotations

import asyncio
import time

from penstock.ports import Clock


class SystemClock:
    """Implements ports.Clock."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def nap(clock: Clock, seconds: float, woken: asyncio.Event) -> None:
    """For as long as that, or until somebody wakes us."""
    asleep, waking = (
        asyncio.ensure_future(clock.sleep(seconds)),
        asyncio.ensure_future(woken.wait()),
    )
    try:
        await asyncio.wait((asleep, waking), return_when=asyncio.FIRST_COMPLETED)
    finally:
        asleep.cancel()
        waking.cancel()
