"""The ledger in PostgreSQL, shared by every machine that reaches it; the SQL is in sql.py, the server's side in stores/postgres.py."""

from __future__ import annotations

from penstock.ledgers.sql import SqlLedger
from penstock.stores.context import Context


def open_ledger(url: str, context: Context) -> SqlLedger:
    return SqlLedger(context.store(url), context.clock)
