"""What a worker has received from Kafka and not handed out: by class and key, in turns, some of it
not due yet. No client and no clock lives here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from penstock.brokers.kafka.topics import Place, position
from penstock.ports import Delivery
from penstock.rules.priority import WEIGHTS, shares
from penstock.rules.watermark import Window


class Partition:
    """One assigned partition. `received*` and `reached` are written by the consumer's thread, all
    else by the loop: their differences need no lock.
    """

    __slots__ = (
        "at", "base", "epoch", "finished", "finished_bytes", "group", "leaving", "lost", "low", "number", "paused", "place", "reached", "received",
        "received_bytes", "saved", "switched", "token", "topic", "window",
    )  # fmt: skip

    def __init__(
        self, place: Place, number: int, window: Window[Entry], topic: str, group: str
    ) -> None:
        self.place, self.number, self.window, self.topic, self.group = (
            place,
            number,
            window,
            topic,
            group,
        )
        self.at = (place.name, number)
        self.base = position(place.slot, number, 0)  # an offset's position is this and the offset
        self.token = (
            window.epoch << 32
        )  # of a first delivery; a copy of it that is handed out again has one of its own
        self.received = self.received_bytes = self.finished = self.finished_bytes = 0
        self.low = self.reached = (
            window.next
        )  # the watermark when it was last committed, and what comes after the last message received
        self.paused, self.switched = False, 0.0  # the thread's
        self.leaving = False  # another worker is to have it: nothing more is handed out
        self.lost = False  # another worker has it
        self.saved = True  # and what was settled before that was committed


class Entry(Delivery, kw_only=True, frozen=False, eq=False, gc=False):  # type: ignore[misc]
    """One message, received and not settled. It is handed out as it is, so that there is one object
    for each message; what comes back is replaced by a copy.

    The collector does not look at them: the only circle they are part of is through their window,
    which is emptied when its partition goes.
    """

    part: Partition
    offset: int
    at: float  # when it was published, or the first that was received in a row with it
    not_before: float = 0.0
    meant: str = ""  # the group it is for, where it is for one
    due: float = 0.0
    settling: bool = False
    holder: object = None  # the subscription that has it


FRAMING = 200  # bytes of memory that a message takes beside its body, about
Run = tuple[
    Partition, list[Entry], bool
]  # received in a row; True: without a gap, and none of them is for a certain time, group or class


class _Class:
    __slots__ = ("keys", "turn")

    def __init__(self) -> None:
        self.keys: dict[str, deque[Entry]] = {}  # never an empty one
        self.turn: deque[str] = (
            deque()
        )  # keys that may be asked, each once, the one that waited longest first


class Backlog:
    """Keys take turns, classes have their shares. In an ordered topic a key is away while one of
    its messages is out or waits for its time.
    """

    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self._classes = [_Class() for _ in WEIGHTS]
        self._away: set[str] = set()
        self._later: list[tuple[float, int, Entry]] = []
        self._n = 0
        self._given = 0
        self.ready = 0  # messages in the queues, in their turn or not

    def put(self, e: Entry, *, first: bool = False) -> None:
        """Ready at `e.due`. `first`: before its key's others, where it was before."""
        if e.due and not self.ordered:
            self._n += 1
            heapq.heappush(self._later, (e.due, self._n, e))
            return
        self.ready += 1
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

    def put_all(self, entries: Sequence[Entry], priority: int) -> None:
        """Ready now, after their keys' others; all of one class."""
        keys, turn, away = self._classes[priority].keys, self._classes[priority].turn, self._away
        self.ready += len(entries)
        for e in entries:
            key = e.key
            queue = keys.get(key)
            if queue is not None:
                queue.append(e)
                continue
            keys[key] = deque((e,))
            if key not in away:
                turn.append(key)

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
        """What waited for its time, taken out: it is put again, or sent on. In an ordered topic
        only its key is let go.
        """
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
        for share in (
            True,
            False,
        ):  # first each class its part, then whoever still has work fills the batch
            for c, quota in zip(self._classes, quotas, strict=True):
                if c.turn and len(got) < limit:
                    self._pick(
                        c,
                        min(quota, limit - len(got)) if share else limit - len(got),
                        per_key,
                        now,
                        taken,
                        got,
                    )
        self._given += len(got)
        self.ready -= len(got)
        return got

    def _pick(
        self,
        c: _Class,
        quota: int,
        per_key: int | None,
        now: float,
        taken: dict[str, int],
        got: list[Entry],
    ) -> None:
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
                if n == len(queue):
                    got.extend(queue)
                    queue.clear()
                else:
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
            kept = {
                key: deque(e for e in queue if not unwanted(e)) for key, queue in c.keys.items()
            }
            c.keys = {key: queue for key, queue in kept.items() if queue}
            c.turn = deque(key for key in c.turn if key in c.keys)
        self.ready = sum(len(queue) for c in self._classes for queue in c.keys.values())
        gone = [e for _, _, e in self._later if unwanted(e)]
        self._later = [item for item in self._later if not unwanted(item[2])]
        heapq.heapify(self._later)
        for e in gone:
            self.back(e.key)
