"""The memory that all bodies in progress share: slow large bodies must not stop other hosts."""

from __future__ import annotations

import asyncio
import gzip
import random

import brotli
import pytest
from tests.embedded.test_http_engine import client, server

from penstock.model import ErrorClass, Failure, Reason

HOSTILE = 30  # bodies that fill the memory, and then arrive slowly
PART = 200_000  # bytes of each that arrive at once
ROOM = HOSTILE * PART - 1000  # bytes of memory. All parts together are slightly more.


async def fill_then_drip(
    head: bytes, reader: asyncio.StreamReader, w: asyncio.StreamWriter
) -> None:
    w.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n" + b"x" * PART)
    for _ in range(600):
        await w.drain()
        await asyncio.sleep(0.1)
        w.write(b"x" * 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("coding", "size"), [("br", 10_000), ("gzip", 1_000_000), ("identity", 1_000_000)]
)
async def test_slow_bodies_that_fill_the_memory_do_not_stop_a_fast_one(
    coding: str, size: int
) -> None:
    body = random.Random(1).randbytes(size)
    sent = {"br": brotli.compress, "gzip": gzip.compress}.get(coding, bytes)(body)

    async def page(head: bytes, reader: asyncio.StreamReader, w: asyncio.StreamWriter) -> None:
        named = b"HTTP/1.1 200 OK\r\nContent-Encoding: %s\r\n" % coding.encode()
        w.write(named + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
        await w.drain()

    async with (
        server(fill_then_drip) as hostile,
        server(page) as s,
        client(hostile.port, s.port, max_held_bytes=ROOM) as c,
    ):
        url = f"http://127.0.0.1:{hostile.port}/"
        slow = [asyncio.create_task(c.fetch(url)) for _ in range(HOSTILE)]
        await hostile.arrived(HOSTILE)
        bodies = c._opened[0].bodies if c._opened else None
        assert bodies is not None
        while bodies.held_bytes <= ROOM or len(bodies._paused) < HOSTILE - 1:
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in slow)
        async with asyncio.timeout(20):  # the body that holds the last place ends after 5 seconds
            answer = await c.fetch(f"http://127.0.0.1:{s.port}/")
        assert answer.body == body
        ended = [task.exception() for task in slow if task.done()]
        assert ended
        for failure in ended:
            assert isinstance(failure, Failure)
            assert (failure.kind, failure.code) == (ErrorClass.TRANSIENT, Reason.RATE)
            assert "other bodies wait for memory" in failure.reason
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
