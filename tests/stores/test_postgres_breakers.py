"""The tests of breakers and of causes of delays on PostgreSQL."""

from __future__ import annotations

import pytest
from tests.embedded.test_breakers import *  # noqa: F403 (the tests)
from tests.embedded.test_waits import (  # noqa: F401 (the tests)
    test_a_delay_of_an_unstarted_event_has_a_cause_until_it_is_redriven,
    test_a_due_event_waits_for_nothing,
    test_an_event_that_starts_again_waits_for_nothing,
    test_events_are_counted_by_the_cause_of_their_wait,
)
from tests.stores.postgres_ground import rigs_on_postgres  # noqa: F401 (a fixture)

pytestmark = pytest.mark.server("postgres")
