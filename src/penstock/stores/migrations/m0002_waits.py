"""Causes of delays that time alone does not end, and breakers of hosts and extractors."""

from __future__ import annotations

from penstock.stores.migrations.base import Migration, Sql

MIGRATION = Migration(
    number=2,
    title="causes of delays, and breakers of hosts and extractors",
    part="ledger",
    steps=(
        Sql(
            "ALTER TABLE event ADD COLUMN waits_for TEXT;"
            "CREATE INDEX event_waits ON event(waits_for) WHERE waits_for IS NOT NULL"
        ),
        Sql(
            "CREATE TABLE ends(what TEXT NOT NULL, bucket INTEGER NOT NULL, class TEXT NOT NULL,"
            " n INTEGER NOT NULL, PRIMARY KEY(what, bucket, class)) WITHOUT ROWID;"
            "CREATE TABLE breaker(what TEXT PRIMARY KEY, class TEXT NOT NULL,"
            " reason TEXT NOT NULL, at REAL NOT NULL, counted INTEGER NOT NULL DEFAULT 1)"
            " WITHOUT ROWID;"
            # Ends of the last minute. The new table counts from zero.
            "DROP TABLE tally"
        ),
    ),
)
