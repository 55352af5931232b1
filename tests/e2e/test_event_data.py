"""A changed event or extractor changes the row, although the page is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import Project, Site, wait_for
from tests.e2e.test_cdc import Database
from tests.e2e.test_changes import with_etag
from tests.servers import Handle

from penstock.testing.web import Reply, Request, json_reply, reply, tagged

READS_DATA = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/p/*", key="sku")
def product(page: Page):
    sku = page.css("h1::text").get()
    yield {"sku": sku, "price": page.event.data.get("price")}

shop.sink("jsonl:products.jsonl")
shop.sink("sqlite:products.db?table=products")
"""
API = 'shop.source("api+{base}/api.json", name="api", every="100ms", items="items", key="sku")\n'
ROLES = ("fetch", "extract", "sink")


class Shop:
    """A site with one product page that never changes, and an API with its price."""

    def __init__(self, site: Site, *, etag: bool = False) -> None:
        self._site, self.price = site, 10
        self.url = site.serve("/p/1", with_etag("<h1>A-1</h1>") if etag else "<h1>A-1</h1>")
        site.serve("/api.json", self._answer)

    def _answer(self, request: Request) -> Reply:
        item = {"sku": "A-1", "url": self.url, "price": self.price}
        return tagged(request, json_reply({"items": [item]}))

    @property
    def base(self) -> str:
        return self._site.url("").rstrip("/")


def prices(project: Project) -> list[Any]:
    return [row["price"] for row in project.rows()]


def visit(project: Project, shop: Shop, price: int) -> None:
    shop.price = price
    project.run()


@pytest.mark.parametrize("etag", [False, True], ids=["same-bytes", "304"])
@pytest.mark.parametrize("isolation", ["process", "none"])
def test_a_price_of_an_api_that_changes_twice_ends_in_the_sink(
    project: Project, site: Site, etag: bool, isolation: str
) -> None:
    project.set(dedup_window="0s", dedup_settle="0s", extract_isolation=isolation)
    shop = Shop(site, etag=etag)
    project.write("shop.py", READS_DATA + API.format(base=shop.base))
    for price in (10, 12, 12, 13):
        visit(project, shop, price)
    assert prices(project) == [10, 12, 13]
    assert [entry.status for entry in site.asked("/p/1")] == (
        [200, 304, 304] if etag else [200] * 3
    )


def test_a_change_inside_the_freshness_window_replaces_the_older_one(
    project: Project, site: Site
) -> None:
    project.set(dedup_window="3s")
    shop = Shop(site)
    lines = [json.dumps({"url": shop.url, "price": price}) for price in range(10, 16)]
    project.write("prices.jsonl", "\n".join(lines) + "\n")
    project.write("shop.py", READS_DATA + 'shop.source("seeds:prices.jsonl", name="prices")\n')
    project.run()
    assert prices(project)[-1] == 15, "the newest event"
    assert prices(project) == sorted(prices(project))
    assert len(site.asked("/p/1")) == len(prices(project)) <= 3, "older events share a request"
    total = project.total()
    assert (total["success"], total["dead"]) == (len(prices(project)), 0)
    assert total["success"] + total["duplicate"] == len(lines)
    project.doctor()


def accepted_events(project: Project) -> int:
    return len(project.events())


def open_events(project: Project) -> int:
    total = project.total()
    return total["pending"] + total["in_flight"] + total["delayed"]


def test_duplicates_without_a_reader_of_their_data_stay_duplicates(
    project: Project, site: Site
) -> None:
    project.set(dedup_window="120s", dedup_settle="60s")
    shop = Shop(site)
    blind = READS_DATA.replace('page.event.data.get("price")', "1")
    project.write("shop.py", blind + API.format(base=shop.base))
    running = project.start("run", "shop.py")
    wait_for(lambda: project.written() == 1, "the first row")
    shop.price = 11
    wait_for(lambda: accepted_events(project) == 2, "the second event")
    wait_for(lambda: open_events(project) == 0, "all ends")
    running.signal(15)
    assert running.wait() == 0, running.output
    assert prices(project) == [1]
    assert project.total()["duplicate"] == 1
    assert len(site.asked("/p/1")) == 1


