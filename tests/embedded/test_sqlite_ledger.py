"""The ledger in an SQLite file passes the conformance suite."""

from __future__ import annotations

from tests.stores.workers import OnSqlite

from penstock.ports import UnitOfWork
from penstock.testing.ledger_suite import LedgerConformance


class TestSqliteLedger(OnSqlite, LedgerConformance):
    async def open(self) -> UnitOfWork:
        return self.worker(self).uow
