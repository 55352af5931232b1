"""A TCP proxy for fault tests: it can drop a server's answers and cut connections.

It does not interpret the bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

CHUNK = 1 << 16
T = TypeVar("T")


class Proxy:
    """A proxy on loopback in front of one server, while the block runs.

    It has its own thread, because its clients may block the event loop.

    async with Proxy("127.0.0.1", 6379) as proxy:
        ...  # connect to proxy.host, proxy.port
    """

    host = "127.0.0.1"

    def __init__(self, host: str, port: int, *, listen: int = 0) -> None:
        self._target, self.port = (host, port), listen
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._links: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._marker = b""
        self._passed = asyncio.Event()
        self._down = False

    async def __aenter__(self) -> Proxy:
        self._thread.start()
        await self._run_in_thread(self._open())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._run_in_thread(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _run_in_thread(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # -- faults ------------------------------------------------------------------------------------

    async def lose_answer_to(self, marker: bytes) -> None:
        """Drop all answers of the server after the bytes `marker` were sent to it."""
        await self._run_in_thread(self._set(down=False, marker=marker))

    async def passed(self) -> None:
        """Wait until the marker was sent to the server."""
        await self._run_in_thread(self._passed.wait())

    async def cut(self) -> None:
        """Abort all connections and refuse new ones."""
        await self._run_in_thread(self._set(down=True, marker=self._marker))

    async def heal(self) -> None:
        """Accept and forward new connections normally."""
        await self._run_in_thread(self._set(down=False, marker=b""))

    # -- in the thread -----------------------------------------------------------------------------

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._set(down=True, marker=b"")  # this also ends the tasks that wait for data
        await asyncio.gather(*self._tasks)
        await self._server.wait_closed()

    async def _set(self, *, down: bool, marker: bytes) -> None:
        self._down = down
        if marker != self._marker:
            self._marker = marker
            self._passed.clear()
        self._cut_if_down()

    def _cut_if_down(self) -> None:
        if self._down:
            for link in list(self._links):
                for end in link:
                    end.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._down:
                return
            try:
                there, back = await asyncio.open_connection(*self._target)
            except OSError:
                return  # the server is down, so close the client's connection too
            link = (writer, back)
            self._links.add(link)
            self._cut_if_down()  # `cut` may have been called while the connection was made
            try:
                await asyncio.gather(
                    self._pass(reader, back, to_server=True),
                    self._pass(there, writer, to_server=False),
                )
            finally:
                self._links.discard(link)
                back.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, to_server: bool
    ) -> None:
        recent = b""
        try:
            while data := await source.read(CHUNK):
                if not to_server and self._passed.is_set():
                    continue
                if to_server and self._marker:
                    recent = recent[-len(self._marker) :] + data
                    if self._marker in recent:
                        self._passed.set()
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()
