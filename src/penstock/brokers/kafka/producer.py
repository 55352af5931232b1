"""The one producer of a Kafka broker object: messages out, one answer for each. What is sent where
is decided by others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.brokers.kafka.url import Settings
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
_FLUSH = 0.2  # seconds; the last report ends it at once
_SPARE = 2.0  # how much later than its own limit the library may report


Message = tuple[str, bytes, str | bytes, dict[str, str | bytes | None]]  # topic, body, key, headers


_OK, _FAILED, _UNKNOWN = (
    Published.OK,
    Published.FAILED,
    Published.UNKNOWN,
)  # looked up once: they are asked for with every message
_ANY = -1  # partition: by the key


class _Batch:
    """Reports of one `send`, all to one function. `reported` is written by the producer's thread
    only, `expected` by the loop only: no lock is needed.
    """

    __slots__ = ("_loop", "expected", "future", "reported", "wrong")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reported, self.expected = 0, -1
        self.wrong: list[tuple[tuple[str, bytes, bytes], Published]] = []
        self.future: asyncio.Future[None] = loop.create_future()
        self._loop = loop

    def report(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self.wrong.append(
                (
                    _contents(message.topic(), message.value(), message.key()),
                    _FAILED if error.code() in _REFUSED else _UNKNOWN,
                )
            )
        self.reported += 1
        if self.reported == self.expected:
            try:
                self._loop.call_soon_threadsafe(self.finish)
            except RuntimeError:  # the loop is closed: nobody waits
                pass

    def finish(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def blame(self, messages: Iterable[Message], answers: list[Published]) -> None:
        """The library tells what was in a message that failed, not which it was: of several that
        are alike, none is certain unless all have failed.
        """
        told: dict[tuple[str, bytes, bytes], list[Published]] = {}
        for contents, answer in self.wrong:
            told.setdefault(contents, []).append(answer)
        alike: dict[tuple[str, bytes, bytes], list[int]] = {}
        for place, (topic, value, key, _) in enumerate(messages):
            if answers[place] is _OK and (contents := _contents(topic, value, key)) in told:
                alike.setdefault(contents, []).append(place)
        for contents, places in alike.items():
            certain = len(places) == len(told[contents]) and len(set(told[contents])) == 1
            for place in places:
                answers[place] = told[contents][0] if certain else _UNKNOWN


def _contents(topic: str, value: bytes | None, key: str | bytes | None) -> tuple[str, bytes, bytes]:
    return topic, value or b"", key.encode() if isinstance(key, str) else key or b""


class Outbound:
    """Made at the first `send`. `produce` never waits and may be called by the loop; all waiting is
    in the thread that polls.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._producer: Producer | None = None
        self._thread: threading.Thread | None = None
        self._handed: SimpleQueue[bool] = (
            SimpleQueue()
        )  # True: something was handed over; False: it is the end

    def _open(self) -> Producer:
        if self._producer is None:
            conf = {
                "acks": "all",
                "enable.idempotence": True,
                # what Java clients do, so that theirs and ours agree where a key lives
                "partitioner": "murmur2_random",
                "linger.ms": 1,
                "message.timeout.ms": int(self.settings.timeout * 1000),
                "message.max.bytes": self.settings.max_message,
                "queue.buffering.max.kbytes": 64 * 1024,
                "topic.metadata.refresh.fast.interval.ms": 50,
                # after that, a topic that nobody made is told as failed
                "topic.metadata.propagation.max.ms": 3000,
            }
            self._handed = SimpleQueue()
            producer = self._producer = Producer(
                self.settings.client() | conf | self.settings.rdkafka
            )
            self._thread = threading.Thread(
                target=_serve, args=(producer, self._handed), name="kafka-producer", daemon=True
            )
            self._thread.start()
        return self._producer

    async def send_all(self, messages: Sequence[Message]) -> list[Published]:
        return await self.send(len(messages), lambda: messages)

    async def send(self, n: int, compose: Callable[[], Iterable[Message]]) -> list[Published]:
        """`ok` is written by all copies in sync, `full` did not fit into the local queue, `unknown`
        may be there.

        The messages are made one by one, and once more where some have failed: so that they do not
        lie around.
        """
        if not n:
            return []
        batch, fatal = _Batch(asyncio.get_running_loop()), False
        report, answers = batch.report, [_OK] * n
        try:
            produce = self._open().produce
        except KafkaException:
            return [_FAILED] * n
        refused = 0
        for place, (topic, value, key, headers) in enumerate(compose()):
            try:
                produce(
                    topic, value, key, _ANY, report, report, 0, headers
                )  # by place: names cost a third more
            except BufferError:
                answers[place] = Published.FULL
                refused += 1
            except KafkaException as e:
                fatal = fatal or e.args[0].code() == KafkaError._FATAL
                answers[place] = _FAILED
                refused += 1
        batch.expected = n - refused
        self._handed.put(True)
        if batch.reported == batch.expected:
            batch.finish()
        try:
            async with asyncio.timeout(self.settings.timeout + _SPARE):
                await batch.future
        except TimeoutError:
            answers = [_UNKNOWN if answer is _OK else answer for answer in answers]
        if batch.wrong:
            batch.blame(compose(), answers)
        if fatal:  # an idempotent producer that lost its place in line cannot go on; a new one can
            await self.close()
        return answers

    async def close(self) -> None:
        producer, thread, self._producer = self._producer, self._thread, None
        if producer is not None and thread is not None:
            self._handed.put(False)
            await asyncio.get_running_loop().run_in_executor(None, thread.join)


def _serve(producer: Producer, handed: SimpleQueue[bool]) -> None:
    """Reports are read by `flush`: one call for all of a batch, and nothing lingers once the batch
    is handed over.
    """
    while handed.get():
        while producer.flush(_FLUSH) and handed.empty():
            pass
    if producer.flush(2.0):
        producer.purge()
        producer.flush(1.0)
