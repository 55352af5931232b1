"""The tests of budgets on PostgreSQL."""

from __future__ import annotations

import pytest
from tests.embedded.test_budgets import *  # noqa: F403 (the tests)
from tests.stores.postgres_ground import rigs_on_postgres  # noqa: F401 (a fixture)

pytestmark = pytest.mark.server("postgres")
