"""Routes that live workers serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.rules.routes import ServedPool


class RouteTable(Protocol):
    """Proxy pools of live workers, inside one transaction. Workers without a pool have no row."""

    def announce(self, worker: str, pools: Sequence[ServedPool], seconds: float) -> None:
        """Record that a worker serves these pools for some seconds. Delete expired rows."""

    def withdraw(self, worker: str) -> None:
        """Delete the row of a worker that stops or has crashed."""

    def served(self) -> Mapping[str, Sequence[ServedPool]]:
        """Return the pools of each live worker."""
