"""A channel that consumes from RabbitMQ: its consumers, its unsettled deliveries and their acks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from penstock.brokers.rabbitmq.connection import Connection
from penstock.brokers.rabbitmq.message import HeldMessage, read_message
from penstock.rules.priority import CLASSES

MAX_PREFETCH = 65535  # limit of the protocol


class ConsumerChannel:
    """An open channel. The server redelivers its unsettled messages when the channel closes.

    `queues` maps each priority class to its queue. `on_message` is called for each message.
    """

    def __init__(
        self,
        channel: Channel,
        connection: Connection,
        queues: Mapping[int, str],
        on_message: Callable[[ConsumerChannel, HeldMessage], None],
    ) -> None:
        self._channel, self._connection, self._queues = channel, connection, queues
        self._on_message = on_message
        self.epoch = secrets.randbits(30) + 1  # identifies the channel
        # priority class -> (consumer tag, prefetch count)
        self._consumers: dict[int, list[tuple[str, int]]] = {priority: [] for priority in queues}
        # delivery tags of all unsettled messages, in the order of arrival
        self._unsettled: dict[int, None] = {}
        self._acks_sent = self._acks_confirmed = 0
        self._qos_lock = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return not self._channel.is_closed and self._connection.is_open

    @property
    def consuming(self) -> bool:
        return self.alive and any(self._consumers.values())

    def granted_prefetch(self, priority: int) -> int:
        return sum(prefetch for _, prefetch in self._consumers[priority])

    async def consume(self, priority: int, prefetch: int, owner: str) -> None:
        """Add a consumer. The prefetch count of a running consumer cannot be changed."""
        tag = f"{owner}.{CLASSES[priority]}.{secrets.token_hex(4)}"
        # No other task may set another prefetch count between these two calls.
        async with self._qos_lock:
            await self._channel.basic_qos(prefetch_count=min(prefetch, MAX_PREFETCH))
            await self._channel.basic_consume(
                self._queues[priority], partial(self._receive, priority), consumer_tag=tag
            )
        self._consumers[priority].append((tag, prefetch))

    async def _receive(self, priority: int, message: DeliveredMessage) -> None:
        held = read_message(message, priority)
        self._unsettled[held.tag] = None
        self._on_message(self, held)

    async def cancel_consumers(self) -> None:
        async with self._connection.request():
            for consumers in self._consumers.values():
                while consumers:
                    await self._channel.basic_cancel(consumers[-1][0])
                    consumers.pop()

    async def has_other_consumers(self) -> bool:
        """Return True if these queues have consumers of other channels."""
        async with self._connection.request():
            for priority, queue in self._queues.items():
                found = await self._channel.queue_declare(queue, passive=True)
                if (found.consumer_count or 0) > len(self._consumers[priority]):
                    return True
        return False

    async def give_back(self, tags: Iterable[int]) -> None:
        """Return messages to their places in the queue.

        RabbitMQ before 4.3 counts a return as a delivery.
        """
        returned = sorted(tags)
        async with self._connection.request():
            for tag in returned:
                await self._channel.basic_nack(tag, requeue=True, wait=False)
        # Remove the tags after the last return is sent. An ack of all tags up to one must never
        # include a returned message.
        for tag in returned:
            del self._unsettled[tag]

    async def ack(self, tags: Iterable[int]) -> None:
        """Ack these delivery tags, and wait until the server has processed the acks.

        The server does not answer an ack. It processes the requests of a channel in order, so a
        later `basic.qos` that is answered confirms the acks before it.
        """
        wanted, upto = set(tags), 0
        for tag in self._unsettled:
            if tag not in wanted:
                break
            upto = tag
        with self._connection.outage():
            if upto:
                await self._channel.basic_ack(upto, multiple=True, wait=False)
            for tag in sorted(wanted):
                if tag > upto:
                    await self._channel.basic_ack(tag, wait=False)
        for tag in wanted:
            self._unsettled.pop(tag, None)
        self._acks_sent += 1
        mine = self._acks_sent
        async with self._qos_lock:
            if self._acks_confirmed >= mine:
                return
            upto = self._acks_sent
            async with self._connection.request():
                await self._channel.basic_qos(prefetch_count=1)
            self._acks_confirmed = upto

    async def close(self) -> None:
        await self._connection.close_channel(self._channel)

    def on_end(self, closed: Callable[[], Any], consumer_cancelled: Callable[[], Any]) -> None:
        """Call `closed` when the channel closes, and the other after the server cancels a consumer.

        The server cancels a consumer if the queue was deleted or moved.
        """
        self._channel.closing.add_done_callback(lambda _: closed())
        self._channel.on_consumer_cancel_callbacks.add(lambda _: consumer_cancelled())
