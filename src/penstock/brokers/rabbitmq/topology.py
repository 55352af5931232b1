"""What Penstock declares on RabbitMQ: names, routing keys, the delay ladder and the arguments of
every queue, as values. Nothing is sent from here.

Three topic exchanges per namespace. `<ns>` takes what is published, with routing keys by stage,
class and target: `requests.normal.shop.example`. `<ns>.delay` takes what must wait, the level
first: `5s.requests.normal.shop.example`. A level's queue has one time to live for all that is in
it, so what is due first is at its head and nothing waits behind another's delay; what has expired
goes to `<ns>.due`, and from there to the queues that it was meant for. A message for one group only
(a retry) has `normal@main` in the place of `normal`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.ports import TopicSpec

CLASSES = ("high", "normal", "low")
NORMAL = CLASSES.index("normal")
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
DEAD = ".dead"
# A back-stop far away: the ledger judges poison by its own starts, and up to 4.2 the server counts
# every return, innocent ones too.
DELIVERY_LIMIT = 10_000
DEAD_KEPT = (
    14 * 86400.0
)  # seconds; the letters themselves are in the ledger, these are copies for other tools
MAX_ROUTING_KEY = 255  # bytes, by the protocol
QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
# Both are needed for a dead-lettering that loses nothing (the source is told when the target has
# it), and it exists since 3.10.
SAFELY: dict[str, Any] = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


class Queue(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]
    bindings: tuple[tuple[str, str], ...]  # (exchange, pattern)


def word(name: str) -> str:
    """A name as one word of a routing key: dots separate words there, and `*` and `#` stand for
    any.
    """
    return re.sub(r"[^A-Za-z0-9_:-]", lambda m: ":" if m[0] == "." else f"%{ord(m[0]):02X}", name)


def ranks(topic: str) -> tuple[int, ...]:
    """The classes a topic has queues for. Dead letters are for looking at: one queue is enough."""
    return (NORMAL,) if topic.endswith(DEAD) else tuple(range(len(CLASSES)))


def rank_of(topic: str, priority: int) -> int:
    """A number that no class has would never be asked for."""
    return NORMAL if topic.endswith(DEAD) else min(max(priority, 0), len(CLASSES) - 1)


def level_for(seconds: float) -> str | None:
    """The longest level that does not last (noticeably) longer than this; None: too short for any,
    to be waited for in memory.
    """
    bearable = seconds * 1.01 + 0.05
    fitting = [name for length, name in LEVELS if length <= bearable]
    return fitting[-1] if fitting else None


class Names:
    """Everything's name in one namespace."""

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

    def queue(self, topic: str, group: str, rank: int) -> str:
        return f"{self.namespace}.{topic}/{group}.{CLASSES[rank]}"

    def waiting(self, topic: str, level: str) -> str:
        return f"{self.namespace}.{topic}/delay.{level}"

    def key(
        self,
        topic: str,
        rank: int,
        target: str,
        *,
        group: str | None = None,
        level: str | None = None,
    ) -> str:
        to = CLASSES[rank] if group is None else f"{CLASSES[rank]}@{word(group)}"
        path = (
            f"{word(topic)}.{to}.{target}"
            if level is None
            else f"{level}.{word(topic)}.{to}.{target}"
        )
        raw = path.encode("utf-8", "replace")
        return (
            path
            if len(raw) <= MAX_ROUTING_KEY and path.isascii()
            else raw[:MAX_ROUTING_KEY].decode("utf-8", "ignore")
        )

    def work(self, spec: TopicSpec) -> Iterator[Queue]:
        """The queues that workers consume: one for each group and class."""
        topic = word(spec.name)
        arguments = {
            **QUORUM,
            "x-delivery-limit": self.delivery_limit,
            "x-overflow": "reject-publish",
        }
        if spec.max_depth is not None:
            arguments["x-max-length"] = spec.max_depth
        if spec.name.endswith(DEAD):
            arguments["x-message-ttl"] = int(DEAD_KEPT * 1000)
        else:
            arguments |= {
                **SAFELY,
                "x-dead-letter-exchange": self.exchange,
                "x-dead-letter-routing-key": self.key(spec.name + DEAD, NORMAL, "limit"),
            }
        for group in spec.groups:
            for rank in ranks(spec.name):
                to = CLASSES[rank]
                one = f"{to}@{word(group)}"
                bindings = (
                    (self.exchange, f"{topic}.{to}.#"),
                    (self.exchange, f"{topic}.{one}.#"),
                    (self.due, f"*.{topic}.{to}.#"),
                    (self.due, f"*.{topic}.{one}.#"),
                )
                yield Queue(self.queue(spec.name, group, rank), arguments, bindings)

    def ladder(self, topic: str) -> Iterator[Queue]:
        """The queues that nobody consumes: what is in them comes out at the other end when its time
        is over.
        """
        for length, level in LEVELS:
            arguments = {
                **QUORUM,
                **SAFELY,
                "x-message-ttl": int(length * 1000),
                "x-dead-letter-exchange": self.due,
            }
            yield Queue(
                self.waiting(topic, level), arguments, ((self.delay, f"{level}.{word(topic)}.#"),)
            )
