"""The one producer of a Kafka broker object: messages out, one answer for each. What is sent where is decided by others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.brokers.kafka_dsn import Settings
from penstock.ports import Published

# Certainly not written: the server said so, or it never left. Everything else may be there.
_REFUSED = frozenset(
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
_POLL = 0.1  # seconds; a report ends it at once
_SPARE = 2.0  # how much later than its own limit the library may report


class Message(NamedTuple):
    topic: str
    value: bytes
    key: bytes
    headers: list[tuple[str, str | bytes | None]]


class _Batch:
    """Answers of one `send`. `reported` is written by the producer's thread only, `expected` by the loop only: no lock is needed."""

    __slots__ = ("_future", "_loop", "answers", "expected", "reported")

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        self.answers = [Published.UNKNOWN] * size
        self.reported, self.expected = 0, -1
        self._loop, self._future = loop, future

    def report(self, place: int, error: KafkaError | None, _: object) -> None:
        self.answers[place] = Published.OK if error is None else Published.FAILED if error.code() in _REFUSED else Published.UNKNOWN
        self.reported += 1
        if self.reported == self.expected:
            try:
                self._loop.call_soon_threadsafe(self.finish)
            except RuntimeError:  # the loop is closed: nobody waits
                pass

    def finish(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


class Outbound:
    """Made at the first `send`. `produce` never waits and may be called by the loop; all waiting is in the thread that polls."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._producer: Producer | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def _open(self) -> Producer:
        if self._producer is None:
            conf = {
                "acks": "all",
                "enable.idempotence": True,
                "partitioner": "murmur2_random",  # what Java clients do, so that theirs and ours agree where a key lives
                "linger.ms": 1,
                "message.timeout.ms": int(self.settings.timeout * 1000),
                "message.max.bytes": self.settings.max_message,
                "queue.buffering.max.kbytes": 64 * 1024,
                "topic.metadata.refresh.fast.interval.ms": 50,
                "topic.metadata.propagation.max.ms": 3000,  # after that, a topic that nobody made is told as failed
            }
            self._stop = threading.Event()
            producer = self._producer = Producer(self.settings.client() | conf | self.settings.rdkafka)
            self._thread = threading.Thread(target=_serve, args=(producer, self._stop), name="kafka-producer", daemon=True)
            self._thread.start()
        return self._producer

    async def send(self, messages: Sequence[Message]) -> list[Published]:
        """`ok` is written by all copies in sync, `full` did not fit into the local queue, `unknown` may be there."""
        if not messages:
            return []
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        batch = _Batch(len(messages), loop, future)
        report, handed_over, fatal = batch.report, 0, False
        try:
            produce = self._open().produce
        except KafkaException:
            return [Published.FAILED] * len(messages)
        for place, (topic, value, key, headers) in enumerate(messages):
            try:
                produce(topic, value, key, headers=headers, on_delivery=partial(report, place))
                handed_over += 1
            except BufferError:
                batch.answers[place] = Published.FULL
            except KafkaException as e:
                fatal = fatal or e.args[0].code() == KafkaError._FATAL
                batch.answers[place] = Published.FAILED
        batch.expected = handed_over
        if batch.reported == handed_over:
            batch.finish()
        try:
            async with asyncio.timeout(self.settings.timeout + _SPARE):
                await future
        except TimeoutError:
            pass
        if fatal:  # an idempotent producer that lost its place in line cannot go on; a new one can
            await self.close()
        return batch.answers

    async def close(self) -> None:
        producer, thread, self._producer = self._producer, self._thread, None
        if producer is not None and thread is not None:
            self._stop.set()
            await asyncio.get_running_loop().run_in_executor(None, thread.join)


def _serve(producer: Producer, stop: threading.Event) -> None:
    while not stop.is_set():
        producer.poll(_POLL)
    if producer.flush(2.0):
        producer.purge()
        producer.flush(1.0)
