"""The page index of any page store, bound to one transaction of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.ports import PageStore, StagedPages
from penstock.stores.sql import Tx


class IndexedPages(PageStore, Protocol):
    """A page store whose index is in the ledger's store."""

    def index_in(self, tx: Tx, staged: StagedPages) -> list[str]: ...
    def get_in(self, tx: Tx, page: str) -> bytes | None: ...
    def find_in(self, tx: Tx, prefix: str) -> list[str]: ...
    def sizes_in(self, tx: Tx, pages: Sequence[str]) -> dict[str, int]: ...
    def totals_in(self, tx: Tx) -> tuple[int, int]: ...
    def problems_in(self, tx: Tx) -> list[str]: ...
    def prune_in(
        self,
        tx: Tx,
        *,
        older_than: float | None,
        max_bytes: int | None,
        keep: Callable[[Sequence[str]], set[str]],
    ) -> tuple[int, int]: ...
    def sweep_in(self, tx: Tx) -> None: ...


class BoundPageIndex:
    """Implements ports.PageIndex."""

    def __init__(self, tx: Tx, pages: IndexedPages) -> None:
        self._tx, self._pages = tx, pages

    def index(self, staged: StagedPages) -> Sequence[str]:
        return self._pages.index_in(self._tx, staged)

    def read(self, page: str) -> bytes | None:
        return self._pages.get_in(self._tx, page)

    def find(self, prefix: str) -> list[str]:
        return self._pages.find_in(self._tx, prefix)

    def sizes(self, pages: Sequence[str]) -> Mapping[str, int]:
        return self._pages.sizes_in(self._tx, pages)

    def totals(self) -> tuple[int, int]:
        return self._pages.totals_in(self._tx)

    def problems(self) -> Sequence[str]:
        return self._pages.problems_in(self._tx)

    def prune(
        self,
        *,
        older_than: float | None,
        max_bytes: int | None,
        keep: Callable[[Sequence[str]], set[str]],
    ) -> tuple[int, int]:
        return self._pages.prune_in(self._tx, older_than=older_than, max_bytes=max_bytes, keep=keep)

    def sweep(self) -> None:
        self._pages.sweep_in(self._tx)
