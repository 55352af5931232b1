"""Thread that owns the Kafka client of one consumer group: it joins, polls, pauses and commits.

Received messages belong to the event loop, in `group_reader`.

Only this thread calls the client, because a call from another thread would wait until the poll
ends. The thread reports to the event loop by `call_soon_threadsafe`, and the event loop passes
commit requests in a deque. While a receive call waits, the thread waits in the client, and a
message ends that wait. Otherwise it waits for an event that the loop sets, so that a commit starts
without delay and messages are collected into larger batches.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVarTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.brokers.kafka.commits import CommitAnswer, CommitRequest
from penstock.brokers.kafka.entries import BufferedMessage, Partition
from penstock.brokers.kafka.message import read_runs
from penstock.brokers.kafka.topics import TopicAndPartition
from penstock.rules.watermark import SPAN, Window, settled_ahead
from penstock.stores.kafka_access import error_of, weightier

if TYPE_CHECKING:
    from penstock.brokers.kafka.group_reader import GroupReader

MAX_POLL_MESSAGES = 500  # messages of one poll
# Messages of a retry partition that are held until they are due. The others stay on the server.
RETRY_WINDOW = 200
# Seconds of one poll: idle, longest and shortest while commit requests are likely. A message ends
# a poll, a commit request does not.
_IDLE_POLL, _MAX_BUSY_POLL, _MIN_BUSY_POLL = 0.1, 0.02, 0.003
# Seconds after an arrival or a commit in which commit requests are likely. The poll is shorter the
# less of this time has passed.
_BUSY_PERIOD = 0.5
# Seconds that the first batch after an assignment waits for messages of the other partitions.
# Otherwise the keys and classes of the first partition would get ahead of the others.
_FIRST_BATCH_WAIT = 0.03
# Seconds that a partition stays paused at least. Each change of the pause discards the messages
# that the client has prefetched.
_MIN_PAUSE = 1.0
# A paused partition is resumed when its unsettled messages use at most this share of every limit:
# count, size and offset range.
_RESUME_SHARE = 0.6
_PROBE_INTERVAL = 1.0  # seconds between two probes of servers that were reported as down
_OUTAGES = (
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._RESOLVE,
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
)
# Numbers all assignments of this process, so that a token of an earlier reader never equals a
# token of a later one.
_epochs = itertools.count(1)
Ts = TypeVarTuple("Ts")


class GroupConsumer:
    """Member of a consumer group. The thread starts with the object.

    It calls the `on_…` methods of the reader in the event loop, in the order of the events. When
    `closing` is set, the consumer leaves the group and calls `on_ended`.
    """

    def __init__(
        self, reader: GroupReader, loop: asyncio.AbstractEventLoop, group_id: str, lease: float
    ) -> None:
        self._reader, self._loop = reader, loop
        self._group_id, self._lease = group_id, lease
        self._commits, self._wakeup = reader.commits, reader.wakeup
        self.closing = self.abandoned = False
        self.outage: KafkaError | None = None
        self._commit_in_progress: CommitAnswer | None = None
        self._partitions: dict[TopicAndPartition, Partition] = {}
        # partitions that are paused or have received messages since the last check
        self._backpressure_checks: set[Partition] = set()
        self._newly_assigned = False
        self._last_probe = self._last_activity = 0.0
        threading.Thread(target=self._run, name=f"kafka-{group_id}", daemon=True).start()

    def _call_in_loop(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed, and the owner did not close this consumer
            self.closing = self.abandoned = True

    def _run(self) -> None:
        error: KafkaError | None = None
        consumer = None
        try:
            consumer = Consumer(self._configuration())
            consumer.subscribe(
                [server_topic.name for server_topic in self._reader.plan.server_topics],
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self.closing:
                self._poll_once(consumer)
        except KafkaException as e:
            error = weightier(self.outage, error_of(e))
        finally:
            if consumer is not None:
                with suppress(KafkaException, RuntimeError):
                    consumer.close()
            self._call_in_loop(self._reader.on_ended, error)

    def _configuration(self) -> dict[str, Any]:
        s = self._reader.settings
        conf: dict[str, Any] = {
            "group.id": self._group_id,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 100,
            "fetch.error.backoff.ms": 50,
            "queued.min.messages": 2 * MAX_POLL_MESSAGES,
            "queued.max.messages.kbytes": 16 * 1024,
            "on_commit": self._on_commit,
            "error_cb": self._on_error,
        }
        if s.protocol == "consumer":
            conf["group.protocol"] = "consumer"
        else:
            session = int(1000 * (s.session or max(6.0, self._lease)))
            conf |= {
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": session,
                "heartbeat.interval.ms": max(100, session // 10),
                "max.poll.interval.ms": max(300_000, session),
            }
        return s.client() | conf | s.rdkafka

    def _poll_once(self, consumer: Consumer) -> None:
        self._wakeup.clear()  # before the conditions are read that the event announces
        quiet = time.monotonic() - self._last_activity
        poll_timeout = (
            _IDLE_POLL
            if not (self._reader.handed_out or self._commits.uncommitted or quiet < _BUSY_PERIOD)
            else min(max(_MIN_BUSY_POLL, quiet / 8), _MAX_BUSY_POLL)
        )
        if self._partitions and not (
            self._reader.receivers_waiting
            or self._commits.requests
            or self._commit_in_progress is not None
            or self.closing
        ):
            # No call waits for the thread. Polling only keeps the group membership.
            poll_timeout = 0
            self._wakeup.wait(_IDLE_POLL)
        messages = consumer.consume(1, 0 if self._commits.requests else poll_timeout)
        if messages:
            messages += consumer.consume(
                MAX_POLL_MESSAGES - 1, _FIRST_BATCH_WAIT if self._newly_assigned else 0
            )
            self._newly_assigned = False
            self._last_activity = time.monotonic()
            runs = read_runs(messages, self._partitions, self._on_error)
            if runs:
                self.outage = None
                self._backpressure_checks.update([run[0] for run in runs])
                self._call_in_loop(self._reader.on_messages, runs)
        elif self.outage is not None and time.monotonic() > self._last_probe + _PROBE_INTERVAL:
            self._probe(consumer)
        while self._commits.requests:
            self._last_activity = time.monotonic()
            self._start_commit(consumer, *self._commits.requests.popleft())
        if self._backpressure_checks:
            self._apply_backpressure(consumer)

    def _offsets_of(self, request: CommitRequest) -> list[TopicPartition]:
        """Return the offsets to commit, without those of partitions that are lost."""
        return [
            TopicPartition(*part.topic_partition, offset, metadata=metadata)
            for part, offset, metadata in request
            if self._partitions.get(part.topic_partition) is part
        ]

    def _start_commit(
        self, consumer: Consumer, request: CommitRequest, answer: CommitAnswer
    ) -> None:
        offsets = self._offsets_of(request)
        if not offsets:
            self._call_in_loop(answer.set_result, None)
            return
        self._commit_in_progress = answer
        try:
            consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as e:
            self._on_commit(error_of(e), ())

    def _on_commit(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        answer, self._commit_in_progress = self._commit_in_progress, None
        if answer is None:
            return
        failure = error or next((tp.error for tp in partitions if tp.error is not None), None)
        if failure is None:
            self.outage = None
        self._call_in_loop(answer.set_result, failure)

    def _apply_backpressure(self, consumer: Consumer) -> None:
        """Pause or resume each partition by its unsettled messages: count, size, offset range.

        Polling continues, so the membership is kept.
        """
        now, settings = time.monotonic(), self._reader.settings
        for part in list(self._backpressure_checks):
            window = RETRY_WINDOW if part.server_topic.delay else settings.window
            share = max(
                (part.received_count - part.settled_count) / window,
                (part.received_bytes - part.settled_bytes) / settings.window_bytes,
                (part.next_offset - part.last_watermark) / (SPAN - 2 * MAX_POLL_MESSAGES),
            )
            if (share >= 1 and not part.paused) or (
                share <= _RESUME_SHARE and part.paused and now - part.pause_changed_at >= _MIN_PAUSE
            ):
                where = [TopicPartition(*part.topic_partition)]
                try:
                    (consumer.resume if part.paused else consumer.pause)(where)
                except KafkaException:  # the partition is being revoked
                    continue
                part.paused, part.pause_changed_at = not part.paused, now
            if not part.paused:
                self._backpressure_checks.discard(part)

    # -- membership --------------------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Start each partition at its committed offset, with the settled offsets above it.

        A partition without a commit starts at its oldest message.
        """
        reader, parts = self._reader, []
        committed = (
            consumer.committed(partitions, timeout=reader.settings.timeout) if partitions else ()
        )
        for tp in committed:
            if tp.error is not None:
                raise KafkaException(tp.error)
            start = max(0, tp.offset)
            window: Window[BufferedMessage] = Window(
                next(_epochs), start, settled_ahead(start, tp.metadata)
            )
            parts.append(Partition(reader.plan, tp.topic, tp.partition, window, reader.group))
        self._partitions |= {part.topic_partition: part for part in parts}
        starts = [TopicPartition(*part.topic_partition, part.window.next) for part in parts]
        consumer.incremental_assign(starts)
        if starts:
            # librdkafka remembers the pause of a partition that this consumer had before. Without
            # a resume it would never read that partition again.
            consumer.resume(starts)
        self._newly_assigned = True
        self.outage = None
        self._call_in_loop(reader.on_assigned, parts)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        at = [(tp.topic, tp.partition) for tp in partitions]
        last: CommitRequest = []
        if not (self.abandoned or self._loop.is_closed()):
            revoking = self._reader.on_revoking(at)
            try:
                work = asyncio.run_coroutine_threadsafe(revoking, self._loop)
            except RuntimeError:  # the event loop was closed in the meantime
                revoking.close()
                self.closing = self.abandoned = True
                return self._drop(consumer, partitions, [], False)
            try:
                last = work.result(self._reader.settings.grace + 5)
            except (TimeoutError, CancelledError):
                # The event loop is stuck or ends. Its later settles are refused, and Kafka
                # redelivers the messages.
                work.cancel()
        offsets, confirmed = self._offsets_of(last), True
        if offsets:
            try:
                answers = consumer.commit(offsets=offsets, asynchronous=False) or ()
                confirmed = all(tp.error is None for tp in answers)
            except KafkaException:
                confirmed = False
        self._drop(consumer, partitions, [part for part, _, _ in last], confirmed)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Drop the partitions without a commit: other members own them already."""
        self._drop(consumer, partitions, [], False)

    def _drop(
        self,
        consumer: Consumer,
        partitions: list[TopicPartition],
        committed: Sequence[Partition],
        confirmed: bool,
    ) -> None:
        at = [(tp.topic, tp.partition) for tp in partitions]
        self._backpressure_checks -= {self._partitions.pop(a, None) for a in at}
        consumer.incremental_unassign(partitions)
        self._call_in_loop(self._reader.on_lost, at, committed, confirmed)

    # -- outages -----------------------------------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() in _OUTAGES or not error.retriable():
            self.outage = weightier(self.outage, error)

    def _probe(self, consumer: Consumer) -> None:
        """Clear the outage if a server answers. The client only reports when servers go down."""
        self._last_probe = time.monotonic()
        with suppress(KafkaException):
            consumer.list_topics(timeout=1.0)
            self.outage = None
