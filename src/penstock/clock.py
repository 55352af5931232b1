"""The real clock. Everything else is given one, so that it can be given another."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implements ports.Clock."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
