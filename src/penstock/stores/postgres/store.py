"""Store in one PostgreSQL schema: group commit under one lock for the whole fleet, reads, tables.

See `connection` for the connection itself.
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

from penstock.errors import StoreRefused, StoreUnavailable, Unreachable
from penstock.stores.group_commit import GroupCommitStore, Job, resolve, take
from penstock.stores.migrations.other_workers import OtherWorker
from penstock.stores.migrations.versions import StoreVersion, read_version
from penstock.stores.postgres import sessions
from penstock.stores.postgres.connection import Wire, statements
from penstock.stores.postgres.locks import FleetLock
from penstock.stores.postgres.url import OLDEST, Address, refusal
from penstock.stores.sql import Tx

T = TypeVar("T")

# Jobs in one transaction. Each has a savepoint: above 64 the server stores them on disk, and every
# snapshot gets slower.
MAX_GROUP = 50
# "PENS": first half of the lock key. Advisory locks of other programs in the same database have
# another first half.
LOCK_SPACE = 0x50454E53
MAX_RETRIES = 3  # retries after a deadlock or serialization failure
# The fleet waits for the holder of the lock. So a holder may not be idle for long, and no wait is
# unlimited.
SETTINGS = {
    "idle_in_transaction_session_timeout": "15s",
    "lock_timeout": "30s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "timezone": "UTC",
    # Statements after the lock must see the commits made before it was granted.
    "default_transaction_isolation": "read committed",
    # With sequential scans off, a necessary scan has a very high cost estimate. So the server would
    # compile the query first.
    "jit": "off",
    # Plans are cached for the life of a connection, and made when tables are small. A plan with a
    # sequential scan would soon scan a large table.
    "enable_seqscan": "off",
}
# Classes of SQLSTATE that are failures of the server, not of the statement.
_OUTAGE_CLASSES = ("08", "53", "57", "58", "XX")
# Idle-in-transaction timeout, read-only, permission withdrawn, lock timeout.
_OUTAGE_STATES = ("25P03", "25006", "42501", "55P03")
_RETRY_STATES = ("40001", "40P01")  # serialization failure, deadlock


class PostgresStore(GroupCommitStore):
    """Implements ports.Store and stores.sql.SqlStore.

    `write` returns after COMMIT. Jobs that wait at the same time share one commit.

    `work(tx)` runs on a thread of the store, never on the event loop's thread. So it must not use
    the loop (no `Event.set`, no futures). Do that after `await write(...)`. `work` may run again in
    a new transaction if the server rejected the first one. `inline=True` runs everything on the
    caller's thread, for tests and simulation.
    """

    pipelined = True
    file: Path | None = None  # the store has no file on this machine

    def __init__(
        self, url: str, *, namespace: str, durability: str = "full", inline: bool = False
    ) -> None:
        """Parse the URL. No connection is opened yet."""
        self.address = Address.parse(url)
        self.namespace, self.durability, self.inline = namespace, durability, inline
        self.path = self.address.label
        self.key = zlib.crc32(namespace.encode()) - (1 << 31)
        self._prepared = False
        self._exclusive = _Writer(self, locked=True)
        self._row_locking = _Writer(self, locked=False)
        self._reading = threading.Lock()
        self._reader = self.wire()
        self._reads = ThreadPoolExecutor(1, "penstock-read")

    # -- opening -----------------------------------------------------------------------------------

    def wire(self) -> Wire:
        """Return a separate connection to this schema, not yet open, for listeners and locks."""
        path = quoting.Identifier(self.namespace).as_string(None)
        own = {"search_path": path, "application_name": sessions.application_name(self.namespace)}
        return Wire(self.address.options, SETTINGS | own)

    def part(self, name: str, schema: str) -> None:
        """As SqlStore.part. Processes that start at the same time create tables one by one."""
        try:
            with self._exclusive.lock:
                wire = self._exclusive.opened()
                self._prepare(wire)
                if not self._has_part(wire, name):
                    self._create(wire, name, schema)
        except psycopg.Error as e:
            self._exclusive.drop()
            raise refusal(e, self.address, self.namespace) from e
        except StoreRefused:
            self._exclusive.drop()
            raise

    def version(self) -> StoreVersion | None:
        """As SqlStore.version. Does not create the schema."""
        return self._ask(
            lambda tx: (
                None
                if tx.execute("SELECT to_regclass('part')::text").get is None
                else read_version(tx)
            )
        )

    def table_size(self, table: str) -> tuple[int, int]:
        """As SqlStore.table_size."""

        def count(tx: Tx) -> tuple[int, int]:
            size = "SELECT pg_total_relation_size(to_regclass(?::text))"
            found: int | None = tx.execute(size, (table,)).get
            return (tx.execute(f"SELECT count(*) FROM {table}").get, found) if found else (0, 0)

        return self._ask(count)

    def other_workers(self) -> list[OtherWorker]:
        """As SqlStore.other_workers."""
        return self._ask(lambda tx: sessions.other_workers(tx, self.namespace))

    def _ask(self, question: Callable[[Tx], T]) -> T:
        """Run a query before the store is used. Raises Unreachable with the reason."""
        try:
            with self._exclusive.lock:
                return question(self._exclusive.opened())
        except psycopg.Error as e:
            self._exclusive.drop()
            raise refusal(e, self.address, self.namespace) from e

    def statements(self, script: str) -> list[str]:
        """As SqlStore.statements."""
        return statements(script)

    def _prepare(self, wire: Wire) -> None:
        """Check the server's version and create the schema, once per process."""
        if self._prepared:
            return
        if wire.version < OLDEST:
            raise Unreachable(
                f"{self.path} runs PostgreSQL {wire.version // 10000}, "
                f"and Penstock needs {OLDEST // 10000} or newer",
                hint="upgrade the server, or name a newer one in the URL",
            )
        is_prepared = (
            "SELECT to_regclass('durable') IS NOT NULL "
            "AND to_regnamespace(current_schema()) IS NOT NULL"
        )
        if not wire.execute(is_prepared).get:
            self._begin_alone(wire)
            name = quoting.Identifier(self.namespace).as_string(None)
            # CREATE SCHEMA IF NOT EXISTS needs the CREATE permission even if the schema exists.
            if not wire.execute(
                "SELECT 1 FROM pg_namespace WHERE nspname=?", (self.namespace,)
            ).get:
                wire.execute(f"CREATE SCHEMA {name}")
            wire.execute(
                "CREATE TABLE IF NOT EXISTS part(name TEXT PRIMARY KEY, version BIGINT NOT NULL)"
            )
            wire.execute("CREATE SEQUENCE IF NOT EXISTS durable")
            wire.execute("COMMIT")
            wire.sync()
        self._prepared = True

    def _create(self, wire: Wire, name: str, schema: str) -> None:
        self._begin_alone(wire)
        self._create_part(wire, name, schema)
        wire.execute("COMMIT")
        wire.sync()

    def _begin_alone(self, wire: Wire) -> None:
        wire.execute("BEGIN")
        wire.execute("SELECT pg_advisory_xact_lock(?, ?)", (LOCK_SPACE, self.key))

    def lock(self, path: Path) -> FleetLock:
        """As SqlStore.lock."""
        return FleetLock(self, path)

    def check(self) -> list[str]:
        """Check that the server answers. The server itself checks its files."""
        try:
            self.read_now(lambda tx: tx.execute("SELECT count(*) FROM part").get)
        except StoreUnavailable as e:
            return [e.message]
        return []

    def server_time(self) -> float | None:
        """As SqlStore.server_time."""
        now: float = self.read_now(
            lambda tx: (
                tx.execute("SELECT extract(epoch FROM clock_timestamp())::double precision").get
            )
        )
        return now

    # -- writing -----------------------------------------------------------------------------------

    async def write(
        self,
        work: Callable[[Tx], T],
        *,
        durable: bool = True,
        synced: bool = False,
        alone: bool = True,
    ) -> T:
        """As SqlStore.write.

        With `alone`, one process of the fleet at a time runs such a transaction. So rows that it
        has read do not change before its commit, as on SQLite. `alone=False` is for work that
        avoids conflicts by row locks.
        """
        job = self._job(work, durable=durable, synced=synced)
        writer = self._exclusive if alone else self._row_locking
        return await self._committed(job, writer.execute_jobs, writer.add)

    def write_now(self, work: Callable[[Tx], T], *, durable: bool = True) -> T:
        job = self._job(work, durable=durable)
        self._exclusive.execute_jobs([job])
        return job.outcome()

    def before_commit(self, work: Callable[[], object], /) -> None:
        self._exclusive.before_commit.append(work)

    # -- reading -----------------------------------------------------------------------------------

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Read committed data. `work(tx)` runs on a thread of the store."""
        if self.inline:
            return self.read_now(work)
        self._refuse_if_closed()
        return await asyncio.get_running_loop().run_in_executor(self._reads, self.read_now, work)

    def moment(self, work: Callable[[Tx], T]) -> T:
        """As SqlStore.moment."""

        def in_transaction(tx: Tx) -> T:
            tx.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                return work(tx)
            finally:
                tx.execute("COMMIT")

        return self.read_now(in_transaction)

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
                    # An idle connection reports only now that the server closed it. A new
                    # connection may work.
                    if last or fresh or not lost:
                        raise self.outage(e, "cannot be read") from e
                except BaseException:
                    self._reader.close()
                    raise
        raise AssertionError("read_now returns or raises")

    def outage(self, e: BaseException, what: str) -> StoreUnavailable:
        lines = str(e).strip().splitlines() or [type(e).__name__]
        outage = StoreUnavailable(
            f"{self.path} {what}: {self.address.without_secrets(lines[0])}",
            hint="check the server. Work continues automatically when it answers",
        )
        outage.__cause__ = e
        return outage

    # -- closing -----------------------------------------------------------------------------------

    def close_now(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._exclusive.close()
        self._row_locking.close()
        self._reads.shutdown()
        self._reader.close()


class _Writer:
    """Writing connection with its thread. Jobs that wait at the same time share one transaction."""

    def __init__(self, store: PostgresStore, *, locked: bool) -> None:
        self.store, self.locked = store, locked
        self.lock = threading.RLock()  # only one thread at a time uses the connection
        self.before_commit: list[Callable[[], object]] = []
        self._wire = store.wire()
        self._queue: deque[Job[Any]] = deque()
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
        self._thread.shutdown()  # waits until all accepted jobs are written
        self.drop()

    def add(self, job: Job[Any]) -> None:
        with self._mutex:
            self._queue.append(job)
            if self._busy:
                return
            self._busy = True
        self._thread.submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._mutex:
                group = take(self._queue, MAX_GROUP)
                if not group:
                    self._busy = False
                    return
            self.execute_jobs(group)
            for loop in {job.future.get_loop() for job in group}:
                awaited = [job for job in group if job.future.get_loop() is loop]
                with contextlib.suppress(RuntimeError):  # the loop was closed, so no caller waits
                    loop.call_soon_threadsafe(resolve, awaited)

    # -- one transaction ---------------------------------------------------------------------------

    def execute_jobs(self, group: Sequence[Job[Any]]) -> None:
        """Run the jobs, and set the result or error of each.

        An outage fails the whole group. Then no change is written, unless the outage hid the result
        of COMMIT.
        """
        with self.lock:
            refused = self._attempt(group)
            if refused is None:
                return
            if len(group) == 1:
                return self._retry_deadlock(group[0], refused)
            for job in group:  # the cause is unknown, so each job runs in its own transaction
                if (refused := self._attempt([job])) is not None:
                    self._retry_deadlock(job, refused)

    def _retry_deadlock(self, job: Job[Any], refused: psycopg.Error) -> None:
        """Repeat a job whose statement was rejected, if the error is a deadlock or similar."""
        for _ in range(MAX_RETRIES):
            if refused.sqlstate not in _RETRY_STATES:
                job.error = refused
                return
            again = self._attempt([job])
            if again is None:
                return
            refused = again
        job.error = self.store.outage(refused, "does not take writes")

    def _attempt(self, group: Sequence[Job[Any]]) -> psycopg.Error | None:
        """Run one transaction. Return None if each job has its result or error.

        Return the error if the server rejected a statement of a job. Then no change is written.
        """
        reused, self._committing = self._wire.is_open, False
        try:
            try:
                self._transact(group)
            except psycopg.Error:
                if not reused or self._wire.is_open or self._committing:
                    raise
                # The idle connection was closed by the server before the COMMIT, so no change is
                # written. Repeat on a new connection.
                self._transact(group)
        except psycopg.Error as e:
            self._roll_back()
            if not is_outage(e):
                return e
            _fail(group, self.store.outage(e, "does not take writes"))
        except BaseException as e:
            self._roll_back()
            _fail(group, e)
        return None

    def _transact(self, group: Sequence[Job[Any]]) -> None:
        self.before_commit.clear()
        wire = self.opened()
        wire.execute("BEGIN")
        # The lock is not held while the disk syncs: see _commit.
        wire.execute("SET LOCAL synchronous_commit TO off")
        if self.locked:
            wire.execute("SELECT pg_advisory_xact_lock(?, ?)", (LOCK_SPACE, self.store.key))
        self.store.run_jobs(wire, group, (psycopg.Error,))
        if len(group) > 1 or group[0].error is None:
            self._commit(wire, group)

    def _commit(self, wire: Wire, group: Sequence[Job[Any]]) -> None:
        if self.before_commit:
            wire.sync()
            for work in self.before_commit:
                work()
        self._committing = True
        done = wire.execute("COMMIT")
        if any(job.durable for job in group):
            # The WAL is synced in order. So syncing a record after the commit also syncs the
            # commit. The lock is already released.
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


def _fail(group: Sequence[Job[Any]], e: BaseException) -> None:
    for job in group:
        job.error = e


def is_outage(e: psycopg.Error) -> bool:
    """Return True if the server failed, so that the same statement may succeed later."""
    state = e.sqlstate
    if state is None:  # an error of the connection, or the library's error for a lost connection
        return isinstance(e, psycopg.OperationalError | psycopg.InterfaceError)
    return state[:2] in _OUTAGE_CLASSES or state in _OUTAGE_STATES
