"""Broker on Amazon SQS or a compatible server: creates, fills, inspects and purges standard queues.

See `subscription` for receiving.

SQS has no groups, no priorities and no order. So each group has a queue for each priority class. A
publish sends to the queues of all groups. A subscription polls the classes by their shares.
The receive count of SQS also counts released and peeked messages, so it is not reported: the ledger
counts starts. CAPS lists the features that SQS does not have.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import defaultdict
from collections.abc import Sequence

from botocore.exceptions import (  # type: ignore[import-untyped, unused-ignore]
    BotoCoreError,
)

from penstock.brokers.dead_copies import DEAD
from penstock.brokers.sqs import message as wire
from penstock.brokers.sqs.client import BATCH, SqsClient, log
from penstock.brokers.sqs.message import ATTRIBUTE, QueueId, QueueMissing, Rejected, SqsAddress
from penstock.brokers.sqs.publisher import Publisher
from penstock.brokers.sqs.subscription import SqsSubscription
from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Capabilities, Clock, Out, Published, Stats, TopicSpec
from penstock.rules.priority import NORMAL, class_of
from penstock.stores.context import Context

CAPS = Capabilities(
    delay="native",
    fair_keys=False,  # AWS fair queues help without a guarantee: the key is the message group
    max_body=180_000,  # bytes that always fit. A body that can be compressed may be larger.
)
GROUPS_REFRESH = 30.0  # seconds after which the groups of other processes are listed again
PURGE_TIME = 60.0  # seconds after a purge in which AWS may also delete new messages
COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesDelayed",
    "ApproximateNumberOfMessagesNotVisible",
)


class SqsBroker:
    """Implements ports.Broker."""

    caps = CAPS

    def __init__(self, address: SqsAddress, clock: Clock) -> None:
        self.clock = clock
        self.client = SqsClient(address)
        self._publisher = Publisher(self.client, clock)
        # topic -> group name in queue names -> group name
        self._groups: dict[str, dict[str, str]] = defaultdict(dict)
        self._groups_listed_at: dict[str, float] = {}
        self._subscriptions: weakref.WeakSet[SqsSubscription] = weakref.WeakSet()

    async def close(self) -> None:
        for sub in self._subscriptions:
            sub.abandon()
        await self.client.close()

    # -- topology ----------------------------------------------------------------------------------

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        """Create and check the queues. Raises ConfigError or Unreachable if SQS cannot be used."""
        for t in topology:
            if t.ordered:
                raise ConfigError(
                    f"topic {t.name} needs order per key, which standard queues of SQS do not keep",
                    hint="leave out `ordered`, or use another broker for this topic",
                )
        dead = {wire.dead_queue(t.name) for t in topology}
        rest = {w for t in topology for g in t.groups for w in wire.group_queues(t.name, g)} - dead
        drift: list[str] = []
        try:
            # Dead-letter queues first, because the other queues refer to them.
            for some in (dead, rest):
                found = await asyncio.gather(
                    *[
                        self.client.check(w)
                        for w in sorted(some, key=lambda w: (w.topic, w.group, w.priority))
                    ]
                )
                drift += [sentence for sentences in found for sentence in sentences]
        except (StoreUnavailable, BotoCoreError) as e:
            raise wire.start_error(e, self.client.address) from e
        for t in topology:
            self._groups[t.name].update({wire.group_name(g): g for g in t.groups})
        return drift

    async def _groups_of(self, topic: str) -> list[str]:
        """Return all groups that have queues, including groups that other processes declared.

        A publish sends to all of them, so that no group misses a message.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._groups_listed_at.get(topic, -math.inf) + GROUPS_REFRESH:
            self._groups_listed_at[topic] = now
            start = wire.topic_prefix(self.client.address.prefix, topic)
            try:
                urls = (await self.client.call("list_queues", QueueNamePrefix=start)).get(
                    "QueueUrls", []
                )
            except Rejected as e:
                log.warning(
                    "cannot list the queues of topic %s, so groups declared by other processes get"
                    " no messages from this process: %s",
                    topic,
                    e.message,
                )
            else:
                for group in wire.groups_of([url.rpartition("/")[2] for url in urls], start):
                    self._groups[topic].setdefault(group, group)
        return list(self._groups[topic].values())

    # -- publishing and receiving ------------------------------------------------------------------

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        """Send each message to all groups. Durable when the result is `ok`.

        The result is `unknown` if the message may have been sent. Raises StoreUnavailable if
        certainly no message was sent.
        """
        targets = {t: await self._groups_of(t) or ["main"] for t in {m.topic for m in batch}}
        return await self._publisher.send(
            [(m, [_queue(m, g) for g in targets[m.topic]]) for m in batch]
        )

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> SqsSubscription:
        sub = SqsSubscription(self.client, self._publisher, topic, group, lease)
        self._subscriptions.add(sub)
        return sub

    # -- stats, peek and purge ---------------------------------------------------------------------

    async def _counts(self, queue: QueueId) -> tuple[int, int, int]:
        """Return the ready, delayed and in-flight messages.

        SQS counts a retry that is not due as in flight.
        """
        if (url := await self.client.find(queue)) is None:
            return 0, 0, 0
        try:
            found = (
                await self.client.call(
                    "get_queue_attributes", QueueUrl=url, AttributeNames=list(COUNTS)
                )
            )["Attributes"]
        except QueueMissing:
            self.client.urls.pop(queue, None)
            return 0, 0, 0
        ready, delayed, in_flight = (int(found.get(name, 0)) for name in COUNTS)
        return ready, delayed, in_flight

    async def stats(self, topic: str, group: str) -> Stats:
        dead, *rest = await asyncio.gather(
            *[self._counts(w) for w in [wire.dead_queue(topic), *wire.group_queues(topic, group)]]
        )
        ready, delayed, in_flight = (sum(column) for column in zip(*rest, strict=True))
        return Stats(
            ready=ready,
            delayed=delayed,
            in_flight=in_flight,
            dead=0 if topic.endswith(DEAD) else sum(dead),
            oldest_age=None,
            exact=False,
        )

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """Return a sample of the messages, sorted by age.

        SQS shows only messages that it delivers. So the sample is received with a visibility
        timeout of 0, and workers can still receive it. SQS counts it as a receive, and after
        `max_receives` moves the message to the dead-letter queue.
        """
        groups = await self._groups_of(topic)
        seen: dict[str, tuple[int, Out]] = {}
        for queue in wire.group_queues(
            topic, "main" if "main" in groups or not groups else groups[0]
        ):
            if (url := await self.client.find(queue)) is None:
                continue
            for _ in range(3 + 3 * math.ceil(limit / BATCH)):
                before = len(seen)
                answer = await self.client.call(
                    "receive_message",
                    QueueUrl=url,
                    MaxNumberOfMessages=BATCH,
                    VisibilityTimeout=0,
                    MessageAttributeNames=[ATTRIBUTE],
                )
                for message in answer.get("Messages", ()):
                    attributes, body = wire.unpack(message)
                    seen[message["MessageId"]] = (
                        attributes.seq,
                        Out(
                            topic=topic,
                            id=attributes.id,
                            key=attributes.key,
                            body=body,
                            headers=attributes.headers,
                            priority=attributes.prio,
                            not_before=attributes.after,
                        ),
                    )
                if len(seen) == before:
                    break
        return [out for _, out in sorted(seen.values(), key=lambda found: found[0])[:limit]]

    async def purge(self, topic: str) -> int:
        """Delete all messages, including those in flight.

        On AWS this takes up to 60 s, and may also delete messages that are published in this time.
        So wait until it has ended.
        """
        queues = [
            w for g in await self._groups_of(topic) or ["main"] for w in wire.group_queues(topic, g)
        ]
        found = [
            (w, await self._counts(w)) for w in queues if await self.client.find(w) is not None
        ]
        for queue, _ in found:
            await self.client.call("purge_queue", QueueUrl=self.client.urls[queue])
        if found and self.client.address.endpoint is None:
            await self.clock.sleep(PURGE_TIME)
        return sum(ready + delayed for _, (ready, delayed, _) in found)

    async def replay(self, topic: str, group: str, *, since: float) -> int:
        raise ConfigError(
            "SQS keeps no history to replay",
            hint="use `penstock dlq retry` for dead letters, `penstock push --force` for URLs",
        )


def _queue(m: Out, group: str) -> QueueId:
    priority = NORMAL if m.topic.endswith(DEAD) else class_of(m.priority)
    return QueueId(m.topic, group, priority)


def open_broker(url: str, context: Context) -> SqsBroker:
    return SqsBroker(wire.parse(url, context.config.namespace), context.clock)
