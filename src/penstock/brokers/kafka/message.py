"""A message of ours on Kafka's wire: body and key as they are, everything else in headers. Nothing
is sent or received here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError

from penstock.brokers.kafka.entries import FRAMING, Entry, Partition, Run
from penstock.brokers.kafka.producer import Message
from penstock.brokers.kafka.topics import NORMAL
from penstock.model import mint
from penstock.rules.priority import class_of

ID, NOT_BEFORE, GROUP, PRIORITY = (
    "penstock-id",
    "penstock-not-before",
    "penstock-group",
    "penstock-priority",
)


def compose(
    topic: str,
    id_: str,
    key: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    not_before: float = 0.0,
    group: str = "",
    priority: int = NORMAL,
) -> Message:
    """`group`: for that one only. `priority`: where the topic does not tell."""
    extra: dict[str, str | bytes | None] = {ID: id_}
    if not_before:
        extra[NOT_BEFORE] = repr(not_before)
    if priority != NORMAL:
        extra[PRIORITY] = str(priority)
    if group:
        extra[GROUP] = group
    if headers:
        extra |= headers
    return topic, body, key if key.isascii() else key.encode("utf-8", "surrogatepass"), extra


def read_runs(
    messages: Sequence[Any],
    held: Mapping[tuple[str, int], Partition],
    complain: Callable[[KafkaError], None],
) -> list[Run]:
    """What the client received, partition by partition as it came. Of partitions that are not held
    any more, nothing.
    """
    runs: list[Run] = []
    part: Partition | None = None
    entries: list[Entry] = []
    plain, size, at = True, 0, 0.0
    for m in messages:
        error = m.error()
        if error is not None:
            complain(error)
            continue
        number = m.partition()
        if part is None or number != part.number or m.topic() != part.place.name:
            if entries:
                runs.append(_run(part, entries, plain, size))
            entries, plain, size = [], True, 0
            part = held.get((m.topic(), number))
            if part is None:
                continue
            at = m.timestamp()[1] / 1000
        headers, key, body = m.headers(), m.key(), m.value()
        e = None
        if (
            headers
            and len(headers) == 1
            and key
            and body
            and headers[0][0] == ID
            and (id_ := headers[0][1])
        ):  # nearly always, and never in a retry topic
            offset = m.offset()
            try:
                e = Entry(
                    topic=part.topic, group=part.group, id=id_.decode(), key=key.decode(), body=body, headers={}, position=part.base | offset,
                    token=part.token, deliveries=1, priority=part.place.priority, part=part, offset=offset, at=at,
                )  # fmt: skip
                size += len(body)
            except UnicodeDecodeError:
                pass
        if e is None:
            e = read_message(m, part)
            size += len(e.body)
            plain = plain and not e.not_before and not e.meant and e.priority == part.place.priority
        entries.append(e)
    if entries:
        runs.append(_run(part, entries, plain, size))
    return runs


def _run(part: Partition | None, entries: list[Entry], plain: bool, size: int) -> Run:
    assert part is not None
    first, last, n = entries[0].offset, entries[-1].offset, len(entries)
    part.received += n
    part.received_bytes += size + FRAMING * n
    part.reached = last + 1
    return part, entries, plain and part.place.delay is None and last - first == n - 1


def read_message(m: Any, part: Partition) -> Entry:
    """A message with whatever headers it has. One of another program has no id: it gets one from
    its place, the same every time.
    """
    offset = m.offset()
    id_, not_before, meant, priority = "", 0.0, "", part.place.priority
    headers: dict[str, str] = {}
    for name, value in m.headers() or ():
        text = value.decode("utf-8", "replace") if value is not None else ""
        if name == ID:
            id_ = text
        elif name == GROUP:
            meant = text
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
    return Entry(
        topic=part.topic, group=part.group, id=id_ or mint("kafka", part.place.name, str(part.number), str(offset)),
        key=(m.key() or b"").decode("utf-8", "replace"), body=m.value() or b"", headers=headers, position=part.base | offset, token=part.token, deliveries=1,
        priority=priority, part=part, offset=offset, at=m.timestamp()[1] / 1000, not_before=not_before, meant=meant,
    )  # fmt: skip
