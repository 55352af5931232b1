"""Kafka consumer of a source: reads a topic's partitions from given offsets, without a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.errors import SourceDown
from penstock.rules.json_limits import memory_of
from penstock.sources.kafka.messages import Message
from penstock.stores.kafka import Topic, sentence
from penstock.stores.kafka_access import error_of, weightier

T = TypeVar("T")
POLL_TIMEOUT = 0.5  # seconds without a message after which `take` returns
PREFETCH = 16 << 20  # bytes


class Client:
    """Consumer that is used by one thread. Its methods block, and raise SourceDown."""

    def __init__(self, topic: Topic, group: str) -> None:
        """Create the consumer without connecting to the servers."""
        self.topic = topic
        self.at: dict[int, int] = {}  # next offset of each partition
        self._ended: set[int] = set()  # partitions that are read to their end
        self._last_error: KafkaError | None = None
        self._may_be_down = False
        # Error that followed messages. The next call of `take` raises it.
        self._deferred_error: KafkaError | None = None
        conf: dict[str, Any] = {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",  # a gap is reported and never skipped silently
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
                hint="check the options of the source, especially those that start with rdkafka.",
            ) from None

    def open(self) -> tuple[str, str, dict[int, tuple[int, int]]]:
        """Connect. Return cluster id, topic id, and first and next offset of each partition."""
        cluster, partitions = self._metadata()
        ranges = {}
        for p in partitions:
            found = self._call(
                "requesting offsets",
                self._consumer.get_watermark_offsets,
                TopicPartition(self.topic.name, p),
                timeout=self.topic.timeout,
            )
            if found is None:
                raise self._down(
                    self._last_error or KafkaError(KafkaError._TIMED_OUT), "requesting offsets"
                )
            ranges[p] = found
        return cluster, self._topic_id(), ranges

    def _metadata(self) -> tuple[str, list[int]]:
        found = self._call(
            "requesting its partitions",
            self._consumer.list_topics,
            self.topic.name,
            timeout=self.topic.timeout,
        )
        found_topic = found.topics[self.topic.name]
        if found_topic.error is not None or not found_topic.partitions:
            raise self._down(
                found_topic.error or KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART),
                "requesting its partitions",
            )
        return found.cluster_id or "", sorted(found_topic.partitions)

    def _topic_id(self) -> str:
        admin = AdminClient(self.topic.client() | self.topic.rdkafka)
        future = admin.describe_topics(
            TopicCollection([self.topic.name]), request_timeout=self.topic.timeout
        )[self.topic.name]
        described = self._call("requesting its id", future.result, self.topic.timeout + 5)
        return str(described.topic_id or "")

    def assign(self, at: Mapping[int, int]) -> None:
        self.at = dict(at)
        self._ended = set()
        self._call(
            "reading",
            self._consumer.assign,
            [TopicPartition(self.topic.name, p, offset) for p, offset in at.items()],
        )

    def add_new_partitions(self) -> None:
        """Also read partitions that were added since `open`, from their start."""
        new = [p for p in self._metadata()[1] if p not in self.at]
        if new:
            self._call(
                "reading",
                self._consumer.incremental_assign,
                [TopicPartition(self.topic.name, p, 0) for p in new],
            )
            self.at |= dict.fromkeys(new, 0)

    def take(self, limit: int, size: int) -> list[Message]:
        """Return available messages, up to `limit` messages or `size` bytes of memory.

        Wait up to 0.5 s for the first message. The list is empty if none arrives.
        """
        if self._deferred_error is not None:
            raise self._down(self._deferred_error, "reading")
        found: list[Message] = []
        wait = POLL_TIMEOUT
        while len(found) < limit and size > 0:
            m: Any = self._call("reading", self._consumer.poll, wait)
            if m is None:
                if wait and not found and self._may_be_down:
                    # After an error, see whether the servers are reachable again.
                    self._metadata()
                    self._may_be_down, self._last_error = False, None
                break
            p, offset = m.partition(), m.offset()
            if (error := m.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    self._ended.add(p)
                    # The end is after transaction markers, which are not delivered as messages.
                    self.at[p] = max(self.at[p], offset)
                    if found or self.is_at_end:
                        wait = 0.0
                    continue
                # Return the messages first. librdkafka reports the error only once.
                if found:
                    self._deferred_error = error
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
            size -= memory_of(value or b"") + len(m.key() or b"")
            wait = 0.0
        return found

    @property
    def is_at_end(self) -> bool:
        return self._ended >= self.at.keys()

    def backlog(self) -> int | None:
        """Return the number of unread messages by the servers' last responses, or None."""
        total = 0
        for p, offset in self.at.items():
            try:
                _, high = self._consumer.get_watermark_offsets(
                    TopicPartition(self.topic.name, p), cached=True
                )
            except (KafkaException, TypeError):
                return None
            if high < 0:  # not known yet
                return None
            total += max(0, high - offset)
        return total

    def commit(self, at: Mapping[int, int]) -> None:
        """Commit offsets for monitoring tools. Errors are ignored."""
        with suppress(KafkaException):
            self._consumer.commit(
                offsets=[TopicPartition(self.topic.name, p, offset) for p, offset in at.items()],
                asynchronous=True,
            )

    def offsets_at(self, time: float, ranges: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Return the first offset of each partition at or after this time (epoch seconds)."""
        wanted = [TopicPartition(self.topic.name, p, max(0, int(time * 1000))) for p in ranges]
        found = self._call(
            "requesting offsets by time",
            self._consumer.offsets_for_times,
            wanted,
            timeout=self.topic.timeout,
        )
        return {
            tp.partition: tp.offset if tp.offset >= 0 else ranges[tp.partition][1] for tp in found
        }

    def close(self) -> None:
        self._consumer.close()

    # -- errors ------------------------------------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        self._last_error = weightier(self._last_error, error)
        self._may_be_down = self._may_be_down or error.code() not in (
            KafkaError._TRANSPORT,
            KafkaError._TIMED_OUT,
        )

    def _call(self, activity: str, work: Callable[..., T], *args: Any, **named: Any) -> T:
        try:
            return work(*args, **named)
        except KafkaException as e:
            raise self._down(error_of(e), activity) from None
        except TimeoutError:
            raise self._down(KafkaError(KafkaError._TIMED_OUT), activity) from None

    def _down(self, error: KafkaError, activity: str) -> SourceDown:
        # Retention deleted unread messages. `KafkaSource._start` then reports how many.
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            return SourceDown(
                f"{self.topic.label}: the next message was deleted before it was read",
                hint="reading continues with the messages that exist",
                after=0.0,
            )
        # librdkafka calls `_on_error` only during a poll. This client is not used after the error,
        # so no message is lost.
        self._consumer.poll(0.1)
        message, hint = sentence(self.topic, weightier(self._last_error, error), activity)
        return SourceDown(message, hint=hint)
