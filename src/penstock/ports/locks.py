"""Locks of a fleet. One process at a time holds a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.ports.store import Transaction


class LockTable(Protocol):
    """Holders of the fleet's locks, inside one transaction."""

    def holder(self, name: str) -> str | None:
        """Return the token of the lock's holder, or None if no process holds the lock."""


class Lock(Protocol):
    """A lock for all processes that share a store. One process at a time holds it.

    On each machine the lock is also a lock file. Other processes read its status text.
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
        """Try to get the lock. Return True if this process holds it. Never waits for the holder.

        Raises OSError or StoreUnavailable if the lock file or the store cannot be used.
        """

    def verify(self, tx: Transaction) -> None:
        """Check the lock in the transaction that records the work done under it.

        Raises Lost if another process has taken the lock.
        """

    def lose(self) -> None:
        """Give the lock up after `verify` failed, so that `take` tries again."""

    def note(self, text: str) -> None:
        """Set the status text of the lock file."""

    def status(self) -> str:
        """Return the status text that the holder on this machine has set, or ""."""

    def release(self) -> None:
        """Give the lock up for other processes. Does nothing if it is not held."""
