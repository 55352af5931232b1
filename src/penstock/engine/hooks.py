"""on_change hooks: run after success, at least once, from a queue in the ledger's store."""

from __future__ import annotations

import asyncio
import logging

from penstock.clock import nap
from penstock.errors import StoreUnavailable
from penstock.locks import Lost
from penstock.ports import Clock, Extraction, Lock, Transaction, UnitOfWork

log = logging.getLogger("penstock.hooks")


class HookRunner:
    """One per fleet at a time (held by a lock), so a change is not told twice in normal running."""

    def __init__(
        self, uow: UnitOfWork, extraction: Extraction, lock: Lock, clock: Clock, *, batch: int = 32
    ) -> None:
        self._uow, self.extraction, self.lock, self.clock, self.batch = (
            uow,
            extraction,
            lock,
            clock,
            batch,
        )
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        try:
            while True:
                try:
                    busy = await self.lock.take() and await self._step()
                except StoreUnavailable:
                    busy = False
                except Lost:  # another machine runs them now, and tells these changes once more
                    self.lock.lose()
                    busy = False
                if not busy:
                    self._woken.clear()
                    await nap(self.clock, 0.5, self._woken)
        finally:
            self.lock.release()

    async def _step(self) -> bool:
        rows = await self._uow.read(lambda tx: tx.outbox.changes(self.batch))
        if not rows:
            return False
        errors = await self.extraction.hooks([body for _, body in rows])
        done = [n for (n, _), error in zip(rows, errors, strict=True) if not error]
        failed = [(error, n) for (n, _), error in zip(rows, errors, strict=True) if error]
        for error, n in failed:
            log.warning("on_change hook failed for change %d: %s", n, error)

        def work(tx: Transaction) -> None:
            self.lock.verify(tx)
            tx.outbox.mark_hooks_run(done, failed)

        await self._uow.write(work)
        if failed and not done:
            await self.clock.sleep(1.0)
        return True
