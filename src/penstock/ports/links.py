"""Table of the ledger with links that wait for room, inside one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

LINKS_WAITING = "links_waiting"  # counter of links that wait for room


class LinkChunk(msgspec.Struct, frozen=True):
    """Some links of one page that wait for room, with all that their acceptance needs."""

    n: int  # number of the chunk, in the order of storing
    page: int  # row number of the event whose page has the links
    links: int  # number of links
    body: bytes  # the links, encoded by the engine


class WaitingLinks(Protocol):
    """Links that are not accepted yet, in chunks. The counter LINKS_WAITING is their number.

    The chunks do not depend on the event of their page. Retention may delete the event first.
    """

    def store(self, page: int, topic: str, chunks: Sequence[tuple[int, bytes]]) -> None:
        """Store the number of links and the body of each chunk of one page, and count the links."""

    def next_after(self, page: int, limit: int) -> list[LinkChunk]:
        """Return the oldest chunk of each of the next pages, at most `limit` chunks.

        The pages have a row number over `page`, in ascending order. Reads one row for each page.
        """

    def holds(self, chunk: LinkChunk) -> bool:
        """Return True if the chunk is stored and no other transaction has shortened it."""

    def shorten(self, chunk: LinkChunk, topic: str, links: int, body: bytes) -> None:
        """Replace a chunk by its last `links` links, or delete it if `links` is 0. Count it."""
