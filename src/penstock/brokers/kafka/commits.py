"""Commits of one consumer group, in the event loop: one at a time, repeated until confirmed.

The thread in `consumer` sends the requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable

from confluent_kafka import KafkaError

from penstock.brokers.kafka.entries import Partition
from penstock.brokers.kafka.url import Settings

# partition, watermark and metadata to commit
CommitRequest = list[tuple[Partition, int, str]]
# Result of a commit: None, or the error.
CommitAnswer = asyncio.Future[KafkaError | None]
_RETRY_WAIT = 0.2  # seconds after a failed commit
log = logging.getLogger("penstock.brokers.kafka")


class Commits:
    """Commits all partitions of `uncommitted` together. Settles during a commit wait for the next.

    The consumer thread takes `requests` from the left.
    """

    def __init__(self, settings: Settings, topic: str, wakeup: threading.Event) -> None:
        self._settings, self._topic, self._wakeup = settings, topic, wakeup
        self.uncommitted: set[Partition] = set()  # partitions with settled, uncommitted messages
        self.requests: deque[tuple[CommitRequest, CommitAnswer]] = deque()
        self._metadata_accepted = True
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[None] = asyncio.Future()

    def start(self) -> asyncio.Future[None]:
        """Start a commit of `uncommitted`. The result is done when Kafka has confirmed it."""
        self._wanted.set()
        return self._next

    async def run(self) -> None:
        """Run the commits that `start` asks for, until the task is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._settings.commit_interval:
                await asyncio.sleep(self._settings.commit_interval)
            confirmed, self._next = self._next, asyncio.Future()
            while self.uncommitted and (error := await self._send()) is not None:
                if error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
                    self._metadata_accepted = False
                    log.warning(
                        "Kafka rejected the commit metadata of %s:"
                        " after a crash, messages settled out of order will be redelivered",
                        self._topic,
                    )
                await asyncio.sleep(_RETRY_WAIT)
            confirmed.set_result(None)

    async def _send(self) -> KafkaError | None:
        """Send one commit to the consumer thread. Return its error.

        Lost partitions are not committed. The thread answers even an empty request, after it has
        reported the loss. So a waiting settle knows whether the last commit was confirmed.
        """
        parts = set(self.uncommitted)
        self.uncommitted.clear()
        answer: CommitAnswer = asyncio.Future()
        self.requests.append((self.request_for(part for part in parts if not part.lost), answer))
        self._wakeup.set()
        await asyncio.wait([answer], timeout=self._settings.timeout)
        # A server failure may lose the answer.
        error = answer.result() if answer.done() else KafkaError(KafkaError._TIMED_OUT)
        if error is not None:
            self.uncommitted |= parts
        return error

    def request_for(self, parts: Iterable[Partition]) -> CommitRequest:
        request = []
        for part in parts:
            part.last_watermark = part.window.watermark
            metadata = part.window.metadata() if self._metadata_accepted else ""
            request.append((part, part.last_watermark, metadata))
        return request
