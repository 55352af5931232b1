"""Real servers for tests: the mark `server("redis")` starts one, the fixture `server` returns it.

See `tools/services` for how servers are run.

A server that is already running is used. A server that the test session started is stopped by it.
Tests are sorted by their servers, and a server that the next test does not need is stopped before
another starts, so that only one large server is in memory at a time. Each worker of pytest-xdist
has separate servers: a fault of one worker cannot fail the tests of another.

Workers take the next test from one list (`--dist load --maxschedchunk 1`). They go through the
servers together, so each worker starts each server about once. The list ends with the shortest
tests, so all workers end at about the same time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from tools.services.control import closure, down, up
from tools.services.servers import SERVERS, Server, servers
from tools.services.state import state_directory
from tools.services.trouble import ServiceError

ORDER = {name: number for number, name in enumerate(SERVERS)}


@dataclass(frozen=True)
class Handle:
    """A running server, for use in a test."""

    _server: Server

    @property
    def url(self) -> str:
        return self._server.url()

    @property
    def port(self) -> int:
        return self._server.port

    def ports(self, name: str) -> int:
        return self._server.ports[name]

    def file(self, name: str) -> Path:
        """Return the path of a file in the data directory of the server."""
        return self._server.data / name

    def start(self) -> None:
        """Start the server and wait until it is ready."""
        up(self._server, borrowed=self._server.place.noted().borrowed)

    def stop(self) -> None:
        down(self._server)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        down(self._server, kill=True)


class _Lending:
    """Servers that this process uses now.

    It holds a shared lock on a file for each server. The last process can lock the file
    exclusively, and stops a borrowed server.
    """

    def __init__(self, worker: str) -> None:
        self.everything = servers(state_directory() / worker)
        self.used: dict[str, IO[str]] = {}
        self.failed: dict[str, ServiceError] = {}

    def lend(self, names: list[str]) -> None:
        """Start the servers `names`. Raise ServiceError if a server cannot start.

        A server that failed once is not tried again.
        """
        wanted = closure(names, self.everything)
        self.give_back(keep={server.name for server in wanted})
        for server in wanted:
            if server.name in self.failed:
                raise self.failed[server.name]
            ours = server.name not in self.used or server.place.noted().borrowed
            if server.name not in self.used:
                held = _users(server)  # closed in give_back
                fcntl.flock(held, fcntl.LOCK_SH)
                self.used[server.name] = held
            try:
                if not server.place.running():
                    up(server, borrowed=ours)
            except ServiceError as error:
                self.failed[server.name] = error
                raise

    def give_back(self, keep: set[str]) -> None:
        for name in sorted(set(self.used) - keep, key=lambda name: -ORDER[name]):
            server = self.everything[name]
            with self.used.pop(name) as held:
                _stop_if_unused(server, held)

    def stop_unused(self) -> None:
        """Stop servers whose session was killed before it could stop them."""
        for server in reversed(self.everything.values()):
            if server.place.running():
                with _users(server) as held:
                    _stop_if_unused(server, held)


def _users(server: Server) -> IO[str]:
    """Open the file that each process locks while it uses the server."""
    server.place.directory.parent.mkdir(parents=True, exist_ok=True)
    return open(server.place.directory.with_suffix(".users"), "a")


def _stop_if_unused(server: Server, held: IO[str]) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another session still uses the server
    if server.place.noted().borrowed:
        down(server)


def _needs(item: pytest.Item | None) -> list[str]:
    names = {name for mark in item.iter_markers("server") for name in mark.args} if item else set()
    unknown = names - set(SERVERS)
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid if item else ''}: no server is called {sorted(unknown)}. "
            f"Servers: {', '.join(SERVERS)}"
        )
    return sorted(names, key=lambda name: ORDER[name])


_lending = pytest.StashKey[_Lending]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_lending] = _Lending(_worker(config))


def _worker(config: pytest.Config) -> str:
    """Return the name of the pytest-xdist worker, or "" without pytest-xdist.

    The environment variable is not used: a pytest that a test starts would inherit it.
    """
    given: dict[str, str] = getattr(config, "workerinput", {})
    return given.get("workerid", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests by their servers.

    Without pytest-xdist, tests without a server come first, for an early first failure. With it,
    they come last, and the slow ones before the rest.
    """
    items.sort(key=_slowest_first if _worker(config) else _server_order)  # stable


def _server_order(item: pytest.Item) -> list[int]:
    return [ORDER[name] for name in _needs(item)]


def _slowest_first(item: pytest.Item) -> tuple[bool, list[int]]:
    servers = _server_order(item)
    return not servers, servers or [not item.get_closest_marker("slow")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    names = _needs(item)
    try:
        item.config.stash[_lending].lend(names)
    except ServiceError as error:
        reason = f"NOT TESTED, no {' and '.join(names)}: {error.message}. Try: {error.hint}"
        if os.environ.get("CI", "").lower() in ("true", "1", "yes"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the servers here: pytest-xdist kills a worker ten seconds after its session."""
    session.config.stash[_lending].give_back(keep=set())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the servers of workers that were killed, in the process that started the workers.

    After Ctrl-C, pytest-xdist kills a worker whose test does not end within ten seconds.
    """
    if not _worker(config):
        for directory in state_directory().glob("gw*"):
            _Lending(directory.name).stop_unused()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Handle]]:
    """Return a function from a server's name to its handle, for example `server("redis").url`.

    The test, its class or its module must be marked with that name. A server that a test stopped
    is started again after the test.
    """
    lending, names = request.config.stash[_lending], _needs(request.node)

    def handle(name: str) -> Handle:
        assert name in names, f"mark the test with pytest.mark.server({name!r})"
        return Handle(lending.everything[name])

    yield handle
    lending.lend(names)
