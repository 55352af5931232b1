"""Links that wait until there is room for their events."""

from __future__ import annotations

from penstock.stores.migrations.base import Migration, Sql

MIGRATION = Migration(
    number=7,
    title="links that wait for room",
    part="ledger",
    steps=(
        Sql(
            "CREATE TABLE waiting_links(n INTEGER PRIMARY KEY AUTOINCREMENT,"
            " page INTEGER NOT NULL, links INTEGER NOT NULL, body BLOB NOT NULL);"
            "CREATE INDEX waiting_links_page ON waiting_links(page, n)"
        ),
    ),
)
