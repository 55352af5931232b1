"""The clock that every part of Penstock is given."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Passed in everywhere, so that the whole pipeline also runs under a simulated one."""

    def now(self) -> float:
        """Seconds since the epoch; what the fleet agrees on (leases, slots, windows)."""

    async def sleep(self, seconds: float) -> None: ...
