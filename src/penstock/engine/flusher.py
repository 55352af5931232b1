"""Carries a sink's outbox to its target, in order and once, from whichever process holds the sink's
lock. Knows no format.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.clock import nap
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

POLL = 0.5  # another worker fills the outbox without waking us
TAKE_OVER = 1.0  # how often a process that does not hold the lock tries for it
FIRST_BACK_OFF, LAST_BACK_OFF = 0.1, 5.0
MAX_BYTES = 8 << 20
_REOPENS = 5  # in a row, without a row written; then it counts as a failure


class Flusher:
    """`run()` is a task for as long as the process works. The rest may be read and called at any
    time from the same loop.
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
        self.down: str | None = None  # why the target takes nothing now; consumption should pause
        self.since: float | None = None  # down since
        self.written = 0  # rows, by this process
        self._lock = lock
        self._on_notice = on_notice or (lambda _: None)
        self._told = ""
        self._woken = asyncio.Event()
        self._idle = False
        self._opened = False
        self._loose = (
            lock.shared
        )  # the target may hold rows that are noted nowhere, and that another machine writes too
        self._position, self._mark = 0, ""
        self._thread: ThreadPoolExecutor | None = None

    @property
    def holding(self) -> bool:
        """This process is the one that writes."""
        return self._lock.held

    @property
    def idle(self) -> bool:
        """Nothing was left when we last looked, and nobody woke us since. For certainty: `drain`."""
        return self._idle and not self._woken.is_set()

    def wake(self) -> None:
        """There are new rows. Cheap; call it after every commit that filled the outbox."""
        self._woken.set()

    async def backlog(self) -> int:
        """Return how many rows of the outbox are not flushed."""
        return await self._uow.read(lambda tx: tx.outbox.backlog(self.sink.name))

    async def run(self) -> None:
        """Until cancelled. Leaves the target and the note consistent, whenever that is, and gives
        the lock to another process.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"flush-{self.sink.name}")
        try:
            failures = 0
            reopens = 0
            while True:
                try:
                    wait = await self._step()
                except Lost:
                    self._opened, wait = False, 0.0
                    self._lock.lose()
                except Reopen as e:
                    self._opened = False
                    reopens += 1
                    if reopens <= _REOPENS:
                        continue
                    failures, wait = failures + 1, self._fail(e, failures)
                except Exception as e:  # an outage, or a bug in a sink: either way the rows stay where they are, and status says why
                    self._opened = False
                    failures, wait = failures + 1, self._fail(e, failures)
                else:
                    failures = reopens = 0
                if wait > 0:
                    await self._pause(wait, wakeable=self._lock.held and self.down is None)
        finally:
            # The lock goes last: nothing of ours may touch the target once another process holds
            # it.
            try:
                await self._in_thread(self.sink.close)
                if self._loose and self._lock.here:
                    with contextlib.suppress(
                        OSError, PenstockError
                    ):  # then whoever opens it next cuts it
                        await self._tidy()
            finally:
                self._thread.shutdown(wait=False)
                self._opened = False
                self._lock.release()

    async def drain(self, timeout: float) -> bool:
        """Wait until the outbox is empty, whichever process empties it. False: it was not, in time."""
        until = self.clock.now() + timeout
        while True:
            self.wake()
            with contextlib.suppress(
                PenstockError
            ):  # the store is away for a moment: not empty, as far as we know
                if await self.backlog() == 0:
                    return True
            left = until - self.clock.now()
            if left <= 0:
                return False
            await self.clock.sleep(min(0.05, left))

    # -- one round ---------------------------------------------------------------------------------

    async def _step(self) -> float:
        """One batch, or one look. Returns how long there is nothing to do."""
        self._woken.clear()
        if not self._lock.held:
            self._opened = False
        if not self._lock.held and not await self._lock.take():
            if self._loose and self._lock.here:
                await self._in_thread(self.sink.close)
                await self._tidy()
                self._loose = False
            # The holder's trouble is ours: the outbox fills for all of us. A note of our own is of
            # a time when we held it.
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
        self._idle = True  # whoever adds rows wakes us
        return POLL

    async def _note(self, position: int, mark: str) -> None:
        """Record the position, unless another process has taken the lock.

        Synced whatever the pipeline's durability is: the file is cut to this mark. Also called if
        only the mark differs.
        """
        if (position, mark) == (self._position, self._mark):
            return

        def work(tx: Transaction) -> None:
            self._lock.verify(tx)
            tx.outbox.mark_flushed(self.sink.name, upto=position, mark=mark)

        await self._uow.write(work, durability=Durability.FSYNC)
        self._position, self._mark = position, mark

    async def _tidy(self) -> None:
        """Another machine goes on from what is noted: a file of ours must not hold more."""
        if isinstance(self.sink, FileSink):
            # A write comes after every write that this process began before, unlike a read.
            _, mark = await self._uow.write(
                lambda tx: tx.outbox.position(self.sink.name), durability=Durability.RELAXED
            )
            await self._in_thread(self.sink.restore, mark)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Not to be interrupted: a cancelled flusher still waits for the write under way, since the
        lock must outlast it.
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

    # -- what others see ---------------------------------------------------------------------------

    def _fail(self, error: Exception, failures: int) -> float:
        self._idle = False
        expected = isinstance(error, OSError | PenstockError)
        hint = f" (try: {error.hint})" if isinstance(error, PenstockError) and error.hint else ""
        self._up_or((str(error) if expected else f"bug in the sink: {error!r}") + hint)
        return float(min(LAST_BACK_OFF, FIRST_BACK_OFF * 2 ** min(failures, 10)))

    def _up_or(self, reason: str | None) -> None:
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
        if self.sink.notice != self._told:
            self._told = self.sink.notice
            if self._told:
                self._on_notice(self._told)

    async def _pause(self, seconds: float, *, wakeable: bool) -> None:
        if not wakeable:
            return await self.clock.sleep(seconds)
        await nap(self.clock, seconds, self._woken)
