"""Binds the adapters of one ledger to transactions, and builds the engine on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from penstock.brokers.sql import SqlQueue
from penstock.claims.external import NoClaimTable
from penstock.claims.sql import SqlClaims, SqlClaimTable, SqlHosts
from penstock.claims.sql_proxies import SqlProxies
from penstock.engine.admission import Admission
from penstock.engine.breakers import Breakers
from penstock.engine.budgets import Budgets, Traffic
from penstock.engine.claim_session import Claims, PrefetchedClaims, SharedClaims
from penstock.engine.gone import Removals
from penstock.engine.lifecycle import Lifecycle
from penstock.engine.maintenance import Maintenance
from penstock.engine.relay import (
    Relay,
    RelayChores,
    RelayedQueue,
    RelayedUnitOfWork,
)
from penstock.engine.routes import Routes
from penstock.engine.settings import LifecycleSettings
from penstock.ledgers.sql import outgoing
from penstock.ledgers.sql.absences import SqlAbsences
from penstock.ledgers.sql.breakers import SqlBreakers
from penstock.ledgers.sql.budgets import SqlBudgets
from penstock.ledgers.sql.counters import SqlCounters
from penstock.ledgers.sql.dead_letters import SqlDeadLetters
from penstock.ledgers.sql.events import SqlEvents
from penstock.ledgers.sql.ledger import SqlLedger
from penstock.ledgers.sql.links import SqlWaitingLinks
from penstock.ledgers.sql.lookup import SqlEventLookup
from penstock.ledgers.sql.maintenance import SqlEventMaintenance
from penstock.ledgers.sql.outbox import SqlOutbox, TableWriter
from penstock.ledgers.sql.owner import SqlStoreOwner
from penstock.ledgers.sql.reports import SqlReports
from penstock.ledgers.sql.routes import SqlRoutes
from penstock.ledgers.sql.sources import SqlSources
from penstock.operate.dead_letters import DeadLetterOffice
from penstock.pages.bound import BoundPageIndex, IndexedPages
from penstock.ports import (
    Broker,
    ClaimTable,
    Clock,
    Durability,
    ExternalClaims,
    HostTable,
    Pace,
    ProxyHealth,
    Queue,
    QueueReports,
    RobotsCache,
    Topics,
    Transaction,
    UnitOfWork,
)
from penstock.rules import pace
from penstock.stores.sql import HolderTable, SqlUnitOfWork, Tx


class HostAccess(Pace, RobotsCache, Protocol):
    """Slots of hosts and the cache of robots.txt. Every claims adapter has both."""


class FleetProxyHealth(ProxyHealth, Protocol):
    """Health of proxies that the fleet shares."""

    async def refresh(self) -> None:
        """Read changes that other workers recorded."""

    async def prune(self) -> None:
        """Delete old rows that no decision needs."""

    def troubled(self) -> list[tuple[str, str, str, int, float, float, str]]:
        """Return proxies with failures, for a command's output."""

    def lists(self) -> dict[str, tuple[float, int, str]]:
        """Return the last fetch of each pool's list, for a command's output."""


class ClaimServer(ExternalClaims, HostAccess, Protocol):
    """Claims in an external store."""

    limits: pace.Limits
    hosts: HostTable
    proxies: FleetProxyHealth

    @property
    def skew(self) -> float:
        """Seconds by which the server's clock was ahead of this machine's at the last refresh."""


def proxies_of(claims: SqlClaims | ClaimServer, clock: Clock) -> FleetProxyHealth:
    """Return the health of proxies, which is in the same store as the claims."""
    return SqlProxies(claims.db, clock) if isinstance(claims, SqlClaims) else claims.proxies


