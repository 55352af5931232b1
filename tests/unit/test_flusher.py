"""The flusher on real files and a real outbox, with a kill and an error at each of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import errno
import json
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import apsw
import pytest

from penstock.engine.flusher import LAST_BACK_OFF, Flusher
from penstock.errors import StoreUnavailable, Unreachable
from penstock.locks import FileLock, holder_alive
from penstock.ports import Durability, Row, Sink
from penstock.sinks import csv as csv_sink
from penstock.sinks import jsonl, sqlite

T = TypeVar("T")
SINKS: dict[str, Callable[[Path], Sink]] = {
    "jsonl": lambda at: jsonl.open_sink("jsonl:out.jsonl", {}, at),
    "csv": lambda at: csv_sink.open_sink("csv:out.csv", {}, at),
    "sqlite": lambda at: sqlite.open_sink("sqlite:out.db?mode=append", {}, at),
}


class Hurried:
    """Real clock that shortens and records its waits."""

    def __init__(self, longest: float = 0.001) -> None:
        self.longest, self.waits = longest, list[float]()

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(min(seconds, self.longest))


class TableOutbox:
    """An outbox as in a ledger: rows and recorded marks in one SQLite file."""

    def __init__(self, path: Path) -> None:
        self.tx: Any = SimpleNamespace(outbox=self)  # the only table that a flusher uses
        self.db = apsw.Connection(str(path))
        self.db.set_busy_timeout(10_000)
        self.db.execute(
            "PRAGMA synchronous = OFF"
        )  # the tests kill processes and do not cut the power
        with self.db:
            self.db.execute(
                "CREATE TABLE IF NOT EXISTS outbox (n INTEGER PRIMARY KEY AUTOINCREMENT, key, "
                "body, ord)"
            )
            self.db.execute("CREATE TABLE IF NOT EXISTS noted (sink PRIMARY KEY, n, mark)")
            self.db.execute("CREATE TABLE IF NOT EXISTS outage (sink PRIMARY KEY, reason)")

    def add(self, bodies: Sequence[dict[str, Any]]) -> None:
        with self.db:
            self.db.executemany(
                "INSERT INTO outbox (key, body, ord) VALUES (?, ?, 0)",
                [(str(body["i"]), json.dumps(body).encode()) for body in bodies],
            )

    async def read(self, work: Callable[[Any], T]) -> T:
        return self.snapshot(work)

    async def write(
        self, work: Callable[[Any], T], *, durability: Durability = Durability.CONFIGURED
    ) -> T:
        return self.write_now(work)

    def write_now(self, work: Callable[[Any], T]) -> T:
        with self.db:
            result = work(self.tx)
        return result

    def snapshot(self, work: Callable[[Any], T]) -> T:
        return work(self.tx)

    def position(self, sink: str) -> tuple[int, str]:
        found = self.db.execute("SELECT n, mark FROM noted WHERE sink = ?", (sink,)).get
        return found or (0, "")

    def rows(self, sink: str, *, after: int, limit: int, max_bytes: int) -> Sequence[Row]:
        return [
            Row(*each)
            for each in self.db.execute(
                "SELECT n, key, body, ord FROM outbox WHERE n > ? ORDER BY n LIMIT ?",
                (after, limit),
            )
        ]

    def mark_flushed(self, sink: str, *, upto: int, mark: str) -> None:
        self.db.execute("INSERT OR REPLACE INTO noted VALUES (?, ?, ?)", (sink, upto, mark))
        self.db.execute("DELETE FROM outbox WHERE n <= ?", (upto,))

    def outage(self, sink: str) -> str:
        return str(self.db.execute("SELECT reason FROM outage WHERE sink = ?", (sink,)).get or "")

    def set_outage(self, sink: str, reason: str, *, since: float | None) -> None:
        self.db.execute("INSERT OR REPLACE INTO outage VALUES (?, ?)", (sink, reason))

    def backlog(self, sink: str) -> int:
        return int(self.db.execute("SELECT count(*) FROM outbox").get)

    def close(self) -> None:
        self.db.close()


def bodies(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Return records whose texts have line breaks and quotes. Later records have an additional
    field, so that the sink rewrites the CSV file.
    """
    return [
        {"i": i, "text": f'line\n"{i}"\r\n'} | ({f"new{i // 4}": i} if i >= 4 else {})
        for i in range(start, start + count)
    ]


