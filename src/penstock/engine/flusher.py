"""Flusher: writes a sink outbox to its target, in order and once.

Only the process that holds the sink's lock writes. Formats belong to the sinks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from penstock.clock import wait
from penstock.engine.blocking_thread import BlockingThread
from penstock.errors import ConfigError, PenstockError, Unreachable
from penstock.locks import Lost
from penstock.ports import (
    Clock,
    Durability,
    FileSink,
    Lock,
    Reopen,
    Sink,
    Transaction,
    UnitOfWork,
)
from penstock.rules.masking import mask_text

T = TypeVar("T")
log = logging.getLogger("penstock.flusher")

# Seconds between two checks of the outbox. Another worker adds rows without waking this flusher.
POLL = 0.5
TAKE_OVER = 1.0  # seconds between two tries to get the lock
FIRST_BACK_OFF, LAST_BACK_OFF = 0.1, 5.0  # seconds. The back-off doubles with each failure.
MAX_BYTES = 8 << 20  # bytes of one batch, which may exceed this by one row
_REOPENS = 5  # reopens in a row without a written row. The next one counts as a failure.
SILENT = 10.0  # seconds of one call of the sink. Then the target counts as down.
# Seconds without progress at the end of the process. Then the rows stay in the outbox.
STALLED = 1.0
ABANDON = 0.5  # seconds that a cancelled flusher waits for a call of the sink
_END_POLL = 0.05  # seconds between two steps at the end of the process
_MAX_REASON = 500  # characters of a stored reason


class Flusher:
    """Task that writes one sink's outbox to its target.

    `run` is a task while the process works. The other members may be used at any time from the
    same event loop.
    """

    def __init__(
        self,
        sink: Sink,
        uow: UnitOfWork,
        lock: Lock,
        clock: Clock,
        *,
        batch: int = 1000,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        self.sink, self._uow, self.clock, self.batch = sink, uow, clock, batch
        # Reason why the target accepts no rows now, or None. Workers should pause while it is set.
        self.down: str | None = None
        self.since: float | None = None  # time since which the target is down
        self.written = 0  # rows written by this process
        self._lock = lock
        self._on_notice = on_notice or (lambda _: None)
        self._last_notice = ""
        self._woken = asyncio.Event()
        self._idle = False
        self._opened = False
        # True if the target may hold rows after the recorded mark. Another machine will also write
        # these rows.
        self._has_unrecorded_rows = lock.shared
        self._position, self._mark = 0, ""  # last flushed row, and the target's mark after it
        self._thread: BlockingThread | None = None
        self._abandoned = False  # a call of the sink did not return before the flusher ended
        # Set when the sink was opened, could not be opened, or is locked by another process.
        self._tried = asyncio.Event()
        self._first_error: Exception | None = None
        self._ending = asyncio.Event()
        self._stored: str | None = None  # reason in the ledger, None if it was not read
        self._last_bug = ""
        self._moved = time.monotonic()  # last time at which a row was written, or no row waited
        self._write_seconds = 0.0  # duration of the last write

    @property
    def holding(self) -> bool:
        """True if this process holds the lock and writes to the target."""
        return self._lock.held

    @property
    def idle(self) -> bool:
        """True if the last check found no row left, and `wake` was not called since.

        Another worker may have added rows. `drain` is certain.
        """
        return self._idle and not self._woken.is_set()

    @property
    def stuck_for(self) -> float:
        """Seconds without progress: no process wrote a row, although rows wait."""
        return time.monotonic() - self._moved

    def wake(self) -> None:
        """Check the outbox now. Cheap, so call it after every commit that added rows."""
        self._woken.set()

    async def wait_until_open(self, timeout: float) -> None:
        """Wait until the sink is open, or until another process is found to hold the lock.

        Raises ConfigError or Unreachable if the first try fails or takes longer than `timeout`
        seconds. The reason is stored for `penstock status`.
        """
        name = self.sink.name
        try:
            await asyncio.wait_for(self._tried.wait(), timeout)
        except TimeoutError:
            reason = f"no answer within {timeout:g} s"
            await self._set_down(reason)
            raise Unreachable(
                f"sink {name} cannot be opened: {reason}",
                hint="check that the server of the sink runs and answers",
            ) from None
        error = self._first_error
        if isinstance(error, ConfigError):
            raise error
        if error is not None:
            hint = (
                error.hint
                if isinstance(error, PenstockError)
                else "check that its directory exists and is writable"
                if isinstance(error, OSError)
                else "read the traceback above, and mend the sink"
            )
            raise Unreachable(
                f"sink {name} cannot be opened: {_reason(error)}", hint=hint
            ) from error

    async def backlog(self) -> int:
        """Return how many rows of the outbox are not flushed."""
        return await self._uow.read(lambda tx: tx.outbox.backlog(self.sink.name))

    async def run(self) -> None:
        """Write rows until cancelled.

        A cancellation at any time leaves the target and its recorded mark consistent. It also
        releases the lock for another process, unless a call of the sink does not return.
        """
        self._thread = BlockingThread(f"flush-{self.sink.name}")
        self._moved = time.monotonic()
        try:
            failures = 0
            reopens = 0
            while True:
                try:
                    delay = await self._step()
                except Lost:
                    self._opened, delay = False, 0.0
                    self._lock.lose()
                except Reopen as e:
                    self._opened = False
                    reopens += 1
                    if reopens <= _REOPENS:
                        continue
                    failures, delay = failures + 1, await self._fail(e, failures)
                except Exception as e:
                    # An outage, or a bug in a sink. In both cases the rows stay in the outbox, and
                    # `penstock status` shows the reason.
                    self._opened = False
                    failures, delay = failures + 1, await self._fail(e, failures)
                else:
                    failures = reopens = 0
                if delay > 0 and self._lock.held and self.down is None:
                    await wait(self.clock, self._woken, delay)
                elif delay > 0 and self._ending.is_set():
                    await self.clock.sleep(min(delay, _END_POLL))
                elif delay > 0:
                    await wait(self.clock, self._ending, delay)
        finally:
            await self._end(self._thread)

    async def _end(self, thread: BlockingThread) -> None:
        """Close the target, then release the lock.

        This process must not touch the target while another process holds the lock. If a call of
        the sink does not return, its thread releases the lock after it, or the lock ends with the
        process. That is safe, because a flusher may be killed at any time.
        """
        self._opened = False
        if not self._abandoned:
            closing = thread.call(self.sink.close)
            if not await _ended_within(closing, ABANDON):
                closing.cancel()
                self._abandoned = True
        if self._abandoned:
            thread.stop(self.sink.close, self._lock.release)
            return
        try:
            if self._has_unrecorded_rows and self._lock.here:
                # If this fails, the next process that opens the file truncates it.
                with contextlib.suppress(OSError, PenstockError):
                    await self._truncate_to_mark()
        finally:
            thread.stop()
            self._lock.release()
        if (error := closing.exception()) is not None:
            log.error("sink %s failed to close: %r", self.sink.name, error, exc_info=error)

    async def drain(self, timeout: float, *, patient: bool = True) -> bool:
        """Wait up to `timeout` seconds until the outbox is empty. Any process may empty it.

        Return False if the outbox was not empty in time. If not `patient`, return False also if
        the target is down or has stopped answering.
        """
        until = self.clock.now() + timeout
        if not patient:
            self._ending.set()
            # Progress is noted once a second. So only a longer time without progress is a stall.
            if self.stuck_for < 3 * STALLED:
                self._moved = time.monotonic()
        while True:
            self.wake()
            # While the store is unavailable, the outbox counts as not empty.
            with contextlib.suppress(PenstockError):
                if await self.backlog() == 0:
                    return True
            left = until - self.clock.now()
            if left <= 0 or (not patient and self._is_stalled):
                return False
            await self.clock.sleep(min(0.05, left))

    @property
    def _is_stalled(self) -> bool:
        """True if the target is down, or takes much longer for a write than before."""
        return self.down is not None or self.stuck_for > max(STALLED, 2 * self._write_seconds)

    # -- one round ---------------------------------------------------------------------------------

    async def _step(self) -> float:
        """Write one batch, or check for rows. Return the seconds until the next step."""
        self._woken.clear()
        if not self._lock.held:
            self._opened = False
        if not self._lock.held and not await self._lock.take():
            if self._has_unrecorded_rows and self._lock.here:
                await self._in_thread(self.sink.close)
                await self._truncate_to_mark()
                self._has_unrecorded_rows = False
            position, stored, backlog = await self._uow.read(
                lambda tx: (
                    tx.outbox.position(self.sink.name)[0],
                    tx.outbox.outage(self.sink.name),
                    tx.outbox.backlog(self.sink.name),
                )
            )
            if backlog == 0 or position != self._position:
                self._moved = time.monotonic()
            self._position = position
            # Take over the reason of the holder: the outbox fills for all processes. Ignore a
            # status text of this process, which it wrote while it held the lock.
            noted = "" if self._lock.here else self._lock.status()
            await self._set_down(noted or stored or None)
            self._idle = backlog == 0
            self._tried.set()
            return TAKE_OVER
        if not self._opened:
            self._has_unrecorded_rows = self._lock.shared
            (self._position, self._mark), self._stored = await self._uow.read(
                lambda tx: (
                    tx.outbox.position(self.sink.name),
                    tx.outbox.outage(self.sink.name),
                )
            )
            await self._record_position(
                self._position, await self._in_thread(self.sink.open, self._position, self._mark)
            )
            self._opened = True
            self._tried.set()
            self._report_notice()
        rows = await self._uow.read(
            lambda tx: tx.outbox.rows(
                self.sink.name, after=self._position, limit=self.batch, max_bytes=MAX_BYTES
            )
        )
        if not rows:
            await self._set_down(None)
            self._idle = True
            self._moved = time.monotonic()
            return POLL
        self._idle = False
        if not self._lock.held:
            raise Lost
        began = time.monotonic()
        mark = await self._in_thread(self.sink.write, rows)
        await self._record_position(rows[-1].n, mark)
        self._moved = time.monotonic()
        self._write_seconds = self._moved - began
        self.written += len(rows)
        await self._set_down(None)
        self._report_notice()
        if len(rows) == self.batch:
            return 0
        self._idle = True  # `wake` is called when this process adds rows
        return POLL

    async def _record_position(self, position: int, mark: str) -> None:
        """Record the position, unless another process has taken the lock.

        Synced under any `durability` of the pipeline, because the file is truncated to this mark.
        Also called if only the mark differs.
        """
        if (position, mark) == (self._position, self._mark):
            return

        def work(tx: Transaction) -> None:
            self._lock.verify(tx)
            tx.outbox.mark_flushed(self.sink.name, upto=position, mark=mark)

        await self._uow.write(work, durability=Durability.FSYNC)
        self._position, self._mark = position, mark

    async def _truncate_to_mark(self) -> None:
        """Truncate the file of this machine to the recorded mark.

        Another machine continues after that mark, so this file must not hold later rows.
        """
        if isinstance(self.sink, FileSink):
            # Use a write transaction. Unlike a read, it runs after all earlier writes of this
            # process.
            _, mark = await self._uow.write(
                lambda tx: tx.outbox.position(self.sink.name), durability=Durability.RELAXED
            )
            await self._in_thread(self.sink.restore, mark)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` in the flusher's thread.

        The lock must be held until the call has ended. So a cancelled flusher waits for it, but not
        longer than `ABANDON` seconds.
        """
        assert self._thread is not None
        future = self._thread.call(work, *args)
        try:
            await asyncio.wait([future], timeout=SILENT)
            if not future.done():
                await self._set_down(f"no answer for {SILENT:g} s")
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not await _ended_within(future, ABANDON):
                future.cancel()
                self._abandoned = True
            raise

    # -- status and notices ------------------------------------------------------------------------

    async def _fail(self, error: Exception, failures: int) -> float:
        """Record why the target is down. Return the back-off in seconds."""
        self._idle = False
        if not self._tried.is_set():
            self._first_error = error
        if _is_bug(error) and repr(error) != self._last_bug:
            self._last_bug = repr(error)
            log.error("bug in sink %s", self.sink.name, exc_info=error)
        hint = f" (try: {error.hint})" if isinstance(error, PenstockError) and error.hint else ""
        await self._set_down(_reason(error) + hint)
        self._tried.set()
        return float(min(LAST_BACK_OFF, FIRST_BACK_OFF * 2 ** min(failures, 10)))

    async def _set_down(self, reason: str | None) -> None:
        """Set why the target is down, or None if it is up. Report a change in a notice."""
        if reason != self.down:
            if reason is None:
                self._on_notice(f"sink {self.sink.name} takes rows again")
            elif self.down is None and self._tried.is_set():  # else `wait_until_open` raises it
                self._on_notice(
                    f"sink {self.sink.name} is down: {reason}. Its rows wait in the outbox, and "
                    "workers fetch no new page until it takes rows again"
                )
            if reason is None or self.down is None:
                self.since = self.clock.now() if reason else None
            self.down = reason
            if self._lock.here:
                with contextlib.suppress(OSError):
                    self._lock.note(reason or "")
        text = (reason or "")[:_MAX_REASON]
        if self._lock.held and text != self._stored:
            await self._store_reason(text)

    async def _store_reason(self, reason: str) -> None:
        """Store the reason in the ledger. `penstock status` shows it when no worker runs.

        If the ledger is unavailable, the next change of the reason or the next round stores it.
        """

        def work(tx: Transaction) -> None:
            self._lock.verify(tx)
            tx.outbox.set_outage(self.sink.name, reason, since=self.since)

        with contextlib.suppress(PenstockError, Lost):
            await self._uow.write(work, durability=Durability.RELAXED)
            self._stored = reason

    def _report_notice(self) -> None:
        """Report the sink's notice once, if it is new."""
        if self.sink.notice != self._last_notice:
            self._last_notice = self.sink.notice
            if self._last_notice:
                self._on_notice(self._last_notice)


def _is_bug(error: Exception) -> bool:
    return not isinstance(error, OSError | PenstockError)


def _reason(error: Exception) -> str:
    return mask_text(f"bug in the sink: {error!r}" if _is_bug(error) else str(error))


async def _ended_within(future: asyncio.Future[T], seconds: float) -> bool:
    """Wait for the future, even if the task is cancelled. Return True if the future is done."""
    until = time.monotonic() + seconds
    while not future.done() and (left := until - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future], timeout=left)
    return future.done()
