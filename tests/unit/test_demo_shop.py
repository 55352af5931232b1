"""The demo's shop: prices by seed and clock, a growing change list, and pages with known faults."""

from __future__ import annotations

import asyncio
import gzip
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock import Page
from penstock.authoring.load import load
from penstock.demo.goods import BROKEN, CATEGORIES, LIMITED, PRODUCTS
from penstock.demo.shop import Shop, serve
from penstock.model import Follow
from penstock.testing.web import Reply, Request

START = 1_700_000_000.0


class Time:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def shop(clock: Time) -> Shop:
    return opened(clock)


def opened(clock: Time, seed: int = 7) -> Shop:
    shop = Shop(seed=seed, clock=clock)
    shop.base, shop.limited = "http://shop.example", "http://limited.example"
    return shop


def get(shop: Shop, url: str, **headers: str) -> Reply:
    parts = urlsplit(url)
    answer = shop.answer_limited if parts.netloc == "limited.example" else shop.answer
    return answer(
        Request(
            "GET",
            parts.path,
            parts.query,
            {k.replace("_", "-"): v for k, v in headers.items()},
            b"",
            80,
        )
    )


def page(shop: Shop, url: str) -> Page:
    answer = get(shop, url)
    assert answer.status == 200
    return Page(url, answer.body, headers=dict(answer.headers))


def extracted(page: Page) -> tuple[list[dict[str, str]], list[str]]:
    """Run the demo's extractor. Return its records and the followed URLs."""
    pipeline = load(Path(__file__).parents[2] / "src/penstock/demo/pipeline.py")
    (extractor,) = pipeline.matching(page.url)
    made = list(extractor.fn(page))
    return [m for m in made if isinstance(m, dict)], [m.url for m in made if isinstance(m, Follow)]


def changes(shop: Shop, query: str = "") -> list[dict[str, object]]:
    listed = json.loads(get(shop, f"http://shop.example/changes.json{query}").body)["changes"]
    assert isinstance(listed, list)
    return listed


def test_there_are_more_than_forty_products_with_distinct_names_and_numbers() -> None:
    sold = [p for p in PRODUCTS if p.slug != BROKEN]
    assert len(sold) > 40
    assert (
        len({p.sku for p in sold})
        == len({p.name for p in sold})
        == len({p.slug for p in sold})
        == len(sold)
    )
    assert {p.category for p in sold} == set(CATEGORIES)


def test_two_shops_with_one_seed_have_the_same_changes(clock: Time) -> None:
    asked, left_alone, other = opened(clock), opened(clock), opened(clock, seed=8)
    for _ in range(600):
        clock.now += 0.1
        changes(asked)
    assert changes(asked) == changes(left_alone)
    assert asked.products == left_alone.products
    assert len(changes(asked)) > 15
    assert changes(asked) != changes(other)


def test_every_price_change_is_bounded_and_the_last_one_is_the_shown_price(
    shop: Shop, clock: Time
) -> None:
    clock.now += 3600
    listed = {p.slug: p.price for p in PRODUCTS}
    last = dict(listed)
    for change in shop.changes:
        slug = change.product.slug
        assert change.old == last[slug] != change.new
        assert listed[slug] / 2 < change.new < listed[slug] * 2
        last[slug] = change.new
    assert {p.slug: p.price for p in shop.products} == last
    knife = page(shop, "http://shop.example/product/santoku-knife-17-cm")
    assert extracted(knife)[0][0]["price"] == str(last["santoku-knife-17-cm"])


def test_the_change_list_grows_at_its_end_and_can_be_read_from_a_cursor(
    shop: Shop, clock: Time
) -> None:
    clock.now += 30
    first = changes(shop)
    clock.now += 30
    second = changes(shop)
    assert second[: len(first)] == first
    assert [c["id"] for c in second] == list(range(1, len(second) + 1))
    assert changes(shop, f"?after={first[-1]['id']}") == second[len(first) :]
    assert changes(shop, f"?after={second[-1]['id']}") == []
    assert get(shop, "http://shop.example/changes.json?after=x").status == 400


