"""Thread that reads one replication slot and decodes its changes into chunks of findings.

It confirms accepted chunks to the server, and it limits how much WAL the replication slot holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import psycopg2

from penstock.errors import SourceDown
from penstock.ports import Finding
from penstock.sources.base import BATCH
from penstock.sources.postgres import slot as slots
from penstock.sources.postgres.findings import Findings
from penstock.sources.postgres.lag_limit import WalLimit
from penstock.sources.postgres.pgoutput import (
    BadChange,
    Begin,
    Commit,
    Decoder,
    Delete,
    Insert,
    Truncate,
    Update,
    lsn_text,
)
from penstock.sources.postgres.position import ALL_CHANGES, Cursor, Part, Reading
from penstock.sources.postgres.settings import CdcSettings, identifier
from penstock.sources.postgres.snapshot import Included, Snapshot, upto_now
from penstock.sources.postgres.spill import Frame, Spill

log = logging.getLogger("penstock")
MAX_QUEUED_CHUNKS = 2  # in addition to the chunk that the source is accepting
# Bytes of changes after which a chunk is finished, even if it has few findings.
MAX_CHUNK_BYTES = 8 << 20
# Seconds for which an unfinished chunk waits for more changes of a transaction still arriving.
LINGER = 0.2
# Seconds between two checks of the slot's state.
SLOT_CHECK_INTERVAL = 1.0
# The same while the queue is full: only then can this reader make the server keep more WAL.
FULL_CHECK_INTERVAL = 0.25
# Checks in a row that find the queue full and unread before reading may stop. Elapsed time would
# also count a suspended machine.
FULL_CHECKS = 12
# Seconds between two heartbeats to an idle server, which drops a silent reader after 60 s.
HEARTBEAT_INTERVAL = 1.0
# A slot may still belong to a killed connection for this many seconds, and for this many checks.
SLOT_RELEASE_TIMEOUT = 2.0
SLOT_RELEASE_CHECKS = 20


class SlotReleaseDeadline:
    """Time limit for the server to release a slot.

    It ends only after enough checks: a machine that was suspended has lost time without checking.
    """

    def __init__(self) -> None:
        self._until = time.monotonic() + SLOT_RELEASE_TIMEOUT
        self._left = SLOT_RELEASE_CHECKS

    def may_wait(self) -> bool:
        self._left -= 1
        return self._left > 0 or time.monotonic() < self._until


class Chunk:
    """Findings in order, with the cursor and the confirmation that follow their acceptance."""

    def __init__(
        self,
        findings: list[Finding],
        cursor: Cursor | None,
        *,
        committed_at: float | None,
        confirm: int = 0,
        spill_end: int = 0,
    ) -> None:
        self.findings, self.cursor, self.committed_at = findings, cursor, committed_at
        self.confirm = confirm  # the server may discard WAL up to this LSN
        self.spill_end = spill_end  # end of its frame in the spill file, 0 if it has no frame


class ChangeStream:
    """Changes of one replication connection, from `start` to `stop`. `next` raises its errors."""

    def __init__(self, s: CdcSettings, cursor: Cursor | None, spill: Path) -> None:
        self._s, self._cursor = s, cursor
        self._spill_path = spill
        self._spill: Spill | None = None
        self._mutex = threading.Lock()
        self._queue: deque[Chunk] = deque()
        self._out: deque[Chunk] = deque()  # returned by `next` and not accepted yet
        self._accepted: deque[Chunk] = deque()  # accepted and not confirmed to the server yet
        self._error: BaseException | None = None
        self._stopping = False
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"penstock-{s.slot}", daemon=True)
        self._opened: list[Any] = []
        self.backlog: int | None = None
        self.caught_up = False
        # Used by the thread only, except `_taken`.
        self._found: list[Finding] = []
        self._bytes = 0
        self._chunk_started_at = 0.0
        self._begin: Begin | None = None  # of the transaction that is arriving
        self._last = Begin(0, 0.0, 0)  # of the last finding's transaction
        self._index = 0  # of the next change in its transaction
        self._confirm = 0  # `confirm` of the next chunk
        # LSN up to which the server may discard WAL, and the part of it that was reported.
        self._flushed = self._reported = 0
        self._system = ""
        self._start = (0, 0)  # (lsn, done) of the ledger's cursor at the start
        self._parts: list[Part] = []
        self._server_lsn = 0  # at the last check of the slot
        self._dropping = False
        self._limit = WalLimit(s)
        self._checked_at = self._reported_at = 0.0
        # Number of chunks that `next` has returned, the same number at the last check, and the
        # number of checks in a row that found the queue full and no chunk taken.
        self._taken = self._taken_before = self._full_checks = 0

    # -- on the loop -------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def next(self, timeout: float) -> Chunk | None:
        """Return the next chunk, or None if no chunk arrives before the timeout.

        Raises the error that ended the thread when no chunk is left in the queue.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while True:
                    with self._mutex:
                        if self._queue:
                            chunk = self._queue.popleft()
                            self._out.append(chunk)
                            self._taken += 1
                            return chunk
                        if self._error is not None:
                            raise self._error
                        self._changed.clear()
                    await self._changed.wait()
        return None

    def accept(self, chunk: Chunk) -> None:
        """Mark a chunk as accepted. Its findings and its cursor are in the ledger."""
        with self._mutex:
            self._out.remove(chunk)
            self._accepted.append(chunk)
        self._wake_thread()

    def stop(self) -> None:
        """Stop the thread. Blocks until it has ended, for at most about 10 seconds."""
        self._stopping = True
        self._wake_thread()
        self._thread.join(1)
        for _ in range(9):
            if not self._thread.is_alive():
                break
            # Creating a slot waits for open transactions of other clients. Cancel repeatedly,
            # because the thread may send that command only after the first cancel.
            for connection in list(self._opened):
                with contextlib.suppress(psycopg2.Error):
                    connection.cancel()
            self._thread.join(1)
        # A thread that is still alive may read the pipe, so the pipe stays open then.
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake_thread(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read(self._opened)
        except psycopg2.Error as e:
            self._fail(slots.read_error(self._s, e))
        except BadChange as e:
            self._fail(
                SourceDown(
                    f"source {self._s.source}: {e}",
                    hint="this is a bug in Penstock, or the slot uses another output plugin: "
                    "please report it",
                )
            )
        except OSError as e:
            self._fail(
                SourceDown(
                    f"source {self._s.source}: {e.strerror or e} ({self._spill_path})",
                    hint="check the free space and the write permission of the state directory",
                )
            )
        except BaseException as e:
            self._fail(e)  # the next call of `next` raises it
        finally:
            for connection in self._opened:
                with contextlib.suppress(psycopg2.Error):
                    connection.close()
            if self._spill is not None:
                with contextlib.suppress(OSError):
                    self._confirm_accepted(None)
                self._spill.close()

    def _fail(self, error: BaseException) -> None:
        with self._mutex:
            self._error = error
        self._notify_loop()

    def _read(self, opened: list[Any]) -> None:
        s = self._s
        session = slots.connect(s)
        opened.append(session)
        slots.check(s, session)
        replication = slots.connect(s, replication=True)
        opened.append(replication)
        self._system, database = slots.identify(replication)
        self._spill = Spill(self._spill_path, s.max_spill)
        try:
            exported = self._prepare(session, replication, database)
        except SourceDown:
            # Findings in the spill file stay valid without the slot.
            self._drain()
            raise
        assert self._cursor is not None
        self._start, self._parts = self._cursor.position, self._cursor.parts
        if self._cursor.reading is not None and not self._snapshot(
            self._cursor, self._cursor.reading, exported, opened
        ):
            return
        findings = Findings(
            s, self._system, Included(s, self._parts, session) if self._parts else None
        )
        stream = self._start_replication(replication, self._start[0])
        try:
            self._stream(
                session,
                replication,
                stream,
                max(self._start, self._spill.last() or (0, 0)),
                findings,
            )
        except SourceDown:
            if self._dropping:
                replication.close()
                self._drop(session)
            raise

    def _prepare(self, session: Any, replication: Any, database: str) -> str | None:
        """Check the slot and the publication. On a first start, create them and set the cursor.

        Return the name of the snapshot that a new slot exported, or None. Raises SourceDown if the
        source has a cursor and its slot is missing, because changes are lost.
        """
        s, exported = self._s, None
        slot = slots.find(s, session)
        if self._cursor is not None:
            if self._cursor.system != self._system:
                raise SourceDown(
                    f"source {s.source}: its position {lsn_text(self._cursor.lsn)} belongs to "
                    f"another server than {s.address.label}",
                    hint="change the URL back to the first server, or run "
                    f"`penstock sources reset {s.source} --to start`",
                )
            if slot is None:
                raise SourceDown(
                    f"source {s.source}: slot {s.slot} does not exist any longer, so changes after "
                    f"{lsn_text(self._cursor.lsn)} are lost",
                    hint=f"run `penstock sources reset {s.source} --to start` to create a new slot "
                    "(with snapshot = true the table is read again)",
                )
            slots.check_usable(s, slot, database)
            # Otherwise new changes with an LSN below the cursor would be skipped as already read.
            if self._cursor.lsn > slot.current_lsn:
                raise SourceDown(
                    f"source {s.source}: its position {lsn_text(self._cursor.lsn)} is ahead of "
                    f"{s.address.label}, which is at {lsn_text(slot.current_lsn)}:"
                    " the server was restored from a backup, or replaced by another server",
                    hint=f"run `penstock sources reset {s.source} --to start` (or `--to now`)",
                )
            slots.ensure_publication(s, session)
            return None
        # Before the slot: a slot cannot use a publication that was created after it.
        slots.ensure_publication(s, session)
        if slot is None:
            slots.warn_if_unlimited(s, session)
            if s.snapshot:
                exported = slots.create_exporting(s, replication)
            else:
                slots.create(s, session)
            slot = slots.find(s, session)
            if slot is None:
                raise SourceDown(
                    f"source {s.source}: slot {s.slot} was dropped while it was created",
                    hint="it is retried automatically",
                    after=1.0,
                )
        slots.check_usable(s, slot, database)
        self._cursor = Cursor(
            self._system, slot.confirmed, 0, Reading(0, None) if s.snapshot else None
        )
        # Once the ledger has this cursor, a missing slot is reported as lost changes and is not
        # taken for a first start.
        self._put(Chunk([], self._cursor, committed_at=None))
        return exported

    def _snapshot(
        self, cursor: Cursor, reading: Reading, exported: str | None, opened: list[Any]
    ) -> bool:
        """Queue the rows that the tables already have. Return False if reading was stopped."""
        connection = slots.connect(self._s)
        opened.append(connection)
        snapshot = Snapshot(self._s, connection, exported)
        part = snapshot.part(reading, upto_now(connection))
        if part is not None:
            self._parts = [*self._parts, part]
        for findings, following in snapshot.batches(reading, self._system):
            self._put(
                Chunk(
                    findings,
                    Cursor(self._system, *cursor.position, following, self._parts),
                    committed_at=None,
                )
            )
            while self._is_full():
                if self._stopping:
                    return False
                self._pause(HEARTBEAT_INTERVAL)
        connection.close()
        return not self._stopping

    def _drain(self) -> None:
        """Queue the findings of the spill file, and wait until they are accepted."""
        assert self._spill is not None
        while self._spill.active and not self._stopping:
            self._confirm_accepted(None)
            self._refill()
            self._pause(HEARTBEAT_INTERVAL)

    def _drop(self, session: Any) -> None:
        """Drop the slot when the server has noticed that its reader is disconnected."""
        deadline = SlotReleaseDeadline()
        while (
            (slot := slots.find(self._s, session)) is not None
            and slot.active_pid is not None
            and deadline.may_wait()
        ):
            self._pause(0.05)
        slots.drop(self._s, session)

    def _start_replication(self, replication: Any, lsn: int) -> Any:
        """Start replication. Retry while the server still holds a killed reader's connection."""
        options = {"proto_version": "1", "publication_names": identifier(self._s.publication)}
        deadline = SlotReleaseDeadline()
        while True:
            stream = replication.cursor()
            try:
                stream.start_replication(
                    slot_name=self._s.slot,
                    start_lsn=lsn,
                    options=options,
                    decode=False,
                    status_interval=10,
                )
                return stream
            except psycopg2.errors.ObjectInUse:
                if self._stopping or not deadline.may_wait():
                    raise
                self._pause(0.05)

    def _stream(
        self,
        session: Any,
        replication: Any,
        stream: Any,
        start: tuple[int, int],
        findings: Findings,
    ) -> None:
        decoder, spill = Decoder(), self._spill
        assert spill is not None
        while not self._stopping:
            self._confirm_accepted(stream)
            self._refill()
            self._check_slot(session, stream)
            if self._is_full() and (not spill.active or spill.full):
                self._send_heartbeat(stream)
                self._pause(FULL_CHECK_INTERVAL)
                continue
            for _ in range(BATCH):
                message = stream.read_message()
                if message is None or self._process(
                    decoder.decode(message.payload), len(message.payload), start, findings
                ):
                    break
            if message is not None:
                continue
            if self._found and (
                self._begin is None or time.monotonic() - self._chunk_started_at > LINGER
            ):
                self._finish_chunk()
                continue
            self._send_heartbeat(stream)
            select.select(
                [replication, self._wake_read],
                [],
                [],
                LINGER if self._found else HEARTBEAT_INTERVAL,
            )
        self._confirm_accepted(stream)

    def _process(self, change: Any, size: int, start: tuple[int, int], findings: Findings) -> bool:
        """Process one message of the server. Return True if it finished a chunk."""
        if isinstance(change, Begin):
            self._begin, self._index = change, 0
        elif isinstance(change, Commit):
            self._begin = None
            if not self._found:
                self._confirm_after_previous(change.end)
            else:
                self._confirm = change.end
        elif isinstance(change, Insert | Update | Delete | Truncate):
            begin = self._begin
            if begin is None:
                raise BadChange("a change came outside of a transaction")
            # The index counts all changes of the publication, including those skipped here.
            index, self._index = self._index, self._index + 1
            if (begin.commit, index) < start or isinstance(change, Delete | Truncate):
                return False
            finding = findings.of(begin, index, change)
            if finding is not None:
                if not self._found:
                    self._chunk_started_at = time.monotonic()
                self._found.append(finding)
                self._last = begin
                self._bytes += size
                if len(self._found) >= BATCH or self._bytes >= MAX_CHUNK_BYTES:
                    self._finish_chunk()
                    return True
        return False

    # -- queueing ----------------------------------------------------------------------------------

    def _finish_chunk(self) -> None:
        """Make a chunk of the collected findings, and queue it or append it to the spill file."""
        place = (
            (self._begin.commit, self._index)
            if self._begin is not None
            else (self._last.commit, ALL_CHANGES)
        )
        chunk = Chunk(
            self._found,
            self._cursor_at(place),
            committed_at=self._last.at,
            confirm=self._confirm,
        )
        self._found, self._bytes, self._confirm = [], 0, 0
        # An active spill file has earlier findings, so this chunk is appended to it.
        if self._spill is not None and self._spill.active:
            self._spill.append(Frame(chunk.findings, *place, chunk.committed_at))
            self._spill.sync()
            self._may_discard(chunk.confirm)
        else:
            self._put(chunk)

    def _cursor_at(self, place: tuple[int, int]) -> Cursor:
        return Cursor(
            self._system,
            *place,
            None,
            self._parts if any(part.upto >= place[0] for part in self._parts) else [],
        )

    def _put(self, chunk: Chunk) -> None:
        with self._mutex:
            self._queue.append(chunk)
        self._notify_loop()

    def _notify_loop(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so `next` is not called again
            self._loop.call_soon_threadsafe(self._changed.set)

    def _is_full(self) -> bool:
        with self._mutex:
            return len(self._queue) >= MAX_QUEUED_CHUNKS

    def _refill(self) -> None:
        """Queue chunks from the spill file while the queue has room."""
        spill = self._spill
        while spill is not None and spill.unread and not self._is_full():
            found = spill.next()
            if found is None:
                return
            frame, end = found
            place = frame.lsn, frame.done
            # Another machine may have read further than this file. The cursor never goes back,
            # and intake ignores a finding with a known id.
            self._put(
                Chunk(
                    frame.findings,
                    self._cursor_at(place) if place > self._start else None,
                    committed_at=frame.at,
                    spill_end=end,
                )
            )

    # -- confirming --------------------------------------------------------------------------------

    def _confirm_after_previous(self, end: int) -> None:
        """Confirm a transaction without further findings together with the chunk before it."""
        # An active spill file also holds all queued findings.
        spilled = self._spill is not None and self._spill.active
        with self._mutex:
            if (self._queue or self._out or self._accepted) and not spilled:
                last = (
                    self._queue[-1]
                    if self._queue
                    else self._out[-1]
                    if self._out
                    else self._accepted[-1]
                )
                last.confirm = max(last.confirm, end)
                return
        self._may_discard(end)

    def _confirm_accepted(self, stream: Any) -> None:
        """Confirm accepted chunks to the server and in the spill file."""
        self._empty_wake_pipe()
        while True:
            with self._mutex:
                chunk = self._accepted.popleft() if self._accepted else None
            if chunk is None:
                break
            if chunk.spill_end and self._spill is not None:
                self._spill.accept(chunk.spill_end)
            self._may_discard(chunk.confirm)
        if self._flushed > self._reported and stream is not None:
            stream.send_feedback(
                write_lsn=self._flushed,
                flush_lsn=self._flushed,
                apply_lsn=self._flushed,
                force=True,
            )
            self._reported = self._flushed
            self._reported_at = time.monotonic()

    def _may_discard(self, lsn: int) -> None:
        self._flushed = max(self._flushed, lsn)

    def _send_heartbeat(self, stream: Any) -> None:
        """Send a heartbeat to the server if the last report is old enough.

        If all received changes are confirmed, psycopg2 adds the server's current position to the
        heartbeat. So an idle slot holds no WAL.
        """
        now = time.monotonic()
        if now - self._reported_at >= HEARTBEAT_INTERVAL:
            self._reported_at = now
            stream.send_feedback(reply=True, force=True)

    def _pause(self, seconds: float) -> None:
        """Wait until a chunk is accepted or reading is stopped, at most `seconds`."""
        select.select([self._wake_read], [], [], seconds)
        self._empty_wake_pipe()

    def _empty_wake_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    # -- the WAL limit -----------------------------------------------------------------------------

    def _check_slot(self, session: Any, stream: Any) -> None:
        """Check the slot at its interval, and apply the WAL limit."""
        now = time.monotonic()
        interval = FULL_CHECK_INTERVAL if self._is_full() else SLOT_CHECK_INTERVAL
        if now - self._checked_at < interval:
            return
        self._checked_at = now
        slot = slots.find(self._s, session)
        if slot is None:
            raise SourceDown(
                f"source {self._s.source}: slot {self._s.slot} does not exist any longer",
                hint="another client dropped it while it was read",
                after=1.0,
            )
        self.caught_up = (
            0 < self._server_lsn <= max(stream.wal_end, slot.confirmed)
            and self._begin is None
            and not self._found
        )
        self._server_lsn = slot.current_lsn
        self.backlog = slot.backlog
        assert self._spill is not None
        full, taken = self._is_full(), self._taken
        self._full_checks = self._full_checks + 1 if full and taken == self._taken_before else 0
        self._taken_before = taken
        verdict = self._limit.check(
            slot, self._spill, full=full, stays_full=self._full_checks >= FULL_CHECKS
        )
        if verdict == "spill":
            self._start_spilling()
        elif verdict == "end":
            self._dropping = self._s.on_limit == "drop"
            raise self._limit.exceeded(slot)

    def _start_spilling(self) -> None:
        """Start the spill file with the chunks in memory.

        Then the file alone has every change whose WAL the server may discard.
        """
        spill = self._spill
        assert spill is not None
        with self._mutex:
            if any(
                chunk.cursor is not None and chunk.cursor.reading is not None
                for chunk in (*self._out, *self._queue)
            ):
                # A frame has no field for `reading`, so rows of the snapshot are not spilled.
                return
        log.warning(
            "source %s: the queue is full, so changes are written to the spill file %s",
            self._s.source,
            spill.path,
        )
        with self._mutex:
            confirm = 0
            for chunk in (*self._out, *self._queue):
                if chunk.cursor is not None:
                    chunk.spill_end = spill.append(
                        Frame(
                            chunk.findings,
                            chunk.cursor.lsn,
                            chunk.cursor.done,
                            chunk.committed_at,
                        ),
                        queued=True,
                    )
                confirm = max(confirm, chunk.confirm)
        spill.sync()
        self._may_discard(confirm)