class Assembly:
    """The engine of one ledger, with everything that it uses."""

    def __init__(
        self,
        *,
        broker: SqlQueue | Mapping[str, Broker],
        ledger: SqlLedger,
        claims: SqlClaims | ClaimServer,
        pages: IndexedPages,
        settings: LifecycleSettings,
        worker: str,
        lease: float,
        clock: Clock,
    ) -> None:
        """`broker` is the queue in the ledger's store, or the external broker of each topic."""
        self.worker, self.clock = worker, clock
        self.ledger, self.claims, self.pages, self.db = ledger, claims, pages, ledger.db
        self.table_sinks: dict[str, TableWriter] = {}  # sinks with a table in the ledger's store
        SqlSources.create(self.db)
        SqlOutbox.create(self.db)
        SqlRoutes.create(self.db)
        inner = SqlUnitOfWork(self.db, self._bind)
        self.uow: UnitOfWork = inner
        self.topics: Topics
        self.relay: Relay | None = None
        self.relay_chores: RelayChores | None = None
        self._queue: SqlQueue | None = None
        if isinstance(broker, SqlQueue):
            self.topics = self._queue = broker
        else:
            outgoing.create(self.db)
            self.topics = self.relay = Relay(broker, inner, self.clock)
            self.uow = RelayedUnitOfWork(inner, self.relay)
            self.relay_chores = RelayChores(
                self.relay,
                self.uow,
                inner,
                worker=worker,
                lease=lease,
                clock=clock,
            )
        self.proxies = proxies_of(claims, clock)
        self.external_claims: ClaimServer | None = None
        self._claim_session: Claims = SharedClaims()
        if not isinstance(claims, SqlClaims):
            self.external_claims = claims
            self._claim_session = PrefetchedClaims(claims, self.uow)
        self.traffic = Traffic(settings.budgets, clock)
        self.meter = self.traffic if settings.budgets.has_bytes else None  # for HTTP clients
        self.former_owners: frozenset[str] = frozenset()
        self.with_settings(settings)

    def _bind(self, sql: Tx) -> Transaction:
        """Make the tables of one transaction."""
        ledger = self.ledger
        events, sent, members = (
            SqlEvents(sql, ledger),
            outgoing.SqlOutgoing(sql),
            outgoing.SqlMembers(sql),
        )
        queue: Queue
        figures: QueueReports
        if self._queue is not None:
            queue = figures = self._queue.bind(sql)
        else:
            assert self.relay is not None
            queue = RelayedQueue(sent, members, events, self.relay, None)
            figures = outgoing.RelayReports(sql, self.clock, self.relay.groups)
        claims: ClaimTable
        hosts: HostTable
        if isinstance(self.claims, SqlClaims):
            claims, hosts = SqlClaimTable(sql, self.claims), SqlHosts(sql, self.claims)
        else:
            claims, hosts = NoClaimTable(), self.claims.hosts
        reports = SqlReports(sql, figures, queue.paused)
        return Transaction(
            events=events,
            lookup=SqlEventLookup(sql, ledger),
            maintenance=SqlEventMaintenance(sql, ledger),
            counters=SqlCounters(sql, ledger),
            breakers=SqlBreakers(sql),
            budgets=SqlBudgets(sql),
            dead_letters=SqlDeadLetters(sql),
            absences=SqlAbsences(sql, ledger),
            sources=SqlSources(sql),
            links=SqlWaitingLinks(sql, ledger),
            outbox=SqlOutbox(sql, self.table_sinks),
            queue=queue,
            queue_reports=figures,
            claims=claims,
            hosts=hosts,
            pages=BoundPageIndex(sql, self.pages),
            locks=HolderTable(sql),
            outgoing=sent,
            members=members,
            owner=SqlStoreOwner(sql),
            routes=SqlRoutes(sql, self.clock),
            reports=reports,
            status_reports=reports,
            page_reports=reports,
            letter_reports=reports,
        )

    def with_settings(self, settings: LifecycleSettings) -> None:
        if self.relay is None:  # messages are in the ledger's store, so their owner is known
            settings = msgspec.structs.replace(settings, pipeline="")
        elif self.former_owners:
            settings = msgspec.structs.replace(settings, former=self.former_owners)
        self.settings = settings
        self.breakers = Breakers(self.uow, self.claims, settings, clock=self.clock)
        self.lifecycle = Lifecycle(
            self.uow,
            self._claim_session,
            self.pages,
            self.topics,
            self.breakers,
            settings,
            url_key=self.ledger.url_key,
            clock=self.clock,
        )
        self.removals = Removals(self.uow, self.lifecycle.write_records, settings, clock=self.clock)
        # A transaction whose messages an external broker receives must survive a power cut here.
        durability = Durability.RELAXED if self.relay is None else Durability.CONFIGURED
        self.admission = Admission(
            self.uow,
            self._claim_session,
            self.claims,
            settings,
            url_key=self.ledger.url_key,
            worker=self.worker,
            clock=self.clock,
            durability=durability,
            traffic=self.traffic,
        )
        self.maintenance = Maintenance(self.uow, self.topics, settings, clock=self.clock)
        self.routes = Routes(
            self.uow, self.topics, settings.pools, worker=self.worker, clock=self.clock
        )
        self.budgets = Budgets(self.uow, self.topics, settings, self.traffic, clock=self.clock)
        self.dead_letters = DeadLetterOffice(self.uow, self.topics, clock=self.clock)

    @property
    def limits(self) -> pace.Limits:
        """The usual limits of a host."""
        return self.claims.limits
