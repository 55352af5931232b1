"""The store of fetched pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class PageStore(Protocol):
    """Raw responses, content-addressed, compressed, stored once. Bytes first, then the row that
    names them, in the books' transaction. The `_in` methods are given the ledger's transaction,
    wherever the bytes lie.
    """

    remote: bool  # the bytes go over a network

    async def start(self) -> None:
        """Only where `remote`, before the first page: raises Unreachable where pages could not be
        stored and read.
        """

    def stage(self, pages: Iterable[tuple[str, bytes]]) -> Any:
        """Write what is new, of (id, body). Nobody can find it yet, and a crash now leaves nothing
        visible. Raises StoreUnavailable.
        """

    async def send(self, staged: Any) -> None:
        """The bytes are there, and durable, when it returns; before the books' transaction, which
        nobody should hold open for that long. Raises StoreUnavailable.
        """

    def index_in(self, tx: Any, staged: Any) -> Sequence[str]:
        """Make staged bytes durable and findable, inside the store's transaction. Returns ids that
        were taken for stored but are gone: stage them again.
        """

    def forget(self, staged: Any) -> None:
        """That transaction failed."""

    async def get(self, page: str) -> bytes | None:
        """The body as it was decoded off the wire, unchanged; None where retention took it."""

    def sizes_in(self, tx: Any, pages: Sequence[str]) -> Mapping[str, int]:
        """Of these, the ones that are stored, with the sizes of their bodies."""

    def totals_in(self, tx: Any) -> tuple[int, int]:
        """(pages stored, bytes they take)."""

    def problems_in(self, tx: Any) -> Sequence[str]:
        """What is wrong with the place they lie in, in sentences; [] is good. For doctor."""
