"""Amazon SQS, or a server that speaks its protocol, as a broker: standard queues, made, filled,
looked at and emptied. Receiving is in sqs_subscription.

SQS has no groups, no priorities and no order. A group has a queue for each priority class,
publishing sends to the queues of every group, and classes are asked for in turn. Its count of
receives also counts what was given back or merely looked at, so it is not passed on: the ledger
counts. What cannot be had at all is in CAPS.
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
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped, unused-ignore]

from penstock.brokers.sqs import message as wire
from penstock.brokers.sqs.message import CLASSES, NOTE, Gone, NotSent, Place, Rejected, Where
from penstock.brokers.sqs.subscription import SqsSubscription
from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Capabilities, Clock, Out, Published, Stats, TopicSpec
from penstock.stores.context import Context

CAPS = Capabilities(
    order_per_key="none",
    strict_priority="none",
    delay="native",
    replay=False,
    bounded=False,
    counts_deliveries=False,
    hold_keys=False,
    exact_stats=False,
    transactional=False,
    fair_keys=False,  # on AWS its fair queues do what they can: the key is the message group
    max_body=180_000,  # of anything; what can be compressed may be larger
)
BATCH = 10  # what SQS takes and gives at once
AT_ONCE = 32  # requests of one kind
LONGEST_DELAY = (
    900  # seconds that a new message can be kept back; longer waits are checked on arrival
)
KEEP = 14 * 86400  # the longest that SQS keeps anything
GROUPS_KNOWN = 30.0  # seconds for which another process's new group may go unnoticed
PURGED = 60.0  # seconds for which AWS may still remove what comes after a purge
COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesDelayed",
    "ApproximateNumberOfMessagesNotVisible",
)
log = logging.getLogger("penstock.sqs")


class SqsBroker:
    """Implements ports.Broker."""

    caps = CAPS

    def __init__(self, place: Place, clock: Clock) -> None:
        self.place, self.clock = place, clock
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = None
        self._connecting = asyncio.Lock()
        self._urls: dict[Where, str] = {}
        self._limits: dict[Where, int] = {}
        self._groups: dict[str, dict[str, str]] = defaultdict(
            dict
        )  # topic → group as SQS spells it → as we do
        self._looked: dict[str, float] = {}
        self._subscriptions: list[SqsSubscription] = []
        self._seq = 0
        self._gate = asyncio.Semaphore(AT_ONCE)

    # -- the connection ----------------------------------------------------------------------------

    async def _connect(self) -> Any:
        async with self._connecting:
            if self._client is None:
                p = self.place
                config = AioConfig(
                    connect_timeout=5, read_timeout=30, max_pool_connections=2 * AT_ONCE + 16, tcp_keepalive=True, parameter_validation=False,
                    retries={"mode": "standard", "total_max_attempts": 3},
                )  # fmt: skip
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
        """One request. Raises StoreUnavailable and its kinds (Gone, NotSent, Rejected), and nothing
        else.
        """
        try:
            client = self._client or await self._connect()
            answer: dict[str, Any] = await getattr(client, operation)(**arguments)
            return answer
        except (ClientError, BotoCoreError, OSError, TimeoutError) as e:
            raise wire.outage(e, self.place) from e

    async def on(self, where: Where, operation: str, **arguments: Any) -> dict[str, Any]:
        """One request to a queue, which is made (again) if it is not there."""
        try:
            return await self.call(
                operation, QueueUrl=self._urls.get(where) or await self.declare(where), **arguments
            )
        except Gone:
            for gone in (
                where,
                wire.dead_queue(where.topic),
            ):  # the other may have gone with it, and the new one refers to it
                self._urls.pop(gone, None)
            return await self.call(operation, QueueUrl=await self.declare(where), **arguments)

    async def each(
        self, where: Where, operation: str, entries: Sequence[dict[str, Any]]
    ) -> list[bool | None]:
        """A request for many receipts of a queue, by tens. True: done. False: refused for good.
        None: not known.
        """
        done: list[bool | None] = [None] * len(entries)

        async def ten(start: int) -> None:
            some = [
                {"Id": str(i), **e} for i, e in enumerate(entries[start : start + BATCH], start)
            ]
            try:
                async with self._gate:
                    answer = await self.call(operation, QueueUrl=self._urls[where], Entries=some)
            except (Gone, Rejected):
                done[start : start + len(some)] = [False] * len(some)
            except StoreUnavailable as e:
                log.debug("%s: %s", operation, e.message)
            else:
                for ok in answer.get("Successful", ()):
                    done[int(ok["Id"])] = True
                for failed in answer.get("Failed", ()):
                    done[int(failed["Id"])] = False if wire.stale(failed) else None

        await asyncio.gather(*[ten(start) for start in range(0, len(entries), BATCH)])
        return done

    async def close(self) -> None:
        for sub in self._subscriptions:
            sub.abandon()
        self._client = None
        await self._stack.aclose()

    # -- topology ----------------------------------------------------------------------------------

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        """Raises ConfigError or Unreachable where SQS cannot be used at all."""
        for t in topology:
            if t.ordered:
                raise ConfigError(
                    f"topic {t.name} asks for order, and standard queues of SQS have none",
                    hint="leave out `ordered`, or use another broker for it",
                )
        dead = {wire.dead_queue(t.name) for t in topology}
        rest = {w for t in topology for g in t.groups for w in wire.lanes(t.name, g)} - dead
        drift: list[str] = []
        try:
            for some in (dead, rest):  # the others refer to the dead ones
                found = await asyncio.gather(
                    *[
                        self._check(w)
                        for w in sorted(some, key=lambda w: (w.topic, w.group, w.rank))
                    ]
                )
                drift += [sentence for sentences in found for sentence in sentences]
        except (StoreUnavailable, BotoCoreError) as e:
            raise wire.at_start(e, self.place) from e
        for t in topology:
            self._groups[t.name].update({wire.group_name(g): g for g in t.groups})
        return drift

    async def _check(self, where: Where) -> list[str]:
        """Make it if need be; what is there already and is not as we would make it, in sentences."""
        async with self._gate:
            url = await self.declare(where)
            found = (await self.call("get_queue_attributes", QueueUrl=url, AttributeNames=["All"]))[
                "Attributes"
            ]
        self._limits[where] = int(found.get("MaximumMessageSize", wire.LEAST_LIMIT))
        name, drift = wire.queue_name(self.place.prefix, where), []
        kept = int(found.get("MessageRetentionPeriod", KEEP))
        if kept < KEEP:
            drift.append(
                f"queue {name} forgets messages after {kept // 3600} h; set its MessageRetentionPeriod to {KEEP}"
            )
        if int(found.get("DelaySeconds", 0)):
            drift.append(
                f"queue {name} delays every message by {found['DelaySeconds']} s; set its DelaySeconds to 0"
            )
        if policy := found.get("RedrivePolicy"):
            most = int(msgspec.json.decode(policy)["maxReceiveCount"])
            if self.place.receives == 0 or most < self.place.receives:
                wanted = (
                    f"raise maxReceiveCount to {self.place.receives}"
                    if self.place.receives
                    else "remove its RedrivePolicy"
                )
                drift.append(
                    f"queue {name} gives a message up after {most} receives, while Penstock counts attempts itself; {wanted}"
                )
        return drift

    async def declare(self, where: Where) -> str:
        """The URL of a queue; it is made if it is not there."""
        if (url := await self._find(where)) is None:
            attributes = {"MessageRetentionPeriod": str(KEEP)}
            if self.place.receives and where != wire.dead_queue(where.topic):
                dead = await self.declare(wire.dead_queue(where.topic))
                arn = (
                    await self.call(
                        "get_queue_attributes", QueueUrl=dead, AttributeNames=["QueueArn"]
                    )
                )["Attributes"]["QueueArn"]
                policy = {"deadLetterTargetArn": arn, "maxReceiveCount": str(self.place.receives)}
                attributes["RedrivePolicy"] = msgspec.json.encode(policy).decode()
            name = wire.queue_name(self.place.prefix, where)
            url = self._url_in(
                await self.call("create_queue", QueueName=name, Attributes=attributes)
            )
        self._urls[where] = url
        return url

    async def _find(self, where: Where) -> str | None:
        if known := self._urls.get(where):
            return known
        with contextlib.suppress(Gone):
            self._urls[where] = self._url_in(
                await self.call(
                    "get_queue_url", QueueName=wire.queue_name(self.place.prefix, where)
                )
            )
        return self._urls.get(where)

    def _url_in(self, answer: dict[str, Any]) -> str:
        """A web server that answers anything with a friendly page gets as far as this."""
        if "QueueUrl" not in answer:
            raise StoreUnavailable(f"{self.place.shown} does not answer as SQS does")
        return str(answer["QueueUrl"])

    async def _groups_of(self, topic: str) -> list[str]:
        """Every group that has queues, whoever made them: one that another process reads must not
        miss anything.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._looked.get(topic, -math.inf) + GROUPS_KNOWN:
            self._looked[topic] = now
            start = wire.topic_prefix(self.place.prefix, topic)
            try:
                urls = (await self.call("list_queues", QueueNamePrefix=start)).get("QueueUrls", [])
            except Rejected as e:
                log.warning(
                    "groups that only other processes know of get nothing from here: %s", e.message
                )
            else:
                for group in wire.groups_of([url.rpartition("/")[2] for url in urls], start):
                    self._groups[topic].setdefault(group, group)
        return list(self._groups[topic].values())

    # -- publishing --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        """Raises StoreUnavailable where nothing was sent for certain; in any other trouble,
        `unknown`.
        """
        targets = {t: await self._groups_of(t) or ["main"] for t in {m.topic for m in batch}}
        return await self.send([(m, [_queue(m, g) for g in targets[m.topic]]) for m in batch])

    async def send(self, items: Sequence[tuple[Out, Sequence[Where]]]) -> list[Published]:
        now = self.clock.now()
        answers: list[Published] = [Published.OK] * len(items)
        loads: dict[Where, list[_Entry]] = defaultdict(list)
        for i, (m, queues) in enumerate(items):
            self._seq = max(self._seq + 1, time.time_ns())
            late = m.not_before - now
            parcel = wire.pack(m, self._seq, m.not_before if late > 0 else 0.0)
            for where in queues:
                if parcel.size > (most := self._limits.get(where, wire.LEAST_LIMIT)):
                    log.error(
                        "message %s of %s has %d bytes after compression, and SQS takes %d",
                        m.id,
                        m.topic,
                        parcel.size,
                        most,
                    )
                    answers[i] = Published.FAILED
                else:
                    loads[where].append(_Entry(i, _entry(parcel, late), parcel.size))
        parts = [
            (where, some)
            for where, load in loads.items()
            for some in _batches(load, self._limits.get(where, wire.LEAST_LIMIT))
        ]
        sent = await asyncio.gather(*[self._send(where, some) for where, some in parts])
        for (_, some), (results, _) in zip(parts, sent, strict=True):
            for entry, result in zip(some, results, strict=True):
                answers[entry.of] = max(
                    answers[entry.of], result, key=WORSE.index
                )  # of all its groups
        unsent = [trouble for _, trouble in sent if trouble is not None]
        if unsent and len(unsent) == len(parts):
            raise unsent[0]
        return answers

    async def _send(
        self, where: Where, some: Sequence[_Entry]
    ) -> tuple[list[Published], NotSent | None]:
        """Ten at most. The second: there was nobody to send them to."""
        try:
            async with self._gate:
                answer = await self.on(
                    where,
                    "send_message_batch",
                    Entries=[{"Id": str(i), **e.fields} for i, e in enumerate(some)],
                )
        except Rejected as e:
            log.error("%d messages of %s were refused: %s", len(some), where.topic, e.message)
            return [Published.FAILED] * len(some), None
        except StoreUnavailable as e:
            return [Published.UNKNOWN] * len(some), e if isinstance(e, NotSent) else None
        results = [Published.UNKNOWN] * len(some)
        for ok in answer.get("Successful", ()):
            results[int(ok["Id"])] = Published.OK
        for failed in answer.get("Failed", ()):
            if failed.get("SenderFault"):
                log.error(
                    "message %s of %s was refused: %s %s",
                    failed["Id"],
                    where.topic,
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

    def left(self, sub: SqsSubscription) -> None:
        if sub in self._subscriptions:
            self._subscriptions.remove(sub)

    # -- looking -----------------------------------------------------------------------------------

    async def _counts(self, where: Where) -> tuple[int, int, int]:
        """Ready, delayed, in flight; a retry that waits for its time is in flight to SQS."""
        if (url := await self._find(where)) is None:
            return 0, 0, 0
        try:
            found = (
                await self.call("get_queue_attributes", QueueUrl=url, AttributeNames=list(COUNTS))
            )["Attributes"]
        except Gone:
            self._urls.pop(where, None)
            return 0, 0, 0
        ready, delayed, in_flight = (int(found.get(name, 0)) for name in COUNTS)
        return ready, delayed, in_flight

    async def stats(self, topic: str, group: str) -> Stats:
        dead, *rest = await asyncio.gather(
            *[self._counts(w) for w in [wire.dead_queue(topic), *wire.lanes(topic, group)]]
        )
        ready, delayed, in_flight = (sum(column) for column in zip(*rest, strict=True))
        letters = 0 if topic.endswith(wire.DEAD) else sum(dead)
        return Stats(
            ready=ready,
            delayed=delayed,
            in_flight=in_flight,
            dead=letters,
            oldest_age=None,
            exact=False,
        )

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        """SQS shows only what it hands out, so this takes some and gives it back in the same
        request: a sample, sorted by age. Nothing is hidden from workers by it; SQS itself counts a
        receive, of which there may be `max_receives`.
        """
        groups = await self._groups_of(topic)
        seen: dict[str, tuple[int, Out]] = {}
        for where in wire.lanes(topic, "main" if "main" in groups or not groups else groups[0]):
            if (url := await self._find(where)) is None:
                continue
            for _ in range(3 + 3 * math.ceil(limit / BATCH)):
                before = len(seen)
                answer = await self.call(
                    "receive_message",
                    QueueUrl=url,
                    MaxNumberOfMessages=BATCH,
                    VisibilityTimeout=0,
                    MessageAttributeNames=[NOTE],
                )
                for message in answer.get("Messages", ()):
                    note, body = wire.unpack(message)
                    out = Out(
                        topic=topic,
                        id=note.id,
                        key=note.key,
                        body=body,
                        headers=note.headers,
                        priority=note.prio,
                        not_before=note.after,
                    )
                    seen[message["MessageId"]] = note.seq, out
                if len(seen) == before:
                    break
        return [out for _, out in sorted(seen.values(), key=lambda found: found[0])[:limit]]

    async def purge(self, topic: str) -> int:
        """What is in flight goes as well. On AWS this takes a minute, in which new messages might
        be removed too, so it waits for that.
        """
        queues = [w for g in await self._groups_of(topic) or ["main"] for w in wire.lanes(topic, g)]
        found = [(w, await self._counts(w)) for w in queues if await self._find(w) is not None]
        for where, _ in found:
            await self.call("purge_queue", QueueUrl=self._urls[where])
        if found and self.place.endpoint is None:
            await self.clock.sleep(PURGED)
        return sum(ready + delayed for _, (ready, delayed, _) in found)

    async def replay(self, topic: str, group: str, *, since: float) -> int:
        raise ConfigError(
            "SQS keeps no history to hand out again",
            hint="penstock dlq redrive for dead letters, penstock push --force for URLs",
        )


class _Entry(msgspec.Struct):
    """One message on its way to one queue."""

    of: int  # index of the message
    fields: dict[str, Any]
    size: int


WORSE = (Published.OK, Published.FULL, Published.UNKNOWN, Published.FAILED)


def _queue(m: Out, group: str) -> Where:
    rank = (
        wire.NORMAL if m.topic.endswith(wire.DEAD) else min(max(m.priority, 0), len(CLASSES) - 1)
    )  # a number that no class has
    return Where(m.topic, group, rank)


def _entry(parcel: wire.Parcel, late: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "MessageBody": parcel.body,
        "MessageAttributes": {NOTE: {"DataType": "String", "StringValue": parcel.note}},
    }
    if parcel.group:
        fields["MessageGroupId"] = parcel.group
    if late > 0:
        fields["DelaySeconds"] = min(math.ceil(late), LONGEST_DELAY)
    return fields


def _batches(load: Sequence[_Entry], most: int) -> list[list[_Entry]]:
    """Tens, fewer where they are large: a batch may be no larger than a message."""
    batches: list[list[_Entry]] = []
    room = 0
    for entry in load:
        if not batches or len(batches[-1]) == BATCH or entry.size > room:
            batches.append([])
            room = most
        batches[-1].append(entry)
        room -= entry.size
    return batches


def open_broker(url: str, context: Context) -> SqsBroker:
    return SqsBroker(wire.parse(url, context.config.namespace), context.clock)
