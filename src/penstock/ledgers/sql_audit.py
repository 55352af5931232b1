"""What in the books must agree with something else, counted over whole tables at one moment: for doctor, on purpose slow."""

from __future__ import annotations

import msgspec

from penstock.ports import Status
from penstock.stores.sql import Tx

_STATUSES = frozenset(status.value for status in Status)


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    counters: dict[tuple[str, str], int]  # (topic, status)
    rows: dict[tuple[str, str], int]
    entered: int  # events ever entered
    unqueued: list[str]  # open events that no queue holds
    unqueued_count: int
    lingering_count: int  # queued events that have ended; acked when they are handed out
    groups: list[tuple[str, str, tuple[int, int, int], tuple[int, int, int]]]  # topic, group, noted and counted (ready, leased, delayed)
    letterless: int  # letters of events that are not dead
    outbox: list[tuple[str, int, int]]  # sink, noted backlog, rows
    future: float  # newest note in the history
    expired: int  # leases that ran out and were not taken back


def audit(tx: Tx, now: float) -> Audit:
    """Everything that must agree with something else, at one moment."""
    open_ = "status IN ('pending','delayed','in_flight','writing')"
    queued = "SELECT m.id FROM queue q JOIN message m ON m.seq=q.seq WHERE q.grp IN (SELECT id FROM grp WHERE name='main')"
    unqueued = [i for (i,) in tx.execute(f"SELECT id FROM event WHERE {open_} EXCEPT {queued}")]
    groups = []
    for topic, group, gid, *noted in tx.execute(
        "SELECT t.name, g.name, g.id, g.ready, g.leased, g.delayed FROM grp g JOIN topic t ON t.id=g.topic ORDER BY 1, 2"
    ).fetchall():
        counted = dict(tx.execute("SELECT state, count(*) FROM queue WHERE grp=? GROUP BY state", (gid,)).fetchall())
        groups.append((topic, group, (noted[0], noted[1], noted[2]), (counted.get(0, 0), counted.get(1, 0), counted.get(2, 0))))
    return Audit(
        counters={(t, s): n for t, s, n in tx.execute("SELECT topic, name, n FROM counter") if s in _STATUSES},
        rows={(t, s): n for t, s, n in tx.execute("SELECT topic, status, count(*) FROM event GROUP BY topic, status")},
        entered=int(tx.execute("SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name='event'), 0)").get),
        unqueued=unqueued[:5],
        unqueued_count=len(unqueued),
        lingering_count=int(tx.execute(f"SELECT count(*) FROM ({queued} EXCEPT SELECT id FROM event WHERE {open_})").get),
        groups=groups,
        letterless=int(tx.execute("SELECT count(*) FROM dead d JOIN event e ON e.id=d.event WHERE e.status<>'dead'").get),
        outbox=tx.execute("SELECT s.name, s.next-1-s.flushed, (SELECT count(*) FROM outbox o WHERE o.sink=s.id) FROM sink s").fetchall(),
        future=(tx.execute("SELECT max(accepted_at) FROM event WHERE n>(SELECT max(n) FROM event)-1000").get or 0.0),
        expired=int(tx.execute("SELECT count(*) FROM queue WHERE state=1 AND at<?", (now,)).get),
    )
