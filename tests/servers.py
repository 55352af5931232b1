"""Real servers for tests: `pytest.mark.server("redis")` brings one, the fixture `server` hands it
over. How servers are run is in tools/services.

What runs already is used as it is; what a test session started, it stops. Tests are put in the
order of their servers, and a server that the next test does not need is stopped before another
starts, so that only one of the large ones is in memory at a time. A worker of pytest-xdist has
servers of its own: one worker's fault is not another's failure.

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
    """A running server, as a test sees it."""

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
        """One of its own."""
        return self._server.data / name

    def start(self) -> None:
        """Ready when it returns."""
        up(self._server, borrowed=self._server.place.noted().borrowed)

    def stop(self) -> None:
        down(self._server)

    def kill(self) -> None:
        """SIGKILL: it said goodbye to nobody."""
        down(self._server, kill=True)


class _Lending:
    """What this process uses now. A shared lock on a file for as long: whoever comes last and gets
    it alone, stops what was borrowed.
    """

    def __init__(self, worker: str) -> None:
        self.everything = servers(state_directory() / worker)
        self.used: dict[str, IO[str]] = {}
        self.failed: dict[str, ServiceError] = {}

    def lend(self, names: list[str]) -> None:
        """Raises ServiceError, for a server that could not be had the first time again without
        another try.
        """
        wanted = closure(names, self.everything)
        self.give_back(keep={server.name for server in wanted})
        for server in wanted:
            if server.name in self.failed:
                raise self.failed[server.name]
            ours = server.name not in self.used or server.place.noted().borrowed
            if server.name not in self.used:
                server.place.directory.parent.mkdir(parents=True, exist_ok=True)
                held = open(server.place.directory.with_suffix(".users"), "a")  # noqa: SIM115 (closed when it is given back)
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
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # another session still uses it
                if server.place.noted().borrowed:
                    down(server)


def _needs(item: pytest.Item | None) -> list[str]:
    names = {name for mark in item.iter_markers("server") for name in mark.args} if item else set()
    unknown = names - set(SERVERS)
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid if item else ''}: no server is called {sorted(unknown)}; there are {', '.join(SERVERS)}"
        )
    return sorted(names, key=lambda name: ORDER[name])


_lending = pytest.StashKey[_Lending]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_lending] = _Lending(_worker(config))


def _worker(config: pytest.Config) -> str:
    """Its name under pytest-xdist, else "". The environment variable also reaches a pytest that a
    test starts.
    """
    given: dict[str, str] = getattr(config, "workerinput", {})
    return given.get("workerid", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests without a server come first, where a person waits for the first failure. Beside other
    workers they come last, and the slow ones of them before the rest.
    """
    items.sort(key=_longest_first if _worker(config) else _server_order)  # stable


def _server_order(item: pytest.Item) -> list[int]:
    return [ORDER[name] for name in _needs(item)]


def _longest_first(item: pytest.Item) -> tuple[bool, list[int]]:
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
    """Not later: pytest-xdist kills a worker that still runs ten seconds after its session."""
    session.config.stash[_lending].give_back(keep=set())


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Handle]]:
    """`server("redis").url`; the test, its class or its module is marked with the same name. One
    that a test stopped is started again behind it.
    """
    lending, names = request.config.stash[_lending], _needs(request.node)

    def handle(name: str) -> Handle:
        assert name in names, f"mark the test with pytest.mark.server({name!r})"
        return Handle(lending.everything[name])

    yield handle
    lending.lend(names)
