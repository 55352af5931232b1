"""Transactions: everything that becomes true together is written by one `work(tx)`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from penstock.ports.claims import ClaimTable
from penstock.ports.hosts import HostTable
from penstock.ports.ledger import Counters, DeadLetters, EventLookup, EventMaintenance, Events
from penstock.ports.locks import LockTable
from penstock.ports.outbox import OutboxTable
from penstock.ports.pages import PageIndex
from penstock.ports.queue import Members, Outgoing, Queue, QueueReports
from penstock.ports.reports import Reports
from penstock.ports.source import Sources

T = TypeVar("T")


class Durability(enum.Enum):
    """What a committed transaction survives. All levels survive a killed process."""

    RELAXED = "relaxed"  # a power cut may lose it
    CONFIGURED = "configured"  # as the operator's option `durability` says
    FSYNC = "fsync"  # a power cut does not lose it


@dataclass(frozen=True, slots=True)
class Transaction:
    """Typed tables that commit together. Valid only inside `work`."""

    events: Events
    lookup: EventLookup
    maintenance: EventMaintenance
    counters: Counters
    dead_letters: DeadLetters
    sources: Sources
    outbox: OutboxTable
    queue: Queue
    queue_reports: QueueReports
    claims: ClaimTable
    hosts: HostTable
    pages: PageIndex
    locks: LockTable
    outgoing: Outgoing
    members: Members
    reports: Reports


class UnitOfWork(Protocol):
    """The only way to change the ledger.

    `work` is synchronous. It may run on another thread, and it may run twice, so it has no effect
    outside `tx` and returns plain data.
    """

    async def write(
        self,
        work: Callable[[Transaction], T],
        *,
        durability: Durability = Durability.CONFIGURED,
    ) -> T:
        """Run `work` in a transaction, and return its result after the commit.

        Raises StoreUnavailable. Then nothing was written.
        """

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on committed data. It must not write."""

    def write_now(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` as `write` does, for commands without an event loop."""

    def snapshot(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on the data of one moment, for commands without an event loop."""


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine gives a store that lies in a file."""

    sqlite: tuple[int, ...]  # its version
    wal_reset_bug: bool
    file_system: str  # "" where nobody knows
    network: bool  # that file system is on another machine
