"""The clock of a process. Every part of Penstock gets it as an argument."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Time and waiting. It is an argument, so that a pipeline can run under a simulated clock."""

    def now(self) -> float:
        """Return seconds since the epoch. Leases, slots and windows of the fleet use this time."""

    async def sleep(self, seconds: float) -> None: ...
