"""Transactions of the ledger. One `work(tx)` writes all changes that belong together."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from penstock.ports.absences import AbsenceTable
from penstock.ports.breakers import Breakers
from penstock.ports.budgets import BudgetTable
from penstock.ports.claims import ClaimTable
from penstock.ports.hosts import HostTable
from penstock.ports.ledger import Counters, DeadLetters, EventLookup, EventMaintenance, Events
from penstock.ports.links import WaitingLinks
from penstock.ports.locks import LockTable
from penstock.ports.outbox import OutboxTable
from penstock.ports.owner import StoreOwner
from penstock.ports.pages import PageIndex
from penstock.ports.queue import Members, Outgoing, Queue, QueueReports
from penstock.ports.reports import EventReports, LetterReports, PageReports, StatusReports
from penstock.ports.routes import RouteTable
from penstock.ports.source import Sources

T = TypeVar("T")


class Durability(enum.Enum):
    """Durability of a committed transaction. All levels survive a killed process."""

    RELAXED = "relaxed"  # a power cut may lose the transaction
    CONFIGURED = "configured"  # the level of the operator's option `durability`
    FSYNC = "fsync"  # a power cut does not lose the transaction


@dataclass(frozen=True, slots=True)
class Transaction:
    """Typed tables that commit together. Valid only inside `work`."""

    events: Events
    lookup: EventLookup
    maintenance: EventMaintenance
    counters: Counters
    breakers: Breakers
    budgets: BudgetTable
    dead_letters: DeadLetters
    absences: AbsenceTable
    sources: Sources
    links: WaitingLinks
    outbox: OutboxTable
    queue: Queue
    queue_reports: QueueReports
    claims: ClaimTable
    hosts: HostTable
    pages: PageIndex
    locks: LockTable
    outgoing: Outgoing
    members: Members
    owner: StoreOwner
    routes: RouteTable
    reports: EventReports
    status_reports: StatusReports
    page_reports: PageReports
    letter_reports: LetterReports


class UnitOfWork(Protocol):
    """Runs transactions. All changes of the ledger use it.

    `work` is synchronous. It may run on another thread, and it may run twice. So `work` has no
    effect outside `tx` and returns plain data.
    """

    async def write(
        self,
        work: Callable[[Transaction], T],
        *,
        durability: Durability = Durability.CONFIGURED,
    ) -> T:
        """Run `work` in a transaction, and return its result after the commit.

        Durable when it returns, at the level of `durability`. `work` may run twice. Raises
        StoreUnavailable if the store does not accept the write. Then the store is unchanged.
        """

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on committed data. `work` must not write."""

    def write_now(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` as `write` does, for commands without an event loop."""

    def snapshot(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on the data of one moment, for commands without an event loop.

        `work` must not write.
        """


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this machine that matter for a store in a file."""

    sqlite: tuple[int, ...]  # version of SQLite
    wal_reset_bug: bool  # this version has the WAL reset bug
    file_system: str  # type of the file system, "" if unknown
    network: bool  # the file system is on another machine
