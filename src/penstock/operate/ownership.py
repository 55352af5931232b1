"""Owner of a store: the first pipeline that runs on it. Another pipeline is refused.

Two pipelines on one store would take each other's events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock import locks
from penstock.errors import PenstockError, StoreRefused, StoreUnavailable
from penstock.operate.doctor import StoreFile
from penstock.operate.figures import joined, plural
from penstock.operate.findings import Finding
from penstock.ports import OPEN, Clock, Durability, Transaction, UnitOfWork

HEARTBEAT_INTERVAL = 10.0  # seconds
# Seconds after its last heartbeat in which a worker of another machine counts as alive.
SILENCE_LIMIT = 60.0


class Membership:
    """A worker's right to work on a store: its pipeline is the owner."""

    def __init__(
        self, uow: UnitOfWork, db: StoreFile, clock: Clock, *, pipeline: str, worker: str
    ) -> None:
        self._uow, self._db, self._clock = uow, db, clock
        self._pipeline, self._worker = pipeline, worker

    async def enter(self) -> None:
        """Make the pipeline the owner if the store has none, and record this worker.

        One transaction decides, so of two first runs only one is accepted. Raises StoreRefused if
        another pipeline is the owner. Called after the worker has its lock file, and before it
        takes or accepts an event.
        """

        def work(tx: Transaction) -> str:
            now = self._clock.now()
            owner = tx.owner.take(self._pipeline, now)
            if owner == self._pipeline:
                tx.owner.heartbeat(self._worker, now + SILENCE_LIMIT)
            return owner

        self._check(await self._uow.write(work))

    async def keep(self) -> None:
        """Repeat the heartbeat of a store on a server, until cancelled.

        Workers of a store in a file are on one machine, and their lock files show that they are
        alive. Raises StoreRefused if another pipeline has become the owner.
        """
        while True:
            await self._clock.sleep(HEARTBEAT_INTERVAL)
            if self._db.file is None:
                with contextlib.suppress(StoreUnavailable):  # the next heartbeat tries again
                    await self.heartbeat()

    async def heartbeat(self) -> None:
        def work(tx: Transaction) -> str | None:
            tx.owner.heartbeat(self._worker, self._clock.now() + SILENCE_LIMIT)
            return tx.owner.pipeline()

        self._check(await self._uow.write(work, durability=Durability.RELAXED))

    async def leave(self) -> None:
        """Delete this worker. If the store is not available, its heartbeat expires instead."""
        with contextlib.suppress(StoreUnavailable):
            await self._uow.write(
                lambda tx: tx.owner.leave(self._worker), durability=Durability.RELAXED
            )

    def _check(self, owner: str | None) -> None:
        if owner != self._pipeline:
            raise StoreRefused(
                f"{self._db.path} belongs to the pipeline {owner!r}, and not to {self._pipeline!r}",
                hint=f"use {_another_place(self._db)}, or make {self._pipeline!r} the owner "
                "with `penstock adopt FILE`",
            )


def _another_place(db: StoreFile) -> str:
    return (
        "another namespace (PENSTOCK_NAMESPACE=…)"
        if db.file is None
        else "another state directory (--state DIR)"
    )


# -- commands --------------------------------------------------------------------------------------


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a change of the owner."""

    before: str | None  # None if the store had no owner
    events: int  # events of the old owner that have not ended
    rows: int  # rows that wait for a sink


def adopt(uow: UnitOfWork, db: StoreFile, clock: Clock, *, pipeline: str, workers: Path) -> Adopted:
    """Make a pipeline the owner of the store. `workers` is the directory of lock files.

    Raises StoreRefused if a worker of the old owner is alive.
    """
    crashed = [
        worker
        for worker, until in uow.snapshot(lambda tx: tx.owner.workers()).items()
        if not _is_alive(worker, until, db, clock, workers)
    ]

    def work(tx: Transaction) -> tuple[Adopted, list[str]]:
        before = tx.owner.pipeline()
        for worker in crashed:
            tx.owner.leave(worker)
        alive = sorted(tx.owner.workers()) if before != pipeline else []
        if not alive:
            tx.owner.change(pipeline, clock.now())
        rows = sum(sink.backlog for sink in tx.status_reports.sinks())
        return Adopted(before=before, events=tx.counters.total(*OPEN), rows=rows), alive

    found, alive = uow.write_now(work)
    if alive:
        wait = "" if db.file else f". A worker that crashed counts for {SILENCE_LIMIT:.0f} s"
        raise StoreRefused(
            f"{plural(len(alive), 'worker')} of the pipeline {found.before!r} "
            f"{'runs' if len(alive) == 1 else 'run'} on {db.path}: {joined(alive, 3)}",
            hint=f"stop the pipeline {found.before!r} first{wait}",
        )
    return found


def _is_alive(worker: str, until: float, db: StoreFile, clock: Clock, directory: Path) -> bool:
    """Return True if the worker is alive, as far as its lock file or its heartbeat shows."""
    if db.file is not None or (directory / f"{worker}.alive").exists():
        return locks.worker_alive(directory, worker)
    return until > clock.now()


def check_owner(uow: UnitOfWork, db: StoreFile, file: str) -> Iterator[Finding]:
    """Compare the owner with the pipeline of `file`, for `doctor`. `file` may be empty."""
    owner = uow.snapshot(lambda tx: tx.owner.pipeline())
    name = owner
    if file:
        from penstock.authoring.load import load

        try:
            name = load(file).name
        except PenstockError:
            return  # the check of the pipeline has reported it
    if owner is None:
        yield Finding("owner", "ok", "none: the first `penstock run` makes its pipeline the owner")
    elif name == owner:
        yield Finding("owner", "ok", f"the pipeline {owner!r}")
    else:
        yield Finding(
            "owner",
            "fail",
            f"{db.path} belongs to the pipeline {owner!r}, and {file} is {name!r}",
            f"use {_another_place(db)}, or `penstock adopt {file}`",
        )
