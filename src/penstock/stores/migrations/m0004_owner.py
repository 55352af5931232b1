"""The pipeline that owns a store, and its workers."""

from __future__ import annotations

from penstock.stores.migrations.base import Migration, Sql

MIGRATION = Migration(
    number=4,
    title="the pipeline that owns the store, and its workers",
    part="ledger",
    steps=(
        Sql(
            "CREATE TABLE store_owner(one INTEGER PRIMARY KEY, pipeline TEXT NOT NULL,"
            " at REAL NOT NULL);"
            "CREATE TABLE live_worker(worker TEXT PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID"
        ),
    ),
)
