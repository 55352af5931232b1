"""`penstock run` from a Kafka topic of changes to a Kafka topic of records, under SIGKILL.

Every change is one event, and every record is written once per key.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from tests.e2e.harness import Project, Site, Target, product, wait_for
from tests.servers import Handle
from tests.sources.kafka_ground import Ground

pytestmark = pytest.mark.server("kafka")
CHANGES, AGAIN, KILLS = 600, 100, 5
SHOP = """
from penstock import Page, Pipeline, Removed

shop = Pipeline("shop")
shop.source("{url}/{changes}", name="changes", group="{changes}", map={{"trace": "id"}})
shop.sink("{url}/{records}?key=sku", partitions=2, transactions={transactions})

@shop.extract(key="sku")
def product(page: Page):
    row = page.event.data
    if row.get("gone"):
        yield Removed(page.css("[data-sku]::attr(data-sku)").get())
    else:
        sku = page.css("[data-sku]::attr(data-sku)").get()
        yield {{"sku": sku, "id": row["id"], "op": row["_cdc"]["op"]}}
"""


@pytest.fixture
def ground(server: Callable[[str], Handle]) -> Iterator[Ground]:
    ground = Ground(server("kafka").url)
    yield ground
    ground.sweep()


def change(n: int, url: str, lsn: int, **row: Any) -> dict[str, Any]:
    source = {
        "connector": "postgresql",
        "name": "shop",
        "db": "shop",
        "schema": "public",
        "table": "scrape_requests",
        "txId": 7,
        "lsn": lsn,
        "ts_ms": 1,
    }
    return {
        "schema": {},
        "payload": {
            "before": None,
            "after": {"id": n, "url": url, **row},
            "source": source,
            "op": "c",
            "ts_ms": 2,
        },
    }


def feed(ground: Ground, topic: str, changes: list[dict[str, Any]]) -> None:
    for one in changes:
        one_key = json.dumps({"id": one["payload"]["after"]["id"]}).encode()
        ground.queue(topic, json.dumps(one).encode(), key=one_key)
    ground.flush()


def messages(ground: Ground, topic: str) -> list[Any]:
    consumer = Consumer(
        {
            "bootstrap.servers": ground.servers,
            "group.id": "check",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    partitions = sorted(consumer.list_topics(topic, timeout=60).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    found: list[Message] = []
    ended: set[int] = set()
    while len(ended) < len(partitions):
        m: Any = consumer.poll(60)
        assert m is not None
        if m.error():
            ended.add(m.partition())
        else:
            found.append(m)
    consumer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("transactions", [False, True], ids=["upserts", "transactions"])
def test_a_killed_run_makes_one_event_per_change_and_one_message_per_record(
    project: Project, target: Callable[..., Target], ground: Ground, seed: int, transactions: bool
) -> None:
    rng = random.Random(seed)
    web = target(pages=CHANGES, delay=0.02)
    topic = ground.topic(3)
    records = f"{topic}.records"
    ground.mine(records)
    project.write(
        "shop.py",
        SHOP.format(url=ground.url, changes=topic, records=records, transactions=transactions),
    )
    changes = [change(n, url, 1000 + n) for n, url in enumerate(web.urls)]
    # Debezium sends some changes again after it crashed.
    repeated = changes + rng.sample(changes, AGAIN)
    feed(ground, topic, repeated)
    for _ in range(KILLS):
        begun, share = web.lines(), rng.randrange(5, CHANGES // KILLS)
        running = project.start("run", "shop.py", "--log-level", "warning")
        # The last run may have no requests left. Then it is killed while it writes.
        wait_for(
            lambda begun=begun, share=share: (
                web.lines() - begun >= share or len(web.asked()) >= CHANGES
            ),
            f"{share} requests: {running.output}",
            180,
            0.002,
        )
        time.sleep(rng.uniform(0.0, 0.1))
        running.kill()
        project.nothing_runs()
    ground.write(topic, [b"{broken"])
    project.run(expect=0)
    total = project.total()
    assert (total["accepted"], total["success"], total["dead"], total["duplicate"]) == (
        CHANGES,
        CHANGES,
        0,
        0,
    ), total
    (dead_letter,) = project.dead_letters().values()
    assert "no JSON" in dead_letter["reason"]
    found = messages(ground, records)
    rows = {json.loads(m.key())["payload"]["sku"]: json.loads(m.value())["payload"] for m in found}
    assert len(rows) == CHANGES
    assert {row["id"] for row in rows.values()} == set(map(float, range(CHANGES)))
    by_id: dict[bytes, set[bytes]] = {}
    for m in found:
        by_id.setdefault(dict(m.headers())["penstock-id"], set()).add(m.value())
    assert len(by_id) == CHANGES
    assert all(len(values) == 1 for values in by_id.values()), (
        "a repeated message is equal byte for byte"
    )
    assert len(found) == CHANGES or not transactions
    print(f"{len(found)} messages for {CHANGES} records, {sum(web.asked().values())} requests")


def test_a_change_becomes_a_record_and_a_removal_becomes_a_tombstone(
    project: Project, site: Site, ground: Ground
) -> None:
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(2)]
    topic = ground.topic()
    records = f"{topic}.records"
    ground.mine(records)
    # The second change follows immediately, and must not be a duplicate of the first.
    project.set(dedup_window="0s", dedup_settle="0s")
    project.write(
        "shop.py", SHOP.format(url=ground.url, changes=topic, records=records, transactions=False)
    )
    feed(ground, topic, [change(n, url, n) for n, url in enumerate(urls)])
    shown = json.loads(
        project.good("sources", "test", "changes", "--pipeline", "shop.py", "--json")
    )
    assert len(shown["events"]) == 2, shown
    project.run()
    site.serve("/p/0", product(0, "sold out"))
    feed(ground, topic, [change(0, urls[0], 10, gone=True)])
    project.run()
    found = [
        (json.loads(m.key())["payload"]["sku"], m.value() is None)
        for m in messages(ground, records)
    ]
    assert sorted(found) == [("S-0", False), ("S-0", True), ("S-1", False)]
    (source,) = json.loads(project.good("sources", "ls", "--pipeline", "shop.py", "--json"))[
        "sources"
    ]
    assert (source["position"], source["backlog"]) == ("at 0:3", 0)
    project.good("sources", "reset", "changes", "--to", "start", "--pipeline", "shop.py")
    project.run()
    assert project.total()["accepted"] == 3, "the changes are read again, and all are known"
    assert len(messages(ground, records)) == 3
