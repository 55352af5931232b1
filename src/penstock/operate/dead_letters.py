"""Operators' work on dead letters: redrive, drop, and purge of a topic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.engine.maintenance import abandon
from penstock.engine.publishing import requeue
from penstock.model import Event, Reason, decode_event
from penstock.ports import Clock, Topics, Transaction, UnitOfWork
from penstock.rules.reasons import sentence

EVENT_TOPICS = ("requests", "pages", "records")  # a message of these belongs to an open event
PURGE_BATCH = 500  # events in one transaction


class DeadLetterOffice:
    """Changes dead letters for an operator."""

    def __init__(self, uow: UnitOfWork, topics: Topics, *, clock: Clock) -> None:
        self._uow, self._topics, self._clock = uow, topics, clock

    async def redrive(
        self, ids: Sequence[str], change: Callable[[Event], Event] = lambda e: e
    ) -> int:
        """Reopen dead events with a new budget, and delete their dead letters. Return how many."""
        n = await self._uow.write(lambda tx: self._redrive(tx, ids, change))
        self._topics.wake(["requests"])
        return n

    def _redrive(
        self, tx: Transaction, ids: Sequence[str], change: Callable[[Event], Event]
    ) -> int:
        now = self._clock.now()
        n = 0
        for id_ in ids:
            found = tx.dead_letters.redrivable(id_)
            if found is None:
                continue
            row, envelope = found
            before = decode_event(envelope)
            event = change(before)
            if (event.id, event.topic, event.url) != (before.id, before.topic, before.url):
                raise ValueError("a redriven event keeps its id, topic and URL")
            tx.dead_letters.drop(id_)
            requeue(tx, row, event, envelope, was="dead", reason=sentence(Reason.REDRIVEN), now=now)
            n += 1
        return n

    async def drop(self, ids: Sequence[str]) -> int:
        """Delete dead letters. Their events stay dead in the ledger. Return how many."""
        return await self._uow.write(
            lambda tx: sum(tx.dead_letters.drop(id_, release_page=True) for id_ in ids)
        )

    async def purge(self, topic: str, reason: str) -> int:
        """End the events that wait on a topic as dead, and delete the broker's messages.

        Dead events can be redriven. Events in flight are finished. Return how many were ended.
        """
        ended = 0
        while topic in EVENT_TOPICS and (
            n := await self._uow.write(lambda tx: self._abandon(tx, topic, reason))
        ):
            ended += n
        removed = await self._topics.purge(topic)
        return ended if topic in EVENT_TOPICS else removed

    def _abandon(self, tx: Transaction, topic: str, reason: str) -> int:
        events = tx.maintenance.waiting_on(topic, PURGE_BATCH)
        for event in events:
            abandon(tx, event, reason, self._clock.now())
        return len(events)
