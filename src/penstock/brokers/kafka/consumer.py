"""The thread that owns the client of one group: it joins, polls, pauses and commits. What was
received lives in the event loop, in kafka_reader.

It alone touches the client: a call from another thread would wait until its poll ends. What it
finds is told to the loop by `call_soon_threadsafe`; what the loop wants committed comes in a deque.
While somebody waits for messages it sleeps in the client, which they end; else in a bell that the
loop rings, so that a commit starts at once and messages are taken in together.
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

from penstock.brokers.kafka.entries import Entry, Partition, Run
from penstock.brokers.kafka.message import read_runs
from penstock.brokers.kafka.topics import Layout
from penstock.brokers.kafka.url import Settings
from penstock.rules.watermark import SPAN, Window, settled_ahead
from penstock.stores.kafka_access import error_of, weightier

BATCH = 500
# messages of a retry partition that are held until they are due; its others stay on the server
RETRY_WINDOW = 200
_IDLE, _SLOW, _BUSY = (
    0.1,
    0.02,
    0.003,
)  # seconds of one poll; a message ends it at once, a commit that waits does not
# seconds after an arrival or a commit in which a commit is likely, the more so the fewer they are
_SOON = 0.5
# how long the first batch of an assignment waits for its other partitions, so that keys and classes
# start level
_FIRST = 0.03
# seconds between two changes of a partition's pause: each throws away what the client has
# prefetched
_DAMPING = 1.0
_RESUME = 0.6  # of the window
_PROBE = 1.0
_OUTAGES = (
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._RESOLVE,
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
)
_epochs = itertools.count(
    1
)  # of all assignments in this process: a token of an earlier reader is never one of a later
Order = list[tuple[Partition, int, str]]  # watermark and metadata to commit


class Told(Protocol):
    """The loop's side: called there, in this order of events."""

    def adopt(self, parts: Sequence[Partition]) -> None: ...
    def arrive(self, runs: Sequence[Run]) -> None: ...
    def leave(self, at: Sequence[tuple[str, int]], answer: Future[Order]) -> None: ...
    def lose(self, at: Sequence[tuple[str, int]]) -> None: ...
    def parted(self, parts: Sequence[Partition], saved: bool) -> None: ...
    def committed(self, order: Order, error: KafkaError | None) -> None: ...
    def end(self, error: KafkaError | None) -> None: ...


