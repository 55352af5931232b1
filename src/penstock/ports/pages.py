"""Store of fetched pages. Bodies are stored first, then the ledger's transaction indexes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec


class StagedPages(msgspec.Struct):
    """Pages that are staged and not yet indexed. Each page store has a subclass."""


class PageStore(Protocol):
    """Bodies of responses, addressed by content and compressed. Each body is stored once."""

    remote: bool  # True if bodies are sent over a network

    async def start(self) -> None:
        """Check that pages can be stored and read, before the first page. Raises Unreachable."""

    def stage(self, pages: Iterable[tuple[str, bytes]]) -> StagedPages:
        """Write those of the pages (id, body) that are not stored yet.

        Staged pages cannot be found before they are indexed. Raises StoreUnavailable.
        """

    async def send(self, staged: StagedPages) -> None:
        """Make staged bodies durable, outside the ledger's transaction. Raises StoreUnavailable."""

    def forget(self, staged: StagedPages) -> None:
        """Discard staged pages whose transaction failed."""

    async def get(self, page: str) -> bytes | None:
        """Return the decoded body, or None if retention deleted it."""

    def close(self) -> None: ...


class PageIndex(Protocol):
    """The index of stored pages, inside one transaction of the ledger."""

    def index(self, staged: StagedPages) -> Sequence[str]:
        """Make staged pages durable and findable.

        Return ids of pages that were believed to be stored but do not exist. Stage them again.
        """

    def read(self, page: str) -> bytes | None:
        """Return the decoded body, or None if retention deleted it."""

    def find(self, prefix: str) -> list[str]:
        """Return ids of stored pages that start with a prefix."""

    def sizes(self, pages: Sequence[str]) -> Mapping[str, int]:
        """Return the body sizes of those pages that are stored."""

    def totals(self) -> tuple[int, int]:
        """Return (pages stored, bytes they occupy)."""

    def problems(self) -> Sequence[str]:
        """Return the problems of the page store, in sentences, for `doctor`."""

    def prune(
        self,
        *,
        older_than: float | None,
        max_bytes: int | None,
        keep: Callable[[Sequence[str]], set[str]],
    ) -> tuple[int, int]:
        """Delete pages by age and total size, except those that `keep` returns.

        Return (pages, bytes) deleted.
        """

    def sweep(self) -> None:
        """Delete files that an earlier, committed transaction marked for deletion."""
