"""The catalogue of signals: what happened to events, as log lines and as the figures of the live
display. Never in the way of a settle.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

from penstock.model import Event
from penstock.ports import End

log = logging.getLogger("penstock")


class Signals:
    """One per process. Bounded: the last latencies, counters, the last failures."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.latencies: deque[float] = deque(maxlen=5000)  # accepted → row, seconds
        self.asked: deque[tuple[float, str]] = deque(maxlen=5000)  # (when, host)
        self.failures: deque[tuple[str, str, str]] = deque(maxlen=50)  # (url, reason, kind)
        self.stale = 0

    def failed(
        self, event: Event, stage: str, kind: str, reason: str, *, dead: bool, delay: float
    ) -> None:
        self.failures.append((event.url, reason, kind))
        if dead:
            log.warning(
                "dead: %s %s: %s",
                event.url,
                stage,
                reason,
                extra={"event_id": event.id, "trace_id": event.trace},
            )
        else:
            log.info(
                "retry in %.1f s: %s %s: %s",
                delay,
                event.url,
                stage,
                reason,
                extra={"event_id": event.id, "trace_id": event.trace},
            )

    def ended(self, end: End, now: float, *, applied: bool) -> None:
        if not applied:
            self.stale += 1
            log.warning(
                "stale: %s was taken over by another worker; this end changed nothing", end.event.id
            )
            return
        self.ends[end.outcome] += 1
        if end.outcome == "success":
            self.latencies.append(now - end.event.accepted_at)
        if end.meta is not None:
            self.asked.append((end.meta.fetched_at, end.event.key))
