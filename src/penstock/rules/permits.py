"""Shares of permits: which registrable domain may start its next request while permits are scarce.

A part of the permits is reserved. Domains with few requests in flight may use that part, so that
busy or slow domains cannot hold all permits.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping

# Seconds for which a request has a permit. Then its domain is slow: permits of fast domains are
# free again after this time.
LONG = 3.0
SLOW_MEMORY = 300.0  # seconds for which a domain is slow after its last long request


def reserved(total: int) -> int:
    """Return the reserved permits: an eighth of all, rounded up."""
    return -(-total // 8) if total > 1 else 0


def reserved_from_slow(total: int) -> int:
    """Return the permits that slow domains never hold: a quarter of all, rounded up."""
    return min(-(-total // 4), total - 1)


def may_use_reserved(held: int, free: int) -> bool:
    """Return True if a domain with `held` permits may use one of the last `free` permits.

    It may have less than a quarter of the free permits. So some are left for domains without one.
    """
    return 4 * held < free


class Turns:
    """Order in which waiting domains start their next requests.

    The domain with the fewest requests in flight is first. Domains with equally many take turns.
    """

    def __init__(
        self,
        total: int,
        held: Mapping[str, int],
        waiting: Iterable[str],
        slow: Collection[str],
    ) -> None:
        """`held` has the requests in flight of each domain, `waiting` the domains with events."""
        self._reserved, self._slow = reserved(total), slow
        self._slow_limit = total - reserved_from_slow(total)
        self._slow_held = sum(n for domain, n in held.items() if domain in slow)
        self._order = [(held.get(domain, 0), n, domain) for n, domain in enumerate(waiting)]
        self._last, self._taken = len(self._order), 0
        heapq.heapify(self._order)

    def next(self, free: int) -> str | None:
        """Return the domain that may start a request with one of `free` permits.

        Return None if no domain may. Call `again` if the domain has more events, and `start` first
        if it has started a request.
        """
        while self._order:
            n, _, domain = self._order[0]
            if free <= 0 or (free <= self._reserved and not may_use_reserved(n, free)):
                return None  # other domains have at least as many
            heapq.heappop(self._order)
            if domain in self._slow and self._slow_held >= self._slow_limit:
                continue
            self._taken = n
            return domain
        return None

    def start(self, domain: str) -> None:
        """Count a request of the domain that `next` has returned."""
        self._taken += 1
        if domain in self._slow:
            self._slow_held += 1

    def again(self, domain: str) -> None:
        """Put the domain that `next` has returned back, behind those with equally many requests."""
        self._last += 1
        heapq.heappush(self._order, (self._taken, self._last, domain))
