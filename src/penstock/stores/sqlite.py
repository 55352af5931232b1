"""One SQLite file: a single writing connection per process with group commit, a reading one, and the checks before it is trusted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import apsw

from penstock.errors import StoreUnavailable, Unreachable
from penstock.locks import FileLock

T = TypeVar("T")


class Rows(Protocol):
    """What a statement answers; SQL knows the types, Python cannot."""

    @property
    def get(self) -> Any:
        """The only value of the first row, or the row, or None."""

    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Tx(Protocol):
    """What `work(tx)` is given: an apsw connection inside a transaction."""

    def execute(self, sql: str, bindings: Any = ..., /) -> Rows: ...
    def executemany(self, sql: str, rows: Any, /) -> Any: ...
    def changes(self) -> int: ...
    def last_insert_rowid(self) -> int: ...
    def cursor(self) -> Any: ...


APPLICATION_ID = 0x50454E53  # "PENS"
WAL_RESET_FIXED = (3, 51, 3)  # 3.7.0–3.51.2 may corrupt a WAL that several processes write and checkpoint
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs"}
)
MAX_GROUP = 256
_OUTAGE = (
    apsw.FullError, apsw.IOError, apsw.ReadOnlyError, apsw.BusyError, apsw.CantOpenError, apsw.LockedError, apsw.PermissionsError,
    apsw.CorruptError, apsw.NotADBError, apsw.NoMemError,  # damage is the store's, whichever event met it first
)  # fmt: skip


class Database:
    """Implements ports.Store. `write` returns after COMMIT; whoever writes at the same moment shares that commit.

    `inline=True` (always so for `:memory:`) runs everything on the caller's thread: tests and simulation.
    """

    def __init__(self, path: str, *, durability: str = "full", inline: bool = False, busy_seconds: float = 30.0) -> None:
        self.path, self.durability = path, durability
        self.inline = inline or path == ":memory:"
        self._single: FileLock | None = None
        if self.path != ":memory:":
            _refuse_network_file_system(Path(path))
            self._single = _single_writer_if_needed(Path(path))
        self._busy_ms = int(busy_seconds * 1000)
        self._writer = self._connect()
        self._synchronous = ""
        self._closed = False
        self.rollbacks = 0  # what was remembered about rows may be wrong after one
        if not self.inline:
            self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            self._reader: apsw.Connection | None = None
            self._read_pool = ThreadPoolExecutor(1, "penstock-read")
            self._thread = threading.Thread(target=self._run, name="penstock-write", daemon=True)
            self._thread.start()

    # -- opening ---------------------------------------------------------------------------------------------------------

    def _connect(self) -> apsw.Connection:
        until = time.monotonic() + self._busy_ms / 1000
        while True:  # turning a new file into a WAL, and closing the last of one, lock out others without asking their patience
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
            c = apsw.Connection(self.path)
            c.set_busy_timeout(self._busy_ms)
            c.execute("PRAGMA page_size=8192")  # the price of a commit is the number of pages it touches, not their size
            # One statement, one moment: another process may be making the file just now.
            known, tables = c.execute("SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id").get
            if known not in (0, APPLICATION_ID) or (known == 0 and tables):
                raise Unreachable(
                    f"{self.path} is an SQLite database, but not one of Penstock's", hint="point PENSTOCK_STATE or the store URL at another place"
                )
            if self.path != ":memory:":
                c.execute("PRAGMA journal_mode=WAL")
            c.execute(f"PRAGMA application_id={APPLICATION_ID}; PRAGMA cache_size=-65536; PRAGMA temp_store=MEMORY")
            c.execute("PRAGMA wal_autocheckpoint=4000; PRAGMA journal_size_limit=67108864")
            c.execute("CREATE TABLE IF NOT EXISTS part(name TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID")
            return c
        except (apsw.Error, OSError) as e:
            raise Unreachable(
                f"cannot open the store {self.path}: {e}",
                hint="check that the directory exists, is yours and has room; a damaged file can be moved aside and its backup restored",
            ) from e

    def part(self, name: str, version: int, schema: str) -> None:
        """Create or check one adapter's tables. A newer version than ours is refused, never touched."""
        try:
            found = self._writer.execute("SELECT version FROM part WHERE name=?", (name,)).get
            if found is None:
                self._writer.execute("BEGIN IMMEDIATE")
                if self._writer.execute("SELECT version FROM part WHERE name=?", (name,)).get is None:
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
            raise Unreachable(f"cannot prepare the store {self.path}: {e}", hint="penstock doctor looks closer") from e

    def check(self) -> list[str]:
        """Integrity, in sentences; [] is good. Slow on large files: for starts after an unclean stop, and for doctor."""
        try:
            c = apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READONLY) if self.path != ":memory:" else self._writer
            try:
                c.set_busy_timeout(self._busy_ms)
                return [str(row[0]) for row in c.execute("PRAGMA quick_check(10)") if row[0] != "ok"]
            finally:
                if c is not self._writer:
                    c.close()
        except apsw.Error as e:
            return [str(e)]

    # -- writing ---------------------------------------------------------------------------------------------------------

    async def write(self, work: Callable[[Tx], T], *, durable: bool = True, synced: bool = False) -> T:
        """`synced` survives a power cut whatever the durability: for notes about files that were synced themselves."""
        if self.inline:
            return self.write_now(work, durable=durable)
        self._refuse_if_closed()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(work, synced or (durable and self.durability == "full"), loop, future))
        result = await asyncio.shield(future)  # a cancelled caller must not hide what was committed
        return result

    def submit(self, work: Callable[[Tx], T], *, durable: bool = True) -> ConcurrentFuture[T]:
        """For callers without a loop."""
        job = _Job(work, durable and self.durability == "full", None, None)
        self._refuse_if_closed()
        job.waiter = ConcurrentFuture()
        self._jobs.put(job)
        return job.waiter

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"{self.path} is closed", hint="it was closed by this process; nothing more can be written")

    def write_now(self, work: Callable[[Tx], T], *, durable: bool = True) -> T:
        """For inline stores and commands without a loop."""
        if not self.inline:
            raise RuntimeError("write_now needs an inline store")
        job = _Job(work, durable and self.durability == "full", None, None)
        self._commit([job])
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            group = []
            while job is not None:
                group.append(job)
                if len(group) >= MAX_GROUP:
                    break
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            if group:
                self._commit(group)
                _answer(group)
            if job is None:
                return

    def _commit(self, group: Sequence[_Job]) -> None:
        """BEGIN IMMEDIATE … COMMIT around the whole group; one failing job is rolled back alone."""
        c = self._writer
        try:
            level = "FULL" if any(j.durable for j in group) else "NORMAL"
            if level != self._synchronous:
                c.execute(f"PRAGMA synchronous={level}")
                self._synchronous = level
            c.execute("BEGIN IMMEDIATE")
            alone = len(group) == 1
            for job in group:
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
            if c.in_transaction:
                c.execute("COMMIT")
        except BaseException as e:
            with contextlib.suppress(apsw.Error):
                if c.in_transaction:
                    c.execute("ROLLBACK")
            self.rollbacks += 1
            self._synchronous = ""
            outage = StoreUnavailable(f"{self.path} does not take writes: {e}", hint="free disk space or repair permissions; work goes on by itself then")
            outage.__cause__ = e
            for job in group:
                job.error = outage if isinstance(e, apsw.Error | OSError) else e

    # -- reading ---------------------------------------------------------------------------------------------------------

    async def read(self, work: Callable[[Tx], T]) -> T:
        if self.inline:
            return work(cast(Tx, self._writer))
        return await asyncio.get_running_loop().run_in_executor(self._read_pool, self._read, work)

    def read_now(self, work: Callable[[Tx], T]) -> T:
        return work(cast(Tx, self._writer)) if self.inline else self._read_pool.submit(self._read, work).result()

    def _read(self, work: Callable[[Tx], T]) -> T:
        if self._reader is None:
            self._reader = apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READONLY)
            self._reader.set_busy_timeout(self._busy_ms)
            self._reader.execute("PRAGMA cache_size=-16384")
        try:
            return work(cast(Tx, self._reader))
        except _OUTAGE as e:
            raise StoreUnavailable(f"{self.path} cannot be read: {e}", hint="penstock doctor looks closer") from e

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self.inline:
            self._jobs.put(None)
            self._thread.join()
            self._read_pool.shutdown()
            if self._reader is not None:
                self._reader.close()
        self._writer.close()
        if self._single is not None:
            self._single.release()


