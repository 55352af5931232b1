"""Sources in the books: whether one is paused, when it was last looked at, what came of it, and its
position. What it reads is not here.
"""

from __future__ import annotations

from typing import Any

from penstock.ports import SourceState
from penstock.stores.sql import SqlStore, Tx

SCHEMA = """
CREATE TABLE source(name TEXT PRIMARY KEY, url TEXT NOT NULL, paused TEXT, generation INTEGER NOT NULL DEFAULT 0, worker TEXT,
  settled_at REAL, looked_at REAL, next_at REAL, event_at REAL, events INTEGER NOT NULL DEFAULT 0, known INTEGER NOT NULL DEFAULT 0,
  skipped INTEGER NOT NULL DEFAULT 0, refused INTEGER NOT NULL DEFAULT 0, error TEXT, error_at REAL, lag REAL, backlog INTEGER, position TEXT);
"""
_COLUMNS = (
    "name, url, paused, generation, worker, settled_at, looked_at, next_at, event_at, events, "
    "known, skipped, refused, error, error_at, lag, backlog, position"
)
_NOTABLE = frozenset(
    "worker settled_at looked_at next_at error error_at lag backlog position".split()  # noqa: SIM905
)


class SqlSources:
    def __init__(self, db: SqlStore) -> None:
        self.db = db
        db.part("sources", 1, SCHEMA)

    def declare_in(self, tx: Tx, name: str, url: str) -> None:
        tx.execute(
            "INSERT INTO source(name, url) VALUES(?,?) ON CONFLICT(name) DO UPDATE SET url=excluded.url",
            (name, url),
        )

    def state_in(self, tx: Tx, name: str) -> SourceState | None:
        return next(
            (
                SourceState(*row)
                for row in tx.execute(f"SELECT {_COLUMNS} FROM source WHERE name=?", (name,))
            ),
            None,
        )

    def all_in(self, tx: Tx) -> list[SourceState]:
        return [
            SourceState(*row) for row in tx.execute(f"SELECT {_COLUMNS} FROM source ORDER BY name")
        ]

    def count_in(
        self, tx: Tx, name: str, *, new: int, known: int, skipped: int, refused: int, now: float
    ) -> None:
        tx.execute(
            "UPDATE source SET events=events+?, known=known+?, skipped=skipped+?, refused=refused+?,"
            " event_at=CASE WHEN ?>0 THEN ? ELSE event_at END, looked_at=? WHERE name=?",
            (new, known, skipped, refused, new, now, now, name),
        )

    def note_in(self, tx: Tx, name: str, **values: Any) -> None:
        assert _NOTABLE.issuperset(values)
        tx.execute(
            f"UPDATE source SET {', '.join(f'{column}=?' for column in values)} WHERE name=?",
            (*values.values(), name),
        )

    def pause_in(self, tx: Tx, name: str, reason: str | None) -> None:
        tx.execute("UPDATE source SET paused=? WHERE name=?", (reason, name))

    def renew_in(self, tx: Tx, name: str) -> None:
        """The position was set by a person: whoever reads begins there, at once."""
        tx.execute(
            "UPDATE source SET generation=generation+1, next_at=NULL, settled_at=NULL, error=NULL, position=NULL WHERE name=?",
            (name,),
        )
