"""Messages for external brokers, live workers and paused topics, in the ledger's store."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.ports import Clock, Out, QueueAudit
from penstock.stores.sql import SqlStore, SqlTable, Tx

SCHEMA = """
-- Messages to publish: inserted with the row they belong to, deleted when the broker has confirmed
-- them. Until `claimed`, one worker publishes the message.
CREATE TABLE outgoing(n INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, id TEXT NOT NULL,
  key TEXT NOT NULL, prio INTEGER NOT NULL, headers TEXT, body BLOB NOT NULL, due REAL NOT NULL,
  claimed REAL NOT NULL);
CREATE INDEX outgoing_due ON outgoing(due);
CREATE INDEX outgoing_id ON outgoing(id);
CREATE TABLE pausing(topic TEXT PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID;
-- Workers that are alive until a time, as far as the others know. They keep their events in flight.
CREATE TABLE member(worker TEXT PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID;
"""


def create(db: SqlStore) -> None:
    """Create or check the tables."""
    db.part("relay", SCHEMA)


class SqlOutgoing(SqlTable):
    """Messages that wait to be published on an external broker, and paused topics."""

    def add(self, message: Out, *, due: float, reserved_until: float) -> int:
        m = message
        headers = msgspec.json.encode(m.headers).decode() if m.headers else None
        self._tx.execute(
            "INSERT INTO outgoing(topic, id, key, prio, headers, body, due, claimed)"
            " VALUES(?,?,?,?,?,?,?,?)",
            (m.topic, m.id, m.key, m.priority, headers, m.body, due, reserved_until),
        )
        return self._tx.last_insert_rowid()

    def remove(self, rows: Sequence[int]) -> None:
        self._tx.executemany("DELETE FROM outgoing WHERE n=?", [(n,) for n in rows])

    def has(self, id: str) -> bool:
        return self._tx.execute("SELECT 1 FROM outgoing WHERE id=? LIMIT 1", (id,)).get is not None

    def next_due(self, now: float) -> tuple[bool, float]:
        due = self._tx.execute(
            "SELECT 1 FROM outgoing WHERE due<=? AND claimed<=? LIMIT 1", (now, now)
        ).get
        later: float | None = self._tx.execute(
            "SELECT min(due) FROM outgoing WHERE due>?", (now,)
        ).get
        return due is not None, later or 0.0

    def reserve_due(self, now: float, until: float, limit: int) -> list[tuple[int, Out]]:
        found = self._tx.execute(
            "SELECT n, topic, id, key, prio, headers, body FROM outgoing"
            " WHERE due<=? AND claimed<=? ORDER BY due LIMIT ?",
            (now, now, limit),
        ).fetchall()
        self._tx.executemany(
            "UPDATE outgoing SET claimed=? WHERE n=?", [(until, row[0]) for row in found]
        )
        return [
            (
                n,
                Out(
                    topic=topic,
                    id=id_,
                    key=key,
                    priority=prio,
                    headers=msgspec.json.decode(headers) if headers else {},
                    body=body,
                ),
            )
            for n, topic, id_, key, prio, headers, body in found
        ]

    def make_due(self, topic: str, events: Sequence[int], now: float) -> None:
        self._tx.executemany(
            "UPDATE outgoing SET due=? WHERE id=(SELECT id FROM event WHERE n=?) AND topic=?"
            " AND due>?",
            [(now, n, topic, now) for n in events],
        )

    def purge(self, topic: str) -> int:
        self._tx.execute("DELETE FROM outgoing WHERE topic=?", (topic,))
        return self._tx.changes()

    def pause(self, topic: str, reason: str | None) -> None:
        if reason is None:
            self._tx.execute("DELETE FROM pausing WHERE topic=?", (topic,))
        else:
            self._tx.execute(
                "INSERT INTO pausing VALUES(?,?)"
                " ON CONFLICT(topic) DO UPDATE SET reason=excluded.reason",
                (topic, reason),
            )

    def paused(self) -> dict[str, str]:
        return dict(self._tx.execute("SELECT topic, reason FROM pausing").fetchall())


class SqlMembers(SqlTable):
    """Workers that are alive, as far as the other workers know."""

    def heartbeat(self, worker: str, until: float) -> None:
        self._tx.execute(
            "INSERT INTO member VALUES(?,?) ON CONFLICT(worker) DO UPDATE SET until=excluded.until",
            (worker, until),
        )

    def leave(self, worker: str) -> None:
        self._tx.execute("DELETE FROM member WHERE worker=?", (worker,))

    def has_event(self, row: int, now: float) -> bool:
        found = self._tx.execute(
            "SELECT 1 FROM event e JOIN member m ON m.worker=e.worker"
            " WHERE e.n=? AND e.status IN ('in_flight','writing') AND m.until>?",
            (row, now),
        ).get
        return found is not None

    def prune(self, before: float) -> None:
        self._tx.execute("DELETE FROM member WHERE until<?", (before,))


class RelayReports:
    """Figures about external queues, as far as the ledger's store knows them."""

    def __init__(self, tx: Tx, clock: Clock, groups: Sequence[tuple[str, str]]) -> None:
        self._tx, self._clock, self._groups = tx, clock, groups

    def groups(self) -> list[tuple[str, str]]:
        return list(self._groups)

    def leases_by_worker(self, limit: int) -> dict[str, int]:
        """Return live workers. Only the broker knows how many deliveries each holds."""
        rows = self._tx.execute(
            "SELECT worker FROM member WHERE until>? LIMIT ?", (self._clock.now(), limit)
        )
        return {worker: 0 for (worker,) in rows}

    def oldest(self, limit: int) -> float | None:
        """Return when the oldest due, unconfirmed message was due."""
        found: float | None = self._tx.execute(
            "SELECT min(due) FROM outgoing WHERE due<=?", (self._clock.now(),)
        ).get
        return found

    def leased_ids(self, limit: int) -> list[str]:
        rows = self._tx.execute(
            "SELECT e.id FROM event e JOIN member m ON m.worker=e.worker"
            " WHERE e.status='in_flight' LIMIT ?",
            (limit,),
        )
        return [id_ for (id_,) in rows]

    def depths(
        self, topic: str, group: str, keys: Sequence[str] | None = None, *, limit: int = 1000
    ) -> dict[str, int]:
        """Return pending events by host, from the ledger. Reads all events."""
        if keys is None:
            rows = self._tx.execute(
                "SELECT host, count(*) AS n FROM event WHERE topic=? AND status='pending'"
                " GROUP BY host ORDER BY n DESC, host LIMIT ?",
                (topic, limit),
            )
            return dict(rows.fetchall())
        return {
            key: self._tx.execute(
                "SELECT count(*) FROM event WHERE topic=? AND status='pending' AND host=?",
                (topic, key),
            ).get
            for key in keys
        }

    def audit(self, now: float) -> QueueAudit:
        """Return an empty audit. The queues of external brokers cannot be compared from here."""
        return QueueAudit(queued=None, groups=[], expired=0)
