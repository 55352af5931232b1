"""Repeats the calls of a worker while the store is unavailable."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.errors import StoreUnavailable
from penstock.ports import Clock

T = TypeVar("T")
RETRY_INTERVAL = 0.5  # seconds
log = logging.getLogger("penstock.worker")


class Outage:
    """Outage of the store, as one worker sees it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.reason: str | None = None  # why the store is unavailable, None if it is available

    async def retry_until_stored(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat `call` while the store is unavailable.

        No attempt is charged and no work is dropped.
        """
        while True:
            try:
                result = await call()
            except StoreUnavailable as e:
                if self.reason is None:
                    log.error("%s (%s)", e.message, e.hint)
                self.reason = e.message
                await self._clock.sleep(RETRY_INTERVAL)
            else:
                self.reason = None
                return result
