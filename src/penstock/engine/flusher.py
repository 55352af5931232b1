"""Flusher: writes a sink outbox to its target, in order and once.

Only the process that holds the sink's lock writes. Formats belong to the sinks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.clock import wait
from penstock.errors import PenstockError
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

T = TypeVar("T")

# Seconds between two checks of the outbox. Another worker adds rows without waking this flusher.
POLL = 0.5
TAKE_OVER = 1.0  # seconds between two tries to get the lock
FIRST_BACK_OFF, LAST_BACK_OFF = 0.1, 5.0  # seconds. The back-off doubles with each failure.
MAX_BYTES = 8 << 20  # bytes of one batch, which may exceed this by one row
_REOPENS = 5  # reopens in a row without a written row. The next one counts as a failure.


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
        self._told = ""
        self._woken = asyncio.Event()
        self._idle = False
        self._opened = False
        # True if the target may hold rows after the recorded mark. Another machine will also write
        # these rows.
        self._loose = lock.shared
        self._position, self._mark = 0, ""  # last flushed row, and the target's mark after it
        self._thread: ThreadPoolExecutor | None = None

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

    def wake(self) -> None:
        """Check the outbox now. Cheap, so call it after every commit that added rows."""
        self._woken.set()

    async def backlog(self) -> int:
        """Return how many rows of the outbox are not flushed."""
        return await self._uow.read(lambda tx: tx.outbox.backlog(self.sink.name))

    async def run(self) -> None:
        """Write rows until cancelled.

        A cancellation at any time leaves the target and its recorded mark consistent. It also
        releases the lock for another process.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"flush-{self.sink.name}")
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
                    failures, delay = failures + 1, self._fail(e, failures)
                except Exception as e:
                    # An outage, or a bug in a sink. In both cases the rows stay in the outbox, and
                    # `penstock status` shows the reason.
                    self._opened = False
                    failures, delay = failures + 1, self._fail(e, failures)
                else:
                    failures = reopens = 0
                if delay > 0 and self._lock.held and self.down is None:
                    await wait(self.clock, self._woken, delay)
                elif delay > 0:
                    await self.clock.sleep(delay)
        finally:
            # Release the lock last. This process must not touch the target while another process
            # holds the lock.
            try:
                await self._in_thread(self.sink.close)
                if self._loose and self._lock.here:
                    # If this fails, the next process that opens the file truncates it.
                    with contextlib.suppress(OSError, PenstockError):
                        await self._tidy()
            finally:
                self._thread.shutdown(wait=False)
                self._opened = False
                self._lock.release()

    async def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the outbox is empty. Any process may empty it.

        Return False if the outbox was not empty in time.
        """
        until = self.clock.now() + timeout
        while True:
            self.wake()
            # While the store is unavailable, the outbox counts as not empty.
            with contextlib.suppress(PenstockError):
                if await self.backlog() == 0:
                    return True
            left = until - self.clock.now()
            if left <= 0:
                return False
            await self.clock.sleep(min(0.05, left))

    # -- one round ---------------------------------------------------------------------------------

    async def _step(self) -> float:
        """Write one batch, or check for rows. Return the seconds until the next step."""
        self._woken.clear()
        if not self._lock.held:
            self._opened = False
        if not self._lock.held and not await self._lock.take():
            if self._loose and self._lock.here:
                await self._in_thread(self.sink.close)
                await self._tidy()
                self._loose = False
            # Take over the reason of the holder: the outbox fills for all processes. Ignore a
            # status text of this process, which it wrote while it held the lock.
            self._up_or(None if self._lock.here else self._lock.status() or None)
            self._idle = await self.backlog() == 0
            return TAKE_OVER
        if not self._opened:
            self._loose = self._lock.shared
            self._position, self._mark = await self._uow.read(
                lambda tx: tx.outbox.position(self.sink.name)
            )
            await self._note(
                self._position, await self._in_thread(self.sink.open, self._position, self._mark)
            )
            self._opened = True
            self._tell()
        rows = await self._uow.read(
            lambda tx: tx.outbox.rows(
                self.sink.name, after=self._position, limit=self.batch, max_bytes=MAX_BYTES
            )
        )
        if not rows:
            self._up_or(None)
            self._idle = True
            return POLL
        self._idle = False
        if not self._lock.held:
            raise Lost
        mark = await self._in_thread(self.sink.write, rows)
        await self._note(rows[-1].n, mark)
        self.written += len(rows)
        self._up_or(None)
        self._tell()
        if len(rows) == self.batch:
            return 0
        self._idle = True  # `wake` is called when this process adds rows
        return POLL

    async def _note(self, position: int, mark: str) -> None:
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

    async def _tidy(self) -> None:
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
        """Run `work` in the flusher's thread, and wait for it even if cancelled.

        The lock must be held until the write in progress has ended.
        """
        assert self._thread is not None
        future = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await asyncio.wait([future])
            raise

    # -- status and notices ------------------------------------------------------------------------

    def _fail(self, error: Exception, failures: int) -> float:
        """Record why the target is down. Return the back-off in seconds."""
        self._idle = False
        expected = isinstance(error, OSError | PenstockError)
        hint = f" (try: {error.hint})" if isinstance(error, PenstockError) and error.hint else ""
        self._up_or((str(error) if expected else f"bug in the sink: {error!r}") + hint)
        return float(min(LAST_BACK_OFF, FIRST_BACK_OFF * 2 ** min(failures, 10)))

    def _up_or(self, reason: str | None) -> None:
        """Set why the target is down, or None if it is up. Report a change in a notice."""
        if reason == self.down:
            return
        if reason is None:
            self._on_notice(f"sink {self.sink.name} takes rows again")
        elif self.down is None:
            self._on_notice(
                f"sink {self.sink.name} is down: {reason}; its rows wait in the outbox and nothing new is fetched until it is back"
            )
        if reason is None or self.down is None:
            self.since = self.clock.now() if reason else None
        self.down = reason
        if self._lock.here:
            with contextlib.suppress(OSError):
                self._lock.note(reason or "")

    def _tell(self) -> None:
        """Report the sink's notice once, if it is new."""
        if self.sink.notice != self._told:
            self._told = self.sink.notice
            if self._told:
                self._on_notice(self._told)
