# ruff: noqa: ASYNC220 (processes are started and awaited outside the loop on purpose)
"""The SQLite store: group commit, disk errors, foreign files, and checks when a file is opened."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from penstock.errors import StoreRefused, StoreUnavailable, Unreachable
from penstock.stores import sqlite as store
from penstock.stores import sqlite_checks, sqlite_connection
from penstock.stores.migrations.versions import newest
from penstock.stores.sql import Tx
from penstock.stores.sqlite import Database
from penstock.stores.sqlite_checks import file_system_of, has_wal_reset_bug

SCHEMA = "CREATE TABLE t(x); CREATE TABLE big(x)"


def insert(x: Any, table: str = "t") -> Callable[[Tx], int]:
    def work(tx: Tx) -> int:
        tx.execute(f"INSERT INTO {table} VALUES(?)", (x,))
        return tx.last_insert_rowid()

    return work


def fails(tx: Tx) -> None:
    tx.execute("INSERT INTO t VALUES('half')")
    raise ZeroDivisionError("a bug in one job")


def values(tx: Tx) -> list[Any]:
    return [x for (x,) in tx.execute("SELECT x FROM t ORDER BY rowid")]


def opened(path: Path, **more: Any) -> Database:
    db = Database(str(path), **more)
    db.part("test", SCHEMA)
    return db


# -- group commit ----------------------------------------------------------------------------------


class Gate(threading.Event):
    """An event that also reports when a thread has started to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._has_waiter = threading.Event()

    def clear(self) -> None:
        super().clear()
        self._has_waiter.clear()

    def wait_here(self) -> bool:
        self._has_waiter.set()
        return self.wait(40)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._has_waiter.wait, 40)


def held_commit(db: Database, gate: Gate) -> Callable[[Tx], None]:
    """Return a job whose commit waits for the gate, like a commit on a slow disk."""
    return lambda tx: db.before_commit(gate.wait_here)


def test_the_wal_size_is_limited_and_automatic_checkpoints_are_off(tmp_path: Path) -> None:
    db = opened(tmp_path / "s.db")
    settings = db.write_now(
        lambda tx: [
            tx.execute(f"PRAGMA {name}").get
            for name in ("journal_size_limit", "wal_autocheckpoint", "synchronous")
        ]
    )
    db.close_now()
    assert settings == [64 << 20, 0, 1]


async def test_writes_that_wait_together_share_a_commit(tmp_path: Path) -> None:
    db = opened(tmp_path / "a.db")
    gate, commits = Gate(), 0

    def count() -> bool:
        nonlocal commits
        commits += 1
        return False

    first = asyncio.ensure_future(db.write(held_commit(db, gate)))
    await gate.reached()
    others = [asyncio.ensure_future(db.write(insert(i))) for i in range(100)]
    await asyncio.sleep(0)
    db._writer.set_commit_hook(count)
    gate.set()
    await asyncio.gather(first, *others)
    db._writer.set_commit_hook(None)
    assert await db.read(values) == list(range(100))
    assert commits <= 2
    db.close_now()


async def test_the_loop_runs_while_a_commit_waits_for_the_disk_or_another_process(
    tmp_path: Path,
) -> None:
    db, other = opened(tmp_path / "a.db"), opened(tmp_path / "a.db")
    gate = Gate()
    waiting = asyncio.ensure_future(db.write(held_commit(db, gate)))
    await gate.reached()
    locked_out = asyncio.ensure_future(other.write(insert(1)))
    await asyncio.sleep(0.05)  # the loop runs, or this would never end
    assert not waiting.done()
    assert not locked_out.done()
    gate.set()
    await asyncio.gather(waiting, locked_out)
    assert await db.read(values) == [1]
    db.close_now()
    other.close_now()


async def test_writes_that_wait_for_another_process_share_one_commit(
    tmp_path: Path,
) -> None:
    db, other = opened(tmp_path / "a.db"), apsw.Connection(str(tmp_path / "a.db"))
    commits = 0

    def count() -> bool:
        nonlocal commits
        commits += 1
        return False

    other.execute("BEGIN IMMEDIATE")
    jobs = []
    for i in range(3):
        jobs.append(asyncio.ensure_future(db.write(insert(i))))
        await asyncio.sleep(0.01)
    db._writer.set_commit_hook(count)
    other.execute("ROLLBACK")
    await asyncio.gather(*jobs)
    assert await db.read(values) == [0, 1, 2]
    assert commits == 1
    other.close()
    db.close_now()


