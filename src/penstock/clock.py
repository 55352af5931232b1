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


async def wait(clock: Clock, event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, at most `seconds`."""
    waiting = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(clock.sleep(seconds))]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
