"""The reader of one source, of any kind.

It reads while this process holds the source's lock, and passes findings and cursor to intake.
"""

from __future__ import annotations

import logging
import random
from contextlib import aclosing, suppress
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
from penstock.rules.masking import mask_text

log = logging.getLogger("penstock.sources")
CHECK_INTERVAL = (
    1.0  # seconds between two checks for a pause or a reset, and between two tries for the lock
)
IDLE_REPORT_INTERVAL = 2.0  # seconds between two heartbeats of an idle reader
PROGRESS_INTERVAL = 10.0  # seconds between two heartbeats during a round
FIRST_BACK_OFF, LAST_BACK_OFF = 1.0, 300.0  # seconds to wait after the first failure, and at most
LONGEST_WAIT = 86400.0  # maximum seconds that a Retry-After delays the next round
JITTER = 0.1  # share of each wait, so that sources that started together spread out


class SourceReset(Exception):
    """An operator paused the source or reset its cursor. The current round is abandoned."""


class Reader:
    """Reads one source in rounds. `run()` is a task that lasts as long as the process."""

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
        self._uow, self._lock, self._clock, self._rng = uow, lock, clock, rng
        self._worker = worker
        self._started = clock.now()
        self._settled = False
        self._looked = self._beaten = 0.0
        self._generation = -1
        self._done = -1  # generation of a source that is read once and whose round has ended
        self._lag: float | None = None  # of the last batch
        self._backlog: int | None = None

    async def run(self) -> None:
        failures = 0
        try:
            while True:
                try:
                    wait = await self._step()
                    failures = 0
                except SourceReset:
                    wait = 0.0
                except Lost:
                    self._lock.lose()
                    wait = CHECK_INTERVAL
                # After any error, the next round continues at the durable cursor.
                except Exception as e:
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
        """Return True if the source is read to its end for now.

        If another process reads the source, its row in the ledger decides.
        """
        if self._lock.held:
            return self._settled
        state = await self._state()
        return (
            state is not None and state.settled_at is not None and state.settled_at >= self._started
        )

    # -- one round ---------------------------------------------------------------------------------

    async def _step(self) -> float:
        """Read one round if it is due, or check the state. Return the seconds to sleep."""
        if not self._lock.held:
            self._settled = False
            if not await self._lock.take():
                return CHECK_INTERVAL
            await self._uow.write(self._declare, durability=Durability.RELAXED)
        name = self.source.name
        state, cursor = await self._uow.read(
            lambda tx: (tx.sources.state(name), tx.sources.cursor(name))
        )
        # The row can be missing while this process holds the lock, if an operator restored the
        # ledger from a backup.
        if state is None:
            await self._uow.write(self._declare, durability=Durability.RELAXED)
            return 0.0
        self._generation, now = state.generation, self._clock.now()
        due = state.next_at or 0.0
        if state.paused or self._done == state.generation or due > now:
            await self._rest()
            return min(CHECK_INTERVAL, max(0.0, due - now)) if due > now else CHECK_INTERVAL
        self._settled = False
        async with aclosing(self.source.read(cursor)) as batches:
            async for batch in batches:
                await self._take(batch)
        now = self._clock.now()
        next_at = self.source.due(now)
        if next_at is None and self.source.every is not None:
            next_at = now + self.source.every * self._rng.uniform(1 - JITTER, 1 + JITTER)
        if next_at is None:
            self._done = state.generation
        self._recovered()
        await self._note(
            looked_at=now,
            next_at=next_at,
            settled_at=now,
            error=None,
            lag=self._lag,
            backlog=self._backlog,
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
            # The next round was planned with a longer `every`, or while the clock was wrong.
            tx.sources.note(self.source.name, next_at=latest)

    async def _take(self, batch: Batch) -> None:
        self._lag, self._backlog = batch.lag, batch.backlog
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
        if self._clock.now() - self._looked >= CHECK_INTERVAL:
            self._looked = self._clock.now()
            self._check_state(await self._state())
            # A long round without findings also needs heartbeats.
            if self._looked - self._beaten >= PROGRESS_INTERVAL:
                self._beaten = self._looked
                await self._note(looked_at=self._looked, worker=self._worker)

    def _record(self, tx: Transaction, batch: Batch, taken: Taken) -> None:
        """Check the lock and the source's state, in the transaction that accepts.

        Raises Lost if another process has taken the lock. Raises SourceReset if an operator paused
        the source or reset its cursor.
        """
        self._lock.verify(tx)
        self._check_state(tx.sources.state(self.source.name))
        if Accepted.FULL in taken.answers:
            return
        values: SourceNote = {
            "lag": batch.lag,
            "backlog": batch.backlog,
            "worker": self._worker,
        }
        if batch.cursor is not None:
            values["position"] = self.source.describe(batch.cursor)
        tx.sources.note(self.source.name, **values)

    def _check_state(self, state: SourceState | None) -> None:
        if state is None or state.generation != self._generation or state.paused:
            raise SourceReset

    # -- the source's row in the ledger ------------------------------------------------------------

    async def _rest(self) -> None:
        """Record that the source is idle, at most every `IDLE_REPORT_INTERVAL` seconds.

        Other processes wait for this record.
        """
        now = self._clock.now()
        if not self._settled or now - self._beaten >= IDLE_REPORT_INTERVAL:
            self._settled, self._beaten = True, now
            await self._note(
                settled_at=now, worker=self._worker, lag=self._lag, backlog=self._backlog
            )

    async def _failed(self, error: Exception, failures: int) -> float:
        expected = isinstance(error, PenstockError | Failure)
        reason = mask_text(str(error) if expected else f"bug in the source: {error!r}")
        hint = f" (try: {error.hint})" if isinstance(error, PenstockError) and error.hint else ""
        if not expected:
            log.error("source %s: %s", self.source.name, reason, exc_info=error)
        elif reason != self.error:
            log.warning("source %s: %s%s; it is tried again", self.source.name, reason, hint)
        # Set both before the await below, because other tasks read them.
        self.error, self._settled = reason, True
        wait: float = min(
            FIRST_BACK_OFF * 2.0 ** min(failures - 1, 10),
            LAST_BACK_OFF,
            self.source.every or LAST_BACK_OFF,
        )
        asked: float = getattr(error, "after", None) or 0.0
        wait = max(wait, min(asked, LONGEST_WAIT)) * self._rng.uniform(1, 1 + JITTER)
        now = self._clock.now()
        with suppress(StoreUnavailable, Lost, SourceReset):  # the next step raises it again
            await self._note(
                error=(reason + hint)[:1000], error_at=now, settled_at=now, next_at=now + wait
            )
        return min(
            wait, CHECK_INTERVAL
        )  # so that a pause or a reset is noticed within `CHECK_INTERVAL` seconds

    def _recovered(self) -> None:
        if self.error:
            log.info("source %s is read again", self.source.name)
            self.error = ""

    async def _note(self, **values: Unpack[SourceNote]) -> None:
        def work(tx: Transaction) -> None:
            self._lock.verify(tx)
            state = tx.sources.state(self.source.name)
            # The values belong to a cursor that an operator has reset.
            if state is not None and state.generation != self._generation >= 0:
                raise SourceReset
            tx.sources.note(self.source.name, **values)

        await self._uow.write(work, durability=Durability.RELAXED)

    async def _state(self) -> SourceState | None:
        return await self._uow.read(lambda tx: tx.sources.state(self.source.name))
