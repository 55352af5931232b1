"""Slow hosts: 34 hosts that send 300 bytes per second, to keep the permits of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.attacks.harness import Attack, Ground, survives

from penstock.testing.web import Reply, Request

HOSTS, URLS = 34, 40  # hostile hosts, and URLs of each
RATE = 300  # bytes that a hostile host sends in a second
SECONDS = 300  # of an answer, unless the client ends it


async def body() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 9999999\r\n\r\n"
    for _ in range(SECONDS):
        yield b"x" * RATE
        await asyncio.sleep(1)


async def head() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    for n in range(SECONDS):
        yield b"X-%03d: %s\r\n" % (n, b"x" * (RATE - 9))
        await asyncio.sleep(1)


async def nothing() -> AsyncIterator[bytes]:
    await asyncio.sleep(SECONDS)
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def _slow(
    host: Callable[[int], str], answer: Callable[[], AsyncIterator[bytes]], path: str
) -> Attack:
    """Answer all requests to `path` slowly. Other requests get 404."""

    def attack(g: Ground) -> Sequence[str]:
        def serve(request: Request) -> Reply:
            return Reply(raw=answer())

        g.hostile.web.route(path, serve)
        port = g.hostile.port
        return [f"http://{host(h)}:{port}/x/{n}" for n in range(URLS) for h in range(HOSTS)]

    return attack


def _received(requests: int, g: Ground) -> bool:
    return len(list(g.hostile.web.entries)) >= requests


def subdomain(n: int) -> str:
    return f"h{n}.slow.test"


def domain(n: int) -> str:
    return f"slow{n}.test"


@pytest.mark.parametrize(
    ("host", "answer", "path"),
    [
        (subdomain, body, "/x/*"),
        (domain, body, "/x/*"),
        (domain, head, "/x/*"),
        (domain, nothing, "/x/*"),
        (domain, body, "/robots.txt"),
    ],
    ids=["subdomains", "domains", "heads", "silent", "robots"],
)
def test_34_slow_hosts_leave_a_healthy_host_its_pages(
    tmp_path: Path,
    host: Callable[[int], str],
    answer: Callable[[], AsyncIterator[bytes]],
    path: str,
) -> None:
    attack = _slow(host, answer, path)
    survives(tmp_path, attack, seconds=15.0, until=partial(_received, HOSTS))
