"""The test web server: HTTP/1.1 responses, size limits, and a log with every request once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import pytest

from penstock.testing.web import (
    Reply,
    Request,
    Web,
    ends_dead,
    product_page,
    read_log,
    reply,
    tagged,
)
from penstock.testing.wire import MAX_BODY, MAX_HEAD, MAX_HEADERS

T = TypeVar("T")


class Client:
    """A client for raw bytes. An HTTP library could hide mistakes of the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, head_only: bool = False) -> tuple[int, dict[str, str], bytes]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)
        }
        body = (
            b""
            if head_only
            else await self.reader.readexactly(int(headers.get("content-length", 0)))
        )
        return int(lines[0].split()[1]), headers, body

    async def get(
        self, path: str, method: str = "GET", headers: str = "", body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        await self.send(
            f"{method} {path} HTTP/1.1\r\nHost: test\r\nUser-Agent: unit\r\n{headers}\r\n".encode()
            + body
        )
        return await self.answer(head_only=method == "HEAD")

    async def rest(self) -> bytes:
        return await self.reader.read()


def with_web(scenario: Callable[[Web, Client], Awaitable[T]], *, log: Path | None = None) -> T:
    async def run() -> T:
        async with asyncio.timeout(60), Web(log=log) as web, Client.to(web.port) as client:
            return await scenario(web, client)

    return asyncio.run(run())


def test_one_connection_carries_many_requests() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/a", "first")
        web.route("/b", b"second")
        assert [(await client.get(path))[2] for path in ("/a", "/b", "/a")] == [
            b"first",
            b"second",
            b"first",
        ]
        assert len(web.connections) == 1

    with_web(scenario)


def test_head_returns_the_length_and_no_body() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/a", "twelve bytes")
        status, headers, _ = await client.get("/a", "HEAD")
        assert (status, headers["content-length"]) == (200, "12")
        # The HEAD response left no body on the connection.
        assert (await client.get("/a"))[2] == b"twelve bytes"

    with_web(scenario)


def test_pipelined_requests_are_answered_in_order_even_when_the_first_is_slow() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/slow", Reply(body=b"slow", delay=0.05))
        web.route("/fast", "fast")
        await client.send(
            b"GET /slow HTTP/1.1\r\nHost: t\r\n\r\nGET /fast HTTP/1.1\r\nHost: t\r\n\r\n"
        )
        assert (await client.answer())[2] == b"slow"
        assert (await client.answer())[2] == b"fast"

    with_web(scenario)


def test_a_handler_sees_method_query_headers_and_both_kinds_of_body() -> None:
    async def scenario(web: Web, client: Client) -> None:
        seen: list[Request] = []

        async def handler(request: Request) -> Reply:
            seen.append(request)
            await asyncio.sleep(0)
            return reply("ok")

        web.route("/api/*", handler)
        await client.get(
            "/api/x?a=1&b=", "POST", "Content-Length: 5\r\nX-Thing: 1\r\nX-Thing: 2\r\n", b"hello"
        )
        await client.get(
            "/api/y",
            "POST",
            "Transfer-Encoding: chunked\r\n",
            b"5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n",
        )
        assert (seen[0].method, seen[0].params, seen[0].headers["x-thing"], seen[0].body) == (
            "POST",
            {"a": "1", "b": ""},
            "1, 2",
            b"hello",
        )
        assert (seen[1].path, seen[1].body) == ("/api/y", b"hello world")

    with_web(scenario)


def test_a_body_that_arrives_byte_by_byte_is_complete() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/echo", lambda request: reply(request.body))
        for byte in (
            b"POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
            b"2\r\nde\r\n0\r\n\r\n"
        ):
            await client.send(bytes([byte]))
        assert (await client.answer())[2] == b"abcde"

    with_web(scenario)


def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/echo", lambda request: reply(request.body))
        await client.send(
            b"POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"ok")
        assert (await client.answer())[2] == b"ok"

    with_web(scenario)


REFUSALS = {
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "not http": (b"\x16\x03\x01 hello\r\n\r\n", 400),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\n", 505),
    "space before the colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "folded header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n 2\r\n\r\n", 400),
    "bare line feed": (b"GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n", 400),
    "length and chunked": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
    ),
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        400,
    ),
    "signed length": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\n", 400),
    "bad chunk size": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\n",
        400,
    ),
    "chunk longer than it says": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n",
        400,
    ),
    "endless chunk header": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
        400,
    ),
    "huge length": (
        f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n".encode(),
        413,
    ),
    "absurd length": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 6000 + b"\r\n\r\n",
        413,
    ),
    "huge chunk": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (MAX_BODY + 1),
        413,
    ),
    "endless head": (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * MAX_HEAD, 431),
    "too many headers": (
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * MAX_HEADERS + b"\r\n",
        431,
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_malformed_or_oversized_request_is_refused_and_the_connection_closed(case: str) -> None:
    data, expected = REFUSALS[case]

    async def scenario(web: Web, client: Client) -> None:
        web.route("*", "reached")
        await client.send(data)
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (expected, "close")
        assert await client.rest() == b""
        assert (web.refused, web.entries) == (1, [])

    with_web(scenario)


def test_an_absolute_request_target_is_accepted() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/x", "yes")
        assert (await client.get("http://elsewhere.example/x"))[2] == b"yes"

    with_web(scenario)


def test_http_1_0_and_connection_close_end_the_connection_after_the_response() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/x", "yes")
        for request in (
            b"GET /x HTTP/1.0\r\n\r\n",
            b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n",
        ):
            async with Client.to(web.port) as other:
                await other.send(request)
                assert (await other.rest()).endswith(b"yes")

    with_web(scenario)


def test_a_half_closed_client_still_gets_a_slow_response() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/x", Reply(body=b"yes", delay=0.05))
        await client.send(b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n")
        client.writer.write_eof()
        assert (await client.rest()).endswith(b"yes")

    with_web(scenario)


def test_a_large_response_arrives_completely() -> None:
    async def scenario(web: Web, client: Client) -> None:
        body = os.urandom(3_000_000)
        web.route("/big", body)
        await client.send(b"GET /big HTTP/1.1\r\nHost: t\r\n\r\n" * 3)
        assert [(await client.answer())[2] == body for _ in range(3)] == [True] * 3

    with_web(scenario)


def test_drop_cuts_the_connection_and_is_logged_as_unanswered() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/x", Reply(drop=True))
        await client.send(b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await client.rest()
        assert [(e.path, e.status) for e in web.entries] == [("/x", 0)]

    with_web(scenario)


def test_raw_bytes_are_sent_unchanged_as_one_block_or_in_parts() -> None:
    async def drip() -> AsyncIterator[bytes]:
        for part in (b"HTTP/1.1 200 OK\r\n", b"content-length: 9\r\n\r\n", b"cut"):
            yield part
            await asyncio.sleep(0)

    async def scenario(web: Web, client: Client) -> None:
        web.route("/x", Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ncut"))
        web.route("/drip", lambda request: Reply(raw=drip()))
        for path in (b"/x", b"/drip"):
            async with Client.to(web.port) as other:
                await other.send(b"GET " + path + b" HTTP/1.1\r\nHost: t\r\n\r\n")
                assert await other.rest() == b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ncut"

    with_web(scenario)


def test_a_request_with_the_current_etag_gets_a_304_without_a_body() -> None:
    async def scenario(web: Web, client: Client) -> None:
        body = ["one"]
        web.route("/x", lambda request: tagged(request, reply(body[0])))
        _, headers, _ = await client.get("/x")
        etag = headers["etag"]
        for sent in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            assert (await client.get("/x", headers=f"If-None-Match: {sent}\r\n"))[0] == 304
        body[0] = "two"
        status, headers, content = await client.get("/x", headers=f"If-None-Match: {etag}\r\n")
        assert (status, content) == (200, b"two")
        assert headers["etag"] != etag

    with_web(scenario)


def test_a_fixed_page_takes_no_post_and_an_unknown_path_is_404() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/x", "x")
        assert (await client.get("/x", "POST", "Content-Length: 1\r\n", b"1"))[0] == 405
        assert (await client.get("/y"))[0] == 404

    with_web(scenario)


def test_the_longest_prefix_wins_and_a_route_can_be_replaced() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/*", "any")
        web.route("/deep/*", "deep")
        web.route("/deep/exact", "exact")
        assert [(await client.get(path))[2] for path in ("/z", "/deep/z", "/deep/exact")] == [
            b"any",
            b"deep",
            b"exact",
        ]
        web.route("/deep/*", "changed")
        assert (await client.get("/deep/z"))[2] == b"changed"

    with_web(scenario)


def test_every_port_has_its_own_handler_and_shows_in_the_log() -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/x", "main")
        same = await web.listen()
        own = await web.listen(handler=lambda request: reply(f"own {request.port}"))
        for port, body in ((web.port, b"main"), (same, b"main"), (own, f"own {own}".encode())):
            async with Client.to(port) as other:
                assert (await other.get("/x"))[2] == body
        assert [(e.port, e.host, e.agent, e.method, e.status) for e in web.entries] == [
            (port, "test", "unit", "GET", 200) for port in (web.port, same, own)
        ]
        assert web.counts["/x"] == 3
        assert all(0 < e.at <= e.answered for e in web.entries)

    with_web(scenario)


def test_a_request_of_a_disconnected_client_is_logged_once(tmp_path: Path) -> None:
    async def scenario(web: Web, client: Client) -> None:
        asked, left = asyncio.Event(), asyncio.Event()

        async def handler(request: Request) -> Reply:
            asked.set()
            try:
                await asyncio.sleep(30)
            finally:
                left.set()
            return reply("too late")

        web.route("/slow", handler)
        await client.send(b"GET /slow HTTP/1.1\r\nHost: t\r\n\r\n")
        await asked.wait()
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        client.writer.transport.abort()
        await left.wait()
        await asyncio.sleep(0)
        assert web.counts["/slow"] == 1
        assert [(e.path, e.status) for e in read_log(tmp_path / "log")] == [("/slow", 0)]

    with_web(scenario, log=tmp_path / "log")


def test_a_request_is_in_the_log_file_before_the_client_gets_the_response(tmp_path: Path) -> None:
    async def scenario(web: Web, client: Client) -> None:
        web.route("/x", "x")
        for n in range(1, 20):
            await client.get(f"/x?n={n}")
            assert read_log(tmp_path / "log") == web.entries
            assert len(web.entries) == n

    with_web(scenario, log=tmp_path / "log")


@pytest.mark.parametrize("late", [False, True])
def test_a_bug_in_a_handler_is_500_for_the_client_and_raised_to_the_test(late: bool) -> None:
    def now(request: Request) -> Reply:
        raise KeyError("bug")

    async def later(request: Request) -> Reply:
        raise KeyError("bug")

    async def scenario(web: Web, client: Client) -> None:
        web.route("/x", later if late else now)
        assert (await client.get("/x"))[0] == 500
        assert (await client.get("/y"))[0] == 404  # the connection is still open

    with pytest.raises(ExceptionGroup) as caught:
        with_web(scenario)
    assert isinstance(caught.value.exceptions[0], KeyError)


def test_the_share_of_dead_pages_is_exact_and_evenly_spread() -> None:
    dead = [n for n in range(5000) if ends_dead(n, 0.02)]
    assert len(dead) == 100
    assert max(b - a for a, b in pairwise(dead)) <= 51
    assert not any(ends_dead(n, 0.0) for n in range(1000))
    assert all(ends_dead(n, 1.0) for n in range(1000))


def test_the_server_command_prints_its_address_serves_logs_and_stops_on_sigterm(
    tmp_path: Path,
) -> None:
    log = tmp_path / "access.jsonl"
    command = [
        sys.executable,
        "-m",
        "penstock.testing.web",
        "--port",
        "0",
        "--pages",
        "10",
        "--dead-share",
        "0.5",
        "--log",
        str(log),
        "--with-parent",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())
            assert address["pid"] == process.pid
            with urlopen(address["url"] + "/p/0", timeout=60) as answer:
                assert answer.read() == product_page(0)
            with urlopen(address["url"] + "/urls.txt", timeout=60) as answer:
                assert answer.read().decode().splitlines() == [
                    f"{address['url']}/p/{n}" for n in range(10)
                ]
            assert [(e.path, e.status) for e in read_log(log)] == [
                ("/p/0", 200),
                ("/urls.txt", 200),
            ]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
