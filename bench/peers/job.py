"""Job of the peers: the list of URLs, the five fields, and the line that each peer prints.

It uses only the standard library.
"""

import json
import sys
import time

FIELDS = {
    "sku": (".sku", "data-sku"),
    "name": ("h1.name", None),
    "brand": ("span.brand", None),
    "price": ("span.price", "content"),
    "rating": ("div.rating", "data-value"),
}
CSS = {
    name: f"{css}::attr({attribute})" if attribute else f"{css}::text"
    for name, (css, attribute) in FIELDS.items()
}
OUT = "products.jsonl"
CONCURRENCY = 64
times: dict[str, float] = {}


def urls() -> list[str]:
    with open(sys.argv[1]) as f:
        return f.read().split()


def started(*_: object, **__: object) -> None:
    times.setdefault("start", time.time())


def ended(*_: object, **__: object) -> None:
    times["end"] = time.time()


def report() -> None:
    print(json.dumps(times), flush=True)