def test_the_seeds_and_the_links_from_them_reach_every_product(shop: Shop) -> None:
    seeds = get(shop, "http://shop.example/seeds.txt").body.decode().split()
    assert len(seeds) < len(PRODUCTS) / 2
    found, waiting = set(seeds), [url for url in seeds if "limited" not in url]
    steps = 0
    while waiting:
        steps += 1
        links = {link for url in waiting for link in extracted(page(shop, url))[1]}
        waiting = sorted(links - found)
        found |= links
    assert found == {shop.url(p.slug) for p in PRODUCTS} | {
        f"http://limited.example/product/{LIMITED.slug}"
    }
    assert steps <= 6  # within the default follow depth


def test_a_product_page_has_the_same_data_in_markup_and_in_json_ld(shop: Shop) -> None:
    for item in PRODUCTS[:-1]:
        found = page(shop, shop.url(item.slug))
        assert extracted(found)[0] == [
            {"sku": item.sku, "title": item.name, "price": str(item.price)}
        ]
        (described,) = found.jsonld()
        assert (described["sku"], described["name"], described["offers"]["price"]) == (
            item.sku,
            item.name,
            str(item.price),
        )


def test_a_page_is_304_until_its_price_changes(shop: Shop, clock: Time) -> None:
    tags = {p.slug: get(shop, shop.url(p.slug)).headers["etag"] for p in PRODUCTS}
    clock.now += 10
    moved = {c.product.slug for c in shop.changes}
    assert moved
    statuses = {
        slug: get(shop, shop.url(slug), if_none_match=tag).status for slug, tag in tags.items()
    }
    assert {slug for slug, status in statuses.items() if status == 200} == moved
    assert {status for slug, status in statuses.items() if slug not in moved} == {304}


def test_the_broken_page_has_a_price_and_no_key(shop: Shop) -> None:
    (record,) = extracted(page(shop, shop.url(BROKEN)))[0]
    assert record["title"] == "Mystery Box"
    assert not record["sku"]
    assert not any(c.product.slug == BROKEN for c in shop.changes)


def test_the_limited_page_returns_429_until_retry_after_has_passed(shop: Shop, clock: Time) -> None:
    url = f"http://limited.example/product/{LIMITED.slug}"
    assert get(shop, "http://limited.example/robots.txt").status == 200  # without using a refusal
    first = get(shop, url)
    assert (first.status, first.headers["retry-after"]) == (429, "3")
    clock.now += 1.2
    early = get(shop, url)
    assert (early.status, early.headers["retry-after"]) == (429, "2")
    clock.now += 1.8
    assert extracted(page(shop, url))[0][0]["sku"] == LIMITED.sku
    assert get(shop, url).status == 200


def test_the_limited_page_can_return_429_more_than_once(clock: Time) -> None:
    shop = Shop(clock=clock, refusals=2, retry_after=5)
    shop.limited = "http://limited.example"
    statuses = []
    for _ in range(4):
        statuses.append(get(shop, f"http://limited.example/product/{LIMITED.slug}").status)
        clock.now += 5
    assert statuses == [429, 429, 200, 200]


def test_after_a_redesign_the_old_selector_fails_and_the_json_ld_is_unchanged(
    shop: Shop,
) -> None:
    url = shop.url("dry-bag-10-l")
    before, tag = page(shop, url), get(shop, url).headers["etag"]
    shop.redesign()
    after = page(shop, url)
    assert (before.css(".price").get() is None, after.css(".price").get() is None) == (False, True)
    assert get(shop, url, if_none_match=tag).status == 200
    assert extracted(after) == ([], [])  # counted as `empty`
    assert after.jsonld() == before.jsonld()


def test_a_redesign_of_one_page_does_not_change_other_pages(shop: Shop) -> None:
    shop.redesign(["dry-bag-10-l"])
    assert page(shop, shop.url("dry-bag-10-l")).css(".price").get() is None
    assert page(shop, shop.url("titanium-spork")).css(".price").get() is not None


