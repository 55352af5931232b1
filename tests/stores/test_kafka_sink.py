"""The Kafka sink on a real server: records with keys, tombstones, topics and outages."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition, admin
from tests.servers import Handle
from tests.sources.kafka_ground import Ground

from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Reopen, Row
from penstock.sinks.kafka import KafkaSink, open_sink

pytestmark = pytest.mark.server("kafka")
_api: Any = admin


def row(
    n: int,
    key: str | None = None,
    order: int | None = None,
    /,
    *,
    deleted: bool = False,
    **fields: Any,
) -> Row:
    key = key if key is not None else f"k{n}"
    origin = {
        "event_id": f"e{n}",
        "trace_id": "t",
        "url": "https://shop.example/" + key,
        "key": key,
        "extractor": "product",
        "version": 1,
    }
    return Row(
        n,
        key,
        json.dumps(
            fields | {"_penstock": origin | ({"deleted": True} if deleted else {})}
        ).encode(),
        order if order is not None else n,
    )


class Place(Ground):
    """A server with topics that sinks created."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened: list[KafkaSink] = []

    def name(self) -> str:
        name = f"t{uuid.uuid4().hex[:12]}.products"
        self.mine(name)
        return name

    def sink(self, topic: str, query: str = "key=sku", **options: Any) -> KafkaSink:
        sink = open_sink(f"{self.url}/{topic}?{query}", {"partitions": 2, **options}, Path())
        self.opened.append(sink)
        return sink

    def messages(self, topic: str) -> list[Any]:
        """Return all messages of the topic, partition by partition."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "look",
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "log_level": 0,
            }
        )
        try:
            partitions = sorted(consumer.list_topics(topic, timeout=20).topics[topic].partitions)
            consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
            found: dict[int, list[Any]] = {p: [] for p in partitions}
            ended: set[int] = set()
            while len(ended) < len(partitions):
                m: Any = consumer.poll(10)
                assert m is not None
                ended.add(m.partition()) if m.error() else found[m.partition()].append(m)
            return [m for p in partitions for m in found[p]]
        finally:
            consumer.close()

    def upserted(self, topic: str) -> dict[str, Any]:
        """Return the last payload per key, without removed keys, as a sink connector does."""
        rows: dict[str, Any] = {}
        for m in self.messages(topic):
            key = json.dumps(json.loads(m.key())["payload"])
            if m.value() is None:
                rows.pop(key, None)
            else:
                rows[key] = json.loads(m.value())["payload"]
        return rows


@pytest.fixture
def place(server: Callable[[str], Handle]) -> Iterator[Place]:
    made = Place(server("kafka").url)
    yield made
    for sink in made.opened:
        sink.close()
    made.sweep()


def test_every_record_is_a_message_with_its_key_and_an_id_header(place: Place) -> None:
    topic = place.name()
    sink = place.sink(topic)
    sink.open(0, "")
    sink.write([row(n, f"s{n}", sku=f"s{n}", price=n) for n in range(1, 2001)])
    found = place.messages(topic)
    assert len(found) == 2000
    assert place.upserted(topic)['{"sku": "s7"}'] == {"sku": "s7", "price": 7.0}
    ids = [dict(m.headers())["penstock-id"] for m in found]
    assert len(set(ids)) == 2000
    assert b"e7-7" in ids
    assert len({m.partition() for m in found}) == 2


def test_a_repeated_batch_has_the_same_ids_and_leaves_the_same_rows(place: Place) -> None:
    topic = place.name()
    sink = place.sink(topic)
    mark = sink.open(0, "")
    batch = [
        row(1, "a", sku="a", price=1),
        row(2, "b", sku="b", price=2),
        row(3, "a", sku="a", price=3),
    ]
    sink.write(batch)
    sink.close()
    again = place.sink(topic)  # the first sink was killed before its mark was recorded
    again.open(0, mark)
    again.write(batch)
    assert place.upserted(topic) == {
        '{"sku": "a"}': {"sku": "a", "price": 3.0},
        '{"sku": "b"}': {"sku": "b", "price": 2.0},
    }
    by_id: dict[bytes, set[bytes]] = {}
    for m in place.messages(topic):
        by_id.setdefault(dict(m.headers())["penstock-id"], set()).add(m.value())
    assert {id_: len(values) for id_, values in by_id.items()} == {
        b"e1-1": 1,
        b"e2-2": 1,
        b"e3-3": 1,
    }, "both copies of a message have the same bytes"


def test_transactions_keep_repeated_and_torn_batches_out_of_the_topic(place: Place) -> None:
    topic = place.name()
    sink = place.sink(topic, transactions=True)
    mark = sink.open(0, "")
    batch = [row(n, f"k{n}", sku=f"k{n}", brand="x") for n in range(1, 51)]
    sink.write(batch)
    # The flusher of the first sink was killed before the mark was recorded.
    again = place.sink(topic, transactions=True)
    assert again.open(0, mark) == mark
    noted = again.write([*batch, row(51, "k51", sku="k51", brand=None)])
    assert len(place.messages(topic)) == 51
    assert place.upserted(topic)['{"sku": "k51"}'] == {"sku": "k51", "brand": None}, (
        "the types of committed rows are learnt"
    )
    # The first sink still runs, but it is fenced and cannot write.
    with pytest.raises(StoreUnavailable):
        sink.write([row(52, "late", sku="late")])
    producer = again._producer
    assert producer is not None
    producer.begin_transaction()
    producer.produce(topic, b"torn", b"torn")
    producer.flush(10)
    third = place.sink(topic, transactions=True)  # killed in the middle of a transaction
    third.open(51, noted)
    third.write([row(52, "k52", sku="k52")])
    assert [
        m.key() for m in place.messages(topic) if b"torn" in m.key() or b"late" in m.key()
    ] == []
    assert len(place.messages(topic)) == 52


def test_field_types_are_recorded_in_the_mark(place: Place) -> None:
    topic = place.name()
    sink = place.sink(topic)
    sink.open(0, "")
    mark = sink.write([row(1, "a", sku="a", price=1, old=True)])
    sink.close()
    again = place.sink(topic)
    again.open(1, mark)
    again.write([row(2, "a", sku="a", price=None)])
    assert place.upserted(topic) == {'{"sku": "a"}': {"sku": "a", "price": None, "old": None}}


def test_a_record_of_an_older_event_is_not_written_after_a_newer_one(place: Place) -> None:
    topic = place.name()
    sink = place.sink(topic)
    sink.open(0, "")
    sink.write([row(1, "a", 9, sku="a", n=1), row(2, "a", 7, sku="a", n=2)])
    sink.write([row(3, "a", 8, sku="a", n=3), row(4, "b", 1, sku="b", n=4)])
    assert place.upserted(topic) == {
        '{"sku": "a"}': {"sku": "a", "n": 1.0},
        '{"sku": "b"}': {"sku": "b", "n": 4.0},
    }
    all_of_them = place.name()
    sink = place.sink(all_of_them, mode="append")
    sink.open(0, "")
    sink.write([row(1, "a", 9, sku="a"), row(2, "a", 7, sku="a")])
    assert len(place.messages(all_of_them)) == 2


def test_a_removed_record_is_a_tombstone(place: Place) -> None:
    topic = place.name()
    sink = place.sink(topic)
    sink.open(0, "")
    sink.write([row(1, "a", sku="a"), row(2, "b", sku="b"), row(3, "a", deleted=True, sku="a")])
    assert list(place.upserted(topic)) == ['{"sku": "b"}']


def test_a_topic_is_created_with_its_options_and_an_existing_topic_is_kept(place: Place) -> None:
    topic = place.name()
    sink = place.sink(topic, compact=True, retention="forever", partitions=3)
    sink.open(0, "")
    sink.write([row(1)])
    assert len(place.admin.list_topics(topic, timeout=20).topics[topic].partitions) == 3
    resource = _api.ConfigResource(_api.ConfigResource.Type.TOPIC, topic)
    config = {
        name: entry.value
        for name, entry in place.admin.describe_configs([resource])[resource].result(20).items()
    }
    assert (config["cleanup.policy"], config["retention.ms"]) == ("compact", "-1")
    place.sink(topic, partitions=5).open(0, "")
    assert len(place.admin.list_topics(topic, timeout=20).topics[topic].partitions) == 3


def test_a_record_that_the_topic_refuses_is_named_in_the_error(place: Place) -> None:
    topic = place.topic(1, max_message_bytes="20000")
    sink = place.sink(topic, "key=sku&rdkafka.compression.type=none")
    sink.open(0, "")
    with pytest.raises(StoreUnavailable, match=r"refuses the record .*big") as caught:
        sink.write([row(1, "big", sku="big", text="x" * 100_000)])
    assert "max.message.bytes" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot be a topic"):
        place.sink("a%20b")


def test_a_refused_login_is_reported_without_its_password(
    place: Place, server: Callable[[str], Handle]
) -> None:
    secure, ca = f"127.0.0.1:{server('kafka').ports('secure')}", server("kafka").file("kafka.pem")
    topic = place.name()
    good = open_sink(f"kafka+ssl://penstock:secret@{secure}/{topic}?ca={ca}", {}, Path())
    good.open(0, "")
    good.write([row(1)])
    good.close()
    assert "secret" not in good.name
    wrong = open_sink(
        f"kafka+ssl://penstock:hunter2@{secure}/{topic}?ca={ca}&timeout=8s", {}, Path()
    )
    with pytest.raises(StoreUnavailable, match="refuses the login") as caught:
        wrong.open(0, "")
    assert "hunter2" not in caught.value.message + caught.value.hint


def test_a_sink_that_is_not_open_raises_reopen(place: Place) -> None:
    with pytest.raises(Reopen):
        place.sink(place.name()).write([row(1)])


async def test_a_killed_server_is_an_outage_and_the_batch_is_written_after_it(
    place: Place, server: Callable[[str], Handle]
) -> None:
    topic = place.name()
    sink = place.sink(topic, "key=sku&timeout=5s&rdkafka.message.timeout.ms=5000")
    mark = sink.open(0, "")
    mark = sink.write([row(1, "a", sku="a")])
    await asyncio.to_thread(server("kafka").kill)
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await asyncio.to_thread(sink.write, [row(2, "b", sku="b")])
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await asyncio.to_thread(sink.open, 1, mark)
    await asyncio.to_thread(server("kafka").start)
    while True:
        try:
            await asyncio.to_thread(sink.open, 1, mark)
            await asyncio.to_thread(sink.write, [row(2, "b", sku="b")])
            break
        except StoreUnavailable:
            # Retry, as the flusher does. Some parts of a restarted server answer later.
            await asyncio.sleep(0.2)
    assert sorted(place.upserted(topic)) == ['{"sku": "a"}', '{"sku": "b"}']
