"""Stores of a configuration that migrations change, and their migration for `penstock migrate`."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from penstock.clock import SystemClock
from penstock.config.schema import Config
from penstock.runtime.stores import TOPICS, has_state, worker_id
from penstock.stores.context import Context
from penstock.stores.migrations.other_workers import OtherWorker, other_workers
from penstock.stores.migrations.plan import Plan, make_plan
from penstock.stores.migrations.runner import Progress
from penstock.stores.migrations.upgrade import Observer, result_sentence, upgrade
from penstock.stores.sql import SqlStore

__all__ = [
    "Done",
    "MigratingStore",
    "Observer",
    "OtherWorker",
    "Plan",
    "Progress",
    "open_all",
    "upgrade_files",
]
SCHEMES = ("sqlite:", "postgres:", "postgresql:")


class Done(Struct, frozen=True):
    """One migrated store."""

    plan: Plan
    seconds: float

    @property
    def sentence(self) -> str:
        return result_sentence(self.plan, self.seconds)


class MigratingStore:
    """One open store, not yet migrated."""

    def __init__(self, store: SqlStore, workers_directory: Path) -> None:
        self._store, self._workers = store, workers_directory
        self.label = store.path

    def plan(self) -> Plan | None:
        """Return the plan, or None if the store has no tables yet. Raises StoreRefused."""
        return make_plan(self._store)

    def other_workers(self) -> list[OtherWorker]:
        return other_workers(self._store, self._workers)

    def migrate(self, observer: Observer, *, wait: bool) -> Done | None:
        """As `upgrade`. Return None if there was nothing to do."""
        started = time.monotonic()
        plan = upgrade(self._store, self._workers, wait=wait, observer=observer)
        if plan is None or not plan.missing:
            return None
        return Done(plan, time.monotonic() - started)


@contextlib.contextmanager
def open_all(config: Config) -> Iterator[Sequence[MigratingStore]]:
    """Open each SQL store of the configuration once. Files that do not exist are left out."""
    context = Context(
        config, SystemClock(), random.Random(), worker=worker_id(), inline=True, upgrade=False
    )
    try:
        opened: list[SqlStore] = []
        for url in _urls(config):
            if url.startswith(SCHEMES):
                store = context.store(url)
                if store not in opened:
                    opened.append(store)
        yield [MigratingStore(store, config.state.dir / "workers") for store in opened]
    finally:
        context.close()


def upgrade_files(config: Config) -> None:
    """Migrate the SQLite files of the configuration, as opening them does.

    `run` calls this before its event loop starts, so that Ctrl-C ends a long migration or the wait
    for another process. The next command continues the migration.
    """
    context = Context(config, SystemClock(), random.Random(), worker=worker_id(), inline=True)
    try:
        for url in _urls(config):
            if url.startswith("sqlite:"):
                context.database(url)
    finally:
        context.close()


def _urls(config: Config) -> list[str]:
    """Return the URLs of all stores, without files that do not exist."""
    urls = [config.ledger.url, config.claims.url, config.pages.url]
    urls += [getattr(config.topics, name) for name in TOPICS]
    return [url for url in dict.fromkeys(urls) if has_state(url)]
