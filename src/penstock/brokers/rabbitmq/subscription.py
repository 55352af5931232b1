"""RabbitMQ subscription: bounded prefetch, fair shares per priority class and key, settling.

Prefetched messages that no call requests are returned to the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from aiormq import exceptions as amqp
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from penstock.brokers.dead_copies import dead_copy
from penstock.brokers.rabbitmq.connection import CONNECTION_ERRORS, RESPONSE_TIMEOUT, Connection
from penstock.brokers.rabbitmq.message import HeldMessage, read_message
from penstock.brokers.rabbitmq.publisher import OutgoingMessage, Publisher
from penstock.brokers.rabbitmq.topology import CLASSES, Names, level_for, priority_classes
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Clock, Delivery, Out, Published
from penstock.rules.handout import Backlog

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
MAX_PREFETCH = 65535  # limit of the protocol
REPUBLISH_INTERVAL = 1.0  # seconds


class ParentBroker(Protocol):
    """Attributes and methods of the broker that a subscription uses."""

    consuming: Connection
    publisher: Publisher
    names: Names
    clock: Clock
    peeked: dict[tuple[str, str], int]
    subscriptions: set[RabbitSubscription]

    def outgoing(
        self, m: Out, *, group: str | None = None, count: int = 0, at: str = ""
    ) -> OutgoingMessage: ...

    async def ensure_declared(self, topic: str, group: str) -> None: ...

    def forget_declared(self, topic: str) -> None: ...


class RabbitSubscription:
    """Implements ports.Subscription.

    A lease lasts as long as the channel of its delivery. `token` identifies that channel.
    """

    def __init__(self, broker: ParentBroker, topic: str, group: str, owner: str) -> None:
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
        self._reset()

    def _reset(self) -> None:
        """Reset the state of the channel. The server redelivers all its unsettled messages."""
        self._epoch = secrets.randbits(30) + 1
        self._channel: Channel | None = None
        # priority class -> (consumer tag, prefetch count)
        self._consumers: dict[int, list[tuple[str, int]]] = {
            priority: [] for priority in self.priority_classes
        }
        self._drop_prefetched()
        self._handed_out: dict[int, HeldMessage] = {}  # position -> unsettled delivery
        # priority class -> number of unsettled deliveries
        self._handed_out_count = dict.fromkeys(self.priority_classes, 0)
        # delivery tags of all unsettled messages of the channel, in the order of arrival
        self._unsettled_tags: dict[int, None] = {}
        self._changed = asyncio.Event()
        self._consumer_added = False
        self._acks_sent = self._acks_confirmed = 0
        self._qos_lock = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return (
            self._channel is not None
            and not self._channel.is_closed
            and self.broker.consuming.is_open
        )

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
                if not self.alive:
                    raise StoreUnavailable(
                        f"the connection to RabbitMQ at {self.broker.consuming.address.host_port}"
                        " was lost"
                    )
                if got := self._take(limit, per_key or limit):
                    return got
                left = until - loop.time()
                if left <= 0:
                    return []
                due = self._backlog.next_due()
                if due is not None:
                    left = min(left, max(0.0, due - self.broker.clock.now()))
                try:
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                except TimeoutError:
                    pass
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
        if self.alive and all(
            self._wanted_prefetch(priority, limit) <= self._granted_prefetch(priority)
            for priority in self.priority_classes
        ):
            return
        async with self._consumers_lock:
            if self._closed:
                raise StoreUnavailable("this subscription was closed")
            if not self.alive:
                await self._start()
            channel = self._channel
            assert channel is not None
            with self.broker.consuming.outage():
                async with asyncio.timeout(RESPONSE_TIMEOUT):
                    for priority in self.priority_classes:
                        missing = self._wanted_prefetch(priority, limit) - self._granted_prefetch(
                            priority
                        )
                        if missing > 0:
                            try:
                                await self._consume(
                                    channel, priority, max(8, 1 << (missing - 1).bit_length())
                                )
                            except amqp.ChannelNotFoundEntity:
                                self.broker.forget_declared(self.topic)
                                raise
            if self._idle_timer is None:
                self._idle_timer = asyncio.get_running_loop().call_later(
                    self._prefetch_hold / 2, self._spawn, self._return_idle_prefetch
                )

    def _wanted_prefetch(self, priority: int, limit: int) -> int:
        return self._handed_out_count[priority] + max(
            limit + min(limit, self._prefetch_ahead), self._prefetch_ahead
        )

    def _granted_prefetch(self, priority: int) -> int:
        return sum(prefetch for _, prefetch in self._consumers[priority])

    async def _start(self) -> None:
        self._reset()
        await self.broker.ensure_declared(self.topic, self.group)
        channel = await self.broker.consuming.channel()
        changed = self._changed
        channel.closing.add_done_callback(lambda _: changed.set())
        channel.on_consumer_cancel_callbacks.add(partial(self._on_consumer_cancelled, channel))
        self._channel = channel

    async def _consume(self, channel: Channel, priority: int, prefetch: int) -> None:
        """Add a consumer. The prefetch count of a running consumer cannot be changed."""
        queue = self.broker.names.queue(self.topic, self.group, priority)
        tag = f"{self.owner}.{CLASSES[priority]}.{secrets.token_hex(4)}"
        self._consumer_added = True
        # No other task may set another prefetch count between these two calls.
        async with self._qos_lock:
            await channel.basic_qos(prefetch_count=min(prefetch, MAX_PREFETCH))
            await channel.basic_consume(
                queue, partial(self._on_message, self._epoch, priority), consumer_tag=tag
            )
        self._consumers[priority].append((tag, prefetch))

    def _on_consumer_cancelled(self, channel: Channel, _: Any) -> None:
        """Close the channel after the server cancelled a consumer. `receive` opens a new channel.

        The queue was deleted or moved.
        """
        self._spawn(partial(self._close_channel, channel))

    async def _close_channel(self, channel: Channel) -> None:
        with self.broker.consuming.outage():
            await channel.close()

    async def _on_message(self, epoch: int, priority: int, message: DeliveredMessage) -> None:
        if epoch != self._epoch:
            return
        held = read_message(message, priority)
        self._unsettled_tags[held.tag] = None
        if peeks := self.broker.peeked.pop((self.topic, held.id), 0):
            held.deliveries = max(1, held.deliveries - peeks)
        now = self.broker.clock.now()
        # A message of another program has no id. Publish it again with one, so that it keeps it.
        if not held.id:
            held.id = secrets.token_hex(16)
            self._spawn(partial(self._republish, held))
        elif held.due > now and level_for(held.due - now) is not None:
            self._spawn(partial(self._republish, held))
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

    async def _republish(self, held: HeldMessage) -> None:
        """Publish a copy of the message to a delay queue, or with an id. Then ack the message."""
        epoch, message = self._epoch, self._outgoing(held, due=held.due, count=held.deliveries - 1)
        while epoch == self._epoch and self.alive:
            try:
                if (await self.broker.publisher.send([message]))[0] is Published.OK:
                    await self._ack([held.tag])
                    return
            except StoreUnavailable:
                pass
            await asyncio.sleep(REPUBLISH_INTERVAL)

    def _take(self, limit: int, per_key: int) -> list[Delivery]:
        for held in self._backlog.pop_due(self.broker.clock.now()):
            held.due = 0.0
            self._backlog.put(held)
        taken = self._backlog.take(limit, per_key)
        for held in taken:
            self._handed_out[self._position(held)] = held
            self._handed_out_count[held.priority] += 1
            self._bytes -= len(held.body)
        # All messages were requested: prefetch more again.
        if taken and not self._backlog.ready:
            self._prefetch_ahead = min(PREFETCH_AHEAD, max(8, self._prefetch_ahead * 2))
            self._prefetch_hold = PREFETCH_HOLD
        return [self._delivery(held) for held in taken]

    def _position(self, held: HeldMessage) -> int:
        return self._epoch << 32 | held.tag

    def _delivery(self, held: HeldMessage) -> Delivery:
        return Delivery(
            topic=self.topic,
            group=self.group,
            id=held.id,
            key=held.key,
            body=held.body,
            headers=held.headers,
            position=self._position(held),
            token=self._epoch,
            deliveries=held.deliveries,
        )

    # -- returning prefetched messages -------------------------------------------------------------

    async def _stop_consuming(self) -> None:
        """Stop consuming until the next `receive`: the prefetched messages are too large."""
        async with self._consumers_lock:
            if self.alive and self._channel is not None:
                await self._cancel_consumers(self._channel)

    async def _cancel_consumers(self, channel: Channel) -> None:
        with self.broker.consuming.outage():
            async with asyncio.timeout(RESPONSE_TIMEOUT):
                for consumers in self._consumers.values():
                    while consumers:
                        await channel.basic_cancel(consumers[-1][0])
                        consumers.pop()

    async def _return_idle_prefetch(self) -> None:
        """Return prefetched messages that no `receive` requested, if there are other consumers.

        Otherwise keep them for up to 30 s, because RabbitMQ before 4.3 counts a return as a
        delivery.
        """
        self._idle_timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        idle = not self._receivers_waiting and now >= self._last_receive_end + self._prefetch_hold
        stale = any(held.arrived < now - self._prefetch_hold for held in self._backlog)
        if (idle and now > self._last_receive_end + MAX_PREFETCH_HOLD) or (
            (idle or stale) and await self._has_other_consumers()
        ):
            await self._return_prefetched()
            if not self._prefetch_ahead:
                self._prefetch_hold = min(MAX_PREFETCH_HOLD, self._prefetch_hold * 2)
        if self.alive and any(self._consumers.values()) and not self._closed:
            self._idle_timer = loop.call_later(
                self._prefetch_hold / 2, self._spawn, self._return_idle_prefetch
            )

    async def _has_other_consumers(self) -> bool:
        """Return True if these queues have other consumers, or if the connection is lost."""
        if not self.alive or self._channel is None:
            return True
        with self.broker.consuming.outage():
            async with asyncio.timeout(RESPONSE_TIMEOUT):
                for priority in self.priority_classes:
                    found = await self._channel.queue_declare(
                        self.broker.names.queue(self.topic, self.group, priority), passive=True
                    )
                    if (found.consumer_count or 0) > len(self._consumers[priority]):
                        return True
        return False

    async def _return_prefetched(self) -> None:
        """Cancel all consumers and return the prefetched messages to their places in the queue.

        RabbitMQ before 4.3 counts a return as a delivery.
        """
        async with self._consumers_lock:
            channel = self._channel
            if not self.alive or channel is None:
                return
            await self._cancel_consumers(channel)
            with self.broker.consuming.outage():
                async with asyncio.timeout(RESPONSE_TIMEOUT):
                    returned = sorted(held.tag for held in self._drop_prefetched())
                    for tag in returned:
                        await channel.basic_nack(tag, requeue=True, wait=False)
                    # Remove the tags after the last return is sent. An ack of all tags up to one
                    # must never include a returned message.
                    for tag in returned:
                        del self._unsettled_tags[tag]
            if returned:
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
        if not mine:
            return answers
        epoch = self._epoch
        try:
            if copies:
                await self._send(copies)
            await self._ack([held.tag for _, held in mine])
        except BaseException:
            if epoch == self._epoch and self.alive:
                self._handed_out.update({d.position: held for d, held in mine})
            raise
        if epoch == self._epoch:
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
        if any(answer is not Published.OK for answer in answers):
            worst = next(answer for answer in answers if answer is not Published.OK)
            raise StoreUnavailable(
                f"RabbitMQ at {self.broker.consuming.address.host_port} did not confirm"
                f" a retry, a release or a dead letter ({worst})"
            )

    async def _ack(self, tags: Sequence[int]) -> None:
        """Ack these delivery tags, and wait until the server has processed the acks.

        The server does not answer an ack. It processes the requests of a channel in order, so a
        later `basic.qos` that is answered confirms the acks before it.
        """
        channel, wanted, upto = self._channel, set(tags), 0
        if channel is None:
            raise StoreUnavailable("the connection to RabbitMQ was lost")
        for tag in self._unsettled_tags:
            if tag not in wanted:
                break
            upto = tag
        with self.broker.consuming.outage():
            if upto:
                await channel.basic_ack(upto, multiple=True, wait=False)
            for tag in sorted(wanted):
                if tag > upto:
                    await channel.basic_ack(tag, wait=False)
        for tag in wanted:
            self._unsettled_tags.pop(tag, None)
        self._acks_sent += 1
        mine = self._acks_sent
        async with self._qos_lock:
            if self._acks_confirmed >= mine:
                return
            upto = self._acks_sent
            with self.broker.consuming.outage():
                async with asyncio.timeout(RESPONSE_TIMEOUT):
                    await channel.basic_qos(prefetch_count=1)
            self._acks_confirmed = upto

    def holds(self, delivery: Delivery) -> bool:
        """Return True if the lease is valid. Needs no request: a lease ends with its channel."""
        return (
            delivery.token == self._epoch and delivery.position in self._handed_out and self.alive
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
        if self._channel is not None and self.alive:
            await self._run_ignoring_outage(partial(self._close_channel, self._channel))
        self.broker.subscriptions.discard(self)
