"""Runner of on_change hooks: at least once, after success, from a queue in the ledger's store."""

from __future__ import annotations

import asyncio
import logging

from penstock.clock import wait
from penstock.errors import StoreUnavailable
from penstock.locks import Lost
from penstock.ports import Clock, Extraction, Lock, Transaction, UnitOfWork

log = logging.getLogger("penstock.hooks")


class HookRunner:
    """Task that runs the hooks.

    A lock allows one runner per fleet at a time. So in normal operation a hook runs once for each
    change. It may run again after its own failure, a crash, an outage or a lost lock.
    """

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
        """Check for changes now."""
        self._woken.set()

    async def run(self) -> None:
        """Run hooks until cancelled. Check for changes every 0.5 s, or when `wake` is called."""
        try:
            while True:
                try:
                    busy = await self.lock.take() and await self._step()
                except StoreUnavailable:
                    busy = False
                except Lost:
                    # Another machine has the lock, and runs the hooks of these changes again.
                    self.lock.lose()
                    busy = False
                if not busy:
                    self._woken.clear()
                    await wait(self.clock, self._woken, 0.5)
        finally:
            self.lock.release()

    async def _step(self) -> bool:
        """Run the hooks of one batch of changes. Return False if no change waits."""
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
