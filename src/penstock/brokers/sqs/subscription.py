"""SQS subscription: shares per priority class, long polls for empty queues, leases and settling."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.brokers.dead_copies import DEAD, REASON, dead_copy
from penstock.brokers.sqs import message as wire
from penstock.brokers.sqs.client import BATCH, SqsClient
from penstock.brokers.sqs.message import ATTRIBUTE, QueueId
from penstock.brokers.sqs.publisher import Publisher
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Delivery, Out, Published
from penstock.rules.handout import Backlog
from penstock.rules.priority import CLASSES

MAX_PARALLEL_POLLS = 16  # concurrent polls of one queue while it has many messages
# Messages that one call receives beyond its limit, to find other keys if one key has many messages.
MAX_EXTRA = 256
MAX_PREFETCHED = 64  # messages of one queue that are kept for the next call
# Seconds for which SQS hides the others. Without it, SQS would deliver them again immediately.
EXTRA_HIDDEN = 5
PREFETCH_HOLD = 2.0  # seconds. Then prefetched messages that no call requested are returned to SQS.
# Seconds after its receipt for which SQS can hide a message: 12 hours, minus a margin.
MAX_HIDDEN = 12 * 3600 - 60


class _HeldMessage(msgspec.Struct):
    """A message under a lease of this subscription."""

    queue: QueueId
    receipt: str
    received_at: float  # time of the event loop
    until: float  # end of the lease, by the time of the event loop
    seq: int
    delivery: Delivery
    key: str
    priority: int
    due: float = 0.0


class _QueueState(msgspec.Struct):
    """State of one queue, which holds one priority class of the group.

    While `has_more` is set, the queue is polled on demand. When a poll returns fewer messages than
    requested, a long poll waits for new messages.
    """

    queue: QueueId
    has_more: bool = True
    parallel_polls: int = 1
    long_poll: asyncio.Task[None] | None = None


class SqsSubscription:
    """Implements ports.Subscription.

    A poll is never cancelled while it runs. Its messages would stay hidden for a whole lease.
    """

    def __init__(
        self, client: SqsClient, publisher: Publisher, topic: str, group: str, lease: float
    ) -> None:
        self._client, self._publisher, self._clock = client, publisher, publisher.clock
        self.topic, self.group, self.lease = topic, group, lease
        self._states = [_QueueState(w) for w in wire.group_queues(topic, group)]
        self._tokens = itertools.count(1)
        self._backlog: Backlog[_HeldMessage] = Backlog()  # prefetched messages
        self._handed_out: dict[int, _HeldMessage] = {}
        # Tokens that a `settle` call settled before it failed for other items. The next call
        # returns True for them.
        self._settled_before: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._outage: StoreUnavailable | None = None
        self._return_timer: asyncio.TimerHandle | None = None
        self._last_sweep = 0.0

    # -- receiving ---------------------------------------------------------------------------------

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        now = asyncio.get_running_loop().time
        until = now() + wait
        self._cancel_return()
        self._drop_expired(now())
        self._outage = None  # drop the error of an earlier poll
        per_key = per_key or limit
        try:
            while True:
                self._changed.clear()
                await self._fill(limit, per_key)
                got = self._backlog.take(limit, per_key)
                left = until - now()
                if got or left <= 0:
                    return self._hand_out(got, limit)
                self._start_long_polls(self._states, limit)
                try:
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                except TimeoutError:
                    until = now()  # then one last check of the prefetched messages
                outage, self._outage = self._outage, None
                if outage is not None:
                    raise outage
        finally:
            self._schedule_return()

    def _hand_out(self, got: Sequence[_HeldMessage], limit: int) -> list[Delivery]:
        self._start_long_polls([state for state in self._states if not state.has_more], limit)
        self._hide_extra()
        for held in got:
            self._handed_out[held.delivery.token] = held
        return [held.delivery for held in sorted(got, key=_by_class_and_age)]

    async def _fill(self, limit: int, per_key: int) -> None:
        """Poll until the batch can be filled: first each priority class with its share, then any.

        Nothing is taken before the last poll, so a cancelled call loses no message.
        """
        budget = limit + MAX_EXTRA
        for share in (True, False):
            while budget > 0 and (plan := self._plan_polls(limit, per_key, share)):
                budget -= await self._poll_now(plan)

    def _plan_polls(self, limit: int, per_key: int, share: bool) -> list[tuple[_QueueState, int]]:
        """Return the queues to poll, and how many messages each must still deliver."""
        nonempty = [state for state in self._states if state.has_more]
        available = [self._backlog.available(priority, per_key) for priority in range(len(CLASSES))]
        if not share:
            missing = limit - sum(available)
            return [(state, missing) for state in nonempty[:1] if missing > 0]
        if len(nonempty) == 1:
            return []  # the other classes have no messages
        quotas = self._backlog.quotas(limit)
        return [
            (state, missing)
            for state in nonempty
            if (missing := quotas[state.queue.priority] - available[state.queue.priority]) > 0
        ]

    async def _poll_now(self, plan: Iterable[tuple[_QueueState, int]]) -> int:
        """Poll the queues without waiting, and return the number of received messages.

        The number of concurrent polls grows while a queue returns full batches.
        """
        polls: list[tuple[_QueueState, int, list[asyncio.Task[int]]]] = []
        for state, want in plan:
            want = min(want, state.parallel_polls * BATCH)
            sizes = [min(BATCH, want - start) for start in range(0, want, BATCH)]
            polls.append((state, want, [self._spawn(self._poll(state, size, 0)) for size in sizes]))
        await asyncio.wait([task for *_, tasks in polls for task in tasks])
        total, outage = 0, None
        for state, want, tasks in polls:
            received = 0
            for task in tasks:
                if (error := task.exception()) is None:
                    received += task.result()
                else:
                    outage = error
            state.has_more = received >= want
            state.parallel_polls = (
                min(2 * state.parallel_polls, MAX_PARALLEL_POLLS) if state.has_more else 1
            )
            total += received
        if outage is not None and not total:
            raise outage
        return total

    async def _poll(self, state: _QueueState, limit: int, wait: int) -> int:
        answer = await self._client.call_queue(
            state.queue,
            "receive_message",
            MaxNumberOfMessages=limit,
            WaitTimeSeconds=wait,
            VisibilityTimeout=math.ceil(self.lease),
            MessageAttributeNames=[ATTRIBUTE],
        )
        messages = answer.get("Messages", ())
        self._add_received(state, messages)
        return len(messages)

    def _add_received(self, state: _QueueState, messages: Sequence[dict[str, Any]]) -> None:
        loop, wall = asyncio.get_running_loop().time(), self._clock.now()
        ready: list[_HeldMessage] = []
        early: list[tuple[_HeldMessage, float]] = []
        for message in messages:
            attributes, body = wire.unpack(message)
            if self.topic.endswith(DEAD):
                attributes.headers.setdefault(
                    REASON, "given up by SQS: received too often without an end"
                )
            held = _HeldMessage(
                queue=state.queue,
                receipt=message["ReceiptHandle"],
                received_at=loop,
                until=loop + self._local_lease(self.lease),
                seq=attributes.seq,
                delivery=Delivery(
                    topic=self.topic,
                    group=self.group,
                    id=attributes.id,
                    key=attributes.key,
                    body=body,
                    headers=attributes.headers,
                    position=wire.position(message["MessageId"]),
                    token=next(self._tokens),
                    deliveries=1,
                    priority=attributes.prio,
                ),
                key=attributes.key,
                priority=state.queue.priority,
            )
            if attributes.after > wall:
                early.append((held, attributes.after - wall))
            else:
                ready.append(held)
        self._backlog.put_all(sorted(ready, key=_by_class_and_age), state.queue.priority)
        if early:
            self._spawn(
                self._set_visibility(
                    [(held, min(math.ceil(delay), MAX_HIDDEN)) for held, delay in early]
                )
            )

    def _local_lease(self, lease: float) -> float:
        """Treat a lease as expired slightly before SQS does.

        AWS may accept a receipt handle even after it delivered the message to another consumer.
        """
        return lease - min(1.0, 0.05 * lease)

    def _start_long_polls(self, states: Iterable[_QueueState], limit: int) -> None:
        for state in states:
            if state.long_poll is None or state.long_poll.done():
                state.long_poll = self._spawn(self._long_poll(state, min(BATCH, limit)))

    async def _long_poll(self, state: _QueueState, limit: int) -> None:
        try:
            if await self._poll(state, limit, self._client.address.poll):
                state.has_more = True
                if self._return_timer is not None:  # no `receive` is running
                    self._schedule_return()
        except StoreUnavailable as e:
            self._outage = e
        self._changed.set()  # even without a message: a waiting `receive` polls again

    # -- prefetched messages -----------------------------------------------------------------------

    def _cancel_return(self) -> None:
        if self._return_timer is not None:
            self._return_timer.cancel()
            self._return_timer = None

    def _schedule_return(self) -> None:
        """Return the prefetched messages to SQS after a short time, unless `receive` is called."""
        self._cancel_return()
        self._return_timer = asyncio.get_running_loop().call_later(
            min(PREFETCH_HOLD, self.lease / 4), self._return_prefetched
        )

    def _return_prefetched(self) -> None:
        if prefetched := self._backlog.drop(lambda held: True):
            self._spawn(self._set_visibility([(held, 0) for held in prefetched]))

    def _hide_extra(self) -> None:
        """Hide the extra messages for some seconds, so that SQS delivers other keys first."""
        if self._backlog.ready <= MAX_PREFETCHED:
            return
        by_age = sorted(self._backlog, key=_by_class_and_age)
        by_queue = [[held for held in by_age if held.queue == s.queue] for s in self._states]
        if extra := [held for mine in by_queue for held in mine[MAX_PREFETCHED:]]:
            tokens = {held.delivery.token for held in extra}
            self._backlog.drop(lambda held: held.delivery.token in tokens)
            self._spawn(self._set_visibility([(held, EXTRA_HIDDEN) for held in extra]))

    def _drop_expired(self, now: float) -> None:
        """Drop prefetched messages with less than half of their lease.

        A caller could not renew such a lease in time. Messages whose leases have not expired are
        returned to SQS.
        """
        old = self._backlog.drop(lambda held: held.until <= now + self.lease / 2)
        if live := [held for held in old if held.until > now]:
            self._spawn(self._set_visibility([(held, 0) for held in live]))
        if now > self._last_sweep + self.lease:
            self._last_sweep = now
            self._handed_out = {
                token: held for token, held in self._handed_out.items() if held.until > now
            }

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait for the running polls, and return their messages to SQS."""
        self._cancel_return()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._return_prefetched()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def abandon(self) -> None:
        """Cancel all tasks, because the broker closes the connection."""
        self._cancel_return()
        for task in self._tasks:
            task.cancel()

    # -- settling ----------------------------------------------------------------------------------

    def holds(self, delivery: Delivery) -> bool:
        held = self._handed_out.get(delivery.token)
        return held is not None and held.until > asyncio.get_running_loop().time()

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        """Settle deliveries. Durable when it returns.

        Raises StoreUnavailable if the result of an item is unknown. Then the caller may settle all
        items again.
        """
        now = asyncio.get_running_loop().time()
        answers: list[bool | None] = [False] * len(items)
        mine: dict[int, _HeldMessage] = {}
        deletes: list[int] = []
        shows: list[tuple[int, int]] = []
        moves: list[tuple[int, Out, QueueId]] = []
        for i, (d, outcome) in enumerate(items):
            if d.token in self._settled_before:
                self._settled_before.discard(d.token)
                answers[i] = True
                continue
            held = self._handed_out.pop(d.token, None)
            if held is None or held.until <= now:
                continue
            mine[i] = held
            match outcome:
                case Ack():
                    deletes.append(i)
                case Release():
                    shows.append((i, 0))
                case Retry(delay=delay) if now - held.received_at + delay <= MAX_HIDDEN:
                    shows.append((i, math.ceil(delay)))
                case Retry(delay=delay):
                    moves.append((i, self._delayed_copy(held, delay), held.queue))
                case Dead(reason=reason):
                    moves.append((i, dead_copy(d, reason), wire.dead_queue(d.topic)))
        done, shown, moved = await asyncio.gather(
            self._delete([mine[i] for i in deletes]),
            self._set_visibility([(mine[i], seconds) for i, seconds in shows]),
            self._move_copies(mine, moves),
        )
        for indices, results in (
            (deletes, done),
            ([i for i, _ in shows], shown),
            ([i for i, *_ in moves], moved),
        ):
            for i, result in zip(indices, results, strict=True):
                answers[i] = result
        unknown = [i for i, answer in enumerate(answers) if answer is None]
        if unknown:
            self._handed_out.update({items[i][0].token: mine[i] for i in unknown})
            self._settled_before.update(items[i][0].token for i in mine if answers[i])
            raise StoreUnavailable(
                f"{self._client.address.shown} did not confirm the outcome"
                f" of {len(unknown)} messages"
            )
        return [bool(answer) for answer in answers]

    def _delayed_copy(self, held: _HeldMessage, delay: float) -> Out:
        d = held.delivery
        return Out(
            topic=d.topic,
            id=d.id,
            key=d.key,
            body=d.body,
            headers=d.headers,
            priority=held.priority,
            not_before=self._clock.now() + delay,
        )

    async def _delete(self, helds: Sequence[_HeldMessage]) -> list[bool | None]:
        return await self._call_by_queue(
            "delete_message_batch", [(held, {"ReceiptHandle": held.receipt}) for held in helds]
        )

    async def _set_visibility(self, helds: Sequence[tuple[_HeldMessage, int]]) -> list[bool | None]:
        """Hide each message for its number of seconds from now."""
        return await self._call_by_queue(
            "change_message_visibility_batch",
            [(held, {"ReceiptHandle": held.receipt, "VisibilityTimeout": s}) for held, s in helds],
        )

    async def _call_by_queue(
        self, operation: str, entries: Sequence[tuple[_HeldMessage, dict[str, Any]]]
    ) -> list[bool | None]:
        answers: list[bool | None] = [None] * len(entries)
        queues: dict[QueueId, list[int]] = defaultdict(list)
        for i, (held, _) in enumerate(entries):
            queues[held.queue].append(i)
        results = await asyncio.gather(
            *[
                self._client.call_batch(queue, operation, [entries[i][1] for i in some])
                for queue, some in queues.items()
            ]
        )
        for some, result in zip(queues.values(), results, strict=True):
            for i, answer in zip(some, result, strict=True):
                answers[i] = answer
        return answers

    async def _move_copies(
        self, mine: Mapping[int, _HeldMessage], moves: Sequence[tuple[int, Out, QueueId]]
    ) -> list[bool | None]:
        """Publish copies and delete the originals.

        First extend the leases, which shows that they are valid. Delete an original only after SQS
        has confirmed its copy.
        """
        if not moves:
            return []
        answers = await self._set_visibility([(mine[i], math.ceil(self.lease)) for i, *_ in moves])
        valid = [n for n, answer in enumerate(answers) if answer]
        try:
            sent = await self._publisher.send([(moves[n][1], [moves[n][2]]) for n in valid])
        except StoreUnavailable:
            sent = [Published.UNKNOWN] * len(valid)
        confirmed = [n for n, answer in zip(valid, sent, strict=True) if answer is Published.OK]
        answers = [None if n in valid else answer for n, answer in enumerate(answers)]
        for n, answer in zip(
            confirmed, await self._delete([mine[moves[n][0]] for n in confirmed]), strict=True
        ):
            answers[n] = answer
        return answers

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        now = asyncio.get_running_loop().time()
        mine = [
            (i, held)
            for i, d in enumerate(deliveries)
            if (held := self._handed_out.get(d.token)) is not None and held.until > now
        ]
        answers = [False] * len(deliveries)
        for (i, held), answer in zip(
            mine,
            await self._set_visibility([(held, math.ceil(seconds)) for _, held in mine]),
            strict=True,
        ):
            if answer:
                held.until = now + self._local_lease(seconds)
            answers[i] = answer is not False  # if the result is unknown, the old lease is valid
        return answers

    async def hold(self, until: Mapping[str, float]) -> None:
        """Do nothing: SQS cannot delay the messages of a key (caps.hold_keys)."""


def _by_class_and_age(held: _HeldMessage) -> tuple[int, int]:
    return held.queue.priority, held.seq
