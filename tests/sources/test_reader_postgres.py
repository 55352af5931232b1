"""The tests of the reader on a shared ledger: PostgreSQL holds the lock and the cursor."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.servers import Handle
from tests.sources.test_reader import *  # noqa: F403
from tests.sources.test_reader import Rig

pytestmark = pytest.mark.server("postgres")


@pytest.fixture
def rig(tmp_path: Path, server: Callable[[str], Handle]) -> Iterator[Rig]:
    (tmp_path / "state").mkdir()
    url, namespace = server("postgres").url, f"reader_{uuid.uuid4().hex[:8]}"
    made = Rig(tmp_path / "state", **{"broker.url": url, "namespace": namespace})
    made.open()
    yield made
    made.stores.close()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f'DROP SCHEMA IF EXISTS "{namespace}" CASCADE')
