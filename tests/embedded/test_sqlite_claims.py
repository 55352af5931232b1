"""The claims in an SQLite file pass the conformance suite."""

from __future__ import annotations

from tests.stores.workers import OnSqlite

from penstock.testing.claims_rig import ClaimsWorker
from penstock.testing.claims_suite import ClaimsConformance


class TestSqliteClaims(OnSqlite, ClaimsConformance):
    async def open(self) -> ClaimsWorker:
        return self.claims(self)
