"""Common parts of page stores: page ids as bytes, and pages that are sent over a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zstandard

from penstock.errors import Unreachable
from penstock.model import page_id
from penstock.ports import Clock, StagedPages
from penstock.stores.sql import Tx

LEVEL = 1  # of zstd
MAX_KNOWN = 30_000  # page ids in the cache of stored pages


def raw(page: str) -> bytes:
    """Return the bytes of a hexadecimal page id, or b"", which no page has, if it is not one."""
    try:
        return bytes.fromhex(page)
    except ValueError:
        return b""


class Staged(StagedPages):
    """Pages to store: new ones, and those that this process knows to be stored."""

    new: dict[str, tuple[bytes, int, str]] = {}  # id -> compressed body, size, object name
    again: dict[str, bytes] = {}  # id -> body, needed if retention has deleted the page


class Pages:
    """Base of page stores. `table` has the hashes of their pages."""

    table: str
    repair: str  # hint for a damaged page

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._known: dict[str, None] = {}  # ids of pages that are stored, or staged
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)

    def find_in(self, tx: Tx, prefix: str) -> list[str]:
        """Return at most ten page ids that start with `prefix`."""
        rows = tx.execute(
            f"SELECT hash FROM {self.table} WHERE hash>=? AND hash<=? ORDER BY hash LIMIT 10",
            (raw(prefix.ljust(64, "0")), raw(prefix.ljust(64, "f"))),
        )
        return [bytes(h).hex() for (h,) in rows]

    def _forget(self, pages: Iterable[str]) -> None:
        """Remove pages from the cache of stored pages."""
        for page in pages:
            self._known.pop(page, None)

    def _verified(self, page: str, body: bytes, place: str) -> bytes:
        """Return the body, if it is the one of this page. `place` is for the message."""
        if page_id(body) != page:
            raise Unreachable(
                f"page {page} in {place} no longer matches its hash", hint=self.repair
            )
        return body


class RemotePages(Pages):
    """Base of page stores on a server. The table of pages has hash, size, packed and seen."""

    remote = True
    place: str  # the store, in messages

    def stage(self, pages: Iterable[tuple[str, bytes]]) -> Staged:
        staged = Staged(new={}, again={})
        for id_, body in pages:
            if id_ in self._known:
                staged.again[id_] = body
            elif id_ not in staged.new:
                staged.new[id_] = self._packed(id_, body)
        return staged

    def _packed(self, id_: str, body: bytes) -> tuple[bytes, int, str]:
        return self._compressor.compress(body), len(body), ""

    def _remember(self, pages: Iterable[str]) -> None:
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        self._known.update(dict.fromkeys(pages))

    def forget(self, staged: StagedPages) -> None:
        assert isinstance(staged, Staged)
        self._forget([*staged.new, *staged.again])

    def _decompressed(self, page: str, packed: bytes) -> bytes:
        try:
            body = zstandard.decompress(packed)
        except zstandard.ZstdError:
            body = b""
        return self._verified(page, body, self.place)

    def _totals(self, tx: Tx) -> tuple[int, int]:
        """Return the number of stored pages and of their compressed bytes."""
        pages, size = tx.execute(f"SELECT count(*), coalesce(sum(packed), 0) FROM {self.table}").get
        return int(pages), int(size)

    def _expired(
        self,
        tx: Tx,
        columns: str,
        *,
        older_than: float | None,
        max_bytes: int | None,
        keep: Callable[[Sequence[str]], set[str]],
        batch: int,
        max_batches: int,
    ) -> list[Any]:
        """Return rows of the oldest pages to delete, from the first batch that has any.

        `columns` begins with `hash, packed`. `keep` returns which of the given pages an open event
        still needs.
        """
        excess = 0 if max_bytes is None else self._totals(tx)[1] - max_bytes
        at: tuple[float, bytes] = (-1.0, b"")
        expired: list[Any] = []
        for _ in range(max_batches):
            rows = tx.execute(
                f"SELECT seen, {columns} FROM {self.table} WHERE (seen, hash)>(?, ?)"
                " ORDER BY seen, hash LIMIT ?",
                (*at, batch),
            ).fetchall()
            aged = sum(older_than is not None and seen < older_than for seen, *_ in rows)
            old = rows if excess > 0 else rows[:aged]
            wanted = keep([bytes(h).hex() for _, h, *_ in old])
            for i, (_, *row) in enumerate(old):
                if i >= aged and excess <= 0:
                    break
                # A page that stays does not free bytes.
                if bytes(row[0]).hex() not in wanted:
                    expired.append(row)
                    excess -= row[1]
            if expired or len(old) < batch:
                break
            at = rows[-1][:2]
        self._forget(bytes(row[0]).hex() for row in expired)
        return expired
