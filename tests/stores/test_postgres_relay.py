"""The tests of the relay with the ledger and its outgoing table on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.embedded.test_books import Rig
from tests.embedded.test_relay import *  # noqa: F403 (the tests)
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
