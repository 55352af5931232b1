"""The thread that reads one slot: it decodes, hands over in bounded pieces, confirms what was
accepted, and guards how much log the slot holds.
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
from penstock.sources.postgres.lag_limit import Guard
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
from penstock.sources.postgres.position import WHOLE, Cursor, Part, Reading
from penstock.sources.postgres.settings import CdcSettings, identifier
from penstock.sources.postgres.snapshot import Included, Snapshot, upto_now
from penstock.sources.postgres.spill import Frame, Spill

log = logging.getLogger("penstock")
ROOM = 2  # pieces that wait, beside the one that is being accepted
PIECE = 8 << 20  # bytes of changes after which a piece is handed over, however few
LINGER = (
    0.2  # seconds that a piece of a transaction which is still arriving may wait for more of it
)
LOOK, LOOK_FULL = (
    1.0,
    0.25,
)  # seconds between two looks at the slot; with a full queue it is our doing what the server keeps
# looks at a full queue from which nothing was taken, until that is more than a moment; by a clock,
# a machine that slept would be guilty
STAYS_FULL = 12
# seconds between two words to the server while nothing happens; it gives up a silent reader after
# 60
TELL = 1.0
WAIT, TRIES = (
    2.0,
    20,
)  # seconds that a slot may still belong to a connection that was killed, and how often it was found so


class Patience:
    """Over when the time is, and it was asked often enough: a machine that slept in between has
    waited for nobody.
    """

    def __init__(self) -> None:
        self._until, self._left = time.monotonic() + WAIT, TRIES

    def lasts(self) -> bool:
        self._left -= 1
        return self._left > 0 or time.monotonic() < self._until


class Piece:
    """Some findings in order, and what their acceptance allows."""

    def __init__(
        self,
        findings: list[Finding],
        cursor: Cursor | None,
        *,
        at: float | None,
        confirm: int = 0,
        frame: int = 0,
    ) -> None:
        self.findings, self.cursor, self.at = findings, cursor, at
        self.confirm = confirm  # LSN that the server may forget up to
        self.frame = frame  # where it ends in the spill, if it is there too


class Feed:
    """One connection's life, from `start` to `stop`. What happens on the way is raised by `next`."""

    def __init__(self, s: CdcSettings, cursor: Cursor | None, spill: Path) -> None:
        self._s, self._cursor = s, cursor
        self._spill_path = spill
        self._spill: Spill | None = None
        self._mutex = threading.Lock()
        self._queue: deque[Piece] = deque()
        self._out: deque[Piece] = deque()  # handed over and not accepted, or not yet confirmed
        self._accepted: deque[Piece] = deque()
        self._error: BaseException | None = None
        self._stopping = False
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"penstock-{s.slot}", daemon=True)
        self._opened: list[Any] = []
        self.backlog: int | None = None
        self.caught_up = False
        # the thread's own
        self._found: list[Finding] = []
        self._bytes = 0
        self._begun = 0.0  # when the piece was begun
        self._begin: Begin | None = None  # of the transaction that is arriving
        self._last = Begin(0, 0.0, 0)  # of the last finding
        self._index = 0
        self._confirm = 0  # with the next piece
        self._flushed = self._said = 0  # what the server may forget, and what it was told of that
        self._system = ""
        self._from = (0, 0)  # where the ledger stood at the start
        self._parts: list[Part] = []
        self._here = 0  # the server's position at the last look
        self._dropping = False
        self._guard = Guard(s)
        self._looked = self._told = 0.0
        self._taken = self._seen_taken = self._full_looks = (
            0  # pieces; as the last look had it; looks since then that found the queue full
        )

    # -- on the loop -------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def next(self, patience: float) -> Piece | None:
        """None: nothing came in this time. Raises what ended the thread, after all that it still
        had.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while True:
                    with self._mutex:
                        if self._queue:
                            piece = self._queue.popleft()
                            self._out.append(piece)
                            self._taken += 1
                            return piece
                        if self._error is not None:
                            raise self._error
                        self._news.clear()
                    await self._news.wait()
        return None

    def accept(self, piece: Piece) -> None:
        """It is in the ledger, and so is its cursor."""
        with self._mutex:
            self._out.remove(piece)
            self._accepted.append(piece)
        self._wake_up()

    def stop(self) -> None:
        """Blocks until the connection is closed, or a little while."""
        self._stopping = True
        self._wake_up()
        self._thread.join(1)
        for _ in range(9):
            if not self._thread.is_alive():
                break
            for connection in list(
                self._opened
            ):  # a slot that is made waits for other people's transactions; more than once, for it may just be asked for
                with contextlib.suppress(psycopg2.Error):
                    connection.cancel()
            self._thread.join(1)
        if (
            not self._thread.is_alive()
        ):  # else the pipe stays open, for a thread that may still look at it
            os.close(self._woken)
            os.close(self._wake)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b".")

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read(self._opened)
        except psycopg2.Error as e:
            self._end(slots.trouble(self._s, e))
        except BadChange as e:
            self._end(
                SourceDown(
                    f"source {self._s.source}: {e}",
                    hint="this is a mistake in Penstock, or another plugin answers; please report it",
                )
            )
        except OSError as e:
            self._end(
                SourceDown(
                    f"source {self._s.source}: {e.strerror or e} ({self._spill_path})",
                    hint="is the state's disk full, or may it not be written?",
                )
            )
        except BaseException as e:
            self._end(e)  # for whoever asks next; there is nobody above a thread
        finally:
            for connection in self._opened:
                with contextlib.suppress(psycopg2.Error):
                    connection.close()
            if self._spill is not None:
                with contextlib.suppress(OSError):
                    self._settle(None)
                self._spill.close()

    def _end(self, error: BaseException) -> None:
        with self._mutex:
            self._error = error
        self._tell_loop()

    def _read(self, opened: list[Any]) -> None:
        s = self._s
        side = slots.connect(s)
        opened.append(side)
        slots.check(s, side)
        replication = slots.connect(s, replication=True)
        opened.append(replication)
        self._system, database = slots.system(replication)
        self._spill = Spill(self._spill_path, s.max_spill)
        try:
            exported = self._prepare(side, replication, database)
        except SourceDown:
            self._drain()  # a slot that is gone takes nothing with it that is here
            raise
        assert self._cursor is not None
        self._from, self._parts = self._cursor.place, self._cursor.parts
        if self._cursor.reading is not None and not self._snapshot(
            self._cursor, self._cursor.reading, exported, opened
        ):
            return
        findings = Findings(
            s, self._system, Included(s, self._parts, side) if self._parts else None
        )
        stream = self._started(replication, self._from[0])
        try:
            self._stream(
                side, replication, stream, max(self._from, self._spill.last() or (0, 0)), findings
            )
        except SourceDown:
            if self._dropping:
                replication.close()
                self._drop(side)
            raise

    def _prepare(self, side: Any, replication: Any, database: str) -> str | None:
        """Slot and publication are there, and the cursor says where to begin. The name of the
        slot's snapshot, where there is one.
        """
        s, exported = self._s, None
        slot = slots.look(s, side)
        if self._cursor is not None:
            if self._cursor.system != self._system:
                raise SourceDown(
                    f"source {s.source}: its position {lsn_text(self._cursor.lsn)} belongs to another server than {s.address.label}",
                    hint=f"point the URL at the first one, or penstock sources reset {s.source} --to start",
                )
            if slot is None:
                raise SourceDown(
                    f"source {s.source}: slot {s.slot} is gone, and with it what changed after {lsn_text(self._cursor.lsn)}",
                    hint=f"penstock sources reset {s.source} --to start makes a new one (with snapshot = true the table is read again)",
                )
            slots.refuse_unfit(s, slot, database)
            if (
                self._cursor.lsn > slot.here
            ):  # what it writes from now on would pass for what was read
                raise SourceDown(
                    f"source {s.source}: its position {lsn_text(self._cursor.lsn)} lies ahead of {s.address.label}, which stands at {lsn_text(slot.here)}:"
                    " the server was put back from a copy, or another took its place",
                    hint=f"penstock sources reset {s.source} --to start (or now)",
                )
            slots.ensure_publication(s, side)
            return None
        slots.ensure_publication(
            s, side
        )  # before the slot: a slot cannot see a publication that is younger than it
        if slot is None:
            slots.warn_of_no_limit(s, side)
            if s.snapshot:
                exported = slots.create_exporting(s, replication)
            else:
                slots.create(s, side)
            slot = slots.look(s, side)
            if slot is None:
                raise SourceDown(
                    f"source {s.source}: slot {s.slot} was dropped while it was made",
                    hint="it is tried again by itself",
                    after=1.0,
                )
        slots.refuse_unfit(s, slot, database)
        self._cursor = Cursor(
            self._system, slot.confirmed, 0, Reading(0, None) if s.snapshot else None
        )
        self._put(
            Piece([], self._cursor, at=None)
        )  # from now on a missing slot is a loss, and not a first start
        return exported

    def _snapshot(
        self, cursor: Cursor, reading: Reading, exported: str | None, opened: list[Any]
    ) -> bool:
        """The rows that are there. False: stopped."""
        connection = slots.connect(self._s)
        opened.append(connection)
        snapshot = Snapshot(self._s, connection, exported)
        part = snapshot.part(reading, upto_now(connection))
        if part is not None:
            self._parts = [*self._parts, part]
        for findings, following in snapshot.batches(reading, self._system):
            self._put(
                Piece(
                    findings, Cursor(self._system, *cursor.place, following, self._parts), at=None
                )
            )
            while self._is_full():
                if self._stopping:
                    return False
                self._pause(TELL)
        connection.close()
        return not self._stopping

    def _drain(self) -> None:
        assert self._spill is not None
        while self._spill.active and not self._stopping:
            self._settle(None)
            self._refill()
            self._pause(TELL)

    def _drop(self, side: Any) -> None:
        """As soon as the server has noticed that nobody reads it."""
        patience = Patience()
        while (
            (slot := slots.look(self._s, side)) is not None
            and slot.active_pid is not None
            and patience.lasts()
        ):
            self._pause(0.05)
        slots.drop(self._s, side)

    def _started(self, replication: Any, lsn: int) -> Any:
        """A killed reader's connection may live on for a moment."""
        options = {"proto_version": "1", "publication_names": identifier(self._s.publication)}
        patience = Patience()
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
                if self._stopping or not patience.lasts():
                    raise
                self._pause(0.05)

    def _stream(
        self, side: Any, replication: Any, stream: Any, start: tuple[int, int], findings: Findings
    ) -> None:
        decoder, spill = Decoder(), self._spill
        assert spill is not None
        while not self._stopping:
            self._settle(stream)
            self._refill()
            self._watch(side, stream)
            if self._is_full() and (not spill.active or spill.full):
                self._tell(stream)
                self._pause(LOOK_FULL)
                continue
            for _ in range(BATCH):
                message = stream.read_message()
                if message is None or self._take(
                    decoder.decode(message.payload), len(message.payload), start, findings
                ):
                    break
            if message is not None:
                continue
            if self._found and (self._begin is None or time.monotonic() - self._begun > LINGER):
                self._cut()
                continue
            self._tell(stream)
            select.select([replication, self._woken], [], [], LINGER if self._found else TELL)
        self._settle(stream)

    def _take(self, change: Any, size: int, start: tuple[int, int], findings: Findings) -> bool:
        """True: a piece was handed over."""
        if isinstance(change, Begin):
            self._begin, self._index = change, 0
        elif isinstance(change, Commit):
            self._begin = None
            if not self._found:
                self._follow(change.end)
            else:
                self._confirm = change.end
        elif isinstance(change, Insert | Update | Delete | Truncate):
            begin = self._begin
            if begin is None:
                raise BadChange("a change came outside of a transaction")
            index, self._index = (
                self._index,
                self._index + 1,
            )  # of all that the publication has: what we pass over counts too
            if (begin.commit, index) < start or isinstance(change, Delete | Truncate):
                return False
            finding = findings.of(begin, index, change)
            if finding is not None:
                if not self._found:
                    self._begun = time.monotonic()
                self._found.append(finding)
                self._last = begin
                self._bytes += size
                if len(self._found) >= BATCH or self._bytes >= PIECE:
                    self._cut()
                    return True
        return False

    # -- handing over ------------------------------------------------------------------------------

    def _cut(self) -> None:
        """What was found becomes a piece."""
        place = (
            (self._begin.commit, self._index)
            if self._begin is not None
            else (self._last.commit, WHOLE)
        )
        piece = Piece(self._found, self._at(place), at=self._last.at, confirm=self._confirm)
        self._found, self._bytes, self._confirm = [], 0, 0
        if self._spill is not None and self._spill.active:  # behind what is there already
            self._spill.append(Frame(piece.findings, *place, piece.at))
            self._spill.sync()
            self._confirmed(piece.confirm)
        else:
            self._put(piece)

    def _at(self, place: tuple[int, int]) -> Cursor:
        return Cursor(
            self._system,
            *place,
            None,
            self._parts if any(part.upto >= place[0] for part in self._parts) else [],
        )

    def _put(self, piece: Piece) -> None:
        with self._mutex:
            self._queue.append(piece)
        self._tell_loop()

    def _tell_loop(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._news.set)

    def _is_full(self) -> bool:
        with self._mutex:
            return len(self._queue) >= ROOM

    def _refill(self) -> None:
        spill = self._spill
        while spill is not None and spill.unread and not self._is_full():
            found = spill.next()
            if found is None:
                return
            frame, end = found
            place = frame.lsn, frame.done
            # Another machine may have read on meanwhile: the position never goes back, and a
            # repeated id is known.
            self._put(
                Piece(
                    frame.findings,
                    self._at(place) if place > self._from else None,
                    at=frame.at,
                    frame=end,
                )
            )

    # -- confirming --------------------------------------------------------------------------------

    def _follow(self, end: int) -> None:
        """A transaction with nothing (more) for us: confirmed with what came before it."""
        spilled = (
            self._spill is not None and self._spill.active
        )  # then all that waits is in the file
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
        self._confirmed(end)

    def _settle(self, stream: Any) -> None:
        self._awake()
        while True:
            with self._mutex:
                piece = self._accepted.popleft() if self._accepted else None
            if piece is None:
                break
            if piece.frame and self._spill is not None:
                self._spill.accept(piece.frame)
            self._confirmed(piece.confirm)
        if self._flushed > self._said and stream is not None:
            stream.send_feedback(
                write_lsn=self._flushed,
                flush_lsn=self._flushed,
                apply_lsn=self._flushed,
                force=True,
            )
            self._said = self._flushed
            self._told = time.monotonic()

    def _confirmed(self, lsn: int) -> None:
        self._flushed = max(self._flushed, lsn)

    def _tell(self, stream: Any) -> None:
        """We are alive. psycopg2 puts the server's own position into it where all that came is
        confirmed, so an idle slot holds nothing.
        """
        now = time.monotonic()
        if now - self._told >= TELL:
            self._told = now
            stream.send_feedback(reply=True, force=True)

    def _pause(self, seconds: float) -> None:
        """Until something is accepted, or for a while."""
        select.select([self._woken], [], [], seconds)
        self._awake()

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass

    # -- the guard ---------------------------------------------------------------------------------

    def _watch(self, side: Any, stream: Any) -> None:
        now = time.monotonic()
        if now - self._looked < (LOOK_FULL if self._is_full() else LOOK):
            return
        self._looked = now
        slot = slots.look(self._s, side)
        if slot is None:
            raise SourceDown(
                f"source {self._s.source}: slot {self._s.slot} is gone",
                hint="it was dropped while it was read",
                after=1.0,
            )
        self.caught_up = (
            0 < self._here <= max(stream.wal_end, slot.confirmed)
            and self._begin is None
            and not self._found
        )
        self._here = slot.here
        self.backlog = slot.backlog
        assert self._spill is not None
        full, taken = self._is_full(), self._taken
        self._full_looks = self._full_looks + 1 if full and taken == self._seen_taken else 0
        self._seen_taken = taken
        verdict = self._guard.judge(
            slot, self._spill, full=full, stays=self._full_looks >= STAYS_FULL
        )
        if verdict == "spill":
            self._begin_spilling()
        elif verdict == "end":
            self._dropping = self._s.on_limit == "drop"
            raise self._guard.ended(slot)

    def _begin_spilling(self) -> None:
        """What is in memory goes first, so that the file alone holds everything that the server may
        forget.
        """
        spill = self._spill
        assert spill is not None
        with self._mutex:
            if any(
                piece.cursor is not None and piece.cursor.reading is not None
                for piece in (*self._out, *self._queue)
            ):
                return  # rows of the first reading, which would not be known again from the file
        log.warning(
            "source %s: the queue is full; what changes meanwhile is kept in %s",
            self._s.source,
            spill.path,
        )
        with self._mutex:
            confirm = 0
            for piece in (*self._out, *self._queue):
                if piece.cursor is not None:
                    piece.frame = spill.append(
                        Frame(piece.findings, piece.cursor.lsn, piece.cursor.done, piece.at),
                        seen=True,
                    )
                confirm = max(confirm, piece.confirm)
        spill.sync()
        self._confirmed(confirm)
