"""The tests of the relay with the ledger and its outgoing table on PostgreSQL."""

from __future__ import annotations

import pytest
from tests.embedded.test_relay import *  # noqa: F403 (the tests)
from tests.stores.postgres_ground import rigs_on_postgres  # noqa: F401 (a fixture)

pytestmark = pytest.mark.server("postgres")
