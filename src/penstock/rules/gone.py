"""Decides when a URL that answers 404 or 410 is gone, and when removals wait for an operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

HOUR = 3600.0  # seconds. URLs that disappear within this time are judged together.
# URLs of one host that must be absent before `Limits.share` is considered. Of three known URLs,
# one is already 33 %.
MIN_URLS = 5


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    after: int = 2  # visits in a row with status 404, after which a URL is gone
    share: float = 0.3  # share of a host's known URLs above which removals wait for an operator
    settle: float = 60.0  # seconds without another absent URL of the host, before removals


class Past(msgspec.Struct, frozen=True):
    """The newest success of a URL."""

    result: str  # "" if it had a page, else "missing" or "gone"
    visits: int = 0  # absent visits in a row up to this success


def is_known(past: Past) -> bool:
    """Return True if the URL counts as known. A missing page is known until it is gone."""
    return past.result != "gone"


class Absence(msgspec.Struct, frozen=True):
    """Meaning of an absent visit for its URL.

    `leaving` means that the URL has been absent often enough, and that its records will be removed.
    """

    result: Literal["not_found", "missing", "leaving", "gone"]
    visits: int = 0  # absent visits in a row, with this one
    needed: int = 0  # absent visits after which the URL leaves


def judge(limits: Limits, past: Past | None, *, status: int, removed: bool) -> Absence:
    """Return the meaning of a 404 or 410. `past` is None if the URL had no success before.

    `removed` is True if the event itself reports that the URL was removed.
    """
    if past is None:
        return Absence("not_found")
    if past.result == "gone":
        return Absence("gone")
    needed = 1 if status == 410 or removed else limits.after
    visits = (past.visits if past.result else 0) + 1
    return Absence("leaving" if visits >= needed else "missing", visits, needed)


def says_removed(data: Mapping[str, Any]) -> bool:
    """Return True if the event's data reports a removal: a sitemap's, or a DELETE of a table."""
    cdc = data.get("_cdc")
    operation = cdc.get("op") if isinstance(cdc, Mapping) else None
    return data.get("change") == "removed" or operation in ("d", "delete")


class HostAbsences(msgspec.Struct, frozen=True, kw_only=True):
    """Absent URLs of one host."""

    known: int  # URLs with a success that are not gone
    absent: int  # URLs that are missing since less than an hour, or whose removal waits
    gone: int  # URLs of the last hour whose records were removed
    newest: float  # time of the newest absent visit
    oldest: float  # time since which the oldest removal waits
    held: bool  # removals of this host wait for an operator
    approved_until: float = 0.0


def decide(
    limits: Limits, host: HostAbsences, *, now: float, idle: bool
) -> Literal["wait", "hold", "remove"]:
    """Decide about the waiting removals of a host, all together.

    They wait until the host has settled: then it is known how many URLs disappeared at the same
    time. `idle` is True if no event is open, so that no further URL can disappear now.
    """
    if host.approved_until > now:
        return "remove"
    if host.held:
        return "hold"
    if not idle and now - host.newest < limits.settle and now - host.oldest < HOUR:
        return "wait"
    disappeared = host.absent + host.gone
    # `known` no longer includes the URLs that are gone.
    too_many = disappeared > limits.share * (host.known + host.gone)
    return "hold" if disappeared >= MIN_URLS and too_many else "remove"