def written(at: Path, kind: str) -> list[int]:
    """Return the numbers of the records in the target, after a check that each is complete."""
    if kind == "jsonl":
        raw = (at / "out.jsonl").read_bytes()
        assert raw.endswith(b"\n")
        found = [json.loads(line) for line in raw.splitlines()]
    elif kind == "csv":
        with open(at / "out.csv", newline="") as f:
            found = [
                {name: value for name, value in line.items() if value}
                for line in csv.DictReader(f, strict=True)
            ]
    else:
        db = apsw.Connection(str(at / "out.db"))
        names = [name for (name,) in db.execute("SELECT name FROM pragma_table_info('records')")]
        found = [
            {k: v for k, v in zip(names, each, strict=True) if v is not None}
            for each in db.execute("SELECT * FROM records ORDER BY rowid")
        ]
        db.close()
    for each in found:
        i = int(each["i"])
        assert {k: str(v) for k, v in each.items() if not k.startswith("_penstock")} == {
            k: str(v) for k, v in bodies(1, i)[0].items()
        }
    return [int(each["i"]) for each in found]


@contextlib.asynccontextmanager
async def running(flusher: Flusher) -> Any:
    task = asyncio.create_task(flusher.run())
    try:
        yield flusher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def flush(at: Path, kind: str, *, batch: int = 3) -> None:
    outbox = TableOutbox(at / "outbox.db")
    async with running(
        Flusher(SINKS[kind](at), outbox, FileLock(at / "out.lock"), Hurried(0.02), batch=batch)
    ) as flusher:  # each poll is a step
        assert await flusher.drain(30)
    outbox.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise TimeoutError


# -- without faults --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SINKS)
async def test_rows_are_written_once_and_in_order_over_several_runs(
    kind: str, tmp_path: Path
) -> None:
    outbox = TableOutbox(tmp_path / "outbox.db")
    for start in (0, 7, 14):
        outbox.add(bodies(7, start))
        await flush(tmp_path, kind)
    outbox.close()
    assert written(tmp_path, kind) == list(range(21))


async def test_a_wake_up_flushes_rows_without_waiting_for_the_next_poll(tmp_path: Path) -> None:
    class Asleep(Hurried):
        async def sleep(self, seconds: float) -> None:
            await asyncio.Event().wait()

    outbox = TableOutbox(tmp_path / "outbox.db")
    async with running(
        Flusher(SINKS["jsonl"](tmp_path), outbox, FileLock(tmp_path / "out.lock"), Asleep())
    ) as flusher:
        await until(lambda: flusher.idle)
        for start in range(5):
            outbox.add(bodies(1, start))
            flusher.wake()
            assert not flusher.idle
            await until(lambda: flusher.idle)
            assert written(tmp_path, "jsonl") == list(range(start + 1))
        assert flusher.written == 5
    outbox.close()


async def test_rows_of_another_worker_are_found_without_a_wake_up(tmp_path: Path) -> None:
    outbox = TableOutbox(tmp_path / "outbox.db")
    clock = Hurried()
    async with running(
        Flusher(SINKS["jsonl"](tmp_path), outbox, FileLock(tmp_path / "out.lock"), clock)
    ) as flusher:
        await until(lambda: flusher.idle)
        outbox.add(bodies(2))
        await until(lambda: flusher.written == 2)
        assert set(clock.waits) == {0.5}
    outbox.close()


async def test_drain_returns_false_after_its_timeout(tmp_path: Path) -> None:
    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(1))
    flusher = Flusher(SINKS["jsonl"](tmp_path), outbox, FileLock(tmp_path / "out.lock"), Hurried())
    assert not await flusher.drain(0.02)  # the flusher does not run
    outbox.close()


# -- kills at every step ---------------------------------------------------------------------------

CALLS = ("open", "write", "ftruncate", "fsync", "fdatasync", "replace", "unlink", "mkdir")


