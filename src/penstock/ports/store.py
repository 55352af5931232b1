"""Transactional stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

T = TypeVar("T")


class Store(Protocol):
    """A transactional domain. Adapters that share one may commit together."""

    async def write(self, work: Callable[[Any], T], *, durable: bool = True) -> T:
        """Run `work(tx)` in a transaction shared with whoever else writes now (group commit).
        Returns after commit. `durable=False` may be forgotten by a power cut (never by a killed
        process). Raises StoreUnavailable; then nothing was written.
        """

    async def read(self, work: Callable[[Any], T]) -> T: ...

    async def close(self) -> None: ...


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine gives a store that lies in a file."""

    sqlite: tuple[int, ...]  # its version
    wal_reset_bug: bool
    file_system: str  # "" where nobody knows
    network: bool  # that file system is on another machine
