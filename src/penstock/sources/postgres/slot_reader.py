"""Thread that reads one replication slot and decodes its changes into chunks of findings.

It confirms accepted chunks to the server, and it limits how much WAL the replication slot holds.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from pathlib import Path
from typing import Any

import psycopg2

from penstock.errors import SourceDown
from penstock.ports import Finding
from penstock.rules.json_limits import memory_of
from penstock.sources.base import BATCH
from penstock.sources.postgres import slot as slots
from penstock.sources.postgres.chunks import Chunk, ChunkQueue
from penstock.sources.postgres.pgoutput import (
    BadChange,
    Begin,
    Commit,
    Decoder,
    Delete,
    Insert,
    Truncate,
    Update,
)
from penstock.sources.postgres.position import ALL_CHANGES, Cursor, Part, Reading
from penstock.sources.postgres.settings import CdcSettings, identifier
from penstock.sources.postgres.snapshot import Findings, Included, Snapshot
from penstock.sources.postgres.spill import Frame, Spill, WalLimit

log = logging.getLogger("penstock")
# Bytes of memory after which a chunk is finished, even if it has few findings.
MAX_CHUNK_BYTES = 8 << 20
# Seconds for which an unfinished chunk waits for more changes of a transaction still arriving.
LINGER = 0.2
# Seconds between two checks of the slot's state.
SLOT_CHECK_INTERVAL = 1.0
# The same while the queue is full: only then can this reader make the server keep more WAL.
FULL_CHECK_INTERVAL = 0.25
# Seconds between two heartbeats to an idle server, which drops a silent reader after 60 s.
HEARTBEAT_INTERVAL = 1.0
# A slot may still belong to a killed connection for this many checks, about 2 s. Elapsed time
# would also count a suspended machine.
SLOT_RELEASE_CHECKS = 40
SLOT_RELEASE_INTERVAL = 0.05  # seconds between two of these checks


class SlotReader:
    """Reader of one slot, from `start` to `stop`. It puts its chunks and its error into `queue`."""

    def __init__(self, s: CdcSettings, cursor: Cursor | None, spill: Path) -> None:
        self._s, self._cursor, self._spill_path = s, cursor, spill
        self.queue = ChunkQueue()
        self._thread = threading.Thread(target=self._run, name=f"penstock-{s.slot}", daemon=True)
        self._opened: list[Any] = []  # connections
        self.backlog: int | None = None
        self.caught_up = False
        # Used by the thread only.
        self._spill: Spill
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

    # -- on the loop -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Blocks until it has ended, for at most about 10 seconds."""
        self.queue.stop()
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
            self.queue.close()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read()
        except psycopg2.Error as e:
            self.queue.fail(slots.read_error(self._s, e))
        except BadChange as e:
            self.queue.fail(
                SourceDown(
                    f"source {self._s.source}: {e}",
                    hint="this is a bug in Penstock, or the slot uses another output plugin: "
                    "please report it",
                )
            )
        except OSError as e:
            self.queue.fail(
                SourceDown(
                    f"source {self._s.source}: {e.strerror or e} ({self._spill_path})",
                    hint="check the free space and the write permission of the state directory",
                )
            )
        except BaseException as e:
            self.queue.fail(e)  # the next call of `queue.next` raises it
        finally:
            for connection in self._opened:
                with contextlib.suppress(psycopg2.Error):
                    connection.close()

    def _connect(self, *, replication: bool = False) -> Any:
        connection = slots.connect(self._s, replication=replication)
        self._opened.append(connection)
        return connection

    def _read(self) -> None:
        session = self._connect()
        slots.check(self._s, session)
        replication = self._connect(replication=True)
        self._system, database = slots.identify(replication)
        self._spill = Spill(self._spill_path, self._s.max_spill)
        try:
            self._read_slot(session, replication, database)
        finally:
            with contextlib.suppress(OSError):
                self._confirm_accepted(None)
            self._spill.close()

    def _read_slot(self, session: Any, replication: Any, database: str) -> None:
        s, cursor, exported = self._s, self._cursor, None
        try:
            if cursor is None:
                cursor, exported = slots.first_start(
                    s, session, replication, self._system, database
                )
                # Once the ledger has this cursor, a missing slot is reported as lost changes and
                # is not taken for a first start.
                self.queue.put(Chunk([], cursor))
            else:
                slots.check_cursor(s, session, cursor, self._system, database)
        except SourceDown:
            # Findings in the spill file stay valid without the slot.
            self._drain()
            raise
        self._start, self._parts = cursor.position, cursor.parts
        if cursor.reading is not None and not self._snapshot(cursor, cursor.reading, exported):
            return
        findings = Findings(
            s, self._system, Included(s, self._parts, session) if self._parts else None
        )
        stream = self._start_replication(replication, self._start[0])
        try:
            self._stream(session, replication, stream, findings)
        except SourceDown:
            if self._dropping:
                replication.close()
                self._drop(session)
            raise

    def _snapshot(self, cursor: Cursor, reading: Reading, exported: str | None) -> bool:
        """Queue the rows that the tables already have. Return False if reading was stopped."""
        connection = self._connect()
        snapshot = Snapshot(self._s, connection, exported)
        self._parts = [*self._parts, *snapshot.parts(reading)]
        for findings, following in snapshot.batches(reading, self._system):
            self.queue.put(
                Chunk(findings, Cursor(self._system, *cursor.position, following, self._parts))
            )
            while self.queue.is_full():
                if self.queue.stopping:
                    return False
                self.queue.pause(HEARTBEAT_INTERVAL)
        connection.close()
        return not self.queue.stopping

    def _drain(self) -> None:
        """Queue the findings of the spill file, and wait until they are accepted."""
        while self._spill.active and not self.queue.stopping:
            self._confirm_accepted(None)
            self._refill()
            self.queue.pause(HEARTBEAT_INTERVAL)

    def _drop(self, session: Any) -> None:
        """Drop the slot when the server has noticed that its reader is disconnected."""
        for _ in range(SLOT_RELEASE_CHECKS):
            slot = slots.find(self._s, session)
            if slot is None or slot.active_pid is None:
                break
            self.queue.pause(SLOT_RELEASE_INTERVAL)
        slots.drop(self._s, session)

    def _start_replication(self, replication: Any, lsn: int) -> Any:
        """Start replication. Retry while the server still holds a killed reader's connection."""
        options = {"proto_version": "1", "publication_names": identifier(self._s.publication)}
        checks_left = SLOT_RELEASE_CHECKS
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
                checks_left -= 1
                if self.queue.stopping or not checks_left:
                    raise
                self.queue.pause(SLOT_RELEASE_INTERVAL)

    def _stream(self, session: Any, replication: Any, stream: Any, findings: Findings) -> None:
        decoder, spill = Decoder(), self._spill
        start = max(self._start, spill.last() or (0, 0))
        while not self.queue.stopping:
            self._confirm_accepted(stream)
            self._refill()
            self._check_slot(session, stream)
            if self.queue.is_full() and (not spill.active or spill.full):
                self._send_heartbeat(stream)
                self.queue.pause(FULL_CHECK_INTERVAL)
                continue
            for _ in range(BATCH):
                message = stream.read_message()
                if message is None or self._process(
                    decoder.decode(message.payload), memory_of(message.payload), start, findings
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
                [replication, self.queue.wake_pipe],
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
            if self._found:
                self._confirm = change.end
            elif self._spill.active or not self.queue.confirm_with_last(change.end):
                # A transaction without findings is confirmed with the chunk before it. An active
                # spill file also holds all queued findings.
                self._may_discard(change.end)
        elif isinstance(change, Insert | Update | Delete | Truncate):
            begin = self._begin
            if begin is None:
                raise BadChange("a change came outside of a transaction")
            # The index counts all changes of the publication, including those skipped here.
            index, self._index = self._index, self._index + 1
            if (begin.commit, index) < start or isinstance(change, Truncate):
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
        if self._spill.active:
            self._spill.append(Frame(chunk.findings, *place, chunk.committed_at))
            self._spill.sync()
            self._may_discard(chunk.confirm)
        else:
            self.queue.put(chunk)

    def _cursor_at(self, place: tuple[int, int]) -> Cursor:
        return Cursor(
            self._system,
            *place,
            None,
            self._parts if any(part.upto >= place[0] for part in self._parts) else [],
        )

    def _refill(self) -> None:
        """Queue chunks from the spill file while the queue has room."""
        while not self.queue.is_full() and (found := self._spill.next()) is not None:
            frame, end = found
            place = frame.lsn, frame.done
            # Another machine may have read further than this file. The cursor never goes back,
            # and intake ignores a finding with a known id.
            self.queue.put(
                Chunk(
                    frame.findings,
                    self._cursor_at(place) if place > self._start else None,
                    committed_at=frame.at,
                    spill_end=end,
                )
            )

    # -- confirming --------------------------------------------------------------------------------

    def _confirm_accepted(self, stream: Any) -> None:
        """Confirm accepted chunks to the server and in the spill file."""
        self.queue.empty_wake_pipe()
        while (chunk := self.queue.pop_accepted()) is not None:
            if chunk.spill_end:
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

    # -- the WAL limit -----------------------------------------------------------------------------

    def _check_slot(self, session: Any, stream: Any) -> None:
        """Check the slot at its interval, and apply the WAL limit."""
        now = time.monotonic()
        interval = FULL_CHECK_INTERVAL if self.queue.is_full() else SLOT_CHECK_INTERVAL
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
        verdict = self._limit.check(
            slot, self._spill, full=self.queue.is_full(), taken=self.queue.taken
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
        chunks = self.queue.not_accepted()
        if any(chunk.cursor is not None and chunk.cursor.reading is not None for chunk in chunks):
            # A frame has no field for `reading`, so rows of the snapshot are not spilled.
            return
        log.warning(
            "source %s: the queue is full, so changes are written to the spill file %s",
            self._s.source,
            self._spill.path,
        )
        for chunk in chunks:
            if chunk.cursor is not None:
                frame = Frame(chunk.findings, *chunk.cursor.position, chunk.committed_at)
                chunk.spill_end = self._spill.append(frame, queued=True)
        self._spill.sync()
        self._may_discard(max((chunk.confirm for chunk in chunks), default=0))
