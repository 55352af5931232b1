"""Makes an event from a URL: canonical form, host key, route and trace.

`intake` accepts events.
"""

from __future__ import annotations

from typing import Literal

from penstock.model import Event, Priority, Reason, Route
from penstock.rules.identity import canonical_url, host_key
from penstock.rules.reasons import sentence

ANY_ROUTE = Route()


class Refused(Exception):
    """A finding from which no event can be made. The reason is a text for the user."""

    def __init__(self, reason: str, code: Reason = Reason.REFUSED) -> None:
        super().__init__(reason)
        # One line of valid text, because parts of the reason may be foreign data.
        self.reason = " ".join(reason.encode("utf-8", "replace").decode().split())
        self.code = code


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
    """Return a new event for a URL.

    Raise BadUrl if the URL cannot be fetched, and Refused if the route asks for a renderer. `trace`
    is the event's own id by default.
    """
    if route.render:
        raise Refused(sentence(Reason.RENDER), Reason.RENDER)
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
