"""RabbitMQ subscription: bounded prefetch, fair shares per priority class and key, settling.

Prefetched messages that no call requests are returned to the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from aiormq import exceptions as amqp

from penstock.brokers.dead_copies import dead_copy
from penstock.brokers.rabbitmq.connection import CONNECTION_ERRORS
from penstock.brokers.rabbitmq.consumer import ConsumerChannel
from penstock.brokers.rabbitmq.message import HeldMessage
from penstock.brokers.rabbitmq.publisher import OutgoingMessage
from penstock.brokers.rabbitmq.topology import level_for, priority_classes
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Delivery, Out, Published
from penstock.rules.handout import Backlog

if TYPE_CHECKING:
    from penstock.brokers.rabbitmq.broker import RabbitBroker

# Messages of a priority class that are prefetched beyond the requested number, so that a key with
# many messages does not hide the other keys.
PREFETCH_AHEAD = 256
MAX_PREFETCH_BYTES = 32 << 20  # bytes of prefetched messages, above which consuming stops
# Seconds that a prefetched message may wait for a `receive` while other consumers could process it.
# The time doubles when messages are returned again and again.
PREFETCH_HOLD = 0.2
MAX_PREFETCH_HOLD = 30.0  # seconds, if the queues have no other consumers
BURST_GAP = 0.003  # seconds without an arrival after which a burst has ended
BURST_WAIT = 0.2  # longest wait for the end of a burst, in seconds
REPUBLISH_INTERVAL = 1.0  # seconds


class RabbitSubscription:
    """Implements ports.Subscription.

    A lease lasts as long as the channel of its delivery. `token` identifies that channel.
    """

    def __init__(self, broker: RabbitBroker, topic: str, group: str, owner: str) -> None:
        self.broker, self.topic, self.group, self.owner = broker, topic, group, owner
        self.priority_classes = priority_classes(topic)
        self._consumers_lock = asyncio.Lock()  # held while consumers are added or cancelled
        self._closed = False
        self._receivers_waiting = 0
        self._last_receive_end = 0.0
        self._prefetch_ahead = PREFETCH_AHEAD
        self._backlog: Backlog[HeldMessage] = Backlog()  # prefetched messages
        self._prefetch_hold = PREFETCH_HOLD
        self._idle_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._consumer_added = False
        self._channel: ConsumerChannel | None = None
        self._reset()

    def _reset(self) -> None:
        """Forget the messages of a closed channel. The server redelivers them."""
        self._drop_prefetched()
        self._handed_out: dict[int, HeldMessage] = {}  # position -> unsettled delivery
        # priority class -> number of unsettled deliveries
        self._handed_out_count = dict.fromkeys(self.priority_classes, 0)

    @property
    def alive(self) -> bool:
        return self._channel is not None and self._channel.alive

    @property
    def buffered(self) -> int:
        return sum(1 for _ in self._backlog)

    @property
    def in_flight(self) -> int:
        return len(self._handed_out) if self.alive else 0

    # -- receiving ---------------------------------------------------------------------------------

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        if limit <= 0:
            return []
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        self._receivers_waiting += 1
        try:
            while True:
                await self._open(limit)
                self._changed.clear()
                if self._backlog.ready and (self._consumer_added or self._backlog.ready < limit):
                    await self._wait_for_burst(limit)
                channel = self._channel
                if channel is None or not channel.alive:
                    raise StoreUnavailable(
                        f"the connection to RabbitMQ at {self.broker.consuming.address.host_port}"
                        " was lost"
                    )
                if got := self._take(channel.epoch, limit, per_key or limit):
                    return got
                left = until - loop.time()
                if left <= 0:
                    return []
                due = self._backlog.next_due()
                if due is not None:
                    left = min(left, max(0.0, due - self.broker.clock.now()))
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
        finally:
            self._receivers_waiting -= 1
            self._last_receive_end = loop.time()

    async def _wait_for_burst(self, limit: int) -> None:
        """Wait some milliseconds for a burst to end, so that the batch is fuller and fairer."""
        loop = asyncio.get_running_loop()
        until, seen = loop.time() + (BURST_WAIT if self._consumer_added else BURST_GAP), -1
        while (
            self._backlog.ready != seen
            and (self._consumer_added or self._backlog.ready < limit)
            and loop.time() < until
        ):
            seen = self._backlog.ready
            await asyncio.sleep(BURST_GAP)
        self._consumer_added = False

    async def _open(self, limit: int) -> None:
        """Add consumers until the server may send `limit` messages and some more in advance."""
        channel = self._channel
        if channel is not None and channel.alive and not self._missing_prefetch(channel, limit):
            return
        async with self._consumers_lock:
            if self._closed:
                raise StoreUnavailable("this subscription was closed")
            channel = self._channel
            if channel is None or not channel.alive:
                channel = await self._start()
            async with self.broker.consuming.request():
                for priority, missing in self._missing_prefetch(channel, limit).items():
                    self._consumer_added = True
                    prefetch = max(8, 1 << (missing - 1).bit_length())
                    try:
                        await channel.consume(priority, prefetch, self.owner)
                    except amqp.ChannelNotFoundEntity:
                        self.broker.forget_declared(self.topic)
                        raise
            if self._idle_timer is None:
                self._set_idle_timer()

    def _missing_prefetch(self, channel: ConsumerChannel, limit: int) -> dict[int, int]:
        """Return how many more messages of each priority class the server must be able to send."""
        ahead = max(limit + min(limit, self._prefetch_ahead), self._prefetch_ahead)
        return {
            priority: missing
            for priority, handed_out in self._handed_out_count.items()
            if (missing := handed_out + ahead - channel.granted_prefetch(priority)) > 0
        }

    async def _start(self) -> ConsumerChannel:
        self._channel = None
        self._reset()
        await self.broker.ensure_declared(self.topic, self.group)
        channel = ConsumerChannel(
            await self.broker.consuming.channel(),
            self.broker.consuming,
            {
                priority: self.broker.names.queue(self.topic, self.group, priority)
                for priority in self.priority_classes
            },
            self._on_message,
        )
        # `receive` opens a new channel.
        channel.on_end(self._changed.set, partial(self._spawn, channel.close))
        self._channel = channel
        return channel

    def _on_message(self, channel: ConsumerChannel, held: HeldMessage) -> None:
        if channel is not self._channel:
            return
        if peeks := self.broker.peeked.pop((self.topic, held.id), 0):
            held.deliveries = max(1, held.deliveries - peeks)
        now = self.broker.clock.now()
        # A message of another program has no id. Publish it again with one, so that it keeps it.
        if not held.id:
            held.id = secrets.token_hex(16)
            self._spawn(partial(self._republish, channel, held))
        elif held.due > now and level_for(held.due - now) is not None:
            self._spawn(partial(self._republish, channel, held))
        else:
            held.arrived = asyncio.get_running_loop().time()
            if held.due <= now:
                held.due = 0.0
            self._backlog.put(held)
            self._bytes += len(held.body)
            if self._bytes > MAX_PREFETCH_BYTES and self._prefetch_ahead:
                self._prefetch_ahead = 0
                self._spawn(self._stop_consuming)
            self._changed.set()

    async def _republish(self, channel: ConsumerChannel, held: HeldMessage) -> None:
        """Publish a copy of the message to a delay queue, or with an id. Then ack the message."""
        message = self._outgoing(held, due=held.due, count=held.deliveries - 1)
        while channel.alive:
            with suppress(StoreUnavailable):
                if (await self.broker.publisher.send([message]))[0] is Published.OK:
                    await channel.ack([held.tag])
                    return
            await asyncio.sleep(REPUBLISH_INTERVAL)

    def _take(self, epoch: int, limit: int, per_key: int) -> list[Delivery]:
        for held in self._backlog.pop_due(self.broker.clock.now()):
            held.due = 0.0
            self._backlog.put(held)
        taken: list[Delivery] = []
        for held in self._backlog.take(limit, per_key):
            delivery = Delivery(
                topic=self.topic,
                group=self.group,
                id=held.id,
                key=held.key,
                body=held.body,
                headers=held.headers,
                position=epoch << 32 | held.tag,
                token=epoch,
                deliveries=held.deliveries,
                priority=held.priority,
            )
            taken.append(delivery)
            self._handed_out[delivery.position] = held
            self._handed_out_count[held.priority] += 1
            self._bytes -= len(held.body)
        # All messages were requested: prefetch more again.
        if taken and not self._backlog.ready:
            self._prefetch_ahead = min(PREFETCH_AHEAD, max(8, self._prefetch_ahead * 2))
            self._prefetch_hold = PREFETCH_HOLD
        return taken

    # -- returning prefetched messages -------------------------------------------------------------

    async def _stop_consuming(self) -> None:
        """Stop consuming until the next `receive`: the prefetched messages are too large."""
        async with self._consumers_lock:
            if self._channel is not None and self._channel.alive:
                await self._channel.cancel_consumers()

    async def _return_idle_prefetch(self) -> None:
        """Return prefetched messages that no `receive` requested, if there are other consumers.

        Otherwise keep them for up to 30 s, because RabbitMQ before 4.3 counts a return as a
        delivery.
        """
        self._idle_timer = None
        channel = self._channel
        if channel is None or not channel.alive:
            return
        now = asyncio.get_running_loop().time()
        idle = not self._receivers_waiting and now >= self._last_receive_end + self._prefetch_hold
        stale = any(held.arrived < now - self._prefetch_hold for held in self._backlog)
        if (idle and now > self._last_receive_end + MAX_PREFETCH_HOLD) or (
            (idle or stale) and await channel.has_other_consumers()
        ):
            await self._return_prefetched()
            if not self._prefetch_ahead:
                self._prefetch_hold = min(MAX_PREFETCH_HOLD, self._prefetch_hold * 2)
        if channel.consuming and not self._closed:
            self._set_idle_timer()

    def _set_idle_timer(self) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(
            self._prefetch_hold / 2, self._spawn, self._return_idle_prefetch
        )

    async def _return_prefetched(self) -> None:
        """Cancel all consumers and return the prefetched messages."""
        async with self._consumers_lock:
            channel = self._channel
            if channel is None or not channel.alive:
                return
            await channel.cancel_consumers()
            if returned := self._drop_prefetched():
                await channel.give_back(held.tag for held in returned)
                self._prefetch_ahead = self._prefetch_ahead // 2 if self._prefetch_ahead > 8 else 0
            self._changed.set()

    def _drop_prefetched(self) -> list[HeldMessage]:
        self._bytes = 0
        return self._backlog.drop(lambda held: True)

    # -- settling ----------------------------------------------------------------------------------

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        """Publish the copies (retry, release, dead letter), then ack all items.

        If a copy is not confirmed, no item is acked and all leases stay valid.
        """
        answers: list[bool] = []
        mine: list[tuple[Delivery, HeldMessage]] = []
        copies: list[OutgoingMessage] = []
        for delivery, outcome in items:
            held = self._handed_out.pop(delivery.position, None) if self.holds(delivery) else None
            answers.append(held is not None)
            if held is not None:
                mine.append((delivery, held))
                if not isinstance(outcome, Ack):
                    copies.append(self._copy(delivery, held, outcome))
        channel = self._channel
        if not mine or channel is None:
            return answers
        try:
            if copies:
                await self._send(copies)
            await channel.ack(held.tag for _, held in mine)
        except BaseException:
            if channel is self._channel and channel.alive:
                self._handed_out.update({d.position: held for d, held in mine})
            raise
        if channel is self._channel:
            for _, held in mine:
                self._handed_out_count[held.priority] -= 1
        return answers

    def _copy(
        self, delivery: Delivery, held: HeldMessage, outcome: Retry | Release | Dead
    ) -> OutgoingMessage:
        match outcome:
            case Retry(delay=delay):
                return self._outgoing(
                    held,
                    due=self.broker.clock.now() + delay if delay > 0 else 0.0,
                    count=held.deliveries,
                )
            case Release():
                return self._outgoing(held, due=0.0, count=held.deliveries - 1)
            case Dead(reason=reason):
                return self.broker.outgoing(dead_copy(delivery, reason))

    def _outgoing(self, held: HeldMessage, *, due: float, count: int) -> OutgoingMessage:
        out = Out(
            topic=self.topic,
            id=held.id,
            key=held.key,
            body=held.body,
            headers=held.headers,
            priority=held.priority,
            not_before=due,
        )
        return self.broker.outgoing(out, group=self.group, count=count, at=held.at)

    async def _send(self, copies: Sequence[OutgoingMessage]) -> None:
        answers = await self.broker.publisher.send(copies)
        # A queue is missing. Declare it, and publish again.
        if Published.FAILED in answers:
            self.broker.forget_declared(self.topic)
            await self.broker.ensure_declared(self.topic, self.group)
            answers = await self.broker.publisher.send(copies)
        worst = next((answer for answer in answers if answer is not Published.OK), None)
        if worst is not None:
            raise StoreUnavailable(
                f"RabbitMQ at {self.broker.consuming.address.host_port} did not confirm"
                f" a retry, a release or a dead letter ({worst})"
            )

    def holds(self, delivery: Delivery) -> bool:
        """Return True if the lease is valid. Needs no request: a lease ends with its channel."""
        return (
            self._channel is not None
            and self._channel.alive
            and delivery.token == self._channel.epoch
            and delivery.position in self._handed_out
        )

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        return [self.holds(d) for d in deliveries]

    async def hold(self, until: Mapping[str, float]) -> None:
        """Do nothing: RabbitMQ cannot delay the messages of a key (caps.hold_keys)."""

    # -- background tasks and closing --------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._run_ignoring_outage(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_ignoring_outage(self, work: Any) -> None:
        """Run `work` and ignore an outage, which the next `receive` or `settle` reports."""
        try:
            await work()
        except (StoreUnavailable, *CONNECTION_ERRORS):
            self._changed.set()

    async def close(self) -> None:
        if self._closed:
            return
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        await self._run_ignoring_outage(self._return_prefetched)
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._channel is not None and self._channel.alive:
            await self._run_ignoring_outage(self._channel.close)
        self.broker.subscriptions.discard(self)
