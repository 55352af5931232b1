"""Page store in PostgreSQL: one row with the compressed body per page.

Pages are written in their own transaction. The ledger transaction checks that they exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import zstandard

from penstock.errors import Unreachable
from penstock.model import page_id
from penstock.ports import Clock, StagedPages
from penstock.stores.context import Context
from penstock.stores.postgres.arrays import byteas
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx

T = TypeVar("T")

# EXTERNAL: the server does not try to compress the bodies, which are already compressed.
SCHEMA = """
CREATE TABLE page_body(hash BLOB PRIMARY KEY, body BLOB NOT NULL, size INTEGER NOT NULL, packed
    INTEGER NOT NULL, seen REAL NOT NULL);
ALTER TABLE page_body ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE INDEX page_body_seen ON page_body(seen, hash);
"""
LEVEL = 1  # of zstd
MAX_KNOWN = 30_000  # page ids in the cache of stored pages
SEEN_INTERVAL = (
    60.0  # seconds between two updates of `seen`, so that a frequent page is not rewritten
)
PRUNE = 2000  # pages read by one statement
MAX_PRUNE_BATCHES = 10  # such statements in one transaction, because other writers wait for it


class Staged(StagedPages):
    """Pages to store: new ones, and those that this process knows to be stored."""

    new: dict[str, tuple[bytes, int]] = {}  # id -> compressed body, size
    again: dict[str, bytes] = {}  # id -> body, needed if retention has deleted the page


class PostgresPages:
    """Implements ports.PageStore.

    `send` writes the bytes in a separate transaction, before the ledger transaction. So no process
    waits for bytes while it holds the fleet's lock. If the pages are in the ledger's store, the
    commit of the ledger transaction also makes them durable, because the WAL is synced in order.
    Otherwise `send` makes them durable.
    """

    remote = True

    def __init__(self, db: PostgresStore, clock: Clock, *, shared: bool) -> None:
        self.db, self.clock, self.shared = db, clock, shared
        self._known: dict[str, None] = {}
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        db.part("page_bodies", 1, SCHEMA)

    async def start(self) -> None:
        """Do nothing: the constructor has created the table."""

    # -- writing -----------------------------------------------------------------------------------

    def stage(self, pages: Iterable[tuple[str, bytes]]) -> Staged:
        staged = Staged(new={}, again={})
        for id_, body in pages:
            if id_ in self._known:
                staged.again[id_] = body
            elif id_ not in staged.new:
                staged.new[id_] = (self._compressor.compress(body), len(body))
        return staged

    async def send(self, staged: StagedPages) -> None:
        """Write the pages. They are stored when it returns.

        Raises StoreUnavailable. Retention deletes pages that no event refers to.
        """
        assert isinstance(staged, Staged)
        if staged.new or staged.again:
            await self.db.write(
                lambda tx: self._send(tx, staged), durable=not self.shared, alone=False
            )
            if len(self._known) > MAX_KNOWN:
                self._known.clear()
            self._known.update(dict.fromkeys(staged.new))

    def _send(self, tx: Tx, staged: Staged) -> None:
        now = self.clock.now()
        new = dict(staged.new)
        if staged.again:
            ids = byteas([bytes.fromhex(h) for h in staged.again])
            tx.execute(
                "UPDATE page_body SET seen=? WHERE hash=ANY(?::bytea[]) AND seen<?",
                (now, ids, now - SEEN_INTERVAL),
            )
            there = {
                h
                for (h,) in tx.execute(
                    "SELECT hash FROM page_body WHERE hash=ANY(?::bytea[])", (ids,)
                )
            }
            for h, body in staged.again.items():
                if bytes.fromhex(h) not in there:
                    # This runs on the store's thread. So it does not use the loop's compressor.
                    new[h] = (zstandard.compress(body, LEVEL), len(body))
        # Sorted, so that two processes that store the same pages cannot deadlock.
        tx.executemany(
            "INSERT INTO page_body(hash, body, size, packed, seen) VALUES(?,?,?,?,?)"
            " ON CONFLICT(hash) DO UPDATE SET seen=excluded.seen",
            [
                (bytes.fromhex(h), packed, size, len(packed), now)
                for h, (packed, size) in sorted(new.items())
            ],
        )

    def index_in(self, tx: Tx, staged: StagedPages) -> list[str]:
        """Return the ids of pages that are not stored, or no longer.

        Return [] if the pages are not in the ledger's store: there `send` has checked it.
        """
        assert isinstance(staged, Staged)
        ids = [*staged.new, *staged.again]
        if not ids or not self.shared:
            return []
        found = {
            h.hex()
            for (h,) in tx.execute(
                "SELECT hash FROM page_body WHERE hash=ANY(?::bytea[])",
                (byteas([bytes.fromhex(h) for h in ids]),),
            )
        }
        return [h for h in ids if h not in found]

    def forget(self, staged: StagedPages) -> None:
        assert isinstance(staged, Staged)
        for h in [*staged.new, *staged.again]:
            self._known.pop(h, None)

    # -- reading -----------------------------------------------------------------------------------

    async def get(self, page: str) -> bytes | None:
        return await self.db.read(lambda tx: self._get(tx, page))

    def get_in(self, tx: Tx, page: str) -> bytes | None:
        return self._query(tx, lambda own: self._get(own, page))

    def _get(self, tx: Tx, page: str) -> bytes | None:
        packed: bytes | None = tx.execute(
            "SELECT body FROM page_body WHERE hash=?", (_raw(page),)
        ).get
        if packed is None:
            return None
        try:
            body = zstandard.decompress(packed)
        except zstandard.ZstdError:
            body = b""
        if page_id(body) != page:
            raise Unreachable(
                f"page {page} in {self.db.path} no longer matches its hash",
                hint="restore it from a backup, or push the URL again with --force",
            )
        return body

    def find_in(self, tx: Tx, prefix: str) -> list[str]:
        """Return at most ten page ids that start with `prefix`."""
        low, high = _raw(prefix.ljust(64, "0")), _raw(prefix.ljust(64, "f"))
        between = "SELECT hash FROM page_body WHERE hash>=? AND hash<=? ORDER BY hash LIMIT 10"
        return self._query(tx, lambda own: [h.hex() for (h,) in own.execute(between, (low, high))])

    def sizes_in(self, tx: Tx, pages: Sequence[str]) -> dict[str, int]:
        """Return the body sizes of those of `pages` that are stored."""
        ids = byteas([_raw(page) for page in pages])
        found = self._query(
            tx,
            lambda own: own.execute(
                "SELECT hash, size FROM page_body WHERE hash=ANY(?::bytea[])", (ids,)
            ).fetchall(),
        )
        return {h.hex(): size for h, size in found}

    def totals_in(self, tx: Tx) -> tuple[int, int]:
        """Return the number of stored pages and of their compressed bytes."""
        pages, size = self._query(
            tx,
            lambda own: own.execute("SELECT count(*), coalesce(sum(packed), 0) FROM page_body").get,
        )
        return pages, size

    def problems_in(self, tx: Tx) -> list[str]:
        """Return []: the server checks its own files."""
        return []

    def _query(self, tx: Tx, work: Callable[[Tx], T]) -> T:
        """Run `work` in the caller's ledger transaction, or in the store of the pages."""
        return work(tx) if self.shared else self.db.read_now(work)

    # -- retention ---------------------------------------------------------------------------------

    def prune_in(
        self,
        tx: Tx,
        *,
        older_than: float | None,
        max_bytes: int | None,
        keep: Callable[[Sequence[str]], set[str]],
    ) -> tuple[int, int]:
        """Delete old pages. Return the number of pages removed and of bytes freed.

        `keep` returns which of the given pages an open event still needs.
        """

        def work(own: Tx) -> tuple[int, int]:
            removed = freed = 0
            excess = (
                None
                if max_bytes is None
                else own.execute("SELECT coalesce(sum(packed), 0) FROM page_body").get - max_bytes
            )
            at: tuple[float, bytes] = (-1.0, b"")
            for _ in range(MAX_PRUNE_BATCHES):
                rows = own.execute(
                    "SELECT seen, hash, packed FROM page_body WHERE (seen, hash)>(?, ?)"
                    " ORDER BY seen, hash LIMIT ?",
                    (*at, PRUNE),
                ).fetchall()
                candidates = []
                for seen, h, packed in rows:
                    if (older_than is None or seen >= older_than) and (
                        excess is None or excess <= 0
                    ):
                        break
                    candidates.append((h, packed))
                    excess = None if excess is None else excess - packed
                wanted = keep([h.hex() for h, _ in candidates])
                deleted = {h: packed for h, packed in candidates if h.hex() not in wanted}
                own.execute(
                    "DELETE FROM page_body WHERE hash=ANY(?::bytea[])", (byteas(list(deleted)),)
                )
                for h in deleted:
                    self._known.pop(h.hex(), None)
                removed, freed = removed + len(deleted), freed + sum(deleted.values())
                if len(candidates) < PRUNE or removed:
                    break
                at = rows[-1][:2]
            return removed, freed

        return work(tx) if self.shared else self.db.write_now(work)

    def sweep_in(self, tx: Tx) -> None:
        """Do nothing: there are no files to delete."""

    def close(self) -> None:
        """Do nothing: the caller that opened the store closes it."""


def _raw(page: str) -> bytes:
    """Return the bytes of a hexadecimal page id, or b"", which no page has, if it is not one."""
    try:
        return bytes.fromhex(page)
    except ValueError:
        return b""


def open_pages(url: str, context: Context) -> PostgresPages:
    """Open the page store of a `postgres://…` URL.

    If it is the ledger's URL, the ledger transaction checks that the page of an event is stored.
    """
    store: Any = context.store(url)
    ledger = context.config.ledger.url
    shared = ledger.startswith(("postgres:", "postgresql:")) and context.store(ledger) is store
    return PostgresPages(store, context.clock, shared=shared)
