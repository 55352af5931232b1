"""The demo's shop: products, price changes and HTTP answers. See `storefront` for the pages.

It opens no sockets before `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import math
import os
import random
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal

from penstock.demo import storefront
from penstock.demo.goods import BROKEN, CATEGORIES, CURRENCY, LIMITED, PRODUCTS, Product
from penstock.testing.web import HTML, TEXT, XML, Reply, Request, Web, json_reply, reply, tagged

KEEP_CHANGES = 10_000
PAGE_OF_CHANGES = 500
PAGE_OF_PRODUCTS = 20
IN_FEED = 200  # changes
_LIST_PRICES = {p.slug: p.price for p in PRODUCTS}


@dataclass(frozen=True, slots=True)
class Change:
    """One price change. Ids increase, so a reader can remember the last id it has seen."""

    id: int
    at: float
    product: Product
    old: Decimal
    new: Decimal


class Shop:
    """A shop whose prices depend only on the seed and the clock, not on the requests.

    `serve` sets `base` and `limited`, the addresses of the shop.
    """

    def __init__(
        self,
        *,
        seed: int = 7,
        clock: Callable[[], float] = time.time,
        every: tuple[float, float] = (1.0, 3.0),
        retry_after: float = 3.0,
        refusals: int = 1,
    ) -> None:
        self._clock, self._every = clock, every
        self._random = random.Random(seed)
        self._next_move = clock() + self._random.uniform(*every)
        self._opened = clock()
        self._movable = [p.slug for p in PRODUCTS if p.slug != BROKEN]
        self._goods = {p.slug: p for p in PRODUCTS}
        self._moved = dict.fromkeys(self._goods, self._opened)
        self._changes: deque[Change] = deque(maxlen=KEEP_CHANGES)
        self._last_id = 0
        self._retry_after, self._refusals, self._open_again = retry_after, refusals, 0.0
        self._redesigned: frozenset[str] = frozenset()
        self.base = self.limited = ""

    # -- price changes

    def advance(self) -> None:
        """Apply the price changes up to now. Every answer calls this first."""
        now = self._clock()
        while self._next_move <= now:
            self._move(self._next_move)
            self._next_move += self._random.uniform(*self._every)

    def _move(self, at: float) -> None:
        product = self._goods[self._random.choice(self._movable)]
        new = self._priced(product)
        self._last_id += 1
        self._changes.append(Change(self._last_id, at, product, product.price, new))
        self._goods[product.slug] = replace(product, price=new)
        self._moved[product.slug] = at

    def _priced(self, product: Product) -> Decimal:
        """Return a new price: a few per cent up or down, with a pull towards the list price.

        Below €20 it ends in 9 cents, and from €20 on in 49 or 99. It differs from the old price.
        """
        listed = _LIST_PRICES[product.slug]
        pull = float(listed - product.price) / float(listed)
        cents = round(
            float(product.price) * (1 + self._random.uniform(-0.12, 0.12) + pull / 3) * 100
        )
        new = (
            Decimal(cents - cents % 10 + 9) / 100
            if cents < 2000
            else Decimal(cents - cents % 50 + 49) / 100
        )
        return new if new != product.price else new + Decimal("0.50")

    def redesign(self, slugs: Iterable[str] | None = None) -> None:
        """Use new markup for these products, or for all: `.price` matches nothing from now on.

        The shop does not announce the change.
        """
        self._redesigned |= frozenset(self._goods if slugs is None else slugs)

    @property
    def products(self) -> tuple[Product, ...]:
        self.advance()
        return tuple(self._goods.values())

    @property
    def changes(self) -> tuple[Change, ...]:
        self.advance()
        return tuple(self._changes)

    # -- answers

    def seeds(self) -> list[str]:
        """Return two products of each category, the broken and the limited one.

        The other products are found by following `a.related`.
        """
        first = [
            p.slug
            for category in CATEGORIES
            for p in [p for p in PRODUCTS if p.category == category and p.slug != BROKEN][:2]
        ]
        # The broken product is one of the first, because a redesign would hide its missing SKU.
        early = (*first[:2], BROKEN, *first[2:])
        return [*(self.url(slug) for slug in early), f"{self.limited}/product/{LIMITED.slug}"]

    def url(self, slug: str) -> str:
        return f"{self.base}/product/{slug}"

    def answer(self, request: Request) -> Reply:
        """Answer a request for any page except the limited edition."""
        if request.method not in ("GET", "HEAD"):
            return reply("GET or HEAD\n", TEXT, 405, allow="GET, HEAD")
        self.advance()
        answer = self._answer(request)
        return tagged(request, answer) if answer.status == 200 else answer

    def _answer(self, request: Request) -> Reply:
        match request.path.strip("/").split("/"):
            case [""]:
                return reply(storefront.front(self.products, self.limited), HTML)
            case ["product", slug] if slug in self._goods:
                return reply(self._page(self._goods[slug]), HTML)
            case ["category", slug] if any(storefront.slug(c) == slug for c in CATEGORIES):
                name = next(c for c in CATEGORIES if storefront.slug(c) == slug)
                return reply(
                    storefront.category(name, [p for p in self.products if p.category == name]),
                    HTML,
                )
            case ["seeds.txt"]:
                return reply("".join(url + "\n" for url in self.seeds()), TEXT)
            case ["changes.json"]:
                return self._change_list(request)
            case ["feed.xml"]:
                return reply(
                    storefront.feed(
                        self.base,
                        [
                            (c.id, c.at, c.product, c.old, c.new)
                            for c in list(self._changes)[-IN_FEED:][::-1]
                        ],
                    ),
                    XML,
                )
            case ["sitemap.xml"]:
                return reply(
                    storefront.sitemap_index(
                        [
                            (self.base + path, max(at for _, at in pages))
                            for path, pages in self._sitemaps().items()
                        ]
                    ),
                    XML,
                )
            case [name] if f"/{name}" in (maps := self._sitemaps()):
                made = storefront.sitemap(maps[f"/{name}"]).encode()
                return (
                    reply(gzip.compress(made, mtime=0), "application/gzip")
                    if name.endswith(".gz")
                    else reply(made, XML)
                )
            case ["api", "products.json"]:
                return self._products(request)
            case ["robots.txt"]:
                return reply(f"User-agent: *\nAllow: /\n\nSitemap: {self.base}/sitemap.xml\n", TEXT)
            case _:
                return reply(storefront.missing(), HTML, 404)

    def _page(self, product: Product) -> str:
        related = [self._goods[slug] for slug in _related(product.slug)]
        return storefront.product(
            product,
            related,
            broken=product.slug == BROKEN,
            redesigned=product.slug in self._redesigned,
        )

    def _sitemaps(self) -> dict[str, list[tuple[str, float]]]:
        """Return the products in two sitemaps, one of them compressed."""
        pages = [(self.url(slug), at) for slug, at in self._moved.items()]
        return {
            "/sitemap-1.xml.gz": pages[: len(pages) // 2],
            "/sitemap-2.xml": pages[len(pages) // 2 :],
        }

    def _products(self, request: Request) -> Reply:
        """Return one page of products, with the next page in the body and in the Link header.

        Products without a SKU are not listed.
        """
        page = request.params.get("page", "1")
        if not (page.isascii() and page.isdigit() and 0 < int(page[:9]) < 10**6):
            return json_reply({"error": "page must be a number from 1 up"}, 400)
        listed = [p for p in self._goods.values() if p.sku]
        at = (int(page) - 1) * PAGE_OF_PRODUCTS
        following = (
            f"/api/products.json?page={int(page) + 1}"
            if at + PAGE_OF_PRODUCTS < len(listed)
            else None
        )
        products = [
            {
                "sku": p.sku,
                "name": p.name,
                "url": f"/product/{p.slug}",
                "price": str(p.price),
                "currency": CURRENCY,
                "stock": p.stock,
                "changed": storefront.iso(self._moved[p.slug]),
            }
            for p in listed[at : at + PAGE_OF_PRODUCTS]
        ]
        body = {"products": products, "next": following}
        return (
            json_reply(body, link=f'<{following}>; rel="next"') if following else json_reply(body)
        )

    def _change_list(self, request: Request) -> Reply:
        after = request.params.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) < 16):
            return json_reply({"error": "after must be the id of a change"}, 400)
        later = [c for c in self._changes if c.id > int(after)][:PAGE_OF_CHANGES]
        lines = [
            {
                "id": c.id,
                "at": storefront.iso(c.at),
                "sku": c.product.sku,
                "url": self.url(c.product.slug),
                "field": "price",
                "old": str(c.old),
                "new": str(c.new),
                "currency": CURRENCY,
            }
            for c in later
        ]
        return json_reply({"changes": lines, "last": later[-1].id if later else int(after)})

    def answer_limited(self, request: Request) -> Reply:
        """Answer a request for the limited edition, which has a separate port.

        The first `refusals` requests get 429, and so does a request before Retry-After has passed.
        """
        if request.method not in ("GET", "HEAD"):
            return reply("GET or HEAD\n", TEXT, 405, allow="GET, HEAD")
        if request.path == "/robots.txt":
            return reply("User-agent: *\nAllow: /\n", TEXT)
        if request.path != f"/product/{LIMITED.slug}":
            return reply(storefront.missing(), HTML, 404)
        now = self._clock()
        if now < self._open_again or self._refusals > 0:
            if now >= self._open_again:
                self._refusals -= 1
                self._open_again = now + self._retry_after
            wait = max(1, math.ceil(self._open_again - now))
            return reply(storefront.busy(wait), HTML, 429, retry_after=str(wait))
        return tagged(
            request,
            reply(
                storefront.product(LIMITED, [], redesigned=LIMITED.slug in self._redesigned), HTML
            ),
        )


def _related(slug: str) -> list[str]:
    """Return the next two products of the category, and one from further on in the catalogue.

    All products are reached from the seeds in a few steps.
    """
    slugs = [p.slug for p in PRODUCTS]
    here = slugs.index(slug)
    siblings = [p.slug for p in PRODUCTS if p.category == PRODUCTS[here].category]
    mine = siblings.index(slug)
    wanted = [
        siblings[(mine + 1) % len(siblings)],
        siblings[(mine + 2) % len(siblings)],
        slugs[(here + 7) % len(slugs)],
    ]
    return list(dict.fromkeys(s for s in wanted if s not in (slug, BROKEN)))


@contextlib.asynccontextmanager
async def serve(
    shop: Shop, *, port: int = 0, limited_port: int = 0, log: str | os.PathLike[str] | None = None
) -> AsyncIterator[Web]:
    """Serve the shop on two loopback ports, and set `shop.base` and `shop.limited`."""
    async with Web(shop.answer, port=port, log=log) as web:
        shop.base = web.url("")
        shop.limited = web.url(
            "", port=await web.listen(port=limited_port, handler=shop.answer_limited)
        )
        yield web


async def _main(options: argparse.Namespace) -> None:
    stop, parent = asyncio.Event(), os.getppid()
    loop = asyncio.get_running_loop()
    shop = Shop(seed=options.seed, every=tuple(options.every))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, shop.redesign)
    async with serve(shop, port=options.port, limited_port=options.limited_port, log=options.log):
        print(
            json.dumps({"url": shop.base, "limited": shop.limited, "pid": os.getpid()}), flush=True
        )
        while not stop.is_set():
            if options.with_parent and os.getppid() != parent:  # the demo process was killed
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.demo.shop",
        description="The demo's shop, to browse or to scrape. SIGUSR1 redesigns it.",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="port (0 is any free port, the addresses are printed as one JSON line)",
    )
    parser.add_argument("--limited-port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--every",
        type=float,
        nargs=2,
        default=(1.0, 3.0),
        metavar=("FROM", "TO"),
        help="seconds between two price changes",
    )
    parser.add_argument("--log", help="append one JSON line per request to this file")
    parser.add_argument(
        "--with-parent",
        action="store_true",
        help="end when the process that started this one has ended",
    )
    asyncio.run(_main(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
