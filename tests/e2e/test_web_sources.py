"""A changing shop, read by feed, sitemap and API sources of a run that is killed repeatedly.

Every change is one event of each source.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.harness import Project, Running, Site, wait_for

from penstock.demo.goods import PRODUCTS
from penstock.demo.shop import Change, Shop
from penstock.model import mint
from penstock.sources import feed
from penstock.testing.web import Reply, Request, reply

pytestmark = pytest.mark.slow
CHANGES = 60
BOMB = (
    '<?xml version="1.0" encoding="UTF-16"?><!DOCTYPE rss [<!ENTITY a '
    '"boom">]><rss><channel><item><guid>&a;</guid></item></channel></rss>'
).encode("utf-16")
PIPELINE = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/product/*", key="sku")
def product(page: Page):
    price = page.css(".price::text").get()
    yield {{"sku": page.css("[data-sku]::attr(data-sku)").get(), "price": price}}

shop.source("feed+{base}/feed.xml", name="feed", every="100ms", window=0)
shop.source("sitemap+{base}/", name="sitemap", every="100ms", window=0)
shop.source("api+{base}/api/products.json", name="api", every="100ms", window=0,
            items="products", key="sku", next="next")
shop.sink("sqlite:products.db?table=products")
"""


class Moving:
    """The demo's shop, whose prices change only when the test calls `move`."""

    def __init__(self) -> None:
        self.now, self._lock = 1_700_000_000.0, threading.Lock()
        self.shop = self._made()
        plan = self._made()
        start, self.now = self.now, self.now + CHANGES
        # All future changes, which follow from the seed and the clock.
        self.plan: tuple[Change, ...] = plan.changes
        self.now = start
        self.answers: dict[str, Reply] = {}  # replace the shop's responses

    def _made(self) -> Shop:
        return Shop(seed=11, clock=lambda: self.now, every=(1.0, 1.0))

    def __call__(self, request: Request) -> Reply:
        with self._lock:
            return self.answers.get(request.path) or self.shop.answer(request)

    def move(self) -> None:
        with self._lock:
            self.now += 1.0
            self.shop.advance()

    def runs(self) -> Iterator[list[Change]]:
        """Split the changes into lists without a repeated product.

        A sitemap shows two changes of a product between two polls as one.
        """
        stretch: list[Change] = []
        for change in self.plan:
            if any(change.product.slug == c.product.slug for c in stretch):
                yield stretch
                stretch = []
            stretch.append(change)
        yield stretch


def sources(project: Project) -> dict[str, dict[str, Any]]:
    done = project.penstock("sources", "ls", "--json", "--pipeline", "shop.py")
    return {s["name"]: s for s in json.loads(done.out)["sources"]} if done.code == 0 else {}


def test_every_shop_change_is_one_event_of_each_source_although_the_run_is_killed(
    project: Project,
) -> None:
    moving, rng = Moving(), random.Random(5)
    site = Site(moving)
    running: Running | None = None
    try:
        moving.shop.base = moving.shop.limited = site.url("")
        project.allow(site.port)
        project.write("shop.py", PIPELINE.format(base=site.url("")))
        running = project.start("run", "shop.py")
        first = {
            "feed": 0,
            "sitemap": len(PRODUCTS),
            "api": len(PRODUCTS) - 1,
        }  # the product without a number is not in the API

        def all_reported(changes: int) -> bool:
            found = sources(project)
            return bool(found) and all(
                found[name]["events"] == count + changes for name, count in first.items()
            )

        wait_for(lambda: all_reported(0), "the first poll", 60, 0.2)
        happened = kills = 0
        for stretch in moving.runs():
            fatal = rng.randrange(len(stretch))
            for n, _ in enumerate(stretch):
                moving.move()
                happened += 1
                if n == fatal:
                    time.sleep(
                        rng.uniform(0.0, 0.4)
                    )  # somewhere between the change and its event, or after it
                    running.kill()
                    kills += 1
                    running = project.start("run", "shop.py")
            if kills == 3:  # serve a feed that must be refused
                moving.answers["/feed.xml"] = reply(BOMB, "application/rss+xml")
                wait_for(
                    lambda: "DTD" in (sources(project).get("feed", {}).get("error") or ""),
                    "the error of the feed",
                    60,
                    0.2,
                )
                moving.answers.clear()
            wait_for(
                lambda n=happened: all_reported(n),
                f"{happened} changes reported by each source",
                60,
                0.2,
            )
        assert happened == CHANGES
        assert kills >= 5
        running.signal(15)
        running.wait()
        project.run()

        events = project.events()
        log = moving.shop.changes
        of = {name: [e for e in events if e["source"] == name] for name in first}
        url, opened = moving.shop.url, moving.now - CHANGES
        entries = feed.parse(
            moving.shop.answer(Request("GET", "/feed.xml", "", {}, b"", site.port)).body, None
        )
        assert [e.id for e in entries] == [f"weir-daughters-change-{c.id}" for c in reversed(log)]
        assert {e["event_id"] for e in of["feed"]} == {
            mint("feed", site.url("/feed.xml"), e.id, e.hash) for e in entries
        }
        states = [
            *((url(c.product.slug), c.at) for c in log),
            *((url(p.slug), opened) for p in PRODUCTS),
        ]
        assert {e["event_id"] for e in of["sitemap"]} == {
            mint("sitemap", loc, f"{at:.3f}") for loc, at in states
        }
        assert Counter(e["url"] for e in of["api"]) == Counter(
            [*(url(c.product.slug) for c in log), *(url(p.slug) for p in PRODUCTS if p.sku)]
        )
        assert (
            len({e["event_id"] for e in events}) == len(events) == sum(first.values()) + 3 * CHANGES
        )
        project.doctor()
    finally:
        if running is not None and not running.ended:
            running.kill()
        site.close()
