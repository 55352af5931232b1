"""Pages that are gone: results of events, absent URLs, and known URLs of each host."""

from __future__ import annotations

from penstock.stores.migrations.base import Backfill, Migration, Sql

MIGRATION = Migration(
    number=3,
    title="absent URLs, and known URLs of each host",
    part="outbox",  # the store has this part only together with the ledger
    steps=(
        Sql(
            "ALTER TABLE event ADD COLUMN result TEXT;"
            "CREATE TABLE absent(url_key BLOB PRIMARY KEY, host TEXT NOT NULL,"
            " event INTEGER NOT NULL, visits INTEGER NOT NULL, at REAL NOT NULL,"
            " state TEXT NOT NULL, since REAL NOT NULL) WITHOUT ROWID;"
            "CREATE INDEX absent_host ON absent(host, at);"
            "CREATE INDEX absent_state ON absent(state, host);"
            "CREATE TABLE known_host(host TEXT PRIMARY KEY, known INTEGER NOT NULL, held_at REAL,"
            " approved_until REAL NOT NULL DEFAULT 0) WITHOUT ROWID"
        ),
        # A URL counts with the first of its successes.
        Backfill(
            "event",
            "n",
            "INSERT INTO known_host(host, known) SELECT e.host, count(*) FROM event e"
            " WHERE e.n>?1 AND e.n<=?2 AND e.status='success'"
            " AND NOT EXISTS(SELECT 1 FROM event o WHERE o.url_key=e.url_key"
            " AND o.status='success' AND o.n<e.n)"
            " GROUP BY e.host ORDER BY e.host ON CONFLICT(host) DO UPDATE"
            " SET known=known_host.known+excluded.known",
        ),
        Sql("CREATE INDEX record_url ON record(url_key)"),
    ),
)
