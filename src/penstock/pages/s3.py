"""Page store on S3, or on a server with its protocol: each compressed body is an object.

The index is in the ledger's store.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import zstandard
from obstore.exceptions import BaseError

from penstock.errors import PenstockError, StoreUnavailable, Unreachable
from penstock.model import page_id
from penstock.ports import Clock, StagedPages
from penstock.stores.context import Context
from penstock.stores.s3 import bucket_at, error_text, refused
from penstock.stores.sql import SqlStore, Tx

# The name of an object is the page id and a nonce. So deleting an object never deletes a newer
# object of the same page.
SCHEMA = """
CREATE TABLE page_object(hash BLOB PRIMARY KEY, name TEXT NOT NULL, size INTEGER NOT NULL, packed
    INTEGER NOT NULL, seen REAL NOT NULL);
CREATE INDEX page_object_seen ON page_object(seen, hash);
CREATE TABLE page_object_doomed(name TEXT PRIMARY KEY);
"""
MAX_REQUESTS = 32  # concurrent requests of one worker
MAX_KNOWN = 30_000  # page ids in the cache of stored pages
PRUNE_BATCH = 500  # pages read by one statement, and objects deleted by one request
PROBE_OBJECT = "penstock"  # object that is written and read at the start, to check the permissions
log = logging.getLogger("penstock.pages")


class Staged(StagedPages):
    """Pages to store: new ones, and those that this process knows to be stored."""

    new: dict[str, tuple[str, bytes, int]] = {}  # id -> object name, compressed body, size
    again: dict[str, bytes] = {}  # id -> body


class S3Pages:
    """Implements ports.PageStore.

    `send` writes the objects before the ledger transaction, which then inserts the index rows. If
    the process crashes between the two, objects without an index row remain.
    """

    remote = True

    def __init__(self, db: SqlStore, bucket: Any, place: str, clock: Clock) -> None:
        self.db, self.bucket, self.place, self.clock = db, bucket, place, clock
        self._known: dict[str, None] = {}
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._request_limit = asyncio.Semaphore(MAX_REQUESTS)
        self._remover = ThreadPoolExecutor(1, "penstock-s3")
        self._sets_lock = threading.Lock()
        self._removing: set[str] = set()
        self._removed: set[str] = set()
        db.part("page_objects", 1, SCHEMA)

    async def start(self) -> None:
        """Raises Unreachable if the bucket or a permission is missing, or no server answers."""
        try:
            await obstore.put_async(self.bucket, PROBE_OBJECT, b"penstock", use_multipart=False)
            await (await obstore.get_async(self.bucket, PROBE_OBJECT)).bytes_async()
        except (BaseError, OSError, ValueError) as e:
            raise self._refused(e) from e

    # -- writing -----------------------------------------------------------------------------------

    def stage(self, pages: Iterable[tuple[str, bytes]]) -> Staged:
        staged = Staged(new={}, again={})
        for id_, body in pages:
            if id_ in self._known:
                staged.again[id_] = body
            elif id_ not in staged.new:
                staged.new[id_] = self._packed_object(id_, body)
        return staged

    def _packed_object(self, id_: str, body: bytes) -> tuple[str, bytes, int]:
        return (
            f"{id_[:2]}/{id_}-{secrets.token_hex(4)}.zst",
            self._compressor.compress(body),
            len(body),
        )

    async def send(self, staged: StagedPages) -> None:
        """Write objects. They have no index row yet. Raises StoreUnavailable."""
        assert isinstance(staged, Staged)
        if not staged.new and not staged.again:
            return
        there = await self.db.read(
            lambda tx: set(self._rows(tx, "hash", [*staged.new, *staged.again]))
        )
        # Stored by another process, or before this process started.
        for id_ in [id_ for id_ in staged.new if id_ in there]:
            del staged.new[id_]
            staged.again[id_] = b""
        for id_ in [id_ for id_ in staged.again if id_ not in there]:
            staged.new[id_] = self._packed_object(id_, staged.again.pop(id_))
        sent = await asyncio.gather(
            *[self._put(name, packed) for name, packed, _ in staged.new.values()],
            return_exceptions=True,
        )
        for failure in sent:
            if isinstance(failure, BaseException):
                raise failure
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        self._known.update(dict.fromkeys([*staged.new, *staged.again]))

    async def _put(self, name: str, packed: bytes) -> None:
        try:
            async with self._request_limit:
                await obstore.put_async(self.bucket, name, packed, use_multipart=False)
        except (BaseError, OSError) as e:
            raise StoreUnavailable(
                f"a page could not be stored in {self.place}: {error_text(e)}",
                hint="check that the bucket can be reached and written",
            ) from e

    def index_in(self, tx: Tx, staged: StagedPages) -> list[str]:
        """Insert index rows of the new objects.

        Return the ids in `again` that are no longer stored, because retention has deleted them,
        maybe in another process.
        """
        assert isinstance(staged, Staged)
        now = self.clock.now()
        if staged.new:
            tx.executemany(
                "INSERT INTO page_object(hash, name, size, packed, seen) VALUES(?,?,?,?,?)"
                " ON CONFLICT(hash) DO UPDATE SET seen=excluded.seen",
                [
                    (bytes.fromhex(h), name, size, len(packed), now)
                    for h, (name, packed, size) in sorted(staged.new.items())
                ],
            )
            named = self._rows(tx, "hash, name", list(staged.new))
            # Another process stored the same page at the same time.
            superfluous = [name for h, (name, _, _) in staged.new.items() if named[h][0] != name]
            tx.executemany(
                "INSERT INTO page_object_doomed(name) VALUES(?) ON CONFLICT DO NOTHING",
                [(name,) for name in superfluous],
            )
        for some in _batches(list(staged.again)):
            tx.execute(
                f"UPDATE page_object SET seen=? WHERE hash IN ({_placeholders(some)})",
                (now, *map(bytes.fromhex, some)),
            )
        there = self._rows(tx, "hash", list(staged.again))
        return [h for h in staged.again if h not in there]

    def forget(self, staged: StagedPages) -> None:
        assert isinstance(staged, Staged)
        for h in [*staged.new, *staged.again]:
            self._known.pop(h, None)

    # -- reading -----------------------------------------------------------------------------------

    def _rows(self, tx: Tx, columns: str, pages: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        """Return the index rows by page id. The first of `columns` must be `hash`."""
        found: dict[str, tuple[Any, ...]] = {}
        for some in _batches(pages):
            rows = tx.execute(
                f"SELECT {columns}, 0 FROM page_object WHERE hash IN ({_placeholders(some)})",
                [_raw(page) for page in some],
            ).fetchall()
            found.update({bytes(h).hex(): tuple(rest) for h, *rest in rows})
        return found

    async def get(self, page: str) -> bytes | None:
        row = (await self.db.read(lambda tx: self._rows(tx, "hash, name", [page]))).get(page)
        if row is None:
            return None
        try:
            async with self._request_limit:
                packed = bytes(await (await obstore.get_async(self.bucket, row[0])).bytes_async())
        except (BaseError, OSError) as e:
            raise self._read_error(page, e) from e
        return self._decompressed(page, packed)

    def get_in(self, tx: Tx, page: str) -> bytes | None:
        row = self._rows(tx, "hash, name", [page]).get(page)
        if row is None:
            return None
        try:
            packed = bytes(obstore.get(self.bucket, row[0]).bytes())
        except (BaseError, OSError) as e:
            raise self._read_error(page, e) from e
        return self._decompressed(page, packed)

    def _read_error(self, page: str, e: Exception) -> PenstockError:
        if isinstance(e, FileNotFoundError):
            return Unreachable(
                f"page {page} is no longer in {self.place}",
                hint="restore the bucket, or push the URL again with --force",
            )
        return StoreUnavailable(
            f"page {page} cannot be read from {self.place}: {error_text(e)}",
            hint="check that the bucket can be reached",
        )

    def _refused(self, e: Exception) -> PenstockError:
        return refused(
            e,
            self.place,
            setting="PENSTOCK_PAGES_URL",
            rights="s3:PutObject, s3:GetObject and s3:DeleteObject",
        )

    def _decompressed(self, page: str, packed: bytes) -> bytes:
        try:
            body = zstandard.decompress(packed)
        except zstandard.ZstdError:
            body = b""
        if page_id(body) != page:
            raise Unreachable(
                f"page {page} in {self.place} no longer matches its hash",
                hint="restore the bucket, or push the URL again with --force",
            )
        return body

    def find_in(self, tx: Tx, prefix: str) -> list[str]:
        """Return at most ten page ids that start with `prefix`."""
        low, high = _raw(prefix.ljust(64, "0")), _raw(prefix.ljust(64, "f"))
        return [
            bytes(h).hex()
            for (h,) in tx.execute(
                "SELECT hash FROM page_object WHERE hash>=? AND hash<=? ORDER BY hash LIMIT 10",
                (low, high),
            )
        ]

    def sizes_in(self, tx: Tx, pages: Sequence[str]) -> dict[str, int]:
        return {page: size for page, (size, _) in self._rows(tx, "hash, size", pages).items()}

    def totals_in(self, tx: Tx) -> tuple[int, int]:
        pages, size = tx.execute("SELECT count(*), coalesce(sum(packed), 0) FROM page_object").get
        return int(pages), int(size)

    def problems_in(self, tx: Tx) -> list[str]:
        try:
            obstore.get(self.bucket, PROBE_OBJECT).bytes()
        except FileNotFoundError as e:
            # If only the object is missing, no worker has started yet.
            return [self._refused(e).message] if "NoSuchBucket" in str(e) else []
        except (BaseError, OSError) as e:
            return [self._refused(e).message]
        return []

    # -- retention ---------------------------------------------------------------------------------

    def prune_in(
        self,
        tx: Tx,
        *,
        older_than: float | None,
        max_bytes: int | None,
        keep: Callable[[Sequence[str]], set[str]],
    ) -> tuple[int, int]:
        """Delete index rows of old pages. Return the number of pages removed and of bytes freed.

        A `sweep_in` after the commit deletes the objects.
        """
        excess = 0 if max_bytes is None else self.totals_in(tx)[1] - max_bytes
        at: tuple[float, bytes] = (-1.0, b"")
        while True:
            query = (
                "SELECT seen, hash, name, packed FROM page_object WHERE (seen, hash)>(?, ?)"
                " ORDER BY seen, hash LIMIT ?"
            )
            rows = tx.execute(query, (*at, PRUNE_BATCH)).fetchall()
            candidates = []
            for seen, h, name, packed in rows:
                if (older_than is None or seen >= older_than) and excess <= 0:
                    break
                candidates.append((bytes(h).hex(), name, packed))
                excess -= packed
            wanted = keep([h for h, _, _ in candidates])
            deleted = [row for row in candidates if row[0] not in wanted]
            # Continue if all rows of this batch are needed.
            if deleted or len(candidates) < PRUNE_BATCH:
                break
            at = rows[-1][:2]
        tx.executemany(
            "DELETE FROM page_object WHERE hash=?", [(bytes.fromhex(h),) for h, _, _ in deleted]
        )
        tx.executemany(
            "INSERT INTO page_object_doomed(name) VALUES(?) ON CONFLICT DO NOTHING",
            [(name,) for _, name, _ in deleted],
        )
        for h, _, _ in deleted:
            self._known.pop(h, None)
        return len(deleted), sum(packed for _, _, packed in deleted)

    def sweep_in(self, tx: Tx) -> None:
        """Delete objects that an earlier, committed transaction marked, on a thread.

        The next call removes the marks of deleted objects.
        """
        with self._sets_lock:
            done, self._removed = self._removed, set()
            busy = set(self._removing)
        tx.executemany(
            "DELETE FROM page_object_doomed WHERE name=?", [(name,) for name in sorted(done)]
        )
        names = [
            name
            for (name,) in tx.execute("SELECT name FROM page_object_doomed LIMIT ?", (PRUNE_BATCH,))
            if name not in busy
        ]
        if names:
            with self._sets_lock:
                self._removing.update(names)
            self._remover.submit(self._remove, names)

    def _remove(self, names: list[str]) -> None:
        try:
            obstore.delete(self.bucket, names)
        except FileNotFoundError:
            done = True  # some servers report that an object does not exist
        except (BaseError, OSError) as e:
            log.warning(
                "%d objects of removed pages are still in %s: %s",
                len(names),
                self.place,
                error_text(e),
            )
            done = False
        else:
            done = True
        with self._sets_lock:
            self._removing.difference_update(names)
            if done:
                self._removed.update(names)

    def close(self) -> None:
        self._remover.shutdown(wait=True)


# -- helpers ---------------------------------------------------------------------------------------


def _raw(page: str) -> bytes:
    """Return the bytes of a hexadecimal page id, or b"", which no page has, if it is not one."""
    try:
        return bytes.fromhex(page)
    except ValueError:
        return b""


def _batches(pages: Sequence[str]) -> Iterator[Sequence[str]]:
    return (pages[i : i + PRUNE_BATCH] for i in range(0, len(pages), PRUNE_BATCH))


def _placeholders(pages: Sequence[str]) -> str:
    return ",".join("?" * len(pages))


def open_pages(url: str, context: Context) -> S3Pages:
    """Open the page store of an `s3://bucket/prefix` URL.

    Its index is in the ledger's store, so that a page and its event are committed together.
    """
    bucket, place = bucket_at(url)
    return S3Pages(context.store(context.config.ledger.url), bucket, place, context.clock)
