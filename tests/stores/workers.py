"""Workers on one store, for the conformance suites of ledgers, claims and pages."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import Handle

from penstock.brokers.postgres.broker import PostgresBroker
from penstock.brokers.sqlite import SqliteBroker
from penstock.claims.sql import SqlClaims
from penstock.engine.settings import LifecycleSettings
from penstock.ledgers.postgres import PostgresLedger
from penstock.ledgers.sqlite import SqliteLedger
from penstock.pages.bound import IndexedPages
from penstock.pages.segments import SegmentStore
from penstock.runtime.assembly import Assembly
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sqlite import Database
from penstock.testing.claims_rig import LIMITS, ClaimsWorker, SharedClaimsWorker
from penstock.testing.clock import ManualClock
from penstock.testing.store_rig import StoreRig


class SqlWorkers:
    """Opens workers on an SQLite file, or on a schema of PostgreSQL."""

    accuracy = 0.001
    clock: ManualClock
    directory: Path

    def database(self) -> Any:
        raise NotImplementedError

    def worker(
        self,
        rig: StoreRig[Any],
        *,
        pages: Callable[[Any, str], IndexedPages] | None = None,
    ) -> Assembly:
        """Open all stores for one more worker. The rig closes them after the test."""
        db, name = self.database(), f"w{secrets.token_hex(3)}"
        postgres = isinstance(db, PostgresStore)
        stored = (
            SegmentStore(db, self.directory / "pages", self.clock, writer=name)
            if pages is None
            else pages(db, name)
        )
        rig.at_end(db.close_now)
        rig.at_end(stored.close)
        return Assembly(
            broker=PostgresBroker(db, self.clock) if postgres else SqliteBroker(db, self.clock),
            ledger=(PostgresLedger if postgres else SqliteLedger)(db, self.clock),
            claims=SqlClaims(db, self.clock, LIMITS, random.Random(1)),
            pages=stored,
            settings=LifecycleSettings(),
            worker=name,
            lease=30.0,
            clock=self.clock,
        )

    def claims(self, rig: StoreRig[Any]) -> ClaimsWorker:
        engine = self.worker(rig)
        assert isinstance(engine.claims, SqlClaims)
        return SharedClaimsWorker(engine.uow, engine.claims, engine.proxies)

    def now(self) -> float:
        return self.clock.now()

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)


class OnSqlite(SqlWorkers):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.clock, self.directory = ManualClock(), tmp_path

    def database(self) -> Database:
        return Database(str(self.directory / "state.db"), durability="process")


class OnPostgres(SqlWorkers):
    @pytest.fixture(autouse=True)
    def _schema(self, tmp_path: Path, server: Callable[[str], Handle]) -> Iterator[None]:
        self.clock, self.directory = ManualClock(), tmp_path
        self.url, self.namespace = server("postgres").url, f"t{secrets.token_hex(6)}"
        yield
        with psycopg.connect(self.url) as db:
            db.execute(f"DROP SCHEMA IF EXISTS {self.namespace} CASCADE")

    def database(self) -> PostgresStore:
        return PostgresStore(self.url, namespace=self.namespace, durability="process")