def at_step(step: int, act: Callable[[], None]) -> None:
    """Call `act` before system call or SQL statement number `step` of this process. If it is a
    write, write half of its data first.
    """
    taken = 0

    def count() -> bool:
        nonlocal taken
        taken += 1
        return taken == step

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if count():
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                act()
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, watched(name, getattr(os, name)))

    def trace(cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        if count():
            act()
        return True

    def watch(db: apsw.Connection) -> None:
        db.exec_trace = trace

    apsw.connection_hooks.append(watch)


def in_child(work: Callable[[], Awaitable[None]]) -> int:
    """Run `work` in a forked process, and return the signal that killed it, or 0."""
    return in_children([work])[0]


def in_children(works: Sequence[Callable[[], Awaitable[None]]]) -> list[int]:
    """Run several forked processes in parallel, because they mostly wait for the disk."""
    statuses = [os.waitpid(pid, 0)[1] for pid in [spawn(work) for work in works]]
    assert all(os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0 for status in statuses)
    return [os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0 for status in statuses]


def spawn(work: Callable[[], Awaitable[None]]) -> int:
    with warnings.catch_warnings():
        # Newer Python versions warn if a process with threads forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:

        async def main() -> None:
            async with asyncio.timeout(30):
                await work()

        asyncio.run(main())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)  # until the signal arrives


@pytest.mark.parametrize("kind", SINKS)
def test_every_row_is_written_once_after_a_kill_at_any_step_and_a_second_kill(
    kind: str, tmp_path: Path
) -> None:
    def killed_at(step: int, at: Path) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            at_step(step, kill)
            await flush(at, kind)

        return work

    step, killed = 0, True
    while killed:
        places = {step + n: tmp_path / str(step + n) for n in range(1, 7)}
        for at in places.values():
            at.mkdir()
            outbox = TableOutbox(at / "outbox.db")
            outbox.add(bodies(8))
            outbox.close()
        killed = all(
            how == signal.SIGKILL
            for how in in_children([killed_at(step, at) for step, at in places.items()])
        )
        in_children([killed_at(1 + step * 7 % 23, at) for step, at in places.items()])
        assert set(in_children([partial(flush, at, kind) for at in places.values()])) == {0}
        for step, at in places.items():
            assert written(at, kind) == list(range(8)), f"killed at step {step}"
    assert step > 25


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_every_row_is_written_once_after_an_error_at_any_step(
    kind: str, number: int, tmp_path: Path
) -> None:
    def fails_at(step: int, at: Path) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            outbox = TableOutbox(at / "outbox.db")
            failed = False

            def fail() -> None:
                nonlocal failed
                failed = True
                raise OSError(number, os.strerror(number))

            at_step(step, fail)
            flusher = Flusher(
                SINKS[kind](at), outbox, FileLock(at / "out.lock"), Hurried(), batch=3
            )
            reasons = set()
            async with running(flusher):
                while outbox.backlog("") or flusher.down:
                    reasons.add(flusher.down)
                    await asyncio.sleep(0)
            assert not failed or len(reasons) > 1 or step < 3, reasons
            if not failed:
                kill()

        return work

    for step in range(1, 200):
        at = tmp_path / str(step)
        at.mkdir()
        outbox = TableOutbox(at / "outbox.db")
        outbox.add(bodies(8))
        outbox.close()
        ended = in_child(fails_at(step, at)) == signal.SIGKILL
        assert written(at, kind) == list(range(8)), f"failed at step {step}"
        if ended:
            break
    assert 10 < step < 199


def test_competing_processes_that_are_killed_at_random_write_every_row_once(tmp_path: Path) -> None:
    rng = random.Random(7)
    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(4))

    async def work() -> None:
        mine = TableOutbox(tmp_path / "outbox.db")
        await Flusher(
            SINKS["jsonl"](tmp_path), mine, FileLock(tmp_path / "out.lock"), Hurried(0.005), batch=2
        ).run()

    workers = [spawn(work) for _ in range(3)]
    total = 4
    try:
        for _ in range(25):
            outbox.add(bodies(20, total))
            total += 20
            time.sleep(rng.uniform(0.005, 0.04))
            victim = workers.pop(rng.randrange(3))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            workers.append(spawn(work))
        end = time.monotonic() + 30
        while outbox.db.execute("SELECT count(*) FROM outbox").get and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        outbox.close()
    assert written(tmp_path, "jsonl") == list(range(total))


