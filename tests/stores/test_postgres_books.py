"""The tests of ledger transactions on PostgreSQL, with ledger, claims, outbox and broker in one
schema.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from tests.embedded.test_books import *  # noqa: F403 (the tests)
from tests.embedded.test_books import AnyOrder
from tests.stores.postgres_ground import rigs_on_postgres  # noqa: F401 (a fixture)

pytestmark = pytest.mark.server("postgres")


class AnyOrderOnPostgres(AnyOrder):
    """The same rules, with fewer examples: each step waits for the server."""


TestAnyOrder = AnyOrderOnPostgres.TestCase
TestAnyOrder.settings = settings(AnyOrder.TestCase.settings, max_examples=20)
