"""Upgrade of a PostgreSQL store: commands refuse an older store, and `migrate` old workers."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.next_release import build
from tests.releases import ReleasedProject
from tests.servers import Handle
from tests.stores.test_postgres_release_fixture import restored

from penstock import __version__
from penstock.stores.migrations.versions import newest

pytestmark = pytest.mark.server("postgres")
NOW, NEXT = newest(), newest() + 1


class Both:
    """One database, used by this release and by the next one, from different machines.

    Each has its own state directory, so the lock files of one are not visible to the other.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        stores = {f"PENSTOCK_{name}_URL": url for name in ("BROKER", "LEDGER", "CLAIMS", "PAGES")}
        path = str(build(folder / "build"))
        self.now = ReleasedProject("0.1.0", "postgres", folder / "now", **stores)
        self.next = ReleasedProject("0.1.0", "postgres", folder / "next", PYTHONPATH=path, **stores)

    def ask(self, query: str, name: str = "test") -> list[Any]:
        with psycopg.connect(
            self.url, autocommit=True, application_name=name, options="-c search_path=fixture"
        ) as connection:
            found = connection.execute(query.encode())
            return found.fetchall() if found.description else []

    def version(self) -> int:
        found: int = self.ask("SELECT version FROM part WHERE name='store'")[0][0]
        return found

    async def worker(self, *args: str) -> asyncio.subprocess.Process:
        """Start a worker of this release, and wait until it has taken the lock of a sink."""
        holders = "SELECT token FROM holder ORDER BY token"
        before = self.ask(holders)
        process = await self.now.start("run", *args)
        while self.ask(holders) == before:
            assert process.returncode is None, (await process.communicate())[1].decode()
            await asyncio.sleep(0.05)
        return process


@pytest.fixture
def both(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Both]:
    with restored(server("postgres").url, "0.1.0") as url:
        made = Both(url, tmp_path)
        asyncio.run(made.now.penstock("migrate"))
        yield made


async def test_every_command_refuses_an_older_schema_until_it_is_migrated(both: Both) -> None:
    before = await both.now.status()
    for command in (["run"], ["status"], ["push", "http://127.0.0.1:23301/p/1"]):
        _, err = await both.next.command(*command, code=3)
        assert f"has store version {NOW}, and this release needs version {NEXT}" in err
        assert "penstock migrate" in err
    out = await both.next.penstock("migrate", "--check", code=3)
    assert f"store version {NOW} → {NEXT}" in out
    assert "count the visits of each event" in out
    (store,) = json.loads(await both.next.penstock("migrate", "--json"))["stores"]
    assert store["migrated"] is True
    assert store["backup"] is None
    assert store["estimate"]["rows"] == both.ask("SELECT count(*) FROM event")[0][0]
    assert store["estimate"]["bytes"] > 0
    assert "nothing to do" in await both.next.penstock("migrate", "--check")
    assert both.ask("SELECT count(*) FROM event WHERE visits IS DISTINCT FROM n") == [(0,)]
    assert await both.next.status() == before

    for command in (["run"], ["migrate"]):
        _, err = await both.now.command(*command, code=3)
        assert f"has store version {NEXT}, and this release knows only version {NOW}" in err


async def test_a_worker_of_another_machine_refuses_the_migration(both: Both) -> None:
    worker = await both.worker()
    try:
        _, err = await both.next.command("migrate", code=3)
        assert f"pid {worker.pid} on host {socket.gethostname()[:15]}" in err
        assert f"release {__version__}" in err
        waiting = await both.next.start("migrate", "--wait")
        assert waiting.stderr is not None
        assert f"pid {worker.pid}" in (await waiting.stderr.readline()).decode()
        worker.send_signal(signal.SIGTERM)
        out, _ = await waiting.communicate()
        assert waiting.returncode == 0
        assert b"was migrated" in out
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.communicate()
    assert both.version() == NEXT


async def test_a_connection_of_release_0_1_0_refuses_the_migration(both: Both) -> None:
    with psycopg.connect(both.url, application_name="penstock") as old:
        _, err = await both.next.command("migrate", code=3)
        assert f"server process id {old.info.backend_pid} on host 127.0.0.1" in err
        assert "an earlier release" in err
    name = f"penstock 0.1.5 v{NOW} 00000000 17@host"  # of another namespace
    with psycopg.connect(both.url, application_name=name):
        await both.next.penstock("migrate")


@pytest.mark.parametrize(("until_idle", "code"), [(False, 0), (True, 3)])
async def test_a_worker_stops_when_the_store_version_changes(
    both: Both, until_idle: bool, code: int
) -> None:
    for topic in ("requests", "records"):
        await both.now.penstock("topics", "resume", topic)
    worker = await both.worker(*["--until-idle"] * until_idle)
    try:
        both.ask(f"UPDATE part SET version={NEXT} WHERE name='store'")
        _, err = await worker.communicate()
        assert worker.returncode == code
        assert f"to store version {NEXT}. This worker knows version {NOW}" in err.decode()
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
