"""Fair hand-out of messages: priority classes get weighted shares of a batch, and keys take turns.

`allot` decides for messages in a database. `Backlog` holds messages in memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from penstock.rules.priority import WEIGHTS, shares


def allot(
    keys: Sequence[Sequence[tuple[str, int]]], first: int, limit: int, per_key: int
) -> dict[tuple[int, str], int]:
    """Return how many messages to deliver, by priority class and key.

    `keys` has the ready messages of each key for each class, the longest-waiting key first. `first`
    is the number of messages requested before. First, each class gets its share. Then, classes with
    more messages fill the batch.
    """
    allotted: dict[tuple[int, str], int] = {}
    left = limit
    quotas = shares(first, limit)
    for share in (True, False):
        for prio, waiting in enumerate(keys):
            quota = min(left, quotas[prio]) if share else left
            able = [
                (key, most)
                for key, ready in waiting
                if (most := min(ready, per_key) - allotted.get((prio, key), 0)) > 0
            ]
            left -= quota
            while able and quota > 0:
                each = max(1, quota // len(able))
                again = []
                for key, most in able:
                    n = min(each, most, quota)
                    if n:
                        allotted[prio, key] = allotted.get((prio, key), 0) + n
                        quota -= n
                    if most > n:
                        again.append((key, most - n))
                able = again
            left += quota
    return allotted


class Buffered(Protocol):
    """A message in a backlog."""

    @property
    def key(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def due(self) -> float:
        """The time at which the message becomes ready, or 0 if it is ready."""


M = TypeVar("M", bound=Buffered)


class _PriorityClass(Generic[M]):
    """Messages of one priority class."""

    __slots__ = ("keys", "rotation")

    def __init__(self) -> None:
        self.keys: dict[str, deque[M]] = {}  # without empty queues
        # Keys that messages may be taken from, each once. The longest-waiting key is first.
        self.rotation: deque[str] = deque()


class Backlog(Generic[M]):
    """Messages that were received from a server and not yet handed out.

    Keys are served in rotation, and priority classes by their shares. In an ordered topic a key is
    skipped while one of its messages is handed out or not due.
    """

    def __init__(self, *, ordered: bool = False) -> None:
        self.ordered = ordered
        self._classes: list[_PriorityClass[M]] = [_PriorityClass() for _ in WEIGHTS]
        self._busy_keys: set[str] = set()
        self._delayed: list[tuple[float, int, M]] = []
        self._sequence = 0
        self._taken_count = 0
        self.ready = 0  # messages in the queues, including those of skipped keys

    def __iter__(self) -> Iterator[M]:
        """Yield all messages. In an ordered topic the delayed messages are in the queues too."""
        for c in self._classes:
            for queue in c.keys.values():
                yield from queue
        if not self.ordered:
            yield from self.delayed()

    def put(self, e: M, *, first: bool = False) -> None:
        """Add a message that becomes ready at `e.due`.

        With `first`, put it before the other messages of its key, at its earlier place.
        """
        if e.due and not self.ordered:
            self._delay(e)
            return
        self.ready += 1
        c = self._classes[e.priority]
        queue = c.keys.get(e.key)
        if queue is None:
            c.keys[e.key] = deque((e,))
            if e.key not in self._busy_keys:
                c.rotation.append(e.key)
        elif first:
            queue.appendleft(e)
        else:
            queue.append(e)

    def put_all(self, entries: Sequence[M], priority: int) -> None:
        """Add ready messages of one priority class, after the other messages of their keys."""
        keys, rotation, busy_keys = (
            self._classes[priority].keys,
            self._classes[priority].rotation,
            self._busy_keys,
        )
        self.ready += len(entries)
        for e in entries:
            key = e.key
            queue = keys.get(key)
            if queue is not None:
                queue.append(e)
                continue
            keys[key] = deque((e,))
            if key not in busy_keys:
                rotation.append(key)

    def _delay(self, e: M) -> None:
        self._sequence += 1
        heapq.heappush(self._delayed, (e.due, self._sequence, e))

    def free_key(self, key: str) -> None:
        """Stop skipping the key. Used in ordered topics when its message is settled or returned."""
        if self.ordered and key in self._busy_keys:
            self._busy_keys.discard(key)
            for c in self._classes:
                if key in c.keys:
                    c.rotation.append(key)

    def next_due(self) -> float | None:
        return self._delayed[0][0] if self._delayed else None

    def pop_due(self, now: float) -> Iterator[M]:
        """Remove and yield the delayed messages that are due. The caller adds or forwards them.

        In an ordered topic the messages are still queued, so only their keys are freed.
        """
        while self._delayed and self._delayed[0][0] <= now:
            _, _, e = heapq.heappop(self._delayed)
            if self.ordered:
                self.free_key(e.key)
            else:
                yield e

    def delayed(self) -> Iterator[M]:
        """Return the messages that are not due."""
        return (e for _, _, e in self._delayed)

    def quotas(self, limit: int) -> list[int]:
        """Return the share of each priority class in the next `limit` messages."""
        return shares(self._taken_count, limit)

    def available(self, priority: int, per_key: int) -> int:
        """Return how many messages of a class one `take` finds, at most `per_key` of one key."""
        return sum(min(len(queue), per_key) for queue in self._classes[priority].keys.values())

    def take(self, limit: int, per_key: int | None = None, now: float = 0.0) -> list[M]:
        """Remove and return up to `limit` ready messages, at most `per_key` of one key.

        `now` is used in ordered topics only: there, messages that are not due are queued.
        """
        got: list[M] = []
        taken: dict[str, int] = {}
        quotas = self.quotas(limit)
        # First each priority class gets its share. Then any class fills the rest of the batch.
        for share in (True, False):
            for c, quota in zip(self._classes, quotas, strict=True):
                if c.rotation and len(got) < limit:
                    self._take_from(
                        c,
                        min(quota, limit - len(got)) if share else limit - len(got),
                        per_key,
                        now,
                        taken,
                        got,
                    )
        self._taken_count += len(got)
        self.ready -= len(got)
        return got

    def _take_from(
        self,
        c: _PriorityClass[M],
        quota: int,
        per_key: int | None,
        now: float,
        taken: dict[str, int],
        got: list[M],
    ) -> None:
        end = len(got) + quota
        skipped: list[str] = []
        while c.rotation and len(got) < end:
            share = max(1, (end - len(got)) // len(c.rotation))
            for _ in range(len(c.rotation)):
                if len(got) >= end:
                    break
                key = c.rotation.popleft()
                queue = c.keys[key]
                n = 1 if self.ordered else min(share, end - len(got), len(queue))
                if self.ordered and queue[0].due > now:
                    self._busy_keys.add(key)
                    self._delay(queue[0])
                    continue
                if per_key is not None:
                    n = min(n, per_key - taken.get(key, 0))
                    if n <= 0:
                        skipped.append(key)
                        continue
                    taken[key] = taken.get(key, 0) + n
                if n == len(queue):
                    got.extend(queue)
                    queue.clear()
                else:
                    got.extend([queue.popleft() for _ in range(n)])
                if self.ordered:
                    self._busy_keys.add(key)
                elif queue:
                    c.rotation.append(key)
                if not queue:
                    del c.keys[key]
        c.rotation.extend(skipped)

    def drop(self, unwanted: Callable[[M], bool]) -> list[M]:
        """Remove and return the messages for which `unwanted` is true."""
        removed = [e for e in self if unwanted(e)]
        for c in self._classes:
            remaining = {
                key: deque(e for e in queue if not unwanted(e)) for key, queue in c.keys.items()
            }
            c.keys = {key: queue for key, queue in remaining.items() if queue}
            c.rotation = deque(key for key in c.rotation if key in c.keys)
        self.ready = sum(len(queue) for c in self._classes for queue in c.keys.values())
        freed = [e.key for _, _, e in self._delayed if unwanted(e)]
        self._delayed = [item for item in self._delayed if not unwanted(item[2])]
        heapq.heapify(self._delayed)
        for key in freed:
            self.free_key(key)
        return removed
