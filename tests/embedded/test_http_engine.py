"""The HTTP client with real sockets: normal and hostile servers, proxies, forbidden addresses."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import os
import resource
import socket
import ssl
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import brotli
import pytest
import zstandard

from penstock.model import ErrorClass, Failure
from penstock.net.guard import Guard, parse_allow
from penstock.net.headers import parse_head
from penstock.net.http import CurlFetcher, HttpOptions, parse_proxy
from penstock.ports import Response

Answer = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A raw socket server: the test writes every byte. Counts connections, stores request heads."""

    def __init__(self, answer: Answer | bytes) -> None:
        self.answer = answer
        self.connections = 0
        self.heads: list[bytes] = []
        self.port = 0
        self._request_arrived = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self._request_arrived.set()
                if isinstance(self.answer, bytes):
                    writer.write(self.answer)
                    await writer.drain()
                else:
                    await self.answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError, _Done):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def arrived(self, n: int) -> None:
        """Wait until the server has received `n` requests."""
        while len(self.heads) < n:
            self._request_arrived.clear()
            await self._request_arrived.wait()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


class _Done(Exception):
    """Raised by an answer function to close the connection."""


@contextlib.asynccontextmanager
async def server(
    answer: Answer | bytes, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    s = Server(answer)
    listener = await asyncio.start_server(s.serve, host, 0, ssl=tls, limit=1 << 20, backlog=1024)
    s.port = listener.sockets[0].getsockname()[1]
    try:
        yield s
    finally:
        listener.close()
        s.stop()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def client(
    *ports: int, names: dict[str, list[str]] | None = None, allow: str = "", **options: Any
) -> AsyncIterator[CurlFetcher]:
    async def resolver(host: str, port: int) -> list[str]:
        return (names or {})[host]

    guard = Guard(
        parse_allow(allow or ",".join(f"127.0.0.1:{p}" for p in ports)),
        resolver=resolver if names is not None else None,
    )
    fetcher = CurlFetcher(guard, HttpOptions(**options))
    try:
        yield fetcher
    finally:
        await fetcher.close()
        guard.close()


async def failing(work: Awaitable[object]) -> Failure:
    with pytest.raises(Failure) as caught:
        await work
    return caught.value


def ok(body: bytes, *headers: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
        + b"".join(h + b"\r\n" for h in headers)
        + b"Content-Length: %d\r\n\r\n" % len(body)
        + body
    )


# -- normal servers --------------------------------------------------------------------------------


async def test_a_response_has_status_body_headers_peer_and_times() -> None:
    async with (
        server(
            ok(b"<p>hello</p>", b"X-One: 1", b"x-one: 2", b"Set-Cookie: a=1", b"Set-Cookie: b=2, c")
        ) as s,
        client(s.port) as c,
    ):
        r = await c.fetch(f"http://127.0.0.1:{s.port}/a/../b?q=1#top")
        assert (r.status, r.body, r.http_version) == (200, b"<p>hello</p>", "1.1")
        assert r.url == f"http://127.0.0.1:{s.port}/b?q=1"
        assert r.headers["x-one"] == "1, 2"
        assert r.headers["set-cookie"] == "a=1\nb=2, c"
        assert r.peer == f"127.0.0.1:{s.port}"
        assert 0 < r.first_byte <= r.seconds < 60
        head = s.heads[0].decode()
        assert head.startswith("GET /b?q=1 HTTP/1.1\r\n")
        assert "User-Agent: Penstock/" in head
        assert "Accept-Encoding: gzip, deflate, br, zstd" in head


async def test_connections_are_kept_alive_and_handles_are_reused() -> None:
    async with server(ok(b"x" * 20_000)) as s, client(s.port) as c:
        for _ in range(50):
            assert len((await c.fetch(f"http://127.0.0.1:{s.port}/")).body) == 20_000
        assert s.connections == 1
        await asyncio.gather(*(c.fetch(f"http://127.0.0.1:{s.port}/") for _ in range(20)))
        before = s.connections
        await asyncio.gather(*(c.fetch(f"http://127.0.0.1:{s.port}/") for _ in range(20)))
        assert s.connections == before <= 20


async def test_a_name_is_connected_at_its_checked_address_and_the_connection_reused() -> None:
    async with server(ok(b"hi")) as s, client(s.port, names={"shop.test": ["127.0.0.1"]}) as c:
        for _ in range(3):
            r = await c.fetch(f"http://shop.test:{s.port}/")
        assert r.peer == f"127.0.0.1:{s.port}"
        assert s.connections == 1
        assert f"Host: shop.test:{s.port}".encode() in s.heads[0]


async def test_the_next_address_of_a_name_is_tried_and_the_working_one_is_cached() -> None:
    async with server(ok(b"hi"), host="127.0.0.3") as s:
        async with client(
            names={"shop.test": ["127.0.0.2", "127.0.0.3"]}, allow="127.0.0.0/8:*"
        ) as c:
            for _ in range(2):
                assert (await c.fetch(f"http://shop.test:{s.port}/")).peer == f"127.0.0.3:{s.port}"
        assert s.connections == 1


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd"])
async def test_encoded_bodies_are_decoded(name: str) -> None:
    body = b"<li>kettle</li>" * 20_000
    encode: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "br": brotli.compress,
        "zstd": zstandard.ZstdCompressor().compress,
    }
    async with (
        server(ok(encode[name](body), b"Content-Encoding: " + name.encode())) as s,
        client(s.port) as c,
    ):
        assert (await c.fetch(f"http://127.0.0.1:{s.port}/")).body == body


