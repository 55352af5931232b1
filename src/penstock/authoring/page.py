"""Page: the argument of an extractor. One fetched page, parsed on first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.authoring.routing import WrongValue, read_priority, read_route, read_window
from penstock.model import ErrorClass, Event, Failure, Follow, Reason, Route
from penstock.rules.identity import join
from penstock.rules.reasons import sentence

if TYPE_CHECKING:
    from os import PathLike

    from penstock.authoring.selectors import Selector, SelectorList

_decode_event = msgspec.json.Decoder(Event).decode


class Page:
    """A raw response, with methods to read it.

    The body is parsed when `css`, `xpath` or `jsonld` is first used. `json` decodes it at each
    call. A unit test of an extractor only needs `Page.from_file("saved.html", url="https://…")`.
    """

    def __init__(
        self,
        url: str,
        body: bytes,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        fetched_at: float = 0.0,
        event: Event | None = None,
        requested_url: str | None = None,
    ) -> None:
        self.url, self.body, self.status, self.fetched_at = url, body, status, fetched_at
        self._headers: dict[str, str] = (
            {k.lower(): v for k, v in headers.items()} if headers else {}
        )
        self._event: Event | bytes | None = event
        # True after user code has read the event or the headers. Then the result depends on them.
        self.event_was_read = self.headers_were_read = False
        self._parsed: Selector | None = None
        self.requested_url = requested_url or url
        # URLs from follow(). They are canonical and are not joined again.
        self.followed: set[str] = set()

    def __repr__(self) -> str:
        return f"<Page {self.status} {self.url} {len(self.body)} bytes>"

    @classmethod
    def received(
        cls,
        url: str,
        body: bytes,
        status: int,
        headers: dict[str, str],
        fetched_at: float,
        event: Event | bytes | None,
        requested_url: str,
    ) -> Page:
        """Make a page from a fetched response. Header names must be in lower case.

        An event as JSON bytes is decoded when `event` is first read.
        """
        page = cls(url, body, status=status, fetched_at=fetched_at, requested_url=requested_url)
        page._headers, page._event = dict(headers), event
        return page

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response, with names in lower case.

        A page whose headers are read is extracted at each visit, also if its bytes are the same.
        """
        self.headers_were_read = True
        return self._headers

    @property
    def event(self) -> Event | None:
        """The event that caused the visit, with the payload of its source in `event.data`.

        If it is read, the page is extracted again when the data changes.
        """
        self.event_was_read = True
        if type(self._event) is bytes:
            self._event = _decode_event(self._event)
        return self._event  # type: ignore[return-value]  # bytes were decoded above

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        *,
        url: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> Page:
        with open(path, "rb") as f:
            return cls(url, f.read(), status=status, headers=headers or {})

    @property
    def _document(self) -> Selector:
        if self._parsed is None:
            # Imported here: the parser is large, and most processes never parse.
            from penstock.authoring.selectors import parse

            self._parsed = parse(self.body, self._headers.get("content-type"))
        return self._parsed

    def forget(self) -> None:
        """Drop the parsed document.

        The next page then reuses its memory, while that is still in the processor's cache.
        """
        self._parsed = None

    @cached_property
    def text(self) -> str:
        from penstock.authoring.selectors import decode

        return decode(self.body, self._headers.get("content-type"))

    def css(self, query: str) -> SelectorList:
        return self._document.css(query)

    def xpath(self, query: str) -> SelectorList:
        return self._document.xpath(query)

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def jsonld(self) -> list[dict[str, Any]]:
        """Return all JSON-LD objects of the page, with `@graph` flattened.

        An invalid block is ignored.
        """
        from penstock.authoring.selectors import jsonld

        return jsonld(self._document)

    def urljoin(self, url: str) -> str:
        return join(self.base_url, url)

    @cached_property
    def base_url(self) -> str:
        from penstock.authoring.selectors import base_url

        return base_url(self._document, self.url)

    def follow(
        self,
        links: str | Iterable[object],
        *,
        priority: str | int = "normal",
        route: Route | Mapping[str, Any] | None = None,
        window: str | float | None = None,
    ) -> Iterator[Follow]:
        """Yield a Follow for each link, once.

        `links` is a CSS selector (of elements with href, or with `::attr(...)`), a result of `css`,
        or URLs. Other URLs than http(s) and other values are ignored.

        `priority` is high, normal or low. `window` is in seconds, or "30s", "5m", "1h", "1d". All
        three options are checked by this call, also if its result is not used. It raises Failure
        with the line of the caller.
        """
        try:
            rank, seconds = read_priority(priority), read_window(window)
            hints = None if route is None else read_route(route)
        except WrongValue as e:
            caller = sys._getframe(1)
            raise wrong_link(e, caller.f_code.co_filename, caller.f_lineno) from None
        return self._follow(links, rank, hints, seconds)

    def _follow(
        self, links: str | Iterable[object], rank: int, hints: Route | None, seconds: float | None
    ) -> Iterator[Follow]:
        from penstock.authoring.selectors import links_of

        for url in links_of(self, links):
            yield Follow(url, rank, hints, seconds)


def wrong_link(e: WrongValue, file: str, line: int) -> Failure:
    """Return the failure of an extractor that follows a link with a wrong value, at this line."""
    place = f"{os.path.basename(file)} line {line}"
    return Failure(
        ErrorClass.PERMANENT,
        sentence(Reason.BAD_LINK, place, detail=f"{e.message}; {e.hint}"),
        code=Reason.BAD_LINK,
    )