# -- outages ---------------------------------------------------------------------------------------


async def test_an_unwritable_target_is_down_with_its_reason_and_recovers(tmp_path: Path) -> None:
    blocked = tmp_path / "out.jsonl"
    blocked.mkdir()
    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(8))
    clock = Hurried()
    async with running(
        Flusher(SINKS["jsonl"](tmp_path), outbox, FileLock(tmp_path / "out.lock"), clock)
    ) as flusher:
        await until(lambda: len(clock.waits) > 10)
        assert flusher.down is not None
        assert "out.jsonl" in flusher.down
        assert flusher.since is not None
        assert flusher.since <= time.time()
        assert not flusher.idle
        assert clock.waits == sorted(clock.waits)
        assert clock.waits[0] == 0.1
        assert clock.waits[-1] == LAST_BACK_OFF
        assert outbox.backlog("") == 8
        blocked.rmdir()
        await until(lambda: flusher.down is None)
        assert flusher.since is None
        assert await flusher.drain(30)
    outbox.close()
    assert written(tmp_path, "jsonl") == list(range(8))


async def test_a_waiting_flusher_reports_a_down_target_and_takes_over_the_lock(
    tmp_path: Path,
) -> None:
    blocked = tmp_path / "out.jsonl"
    blocked.mkdir()
    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(2))
    one, two = (
        Flusher(SINKS["jsonl"](tmp_path), outbox, FileLock(tmp_path / "out.lock"), Hurried())
        for _ in range(2)
    )
    async with running(two):
        async with running(one):
            await until(lambda: one.down is not None and two.down is not None)
            assert one.down == two.down
            assert one.holding != two.holding
            blocked.rmdir()
            await until(lambda: one.down is None and two.down is None and one.idle and two.idle)
        await until(lambda: two.holding)
        assert not one.holding
        outbox.add(bodies(2, 2))
        assert await two.drain(30)
    assert not holder_alive(tmp_path / "out.lock")
    outbox.close()
    assert written(tmp_path, "jsonl") == list(range(4))


async def test_a_ledger_outage_repeats_the_batch_without_duplicate_rows(tmp_path: Path) -> None:
    class Shaky(TableOutbox):
        failures = 3

        answer_lost = False

        def mark_flushed(self, sink: str, *, upto: int, mark: str) -> None:
            super().mark_flushed(sink, upto=upto, mark=mark)
            if upto and self.failures:
                self.failures -= 1
                self.answer_lost = self.failures == 1
                if not self.answer_lost:
                    raise StoreUnavailable("the ledger is away")

        async def write(
            self, work: Callable[[Any], T], *, durability: Durability = Durability.CONFIGURED
        ) -> T:
            result = await super().write(work, durability=durability)
            if self.answer_lost:  # committed, but the flusher gets an error
                self.answer_lost = False
                raise StoreUnavailable("the ledger is away")
            return result

    outbox = Shaky(tmp_path / "outbox.db")
    outbox.add(bodies(8))
    async with running(
        Flusher(SINKS["csv"](tmp_path), outbox, FileLock(tmp_path / "out.lock"), Hurried(), batch=3)
    ) as flusher:
        assert await flusher.drain(30)
        assert outbox.failures == 0
    outbox.close()
    assert written(tmp_path, "csv") == list(range(8))


async def test_a_bug_in_a_sink_is_reported_and_the_flusher_keeps_running(tmp_path: Path) -> None:
    class Buggy(jsonl.JsonLinesSink):
        def write(self, rows: Sequence[Row]) -> str:
            if not (tmp_path / "fixed").exists():
                raise KeyError("price")
            return super().write(rows)

    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(1))
    async with running(
        Flusher(
            Buggy("x", tmp_path / "out.jsonl"), outbox, FileLock(tmp_path / "out.lock"), Hurried()
        )
    ) as flusher:
        await until(lambda: flusher.down is not None)
        assert flusher.down == "bug in the sink: KeyError('price')"
        (tmp_path / "fixed").touch()
        assert await flusher.drain(30)
    outbox.close()
    assert written(tmp_path, "jsonl") == [0]


