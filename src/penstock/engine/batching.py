"""Collects items into batches.

A batch is processed when it is full or when its oldest item has waited long enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

T = TypeVar("T")


class Batcher(Generic[T]):
    """Collects items and passes each batch to `work`, in a separate task.

    Several of these tasks may run at the same time. `enough` is the size of a full batch in items.
    `linger` returns the seconds that the oldest item may wait.
    """

    __slots__ = ("_enough", "_linger", "_timer", "_work", "under_way", "waiting")

    def __init__(
        self,
        enough: int,
        linger: Callable[[], float],
        work: Callable[[list[T]], Coroutine[object, None, None]],
    ) -> None:
        self._enough, self._linger, self._work = enough, linger, work
        self._timer: asyncio.TimerHandle | None = None
        self.waiting: list[T] = []  # items of the next batch
        self.under_way: set[asyncio.Task[None]] = set()  # tasks of batches in progress

    def add(self, one: T) -> None:
        """Add an item. Process the batch if it is full. Start the timer if none is running."""
        self.waiting.append(one)
        if len(self.waiting) >= self._enough:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger(), self.flush)

    def flush(self) -> None:
        """Process the waiting items now, if there are any."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.waiting:
            batch, self.waiting = self.waiting, []
            task = asyncio.create_task(self._work(batch))
            self.under_way.add(task)
            task.add_done_callback(self.under_way.discard)
