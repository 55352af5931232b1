"""Statements that several tables of the ledger share: history and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from penstock.ports import End
from penstock.stores.sql import Tx

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


def count(tx: Tx, topic: str, deltas: Mapping[str, int]) -> None:
    """Add to the counters of one topic."""
    tx.executemany(COUNT, [(topic, str(name), d) for name, d in deltas.items() if d])


def count_all(tx: Tx, deltas: Counter[tuple[str, str]]) -> None:
    """Add to counters by (topic, name)."""
    tx.executemany(COUNT, [(*k, d) for k, d in deltas.items() if d])


def record(
    tx: Tx,
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
    tx.execute(RECORD, (n, int(now * 1e6), status, worker, stage, error_class, reason))
