"""Sends messages to SQS, ten in a request, and returns one result for each message."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.brokers.sqs import message as wire
from penstock.brokers.sqs.client import BATCH, SqsClient, log
from penstock.brokers.sqs.message import ATTRIBUTE, NotSent, QueueId, Rejected
from penstock.errors import StoreUnavailable
from penstock.ports import Clock, Out, Published

# Seconds that SQS can delay a new message. Longer delays are checked when the message is received.
MAX_DELAY = 900
BY_SEVERITY = (Published.OK, Published.FULL, Published.UNKNOWN, Published.FAILED)


class _BatchEntry(msgspec.Struct):
    """A message for one queue."""

    index: int  # position of the message in the call
    fields: dict[str, Any]
    size: int


class Publisher:
    """Sends messages of one broker object."""

    def __init__(self, client: SqsClient, clock: Clock) -> None:
        self.client, self.clock = client, clock
        self._last_sequence = 0

    async def send(self, items: Sequence[tuple[Out, Sequence[QueueId]]]) -> list[Published]:
        now = self.clock.now()
        answers: list[Published] = [Published.OK] * len(items)
        entries: dict[QueueId, list[_BatchEntry]] = defaultdict(list)
        for i, (m, queues) in enumerate(items):
            self._last_sequence = max(self._last_sequence + 1, time.time_ns())
            late = m.not_before - now
            packed = wire.pack(m, self._last_sequence, m.not_before if late > 0 else 0.0)
            for queue in queues:
                if packed.size > (limit := self.client.size_limit(queue)):
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
            for some in _batches(load, self.client.size_limit(queue))
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
            async with self.client.request_limit:
                answer = await self.client.call_queue(
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
