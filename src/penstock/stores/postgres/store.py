"""One PostgreSQL schema as a store: group commit under one lock for the whole fleet, readings, and
migrations. The connection itself is in postgres_wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg import sql as quoting

from penstock.errors import StoreUnavailable, Unreachable
from penstock.stores.postgres.connection import Wire, statements
from penstock.stores.postgres.locks import FleetLock
from penstock.stores.postgres.url import OLDEST, Address, refusal
from penstock.stores.sql import Tx

T = TypeVar("T")

# with a savepoint each: beyond 64 the server keeps them on disk, and every snapshot gets slower
MAX_GROUP = 50
LOCK_SPACE = (
    0x50454E53  # "PENS": the advisory locks of others in the same database have other first halves
)
TRIES = 3
# A fleet waits for whoever holds the lock, so nobody may hold it and be silent, and nobody waits
# for ever.
SETTINGS = {
    "idle_in_transaction_session_timeout": "15s",
    "lock_timeout": "30s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "timezone": "UTC",
    # else what is read behind the lock would be as it was before it
    "default_transaction_isolation": "read committed",
    # where a table must be walked all the same, it looks so dear that the server would compile the
    # question first
    "jit": "off",
    # plans are kept as long as a connection, and made when tables are small: one that walks a table
    # would soon walk a large one
    "enable_seqscan": "off",
}
# Whole classes of SQLSTATE that are the server's trouble, not the statement's.
_OUTAGE_CLASSES = ("08", "53", "57", "58", "XX")
_OUTAGE_STATES = (
    "25P03",
    "25006",
    "42501",
    "55P03",
)  # stalled, read-only, no longer permitted, the lock is held
_TRY_AGAIN = ("40001", "40P01")


class PostgresStore:
    """Implements ports.Store and stores.sql.SqlStore. `write` returns after COMMIT; whoever writes
    at the same moment shares that commit.

    `work(tx)` runs on a thread of the store's own, never on the loop's: it must not touch the loop
    (no `Event.set`, no futures); what is to happen there happens after `await write(...)`. It may
    run again in a new transaction when the server refused the first. `inline=True` runs everything
    on the caller's thread: tests and simulation.
    """

    pipelined = True

    def __init__(
        self, url: str, *, namespace: str, durability: str = "full", inline: bool = False
    ) -> None:
        """Reads the URL; nothing is asked of the server yet."""
        self.address = Address.parse(url)
        self.namespace, self.durability, self.inline = namespace, durability, inline
        self.path = self.address.label
        self.rollbacks = 0
        self.key = zlib.crc32(namespace.encode()) - (1 << 31)
        self._closed = False
        self._prepared = False
        self._books = _Writer(self, locked=True)
        self._beside = _Writer(self, locked=False)
        self._reading = threading.Lock()
        self._reader = self.wire()
        self._reads = ThreadPoolExecutor(1, "penstock-read")

    # -- opening -----------------------------------------------------------------------------------

    def wire(self) -> Wire:
        """A connection of one's own to this schema, not open yet; for those who listen."""
        path = quoting.Identifier(self.namespace).as_string(None)
        return Wire(self.address.options, {**SETTINGS, "search_path": path})

    def part(self, name: str, version: int, schema: str) -> None:
        """As SqlStore.part. Several processes may start at once: they take turns."""
        try:
            with self._books.lock:
                wire = self._books.opened()
                self._prepare(wire)
                found = wire.execute("SELECT version FROM part WHERE name=?", (name,)).get
                if found is None:
                    found = self._create(wire, name, version, schema)
        except psycopg.Error as e:
            self._books.drop()
            raise refusal(e, self.address, self.namespace) from e
        if found != version:
            age = "a newer" if found > version else "an older"
            raise Unreachable(
                f"{self.path}: its {name} tables have version {found}, this Penstock knows {version}; they were written by {age} release",
                hint="run that release, or give this one a namespace of its own (PENSTOCK_NAMESPACE=…)",
            )

    def _prepare(self, wire: Wire) -> None:
        """The schema itself, once per process."""
        if self._prepared:
            return
        if wire.version < OLDEST:
            raise Unreachable(
                f"{self.path} runs PostgreSQL {wire.version // 10000}, and Penstock needs {OLDEST // 10000} or newer",
                hint="upgrade the server, or point the URL at a newer one",
            )
        there = "SELECT to_regclass('durable') IS NOT NULL AND to_regnamespace(current_schema()) IS NOT NULL"
        if not wire.execute(there).get:
            self._alone(wire)
            name = quoting.Identifier(self.namespace).as_string(None)
            if not wire.execute(
                "SELECT 1 FROM pg_namespace WHERE nspname=?", (self.namespace,)
            ).get:  # IF NOT EXISTS asks for the right to create even then
                wire.execute(f"CREATE SCHEMA {name}")
            wire.execute(
                "CREATE TABLE IF NOT EXISTS part(name TEXT PRIMARY KEY, version BIGINT NOT NULL)"
            )
            wire.execute("CREATE SEQUENCE IF NOT EXISTS durable")
            wire.execute("COMMIT")
            wire.sync()
        self._prepared = True

    def _create(self, wire: Wire, name: str, version: int, schema: str) -> int:
        self._alone(wire)
        found: int | None = wire.execute("SELECT version FROM part WHERE name=?", (name,)).get
        if found is None:
            for statement in statements(schema):
                wire.execute(statement)
            wire.execute("INSERT INTO part VALUES(?,?)", (name, version))
        wire.execute("COMMIT")
        wire.sync()
        return version if found is None else found

    def _alone(self, wire: Wire) -> None:
        wire.execute("BEGIN")
        wire.execute("SELECT pg_advisory_xact_lock(?, ?)", (LOCK_SPACE, self.key))

    def lock(self, path: Path) -> FleetLock:
        """As SqlStore.lock."""
        return FleetLock(self, path)

    def check(self) -> list[str]:
        """The server looks after its files; here only whether it answers."""
        try:
            self.read_now(lambda tx: tx.execute("SELECT count(*) FROM part").get)
        except StoreUnavailable as e:
            return [e.message]
        return []

    # -- writing -----------------------------------------------------------------------------------

    async def write(
        self,
        work: Callable[[Tx], T],
        *,
        durable: bool = True,
        synced: bool = False,
        alone: bool = True,
    ) -> T:
        """As SqlStore.write. With `alone`, no other process of the fleet writes with `alone` at
        that time: what was read there is still so when it is decided and written, as on SQLite.
        `alone=False` is for work that settles its conflicts by row locks.
        """
        self._refuse_if_closed()
        job = _Job(work, synced or (durable and self.durability == "full"))
        writer = self._books if alone else self._beside
        if self.inline:
            writer.settle([job])
        else:
            job.loop = asyncio.get_running_loop()
            job.future = job.loop.create_future()
            writer.add(job)
            await asyncio.shield(job.future)  # a cancelled caller must not hide what was committed
        result: T = job.outcome()
        return result

    def write_now(self, work: Callable[[Tx], T], *, durable: bool = True) -> T:
        self._refuse_if_closed()
        job = _Job(work, durable and self.durability == "full")
        self._books.settle([job])
        result: T = job.outcome()
        return result

    def before_commit(self, work: Callable[[], object], /) -> None:
        self._books.before_commit.append(work)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable(
                f"{self.path} is closed",
                hint="it was closed by this process; nothing more can be written",
            )

    # -- reading -----------------------------------------------------------------------------------

    async def read(self, work: Callable[[Tx], T]) -> T:
        """What is committed. `work(tx)` runs on a thread of the store's own."""
        if self.inline:
            return self.read_now(work)
        self._refuse_if_closed()
        return await asyncio.get_running_loop().run_in_executor(self._reads, self.read_now, work)

    @property
    def file(self) -> Path | None:
        """It has none on this machine."""
        return None

    def moment(self, work: Callable[[Tx], T]) -> T:
        """As read_now, with all that `work` reads from one moment."""

        def whole(tx: Tx) -> T:
            tx.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                return work(tx)
            finally:
                tx.execute("COMMIT")

        return self.read_now(whole)

    def read_now(self, work: Callable[[Tx], T]) -> T:
        self._refuse_if_closed()
        with self._reading:
            for last in (False, True):
                fresh = not self._reader.is_fresh
                try:
                    if fresh:
                        self._reader.open()
                    answer = work(self._reader)
                    self._reader.sync()
                    return answer
                except psycopg.Error as e:
                    lost = not self._reader.is_open
                    self._reader.close()
                    if not is_outage(e):
                        raise
                    if (
                        last or fresh or not lost
                    ):  # a connection that was idle when the server went tells us only now; a new one may do
                        raise self.outage(e, "cannot be read") from e
                except BaseException:
                    self._reader.close()
                    raise
        raise AssertionError("a reading answers or raises")

    def outage(self, e: BaseException, what: str) -> StoreUnavailable:
        lines = str(e).strip().splitlines() or [type(e).__name__]
        return StoreUnavailable(
            f"{self.path} {what}: {self.address.without_secrets(lines[0])}",
            hint="work goes on by itself when the server is back",
        )

    # -- closing -----------------------------------------------------------------------------------

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._books.close()
        self._beside.close()
        self._reads.shutdown()
        self._reader.close()


