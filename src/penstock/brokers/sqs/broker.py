"""Broker on Amazon SQS or a compatible server: creates, fills, inspects and purges standard queues.

See `subscription` for receiving.

SQS has no groups, no priorities and no order. So each group has a queue for each priority class. A
publish sends to the queues of all groups. A subscription polls the classes by their shares.
The receive count of SQS also counts released and peeked messages, so it is not reported: the ledger
counts starts. CAPS lists the features that SQS does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import (  # type: ignore[import-untyped, unused-ignore]
    BotoCoreError,
    ClientError,
)

from penstock.brokers.dead_copies import DEAD
from penstock.brokers.sqs import message as wire
from penstock.brokers.sqs.message import (
    ATTRIBUTE,
    CLASSES,
    NotSent,
    QueueId,
    QueueMissing,
    Rejected,
    SqsAddress,
)
from penstock.brokers.sqs.subscription import SqsSubscription
from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Capabilities, Clock, Out, Published, Stats, TopicSpec
from penstock.stores.context import Context

CAPS = Capabilities(
    delay="native",
    fair_keys=False,  # AWS fair queues help without a guarantee: the key is the message group
    max_body=180_000,  # bytes that always fit. A body that can be compressed may be larger.
)
BATCH = 10  # messages in one request, a limit of SQS
MAX_REQUESTS = 32  # concurrent requests that send, settle or check. Polls have their own limit.
# Seconds that SQS can delay a new message. Longer delays are checked when the message is received.
MAX_DELAY = 900
RETENTION = 14 * 86400  # seconds, the longest retention of SQS
GROUPS_REFRESH = 30.0  # seconds after which the groups of other processes are listed again
PURGE_TIME = 60.0  # seconds after a purge in which AWS may also delete new messages
COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesDelayed",
    "ApproximateNumberOfMessagesNotVisible",
)
log = logging.getLogger("penstock.sqs")


class SqsBroker:
    """Implements ports.Broker."""

    caps = CAPS

    def __init__(self, address: SqsAddress, clock: Clock) -> None:
        self.address, self.clock = address, clock
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = None
        self._connecting = asyncio.Lock()
        self._urls: dict[QueueId, str] = {}
        self._limits: dict[QueueId, int] = {}
        # topic -> group name in queue names -> group name
        self._groups: dict[str, dict[str, str]] = defaultdict(dict)
        self._groups_listed_at: dict[str, float] = {}
        self._subscriptions: list[SqsSubscription] = []
        self._last_sequence = 0
        self._request_limit = asyncio.Semaphore(MAX_REQUESTS)

    # -- the connection ----------------------------------------------------------------------------

    async def _connect(self) -> Any:
        async with self._connecting:
            if self._client is None:
                p = self.address
                config = AioConfig(
                    connect_timeout=5,
                    read_timeout=30,
                    max_pool_connections=2 * MAX_REQUESTS + 16,
                    tcp_keepalive=True,
                    parameter_validation=False,
                    retries={"mode": "standard", "total_max_attempts": 3},
                )
                self._client = await self._stack.enter_async_context(
                    get_session().create_client(
                        "sqs",
                        region_name=p.region,
                        endpoint_url=p.endpoint,
                        aws_access_key_id=p.key,
                        aws_secret_access_key=p.secret,
                        config=config,
                    )
                )
        return self._client

    async def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send one request. Raises only StoreUnavailable or its subclasses.

        The subclasses are QueueMissing, NotSent and Rejected.
        """
        try:
            client = self._client or await self._connect()
            answer: dict[str, Any] = await getattr(client, operation)(**arguments)
            return answer
        except (ClientError, BotoCoreError, OSError, TimeoutError) as e:
            raise wire.outage(e, self.address) from e

    async def call_queue(self, queue: QueueId, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send one request to a queue. Create the queue if it does not exist."""
        try:
            return await self.call(
                operation, QueueUrl=self._urls.get(queue) or await self.declare(queue), **arguments
            )
        except QueueMissing:
            # The dead-letter queue may be missing too, and the new queue refers to it.
            for missing in (queue, wire.dead_queue(queue.topic)):
                self._urls.pop(missing, None)
            return await self.call(operation, QueueUrl=await self.declare(queue), **arguments)

    async def call_batch(
        self, queue: QueueId, operation: str, entries: Sequence[dict[str, Any]]
    ) -> list[bool | None]:
        """Send a batch request for entries of one queue, ten in a request.

        The result of an entry is True if it succeeded, False if SQS refused it permanently, and
        None if the result is unknown.
        """
        done: list[bool | None] = [None] * len(entries)

        async def send_batch(start: int) -> None:
            some = [
                {"Id": str(i), **e} for i, e in enumerate(entries[start : start + BATCH], start)
            ]
            try:
                async with self._request_limit:
                    answer = await self.call(operation, QueueUrl=self._urls[queue], Entries=some)
            except (QueueMissing, Rejected):
                done[start : start + len(some)] = [False] * len(some)
            except StoreUnavailable as e:
                log.debug("%s: %s", operation, e.message)
            else:
                for ok in answer.get("Successful", ()):
                    done[int(ok["Id"])] = True
                for failed in answer.get("Failed", ()):
                    done[int(failed["Id"])] = False if wire.is_permanent(failed) else None

        await asyncio.gather(*[send_batch(start) for start in range(0, len(entries), BATCH)])
        return done

    async def close(self) -> None:
        for sub in self._subscriptions:
            sub.abandon()
        self._client = None
        await self._stack.aclose()

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
                        self._check(w)
                        for w in sorted(some, key=lambda w: (w.topic, w.group, w.priority))
                    ]
                )
                drift += [sentence for sentences in found for sentence in sentences]
        except (StoreUnavailable, BotoCoreError) as e:
            raise wire.start_error(e, self.address) from e
        for t in topology:
            self._groups[t.name].update({wire.group_name(g): g for g in t.groups})
        return drift

    async def _check(self, queue: QueueId) -> list[str]:
        """Create the queue if necessary. Return a sentence for each unsuitable attribute."""
        async with self._request_limit:
            url = await self.declare(queue)
            found = (await self.call("get_queue_attributes", QueueUrl=url, AttributeNames=["All"]))[
                "Attributes"
            ]
        self._limits[queue] = int(found.get("MaximumMessageSize", wire.MIN_SIZE_LIMIT))
        name, drift = wire.queue_name(self.address.prefix, queue), []
        retention = int(found.get("MessageRetentionPeriod", RETENTION))
        if retention < RETENTION:
            drift.append(
                f"queue {name} deletes messages after {retention // 3600} h:"
                f" set its MessageRetentionPeriod to {RETENTION}"
            )
        if int(found.get("DelaySeconds", 0)):
            drift.append(
                f"queue {name} delays every message by {found['DelaySeconds']} s:"
                " set its DelaySeconds to 0"
            )
        if policy := found.get("RedrivePolicy"):
            limit = int(msgspec.json.decode(policy)["maxReceiveCount"])
            if self.address.receives == 0 or limit < self.address.receives:
                wanted = (
                    f"raise maxReceiveCount to {self.address.receives}"
                    if self.address.receives
                    else "remove its RedrivePolicy"
                )
                drift.append(
                    f"queue {name} moves a message to its dead-letter queue after {limit} receives,"
                    f" but Penstock counts attempts itself: {wanted}"
                )
        return drift

    async def declare(self, queue: QueueId) -> str:
        """Return the URL of the queue. Create the queue if it does not exist."""
        if (url := await self._find(queue)) is None:
            attributes = {"MessageRetentionPeriod": str(RETENTION)}
            if self.address.receives and queue != wire.dead_queue(queue.topic):
                dead = await self.declare(wire.dead_queue(queue.topic))
                arn = (
                    await self.call(
                        "get_queue_attributes", QueueUrl=dead, AttributeNames=["QueueArn"]
                    )
                )["Attributes"]["QueueArn"]
                policy = {"deadLetterTargetArn": arn, "maxReceiveCount": str(self.address.receives)}
                attributes["RedrivePolicy"] = msgspec.json.encode(policy).decode()
            name = wire.queue_name(self.address.prefix, queue)
            url = self._url_in(
                await self.call("create_queue", QueueName=name, Attributes=attributes)
            )
        self._urls[queue] = url
        return url

    async def _find(self, queue: QueueId) -> str | None:
        if known := self._urls.get(queue):
            return known
        with contextlib.suppress(QueueMissing):
            self._urls[queue] = self._url_in(
                await self.call(
                    "get_queue_url", QueueName=wire.queue_name(self.address.prefix, queue)
                )
            )
        return self._urls.get(queue)

    def _url_in(self, answer: dict[str, Any]) -> str:
        """Return the queue URL. Raises StoreUnavailable if a web server answered instead of SQS."""
        if "QueueUrl" not in answer:
            raise StoreUnavailable(f"{self.address.shown} does not answer as SQS does")
        return str(answer["QueueUrl"])

    async def _groups_of(self, topic: str) -> list[str]:
        """Return all groups that have queues, including groups that other processes declared.

        A publish sends to all of them, so that no group misses a message.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._groups_listed_at.get(topic, -math.inf) + GROUPS_REFRESH:
            self._groups_listed_at[topic] = now
            start = wire.topic_prefix(self.address.prefix, topic)
            try:
                urls = (await self.call("list_queues", QueueNamePrefix=start)).get("QueueUrls", [])
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

    # -- publishing --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        """Send each message to all groups. Durable when the result is `ok`.

        The result is `unknown` if the message may have been sent. Raises StoreUnavailable if
        certainly no message was sent.
        """
        targets = {t: await self._groups_of(t) or ["main"] for t in {m.topic for m in batch}}
        return await self.send([(m, [_queue(m, g) for g in targets[m.topic]]) for m in batch])

    async def send(self, items: Sequence[tuple[Out, Sequence[QueueId]]]) -> list[Published]:
        now = self.clock.now()
        answers: list[Published] = [Published.OK] * len(items)
        entries: dict[QueueId, list[_BatchEntry]] = defaultdict(list)
        for i, (m, queues) in enumerate(items):
            self._last_sequence = max(self._last_sequence + 1, time.time_ns())
            late = m.not_before - now
            packed = wire.pack(m, self._last_sequence, m.not_before if late > 0 else 0.0)
            for queue in queues:
                if packed.size > (limit := self._limits.get(queue, wire.MIN_SIZE_LIMIT)):
                    log.error(
                        "message %s of topic %s has %d bytes after compression,"
                        " and SQS accepts at most %d",
                        m.id,
                        m.topic,
                        packed.size,
                        limit,
                    )
                    answers[i] = Published.FAILED
                else:
                    entries[queue].append(_BatchEntry(i, _entry(packed, late), packed.size))
        parts = [
            (queue, some)
            for queue, load in entries.items()
            for some in _batches(load, self._limits.get(queue, wire.MIN_SIZE_LIMIT))
        ]
        sent = await asyncio.gather(*[self._send(queue, some) for queue, some in parts])
        for (_, some), (results, _) in zip(parts, sent, strict=True):
            for entry, result in zip(some, results, strict=True):
                # the worst result of all groups
                answers[entry.index] = max(answers[entry.index], result, key=BY_SEVERITY.index)
        unsent = [error for _, error in sent if error is not None]
        if unsent and len(unsent) == len(parts):
            raise unsent[0]
        return answers

    async def _send(
        self, queue: QueueId, some: Sequence[_BatchEntry]
    ) -> tuple[list[Published], NotSent | None]:
        """Send up to ten messages to one queue.

        Return the results, and the error if certainly no message was sent.
        """
        try:
            async with self._request_limit:
                answer = await self.call_queue(
                    queue,
                    "send_message_batch",
                    Entries=[{"Id": str(i), **e.fields} for i, e in enumerate(some)],
                )
        except Rejected as e:
            log.error("SQS refused %d messages of topic %s: %s", len(some), queue.topic, e.message)
            return [Published.FAILED] * len(some), None
        except StoreUnavailable as e:
            return [Published.UNKNOWN] * len(some), e if isinstance(e, NotSent) else None
        results = [Published.UNKNOWN] * len(some)
        for ok in answer.get("Successful", ()):
            results[int(ok["Id"])] = Published.OK
        for failed in answer.get("Failed", ()):
            if failed.get("SenderFault"):
                log.error(
                    "SQS refused message %s of topic %s: %s %s",
                    failed["Id"],
                    queue.topic,
                    failed.get("Code"),
                    failed.get("Message", ""),
                )
                results[int(failed["Id"])] = Published.FAILED
        return results, None

    # -- receiving ---------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> SqsSubscription:
        sub = SqsSubscription(self, topic, group, lease)
        self._subscriptions.append(sub)
        return sub

    def remove_subscription(self, sub: SqsSubscription) -> None:
        if sub in self._subscriptions:
            self._subscriptions.remove(sub)

    # -- stats, peek and purge ---------------------------------------------------------------------

    async def _counts(self, queue: QueueId) -> tuple[int, int, int]:
        """Return the ready, delayed and in-flight messages.

        SQS counts a retry that is not due as in flight.
        """
        if (url := await self._find(queue)) is None:
            return 0, 0, 0
        try:
            found = (
                await self.call("get_queue_attributes", QueueUrl=url, AttributeNames=list(COUNTS))
            )["Attributes"]
        except QueueMissing:
            self._urls.pop(queue, None)
            return 0, 0, 0
        ready, delayed, in_flight = (int(found.get(name, 0)) for name in COUNTS)
        return ready, delayed, in_flight

    async def stats(self, topic: str, group: str) -> Stats:
        dead, *rest = await asyncio.gather(
            *[self._counts(w) for w in [wire.dead_queue(topic), *wire.group_queues(topic, group)]]
        )
        ready, delayed, in_flight = (sum(column) for column in zip(*rest, strict=True))
        dead_count = 0 if topic.endswith(DEAD) else sum(dead)
        return Stats(
            ready=ready,
            delayed=delayed,
            in_flight=in_flight,
            dead=dead_count,
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
            if (url := await self._find(queue)) is None:
                continue
            for _ in range(3 + 3 * math.ceil(limit / BATCH)):
                before = len(seen)
                answer = await self.call(
                    "receive_message",
                    QueueUrl=url,
                    MaxNumberOfMessages=BATCH,
                    VisibilityTimeout=0,
                    MessageAttributeNames=[ATTRIBUTE],
                )
                for message in answer.get("Messages", ()):
                    attributes, body = wire.unpack(message)
                    out = Out(
                        topic=topic,
                        id=attributes.id,
                        key=attributes.key,
                        body=body,
                        headers=attributes.headers,
                        priority=attributes.prio,
                        not_before=attributes.after,
                    )
                    seen[message["MessageId"]] = attributes.seq, out
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
        found = [(w, await self._counts(w)) for w in queues if await self._find(w) is not None]
        for queue, _ in found:
            await self.call("purge_queue", QueueUrl=self._urls[queue])
        if found and self.address.endpoint is None:
            await self.clock.sleep(PURGE_TIME)
        return sum(ready + delayed for _, (ready, delayed, _) in found)

    async def replay(self, topic: str, group: str, *, since: float) -> int:
        raise ConfigError(
            "SQS keeps no history to replay",
            hint="use `penstock dlq retry` for dead letters, `penstock push --force` for URLs",
        )


class _BatchEntry(msgspec.Struct):
    """A message for one queue."""

    index: int  # position of the message in the call
    fields: dict[str, Any]
    size: int


BY_SEVERITY = (Published.OK, Published.FULL, Published.UNKNOWN, Published.FAILED)


def _queue(m: Out, group: str) -> QueueId:
    # Clamp the priority to a known class.
    priority = wire.NORMAL if m.topic.endswith(DEAD) else min(max(m.priority, 0), len(CLASSES) - 1)
    return QueueId(m.topic, group, priority)


def _entry(packed: wire.PackedMessage, late: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "MessageBody": packed.body,
        "MessageAttributes": {ATTRIBUTE: {"DataType": "String", "StringValue": packed.attributes}},
    }
    if packed.group:
        fields["MessageGroupId"] = packed.group
    if late > 0:
        fields["DelaySeconds"] = min(math.ceil(late), MAX_DELAY)
    return fields


def _batches(load: Sequence[_BatchEntry], limit: int) -> list[list[_BatchEntry]]:
    """Group the entries into batches of up to ten. SQS limits a batch to the size of a message."""
    batches: list[list[_BatchEntry]] = []
    room = 0
    for entry in load:
        if not batches or len(batches[-1]) == BATCH or entry.size > room:
            batches.append([])
            room = limit
        batches[-1].append(entry)
        room -= entry.size
    return batches


def open_broker(url: str, context: Context) -> SqsBroker:
    return SqsBroker(wire.parse(url, context.config.namespace), context.clock)
