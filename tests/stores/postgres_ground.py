"""PostgreSQL under the sentences about the books: a schema for each rig, dropped behind the test. Which broker shares the transaction is the test's choice."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql
from tests.embedded.test_books import Ground, Rig

from penstock.ledgers.postgres import PostgresLedger
from penstock.stores.postgres import PostgresStore


class PostgresGround(Ground):
    def __init__(self, url: str, broker: Callable[[Any, Any], Any]) -> None:
        self.url, self._broker = url, broker
        self.stores: list[PostgresStore] = []

    def store(self) -> PostgresStore:
        self.stores.append(PostgresStore(self.url, namespace=f"test_{secrets.token_hex(6)}", inline=True))
        return self.stores[-1]

    def broker(self, db: Any, clock: Any) -> Any:
        return self._broker(db, clock)

    def ledger(self, db: Any, clock: Any) -> PostgresLedger:
        return PostgresLedger(db, clock)

    def tables(self, r: Rig) -> list[str]:
        return [name for (name,) in r.sql("SELECT relname FROM pg_class WHERE relnamespace=current_schema()::regnamespace AND relkind='r'")]

    def columns(self, r: Rig, table: str) -> list[str]:
        found = r.sql("SELECT attname FROM pg_attribute WHERE attrelid=?::regclass AND attnum>0 AND NOT attisdropped ORDER BY attnum", table)
        return [name for (name,) in found]

    def clear(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for store in self.stores:
                store.close_now()
                connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(store.namespace)))
