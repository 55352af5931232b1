"""The reason why a sink takes no rows."""

from __future__ import annotations

from penstock.stores.migrations.base import Migration, Sql

MIGRATION = Migration(
    number=6,
    title="record why a sink takes no rows",
    part="outbox",
    steps=(
        Sql(
            "ALTER TABLE sink ADD COLUMN outage TEXT NOT NULL DEFAULT '';"
            "ALTER TABLE sink ADD COLUMN outage_since REAL"
        ),
    ),
)
