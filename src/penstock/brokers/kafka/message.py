"""Format of a Penstock message in Kafka: body and key are unchanged, all else is in headers.

Sends and receives no messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from confluent_kafka import KafkaError

from penstock.brokers.dead_copies import dead_headers
from penstock.brokers.kafka.entries import MESSAGE_OVERHEAD, BufferedMessage, Partition, Run
from penstock.brokers.kafka.producer import Message
from penstock.brokers.kafka.topics import NORMAL, TopicAndPartition
from penstock.model import mint
from penstock.ports import Delivery, Out
from penstock.rules.priority import class_of

ID, NOT_BEFORE, GROUP, PRIORITY = (
    "penstock-id",
    "penstock-not-before",
    "penstock-group",
    "penstock-priority",
)


def compose(
    topic: str,
    m: Out | Delivery,
    *,
    not_before: float = 0.0,
    group: str = "",
    priority: int = NORMAL,
) -> Message:
    """Compose a copy of the message for a server-side topic.

    `group` is the only group that gets the message, or "" for all. `priority` is needed for topics
    that hold several priority classes.
    """
    extra: dict[str, str | bytes | None] = {ID: m.id}
    if not_before:
        extra[NOT_BEFORE] = repr(not_before)
    if priority != NORMAL:
        extra[PRIORITY] = str(priority)
    if group:
        extra[GROUP] = group
    extra |= m.headers
    key = m.key if m.key.isascii() else m.key.encode("utf-8", "surrogatepass")
    return topic, m.body, key, extra


def retry(topic: str, d: Delivery, not_before: float) -> Message:
    """Compose a copy that only the delivery's group gets."""
    return compose(topic, d, not_before=not_before, group=d.group, priority=d.priority)


def dead_letter(topic: str, d: Delivery, reason: str) -> Message:
    return compose(topic, msgspec.structs.replace(d, headers=dead_headers(d, reason)))


def read_runs(
    messages: Sequence[Any],
    assigned: Mapping[TopicAndPartition, Partition],
    on_error: Callable[[KafkaError], None],
) -> list[Run]:
    """Return the received messages as runs of one partition, in the order of arrival.

    Messages of partitions that are no longer assigned are dropped.
    """
    runs: list[Run] = []
    part: Partition | None = None
    entries: list[BufferedMessage] = []
    plain, size, published_at = True, 0, 0.0
    for m in messages:
        error = m.error()
        if error is not None:
            on_error(error)
            continue
        number = m.partition()
        if part is None or number != part.number or m.topic() != part.server_topic.name:
            if entries:
                runs.append(_run(part, entries, plain, size))
            entries, plain, size = [], True, 0
            part = assigned.get((m.topic(), number))
            if part is None:
                continue
            published_at = m.timestamp()[1] / 1000
        headers, key, body = m.headers(), m.key(), m.value()
        if (
            headers
            and len(headers) == 1
            and key
            and body
            and headers[0][0] == ID
            and (id_ := headers[0][1])
        ):
            # Fast path for nearly all messages, but never for those of a retry topic.
            offset = m.offset()
            e = BufferedMessage(
                topic=part.topic,
                group=part.group,
                id=id_.decode("utf-8", "replace"),
                key=key.decode("utf-8", "replace"),
                body=body,
                headers={},
                position=part.base | offset,
                token=part.token,
                deliveries=1,
                priority=part.server_topic.priority,
                part=part,
                offset=offset,
                published_at=published_at,
            )
        else:
            e = read_message(m, part)
            plain = (
                plain
                and not e.not_before
                and not e.target_group
                and e.priority == part.server_topic.priority
            )
        size += len(e.body)
        entries.append(e)
    if entries:
        runs.append(_run(part, entries, plain, size))
    return runs


def _run(part: Partition | None, entries: list[BufferedMessage], plain: bool, size: int) -> Run:
    assert part is not None
    first, last, n = entries[0].offset, entries[-1].offset, len(entries)
    part.received_count += n
    part.received_bytes += size + MESSAGE_OVERHEAD * n
    part.next_offset = last + 1
    return part, entries, plain and part.server_topic.delay is None and last - first == n - 1


def read_message(m: Any, part: Partition) -> BufferedMessage:
    """Decode a message with any headers.

    A message of another program has no id. Its id is derived from topic, partition and offset, so
    that it is the same on every delivery.
    """
    offset = m.offset()
    headers = {
        name: value.decode("utf-8", "replace") if value is not None else ""
        for name, value in m.headers() or ()
    }
    priority = headers.pop(PRIORITY, "")
    try:
        not_before = float(headers.pop(NOT_BEFORE, 0.0))
    except ValueError:
        not_before = 0.0
    return BufferedMessage(
        topic=part.topic,
        group=part.group,
        id=headers.pop(ID, "")
        or mint("kafka", part.server_topic.name, str(part.number), str(offset)),
        key=(m.key() or b"").decode("utf-8", "replace"),
        body=m.value() or b"",
        headers=headers,
        position=part.base | offset,
        token=part.token,
        deliveries=1,
        priority=class_of(int(priority)) if priority.isdecimal() else part.server_topic.priority,
        part=part,
        offset=offset,
        published_at=m.timestamp()[1] / 1000,
        not_before=not_before if math.isfinite(not_before) else 0.0,
        target_group=headers.pop(GROUP, ""),
    )
