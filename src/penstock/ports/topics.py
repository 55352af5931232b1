"""All topics of a pipeline, on all its brokers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from penstock.ports.broker import Capabilities, Out, Stats, Subscription, TopicSpec


class Topics(Protocol):
    """Brokers as workers and commands use them, outside the ledger's transaction."""

    def caps_of(self, topic: str) -> Capabilities:
        """Return the features of the topic's broker."""

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription: ...

    def wake(self, topics: Iterable[str]) -> None:
        """Wake receivers of this process that wait for these topics."""

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        """Declare topics, as `Broker.ensure` does. May be repeated.

        Return differences from the configuration, in sentences.
        """

    async def stats(self, topic: str, group: str) -> Stats: ...

    async def partitions(self, topic: str, group: str) -> list[dict[str, object]]:
        """Return the lag of each partition, or an empty list if the broker has no partitions."""

    async def peek(self, topic: str, limit: int) -> Sequence[Out]: ...

    async def purge(self, topic: str) -> int: ...

    async def replay(
        self,
        topic: str,
        group: str,
        *,
        since: float,
        offsets: Mapping[int, int] | None = None,
    ) -> int:
        """Deliver messages published since `since` to `group` again. Return how many.

        `offsets` (partition -> offset) is for Kafka only.
        """

    async def close(self) -> None: ...
