"""The demo's pipeline, written as a user would: what tells us of changes, what to read from a
product page, where it goes, what to do when a price moves.
"""

from collections.abc import Iterator

from penstock import Change, Page, Pipeline

SHOP = "http://127.0.0.1:8000"

shop = Pipeline("shop")
shop.source(
    f"sitemap+{SHOP}/seeds.txt", name="seeds"
)  # a list of URLs is a sitemap too; the rest is found by following links
shop.source(
    f"feed+{SHOP}/feed.xml", name="changes", every="1s", priority="high"
)  # an entry for every price that moved


@shop.extract(match="*/product/*", version=1, key="sku")
def product(page: Page) -> Iterator[object]:
    price = page.css(".price::text").get()
    if not price:
        # a redesigned page: it counts as `empty`, which the display and `status` show, and the last
        # good row stays
        return
    yield {
        "sku": page.css("[data-sku]::attr(data-sku)").get(),
        "title": page.css("h1::text").get(),
        "price": price.removeprefix("€"),
    }
    yield from page.follow("a.related")


@shop.on_change(fields=["price"])
def price_moved(change: Change) -> None:
    if change.old:  # the first sight of a product is no change
        with open("changes.txt", "a", encoding="utf-8") as f:
            f.write(f"{change.new['title']}: €{change.old['price']} → €{change.new['price']}\n")


shop.sink("jsonl:records.jsonl")  # every record, as it came
shop.sink("sqlite:products.db?table=products")  # one row a product, the newest
