"""Job as a user of Penstock writes it: five fields of a product page, one line each."""

from collections.abc import Iterator

from penstock import Page, Pipeline

products = Pipeline("bench")


@products.extract(match="*/product/*", version=1, key="sku")
def product(page: Page) -> Iterator[dict[str, str | None]]:
    yield {
        "sku": page.css(".sku::attr(data-sku)").get(),
        "name": page.css("h1.name::text").get(),
        "brand": page.css("span.brand::text").get(),
        "price": page.css("span.price::attr(content)").get(),
        "rating": page.css("div.rating::attr(data-value)").get(),
    }


products.sink("jsonl:products.jsonl")
