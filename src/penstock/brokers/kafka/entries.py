"""Assigned partitions, and messages that were received from them and are not settled.

Uses no Kafka client and no clock.
"""

from __future__ import annotations

from penstock.brokers.kafka.topics import ServerTopic, position
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
        server_topic: ServerTopic,
        number: int,
        window: Window[BufferedMessage],
        topic: str,
        group: str,
    ) -> None:
        self.server_topic, self.number, self.window, self.topic, self.group = (
            server_topic,
            number,
            window,
            topic,
            group,
        )
        self.topic_partition = (server_topic.name, number)
        # position of a message: base | offset
        self.base = position(server_topic.topic_index, number, 0)
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
