"""Claims on URLs: the right of one event to fetch a URL in its freshness window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class Holder(msgspec.Struct, frozen=True):
    """State of the claim on a URL."""

    owner: str  # id of the event that has the claim
    good: str | None  # id of the last success before the owner
    next: str | None  # id of the event that is delayed to the end of the window


class ClaimChange(msgspec.Struct, frozen=True):
    """Change of a claim's owner."""

    key: bytes  # URL key
    owner: str  # id of the event that takes the claim
    last_success: str | None = None  # id of the last success before the owner
    expected: str | None = None  # id of the previous owner, None if the claim is free


class ClaimTable(Protocol):
    """Claims in the ledger's store, inside one transaction. Durable when it commits."""

    def holder(self, key: bytes) -> Holder | None:
        """Return the holder of a URL key, or None if it has no claim."""

    def holders(self, keys: Sequence[bytes]) -> dict[bytes, Holder | None]:
        """Return the holder of each URL key, or None for a key without a claim."""

    def acquire(self, wanted: Mapping[bytes, str], now: float) -> list[bytes]:
        """Insert claims (URL key -> owner). Return the keys that had no owner."""

    def take_over(self, changes: Sequence[ClaimChange], now: float) -> None:
        """Set the owners of these claims, even if other events have them."""

    def set_next(self, key: bytes, id: str) -> None:
        """Record the event that is delayed to the end of the window."""

    def references(self, key: bytes, id: str) -> bool:
        """Return True if the claim names the event as owner or last success."""

    def prune(self, before: float) -> None:
        """Delete a part of the claims that were taken before a time."""


class ExternalClaims(Protocol):
    """Claims in an external store. They are read before the ledger's transaction."""

    async def holders(self, keys: Sequence[bytes]) -> dict[bytes, Holder]:
        """Return the holders of those URL keys that have a claim."""

    async def take(self, changes: Sequence[ClaimChange]) -> list[bool]:
        """Take each claim whose owner is the expected one.

        The result is False if another event has the claim. A repeated call gives the same result.
        """

    async def set_next(self, key: bytes, id: str, expected_owner: str) -> bool:
        """Record the event that is delayed to the end of the window.

        The result is False if the owner is not the expected one. Then nothing changes.
        """

    async def prune(self, before: float) -> None:
        """Delete a part of the claims that were taken before a time."""

    async def close(self) -> None: ...