async def test_a_removed_file_is_created_again_with_a_notice(tmp_path: Path) -> None:
    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(2))
    notices: list[str] = []
    flusher = Flusher(
        SINKS["jsonl"](tmp_path),
        outbox,
        FileLock(tmp_path / "out.lock"),
        Hurried(),
        on_notice=notices.append,
    )
    async with running(flusher):
        assert await flusher.drain(30)
        (tmp_path / "out.jsonl").unlink()
        outbox.add(bodies(2, 2))
        assert await flusher.drain(30)
        assert flusher.down is None
    outbox.close()
    assert written(tmp_path, "jsonl") == [2, 3]
    assert len(notices) == 1
    assert "appending at its end" in notices[0]


async def test_a_cancelled_flusher_keeps_the_lock_until_its_write_has_ended(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(jsonl.JsonLinesSink):
        def write(self, rows: Sequence[Row]) -> str:
            begun.set()
            go.wait(60)
            return super().write(rows)

    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(2))
    task = asyncio.create_task(
        Flusher(
            Slow("jsonl:out.jsonl", tmp_path / "out.jsonl"),
            outbox,
            FileLock(tmp_path / "out.lock"),
            Hurried(),
        ).run()
    )
    await until(begun.is_set)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.005)
    assert not task.done()
    assert not FileLock(tmp_path / "out.lock").try_acquire()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not holder_alive(tmp_path / "out.lock")
    outbox.close()
    await flush(tmp_path, "jsonl")
    assert written(tmp_path, "jsonl") == [0, 1]


# -- the start, stored reasons, and calls that do not return ---------------------------------------


async def test_the_reason_of_an_outage_is_stored_and_removed_after_a_write(tmp_path: Path) -> None:
    blocked = tmp_path / "out.jsonl"
    blocked.mkdir()
    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(2))
    sink = SINKS["jsonl"](tmp_path)
    async with running(Flusher(sink, outbox, FileLock(tmp_path / "out.lock"), Hurried())) as one:
        with pytest.raises(Unreachable, match="cannot be opened") as raised:
            await one.wait_until_open(30)
        assert raised.value.hint
    assert "out.jsonl" in outbox.outage(sink.name), "the reason stays after the end"
    blocked.rmdir()
    async with running(Flusher(sink, outbox, FileLock(tmp_path / "out.lock"), Hurried())) as two:
        await two.wait_until_open(30)
        assert await two.drain(30)
        await until(lambda: outbox.outage(sink.name) == "")
    outbox.close()


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit("x")])
async def test_an_exception_that_asyncio_treats_specially_is_a_bug_of_the_sink(
    tmp_path: Path, error: BaseException
) -> None:
    class Buggy(jsonl.JsonLinesSink):
        def write(self, rows: Sequence[Row]) -> str:
            raise error

    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(1))
    sink, lock = Buggy("x", tmp_path / "out.jsonl"), FileLock(tmp_path / "out.lock")
    async with running(Flusher(sink, outbox, lock, Hurried())) as flusher:
        await until(lambda: flusher.down is not None)
        assert flusher.down is not None
        assert type(error).__name__ in flusher.down
    outbox.close()


async def test_a_write_that_never_returns_is_left_behind_and_keeps_the_lock(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    class Stuck(jsonl.JsonLinesSink):
        def write(self, rows: Sequence[Row]) -> str:
            begun.set()
            go.wait(60)
            raise OSError("the answer came too late")

    outbox = TableOutbox(tmp_path / "outbox.db")
    outbox.add(bodies(2))
    path = tmp_path / "out.lock"
    flusher = Flusher(Stuck("x", tmp_path / "out.jsonl"), outbox, FileLock(path), Hurried())
    task = asyncio.create_task(flusher.run())
    await until(begun.is_set)
    began = time.monotonic()
    assert not await flusher.drain(60, patient=False)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 30, "the end does not wait for the write"
    assert holder_alive(path), "another process must not write while the call runs"
    go.set()
    await until(lambda: not holder_alive(path))
    outbox.close()
    await flush(tmp_path, "jsonl")
    assert written(tmp_path, "jsonl") == [0, 1]
