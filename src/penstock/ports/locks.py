"""Locks that one process of a fleet holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.ports.store import Transaction


class LockTable(Protocol):
    """Holders of the fleet's locks, inside one transaction."""

    def holder(self, name: str) -> str | None:
        """Return the token of the lock's holder."""


class Lock(Protocol):
    """A lock that one process of all that share a store can hold.

    On this machine the lock is also a file. Other processes read its status text.
    """

    @property
    def held(self) -> bool:
        """True while this process holds the lock, as far as it knows without a request."""

    @property
    def here(self) -> bool:
        """True while this process holds the file lock of this machine.

        Another machine may hold the fleet's lock at the same time.
        """

    @property
    def shared(self) -> bool:
        """True if processes of other machines compete for the lock."""

    async def take(self) -> bool:
        """Try to get the lock. Never waits for its holder.

        Raises OSError or StoreUnavailable if the lock cannot be had at all.
        """

    def verify(self, tx: Transaction) -> None:
        """Check the lock in the transaction that records the work done under it.

        Raises LockLost if another process has taken the lock.
        """

    def lose(self) -> None:
        """Give the lock up after `verify` failed, so that `take` tries again."""

    def note(self, text: str) -> None:
        """Set the status text of the lock file."""

    def status(self) -> str:
        """Return the status text that the holder on this machine has set, or ""."""

    def release(self) -> None: ...
