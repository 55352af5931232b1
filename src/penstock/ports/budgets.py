"""Budgets of pages and bytes, and the crawler traps whose links were not accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from penstock.rules.budgets import Key


class StoppedTrap(msgspec.Struct, frozen=True):
    """A crawler trap, and the links of it that were not accepted."""

    template: str  # for example "https://shop.example/calendar/{date}"
    kind: str  # "path", "session" or "date"
    links: int
    at: float  # time of the last of these links


class BudgetTable(Protocol):
    """Used amounts of budgets, inside one transaction."""

    def spend(self, amounts: Mapping[Key, int], now: float) -> dict[Key, int]:
        """Add to budgets. Return the amounts used before.

        No other transaction changes these budgets before this one ends. An amount of 0 only reads
        and keeps the budget.
        """

    def used(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Return the used amount of each budget. Changes nothing."""

    def stop(self, template: str, kind: str, links: int, now: float) -> None:
        """Add to the links of a trap that were not accepted.

        At most 100 templates are kept. The links of others are only in the counters.
        """

    def traps(self) -> Sequence[StoppedTrap]:
        """Return the traps, the one with the newest link first."""

    def prune(self, before: float) -> None:
        """Delete budgets and traps without a change since a time. Budgets with waits are kept."""


class Traffic(Protocol):
    """Counts the bytes of one process."""

    def count(self, proxy: str | None, size: int) -> None:
        """Add the bytes of one exchange, through a proxy or without one."""

    def use(self, pool: str, proxy: str) -> None:
        """Record that requests of this pool use a proxy. Called before the first request."""

    def spent_until(self, pool: str) -> float:
        """Return when the used-up budget of a pool is renewed, or 0 if it is not used up."""
