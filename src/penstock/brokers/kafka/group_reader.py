"""What this process has of one topic and group: windows, what is handed out, what is to be
committed. The client itself is kafka_consumer's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from confluent_kafka import KafkaError

from penstock.brokers.kafka.consumer import Member, Order
from penstock.brokers.kafka.entries import FRAMING, Backlog, Entry, Partition, Run
from penstock.brokers.kafka.topics import Layout
from penstock.brokers.kafka.url import Settings, running
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Outcome
from penstock.ports import Clock, Delivery
from penstock.rules.watermark import Window

_FLOW, _GATHER = (
    16,
    0.003,
)  # after so many messages at once, a batch that is not full waits so many seconds for the next: each batch costs a commit
# seconds after which what is none of our business is committed by itself: nobody may settle
# anything for long
_SKIPPED = 0.2
_WATCH = 30.0  # seconds between two looks at the age of what is open
SendOn = Callable[["Reader", Entry], Coroutine[Any, Any, None]]
_log = logging.getLogger("penstock.brokers.kafka")


class Reader:
    """Made by the first `receive`, shared by all subscriptions of this process to the same topic
    and group.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Layout,
        group: str,
        group_id: str,
        clock: Clock,
        *,
        lease: float,
        send_on: SendOn,
    ) -> None:
        self.settings, self.plan, self.group, self.group_id, self.clock, self.lease = (
            settings,
            plan,
            group,
            group_id,
            clock,
            lease,
        )
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
        self._order: Order = []  # what is being committed, and since when
        self._ordered_at = 0.0
        self._keeps_metadata, self._scheduled = True, False
        self._waiters = 0
        self._flowing, self._arrived_at = False, 0.0
        self.member = Member(settings, plan, group, group_id, lease, self._loop, self)

    # -- receiving ---------------------------------------------------------------------------------

    async def receive(
        self, limit: int, wait: float, per_key: int | None, holder: object
    ) -> Sequence[Delivery]:
        if not self._joined.is_set():  # the first time, joining the group is not part of the wait
            try:
                async with asyncio.timeout(self.settings.timeout):
                    await self._joined.wait()
            except TimeoutError:
                self._complain()
        until = self._loop.time() + wait
        while True:
            while (
                self._flowing
                and self.backlog.ready < limit
                and self._loop.time() < min(until, self._arrived_at + _GATHER)
            ):
                await self._woken(_GATHER)
            if self._ended.done():
                self._complain()
                raise StoreUnavailable(
                    f"the reader of {self.plan.topic} has ended",
                    hint="it is closed; subscribe again",
                )
            got = self.backlog.take(limit, per_key, self.clock.now())
            if self.plan.ordered:
                self._arm()  # a key may have been found that waits for its time
            if got:
                return self._hand_out(got, holder)
            left = until - self._loop.time()
            if left <= 0:
                self._complain()
                return []
            await self._woken(left)

    async def _woken(self, longest: float) -> None:
        """Until there is something to look at, or for so long."""
        self._waiters += 1
        self.member.wanted = True
        self.member.ring()
        self._wake.clear()
        try:
            async with asyncio.timeout(longest):
                await self._wake.wait()
        except TimeoutError:
            pass
        finally:
            self._waiters -= 1
            self.member.wanted = self._waiters > 0

    def _complain(self) -> None:
        if self.member.trouble is not None:
            raise running(self.settings, self.member.trouble, f"reading {self.plan.topic}")

    def _hand_out(self, got: Sequence[Entry], holder: object) -> Sequence[Delivery]:
        out = self.out
        for e in got:
            e.holder = holder
            out[e.position] = e
        self.member.busy = True
        return got

    @property
    def ended(self) -> bool:
        return self._ended.done()

    def waiting(self) -> int:
        """Messages of ordinary partitions that wait here for their time."""
        return sum(1 for e in self.backlog.waiting() if not e.part.place.delay)

    def settled(self) -> dict[tuple[str, int], tuple[int, Any]]:
        """By partition, below which offset all is settled, and what is above it: as it is now,
        committed or not.
        """
        return {
            at: (part.window.watermark, part.window.ahead) for at, part in self.partitions.items()
        }

    def forget(self, ends: Mapping[tuple[str, int], int]) -> None:
        """These were deleted on the server up to there: what was not handed out is done with."""
        parts = [
            (part, end) for at, end in ends.items() if (part := self.partitions.get(at)) is not None
        ]
        gone = [
            e
            for part, end in parts
            for e in part.window.open.values()
            if e.offset < end and e.holder is None
        ]
        unwanted = set(map(id, gone))
        self.backlog.drop(lambda e: id(e) in unwanted)
        for e in gone:
            self.finish(e)
        self._commit()

    def holds(self, d: Delivery) -> Entry | None:
        e = self.out.get(d.position)
        return e if e is not None and e.token == d.token and not e.part.lost else None

    # -- settling ----------------------------------------------------------------------------------

    def acknowledge(
        self, items: Sequence[tuple[Delivery, Outcome]]
    ) -> tuple[list[Partition | None], list[tuple[Entry, Outcome]]]:
        """Acks are finished, all else is marked as being settled and given back. Also, for each
        item, its partition; None: it is not ours to settle.
        """
        parts: list[Partition | None] = []
        others: list[tuple[Entry, Outcome]] = []
        out, ordered, last, opened = self.out, self.plan.ordered, None, None
        for d, outcome in items:
            where = d.position
            e = out.get(where)
            if e is None or (e is not d and e.token != d.token) or e.settling:
                parts.append(None)
                continue
            part = e.part
            parts.append(part)
            if outcome.__class__ is not Ack:
                e.settling = True
                others.append((e, outcome))
                continue
            if part is not last or opened is None:  # what is settled together often came together
                last, opened = part, part.window.open
                self._dirty.add(part)
                if part.leaving:
                    self._quiet.set()
            del out[where], opened[e.offset]
            part.finished += 1
            part.finished_bytes += len(e.body) + FRAMING
            if ordered:
                self.backlog.back(e.key)
        return parts, others

    def finish(self, e: Entry) -> None:
        """Settled for good; committed by the next `save`."""
        part = e.part
        if self._take_back(e):
            del part.window.open[e.offset]
            part.finished += 1
            part.finished_bytes += len(e.body) + FRAMING
            self._dirty.add(part)
            if self.plan.ordered:
                self.backlog.back(e.key)

    def put_back(self, e: Entry, due: float = 0.0) -> None:
        """Ready again, at once or at `due`; where its partition is leaving, for its next owner."""
        part = e.part
        if self._take_back(e):
            if e.holder is not None:  # whoever had it has nothing any more
                e = msgspec.structs.replace(
                    e, token=part.token | next(self._serial), settling=False, holder=None
                )
                part.window.open[e.offset] = e
            e.due = due
            if not part.leaving:
                self.backlog.put(e, first=True)
                self.backlog.back(e.key)
                self.member.busy = bool(self.out or self._dirty or self._committing is not None)
                self._arm()
                self._wake.set()

    def _take_back(self, e: Entry) -> bool:
        """False: it is another's, or of a topic that was made anew."""
        part = e.part
        if part.lost or part.window.open.get(e.offset) is not e:
            return False
        if self.out.pop(e.position, None) is not None and part.leaving:
            self._quiet.set()
        return True

    async def save(self) -> None:
        """Everything finished so far is committed when this returns. Raises StoreUnavailable; then
        it is committed later.
        """
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
            raise running(
                self.settings,
                self.member.trouble or KafkaError(KafkaError._TIMED_OUT),
                f"committing {self.plan.topic}",
            ) from None

    def _commit(self) -> None:
        """One commit at a time; what is finished meanwhile goes with the next."""
        self._scheduled = False
        if self._committing is not None:
            if (
                self._loop.time() > self._ordered_at + self.settings.timeout
            ):  # its answer was lost with a server
                self.committed(self._order, KafkaError(KafkaError._TIMED_OUT))
            return
        order = self._positions(part for part in self._dirty if not part.lost)
        self._dirty.clear()
        waiting, self._waiting = self._waiting, []
        if order and not self._ended.done():
            self._committing = waiting
            self._order, self._ordered_at = order, self._loop.time()
            self.member.orders.append(order)
            self.member.ring()
        else:
            _resolve(waiting)

    def _positions(self, parts: Iterable[Partition]) -> Order:
        order = []
        for part in parts:
            part.low = part.window.watermark
            order.append((part, part.low, part.window.metadata() if self._keeps_metadata else ""))
        return order

    def committed(self, order: Order, error: KafkaError | None) -> None:
        waiting, self._committing = self._committing or [], None
        if error is None:
            _resolve(waiting)
            if self._waiting or self._dirty:
                self._commit()
            self.member.busy = bool(self.out or self._committing is not None)
            return
        if error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
            self._keeps_metadata = False
            _log.warning(
                "Kafka takes no metadata with the commits of %s: after a crash, what was settled out of order comes again",
                self.plan.topic,
            )
        self._waiting = waiting + self._waiting
        self._dirty.update(part for part, _, _ in order if not part.lost)
        self._loop.call_later(0.2, self._commit)

    # -- arrivals ----------------------------------------------------------------------------------

    def adopt(self, parts: Sequence[Partition]) -> None:
        self._joined.set()
        for part in parts:
            self.partitions[part.at] = part
        if self._watcher is None:
            self._watcher = self._loop.call_later(_WATCH, self._watch)

    def arrive(self, runs: Sequence[Run]) -> None:
        now, n = self.clock.now(), self.backlog.ready
        for part, entries, plain in runs:
            if part.leaving:
                continue
            window, first = part.window, entries[0].offset
            if first > window.next > 0 and not window.open and not part.finished:
                _log.warning(
                    "%s, partition %d: %d messages that group %s had not read are gone (retention, a purge or compaction)",
                    *part.at, first - window.next, self.group,
                )  # fmt: skip
            if plain and window.add_run(first, entries):
                self.backlog.put_all(entries, part.place.priority)
            else:
                for e in entries:
                    self._arrive(part, e, now)
                part.low = part.window.watermark
        self._flowing, self._arrived_at = self.backlog.ready - n >= _FLOW, self._loop.time()
        self._arm()
        self._wake.set()

    def _arrive(self, part: Partition, e: Entry, now: float) -> None:
        """One that may be known, or is for a certain time or group."""
        if e.offset < part.window.next:
            self._restart(part, e.offset)
        if not part.window.add(e.offset, e) or (
            e.meant and e.meant != self.group
        ):  # settled before a restart, or meant for another group
            part.window.settle(e.offset, part.window.epoch)
            part.finished += 1
            part.finished_bytes += len(e.body) + FRAMING
            self._dirty.add(part)
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_later(self.settings.commit_interval or _SKIPPED, self._commit)
            return
        delay = part.place.delay
        if delay is not None and e.at + delay > now:
            e.due = e.at + delay
            self.backlog.put(e)
        else:
            self._place(e, now)

    def _restart(self, part: Partition, offset: int) -> None:
        """Offsets went back: the topic was made anew, or a server lost its end. What we know of
        them is about other messages.
        """
        self.backlog.drop(lambda e: e.part is part)
        for where in [where for where, e in self.out.items() if e.part is part]:
            self.backlog.back(self.out.pop(where).key)
        part.finished += len(part.window)
        part.finished_bytes += sum(len(e.body) + FRAMING for e in part.window.open.values())
        part.window, part.low = Window(part.window.epoch, offset), offset

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
        self._timer = (
            None
            if due is None
            else self._loop.call_later(max(0.0, due - self.clock.now()) + 0.001, self._ring)
        )

    def _ring(self) -> None:
        self._armed = None
        now = self.clock.now()
        for e in self.backlog.due(now):
            self._place(e, now)
        self._arm()
        self._wake.set()

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self, at: Sequence[tuple[str, int]], answer: Future[Order]) -> None:
        parts = [self.partitions[a] for a in at if a in self.partitions]
        for part in parts:
            part.leaving = True
        self.backlog.drop(lambda e: e.part.leaving)
        task = self._loop.create_task(self._part_with(parts, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _part_with(self, parts: Sequence[Partition], answer: Future[Order]) -> None:
        """Work in flight may finish for a while: a request that was sent has cost something
        already.
        """
        until = self._loop.time() + (0.0 if self.member.closing else self.settings.grace)
        while (
            any(e.part in parts for e in self.out.values())
            and (left := until - self._loop.time()) > 0
        ):
            self._quiet.clear()
            try:
                async with asyncio.timeout(left):
                    await self._quiet.wait()
            except TimeoutError:
                pass
        last = self._positions(parts)
        self.lose([part.at for part in parts])
        if not answer.cancelled():
            answer.set_result(last)

    def lose(self, at: Sequence[tuple[str, int]]) -> None:
        parts = {part for a in at if (part := self.partitions.pop(a, None)) is not None}
        for part in parts:
            part.lost = part.leaving = True
            part.saved = False  # until it is known that it was
        self._dirty -= parts
        self.backlog.drop(lambda e: e.part.lost)
        for where in [where for where, e in self.out.items() if e.part in parts]:
            self.backlog.back(self.out.pop(where).key)
        for part in parts:
            part.window.open.clear()
        self._quiet.set()
        self._wake.set()

    def parted(self, parts: Sequence[Partition], saved: bool) -> None:
        for part in parts:
            part.saved = saved
        self._commit()  # whoever waited for them is told

    async def close(self) -> None:
        """What is settled is committed, and the group is told that we leave."""
        self.member.closing = True
        self.member.ring()
        await self._ended

    def end(self, error: KafkaError | None) -> None:
        self.member.trouble = error or self.member.trouble
        self.member.busy = False
        self.lose(list(self.partitions))
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

    # -- retention ---------------------------------------------------------------------------------

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
            oldest = part.window.open.get(part.window.watermark)
            keep = self.retention.get(part.place.name, self.settings.retention)
            if oldest is not None and keep > 0 and now - oldest.at > keep / 2:
                found[at] = (
                    f"{part.place.name}, partition {part.number}: group {self.group} is {(now - oldest.at) / 3600:.1f} h behind and retention deletes after"
                    f" {keep / 3600:.1f} h, read or not; start more workers, or raise retention.ms"
                )
        return found


def _resolve(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
