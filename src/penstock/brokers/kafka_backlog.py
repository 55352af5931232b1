"""What a worker has received from Kafka and not handed out: by class and key, in turns, some of it not due yet. No client and no clock lives here."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from penstock.brokers.kafka_topics import Place
from penstock.rules.shares import WEIGHTS, shares
from penstock.rules.watermark import Window


class Partition:
    """One assigned partition. `received*` are written by the consumer's thread, all else by the loop: their difference needs no lock."""

    __slots__ = (
        "at", "entries", "epoch", "finished", "finished_bytes", "leaving", "lost", "number", "out", "paused", "place", "received", "received_bytes", "saved",
        "switched", "window",
    )  # fmt: skip

    def __init__(self, place: Place, number: int, window: Window) -> None:
        self.place, self.number, self.window, self.epoch = place, number, window, window.epoch
        self.at = (place.name, number)
        self.entries: dict[int, Entry] = {}  # received and not settled
        self.out = 0  # of these, handed out
        self.received = self.received_bytes = self.finished = self.finished_bytes = 0
        self.paused, self.switched = False, 0.0  # the thread's
        self.leaving = False  # another worker is to have it: nothing more is handed out
        self.lost = False  # another worker has it
        self.saved = True  # and what was settled before that was committed


class Entry:
    """One message, received and not settled."""

    __slots__ = ("at", "body", "due", "headers", "holder", "id", "key", "not_before", "offset", "part", "priority", "settling", "size", "token", "where")

    def __init__(
        self, part: Partition, offset: int, id_: str, key: str, body: bytes, headers: dict[str, str], at: float, not_before: float, size: int, priority: int
    ) -> None:  # fmt: skip
        self.part, self.offset, self.id, self.key, self.body, self.headers, self.at, self.not_before = part, offset, id_, key, body, headers, at, not_before
        self.size, self.priority = size, priority
        self.due = 0.0
        self.token = 0  # of the delivery that is out
        self.where = 0  # its position
        self.settling = False
        self.holder: object = None


class _Class:
    __slots__ = ("keys", "turn")

    def __init__(self) -> None:
        self.keys: dict[str, deque[Entry]] = {}  # never an empty one
        self.turn: deque[str] = deque()  # keys that may be asked, each once, the one that waited longest first


class Backlog:
    """Keys take turns, classes have their shares. In an ordered topic a key is away while one of its messages is out or waits for its time."""

    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self._classes = [_Class() for _ in WEIGHTS]
        self._away: set[str] = set()
        self._later: list[tuple[float, int, Entry]] = []
        self._n = 0
        self._given = 0

    def put(self, e: Entry, *, first: bool = False) -> None:
        """Ready at `e.due`. `first`: before its key's others, where it was before."""
        if e.due and not self.ordered:
            self._n += 1
            heapq.heappush(self._later, (e.due, self._n, e))
            return
        c = self._classes[e.priority]
        queue = c.keys.get(e.key)
        if queue is None:
            c.keys[e.key] = deque((e,))
            if e.key not in self._away:
                c.turn.append(e.key)
        elif first:
            queue.appendleft(e)
        else:
            queue.append(e)

    def back(self, key: str) -> None:
        """In an ordered topic: the message of this key that was out is settled, or put back."""
        if self.ordered and key in self._away:
            self._away.discard(key)
            for c in self._classes:
                if key in c.keys:
                    c.turn.append(key)

    def next_due(self) -> float | None:
        return self._later[0][0] if self._later else None

    def due(self, now: float) -> Iterator[Entry]:
        """What waited for its time, taken out: it is put again, or sent on. In an ordered topic only its key is let go."""
        while self._later and self._later[0][0] <= now:
            _, _, e = heapq.heappop(self._later)
            if self.ordered:
                self.back(e.key)
            else:
                yield e

    def waiting(self) -> Iterator[Entry]:
        """What is not due yet."""
        return (e for _, _, e in self._later)

    def take(self, limit: int, per_key: int | None, now: float) -> list[Entry]:
        got: list[Entry] = []
        taken: dict[str, int] = {}
        quotas = shares(self._given, limit)
        for share in (True, False):  # first each class its part, then whoever still has work fills the batch
            for c, quota in zip(self._classes, quotas, strict=True):
                if c.turn and len(got) < limit:
                    self._pick(c, min(quota, limit - len(got)) if share else limit - len(got), per_key, now, taken, got)
        self._given += len(got)
        return got

    def _pick(self, c: _Class, quota: int, per_key: int | None, now: float, taken: dict[str, int], got: list[Entry]) -> None:
        end = len(got) + quota
        aside: list[str] = []
        while c.turn and len(got) < end:
            share = max(1, (end - len(got)) // len(c.turn))
            for _ in range(len(c.turn)):
                if len(got) >= end:
                    break
                key = c.turn.popleft()
                queue = c.keys[key]
                n = 1 if self.ordered else min(share, end - len(got), len(queue))
                if self.ordered and queue[0].due > now:
                    self._away.add(key)
                    self._n += 1
                    heapq.heappush(self._later, (queue[0].due, self._n, queue[0]))
                    continue
                if per_key is not None:
                    n = min(n, per_key - taken.get(key, 0))
                    if n <= 0:
                        aside.append(key)
                        continue
                    taken[key] = taken.get(key, 0) + n
                got.extend([queue.popleft() for _ in range(n)])
                if self.ordered:
                    self._away.add(key)
                elif queue:
                    c.turn.append(key)
                if not queue:
                    del c.keys[key]
        c.turn.extend(aside)

    def drop(self, unwanted: Callable[[Entry], bool]) -> None:
        """Forget what was not handed out."""
        for c in self._classes:
            kept = {key: deque(e for e in queue if not unwanted(e)) for key, queue in c.keys.items()}
            c.keys = {key: queue for key, queue in kept.items() if queue}
            c.turn = deque(key for key in c.turn if key in c.keys)
        gone = [e for _, _, e in self._later if unwanted(e)]
        self._later = [item for item in self._later if not unwanted(item[2])]
        heapq.heapify(self._later)
        for e in gone:
            self.back(e.key)
