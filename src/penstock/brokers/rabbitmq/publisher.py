"""Publishing to RabbitMQ with confirmations: one long-lived channel, many messages on their way,
one answer for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from aiormq import exceptions as amqp
from aiormq.channel import Channel
from pamqp.commands import Basic

from penstock.brokers.rabbitmq.connection import ANSWER, TROUBLE, Link
from penstock.brokers.rabbitmq.topology import Names
from penstock.errors import Unreachable
from penstock.ports import Published

ON_THEIR_WAY = (
    1000  # confirmations a channel waits for at most; more gains nothing and fills buffers
)
PERSISTENT = 2


class Letter(msgspec.Struct, frozen=True):
    """A message as it goes out."""

    exchange: str
    key: str
    id: str
    body: bytes
    headers: dict[str, str]


class Publisher:
    def __init__(self, link: Link, names: Names) -> None:
        self.link, self.names = link, names
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._room = asyncio.Semaphore(ON_THEIR_WAY)
        self._flying: dict[str, asyncio.Future[None]] = {}

    async def send(self, letters: Sequence[Letter]) -> list[Published]:
        """Raises StoreUnavailable where nothing was sent. `full`: the server is short of memory or
        disk, or a queue is at its limit.
        """
        if not letters:
            return []
        channel = await self._open()
        patience = self.link.address.publish_timeout
        if await self.link.blocked(patience):
            return [Published.FULL] * len(letters)
        last = len(letters) - 1
        if not last:
            answers = [await self._one(channel, letters[0], flush=True)]
        else:
            answers = await asyncio.gather(
                *(self._one(channel, letter, flush=i == last) for i, letter in enumerate(letters))
            )
        if (
            last and None in answers
        ):  # one of them made the server close the channel: it is found by sending them one by one
            for i, answer in enumerate(answers):
                if answer is None:
                    answers[i] = (await self.send([letters[i]]))[0]
        return [Published.FAILED if answer is None else answer for answer in answers]

    async def _open(self) -> Channel:
        async with self._opening:
            channel = self._channel
            if channel is None or channel.is_closed or not self.link.up:
                channel = await self.link.channel(confirms=True)
                with self.link.outage():
                    async with asyncio.timeout(
                        ANSWER
                    ):  # a connection that is blocked answers nothing
                        # to publish where there is no exchange costs the channel and all that is on
                        # its way
                        for name in self.names.exchanges:
                            await declare_exchange(channel, name)
                self._channel = channel
            return channel

    async def _one(self, channel: Channel, letter: Letter, *, flush: bool) -> Published | None:
        """None: the server closed the channel over something that was sent on it."""
        while (
            same := self._flying.get(letter.id)
        ) is not None:  # a message that comes back is known by its id alone
            await asyncio.wait([same])
        done = self._flying[letter.id] = asyncio.get_running_loop().create_future()
        try:
            async with self._room:
                await channel.basic_publish(
                    letter.body,
                    exchange=letter.exchange,
                    routing_key=letter.key,
                    mandatory=True,
                    properties=Basic.Properties(
                        message_id=letter.id, delivery_mode=PERSISTENT, headers=dict(letter.headers)
                    ),
                    timeout=self.link.address.publish_timeout,
                    wait=flush,
                )
            return Published.OK
        except amqp.PublishError:
            return Published.FAILED  # nobody listens there
        except amqp.DeliveryError:
            return Published.FULL
        except amqp.ChannelPreconditionFailed:
            return None
        except (ValueError, TypeError, UnicodeError):
            return Published.FAILED  # cannot be put into a message at all
        except TROUBLE:
            return Published.UNKNOWN
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Published.UNKNOWN
        finally:
            del self._flying[letter.id]
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
