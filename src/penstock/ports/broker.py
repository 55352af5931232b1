"""Brokers: topics, messages, deliveries, settling."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from penstock.model import Outcome


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker can do, as data; checked when the configuration is read, never silently
    downgraded.
    """

    order_per_key: Literal["native", "emulated", "none"]
    strict_priority: Literal["native", "emulated", "none"]
    delay: Literal["native", "emulated", "none"]
    replay: bool
    bounded: bool  # can answer `full` itself
    counts_deliveries: bool
    hold_keys: (
        bool  # can keep a host's work back until its slot, so it takes no place in the window
    )
    exact_stats: bool
    transactional: bool  # settle, publish and the ledger may share one transaction
    lease: Literal["time", "connection"] = (
        # what ends it: the clock, or the death of the connection or membership that holds it
        "time"
    )
    # a key with much work does not keep others waiting even where nobody sets per_key; else the
    # order of publication decides
    fair_keys: bool = True
    max_body: int | None = (
        None  # bytes that it always takes, whatever they are; None: more than we ever send
    )


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    groups: tuple[str, ...] = ("main",)
    ordered: bool = False  # one event of a key at a time, in the order of publication
    max_depth: int | None = None  # publish answers `full` beyond it
    retention: float = 24 * 3600.0  # history kept for replay after every group has settled


class Out(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer hands over."""

    topic: str
    id: str
    key: str
    body: bytes
    headers: dict[str, str] = {}
    priority: int = 1
    not_before: float = 0.0


class Published(enum.StrEnum):
    OK = "ok"
    FULL = "full"
    FAILED = "failed"
    UNKNOWN = "unknown"  # it may or may not be there; publish again with the same id


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """An event as a broker handed it out. Lives in one process; must be settled."""

    topic: str
    group: str
    id: str
    key: str
    body: bytes
    headers: dict[str, str] = {}
    # audit and replay; no two deliveries of one subscription that are out at the same time have the
    # same
    position: int
    token: int  # fencing: a settle with an old token touches nothing
    deliveries: int  # times handed out, crashes included; not guilt
    priority: int = 1


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest_age: float | None
    exact: bool


class Subscription(Protocol):
    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        """At most `limit`, possibly none after `wait` seconds; at most `per_key` of one key. Never
        raises for "nothing there".
        """

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        """In any order, late, or twice; durable when it returns. False: the lease was lost, nothing
        was touched. `Retry` and `Dead` never lose: where they cannot be atomic, publish with
        confirmation first, then ack, same id.
        """

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        """Still at work: the lease now ends `seconds` from now. False: it was lost already."""

    async def hold(self, until: Mapping[str, float]) -> None:
        """Hand out nothing of these keys before these times. A no-op where the broker cannot
        (caps.hold_keys).
        """

    async def close(self) -> None: ...


class Broker(Protocol):
    caps: Capabilities

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        """Declare, idempotently. Returns drift in sentences; never changes what exists silently."""

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        """One answer per message, durable when it is `ok`. The same id may be published twice
        (after `unknown`).
        """

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription: ...

    async def stats(self, topic: str, group: str) -> Stats: ...

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """What waits, oldest first, at most `limit`; nothing is consumed, counted or moved by
        looking.
        """

    async def purge(self, topic: str) -> int:
        """Remove what waits, for every group; what is in flight may be kept. Returns how many (an
        estimate where stats are).
        """

    async def replay(self, topic: str, group: str, *, since: float) -> int:
        """Hand everything published since then to `group` again. Only with caps.replay. Returns how
        many.
        """

    async def close(self) -> None: ...


@runtime_checkable
class LeaseTracking(Protocol):
    """A subscription that knows without a request whether it still holds a lease."""

    def holds(self, delivery: Delivery) -> bool: ...


@runtime_checkable
class Partitioned(Protocol):
    """A broker whose topics have partitions."""

    async def partitions(self, topic: str, group: str) -> list[dict[str, object]]:
        """Return name, partition, end, committed and lag of each partition."""

    async def replay(
        self,
        topic: str,
        group: str,
        *,
        since: float,
        offsets: Mapping[int, int] | None = None,
    ) -> int:
        """Replay from these offsets of partitions, or from a time."""


class QueueAudit(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker in the ledger's own store says about itself, counted over whole tables; for
    doctor.
    """

    unqueued: list[str]  # the first few open events that no default group holds
    unqueued_count: int
    lingering_count: int  # queued events that have ended; acked when they are handed out
    groups: list[
        tuple[str, str, tuple[int, int, int], tuple[int, int, int]]
    ]  # topic, group, noted and counted (ready, leased, delayed)
    expired: int  # leases that ran out and were not taken back
