"""Sinks that cannot be opened, fail later, do not answer, or have a bug."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import (
    SHOP,
    Done,
    Project,
    Running,
    Site,
    Target,
    free_port,
    product,
    wait_for,
)
from tests.e2e.silent_servers import BlackHole, Relay
from tests.servers import Handle

from penstock.testing.web import Reply, Request
from penstock.testing.wire import reply

AT_START = 10.0  # seconds: limit of the issue for a sink that cannot be opened
AT_END = 2.0  # seconds: limit of the issue for Ctrl-C
PLUGIN = '''
"""A sink with a bug that a file switches off."""
from pathlib import Path


class Sink:
    def __init__(self, name):
        self.name, self.notice, self.file = name, "", Path("plugin.out")

    def open(self, position, mark):
        if Path("bug-in-open").exists():
            raise KeyError("the key of the bug in open")
        return mark

    def write(self, rows):
        with open("writes", "a") as f:
            f.write("x")
        if Path("bug-in-write").exists():
            raise KeyError("the key of the bug in write")
        with self.file.open("ab") as f:
            f.write(b"".join(row.body + b"\\n" for row in rows))
        return str(rows[-1].n)

    def close(self):
        pass


def open_sink(url, options, base):
    if Path("bug-in-maker").exists():
        raise KeyError("the key of the bug in the maker")
    return Sink(url)
'''


def write_to(project: Project, sink: str) -> None:
    project.write("shop.py", SHOP.replace("jsonl:products.jsonl", sink))


@pytest.fixture
def black_hole() -> Iterator[BlackHole]:
    made = BlackHole()
    yield made
    made.close()


def ends_at_start(project: Project, *args: str) -> Done:
    """Run, and check that the run ends with exit code 4 in time, with a stored reason."""
    slack = time_of_a_run(project)
    began = time.monotonic()
    done = project.penstock("run", "shop.py", *args)
    took = time.monotonic() - began
    assert done.code == 4, done.output
    assert took < AT_START + slack, f"{took:.1f} s\n{done.output}"
    assert "cannot be opened" in done.err
    assert "Try:" in done.err
    assert project.status()["sinks"][0]["down"], "status gives the reason afterwards"
    return done


def ends_soon(project: Project, running: Running, number: int = signal.SIGINT) -> None:
    slack = time_of_a_command(project)
    began = time.monotonic()
    running.signal(number)
    code = running.wait(30)
    took = time.monotonic() - began
    assert code == 0, running.output
    assert took < AT_END + slack, f"{took:.1f} s\n{running.output}"


def time_of_a_run(project: Project) -> float:
    """Return the seconds of a run with nothing to do, as a measure of a busy machine."""
    project.write("idle.py", SHOP)
    began = time.monotonic()
    project.good("run", "idle.py", "--until-idle", "--state", "idle-state")
    return time.monotonic() - began


def time_of_a_command(project: Project) -> float:
    """Return the seconds of a command that does nothing, as a measure of a busy machine."""
    began = time.monotonic()
    project.good("version")
    return time.monotonic() - began


# -- at the start ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["postgres", "kafka"])
def test_a_run_ends_with_4_if_the_server_of_a_sink_is_dead(project: Project, kind: str) -> None:
    port = free_port()
    write_to(
        project,
        f"postgres://u@127.0.0.1:{port}/db?table=t"
        if kind == "postgres"
        else f"kafka://127.0.0.1:{port}/products",
    )
    done = ends_at_start(project)
    assert str(port) in done.err


@pytest.mark.parametrize("kind", ["postgres", "kafka"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_ends_with_4_if_the_server_of_a_sink_never_answers(
    project: Project, black_hole: BlackHole, kind: str, workers: str
) -> None:
    write_to(
        project,
        f"postgres://u@127.0.0.1:{black_hole.port}/db?table=t&connect_timeout=60"
        if kind == "postgres"
        else f"kafka://127.0.0.1:{black_hole.port}/products?timeout=60s",
    )
    ends_at_start(project, "--workers", workers)
    assert black_hole.connections


@pytest.mark.parametrize("role", ["source,fetch,extract,sink", "sink"])
def test_a_run_ends_with_4_if_the_directory_of_a_file_sink_is_not_writable(
    project: Project, role: str
) -> None:
    (project.dir / "out").write_text("a file, where a directory should be")
    for sink in ("jsonl:out/a.jsonl", "csv:out/a.csv", "sqlite:out/a.db"):
        write_to(project, sink)
        ends_at_start(project, "--role", role)


def test_a_role_that_writes_no_sink_does_not_open_the_sinks(
    project: Project, target: Callable[..., Target]
) -> None:
    web = target(pages=3)
    write_to(project, f"postgres://u@127.0.0.1:{free_port()}/db?table=t")
    project.push(*web.urls)
    running = project.start("run", "shop.py", "--role", "fetch")
    wait_for(lambda: running.ended or web.lines() >= 3, f"three requests: {running.output}")
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.output


def test_ctrl_c_ends_a_start_that_waits_for_a_sink(project: Project, black_hole: BlackHole) -> None:
    write_to(project, f"postgres://u@127.0.0.1:{black_hole.port}/db?table=t&connect_timeout=60")
    running = project.start("run", "shop.py")
    wait_for(lambda: running.ended or black_hole.connections, f"a connection: {running.output}")
    ends_soon(project, running)


# -- later -----------------------------------------------------------------------------------------


class Pages:
    """Products of a site that answers only after `release`."""

    def __init__(self, site: Site, count: int) -> None:
        self.site, self._replies = site, [asyncio.Event() for _ in range(count)]
        self.urls = [site.serve(f"/p/{n}", self._answer(n)) for n in range(count)]

    def _answer(self, n: int) -> Callable[[Request], Awaitable[Reply]]:
        async def answer(_: Request) -> Reply:
            await self._replies[n].wait()
            return reply(product(n))

        return answer

    def wait_for_requests(self, running: Running) -> None:
        """Wait until every page is requested. The sinks of the run are open then."""
        wait_for(
            lambda: running.ended or all(self.asked().values()),
            f"a request for each page: {running.output}",
        )

    def release(self) -> None:
        for event in self._replies:
            self.site.call(event.set)

    def asked(self) -> dict[str, int]:
        return {url: len(self.site.asked("/p" + url.partition("/p")[2])) for url in self.urls}


@pytest.fixture
def pages(project: Project, site: Site) -> Pages:
    made = Pages(site, 20)
    project.push(*made.urls)
    return made


def skus(count: int = 20) -> list[str]:
    return sorted(f"S-{n}" for n in range(count))


def test_until_idle_gives_up_a_file_that_stays_unwritable_and_loses_nothing(
    project: Project, pages: Pages
) -> None:
    write_to(project, "jsonl:out/products.jsonl")
    project.set(sink_give_up_after="2s")
    running = project.start("run", "shop.py", "--until-idle")
    pages.wait_for_requests(running)
    out = project.dir / "out"
    out.rename(project.dir / "away")
    out.write_text("in the way")
    pages.release()
    assert running.wait() == 4, running.output
    assert "took no rows for 2 s" in running.output
    status = project.status()
    assert status["total"]["success"] == 20
    (sink,) = status["sinks"]
    assert sink["backlog"] == 20
    assert "Not a directory" in sink["down"]
    assert sink["down_since"]
    out.unlink()
    (project.dir / "away").rename(out)
    project.run()
    assert sorted(row["sku"] for row in project.rows("out/products.jsonl")) == skus()
    assert set(pages.asked().values()) == {1}
    assert project.status()["sinks"][0]["down"] is None


def test_ctrl_c_ends_a_run_that_waits_for_a_sink(project: Project, pages: Pages) -> None:
    write_to(project, "jsonl:out/products.jsonl")
    running = project.start("run", "shop.py", "--until-idle")
    pages.wait_for_requests(running)
    out = project.dir / "out"
    out.rename(project.dir / "away")
    out.write_text("in the way")
    pages.release()
    wait_for(lambda: running.ended or "is down" in running.output, running.output)
    ends_soon(project, running)
    assert "Not a directory" in project.status()["sinks"][0]["down"]


class Table:
    """A table on the PostgreSQL server as the sink of a project."""

    def __init__(self, project: Project, handle: Handle, port: int) -> None:
        self.handle, self.name = handle, f"t{project.mark[:12]}"
        url = handle.url.replace(f":{handle.port}/", f":{port}/")
        assert str(port) in url
        write_to(project, f"{url}?table={self.name}&mode=append")

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.handle.url) as db:
            cursor = db.execute(text)
            return cursor.fetchall() if cursor.description else []

    def rows(self) -> list[str]:
        return sorted(sku for (sku,) in self.sql(f"SELECT sku FROM {self.name}"))

    def drop(self) -> None:
        self.sql(f"DROP TABLE IF EXISTS {self.name}")


@pytest.fixture
def table(project: Project, server: Callable[[str], Handle]) -> Iterator[Table]:
    handle = server("postgres")
    made = Table(project, handle, handle.port)
    yield made
    handle.start()
    made.drop()


@pytest.mark.server("postgres")
def test_a_killed_server_of_a_sink_is_waited_for_and_no_row_is_lost_or_repeated(
    project: Project, pages: Pages, table: Table
) -> None:
    running = project.start("run", "shop.py", "--until-idle")
    pages.wait_for_requests(running)
    table.handle.kill()
    pages.release()
    wait_for(lambda: running.ended or "is down" in running.output, f"down: {running.output}")
    assert project.status()["sinks"][0]["down"]
    table.handle.start()
    assert running.wait() == 0, running.output
    assert table.rows() == skus()
    assert set(pages.asked().values()) == {1}
    assert project.status()["sinks"][0]["down"] is None


@pytest.mark.server("postgres")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_until_idle_gives_up_a_killed_server_and_the_next_run_writes_the_rows(
    project: Project, pages: Pages, table: Table, workers: str
) -> None:
    project.set(sink_give_up_after="2s")
    running = project.start("run", "shop.py", "--until-idle", "--workers", workers)
    pages.wait_for_requests(running)
    table.handle.kill()
    pages.release()
    assert running.wait() == 4, running.output
    (sink,) = project.status()["sinks"]
    assert sink["backlog"] == 20
    assert sink["down"]
    table.handle.start()
    project.run()
    assert table.rows() == skus()
    assert set(pages.asked().values()) == {1}


@pytest.mark.server("postgres")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_ends_a_run_whose_sink_stopped_answering_in_a_write(
    project: Project, pages: Pages, table: Table, workers: str
) -> None:
    handle = table.handle
    relay = Relay(handle.port)
    try:
        Table(project, handle, relay.port)  # the same table, through the relay
        running = project.start("run", "shop.py", "--until-idle", "--workers", workers)
        pages.wait_for_requests(running)
        relay.forwards.clear()
        pages.release()
        wait_for(
            lambda: running.ended or project.total()["success"] == 20,
            f"all rows are in the outbox: {running.output}",
        )
        ends_soon(project, running, signal.SIGTERM)
        relay.forwards.set()
        project.run()
        assert table.rows() == skus()
    finally:
        relay.close()


# -- bugs in plug-ins ------------------------------------------------------------------------------


@pytest.fixture
def plugin(project: Project) -> Project:
    """A project whose sink is a plug-in, found by its entry point."""
    project.write("plugins/buggy_sink.py", PLUGIN)
    about = "plugins/buggy_sink-1.0.dist-info"
    project.write(f"{about}/METADATA", "Metadata-Version: 2.1\nName: buggy-sink\nVersion: 1.0\n")
    project.write(f"{about}/entry_points.txt", "[penstock.sinks]\nbuggy = buggy_sink:open_sink\n")
    project.env["PYTHONPATH"] = str(project.dir / "plugins")
    write_to(project, "buggy:somewhere")
    return project


def run_with_bug(project: Project, name: str) -> Running:
    (project.dir / name).touch()
    running = project.start("run", "shop.py", "--until-idle")
    running.wait()
    (project.dir / name).unlink()
    assert running.output.count("Traceback (most recent call last)") == 1, running.output
    assert "buggy_sink.py" in running.output
    assert f"KeyError('the key of the {name.replace('-', ' ')}')" in running.output
    return running


def test_a_bug_in_the_start_of_a_plug_in_shows_its_traceback(plugin: Project) -> None:
    running = run_with_bug(plugin, "bug-in-open")
    assert running.process.returncode == 4, running.output
    assert "bug in the sink: KeyError" in plugin.status()["sinks"][0]["down"]
    plugin.run()
    assert plugin.status()["sinks"][0]["down"] is None


def test_a_bug_in_the_maker_of_a_plug_in_shows_its_traceback(plugin: Project) -> None:
    (plugin.dir / "bug-in-maker").touch()
    running = plugin.start("run", "shop.py", "--until-idle")
    assert running.wait() == 3, running.output
    assert "Traceback (most recent call last)" in running.output
    assert "buggy_sink.py" in running.output


def test_a_bug_in_a_write_of_a_plug_in_shows_its_traceback_and_keeps_the_rows(
    plugin: Project, target: Callable[..., Target]
) -> None:
    web = target(pages=5)
    plugin.set(sink_give_up_after="3s")
    plugin.push(*web.urls)
    running = run_with_bug(plugin, "bug-in-write")
    assert running.process.returncode == 4, running.output
    assert "bug in the sink: KeyError" in plugin.status()["sinks"][0]["down"]
    tries = len((plugin.dir / "writes").read_text())
    assert tries < 12, "the writes are repeated with a back-off"
    plugin.run()
    assert len(plugin.rows("plugin.out")) == 5
