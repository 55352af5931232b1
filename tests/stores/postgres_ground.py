"""PostgreSQL store for the tests of ledger transactions: one schema per rig, dropped after the
test.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.embedded.test_books import Ground, Rig
from tests.servers import Handle

from penstock.brokers.postgres.broker import PostgresBroker
from penstock.ledgers.postgres import PostgresLedger
from penstock.stores.postgres.store import PostgresStore


class PostgresGround(Ground):
    def __init__(self, url: str) -> None:
        self.url = url
        self.stores: list[PostgresStore] = []

    def store(self) -> PostgresStore:
        self.stores.append(
            PostgresStore(
                self.url,
                namespace=f"test_{secrets.token_hex(6)}",
                durability="process",
                inline=True,
            )
        )
        return self.stores[-1]

    def broker(self, db: Any, clock: Any) -> Any:
        return PostgresBroker(db, clock)

    def ledger(self, db: Any, clock: Any) -> PostgresLedger:
        return PostgresLedger(db, clock)

    def tables(self, r: Rig) -> list[str]:
        return [
            name
            for (name,) in r.sql(
                "SELECT relname FROM pg_class WHERE relnamespace=current_schema()::regnamespace "
                "AND relkind='r'"
            )
        ]

    def columns(self, r: Rig, table: str) -> list[str]:
        found = r.sql(
            (
                "SELECT attname FROM pg_attribute WHERE attrelid=?::regclass AND attnum>0 "
                "AND NOT attisdropped ORDER BY attnum"
            ),
            table,
        )
        return [name for (name,) in found]

    def assert_queued(self, r: Rig) -> None:
        noted = {
            tuple(k): counts
            for *k, counts in r.sql(
                "SELECT grp, prio, key, ARRAY[ready, leased, delayed] FROM keyq "
                "WHERE ready+leased+delayed<>0"
            )
        }
        counted = (
            "ARRAY[count(*) FILTER (WHERE state=0), count(*) FILTER (WHERE state=1), "
            "count(*) FILTER (WHERE state=2)]"
        )
        assert noted == {
            tuple(k): counts
            for *k, counts in r.sql(
                f"SELECT grp, prio, key, {counted} FROM queue GROUP BY grp, prio, key"
            )
        }

    def clear(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for store in self.stores:
                store.close_now()
                connection.execute(
                    sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(
                        sql.Identifier(store.namespace)
                    )
                )


@pytest.fixture(autouse=True)
def rigs_on_postgres(
    server: Callable[[str], Handle], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Put the rigs of a module that imports this fixture on PostgreSQL."""
    ground = PostgresGround(server("postgres").url)
    monkeypatch.setattr(Rig, "ground", ground)
    yield
    ground.clear()
