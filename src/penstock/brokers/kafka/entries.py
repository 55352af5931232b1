"""Buffer of messages that were received from Kafka and not yet handed out.

Messages are ordered by priority class, key and due time. Uses no Kafka client and no clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from penstock.brokers.kafka.topics import Layout, position
from penstock.ports import Delivery
from penstock.rules.priority import WEIGHTS, shares
from penstock.rules.watermark import Window


class Partition:
    """One assigned partition.

    The consumer thread writes `received_count`, `received_bytes`, `next_offset`, `paused` and
    `pause_changed_at`. The event loop writes all other attributes. So the counters need no lock.
    """

    __slots__ = (
        "base",
        "commit_confirmed",
        "epoch",
        "group",
        "last_watermark",
        "leaving",
        "lost",
        "next_offset",
        "number",
        "pause_changed_at",
        "paused",
        "received_bytes",
        "received_count",
        "server_topic",
        "settled_bytes",
        "settled_count",
        "token",
        "topic",
        "topic_partition",
        "window",
    )

    def __init__(
        self,
        plan: Layout,
        name: str,
        number: int,
        window: Window[BufferedMessage],
        group: str,
    ) -> None:
        self.server_topic = next(found for found in plan.server_topics if found.name == name)
        self.topic_partition = (name, number)
        self.number, self.window = number, window
        self.topic, self.group = plan.topic, group
        # position of a message: base | offset
        self.base = position(self.server_topic.topic_index, number, 0)
        # Token of a first delivery. A message that is returned to the backlog gets a new token.
        self.token = window.epoch << 32
        self.received_count = self.received_bytes = self.settled_count = self.settled_bytes = 0
        # the watermark at the last commit, and the offset after the last received message
        self.last_watermark = self.next_offset = window.next
        self.paused, self.pause_changed_at = False, 0.0
        self.leaving = False  # being revoked: hands out no messages
        self.lost = False  # another worker owns the partition
        # False if the partition was lost before the last commit was confirmed
        self.commit_confirmed = True

    def count_settled(self, messages: Collection[BufferedMessage]) -> None:
        self.settled_count += len(messages)
        self.settled_bytes += sum(len(e.body) + MESSAGE_OVERHEAD for e in messages)

    def restart(self, offset: int) -> None:
        """Start again at `offset`, because the offsets went backwards.

        The topic was recreated, or a server lost its newest messages. The recorded offsets belong
        to other messages now.
        """
        self.count_settled(self.window.open.values())
        self.window, self.last_watermark = Window(self.window.epoch, offset), offset

    def retention_alarm(self, now: float, keep: float) -> str:
        """Return a warning if the oldest unsettled message is older than half of the retention.

        `keep` is the retention in seconds, or negative if the topic is not limited by time. Return
        "" if there is no warning.
        """
        oldest = self.window.open.get(self.window.watermark)
        if keep <= 0 or oldest is None or now - oldest.published_at <= keep / 2:
            return ""
        return (
            f"{self.server_topic.name}, partition {self.number}: group {self.group} is"
            f" {(now - oldest.published_at) / 3600:.1f} h behind and retention deletes after"
            f" {keep / 3600:.1f} h, even unread messages: start more workers, or raise retention.ms"
        )


class BufferedMessage(  # type: ignore[misc]
    Delivery, kw_only=True, frozen=False, eq=False, gc=False
):
    """A message that is received and not settled.

    The same object is handed out as the delivery, so that each message has one object. A message
    that is returned to the backlog is replaced by a copy.

    Entries are not tracked by the garbage collector. Their only reference cycle leads through the
    window of their partition, and the window is cleared when the partition is lost.
    """

    part: Partition
    offset: int
    published_at: float  # when this message, or the first message of its run, was published
    not_before: float = 0.0
    target_group: str = ""  # the only group that gets the message, or "" for all groups
    due: float = 0.0  # 0 if the message is ready
    settling: bool = False
    holder: object = None  # the subscription that has the delivery


MESSAGE_OVERHEAD = 200  # approximate bytes of memory that a message takes in addition to its body
# Consecutive messages of one partition. The flag is True if the offsets have no gap, the topic is
# not a retry topic, and all messages are plain: no due time, no target group, and the priority
# class of their topic.
Run = tuple[Partition, list[BufferedMessage], bool]


class _PriorityClass:
    """Messages of one priority class."""

    __slots__ = ("keys", "rotation")

    def __init__(self) -> None:
        self.keys: dict[str, deque[BufferedMessage]] = {}  # without empty queues
        # Keys that messages may be taken from, each once. The longest-waiting key is first.
        self.rotation: deque[str] = deque()


class Backlog:
    """Buffered messages. Keys are served in rotation, and priority classes by their shares.

    In an ordered topic a key is skipped while one of its messages is handed out or not due.
    """

    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self._classes = [_PriorityClass() for _ in WEIGHTS]
        self._busy_keys: set[str] = set()
        self._delayed: list[tuple[float, int, BufferedMessage]] = []
        self._sequence = itertools.count()
        self._taken_count = 0
        self.ready = 0  # messages in the queues, including those of skipped keys

    def put(self, e: BufferedMessage, *, first: bool = False) -> None:
        """Add a message that becomes ready at `e.due`.

        With `first`, put it before the other messages of its key, at its earlier place.
        """
        if e.due and not self.ordered:
            heapq.heappush(self._delayed, (e.due, next(self._sequence), e))
        elif first and (queue := self._classes[e.priority].keys.get(e.key)) is not None:
            queue.appendleft(e)
            self.ready += 1
        else:
            self.put_all([e], e.priority)

    def put_all(self, entries: Sequence[BufferedMessage], priority: int) -> None:
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

    def free_key(self, key: str) -> None:
        """Stop skipping the key. Used in ordered topics when its message is settled or returned."""
        if key in self._busy_keys:
            self._busy_keys.discard(key)
            for c in self._classes:
                if key in c.keys:
                    c.rotation.append(key)

    def next_due(self) -> float | None:
        return self._delayed[0][0] if self._delayed else None

    def pop_due(self, now: float) -> Iterator[BufferedMessage]:
        """Remove and yield the delayed messages that are due. The caller adds or forwards them.

        In an ordered topic the messages are still queued, so only their keys are freed.
        """
        while self._delayed and self._delayed[0][0] <= now:
            _, _, e = heapq.heappop(self._delayed)
            if self.ordered:
                self.free_key(e.key)
            else:
                yield e

    def delayed(self) -> Iterator[BufferedMessage]:
        """Return the messages that are not due."""
        return (e for _, _, e in self._delayed)

    def take(self, limit: int, per_key: int | None, now: float) -> list[BufferedMessage]:
        """Remove and return up to `limit` ready messages, at most `per_key` of one key."""
        got: list[BufferedMessage] = []
        taken: dict[str, int] = {}
        quotas = shares(self._taken_count, limit)
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
        c: _PriorityClass,
        quota: int,
        per_key: int | None,
        now: float,
        taken: dict[str, int],
        got: list[BufferedMessage],
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
                if self.ordered and queue[0].due > now:
                    self._busy_keys.add(key)
                    heapq.heappush(self._delayed, (queue[0].due, next(self._sequence), queue[0]))
                    continue
                n = 1 if self.ordered else min(share, end - len(got), len(queue))
                if per_key is not None:
                    n = min(n, per_key - taken.get(key, 0))
                    if n <= 0:
                        skipped.append(key)
                        continue
                    taken[key] = taken.get(key, 0) + n
                if n == len(queue):
                    got.extend(queue)
                    del c.keys[key]
                else:
                    got.extend([queue.popleft() for _ in range(n)])
                    if not self.ordered:
                        c.rotation.append(key)
                if self.ordered:
                    self._busy_keys.add(key)
        c.rotation.extend(skipped)

    def drop(self, unwanted: Callable[[BufferedMessage], bool]) -> None:
        """Remove the buffered messages for which `unwanted` is true."""
        for c in self._classes:
            remaining = {
                key: deque(e for e in queue if not unwanted(e)) for key, queue in c.keys.items()
            }
            c.keys = {key: queue for key, queue in remaining.items() if queue}
            c.rotation = deque(key for key in c.rotation if key in c.keys)
        self.ready = sum(len(queue) for c in self._classes for queue in c.keys.values())
        removed = [e for _, _, e in self._delayed if unwanted(e)]
        self._delayed = [item for item in self._delayed if not unwanted(item[2])]
        heapq.heapify(self._delayed)
        for e in removed:
            self.free_key(e.key)
