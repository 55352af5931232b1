"""Crawlee: its parsel crawler with 64 concurrent requests, rows as JSON lines.

Its queue is in memory. The default queue in files is several times slower.
"""

import asyncio
import json

from crawlee import ConcurrencySettings
from crawlee.crawlers import ParselCrawler, ParselCrawlingContext
from crawlee.storage_clients import MemoryStorageClient
from job import CONCURRENCY, CSS, OUT, ended, report, started, urls


async def main() -> None:
    at_once = ConcurrencySettings(
        min_concurrency=CONCURRENCY, desired_concurrency=CONCURRENCY, max_concurrency=CONCURRENCY
    )
    crawler = ParselCrawler(
        storage_client=MemoryStorageClient(), concurrency_settings=at_once, configure_logging=False
    )
    with open(OUT, "w", encoding="utf-8") as out:

        @crawler.router.default_handler
        async def product(context: ParselCrawlingContext) -> None:
            row = {name: context.selector.css(css).get() for name, css in CSS.items()}
            out.write(json.dumps({"url": context.request.url, **row}) + "\n")

        started()
        await crawler.run(urls())
    ended()


asyncio.run(main())
report()
