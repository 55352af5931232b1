"""The ledger in PostgreSQL, shared by all machines that reach the server.

The history has one partition per week, and old partitions are dropped. See `ledgers.sql` for the
other tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ledgers.sql.ledger import SCHEMA, SqlLedger
from penstock.ports import Clock
from penstock.rules.identity import DEFAULT_TRACKING, tracking
from penstock.stores.context import Context
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx

DAY = 86400 * 1_000_000  # history.at is in microseconds
WEEK = 7 * DAY
# `history_rest` is the default partition, so that an insert never fails. It takes rows without a
# weekly partition (after a clock jump or late maintenance) and rows kept from dropped partitions.
HISTORY = """
CREATE TABLE history(event INTEGER NOT NULL, at INTEGER NOT NULL, status TEXT NOT NULL,
  worker TEXT, stage TEXT, class TEXT, reason TEXT,
  PRIMARY KEY(event, at, status)) PARTITION BY RANGE(at);
CREATE TABLE history_rest PARTITION OF history DEFAULT;
-- A few rows that change often. In a block with free space, the server reuses old row versions.
ALTER TABLE counter SET (fillfactor=20);
ALTER TABLE ends SET (fillfactor=20);
ALTER TABLE event SET (fillfactor=70);
"""


class PostgresLedger(SqlLedger):
    def __init__(
        self, db: PostgresStore, clock: Clock, tracking: tuple[str, ...] = DEFAULT_TRACKING
    ) -> None:
        week = int(clock.now() * 1e6) // WEEK
        self.schema = SCHEMA + HISTORY + ";".join([_making(week), _making(week + 1)])
        super().__init__(db, clock, tracking)
        # Day and number of rollbacks when `forget_history` last changed the partitions.
        self._looked = (0, 0)

    def forget_history(self, tx: Tx, rows: Sequence[tuple[int]], before: float) -> None:
        """Drop old weekly partitions and create the next ones, once a day.

        Rows of events that still exist (dead letters, baselines) are first copied to
        `history_rest`. After a rollback, the work is repeated.
        """
        now = int(self.clock.now() * 1e6)
        looked = (now // DAY, self.db.rollbacks)
        if looked == self._looked:
            return
        week = now // WEEK
        # Other transactions queue behind this lock, so do not wait long for a reader.
        tx.execute("SET LOCAL lock_timeout TO '2s'")
        there = {int(name.removeprefix("history_w")) for name in _weeks(tx)}
        for missing in {week, week + 1} - there:
            if (
                tx.execute(
                    "SELECT 1 FROM history_rest WHERE at>=? AND at<? LIMIT 1",
                    (missing * WEEK, (missing + 1) * WEEK),
                ).get
                is None
            ):
                tx.execute(_making(missing))
        for passed in sorted(w for w in there if (w + 1) * WEEK <= before * 1e6):
            tx.execute(f"ALTER TABLE history DETACH PARTITION history_w{passed}")
            tx.execute(
                f"INSERT INTO history_rest SELECT h.* FROM history_w{passed} h"
                " WHERE EXISTS(SELECT 1 FROM event e WHERE e.n=h.event)"
            )
            tx.execute(f"DROP TABLE history_w{passed}")
        tx.execute(
            "DELETE FROM history_rest h WHERE at<? AND NOT EXISTS(SELECT 1 FROM event e"
            " WHERE e.n=h.event)",
            (int(before * 1e6),),
        )
        tx.execute("SET LOCAL lock_timeout TO '30s'")
        self._looked = looked

    def entered(self, tx: Tx) -> int | None:
        """Return None. A sequence of PostgreSQL also counts inserts that were rolled back."""
        return None


def _making(week: int) -> str:
    return (
        f"CREATE TABLE history_w{week} PARTITION OF history FOR VALUES"
        f" FROM ({week * WEEK}) TO ({(week + 1) * WEEK})"
    )


def _weeks(tx: Tx) -> list[str]:
    children = tx.execute(
        "SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid=inhrelid"
        " WHERE inhparent='history'::regclass"
    )
    return [name for (name,) in children if name.startswith("history_w")]


def open_ledger(url: str, context: Context) -> PostgresLedger:
    return PostgresLedger(
        context.server(url), context.clock, tracking(context.config.dedup.tracking)
    )
