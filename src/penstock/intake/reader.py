"""Reads one source for as long as this process holds its lock, and hands what it finds to intake
together with its position. Knows no kind of source.
"""

from __future__ import annotations

import logging
import random
from typing import Unpack

from penstock.errors import PenstockError, StoreUnavailable
from penstock.intake.accept import Intake, Taken
from penstock.locks import Lost
from penstock.model import Failure
from penstock.ports import (
    Accepted,
    Batch,
    Clock,
    Durability,
    Lock,
    Source,
    SourceNote,
    SourceState,
    Transaction,
    UnitOfWork,
)

log = logging.getLogger("penstock.sources")
LOOK = 1.0  # seconds until a pause or a reset is noticed, and between two tries for the lock
BEAT = 2.0  # seconds between two notes of one who has nothing to do
WORD = 10.0  # … of one who is at it
FIRST_BACK_OFF, LAST_BACK_OFF = 1.0, 300.0
LONGEST_WAIT = 86400.0  # whatever Retry-After says
JITTER = 0.1  # of `every`: sources that were started together do not stay together


class Moved(Exception):
    """Somebody paused the source or set its position: what is being read is not wanted any more."""


class Reader:
    """`run()` is a task for as long as the process works."""

    def __init__(
        self,
        source: Source,
        url: str,
        intake: Intake,
        uow: UnitOfWork,
        lock: Lock,
        clock: Clock,
        rng: random.Random,
        *,
        worker: str,
    ) -> None:
        self.source, self.url, self.intake, self.error = source, url, intake, ""
        self._uow, self._lock, self._clock, self._rng, self._worker = (
            uow,
            lock,
            clock,
            rng,
            worker,
        )
        self._started = clock.now()
        self._settled = False
        self._looked = self._beaten = 0.0
        self._generation = -1
        self._done = -1  # the generation whose only round is over
        self._backlog: tuple[float | None, int | None] = (None, None)

    async def run(self) -> None:
        failures = 0
        try:
            while True:
                try:
                    wait = await self._step()
                    failures = 0
                except Moved:
                    wait = 0.0
                except Lost:
                    self._lock.lose()
                    wait = LOOK
                except (
                    Exception
                ) as e:  # whatever it is, the source goes on from where it durably is
                    failures += 1
                    wait = await self._failed(e, failures)
                if wait > 0:
                    await self._clock.sleep(wait)
        finally:
            try:
                await self.source.close()
            finally:
                self._lock.release()

    async def settled(self) -> bool:
        """Nothing is left to read for now, whoever of the fleet reads it."""
        if self._lock.held:
            return self._settled
        state = await self._state()
        return (
            state is not None and state.settled_at is not None and state.settled_at >= self._started
        )

    # -- one round ---------------------------------------------------------------------------------

    async def _step(self) -> float:
        """A round, or a look. Returns how long there is nothing to do."""
        if not self._lock.held:
            self._settled = False
            if not await self._lock.take():
                return LOOK
            await self._uow.write(self._declare, durability=Durability.RELAXED)
        state, cursor = await self._uow.read(self._standing)
        if (
            state is None
        ):  # the row is gone, though the lock is ours: books that were put back from a copy
            await self._uow.write(self._declare, durability=Durability.RELAXED)
            return 0.0
        self._generation, now = state.generation, self._clock.now()
        every = self.source.every
        due = state.next_at or 0.0
        if state.paused or self._done == state.generation or due > now:
            await self._rest()
            return min(LOOK, max(0.0, due - now)) if due > now else LOOK
        self._settled = False
        await self._round(cursor)
        now = self._clock.now()
        next_at = self.source.due(now)
        if next_at is None and every is not None:
            next_at = now + every * self._rng.uniform(1 - JITTER, 1 + JITTER)
        if next_at is None:
            self._done = state.generation
        self._recovered()
        await self._note(
            looked_at=now,
            next_at=next_at,
            settled_at=now,
            error=None,
            lag=self._backlog[0],
            backlog=self._backlog[1],
        )
        self._settled = True
        return 0.0

    def _declare(self, tx: Transaction) -> None:
        self._lock.verify(tx)
        tx.sources.declare(self.source.name, self.url)
        state, every = tx.sources.state(self.source.name), self.source.every
        if (
            every is not None
            and state is not None
            and (state.next_at or 0.0) > (latest := self._clock.now() + every * (1 + JITTER))
        ):
            tx.sources.note(
                self.source.name, next_at=latest
            )  # it was planned with a longer `every`, or by a clock that went wrong

    def _standing(self, tx: Transaction) -> tuple[SourceState | None, bytes | None]:
        return tx.sources.state(self.source.name), tx.sources.cursor(self.source.name)

    async def _round(self, cursor: bytes | None) -> None:
        batches = self.source.read(cursor)
        try:
            async for batch in batches:
                await self._take(batch)
        finally:
            await batches.aclose()

    async def _take(self, batch: Batch) -> None:
        self._backlog = batch.lag, batch.backlog
        if batch.findings or batch.cursor is not None:
            self._settled = False
            await self.intake.take(
                batch, in_transaction=lambda tx, taken: self._record(tx, batch, taken)
            )
        if self.error:
            self._recovered()
            await self._note(error=None)
        if batch.idle:
            await self._rest()
        if self._clock.now() - self._looked >= LOOK:
            self._looked = self._clock.now()
            state = await self._state()
            if state is None or state.generation != self._generation or state.paused:
                raise Moved
            if (
                self._looked - self._beaten >= WORD
            ):  # a long round that finds nothing is reading too
                self._beaten = self._looked
                await self._note(looked_at=self._looked, worker=self._worker)

    def _record(self, tx: Transaction, batch: Batch, taken: Taken) -> None:
        """In the transaction that accepts: still ours, still wanted, and counted."""
        self._lock.verify(tx)
        state = tx.sources.state(self.source.name)
        if state is None or state.generation != self._generation or state.paused:
            raise Moved
        answers, now = taken.answers, self._clock.now()
        if Accepted.FULL in answers:
            tx.sources.count(
                self.source.name,
                new=answers.count(Accepted.NEW),
                known=0,
                skipped=0,
                refused=0,
                now=now,
            )
            return
        tx.sources.count(
            self.source.name,
            new=answers.count(Accepted.NEW),
            known=answers.count(Accepted.KNOWN),
            skipped=taken.skipped,
            refused=len(taken.refused),
            now=now,
        )
        values: SourceNote = {
            "lag": batch.lag,
            "backlog": batch.backlog,
            "worker": self._worker,
        }
        if batch.cursor is not None:
            values["position"] = self.source.describe(batch.cursor)
        tx.sources.note(self.source.name, **values)

    # -- what others see ---------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Nothing to do now; said from time to time, for those who wait for it."""
        now = self._clock.now()
        if not self._settled or now - self._beaten >= BEAT:
            self._settled, self._beaten = True, now
            await self._note(
                settled_at=now, worker=self._worker, lag=self._backlog[0], backlog=self._backlog[1]
            )

    async def _failed(self, error: Exception, failures: int) -> float:
        expected = isinstance(error, PenstockError | Failure)
        reason = str(error) if expected else f"bug in the source: {error!r}"
        hint = f" (try: {error.hint})" if isinstance(error, PenstockError) and error.hint else ""
        if not expected:
            log.error("source %s: %s", self.source.name, reason, exc_info=error)
        elif reason != self.error:
            log.warning("source %s: %s%s; it is tried again", self.source.name, reason, hint)
        self.error, self._settled = reason, True  # before others can read of it
        wait: float = min(
            FIRST_BACK_OFF * 2.0 ** min(failures - 1, 10),
            LAST_BACK_OFF,
            self.source.every or LAST_BACK_OFF,
        )
        asked: float = getattr(error, "after", None) or 0.0
        wait = max(wait, min(asked, LONGEST_WAIT)) * self._rng.uniform(1, 1 + JITTER)
        now = self._clock.now()
        try:
            await self._note(
                error=(reason + hint)[:1000], error_at=now, settled_at=now, next_at=now + wait
            )
        except (StoreUnavailable, Lost, Moved):
            pass  # the next step says it
        return min(wait, LOOK)  # a reset or a pause is not kept waiting

    def _recovered(self) -> None:
        if self.error:
            log.info("source %s is read again", self.source.name)
            self.error = ""

    async def _note(self, **values: Unpack[SourceNote]) -> None:
        def work(tx: Transaction) -> None:
            self._lock.verify(tx)
            state = tx.sources.state(self.source.name)
            if (
                state is not None and state.generation != self._generation >= 0
            ):  # what was seen is of a position that is not wanted any more
                raise Moved
            tx.sources.note(self.source.name, **values)

        await self._uow.write(work, durability=Durability.RELAXED)

    async def _state(self) -> SourceState | None:
        return await self._uow.read(lambda tx: tx.sources.state(self.source.name))
