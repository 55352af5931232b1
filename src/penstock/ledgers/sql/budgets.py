"""Budgets and stopped crawler traps, in SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.ports.budgets import StoppedTrap
from penstock.rules.budgets import BUDGET, Key
from penstock.stores.sql import SqlTable, Tx

MAX_TRAPS = 100  # templates
PRUNED = 10_000  # budgets that one call deletes


class SqlBudgets(SqlTable):
    """Implements ports.BudgetTable."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def spend(self, amounts: Mapping[Key, int], now: float) -> dict[Key, int]:
        # In the same order everywhere, so that transactions do not wait for each other in a circle.
        keys = sorted(amounts)
        rows = self._tx.executemany(
            "INSERT INTO budget VALUES(?,?,?,?) ON CONFLICT(what, period) DO UPDATE"
            " SET used=budget.used+excluded.used, at=excluded.at RETURNING used",
            [(*key, amounts[key], now) for key in keys],
        ).fetchall()
        return {key: used - amounts[key] for key, (used,) in zip(keys, rows, strict=True)}

    def used(self, keys: Sequence[Key]) -> dict[Key, int]:
        found = self._tx.executemany(
            "SELECT what, period, used FROM budget WHERE what=? AND period=?", keys
        ).fetchall()
        used = {(what, period): n for what, period, n in found}
        return {key: used.get(key, 0) for key in keys}

    def stop(self, template: str, kind: str, links: int, now: float) -> None:
        self._tx.execute(
            "INSERT INTO trap SELECT ?,?,?,? WHERE (SELECT count(*) FROM trap)<?"
            " OR EXISTS(SELECT 1 FROM trap WHERE template=?)"
            " ON CONFLICT(template) DO UPDATE SET links=trap.links+excluded.links, at=excluded.at",
            (template, kind, links, now, MAX_TRAPS, template),
        )

    def traps(self) -> list[StoppedTrap]:
        rows = self._tx.execute("SELECT template, kind, links, at FROM trap ORDER BY at DESC")
        return [StoppedTrap(*row) for row in rows]

    def prune(self, before: float) -> None:
        self._tx.execute(
            "DELETE FROM budget WHERE (what, period) IN (SELECT b.what, b.period FROM budget b"
            " WHERE b.at<? AND NOT EXISTS(SELECT 1 FROM event e WHERE e.waits_for=? || b.what)"
            " ORDER BY b.at LIMIT ?)",
            (before, BUDGET, PRUNED),
        )
        self._tx.execute("DELETE FROM trap WHERE at<?", (before,))
