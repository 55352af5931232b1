"""Fetching one response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from penstock.model import Event
from penstock.ports.events import Baseline


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    status: int
    peer: str = ""
    seconds: float = 0.0


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange, no redirect followed. `body` is decoded; header names are lower case."""

    url: str
    status: int
    headers: dict[str, str]
    body: bytes
    peer: str = ""  # ip:port that was dialled
    seconds: float = 0.0
    first_byte: float = 0.0
    # until the request could be sent: TCP, proxy and TLS; near 0 on a connection that was open
    # already
    connect: float = 0.0
    http_version: str = ""
    hops: tuple[Hop, ...] = ()


class Fetcher(Protocol):
    """One exchange through the one egress object. Raises model.Failure, classified, and nothing
    else.
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
    def cancel(self) -> object: ...


@runtime_checkable
class DirectFetcher(Fetcher, Protocol):
    """One that needs no task for an exchange: at thousands a second, that is a tenth of the work."""

    def begin(self, url: str, headers: Mapping[str, str], done: Done) -> Cancellable | None:
        """A GET of a canonical URL, under way when this returns. `done` is called once, by the
        loop, with the answer, a Failure, or CancelledError where it was cancelled. None: something
        has to be found out first, or is wrong; `fetch` does that.
        """


class PageFetcher(Protocol):
    """An event to its answer: robots.txt, redirects, proxies and the verdict are its business.

    The slot of the event's own host was awaited before. Every further request takes one of its own.
    """

    def begin(self, event: Event, baseline: Baseline | None, done: Done) -> Cancellable | None:
        """Send without a task, where there is nothing to wait for but the answer. `done` gets what
        came. `is_final` says whether that is all. None: nothing was sent, and `fetch` has to do it.
        """

    def is_final(self, event: Event, response: Response) -> bool:
        """Is this answer, to what `begin` sent, the one to go on with? False: `fetch` has more to
        do. Raises Failure by its verdict.
        """

    async def fetch(
        self,
        event: Event,
        baseline: Baseline | None,
        *,
        turn: int = 0,
        answer: Response | None = None,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        again: bool = False,
    ) -> Response:
        """The final answer, with the hops that led to it. Raises Failure for everything else.

        `turn`: how often the event was blocked. `answer`: to its first request, where `begin` sent
        it. `sleep`: how to wait for a slot. `again`: its slot was used already.
        """
