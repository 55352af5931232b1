"""Assigned partitions, and messages that were received from them and are not settled.

Uses no Kafka client and no clock.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.brokers.kafka.topics import Layout, position
from penstock.ports import Delivery
from penstock.rules.watermark import Window


class Partition:
    """One assigned partition.

    The consumer thread writes `received_count`, `received_bytes`, `next_offset`, `paused` and
    `pause_changed_at`. The event loop writes all other attributes. So the counters need no lock.
    """

    __slots__ = (
        "base",
        "commit_confirmed",
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
