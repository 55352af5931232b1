"""Start, stop and status of servers. See `servers` for the details of each server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .processes import end, identity, spawn
from .servers import Server
from .state import locked
from .trouble import ServiceError, say

LOG_LINES = 25  # last lines of the log that are shown after a failure
STOPPING = 30.0  # seconds from the stop signal to SIGKILL


@dataclass(frozen=True)
class Status:
    name: str
    state: str  # running | stopped | not answering
    url: str | None
    pid: int | None
    version: str | None


def closure(names: Iterable[str], everything: dict[str, Server]) -> list[Server]:
    """Return these servers and the servers that they need, in the order of their start."""
    wanted = set(names)
    for server in reversed(everything.values()):
        if server.name in wanted:
            wanted.update(server.needs)
    return [server for server in everything.values() if server.name in wanted]


def up(server: Server, *, borrowed: bool = False) -> bool:
    """Start a server and wait until it is ready. Return False if it was already running.

    A borrowed server is stopped by the tests that started it. It is kept if a user starts it too.
    """
    with locked(server.place.lock):
        if server.place.running():
            _wait(server)
            if not borrowed:
                server.place.note(borrowed=False)
            return False
        began = time.monotonic()
        server.place.directory.mkdir(parents=True, exist_ok=True)
        command = server.command()
        server.place.log.write_bytes(b"")
        # These variables configure Penstock or clients. Servers must not see them.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PENSTOCK_", "RABBITMQ_", "PG", "AWS_"))
        } | server.environment()
        pid = spawn(
            command,
            environment=environment,
            log=server.place.log,
            directory=server.data,
            user=server.user,
        )
        server.place.note(pid=pid, began=identity(pid) or "", version="", borrowed=borrowed)
        version = _wait(server)
        server.place.note(version=version)
        say(f"{server.name} {version} is ready after {time.monotonic() - began:.1f} s")
        return True


def _wait(server: Server) -> str:
    until = time.monotonic() + server.patience
    while True:
        trouble = version = ""
        try:
            version = server.version()
        except Exception as error:  # clients raise various exceptions until the server is ready
            trouble = f"{type(error).__name__}: {error}"
        if (
            version and server.place.running()
        ):  # otherwise another server has answered on the same port
            return version
        if not server.place.running():
            raise _failed(server, "ended while it was starting")
        if time.monotonic() > until:
            raise _failed(
                server,
                f"did not answer within {server.patience:.0f} s ({trouble.splitlines()[0][:200]})",
            )
        time.sleep(0.05)


def _failed(server: Server, what: str) -> ServiceError:
    lines = (
        server.place.log.read_text(encoding="utf-8", errors="replace").splitlines()
        if server.place.log.exists()
        else []
    )
    for line in lines[-LOG_LINES:]:
        say(f"{server.name}: {line}")
    return ServiceError(
        f"{server.name} {what}",
        f"read {server.place.log}, then run ./dev services restart {server.name} "
        f"(with new data: ./dev services down --wipe {server.name})",
    )


def down(server: Server, *, kill: bool = False, wipe: bool = False) -> bool:
    """Stop the process that `up` has recorded, and wait. Return False if it was not running."""
    with locked(server.place.lock):
        running = server.place.running()
        noted = server.place.noted()
        if running:
            end(
                noted.pid,
                noted.began,
                signal.SIGKILL if kill else server.stop_signal,
                patience=STOPPING,
            )
            server.place.note(pid=0, began="")
        if wipe:
            server.place.wipe()
        return running


def status(everything: Sequence[Server]) -> list[Status]:
    found = []
    for server in everything:
        noted = server.place.noted()
        if not server.place.running():
            found.append(
                Status(server.name, "stopped", server.url() if noted.ports else None, None, None)
            )
            continue
        try:
            state, version = "running", server.version()
        except ImportError:  # the client is not installed, so only the process can be checked
            state, version = "running", noted.version
        except Exception:
            state, version = "not answering", noted.version
        found.append(Status(server.name, state, server.url(), noted.pid, version))
    return found
