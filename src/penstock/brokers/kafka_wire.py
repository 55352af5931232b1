"""A message of ours on Kafka's wire: body and key as they are, everything else in headers. Nothing is sent or received here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.brokers.kafka_backlog import Entry, Partition
from penstock.brokers.kafka_producer import Message
from penstock.brokers.kafka_topics import NORMAL
from penstock.model import mint
from penstock.rules.shares import class_of

ID, NOT_BEFORE, GROUP, PRIORITY = "penstock-id", "penstock-not-before", "penstock-group", "penstock-priority"
FRAMING = 200  # bytes of memory that a message takes beside its body, about


def compose(
    topic: str, id_: str, key: str, body: bytes, headers: Mapping[str, str], *, not_before: float = 0.0, group: str = "", priority: int = NORMAL
) -> Message:
    """`group`: for that one only. `priority`: where the topic does not tell."""
    extra: list[tuple[str, str | bytes | None]] = [(ID, id_)]
    if not_before:
        extra.append((NOT_BEFORE, repr(not_before)))
    if priority != NORMAL:
        extra.append((PRIORITY, str(priority)))
    if group:
        extra.append((GROUP, group))
    if headers:
        extra.extend(headers.items())
    return Message(topic, body, key.encode("utf-8", "surrogatepass"), extra)


def read_message(m: Any, part: Partition) -> tuple[Entry, str]:
    """The message, and the group it is meant for. One of another program has no id: it gets one from its place, the same every time."""
    offset, body = m.offset(), m.value() or b""
    id_, not_before, group, priority = "", 0.0, "", part.place.priority
    headers: dict[str, str] = {}
    for name, value in m.headers() or ():
        text = value.decode("utf-8", "replace") if value is not None else ""
        if name == ID:
            id_ = text
        elif name == GROUP:
            group = text
        elif name == PRIORITY:
            priority = class_of(int(text)) if text.isdecimal() else priority
        elif name == NOT_BEFORE:
            try:
                not_before = float(text)
            except ValueError:
                continue
            if not math.isfinite(not_before):
                not_before = 0.0
        else:
            headers[name] = text
    key = m.key()
    size = len(body) + FRAMING
    part.received += 1
    part.received_bytes += size
    return Entry(
        part,
        offset,
        id_ or mint("kafka", part.place.name, str(part.number), str(offset)),
        key.decode("utf-8", "replace") if key else "",
        body,
        headers,
        m.timestamp()[1] / 1000,
        not_before,
        size,
        priority,
    ), group
