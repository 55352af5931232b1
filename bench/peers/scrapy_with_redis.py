"""scrapy-redis, tuned as Scrapy: start URLs, scheduler and duplicate filter are in Redis.

The second argument is the port of Redis. It is filled before the measured time starts.
"""

import asyncio
import sys

import redis
from job import CONCURRENCY, CSS, OUT, ended, report, started, urls
from scrapy import Request, signals
from scrapy.crawler import CrawlerProcess
from scrapy_redis.spiders import RedisSpider

KEY = "products:start_urls"
address = f"redis://127.0.0.1:{int(sys.argv[2])}"
wanted = urls()
redis.Redis.from_url(address).rpush(KEY, *wanted)


class Products(RedisSpider):
    name = "products"
    redis_key = KEY
    redis_batch_size = CONCURRENCY
    rows = 0

    async def start(self):
        for request in self.next_requests():
            yield request

    def make_request_from_data(self, data):
        return Request(data.decode())

    def parse(self, response):
        yield {"url": response.url, **{name: response.css(css).get() for name, css in CSS.items()}}
        self.rows += 1
        if self.rows == len(wanted):  # a scrapy-redis spider does not end by itself
            self.closing = asyncio.ensure_future(
                self.crawler.engine.close_spider_async(reason="done")
            )


process = CrawlerProcess(
    {
        "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
        "DUPEFILTER_CLASS": "scrapy_redis.dupefilter.RFPDupeFilter",
        "SCHEDULER_PERSIST": True,
        "REDIS_URL": address,
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
