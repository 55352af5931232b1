"""Breakers: counts ends of events by host and extractor, and pauses those with many dead ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial

import msgspec

from penstock.engine.settings import LifecycleSettings
from penstock.errors import StoreUnavailable
from penstock.model import Reason
from penstock.ports import Clock, End, Pace, Transaction, UnitOfWork
from penstock.rules import breaker
from penstock.rules.dependencies import labels_of
from penstock.rules.reasons import sentence
from penstock.rules.waiting import EXTRACTOR, HOST, HOST_RECHECK, RECHECK, TOPIC

log = logging.getLogger("penstock.breaker")


class Tripped(msgspec.Struct, frozen=True):
    """A host or extractor that exceeded the limits."""

    what: str  # "host:HOST" or "extractor:NAME"
    topic: str  # topic of its events
    example: str  # reason of a dead event


class Breakers:
    """Breakers of one ledger.

    A transaction of `Lifecycle` counts the ends and finds what exceeded the limits. Only then a
    second transaction pauses it. So a crash between the two pauses nothing, and the next dead event
    is judged again.
    """

    def __init__(
        self, uow: UnitOfWork, pace: Pace, settings: LifecycleSettings, *, clock: Clock
    ) -> None:
        self._uow, self._pace, self._clock = uow, pace, clock
        self._limits = settings.breaker
        self.extractors: frozenset[str] = frozenset()  # paused ones, as of the last `refresh`

    async def refresh(self) -> None:
        """Read which extractors are paused."""
        found = await self._uow.read(lambda tx: tx.breakers.opened())
        self.extractors = frozenset(
            b.what.removeprefix(EXTRACTOR) for b in found if b.what.startswith(EXTRACTOR)
        )

    # -- in the transaction of the ends ------------------------------------------------------------

    def causes(self, tx: Transaction, ends: Sequence[End]) -> Sequence[End]:
        """Return the ends with the causes that the open breakers give to delays.

        A retry at a paused host waits for its host. An event whose extractor was resumed since is
        released: after the resume, no other step would make it due. An event that waits for a host
        without an open breaker is tried again soon, because that host may have been resumed too.
        """
        if not any(end.outcome in ("retry", "park") for end in ends):
            return ends
        opened = {b.what for b in tx.breakers.opened()}
        now = self._clock.now()
        return [self._with_cause(end, opened, now) for end in ends]

    def _with_cause(self, end: End, opened: set[str], now: float) -> End:
        if end.waits_for.startswith(EXTRACTOR) and end.waits_for not in opened:
            return msgspec.structs.replace(end, outcome="release", waits_for="")
        if end.waits_for.startswith(HOST) and end.waits_for not in opened:
            return msgspec.structs.replace(end, until=min(end.until, now + HOST_RECHECK))
        host = HOST + end.event.key
        if (
            host in opened
            and end.outcome in ("retry", "park")
            and end.stage == "fetch"
            and not end.waits_for
        ):
            return msgspec.structs.replace(end, waits_for=host, until=max(end.until, now + RECHECK))
        return end

    def count(
        self, tx: Transaction, successes: Sequence[End], dead: Sequence[End], now: float
    ) -> list[Tripped]:
        """Count ends. Return the hosts and extractors that exceed the limits now."""
        counts: Counter[tuple[str, str]] = Counter()
        groups = Counter(
            (end.event.topic, end.event.key, labels_of(end.extractors), end.extracted)
            for end in successes
        )
        for (topic, host, labels, extracted), n in groups.items():
            counts[TOPIC + topic, ""] += n
            counts[HOST + host, ""] += n
            if extracted:
                for name in _names(labels):
                    counts[EXTRACTOR + name, ""] += n
        suspects: dict[str, Tripped] = {}
        for end in dead:
            e = end.event
            blamed = breaker.blamed(end.stage, end.error_class, e.key, end.failed_extractors)
            counts[TOPIC + e.topic, end.error_class if blamed else ""] += 1
            for what in blamed:
                counts[what, end.error_class] += 1
                suspects[what] = Tripped(what, e.topic, end.reason)
            if HOST + e.key not in blamed:
                counts[HOST + e.key, ""] += 1  # the host answered
        tx.breakers.record_ends(counts, now)
        return [t for t in suspects.values() if self._is_over(tx, t.what, now)]

    def _is_over(self, tx: Transaction, what: str, now: float) -> bool:
        recent = tx.breakers.recent_ends(what, self._limits.window, now)
        return breaker.judge(self._limits, *breaker.ended_and_dead(recent)) == "open"

    # -- after the transaction ---------------------------------------------------------------------

    async def open(self, tripped: Sequence[Tripped]) -> None:
        """Pause hosts and extractors. If a store is unavailable, the next dead event repeats it."""
        try:
            for t in tripped:
                if t.what.startswith(HOST):
                    await self._pace.pause(t.what.removeprefix(HOST))
            for line in await self._uow.write(partial(self._open, tripped)):
                log.error("%s", line)
            await self.refresh()
        except StoreUnavailable as e:
            log.warning("the breaker could not be opened: %s", e.message)

    def _open(self, tripped: Sequence[Tripped], tx: Transaction) -> list[str]:
        """Record the pauses. Return a line about each new one."""
        now, window = self._clock.now(), self._limits.window
        lines = []
        topics = set()
        for t in tripped:
            recent = tx.breakers.recent_ends(t.what, window, now)
            ended, dead = breaker.ended_and_dead(recent)
            cause = breaker.main_cause(recent)
            detail = f"{cause}, for example {t.example[:200]}"
            reason = sentence(Reason.BREAKER, dead, ended, window, detail=detail)
            if not tx.breakers.open(t.what, cause, reason, now):
                continue
            lines.append(f"{t.what.replace(':', ' ', 1)} is paused. {reason}")
            if t.what.startswith(HOST):
                tx.maintenance.hold(t.what.removeprefix(HOST), t.what, now + RECHECK)
                topics.add(t.topic)
        for topic in sorted(topics):
            lines += self._judge_topic(tx, topic, now)
        return lines

    def _judge_topic(self, tx: Transaction, topic: str, now: float) -> list[str]:
        """Pause the topic if many hosts are paused for the same cause."""
        hosts = [b for b in tx.breakers.opened() if b.what.startswith(HOST)]
        active = tx.breakers.active_hosts(self._limits.window, now) | {b.what for b in hosts}
        causes = [b.error_class for b in hosts if b.counted]
        cause = breaker.pauses_topic(causes, len(active))
        if not cause:
            return []
        reason = sentence(Reason.BREAKER_HOSTS, causes.count(cause), len(active), cause)
        tx.queue.pause(topic, reason)
        return [f"topic {topic} is paused. {reason}"]


@lru_cache(1024)
def _names(labels: str) -> tuple[str, ...]:
    """Return the names in "name@version,…"."""
    return tuple(part.partition("@")[0] for part in labels.split(",") if part)
