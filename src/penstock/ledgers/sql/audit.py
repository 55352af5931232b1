"""Figures of the ledger that must agree with each other, for `penstock doctor`.

They are counted over whole tables in one snapshot, so the audit is slow.
"""

from __future__ import annotations

from penstock.ports import QueueAudit, Status
from penstock.ports.reports import Audit
from penstock.stores.sql import Tx

_STATUSES = frozenset(status.value for status in Status)


def audit(tx: Tx, queue: QueueAudit, *, entered: int | None) -> Audit:
    """Count the ledger's figures that must agree. `queue` contains the figures of the broker."""
    return Audit(
        counters={
            (t, s): n
            for t, s, n in tx.execute("SELECT topic, name, n FROM counter")
            if s in _STATUSES
        },
        rows={
            (t, s): n
            for t, s, n in tx.execute(
                "SELECT topic, status, count(*) FROM event GROUP BY topic, status"
            )
        },
        entered=entered,
        queue=queue,
        letterless=int(
            tx.execute(
                "SELECT count(*) FROM dead d JOIN event e ON e.id=d.event WHERE e.status<>'dead'"
            ).get
        ),
        outbox=tx.execute(
            "SELECT s.name, s.next-1-s.flushed, (SELECT count(*) FROM outbox o"
            " WHERE o.sink=s.id) FROM sink s"
        ).fetchall(),
        future=(
            tx.execute(
                "SELECT max(accepted_at) FROM event WHERE n>(SELECT max(n) FROM event)-1000"
            ).get
            or 0.0
        ),
    )
