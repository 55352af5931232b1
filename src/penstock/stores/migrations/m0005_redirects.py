"""Progress of redirect chains of delayed events."""

from __future__ import annotations

from penstock.stores.migrations.base import Migration, Sql

MIGRATION = Migration(
    number=5,
    title="progress of redirect chains",
    part="ledger",
    steps=(Sql("CREATE TABLE redirect(event INTEGER PRIMARY KEY, chain BLOB NOT NULL)"),),
)