def test_feed_sitemap_and_api_show_the_changes_and_keep_their_etag_otherwise(
    shop: Shop, clock: Time
) -> None:
    def tags() -> dict[str, str]:
        paths = (
            "/feed.xml",
            "/sitemap.xml",
            "/sitemap-1.xml.gz",
            "/sitemap-2.xml",
            "/api/products.json",
            "/api/products.json?page=2",
        )
        return {path: get(shop, "http://shop.example" + path).headers["etag"] for path in paths}

    assert tags() == tags()
    before = tags()
    clock.now += 20
    made, after = shop.changes, tags()
    assert {path for path in after if after[path] != before[path]} >= {"/feed.xml", "/sitemap.xml"}
    feed = ElementTree.fromstring(get(shop, "http://shop.example/feed.xml").body)
    items = feed.findall("channel/item")
    assert [i.findtext("link") for i in items] == [shop.url(c.product.slug) for c in reversed(made)]
    assert len({i.findtext("guid") for i in items}) == len(made)
    space = {"s": "http://www.sitemaps.org/schemas/sitemap/0.9"}
    index = ElementTree.fromstring(get(shop, "http://shop.example/sitemap.xml").body)
    modified: dict[str, str] = {}
    for loc in index.iterfind("s:sitemap/s:loc", space):
        body = get(shop, loc.text or "").body
        part = ElementTree.fromstring(
            gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body
        )
        modified |= {
            u.findtext("s:loc", "", space): u.findtext("s:lastmod", "", space)
            for u in part.findall("s:url", space)
        }
    assert set(modified) == {shop.url(p.slug) for p in PRODUCTS}
    opened_at = min(modified.values())
    assert {url for url, at in modified.items() if at > opened_at} == {
        shop.url(c.product.slug) for c in made
    }


def test_the_api_lists_every_product_with_a_sku_in_pages(shop: Shop, clock: Time) -> None:
    clock.now += 20
    found, path = [], "/api/products.json"
    while path:
        answer = get(shop, "http://shop.example" + path)
        page = json.loads(answer.body)
        found += page["products"]
        path = page["next"]
        assert ("link" in answer.headers) == bool(path)
    assert {p["sku"]: p["price"] for p in found} == {
        p.sku: str(p.price) for p in shop.products if p.sku
    }
    assert get(shop, "http://shop.example/api/products.json?page=0").status == 400
    assert json.loads(get(shop, "http://shop.example/api/products.json?page=99").body) == {
        "products": [],
        "next": None,
    }


def test_every_link_of_the_shop_is_a_page_and_no_resource_is_external(
    shop: Shop,
) -> None:
    waiting, seen = ["/"], {"/"}
    while waiting:
        answer = get(shop, "http://shop.example" + waiting.pop())
        assert answer.status == 200
        if answer.headers["content-type"].startswith("text/html"):
            found = Page("http://shop.example/", answer.body)
            assert found.css("[src]").getall() == []
            for href in found.css("[href]::attr(href)").getall():
                assert href.startswith(("/", "http://limited.example/"))
                if href.startswith("/") and href not in seen:
                    seen.add(href)
                    waiting.append(href)
    assert {f"/product/{p.slug}" for p in PRODUCTS} < seen


def test_an_unknown_path_is_404_and_a_post_is_405(shop: Shop) -> None:
    for path in (
        "/product/nothing",
        "/category/nothing",
        "/product/dry-bag-10-l/more",
        "/product",
        "/favicon.ico",
    ):
        assert get(shop, "http://shop.example" + path).status == 404
    assert get(shop, "http://limited.example/product/dry-bag-10-l").status == 404
    assert shop.answer(Request("POST", "/", "", {}, b"", 80)).status == 405


def test_robots_txt_allows_everything_on_both_ports(shop: Shop) -> None:
    for host in ("shop", "limited"):
        assert b"Disallow" not in get(shop, f"http://{host}.example/robots.txt").body


def test_a_shop_on_two_ports_lists_urls_of_both_ports() -> None:
    async def scenario() -> None:
        shop = Shop()
        async with asyncio.timeout(60), serve(shop) as web:
            reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
            writer.write(b"GET /seeds.txt HTTP/1.0\r\n\r\n")
            seeds = (await reader.read()).partition(b"\r\n\r\n")[2].decode().split()
            writer.close()
        assert {url.partition("/product/")[0] for url in seeds} == {shop.base, shop.limited}
        assert shop.base != shop.limited

    asyncio.run(scenario())