class _Writer:
    """One writing connection with its thread: whoever writes at this moment shares a transaction."""

    def __init__(self, store: PostgresStore, *, locked: bool) -> None:
        self.store, self.locked = store, locked
        self.lock = threading.RLock()  # the connection is one thread's at a time
        self.before_commit: list[Callable[[], object]] = []
        self._wire = store.wire()
        self._queue: deque[_Job] = deque()
        self._mutex = threading.Lock()
        self._busy = False
        self._committing = False
        self._thread = ThreadPoolExecutor(1, "penstock-write")

    def opened(self) -> Wire:
        if not self._wire.is_fresh:
            self._wire.open()
        return self._wire

    def drop(self) -> None:
        with self.lock:
            self._wire.close()

    def close(self) -> None:
        self._thread.shutdown()  # what was accepted before is still written
        self.drop()

    def add(self, job: _Job) -> None:
        with self._mutex:
            self._queue.append(job)
            if self._busy:
                return
            self._busy = True
        self._thread.submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._mutex:
                group = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_GROUP))]
                if not group:
                    self._busy = False
                    return
            self.settle(group)
            for loop in {job.loop for job in group if job.loop is not None}:
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody asks any more
                    loop.call_soon_threadsafe(_answer, [job for job in group if job.loop is loop])

    # -- one transaction ---------------------------------------------------------------------------

    def settle(self, group: Sequence[_Job]) -> None:
        """Every job has its result or its error afterwards. An outage fails the whole group, and
        then (but for a COMMIT whose answer was lost) nothing was written.
        """
        with self.lock:
            refused = self._attempt(group)
            if refused is None:
                return
            if len(group) == 1:
                return self._insist(group[0], refused)
            for job in group:  # which of them it was cannot be told: each for itself
                if (refused := self._attempt([job])) is not None:
                    self._insist(job, refused)

    def _insist(self, job: _Job, refused: psycopg.Error) -> None:
        """A statement was refused, of this job alone. Against a deadlock, trying again is the cure."""
        for _ in range(TRIES):
            if refused.sqlstate not in _TRY_AGAIN:
                job.error = refused
                return
            again = self._attempt([job])
            if again is None:
                return
            refused = again
        job.error = self.store.outage(refused, "does not take writes")

    def _attempt(self, group: Sequence[_Job]) -> psycopg.Error | None:
        """None: all is settled. An error: a statement was refused, nothing is written, and it is
        the jobs' own.
        """
        reused, self._committing = self._wire.is_open, False
        try:
            try:
                self._transact(group)
            except psycopg.Error:
                if not reused or self._wire.is_open or self._committing:
                    raise
                self._transact(
                    group
                )  # it was idle when the server went, and nothing can have been written: on a new connection
        except psycopg.Error as e:
            self._roll_back()
            if not is_outage(e):
                return e
            self._fail(group, self.store.outage(e, "does not take writes"), e)
        except BaseException as e:
            self._roll_back()
            self._fail(group, e)
        return None

    def _transact(self, group: Sequence[_Job]) -> None:
        self.before_commit.clear()
        wire = self.opened()
        wire.execute("BEGIN")
        wire.execute(
            "SET LOCAL synchronous_commit TO off"
        )  # the lock is not kept while the disk syncs: see _commit
        if self.locked:
            wire.execute("SELECT pg_advisory_xact_lock(?, ?)", (LOCK_SPACE, self.store.key))
        if self._run(wire, group):
            self._commit(wire, group)

    def _run(self, wire: Wire, group: Sequence[_Job]) -> bool:
        """One job that raises is rolled back alone. False: there is nothing to commit."""
        for job in group:
            if len(group) > 1:
                wire.execute("SAVEPOINT job")
            try:
                job.result, job.error = job.work(wire), None
            except psycopg.Error:
                raise
            except BaseException as e:
                job.error = e
                self.store.rollbacks += 1
                wire.sync()
                wire.execute("ROLLBACK" if len(group) == 1 else "ROLLBACK TO SAVEPOINT job")
            if len(group) > 1:
                wire.execute("RELEASE SAVEPOINT job")
        wire_idle = len(group) == 1 and group[0].error is not None
        if wire_idle:
            wire.sync()
        return not wire_idle

    def _commit(self, wire: Wire, group: Sequence[_Job]) -> None:
        if self.before_commit:
            wire.sync()
            for work in self.before_commit:
                work()
        self._committing = True
        done = wire.execute("COMMIT")
        if any(job.durable for job in group):
            # The log is synced in order, so a record of our own behind the commit brings it to the
            # disk; by now others have the lock.
            wire.execute("SELECT setval('durable', 1)")
        wire.sync()
        if done.tag != "COMMIT":
            raise psycopg.errors.InFailedSqlTransaction(f"COMMIT ended as {done.tag}")

    def _roll_back(self) -> None:
        self.store.rollbacks += 1
        try:
            if self._wire.is_open:
                with contextlib.suppress(psycopg.Error):
                    self._wire.sync()
                self._wire.execute("ROLLBACK")
                self._wire.sync()
        except psycopg.Error:
            self._wire.close()

    def _fail(
        self, group: Sequence[_Job], e: BaseException, cause: BaseException | None = None
    ) -> None:
        if cause is not None:
            e.__cause__ = cause
        for job in group:
            job.error = e


class _Job:
    __slots__ = ("durable", "error", "future", "loop", "result", "work")

    def __init__(self, work: Callable[[Tx], Any], durable: bool) -> None:
        self.work, self.durable = work, durable
        self.loop: asyncio.AbstractEventLoop | None = None
        self.future: asyncio.Future[None] | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


def _answer(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if job.future is not None and not job.future.done():
            job.future.set_result(None)


def is_outage(e: psycopg.Error) -> bool:
    """Is it the server's trouble, so that the same statement may do later?"""
    state = e.sqlstate
    if state is None:  # the connection's own, or the library's word for a connection that is gone
        return isinstance(e, psycopg.OperationalError | psycopg.InterfaceError)
    return state[:2] in _OUTAGE_CLASSES or state in _OUTAGE_STATES
