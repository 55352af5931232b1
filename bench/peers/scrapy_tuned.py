"""Scrapy, tuned: 64 concurrent requests, no delay, four item tasks instead of a hundred, parsel.

The feed is JSON lines.
"""

from job import CONCURRENCY, CSS, OUT, ended, report, started, urls
from scrapy import Request, Spider, signals
from scrapy.crawler import CrawlerProcess


class Products(Spider):
    name = "products"

    async def start(self):
        for url in urls():
            yield Request(url)

    def parse(self, response):
        yield {"url": response.url, **{name: response.css(css).get() for name, css in CSS.items()}}


process = CrawlerProcess(
    {
        "CONCURRENT_REQUESTS": CONCURRENCY,
        "CONCURRENT_REQUESTS_PER_DOMAIN": CONCURRENCY,
        "DOWNLOAD_DELAY": 0,
        "CONCURRENT_ITEMS": 4,
        "LOG_LEVEL": "WARNING",
        "FEEDS": {OUT: {"format": "jsonlines", "overwrite": True}},
    }
)
crawler = process.create_crawler(Products)
crawler.signals.connect(started, signals.spider_opened)
crawler.signals.connect(ended, signals.spider_closed)
process.crawl(crawler)
process.start()
report()
