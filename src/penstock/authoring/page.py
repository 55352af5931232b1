"""What an extractor reads: one fetched page, parsed on first use. Who runs the extractor is not
known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.model import Event, Follow, Priority, Route
from penstock.rules.identity import join

if TYPE_CHECKING:
    from os import PathLike

    from penstock.authoring.selectors import Selector, SelectorList

_decode_event = msgspec.json.Decoder(Event).decode


class Page:
    """The raw response, and what an extractor reads from it. `css`, `xpath`, `json` parse on first
    use.

    `Page.from_file("saved.html", url="https://…")` is all a unit test of an extractor needs.
    """

    def __init__(
        self, url: str, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None, fetched_at: float = 0.0,
        event: Event | None = None, requested_url: str | None = None,
    ) -> None:  # fmt: skip
        self.url, self.body, self.status, self.fetched_at = url, body, status, fetched_at
        self.headers: dict[str, str] = {k.lower(): v for k, v in headers.items()} if headers else {}
        self._event: Event | bytes | None = event
        self._parsed: Selector | None = None
        self.requested_url = requested_url or url
        self.followed: set[str] = (
            set()
        )  # what follow() gave: canonical already, so nobody works that out twice

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
        """As it came off the wire: header names are lower case already, and an event that travelled
        as JSON is read when somebody asks for it.
        """
        page = cls(url, body, status=status, fetched_at=fetched_at, requested_url=requested_url)
        page.headers, page._event = dict(headers), event
        return page

    @property
    def event(self) -> Event | None:
        if type(self._event) is bytes:
            self._event = _decode_event(self._event)
        return self._event  # type: ignore[return-value]  # bytes are gone by now

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
            from penstock.authoring.selectors import (
                parse,  # here: the parser is heavy, and most processes never parse
            )

            self._parsed = parse(self.body, self.headers.get("content-type"))
        return self._parsed

    def forget(self) -> None:
        """Let go of the parsed document. The next page's is made where this one was, while that
        memory is still in the processor's cache.
        """
        self._parsed = None

    @cached_property
    def text(self) -> str:
        from penstock.authoring.selectors import decode

        return decode(self.body, self.headers.get("content-type"))

    def css(self, query: str) -> SelectorList:
        return self._document.css(query)

    def xpath(self, query: str) -> SelectorList:
        return self._document.xpath(query)

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def jsonld(self) -> list[dict[str, Any]]:
        """Every JSON-LD object of the page, `@graph` flattened; a broken block is left out."""
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
        links: str | Iterable[str],
        *,
        priority: str = "normal",
        route: Route | None = None,
        window: float | None = None,
    ) -> Iterator[Follow]:
        """A CSS selector (elements with href, or `::attr(...)`), or URLs. What is no http(s) URL is
        left out.
        """
        from penstock.authoring.selectors import links_of

        rank = Priority.named(priority)
        for url in links_of(self, links):
            yield Follow(url, rank, route, window)
