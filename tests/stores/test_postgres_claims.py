"""The claims in PostgreSQL pass the conformance suite."""

from __future__ import annotations

import pytest
from tests.stores.workers import OnPostgres

from penstock.testing.claims_rig import ClaimsWorker
from penstock.testing.claims_suite import ClaimsConformance

pytestmark = pytest.mark.server("postgres")


class TestPostgresClaims(OnPostgres, ClaimsConformance):
    async def open(self) -> ClaimsWorker:
        return self.claims(self)
