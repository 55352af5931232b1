"""A small HTTP/1.1 server for tests, demo and benchmark, with an access log to count requests.

It is not for production.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self, TypeAlias

from penstock.testing.wire import (
    HTML,
    JSON,
    MAX_HEAD,
    TEXT,
    XML,
    Head,
    Refused,
    Reply,
    Request,
    encode,
    json_reply,
    reply,
    tagged,
    take_body,
    take_head,
)

__all__ = ["HTML", "JSON", "TEXT", "XML", "Entry", "Handler", "Reply", "Request", "Web"]
__all__ += ["ends_dead", "json_reply", "product_page", "read_log", "reply", "tagged", "target"]

MAX_CONNECTIONS = 4096
# Seconds without a complete request, after which a connection is cut.
IDLE_TIMEOUT = 75.0

Handler: TypeAlias = Callable[[Request], Reply | Awaitable[Reply]]


@dataclass(slots=True)
class Entry:
    """One request in the access log, created when the request is complete.

    `status` is 0 if the request is not answered yet, was cut, or its client has disconnected.
    """

    at: int  # µs since the epoch when the request was complete
    port: int
    method: str
    path: str
    query: str
    host: str
    agent: str
    status: int = 0
    answered: int = 0  # µs since the epoch


def read_log(path: str | os.PathLike[str]) -> list[Entry]:
    """Read the log file of a server in another process. An incomplete last line is skipped."""
    with open(path, "rb") as f:
        return [Entry(**json.loads(line)) for line in f if line.endswith(b"\n")]


def _micros() -> int:
    return time.time_ns() // 1000


class Web:
    """`async with Web() as web:` listens on a free port of 127.0.0.1.

    An exception in a handler is answered with 500, and raised when the block ends. `handler`
    answers all requests. Without it, routes do, and other paths get 404. `remember=False` keeps
    counts but no entries, for long runs.
    """

    def __init__(
        self,
        handler: Handler | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        log: str | os.PathLike[str] | None = None,
        remember: bool = True,
    ) -> None:
        self.handler = handler or self._routed
        self.host, self.port = host, port  # address of the first listener
        self._log_path, self._log_fd = log, -1
        self._remember = remember
        self._exact: dict[str, Handler] = {}
        self._prefixes: list[tuple[str, Handler]] = []
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        self.connections: set[_Connection] = set()
        self.entries: list[Entry] = []  # in the order of arrival
        self.counts: Counter[str] = Counter()  # by path
        # Requests that were malformed or too large, and reached no handler.
        self.refused = 0
        self.bugs: list[Exception] = []

    # -- lifetime

    async def __aenter__(self) -> Self:
        if self._log_path is not None:
            self._log_fd = os.open(
                self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        self.port = await self.listen(self.host, self.port)
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for server in self._servers:
            server.close()
        answering = [c.task for c in self.connections if c.task is not None]
        leaving = list(self.connections)
        for connection in leaving:
            connection.transport.abort()
        for connection in leaving:
            await connection.gone.wait()
        await asyncio.gather(*answering, return_exceptions=True)
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1
        if self.bugs and error is None:
            raise ExceptionGroup("a handler of the test web server failed", self.bugs)

    async def listen(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        handler: Handler | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> int:
        """Open another port and return its number. `handler` defaults to that of the first."""
        bound = 0

        def connection() -> _Connection:
            return _Connection(self, handler or self.handler, bound)

        server = await asyncio.get_running_loop().create_server(
            connection, host, port, backlog=1024, ssl=tls
        )
        self._servers.append(server)
        bound = int(server.sockets[0].getsockname()[1])
        return bound

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(5)
            late = loop.time() - IDLE_TIMEOUT
            for connection in [c for c in self.connections if c.task is None and c.since < late]:
                connection.transport.abort()

    # -- routes

    def url(self, path: str = "/", *, host: str = "", port: int = 0) -> str:
        return f"http://{host or self.host}:{port or self.port}{path}"

    def route(self, path: str, answer: Handler | Reply | str | bytes) -> None:
        """Add a route. `path` is exact, or a prefix if it ends in `*` (the longest prefix wins).

        A fixed answer is given only to GET and HEAD.
        """
        handler = (
            answer
            if callable(answer)
            else _fixed(answer if isinstance(answer, Reply) else reply(answer))
        )
        if path.endswith("*"):
            self._prefixes = sorted(
                [*((p, h) for p, h in self._prefixes if p != path[:-1]), (path[:-1], handler)],
                key=lambda item: -len(item[0]),
            )
        else:
            self._exact[path] = handler

    def _routed(self, request: Request) -> Reply | Awaitable[Reply]:
        handler = self._exact.get(request.path) or next(
            (h for prefix, h in self._prefixes if request.path.startswith(prefix)), None
        )
        return handler(request) if handler else reply("not found\n", TEXT, 404)

    # -- the access log

    def enter(self, request: Request) -> Entry:
        entry = Entry(
            _micros(),
            request.port,
            request.method,
            request.path,
            request.query,
            request.host,
            request.headers.get("user-agent", ""),
        )
        self.counts[request.path] += 1
        if self._remember:
            self.entries.append(entry)
        return entry

    def leave(self, entry: Entry, status: int) -> None:
        entry.status, entry.answered = status, _micros() if status else 0
        if self._log_fd >= 0:  # a single write, so other processes see complete lines
            os.write(self._log_fd, json.dumps(asdict(entry)).encode() + b"\n")

    def failed(self, bug: Exception) -> Reply:
        self.bugs.append(bug)
        return reply(f"{type(bug).__name__} in the handler\n", TEXT, 500)


def _fixed(answer: Reply) -> Handler:
    def handler(request: Request) -> Reply:
        return (
            answer
            if request.method in ("GET", "HEAD")
            else reply("GET or HEAD\n", TEXT, 405, allow="GET, HEAD")
        )

    return handler


class _Connection(asyncio.Protocol):
    """Reads complete requests and answers them in order.

    While a request is answered, further requests wait in the kernel's buffer.
    """

    transport: asyncio.Transport

    def __init__(self, web: Web, handler: Handler, port: int) -> None:
        self.web, self.handler, self.port = web, handler, port
        self.loop = asyncio.get_running_loop()
        self.buffer = bytearray()
        self.head: Head | None = None
        self.task: asyncio.Task[None] | None = None
        self.room = asyncio.Event()
        self.room.set()
        self.gone = asyncio.Event()
        self.reading, self.ended, self.keep = True, False, True
        self.since = self.loop.time()

    @property
    def busy(self) -> bool:
        return self.task is not None or not self.room.is_set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # `create_server` passes a stream transport.
        self.transport = transport  # type: ignore[assignment]
        self.web.connections.add(self)
        if len(self.web.connections) > MAX_CONNECTIONS:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.web.connections.discard(self)
        self.room.set()
        self.gone.set()
        if self.task is not None:
            self.task.cancel()

    def eof_received(self) -> bool:
        self.ended = True
        return self.busy  # half-closed: the client still waits for its answer

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()
        self._advance()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.busy:
            self._advance()
        elif self.reading and len(self.buffer) > MAX_HEAD:
            self.reading = False
            self.transport.pause_reading()

    def _advance(self) -> None:
        try:
            while not self.busy and not self.transport.is_closing():
                request = self._next()
                if request is None:
                    break
                self._answer(request)
        except Refused as refused:
            self.web.refused += 1
            self.transport.write(encode(refused.reply, keep=False))
            self.transport.close()
            return
        if not self.busy and not self.transport.is_closing():
            if self.ended:
                self.transport.close()
            elif not self.reading:
                self.reading = True
                self.transport.resume_reading()

    def _next(self) -> Request | None:
        head = self.head
        if head is None:
            head = self.head = take_head(self.buffer)
            if head is None:
                return None
            if head.length != 0 and head.headers.get("expect", "").lower() == "100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not take_body(head, self.buffer):
            return None
        self.head, self.keep = None, head.keep
        self.since = self.loop.time()
        return Request(
            head.method, head.path, head.query, head.headers, bytes(head.body), self.port
        )

    def _answer(self, request: Request) -> None:
        entry = self.web.enter(request)
        made: Reply | Awaitable[Reply]
        try:
            made = self.handler(request)
        except Exception as bug:
            made = self.web.failed(bug)
        if (
            isinstance(made, Reply)
            and not made.delay
            and (made.raw is None or isinstance(made.raw, bytes))
        ):
            self._send(request, made, entry)
        else:
            self.task = self.loop.create_task(self._answer_later(request, made, entry))

    async def _answer_later(
        self, request: Request, made: Reply | Awaitable[Reply], entry: Entry
    ) -> None:
        try:
            try:
                answer = made if isinstance(made, Reply) else await made
            except Exception as bug:
                answer = self.web.failed(bug)
            if answer.delay:
                await asyncio.sleep(answer.delay)
            if answer.raw is not None and not isinstance(answer.raw, bytes):
                async for part in answer.raw:
                    self.transport.write(part)
                    await self.room.wait()
                answer = Reply(answer.status, raw=b"")
            self._send(request, answer, entry)
        except BaseException:
            # The task is cancelled when the client disconnects. The request is logged anyway.
            self.web.leave(entry, 0)
            raise
        finally:
            self.task = None
        self.since = self.loop.time()
        self._advance()

    def _send(self, request: Request, answer: Reply, entry: Entry) -> None:
        # Log before sending, so that a client that has the answer finds the request in the log.
        self.web.leave(entry, 0 if answer.drop else answer.status)
        if answer.drop:
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            self.transport.abort()  # with SO_LINGER 0 this sends a reset
        elif isinstance(answer.raw, bytes):
            self.transport.write(answer.raw)
            self.transport.close()
        else:
            self.transport.write(encode(answer, head_only=request.method == "HEAD", keep=self.keep))
            if not self.keep:
                self.transport.close()


# -- a target in its own process -------------------------------------------------------------------


def ends_dead(n: int, share: float) -> bool:
    """Return True if /p/<n> always answers 404 with this `--dead-share`.

    The dead pages are spread evenly, and are the same in every process.
    """
    return int((n + 1) * share) > int(n * share)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Product {n} · Target</title>
<script type="application/ld+json">{{"@context":"https://schema.org","@type":"Product",\
"sku":"T-{n}","name":"Product {n}",\
"offers":{{"@type":"Offer","price":"{price}","priceCurrency":"EUR"}}}}</script></head>
<body><main data-sku="T-{n}"><h1>Product {n}</h1><p class="price">{price}</p>\
<p class="stock">{stock} in stock</p>
<p>Product {n} of the target that tests fetch; its words and its price follow from its number, \
so every fetch finds the same page.</p></main></body></html>
"""


