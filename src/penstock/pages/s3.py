"""Page store on S3, or on a server with its protocol: each compressed body is an object.

The index is in the ledger's store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
from obstore.exceptions import BaseError

from penstock.errors import PenstockError, StoreUnavailable, Unreachable
from penstock.pages.common import RemotePages, Staged, raw
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
PRUNE_BATCH = 500  # pages read by one statement, and objects deleted by one request
PROBE_OBJECT = "penstock"  # object that is written and read at the start, to check the permissions
log = logging.getLogger("penstock.pages")


class S3Pages(RemotePages):
    """Implements ports.PageStore.

    `send` writes the objects before the ledger transaction, which then inserts the index rows. If
    the process crashes between the two, objects without an index row remain.
    """

    table = "page_object"
    repair = "restore the bucket, or push the URL again with --force"

    def __init__(self, db: SqlStore, bucket: Any, place: str, clock: Clock) -> None:
        super().__init__(clock)
        self.db, self.bucket, self.place = db, bucket, place
        self._request_limit = asyncio.Semaphore(MAX_REQUESTS)
        self._remover = ThreadPoolExecutor(1, "penstock-s3")
        self._sets_lock = threading.Lock()
        self._removing: set[str] = set()
        self._removed: set[str] = set()
        db.part("page_objects", SCHEMA)

    async def start(self) -> None:
        """Raises Unreachable if the bucket or a permission is missing, or no server answers."""
        try:
            await obstore.put_async(self.bucket, PROBE_OBJECT, b"penstock", use_multipart=False)
            await (await obstore.get_async(self.bucket, PROBE_OBJECT)).bytes_async()
        except (BaseError, OSError, ValueError) as e:
            raise self._refused(e) from e

    # -- writing -----------------------------------------------------------------------------------

    def _packed(self, id_: str, body: bytes) -> tuple[bytes, int, str]:
        packed, size, _ = super()._packed(id_, body)
        return packed, size, f"{id_[:2]}/{id_}-{secrets.token_hex(4)}.zst"

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
            staged.new[id_] = self._packed(id_, staged.again.pop(id_))
        sent = await asyncio.gather(
            *[self._put(name, packed) for packed, _, name in staged.new.values()],
            return_exceptions=True,
        )
        for failure in sent:
            if isinstance(failure, BaseException):
                raise failure
        self._remember([*staged.new, *staged.again])

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
                    for h, (packed, size, name) in sorted(staged.new.items())
                ],
            )
            named = self._rows(tx, "hash, name", list(staged.new))
            # Another process stored the same page at the same time.
            superfluous = [name for h, (*_, name) in staged.new.items() if named[h][0] != name]
            self._doom(tx, superfluous)
        for some in _batches(list(staged.again)):
            tx.execute(
                f"UPDATE page_object SET seen=? WHERE hash IN ({_placeholders(some)})",
                (now, *map(bytes.fromhex, some)),
            )
        there = self._rows(tx, "hash", list(staged.again))
        return [h for h in staged.again if h not in there]

    def _doom(self, tx: Tx, names: Iterable[str]) -> None:
        """Mark objects for deletion by a later `sweep_in`."""
        tx.executemany(
            "INSERT INTO page_object_doomed(name) VALUES(?) ON CONFLICT DO NOTHING",
            [(name,) for name in names],
        )

    # -- reading -----------------------------------------------------------------------------------

    def _rows(self, tx: Tx, columns: str, pages: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        """Return the index rows by page id. The first of `columns` must be `hash`."""
        found: dict[str, tuple[Any, ...]] = {}
        for some in _batches(pages):
            rows = tx.execute(
                f"SELECT {columns}, 0 FROM page_object WHERE hash IN ({_placeholders(some)})",
                [raw(page) for page in some],
            ).fetchall()
            found.update({bytes(h).hex(): tuple(rest) for h, *rest in rows})
        return found

    async def get(self, page: str) -> bytes | None:
        row = (await self.db.read(lambda tx: self._rows(tx, "hash, name", [page]))).get(page)
        if row is None:
            return None
        with self._read_errors(page):
            async with self._request_limit:
                packed = bytes(await (await obstore.get_async(self.bucket, row[0])).bytes_async())
        return self._decompressed(page, packed)

    def get_in(self, tx: Tx, page: str) -> bytes | None:
        row = self._rows(tx, "hash, name", [page]).get(page)
        if row is None:
            return None
        with self._read_errors(page):
            packed = bytes(obstore.get(self.bucket, row[0]).bytes())
        return self._decompressed(page, packed)

    @contextlib.contextmanager
    def _read_errors(self, page: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as e:
            raise Unreachable(f"page {page} is no longer in {self.place}", hint=self.repair) from e
        except (BaseError, OSError) as e:
            raise StoreUnavailable(
                f"page {page} cannot be read from {self.place}: {error_text(e)}",
                hint="check that the bucket can be reached",
            ) from e

    def _refused(self, e: Exception) -> PenstockError:
        return refused(
            e,
            self.place,
            setting="PENSTOCK_PAGES_URL",
            rights="s3:PutObject, s3:GetObject and s3:DeleteObject",
        )

    def sizes_in(self, tx: Tx, pages: Sequence[str]) -> dict[str, int]:
        return {page: size for page, (size, _) in self._rows(tx, "hash, size", pages).items()}

    def totals_in(self, tx: Tx) -> tuple[int, int]:
        return self._totals(tx)

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
        expired = self._expired(
            tx,
            "hash, packed, name",
            older_than=older_than,
            max_bytes=max_bytes,
            keep=keep,
            batch=PRUNE_BATCH,
            max_batches=sys.maxsize,
        )
        tx.executemany("DELETE FROM page_object WHERE hash=?", [(h,) for h, _, _ in expired])
        self._doom(tx, [name for _, _, name in expired])
        return len(expired), sum(packed for _, packed, _ in expired)

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
        done = True
        try:
            obstore.delete(self.bucket, names)
        except FileNotFoundError:
            pass  # some servers report that an object does not exist
        except (BaseError, OSError) as e:
            log.warning(
                "%d objects of removed pages are still in %s: %s",
                len(names),
                self.place,
                error_text(e),
            )
            done = False
        with self._sets_lock:
            self._removing.difference_update(names)
            if done:
                self._removed.update(names)

    def close(self) -> None:
        self._remover.shutdown(wait=True)


# -- helpers ---------------------------------------------------------------------------------------


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
