"""Lowest accepted speed of a response: it rises while slow requests make permits scarce."""

from __future__ import annotations

import msgspec

# Bytes per second over a number of seconds. The first pair is nearly the limit that always applies
# (`HttpOptions.min_rate`). The second one applies if slow requests hold all permits.
LOWEST, HIGHEST = 256.0, 16384.0
LONGEST, SHORTEST = 20.0, 5.0
# Share of all permits that long requests may hold before the speed rises.
MIN_SHARE = 0.5


class Scarcity(msgspec.Struct, frozen=True):
    """Permits are scarce: the lowest accepted speed, and the domains that wait for permits."""

    speed: float  # bytes per second
    span: float  # seconds over which the speed is measured
    waiting: frozenset[str]  # registrable domains
    needed: int = 1  # permits that must become free until they are not scarce

    def affects(self, domain: str) -> bool:
        """Return True if another domain waits for the permit of this domain's request."""
        return not self.waiting <= {domain}


def scarcity(
    total: int, free: int, kept: int, long: int, waiting: frozenset[str]
) -> Scarcity | None:
    """Return the lowest accepted speed, or None if slow requests are accepted.

    `kept` of the `total` permits are reserved. `long` permits belong to long requests. The speed
    does not rise while other permits than the reserved ones are free, or while no domain waits.
    """
    share = long / total
    if free > kept or not waiting or share <= MIN_SHARE:
        return None
    level = min(1.0, (share - MIN_SHARE) / (1.0 - MIN_SHARE))
    return Scarcity(
        LOWEST * (HIGHEST / LOWEST) ** level,
        LONGEST * (SHORTEST / LONGEST) ** level,
        waiting,
        kept + 1 - free,
    )
