"""The consumer of one topic and group: a thread that owns the client, and the windows of its partitions in the event loop. No topic is made here.

The thread polls, pauses, resumes and commits; it alone touches the client (calls from other threads would wait for its poll to end). All that was
received lives in the loop. What crosses over does so by `call_soon_threadsafe` in one direction and by a deque in the other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.brokers.kafka_backlog import Backlog, Entry, Partition
from penstock.brokers.kafka_dsn import Settings, error_of, running, weightier
from penstock.brokers.kafka_topics import Layout, position
from penstock.errors import StoreUnavailable
from penstock.model import mint
from penstock.ports import Clock, Delivery
from penstock.rules.shares import class_of
from penstock.rules.watermark import SPAN, Window, settled_ahead

ID, NOT_BEFORE, GROUP, PRIORITY = "penstock-id", "penstock-not-before", "penstock-group", "penstock-priority"
BATCH = 500
RETRY_WINDOW = 200  # messages of a retry partition that are held until they are due; its others stay on the server
_IDLE, _BUSY = 0.1, 0.003  # seconds of one poll; a message ends it at once, a commit that waits does not
_FIRST = 0.03  # how long the first batch of an assignment waits for its other partitions, so that keys and classes start level
_DAMPING = 1.0  # seconds between two changes of a partition's pause: each throws away what the client has prefetched
_RESUME = 0.6  # of the window
_PROBE = 1.0
_WATCH = 30.0
_TIMEOUTS = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._AUTHENTICATION, KafkaError._SSL)
_Order = list[tuple[Partition, int, str]]  # watermark and metadata to commit
_log = logging.getLogger("penstock.brokers.kafka")


class Reader:
    """Made by the first `receive`, shared by all subscriptions of this process to the same topic and group. Methods without `_` are the loop's."""

    def __init__(
        self, settings: Settings, plan: Layout, group: str, group_id: str, clock: Clock, *, lease: float, send_on: Callable[[Reader, Entry], Any]
    ) -> None:
        self.settings, self.plan, self.group, self.group_id, self.clock, self.lease = settings, plan, group, group_id, clock, lease
        self.backlog = Backlog(ordered=plan.ordered)
        self.partitions: dict[tuple[str, int], Partition] = {}
        self.out: dict[int, Entry] = {}
        self.warnings: dict[tuple[str, int], str] = {}
        self.retention: dict[str, float] = {}
        self._send_on = send_on  # what came early: it goes to the next retry topic
        self._loop = asyncio.get_running_loop()
        self._wake, self._joined, self._quiet = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._armed: float | None = None  # when it rings
        self._watcher: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serial = itertools.count(1)
        self._dirty: set[Partition] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._committing: list[asyncio.Future[None]] | None = None
        self._trouble: KafkaError | None = None
        self._keeps_metadata, self._scheduled = True, False
        self.closing = self.abandoned = False
        # The thread's own.
        self._orders: deque[_Order] = deque()
        self._ordered: _Order = []  # what the commit that is on its way is about
        self._held: dict[tuple[str, int], Partition] = {}
        self._places = {place.name: place for place in plan.places}
        self._epochs = itertools.count(1)
        self._fresh = False
        self._probed = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kafka-{group_id}", daemon=True)
        self._thread.start()

    # -- receiving (loop) ------------------------------------------------------------------------------------------------

    async def receive(self, limit: int, wait: float, per_key: int | None, holder: object) -> list[Delivery]:
        if not self._joined.is_set():  # the first time, joining the group is not part of the wait
            try:
                async with asyncio.timeout(self.settings.timeout):
                    await self._joined.wait()
            except TimeoutError:
                self._complain()
        until = self._loop.time() + wait
        while True:
            self._wake.clear()
            if self._ended.done():
                self._complain()
                raise StoreUnavailable(f"the reader of {self.plan.topic} has ended", hint="it is closed; subscribe again")
            got = self.backlog.take(limit, per_key, self.clock.now())
            if self.plan.ordered:
                self._arm()  # a key may have been found that waits for its time
            if got:
                return [self._hand_out(e, holder) for e in got]
            left = until - self._loop.time()
            if left <= 0:
                self._complain()
                return []
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _complain(self) -> None:
        if self._trouble is not None:
            raise running(self.settings, self._trouble, f"reading {self.plan.topic}")

    def _hand_out(self, e: Entry, holder: object) -> Delivery:
        part = e.part
        e.token = part.epoch << 32 | next(self._serial)
        e.holder = holder
        part.out += 1
        where = position(part.place.slot, part.number, e.offset)
        self.out[where] = e
        return Delivery(
            topic=self.plan.topic, group=self.group, id=e.id, key=e.key, body=e.body, headers=e.headers, position=where, token=e.token, deliveries=1,
            priority=e.priority,
        )  # fmt: skip

    @property
    def ended(self) -> bool:
        return self._ended.done()

    def waiting(self) -> int:
        """Messages of ordinary partitions that wait here for their time."""
        return sum(1 for e in self.backlog.waiting() if not e.part.place.delay)

    def settled(self) -> dict[tuple[str, int], tuple[int, Any]]:
        """By partition, below which offset all is settled, and what is above it: as it is now, committed or not."""
        return {at: (part.window.watermark, part.window.ahead) for at, part in self.partitions.items()}

    def forget(self, ends: Mapping[tuple[str, int], int]) -> None:
        """These were deleted on the server up to there: what was not handed out is done with."""
        gone = [e for at, end in ends.items() if (part := self.partitions.get(at)) is not None for e in part.entries.values() if e.offset < end and not e.token]
        unwanted = set(map(id, gone))
        self.backlog.drop(lambda e: id(e) in unwanted)
        for e in gone:
            self.finish(e)
        self._commit()

    def holds(self, d: Delivery) -> Entry | None:
        e = self.out.get(d.position)
        return e if e is not None and e.token == d.token and not e.part.lost else None

    # -- settling (loop) -------------------------------------------------------------------------------------------------

    def finish(self, e: Entry) -> None:
        """Settled for good; committed by the next `save`."""
        part = e.part
        if self._take_back(e):
            part.window.settle(e.offset, part.epoch)
            del part.entries[e.offset]
            part.finished += 1
            part.finished_bytes += e.size
            self._dirty.add(part)
            self.backlog.back(e.key)

    def put_back(self, e: Entry, due: float = 0.0) -> None:
        """Ready again, at once or at `due`; where its partition is leaving, for its next owner."""
        if self._take_back(e):
            e.due = due
            if not e.part.leaving:
                self.backlog.put(e, first=True)
                self.backlog.back(e.key)
                self._arm()
                self._wake.set()

    def _take_back(self, e: Entry) -> bool:
        if e.part.lost:
            return False
        where = position(e.part.place.slot, e.part.number, e.offset)
        if self.out.pop(where, None) is not None:
            e.part.out -= 1
            e.token, e.settling, e.holder = 0, False, None
            self._quiet.set()
        return True

    async def save(self) -> None:
        """Everything finished so far is committed when this returns. Raises StoreUnavailable; then it is committed later."""
        if self.settings.commit_interval:
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_later(self.settings.commit_interval, self._commit)
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(future)
        self._commit()
        try:
            async with asyncio.timeout(self.settings.timeout):
                await future
        except TimeoutError:
            raise running(self.settings, self._trouble or KafkaError(KafkaError._TIMED_OUT), f"committing {self.plan.topic}") from None

    def _commit(self) -> None:
        """One commit at a time; what is finished meanwhile goes with the next."""
        self._scheduled = False
        if self._committing is not None:
            return
        order = [(part, part.window.watermark, part.window.metadata() if self._keeps_metadata else "") for part in self._dirty if not part.lost]
        self._dirty.clear()
        waiting, self._waiting = self._waiting, []
        if order and not self._ended.done():
            self._committing = waiting
            self._orders.append(order)
        else:
            _resolve(waiting)

    def _committed(self, order: _Order, error: KafkaError | None) -> None:
        waiting, self._committing = self._committing or [], None
        if error is None:
            _resolve(waiting)
            if self._waiting or self._dirty:
                self._commit()
            return
        if error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
            self._keeps_metadata = False
            _log.warning("Kafka takes no metadata with the commits of %s: after a crash, what was settled out of order comes again", self.plan.topic)
        self._waiting = waiting + self._waiting
        self._dirty.update(part for part, _, _ in order if not part.lost)
        self._loop.call_later(0.2, self._commit)

    # -- arrivals (loop) -------------------------------------------------------------------------------------------------

    def _adopt(self, parts: Sequence[Partition]) -> None:
        self._joined.set()
        for part in parts:
            self.partitions[part.at] = part
        if self._watcher is None:
            self._watcher = self._loop.call_later(_WATCH, self._watch)

    def _arrive(self, entries: Sequence[tuple[Entry, str]]) -> None:
        now = self.clock.now()
        for e, group in entries:
            part = e.part
            if part.lost or part.leaving:
                continue
            if e.offset < part.window.next:
                self._restart(part, e.offset)
            elif e.offset > part.window.next > 0 and not part.entries and not part.finished:
                _log.warning(
                    "%s, partition %d: %d messages that group %s had not read are gone (retention, a purge or compaction)",
                    *part.at, e.offset - part.window.next, self.group,
                )  # fmt: skip
            if not part.window.add(e.offset) or (group and group != self.group):  # settled before a restart, or meant for another group
                if e.offset in part.window:
                    part.window.settle(e.offset, part.epoch)
                part.finished += 1
                part.finished_bytes += e.size
                self._dirty.add(part)
                continue
            part.entries[e.offset] = e
            delay = part.place.delay
            if delay is not None and e.at + delay > now:
                e.due = e.at + delay
                self.backlog.put(e)
            else:
                self._place(e, now)
        self._arm()
        self._wake.set()

    def _restart(self, part: Partition, offset: int) -> None:
        """Offsets went back: the topic was made anew, or a server lost its end. What we know of them is about other messages."""
        self.backlog.drop(lambda e: e.part is part)
        for where in [where for where, e in self.out.items() if e.part is part]:
            self.backlog.back(self.out.pop(where).key)
        part.finished += len(part.entries)
        part.finished_bytes += sum(e.size for e in part.entries.values())
        part.entries.clear()
        part.out, part.window = 0, Window(part.epoch, offset)

    def _place(self, e: Entry, now: float) -> None:
        """Its wait in a retry topic is over; is it due?"""
        left = e.not_before - now
        e.due = 0.0
        if left > 0:
            if self.plan.level(left) is not None:
                self._early(e)
                return
            e.due = e.not_before
        self.backlog.put(e)

    def _early(self, e: Entry) -> None:
        task = self._loop.create_task(self._send_on(self, e))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _arm(self) -> None:
        due = self.backlog.next_due()
        if due == self._armed:
            return
        self._armed = due
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_later(max(0.0, due - self.clock.now()) + 0.001, self._ring)

    def _ring(self) -> None:
        self._armed = None
        now = self.clock.now()
        for e in self.backlog.due(now):
            self._place(e, now)
        self._arm()
        self._wake.set()

    # -- leaving (loop) --------------------------------------------------------------------------------------------------

    def _leave(self, at: Sequence[tuple[str, int]], answer: Future[_Order]) -> None:
        parts = [self.partitions[a] for a in at if a in self.partitions]
        for part in parts:
            part.leaving = True
        self.backlog.drop(lambda e: e.part.leaving)
        task = self._loop.create_task(self._part_with(parts, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _part_with(self, parts: Sequence[Partition], answer: Future[_Order]) -> None:
        """Work in flight may finish for a while: a request that was sent has cost something already."""
        until = self._loop.time() + (0.0 if self.closing else self.settings.grace)
        while any(part.out for part in parts) and (left := until - self._loop.time()) > 0:
            self._quiet.clear()
            try:
                async with asyncio.timeout(left):
                    await self._quiet.wait()
            except TimeoutError:
                pass
        last = [(part, part.window.watermark, part.window.metadata() if self._keeps_metadata else "") for part in parts]
        self._lose([part.at for part in parts])
        if not answer.cancelled():
            answer.set_result(last)

    def _lose(self, at: Sequence[tuple[str, int]]) -> None:
        parts = {part for a in at if (part := self.partitions.pop(a, None)) is not None}
        for part in parts:
            part.lost = part.leaving = True
            part.saved = False  # until it is known that it was
        self._dirty -= parts
        self.backlog.drop(lambda e: e.part.lost)
        for where in [where for where, e in self.out.items() if e.part in parts]:
            self.backlog.back(self.out.pop(where).key)
        self._quiet.set()
        self._wake.set()

    def _parted(self, parts: Sequence[Partition], saved: bool) -> None:
        for part in parts:
            part.saved = saved
        self._commit()  # whoever waited for them is told

    async def close(self) -> None:
        """What is settled is committed, and the group is told that we leave."""
        self.closing = True
        await self._ended

    def _end(self, error: KafkaError | None) -> None:
        self._trouble = error or self._trouble
        self._lose(list(self.partitions))
        _resolve(self._waiting + (self._committing or []))
        self._waiting, self._committing = [], None
        for handle in (self._timer, self._watcher):
            if handle is not None:
                handle.cancel()
        for task in self._tasks:
            task.cancel()
        self._joined.set()
        self._wake.set()
        if not self._ended.done():
            self._ended.set_result(None)

    # -- retention (loop) ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        for at, text in self.alarms().items():
            if at not in self.warnings:
                _log.warning("%s", text)
            self.warnings[at] = text
        self._watcher = self._loop.call_later(_WATCH, self._watch)

    def alarms(self) -> dict[tuple[str, int], str]:
        """Partitions whose oldest open message is more than half way to being deleted by retention."""
        now, found = self.clock.now(), {}
        for at, part in self.partitions.items():
            oldest = part.entries.get(part.window.watermark)
            keep = self.retention.get(part.place.name, self.settings.retention)
            if oldest is not None and keep > 0 and now - oldest.at > keep / 2:
                found[at] = (
                    f"{part.place.name}, partition {part.number}: group {self.group} is {(now - oldest.at) / 3600:.1f} h behind and retention deletes after"
                    f" {keep / 3600:.1f} h, read or not; start more workers, or raise retention.ms"
                )
        return found

    # -- the thread ------------------------------------------------------------------------------------------------------

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
            consumer.subscribe([place.name for place in self.plan.places], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)
            while not self.closing:
                self._turn(consumer)
        except KafkaException as e:
            error = weightier(self._trouble, error_of(e))
        finally:
            if consumer is not None:
                try:
                    consumer.close()
                except (KafkaException, RuntimeError):
                    pass
            self._post(self._end, error)

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

    def _turn(self, consumer: Consumer) -> None:
        nap = _BUSY if self.out or self._orders or self._committing is not None else _IDLE
        messages = consumer.consume(1, nap)
        if messages:
            messages += consumer.consume(BATCH - 1, _FIRST if self._fresh else 0)
            self._fresh = False
            self._take_in(messages)
        elif self._trouble is not None and time.monotonic() > self._probed + _PROBE:
            self._probe(consumer)
        while self._orders:
            self._carry_out(consumer, self._orders.popleft())
        self._press(consumer)

    def _take_in(self, messages: Sequence[Any]) -> None:
        entries = []
        for m in messages:
            error = m.error()
            if error is not None:
                self._on_error(error)
                continue
            part = self._held.get((m.topic(), m.partition()))
            if part is None:
                continue
            self._trouble = None
            entries.append(parse_message(m, part))
        if entries:
            self._post(self._arrive, entries)

    def _carry_out(self, consumer: Consumer, order: _Order) -> None:
        live = [item for item in order if self._held.get(item[0].at) is item[0]]
        if not live:
            self._post(self._committed, order, None)
            return
        self._ordered = order
        try:
            consumer.commit(offsets=_positions(live), asynchronous=True)
        except KafkaException as e:
            self._post(self._committed, order, error_of(e))

    def _on_commit(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        order, self._ordered = self._ordered, []
        if not order:
            return
        wrong = error or next((tp.error for tp in partitions if tp.error is not None), None)
        if wrong is None:
            self._trouble = None
        self._post(self._committed, order, wrong)

    def _press(self, consumer: Consumer) -> None:
        """Each partition is held back by itself, by count, bytes and span; polling goes on."""
        now = time.monotonic()
        for part in self._held.values():
            count, size = part.received - part.finished, part.received_bytes - part.finished_bytes
            window = RETRY_WINDOW if part.place.delay else self.settings.window
            share = max(count / window, size / self.settings.window_bytes, part.window.span / (SPAN - 2 * BATCH))
            if (share >= 1 and not part.paused) or (share <= _RESUME and part.paused and now - part.switched >= _DAMPING):
                where = [TopicPartition(*part.at)]
                try:
                    (consumer.resume if part.paused else consumer.pause)(where)
                except KafkaException:  # being taken away
                    continue
                part.paused, part.switched = not part.paused, now

    # -- the thread: membership ------------------------------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """We say where each begins, from what was committed with it; a new one begins with its oldest message."""
        parts, starts = [], []
        committed = consumer.committed(partitions, timeout=self.settings.timeout) if partitions else []
        for tp in committed:
            if tp.error is not None:
                raise KafkaException(tp.error)
            start = max(0, tp.offset)
            window = Window(next(self._epochs), start, settled_ahead(start, tp.metadata))
            part = self._held[tp.topic, tp.partition] = Partition(self._places[tp.topic], tp.partition, window)
            parts.append(part)
            starts.append(TopicPartition(tp.topic, tp.partition, start))
        consumer.incremental_assign(starts)
        self._fresh = True
        self._trouble = None
        self._post(self._adopt, parts)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        at = [(tp.topic, tp.partition) for tp in partitions]
        last: _Order = []
        if not self.abandoned:
            answer: Future[_Order] = Future()
            self._post(self._leave, at, answer)
            try:
                last = answer.result(self.settings.grace + 5)
            except TimeoutError:  # the loop is stuck: what it settles from now on is refused, and comes again
                answer.cancel()
        live = [item for item in last if self._held.get(item[0].at) is item[0]]
        saved = not live
        if live:
            try:
                saved = all(tp.error is None for tp in consumer.commit(offsets=_positions(live), asynchronous=False) or ())
            except KafkaException:
                saved = False
        self._forget(consumer, partitions)
        self._post(self._lose, at)
        self._post(self._parted, [item[0] for item in last], saved)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Others have them already: nothing may be committed any more."""
        self._forget(consumer, partitions)
        self._post(self._lose, [(tp.topic, tp.partition) for tp in partitions])
        self._post(self._parted, [], False)

    def _forget(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            self._held.pop((tp.topic, tp.partition), None)
        consumer.incremental_unassign(partitions)

    # -- the thread: trouble ---------------------------------------------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() in _TIMEOUTS or not error.retriable():
            self._trouble = weightier(self._trouble, error)

    def _probe(self, consumer: Consumer) -> None:
        """The client tells when the servers go, not when they come back."""
        self._probed = time.monotonic()
        try:
            consumer.list_topics(timeout=1.0)
        except KafkaException:
            return
        self._trouble = None


def _resolve(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _positions(order: _Order) -> list[TopicPartition]:
    return [TopicPartition(part.place.name, part.number, offset, metadata=metadata) for part, offset, metadata in order]


def parse_message(m: Any, part: Partition) -> tuple[Entry, str]:
    """The message, and the group it is meant for. One of another program has no id: it gets one from its place, the same every time."""
    offset, body = m.offset(), m.value() or b""
    id_, not_before, group, priority = "", 0.0, "", part.place.priority
    headers: dict[str, str] = {}
    for name, value in m.headers() or ():
        text = value.decode("utf-8", "replace") if value is not None else ""
        if name == ID:
            id_ = text
        elif name == GROUP:
            group = text
        elif name == PRIORITY:
            priority = class_of(int(text)) if text.isdecimal() else priority
        elif name == NOT_BEFORE:
            try:
                not_before = float(text)
            except ValueError:
                continue
            if not math.isfinite(not_before):
                not_before = 0.0
        else:
            headers[name] = text
    key = m.key()
    size = len(body) + 200
    part.received += 1
    part.received_bytes += size
    return Entry(
        part,
        offset,
        id_ or mint("kafka", part.place.name, str(part.number), str(offset)),
        key.decode("utf-8", "replace") if key else "",
        body,
        headers,
        m.timestamp()[1] / 1000,
        not_before,
        size,
        priority,
    ), group