class _Job:
    __slots__ = ("durable", "error", "future", "loop", "result", "waiter", "work")

    def __init__(self, work: Callable[[Tx], Any], durable: bool, loop: asyncio.AbstractEventLoop | None, future: asyncio.Future[Any] | None) -> None:
        self.work, self.durable, self.loop, self.future = work, durable, loop, future
        self.result: Any = None
        self.error: BaseException | None = None
        self.waiter: ConcurrentFuture[Any] | None = None


def _answer(group: Sequence[_Job]) -> None:
    """One wake-up per loop and commit."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in group:
        if job.loop is not None:
            by_loop.setdefault(job.loop, []).append(job)
        elif job.waiter is not None and job.error is not None:
            job.waiter.set_exception(job.error)
        elif job.waiter is not None:
            job.waiter.set_result(job.result)
    for loop, jobs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is gone: the commit stands, nobody waits for it
            loop.call_soon_threadsafe(_resolve, jobs)


def _resolve(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if job.future is None or job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


def file_system_of(path: Path, mountinfo: str = "/proc/self/mountinfo") -> str:
    """The file system type below `path`, "" where it cannot be told."""
    try:
        real = os.path.realpath(path)
        best, kind = "", ""
        with open(mountinfo, encoding="utf-8", errors="replace") as f:
            for line in f:
                left, _, right = line.partition(" - ")
                point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split()[4])  # space, tab, newline and backslash are written so
                if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
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
