"""Budgets of pages and bytes: their names, their limits, and what an operator can do about them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import TypeAlias

import msgspec

DAY = 86400.0
_EPOCH = date(1970, 1, 1).toordinal()
BUDGET = "budget:"  # start of the causes of waits
HOST, TRACE, RUN = "pages:host:", "pages:trace:", "pages:run:"
PAGES_DAY, BYTES_DAY, POOL = "pages:day", "bytes:day", "bytes:pool:"

# Name of a budget, for example "pages:host:shop.example", and its UTC day or "".
Key: TypeAlias = tuple[str, str]


class Run(msgspec.Struct, frozen=True):
    """One `penstock run` command, with all its worker processes."""

    id: str = ""
    started: float = 0.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one worker. 0 means unlimited."""

    pages_per_host: int = 0
    pages_per_trace: int = 0
    pages_per_run: int = 0
    pages_per_day: int = 0
    bytes_per_day: int = 0
    links_per_page: int = 0
    traps: int = 0  # URLs of one template with a date, in one trace. 0 turns off the trap rule.
    pool_bytes: Mapping[str, int] = {}  # pool name -> bytes per day, of pools with a limit

    @property
    def any(self) -> bool:
        return self.has_pages or self.has_bytes

    @property
    def has_pages(self) -> bool:
        """True if pages are counted."""
        return bool(
            self.pages_per_host or self.pages_per_trace or self.pages_per_run or self.pages_per_day
        )

    @property
    def has_bytes(self) -> bool:
        """True if bytes are counted."""
        return bool(self.bytes_per_day or self.pool_bytes)

    def of(self, what: str) -> int:
        """Return the limit of a budget, or 0 if it has none."""
        if what.startswith(POOL):
            return self.pool_bytes.get(what.removeprefix(POOL), 0)
        for start, limit in (
            (HOST, self.pages_per_host),
            (TRACE, self.pages_per_trace),
            (RUN, self.pages_per_run),
            (PAGES_DAY, self.pages_per_day),
            (BYTES_DAY, self.bytes_per_day),
        ):
            if what.startswith(start):
                return limit
        return 0

    def lasting(self, host: str, trace: str, run: str) -> list[Key]:
        """Return the limited budgets that a link is charged to when it is accepted.

        An empty `run` means that the run has counted the page before. The host is last: a read
        stores its row, and the links of a page that are over another budget may name many hosts.
        """
        keys = [
            (TRACE + trace, "") if self.pages_per_trace else None,
            (RUN + run, "") if self.pages_per_run and run else None,
            (HOST + host, "") if self.pages_per_host else None,
        ]
        return [key for key in keys if key is not None]


def day_of(now: float) -> str:
    """Return the UTC day, for example "2026-11-18"."""
    return date.fromordinal(_EPOCH + int(now // DAY)).isoformat()


def day_end(now: float) -> float:
    """Return the time at which the UTC day ends."""
    return (now // DAY + 1) * DAY


def is_daily(what: str) -> bool:
    return what in (PAGES_DAY, BYTES_DAY) or what.startswith(POOL)


def key_of(what: str, now: float) -> Key:
    """Return the budget with its current day, if it is a daily one."""
    return what, day_of(now) if is_daily(what) else ""


def counter_of(what: str) -> str:
    """Return the counter of links that a budget did not accept."""
    return "followed_over_" + what.split(":")[1]


_RAISE = "raise {} and start the workers again"
_DAY = "wait until 00:00 UTC, or raise {} and start the workers again"


def describe(what: str) -> tuple[str, str]:
    """Return the sentence of a budget that is used up, and the next step."""
    kind, _, rest = what.partition(":")
    scope, _, name = rest.partition(":")
    match kind, scope:
        case "pages", "host":
            return f"the page budget of host {name} is used up", _RAISE.format(
                "limits.pages_per_host"
            )
        case "pages", "trace":
            return f"the page budget of trace {name} is used up", _RAISE.format(
                "limits.pages_per_trace"
            )
        case "pages", "run":
            return (
                f"the page budget of run {name} is used up",
                "start `penstock run` again for a new budget, or raise limits.pages_per_run",
            )
        case "pages", "day":
            return "the page budget of this UTC day is used up", _DAY.format("limits.pages_per_day")
        case "bytes", "day":
            return "the byte budget of this UTC day is used up", _DAY.format("limits.bytes_per_day")
        case "bytes", "pool":
            return (
                f"the byte budget of proxy pool {name} is used up for this UTC day",
                _DAY.format(f"limits.pool_bytes_per_day or proxies.{name}.bytes_per_day"),
            )
    return f"the budget {what} is used up", "raise it, or wait until it is renewed"


# Counter of links that were not accepted -> the reason, and the option to change.
NOT_ACCEPTED: dict[str, tuple[str, str]] = {
    "followed_over_host": (
        "the page budget of their host is used up",
        "raise limits.pages_per_host",
    ),
    "followed_over_trace": (
        "the page budget of their trace is used up",
        "raise limits.pages_per_trace",
    ),
    "followed_over_run": (
        "the page budget of the run is used up",
        "start `penstock run` again, or raise limits.pages_per_run",
    ),
    "followed_over_page": ("their page has too many links", "raise limits.links_per_page"),
    "followed_trap_path": ("trap: a path that repeats itself", "limits.traps = 0 follows them"),
    "followed_trap_session": ("trap: session ids in paths", "limits.traps = 0 follows them"),
    "followed_trap_date": ("trap: a calendar without an end", "raise limits.traps"),
}
