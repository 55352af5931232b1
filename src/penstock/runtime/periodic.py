"""Periodic work of a worker process: maintenance, retention, and messages of an external broker."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.config.schema import Config
from penstock.engine.flusher import Flusher
from penstock.engine.relay import RelayChores
from penstock.errors import StoreUnavailable
from penstock.runtime.retention import retain
from penstock.runtime.stores import Stores

log = logging.getLogger("penstock")
RETENTION_INTERVAL = 60.0  # seconds


class PeriodicWork:
    """Tasks that run until they are cancelled."""

    def __init__(self, config: Config, stores: Stores, flushers: Sequence[Flusher]) -> None:
        self._config, self._stores, self._flushers = config, stores, flushers
        self._clock = stores.clock
        self.backlog = 0  # rows that wait for the slowest sink of this process

    async def maintain(self) -> None:
        """Run periodic work until cancelled.

        The view of blocked hosts is read ten times a second. Ended workers, due delays and sink
        backlogs are checked every second. Retention runs every minute.
        """
        beats = 0
        while True:
            await self._clock.sleep(0.1)
            beats += 1
            try:
                await self._stores.claims.refresh()
                if beats % 10 == 0:
                    if self._config.proxies:
                        await self._stores.proxies.refresh()
                    for worker in await self._stores.maintenance.reclaim(
                        self._stores.workers_directory
                    ):
                        log.warning("worker %s is gone; its work was taken back", worker)
                    if self._stores.relay_chores is not None:
                        await self._stores.relay_chores.heartbeat()
                    await self._stores.maintenance.release_due()
                    self.backlog = max([await f.backlog() for f in self._flushers], default=0)
                if beats % int(RETENTION_INTERVAL * 10) == 0:
                    await self._retain()
            except StoreUnavailable as e:
                log.error("%s", e.message)
                await self._clock.sleep(1.0)

    async def relay(self, chores: RelayChores) -> None:
        """Publish due messages on the external broker, and messages that the broker has lost.

        This is a separate task from `maintain`. If the broker does not answer, this worker's
        heartbeat must continue.
        """
        beats = 0
        while True:
            await self._clock.sleep(0.1)
            beats += 1
            try:
                await chores.publish_due()
                if beats % max(10, int(self._config.lease * 10)) == 0 and (
                    again := await chores.recover()
                ):
                    log.warning(
                        "the broker had lost %d messages of open events; they were published again",
                        again,
                    )
            except StoreUnavailable as e:
                log.warning("%s", e.message)
                await self._clock.sleep(1.0)

    async def _retain(self) -> None:
        await self._stores.proxies.prune()
        await retain(
            self._stores,
            pages_keep=self._config.pages.keep,
            pages_bytes=self._config.pages.max_bytes,
            history_keep=self._config.history.keep,
        )