def test_separate_roles_see_a_changed_event_too(project: Project, site: Site) -> None:
    project.set(dedup_window="0s", dedup_settle="0s")
    shop = Shop(site, etag=True)
    project.write("shop.py", READS_DATA + API.format(base=shop.base))
    running = [project.start("run", "shop.py", "--role", role) for role in (*ROLES, "source")]
    for count, price in enumerate((10, 12, 13), 1):
        shop.price = price
        wait_for(lambda n=count: len(project.rows()) == n, f"the row with price {price}")
    for each in running:
        each.signal(15)
    for each in running:
        assert each.wait() == 0, each.output
    assert prices(project) == [10, 12, 13]


@pytest.mark.server("postgres")
def test_an_update_of_a_table_row_changes_the_row_in_the_sink(
    project: Project, site: Site, server: Callable[[str], Handle]
) -> None:
    database = Database(server("postgres").url)
    try:
        database.db.execute("ALTER TABLE scrape_requests ADD COLUMN price int")
        project.set(dedup_window="0s", dedup_settle="0s")
        shop = Shop(site, etag=True)
        source = database.url.replace("postgres:", "postgres+cdc:")
        source += ("&" if "?" in source else "?") + "operations=insert,update"
        project.write("shop.py", READS_DATA + f'shop.source("{source}", name="asked")\n')
        running = project.start("run", "shop.py")
        wait_for(lambda: any(active for _, active in database.slots()), "the change stream")
        change(database, "INSERT INTO scrape_requests(url, price) VALUES(%s, 10)", shop.url)
        wait_for(lambda: prices(project) == [10], "the first price")
        for price in (12, 13):
            change(database, f"UPDATE scrape_requests SET price={price} WHERE url=%s", shop.url)
            wait_for(lambda price=price: prices(project)[-1] == price, f"price {price}")
        running.signal(15)
        assert running.wait() == 0, running.output
        assert prices(project) == [10, 12, 13]
    finally:
        project.close()
        database.close()


def change(database: Database, statement: str, url: str) -> None:
    db: psycopg.Connection[Any] = database.db
    db.execute(statement, (url,))


def test_an_edit_of_only_the_extractors_code_changes_the_row(project: Project, site: Site) -> None:
    project.set(dedup_window="0s", dedup_settle="0s")
    shop = Shop(site, etag=True)
    project.write("prices.py", "def price(page):\n    return 1\n")
    text = READS_DATA.replace('page.event.data.get("price")', "price(page)")
    text = text.replace("    sku =", "    from prices import price\n    sku =")
    project.write("shop.py", text)

    def visit_again() -> None:
        project.push(shop.url)
        project.run()

    visit_again()
    visit_again()
    assert prices(project) == [1]
    project.write("prices.py", "def price(page):\n    return 2\n")
    visit_again()
    assert prices(project) == [1, 2], "a module of the pipeline's folder was changed"
    project.write("shop.py", text.replace("price(page)}", "price(page) + 1}"))
    visit_again()
    assert prices(project) == [1, 2, 3], "the pipeline file was changed"
    visit_again()
    assert prices(project) == [1, 2, 3]
    assert [entry.status for entry in site.asked("/p/1")] == [200, 304, 304, 304, 304]


def test_an_extractor_that_reads_headers_runs_at_each_visit(project: Project, site: Site) -> None:
    project.set(dedup_window="0s", dedup_settle="0s")
    stock = iter(("1", "2"))
    url = site.serve("/p/1", lambda _: reply("<h1>A-1</h1>", x_stock=next(stock)))
    text = READS_DATA.replace('page.event.data.get("price")', 'page.headers["x-stock"]')
    project.write("shop.py", text)
    for _ in range(2):
        project.push(url)
        project.run()
    assert prices(project) == ["1", "2"]