async def test_a_304_or_a_head_response_has_an_empty_body() -> None:
    async with (
        server(b"HTTP/1.1 304 Not Modified\r\nContent-Encoding: gzip\r\nETag: x\r\n\r\n") as s,
        client(s.port) as c,
    ):
        r = await c.fetch(f"http://127.0.0.1:{s.port}/", headers={"If-None-Match": '"x"'})
        assert (r.status, r.body) == (304, b"")
        assert b'If-None-Match: "x"\r\n' in s.heads[0]
    async with (
        server(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 500\r\n\r\n") as s,
        client(s.port) as c,
    ):
        assert (await c.fetch(f"http://127.0.0.1:{s.port}/", method="HEAD")).body == b""


async def test_a_request_body_is_sent_and_not_repeated_in_the_next_request() -> None:
    bodies: list[bytes] = []

    async def answer(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        size = next(
            (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            ),
            0,
        )
        bodies.append(await reader.readexactly(size))
        writer.write(ok(b"done"))

    async with server(answer) as s, client(s.port) as c:
        url = f"http://127.0.0.1:{s.port}/"
        await c.fetch(
            url,
            method="POST",
            body=b'{"a":1}',
            headers={
                "Content-Type": "application/json",
                "Authorization": "Bearer secret",
                "X-Empty": "",
            },
        )
        await c.fetch(url)
        await c.fetch(url, method="PUT", body=b"put")
        await c.fetch(url, method="DELETE")
        await c.fetch(url, method="POST")
    post, get, put, delete, empty = (h.decode() for h in s.heads)
    assert post.startswith("POST ")
    assert "Authorization: Bearer secret\r\n" in post
    assert "Content-Type: application/json\r\n" in post
    assert "X-Empty:" in post
    assert "Expect" not in post
    assert get.startswith("GET ")
    assert "secret" not in get
    assert "Content-" not in get
    assert put.startswith("PUT ")
    assert "Content-Type" not in put
    assert delete.startswith("DELETE ")
    assert "Content-Length: 0" in empty
    assert bodies == [b'{"a":1}', b"", b"put", b"", b""]


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET /x HTTP/1.1\r\nX:", {}),
        ("TRACE", {}),
        ("CONNECT", {}),
        ("GET", {"Host": "other"}),
        ("GET", {"X": "a\r\nHost: other"}),
        ("GET", {"X\r\nY": "a"}),
        ("GET", {"X:": "a"}),
        ("GET", {"": "a"}),
        ("GET", {"Content-Length": "5"}),
        ("GET", {"Transfer-Encoding": "chunked"}),
        ("GET", {"X": "\ud800"}),
    ],
)
async def test_a_request_with_an_invalid_method_or_header_is_not_sent(
    method: str, headers: dict[str, str]
) -> None:
    async with server(ok(b"")) as s, client(s.port) as c:
        failure = await failing(
            c.fetch(f"http://127.0.0.1:{s.port}/", method=method, headers=headers)
        )
        assert failure.kind is ErrorClass.PERMANENT
        assert s.connections == 0


async def test_interim_responses_and_trailers_are_not_part_of_the_response() -> None:
    raw = (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\nHTTP/1.1 200 OK\r\nX-Real: yes\r\n"
        b"Transfer-Encoding: chunked\r\nTrailer: X-Late\r\n\r\n"
        b"5\r\nhello\r\n0\r\nX-Late: 1\r\n\r\n"
    )
    async with server(raw) as s, client(s.port) as c:
        r = await c.fetch(f"http://127.0.0.1:{s.port}/")
        assert (r.status, r.body, r.headers.get("x-real")) == (200, b"hello", "yes")
        assert "link" not in r.headers


