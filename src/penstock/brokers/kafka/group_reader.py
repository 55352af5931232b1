"""Event-loop side of one Kafka topic and consumer group: buffering, settling and commits.

The Kafka client belongs to the thread in `consumer`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence

import msgspec
from confluent_kafka import KafkaError

from penstock.brokers.kafka.commits import CommitRequest, Commits, log
from penstock.brokers.kafka.consumer import GroupConsumer
from penstock.brokers.kafka.entries import MESSAGE_OVERHEAD, BufferedMessage, Partition, Run
from penstock.brokers.kafka.message import dead_letter, retry
from penstock.brokers.kafka.producer import BatchProducer, Message
from penstock.brokers.kafka.topics import Layout, TopicAndPartition
from penstock.brokers.kafka.url import Settings, explained
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Dead, Outcome, Retry
from penstock.ports import Clock, Delivery, Published
from penstock.rules.handout import Backlog

# After this many messages arrived together, a receive call with a partial batch waits this long
# for more. Every batch costs a commit.
BURST_MESSAGES, BURST_WAIT = 16, 0.003  # messages, seconds
# Offsets of skipped messages are committed after this delay. Otherwise they would count as lag
# until the group settles a message.
SKIP_COMMIT_DELAY = 0.2  # seconds
RETENTION_CHECK_INTERVAL = 30.0  # seconds


class GroupReader:
    """State of one topic and consumer group in this process.

    Created by the first `receive`, shared by all subscriptions of this process to the group.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Layout,
        group: str,
        clock: Clock,
        producer: BatchProducer,
        retention: Mapping[str, float],
        *,
        group_id: str,
        lease: float,
    ) -> None:
        self.settings, self.plan, self.group, self.clock = settings, plan, group, clock
        self._producer = producer
        self._retention = retention  # server-side name -> seconds
        self.backlog: Backlog[BufferedMessage] = Backlog(ordered=plan.ordered)
        self.partitions: dict[TopicAndPartition, Partition] = {}
        self.handed_out: dict[int, BufferedMessage] = {}  # position -> unsettled delivery
        self._warned: set[TopicAndPartition] = set()  # partitions with a logged retention alarm
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._assigned = asyncio.Event()
        self._revocation_progress = asyncio.Event()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None  # for delayed messages
        self._tasks: set[asyncio.Task[None]] = set()
        self._serial = itertools.count(1)
        self.wakeup = threading.Event()  # wakes the consumer thread
        self.commits = Commits(settings, plan.topic, self.wakeup)
        self._start_task(self.commits.run())
        self._start_task(self._watch_retention())
        self.receivers_waiting = 0
        self._in_burst, self._last_arrival = False, 0.0
        self.consumer = GroupConsumer(self, self._loop, group_id, lease)

    # -- receiving ---------------------------------------------------------------------------------

    async def receive(
        self, limit: int, wait: float, per_key: int | None, holder: object
    ) -> Sequence[Delivery]:
        """Return up to `limit` deliveries, at most `per_key` of one key. Wait up to `wait` seconds.

        The first call also waits for the group assignment, which does not count towards `wait`.
        Returns an empty list if no message arrives. Raises StoreUnavailable if the consumer has
        stopped, or has reported an outage and no message is available.
        """
        if not await _is_set(self._assigned, self.settings.timeout):
            self._raise_outage()
        until = self._loop.time() + wait
        while True:
            while (
                self._in_burst
                and self.backlog.ready < limit
                and self._loop.time() < min(until, self._last_arrival + BURST_WAIT)
            ):
                await self._wait_for_messages(BURST_WAIT)
            if self.ended.done():
                self._raise_outage()
                raise StoreUnavailable(
                    f"the Kafka consumer of topic {self.plan.topic} is closed",
                    hint="subscribe again",
                )
            got = self.backlog.take(limit, per_key, self.clock.now())
            if self.plan.ordered:
                self._set_timer()  # `take` may have found a key whose next message is not due
            for e in got:
                e.holder = holder
                self.handed_out[e.position] = e
            if got:
                return got
            left = until - self._loop.time()
            if left <= 0:
                self._raise_outage()
                return []
            await self._wait_for_messages(left)

    async def _wait_for_messages(self, timeout: float) -> None:
        """Wake the consumer thread, and wait until it reports something or the timeout ends."""
        self.receivers_waiting += 1
        self.wakeup.set()
        self._changed.clear()
        try:
            await _is_set(self._changed, timeout)
        finally:
            self.receivers_waiting -= 1

    def _raise_outage(self) -> None:
        if self.consumer.outage is not None:
            raise explained(
                StoreUnavailable, self.settings, self.consumer.outage, f"reading {self.plan.topic}"
            )

    def delayed_count(self) -> int:
        """Return how many messages wait here until due, except those in delayed retry topics."""
        return sum(not e.part.server_topic.delay for e in self.backlog.delayed())

    def drop_deleted(self, ends: Mapping[TopicAndPartition, int]) -> None:
        """Settle messages below these offsets, which the server has deleted, unless handed out."""
        deleted = [
            e
            for at, part in self.partitions.items()
            for e in part.window.open.values()
            if e.offset < ends.get(at, 0) and e.holder is None
        ]
        self.backlog.drop(lambda e: e.offset < ends.get(e.part.topic_partition, 0))
        for e in deleted:
            self._mark_settled(e)
        self.commits.start()

    def holds(self, d: Delivery) -> bool:
        """Return True if the delivery's token is valid and its partition is not lost."""
        e = self.handed_out.get(d.position)
        return e is not None and e.token == d.token and not e.part.lost

    def release_all(self, holder: object) -> None:
        """Return the unsettled deliveries of a subscription to the backlog."""
        for e in list(self.handed_out.values()):
            if e.holder is holder and not e.settling:
                self._return_to_backlog(e)

    # -- settling ----------------------------------------------------------------------------------

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        """Settle deliveries. The result is False if the lease was lost."""
        parts, others = self._acknowledge(items)
        finished = len(others) < len(items) - parts.count(None)
        if others:
            finished = await self._settle_others(others) or finished
        if finished:
            await self._commit()
        return [part is not None and part.commit_confirmed for part in parts]

    def _acknowledge(
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
                self.commits.uncommitted.add(part)
                if part.leaving:
                    self._revocation_progress.set()
            del handed_out[where], opened[e.offset]
            part.settled_count += 1
            part.settled_bytes += len(e.body) + MESSAGE_OVERHEAD
            if ordered:
                self.backlog.free_key(e.key)
        return parts, others

    async def _settle_others(self, others: Sequence[tuple[BufferedMessage, Outcome]]) -> bool:
        """Settle items that are not acks. Return True if some of them must be committed."""
        now = self.clock.now()
        returned: list[tuple[BufferedMessage, float]] = []
        copied: list[BufferedMessage] = []
        copies: list[Message] = []
        for e, outcome in others:
            delay = outcome.delay if isinstance(outcome, Retry) else 0.0
            if isinstance(outcome, Dead):
                copies.append(dead_letter(self.plan.dead, e, outcome.reason))
            elif (server_topic := self.plan.retry_topic_for(delay)) is not None:
                copies.append(retry(server_topic.name, e, now + delay))
            else:
                returned.append((e, now + delay if delay > 0 else 0.0))
                continue
            copied.append(e)
        try:
            answers = await self._producer.send(copies)
        finally:
            for e, _ in others:
                e.settling = False
        if answers.count(Published.OK) < len(copies):
            raise StoreUnavailable(
                "Kafka did not confirm a retry or a dead letter",
                hint="check that all Kafka servers are up: the settle is retried automatically",
            )
        for e, due in returned:
            self._return_to_backlog(e, due)
        for e in copied:
            self._mark_settled(e)
        return bool(copied)

    def _mark_settled(self, e: BufferedMessage) -> None:
        """Mark the message as settled. The next commit includes it."""
        part = e.part
        if self._remove_handed_out(e):
            del part.window.open[e.offset]
            part.count_settled([e])
            self.commits.uncommitted.add(part)
            self.backlog.free_key(e.key)

    def _return_to_backlog(self, e: BufferedMessage, due: float = 0.0) -> None:
        """Return the message to the backlog, ready now or at `due`.

        If its partition is being revoked, the next owner of the partition receives the message.
        """
        part = e.part
        if self._remove_handed_out(e):
            if e.holder is not None:  # a new token, so that the old delivery cannot be settled
                e = msgspec.structs.replace(e, token=part.token | next(self._serial), holder=None)
                part.window.open[e.offset] = e
            e.due = due
            if not part.leaving:
                self.backlog.put(e, first=True)
                self.backlog.free_key(e.key)
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

    async def _commit(self) -> None:
        """Commit all messages that are settled so far, and wait until Kafka confirms the commit.

        With `commit_interval`, only start the commit. Raises StoreUnavailable if no confirmation
        arrives in time. Then the messages are committed later.
        """
        confirmed = self.commits.start()
        if self.settings.commit_interval:
            return
        done, _ = await asyncio.wait(
            (confirmed, self.ended),
            timeout=self.settings.timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done:
            raise explained(
                StoreUnavailable,
                self.settings,
                self.consumer.outage or KafkaError(KafkaError._TIMED_OUT),
                f"committing {self.plan.topic}",
            )

    # -- arrivals ----------------------------------------------------------------------------------

    def on_assigned(self, parts: Sequence[Partition]) -> None:
        self._assigned.set()
        for part in parts:
            self.partitions[part.topic_partition] = part

    def on_messages(self, runs: Sequence[Run]) -> None:
        now, n = self.clock.now(), self.backlog.ready
        for part, entries, plain in runs:
            if part.leaving:
                continue
            window, first = part.window, entries[0].offset
            if first > window.next > 0 and not window.open and not part.settled_count:
                log.warning(
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
        if self.commits.uncommitted:  # skipped messages
            self._loop.call_later(SKIP_COMMIT_DELAY, self.commits.start)
        self._in_burst = self.backlog.ready - n >= BURST_MESSAGES
        self._last_arrival = self._loop.time()
        self._set_timer()
        self._changed.set()

    def _add_message(self, part: Partition, e: BufferedMessage, now: float) -> None:
        """Add one message that may be settled already, or has a due time or a target group."""
        if e.offset < part.window.next:
            self._drop_messages({part})
            part.restart(e.offset)
        if not part.window.add(e.offset, e) or (e.target_group and e.target_group != self.group):
            # Skip the message: it was settled before a restart, or is for another group.
            part.window.settle(e.offset, part.window.epoch)
            part.count_settled([e])
            self.commits.uncommitted.add(part)
            return
        delay = part.server_topic.delay
        if delay is not None and e.published_at + delay > now:
            e.due = e.published_at + delay
            self.backlog.put(e)
        else:
            self._schedule(e, now)

    def _drop_messages(self, parts: set[Partition]) -> None:
        """Drop the buffered messages and the deliveries of these partitions."""
        self.backlog.drop(lambda e: e.part in parts)
        for e in [e for e in self.handed_out.values() if e.part in parts]:
            del self.handed_out[e.position]
            self.backlog.free_key(e.key)

    def _schedule(self, e: BufferedMessage, now: float) -> None:
        """Make the message ready if it is due. Otherwise delay it here or in a retry topic."""
        retry_topic = self.plan.retry_topic_for(e.not_before - now)
        if retry_topic is not None:
            self._start_task(self._forward_early(e, retry_topic.name))
            return
        e.due = e.not_before if e.not_before > now else 0.0
        self.backlog.put(e)

    async def _forward_early(self, e: BufferedMessage, retry_topic: str) -> None:
        """Move a message that is not due to the next retry topic, then settle it here."""
        answers = await self._producer.send([retry(retry_topic, e, e.not_before)])
        if answers == [Published.OK]:
            self._mark_settled(e)
            await self._commit()
        else:
            self._return_to_backlog(e, self.clock.now() + 1.0)  # then it is forwarded again

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Log an unexpected exception of a task, and end the reader. An outage does not end it."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, StoreUnavailable):
            log.error("a task of the Kafka reader failed: the reader is replaced", exc_info=error)
            self.consumer.closing = True
            self.wakeup.set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.backlog.next_due()
        if due is not None:
            left = max(0.0, due - self.clock.now())
            self._timer = self._loop.call_later(left + 0.001, self._on_timer)

    def _on_timer(self) -> None:
        now = self.clock.now()
        for e in self.backlog.pop_due(now):
            self._schedule(e, now)
        self._set_timer()
        self._changed.set()

    # -- leaving -----------------------------------------------------------------------------------

    async def on_revoking(self, at: Sequence[TopicAndPartition]) -> CommitRequest:
        """Wait up to `grace` seconds for unsettled deliveries, then give the partitions up.

        A delivery in progress may already have sent its request, and redelivery would repeat it.
        Return what the consumer commits before another member gets the partitions.
        """
        parts = [self.partitions[a] for a in at if a in self.partitions]
        for part in parts:
            part.leaving = True
        self.backlog.drop(lambda e: e.part.leaving)
        until = self._loop.time() + (0.0 if self.consumer.closing else self.settings.grace)
        while (
            any(e.part in parts for e in self.handed_out.values())
            and (left := until - self._loop.time()) > 0
        ):
            self._revocation_progress.clear()
            await _is_set(self._revocation_progress, left)
        last = self.commits.request_for(parts)
        self._give_up(at)
        return last

    def _give_up(self, at: Iterable[TopicAndPartition]) -> None:
        parts = {part for a in at if (part := self.partitions.pop(a, None)) is not None}
        self._drop_messages(parts)
        for part in parts:
            part.lost = part.leaving = True
            part.commit_confirmed = False  # until `on_lost` reports the last commit
            part.window.open.clear()
        self._revocation_progress.set()
        self._changed.set()

    def on_lost(
        self, at: Sequence[TopicAndPartition], committed: Sequence[Partition], confirmed: bool
    ) -> None:
        self._give_up(at)
        for part in committed:
            part.commit_confirmed = confirmed

    async def close(self) -> None:
        """Commit the settled messages, leave the group, and wait until the consumer has ended."""
        self.consumer.closing = True
        self.wakeup.set()
        await self.ended

    def on_ended(self, error: KafkaError | None) -> None:
        self.consumer.outage = error or self.consumer.outage
        self._give_up(list(self.partitions))
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._assigned.set()
        self._changed.set()
        if not self.ended.done():  # a cancelled `close` has cancelled it
            self.ended.set_result(None)

    # -- retention ---------------------------------------------------------------------------------

    async def _watch_retention(self) -> None:
        while True:
            await asyncio.sleep(RETENTION_CHECK_INTERVAL)
            self._check_retention()

    def _check_retention(self) -> None:
        for at, text in self.alarms().items():
            if at not in self._warned:
                log.warning("%s", text)
            self._warned.add(at)

    def alarms(self) -> dict[TopicAndPartition, str]:
        """Return the warnings of partitions that are too far behind."""
        now, default = self.clock.now(), self.settings.retention
        found = {
            at: part.retention_alarm(now, self._retention.get(at[0], default))
            for at, part in self.partitions.items()
        }
        return {at: text for at, text in found.items() if text}


async def _is_set(event: asyncio.Event, timeout: float) -> bool:
    """Wait until the event is set. Return False if the timeout ends first."""
    try:
        async with asyncio.timeout(timeout):
            return await event.wait()
    except TimeoutError:
        return False
