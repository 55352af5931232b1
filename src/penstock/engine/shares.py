"""Events that wait for their registrable domain's share of the permits, and the slow domains."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from penstock.engine.inflight import InflightEvent, State
from penstock.rules.identity import BadUrl, host_key
from penstock.rules.permits import LONG, SLOW_MEMORY, Turns, reserved, reserved_from_slow
from penstock.rules.speed import Scarcity, scarcity

MAX_SLOW = 8192  # domains. Above this, the domain that was slow the longest time ago is forgotten.


@lru_cache(maxsize=8192)
def domain_of(key: str) -> str:
    """Return the registrable domain of a host key."""
    try:
        return host_key(f"http://{key}/", by="domain")
    except BadUrl:  # an event from another program, which chose its own key
        return key


class DomainShares:
    """Queues of events for each domain. They are used only while permits are scarce."""

    def __init__(self, total: int) -> None:
        self._total, self.reserved = total, reserved(total)
        self._kept_from_slow = reserved_from_slow(total)
        self.waiting: dict[str, deque[InflightEvent]] = {}  # domain -> events, no empty queue
        self._slow: dict[str, float] = {}  # slow domain -> time at which it is forgotten

    @property
    def kept(self) -> int:
        """Number of free permits from which on permits are shared by domain."""
        return self._kept_from_slow if self._slow else self.reserved

    @property
    def has_slow(self) -> bool:
        return bool(self._slow)

    def is_slow(self, host: str) -> bool:
        return bool(self._slow) and domain_of(host) in self._slow

    def put(self, item: InflightEvent) -> None:
        self.waiting.setdefault(domain_of(item.event.key), deque()).append(item)

    def put_first(self, item: InflightEvent) -> None:
        """Put an event before those of its domain. Later events of its host may wait there."""
        self.waiting.setdefault(domain_of(item.event.key), deque()).appendleft(item)

    def take(self, domain: str) -> InflightEvent:
        """Remove and return the domain's longest-waiting event."""
        queue = self.waiting[domain]
        item = queue.popleft()
        if not queue:
            del self.waiting[domain]
        return item

    def items(self) -> Iterator[InflightEvent]:
        for queue in self.waiting.values():
            yield from queue

    def remove(self, unwanted: Iterable[InflightEvent]) -> None:
        gone = set(map(id, unwanted))
        kept = {
            domain: deque(item for item in queue if id(item) not in gone)
            for domain, queue in self.waiting.items()
        }
        self.waiting = {domain: queue for domain, queue in kept.items() if queue}

    def by_domain(
        self, in_flight: Mapping[str, int], sleeping: Iterable[InflightEvent]
    ) -> Counter[str]:
        """Return the permits of each domain. `in_flight` is by host key.

        The `sleeping` events have a request in flight, but no permit.
        """
        held: Counter[str] = Counter()
        for host, n in in_flight.items():
            held[domain_of(host)] += n
        for item in sleeping:
            held[domain_of(item.event.key)] -= 1
        return held

    def turns(self, held: Mapping[str, int], now: float) -> Turns:
        """Return the order in which waiting events start. `held` has the permits of each domain."""
        while self._slow and next(iter(self._slow.values())) <= now:
            del self._slow[next(iter(self._slow))]
        return Turns(self._total, held, self.waiting, self._slow)

    def count_long(self, held: Iterable[InflightEvent], now: float) -> int:
        """Return the number of long requests, and remember that their domains are slow."""
        long = 0
        for item in held:
            if (
                item.started < now - LONG
                and item.state is State.HANDLER
                and item.task is not None
                and item.needs_request
            ):
                long += 1
                domain = domain_of(item.event.key)
                self._slow.pop(domain, None)
                self._slow[domain] = now + SLOW_MEMORY
        while len(self._slow) > MAX_SLOW:
            del self._slow[next(iter(self._slow))]
        return long

    def scarcity(self, free: int, long: int) -> Scarcity | None:
        """Return the lowest accepted speed, or None if it does not rise."""
        return scarcity(self._total, free, self.reserved, long, frozenset(self.waiting))
