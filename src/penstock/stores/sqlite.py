"""One SQLite file: a single writing connection per process with group commit, a reading one, and
the checks before it is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import apsw

from penstock.errors import StoreUnavailable, Unreachable
from penstock.locks import FileLock
from penstock.stores.sql import Tx

T = TypeVar("T")

_ONE_THREAD = (
    apsw.SQLITE_OPEN_NOMUTEX
)  # a connection serves one thread at a time here; its locks cost a tenth of what SQLite does
APPLICATION_ID = 0x50454E53  # "PENS"
WAL_RESET_FIXED = (
    3,
    51,
    3,
)  # 3.7.0–3.51.2 may corrupt a WAL that several processes write and checkpoint
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.s3fs",
    }
)
MAX_GROUP = 256
AGAIN = 0.001  # seconds after which we look whether another process still writes
CHECKPOINT_FRAMES, SOON_AGAIN = (
    8000,
    1000,
)  # frames in the WAL; and more, where somebody who read or wrote kept it from starting anew
CHECKPOINT_PATIENCE = 1000  # milliseconds, for those
_OUTAGE = (
    apsw.FullError, apsw.IOError, apsw.ReadOnlyError, apsw.BusyError, apsw.CantOpenError, apsw.LockedError, apsw.PermissionsError,
    # damage is the store's, whichever event met it first
    apsw.CorruptError, apsw.NotADBError, apsw.NoMemError,
)  # fmt: skip


class _Connection(apsw.Connection):
    """Implements stores.sql.Tx."""

    def each(self, sql: str, rows: Sequence[Any], /) -> list[bool]:
        """Rows are asked for one by one, so we see how many changes there were before each."""
        counts: list[int] = []

        def noted() -> Iterator[Any]:
            for row in rows:
                counts.append(self.total_changes())
                yield row

        self.executemany(sql, noted())
        return [after > before for before, after in pairwise([*counts, self.total_changes()])]


class Database:
    """Implements ports.Store and stores.sql.SqlStore. `write` returns after COMMIT; whoever writes
    at the same moment shares that commit.

    `inline=True` (always so for `:memory:`) runs everything on the caller's thread: tests and
    simulation.
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
        self._single: FileLock | None = None
        if self.path != ":memory:":
            _refuse_network_file_system(Path(path))
            self._single = _single_writer_if_needed(Path(path))
        self._patience = busy_seconds
        self._frames, self._checkpoint_at = (
            0,
            CHECKPOINT_FRAMES,
        )  # in the WAL, when we last committed
        self._writer = self._connect()
        self._writer.set_wal_hook(self._on_wal)
        self._reader: apsw.Connection | None = None
        self._closed = False
        self.rollbacks = 0  # what was remembered about rows may be wrong after one
        self._queue: deque[_Job] = deque()
        self._busy = False
        self._before_commit: list[Callable[[], object]] = []
        self._wal = -1
        self._unsynced: list[_Job] = []  # committed, but the disk need not have it yet
        self._syncing = False
        self._doubtful = False  # a sync failed: the kernel tells once, then forgets the bytes
        self._waits = ThreadPoolExecutor(2, "penstock-commit")  # for what blocks: the disk

    @property
    def file(self) -> Path | None:
        return None if self.path == ":memory:" else Path(self.path)

    # -- opening -----------------------------------------------------------------------------------

    def _connect(self) -> apsw.Connection:
        until = time.monotonic() + self._patience
        # turning a new file into a WAL, and closing the last of one, lock out others without asking
        # their patience
        while True:
            try:
                return self._open()
            except Unreachable as e:
                if not isinstance(e.__cause__, apsw.BusyError) or time.monotonic() > until:
                    raise
            time.sleep(0.01)

    def _open(self) -> apsw.Connection:
        try:
            if self.path != ":memory:":
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            c = _Connection(
                self.path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | _ONE_THREAD
            )
            c.set_busy_timeout(int(self._patience * 1000))
            c.execute(
                "PRAGMA page_size=4096"
            )  # keys come in no order: a commit touches about a page for each row, and writes it whole
            # One statement, one moment: another process may be making the file just now.
            known, tables = c.execute(
                "SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id"
            ).get
            if known not in (0, APPLICATION_ID) or (known == 0 and tables):
                raise Unreachable(
                    f"{self.path} is an SQLite database, but not one of Penstock's",
                    hint="point PENSTOCK_STATE or the store URL at another place",
                )
            self._in_wal = (
                self.path != ":memory:" and c.execute("PRAGMA journal_mode=WAL").get == "wal"
            )  # not every file system can
            if not known:  # only then: it takes the write lock, and most who open only want to look
                c.execute(f"PRAGMA application_id={APPLICATION_ID}")
            c.execute("PRAGMA cache_size=-65536; PRAGMA temp_store=MEMORY")
            c.execute(
                f"PRAGMA synchronous={'NORMAL' if self._in_wal else 'FULL'}; PRAGMA journal_size_limit=67108864"
            ).fetchall()
            c.execute(
                "PRAGMA wal_autocheckpoint=0"
            ).fetchall()  # it answers: what stood behind it would not be run before that is read
            c.execute(
                "CREATE TABLE IF NOT EXISTS part(name TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID"
            )
            return c
        except (apsw.Error, OSError) as e:
            raise Unreachable(
                f"cannot open the store {self.path}: {e}",
                hint="check that the directory exists, is yours and has room; a damaged file can be moved aside and its backup restored",
            ) from e

    def part(self, name: str, version: int, schema: str) -> None:
        """Create or check one adapter's tables. A newer version than ours is refused, never
        touched.
        """
        try:
            found = self._writer.execute("SELECT version FROM part WHERE name=?", (name,)).get
            if found is None:
                self._writer.execute("BEGIN IMMEDIATE")
                if (
                    self._writer.execute("SELECT version FROM part WHERE name=?", (name,)).get
                    is None
                ):
                    self._writer.execute(schema)
                    self._writer.execute("INSERT INTO part VALUES(?,?)", (name, version))
                self._writer.execute("COMMIT")
            elif found != version:
                age = "a newer" if found > version else "an older"
                raise Unreachable(
                    f"{self.path}: its {name} tables have version {found}, this Penstock knows {version}; they were written by {age} release",
                    hint="run that release, or give this one a new state directory (PENSTOCK_STATE=…)",
                )
        except apsw.Error as e:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise Unreachable(
                f"cannot prepare the store {self.path}: {e}", hint="penstock doctor looks closer"
            ) from e

    def lock(self, path: Path) -> FileLock:
        """As SqlStore.lock: those who share a file are on one machine."""
        return FileLock(path)

    def check(self) -> list[str]:
        """Integrity, in sentences; [] is good. Slow on large files: for starts after an unclean
        stop, and for doctor.
        """
        try:
            c = (
                apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READONLY)
                if self.path != ":memory:"
                else self._writer
            )
            try:
                c.set_busy_timeout(int(self._patience * 1000))
                lines = [
                    line
                    for row in c.execute("PRAGMA quick_check(10)")
                    for line in str(row[0]).splitlines()
                ]
                return [
                    line
                    for line in lines
                    if line != "ok" and not line.startswith("*** in database")
                ]
            finally:
                if c is not self._writer:
                    c.close()
        except apsw.Error as e:
            return [str(e)]

    # -- writing -----------------------------------------------------------------------------------

    async def write(
        self, work: Callable[[Tx], T], *, durable: bool = True, synced: bool = False
    ) -> T:
        """`synced` survives a power cut whatever the durability: for notes about files that were
        synced themselves.

        Statements run on the loop's own thread: handing each of them to another one cost more than
        SQLite does. The disk, which blocks, is left to a thread; for another process's lock nobody
        blocks. A durable job is answered when the WAL was synced after its COMMIT; others write
        meanwhile, since nobody holds a lock for that. Where the sync fails, it may have been
        written all the same.
        """
        self._refuse_if_closed()
        job = _Job(work, synced or (durable and self.durability == "full"))
        if self.inline:
            self._settle([job])
        else:
            loop = asyncio.get_running_loop()
            job.future = loop.create_future()
            self._queue.append(job)
            if not self._busy:
                self._busy = True
                loop.call_soon(self._next, loop)
            await asyncio.shield(job.future)  # a cancelled caller must not hide what was committed
        result: T = job.outcome()
        return result

    def write_now(self, work: Callable[[Tx], T], *, durable: bool = True) -> T:
        """For commands without a loop, and before one runs."""
        self._refuse_if_closed()
        if self._busy:
            raise RuntimeError("write_now while the loop writes")
        job = _Job(work, durable and self.durability == "full")
        self._settle([job])
        result: T = job.outcome()
        return result

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable(
                f"{self.path} is closed",
                hint="it was closed by this process; nothing more can be written",
            )

    def before_commit(self, work: Callable[[], object]) -> None:
        """Called by a job: `work` runs where blocking does not hurt, after the jobs and before
        their COMMIT.
        """
        self._before_commit.append(work)

    def _settle(self, group: Sequence[_Job]) -> None:
        """The whole way on one thread."""
        self._begin(group)
        self._run(group)
        self._finish(group)
        if any(j.durable for j in group):
            self._sync(group)
        if self._frames >= self._checkpoint_at:
            self._checkpoint()

    def _next(self, loop: asyncio.AbstractEventLoop, until: float | None = None) -> None:
        """Whoever writes at this moment shares a transaction; while another process writes, more
        join them.

        We look again between our other work. A thread would be given the lock while the loop is
        busy, and keep it for nothing.
        """
        if self._closed:  # who closed it has done what was queued
            return
        doubtful, error = self._doubtful, None
        until = until or time.monotonic() + self._patience
        try:
            if not doubtful and not self._locked(until):
                loop.call_later(AGAIN, self._next, loop, until)
                return
        except BaseException as e:
            error = e
        group = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_GROUP))]
        if doubtful:
            loop.run_in_executor(self._waits, self._begin, group).add_done_callback(
                lambda _: self._go_on(loop, group)
            )
            return
        if error is not None:
            self._fail(group, error)
        self._go_on(loop, group)

    def _go_on(self, loop: asyncio.AbstractEventLoop, group: Sequence[_Job]) -> None:
        self._run(group)
        if self._before_commit:
            loop.run_in_executor(self._waits, self._finish, group).add_done_callback(
                lambda _: self._committed(loop, group)
            )
        else:
            self._finish(group)
            self._committed(loop, group)

    def _committed(self, loop: asyncio.AbstractEventLoop, group: Sequence[_Job]) -> None:
        if self._closed:  # who closed it has waited for this, and synced it
            _answer(group)
            return
        if self._frames >= self._checkpoint_at:
            loop.run_in_executor(self._waits, self._checkpoint).add_done_callback(
                lambda _: self._rest(loop)
            )
        else:
            self._rest(loop)
        self._unsynced += [job for job in group if job.durable and job.error is None]
        _answer([job for job in group if not job.durable or job.error is not None])
        self._sync_soon(loop)

    def _rest(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._queue:
            loop.call_soon(self._next, loop)
        else:
            self._busy = False

    def _sync_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Whoever committed while a sync was under way shares the next one."""
        if self._syncing or not self._unsynced:
            return
        jobs, self._unsynced, self._syncing = self._unsynced, [], True

        def done(_: object) -> None:
            self._syncing = False
            _answer(jobs)
            if not self._closed:
                self._sync_soon(loop)

        loop.run_in_executor(self._waits, self._sync, jobs).add_done_callback(done)

    def _sync(self, jobs: Sequence[_Job]) -> None:
        """As a COMMIT with synchronous=FULL does, but without its lock. What a checkpoint took out
        of the WAL meanwhile was synced by that.
        """
        if not self._in_wal:  # then COMMIT itself has
            return
        try:
            if self._wal < 0:
                self._wal = os.open(self.path + "-wal", os.O_RDONLY | os.O_CLOEXEC)
            os.fdatasync(self._wal)
        except OSError as e:
            self._doubtful = True
            for job in jobs:
                job.error = job.error or self._outage(e)

    def _on_wal(self, connection: apsw.Connection, name: str, frames: int) -> int:
        if frames < self._frames:
            self._checkpoint_at = CHECKPOINT_FRAMES
        self._frames = frames
        return apsw.SQLITE_OK

    def _checkpoint(self) -> None:
        again = (
            self._checkpoint_at != CHECKPOINT_FRAMES
        )  # then others wait until it is done, or a WAL that is always written to would never start anew
        with contextlib.suppress(
            apsw.Error
        ):  # what is wrong with the disk is told to those who write
            self._writer.set_busy_timeout(CHECKPOINT_PATIENCE if again else 0)
            self._writer.wal_checkpoint(
                mode=apsw.SQLITE_CHECKPOINT_FULL if again else apsw.SQLITE_CHECKPOINT_PASSIVE
            )
        self._checkpoint_at = self._frames + SOON_AGAIN

    # The three steps of a transaction. An outage anywhere fails the whole group, and then nothing
    # was written.

    def _begin(self, group: Sequence[_Job]) -> None:
        """Waits for another process."""
        until = time.monotonic() + self._patience
        try:
            if self._doubtful:
                self._rewrite()
            while not self._locked(until):
                time.sleep(AGAIN)
        except BaseException as e:
            self._fail(group, e)

    def _locked(self, until: float) -> bool:
        """False: another process writes. SQLite's own way of waiting sleeps up to a tenth of a
        second, while nobody writes.
        """
        self._writer.set_busy_timeout(0)
        try:
            self._writer.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            if time.monotonic() > until:
                raise
            return False
        return True

    def _run(self, group: Sequence[_Job]) -> None:
        """One failing job is rolled back alone."""
        c = self._writer
        alone = len(group) == 1
        try:
            for job in group:
                if job.error is not None:
                    return  # BEGIN failed: they all did
                if not alone:
                    c.execute("SAVEPOINT job")
                try:
                    job.result = job.work(cast(Tx, c))
                except _OUTAGE:
                    raise
                except BaseException as e:
                    job.error = e
                    self.rollbacks += 1
                    c.execute("ROLLBACK" if alone else "ROLLBACK TO job")
                if not alone:
                    c.execute("RELEASE job")
        except BaseException as e:
            self._fail(group, e)

    def _finish(self, group: Sequence[_Job]) -> None:
        before, self._before_commit = self._before_commit, []
        try:
            if self._writer.in_transaction:
                for work in before:
                    work()
                self._writer.execute("COMMIT")
        except BaseException as e:
            self._fail(group, e)

    def _fail(self, group: Sequence[_Job], e: BaseException) -> None:
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
            hint="free disk space or repair permissions; work goes on by itself then",
        )
        outage.__cause__ = e
        return outage

    def _rewrite(self) -> None:
        """After a failed sync nobody knows what the disk has of the WAL: all of it goes into the
        database file, by a sync that is believed.
        """
        ((busy, _, _),) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if busy:
            raise apsw.BusyError(
                "others read the WAL, which has to be written anew after a failed sync"
            )
        self._doubtful = False

    # -- reading -----------------------------------------------------------------------------------

    async def read(self, work: Callable[[Tx], T]) -> T:
        """What is committed. Short questions only: they run on the loop's thread, and a WAL reader
        never waits.
        """
        return self.read_now(work)

    def read_now(self, work: Callable[[Tx], T]) -> T:
        if self.inline:
            return work(cast(Tx, self._writer))
        if self._reader is None:
            self._reader = apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READONLY | _ONE_THREAD)
            self._reader.set_busy_timeout(int(self._patience * 1000))
            self._reader.execute("PRAGMA cache_size=-16384")
        try:
            return work(cast(Tx, self._reader))
        except _OUTAGE as e:
            raise StoreUnavailable(
                f"{self.path} cannot be read: {e}", hint="penstock doctor looks closer"
            ) from e

    def moment(self, work: Callable[[Tx], T]) -> T:
        """As read_now, with all that `work` reads from one moment."""

        def whole(tx: Any) -> T:
            with tx:
                return work(tx)

        return self.read_now(whole)

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._waits.shutdown()
        while self._queue:  # accepted before we closed
            job = self._queue.popleft()
            self._settle([job])
            _answer([job])
        if self._busy or self._unsynced:
            self._sync(self._unsynced)
            _answer(self._unsynced)
        if self._reader is not None:
            self._reader.close()
        self._writer.close()
        if self._wal >= 0:
            os.close(self._wal)
            self._wal = -1
        if self._single is not None:
            self._single.release()


class _Job:
    __slots__ = ("durable", "error", "future", "result", "work")

    def __init__(self, work: Callable[[Tx], Any], durable: bool) -> None:
        self.work, self.durable = work, durable
        self.future: asyncio.Future[None] | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


def _answer(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if (
            job.future is not None
            and not job.future.done()
            and not job.future.get_loop().is_closed()
        ):
            job.future.set_result(None)


def file_system_of(path: Path, mountinfo: str = "/proc/self/mountinfo") -> str:
    """The file system type below `path`, "" where it cannot be told."""
    try:
        real = os.path.realpath(path)
        best, kind = "", ""
        with open(mountinfo, encoding="utf-8", errors="replace") as f:
            for line in f:
                left, _, right = line.partition(" - ")
                point = re.sub(
                    r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split()[4]
                )  # space, tab, newline and backslash are written so
                if (real == point or real.startswith(point.rstrip("/") + "/")) and len(
                    point
                ) >= len(best):
                    best, kind = point, right.split()[0]
        return kind
    except (OSError, IndexError, UnicodeError):
        return ""


def _refuse_network_file_system(path: Path) -> None:
    kind = file_system_of(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise Unreachable(
            f"{path} lies on a network file system ({kind}); SQLite's locks do not hold there",
            hint="put the state on a local disk (PENSTOCK_STATE=/var/lib/penstock)",
        )


def sqlite_version() -> tuple[int, ...]:
    return tuple(int(x) for x in apsw.sqlite_lib_version().split("."))


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    return (3, 7, 0) <= version < WAL_RESET_FIXED


def _single_writer_if_needed(path: Path) -> FileLock | None:
    """An SQLite with the WAL-reset bug is safe with one writing process: hold it to that."""
    if not has_wal_reset_bug(sqlite_version()):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(path.name + ".single"))
    if not lock.try_acquire():
        raise Unreachable(
            f"SQLite {apsw.sqlite_lib_version()} has the WAL-reset bug, so only one process may write {path}, and another does",
            hint="pip install --upgrade apsw (3.51.3 or newer), or stop the other process",
        )
    return lock
