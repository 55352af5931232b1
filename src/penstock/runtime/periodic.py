"""Periodic work of a worker process: maintenance, retention, and messages of an external broker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from functools import partial

from penstock.config.schema import Config
from penstock.engine.flusher import Flusher
from penstock.engine.relay import RelayChores
from penstock.engine.routes import HEARTBEAT
from penstock.errors import StoreUnavailable
from penstock.locks import WorkerLock
from penstock.operate.disk import record_sample
from penstock.operate.ownership import HEARTBEAT_INTERVAL, Membership
from penstock.ports import Clock, Transaction
from penstock.runtime.stores import Stores
from penstock.stores.migrations.versions import newest, read_version

log = logging.getLogger("penstock")
RETENTION_INTERVAL = 60.0  # seconds


class PeriodicWork:
    """Tasks that run until they are cancelled."""

    def __init__(
        self,
        config: Config,
        stores: Stores,
        flushers: Sequence[Flusher],
        lock: WorkerLock,
        *,
        fetches: bool,
    ) -> None:
        """`fetches` is True if this process has the role `fetch`, and so serves routes."""
        self._config, self._stores, self._flushers = config, stores, flushers
        self._lock, self._fetches = lock, fetches
        self._clock = stores.clock
        self.backlog = 0  # rows that wait for the slowest sink of this process
        self.store_changed = asyncio.Event()  # another release has migrated the store

    async def heartbeat(self, member: Membership) -> None:
        """Show the fleet every second that this worker is alive, until cancelled.

        Raises StoreRefused if another pipeline has become the owner of the store. This is a
        separate task from `maintain`: a claims server that is down must not delay the heartbeat.
        """
        for beats in itertools.count(1):
            await self._clock.sleep(1.0)
            self._lock.beat()
            with contextlib.suppress(StoreUnavailable):  # `maintain` logs the outage
                if self._stores.relay_chores is not None:
                    await self._stores.relay_chores.heartbeat()
                # Workers of a store in a file are on one machine, and have lock files.
                if self._stores.db.file is None and beats % int(HEARTBEAT_INTERVAL) == 0:
                    await member.heartbeat()
                if self._fetches and beats % int(HEARTBEAT) == 0:
                    await self._stores.routes.announce()
                await self.check_store_version()

    async def maintain(self) -> None:
        """Run periodic work until cancelled.

        The view of blocked hosts is read ten times a second. Ended workers, due delays and sink
        backlogs are checked every second. Retention runs every minute.
        """
        for beats in itertools.count(1):
            await self._clock.sleep(0.1)
            try:
                await self._stores.claims.refresh()
                if beats % 10 == 0:
                    if self._config.proxies:
                        await self._stores.proxies.refresh()
                    for worker in await self._stores.maintenance.reclaim(
                        self._stores.workers_directory
                    ):
                        log.warning("worker %s has crashed. Its work was released", worker)
                    await self._stores.maintenance.release_due()
                    await self._stores.breakers.refresh()
                    await self._stores.budgets.refresh(fetches=self._fetches)
                    await self.remove()
                    self.backlog = max([await f.backlog() for f in self._flushers], default=0)
                    if self._fetches:
                        await self._stores.routes.release()
                if beats % int(RETENTION_INTERVAL * 10) == 1:
                    await asyncio.to_thread(
                        record_sample, self._config.state.dir, self._clock.now()
                    )
                if beats % int(RETENTION_INTERVAL * 10) == 0:
                    await self._stores.proxies.prune()
                    await retain(
                        self._stores,
                        pages_keep=self._config.pages.keep,
                        pages_bytes=self._config.pages.max_bytes,
                        history_keep=self._config.history.keep,
                    )
            except StoreUnavailable as e:
                log.error("%s", e.message)
                await self._clock.sleep(1.0)

    async def check_store_version(self) -> bool:
        """Return True if another release migrates a store. Then this worker has to stop.

        Runs with each heartbeat. The pages or the broker may be in another store than the ledger.
        """
        for store in self._stores.context.opened:
            found = await store.read(read_version)
            if found is None or found.is_current:
                continue
            if not self.store_changed.is_set():
                log.warning(
                    "another release changes %s to store version %d. This worker knows version %d, "
                    "so it stops. Start the workers of that release",
                    store.path,
                    found.target or found.number,
                    newest(),
                )
            self.store_changed.set()
            return True
        return False

    async def remove(self, *, idle: bool = False) -> bool:
        """Remove records of URLs that are gone. Return True if there were any.

        `idle` is True if no event is open.
        """
        removed = await self._stores.removals.settle(idle=idle)
        if removed:
            for flusher in self._flushers:
                flusher.wake()
        return removed

    async def relay(self, chores: RelayChores) -> None:
        """Publish due messages on the external broker, and messages that the broker has lost.

        This is a separate task from `maintain`. If the broker does not answer, this worker's
        heartbeat must continue.
        """
        for beats in itertools.count(1):
            await self._clock.sleep(0.1)
            try:
                await chores.publish_due()
                if beats % max(10, int(self._config.lease * 10)) == 0 and (
                    again := await chores.recover()
                ):
                    log.warning(
                        "the broker had lost %d messages of open events. They were published again",
                        again,
                    )
            except StoreUnavailable as e:
                log.warning("%s", e.message)
                await self._clock.sleep(1.0)


# -- retention -------------------------------------------------------------------------------------


async def retain(
    stores: Stores,
    *,
    pages_keep: float | None,
    pages_bytes: int | None,
    history_keep: float | None,
    seconds: float = 5.0,
) -> tuple[int, int]:
    """Apply retention to pages, history and ended events. Return (pages removed, bytes freed).

    Runs small transactions until all is deleted or `seconds` have passed.
    """
    now = stores.clock.now()
    until = now + seconds
    # Keep two windows: clocks of workers may differ.
    ends_before = now - 2 * stores.config.breaker.window
    await stores.uow.write(lambda tx: tx.breakers.prune(ends_before))
    removed = freed = 0
    while True:
        pages, size = await stores.uow.write(
            partial(_retain_pages, stores.clock, pages_keep, pages_bytes)
        )
        done = [pages, size, await stores.uow.write(lambda tx: tx.queue.prune())]
        if history_keep is not None:
            before = stores.clock.now() - history_keep
            shared_claims = stores.external_claims is None
            if stores.external_claims is not None:
                await stores.external_claims.prune(before)
            done.append(await stores.uow.write(partial(_retain_events, before, shared_claims)))
        removed, freed = removed + pages, freed + size
        if not any(done) or stores.clock.now() > until:
            return removed, freed
        await stores.clock.sleep(0.01)  # let other transactions write


def _retain_pages(
    clock: Clock, keep: float | None, max_bytes: int | None, tx: Transaction
) -> tuple[int, int]:
    tx.pages.sweep()
    return tx.pages.prune(
        older_than=None if keep is None else clock.now() - keep,
        max_bytes=max_bytes,
        keep=tx.maintenance.pages_needed,
    )


def _retain_events(before: float, shared_claims: bool, tx: Transaction) -> int:
    # With external claims, an event that a claim still names is deleted too. Its URL is then
    # fetched without a baseline.
    if not shared_claims:
        return tx.maintenance.prune(before, lambda key, id_: False)
    tx.claims.prune(before)
    return tx.maintenance.prune(before, tx.claims.references)
