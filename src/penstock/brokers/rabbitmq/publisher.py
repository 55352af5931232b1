"""Publishes to RabbitMQ over one channel, and returns one result for each message.

The results are the server's confirmations. Many messages are in flight together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from aiormq import exceptions as amqp
from aiormq.channel import Channel
from pamqp.commands import Basic

from penstock.brokers.rabbitmq.connection import (
    CONNECTION_ERRORS,
    Connection,
    is_task_cancelled,
)
from penstock.brokers.rabbitmq.topology import Names
from penstock.errors import Unreachable
from penstock.ports import Published

# Unconfirmed messages of the channel. A higher limit is not faster and fills buffers.
MAX_UNCONFIRMED = 1000
PERSISTENT = 2


class OutgoingMessage(msgspec.Struct, frozen=True):
    """A message to publish."""

    exchange: str
    key: str
    id: str
    body: bytes
    headers: dict[str, str]


class Publisher:
    """Publisher of one broker object. The first `send` opens the channel."""

    def __init__(self, connection: Connection, names: Names) -> None:
        self.connection, self.names = connection, names
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._permits = asyncio.Semaphore(MAX_UNCONFIRMED)
        self._in_flight: dict[str, asyncio.Future[None]] = {}

    async def send(self, messages: Sequence[OutgoingMessage]) -> list[Published]:
        """Publish messages and return one result for each.

        `full` means that the server is short of memory or disk, or that a queue is at its limit.
        Raises StoreUnavailable if no message was sent.
        """
        if not messages:
            return []
        channel = await self._open()
        timeout = self.connection.address.publish_timeout
        if await self.connection.blocked(timeout):
            return [Published.FULL] * len(messages)
        last = len(messages) - 1
        answers = await asyncio.gather(
            *(
                self._publish_one(channel, message, flush=i == last)
                for i, message in enumerate(messages)
            )
        )
        # One message made the server close the channel. Send them one by one to find it.
        if last and None in answers:
            for i, answer in enumerate(answers):
                if answer is None:
                    answers[i] = (await self.send([messages[i]]))[0]
        return [Published.FAILED if answer is None else answer for answer in answers]

    async def _open(self) -> Channel:
        async with self._opening:
            channel = self._channel
            if channel is None or channel.is_closed or not self.connection.is_open:
                channel = await self.connection.channel(confirms=True)
                # A blocked connection does not answer.
                async with self.connection.request():
                    # Publishing to a missing exchange would close the channel, and with it
                    # lose the confirmations of all messages in flight.
                    for name in self.names.exchanges:
                        await declare_exchange(channel, name)
                self._channel = channel
            return channel

    async def _publish_one(
        self, channel: Channel, message: OutgoingMessage, *, flush: bool
    ) -> Published | None:
        """Publish one message. Return None if the server closed the channel because of a message.

        The rejected message may be another one of the same channel.
        """
        # A returned message is identified by its id only, so an id must not be in flight twice.
        while (same := self._in_flight.get(message.id)) is not None:
            await asyncio.wait([same])
        done = self._in_flight[message.id] = asyncio.get_running_loop().create_future()
        try:
            async with self._permits:
                await channel.basic_publish(
                    message.body,
                    exchange=message.exchange,
                    routing_key=message.key,
                    mandatory=True,
                    properties=Basic.Properties(
                        message_id=message.id,
                        delivery_mode=PERSISTENT,
                        headers=dict(message.headers),
                    ),
                    timeout=self.connection.address.publish_timeout,
                    wait=flush,
                )
            return Published.OK
        except amqp.PublishError:
            return Published.FAILED  # no queue is bound to the routing key
        except amqp.DeliveryError:
            return Published.FULL
        except amqp.ChannelPreconditionFailed:
            return None
        except (ValueError, TypeError, UnicodeError):
            return Published.FAILED  # cannot be encoded as a message
        except CONNECTION_ERRORS:
            return Published.UNKNOWN
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            return Published.UNKNOWN
        finally:
            del self._in_flight[message.id]
            done.set_result(None)


async def declare_exchange(channel: Channel, name: str) -> None:
    try:
        await channel.exchange_declare(name, exchange_type="topic", durable=True)
    except amqp.ChannelAccessRefused as e:
        raise Unreachable(
            f"the user may not declare the exchange {name!r}",
            hint="rabbitmqctl set_permissions -p VHOST USER '.*' '.*' '.*'",
        ) from e
    except amqp.ChannelPreconditionFailed as e:
        raise Unreachable(
            f"there is an exchange {name!r} of another kind on the server",
            hint="choose another namespace (PENSTOCK_NAMESPACE), or delete that exchange",
        ) from e
