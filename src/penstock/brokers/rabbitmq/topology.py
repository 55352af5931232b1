"""Exchanges, routing keys, queues and queue arguments that Penstock declares on RabbitMQ.

Sends no requests.

A namespace has three topic exchanges:

- `<ns>` takes published messages. The routing key is the topic, the priority class and the target:
  `requests.normal.shop.example`.
- `<ns>.delay` takes delayed messages. The routing key starts with the delay level:
  `5s.requests.normal.shop.example`. All messages of a delay queue have the same time to live, so
  messages expire in the order of the queue. No message waits behind one with a longer delay.
- `<ns>.due` takes expired messages and routes them to their work queues.

A message for one group only (a retry) has `normal@main` in place of `normal`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.brokers.dead_copies import DEAD
from penstock.ports import TopicSpec
from penstock.rules.priority import CLASSES, NORMAL, class_of

LEVELS = (
    (0.2, "200ms"),
    (1.0, "1s"),
    (5.0, "5s"),
    (30.0, "30s"),
    (120.0, "2m"),
    (600.0, "10m"),
    (3600.0, "1h"),
    (21600.0, "6h"),
)
# High, because the ledger detects poison by its own count of starts, and RabbitMQ before 4.3 counts
# every return as a delivery.
DELIVERY_LIMIT = 10_000
# Seconds. The ledger keeps the dead letters. The queue has copies of them for other tools.
DEAD_RETENTION = 14 * 86400.0
MAX_ROUTING_KEY = 255  # bytes, by the protocol
QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
# Both are needed for dead-lettering without loss: the source queue keeps a message until the target
# queue confirms it. Available since RabbitMQ 3.10.
AT_LEAST_ONCE: dict[str, Any] = {
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}


class Queue(msgspec.Struct, frozen=True):
    """A queue to declare."""

    name: str
    arguments: dict[str, Any]
    bindings: tuple[tuple[str, str], ...]  # (exchange, pattern)


def escape_name(name: str) -> str:
    """Escape a name as one word of a routing key, where dots, `*` and `#` have a meaning."""
    return re.sub(r"[^A-Za-z0-9_:-]", lambda m: ":" if m[0] == "." else f"%{ord(m[0]):02X}", name)


def priority_classes(topic: str) -> tuple[int, ...]:
    """Return the priority classes of a topic. Dead letters have one: they are only inspected."""
    return (NORMAL,) if topic.endswith(DEAD) else tuple(range(len(CLASSES)))


def clamp_priority(topic: str, priority: int) -> int:
    """Clamp `priority` to a known class. A message with an unknown class is never received."""
    return NORMAL if topic.endswith(DEAD) else class_of(priority)


def level_for(seconds: float) -> str | None:
    """Return the longest delay level that is at most 1 % and 50 ms longer than `seconds`.

    Return None if there is no such level. Then the message waits in memory.
    """
    limit = seconds * 1.01 + 0.05
    fitting = [name for length, name in LEVELS if length <= limit]
    return fitting[-1] if fitting else None


class Names:
    """Names of the exchanges, queues and routing keys of one namespace."""

    def __init__(self, namespace: str, *, delivery_limit: int = DELIVERY_LIMIT) -> None:
        self.delivery_limit = delivery_limit
        self.namespace = re.sub(r"[^A-Za-z0-9_.-]", "-", namespace)
        if self.namespace.startswith("amq."):  # reserved by the server
            self.namespace = "penstock." + self.namespace
        self.exchange, self.delay, self.due = (
            self.namespace,
            self.namespace + ".delay",
            self.namespace + ".due",
        )
        self.exchanges = (self.exchange, self.delay, self.due)

    def queue(self, topic: str, group: str, priority: int) -> str:
        return f"{self.namespace}.{topic}/{group}.{CLASSES[priority]}"

    def delay_queue(self, topic: str, level: str) -> str:
        return f"{self.namespace}.{topic}/delay.{level}"

    def key(
        self,
        topic: str,
        priority: int,
        target: str,
        *,
        group: str | None = None,
        level: str | None = None,
    ) -> str:
        to = CLASSES[priority] if group is None else f"{CLASSES[priority]}@{escape_name(group)}"
        path = (
            f"{escape_name(topic)}.{to}.{target}"
            if level is None
            else f"{level}.{escape_name(topic)}.{to}.{target}"
        )
        raw = path.encode("utf-8", "replace")
        return (
            path
            if len(raw) <= MAX_ROUTING_KEY and path.isascii()
            else raw[:MAX_ROUTING_KEY].decode("utf-8", "ignore")
        )

    def work_queues(self, spec: TopicSpec) -> Iterator[Queue]:
        """Yield the queues that workers consume, one for each group and priority class."""
        topic = escape_name(spec.name)
        arguments = {
            **QUORUM,
            "x-delivery-limit": self.delivery_limit,
            "x-overflow": "reject-publish",
        }
        if spec.max_depth is not None:
            arguments["x-max-length"] = spec.max_depth
        if spec.name.endswith(DEAD):
            arguments["x-message-ttl"] = int(DEAD_RETENTION * 1000)
        else:
            arguments |= {
                **AT_LEAST_ONCE,
                "x-dead-letter-exchange": self.exchange,
                "x-dead-letter-routing-key": self.key(spec.name + DEAD, NORMAL, "limit"),
            }
        for group in spec.groups:
            for priority in priority_classes(spec.name):
                to = CLASSES[priority]
                one = f"{to}@{escape_name(group)}"
                bindings = (
                    (self.exchange, f"{topic}.{to}.#"),
                    (self.exchange, f"{topic}.{one}.#"),
                    (self.due, f"*.{topic}.{to}.#"),
                    (self.due, f"*.{topic}.{one}.#"),
                )
                yield Queue(self.queue(spec.name, group, priority), arguments, bindings)

    def delay_queues(self, topic: str) -> Iterator[Queue]:
        """Yield the delay queues. They have no consumers: expired messages go to `<ns>.due`."""
        for length, level in LEVELS:
            arguments = {
                **QUORUM,
                **AT_LEAST_ONCE,
                "x-message-ttl": int(length * 1000),
                "x-dead-letter-exchange": self.due,
            }
            yield Queue(
                self.delay_queue(topic, level),
                arguments,
                ((self.delay, f"{level}.{escape_name(topic)}.#"),),
            )
