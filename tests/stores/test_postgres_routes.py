"""The tests of events that wait for a route, with the ledger on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.embedded.test_books import Rig
from tests.embedded.test_routes import *  # noqa: F403 (the tests)
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
