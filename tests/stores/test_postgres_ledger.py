"""The ledger in PostgreSQL passes the conformance suite."""

from __future__ import annotations

import pytest
from tests.stores.workers import OnPostgres

from penstock.ports import UnitOfWork
from penstock.testing.ledger_suite import LedgerConformance

pytestmark = pytest.mark.server("postgres")


class TestPostgresLedger(OnPostgres, LedgerConformance):
    async def open(self) -> UnitOfWork:
        return self.worker(self).uow
