"""The part of a broker that takes part in the ledger's transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.model import Outcome
from penstock.ports.broker import Delivery, Out, Published, QueueAudit
from penstock.ports.ledger import EventState


class Queue(Protocol):
    """Messages and deliveries, inside one transaction.

    The embedded broker changes its tables. For an external broker, the transaction records the
    messages to publish. The relay publishes and settles after the commit.
    """

    def enqueue(self, batch: Sequence[Out]) -> list[tuple[Published, int]]:
        """Publish messages. Return an answer and a position for each."""

    def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        """Settle deliveries. The result is False if the lease was lost. Then nothing changes."""

    def settle_undurably(self, items: Sequence[tuple[Delivery, Outcome]]) -> None:
        """Settle deliveries in a transaction that a power cut may lose.

        An external broker would not lose the settlement. So its deliveries are released. A durable
        transaction settles them when they are delivered again.
        """

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Return for each delivery whether its lease is still held."""

    def defer_copy(self, delivery: Delivery, state: EventState, now: float) -> Outcome | None:
        """Return an outcome if this delivery is a copy of running work or arrived too early.

        The embedded broker makes no copies and returns None.
        """

    def may_start(self, rows: Sequence[int]) -> list[bool]:
        """Return False for each row that another delivery of this batch or another worker has."""

    def hold_keys(self, topic: str, group: str, until: Mapping[str, float]) -> None:
        """Deliver messages of these keys only after these times, if the broker can do that."""

    def reclaim(self, worker: str) -> list[str]:
        """Expire the leases of a crashed worker. Return the ids of its events."""

    def pause(self, topic: str, reason: str | None) -> bool:
        """Pause a topic, or resume it if `reason` is None.

        Return False if the topic does not exist.
        """

    def paused(self) -> dict[str, str]:
        """Return the reason for each paused topic."""

    def make_due(
        self, topic: str, group: str, key: str, messages: Sequence[tuple[int, int]]
    ) -> None:
        """End the delay of these messages of a key now, and the hold of the key.

        `messages` has the row number of each event, and the position of its message.
        """

    def prune(self) -> int:
        """Delete a part of the messages that no group needs. Return how many."""


class QueueReports(Protocol):
    """Figures about queues, for operators."""

    def groups(self) -> list[tuple[str, str]]:
        """Return all pairs of topic and consumer group."""

    def leases_by_worker(self, limit: int) -> dict[str, int]:
        """Return worker -> number of its leases. The number is 0 if the broker does not know it."""

    def oldest(self, limit: int) -> float | None:
        """Return the time since which the oldest unfinished message waits, or None if none does.

        Delayed messages count only if more than `limit` of them are older.
        """

    def leased_ids(self, limit: int) -> list[str]:
        """Return ids of events that workers have in flight."""

    def depths(
        self, topic: str, group: str, keys: Sequence[str] | None = None, *, limit: int = 1000
    ) -> dict[str, int]:
        """Return key -> waiting messages, of these keys or of the keys with the most messages."""

    def audit(self, now: float) -> QueueAudit:
        """Compare the queue with the ledger and with its own counters, for `doctor`."""


class Outgoing(Protocol):
    """Messages that wait to be published on an external broker."""

    def add(self, message: Out, *, due: float, reserved_until: float) -> int:
        """Insert a message. Return its row number."""

    def remove(self, rows: Sequence[int]) -> None: ...

    def has(self, id: str) -> bool:
        """Return True if a message of this event waits."""

    def next_due(self, now: float) -> tuple[bool, float]:
        """Return whether an unreserved message is due, and the next due time or 0."""

    def reserve_due(self, now: float, until: float, limit: int) -> list[tuple[int, Out]]:
        """Reserve due messages until a time, and return them."""

    def make_due(self, topic: str, events: Sequence[int], now: float) -> None:
        """End the delay of the messages of these events now. `events` are row numbers."""

    def purge(self, topic: str) -> int:
        """Delete all messages of a topic. Return how many."""

    def pause(self, topic: str, reason: str | None) -> None:
        """Pause a topic for all workers, or resume it if `reason` is None."""

    def paused(self) -> dict[str, str]:
        """Return the reason for each paused topic."""


class Members(Protocol):
    """Live workers, known to other workers by their heartbeats."""

    def heartbeat(self, worker: str, until: float) -> None:
        """Record that a worker is alive until a time."""

    def leave(self, worker: str) -> None:
        """Delete a worker that stops or has crashed."""

    def has_event(self, row: int, now: float) -> bool:
        """Return True if a live worker has this event in flight."""

    def prune(self, before: float) -> None:
        """Delete workers whose last heartbeat ended before this time."""
