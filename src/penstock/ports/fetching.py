"""Fetchers: from a URL or an event to a response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from penstock.model import Event
from penstock.ports.events import Baseline


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One redirect."""

    url: str
    status: int
    peer: str = ""  # address of the server, as ip:port
    seconds: float = 0.0  # duration


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Response of a web server. `body` is decoded. Header names are in lower case."""

    url: str
    status: int
    headers: dict[str, str]
    body: bytes
    peer: str = ""  # address that was connected to, as ip:port
    seconds: float = 0.0  # duration of the exchange
    first_byte: float = 0.0  # seconds until the first byte of the response
    # Seconds until the request could be sent: TCP, proxy and TLS. Near 0 on a reused connection.
    connect: float = 0.0
    http_version: str = ""
    hops: tuple[Hop, ...] = ()  # redirects before this response. A Fetcher follows none.


class Fetcher(Protocol):
    """Sends one request through the egress object that all requests use. Follows no redirects.

    Raises only model.Failure, with an error class.
    """

    async def fetch(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        proxy: str | None = None,
    ) -> Response: ...

    async def close(self) -> None: ...


Done: TypeAlias = Callable[[Response | BaseException], None]


class Cancellable(Protocol):
    """Work in progress, for example a request or a task."""

    def cancel(self) -> object: ...


@runtime_checkable
class DirectFetcher(Fetcher, Protocol):
    """A fetcher that can send a request without a task.

    At thousands of requests per second, tasks cost a tenth of the work.
    """

    def begin(self, url: str, headers: Mapping[str, str], done: Done) -> Cancellable | None:
        """Send a GET of a canonical URL. The request is in progress when this returns.

        The event loop calls `done` once, with the response, a Failure, or CancelledError if the
        request was cancelled. Return None if no request was sent, because something must be looked
        up first or is wrong. Then call `fetch`.
        """


class PageFetcher(Protocol):
    """Fetches the page of an event: robots.txt, redirects, proxies and the check of the response.

    The caller has waited for the slot of the event's host. Every further request reserves another
    slot.
    """

    def start(
        self,
        event: Event,
        baseline: Baseline | None,
        done: Done,
        *,
        turn: int = 0,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        again: bool = False,
        progress: bytes = b"",
    ) -> Cancellable:
        """Start to fetch the page. Most pages need one request, which runs without a task.

        The event loop calls `done` once: with the final, successful response and its redirects, a
        Failure, or CancelledError if the fetch was cancelled. `cancel` may call it before it
        returns.

        `turn` is the number of proxy pools that the event has moved on by. `sleep` is the function
        that waits for a slot. `again` is True if the event's slot was already used. `progress` is
        that of an earlier Failure of this event. Its redirects are continued.
        """
