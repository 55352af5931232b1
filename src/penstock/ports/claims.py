"""Claims on URLs: the right of one event to fetch a URL in its freshness window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class Holder(msgspec.Struct, frozen=True):
    """Who has the claim on a URL: the event that owns it, the last success before that, the one
    event delayed to the window's end.
    """

    owner: str
    good: str | None
    next: str | None


class ClaimChange(msgspec.Struct, frozen=True):
    """A claim that an event takes."""

    key: bytes  # URL key
    owner: str
    last_success: str | None = None
    expected: str | None = None  # the owner until now, if there is one


class ClaimTable(Protocol):
    """Claims that share the ledger's store, inside one transaction."""

    def holder(self, key: bytes) -> Holder | None: ...

    def holders(self, keys: Sequence[bytes]) -> dict[bytes, Holder | None]: ...

    def acquire(self, wanted: Mapping[bytes, str], now: float) -> list[bytes]:
        """Insert claims (URL key -> owner). Return the keys that had no owner."""

    def take_over(self, changes: Sequence[ClaimChange], now: float) -> None:
        """Set the owners of these claims, whoever has them."""

    def set_next(self, key: bytes, id: str) -> None:
        """Record the event that is delayed to the end of the window."""

    def references(self, key: bytes, id: str) -> bool:
        """Return True if the claim names the event as owner or last success."""

    def prune(self, before: float) -> None:
        """Delete a part of the claims that were taken before a time."""


class ExternalClaims(Protocol):
    """Claims in a store of their own. They are read before the ledger's transaction."""

    async def holders(self, keys: Sequence[bytes]) -> dict[bytes, Holder]:
        """Return the holders of claimed keys."""

    async def take(self, changes: Sequence[ClaimChange]) -> list[bool]:
        """Take claims whose owner is as expected.

        The result is False if another event has the claim. A repeated call gives the same answer.
        """

    async def set_next(self, key: bytes, id: str, expected_owner: str) -> bool: ...

    async def prune(self, before: float) -> None: ...

    async def close(self) -> None: ...