async def test_close_waits_for_writes_that_another_process_blocks(
    tmp_path: Path,
) -> None:
    db, other = opened(tmp_path / "a.db"), apsw.Connection(str(tmp_path / "a.db"))
    other.execute("BEGIN IMMEDIATE")
    job = asyncio.ensure_future(db.write(insert(1)))
    await asyncio.sleep(0.01)
    release = threading.Timer(0.05, other.execute, ("ROLLBACK",))
    release.start()
    db.close_now()
    release.join()
    assert await job == 1
    assert other.execute("SELECT x FROM t").fetchall() == [(1,)]
    other.close()


async def test_processes_that_write_continuously_do_not_lock_out_another_writer(
    tmp_path: Path,
) -> None:
    db = opened(tmp_path / "a.db", busy_seconds=20.0)
    code = (
        "import asyncio, sys\n"
        "from penstock.stores.sqlite import Database\n"
        "async def main():\n"
        "    db = Database(sys.argv[1])\n"
        "    while True:\n"
        "        await db.write(lambda tx: [tx.execute('INSERT INTO t VALUES(?)', (i,)) "
        "for i in range(2000)], durable=False)\n"
        "        print(flush=True)\n"
        "asyncio.run(main())\n"
    )
    busy = [
        subprocess.Popen([sys.executable, "-c", code, db.path], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()  # wait for the first write
        for i in range(20):
            await db.write(insert(f"row {i}"))
            db.write_now(insert(f"row {i}, without a loop"))
    finally:
        for process in busy:
            process.kill()
            process.communicate()
    await db.write(insert("the killed processes left no lock"))
    db.close_now()


@pytest.mark.parametrize("company", [0, 4])
async def test_one_failing_job_is_rolled_back_alone(tmp_path: Path, company: int) -> None:
    db = opened(tmp_path / "a.db")
    gate = Gate()
    hold = asyncio.ensure_future(db.write(held_commit(db, gate)))
    await gate.reached()
    jobs: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(db.write(insert(i))) for i in range(company)
    ]
    bad = asyncio.ensure_future(db.write(fails))
    jobs += [asyncio.ensure_future(db.write(insert(i))) for i in range(company, 2 * company)]
    await asyncio.sleep(0)
    gate.set()
    await hold
    with pytest.raises(ZeroDivisionError):
        await bad
    await asyncio.gather(*jobs)
    assert await db.read(values) == list(range(2 * company))
    await db.write(insert("after"))
    db.close_now()


async def test_a_cancelled_caller_does_not_undo_its_commit(tmp_path: Path) -> None:
    db = opened(tmp_path / "a.db")
    gate = Gate()

    def slow(tx: Tx) -> None:
        insert("kept")(tx)
        held_commit(db, gate)(tx)

    task = asyncio.ensure_future(db.write(slow))
    await gate.reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert (await db.write(values)) == ["kept"]
    db.close_now()


async def test_a_write_after_close_raises_store_unavailable(tmp_path: Path) -> None:
    db = opened(tmp_path / "a.db")
    await db.close()
    await db.close()
    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(30):
            await db.write(insert(1))


async def test_close_finishes_writes_that_were_requested_before(tmp_path: Path) -> None:
    db = opened(tmp_path / "a.db")
    gate = Gate()
    hold = asyncio.ensure_future(db.write(held_commit(db, gate)))
    await gate.reached()
    jobs = [hold, *(asyncio.ensure_future(db.write(insert(i))) for i in range(600))]
    await asyncio.sleep(0)
    gate.set()
    db.close_now()
    again = opened(tmp_path / "a.db")
    assert await again.read(values) == list(range(600))
    again.close_now()
    for job in jobs:
        job.cancel()


@pytest.mark.parametrize("there", [[1, 2, 3], [1, 3], []])
async def test_each_returns_which_statements_changed_a_row(
    tmp_path: Path, there: list[int]
) -> None:
    db = opened(tmp_path / "a.db")
    await db.write(lambda tx: [insert(x)(tx) for x in there])
    assert await db.write(
        lambda tx: tx.each("UPDATE t SET x=x+10 WHERE x=?", [(1,), (2,), (3,)])
    ) == [x in there for x in (1, 2, 3)]
    assert await db.read(values) == [x + 10 for x in there]
    assert await db.write(lambda tx: tx.each("DELETE FROM t WHERE x=?", [(11,), (11,)])) == [
        1 in there,
        False,
    ]
    assert await db.write(lambda tx: tx.each("DELETE FROM t", [])) == []
    db.close_now()


# -- durability ------------------------------------------------------------------------------------


class Disk:
    """Counts the syncs of the WAL. Each sync waits for the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.synced, self.error = Gate(), 0, 0
        self.gate.set()
        self._sync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._watched)

    def _watched(self, fd: int) -> None:
        assert os.readlink(f"/proc/self/fd/{fd}").endswith("-wal")
        self.gate.wait_here()
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self._sync(fd)
        self.synced += 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize(
    ("durability", "durable", "synced", "syncs"),
    [
        ("full", True, False, 1),
        ("full", False, False, 0),
        ("process", True, False, 0),
        ("process", False, False, 0),
        ("process", True, True, 1),
    ],
)
async def test_durability_decides_whether_a_commit_waits_for_the_disk(
    tmp_path: Path, disk: Disk, durability: str, durable: bool, synced: bool, syncs: int
) -> None:
    db = opened(tmp_path / "a.db", durability=durability)
    await db.write(insert(1), durable=durable, synced=synced)
    assert disk.synced == syncs
    assert db._writer.execute("PRAGMA journal_mode").get == "wal"
    assert db._writer.execute("PRAGMA synchronous").get == 1, "checkpoints are synced"
    db.close_now()


async def test_other_writes_commit_while_a_durable_write_waits_for_its_sync(
    tmp_path: Path, disk: Disk
) -> None:
    db, other = opened(tmp_path / "a.db"), opened(tmp_path / "a.db", busy_seconds=40.0)
    disk.gate.clear()
    durable = [asyncio.ensure_future(db.write(insert(i))) for i in range(3)]
    await disk.gate.reached()
    late = asyncio.ensure_future(db.write(insert("late")))
    await db.write(insert("same process"), durable=False)
    await other.write(insert("other process"), durable=False)
    assert not any(job.done() for job in (*durable, late))
    disk.gate.set()
    await asyncio.gather(*durable, late)
    assert disk.synced == 2, (
        "the three writes shared one sync, and the late write needed a second one"
    )
    assert set(await db.read(values)) == {0, 1, 2, "late", "same process", "other process"}
    db.close_now()
    other.close_now()


@pytest.mark.parametrize("inline", [False, True])
async def test_a_failed_sync_is_an_outage_and_the_wal_is_checkpointed_afterwards(
    tmp_path: Path, disk: Disk, inline: bool
) -> None:
    db = opened(tmp_path / "a.db", inline=inline)
    disk.error = 5
    with pytest.raises(StoreUnavailable) as e:
        await db.write(insert(1))
    assert "Input/output error" in e.value.message
    disk.error = 0
    await db.write(insert(2))
    copy = apsw.Connection(
        f"file:{tmp_path}/a.db?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    )
    assert copy.execute("SELECT x FROM t").fetchall() == [(1,)], (
        "the contents of the WAL are in the database file before the next write"
    )
    copy.close()
    db.close_now()


async def test_without_wal_support_sqlite_syncs_each_commit(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Without(sqlite_connection.Connection):
        def execute(self, statements: str, *more: Any, **options: Any) -> apsw.Cursor:
            if statements == "PRAGMA journal_mode=WAL":
                statements = "PRAGMA journal_mode"
            return super().execute(statements, *more, **options)

    monkeypatch.setattr(sqlite_connection, "Connection", Without)
    db = opened(tmp_path / "a.db")
    await db.write(insert(1))
    assert (
        db._writer.execute("PRAGMA journal_mode").get,
        db._writer.execute("PRAGMA synchronous").get,
        disk.synced,
    ) == ("delete", 2, 0)
    assert await db.read(values) == [1]
    db.close_now()


async def test_close_syncs_all_commits(tmp_path: Path, disk: Disk) -> None:
    db = opened(tmp_path / "a.db")
    disk.gate.clear()
    first = asyncio.ensure_future(db.write(insert(1)))
    await disk.gate.reached()
    second = asyncio.ensure_future(db.write(insert(2)))
    while await db.read(values) != [1, 2]:  # noqa: ASYNC110 (there is no event for it)
        await asyncio.sleep(0.002)
    disk.gate.set()
    db.close_now()
    assert disk.synced == 2
    await asyncio.gather(first, second)


async def test_a_long_wal_is_checkpointed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHECKPOINT_FRAMES", 50)
    db = opened(tmp_path / "a.db")
    for _ in range(30):
        await db.write(insert(b"x" * 100_000, "big"), durable=False)
    assert (tmp_path / "a.db-wal").stat().st_size < 100 * 4096
    assert (tmp_path / "a.db").stat().st_size > 600 * 4096
    db.close_now()


async def test_a_wal_that_two_processes_write_continuously_is_restarted(
    tmp_path: Path,
) -> None:
    opened(tmp_path / "a.db").close_now()
    code = (
        "import asyncio, sys\n"
        "from penstock.stores import sqlite as store\n"
        "store.CHECKPOINT_FRAMES = store.CHECKPOINT_RETRY_FRAMES = 200\n"
        "async def main():\n"
        "    db = store.Database(sys.argv[1])\n"
        "    for _ in range(300):\n"
        "        await db.write(lambda tx: tx.execute('INSERT INTO big "
        "VALUES(zeroblob(100000))'))\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"  # the last process that closes the file deletes the WAL
        "asyncio.run(main())\n"
    )
    busy = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "a.db")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in busy:
        assert process.stdout is not None
        process.stdout.readline()
    length = (tmp_path / "a.db-wal").stat().st_size
    assert [process.communicate()[0] for process in busy] == [b"", b""]
    assert [process.returncode for process in busy] == [0, 0]
    assert length < 60_000_000 / 3, "the processes wrote 60 MB"


# -- outages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [False, True])
async def test_a_full_disk_is_an_outage_that_writes_no_row_and_can_end(
    tmp_path: Path, inline: bool
) -> None:
    db = opened(tmp_path / "a.db", inline=inline)
    pages = db._writer.execute("PRAGMA page_count").get
    db._writer.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(StoreUnavailable) as e:
        await db.write(lambda tx: [insert(1)(tx), insert(b"x" * 200_000, "big")(tx)])
    assert "does not take writes" in e.value.message
    assert e.value.hint
    assert await db.read(values) == []
    await db.write(insert("small"))
    db._writer.execute("PRAGMA max_page_count=1000000")
    await db.write(lambda tx: [insert(2)(tx), insert(b"x" * 200_000, "big")(tx)])
    assert await db.read(values) == ["small", 2]
    db.close_now()


async def test_a_full_disk_fails_all_writes_of_a_batch(tmp_path: Path) -> None:
    db = opened(tmp_path / "a.db")
    db._writer.execute(f"PRAGMA max_page_count={db._writer.execute('PRAGMA page_count').get + 2}")
    gate = Gate()
    hold = asyncio.ensure_future(db.write(held_commit(db, gate)))
    await gate.reached()
    jobs = [
        asyncio.ensure_future(db.write(work))
        for work in (insert(1), insert(b"x" * 200_000, "big"), insert(3), fails)
    ]
    await asyncio.sleep(0)
    gate.set()
    await hold
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [type(r) for r in results] == [StoreUnavailable] * 4
    assert await db.read(values) == [], "a failed write leaves no row"
    db.close_now()


async def test_a_store_that_becomes_read_only_is_an_outage(tmp_path: Path) -> None:
    db = opened(tmp_path / "a.db")
    await db.write(insert(1))
    db._writer.execute("PRAGMA query_only=1")
    with pytest.raises(StoreUnavailable):
        await db.write(insert(2))
    assert await db.read(values) == [1]
    db._writer.execute("PRAGMA query_only=0")
    await db.write(insert(3))
    db.close_now()


async def test_a_store_locked_by_another_process_is_an_outage_and_not_a_hang(
    tmp_path: Path,
) -> None:
    db = opened(tmp_path / "a.db", busy_seconds=0.05)
    other = apsw.Connection(str(tmp_path / "a.db"))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable):
        await db.write(insert(1))
    other.execute("ROLLBACK")
    await db.write(insert(2))
    assert await db.read(values) == [2]
    other.close()
    db.close_now()


async def test_a_damaged_file_is_an_outage_for_reads_and_writes(tmp_path: Path) -> None:
    db = opened(tmp_path / "a.db")
    await db.write(lambda tx: [insert("x" * 100)(tx) for _ in range(2000)])
    db.close_now()
    _damage(tmp_path / "a.db", 5)
    db = opened(tmp_path / "a.db")
    with pytest.raises(StoreUnavailable):
        await db.write(lambda tx: tx.execute("UPDATE t SET x=x||'y'").fetchall())
    with pytest.raises(StoreUnavailable):
        await db.read(values)
    db.close_now()


# -- invalid files ---------------------------------------------------------------------------------


def test_a_file_without_write_permission_is_unreachable_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "a.db").close_now()

    class Refused(apsw.Connection):
        def __init__(self, path: str, **more: Any) -> None:
            super().__init__(path, flags=apsw.SQLITE_OPEN_READONLY)

    # SQLite falls back to read-only if the file mode forbids writing. Root may write any file.
    monkeypatch.setattr(sqlite_connection, "Connection", Refused)
    with pytest.raises(Unreachable, match=r"cannot (open|prepare) the store") as e:
        opened(tmp_path / "b.db")
    assert e.value.hint
    assert e.value.exit_code == 4


def test_a_directory_instead_of_the_file_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="cannot open the store"):
        Database(str(tmp_path))
    (tmp_path / "file").write_text("x")
    with pytest.raises(Unreachable, match="cannot open the store"):
        Database(str(tmp_path / "file" / "a.db"))


def test_a_file_that_is_not_a_database_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"these are my notes, not a database\n" * 100)
    with pytest.raises(Unreachable, match="cannot open the store"):
        Database(str(path))
    assert path.read_bytes() == b"these are my notes, not a database\n" * 100


def test_a_database_of_another_program_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "firefox.db"
    with sqlite3.connect(path) as foreign:
        foreign.execute("CREATE TABLE bookmarks(x)")
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(Unreachable, match="not one of Penstock's"):
        Database(str(path))
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["firefox.db"]


def test_a_truncated_file_is_unreachable(tmp_path: Path) -> None:
    opened(tmp_path / "a.db").close_now()
    data = (tmp_path / "a.db").read_bytes()
    (tmp_path / "a.db").write_bytes(data[: len(data) // 3])
    with pytest.raises(Unreachable):
        opened(tmp_path / "a.db")


@pytest.mark.parametrize(("change", "age"), [(1, "A newer release"), (-1, "older release")])
def test_tables_of_another_version_are_refused_and_unchanged(
    tmp_path: Path, change: int, age: str
) -> None:
    db = Database(str(tmp_path / "a.db"))
    db.part("test", "CREATE TABLE t(x)")
    stored = newest() + change
    db.write_now(lambda tx: tx.execute("UPDATE part SET version=?", (stored,)))
    db.close_now()
    db = Database(str(tmp_path / "a.db"))
    for part in ("test", "other"):
        with pytest.raises(StoreRefused, match=f"store version {stored}.*{age}") as caught:
            db.part(part, "CREATE TABLE t(x, y)")
        assert caught.value.exit_code == 3
    assert [row[1] for row in db._writer.execute("PRAGMA table_info(t)")] == ["x"]
    db.close_now()


def test_a_failed_schema_creates_no_tables(tmp_path: Path) -> None:
    db = Database(str(tmp_path / "a.db"))
    with pytest.raises(Unreachable, match="cannot prepare"):
        db.part("test", "CREATE TABLE t(x); CREATE TABLE oops(")
    db.part("test", "CREATE TABLE t(x)")
    db.close_now()


async def test_several_processes_can_open_a_new_file_together(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom penstock.stores.sqlite import Database\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "for i in range(20):\n    db = Database(f'{sys.argv[1]}/{i}.db', inline=True); "
        "db.part('p', 'CREATE TABLE t(x)')\n"
        "    db.write_now(lambda tx: tx.execute('INSERT INTO t VALUES(1)')); db.close_now()\n"
    )
    start = __import__("time").time() + 1.0
    some = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(start)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in some:
        _, err = await asyncio.to_thread(process.communicate, None, 40)
        assert process.returncode == 0, err[-600:]
    for i in range(20):
        with sqlite3.connect(tmp_path / f"{i}.db") as c:
            assert c.execute("SELECT count(*) FROM t").fetchone() == (3,)
        c.close()


# -- integrity -------------------------------------------------------------------------------------


def _damage(path: Path, page: int) -> None:
    """Damage the header of a page, as a bad sector or a torn write does.

    SQLite has no checksums, so it does not detect a changed byte inside a value.
    """
    with open(path, "r+b") as f:
        f.seek(16)
        size = int.from_bytes(f.read(2), "big")
        f.seek(size * page)
        f.write(b"\xff" * 16)


async def test_the_check_of_an_undamaged_store_is_empty(tmp_path: Path) -> None:
    db = opened(tmp_path / "a.db")
    await db.write(lambda tx: [insert(i)(tx) for i in range(5000)])
    assert db.check() == []
    db.close_now()
    assert Database(":memory:").check() == []


async def test_the_check_finds_damage(tmp_path: Path) -> None:
    db = opened(tmp_path / "a.db")
    await db.write(lambda tx: [insert("x" * 100)(tx) for _ in range(2000)])
    db.close_now()
    _damage(tmp_path / "a.db", 5)
    db = opened(tmp_path / "a.db")
    assert db.check() != []
    db.close_now()


# -- file systems and versions ---------------------------------------------------------------------

MOUNTS = """22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:35 / /home rw shared:2 - nfs4 server:/home rw,vers=4.2
41 40 0:36 / /home/me/local rw - xfs /dev/sdb1 rw
42 22 0:37 / /srv/with\\040space rw - cifs //nas/x rw
43 22 0:38 / /srv/donn\u00e9es rw master:3 shared:4 - fuse.sshfs host: rw
44 22 0:39 / /mnt/over rw - ext4 /dev/sdc1 rw
45 44 0:40 / /mnt/over rw - 9p share rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/penstock/state.db", "ext4"),
        ("/home/me/state.db", "nfs4"),
        ("/home", "nfs4"),
        ("/homestead/state.db", "ext4"),
        ("/home/me/local/state.db", "xfs"),
        ("/srv/with space/state.db", "cifs"),
        ("/srv/donn\u00e9es/state.db", "fuse.sshfs"),
        ("/mnt/over/state.db", "9p"),
    ],
)
def test_the_file_system_of_a_path_is_the_innermost_and_latest_mount(
    tmp_path: Path, path: str, kind: str
) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTS, encoding="utf-8")
    assert file_system_of(Path(path), str(mountinfo)) == kind


