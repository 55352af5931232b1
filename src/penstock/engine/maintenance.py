"""Periodic work on the ledger: crashed workers, due events, alerts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from penstock import locks
from penstock.engine.settings import LifecycleSettings
from penstock.ports import (
    Clock,
    DeadLetter,
    Durability,
    StoredEvent,
    Topics,
    Transaction,
    UnitOfWork,
)
from penstock.rules import breaker
from penstock.rules.fingerprint import fingerprint
from penstock.rules.waiting import TOPIC


def abandon(tx: Transaction, event: StoredEvent, reason: str, now: float) -> None:
    """End an event as dead, although it has not failed. Its dead letter can be redriven."""
    letter = DeadLetter(
        event_id=event.id,
        topic=event.topic,
        url=event.url,
        host=event.host,
        stage="intake",
        reason=reason,
        fingerprint=fingerprint("intake", "permanent", reason),
        envelope=event.envelope,
    )
    tx.maintenance.abandon(event, letter, now)


class Maintenance:
    """Periodic work of one worker. Several workers may do it at the same time."""

    def __init__(
        self, uow: UnitOfWork, topics: Topics, settings: LifecycleSettings, *, clock: Clock
    ) -> None:
        self._uow, self._topics, self._settings, self._clock = uow, topics, settings, clock

    def alerts(self, tx: Transaction) -> dict[str, tuple[int, int]]:
        """Return (ended, dead) of each topic whose share of dead events exceeds a limit."""
        now, limits = self._clock.now(), self._settings.breaker
        recent = {}
        for topic in tx.counters.topics():
            ends = tx.breakers.recent_ends(TOPIC + topic, limits.window, now)
            recent[topic] = breaker.ended_and_dead(ends)
        return {topic: seen for topic, seen in recent.items() if breaker.judge(limits, *seen)}

    async def reclaim(self, directory: Path) -> list[str]:
        """Expire the leases of crashed workers of this machine early. Return their ids."""
        crashed = locks.dead_workers(directory)
        for worker in crashed:
            await self._uow.write(partial(self._reclaim, worker))
            locks.forget_worker(directory, worker)
        if crashed:
            self._topics.wake(["requests", "pages", "records"])
        return crashed

    def _reclaim(self, worker: str, tx: Transaction) -> None:
        tx.owner.leave(worker)
        tx.routes.withdraw(worker)
        ids = tx.queue.reclaim(worker)
        tx.maintenance.requeue_from(worker, ids, self._clock.now())

    async def release_due(self) -> None:
        """Make due events pending. Called once a second."""
        now = self._clock.now()
        if await self._uow.read(lambda tx: tx.maintenance.has_due(now)):
            await self._uow.write(
                lambda tx: tx.maintenance.release_due(now), durability=Durability.RELAXED
            )