def test_a_malformed_head_is_parsed_leniently_and_a_cut_one_is_refused() -> None:
    lines = [
        b"HTTP/2 204 \r\n",
        b"A: 1\r\n",
        b"b : two\r\n",
        b"Folded: x\r\n",
        b"  y: z\r\n",
        b"nonsense\r\n",
        b"A:2\r\n",
        b"\r\n",
    ]
    assert parse_head(lines) == (204, "2", {"a": "1, 2", "b": "two", "folded": "x y: z"})
    for cut in (
        [],
        [b"HTTP/1.1 200 OK\r\n"],
        [b"HTTP/1.1 200 OK\r\n", b"A: 1\r\n"],
        [b"HTTP/1.1 100 Continue\r\n", b"\r\n", b"HTTP/1.1 200 OK\r\n"],
    ):
        with pytest.raises(Failure, match="ended inside its headers"):
            parse_head(cut)
    assert parse_head([b"HTTP/1.1 abc\r\n", b"\r\n"])[0] == 0


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [b"A: 1\r\n", b"B:2 \r\n", b"C :\t3\r\n", b"D:\r\n", b":e\r\n", b"F: \xe4\x85\r\n"],
        [b"A: 1\r\n", b"a: 2\r\n", b"Set-Cookie: x=1\r\n", b"set-cookie: y=2\r\n"],
        [b"A: 1\n", b"B: 2\r\n"],
        [b"A: 1\r\n", b" more\r\n", b"B: 1\n 2\r\n"],
        [b"A: 1\r2\r\n", b"nothing\r\n", b"\tfolded: x\r\n"],
        [b"Long: " + b"x" * 1000 + b"\r\n"],
    ],
)
def test_a_head_is_parsed_alike_alone_and_after_an_interim_head(fields: list[bytes]) -> None:
    """A single head takes the fast path with cached lines. After an interim head, it does not."""
    lines = [b"HTTP/1.1 200 OK\r\n", *fields, b"\r\n"]
    after_interim = parse_head([b"HTTP/1.1 103 Early Hints\r\n", b"\r\n", *lines])
    assert parse_head(lines) == parse_head(lines) == after_interim


# -- limits ----------------------------------------------------------------------------------------


def _bomb(name: str) -> bytes:
    block = bytes(1 << 20)
    if name == "gzip":
        c = zlib.compressobj(9, wbits=-15)
        return gzip.compress(b"")[:10] + (c.compress(block) + c.flush(zlib.Z_FULL_FLUSH)) * 1024
    if name == "br":
        b = brotli.Compressor(quality=1)
        return b"".join([*(b.process(block) for _ in range(1024)), b.finish()])
    z = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join(z.compress(block) for _ in range(1024)) + z.flush()


@pytest.mark.parametrize("name", ["gzip", "br", "zstd", "gzip, gzip"])
async def test_a_gigabyte_bomb_fails_without_much_memory_and_without_a_stall(
    name: str,
) -> None:
    first, *more = name.split(", ")
    bomb = _bomb(first)
    for _ in more:
        bomb = gzip.compress(bomb)
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            t = time.thread_time()  # does not count the time of other processes
            await asyncio.sleep(0.005)
            worst = max(worst, time.thread_time() - t)

    async with server(ok(bomb, b"Content-Encoding: " + name.encode())) as s, client(s.port) as c:
        # A busy machine may also stall the loop. A stall of the client would occur every time.
        for _ in range(5):
            before, worst = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
            watcher = asyncio.create_task(watch())
            failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))
            watcher.cancel()
            assert failure.kind is ErrorClass.PERMANENT
            assert "decoded body is larger" in failure.reason
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
            if worst < 0.25:  # the aim is 100 ms
                return
        pytest.fail(f"a stall of {worst:.3f} s")


async def test_a_body_over_the_limit_fails_with_and_without_content_length() -> None:
    async def endless(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with server(endless) as s, client(s.port, max_encoded_bytes=300_000) as c:
        failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))
        assert (failure.kind, "too large" in failure.reason) == (ErrorClass.PERMANENT, True)
    async with server(endless) as s, client(s.port, max_decoded_bytes=300_000) as c:
        assert (
            "larger than the limit"
            in (await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))).reason
        )
    async with (
        server(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n") as s,
        client(s.port) as c,
    ):
        assert "too large" in (await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))).reason


