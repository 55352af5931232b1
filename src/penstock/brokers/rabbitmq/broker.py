"""RabbitMQ broker: quorum queues per group and priority class, confirmed publishing, delay queues.

See `subscription` for consuming.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence

from aiormq import exceptions as amqp
from aiormq.channel import Channel
from pamqp.commands import Queue as Commands

from penstock.brokers.dead_copies import DEAD
from penstock.brokers.rabbitmq.connection import Address, Connection, read_address
from penstock.brokers.rabbitmq.message import AT, COUNT, DUE, KEY, HeldMessage, number, read_message
from penstock.brokers.rabbitmq.publisher import OutgoingMessage, Publisher, declare_exchange
from penstock.brokers.rabbitmq.subscription import RabbitSubscription
from penstock.brokers.rabbitmq.topology import (
    LEVELS,
    Names,
    Queue,
    clamp_priority,
    level_for,
    priority_classes,
)
from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.ports import Capabilities, Clock, Out, Published, Stats, Subscription, TopicSpec
from penstock.rules.priority import NORMAL
from penstock.stores.context import Context

# Missing features:
# - `order_per_key`: returned and retried messages are overtaken, and several workers may have
#   messages of a key.
# - `replay`: acked messages are deleted.
# - `bounded`: the limit of a queue does not count deliveries in flight, so `full` is not exact.
CAPS = Capabilities(delay="emulated", counts_deliveries=True, lease="connection")
MAX_PEEKED = 10_000  # messages whose returns by `peek` are counted


class RabbitBroker:
    """Implements ports.Broker."""

    caps = CAPS

    def __init__(self, address: Address, namespace: str, clock: Clock, *, worker: str = "") -> None:
        self.clock, self.names = clock, Names(namespace)
        self.publishing = Connection(address, f"{worker or 'penstock'} publishes")
        # also for single requests, because the publishing connection may be blocked
        self.consuming = Connection(address, f"{worker or 'penstock'} consumes")
        self.publisher = Publisher(self.publishing, self.names)
        self.subscriptions: set[RabbitSubscription] = set()
        self.peeked: dict[tuple[str, str], int] = {}  # (topic, id) -> returns by `peek`
        # topic -> groups whose queues are declared
        self._groups: dict[str, dict[str, None]] = {}
        self._specs: dict[str, TopicSpec] = {}
        self._with_delay_queues: set[str] = set()  # topics whose delay queues are declared
        self._declaring = asyncio.Lock()

    # -- topology ----------------------------------------------------------------------------------

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        """Declare the topics. Raises Unreachable or ConfigError if the start must fail."""
        for spec in topology:
            if spec.ordered:
                raise ConfigError(
                    f"topic {spec.name} needs order per key, which RabbitMQ does not keep",
                    hint="use sqlite:, postgres: or kafka: for this topic, or an unordered topic",
                )
        await self.consuming.connect()
        if self.consuming.address.management is not None:
            await self.consuming.address.management.unacknowledged(
                self.consuming.address.vhost, self.names.namespace
            )
        try:
            return [sentence for spec in topology for sentence in await self._declare(spec)]
        except StoreUnavailable as e:
            raise Unreachable(e.message, hint=e.hint) from e

    async def ensure_declared(self, topic: str, group: str) -> None:
        """Declare the queues of the group, unless this process has already declared them."""
        if group not in self._groups.get(topic, {}):
            known = self._specs.get(topic, TopicSpec(name=topic))
            await self._declare(TopicSpec(name=topic, groups=(group,), max_depth=known.max_depth))

    def forget_declared(self, topic: str) -> None:
        """Declare the topic again at its next use, because one of its queues is missing."""
        for name in (topic, topic + DEAD):
            self._groups.pop(name, None)
            self._with_delay_queues.discard(name)

    async def _declare(self, spec: TopicSpec) -> list[str]:
        async with self._declaring:
            queues, dead = [*self.names.work_queues(spec)], spec.name + DEAD
            if not spec.name.endswith(DEAD):
                queues += self.names.delay_queues(spec.name)
                if "main" not in self._groups.get(dead, {}):
                    queues += self.names.work_queues(TopicSpec(name=dead))
            drift = await self._declare_queues(queues)
            self._groups.setdefault(spec.name, {}).update(dict.fromkeys(spec.groups))
            self._specs[spec.name] = spec
            if not spec.name.endswith(DEAD):
                self._groups.setdefault(dead, {})["main"] = None
                self._with_delay_queues.add(spec.name)
        return drift

    async def _declare_queues(self, queues: Iterable[Queue]) -> list[str]:
        """Declare the exchanges and these queues. Return a sentence for each different queue."""
        drift: list[str] = []
        channel = await self.consuming.channel()
        with self.consuming.outage():
            for name in self.names.exchanges:
                await declare_exchange(channel, name)
        for queue in queues:
            channel = await self._declare_queue(channel, queue, drift)
        await self.consuming.close_channel(channel)
        return drift

    async def _declare_queue(self, channel: Channel, queue: Queue, drift: list[str]) -> Channel:
        """Declare a queue. Return the channel to use next.

        The server closes the channel if the arguments of an existing queue differ.
        """
        async with self.consuming.request():
            try:
                await channel.queue_declare(
                    queue.name, durable=True, arguments=dict(queue.arguments)
                )
            except amqp.ChannelPreconditionFailed as e:
                drift.append(_drift(queue.name, str(e.args[0] if e.args else e)))
                channel = await self.consuming.channel()
            except amqp.ChannelAccessRefused as e:
                raise Unreachable(
                    f"the user {self.consuming.address.user!r} may not declare"
                    f" the queue {queue.name!r}",
                    hint=f"rabbitmqctl set_permissions -p {self.consuming.address.vhost}"
                    f" {self.consuming.address.user} '.*' '.*' '.*'",
                ) from e
            for exchange, pattern in queue.bindings:
                await channel.queue_bind(queue.name, exchange, pattern)
        return channel

    # -- publishing --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        now = self.clock.now()
        for topic in {
            m.topic for m in batch if m.not_before > now and m.topic not in self._with_delay_queues
        }:
            async with self._declaring:
                await self._declare_queues(self.names.delay_queues(topic))
                self._with_delay_queues.add(topic)
        at = f"{now:.3f}"
        return await self.publisher.send([self.outgoing(m, at=at) for m in batch])

    def outgoing(
        self, m: Out, *, group: str | None = None, count: int = 0, at: str = ""
    ) -> OutgoingMessage:
        """Compose a message for its work queues, or for a delay queue if it is not due."""
        headers = {**m.headers, KEY: m.key}
        if at:
            headers[AT] = at
        if count > 0:
            headers[COUNT] = str(count)
        priority = clamp_priority(m.topic, m.priority)
        now = self.clock.now()
        level = level_for(m.not_before - now) if m.not_before > now else None
        if m.not_before > now:
            headers[DUE] = f"{m.not_before:.3f}"
        return OutgoingMessage(
            self.names.exchange if level is None else self.names.delay,
            self.names.key(m.topic, priority, m.key, group=group, level=level),
            m.id,
            m.body,
            headers,
        )

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        subscription = RabbitSubscription(self, topic, group, owner)
        self.subscriptions.add(subscription)
        return subscription

    # -- stats, peek and purge ---------------------------------------------------------------------

    async def stats(self, topic: str, group: str) -> Stats:
        """Return estimates from the queues and from the deliveries of this process.

        The deliveries of other processes are known only with the management API (`?management=`).
        """
        queues = [self.names.queue(topic, group, priority) for priority in priority_classes(topic)]
        dead_queue = self.names.queue(topic + DEAD, "main", NORMAL)
        ready = await self._depth(queues)
        delayed = (
            await self._depth([self.names.delay_queue(topic, level) for _, level in LEVELS])
            if not topic.endswith(DEAD)
            else 0
        )
        dead = await self._depth([dead_queue])
        held = await self._unacknowledged()
        open_subscriptions = [s for s in self.subscriptions if s.alive]
        mine = [s for s in open_subscriptions if (s.topic, s.group) == (topic, group)]
        buffered = sum(s.buffered for s in mine)
        dead += max(
            held.get(dead_queue, 0),
            sum(s.buffered + s.in_flight for s in open_subscriptions if s.topic == topic + DEAD),
        )
        in_flight = max(
            sum(held.get(name, 0) for name in queues) - buffered, sum(s.in_flight for s in mine)
        )
        return Stats(
            ready=ready + buffered,
            delayed=delayed,
            in_flight=in_flight,
            dead=dead,
            oldest_age=None,
            exact=False,
        )

    async def _unacknowledged(self) -> dict[str, int]:
        """Return the unacknowledged messages of each queue.

        Return an empty dict if the management API is not configured or does not answer. The figures
        are estimates in any case.
        """
        address = self.consuming.address
        if address.management is None:
            return {}
        try:
            return await address.management.unacknowledged(address.vhost, self.names.namespace)
        except Unreachable:
            return {}

    async def _depth(self, queues: Sequence[str]) -> int:
        """Return the number of ready messages in those of the queues that exist."""
        return await self._count(queues, lambda channel, q: channel.queue_declare(q, passive=True))

    async def _count(
        self,
        queues: Sequence[str],
        request: Callable[[Channel, str], Awaitable[Commands.DeclareOk | Commands.PurgeOk]],
    ) -> int:
        """Send a request for each queue. Return the sum of the counts of queues that exist."""
        total = 0
        channel: Channel | None = None
        for name in queues:
            if channel is None:
                channel = await self.consuming.channel()
            async with self.consuming.request():
                try:
                    total += (await request(channel, name)).message_count or 0
                except amqp.ChannelNotFoundEntity:  # the server has closed the channel
                    channel = None
        if channel is not None:
            await self.consuming.close_channel(channel)
        return total

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """Get messages and return them to their place in the queue.

        RabbitMQ before 4.3 counts a return as a delivery. This process subtracts it again. Another
        process reports one delivery too many.
        """
        group = next(iter(self._groups.get(topic, {"main": None})))
        seen: list[HeldMessage] = []
        channel = await self.consuming.channel()
        async with self.consuming.request():
            for priority in priority_classes(topic):
                try:
                    for _ in range(limit):
                        message = await channel.basic_get(self.names.queue(topic, group, priority))
                        if message.delivery.name == "Basic.GetEmpty":
                            break
                        seen.append(read_message(message, priority))
                except amqp.ChannelNotFoundEntity:
                    return []
            for held in seen:
                await channel.basic_nack(held.tag, requeue=True, wait=False)
        await self.consuming.close_channel(channel)
        if self.consuming.version < (4, 3):
            for held in seen:
                if len(self.peeked) < MAX_PEEKED:
                    self.peeked[topic, held.id] = self.peeked.get((topic, held.id), 0) + 1
        return [
            Out(
                topic=topic,
                id=held.id,
                key=held.key,
                body=held.body,
                headers=held.headers,
                priority=held.priority,
                not_before=held.due,
            )
            for held in sorted(seen, key=lambda held: number(held.at))[:limit]
        ]

    async def purge(self, topic: str) -> int:
        removed = [
            await self._purge_queues(
                [self.names.queue(topic, group, priority) for priority in priority_classes(topic)]
            )
            for group in [*self._groups.get(topic, {"main": None})]
        ]
        return max(removed, default=0) + await self._purge_queues(
            [self.names.delay_queue(topic, level) for _, level in LEVELS]
        )

    async def _purge_queues(self, queues: Sequence[str]) -> int:
        return await self._count(queues, lambda channel, q: channel.queue_purge(q))

    async def replay(self, topic: str, group: str, *, since: float) -> int:
        raise ConfigError(
            "RabbitMQ keeps no history to replay",
            hint="publish the messages again, or use kafka: or sqlite: for this topic",
        )

    async def close(self) -> None:
        for subscription in list(self.subscriptions):
            await subscription.close()
        await self.consuming.close()
        await self.publishing.close()


def _drift(queue: str, error: str) -> str:
    """Return a sentence about a queue argument that differs on the server.

    Example of an error: PRECONDITION_FAILED - inequivalent arg 'x-max-length' for queue 'q' in
    vhost '/': received '3' but current is '5'
    """
    found = re.search(r"inequivalent arg '([^']+)'.*?received (.+?) but current is (.+)$", error)
    if found is None:
        return f"queue {queue}: {error}"
    argument, configured, current = (
        part.strip().replace("the value ", "").split(" of type ")[0].strip("'")
        for part in found.groups()
    )
    return (
        f"queue {queue}: {argument} is {current} on the server and {configured} in the"
        " configuration; delete the queue when it is empty to change that"
    )


def open_broker(url: str, context: Context) -> RabbitBroker:
    return RabbitBroker(
        read_address(url),
        context.config.namespace or "penstock",
        context.clock,
        worker=context.worker,
    )
