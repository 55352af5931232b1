"""Kafka producer: sends batches of messages and returns one result for each message.

The caller chooses the topics.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.brokers.kafka.url import Settings
from penstock.ports import Published

# Errors after which a message is certainly not written: the server rejected it, or it was never
# sent. After any other error the message may be written.
_NOT_WRITTEN = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.POLICY_VIOLATION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._PURGE_QUEUE,
        KafkaError._INVALID_ARG,
    }
)
_FLUSH_TIMEOUT = 0.2  # seconds of one flush. The last report ends a flush early.
_REPORT_MARGIN = 2.0  # seconds that librdkafka may report later than its own timeout


Message = tuple[str, bytes, str | bytes, dict[str, str | bytes | None]]  # topic, body, key, headers


# Looked up once, because they are used for every message.
_OK, _FAILED, _UNKNOWN = Published.OK, Published.FAILED, Published.UNKNOWN
_BY_KEY = -1  # partition number: librdkafka chooses the partition by the key


class _Batch:
    """Collects the delivery reports of one `send`.

    Only the producer thread writes `reported`, and only the event loop writes `expected`. So no
    lock is needed.
    """

    __slots__ = ("_loop", "expected", "failures", "future", "reported")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reported, self.expected = 0, -1
        self.failures: list[tuple[tuple[str, bytes, bytes], Published]] = []
        self.future: asyncio.Future[None] = loop.create_future()
        self._loop = loop

    def report(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self.failures.append(
                (
                    _contents(message.topic(), message.value(), message.key()),
                    _FAILED if error.code() in _NOT_WRITTEN else _UNKNOWN,
                )
            )
        self.reported += 1
        if self.reported == self.expected:
            try:
                self._loop.call_soon_threadsafe(self.finish)
            except RuntimeError:  # the loop is closed, so no call waits for this batch
                pass

    def finish(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def mark_failures(self, messages: Iterable[Message], answers: list[Published]) -> None:
        """Set the results of failed messages in `answers`.

        librdkafka reports the contents of a failed message, not its index. If messages have equal
        contents and not all of them failed alike, mark all of them `unknown`.
        """
        failed: dict[tuple[str, bytes, bytes], list[Published]] = {}
        for contents, answer in self.failures:
            failed.setdefault(contents, []).append(answer)
        equal: dict[tuple[str, bytes, bytes], list[int]] = {}
        for index, (topic, value, key, _) in enumerate(messages):
            if answers[index] is _OK and (contents := _contents(topic, value, key)) in failed:
                equal.setdefault(contents, []).append(index)
        for contents, indexes in equal.items():
            certain = len(indexes) == len(failed[contents]) and len(set(failed[contents])) == 1
            for index in indexes:
                answers[index] = failed[contents][0] if certain else _UNKNOWN


def _contents(topic: str, value: bytes | None, key: str | bytes | None) -> tuple[str, bytes, bytes]:
    return topic, value or b"", key.encode() if isinstance(key, str) else key or b""


class BatchProducer:
    """Producer of one broker object. The first `send` opens it.

    The event loop calls `produce`, which never waits. All waiting is done in a separate thread.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._producer: Producer | None = None
        self._thread: threading.Thread | None = None
        # True when messages were passed to librdkafka, False when the thread must end
        self._wakeups: SimpleQueue[bool] = SimpleQueue()

    def _open(self) -> Producer:
        if self._producer is None:
            conf = {
                "acks": "all",
                "enable.idempotence": True,
                # The default of Java clients, so that all clients use the same partition for a key.
                "partitioner": "murmur2_random",
                "linger.ms": 1,
                "message.timeout.ms": int(self.settings.timeout * 1000),
                "message.max.bytes": self.settings.max_message,
                "queue.buffering.max.kbytes": 64 * 1024,
                "topic.metadata.refresh.fast.interval.ms": 50,
                # After this time, messages to a topic that does not exist are reported as failed.
                "topic.metadata.propagation.max.ms": 3000,
            }
            self._wakeups = SimpleQueue()
            producer = self._producer = Producer(
                self.settings.client() | conf | self.settings.rdkafka
            )
            self._thread = threading.Thread(
                target=_handle_reports,
                args=(producer, self._wakeups),
                name="kafka-producer",
                daemon=True,
            )
            self._thread.start()
        return self._producer

    async def send(self, messages: Sequence[Message]) -> list[Published]:
        """Send messages and return one result for each.

        `ok` means that all in-sync replicas have the message, `full` that the local queue was full,
        and `unknown` that the message may be written.
        """
        if not messages:
            return []
        batch, fatal = _Batch(asyncio.get_running_loop()), False
        report, answers = batch.report, [_OK] * len(messages)
        try:
            produce = self._open().produce
        except KafkaException:
            return [_FAILED] * len(messages)
        for index, (topic, value, key, headers) in enumerate(messages):
            try:
                # Positional arguments, because keyword arguments make the call a third slower.
                produce(topic, value, key, _BY_KEY, report, report, 0, headers)
            except BufferError:
                answers[index] = Published.FULL
            except KafkaException as e:
                fatal = fatal or e.args[0].code() == KafkaError._FATAL
                answers[index] = _FAILED
        batch.expected = answers.count(_OK)
        self._wakeups.put(True)
        if batch.reported == batch.expected:
            batch.finish()
        try:
            async with asyncio.timeout(self.settings.timeout + _REPORT_MARGIN):
                await batch.future
        except TimeoutError:
            answers = [_UNKNOWN if answer is _OK else answer for answer in answers]
        if batch.failures:
            batch.mark_failures(messages, answers)
        # An idempotent producer that lost its sequence number cannot continue. The next `send`
        # opens a new producer.
        if fatal:
            await self.close()
        return answers

    async def close(self) -> None:
        producer, thread, self._producer = self._producer, self._thread, None
        if producer is not None and thread is not None:
            self._wakeups.put(False)
            await asyncio.get_running_loop().run_in_executor(None, thread.join)


def _handle_reports(producer: Producer, wakeups: SimpleQueue[bool]) -> None:
    """Run the producer thread, until the queue contains False.

    `flush` handles the reports of a whole batch in one call, and does not wait for `linger.ms`.
    """
    while wakeups.get():
        while producer.flush(_FLUSH_TIMEOUT) and wakeups.empty():
            pass
    if producer.flush(2.0):
        producer.purge()
        producer.flush(1.0)
