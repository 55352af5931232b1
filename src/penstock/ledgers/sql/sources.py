"""Sources in the ledger: pause, last read, counts, errors and cursor."""

from __future__ import annotations

from typing import Unpack

from penstock.ports import SourceNote, SourceState
from penstock.stores.sql import SqlStore, SqlTable

SCHEMA = """
CREATE TABLE source(name TEXT PRIMARY KEY, url TEXT NOT NULL, paused TEXT,
  generation INTEGER NOT NULL DEFAULT 0, worker TEXT,
  settled_at REAL, looked_at REAL, next_at REAL, event_at REAL, events INTEGER NOT NULL DEFAULT 0,
  known INTEGER NOT NULL DEFAULT 0,
  skipped INTEGER NOT NULL DEFAULT 0, refused INTEGER NOT NULL DEFAULT 0, error TEXT,
  error_at REAL, lag REAL, backlog INTEGER, position TEXT);
"""
_COLUMNS = (
    "name, url, paused, generation, worker, settled_at, looked_at, next_at, event_at, events, "
    "known, skipped, refused, error, error_at, lag, backlog, position"
)


class SqlSources(SqlTable):
    """State and cursors of sources."""

    @staticmethod
    def create(db: SqlStore) -> None:
        """Create or check the tables."""
        db.part("sources", SCHEMA)

    def cursor(self, name: str) -> bytes | None:
        body: bytes | None = self._tx.execute("SELECT body FROM cursor WHERE source=?", (name,)).get
        return body

    def move_cursor(self, name: str, body: bytes | None, now: float) -> None:
        self._tx.execute(
            "INSERT INTO cursor VALUES(?,?,?)"
            " ON CONFLICT(source) DO UPDATE SET body=excluded.body, at=excluded.at",
            (name, body, now),
        )

    def declare(self, name: str, url: str) -> None:
        self._tx.execute(
            "INSERT INTO source(name, url) VALUES(?,?) ON CONFLICT(name) DO UPDATE"
            " SET url=excluded.url",
            (name, url),
        )

    def state(self, name: str) -> SourceState | None:
        return next(
            (
                SourceState(*row)
                for row in self._tx.execute(f"SELECT {_COLUMNS} FROM source WHERE name=?", (name,))
            ),
            None,
        )

    def all(self) -> list[SourceState]:
        return [
            SourceState(*row)
            for row in self._tx.execute(f"SELECT {_COLUMNS} FROM source ORDER BY name")
        ]

    def count(
        self, name: str, *, new: int, known: int, skipped: int, refused: int, now: float
    ) -> None:
        self._tx.execute(
            "UPDATE source SET events=events+?, known=known+?, skipped=skipped+?,"
            " refused=refused+?,"
            " event_at=CASE WHEN ?>0 THEN ? ELSE event_at END, looked_at=? WHERE name=?",
            (new, known, skipped, refused, new, now, now, name),
        )

    def note(self, name: str, **values: Unpack[SourceNote]) -> None:
        assert SourceNote.__annotations__.keys() >= values.keys()
        self._tx.execute(
            f"UPDATE source SET {', '.join(f'{column}=?' for column in values)} WHERE name=?",
            (*values.values(), name),
        )

    def pause(self, name: str, reason: str | None) -> None:
        self._tx.execute("UPDATE source SET paused=? WHERE name=?", (reason, name))

    def reset(self, name: str) -> None:
        """Make the reader start again, after an operator has set the cursor.

        The next round is due now, and the current round is abandoned.
        """
        self._tx.execute(
            "UPDATE source SET generation=generation+1, next_at=NULL, settled_at=NULL,"
            " error=NULL, position=NULL WHERE name=?",
            (name,),
        )