def product_page(n: int) -> bytes:
    return _PAGE.format(
        n=n, price=f"{5 + n * 37 % 495}.{n * 7 % 100:02d}", stock=n * 13 % 90
    ).encode()


def target(pages: int, *, dead_share: float = 0.0, delay: float = 0.0) -> Handler:
    """Return a handler for /p/0 … /p/<pages-1>, /urls.txt (one URL per line) and robots.txt.

    robots.txt allows all.
    """

    def handler(request: Request) -> Reply:
        if request.path.startswith("/p/"):
            digits = request.path[3:]
            n = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else pages
            if n >= pages or ends_dead(n, dead_share):
                return Reply(404, {"content-type": TEXT}, b"no such product\n", delay)
            return Reply(200, {"content-type": HTML}, product_page(n), delay)
        if request.path == "/urls.txt":
            return reply("".join(f"http://{request.host}/p/{n}\n" for n in range(pages)), TEXT)
        if request.path == "/robots.txt":
            return reply("User-agent: *\nAllow: /\n", TEXT)
        return reply("not found\n", TEXT, 404)

    return handler


async def _serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    parent = os.getppid()
    handler = target(options.pages, dead_share=options.dead_share, delay=options.delay)
    async with Web(
        handler, host=options.host, port=options.port, log=options.log, remember=False
    ) as web:
        print(
            json.dumps(
                {"url": web.url(""), "port": web.port, "pid": os.getpid(), "pages": options.pages}
            ),
            flush=True,
        )
        while not stop.is_set():
            if options.with_parent and os.getppid() != parent:  # the parent process was killed
                break
            try:
                await asyncio.wait_for(stop.wait(), 1)
            except TimeoutError:
                continue


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.testing.web",
        description="A target for kill tests, in its own process.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="port (0 is any free port, the address is printed as one JSON line)",
    )
    parser.add_argument(
        "--pages", type=int, default=5000, help="how many product pages: /p/0, /p/1, …"
    )
    parser.add_argument("--log", help="append one JSON line per request to this file")
    parser.add_argument(
        "--dead-share", type=float, default=0.0, help="this share of the pages always answers 404"
    )
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before every page")
    parser.add_argument(
        "--with-parent",
        action="store_true",
        help="end when the process that started this one has ended",
    )
    asyncio.run(_serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
