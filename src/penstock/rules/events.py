"""From a URL outside to an event: canonical form, host key, route, trace. Who accepts it is not
known here.
"""

from __future__ import annotations

from typing import Literal

from penstock.model import Event, Priority, Route
from penstock.rules.identity import canonical_url, host_key

ANY_ROUTE = Route()


class Refused(Exception):
    """A finding makes no event; the reason, for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = " ".join(
            reason.encode("utf-8", "replace").decode().split()
        )  # parts of it may come from anywhere


def event_of(
    url: str,
    *,
    id_: str,
    source: str = "push",
    cause: str = "",
    route: Route = ANY_ROUTE,
    priority: int = Priority.NORMAL,
    force: bool = False,
    window: float | None = None,
    trace: str | None = None,
    host_by: Literal["host", "domain"] = "host",
) -> Event:
    """Raises BadUrl."""
    canonical = canonical_url(url)
    return Event(
        id=id_,
        url=canonical,
        key=host_key(canonical, by=host_by),
        source=source,
        trace=trace or id_,
        cause=cause,
        route=route,
        priority=priority,
        force=force,
        window=window,
    )
