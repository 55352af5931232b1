"""The HTTP server of webhooks: the listening socket and the process that listens.

Of several processes with the same address, only one listens. See `endpoint` for the requests, and
`connections` for their limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from penstock.errors import ConfigError, Unreachable
from penstock.intake.connections import Connections, protocol
from penstock.intake.endpoint import MAX_HEAD, Endpoint
from penstock.locks import FileLock
from penstock.ports import Clock, ServedSource

log = logging.getLogger("penstock.serving")
BACKLOG = 1024
KEEP_ALIVE = 30  # seconds that a connection may be idle between two requests
TAKE_OVER = 0.2  # seconds between two tries to get the lock of the listening process, or the port
PATIENCE = 3.0  # seconds in which binding is retried, because an ended process may keep its port


class Listener:
    """Serves the endpoint on one address.

    `run()` is a task that lasts as long as the process. If several processes have the same address,
    the first one serves. Another process takes over when the first one ends.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        host: str,
        port: int,
        connections: Connections,
        timeout: float,
        grace: float,
        lock: Path,
        clock: Clock,
    ) -> None:
        self.endpoint, self.host, self.port = endpoint, host, port
        self._connections, self._timeout, self._grace, self._clock = (
            connections,
            timeout,
            grace,
            clock,
        )
        self._lock = FileLock(lock)

    async def run(self) -> None:
        try:
            if not self._lock.try_acquire():
                log.info(
                    "another process listens on %s already. This one takes over when it ends",
                    where(self.host, self.port),
                )
                while not self._lock.try_acquire():
                    await self._clock.sleep(TAKE_OVER)
            await self.endpoint.declare()
            await self._serve(await self._bound())
        finally:
            self._lock.release()

    async def _bound(self) -> socket.socket:
        """Bind the socket, and retry for `PATIENCE` seconds.

        If the previous process was killed, its port may become free later than its lock.
        """
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return bind(self.host, self.port)
            except Unreachable:
                if time.monotonic() > until:
                    raise
            await self._clock.sleep(TAKE_OVER)

    async def _serve(self, bound: socket.socket) -> None:
        config = uvicorn.Config(
            self.endpoint.app(),
            http=protocol(self._connections, self._timeout, self.endpoint.charge_unreadable),
            ws="none",
            lifespan="off",
            log_config=None,
            # Bad requests are not logged. Otherwise any client could fill the log.
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=max(1, int(self._grace)),
            h11_max_incomplete_event_size=MAX_HEAD,
            backlog=BACKLOG,
        )
        server = _Server(config)
        self.port = bound.getsockname()[1]
        serving = asyncio.create_task(server.serve(sockets=[bound]), name="http")
        log.info(
            "listening on %s: %s",
            where(self.host, self.port),
            ", ".join(
                f"{hook.source.path} ({_signed(hook.source)})"
                for hook in self.endpoint.hooks.values()
            ),
        )
        try:
            await asyncio.shield(serving)
            raise RuntimeError("the HTTP server ended without a request to stop")
        except asyncio.CancelledError:
            # Accept no new connections, and finish the requests in progress.
            server.should_exit = True
            await serving
            raise
        finally:
            bound.close()


def _signed(source: ServedSource) -> str:
    if source.signed:
        return f"{source.signed} signatures"
    return "unsigned, this machine only" if source.local else "UNSIGNED"


def where(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    address = "127.0.0.1" if host == "localhost" else host
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
        bound.listen(BACKLOG)
    except OSError as e:
        bound.close()
        if e.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"serve.host {host} is no address of this machine",
                hint="127.0.0.1, or 0.0.0.0 for all of them",
            ) from None
        reason = "another program listens there" if e.errno == errno.EADDRINUSE else e.strerror
        raise Unreachable(
            f"cannot listen on {where(host, port)}: {reason}",
            hint="another port: -o serve.port=8788, or --port 8788",
        ) from None
    bound.setblocking(False)
    return bound


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the worker. The server ends when its task is cancelled."""
        yield
