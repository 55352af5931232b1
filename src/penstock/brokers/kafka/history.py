"""Reads Kafka topics without a consumer group: for `peek`, `stats` and `replay`.

Commits no offsets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.brokers.kafka.entries import BufferedMessage, Partition
from penstock.brokers.kafka.message import read_message
from penstock.brokers.kafka.topics import Layout, TopicAndPartition
from penstock.brokers.kafka.url import Settings, unavailable_error
from penstock.rules.watermark import Window
from penstock.stores.kafka_access import error_of

_POLL_WAIT = 0.2  # seconds of one poll
Spans = Mapping[TopicAndPartition, tuple[int, int]]  # first offset, and the offset after the last


def read(settings: Settings, plan: Layout, spans: Spans, limit: int) -> list[BufferedMessage]:
    """Return messages of these partitions, each from its first offset to before its second.

    Returns at most `limit` messages of each partition. Messages of different partitions are in no
    order. Blocks, so call it in a thread.
    """
    found: list[BufferedMessage] = []
    open_spans = {at: span for at, span in spans.items() if span[0] < span[1]}
    if not open_spans or limit <= 0:
        return found
    conf = {
        "group.id": "penstock-look",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 50,
        # The span may end with offsets that have no message, such as a transaction marker.
        "enable.partition.eof": True,
    }
    consumer = Consumer(
        settings.client()
        | conf
        | {"queued.min.messages": min(100_000, 2 * limit)}
        | settings.rdkafka
    )
    parts = {at: Partition(plan, *at, Window(0, 0), "") for at in open_spans}
    try:
        left = dict.fromkeys(open_spans, limit)
        consumer.assign([TopicPartition(*at, span[0]) for at, span in open_spans.items()])
        until = time.monotonic() + settings.timeout
        while left and time.monotonic() < until:
            batch: list[Any] = consumer.consume(min(500, sum(left.values())), _POLL_WAIT)
            for m in batch:
                until = time.monotonic() + settings.timeout
                error, at, offset = m.error(), (m.topic(), m.partition()), m.offset()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise unavailable_error(settings, error, f"reading {m.topic()}")
                if at not in left or (error is not None and offset < open_spans[at][1]):
                    continue  # an early end of the partition: this replica is behind its leader
                if error is None and offset < open_spans[at][1]:
                    found.append(read_message(m, parts[at]))
                    left[at] -= 1
                if error is not None or left[at] == 0 or offset + 1 >= open_spans[at][1]:
                    del left[at]
                    consumer.incremental_unassign([TopicPartition(*at)])
    except KafkaException as e:
        raise unavailable_error(settings, error_of(e), "reading") from e
    finally:
        consumer.close()
    return found
