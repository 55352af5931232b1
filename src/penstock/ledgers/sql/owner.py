"""The pipeline that owns the store, and its workers, in SQL."""

from __future__ import annotations

from penstock.stores.sql import SqlTable


class SqlStoreOwner(SqlTable):
    """Owner of the store, in the row with `one` = 1. Other rows are former owners."""

    def pipeline(self) -> str | None:
        name: str | None = self._tx.execute("SELECT pipeline FROM store_owner WHERE one=1").get
        return name

    def former(self) -> frozenset[str]:
        rows = self._tx.execute("SELECT pipeline FROM store_owner WHERE one>1")
        return frozenset(name for (name,) in rows)

    def take(self, pipeline: str, now: float) -> str:
        self._tx.execute(
            "INSERT INTO store_owner VALUES(1,?,?) ON CONFLICT(one) DO NOTHING", (pipeline, now)
        )
        return self.pipeline() or pipeline

    def change(self, pipeline: str, now: float) -> None:
        before = self.pipeline()
        if before is not None and before != pipeline and before not in self.former():
            self._tx.execute(
                "INSERT INTO store_owner SELECT max(one)+1, ?, ? FROM store_owner", (before, now)
            )
        self._tx.execute(
            "INSERT INTO store_owner VALUES(1,?,?)"
            " ON CONFLICT(one) DO UPDATE SET pipeline=excluded.pipeline, at=excluded.at",
            (pipeline, now),
        )

    def heartbeat(self, worker: str, until: float) -> None:
        self._tx.execute(
            "INSERT INTO live_worker VALUES(?,?)"
            " ON CONFLICT(worker) DO UPDATE SET until=excluded.until",
            (worker, until),
        )

    def leave(self, worker: str) -> None:
        self._tx.execute("DELETE FROM live_worker WHERE worker=?", (worker,))

    def prune(self, before: float) -> None:
        self._tx.execute("DELETE FROM live_worker WHERE until<?", (before,))

    def workers(self) -> dict[str, float]:
        return dict(self._tx.execute("SELECT worker, until FROM live_worker").fetchall())
