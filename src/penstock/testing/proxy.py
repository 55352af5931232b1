"""A TCP proxy that can misbehave: it loses a server's answers, cuts its connections, and heals. What is said over it, it does not know."""

from __future__ import annotations

import asyncio

CHUNK = 1 << 16


class Proxy:
    """In front of one server, on loopback, for as long as the block lasts.

    async with Proxy("127.0.0.1", 6379) as proxy:
        ...  # connect to proxy.host, proxy.port
    """

    host = "127.0.0.1"

    def __init__(self, host: str, port: int, *, listen: int = 0) -> None:
        self._target, self.port = (host, port), listen
        self._server: asyncio.Server | None = None
        self._links: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._marker = b""
        self._passed = asyncio.Event()
        self._down = False

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()  # which also ends whoever waits for either side
        await asyncio.gather(*self._tasks)
        await self._server.wait_closed()

    # -- faults ------------------------------------------------------------------------------------------------------------

    def lose_answer_to(self, marker: bytes) -> None:
        """As soon as these bytes have gone to the server, nothing that it says comes back."""
        self._marker = marker
        self._passed.clear()

    async def passed(self) -> None:
        """Those bytes have gone to the server."""
        await self._passed.wait()

    def cut(self) -> None:
        """Every connection ends at once, and new ones are refused."""
        self._down = True
        for link in list(self._links):
            for end in link:
                end.transport.abort()

    def heal(self) -> None:
        """New connections work as they should."""
        self._down, self._marker = False, b""
        self._passed.clear()

    # -- the way through ---------------------------------------------------------------------------------------------------

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
                return  # the server is away: so are we
            link = (writer, back)
            self._links.add(link)
            try:
                await asyncio.gather(self._pass(reader, back, asking=True), self._pass(there, writer, asking=False))
            finally:
                self._links.discard(link)
                back.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, asking: bool) -> None:
        recent = b""
        try:
            while data := await source.read(CHUNK):
                if not asking and self._passed.is_set():
                    continue
                target.write(data)
                await target.drain()
                if asking and self._marker:
                    recent = recent[-len(self._marker) :] + data
                    if self._marker in recent:
                        self._passed.set()
        except OSError:
            pass
        finally:
            target.close()
