"""Execution of the user's extractors and hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from penstock.model import Event, Link, Reason, Record
from penstock.rules.links import UNPACKED, PackedLinks, pack


class Extracted(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Result of the user's code for one page. If `error` is set, there are no records and links."""

    records: list[Record] = []
    links: list[Link] = []  # at most UNPACKED. The others are in `more_links`.
    more_links: list[PackedLinks] = []
    matched: bool = True  # False if no extractor matches the URL
    read_event: bool = False  # an extractor has read the event
    read_headers: bool = False  # an extractor has read the headers of the response
    error: str = ""  # error message of one line
    code: Reason | None = None  # of the error, if it is not an error of the user's code
    kind: str = ""  # value of an ErrorClass
    extractor: str = ""  # name of the extractor that failed, if it is known
    detail: str = ""  # traceback
    after: float | None = None  # seconds until the retry, if the user's code requested a delay

    def pack_links(self) -> Extracted:
        """Pack all links but the first, so that a page with very many links needs little memory."""
        self.links, rest = self.links[:UNPACKED], self.links[UNPACKED:]
        self.more_links += pack(rest)
        return self


class FetchedPage(msgspec.Struct, frozen=True):
    """A page for its extractors. Header names are in lower case."""

    url: str
    body: bytes
    status: int
    headers: dict[str, str]
    fetched_at: float
    event: Event | None
    requested_url: str


@runtime_checkable
class Extraction(Protocol):
    """Runs the user's code. An error or a crash of that code never raises an exception here.

    If the process crashes while a page runs alone, the crash is the result of that page.
    """

    async def extract(
        self, pages: Sequence[FetchedPage], *, alone: bool = False
    ) -> Sequence[Extracted]:
        """Extract pages. Return one result per page. With `alone`, each page runs separately.

        A page may run again if the process crashed while several pages ran together.
        """

    async def hooks(self, changes: Sequence[bytes]) -> Sequence[str]:
        """Run on_change hooks on msgpack-encoded Changes.

        Return one line per change: the error, or "" if the hooks succeeded.
        """

    async def close(self) -> None: ...