@pytest.mark.parametrize(
    "line",
    [
        b"X-%d: " + b"a" * 80 + b"\r\n",
        b"X-%d:\r\n",
        b"X-%d: " + b"a" * 90_000 + b"\r\n",
        b"junk%d" + b"j" * 5000,
    ],
)
async def test_endless_headers_fail_before_the_timeout(line: bytes) -> None:
    async def endless(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for n in range(10**9):
            writer.write(line % n)
            if n % 50 == 0:
                await writer.drain()

    async with server(endless) as s, client(s.port, total_timeout=40.0) as c:
        failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))
        assert "in time" not in failure.reason
        assert failure.kind in (ErrorClass.PERMANENT, ErrorClass.TRANSIENT)


async def test_headers_over_the_limit_are_permanent() -> None:
    async with server(ok(b"x", b"X: " + b"a" * 70_000)) as s, client(s.port) as c:
        failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))
        assert (failure.kind, "headers" in failure.reason) == (ErrorClass.PERMANENT, True)


async def test_each_timeout_has_its_own_reason() -> None:
    async def silent(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await asyncio.sleep(30)

    async def slow(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.05)

    async with server(silent) as s, client(s.port, first_byte_timeout=0.3) as c:
        failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))
        assert (failure.kind, failure.reason) == (
            ErrorClass.TRANSIENT,
            "no first byte in time: 0.3 s",
        )
    async with server(slow) as s, client(s.port, min_rate=1000.0, min_rate_span=0.3) as c:
        failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))
        assert (failure.kind, "minimum rate" in failure.reason) == (ErrorClass.TRANSIENT, True)
    async with server(slow) as s, client(s.port, total_timeout=0.4) as c:
        failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))
        assert (failure.kind, failure.reason) == (
            ErrorClass.TRANSIENT,
            "not finished in time: 0.4 s",
        )
    # With a full backlog, the kernel does not complete the handshake.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(3)]
        for f in fillers:
            f.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                f.connect(("127.0.0.1", port))
        async with client(port, connect_timeout=0.3) as c:
            failure = await failing(c.fetch(f"http://127.0.0.1:{port}/"))
            assert (failure.kind, failure.reason) == (
                ErrorClass.TRANSIENT,
                "no connection in time: 0.3 s",
            )
        for f in fillers:
            f.close()


@pytest.mark.parametrize("short", ["connect_timeout", "total_timeout"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_pause_of_this_process_does_not_count_towards_timeouts(short: str, loop: str) -> None:
    """If this process was suspended, a response that arrived in that time is still read."""
    import uvloop

    def block_the_loop() -> None:
        time.sleep(1.5)

    async def answer(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if short == "total_timeout":
            block_the_loop()
        writer.write(ok(b"in time"))

    options: dict[str, Any] = {short: 1.0}

    async def main() -> None:
        async with server(answer) as s, client(s.port, **options) as c:
            asked = asyncio.create_task(c.fetch(f"http://127.0.0.1:{s.port}/"))
            await asyncio.sleep(0)
            if short == "connect_timeout":
                block_the_loop()
            assert (await asked).body == b"in time"

    (uvloop.run if loop == "uvloop" else asyncio.run)(main())


# -- hostile bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", ErrorClass.TRANSIENT),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", ErrorClass.TRANSIENT),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", ErrorClass.TRANSIENT),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzzzz\r\nhello\r\n",
            ErrorClass.TRANSIENT,
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffffffff\r\n",
            ErrorClass.TRANSIENT,
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\nnot a zip",
            ErrorClass.TRANSIENT,
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n"
            + gzip.compress(b"x" * 500, mtime=0)[:20],
            ErrorClass.TRANSIENT,
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, br, gzip\r\nContent-Length: 1\r\n\r\nx",
            ErrorClass.PERMANENT,
        ),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ErrorClass.PERMANENT),
        (b"\x16\x03\x01\x00\x00", ErrorClass.PERMANENT),
        (b"HTTP/9.9 200 OK\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n", None),
        (b"HTTP/1.1 99999 OK\r\nContent-Length: 0\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello", None),
    ],
)
async def test_broken_responses_are_classified_failures(
    raw: bytes, kind: ErrorClass | None
) -> None:
    async def answer(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(raw)
        await writer.drain()
        raise _Done

    async with server(answer) as s, client(s.port, total_timeout=40.0) as c:
        if kind is None:  # a page or a Failure, nothing worse
            with contextlib.suppress(Failure):
                assert (await c.fetch(f"http://127.0.0.1:{s.port}/")).status < 1000
            return
        failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))
        assert failure.kind is kind, failure.reason


