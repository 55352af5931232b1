"""Requests to SQS: the connection, the URLs and limits of queues, and the creation of queues."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import (  # type: ignore[import-untyped, unused-ignore]
    BotoCoreError,
    ClientError,
)

from penstock.brokers.sqs import message as wire
from penstock.brokers.sqs.message import QueueId, QueueMissing, Rejected, SqsAddress
from penstock.errors import StoreUnavailable

BATCH = 10  # messages in one request, a limit of SQS
MAX_REQUESTS = 32  # concurrent requests that send, settle or check. Polls have their own limit.
RETENTION = 14 * 86400  # seconds, the longest retention of SQS
log = logging.getLogger("penstock.sqs")


class SqsClient:
    """Client of one server. The first request opens the connection."""

    def __init__(self, address: SqsAddress) -> None:
        self.address = address
        self.urls: dict[QueueId, str] = {}
        self.request_limit = asyncio.Semaphore(MAX_REQUESTS)
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = None
        self._connecting = asyncio.Lock()
        self._size_limits: dict[QueueId, int] = {}

    async def _connect(self) -> Any:
        async with self._connecting:
            if self._client is None:
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
                        region_name=self.address.region,
                        endpoint_url=self.address.endpoint,
                        aws_access_key_id=self.address.key,
                        aws_secret_access_key=self.address.secret,
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
                operation, QueueUrl=self.urls.get(queue) or await self.declare(queue), **arguments
            )
        except QueueMissing:
            # The dead-letter queue may be missing too, and the new queue refers to it.
            for missing in (queue, wire.dead_queue(queue.topic)):
                self.urls.pop(missing, None)
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
                async with self.request_limit:
                    answer = await self.call(operation, QueueUrl=self.urls[queue], Entries=some)
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
        self._client = None
        await self._stack.aclose()

    # -- queues ------------------------------------------------------------------------------------

    def size_limit(self, queue: QueueId) -> int:
        """Return the bytes that a message or a batch for this queue may have."""
        return self._size_limits.get(queue, wire.MIN_SIZE_LIMIT)

    async def check(self, queue: QueueId) -> list[str]:
        """Create the queue if necessary. Return a sentence for each unsuitable attribute."""
        async with self.request_limit:
            url = await self.declare(queue)
            found = (await self.call("get_queue_attributes", QueueUrl=url, AttributeNames=["All"]))[
                "Attributes"
            ]
        self._size_limits[queue] = int(found.get("MaximumMessageSize", wire.MIN_SIZE_LIMIT))
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
        if (url := await self.find(queue)) is None:
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
        self.urls[queue] = url
        return url

    async def find(self, queue: QueueId) -> str | None:
        if known := self.urls.get(queue):
            return known
        with contextlib.suppress(QueueMissing):
            self.urls[queue] = self._url_in(
                await self.call(
                    "get_queue_url", QueueName=wire.queue_name(self.address.prefix, queue)
                )
            )
        return self.urls.get(queue)

    def _url_in(self, answer: dict[str, Any]) -> str:
        """Return the queue URL. Raises StoreUnavailable if a web server answered instead of SQS."""
        if "QueueUrl" not in answer:
            raise StoreUnavailable(f"{self.address.shown} does not answer as SQS does")
        return str(answer["QueueUrl"])