class Member:
    """Of the group from when it is made until `closing` is set; then `end` is told."""

    def __init__(
        self,
        settings: Settings,
        plan: Layout,
        group: str,
        group_id: str,
        lease: float,
        loop: asyncio.AbstractEventLoop,
        told: Told,
    ) -> None:
        self.settings, self.plan, self.group, self.group_id, self.lease, self._loop, self._told = (
            settings,
            plan,
            group,
            group_id,
            lease,
            loop,
            told,
        )
        self.orders: deque[Order] = deque()
        self._bell = threading.Event()
        self.busy = (
            False  # something is handed out or being committed, so that orders come at any time
        )
        self.wanted = False  # somebody waits for what arrives, so that it is not gathered first
        self.closing = self.abandoned = False
        self.trouble: KafkaError | None = None
        self._ordered: Order = []  # what the commit that is on its way is about
        self._held: dict[tuple[str, int], Partition] = {}
        self._pressed: set[Partition] = set()  # something arrived, or it is held back
        self._places = {place.name: place for place in plan.places}
        self._fresh = False
        self._probed = self._active = 0.0
        threading.Thread(target=self._run, name=f"kafka-{group_id}", daemon=True).start()

    def _post(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: whoever had us is gone, without a word
            self.closing = self.abandoned = True

    def _run(self) -> None:
        error: KafkaError | None = None
        consumer = None
        try:
            consumer = Consumer(self._configuration())
            consumer.subscribe(
                [place.name for place in self.plan.places],
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self.closing:
                self._turn(consumer)
        except KafkaException as e:
            error = weightier(self.trouble, error_of(e))
        finally:
            if consumer is not None:
                try:
                    consumer.close()
                except (KafkaException, RuntimeError):
                    pass
            self._post(self._told.end, error)

    def _configuration(self) -> dict[str, Any]:
        s = self.settings
        conf: dict[str, Any] = {
            "group.id": self.group_id,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 100,
            "fetch.error.backoff.ms": 50,
            "queued.min.messages": 2 * BATCH,
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

    def ring(self) -> None:
        """Somebody waits for messages, something is to be committed, or it is the end."""
        self._bell.set()

    def _turn(self, consumer: Consumer) -> None:
        self._bell.clear()  # before we look at what it may ring for
        quiet = time.monotonic() - self._active
        nap = _IDLE if not (self.busy or quiet < _SOON) else min(max(_BUSY, quiet / 8), _SLOW)
        if self._held and not (
            self.wanted or self.orders or self._ordered or self.closing
        ):  # nobody waits: only membership is to be kept up
            nap = 0
            self._bell.wait(_IDLE)
        messages = consumer.consume(1, 0 if self.orders else nap)
        if messages:
            messages += consumer.consume(BATCH - 1, _FIRST if self._fresh else 0)
            self._fresh = False
            self._active = time.monotonic()
            self._take_in(messages)
        elif self.trouble is not None and time.monotonic() > self._probed + _PROBE:
            self._probe(consumer)
        while self.orders:
            self._active = time.monotonic()
            self._carry_out(consumer, self.orders.popleft())
        if self._pressed:
            self._press(consumer)

    def _take_in(self, messages: Sequence[Any]) -> None:
        runs = read_runs(messages, self._held, self._on_error)
        if runs:
            self.trouble = None
            self._pressed.update([run[0] for run in runs])
            self._post(self._told.arrive, runs)

    def _carry_out(self, consumer: Consumer, order: Order) -> None:
        live = [item for item in order if self._held.get(item[0].at) is item[0]]
        if not live:
            self._post(self._told.committed, order, None)
            return
        self._ordered = order
        try:
            consumer.commit(offsets=_positions(live), asynchronous=True)
        except KafkaException as e:
            self._ordered = []
            self._post(self._told.committed, order, error_of(e))

    def _on_commit(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        order, self._ordered = self._ordered, []
        if not order:
            return
        wrong = error or next((tp.error for tp in partitions if tp.error is not None), None)
        if wrong is None:
            self.trouble = None
        self._post(self._told.committed, order, wrong)

    def _press(self, consumer: Consumer) -> None:
        """Each partition is held back by itself, by count, bytes and span; polling goes on."""
        now = time.monotonic()
        for part in list(self._pressed):
            count, size = part.received - part.finished, part.received_bytes - part.finished_bytes
            window = RETRY_WINDOW if part.place.delay else self.settings.window
            share = max(
                count / window,
                size / self.settings.window_bytes,
                (part.reached - part.low) / (SPAN - 2 * BATCH),
            )
            if (share >= 1 and not part.paused) or (
                share <= _RESUME and part.paused and now - part.switched >= _DAMPING
            ):
                where = [TopicPartition(*part.at)]
                try:
                    (consumer.resume if part.paused else consumer.pause)(where)
                except KafkaException:  # being taken away
                    continue
                part.paused, part.switched = not part.paused, now
            if not part.paused:
                self._pressed.discard(part)

    # -- membership --------------------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """We say where each begins, from what was committed with it; a new one begins with its
        oldest message.
        """
        parts, starts = [], []
        committed = (
            consumer.committed(partitions, timeout=self.settings.timeout) if partitions else []
        )
        for tp in committed:
            if tp.error is not None:
                raise KafkaException(tp.error)
            start = max(0, tp.offset)
            window: Window[Entry] = Window(next(_epochs), start, settled_ahead(start, tp.metadata))
            part = self._held[tp.topic, tp.partition] = Partition(
                self._places[tp.topic], tp.partition, window, self.plan.topic, self.group
            )
            parts.append(part)
            starts.append(TopicPartition(tp.topic, tp.partition, start))
        consumer.incremental_assign(starts)
        if starts:
            consumer.resume(
                starts
            )  # the library remembers that we held a partition back when we had it last, and would never read it again
        self._fresh = True
        self.trouble = None
        self._post(self._told.adopt, parts)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        at = [(tp.topic, tp.partition) for tp in partitions]
        last: Order = []
        if not self.abandoned:
            answer: Future[Order] = Future()
            self._post(self._told.leave, at, answer)
            try:
                last = answer.result(self.settings.grace + 5)
            except (
                TimeoutError
            ):  # the loop is stuck: what it settles from now on is refused, and comes again
                answer.cancel()
        live = [item for item in last if self._held.get(item[0].at) is item[0]]
        saved = not live
        if live:
            try:
                saved = all(
                    tp.error is None
                    for tp in consumer.commit(offsets=_positions(live), asynchronous=False) or ()
                )
            except KafkaException:
                saved = False
        self._forget(consumer, partitions)
        self._post(self._told.lose, at)
        self._post(self._told.parted, [item[0] for item in last], saved)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Others have them already: nothing may be committed any more."""
        self._forget(consumer, partitions)
        self._post(self._told.lose, [(tp.topic, tp.partition) for tp in partitions])
        self._post(self._told.parted, [], False)

    def _forget(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            part = self._held.pop((tp.topic, tp.partition), None)
            if part is not None:
                self._pressed.discard(part)
        consumer.incremental_unassign(partitions)

    # -- trouble -----------------------------------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() in _OUTAGES or not error.retriable():
            self.trouble = weightier(self.trouble, error)

    def _probe(self, consumer: Consumer) -> None:
        """The client tells when the servers go, not when they come back."""
        self._probed = time.monotonic()
        try:
            consumer.list_topics(timeout=1.0)
        except KafkaException:
            return
        self.trouble = None


def _positions(order: Order) -> list[TopicPartition]:
    return [
        TopicPartition(part.place.name, part.number, offset, metadata=metadata)
        for part, offset, metadata in order
    ]
