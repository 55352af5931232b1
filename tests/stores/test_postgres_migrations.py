"""Migrations of a PostgreSQL schema: progress, resumption after a kill, and refusals."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql
from tests.migrating import (
    TRANSACTIONS,
    check_migrated,
    make_old,
    migrated_steps,
    open_store,
    run_killed,
)
from tests.servers import Handle

from penstock.errors import StoreRefused

pytestmark = pytest.mark.server("postgres")


@pytest.fixture
def place(server: Callable[[str], Handle]) -> Iterator[str]:
    url, namespace = server("postgres").url, f"test_{secrets.token_hex(6)}"
    store = open_store(f"{url}#{namespace}")
    make_old(store)
    store.close_now()
    yield f"{url}#{namespace}"
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(namespace)))


def test_a_schema_without_a_version_gets_every_migration(place: str) -> None:
    store = open_store(place)
    assert len(migrated_steps(store)) == TRANSACTIONS
    check_migrated(store)
    assert migrated_steps(store) == []
    store.close_now()


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 7, 9, 12, 14, 15, 16, 18])
def test_a_migration_that_was_killed_resumes(place: str, moment: int) -> None:
    run_killed(place, moment)
    store = open_store(place)
    assert len(migrated_steps(store)) == TRANSACTIONS - (moment + 1) // 2
    check_migrated(store)
    store.close_now()


def test_an_incomplete_migration_is_refused(place: str) -> None:
    run_killed(place, 5)
    store = open_store(place)
    with pytest.raises(StoreRefused, match="store version"):
        store.part("items", "")
    migrated_steps(store)
    check_migrated(store)
    store.close_now()
