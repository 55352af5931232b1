"""Group commit: jobs that wait at the same time share one commit of their SQL store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from penstock.errors import StoreUnavailable, Unreachable
from penstock.stores.sql import Tx

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


class GroupCommitStore:
    """Base of SQL stores with group commit. `inline` runs each job on the caller's thread."""

    path: str
    durability: str
    inline: bool
    rollbacks = 0  # callers that cache rows compare it: a cached row may be wrong after a rollback
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

    def _refuse_other_version(self, name: str, found: int, version: int, *, instead: str) -> None:
        """Raise Unreachable if the tables of part `name` have another version."""
        if found != version:
            age = "a newer" if found > version else "an older"
            raise Unreachable(
                f"{self.path}: its {name} tables have version {found}, "
                f"this Penstock knows {version}; they were written by {age} release",
                hint=f"run that release, or give this one {instead}",
            )

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        raise NotImplementedError
