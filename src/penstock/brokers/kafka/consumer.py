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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.brokers.kafka.entries import BufferedMessage, Partition, Run
from penstock.brokers.kafka.message import read_runs
from penstock.brokers.kafka.topics import Layout
from penstock.brokers.kafka.url import Settings
from penstock.rules.watermark import SPAN, Window, settled_ahead
from penstock.stores.kafka_access import error_of, weightier

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
CommitRequest = list[tuple[Partition, int, str]]  # partition, watermark and metadata to commit


class ReaderCallbacks(Protocol):
    """Callbacks of the reader. They run in the event loop, in the order of the events."""

    def on_assigned(self, parts: Sequence[Partition]) -> None: ...
    def on_messages(self, runs: Sequence[Run]) -> None: ...
    def on_revoking(self, at: Sequence[tuple[str, int]], answer: Future[CommitRequest]) -> None: ...
    def on_lost(self, at: Sequence[tuple[str, int]]) -> None: ...
    def on_revoked(self, parts: Sequence[Partition], confirmed: bool) -> None: ...
    def on_committed(self, request: CommitRequest, error: KafkaError | None) -> None: ...
    def on_ended(self, error: KafkaError | None) -> None: ...


class GroupConsumer:
    """Member of a consumer group. The thread starts with the object.

    When `closing` is set, the consumer leaves the group and calls `on_ended`.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Layout,
        group: str,
        group_id: str,
        lease: float,
        loop: asyncio.AbstractEventLoop,
        callbacks: ReaderCallbacks,
    ) -> None:
        (
            self.settings,
            self.plan,
            self.group,
            self.group_id,
            self.lease,
            self._loop,
            self._callbacks,
        ) = (
            settings,
            plan,
            group,
            group_id,
            lease,
            loop,
            callbacks,
        )
        self.commit_requests: deque[CommitRequest] = deque()
        self._wakeup = threading.Event()
        # A delivery is unsettled or a commit is in progress, so a commit request is likely.
        self.busy = False
        # A receive call waits for messages, so they are reported without being collected first.
        self.has_receivers = False
        self.closing = self.abandoned = False
        self.outage: KafkaError | None = None
        self._commit_in_progress: CommitRequest = []
        self._partitions: dict[tuple[str, int], Partition] = {}
        # partitions that are paused or have received messages since the last check
        self._backpressure_checks: set[Partition] = set()
        self._server_topics = {
            server_topic.name: server_topic for server_topic in plan.server_topics
        }
        self._newly_assigned = False
        self._last_probe = self._last_activity = 0.0
        threading.Thread(target=self._run, name=f"kafka-{group_id}", daemon=True).start()

    def _call_in_loop(self, call: Callable[..., Any], *args: Any) -> None:
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
                [server_topic.name for server_topic in self.plan.server_topics],
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
                try:
                    consumer.close()
                except (KafkaException, RuntimeError):
                    pass
            self._call_in_loop(self._callbacks.on_ended, error)

    def _configuration(self) -> dict[str, Any]:
        s = self.settings
        conf: dict[str, Any] = {
            "group.id": self.group_id,
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
            session = int(1000 * (s.session or max(6.0, self.lease)))
            conf |= {
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": session,
                "heartbeat.interval.ms": max(100, session // 10),
                "max.poll.interval.ms": max(300_000, session),
            }
        return s.client() | conf | s.rdkafka

    def wake(self) -> None:
        """Wake the thread for a waiting receive call, a commit request or the end."""
        self._wakeup.set()

    def _poll_once(self, consumer: Consumer) -> None:
        self._wakeup.clear()  # before the conditions are read that the event announces
        quiet = time.monotonic() - self._last_activity
        poll_timeout = (
            _IDLE_POLL
            if not (self.busy or quiet < _BUSY_PERIOD)
            else min(max(_MIN_BUSY_POLL, quiet / 8), _MAX_BUSY_POLL)
        )
        if self._partitions and not (
            self.has_receivers or self.commit_requests or self._commit_in_progress or self.closing
        ):
            # No call waits for the thread. Polling only keeps the group membership.
            poll_timeout = 0
            self._wakeup.wait(_IDLE_POLL)
        messages = consumer.consume(1, 0 if self.commit_requests else poll_timeout)
        if messages:
            messages += consumer.consume(
                MAX_POLL_MESSAGES - 1, _FIRST_BATCH_WAIT if self._newly_assigned else 0
            )
            self._newly_assigned = False
            self._last_activity = time.monotonic()
            self._handle_messages(messages)
        elif self.outage is not None and time.monotonic() > self._last_probe + _PROBE_INTERVAL:
            self._probe(consumer)
        while self.commit_requests:
            self._last_activity = time.monotonic()
            self._start_commit(consumer, self.commit_requests.popleft())
        if self._backpressure_checks:
            self._apply_backpressure(consumer)

    def _handle_messages(self, messages: Sequence[Any]) -> None:
        runs = read_runs(messages, self._partitions, self._on_error)
        if runs:
            self.outage = None
            self._backpressure_checks.update([run[0] for run in runs])
            self._call_in_loop(self._callbacks.on_messages, runs)

    def _start_commit(self, consumer: Consumer, request: CommitRequest) -> None:
        live = [
            item for item in request if self._partitions.get(item[0].topic_partition) is item[0]
        ]
        if not live:
            self._call_in_loop(self._callbacks.on_committed, request, None)
            return
        self._commit_in_progress = request
        try:
            consumer.commit(offsets=_offsets_of(live), asynchronous=True)
        except KafkaException as e:
            self._commit_in_progress = []
            self._call_in_loop(self._callbacks.on_committed, request, error_of(e))

    def _on_commit(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        request, self._commit_in_progress = self._commit_in_progress, []
        if not request:
            return
        failure = error or next((tp.error for tp in partitions if tp.error is not None), None)
        if failure is None:
            self.outage = None
        self._call_in_loop(self._callbacks.on_committed, request, failure)

    def _apply_backpressure(self, consumer: Consumer) -> None:
        """Pause or resume each partition by its unsettled messages: count, size, offset range.

        Polling continues, so the membership is kept.
        """
        now = time.monotonic()
        for part in list(self._backpressure_checks):
            count, size = (
                part.received_count - part.settled_count,
                part.received_bytes - part.settled_bytes,
            )
            window = RETRY_WINDOW if part.server_topic.delay else self.settings.window
            share = max(
                count / window,
                size / self.settings.window_bytes,
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
        parts, starts = [], []
        committed = (
            consumer.committed(partitions, timeout=self.settings.timeout) if partitions else []
        )
        for tp in committed:
            if tp.error is not None:
                raise KafkaException(tp.error)
            start = max(0, tp.offset)
            window: Window[BufferedMessage] = Window(
                next(_epochs), start, settled_ahead(start, tp.metadata)
            )
            part = self._partitions[tp.topic, tp.partition] = Partition(
                self._server_topics[tp.topic], tp.partition, window, self.plan.topic, self.group
            )
            parts.append(part)
            starts.append(TopicPartition(tp.topic, tp.partition, start))
        consumer.incremental_assign(starts)
        if starts:
            # librdkafka remembers the pause of a partition that this consumer had before. Without
            # a resume it would never read that partition again.
            consumer.resume(starts)
        self._newly_assigned = True
        self.outage = None
        self._call_in_loop(self._callbacks.on_assigned, parts)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        at = [(tp.topic, tp.partition) for tp in partitions]
        last: CommitRequest = []
        if not self.abandoned:
            answer: Future[CommitRequest] = Future()
            self._call_in_loop(self._callbacks.on_revoking, at, answer)
            try:
                last = answer.result(self.settings.grace + 5)
            except TimeoutError:
                # The event loop is stuck. Its later settles are refused, and Kafka redelivers
                # the messages.
                answer.cancel()
        live = [item for item in last if self._partitions.get(item[0].topic_partition) is item[0]]
        confirmed = not live
        if live:
            try:
                confirmed = all(
                    tp.error is None
                    for tp in consumer.commit(offsets=_offsets_of(live), asynchronous=False) or ()
                )
            except KafkaException:
                confirmed = False
        self._unassign(consumer, partitions)
        self._call_in_loop(self._callbacks.on_lost, at)
        self._call_in_loop(self._callbacks.on_revoked, [item[0] for item in last], confirmed)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Drop the partitions without a commit: other members own them already."""
        self._unassign(consumer, partitions)
        self._call_in_loop(self._callbacks.on_lost, [(tp.topic, tp.partition) for tp in partitions])
        self._call_in_loop(self._callbacks.on_revoked, [], False)

    def _unassign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            part = self._partitions.pop((tp.topic, tp.partition), None)
            if part is not None:
                self._backpressure_checks.discard(part)
        consumer.incremental_unassign(partitions)

    # -- outages -----------------------------------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() in _OUTAGES or not error.retriable():
            self.outage = weightier(self.outage, error)

    def _probe(self, consumer: Consumer) -> None:
        """Clear the outage if a server answers. The client only reports when servers go down."""
        self._last_probe = time.monotonic()
        try:
            consumer.list_topics(timeout=1.0)
        except KafkaException:
            return
        self.outage = None


def _offsets_of(request: CommitRequest) -> list[TopicPartition]:
    return [
        TopicPartition(part.server_topic.name, part.number, offset, metadata=metadata)
        for part, offset, metadata in request
    ]
