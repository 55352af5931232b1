"""Group commit: jobs that wait at the same time share one commit of their SQL store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from penstock.errors import StoreUnavailable
from penstock.stores.migrations.versions import ROWS, STORE, newest, read_version, refuse_other
from penstock.stores.sql import SqlStore, Tx

T = TypeVar("T")


class Job(Generic[T]):
    """One `work(tx)`, with its result or error."""

    __slots__ = ("durable", "error", "future", "result", "work")
    future: asyncio.Future[None]  # only of a job that a caller awaits
    result: T  # only after `work` has returned

    def __init__(self, work: Callable[[Tx], T], durable: bool) -> None:
        self.work, self.durable = work, durable
        self.error: BaseException | None = None

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        return self.result


def take(queue: deque[Job[Any]], limit: int) -> list[Job[Any]]:
    """Remove the oldest jobs from the queue, and return them."""
    return [queue.popleft() for _ in range(min(len(queue), limit))]


def resolve(jobs: Sequence[Job[Any]]) -> None:
    """Wake the callers that await these jobs."""
    for job in jobs:
        if not job.future.done() and not job.future.get_loop().is_closed():
            job.future.set_result(None)


class GroupCommitStore(SqlStore):
    """Base of SQL stores with group commit. `inline` runs each job on the caller's thread."""

    inline: bool
    rollbacks = 0
    _closed = False

    def _job(
        self, work: Callable[[Tx], T], *, durable: bool = True, synced: bool = False
    ) -> Job[T]:
        self._refuse_if_closed()
        return Job(work, synced or (durable and self.durability == "full"))

    async def _committed(
        self,
        job: Job[T],
        execute: Callable[[Sequence[Job[Any]]], None],
        enqueue: Callable[[Job[Any]], None],
    ) -> T:
        """Return the result of the job after its commit."""
        if self.inline:
            execute([job])
        else:
            job.future = asyncio.get_running_loop().create_future()
            enqueue(job)
            # A cancelled caller must not cancel the future: the job commits anyway.
            await asyncio.shield(job.future)
        return job.outcome()

    def run_jobs(
        self, tx: Tx, group: Sequence[Job[Any]], outages: tuple[type[Exception], ...]
    ) -> None:
        """Run the jobs in one transaction. Raises outages, which fail the whole group.

        A job that raises another error is rolled back alone. If it is the only job, the transaction
        has then ended.
        """
        alone = len(group) == 1
        for job in group:
            if not alone:
                tx.execute("SAVEPOINT job")
            try:
                job.result, job.error = job.work(tx), None
            except outages:
                raise
            except BaseException as e:
                job.error = e
                self.rollbacks += 1
                tx.execute("ROLLBACK" if alone else "ROLLBACK TO job").fetchall()
            if not alone:
                tx.execute("RELEASE job")

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable(
                f"{self.path} is closed",
                hint="open the store again: this process has closed it",
            )

    def _has_part(self, tx: Tx, name: str) -> bool:
        """Return True if the tables of part `name` exist.

        Raises StoreRefused if the store has another version.
        """
        version = read_version(tx)
        if version is None:
            return False
        refuse_other(self.path, version, newest())
        return name in version.parts

    def _create_part(self, tx: Tx, name: str, schema: str) -> None:
        """Create the tables of part `name` in this transaction, unless another process has."""
        if not self._has_part(tx, name):
            if tx.execute(ROWS).get is None:
                tx.execute("INSERT INTO part VALUES(?,?)", (STORE, newest()))
            for statement in self.statements(schema):
                tx.execute(statement).fetchall()
            tx.execute("INSERT INTO part VALUES(?,?)", (name, newest()))

    async def close(self) -> None:
        self.close_now()
