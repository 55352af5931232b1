"""The demo's pipeline, in the form a user would write: sources, extractor, hook and sinks."""

from collections.abc import Iterator

from penstock import Change, Page, Pipeline

SHOP = "http://127.0.0.1:8000"

shop = Pipeline("shop")
# A list of URLs is a valid sitemap. The other products are found by following links.
shop.source(f"sitemap+{SHOP}/seeds.txt", name="seeds")
# The feed has an entry for every price change.
shop.source(f"feed+{SHOP}/feed.xml", name="changes", every="1s", priority="high")


@shop.extract(match="*/product/*", version=1, key="sku")
def product(page: Page) -> Iterator[object]:
    price = page.css(".price::text").get()
    if not price:
        # A redesigned page. It counts as `empty`, which the display and `status` show. The last
        # good row stays.
        return
    yield {
        "sku": page.css("[data-sku]::attr(data-sku)").get(),
        "title": page.css("h1::text").get(),
        "price": price.removeprefix("€"),
    }
    yield from page.follow("a.related")


@shop.on_change(fields=["price"])
def price_moved(change: Change) -> None:
    if change.old:  # a new product has no old price
        with open("changes.txt", "a", encoding="utf-8") as f:
            f.write(f"{change.new['title']}: €{change.old['price']} → €{change.new['price']}\n")


shop.sink("jsonl:records.jsonl")  # every record, in order of arrival
shop.sink("sqlite:products.db?table=products")  # the newest row of each product
