"""Lists of proxies from a provider: their proxies, and their limits."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.fetching.proxies import MAX_LIST, fetch_list
from penstock.model import Failure
from penstock.net.guard import Guard, parse_allow
from penstock.net.http import CurlFetcher
from penstock.testing.web import Web, reply


async def read(body: bytes) -> tuple[list[str], float]:
    """Return the labels of the proxies, and the CPU seconds of the longest turn of the loop."""
    loop = asyncio.get_running_loop()
    longest, before = 0.0, time.thread_time()

    def tick() -> None:
        nonlocal longest, before
        longest, before = max(longest, time.thread_time() - before), time.thread_time()
        timer[0] = loop.call_later(0.001, tick)

    async with Web() as web:
        web.route("/list", reply(body, "text/plain"))
        fetcher = CurlFetcher(Guard(parse_allow(f"127.0.0.1:{web.port}")))
        timer: list[asyncio.Handle] = [loop.call_soon(tick)]
        try:
            members = await fetch_list(fetcher, web.url("/list"))
            await asyncio.sleep(0.01)  # for the last tick
        finally:
            timer[0].cancel()
            await fetcher.close()
    return [member.label for member in members], longest


async def test_a_list_has_one_proxy_on_each_line_with_any_line_end() -> None:
    labels, _ = await read(b"# two\r\n10.0.0.1:80\r\n\n10.0.0.2:80\r10.0.0.1:80\n")
    assert len(labels) == 2


async def test_a_long_list_does_not_stop_the_event_loop() -> None:
    labels, longest = await read(b"10.0.0.1:80\n" * (MAX_LIST // 12))
    assert len(labels) == 1
    assert longest < 0.25  # seconds. Parsing takes 1 s.


async def test_a_list_over_the_limit_is_refused() -> None:
    with pytest.raises(Failure, match="more than 2097152 bytes"):
        await read(b"#" * (MAX_LIST + 1))
