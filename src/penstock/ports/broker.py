"""Brokers: topics, messages, deliveries, settling."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from penstock.model import Outcome


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Features of a broker.

    The configuration is checked against them when it is read. A missing feature is an error and is
    never replaced silently. A broker does not have a feature that it does not declare.
    """

    order_per_key: Literal["native", "emulated", "none"] = "none"
    strict_priority: Literal["native", "emulated", "none"] = "none"
    delay: Literal["native", "emulated", "none"] = "none"
    replay: bool = False
    bounded: bool = False  # the broker itself answers `full`
    counts_deliveries: bool = False
    # The broker can hold the messages of a host until its slot. Then these messages do not fill the
    # prefetch window.
    hold_keys: bool = False
    exact_stats: bool = False
    transactional: bool = False  # settle, publish and the ledger can share one transaction
    # End of a lease: its time, or the end of the connection or membership that holds it.
    lease: Literal["time", "connection"] = "time"
    # Messages of one key do not delay other keys, even without `per_key`. If False, messages are
    # delivered in the order of publication.
    fair_keys: bool = True
    # Bytes of any body that the broker always accepts. None if it accepts all messages of Penstock.
    max_body: int | None = None


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of a topic."""

    name: str
    groups: tuple[str, ...] = ("main",)  # consumer groups
    ordered: bool = False  # deliver one message of a key at a time, in the order of publication
    max_depth: int | None = None  # messages. With more, `publish` answers `full`.
    # Seconds for which messages are kept for replay after every group has settled them.
    retention: float = 24 * 3600.0


class Out(msgspec.Struct, frozen=True, kw_only=True):
    """A message to publish."""

    topic: str
    id: str
    key: str
    body: bytes
    headers: dict[str, str] = {}
    priority: int = 1  # priority class: 0 high, 1 normal, 2 low
    not_before: float = 0.0  # time before which the message is not delivered


class Published(enum.StrEnum):
    """Answer to a published message."""

    OK = "ok"  # the message is durable
    FULL = "full"  # the topic has reached its `max_depth`
    FAILED = "failed"  # the message was not published
    UNKNOWN = "unknown"  # the message may be published. Publish it again with the same id.


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A message delivered to this process under a lease. It must be settled."""

    topic: str
    group: str
    id: str
    key: str
    body: bytes
    headers: dict[str, str] = {}
    # Message number, for audit and replay. It is unique among the unsettled deliveries of one
    # subscription.
    position: int
    token: int  # token of the lease. A settle with an older token changes nothing.
    deliveries: int  # number of deliveries, including crashes. It is not a number of failures.
    priority: int  # priority class of the message: 0 high, 1 normal, 2 low


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of messages of a topic and consumer group."""

    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest_age: float | None  # seconds
    exact: bool  # False if the numbers are estimates


class Subscription(Protocol):
    """Deliveries of one topic to one consumer group."""

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        """Return up to `limit` deliveries, at most `per_key` of one key.

        Wait up to `wait` seconds. Return an empty list if no message arrives. A message may be
        delivered again if its lease expires.
        """

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        """Settle deliveries. Durable when it returns.

        Items may come in any order, late or twice. The result is False if the lease was lost. Then
        nothing changes. If `Retry` or `Dead` is not atomic, publish the copy under the same id,
        wait for the confirmation, then ack. So the message is never lost.
        """

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        """Extend leases to `seconds` from now. The result is False if the lease was lost."""

    async def hold(self, until: Mapping[str, float]) -> None:
        """Deliver messages of these keys only after these times.

        Does nothing if the broker does not have the feature `caps.hold_keys`.
        """

    async def close(self) -> None: ...


class Broker(Protocol):
    """A message broker.

    If the broker cannot be reached, calls raise StoreUnavailable, or `publish` returns `failed` or
    `unknown` for a message.
    """

    caps: Capabilities

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        """Declare topics and groups. May be repeated.

        Return differences between existing topics and the declaration, in sentences. A broker may
        update limits such as `max_depth`. It never changes other properties silently.
        """

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        """Publish messages. Return one answer per message.

        A message is durable if its answer is `ok`. The same id may be published twice, for example
        after `unknown`.
        """

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription: ...

    async def stats(self, topic: str, group: str) -> Stats: ...

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """Return up to `limit` waiting messages, oldest first.

        Messages are not consumed, moved or counted as delivered.
        """

    async def purge(self, topic: str) -> int:
        """Delete waiting messages for every group. Messages in flight may be kept.

        Return how many were deleted. The number is an estimate if `stats` are estimates.
        """

    async def replay(self, topic: str, group: str, *, since: float) -> int:
        """Deliver all messages published since `since` to `group` again. Return how many.

        Needs the feature `caps.replay`.
        """

    async def close(self) -> None: ...


@runtime_checkable
class LeaseTracking(Protocol):
    """A subscription that knows its leases without a request to the broker."""

    def holds(self, delivery: Delivery) -> bool:
        """Return True if this subscription still holds the delivery's lease."""


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
        """Replay from these offsets (partition -> offset), or else from a time."""


class QueueAudit(msgspec.Struct, frozen=True, kw_only=True):
    """Audit of the embedded broker for `doctor`. Its numbers are counted over whole tables."""

    # Ids of the events with a message for group `main`, None for external brokers.
    queued: frozenset[str] | None
    # (topic, group, recorded numbers, counted numbers). The numbers are (ready, leased, delayed).
    groups: list[tuple[str, str, tuple[int, int, int], tuple[int, int, int]]]
    expired: int  # expired leases whose messages are not yet ready again
