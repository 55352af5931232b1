"""Hostile responses: each is a classified failure, needs at most 64 MiB and never blocks the loop
for 100 ms. Server and client run in separate processes, so that only the client is measured.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import random
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import brotli
import msgspec
import pytest
import zstandard

from penstock.authoring.page import Page
from penstock.model import ErrorClass, Failure
from penstock.net.guard import Guard, parse_allow
from penstock.net.http import CurlFetcher, HttpOptions
from penstock.net.transfer import Engine
from penstock.testing.web import Reply, Request, Web

MIB = 1 << 20
SMALL = 280_000  # bytes that each body may have above the memory limit: one step of a decoder
STALL = 0.1  # seconds, on a processor that inflates ZEROS (1 MiB) in USUAL seconds
ZEROS, USUAL = zlib.compress(bytes(MIB)), 0.003
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n"


# -- the server's process --------------------------------------------------------------------------


def _deflated(times: int = 1024) -> bytes:
    """Return 1 GiB of deflated zeros. Each block ends on a byte, so one block can be repeated."""
    c = zlib.compressobj(9, wbits=-15)
    return (c.compress(bytes(MIB)) + c.flush(zlib.Z_FULL_FLUSH)) * times


def _gzip_bomb() -> bytes:
    return gzip.compress(b"")[:10] + _deflated()


def _br_bomb(window: int = 22) -> bytes:
    c = brotli.Compressor(quality=1, lgwin=window)
    return b"".join(c.process(bytes(MIB)) for _ in range(1024)) + bytes(c.finish())


def _zstd_bomb(window: int = 0) -> bytes:
    parameters = (
        zstandard.ZstdCompressionParameters.from_level(1, window_log=window)
        if window
        else zstandard.ZstdCompressionParameters.from_level(1)
    )
    c = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return b"".join(c.compress(bytes(MIB)) for _ in range(1024)) + c.flush()


def _encoded(coding: str, body: bytes) -> bytes:
    return OK + f"Content-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _endless(first: bytes, part: bytes, every: float = 0.0) -> AsyncIterator[bytes]:
    yield first
    while True:
        yield part
        if every:
            await asyncio.sleep(every)


async def _once(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKED_GZIP = (
    OK
    + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\na\r\n"
    + gzip.compress(b"")[:10]
    + b"\r\n"
)
# The response, the error class that it must have (None: any), and a part of the reason.
ANSWERS: dict[str, tuple[Callable[[], bytes | AsyncIterator[bytes]], ErrorClass | None, str]] = {
    "gzip": (
        lambda: _encoded("gzip", _gzip_bomb()),
        ErrorClass.PERMANENT,
        "decoded body is larger",
    ),
    "deflate": (
        lambda: _encoded("deflate", b"\x78\x9c" + _deflated()),
        ErrorClass.PERMANENT,
        "decoded body is larger",
    ),
    "raw-deflate": (
        lambda: _encoded("deflate", _deflated()),
        ErrorClass.PERMANENT,
        "decoded body is larger",
    ),
    "br": (lambda: _encoded("br", _br_bomb()), ErrorClass.PERMANENT, "decoded body is larger"),
    "br-window": (
        lambda: _encoded("br", _br_bomb(24)),
        ErrorClass.PERMANENT,
        "decoded body is larger",
    ),
    "zstd": (
        lambda: _encoded("zstd", _zstd_bomb()),
        ErrorClass.PERMANENT,
        "decoded body is larger",
    ),
    # The decoder would have to keep 128 MiB of history.
    "zstd-window": (lambda: _encoded("zstd", _zstd_bomb(27)), None, ""),
    "nested-gzip": (
        lambda: _encoded("gzip, gzip", gzip.compress(_gzip_bomb())),
        ErrorClass.PERMANENT,
        "decoded body is larger",
    ),
    "nested-br": (
        lambda: _encoded("gzip, br", bytes(brotli.compress(_gzip_bomb(), quality=5))),
        ErrorClass.PERMANENT,
        "decoded body is larger",
    ),
    "nested-zstd": (
        lambda: _encoded("br, zstd", zstandard.compress(_br_bomb())),
        ErrorClass.PERMANENT,
        "decoded body is larger",
    ),
    "codings": (lambda: _encoded(", ".join(["gzip"] * 200), b"x"), ErrorClass.PERMANENT, ""),
    # 8 MB that decode to zero bytes, with a checksum for each member.
    "members": (lambda: _encoded("gzip", gzip.compress(b"") * 400_000), None, ""),
    "frames": (lambda: _encoded("zstd", zstandard.compress(b"") * 800_000), None, ""),
    "skipped-frames": (
        lambda: _encoded(
            "zstd", b"\x50\x2a\x4d\x18\0\0\0\0" * 1_000_000 + zstandard.compress(b"x")
        ),
        None,
        "",
    ),
    "drip": (
        lambda: _endless(OK + b"Content-Length: 1000\r\n\r\n", b"x", 1.0),
        ErrorClass.TRANSIENT,
        "minimum rate",
    ),
    "drip-chunks": (
        lambda: _endless(CHUNKED, b"1\r\nx\r\n", 1.0),
        ErrorClass.TRANSIENT,
        "minimum rate",
    ),
    "drip-head": (lambda: _endless(b"HTTP/1.1 200 OK\r\nX: ", b"x", 1.0), ErrorClass.TRANSIENT, ""),
    "drip-status": (lambda: _endless(b"H", b"T", 1.0), None, ""),
    "endless": (lambda: _endless(OK + b"\r\n", bytes(65536)), ErrorClass.PERMANENT, "large"),
    "endless-headers": (
        lambda: _endless(OK, b"X-Filler: " + b"a" * 80 + b"\r\n"),
        ErrorClass.PERMANENT,
        "headers",
    ),
    "endless-line": (lambda: _endless(OK + b"X: ", b"a" * 65536), None, ""),
    "endless-interim": (lambda: _endless(b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 500), None, ""),
    "endless-extension": (lambda: _endless(CHUNKED + b"1;", b"x" * 65536), None, ""),
    "endless-trailers": (
        lambda: _endless(CHUNKED + b"1\r\nx\r\n0\r\n", b"X: " + b"y" * 80 + b"\r\n"),
        None,
        "",
    ),
    "crumbs": (lambda: _endless(CHUNKED, b"2\r\nxy\r\n" * 8192), ErrorClass.PERMANENT, "large"),
    # Each chunk is a separate deflate block.
    "crumbs-gzip": (
        lambda: _endless(CHUNKED_GZIP, b"7\r\n\0\2\0\xfd\xffxy\r\n" * 8192),
        ErrorClass.PERMANENT,
        "large",
    ),
    "location": (
        lambda: _once(
            b"HTTP/1.1 302 Found\r\nLocation: /" + b"a" * 200_000 + b"\r\nContent-Length: 0\r\n\r\n"
        ),
        ErrorClass.PERMANENT,
        "headers",
    ),
    "chunk-size": (
        lambda: _once(CHUNKED + b"ffffffffffffffffffffff\r\nx"),
        ErrorClass.TRANSIENT,
        "",
    ),
    "chunk-negative": (lambda: _once(CHUNKED + b"-5\r\nhello\r\n"), ErrorClass.TRANSIENT, ""),
    "chunk-words": (lambda: _once(CHUNKED + b"lots\r\nhello\r\n"), ErrorClass.TRANSIENT, ""),
    "chunk-short": (
        lambda: _once(CHUNKED + b"5\r\nhello, and more\r\n0\r\n\r\n"),
        ErrorClass.TRANSIENT,
        "",
    ),
    "chunk-cut": (lambda: _once(CHUNKED + b"5\r\nhel"), ErrorClass.TRANSIENT, "ended early"),
    "chunk-unended": (
        lambda: _once(CHUNKED + b"5\r\nhello\r\n"),
        ErrorClass.TRANSIENT,
        "ended early",
    ),
    "half-closed": (
        lambda: _once(OK + b"Content-Length: 100\r\n\r\nhalf", b"EOF"),
        ErrorClass.TRANSIENT,
        "ended early",
    ),
    "half-closed-head": (
        lambda: _once(b"HTTP/1.1 200 OK\r\nX: y", b"EOF"),
        ErrorClass.TRANSIENT,
        "ended",
    ),
    "cut-head": (
        lambda: _once(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"),
        ErrorClass.TRANSIENT,
        "ended inside its headers",
    ),
    "cut-status": (
        lambda: _once(b"HTTP/1.1 200 OK\r\n"),
        ErrorClass.TRANSIENT,
        "ended inside its headers",
    ),
    "cut-interim": (
        lambda: _once(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nX"),
        ErrorClass.TRANSIENT,
        "",
    ),
    "half-closed-at-once": (lambda: _once(b"EOF"), ErrorClass.TRANSIENT, ""),
    "cut-gzip": (
        lambda: _encoded("gzip", gzip.compress(b"hello" * 1000)[:40]),
        ErrorClass.TRANSIENT,
        "",
    ),
}
MADE: dict[str, bytes] = {}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        name = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()[1:]
        answer = MADE.get(name) or ANSWERS[name][0]()
        if isinstance(answer, bytes):
            MADE[name] = answer
            answer = _once(b"" if name == "warm-up" else answer)
        async for part in answer:
            if part == b"EOF":
                writer.write_eof()
                await reader.read()
                return
            writer.write(part)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _server() -> None:
    for name, (make, _, _) in ANSWERS.items():
        if isinstance(answer := make(), bytes):
            MADE[name] = answer
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


# -- the client's process --------------------------------------------------------------------------


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def _slowness() -> float:
    """Return how many times slower this processor is now than the one of STALL, at least 1."""
    begun = time.thread_time()
    for _ in range(20):
        zlib.decompress(ZEROS)
    return max(1.0, (time.thread_time() - begun) / 20 / USUAL)


async def _client(port: int, names: list[str], together: bool) -> None:
    """Fetch the responses and print each result.

    A result has the class, the reason, the longest stall of the loop at the usual speed, and the
    additional memory.
    """
    guard = Guard(parse_allow(f"127.0.0.1:{port}"))
    # Responses that are slow on purpose end by a short timeout. The others have a long one, because
    # a busy machine may delay the server.
    impatient = HttpOptions(
        first_byte_timeout=20.0, total_timeout=60.0, min_rate=100.0, min_rate_span=1.5
    )
    patient = msgspec.structs.replace(impatient, first_byte_timeout=60.0, min_rate_span=60.0)
    # Responses in tiny chunks take long, so they have smaller limits.
    smaller = msgspec.structs.replace(patient, max_encoded_bytes=6 * MIB, max_decoded_bytes=6 * MIB)
    fetchers = (
        CurlFetcher(guard, patient),
        CurlFetcher(guard, smaller),
        CurlFetcher(guard, impatient),
    )
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            before = time.thread_time()  # does not count the time of other processes
            await asyncio.sleep(0.002)
            worst = max(worst, time.thread_time() - before)

    async def fetch(name: str) -> tuple[str, str]:
        try:
            answer = await fetchers[
                1 if "crumbs" in name else 2 if "drip" in name or name == "endless-extension" else 0
            ].fetch(f"http://127.0.0.1:{port}/{name}")
        except Failure as e:
            return str(e.kind), e.reason
        return "", f"{answer.status}, {len(answer.body)} bytes"

    await fetch("cut-gzip")  # the imports of the first exchange are not counted
    watcher = asyncio.create_task(watch())
    drips = [name for name in names if "drip" in name]  # slow, but need no CPU
    for group in [names] if together else [*([name] for name in names if name not in drips), drips]:
        slowness = _slowness()
        await asyncio.sleep(0.01)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        start, worst = _peak(), 0.0
        answers = await asyncio.gather(*(fetch(name) for name in group))
        await asyncio.sleep(0.01)
        memory, stall = _peak() - start, worst / max(slowness, _slowness())
        for name, (kind, reason) in zip(group, answers, strict=True):
            print(
                json.dumps(
                    {"name": name, "kind": kind, "reason": reason, "stall": stall, "memory": memory}
                ),
                flush=True,
            )
    watcher.cancel()
    for fetcher in fetchers:
        await fetcher.close()
    guard.close()


# -- the tests -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = subprocess.Popen(
        [sys.executable, __file__, "server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    yield int(server.stdout.readline())
    server.communicate(timeout=30)


def fetched(port: int, names: list[str], *, together: bool = False) -> list[dict[str, Any]]:
    args = [sys.executable, __file__, "together" if together else "client", str(port), *names]
    done = subprocess.run(args, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def results(port: int) -> dict[str, dict[str, Any]]:
    found = {row["name"]: row for row in fetched(port, list(ANSWERS))}
    for _ in range(4):  # a busy machine may also stall the loop
        again = [name for name, row in found.items() if row["stall"] > STALL]
        for row in fetched(port, again) if again else []:
            found[row["name"]] = min(row, found[row["name"]], key=lambda r: r["stall"])
    return found


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")
def test_a_hostile_response_is_classified_with_little_memory_and_no_stall(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    _, kind, reason = ANSWERS[name]
    row = results[name]
    if kind is not None:
        assert row["kind"] == kind, row
        assert reason in row["reason"]
    elif not row["kind"]:  # accepted as a page
        assert row["reason"].endswith(" bytes"), row
    assert row["stall"] <= STALL, row
    assert row["memory"] <= 64 * MIB, row


@pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")
def test_all_hostile_responses_together_do_not_stall_the_loop(port: int) -> None:
    rounds = []
    for _ in range(5):
        rows = fetched(port, [name for name in ANSWERS if "drip" not in name], together=True)
        assert all(row["kind"] for row in rows if ANSWERS[row["name"]][1] is not None), rows
        rounds.append(rows[0]["stall"])
        if rounds[-1] <= STALL:
            return
    pytest.fail(f"stalls of {rounds} s")


async def test_a_transfer_that_is_paused_repeatedly_loses_no_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = 0
    must_pause = Engine.must_pause

    def every_other_time(engine: Engine, ex: Any) -> bool:
        nonlocal seen
        seen += 1
        engine._pause_deadline = 0.0 if seen % 2 else math.inf
        return must_pause(engine, ex)

    monkeypatch.setattr(Engine, "must_pause", every_other_time)
    bodies = [random.Random(n).randbytes(n * 20_000) for n in range(30)]

    def answer(request: Request) -> Reply:
        n, coding = int(request.path[1:]), request.query
        if coding == "gzip":
            return Reply(200, {"content-encoding": "gzip"}, gzip.compress(bodies[n], 1))
        if coding == "chunked":
            parts = [bodies[n][i : i + 999] for i in range(0, len(bodies[n]), 999)]
            return Reply(
                200,
                raw=CHUNKED
                + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
                + b"0\r\n\r\n",
            )
        return Reply(200, {}, bodies[n])

    async with Web(answer) as web:
        guard = Guard(parse_allow(f"127.0.0.1:{web.port}"))
        fetcher = CurlFetcher(guard, HttpOptions())
        for coding in ("plain", "gzip", "chunked"):
            for _ in range(2):  # new connections, then reused ones
                found = await asyncio.gather(
                    *(fetcher.fetch(web.url(f"/{n}?{coding}")) for n in range(len(bodies)))
                )
                assert [r.body for r in found] == bodies
        await fetcher.close()
        guard.close()
    assert seen > 1000


async def test_a_body_whose_decoding_is_paused_after_each_step_loses_no_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """libcurl delivers a chunk again after a pause, with later bytes behind it."""
    pauses = 0

    def always(engine: Engine, ex: Any) -> bool:
        nonlocal pauses
        pauses += 1
        if pauses % 3:
            engine.schedule_resume(ex)
        return pauses % 3 > 0

    monkeypatch.setattr(Engine, "must_pause", always)
    noise = random.Random(1).randbytes(200_000)
    body = b"".join(bytes(100_000) + noise[i : i + 2000] for i in range(0, 200_000, 2000))
    nested = brotli.compress(gzip.compress(body, 1), quality=1)
    encoded = {
        "gzip": gzip.compress(body, 1),
        "br": brotli.compress(body, quality=1),
        "zstd": zstandard.ZstdCompressor().compress(body),
        "gzip, br": nested,
    }

    def answer(request: Request) -> Reply:
        coding = list(encoded)[int(request.path[1:])]
        data = encoded[coding]

        async def raw() -> AsyncIterator[bytes]:
            head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nContent-Length: {len(data)}"
            yield head.encode() + b"\r\n\r\n"
            for i in range(0, len(data), 10_001):
                yield data[i : i + 10_001]
                await asyncio.sleep(0.001)

        return Reply(raw=raw())

    async with Web(answer) as web:
        guard = Guard(parse_allow(f"127.0.0.1:{web.port}"))
        fetcher = CurlFetcher(guard, HttpOptions())
        found = await asyncio.gather(
            *(fetcher.fetch(web.url(f"/{n}")) for n in range(len(encoded)) for _ in range(3))
        )
        assert [len(r.body) for r in found] == [len(body)] * len(found)
        assert all(r.body == body for r in found)
        assert fetcher._opened is not None
        assert fetcher._opened[0].bodies.held_bytes == 0
        await fetcher.close()
        guard.close()
    assert pauses > 200


@pytest.mark.parametrize("coding", ["plain", "gzip"])
async def test_bodies_in_progress_stay_within_the_memory_limit_and_all_complete(
    coding: str,
) -> None:
    size, room, last = 800_000, 2_000_000, asyncio.Event()
    bodies = [random.Random(n).randbytes(1000) * (size // 1000) for n in range(20)]

    def answer(request: Request) -> Reply:
        body = bodies[int(request.path[1:])]
        sent = gzip.compress(body) if coding == "gzip" else body
        named = b"Content-Encoding: gzip\r\n" if coding == "gzip" else b""

        async def raw() -> AsyncIterator[bytes]:
            yield (
                b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n" % (named, len(sent)) + sent[:-1]
            )
            await last.wait()
            yield sent[-1:]

        return Reply(raw=raw())

    async with Web(answer) as web:
        guard = Guard(parse_allow(f"127.0.0.1:{web.port}"))
        fetcher = CurlFetcher(guard, HttpOptions(max_held_bytes=room))
        asking = [asyncio.create_task(fetcher.fetch(web.url(f"/{n}"))) for n in range(len(bodies))]
        held = [0]
        # Wait until the sizes stay constant.
        while len(held) < 5 or len(set(held[-5:])) > 1 or held[-1] < room / 2:
            await asyncio.sleep(0.1)
            assert fetcher._opened is not None
            in_progress = fetcher._opened[1].active.values()
            held.append(
                sum(
                    ex.size if ex.decoder is None else len(b"".join(ex.decoder._parts))
                    for ex in in_progress
                )
            )
        # Bodies up to 128 KiB are not paused, so each can have one more step.
        assert room / 2 < max(held) < room + 2 * size + len(bodies) * SMALL
        asking.pop().cancel()
        last.set()
        assert [r.body for r in await asyncio.gather(*asking)] == bodies[:-1]
        assert fetcher._opened is not None
        assert fetcher._opened[0].bodies.held_bytes == 0
        last.clear()
        asking = [asyncio.create_task(fetcher.fetch(web.url(f"/{n}"))) for n in range(len(bodies))]
        await asyncio.sleep(0.2)
        await fetcher.close()
        assert all(
            isinstance(f, Failure) for f in await asyncio.gather(*asking, return_exceptions=True)
        )
        guard.close()


@pytest.mark.parametrize(
    "charset",
    [
        "utf-16",
        "utf-7",
        "utf-8",
        "none-such",
        "",
        "idna",
        "rot13",
        "hex",
        "zlib",
        "unicode_escape",
        "\x00",
        "a" * 5000,
        "shift_jis",
        "utf-8\r\nX: y",
    ],
)
def test_a_page_with_a_wrong_charset_is_decoded_as_text(charset: str) -> None:
    body = (
        "<title>Käse 茶</title>".encode()
        + bytes(range(256))
        + b"\xff\xfe\xed\xa0\x80<p class=a>x</p>"
    )
    page = Page(
        "http://shop.test/", body, headers={"Content-Type": f"text/html; charset={charset}"}
    )
    assert isinstance(page.text, str)
    page.text.encode("utf-8")  # no lone surrogate, which no sink accepts
    for found in (page.css("title::text").get(), page.xpath("//title/text()").get()):
        assert found is None or isinstance(found, str)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "server":
        asyncio.run(_server())
    else:
        import uvloop

        uvloop.run(_client(int(rest[0]), rest[1:], role == "together"))
