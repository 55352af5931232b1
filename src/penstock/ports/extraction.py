"""Running the user's extractors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from penstock.model import Event, Link, Record


class Extracted(msgspec.Struct, kw_only=True):
    """What the user's code made of one page. `error` excludes the rest."""

    records: list[Record] = []
    links: list[Link] = []
    matched: bool = True
    error: str = ""  # one line
    kind: str = ""  # ErrorClass value
    detail: str = ""  # traceback
    after: float | None = None  # the user's own wish for the next try


class FetchedPage(msgspec.Struct, frozen=True):
    """A page on its way to its extractors. Header names are lower case."""

    url: str
    body: bytes
    status: int
    headers: dict[str, str]
    fetched_at: float
    event: Event | None
    requested_url: str


@runtime_checkable
class Extraction(Protocol):
    """Runs the user's code on pages. Never raises for what that code does; a death is a result of
    the page that died alone.
    """

    async def extract(
        self, pages: Sequence[FetchedPage], *, alone: bool = False
    ) -> Sequence[Extracted]: ...

    async def hooks(self, changes: Sequence[bytes]) -> Sequence[str]:
        """Run on_change hooks on msgpack-encoded Changes; one error line (or "") for each."""

    async def close(self) -> None: ...
