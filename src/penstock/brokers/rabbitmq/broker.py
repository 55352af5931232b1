"""The RabbitMQ broker: quorum queues per group and class behind topic exchanges, confirmed
publishing, a delay ladder. How a worker consumes is next door.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from aiormq import exceptions as amqp
from aiormq.channel import Channel

from penstock.brokers.rabbitmq.connection import ANSWER, Address, Link, read_address
from penstock.brokers.rabbitmq.message import AT, COUNT, DUE, KEY, Held, number, open_letter
from penstock.brokers.rabbitmq.publisher import Letter, Publisher, declare_exchange
from penstock.brokers.rabbitmq.subscription import RabbitSubscription
from penstock.brokers.rabbitmq.topology import (
    DEAD,
    LEVELS,
    NORMAL,
    Names,
    Queue,
    level_for,
    rank_of,
    ranks,
)
from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.ports import Capabilities, Clock, Out, Published, Stats, Subscription, TopicSpec
from penstock.stores.context import Context

CAPS = Capabilities(
    # what is returned or retried is overtaken, and a key's messages may be with several workers
    order_per_key="none",
    strict_priority="none",
    delay="emulated",
    replay=False,  # what is acked is gone
    # `full` is answered near the limit of a queue, which does not count what is in flight: no
    # promise
    bounded=False,
    counts_deliveries=True,
    hold_keys=False,
    exact_stats=False,
    transactional=False,
    lease="connection",
)
LOOKS = 10_000  # messages that a look is remembered for


class RabbitBroker:
    """Implements ports.Broker."""

    caps = CAPS

    def __init__(self, address: Address, namespace: str, clock: Clock, *, worker: str = "") -> None:
        self.clock, self.names = clock, Names(namespace)
        self.publishing = Link(address, f"{worker or 'penstock'} publishes")
        self.consuming = Link(address, f"{worker or 'penstock'} consumes")
        self.publisher = Publisher(self.publishing, self.names)
        self.subscriptions: set[RabbitSubscription] = set()
        self.looks: dict[tuple[str, str], int] = {}
        self._groups: dict[
            str, dict[str, None]
        ] = {}  # topic → groups whose queues are known to be there
        self._specs: dict[str, TopicSpec] = {}
        self._ladders: set[str] = set()
        self._declaring = asyncio.Lock()

    # -- topology ----------------------------------------------------------------------------------

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        """Raises Unreachable and ConfigError: this is where a start fails."""
        for spec in topology:
            if spec.ordered:
                raise ConfigError(
                    f"topic {spec.name} asks for order per key, which RabbitMQ does not keep",
                    hint="carry it by sqlite:, postgres: or kafka:, or drop the order",
                )
        await self.consuming.connect()
        if self.consuming.address.management is not None:
            await self.consuming.address.management.unacknowledged(
                self.consuming.address.vhost, self.names.namespace
            )
        try:
            drift: list[str] = []
            for spec in topology:
                drift += await self._declare(spec)
            return drift
        except StoreUnavailable as e:
            raise Unreachable(e.message, hint=e.hint) from e

    async def declared(self, topic: str, group: str) -> None:
        """For those who read or retry before anybody has declared what they need."""
        if group not in self._groups.get(topic, {}):
            known = self._specs.get(topic, TopicSpec(name=topic))
            await self._declare(TopicSpec(name=topic, groups=(group,), max_depth=known.max_depth))

    def forget(self, topic: str) -> None:
        """Something of it was found to be missing: it is declared again by whoever needs it next."""
        for name in (topic, topic + DEAD):
            self._groups.pop(name, None)
            self._ladders.discard(name)

    async def _declare(self, spec: TopicSpec) -> list[str]:
        drift: list[str] = []
        async with self._declaring:
            channel = await self._channel()
            with self.consuming.outage():
                for name in self.names.exchanges:
                    await declare_exchange(channel, name)
            queues = [*self.names.work(spec)]
            if not spec.name.endswith(DEAD):
                queues += self.names.ladder(spec.name)
                if "main" not in self._groups.get(spec.name + DEAD, {}):
                    queues += self.names.work(TopicSpec(name=spec.name + DEAD))
                    self._groups.setdefault(spec.name + DEAD, {})["main"] = None
            for queue in queues:
                channel = await self._declare_queue(channel, queue, drift)
            await self._done(channel)
            self._groups.setdefault(spec.name, {}).update(dict.fromkeys(spec.groups))
            self._specs[spec.name] = spec
            if not spec.name.endswith(DEAD):
                self._ladders.add(spec.name)
        return drift

    async def _declare_queue(self, channel: Channel, queue: Queue, drift: list[str]) -> Channel:
        """The channel to go on with: the server closes one over every disagreement."""
        with self.consuming.outage():
            async with asyncio.timeout(ANSWER):
                try:
                    await channel.queue_declare(
                        queue.name, durable=True, arguments=dict(queue.arguments)
                    )
                except amqp.ChannelPreconditionFailed as e:
                    drift.append(_drift(queue.name, str(e.args[0] if e.args else e)))
                    channel = await self._channel()
                except amqp.ChannelAccessRefused as e:
                    raise Unreachable(
                        f"the user {self.consuming.address.user!r} may not declare the queue {queue.name!r}",
                        hint=f"rabbitmqctl set_permissions -p {self.consuming.address.vhost} {self.consuming.address.user} '.*' '.*' '.*'",
                    ) from e
                for exchange, pattern in queue.bindings:
                    await channel.queue_bind(queue.name, exchange, pattern)
        return channel

    async def _channel(self) -> Channel:
        """For a few questions. By the connection that consumes: the other one may be blocked."""
        return await self.consuming.channel()

    async def _done(self, channel: Channel) -> None:
        with self.consuming.outage():
            await channel.close()

    # -- publishing --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        now = self.clock.now()
        for topic in {
            m.topic for m in batch if m.not_before > now and m.topic not in self._ladders
        }:
            await self._declare_ladder(topic)
        at = f"{now:.3f}"
        return await self.publisher.send([self.letter(m, at=at) for m in batch])

    async def _declare_ladder(self, topic: str) -> None:
        async with self._declaring:
            channel = await self._channel()
            drift: list[str] = []
            with self.consuming.outage():
                for name in self.names.exchanges:
                    await declare_exchange(channel, name)
            for queue in self.names.ladder(topic):
                channel = await self._declare_queue(channel, queue, drift)
            await self._done(channel)
            self._ladders.add(topic)

    def letter(self, m: Out, *, group: str | None = None, count: int = 0, at: str = "") -> Letter:
        """A message on its way to its queues: at once, or by the ladder."""
        headers = {**m.headers, KEY: m.key}
        if at:
            headers[AT] = at
        if count > 0:
            headers[COUNT] = str(count)
        rank = rank_of(m.topic, m.priority)
        now = self.clock.now()
        level = level_for(m.not_before - now) if m.not_before > now else None
        if m.not_before > now:
            headers[DUE] = f"{m.not_before:.3f}"
        return Letter(
            self.names.exchange if level is None else self.names.delay,
            self.names.key(m.topic, rank, m.key, group=group, level=level),
            m.id,
            m.body,
            headers,
        )

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        subscription = RabbitSubscription(self, topic, group, owner)
        self.subscriptions.add(subscription)
        return subscription

    # -- looking -----------------------------------------------------------------------------------

    async def stats(self, topic: str, group: str) -> Stats:
        """What the queues say, and what this process itself has in hand; what others have in hand
        only the management API knows (`?management=`).
        """
        queues = [self.names.queue(topic, group, rank) for rank in ranks(topic)]
        graves = self.names.queue(topic + DEAD, "main", NORMAL)
        ready = await self._depth(queues)
        delayed = (
            await self._depth([self.names.waiting(topic, level) for _, level in LEVELS])
            if not topic.endswith(DEAD)
            else 0
        )
        dead = await self._depth([graves])
        held = await self._unacknowledged()
        here = [s for s in self.subscriptions if s.alive]
        mine = [s for s in here if (s.topic, s.group) == (topic, group)]
        buffered = sum(s.buffered for s in mine)
        dead += max(
            held.get(graves, 0),
            sum(s.buffered + s.in_flight for s in here if s.topic == topic + DEAD),
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
        """Nothing where there is no management API, or none now: these figures are estimates with
        and without it.
        """
        address = self.consuming.address
        if address.management is None:
            return {}
        try:
            return await address.management.unacknowledged(address.vhost, self.names.namespace)
        except Unreachable:
            return {}

    async def _depth(self, queues: Sequence[str]) -> int:
        """Of those that are there."""
        total = 0
        channel: Channel | None = None
        for name in queues:
            if channel is None:
                channel = await self._channel()
            with self.consuming.outage():
                async with asyncio.timeout(ANSWER):
                    try:
                        total += (
                            await channel.queue_declare(name, passive=True)
                        ).message_count or 0
                    except amqp.ChannelNotFoundEntity:
                        channel = None
        if channel is not None:
            await self._done(channel)
        return total

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """Taken, looked at and returned to where it was. Up to RabbitMQ 4.2 the server counts a
        return as a delivery: this process takes that off again, another one shows one delivery too
        many.
        """
        group = next(iter(self._groups.get(topic, {"main": None})))
        seen: list[Held] = []
        channel = await self._channel()
        with self.consuming.outage():
            async with asyncio.timeout(ANSWER):
                for rank in ranks(topic):
                    try:
                        for _ in range(limit):
                            message = await channel.basic_get(self.names.queue(topic, group, rank))
                            if message.delivery.name == "Basic.GetEmpty":
                                break
                            seen.append(open_letter(message, rank))
                    except amqp.ChannelNotFoundEntity:
                        return []
                for held in seen:
                    await channel.basic_nack(held.tag, requeue=True, wait=False)
        await self._done(channel)
        if self.consuming.version < (4, 3):
            for held in seen:
                if len(self.looks) < LOOKS:
                    self.looks[topic, held.id] = self.looks.get((topic, held.id), 0) + 1
        oldest = sorted(seen, key=lambda held: number(held.at))[:limit]
        return [
            Out(
                topic=topic,
                id=held.id,
                key=held.key,
                body=held.body,
                headers=held.headers,
                priority=held.rank,
                not_before=held.due,
            )
            for held in oldest
        ]

    async def purge(self, topic: str) -> int:
        most = 0
        for group in [*self._groups.get(topic, {"main": None})]:
            most = max(
                most,
                await self._empty([self.names.queue(topic, group, rank) for rank in ranks(topic)]),
            )
        return most + await self._empty([self.names.waiting(topic, level) for _, level in LEVELS])

    async def _empty(self, queues: Sequence[str]) -> int:
        gone = 0
        for name in queues:
            channel = await self._channel()
            with self.consuming.outage():
                async with asyncio.timeout(ANSWER):
                    try:
                        gone += (await channel.queue_purge(name)).message_count or 0
                    except amqp.ChannelNotFoundEntity:
                        continue
                    await channel.close()
        return gone

    async def replay(self, topic: str, group: str, *, since: float) -> int:
        raise ConfigError(
            "RabbitMQ keeps no history to replay",
            hint="publish again, or carry the topic by kafka: or sqlite:",
        )

    async def close(self) -> None:
        for subscription in list(self.subscriptions):
            await subscription.close()
        await self.consuming.close()
        await self.publishing.close()


def _drift(queue: str, said: str) -> str:
    """PRECONDITION_FAILED - inequivalent arg 'x-max-length' for queue 'q' in vhost '/': received
    '3' but current is '5'
    """
    found = re.search(r"inequivalent arg '([^']+)'.*?received (.+?) but current is (.+)$", said)
    if found is None:
        return f"queue {queue}: {said}"
    argument, ours, theirs = (
        part.strip().replace("the value ", "").split(" of type ")[0].strip("'")
        for part in found.groups()
    )
    return f"queue {queue}: {argument} is {theirs} on the server and {ours} in the configuration; delete the queue when it is empty to change that"


def open_broker(url: str, context: Context) -> RabbitBroker:
    return RabbitBroker(
        read_address(url),
        context.config.namespace or "penstock",
        context.clock,
        worker=context.worker,
    )
