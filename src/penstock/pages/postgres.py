"""The page store on PostgreSQL: bodies compressed, one row each, written beside the books and
looked for inside their transaction. Not the index of events.
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

# EXTERNAL: the bytes are compressed already, and the server need not try.
SCHEMA = """
CREATE TABLE page_body(hash BLOB PRIMARY KEY, body BLOB NOT NULL, size INTEGER NOT NULL, packed INTEGER NOT NULL, seen REAL NOT NULL);
ALTER TABLE page_body ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE INDEX page_body_seen ON page_body(seen, hash);
"""
LEVEL = 1
REMEMBERED = 30_000
SEEN_AGAIN = 60.0  # seconds: a page that is seen all the time is not written to all the time
PRUNE = 2000  # pages looked at in one statement
PRUNES = 10  # such statements in one transaction at most: others wait for it


class Staged(StagedPages):
    """What is to be stored: bodies that are new to us, compressed, and those that we know."""

    new: dict[str, tuple[bytes, int]] = {}  # packed, size
    again: dict[str, bytes] = {}  # as they are: needed only where retention was quicker


class PostgresPages:
    """`send` writes the bytes in a transaction of its own, before the books' one, so that nobody
    waits for bytes behind the fleet's lock. On the ledger's own server the books' commit makes them
    durable with itself, since the log is synced in order; elsewhere `send` does.
    """

    remote = True

    def __init__(self, db: PostgresStore, clock: Clock, *, shared: bool) -> None:
        self.db, self.clock, self.shared = db, clock, shared
        self._known: dict[str, None] = {}
        self._squeeze = zstandard.ZstdCompressor(level=LEVEL)
        db.part("page_bodies", 1, SCHEMA)

    async def start(self) -> None:
        """Opening it made the table."""

    # -- writing -----------------------------------------------------------------------------------

    def stage(self, pages: Iterable[tuple[str, bytes]]) -> Staged:
        staged = Staged(new={}, again={})
        for id_, body in pages:
            if id_ in self._known:
                staged.again[id_] = body
            elif id_ not in staged.new:
                staged.new[id_] = (self._squeeze.compress(body), len(body))
        return staged

    async def send(self, staged: StagedPages) -> None:
        """There when it returns. Raises StoreUnavailable; what was sent then without being named by
        anybody goes with retention.
        """
        assert isinstance(staged, Staged)
        if staged.new or staged.again:
            await self.db.write(
                lambda tx: self._send(tx, staged), durable=not self.shared, alone=False
            )
            if len(self._known) > REMEMBERED:
                self._known.clear()
            self._known.update(dict.fromkeys(staged.new))

    def _send(self, tx: Tx, staged: Staged) -> None:
        now = self.clock.now()
        new = dict(staged.new)
        if staged.again:
            ids = byteas([bytes.fromhex(h) for h in staged.again])
            tx.execute(
                "UPDATE page_body SET seen=? WHERE hash=ANY(?::bytea[]) AND seen<?",
                (now, ids, now - SEEN_AGAIN),
            )
            there = {
                h
                for (h,) in tx.execute(
                    "SELECT hash FROM page_body WHERE hash=ANY(?::bytea[])", (ids,)
                )
            }
            for h, body in staged.again.items():
                if bytes.fromhex(h) not in there:
                    new[h] = (
                        zstandard.compress(body, LEVEL),
                        len(body),
                    )  # on the store's thread, so not with the loop's compressor
        # Sorted: two who store the same pages wait for each other in one order.
        tx.executemany(
            "INSERT INTO page_body(hash, body, size, packed, seen) VALUES(?,?,?,?,?) ON CONFLICT(hash) DO UPDATE SET seen=excluded.seen",
            [
                (bytes.fromhex(h), packed, size, len(packed), now)
                for h, (packed, size) in sorted(new.items())
            ],
        )

    def index_in(self, tx: Tx, staged: StagedPages) -> list[str]:
        """Ids whose bytes are not there (any more). Elsewhere than in the ledger's store that was
        seen to by `send`.
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
        return self._asked(tx, lambda own: self._get(own, page))

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
                f"page {page} in {self.db.path} does not have its hash any more",
                hint="restore it from a backup, or push the URL again with --force",
            )
        return body

    def find_in(self, tx: Tx, prefix: str) -> list[str]:
        """Ids that begin so; ten at most."""
        low, high = _raw(prefix.ljust(64, "0")), _raw(prefix.ljust(64, "f"))
        between = "SELECT hash FROM page_body WHERE hash>=? AND hash<=? ORDER BY hash LIMIT 10"
        return self._asked(tx, lambda own: [h.hex() for (h,) in own.execute(between, (low, high))])

    def sizes_in(self, tx: Tx, pages: Sequence[str]) -> dict[str, int]:
        """Of these, the ones that are stored, with the size of their bodies."""
        ids = byteas([_raw(page) for page in pages])
        found = self._asked(
            tx,
            lambda own: own.execute(
                "SELECT hash, size FROM page_body WHERE hash=ANY(?::bytea[])", (ids,)
            ).fetchall(),
        )
        return {h.hex(): size for h, size in found}

    def totals_in(self, tx: Tx) -> tuple[int, int]:
        """(pages, bytes they take)."""
        pages, size = self._asked(
            tx,
            lambda own: own.execute("SELECT count(*), coalesce(sum(packed), 0) FROM page_body").get,
        )
        return pages, size

    def problems_in(self, tx: Tx) -> list[str]:
        """The server looks after its own files."""
        return []

    def _asked(self, tx: Tx, work: Callable[[Tx], T]) -> T:
        """The caller's transaction is the ledger's; our rows may lie elsewhere."""
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
        """(pages removed, bytes freed). `keep` answers which of these pages an open event still
        needs.
        """

        def work(own: Tx) -> tuple[int, int]:
            removed = freed = 0
            excess = (
                None
                if max_bytes is None
                else own.execute("SELECT coalesce(sum(packed), 0) FROM page_body").get - max_bytes
            )
            at: tuple[float, bytes] = (-1.0, b"")
            for _ in range(PRUNES):
                rows = own.execute(
                    "SELECT seen, hash, packed FROM page_body WHERE (seen, hash)>(?, ?) ORDER BY seen, hash LIMIT ?",
                    (*at, PRUNE),
                ).fetchall()
                doomed = []
                for seen, h, packed in rows:
                    if (older_than is None or seen >= older_than) and (
                        excess is None or excess <= 0
                    ):
                        break
                    doomed.append((h, packed))
                    excess = None if excess is None else excess - packed
                wanted = keep([h.hex() for h, _ in doomed])
                gone = {h: packed for h, packed in doomed if h.hex() not in wanted}
                own.execute(
                    "DELETE FROM page_body WHERE hash=ANY(?::bytea[])", (byteas(list(gone)),)
                )
                for h in gone:
                    self._known.pop(h.hex(), None)
                removed, freed = removed + len(gone), freed + sum(gone.values())
                if len(doomed) < PRUNE or removed:
                    break
                at = rows[-1][:2]
            return removed, freed

        return work(tx) if self.shared else self.db.write_now(work)

    def sweep_in(self, tx: Tx) -> None:
        """The server looks after its own files."""

    def close(self) -> None:
        """The connections belong to whoever opened them."""


def _raw(page: str) -> bytes:
    """Ids are hex outside and bytes here; what is no id is nowhere."""
    try:
        return bytes.fromhex(page)
    except ValueError:
        return b""


def open_pages(url: str, context: Context) -> PostgresPages:
    """`postgres://…`: where that is the ledger's own URL, a page is there exactly if the event that
    names it can be.
    """
    store: Any = context.store(url)
    ledger = context.config.ledger.url
    shared = ledger.startswith(("postgres:", "postgresql:")) and context.store(ledger) is store
    return PostgresPages(store, context.clock, shared=shared)
