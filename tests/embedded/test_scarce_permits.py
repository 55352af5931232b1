"""Slow servers while permits are scarce, with real sockets: every phase of an exchange."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from tests.embedded.test_fetch_stage import rig as stage_rig
from tests.embedded.test_http_engine import client, failing, ok, server

from penstock.model import ErrorClass, Failure, Reason
from penstock.ports import Response
from penstock.rules.proxies import ProxyFailed
from penstock.rules.speed import Scarcity
from penstock.testing.web import Reply, Request

SCARCE = Scarcity(2000.0, 0.5, frozenset({"other.test"}))
SIZE = 2000  # bytes of a slow body, sent in about two seconds


async def drip_body(head: bytes, reader: asyncio.StreamReader, w: asyncio.StreamWriter) -> None:
    w.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE)
    for _ in range(20):
        w.write(b"x" * (SIZE // 20))
        await w.drain()
        await asyncio.sleep(0.1)


async def burst_then_drip(head: bytes, r: asyncio.StreamReader, w: asyncio.StreamWriter) -> None:
    w.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (SIZE + 1000))
    w.write(b"x" * 1000)
    for _ in range(20):
        w.write(b"x" * (SIZE // 20))
        await w.drain()
        await asyncio.sleep(0.1)


async def drip_head(head: bytes, reader: asyncio.StreamReader, w: asyncio.StreamWriter) -> None:
    w.write(b"HTTP/1.1 200 OK\r\n")
    for n in range(20):
        w.write(b"X-%d: %s\r\n" % (n, b"x" * 90))
        await w.drain()
        await asyncio.sleep(0.1)
    w.write(b"Content-Length: 0\r\n\r\n")


async def silent(head: bytes, reader: asyncio.StreamReader, w: asyncio.StreamWriter) -> None:
    await asyncio.sleep(2)
    w.write(ok(b"late"))


@contextlib.asynccontextmanager
async def mute() -> AsyncIterator[int]:
    """Accept connections on the yielded port, and send nothing."""

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(read, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [drip_body, burst_then_drip, drip_head, silent])
async def test_a_slow_answer_ends_as_transient_only_while_other_domains_wait(
    answer: Callable[..., object],
) -> None:
    async with server(answer) as s, client(s.port) as c:  # type: ignore[arg-type]
        url = f"http://127.0.0.1:{s.port}/"
        began = asyncio.get_running_loop().time()
        c.scarcity = lambda: SCARCE
        failure = await failing(c.fetch(url))
        assert asyncio.get_running_loop().time() - began < 1.9
        assert (failure.kind, failure.code) == (ErrorClass.TRANSIENT, Reason.SLOW)
        assert "too slow while other domains wait for permits" in failure.reason
        c.scarcity = lambda: None
        assert (await c.fetch(url)).status == 200
        c.scarcity = lambda: Scarcity(2000.0, 0.5, frozenset({"127.0.0.1"}))
        assert (await c.fetch(url)).status == 200, "only its own domain waits"


async def test_no_more_slow_answers_end_than_permits_are_needed() -> None:
    async with server(drip_body) as s, client(s.port) as c:

        def scarce() -> Scarcity | None:
            ended = sum(task.done() for task in tasks)
            return msgspec.structs.replace(SCARCE, needed=3 - ended) if ended < 3 else None

        c.scarcity = scarce
        tasks: list[asyncio.Task[Response]] = []
        tasks += [asyncio.create_task(c.fetch(f"http://127.0.0.1:{s.port}/")) for _ in range(8)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, Failure) for result in results) == 3


async def test_a_server_that_never_answers_the_tls_handshake_is_too_slow() -> None:
    async with mute() as port, client(port) as c:
        c.scarcity = lambda: SCARCE
        failure = await failing(c.fetch(f"https://127.0.0.1:{port}/"))
        assert failure.code is Reason.SLOW


@pytest.mark.parametrize("scheme", ["http", "socks5", "https"])
async def test_a_proxy_that_does_not_connect_is_too_slow(scheme: str) -> None:
    async with server(ok(b"target")) as s, mute() as port, client(s.port, port) as c:
        c.scarcity = lambda: SCARCE
        proxy = f"{scheme}://u:p@127.0.0.1:{port}"
        failure = await failing(c.fetch(f"http://127.0.0.1:{s.port}/", proxy=proxy))
        assert failure.kind is ErrorClass.TRANSIENT
        assert failure.code is Reason.SLOW or isinstance(failure, ProxyFailed)
        assert "too slow while other domains wait" in failure.reason


async def test_a_fast_download_is_not_ended_while_permits_are_scarce() -> None:
    async def fast(head: bytes, reader: asyncio.StreamReader, w: asyncio.StreamWriter) -> None:
        w.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (20 * 10_000))
        for _ in range(20):
            w.write(b"x" * 10_000)
            await w.drain()
            await asyncio.sleep(0.1)

    async with server(fast) as s, client(s.port) as c:
        c.scarcity = lambda: SCARCE
        assert len((await c.fetch(f"http://127.0.0.1:{s.port}/")).body) == 200_000


@pytest.mark.slow
async def test_permits_are_measured_also_while_the_event_loop_is_busy() -> None:
    measured: list[float] = []
    async with server(drip_body) as s, client(s.port) as c:
        c.scarcity = lambda: measured.append(time.monotonic())
        task = asyncio.create_task(c.fetch(f"http://127.0.0.1:{s.port}/"))
        while not task.done():
            time.sleep(0.3)  # noqa: ASYNC251 (the busy loop)
            await asyncio.sleep(0)
        assert (await task).status == 200
    assert len(measured) >= 4


async def test_a_robots_file_that_was_too_slow_is_not_stored_as_unreachable() -> None:
    def robots(request: Request) -> Reply:
        async def raw() -> AsyncIterator[bytes]:
            yield b"HTTP/1.1 200 OK\r\n\r\n"
            await asyncio.sleep(5)

        return Reply(raw=raw())

    async with stage_rig() as r:
        r.web.route("/robots.txt", robots)
        r.web.route("/x", "<html><body>a page</body></html>")
        r.fetcher.scarcity = lambda: SCARCE
        failure = await r.fails("/x")
        assert (failure.kind, failure.code) == (ErrorClass.TRANSIENT, Reason.SLOW)
        assert not r.hosts.cached_robots
        r.web.route("/robots.txt", Reply(404))
        assert (await r.fetch("/x")).status == 200
