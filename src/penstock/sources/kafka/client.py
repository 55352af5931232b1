"""The consumer under the Kafka source: a topic's partitions from given offsets on, without joining
a group. What messages mean is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.errors import SourceDown
from penstock.sources.kafka.messages import Message
from penstock.stores.kafka import Topic, sentence
from penstock.stores.kafka_access import error_of, weightier

T = TypeVar("T")
POLL = 0.5  # seconds without a message after which we say so
PREFETCH = 16 << 20


class Client:
    """One consumer, used by one thread. Everything waits, and raises SourceDown."""

    def __init__(self, topic: Topic, group: str) -> None:
        self.topic = topic
        self.at: dict[int, int] = {}  # the next offset, by partition
        self._group = group
        self._consumer: Consumer | None = None
        self._ended: set[int] = set()
        self._trouble: KafkaError | None = None
        self._away = False
        self._owed: KafkaError | None = None  # came behind messages, for the next call

    def open(self) -> tuple[str, str, dict[int, tuple[int, int]]]:
        """(cluster, id of the topic, first and next offset of each partition)"""
        conf: dict[str, Any] = {
            "group.id": self._group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",  # a gap is told, never skipped in silence
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.max.bytes": PREFETCH,
            "fetch.message.max.bytes": 1 << 20,
            "queued.max.messages.kbytes": PREFETCH >> 10,
            "queued.min.messages": 10_000,
            "error_cb": self._on_error,
        }
        try:
            self._consumer = Consumer(self.topic.client() | conf | self.topic.rdkafka)
        except (KafkaException, TypeError, ValueError) as e:
            raise SourceDown(
                f"{self.topic.label}: {e}",
                hint="check its options, those that begin with rdkafka. above all",
            ) from None
        cluster, partitions = self._metadata()
        spans = {}
        for p in partitions:
            found = self._asking(
                "asking for offsets",
                self._open.get_watermark_offsets,
                TopicPartition(self.topic.name, p),
                timeout=self.topic.timeout,
            )
            if found is None:
                raise self._down(
                    self._trouble or KafkaError(KafkaError._TIMED_OUT), "asking for offsets"
                )
            spans[p] = found
        return cluster, self._topic_id(), spans

    @property
    def _open(self) -> Consumer:
        assert self._consumer is not None
        return self._consumer

    def _metadata(self) -> tuple[str, list[int]]:
        found = self._asking(
            "asking for its partitions",
            self._open.list_topics,
            self.topic.name,
            timeout=self.topic.timeout,
        )
        there = found.topics[self.topic.name]
        if there.error is not None or not there.partitions:
            raise self._down(
                there.error or KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART),
                "asking for its partitions",
            )
        return found.cluster_id or "", sorted(there.partitions)

    def _topic_id(self) -> str:
        admin = AdminClient(self.topic.client() | self.topic.rdkafka)
        future = admin.describe_topics(
            TopicCollection([self.topic.name]), request_timeout=self.topic.timeout
        )[self.topic.name]
        described = self._asking("asking for its id", future.result, self.topic.timeout + 5)
        return str(described.topic_id or "")

    def assign(self, at: Mapping[int, int]) -> None:
        self.at = dict(at)
        self._ended = set()
        self._asking(
            "reading",
            self._open.assign,
            [TopicPartition(self.topic.name, p, offset) for p, offset in at.items()],
        )

    def look_for_partitions(self) -> None:
        new = [p for p in self._metadata()[1] if p not in self.at]
        if new:
            self._asking(
                "reading",
                self._open.incremental_assign,
                [TopicPartition(self.topic.name, p, 0) for p in new],
            )
            self.at |= dict.fromkeys(new, 0)

    def take(self, limit: int, size: int) -> list[Message]:
        """What is there; else what comes within a moment. None, and `is_at_the_end`: there is
        nothing.
        """
        if self._owed is not None:
            raise self._down(self._owed, "reading")
        found: list[Message] = []
        wait = POLL
        while len(found) < limit and size > 0:
            m: Any = self._asking("reading", self._open.poll, wait)
            if m is None:
                if not wait or found:
                    break
                self._check()
                break
            p, offset = m.partition(), m.offset()
            if (error := m.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    self._ended.add(p)
                    self.at[p] = max(
                        self.at[p], offset
                    )  # behind a transaction's marks, which are no messages
                    if found or self.is_at_the_end:
                        wait = 0.0
                    continue
                if found:  # they come first; the library says it only once
                    self._owed = error
                    break
                raise self._down(error, "reading")
            self._ended.discard(p)
            kind, ms = m.timestamp()
            value = m.value()
            found.append(
                Message(
                    self.topic.name,
                    p,
                    offset,
                    ms / 1000 if kind else None,
                    m.key(),
                    value,
                    m.headers() or (),
                )
            )
            self.at[p] = offset + 1
            size -= len(value or b"") + len(m.key() or b"")
            wait = 0.0
        return found

    def _check(self) -> None:
        """All servers were away for a moment: are they still?"""
        if self._away:
            self._metadata()
            self._away, self._trouble = False, None

    @property
    def is_at_the_end(self) -> bool:
        return self._ended >= self.at.keys()

    def backlog(self) -> int | None:
        """Messages that are there and not read, as the last answers of the servers had it."""
        total = 0
        for p, offset in self.at.items():
            try:
                _, high = self._open.get_watermark_offsets(
                    TopicPartition(self.topic.name, p), cached=True
                )
            except (KafkaException, TypeError):
                return None
            if high < 0:  # not known yet
                return None
            total += max(0, high - offset)
        return total

    def commit(self, at: Mapping[int, int]) -> None:
        """For those who watch; whether it worked is not our concern."""
        try:
            self._open.commit(
                offsets=[TopicPartition(self.topic.name, p, offset) for p, offset in at.items()],
                asynchronous=True,
            )
        except KafkaException:
            pass

    def at_time(self, when: float, spans: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        wanted = [TopicPartition(self.topic.name, p, max(0, int(when * 1000))) for p in spans]
        found = self._asking(
            "asking for offsets by time",
            self._open.offsets_for_times,
            wanted,
            timeout=self.topic.timeout,
        )
        return {
            tp.partition: tp.offset if tp.offset >= 0 else spans[tp.partition][1] for tp in found
        }

    def close(self) -> None:
        if self._consumer is not None:
            consumer, self._consumer = self._consumer, None
            consumer.close()

    # -- trouble -----------------------------------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        self._trouble = weightier(self._trouble, error)
        self._away = self._away or error.code() not in (
            KafkaError._TRANSPORT,
            KafkaError._TIMED_OUT,
        )

    def _asking(self, doing: str, work: Callable[..., T], *args: Any, **named: Any) -> T:
        try:
            return work(*args, **named)
        except KafkaException as e:
            raise self._down(error_of(e), doing) from None
        except TimeoutError:
            raise self._down(KafkaError(KafkaError._TIMED_OUT), doing) from None

    def _down(self, error: KafkaError, doing: str) -> SourceDown:
        if (
            error.code() == KafkaError._AUTO_OFFSET_RESET
        ):  # retention was quicker than we; `_begin` will say how much is gone
            return SourceDown(
                f"{self.topic.label}: what comes next was deleted before it was read",
                hint="reading goes on from what is there",
                after=0.0,
            )
        if self._consumer is not None:
            self._consumer.poll(
                0.1
            )  # it tells its own complaints only when it is asked; this client ends here, so no message is missed
        message, hint = sentence(self.topic, weightier(self._trouble, error), doing)
        return SourceDown(message, hint=hint)
