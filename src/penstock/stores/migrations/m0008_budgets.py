"""Budgets of pages and bytes, and stopped crawler traps."""

from __future__ import annotations

from penstock.stores.migrations.base import Migration, Sql

MIGRATION = Migration(
    number=8,
    title="budgets and crawler traps",
    part="ledger",
    steps=(
        Sql(
            "CREATE TABLE budget(what TEXT NOT NULL, period TEXT NOT NULL, used INTEGER NOT NULL,"
            " at REAL NOT NULL, PRIMARY KEY(what, period)) WITHOUT ROWID;"
            "CREATE INDEX budget_at ON budget(at);"
            "CREATE TABLE trap(template TEXT PRIMARY KEY, kind TEXT NOT NULL,"
            " links INTEGER NOT NULL, at REAL NOT NULL) WITHOUT ROWID"
        ),
    ),
)
