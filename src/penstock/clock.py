"""System clock. Other modules get a clock as an argument, so that tests can pass another one."""

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
    """Wait for `seconds`, or until `woken` is set."""
    asleep, waking = (
        asyncio.ensure_future(clock.sleep(seconds)),
        asyncio.ensure_future(woken.wait()),
    )
    try:
        await asyncio.wait((asleep, waking), return_when=asyncio.FIRST_COMPLETED)
    finally:
        asleep.cancel()
        waking.cancel()