def test_the_file_system_is_unknown_if_mounts_cannot_be_read(tmp_path: Path) -> None:
    assert file_system_of(tmp_path, str(tmp_path / "none")) == ""


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p"])
def test_a_network_file_system_is_refused_before_any_file_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(sqlite_checks, "file_system_of", lambda path: kind)
    with pytest.raises(Unreachable, match=f"network file system \\({kind}\\)") as e:
        Database(str(tmp_path / "sub" / "a.db"))
    assert "local disk" in e.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ((3, 6, 23), False),
        ((3, 7, 0), True),
        ((3, 40, 1), True),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 52, 0), False),
        ((4, 0, 0), False),
    ],
)
def test_the_wal_reset_bug_is_detected_by_version(version: tuple[int, ...], has: bool) -> None:
    assert has_wal_reset_bug(version) is has


def test_the_installed_sqlite_does_not_have_the_wal_reset_bug() -> None:
    assert not has_wal_reset_bug(sqlite_checks.sqlite_version())


def test_with_the_wal_reset_bug_a_second_writer_is_refused_until_the_first_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_checks, "sqlite_version", lambda: (3, 40, 1))
    first = Database(str(tmp_path / "a.db"))
    with pytest.raises(Unreachable, match="WAL-reset bug"):
        Database(str(tmp_path / "a.db"))
    other = Database(str(tmp_path / "b.db"))
    first.close_now()
    Database(str(tmp_path / "a.db")).close_now()
    other.close_now()


def test_without_the_wal_reset_bug_several_processes_may_write(tmp_path: Path) -> None:
    a, b = opened(tmp_path / "a.db", inline=True), opened(tmp_path / "a.db", inline=True)
    a.write_now(insert(1))
    b.write_now(insert(2))
    assert a.read_now(values) == [1, 2]
    a.close_now()
    b.close_now()
    assert os.listdir(tmp_path) == ["a.db"]
