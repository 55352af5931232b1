"""Attacks with compressed bodies: few bytes that need much CPU time or memory."""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import brotli
import pytest
from tests.attacks.harness import Attack, Ground, survives

from penstock.testing.web import Reply, Request

MEMBERS = 838_000  # empty gzip members, which brotli compresses to about 30 bytes
CONNECTIONS = 40


def _empty_members() -> bytes:
    return bytes(brotli.compress(gzip.compress(b"", mtime=0) * MEMBERS))


def _long_name(size: int) -> bytes:
    """Return a gzip header with a long file name, compressed with brotli. It has no output."""
    return bytes(brotli.compress(b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * size))


def _half_random_name() -> bytes:
    """Return a gzip header with a name of 9 MiB in 700 kB. The limits allow it."""
    noise = random.Random(1).randbytes(700_000).replace(b"\0", b"1")
    header = b"\x1f\x8b\x08\x08" + bytes(6) + noise + b"n" * (9 << 20)
    return bytes(brotli.compress(header, quality=5))


def _small_blocks() -> bytes:
    """Return a zstd frame of 700,000 empty blocks."""
    return b"\x28\xb5\x2f\xfd\x00\x00" + bytes(3 * 700_000) + b"\x01\x00\x00"


def _brotli_trees() -> bytes:
    """Return brotli blocks of one byte, each with 768 Huffman trees. A block needs 0.4 ms."""
    bits: list[str] = ["0"]  # the first bit is the first of the stream

    def put(value: int, width: int) -> None:
        bits.append(f"{value:0{width}b}"[::-1])

    def tree(symbol: int, width: int) -> None:
        put(0b0001, 4)  # a tree with one symbol
        put(symbol, width)

    def one_block() -> None:
        put(0, 1 + 2 + 16 + 1)  # not the last, one byte, compressed
        for _ in range(3):  # 256 block types each of literals, commands and distances
            put(0b1111111_111_1, 11)
            tree(0, 9)
            tree(0, 5)
            put(3, 2)
        put(0b111111, 6)  # the most distance codes
        put(0, 2 * 256)
        for _ in range(2):  # context maps of 256 trees
            put(0b1111111_111_1, 11)
            put(0, 1)
            tree(0, 8)
            put(0, 1)
        for width, symbol in ((8, 65), (10, 8), (10, 0)):
            for _ in range(256):
                tree(symbol, width)

    one_block()
    block = "".join(bits[1:])
    text = "0" + block * 1500 + "11"
    return int(text[::-1], 2).to_bytes((len(text) + 7) // 8, "little")


def _answers(coding: str, make: Callable[[], bytes], urls: int) -> Attack:
    def attack(g: Ground) -> list[str]:
        answer = Reply(200, {"content-encoding": coding, "content-type": "text/html"}, make())
        g.hostile.web.route("/x/*", lambda request: answer)
        return [g.hostile.url(f"/x/{n}") for n in range(urls)]

    return attack


def _waits(coding: str, make: Callable[[], bytes], urls: int) -> Attack:
    """Send the body, but never the end of the response. All connections stay open together."""

    def attack(g: Ground) -> list[str]:
        body = make()

        def answer(request: Request) -> Reply:
            async def raw() -> AsyncIterator[bytes]:
                head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nContent-Length: 9999999"
                yield head.encode() + b"\r\n\r\n" + body
                await asyncio.sleep(60)

            return Reply(raw=raw())

        g.hostile.web.route("/x/*", answer)
        return [g.hostile.url(f"/x/{n}") for n in range(urls)]

    return attack


def _received(requests: int, g: Ground) -> bool:
    return len([e for e in list(g.hostile.web.entries) if e.path != "/robots.txt"]) >= requests


@pytest.mark.parametrize(
    ("coding", "make"),
    [
        ("gzip, br", _empty_members),
        ("gzip", lambda: gzip.compress(b"", mtime=0) * MEMBERS),
        ("zstd", _small_blocks),
        ("br", _brotli_trees),
    ],
    ids=["nested-members", "members", "zstd-blocks", "brotli-trees"],
)
def test_bodies_that_decode_slowly_do_not_stop_other_hosts(
    tmp_path: Path, coding: str, make: Callable[[], bytes]
) -> None:
    survives(tmp_path, _answers(coding, make, 8), until=partial(_received, 8))


@pytest.mark.parametrize("size", [15 << 20, 1_000_000], ids=["refused", "accepted"])
def test_nested_codings_on_40_connections_need_little_memory(tmp_path: Path, size: int) -> None:
    survives(
        tmp_path,
        _waits("gzip, br", partial(_long_name, size), CONNECTIONS),
        until=partial(_received, CONNECTIONS),
        pace_concurrency=str(CONNECTIONS),
    )


@pytest.mark.parametrize(
    ("coding", "make"),
    [
        ("br", lambda: bytes(brotli.compress(bytes(15 << 20)))),
        ("gzip, br", _half_random_name),
    ],
    ids=["single", "nested"],
)
def test_open_connections_with_much_memory_do_not_stop_other_hosts(
    tmp_path: Path, coding: str, make: Callable[[], bytes]
) -> None:
    survives(
        tmp_path,
        _waits(coding, make, CONNECTIONS),
        until=partial(_received, CONNECTIONS),
        pace_concurrency=str(CONNECTIONS),
        fetch_bytes="32MiB",
    )