async def test_a_half_closed_connection_fails_with_an_early_end() -> None:
    async def answer(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        writer.write_eof()
        await asyncio.sleep(30)

    async with server(answer) as s, client(s.port, total_timeout=40.0) as c:
        failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))
        assert (failure.kind, failure.reason) == (ErrorClass.TRANSIENT, "the body ended early")


async def test_a_connection_that_the_server_closed_while_idle_is_replaced() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def answer(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(ok(b"x"))
        writers.append(writer)

    async with server(answer) as s, client(s.port) as c:
        await c.fetch(f"http://127.0.0.1:{s.port}/")
        writers[0].close()
        await asyncio.sleep(0.05)
        assert (await c.fetch(f"http://127.0.0.1:{s.port}/")).body == b"x"
        assert s.connections == 2


# -- lifetime --------------------------------------------------------------------------------------


async def test_cancelling_a_fetch_closes_its_connection_and_frees_its_handle() -> None:
    closed = asyncio.Event()

    async def answer(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if b"/slow" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\npart")
            await reader.read()
            closed.set()
            raise _Done
        writer.write(ok(b"fine"))

    async with server(answer) as s, client(s.port) as c:
        task = asyncio.create_task(c.fetch(f"http://127.0.0.1:{s.port}/slow"))
        await s.arrived(1)
        await asyncio.sleep(0.05)  # a part of the body has arrived too
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), 5)
        r = await c.fetch(f"http://127.0.0.1:{s.port}/")
        assert r.body == b"fine"  # without bytes of the cancelled response


