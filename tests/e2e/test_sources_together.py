"""A row, a webhook and a feed entry that name one product in the same second: three events, one
fetch, one row.
"""

from __future__ import annotations

import json
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator

import psycopg
import pytest
from tests.e2e.harness import Project, Site, free_port, product, wait_for
from tests.servers import Handle

from penstock.testing.web import Reply

pytestmark = pytest.mark.server("postgres")
SHOP = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/p/*", key="sku")
def product(page: Page):
    price = page.css(".price::text").get()
    yield {{"sku": page.css("[data-sku]::attr(data-sku)").get(), "price": price}}

shop.source("{cdc}", name="rows", priority="high")
shop.source("webhook:shop", name="hook")
shop.source("feed+{feed}", name="feed", every="200ms")
shop.sink("jsonl:products.jsonl")
"""
EMPTY = (
    '<?xml version="1.0"?><rss '
    'version="2.0"><channel><title>shop</title><link>{home}</link>{items}</channel></rss>'
)


@pytest.fixture
def database(server: Callable[[str], Handle]) -> Iterator[str]:
    address = server("postgres").url
    name = f"together_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(address, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    url = address.rpartition("/")[0] + "/" + name
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE TABLE scrape_requests(id bigserial PRIMARY KEY, url text NOT NULL)")
    yield url
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
            "WHERE database=current_database() AND active"
        )
        wait_for(
            lambda: (
                not db.execute(
                    "SELECT 1 FROM pg_replication_slots WHERE database=current_database() "
                    "AND active"
                ).fetchone()
            ),
            "the slot to be free",
        )
        db.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
            "WHERE database=current_database()"
        )
    with psycopg.connect(address, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_row_a_webhook_and_a_feed_entry_for_one_product_are_one_fetch(
    project: Project, site: Site, database: str
) -> None:
    port = free_port()
    # 30 s is "the same second" even on a slow machine.
    project.set(dedup_settle="30s", serve_port=str(port))
    page = site.serve("/p/1", product(1))
    items = ""
    rss = {"content-type": "application/rss+xml"}
    feed = site.serve(
        "/feed.xml",
        lambda request: Reply(
            body=EMPTY.format(home=site.url("/"), items=items).encode(), headers=rss
        ),
    )
    project.write(
        "shop.py",
        SHOP.format(
            cdc=database.replace("postgresql:", "postgres:").replace(
                "postgres:", "postgres+cdc:", 1
            ),
            feed=feed,
        ),
    )
    running = project.start("run", "shop.py")

    def reading() -> bool:
        sources = (
            {s["name"]: s for s in project.status()["sources"]}
            if project.penstock("status").code == 0
            else {}
        )
        return (
            len(sources) == 3
            and not any(s["error"] for s in sources.values())
            and bool(site.asked("/feed.xml"))
        )

    wait_for(
        lambda: reading() or running.ended, "three sources that are read", seconds=60, every=0.2
    )
    with psycopg.connect(database) as db:
        wait_for(
            lambda: db.execute(
                "SELECT 1 FROM pg_replication_slots WHERE database=current_database() AND active"
            ).fetchone(),
            "an active slot",
        )
        go = threading.Barrier(3)

        def insert() -> None:
            go.wait()
            db.execute("INSERT INTO scrape_requests(url) VALUES (%s)", (page,))
            db.commit()

        def post_webhook() -> None:
            go.wait()
            body = json.dumps({"url": page}).encode()
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/hooks/shop", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=30) as answer:
                assert answer.status == 202

        threads = [threading.Thread(target=insert), threading.Thread(target=post_webhook)]
        for thread in threads:
            thread.start()
        go.wait()
        items = f"<item><guid>1</guid><title>one</title><link>{page}</link></item>"
        for thread in threads:
            thread.join(30)
    wait_for(
        lambda: (
            project.total()["accepted"] == 3
            and project.total()["pending"] + project.total()["in_flight"] == 0
        ),
        "three ended",
        every=0.2,
    )
    total = project.total()
    assert (total["success"], total["duplicate"]) == (1, 2)
    assert len(site.asked("/p/1")) == 1
    wait_for(lambda: project.written() == 1, "its row")
    assert {e["source"] for e in project.events()} == {"rows", "hook", "feed"}
    running.signal(15)
    assert running.wait() == 0, running.output
    project.doctor()
