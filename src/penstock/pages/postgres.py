"""Page store in PostgreSQL: one row with the compressed body per page.

Pages are written in their own transaction. The ledger transaction checks that they exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zstandard

from penstock.pages.common import LEVEL, RemotePages, Staged, raw
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
SEEN_INTERVAL = (
    60.0  # seconds between two updates of `seen`, so that a frequent page is not rewritten
)
PRUNE = 2000  # pages read by one statement
MAX_PRUNE_BATCHES = 10  # such statements in one transaction, because other writers wait for it


class PostgresPages(RemotePages):
    """Implements ports.PageStore.

    `send` writes the bytes in a separate transaction, before the ledger transaction. So no process
    waits for bytes while it holds the fleet's lock. If the pages are in the ledger's store, the
    commit of the ledger transaction also makes them durable, because the WAL is synced in order.
    Otherwise `send` makes them durable.
    """

    table = "page_body"
    repair = "restore it from a backup, or push the URL again with --force"

    def __init__(self, db: PostgresStore, clock: Clock, *, shared: bool) -> None:
        super().__init__(clock)
        self.db, self.shared, self.place = db, shared, db.path
        db.part("page_bodies", SCHEMA)

    async def start(self) -> None:
        """Do nothing: the constructor has created the table."""

    # -- writing -----------------------------------------------------------------------------------

    async def send(self, staged: StagedPages) -> None:
        """Write the pages. They are stored when it returns.

        Raises StoreUnavailable. Retention deletes pages that no event refers to.
        """
        assert isinstance(staged, Staged)
        if staged.new or staged.again:
            await self.db.write(
                lambda tx: self._send(tx, staged), durable=not self.shared, alone=False
            )
            self._remember(staged.new)

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
                    new[h] = (zstandard.compress(body, LEVEL), len(body), "")
        # Sorted, so that two processes that store the same pages cannot deadlock.
        tx.executemany(
            "INSERT INTO page_body(hash, body, size, packed, seen) VALUES(?,?,?,?,?)"
            " ON CONFLICT(hash) DO UPDATE SET seen=excluded.seen",
            [
                (bytes.fromhex(h), packed, size, len(packed), now)
                for h, (packed, size, _) in sorted(new.items())
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

    # -- reading -----------------------------------------------------------------------------------

    async def get(self, page: str) -> bytes | None:
        return await self.db.read(lambda tx: self._get(tx, page))

    def get_in(self, tx: Tx, page: str) -> bytes | None:
        return self._query(tx, lambda own: self._get(own, page))

    def _get(self, tx: Tx, page: str) -> bytes | None:
        packed: bytes | None = tx.execute(
            "SELECT body FROM page_body WHERE hash=?", (raw(page),)
        ).get
        return None if packed is None else self._decompressed(page, packed)

    def find_in(self, tx: Tx, prefix: str) -> list[str]:
        find = super().find_in  # `super()` without arguments does not work inside a lambda
        return self._query(tx, lambda own: find(own, prefix))

    def sizes_in(self, tx: Tx, pages: Sequence[str]) -> dict[str, int]:
        """Return the body sizes of those of `pages` that are stored."""
        ids = byteas([raw(page) for page in pages])
        found = self._query(
            tx,
            lambda own: own.execute(
                "SELECT hash, size FROM page_body WHERE hash=ANY(?::bytea[])", (ids,)
            ).fetchall(),
        )
        return {h.hex(): size for h, size in found}

    def totals_in(self, tx: Tx) -> tuple[int, int]:
        """Return the number of stored pages and of their compressed bytes."""
        return self._query(tx, self._totals)

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
            expired = self._expired(
                own,
                "hash, packed",
                older_than=older_than,
                max_bytes=max_bytes,
                keep=keep,
                batch=PRUNE,
                max_batches=MAX_PRUNE_BATCHES,
            )
            own.execute(
                "DELETE FROM page_body WHERE hash=ANY(?::bytea[])",
                (byteas([h for h, _ in expired]),),
            )
            return len(expired), sum(packed for _, packed in expired)

        return work(tx) if self.shared else self.db.write_now(work)

    def sweep_in(self, tx: Tx) -> None:
        """Do nothing: there are no files to delete."""

    def close(self) -> None:
        """Do nothing: the caller that opened the store closes it."""


def open_pages(url: str, context: Context) -> PostgresPages:
    """Open the page store of a `postgres://…` URL.

    If it is the ledger's URL, the ledger transaction checks that the page of an event is stored.
    """
    store: Any = context.store(url)
    ledger = context.config.ledger.url
    shared = ledger.startswith(("postgres:", "postgresql:")) and context.store(ledger) is store
    return PostgresPages(store, context.clock, shared=shared)