@pytest.fixture
def _target_cache_never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checked origin is cached for 1 s. This machine may pause for longer."""
    monkeypatch.setattr("penstock.net.http._TARGET_TTL", 3600.0)


async def fetch_without_task(c: CurlFetcher, url: str) -> Response | BaseException | None:
    future: asyncio.Future[Response | BaseException] = asyncio.get_running_loop().create_future()
    return await future if c.begin(url, {}, future.set_result) is not None else None


@pytest.mark.usefixtures("_target_cache_never_expires")
async def test_begin_requests_only_origins_that_the_guard_has_checked() -> None:
    async with server(ok(b"fine")) as s, client(s.port) as c:
        base = f"http://127.0.0.1:{s.port}"
        assert await fetch_without_task(c, f"{base}/a") is None
        await c.fetch(f"{base}/a")
        got = await fetch_without_task(c, f"{base}/b")
        assert isinstance(got, Response)
        assert (got.url, got.body) == (f"{base}/b", b"fine")
        for other in (
            f"{base}@127.0.0.2/",
            f"{base}#@127.0.0.2/",
            f"{base}\\@127.0.0.2/",
            "http://127.0.0.2/",
            f"http://127.0.0.1:{s.port + 1}/",
            base,
        ):
            assert await fetch_without_task(c, other) is None
        assert len(s.heads) == 2
    assert c.begin(f"{base}/c", {}, print) is None  # closed


@pytest.mark.usefixtures("_target_cache_never_expires")
async def test_begin_tries_the_next_address_if_one_does_not_answer() -> None:
    async with (
        server(ok(b"hi"), host="127.0.0.3") as s,
        client(names={"shop.test": ["127.0.0.3", "127.0.0.2"]}, allow="127.0.0.0/8:*") as c,
    ):
        url = f"http://shop.test:{s.port}/"
        await c.fetch(url)
        c._preferred["shop.test"] = "127.0.0.2"
        got = await fetch_without_task(c, url)
        assert isinstance(got, Response)
        assert (got.body, got.peer) == (b"hi", f"127.0.0.3:{s.port}")


@pytest.mark.usefixtures("_target_cache_never_expires")
async def test_begin_can_be_cancelled_and_reports_a_cancelled_error() -> None:
    closed = asyncio.Event()

    async def answer(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if b"/slow" in head:
            await reader.read()
            closed.set()
            raise _Done
        writer.write(ok(b"fine"))

    async with server(answer) as s, client(s.port) as c:
        url = f"http://127.0.0.1:{s.port}/"
        await c.fetch(url)
        results: list[Response | BaseException] = []
        handle = c.begin(f"{url}slow", {}, results.append)
        assert handle is not None
        await s.arrived(2)
        handle.cancel()
        assert [type(one) for one in results] == [asyncio.CancelledError]
        await asyncio.wait_for(closed.wait(), 5)
        assert isinstance(await fetch_without_task(c, url), Response)
        assert len(results) == 1


async def test_closing_fails_requests_in_progress_and_leaks_no_descriptor() -> None:
    async def silent(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await asyncio.sleep(30)

    async with server(silent) as s:
        before = len(os.listdir("/proc/self/fd"))
        async with client(s.port) as c:
            tasks = [asyncio.create_task(c.fetch(f"http://127.0.0.1:{s.port}/")) for _ in range(5)]
            await s.arrived(5)
            await c.close()
            for t in tasks:
                assert (await failing(t)).kind is ErrorClass.OURS
            assert (await failing(c.fetch(f"http://127.0.0.1:{s.port}/"))).kind is ErrorClass.OURS
        s.stop()
        async with asyncio.timeout(10):
            while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_hundreds_of_concurrent_connections_succeed() -> None:
    async def answer(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await asyncio.sleep(0.2)
        writer.write(ok(b"x" * 1000))

    async with server(answer) as s, client(s.port) as c:
        answers = await asyncio.gather(
            *(c.fetch(f"http://127.0.0.1:{s.port}/{i}") for i in range(400))
        )
        assert {len(r.body) for r in answers} == {1000}


# -- forbidden addresses ---------------------------------------------------------------------------


async def test_forbidden_addresses_are_never_connected() -> None:
    """No spelling of a loopback address that is not on the allow list gets a connection."""
    async with server(ok(b"secret")) as s, server(ok(b"fine")) as allowed:
        names = {
            "inward.test": ["127.0.0.1"],
            "mixed.test": ["8.8.8.8", "127.0.0.1"],
            "v6.test": ["::1"],
            "mapped.test": ["::ffff:127.0.0.1"],
        }
        async with client(allowed.port, names=names) as c:
            for host in (
                "127.0.0.1",
                "2130706433",
                "0x7f.1",
                "017700000001",
                "127.1",
                "0",
                "[::1]",
                "[::ffff:127.0.0.1]",
                "[::ffff:7f00:1]",
                *names,
            ):
                failure = await failing(c.fetch(f"http://{host}:{s.port}/"))
                assert failure.kind is ErrorClass.PERMANENT, (host, failure.reason)
            for url in (
                f"file:///etc/passwd?{s.port}",
                f"gopher://127.0.0.1:{s.port}/",
                f"http://user:pw@127.0.0.1:{s.port}/",
                "http:///",
                "",
                "http://[",
                f"http://127.0.0.1:{s.port}:1/",
            ):
                assert (await failing(c.fetch(url))).kind is ErrorClass.PERMANENT
            assert (await c.fetch(f"http://127.0.0.1:{allowed.port}/")).body == b"fine"
        assert s.connections == 0


async def test_a_name_that_later_resolves_to_a_forbidden_address_is_refused() -> None:
    async with server(ok(b"secret"), host="127.0.0.2") as s:
        answers = iter([["127.0.0.3"], ["127.0.0.2"]])

        async def resolver(host: str, port: int) -> list[str]:
            return next(answers)

        guard = Guard(parse_allow(f"127.0.0.3:{s.port}"), resolver=resolver, ttl=0.0)
        c = CurlFetcher(guard)
        first = await failing(c.fetch(f"http://rebind.test:{s.port}/"))  # no server listens there
        assert first.kind is ErrorClass.TRANSIENT
        c._targets.clear()  # as after 1 s
        second = await failing(c.fetch(f"http://rebind.test:{s.port}/"))
        assert (second.kind, s.connections) == (ErrorClass.PERMANENT, 0)
        await c.close()


async def test_proxy_variables_and_netrc_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with server(ok(b"direct")) as s, server(ok(b"proxied")) as p, client(s.port, p.port) as c:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{p.port}")
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert (await c.fetch(f"http://127.0.0.1:{s.port}/")).body == b"direct"
        assert p.connections == 0
        assert b"authorization" not in s.heads[0].lower()


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-keyout",
            key,
            "-out",
            cert,
            "-subj",
            "/CN=shop.test",
            "-addext",
            "subjectAltName=DNS:shop.test,DNS:proxy.test",
        ],
        check=True,
        capture_output=True,
    )
    return key, cert


def _tls(certificate: tuple[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    return context


async def test_tls_is_verified_by_name_although_the_address_is_connected(
    certificate: tuple[str, str],
) -> None:
    names = {"shop.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]}
    async with server(ok(b"safe"), tls=_tls(certificate)) as s:
        async with client(s.port, names=names, ca_file=certificate[1]) as c:
            for _ in range(3):
                assert (await c.fetch(f"https://shop.test:{s.port}/")).body == b"safe"
            assert s.connections == 1
            failure = await failing(c.fetch(f"https://other.test:{s.port}/"))
            assert (failure.kind, failure.reason) == (ErrorClass.PERMANENT, "bad TLS certificate")
        async with client(s.port, names=names) as c:
            assert (
                await failing(c.fetch(f"https://shop.test:{s.port}/"))
            ).kind is ErrorClass.PERMANENT
        assert len(s.heads) == 3


async def test_https_to_a_plain_http_server_is_permanent() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with client(port) as c:
        failure = await failing(c.fetch(f"https://127.0.0.1:{port}/"))
        assert (failure.kind, failure.reason) == (ErrorClass.PERMANENT, "the TLS handshake failed")
    listener.close()


# -- proxies ---------------------------------------------------------------------------------------


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


async def _tunnel(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
) -> None:
    up_reader, up_writer = await asyncio.open_connection(host, port)
    try:
        await asyncio.gather(_pipe(reader, up_writer), _pipe(up_reader, writer))
    finally:
        up_writer.close()
    raise _Done


async def _http_proxy(
    head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    method, target, _ = head.split(b" ", 2)
    if method != b"CONNECT":
        writer.write(ok(b"by absolute URL"))
        return
    if b"Proxy-Authorization" not in head:
        writer.write(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
        return
    host, _, port = target.decode().rpartition(":")
    writer.write(b"HTTP/1.1 200 Connected\r\nX-Proxy: yes\r\n\r\n")
    await _tunnel(reader, writer, host.strip("[]"), int(port))


async def test_an_http_proxy_gets_the_checked_address_and_never_the_name() -> None:
    async with (
        server(ok(b"through")) as s,
        server(_http_proxy) as p,
        client(s.port, p.port, names={"shop.test": ["127.0.0.1"]}) as c,
    ):
        for user in ("ann", "ann", "bob"):
            r = await c.fetch(
                f"http://shop.test:{s.port}/x", proxy=f"http://{user}:p%40ss@127.0.0.1:{p.port}"
            )
            assert r.body == b"through"
            assert "x-proxy" not in r.headers
        assert r.peer == f"127.0.0.1:{p.port}"
        # The tunnel of ann is reused, but not for bob.
        assert [h.split(b"\r\n")[0] for h in p.heads] == [
            b"CONNECT 127.0.0.1:%d HTTP/1.1" % s.port
        ] * 2
        assert all(b"shop.test" not in h for h in p.heads)
        assert base64.b64encode(b"ann:p@ss") in p.heads[0]
        assert b"Host: shop.test" in s.heads[0]
        assert b"Proxy-" not in s.heads[0]
        # A reused handle does not keep its proxy.
        assert (await c.fetch(f"http://shop.test:{s.port}/x")).peer == f"127.0.0.1:{s.port}"
        failure = await failing(
            c.fetch(f"http://shop.test:{s.port}/x", proxy=f"http://127.0.0.1:{p.port}")
        )
        assert (failure.kind, "407" in failure.reason) == (ErrorClass.BLOCKED, True)


async def test_an_unreachable_proxy_is_transient_and_no_request_is_sent_directly() -> None:
    async with server(ok(b"direct")) as s:
        with socket.socket() as taken:  # bound but not listening, so no process listens there
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            async with client(s.port, port) as c:
                for scheme in ("http", "socks5"):
                    failure = await failing(
                        c.fetch(
                            f"http://127.0.0.1:{s.port}/",
                            proxy=f"{scheme}://me:secret@127.0.0.1:{port}",
                        )
                    )
                    assert failure.kind is ErrorClass.TRANSIENT
                    assert "secret" not in failure.reason + failure.detail
        assert s.connections == 0


@contextlib.asynccontextmanager
async def socks_proxy(asked: list[tuple[int, str, int]]) -> AsyncIterator[int]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            _, n = await reader.readexactly(2)
            methods = await reader.readexactly(n)
            if 2 in methods:
                writer.write(b"\x05\x02")
                _, n = await reader.readexactly(2)
                user = await reader.readexactly(n)
                password = await reader.readexactly((await reader.readexactly(1))[0])
                assert (user, password) == (b"me", b"secret")
                writer.write(b"\x01\x00")
            else:
                writer.write(b"\x05\x00")
            kind = (await reader.readexactly(4))[3]
            if kind == 3:
                host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
            else:
                host = socket.inet_ntop(
                    socket.AF_INET if kind == 1 else socket.AF_INET6,
                    await reader.readexactly(4 if kind == 1 else 16),
                )
            (port,) = struct.unpack("!H", await reader.readexactly(2))
            asked.append((kind, host, port))
            writer.write(b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00")
            await _tunnel(reader, writer, "127.0.0.1", port)
        except (_Done, asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_socks_proxy_gets_the_checked_address_unless_remote_dns_is_set() -> None:
    asked: list[tuple[int, str, int]] = []
    async with server(ok(b"through")) as s, socks_proxy(asked) as port:
        async with client(s.port, port, names={"shop.test": ["127.0.0.1"]}) as c:
            assert (
                await c.fetch(
                    f"http://shop.test:{s.port}/", proxy=f"socks5://me:secret@127.0.0.1:{port}"
                )
            ).body == b"through"
            assert asked == [(1, "127.0.0.1", s.port)]
            failure = await failing(
                c.fetch(f"http://shop.test:{s.port}/", proxy=f"socks5h://127.0.0.1:{port}")
            )
            assert (failure.kind, "remote_dns" in failure.reason) == (ErrorClass.OURS, True)
        async with client(s.port, port, names={}, remote_dns=True) as c:
            for scheme in ("socks5h", "socks5"):
                assert (
                    await c.fetch(
                        f"http://far.test:{s.port}/", proxy=f"{scheme}://127.0.0.1:{port}"
                    )
                ).body == b"through"
            assert asked[1:] == [(3, "far.test", s.port)] * 2
            failure = await failing(
                c.fetch("http://10.0.0.1/", proxy=f"socks5h://127.0.0.1:{port}")
            )
            assert failure.kind is ErrorClass.PERMANENT


async def test_a_forbidden_target_or_proxy_gets_no_connection() -> None:
    async with server(ok(b"secret")) as s, server(_http_proxy) as p:
        async with client(p.port, names={"inward.test": ["127.0.0.1"]}) as c:
            failure = await failing(
                c.fetch(f"http://inward.test:{s.port}/", proxy=f"http://a:b@127.0.0.1:{p.port}")
            )
            assert failure.kind is ErrorClass.PERMANENT
        async with client(s.port) as c:
            failure = await failing(
                c.fetch(f"http://127.0.0.1:{s.port}/", proxy=f"http://a:b@127.0.0.1:{p.port}")
            )
            assert failure.kind is ErrorClass.PERMANENT
        assert s.connections == p.connections == 0


async def test_an_https_proxy_is_verified_by_its_name(certificate: tuple[str, str]) -> None:
    names = {"shop.test": ["127.0.0.1"], "proxy.test": ["127.0.0.1"], "fake.test": ["127.0.0.1"]}
    async with server(ok(b"through")) as s, server(_http_proxy, tls=_tls(certificate)) as p:
        async with client(s.port, p.port, names=names, ca_file=certificate[1]) as c:
            assert (
                await c.fetch(
                    f"http://shop.test:{s.port}/", proxy=f"https://a:b@proxy.test:{p.port}"
                )
            ).body == b"through"
            assert (
                await failing(
                    c.fetch(f"http://shop.test:{s.port}/", proxy=f"https://a:b@fake.test:{p.port}")
                )
            ).kind is ErrorClass.PERMANENT
        assert len(p.heads) == 1


@pytest.mark.parametrize(
    "dsn",
    [
        "",
        "nonsense",
        "ftp://h:1",
        "http://h",
        "http://:80",
        "socks4://h:1",
        "http://h:99999",
        "http://user:pa$$@[::1:80",
    ],
)
def test_the_error_of_a_bad_proxy_url_does_not_contain_its_password(dsn: str) -> None:
    with pytest.raises(Failure) as caught:
        parse_proxy(dsn)
    assert caught.value.kind is ErrorClass.OURS
    assert "pa$$" not in caught.value.reason


# -- event loops -----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop")
def test_the_client_works_on_uvloop() -> None:
    import uvloop

    async def main() -> None:
        async with server(ok(b"fast")) as s, client(s.port, first_byte_timeout=30.0) as c:
            for _ in range(20):
                assert (await c.fetch(f"http://127.0.0.1:{s.port}/")).body == b"fast"
            assert s.connections == 1

    uvloop.run(main())
