"""The ledger's schema in SQL, and the state that outlives a transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from penstock.ports import Clock, End
from penstock.rules.identity import DEFAULT_TRACKING, url_key
from penstock.stores.sql import SqlStore, SqlTable, Tx

SCHEMA = """
CREATE TABLE event(n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
  topic TEXT NOT NULL, position INTEGER, source TEXT NOT NULL,
  trace TEXT NOT NULL, url TEXT NOT NULL, url_key BLOB NOT NULL,
  host TEXT NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
  starts INTEGER NOT NULL DEFAULT 0,
  crashes INTEGER NOT NULL DEFAULT 0, fence INTEGER NOT NULL DEFAULT 0,
  accepted_at REAL NOT NULL, dispatched_at REAL, asked_at REAL, finished_at REAL, not_before REAL,
  response_status INTEGER, response_hash TEXT,
  reason TEXT, worker TEXT, extractors TEXT,
  duplicate_of TEXT, promoted INTEGER NOT NULL DEFAULT 0, waits_for TEXT, result TEXT);
-- Wide and written once, in a separate table, so that a change of status rewrites a short row.
CREATE TABLE envelope(event INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE fetched(event INTEGER PRIMARY KEY, page TEXT NOT NULL, meta BLOB NOT NULL);
-- Pages of delayed and dead events. Retention keeps them.
CREATE TABLE needed(event INTEGER PRIMARY KEY, page TEXT NOT NULL);
-- Progress of redirect chains of delayed events.
CREATE TABLE redirect(event INTEGER PRIMARY KEY, chain BLOB NOT NULL);
CREATE INDEX event_url ON event(url_key, n);
CREATE INDEX event_trace ON event(trace);
CREATE INDEX event_delayed ON event(not_before) WHERE status='delayed';
CREATE INDEX event_waits ON event(waits_for) WHERE waits_for IS NOT NULL;
CREATE INDEX event_duplicate ON event(duplicate_of, n) WHERE duplicate_of IS NOT NULL;
CREATE TABLE counter(topic TEXT NOT NULL, name TEXT NOT NULL, n INTEGER NOT NULL,
  PRIMARY KEY(topic, name)) WITHOUT ROWID;
CREATE TABLE dead(n INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL UNIQUE,
  topic TEXT NOT NULL, url TEXT NOT NULL, host TEXT NOT NULL,
  at REAL NOT NULL, stage TEXT NOT NULL, class TEXT NOT NULL,
  reason TEXT NOT NULL, fingerprint TEXT NOT NULL, detail TEXT NOT NULL, envelope BLOB NOT NULL,
  headers TEXT NOT NULL);
CREATE INDEX dead_fingerprint ON dead(fingerprint);
-- Recent ends of a topic, host or extractor: "topic:requests", "host:shop.example".
-- The class is that of dead events, and "" for other ends.
CREATE TABLE ends(what TEXT NOT NULL, bucket INTEGER NOT NULL, class TEXT NOT NULL,
  n INTEGER NOT NULL, PRIMARY KEY(what, bucket, class)) WITHOUT ROWID;
-- Hosts and extractors that the breaker paused. `counted` is 0 after an operator resumed the topic.
CREATE TABLE breaker(what TEXT PRIMARY KEY, class TEXT NOT NULL, reason TEXT NOT NULL,
  at REAL NOT NULL, counted INTEGER NOT NULL DEFAULT 1) WITHOUT ROWID;
-- Used amount of each budget: "pages:host:shop.example", "pages:day" with its day. The counters
-- of URL templates are here too: "trap:date:TRACE" with a hash of the template.
CREATE TABLE budget(what TEXT NOT NULL, period TEXT NOT NULL, used INTEGER NOT NULL,
  at REAL NOT NULL, PRIMARY KEY(what, period)) WITHOUT ROWID;
CREATE INDEX budget_at ON budget(at);
-- Examples of crawler traps whose links were not accepted.
CREATE TABLE trap(template TEXT PRIMARY KEY, kind TEXT NOT NULL, links INTEGER NOT NULL,
  at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE seen(trace TEXT NOT NULL, url_key BLOB NOT NULL, at REAL NOT NULL,
  PRIMARY KEY(trace, url_key)) WITHOUT ROWID;
-- Links of ended pages that are not accepted yet. The engine encodes `body`.
CREATE TABLE waiting_links(n INTEGER PRIMARY KEY AUTOINCREMENT, page INTEGER NOT NULL,
  links INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX waiting_links_page ON waiting_links(page, n);
-- The pipeline whose events these are, in one row, and its workers.
CREATE TABLE store_owner(one INTEGER PRIMARY KEY, pipeline TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE live_worker(worker TEXT PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE cursor(source TEXT PRIMARY KEY, body BLOB, at REAL NOT NULL) WITHOUT ROWID;
-- Known URLs whose newest visit answered 404 or 410. The state is 'missing', 'leaving' (the records
-- will be removed), 'held' (the removal waits for an operator) or 'gone'. `since` is its time.
CREATE TABLE absent(url_key BLOB PRIMARY KEY, host TEXT NOT NULL, event INTEGER NOT NULL,
  visits INTEGER NOT NULL, at REAL NOT NULL, state TEXT NOT NULL, since REAL NOT NULL)
  WITHOUT ROWID;
CREATE INDEX absent_host ON absent(host, at);
CREATE INDEX absent_state ON absent(state, host);
-- Number of URLs of a host that had a success and are not gone.
CREATE TABLE known_host(host TEXT PRIMARY KEY, known INTEGER NOT NULL, held_at REAL,
  approved_until REAL NOT NULL DEFAULT 0) WITHOUT ROWID;
"""
# Append-only. The time in microseconds is part of the key and keeps the order of rows. So one
# B-tree is enough for writing and reading.
HISTORY = """
CREATE TABLE history(event INTEGER NOT NULL, at INTEGER NOT NULL, status TEXT NOT NULL,
  worker TEXT, stage TEXT, class TEXT, reason TEXT,
  PRIMARY KEY(event, at, status)) WITHOUT ROWID;
"""
COUNT = (
    "INSERT INTO counter VALUES(?,?,?) ON CONFLICT(topic, name) DO UPDATE"
    " SET n=counter.n+excluded.n"
)
RECORD = (
    "INSERT INTO history(event, at, status, worker, stage, class, reason)"
    " VALUES(?,?,?,?,?,?,?) ON CONFLICT(event, at, status)"
    " DO UPDATE SET worker=excluded.worker, stage=excluded.stage, class=excluded.class,"
    " reason=excluded.reason"
)
STORED = (  # the columns of ports.StoredEvent
    "SELECT e.n, e.id, e.topic, e.status, e.url, e.host, v.body"
    " FROM event e JOIN envelope v ON v.event=e.n"
)
STATE = "e.id, e.n, e.status, e.attempts, e.starts, e.crashes, e.accepted_at, e.not_before, e.fence"


class SqlLedger:
    """An open ledger. `runtime.assembly` binds its tables to each transaction."""

    schema = SCHEMA + HISTORY

    def __init__(
        self, db: SqlStore, clock: Clock, tracking: tuple[str, ...] = DEFAULT_TRACKING
    ) -> None:
        self.db, self.clock = db, clock
        # The key of a canonical URL, the same in every row and claim. Every step of an event needs
        # it, so recent keys are cached.
        self.url_key = lru_cache(1 << 13)(partial(url_key, tracking=tracking, canonical=True))
        self.pruned = 0  # row after which the next prune continues
        db.part("ledger", self.schema)

    # -- statements that each database writes in its own way ---------------------------------------

    def state_rows(self, tx: Tx, ids: Sequence[str]) -> list[Any]:
        """Return the columns STATE of these events."""
        rows: list[Any] = tx.executemany(
            f"SELECT {STATE} FROM event e WHERE e.id=?", [(id_,) for id_ in ids]
        ).fetchall()
        return rows

    def record_all(
        self,
        tx: Tx,
        events: Sequence[int],
        now: float,
        status: str,
        worker: str | None,
        stage: str | None,
        reason: str | None,
    ) -> None:
        """Add the same line to the history of many events."""
        at = int(now * 1e6)
        tx.executemany(RECORD, [(n, at, status, worker, stage, None, reason) for n in events])

    def forget_history(self, tx: Tx, rows: Sequence[tuple[int]], before: float) -> None:
        """Delete the history of events that are deleted now."""
        tx.executemany("DELETE FROM history WHERE event=?", rows)

    def entered(self, tx: Tx) -> int | None:
        """Return the number of events ever inserted, from the counter of the store."""
        return int(
            tx.execute(
                "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name='event'), 0)"
            ).get
        )


class LedgerTable(SqlTable):
    """Base of the ledger's tables that need its state, or write history and counters."""

    def __init__(self, tx: Tx, ledger: SqlLedger) -> None:
        self._tx, self._ledger = tx, ledger

    def _count(self, topic: str, deltas: Mapping[str, int]) -> None:
        """Add to the counters of one topic."""
        self._tx.executemany(COUNT, [(topic, str(name), d) for name, d in deltas.items() if d])

    def _count_all(self, deltas: Counter[tuple[str, str]]) -> None:
        """Add to counters by (topic, name)."""
        self._tx.executemany(COUNT, [(*k, d) for k, d in deltas.items() if d])

    def _record(
        self,
        n: int,
        now: float,
        status: str,
        *,
        reason: str | None = None,
        worker: str | None = None,
        end: End | None = None,
    ) -> None:
        """Add a line to an event's history, from `end` if it is given."""
        stage = error_class = None
        if end is not None:
            stage, error_class, reason = end.stage, end.error_class or None, end.reason
        self._tx.execute(RECORD, (n, int(now * 1e6), status, worker, stage, error_class, reason))
