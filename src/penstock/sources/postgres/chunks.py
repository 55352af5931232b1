"""Queue of chunks between the thread that reads a slot and the event loop that accepts them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections import deque

import msgspec

from penstock.ports import Finding
from penstock.sources.postgres.position import Cursor

MAX_QUEUED_CHUNKS = 2  # in addition to the chunk that the source is accepting


class Chunk(msgspec.Struct, eq=False):
    """Findings in order, with the cursor and the confirmation that follow their acceptance."""

    findings: list[Finding]
    cursor: Cursor | None
    committed_at: float | None = None
    confirm: int = 0  # the server may discard WAL up to this LSN
    spill_end: int = 0  # end of its frame in the spill file, 0 if it has no frame


class ChunkQueue:
    """Chunks that are queued, returned by `next`, or accepted and not confirmed to the server.

    `next`, `accept` and `stop` belong to the event loop, all other methods to the thread.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: deque[Chunk] = deque()
        self._out: deque[Chunk] = deque()  # returned by `next` and not accepted yet
        self._accepted: deque[Chunk] = deque()  # accepted and not confirmed to the server yet
        self._error: BaseException | None = None
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self.wake_pipe, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.stopping = False
        self.taken = 0  # number of chunks that `next` has returned

    # -- on the loop -------------------------------------------------------------------------------

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
                            self.taken += 1
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
        self.stopping = True
        self._wake_thread()

    def close(self) -> None:
        os.close(self.wake_pipe)
        os.close(self._wake_write)

    def _wake_thread(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    # -- the thread --------------------------------------------------------------------------------

    def put(self, chunk: Chunk) -> None:
        with self._mutex:
            self._queue.append(chunk)
        self._notify_loop()

    def fail(self, error: BaseException) -> None:
        with self._mutex:
            self._error = error
        self._notify_loop()

    def _notify_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so `next` is not called again
            self._loop.call_soon_threadsafe(self._changed.set)

    def is_full(self) -> bool:
        with self._mutex:
            return len(self._queue) >= MAX_QUEUED_CHUNKS

    def pop_accepted(self) -> Chunk | None:
        with self._mutex:
            return self._accepted.popleft() if self._accepted else None

    def not_accepted(self) -> list[Chunk]:
        with self._mutex:
            return [*self._out, *self._queue]

    def confirm_with_last(self, lsn: int) -> bool:
        """Confirm the LSN together with the last chunk. Return False if there is no chunk."""
        with self._mutex:
            for chunks in (self._queue, self._out, self._accepted):
                if chunks:
                    chunks[-1].confirm = max(chunks[-1].confirm, lsn)
                    return True
        return False

    def pause(self, seconds: float) -> None:
        """Wait until a chunk is accepted or reading is stopped, at most `seconds`."""
        select.select([self.wake_pipe], [], [], seconds)
        self.empty_wake_pipe()

    def empty_wake_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake_pipe, 4096):
                pass
