"""Store in one SQLite file: per process a writing connection with group commit, and a reading one.

See `sqlite_connection` for the connections, and `sqlite_checks` for the checks before use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import apsw

from penstock.errors import StoreUnavailable, Unreachable
from penstock.locks import FileLock
from penstock.stores.group_commit import GroupCommitStore, Job, resolve, take
from penstock.stores.migrations.versions import StoreVersion, read_version
from penstock.stores.sql import Tx
from penstock.stores.sqlite_checks import refuse_network_file_system, single_writer_if_needed
from penstock.stores.sqlite_connection import OUTAGE, Connection, connect, read_only

if TYPE_CHECKING:
    from penstock.stores.migrations.other_workers import OtherWorker

T = TypeVar("T")

MAX_GROUP = 256  # jobs in one transaction
LOCK_POLL_INTERVAL = 0.001  # seconds between two attempts to get the write lock
# Frames in the WAL at which a checkpoint runs. If a reader or writer kept the WAL from restarting,
# the next checkpoint runs CHECKPOINT_RETRY_FRAMES later.
CHECKPOINT_FRAMES, CHECKPOINT_RETRY_FRAMES = 8000, 1000
ROW_BYTES = 400  # bytes of a row with its index entries, for estimates
CHECKPOINT_TIMEOUT_MS = 1000  # how long such a repeated checkpoint waits for other processes


class Database(GroupCommitStore):
    """Implements ports.Store and stores.sql.SqlStore.

    `write` returns after COMMIT. Jobs that wait at the same time share one commit. `inline=True`
    runs everything on the caller's thread, for tests and simulation. `:memory:` is always inline.
    """

    pipelined = False

    def __init__(
        self,
        path: str,
        *,
        durability: str = "full",
        inline: bool = False,
        busy_seconds: float = 30.0,
    ) -> None:
        self.path, self.durability = path, durability
        self.inline = inline or path == ":memory:"
        self._single_writer: FileLock | None = None
        if self.file is not None:
            refuse_network_file_system(self.file)
            self._single_writer = single_writer_if_needed(self.file)
        self._busy_timeout = busy_seconds
        # Frames in the WAL after the last commit, and the number at which the next checkpoint runs.
        self._frames, self._checkpoint_at = 0, CHECKPOINT_FRAMES
        self._writer = connect(path, busy_seconds)
        self._writer.set_wal_hook(self._on_wal)
        self._reader: Connection | None = None
        self._queue: deque[Job[Any]] = deque()
        self._busy = False
        self._before_commit: list[Callable[[], object]] = []
        self._wal = -1  # file descriptor of the WAL, for fdatasync
        self._unsynced: list[Job[Any]] = []  # committed, but not synced yet
        self._syncing = False
        # True after a failed sync. The kernel reports the error once, and may drop the bytes.
        self._sync_failed = False
        # Runs the calls that block on the disk.
        self._blocking_calls = ThreadPoolExecutor(2, "penstock-commit")

    @property
    def file(self) -> Path | None:
        return None if self.path == ":memory:" else Path(self.path)

    # -- opening -----------------------------------------------------------------------------------

    def part(self, name: str, schema: str) -> None:
        """As SqlStore.part."""
        c = self._writer
        try:
            if self._has_part(c.tx, name):
                return
            c.set_busy_timeout(int(self._busy_timeout * 1000))  # earlier writes set it to 0
            c.execute("BEGIN IMMEDIATE")
            self._create_part(c.tx, name, schema)
            c.execute("COMMIT")
        except apsw.Error as e:
            raise Unreachable(
                f"cannot prepare the store {self.path}: {e}", hint="run `penstock doctor`"
            ) from e
        finally:
            if c.in_transaction:
                c.execute("ROLLBACK")

    def version(self) -> StoreVersion | None:
        """As SqlStore.version. Raises Unreachable if the file cannot be read."""
        try:
            return self.read_now(read_version)
        except (apsw.Error, StoreUnavailable) as e:
            raise Unreachable(
                f"cannot read the version of the store {self.path}: {e}",
                hint="if the file is damaged, keep a copy, and restore a backup or recover it with "
                "the sqlite3 shell's .recover",
            ) from e

    def table_size(self, table: str) -> tuple[int, int]:
        """As SqlStore.table_size."""

        def count(tx: Tx) -> tuple[int, int]:
            if tx.execute("SELECT 1 FROM sqlite_master WHERE name=?", (table,)).get is None:
                return 0, 0
            rows: int = tx.execute(f"SELECT count(*) FROM {table}").get
            return rows, rows * ROW_BYTES

        return self.read_now(count)

    def other_workers(self) -> list[OtherWorker]:
        """As SqlStore.other_workers. All workers of a file have lock files."""
        return []

    def statements(self, script: str) -> list[str]:
        """As SqlStore.statements. SQLite runs a whole script."""
        return [script]

    def lock(self, path: Path) -> FileLock:
        """As SqlStore.lock. A file lock suffices: all processes that share the file are local."""
        return FileLock(path)

    def server_time(self) -> float | None:
        """As SqlStore.server_time. The file has no server."""
        return None

    def check(self) -> list[str]:
        """As SqlStore.check. Slow on large files: used by doctor, and by starts after a crash."""
        try:
            c = self._writer if self.file is None else read_only(self.path, self._busy_timeout)
            try:
                rows = c.execute("PRAGMA quick_check(10)").fetchall()
            finally:
                if c is not self._writer:
                    c.close()
        except apsw.Error as e:
            return [str(e)]
        lines = [line for (text,) in rows for line in str(text).splitlines()]
        return [line for line in lines if line != "ok" and not line.startswith("*** in database")]

    # -- writing -----------------------------------------------------------------------------------

    async def write(
        self, work: Callable[[Tx], T], *, durable: bool = True, synced: bool = False
    ) -> T:
        """As SqlStore.write.

        Statements run on the event loop's thread: handing each one to another thread costs more
        than SQLite itself. Calls that block on the disk run on a thread. The write lock of another
        process is polled. A durable job returns after the WAL is synced behind its COMMIT. No lock
        is held during the sync, so other jobs can write. If the sync fails, the job raises
        StoreUnavailable, but its changes may have been stored.
        """
        job = self._job(work, durable=durable, synced=synced)
        return await self._committed(job, self._execute, self._enqueue)

    def _enqueue(self, job: Job[Any]) -> None:
        self._queue.append(job)
        if not self._busy:
            self._busy = True
            loop = job.future.get_loop()
            loop.call_soon(self._next, loop)

    def write_now(self, work: Callable[[Tx], T], *, durable: bool = True) -> T:
        """As SqlStore.write_now."""
        job = self._job(work, durable=durable)
        if self._busy:
            raise RuntimeError("write_now while the loop writes")
        self._execute([job])
        return job.outcome()

    def before_commit(self, work: Callable[[], object]) -> None:
        """As SqlStore.before_commit."""
        self._before_commit.append(work)

    def _execute(self, group: Sequence[Job[Any]]) -> None:
        """Run a whole transaction, sync and checkpoint on the caller's thread."""
        self._begin(group)
        self._run(group)
        self._finish(group)
        if any(j.durable for j in group):
            self._sync(group)
        if self._frames >= self._checkpoint_at:
            self._checkpoint()

    def _next(self, loop: asyncio.AbstractEventLoop, until: float | None = None) -> None:
        """Start a transaction with all queued jobs, or try again in 1 ms if another process writes.

        Jobs that arrive during the wait join the transaction. The loop polls, not a thread: a
        thread could get the lock while the loop is busy, and would hold it unused.
        """
        if self._closed:  # `close_now` has run the queued jobs
            return
        if self._sync_failed:
            group = take(self._queue, MAX_GROUP)
            loop.run_in_executor(self._blocking_calls, self._begin, group).add_done_callback(
                lambda _: self._run_and_commit(loop, group)
            )
            return
        until = until or time.monotonic() + self._busy_timeout
        try:
            if not self._try_begin(until):
                loop.call_later(LOCK_POLL_INTERVAL, self._next, loop, until)
                return
            group = take(self._queue, MAX_GROUP)
        except BaseException as e:
            group = take(self._queue, MAX_GROUP)
            self._fail(group, e)
        self._run_and_commit(loop, group)

    def _run_and_commit(self, loop: asyncio.AbstractEventLoop, group: Sequence[Job[Any]]) -> None:
        self._run(group)
        if self._before_commit:
            loop.run_in_executor(self._blocking_calls, self._finish, group).add_done_callback(
                lambda _: self._after_commit(loop, group)
            )
        else:
            self._finish(group)
            self._after_commit(loop, group)

    def _after_commit(self, loop: asyncio.AbstractEventLoop, group: Sequence[Job[Any]]) -> None:
        if self._closed:  # `close_now` has waited for this commit, and synced it
            resolve(group)
            return
        if self._frames >= self._checkpoint_at:
            loop.run_in_executor(self._blocking_calls, self._checkpoint).add_done_callback(
                lambda _: self._start_next(loop)
            )
        else:
            self._start_next(loop)
        self._unsynced += [job for job in group if job.durable and job.error is None]
        resolve([job for job in group if not job.durable or job.error is not None])
        self._start_sync(loop)

    def _start_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._queue:
            loop.call_soon(self._next, loop)
        else:
            self._busy = False

    def _start_sync(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sync all unsynced jobs together, unless a sync is running. It starts the next one."""
        if self._syncing or not self._unsynced:
            return
        jobs, self._unsynced, self._syncing = self._unsynced, [], True

        def done(_: object) -> None:
            self._syncing = False
            resolve(jobs)
            if not self._closed:
                self._start_sync(loop)

        loop.run_in_executor(self._blocking_calls, self._sync, jobs).add_done_callback(done)

    def _sync(self, jobs: Sequence[Job[Any]]) -> None:
        """Sync the WAL as a COMMIT with synchronous=FULL does, but without the write lock.

        Frames that a checkpoint has moved out of the WAL were synced by the checkpoint.
        """
        if not self._writer.in_wal:  # without a WAL, COMMIT itself has synced
            return
        try:
            if self._wal < 0:
                self._wal = os.open(self.path + "-wal", os.O_RDONLY | os.O_CLOEXEC)
            os.fdatasync(self._wal)
        except OSError as e:
            self._sync_failed = True
            for job in jobs:
                job.error = job.error or self._outage(e)

    def _on_wal(self, connection: apsw.Connection, name: str, frames: int) -> int:
        # Fewer frames than before: the WAL was restarted.
        if frames < self._frames:
            self._checkpoint_at = CHECKPOINT_FRAMES
        self._frames = frames
        return apsw.SQLITE_OK

    def _checkpoint(self) -> None:
        # After a checkpoint that did not restart the WAL, run a full one. Writers wait for it.
        # Otherwise a WAL with constant writes would never restart.
        again = self._checkpoint_at != CHECKPOINT_FRAMES
        # Disk errors are raised by the next write.
        with contextlib.suppress(apsw.Error):
            self._writer.set_busy_timeout(CHECKPOINT_TIMEOUT_MS if again else 0)
            self._writer.wal_checkpoint(
                mode=apsw.SQLITE_CHECKPOINT_FULL if again else apsw.SQLITE_CHECKPOINT_PASSIVE
            )
        self._checkpoint_at = self._frames + CHECKPOINT_RETRY_FRAMES

    # The three steps of a transaction. An outage in any step fails the whole group, and then no
    # change is written.

    def _begin(self, group: Sequence[Job[Any]]) -> None:
        """Get the write lock. Blocks while another process writes."""
        until = time.monotonic() + self._busy_timeout
        try:
            if self._sync_failed:
                self._checkpoint_and_truncate()
            while not self._try_begin(until):
                time.sleep(LOCK_POLL_INTERVAL)
        except BaseException as e:
            self._fail(group, e)

    def _try_begin(self, until: float) -> bool:
        """Begin a transaction. Return False if another process writes.

        Raises BusyError if that is still so after `until`.

        The busy timeout of SQLite is not used: it sleeps up to 0.1 s, even if the lock is free.
        """
        self._writer.set_busy_timeout(0)
        try:
            self._writer.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            if time.monotonic() > until:
                raise
            return False
        return True

    def _run(self, group: Sequence[Job[Any]]) -> None:
        if group[0].error is not None:
            return  # BEGIN failed, so all jobs have failed
        try:
            self.run_jobs(self._writer.tx, group, OUTAGE)
        except BaseException as e:
            self._fail(group, e)

    def _finish(self, group: Sequence[Job[Any]]) -> None:
        before, self._before_commit = self._before_commit, []
        try:
            if self._writer.in_transaction:
                for work in before:
                    work()
                self._writer.execute("COMMIT")
        except BaseException as e:
            self._fail(group, e)

    def _fail(self, group: Sequence[Job[Any]], e: BaseException) -> None:
        with contextlib.suppress(apsw.Error):
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        self.rollbacks += 1
        if isinstance(e, apsw.Error | OSError):
            e = self._outage(e)
        for job in group:
            job.error = e

    def _outage(self, e: Exception) -> StoreUnavailable:
        outage = StoreUnavailable(
            f"{self.path} does not take writes: {e}",
            hint="free disk space or repair permissions. Then work continues automatically",
        )
        outage.__cause__ = e
        return outage

    def _checkpoint_and_truncate(self) -> None:
        """Checkpoint the whole WAL into the database file, which the checkpoint syncs.

        After a failed sync it is unknown which part of the WAL is on the disk.
        """
        ((busy, _, _),) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if busy:
            raise apsw.BusyError(
                "another process reads the WAL, which must be rewritten after a failed sync"
            )
        self._sync_failed = False

    # -- reading -----------------------------------------------------------------------------------

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Read committed data on the event loop's thread. Use it for short queries only.

        A reader of a WAL never waits.
        """
        return self.read_now(work)

    def read_now(self, work: Callable[[Tx], T]) -> T:
        if self.inline:
            return work(self._writer.tx)
        if self._reader is None:
            self._reader = read_only(self.path, self._busy_timeout)
            self._reader.execute("PRAGMA cache_size=-16384")
        try:
            return work(self._reader.tx)
        except OUTAGE as e:
            raise StoreUnavailable(
                f"{self.path} cannot be read: {e}", hint="run `penstock doctor`"
            ) from e

    def moment(self, work: Callable[[Tx], T]) -> T:
        """As SqlStore.moment."""

        def in_transaction(tx: Any) -> T:
            with tx:
                return work(tx)

        return self.read_now(in_transaction)

    def close_now(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._blocking_calls.shutdown()
        while self._queue:  # jobs that were accepted before the close
            job = self._queue.popleft()
            self._execute([job])
            resolve([job])
        if self._busy or self._unsynced:
            self._sync(self._unsynced)
            resolve(self._unsynced)
        if self._reader is not None:
            self._reader.close()
        self._writer.close()
        if self._wal >= 0:
            os.close(self._wal)
            self._wal = -1
        if self._single_writer is not None:
            self._single_writer.release()
