"""Embedded page store: bodies in append-only segment files, with an index in the ledger's store.

A zstd frame in a segment holds many bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import zstandard

from penstock.errors import StoreUnavailable, Unreachable
from penstock.locks import FileLock
from penstock.pages.common import MAX_KNOWN, Pages, raw
from penstock.ports import Clock, StagedPages
from penstock.private_files import FILE_MODE, make_directory
from penstock.stores.context import Context
from penstock.stores.sql import SqlStore, Tx

SCHEMA = """
CREATE TABLE segment(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, made REAL NOT
    NULL);
CREATE TABLE page(hash BLOB PRIMARY KEY, segment INTEGER NOT NULL, frame INTEGER NOT NULL, packed
    INTEGER NOT NULL, start INTEGER NOT NULL,
  size INTEGER NOT NULL, seen REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX page_segment ON page(segment, frame);
CREATE TABLE doomed(name TEXT PRIMARY KEY) WITHOUT ROWID;
"""
# A segment begins with a frame that zstd skips: its magic number, the size of the rest, a name, and
# the version. Release 0.1.0 wrote segments without it, which have version 1. A reader refuses a
# newer version.
VERSION = 1
_HEADER = struct.Struct("<II4sI")
_SKIPPABLE, _NAME = 0x184D2A50, b"PSEG"
# Pages in one frame. Similar pages compress better together: 5.6:1 instead of 4.3:1, with less CPU.
FRAME_PAGES = 32
FRAME_BYTES = 4 << 20  # of bodies before compression, after which a frame is written
SEGMENT_BYTES = 64 << 20  # after which a new segment is started
LIVE_SHARE = 0.5  # a segment with a smaller share of stored pages is rewritten
# Compressed bytes moved in one transaction. Other writers wait for the transaction.
MOVE_BYTES = 4 << 20
ORPHANED = 3600.0  # seconds after which a segment without index rows is deleted


def header(version: int) -> bytes:
    """Return the first bytes of a segment."""
    return _HEADER.pack(_SKIPPABLE, _HEADER.size - 8, _NAME, version)


def version_in(start: bytes) -> int:
    """Return the version of a segment from its first bytes."""
    if len(start) < _HEADER.size:
        return 1
    magic, _, name, version = _HEADER.unpack(start)
    return int(version) if (magic, name) == (_SKIPPABLE, _NAME) else 1


class Staged(StagedPages):
    """Bytes in a segment that have no index row yet."""

    segment: str = ""
    rows: list[tuple[str, int, int, int, int]] = []  # hash, frame, packed, start, size
    again: list[str] = []  # stored before: only their time is updated
    synced: bool = False


class SegmentStore(Pages):
    """Implements ports.PageStore.

    `stage` appends bytes on any thread, before the transaction. `send` syncs them. `index_in`
    inserts the index rows in the transaction. `get` reads a page.
    """

    remote = False
    table = "page"
    repair = "restore the pages directory from a backup, or push the URL again with --force"

    def __init__(self, db: SqlStore, directory: Path, clock: Clock, *, writer: str) -> None:
        super().__init__(clock)
        self.db, self.directory, self.writer = db, directory, writer
        self._file: int = -1
        self._name, self._end, self._count = "", 0, 0
        self._lock: FileLock | None = None
        # Lock of the previous segment. Pages staged there may not be committed yet.
        self._last_lock: FileLock | None = None
        self._closing = threading.Lock()
        # Retention also stages the pages that it moves, on the store's thread if the store has one.
        self._staging = threading.Lock()
        # Segments whose sync failed. The kernel reports the error once, and may drop the bytes.
        self._unsynced: set[str] = set()
        self._disk = ThreadPoolExecutor(1, "penstock-pages")  # runs the syncs, which block
        self._decompressor = zstandard.ZstdDecompressor()
        db.part("pages", SCHEMA)

    async def start(self) -> None:
        """Do nothing: the first `stage` creates the directory, and raises if it cannot."""

    # -- writing -----------------------------------------------------------------------------------

    def stage(self, pages: Iterable[tuple[str, bytes]]) -> Staged:
        """Append new pages. They are not durable before `send` or the commit of `index_in`.

        Raises StoreUnavailable. Then no page is staged.
        """
        staged = Staged(rows=[], again=[])
        new: list[str] = []
        try:
            with self._staging:
                self._stage(pages, staged, new)
        except BaseException as e:
            self._forget(new)
            if isinstance(e, OSError):
                raise self._unavailable(e) from e
            raise
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        return staged

    def _stage(self, pages: Iterable[tuple[str, bytes]], staged: Staged, new: list[str]) -> None:
        frame: list[tuple[str, bytes]] = []
        size = 0
        for hash_, body in pages:
            if hash_ in self._known:
                staged.again.append(hash_)
                continue
            self._known[hash_] = None
            new.append(hash_)
            frame.append((hash_, body))
            size += len(body)
            if len(frame) >= FRAME_PAGES or size >= FRAME_BYTES:
                self._append(frame, staged)
                frame, size = [], 0
        if frame:
            self._append(frame, staged)

    def _append(self, frame: Sequence[tuple[str, bytes]], staged: Staged) -> None:
        if self._file < 0 or (
            not staged.rows and (self._end >= SEGMENT_BYTES or self._name in self._unsynced)
        ):
            self._rotate()
        staged.segment = self._name
        packed = self._compressor.compress(b"".join([body for _, body in frame]))
        start = b"" if self._end else header(VERSION)
        end = self._end
        at = end + len(start)
        view = memoryview(start + packed)
        while view:
            wrote = os.pwrite(self._file, view, end)
            end += wrote
            view = view[wrote:]
        self._end = end
        offset = 0
        for hash_, body in frame:
            staged.rows.append((hash_, at, len(packed), offset, len(body)))
            offset += len(body)

    def _rotate(self) -> None:
        self._close_segment()
        make_directory(self.directory)
        while True:
            self._count += 1
            name = f"{self.writer}-{self._count}.seg"
            lock = FileLock(self.directory / (name + ".lock"))
            if not lock.try_acquire():
                continue
            try:
                self._file = os.open(
                    self.directory / name,
                    os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                    FILE_MODE,
                )
                fd = os.open(self.directory, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
            except FileExistsError:  # the file of an earlier worker with this name
                lock.release()
            except BaseException:
                lock.release(remove=True)
                raise
            else:
                self._name, self._end, self._lock = name, 0, lock
                return

    async def send(self, staged: StagedPages) -> None:
        """Sync before the transaction, so that it is not open while the disk syncs."""
        assert isinstance(staged, Staged)
        if staged.rows and self.db.durability == "full":
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._disk, self._sync, staged.segment
                )
            except OSError as e:
                raise self._unavailable(e) from e
            staged.synced = True

    def _unavailable(self, e: OSError) -> StoreUnavailable:
        return StoreUnavailable(
            f"cannot write pages to {self.directory}: {e}",
            hint="free disk space, or set PENSTOCK_PAGES_URL=file:DIR",
        )

    def _sync(self, segment: str) -> None:
        """Sync the segment, unless it is closed: closing has synced it."""
        if segment in self._unsynced:
            raise OSError(f"{segment} could not be synced before")
        with self._closing:
            fd = os.dup(self._file) if self._name == segment and self._file >= 0 else -1
        if fd >= 0:
            try:
                os.fdatasync(fd)
            except OSError:
                self._unsynced.add(segment)
                raise
            finally:
                os.close(fd)

    def index_in(self, tx: Tx, staged: StagedPages) -> list[str]:
        """Insert the index rows. Sync the bytes before the commit, if `send` has not.

        So a row never refers to bytes that a power cut could lose. Return the ids in `again` that
        are no longer stored, because retention has deleted them, maybe in another process.
        """
        assert isinstance(staged, Staged)
        now = self.clock.now()
        if staged.rows:
            if self.db.durability == "full" and not staged.synced:
                self.db.before_commit(partial(self._sync, staged.segment))
            segment = tx.execute("SELECT id FROM segment WHERE name=?", (staged.segment,)).get
            if segment is None:
                tx.execute("INSERT INTO segment(name, made) VALUES(?,?)", (staged.segment, now))
                segment = tx.last_insert_rowid()
            tx.executemany(
                "INSERT INTO page VALUES(?,?,?,?,?,?,?) ON CONFLICT(hash) DO UPDATE"
                " SET seen=excluded.seen",
                [
                    (bytes.fromhex(h), segment, frame, packed, start, size, now)
                    for h, frame, packed, start, size in staged.rows
                ],
            )
        if not staged.again:
            return []
        found = tx.executemany(
            "UPDATE page SET seen=? WHERE hash=? RETURNING hash",
            [(now, bytes.fromhex(h)) for h in staged.again],
        ).fetchall()
        there = {h.hex() for (h,) in found}
        return [h for h in staged.again if h not in there]

    def forget(self, staged: StagedPages) -> None:
        """Remove the pages from the cache of stored pages, because the transaction failed."""
        assert isinstance(staged, Staged)
        self._forget([*(row[0] for row in staged.rows), *staged.again])

    # -- reading -----------------------------------------------------------------------------------

    async def get(self, page: str) -> bytes | None:
        return await self.db.read(lambda tx: self.get_in(tx, page))

    def get_in(self, tx: Tx, page: str) -> bytes | None:
        row = tx.execute(
            "SELECT s.name, p.frame, p.packed, p.start, p.size FROM page p"
            " JOIN segment s ON s.id=p.segment WHERE p.hash=?",
            (raw(page),),
        ).get
        if row is None:
            return None
        name, frame, packed, start, size = row
        body = self._frame(name, frame, packed)[start : start + size]
        return self._verified(page, body, name)

    def _frame(self, name: str, frame: int, packed: int) -> bytes:
        try:
            with open(self.directory / name, "rb") as f:
                version = version_in(f.read(_HEADER.size))
                if version > VERSION:
                    # Not a damaged page: its event waits for a worker that can read it.
                    raise StoreUnavailable(
                        f"segment {name} has version {version}, and this release reads version"
                        f" {VERSION}: a newer release wrote it",
                        hint="upgrade this installation of Penstock",
                    )
                f.seek(frame)
                return self._decompressor.decompress(f.read(packed))
        except (OSError, zstandard.ZstdError) as e:
            raise Unreachable(f"pages cannot be read from {name}: {e}", hint=self.repair) from e

    def _version(self, name: str) -> int:
        with contextlib.suppress(OSError), open(self.directory / name, "rb") as f:
            return version_in(f.read(_HEADER.size))
        return VERSION

    def sizes_in(self, tx: Tx, pages: Sequence[str]) -> dict[str, int]:
        """Return the body sizes of those of `pages` that are stored."""
        found = {
            page: tx.execute("SELECT size FROM page WHERE hash=?", (raw(page),)).get
            for page in pages
        }
        return {page: size for page, size in found.items() if size is not None}

    def totals_in(self, tx: Tx) -> tuple[int, int]:
        """Return the number of stored pages and the bytes of their segments."""
        return int(tx.execute("SELECT count(*) FROM page").get), sum(self._sizes(tx).values())

    def problems_in(self, tx: Tx) -> list[str]:
        deleted = [
            name
            for (name,) in tx.execute("SELECT name FROM segment ORDER BY id")
            if not (self.directory / name).exists()
        ]
        return [f"{name} is missing in {self.directory}" for name in deleted]

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
        removed = 0
        if older_than is not None:
            query = (
                "SELECT p.hash FROM segment s JOIN page p ON p.segment=s.id WHERE s.made<?1"
                " AND p.seen<?1 LIMIT 20000"
            )
            old = [h.hex() for (h,) in tx.execute(query, (older_than,))]
            removed += self._remove(tx, old, keep)
        if max_bytes is not None:
            sizes = self._sizes(tx)
            total = sum(sizes.values())
            for segment in sorted(sizes):
                if total <= max_bytes:
                    break
                pages = [
                    h.hex()
                    for (h,) in tx.execute("SELECT hash FROM page WHERE segment=?", (segment,))
                ]
                removed += self._remove(tx, pages, keep)
                left = sum(packed for _, packed in self._frames(tx, segment))
                if left < sizes[segment] * LIVE_SHARE:  # otherwise the segment is not rewritten
                    total -= sizes[segment] - left
        return removed, self._reclaim(tx)

    def _remove(
        self, tx: Tx, pages: Sequence[str], keep: Callable[[Sequence[str]], set[str]]
    ) -> int:
        wanted = keep(pages)
        deleted = [h for h in pages if h not in wanted]
        tx.executemany("DELETE FROM page WHERE hash=?", [(bytes.fromhex(h),) for h in deleted])
        self._forget(deleted)
        return len(deleted)

    def _frames(self, tx: Tx, segment: int) -> list[tuple[int, int]]:
        """Return (position, size) of the frames of a segment that have pages."""
        return tx.execute(
            "SELECT DISTINCT frame, packed FROM page WHERE segment=? ORDER BY frame", (segment,)
        ).fetchall()

    def _sizes(self, tx: Tx) -> dict[int, int]:
        sizes = {}
        for id_, name in tx.execute("SELECT id, name FROM segment").fetchall():
            with contextlib.suppress(OSError):
                sizes[id_] = (self.directory / name).stat().st_size
        return sizes

    def _reclaim(self, tx: Tx) -> int:
        """Mark segments without pages for deletion. Return the bytes that this frees.

        Move the remaining pages out of mostly empty segments, at most MOVE_BYTES in one call.
        """
        freed, budget = 0, MOVE_BYTES
        for id_, size in self._sizes(tx).items():
            name = tx.execute("SELECT name FROM segment WHERE id=?", (id_,)).get
            if self._in_use(name):
                continue
            if self._version(name) > VERSION:
                continue  # a newer release moves its pages
            frames = self._frames(tx, id_)
            if frames and sum(packed for _, packed in frames) >= size * LIVE_SHARE:
                continue
            moved = 0
            # A damaged segment stays unchanged. Reading its pages raises the error.
            with contextlib.suppress(Unreachable):
                for frame, packed in frames:
                    if budget <= 0:
                        break
                    budget -= packed
                    self._move(tx, id_, name, frame, packed)
                    moved += 1
            if moved == len(frames):
                tx.execute("DELETE FROM segment WHERE id=?", (id_,))
                tx.execute("INSERT INTO doomed VALUES(?) ON CONFLICT(name) DO NOTHING", (name,))
                freed += size
        return freed

    def _move(self, tx: Tx, segment: int, name: str, frame: int, packed: int) -> None:
        """Copy the remaining pages of a frame to the current segment."""
        rows = tx.execute(
            "SELECT hash, start, size, seen FROM page WHERE segment=? AND frame=?", (segment, frame)
        ).fetchall()
        bodies = self._frame(name, frame, packed)
        pages = [(h.hex(), bodies[start : start + size]) for h, start, size, _ in rows]
        for h, body in pages:
            self._verified(h, body, name)
        self._forget(h for h, _ in pages)
        tx.execute("DELETE FROM page WHERE segment=? AND frame=?", (segment, frame))
        self.index_in(tx, self.stage(pages))
        tx.executemany("UPDATE page SET seen=? WHERE hash=?", [(seen, h) for h, _, _, seen in rows])
        # Retention by age looks only at segments that are old enough.
        oldest = min(seen for *_, seen in rows)
        tx.execute(
            "UPDATE segment SET made=? WHERE name=? AND made>?", (oldest, self._name, oldest)
        )

    def sweep_in(self, tx: Tx) -> None:
        """Delete segment files that an earlier, committed transaction marked.

        Deleting them in that transaction would lose them on rollback.
        """
        for (name,) in tx.execute("SELECT name FROM doomed").fetchall():
            for suffix in ("", ".lock"):
                with contextlib.suppress(FileNotFoundError):
                    (self.directory / (name + suffix)).unlink()
        tx.execute("DELETE FROM doomed")
        named = {name for (name,) in tx.execute("SELECT name FROM segment")}
        # Also delete segments of processes that were killed before their first commit.
        for path in self.directory.glob("*.seg"):
            with contextlib.suppress(FileNotFoundError):
                if (
                    path.name not in named
                    and path.stat().st_mtime < self.clock.now() - ORPHANED
                    and not self._in_use(path.name)
                ):
                    path.unlink()
                    path.with_name(path.name + ".lock").unlink()

    def _in_use(self, name: str) -> bool:
        if name == self._name:
            return True
        lock = FileLock(self.directory / (name + ".lock"))
        if not lock.try_acquire():
            return True
        lock.release()
        return False

    def _close_segment(self) -> None:
        if self._file >= 0:
            with self._closing:
                # Pages that are staged here may be committed later. Then this descriptor is closed.
                if self.db.durability == "full":
                    os.fdatasync(self._file)
                os.close(self._file)
                self._file = -1
        if self._last_lock is not None:
            self._last_lock.release()
        self._last_lock, self._lock = self._lock, None

    def close(self) -> None:
        self._disk.shutdown()
        for _ in range(2):
            self._close_segment()


def open_pages(url: str, context: Context) -> SegmentStore:
    """Open the page store of a `file:DIR` URL.

    Its index is in the ledger's store, so that a page and its event are committed together.
    """
    directory = Path(url.removeprefix("file:"))
    return SegmentStore(
        context.store(context.config.ledger.url), directory, context.clock, writer=context.worker
    )
