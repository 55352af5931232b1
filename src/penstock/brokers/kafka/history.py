"""Reading Kafka without a group: for a look, for the age of what waits, and to hand history to a
group again. Nothing is committed here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from penstock.brokers.kafka.url import Settings, running
from penstock.stores.kafka_access import error_of

_QUIET = 0.2  # a gap at the end (a transaction's marker) is no message: so long we wait for one


def read(
    settings: Settings, spans: Mapping[tuple[str, int], tuple[int, int]], limit: int
) -> Iterator[Any]:
    """Messages of these partitions from an offset to another, at most `limit` of each, in no order
    between partitions. Waits; for a thread.
    """
    open_spans = {at: span for at, span in spans.items() if span[0] < span[1]}
    if not open_spans or limit <= 0:
        return
    conf = {
        "group.id": "penstock-look",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 50,
    }
    consumer = Consumer(
        settings.client()
        | conf
        | {"queued.min.messages": min(100_000, 2 * limit)}
        | settings.rdkafka
    )
    try:
        left = dict.fromkeys(open_spans, limit)
        consumer.assign([TopicPartition(*at, span[0]) for at, span in open_spans.items()])
        until = time.monotonic() + settings.timeout
        while left:
            batch: list[Any] = consumer.consume(min(500, sum(left.values())), _QUIET)
            for m in batch:
                if (error := m.error()) is not None:
                    raise running(settings, error, f"reading {m.topic()}")
                at = (m.topic(), m.partition())
                if at not in left:
                    continue
                if m.offset() < open_spans[at][1]:
                    yield m
                    left[at] -= 1
                if left[at] == 0 or m.offset() + 1 >= open_spans[at][1]:
                    del left[at]
                    consumer.incremental_unassign([TopicPartition(*at)])
            if batch:
                until = time.monotonic() + settings.timeout
            else:
                for tp in consumer.position([TopicPartition(*at) for at in left]):
                    if tp.offset >= open_spans[tp.topic, tp.partition][1]:
                        del left[tp.topic, tp.partition]
                if time.monotonic() > until:
                    return
    except KafkaException as e:
        raise running(settings, error_of(e), "reading") from e
    finally:
        consumer.close()
