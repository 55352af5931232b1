"""What is cheaper done together, collected until there is enough of it or the first has waited long
enough. Not what is done with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

T = TypeVar("T")


class Group(Generic[T]):
    """`work` gets each group in a task of its own; several may be under way at once."""

    __slots__ = ("_enough", "_linger", "_timer", "_work", "under_way", "waiting")

    def __init__(
        self,
        enough: int,
        linger: Callable[[], float],
        work: Callable[[list[T]], Coroutine[object, None, None]],
    ) -> None:
        self._enough, self._linger, self._work = enough, linger, work
        self._timer: asyncio.TimerHandle | None = None
        self.waiting: list[T] = []
        self.under_way: set[asyncio.Task[None]] = set()

    def add(self, one: T) -> None:
        self.waiting.append(one)
        if len(self.waiting) >= self._enough:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger(), self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.waiting:
            group, self.waiting = self.waiting, []
            task = asyncio.create_task(self._work(group))
            self.under_way.add(task)
            task.add_done_callback(self.under_way.discard)
