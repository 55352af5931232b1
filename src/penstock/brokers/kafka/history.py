"""Reads Kafka topics without a consumer group: for `peek`, `stats` and `replay`.

Commits no offsets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from penstock.brokers.kafka.topics import TopicAndPartition
from penstock.brokers.kafka.url import Settings, unavailable_error
from penstock.stores.kafka_access import error_of

# Seconds of one poll. A gap at the end of a partition, such as a transaction marker, is not
# returned as a message. So the consumer's position is checked when a poll returns none.
_POLL_WAIT = 0.2


Spans = Mapping[TopicAndPartition, tuple[int, int]]  # first offset, and the offset after the last


def read(settings: Settings, spans: Spans, limit: int) -> Iterator[Any]:
    """Yield messages of these partitions, each from its first offset to before its second.

    Yields at most `limit` messages of each partition. Messages of different partitions are in no
    order. Blocks, so call it in a thread.
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
            batch: list[Any] = consumer.consume(min(500, sum(left.values())), _POLL_WAIT)
            for m in batch:
                if (error := m.error()) is not None:
                    raise unavailable_error(settings, error, f"reading {m.topic()}")
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
        raise unavailable_error(settings, error_of(e), "reading") from e
    finally:
        consumer.close()
