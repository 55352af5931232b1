"""Event-loop side of one Kafka topic and consumer group: buffering, settling and commits.

The Kafka client belongs to the thread in `consumer`.
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

from penstock.brokers.kafka.consumer import CommitRequest, GroupConsumer
from penstock.brokers.kafka.entries import MESSAGE_OVERHEAD, BufferedMessage, Partition, Run
from penstock.brokers.kafka.topics import Layout
from penstock.brokers.kafka.url import Settings, unavailable_error
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Outcome
from penstock.ports import Clock, Delivery
from penstock.rules.handout import Backlog
from penstock.rules.watermark import Window

# After this many messages arrived together, a receive call with a partial batch waits this long
# for more. Every batch costs a commit.
BURST_MESSAGES, BURST_WAIT = 16, 0.003  # messages, seconds
# Offsets of skipped messages are committed after this delay. Otherwise they would count as lag
# until the group settles a message.
SKIP_COMMIT_DELAY = 0.2  # seconds
RETENTION_CHECK_INTERVAL = 30.0  # seconds
ForwardEarly = Callable[["GroupReader", BufferedMessage], Coroutine[Any, Any, None]]
_log = logging.getLogger("penstock.brokers.kafka")


class GroupReader:
    """State of one topic and consumer group in this process.

    Created by the first `receive`, shared by all subscriptions of this process to the group.
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
        forward_early: ForwardEarly,
    ) -> None:
        self.settings, self.plan, self.group, self.group_id, self.clock, self.lease = (
            settings,
            plan,
            group,
            group_id,
            clock,
            lease,
        )
        self.backlog: Backlog[BufferedMessage] = Backlog(ordered=plan.ordered)
        self.partitions: dict[tuple[str, int], Partition] = {}
        self.handed_out: dict[int, BufferedMessage] = {}  # position -> unsettled delivery
        self.warnings: dict[tuple[str, int], str] = {}
        self.retention: dict[str, float] = {}
        # moves a message that is not due to the next retry topic
        self._forward_early = forward_early
        self._loop = asyncio.get_running_loop()
        self._changed, self._assigned, self._revocation_progress = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None  # when the timer for delayed messages fires
        self._retention_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serial = itertools.count(1)
        self._uncommitted: set[Partition] = set()  # partitions with settled, uncommitted messages
        # callers waiting for the next commit
        self._commit_waiters: list[asyncio.Future[None]] = []
        # callers waiting for the commit in progress, None if there is no commit in progress
        self._commit_in_progress: list[asyncio.Future[None]] | None = None
        self._commit_request: CommitRequest = []  # offsets of the commit in progress
        self._commit_started_at = 0.0
        self._metadata_accepted, self._commit_scheduled = True, False
        self._receivers_waiting = 0
        self._in_burst, self._last_arrival = False, 0.0
        self.consumer = GroupConsumer(settings, plan, group, group_id, lease, self._loop, self)

    # -- receiving ---------------------------------------------------------------------------------

    async def receive(
        self, limit: int, wait: float, per_key: int | None, holder: object
    ) -> Sequence[Delivery]:
        """Return up to `limit` deliveries, at most `per_key` of one key. Wait up to `wait` seconds.

        The first call also waits for the group assignment, which does not count towards `wait`.
        Returns an empty list if no message arrives. Raises StoreUnavailable if the consumer has
        stopped, or has reported an outage and no message is available.
        """
        if not self._assigned.is_set():
            try:
                async with asyncio.timeout(self.settings.timeout):
                    await self._assigned.wait()
            except TimeoutError:
                self._raise_outage()
        until = self._loop.time() + wait
        while True:
            while (
                self._in_burst
                and self.backlog.ready < limit
                and self._loop.time() < min(until, self._last_arrival + BURST_WAIT)
            ):
                await self._wait_for_messages(BURST_WAIT)
            if self._ended.done():
                self._raise_outage()
                raise StoreUnavailable(
                    f"the Kafka consumer of topic {self.plan.topic} is closed",
                    hint="subscribe again",
                )
            got = self.backlog.take(limit, per_key, self.clock.now())
            if self.plan.ordered:
                self._set_timer()  # `take` may have found a key whose next message is not due
            if got:
                return self._hand_out(got, holder)
            left = until - self._loop.time()
            if left <= 0:
                self._raise_outage()
                return []
            await self._wait_for_messages(left)

    async def _wait_for_messages(self, timeout: float) -> None:
        """Wake the consumer thread, and wait until it reports something or the timeout ends."""
        self._receivers_waiting += 1
        self.consumer.has_receivers = True
        self.consumer.wake()
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._receivers_waiting -= 1
            self.consumer.has_receivers = self._receivers_waiting > 0

    def _raise_outage(self) -> None:
        if self.consumer.outage is not None:
            raise unavailable_error(
                self.settings, self.consumer.outage, f"reading {self.plan.topic}"
            )

    def _hand_out(self, entries: Sequence[BufferedMessage], holder: object) -> Sequence[Delivery]:
        handed_out = self.handed_out
        for e in entries:
            e.holder = holder
            handed_out[e.position] = e
        self.consumer.busy = True
        return entries

    @property
    def ended(self) -> bool:
        return self._ended.done()

    def delayed_count(self) -> int:
        """Return how many messages wait here until due, except those in delayed retry topics."""
        return sum(1 for e in self.backlog.delayed() if not e.part.server_topic.delay)

    def progress(self) -> dict[tuple[str, int], tuple[int, Any]]:
        """Return each partition's watermark and the settled offsets above it, committed or not."""
        return {
            at: (part.window.watermark, part.window.ahead) for at, part in self.partitions.items()
        }

    def drop_deleted(self, ends: Mapping[tuple[str, int], int]) -> None:
        """Settle messages below these offsets, which the server has deleted, unless handed out."""
        parts = [
            (part, end) for at, end in ends.items() if (part := self.partitions.get(at)) is not None
        ]
        deleted = [
            e
            for part, end in parts
            for e in part.window.open.values()
            if e.offset < end and e.holder is None
        ]
        deleted_ids = set(map(id, deleted))
        self.backlog.drop(lambda e: id(e) in deleted_ids)
        for e in deleted:
            self.mark_settled(e)
        self._start_commit()

    def find_held(self, delivery: Delivery) -> BufferedMessage | None:
        """Return the delivery's message, or None if its token is outdated or its partition lost."""
        e = self.handed_out.get(delivery.position)
        return e if e is not None and e.token == delivery.token and not e.part.lost else None

    # -- settling ----------------------------------------------------------------------------------

    def acknowledge(
        self, items: Sequence[tuple[Delivery, Outcome]]
    ) -> tuple[list[Partition | None], list[tuple[BufferedMessage, Outcome]]]:
        """Settle the acks, and mark all other items as being settled.

        Return the partition of each item, and the items that are not acks. The partition is None
        if the token is outdated, or if the item is already settled or being settled.
        """
        parts: list[Partition | None] = []
        others: list[tuple[BufferedMessage, Outcome]] = []
        handed_out, ordered, last, opened = self.handed_out, self.plan.ordered, None, None
        for d, outcome in items:
            where = d.position
            e = handed_out.get(where)
            if e is None or (e is not d and e.token != d.token) or e.settling:
                parts.append(None)
                continue
            part = e.part
            parts.append(part)
            if outcome.__class__ is not Ack:
                e.settling = True
                others.append((e, outcome))
                continue
            # Look up the window once per partition: items of one call often share a partition.
            if part is not last or opened is None:
                last, opened = part, part.window.open
                self._uncommitted.add(part)
                if part.leaving:
                    self._revocation_progress.set()
            del handed_out[where], opened[e.offset]
            part.settled_count += 1
            part.settled_bytes += len(e.body) + MESSAGE_OVERHEAD
            if ordered:
                self.backlog.free_key(e.key)
        return parts, others

    def mark_settled(self, e: BufferedMessage) -> None:
        """Mark the message as settled. The next `commit` commits it."""
        part = e.part
        if self._remove_handed_out(e):
            del part.window.open[e.offset]
            part.settled_count += 1
            part.settled_bytes += len(e.body) + MESSAGE_OVERHEAD
            self._uncommitted.add(part)
            if self.plan.ordered:
                self.backlog.free_key(e.key)

    def return_to_backlog(self, e: BufferedMessage, due: float = 0.0) -> None:
        """Return the message to the backlog, ready now or at `due`.

        If its partition is being revoked, the next owner of the partition receives the message.
        """
        part = e.part
        if self._remove_handed_out(e):
            if e.holder is not None:  # a new token, so that the old delivery cannot be settled
                e = msgspec.structs.replace(
                    e, token=part.token | next(self._serial), settling=False, holder=None
                )
                part.window.open[e.offset] = e
            e.due = due
            if not part.leaving:
                self.backlog.put(e, first=True)
                self.backlog.free_key(e.key)
                self.consumer.busy = bool(
                    self.handed_out or self._uncommitted or self._commit_in_progress is not None
                )
                self._set_timer()
                self._changed.set()

    def _remove_handed_out(self, e: BufferedMessage) -> bool:
        """Remove the message from the unsettled deliveries.

        Return False if its partition is lost, or if the message is settled or was replaced: it was
        released, or the topic was recreated.
        """
        part = e.part
        if part.lost or part.window.open.get(e.offset) is not e:
            return False
        if self.handed_out.pop(e.position, None) is not None and part.leaving:
            self._revocation_progress.set()
        return True

    async def commit(self) -> None:
        """Commit all messages that are settled so far, and wait until Kafka confirms the commit.

        With `commit_interval`, only schedule the commit. Raises StoreUnavailable if no confirmation
        arrives in time. Then the messages are committed later.
        """
        if self.settings.commit_interval:
            if not self._commit_scheduled:
                self._commit_scheduled = True
                self._loop.call_later(self.settings.commit_interval, self._start_commit)
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._commit_waiters.append(future)
        self._start_commit()
        try:
            async with asyncio.timeout(self.settings.timeout):
                await future
        except TimeoutError:
            raise unavailable_error(
                self.settings,
                self.consumer.outage or KafkaError(KafkaError._TIMED_OUT),
                f"committing {self.plan.topic}",
            ) from None

    def _start_commit(self) -> None:
        """Start a commit, unless one is in progress. The next commit includes later settles."""
        self._commit_scheduled = False
        if self._commit_in_progress is not None:
            # No answer arrived in time: a server failure may have lost it.
            if self._loop.time() > self._commit_started_at + self.settings.timeout:
                self.on_committed(self._commit_request, KafkaError(KafkaError._TIMED_OUT))
            return
        request = self._commit_request_for(part for part in self._uncommitted if not part.lost)
        self._uncommitted.clear()
        waiting, self._commit_waiters = self._commit_waiters, []
        if request and not self._ended.done():
            self._commit_in_progress = waiting
            self._commit_request, self._commit_started_at = request, self._loop.time()
            self.consumer.commit_requests.append(request)
            self.consumer.wake()
        else:
            _resolve(waiting)

    def _commit_request_for(self, parts: Iterable[Partition]) -> CommitRequest:
        request = []
        for part in parts:
            part.last_watermark = part.window.watermark
            request.append(
                (
                    part,
                    part.last_watermark,
                    part.window.metadata() if self._metadata_accepted else "",
                )
            )
        return request

    def on_committed(self, request: CommitRequest, error: KafkaError | None) -> None:
        waiting, self._commit_in_progress = self._commit_in_progress or [], None
        if error is None:
            _resolve(waiting)
            if self._commit_waiters or self._uncommitted:
                self._start_commit()
            self.consumer.busy = bool(self.handed_out or self._commit_in_progress is not None)
            return
        if error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
            self._metadata_accepted = False
            _log.warning(
                "Kafka rejected the commit metadata of %s:"
                " after a crash, messages settled out of order will be redelivered",
                self.plan.topic,
            )
        self._commit_waiters = waiting + self._commit_waiters
        self._uncommitted.update(part for part, _, _ in request if not part.lost)
        self._loop.call_later(0.2, self._start_commit)

    # -- arrivals ----------------------------------------------------------------------------------

    def on_assigned(self, parts: Sequence[Partition]) -> None:
        self._assigned.set()
        for part in parts:
            self.partitions[part.topic_partition] = part
        if self._retention_timer is None:
            self._retention_timer = self._loop.call_later(
                RETENTION_CHECK_INTERVAL, self._check_retention
            )

    def on_messages(self, runs: Sequence[Run]) -> None:
        now, n = self.clock.now(), self.backlog.ready
        for part, entries, plain in runs:
            if part.leaving:
                continue
            window, first = part.window, entries[0].offset
            if first > window.next > 0 and not window.open and not part.settled_count:
                _log.warning(
                    "%s, partition %d: %d messages that group %s had not read were deleted"
                    " (by retention, a purge or compaction)",
                    *part.topic_partition,
                    first - window.next,
                    self.group,
                )
            if plain and window.add_run(first, entries):
                self.backlog.put_all(entries, part.server_topic.priority)
            else:
                for e in entries:
                    self._add_message(part, e, now)
                part.last_watermark = part.window.watermark
        self._in_burst, self._last_arrival = (
            self.backlog.ready - n >= BURST_MESSAGES,
            self._loop.time(),
        )
        self._set_timer()
        self._changed.set()

    def _add_message(self, part: Partition, e: BufferedMessage, now: float) -> None:
        """Add one message that may be settled already, or has a due time or a target group."""
        if e.offset < part.window.next:
            self._reset_partition(part, e.offset)
        if not part.window.add(e.offset, e) or (e.target_group and e.target_group != self.group):
            # Skip the message: it was settled before a restart, or is for another group.
            part.window.settle(e.offset, part.window.epoch)
            part.settled_count += 1
            part.settled_bytes += len(e.body) + MESSAGE_OVERHEAD
            self._uncommitted.add(part)
            if not self._commit_scheduled:
                self._commit_scheduled = True
                self._loop.call_later(
                    self.settings.commit_interval or SKIP_COMMIT_DELAY, self._start_commit
                )
            return
        delay = part.server_topic.delay
        if delay is not None and e.published_at + delay > now:
            e.due = e.published_at + delay
            self.backlog.put(e)
        else:
            self._schedule(e, now)

    def _reset_partition(self, part: Partition, offset: int) -> None:
        """Start the partition again at `offset`, because its offsets went backwards.

        The topic was recreated, or a server lost its newest messages. The recorded offsets belong
        to other messages now.
        """
        self.backlog.drop(lambda e: e.part is part)
        for where in [where for where, e in self.handed_out.items() if e.part is part]:
            self.backlog.free_key(self.handed_out.pop(where).key)
        part.settled_count += len(part.window)
        part.settled_bytes += sum(len(e.body) + MESSAGE_OVERHEAD for e in part.window.open.values())
        part.window, part.last_watermark = Window(part.window.epoch, offset), offset

    def _schedule(self, e: BufferedMessage, now: float) -> None:
        """Make the message ready if it is due. Otherwise delay it here or in a retry topic."""
        left = e.not_before - now
        e.due = 0.0
        if left > 0:
            if self.plan.retry_topic_for(left) is not None:
                self._start_forwarding(e)
                return
            e.due = e.not_before
        self.backlog.put(e)

    def _start_forwarding(self, e: BufferedMessage) -> None:
        task = self._loop.create_task(self._forward_early(self, e))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_timer(self) -> None:
        due = self.backlog.next_due()
        if due == self._timer_due:
            return
        self._timer_due = due
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            None
            if due is None
            else self._loop.call_later(max(0.0, due - self.clock.now()) + 0.001, self._on_timer)
        )

    def _on_timer(self) -> None:
        self._timer_due = None
        now = self.clock.now()
        for e in self.backlog.pop_due(now):
            self._schedule(e, now)
        self._set_timer()
        self._changed.set()

    # -- leaving -----------------------------------------------------------------------------------

    def on_revoking(self, at: Sequence[tuple[str, int]], answer: Future[CommitRequest]) -> None:
        parts = [self.partitions[a] for a in at if a in self.partitions]
        for part in parts:
            part.leaving = True
        self.backlog.drop(lambda e: e.part.leaving)
        task = self._loop.create_task(self._finish_revocation(parts, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish_revocation(
        self, parts: Sequence[Partition], answer: Future[CommitRequest]
    ) -> None:
        """Wait up to `grace` seconds for unsettled deliveries, then give the partitions up.

        A delivery in progress may already have sent its request, and redelivery would repeat it.
        """
        until = self._loop.time() + (0.0 if self.consumer.closing else self.settings.grace)
        while (
            any(e.part in parts for e in self.handed_out.values())
            and (left := until - self._loop.time()) > 0
        ):
            self._revocation_progress.clear()
            try:
                async with asyncio.timeout(left):
                    await self._revocation_progress.wait()
            except TimeoutError:
                pass
        last = self._commit_request_for(parts)
        self.on_lost([part.topic_partition for part in parts])
        if not answer.cancelled():
            answer.set_result(last)

    def on_lost(self, at: Sequence[tuple[str, int]]) -> None:
        parts = {part for a in at if (part := self.partitions.pop(a, None)) is not None}
        for part in parts:
            part.lost = part.leaving = True
            part.commit_confirmed = False  # until `on_revoked` reports the last commit
        self._uncommitted -= parts
        self.backlog.drop(lambda e: e.part.lost)
        for where in [where for where, e in self.handed_out.items() if e.part in parts]:
            self.backlog.free_key(self.handed_out.pop(where).key)
        for part in parts:
            part.window.open.clear()
        self._revocation_progress.set()
        self._changed.set()

    def on_revoked(self, parts: Sequence[Partition], confirmed: bool) -> None:
        for part in parts:
            part.commit_confirmed = confirmed
        self._start_commit()  # also ends the wait of callers whose partitions are lost

    async def close(self) -> None:
        """Commit the settled messages, leave the group, and wait until the consumer has ended."""
        self.consumer.closing = True
        self.consumer.wake()
        await self._ended

    def on_ended(self, error: KafkaError | None) -> None:
        self.consumer.outage = error or self.consumer.outage
        self.consumer.busy = False
        self.on_lost(list(self.partitions))
        _resolve(self._commit_waiters + (self._commit_in_progress or []))
        self._commit_waiters, self._commit_in_progress = [], None
        for handle in (self._timer, self._retention_timer):
            if handle is not None:
                handle.cancel()
        for task in self._tasks:
            task.cancel()
        self._assigned.set()
        self._changed.set()
        if not self._ended.done():
            self._ended.set_result(None)

    # -- retention ---------------------------------------------------------------------------------

    def _check_retention(self) -> None:
        for at, text in self.alarms().items():
            if at not in self.warnings:
                _log.warning("%s", text)
            self.warnings[at] = text
        self._retention_timer = self._loop.call_later(
            RETENTION_CHECK_INTERVAL, self._check_retention
        )

    def alarms(self) -> dict[tuple[str, int], str]:
        """Return a warning for each partition that is too far behind.

        The oldest unsettled message of such a partition is older than half of the retention.
        """
        now, found = self.clock.now(), {}
        for at, part in self.partitions.items():
            oldest = part.window.open.get(part.window.watermark)
            keep = self.retention.get(part.server_topic.name, self.settings.retention)
            if oldest is not None and keep > 0 and now - oldest.published_at > keep / 2:
                found[at] = (
                    f"{part.server_topic.name}, partition {part.number}: group {self.group} is"
                    f" {(now - oldest.published_at) / 3600:.1f} h behind"
                    " and retention deletes after"
                    f" {keep / 3600:.1f} h, even unread messages:"
                    " start more workers, or raise retention.ms"
                )
        return found


def _resolve(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
