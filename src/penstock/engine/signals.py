"""Signals about events: log lines, and figures of the live display. They never delay a settle."""

from __future__ import annotations

import logging
from collections import Counter, deque

from penstock.model import Event
from penstock.ports import End

log = logging.getLogger("penstock")


class Signals:
    """Signals of one process. Memory is bounded: counters, recent latencies, recent failures."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()  # outcome -> ends
        # Seconds from acceptance to the committed success, of the last 5,000 successes.
        self.latencies: deque[float] = deque(maxlen=5000)
        self.asked: deque[tuple[float, str]] = deque(maxlen=5000)  # (fetch time, host key)
        self.failures: deque[tuple[str, str, str]] = deque(maxlen=50)  # (URL, reason, error class)
        self.stale = 0  # ends with an outdated fence

    def failed(
        self, event: Event, stage: str, kind: str, reason: str, *, dead: bool, delay: float
    ) -> None:
        self.failures.append((event.url, reason, kind))
        log.log(
            logging.WARNING if dead else logging.INFO,
            "%s: %s %s: %s",
            "dead" if dead else f"retry in {delay:.1f} s",
            event.url,
            stage,
            reason,
            extra={"event_id": event.id, "trace_id": event.trace},
        )

    def ended(self, end: End, now: float, *, applied: bool) -> None:
        """Count a committed end. `applied` is False if its fence was outdated."""
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
