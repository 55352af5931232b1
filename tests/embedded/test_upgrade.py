"""Upgrade of an SQLite store: `penstock migrate`, the automatic migration, and live workers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.next_release import build
from tests.releases import ReleasedProject

from penstock import __version__
from penstock.locks import FileLock, holder_alive
from penstock.stores.migrations.versions import newest

NOW, NEXT = newest(), newest() + 1


class Both:
    """One project folder, used by this release and by the next one."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder / "project"
        self.now = ReleasedProject("0.1.0", "embedded", self.folder, **environment)
        self.next = ReleasedProject(
            "0.1.0", "embedded", self.folder, PYTHONPATH=str(build(folder / "next")), **environment
        )
        self.file = self.folder / ".penstock" / "penstock.db"
        self.backup = self.file.with_name(f"penstock.db.before-v{NEXT}")

    def ask(self, query: str, file: Path | None = None) -> list[Any]:
        connection = apsw.Connection(str(file or self.file))
        connection.set_busy_timeout(30_000)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    def version(self, file: Path | None = None) -> int:
        found: int = self.ask("SELECT version FROM part WHERE name='store'", file)[0][0]
        return found

    @asynccontextmanager
    async def worker(self, *args: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a worker of this release, and wait until it writes to the sinks."""
        process = await self.now.start("run", *args)
        try:
            while not self._is_running(process.pid):
                assert process.returncode is None, (await process.communicate())[1].decode()
                await asyncio.sleep(0.05)
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    def _is_running(self, pid: int) -> bool:
        """Return True if the worker has ended its start: it holds the lock of a sink."""
        state = self.folder / ".penstock"
        signs = (state / "workers").glob(f"*-{pid}-*.alive")
        return any("store" in sign.read_text() for sign in signs) and any(
            map(holder_alive, (state / "sinks").glob("*.lock"))
        )


@pytest.fixture
def both(tmp_path: Path) -> Both:
    made = Both(tmp_path)
    asyncio.run(made.now.penstock("status"))  # migrates the fixture to the version of this release
    return made


async def test_every_command_migrates_an_older_file_after_a_backup(both: Both) -> None:
    before = await both.now.status()
    out, err = await both.next.command("events", "ls", "--json")
    assert json.loads(out)["events"]
    assert len(err.splitlines()) == 1
    assert f"migrated from store version {NOW} to {NEXT}" in err
    assert str(both.backup) in err
    assert both.ask("SELECT count(*) FROM event WHERE visits IS NOT n") == [(0,)]
    assert await both.next.status() == before
    _, err = await both.next.command("status")
    assert err == ""
    assert not list(both.file.parent.glob("*.part*"))
    assert not list(both.file.parent.glob("*.migrating"))

    # Downgrade: the backup replaces the file.
    for file in both.file.parent.glob("penstock.db-*"):
        file.unlink()
    shutil.copy(both.backup, both.file)
    assert await both.now.status() == before


async def test_commands_that_start_together_migrate_once(both: Both) -> None:
    found = await asyncio.gather(*(both.next.command("status") for _ in range(3)))
    assert "".join(err for _, err in found).count("was migrated") == 1
    assert (both.version(), both.version(both.backup)) == (NEXT, NOW)


async def test_migrate_shows_its_plan_and_check_changes_nothing(both: Both) -> None:
    out = await both.next.penstock("migrate", "--check", code=3)
    assert f"store version {NOW} → {NEXT}" in out
    assert "count the visits of each event" in out
    assert "estimate: " in out
    assert "of disk space" in out
    plan = json.loads(await both.next.penstock("migrate", "--check", "--json", code=3))
    (store,) = plan["stores"]
    rows = both.ask("SELECT count(*) FROM event")[0][0]
    assert (store["from"], store["to"], store["needed"]) == (NOW, NEXT, True)
    assert store["estimate"]["rows"] == rows
    assert store["estimate"]["bytes"] > both.file.stat().st_size
    assert store["backup"] == str(both.backup)
    assert store["other_workers"] == []
    assert both.version() == NOW
    assert not both.backup.exists()

    out = await both.next.penstock("migrate")
    assert out.splitlines()[-1].startswith(
        f"{both.file} was migrated from store version {NOW} to {NEXT} in "
    )
    assert (both.version(), both.version(both.backup)) == (NEXT, NOW)
    assert "nothing to do" in await both.next.penstock("migrate", "--check")
    again = json.loads(await both.next.penstock("migrate", "--json"))
    assert again["stores"][0]["needed"] is False


async def test_migrate_without_a_store_has_nothing_to_do(both: Both) -> None:
    out = await both.next.penstock("migrate", "--check", "--state", "elsewhere")
    assert "there is no store yet" in out
    assert not (both.folder / "elsewhere").exists()


async def test_a_newer_store_is_refused_by_every_command(both: Both) -> None:
    await both.next.penstock("migrate")
    for command in ("status", "migrate", "run"):
        _, err = await both.now.command(command, code=3)
        assert f"has store version {NEXT}, and this release knows only version {NOW}" in err
        assert "Try:" in err
    assert both.version() == NEXT


async def test_a_full_disk_refuses_the_migration_before_any_change(both: Both) -> None:
    # The file is sparse: the blocks do not exist, but a copy would need them.
    wal = Path(f"{both.file}-wal")
    free = shutil.disk_usage(both.folder).free
    both.ask("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(both.file, "r+b") as f:
        size = f.seek(0, os.SEEK_END)
        f.truncate(free + (1 << 30))
    _, err = await both.next.command("status", code=3)
    assert "of disk space with its backup" in err
    assert not both.backup.exists()
    os.truncate(both.file, size)
    assert not wal.exists() or wal.stat().st_size == 0
    assert both.version() == NOW


async def test_ctrl_c_ends_a_run_that_waits_for_another_migration(both: Both) -> None:
    lock = FileLock(f"{both.file}.migrating")
    assert lock.try_acquire()
    running = await both.next.start("run")
    assert running.stderr is not None
    try:
        line = (await running.stderr.readline()).decode()
        assert "another process migrates" in line
        running.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(running.wait(), 10.0) == 130
    finally:
        lock.release()
        if running.returncode is None:
            running.kill()
        await running.communicate()
    assert both.version() == NOW


# -- workers ---------------------------------------------------------------------------------------


async def test_a_live_worker_refuses_the_migration_until_it_has_stopped(both: Both) -> None:
    async with both.worker() as worker:
        for command in (["status"], ["migrate"]):
            _, err = await both.next.command(*command, code=3)
            assert f"pid {worker.pid} on host {socket.gethostname()[:40]}" in err
            assert f"release {__version__}" in err
            assert "penstock migrate --wait" in err
        (store,) = json.loads(await both.next.penstock("migrate", "--check", "--json", code=3))[
            "stores"
        ]
        assert store["other_workers"][0]["process"] == f"pid {worker.pid}"
        assert both.version() == NOW

        waiting = await both.next.start("migrate", "--wait")
        assert waiting.stderr is not None
        line = (await waiting.stderr.readline()).decode()
        assert f"waiting for pid {worker.pid} on host" in line
        worker.send_signal(signal.SIGTERM)
        out, _ = await waiting.communicate()
        assert waiting.returncode == 0
        assert b"was migrated" in out
        assert await worker.wait() == 0
    assert both.version() == NEXT


async def test_a_lock_of_an_earlier_release_refuses_the_migration(both: Both) -> None:
    # Release 0.1.0 holds the lock in the same way, and writes an empty status text.
    sign = both.folder / ".penstock" / "workers" / "shop-1-17-0a1b2c.alive"
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        " f.write(' ' * 511); f.flush(); print('held', flush=True); time.sleep(600)",
        str(sign),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        await holder.stdout.readline()
        _, err = await both.next.command("migrate", code=3)
        assert "pid 17 on host shop-1 (an earlier release)" in err
    finally:
        holder.kill()
        await holder.wait()
    await both.next.penstock("migrate")


@pytest.mark.parametrize(
    ("row", "until_idle", "code"), [("store", False, 0), ("migration to", True, 3)]
)
async def test_a_worker_stops_when_the_store_version_changes(
    both: Both, row: str, until_idle: bool, code: int
) -> None:
    for topic in ("requests", "records"):
        await both.now.penstock("topics", "resume", topic)
    async with both.worker(*["--until-idle"] * until_idle) as worker:
        # The worker cannot finish its work, because its tables have changed.
        both.ask(
            f"BEGIN IMMEDIATE; INSERT OR REPLACE INTO part VALUES('{row}', {NEXT});"
            "ALTER TABLE event RENAME TO happening; ALTER TABLE claim RENAME TO ticket; COMMIT"
        )
        _, err = await worker.communicate()
        assert worker.returncode == code
        assert f"to store version {NEXT}. This worker knows version {NOW}" in err.decode()


async def test_a_worker_stops_when_the_version_of_its_broker_changes(tmp_path: Path) -> None:
    ledger, broker = f"sqlite:{tmp_path}/ledger.db", tmp_path / "broker.db"
    both = Both(
        tmp_path,
        PENSTOCK_LEDGER_URL=ledger,
        PENSTOCK_CLAIMS_URL=ledger,
        PENSTOCK_PAGES_URL=f"file:{tmp_path}/pages",
        PENSTOCK_BROKER_URL=f"sqlite:{broker}",
    )
    async with both.worker() as worker:
        both.ask(f"INSERT OR REPLACE INTO part VALUES('store', {NEXT})", broker)
        _, err = await asyncio.wait_for(worker.communicate(), 30.0)
        assert worker.returncode == 0
        assert f"another release changes {broker} to store version {NEXT}" in err.decode()
