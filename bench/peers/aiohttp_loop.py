"""Hand-written loop: 64 tasks share one aiohttp session and a list, with uvloop and selectolax.

It writes JSON lines. It has no queue, no retries and no durability.
"""

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import uvloop
from job import CONCURRENCY, FIELDS, OUT, ended, report, started, urls
from selectolax.lexbor import LexborHTMLParser


def row(body: bytes) -> dict[str, str | None]:
    page = LexborHTMLParser(body)
    found = {name: page.css_first(css) for name, (css, _) in FIELDS.items()}
    return {
        name: node and (node.attributes[FIELDS[name][1]] if FIELDS[name][1] else node.text())
        for name, node in found.items()
    }


async def take(session: aiohttp.ClientSession, todo: Iterator[str], out) -> None:
    for url in todo:
        async with session.get(url) as response:
            response.raise_for_status()
            out.write(json.dumps({"url": url, **row(await response.read())}) + "\n")


async def main() -> None:
    todo = iter(urls())
    with open(OUT, "w", encoding="utf-8") as out:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONCURRENCY)
        ) as session:
            started()
            await asyncio.gather(*(take(session, todo, out) for _ in range(CONCURRENCY)))
    ended()


uvloop.run(main())
report()
