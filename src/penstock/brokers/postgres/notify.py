"""Wakes receivers that wait for messages of a topic: by events in this process, else by NOTIFY."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable, Iterable

import psycopg

from penstock.errors import StoreUnavailable
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx

# Seconds between two notifications of a process. PostgreSQL serialises commits that notify.
NOTIFY_INTERVAL = 0.05
# Seconds before a lost LISTEN connection is opened again. Until then, receivers poll.
RECONNECT_DELAY = 5.0


class Notifier:
    """Listens for and sends notifications.

    `notify_in` and `defer_notification` may be called on any thread, the other methods on the event
    loop's thread.
    """

    def __init__(
        self,
        db: PostgresStore,
        topics: Iterable[str],
        wake: Callable[[Iterable[str]], None],
    ) -> None:
        """`wake` wakes the receivers of this process. `topics` are those with receivers."""
        self._db, self._topics, self._wake = db, topics, wake
        self.channel = f"penstock_{zlib.crc32(db.namespace.encode()):08x}"
        self._deferred: set[str] = set()
        self._last_notified = 0.0
        self._task: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None

    # -- waiting -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start listening, if this process does not listen yet. Called before a receiver waits."""
        if not self._db.inline and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._listen(), name="postgres listener")

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(psycopg.Error, OSError):
                async with await psycopg.AsyncConnection.connect(
                    **self._db.address.options, autocommit=True
                ) as connection:
                    await connection.execute(f"LISTEN {self.channel}")
                    # Notifications sent before LISTEN were missed.
                    self._wake(list(self._topics))
                    async for notification in connection.notifies():
                        self._wake([notification.payload])
            await asyncio.sleep(RECONNECT_DELAY)

    # -- notifying ---------------------------------------------------------------------------------

    def notify_in(self, tx: Tx, topics: Iterable[str]) -> None:
        """Notify other processes at commit.

        If this process notified less than 50 ms ago, the notification is deferred.
        """
        if time.monotonic() < self._last_notified + NOTIFY_INTERVAL:
            self.defer_notification(topics)
        else:
            self._notify(tx, topics)

    def defer_notification(self, topics: Iterable[str]) -> None:
        self._deferred.update(topics)

    def send_deferred(self) -> None:
        """Send deferred notifications after a short time."""
        if (
            self._deferred
            and not self._db.inline
            and (self._sending is None or self._sending.done())
        ):
            self._sending = asyncio.create_task(self._send_deferred(), name="postgres notifier")

    async def _send_deferred(self) -> None:
        await asyncio.sleep(NOTIFY_INTERVAL)
        topics, self._deferred = self._deferred, set()
        with contextlib.suppress(StoreUnavailable):  # receivers also poll
            await self._db.write(lambda tx: self._notify(tx, topics), durable=False, alone=False)

    def _notify(self, tx: Tx, topics: Iterable[str]) -> None:
        self._last_notified = time.monotonic()
        for topic in topics:
            tx.execute("SELECT pg_notify(?, ?)", (self.channel, topic))

    async def close(self) -> None:
        for task in (self._task, self._sending):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._task = self._sending = None
