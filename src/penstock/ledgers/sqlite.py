"""The ledger in an SQLite file; the SQL is in sql.py, the file's side in stores/sqlite.py."""

from __future__ import annotations

from penstock.ledgers.sql import SqlLedger
from penstock.stores.context import Context


def open_ledger(url: str, context: Context) -> SqlLedger:
    return SqlLedger(context.store(url), context.clock)
