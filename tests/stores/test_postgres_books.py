"""The tests of ledger transactions on PostgreSQL, with ledger, claims, outbox and broker in one
schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from tests.embedded.test_books import *  # noqa: F403 (the tests)
from tests.embedded.test_books import AnyOrder, Rig
from tests.servers import Handle
from tests.stores.postgres_ground import PostgresGround

pytestmark = pytest.mark.server("postgres")


@pytest.fixture(autouse=True)
def _on_postgres(
    server: Callable[[str], Handle], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    ground = PostgresGround(server("postgres").url)
    monkeypatch.setattr(Rig, "ground", ground)
    yield
    ground.clear()


class AnyOrderOnPostgres(AnyOrder):
    """The same rules, with fewer examples: each step waits for the server."""


TestAnyOrder = AnyOrderOnPostgres.TestCase
TestAnyOrder.settings = settings(AnyOrder.TestCase.settings, max_examples=20)
