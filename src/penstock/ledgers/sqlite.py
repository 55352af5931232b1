"""The ledger in an SQLite file, with single statements for many events.

See `ledgers.sql` for the other SQL and `stores.sqlite` for the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.ledgers.sql.ledger import STATE, SqlLedger
from penstock.rules.identity import tracking
from penstock.stores.context import Context
from penstock.stores.sql import Tx

_NOTE_ALL = (
    "INSERT INTO history(event, at, status, worker, stage, reason)"
    " SELECT value, ?, ?, ?, ?, ? FROM json_each(?) WHERE true"
    " ON CONFLICT(event, at, status) DO UPDATE"
    " SET worker=excluded.worker, stage=excluded.stage, class=NULL, reason=excluded.reason"
)
_STATES = f"SELECT {STATE} FROM json_each(?) CROSS JOIN event e ON e.id=value"


class SqliteLedger(SqlLedger):
    def state_rows(self, tx: Tx, ids: Sequence[str]) -> list[Any]:
        return tx.execute(_STATES, (msgspec.json.encode(ids).decode(),)).fetchall()

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
        tx.execute(_NOTE_ALL, (int(now * 1e6), status, worker, stage, reason, str(events)))


def open_ledger(url: str, context: Context) -> SqliteLedger:
    return SqliteLedger(context.store(url), context.clock, tracking(context.config.dedup.tracking))
