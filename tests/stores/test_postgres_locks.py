"""The fleet lock on a real PostgreSQL server: one holder on all machines, and a holder that lost
the lock can no longer write.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from tests.servers import Handle

from penstock.clock import SystemClock
from penstock.engine.flusher import Flusher
from penstock.ledgers.sql.outbox import SqlOutbox
from penstock.locks import Lost, holder_alive, note_of
from penstock.ports import Durability, Line
from penstock.sinks import jsonl
from penstock.stores.postgres.locks import FleetLock
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import HolderTable, SqlUnitOfWork, Tx

pytestmark = pytest.mark.server("postgres")


class Machine:
    """One machine with a separate store and state directory."""

    def __init__(self, url: str, namespace: str, at: Path) -> None:
        self.store = PostgresStore(url, namespace=namespace, durability="process")
        SqlOutbox.create(self.store)
        self.uow = SqlUnitOfWork(self.store, self.bind)
        self.at = at
        self.lock = self.new_lock()
        self.sink = jsonl.open_sink("jsonl:out.jsonl", {}, at)

    def bind(self, sql: Tx) -> Any:
        """Return the tables of a transaction that a flusher and its lock use."""
        return SimpleNamespace(outbox=SqlOutbox(sql), locks=HolderTable(sql))

    async def note(self, upto: int, mark: str) -> None:
        """Record a mark, as a flusher does."""

        def work(tx: Any) -> None:
            self.lock.verify(tx)
            tx.outbox.mark_flushed(self.sink.name, upto=upto, mark=mark)

        await self.uow.write(work, durability=Durability.FSYNC)

    def new_lock(self) -> FleetLock:
        return self.store.lock(self.at / "sinks" / "out.lock")

    def flusher(self) -> Flusher:
        return Flusher(self.sink, self.uow, self.lock, SystemClock(), batch=5)

    async def put(self, *bodies: int) -> None:
        lines = [Line("extractor", str(n), b'{"n":%d}' % n, 0) for n in bodies]
        await self.uow.write(lambda tx: tx.outbox.append(self.sink.name, lines))

    @property
    def lines(self) -> list[bytes]:
        file = self.at / "out.jsonl"
        return file.read_bytes().splitlines() if file.exists() else []


class Fleet:
    def __init__(self, url: str, at: Path) -> None:
        self.url, self.namespace = url, f"test_{secrets.token_hex(6)}"
        self.a, self.b = (Machine(url, self.namespace, at / name) for name in "ab")

    def cut(self, lock: FleetLock) -> None:
        """Let the server close the connection of the lock, and wait until it is closed."""
        key = lock._key & ((1 << 64) - 1)
        held = (
            "FROM pg_locks WHERE locktype='advisory' AND objsubid=1 AND classid::bigint=%s "
            "AND objid::bigint=%s"
        )
        with psycopg.connect(self.url, autocommit=True) as db:
            where = (key >> 32, key & 0xFFFFFFFF)
            assert db.execute(
                f"SELECT pg_terminate_backend(pid, 60000) {held}", where
            ).fetchall() == [(True,)]

    def close(self) -> None:
        for machine in (self.a, self.b):
            machine.lock.release()
            machine.store.close_now()
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute(f"DROP SCHEMA IF EXISTS {self.namespace} CASCADE")


@pytest.fixture
def fleet(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(server("postgres").url, tmp_path)
    yield made
    made.close()


async def until(condition: Callable[..., Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (another process changes it)
            await asyncio.sleep(0.01)


async def test_one_process_of_all_machines_holds_the_lock_until_it_releases_it(
    fleet: Fleet,
) -> None:
    a, b = fleet.a.lock, fleet.b.lock
    beside = fleet.a.new_lock()
    assert await a.take()
    assert await a.take(), "taking a held lock again succeeds"
    assert not await b.take()
    assert not await beside.take()
    assert (a.held, b.held, beside.held) == (True, False, False)
    a.note("no space left")
    assert holder_alive(a.path)
    assert note_of(a.path) == "no space left"
    a.release()
    assert not holder_alive(a.path)
    await until_taken(b)
    assert not await beside.take()
    beside.release()


async def until_taken(lock: FleetLock) -> None:
    async with asyncio.timeout(60):
        # The server detects a closed connection with a delay.
        while not await lock.take():  # noqa: ASYNC110 (the server sends no event)
            await asyncio.sleep(0.01)


async def test_locks_with_different_names_are_independent(fleet: Fleet) -> None:
    assert await fleet.a.lock.take()
    other = fleet.b.store.lock(fleet.b.at / "hooks.lock")
    assert await other.take()
    other.release()


async def test_a_lock_whose_connection_was_cut_is_lost_and_can_be_taken(fleet: Fleet) -> None:
    assert await fleet.a.lock.take()
    fleet.cut(fleet.a.lock)
    await until(lambda: not fleet.a.lock.held)
    assert fleet.a.lock.here, (
        "this process keeps the file lock, so that no other local process changes its rows"
    )
    assert await fleet.b.lock.take()
    assert not await fleet.a.lock.take()


async def test_a_holder_that_lost_the_lock_cannot_record_a_mark(fleet: Fleet) -> None:
    a, b = fleet.a, fleet.b
    await a.put(1, 2, 3)
    assert await a.lock.take()
    await a.note(1, "a")
    fleet.cut(a.lock)
    assert await b.lock.take()
    with pytest.raises(Lost):
        await a.note(3, "stale")
    with pytest.raises(Lost):
        await a.uow.write(a.lock.verify)
    assert await b.uow.read(lambda tx: tx.outbox.position(b.sink.name)) == (1, "a")
    rows = await b.uow.read(lambda tx: tx.outbox.rows(b.sink.name, after=1, limit=9, max_bytes=99))
    assert [row.n for row in rows] == [2, 3]
    await b.note(3, "b")


async def test_a_machine_that_lost_the_lock_after_a_write_truncates_its_rows(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = fleet.a, fleet.b
    await a.put(1, 2)
    one, two = a.flusher(), b.flusher()
    first = asyncio.create_task(one.run())
    await until(lambda: one.written == 2)
    write = a.sink.write

    def cut_behind_it(rows: Any) -> str:
        mark = write(rows)
        monkeypatch.undo()
        fleet.cut(a.lock)
        asyncio.run(until_taken(b.lock))
        return mark

    monkeypatch.setattr(a.sink, "write", cut_behind_it)
    await a.put(3, 4)
    one.wake()
    await until(lambda: b.lock.held)
    second = asyncio.create_task(two.run())
    assert await two.drain(60)
    await until(lambda: len(a.lines) == 2)
    assert (a.lines, b.lines) == ([b'{"n":1}', b'{"n":2}'], [b'{"n":3}', b'{"n":4}'])
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await until(lambda: one.holding)
    await a.put(5)
    assert await one.drain(60)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (a.lines, b.lines) == ([b'{"n":1}', b'{"n":2}', b'{"n":5}'], [b'{"n":3}', b'{"n":4}'])
    assert one.sink.notice == "", "the file has the recorded state"


async def test_machines_that_share_one_file_continue_where_the_other_ended(fleet: Fleet) -> None:
    a, b = fleet.a, fleet.b
    b.sink = jsonl.open_sink("jsonl:out.jsonl", {}, a.at)
    for turn, (writes, waits) in enumerate([(a, b), (b, a), (a, b)]):
        one, two = writes.flusher(), waits.flusher()
        await writes.put(2 * turn)
        first = asyncio.create_task(one.run())
        await until(lambda one=one: one.written)
        second = asyncio.create_task(two.run())
        await until(lambda waits=waits, two=two: waits.lock.here and two.idle)
        await writes.put(2 * turn + 1)
        assert await one.drain(60)
        assert (one.written, two.written, two.down) == (2, 0, None)
        for task in (second, first):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert a.lines == [b'{"n":%d}' % n for n in range(6)]
    assert (a.sink.notice, b.sink.notice) == ("", "")


async def test_a_flusher_with_a_full_disk_is_not_down_after_it_lost_the_lock(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = fleet.a, fleet.b

    def full(rows: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(a.sink, "write", full)
    await a.put(1)
    one, two = a.flusher(), b.flusher()
    first = asyncio.create_task(one.run())
    await until(lambda: one.down)
    assert "No space left" in note_of(a.lock.path)
    while not b.lock.held:  # the first machine that asks gets the lock
        if a.lock.held:
            fleet.cut(a.lock)
        await b.lock.take()
    second = asyncio.create_task(two.run())
    assert await two.drain(60)
    await until(lambda: one.down is None)
    assert note_of(a.lock.path) == ""
    for task in (first, second):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (a.lines, b.lines) == ([], [b'{"n":1}'])
