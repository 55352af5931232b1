"""Who waits for a topic's messages, and how word of them gets around: in the process at once,
between processes by LISTEN and NOTIFY. No messages here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable

import psycopg

from penstock.errors import StoreUnavailable
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx

# seconds between two notifications of a process: at commit, all who notify wait in one line
EVERY = 0.05
# seconds before a listening connection that was lost is made again; until then work is found by
# asking
AGAIN = 5.0


class Listener:
    """`tell_in` and `owe` may be called on any thread; the rest on the loop's."""

    def __init__(self, db: PostgresStore) -> None:
        self._db = db
        self.channel = f"penstock_{zlib.crc32(db.namespace.encode()):08x}"
        self._waiting: dict[str, list[asyncio.Event]] = defaultdict(list)
        self._owed: set[str] = set()
        self._told = 0.0
        self._task: asyncio.Task[None] | None = None
        self._paying: asyncio.Task[None] | None = None

    # -- waiting -----------------------------------------------------------------------------------

    def waiter(self, topic: str) -> asyncio.Event:
        event = asyncio.Event()
        self._waiting[topic].append(event)
        return event

    def forget(self, topic: str, event: asyncio.Event) -> None:
        """Raises ValueError: it is forgotten already."""
        self._waiting[topic].remove(event)

    def start(self) -> None:
        """Somebody waits: listen, if we do not yet."""
        if not self._db.inline and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._listen(), name="postgres listener")

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(psycopg.Error, OSError):
                async with await psycopg.AsyncConnection.connect(
                    **self._db.address.options, autocommit=True
                ) as connection:
                    await connection.execute(f"LISTEN {self.channel}")
                    self._set(list(self._waiting))  # what was told while nobody listened
                    async for note in connection.notifies():
                        self._set([note.payload])
            await asyncio.sleep(AGAIN)

    def _set(self, topics: Iterable[str]) -> None:
        for topic in topics:
            for event in self._waiting.get(topic, ()):
                event.set()

    # -- telling -----------------------------------------------------------------------------------

    def tell_in(self, tx: Tx, topics: Iterable[str]) -> None:
        """The others hear of it with the commit; where we told something a moment ago, a little
        later.
        """
        if time.monotonic() < self._told + EVERY:
            self.owe(topics)
            return
        self._told = time.monotonic()
        for topic in topics:
            tx.execute("SELECT pg_notify(?, ?)", (self.channel, topic))

    def owe(self, topics: Iterable[str]) -> None:
        self._owed.update(topics)

    def wake(self, topics: Iterable[str]) -> None:
        """After a commit: our own receivers now, the others soon."""
        self._set(set(topics))
        if self._owed and not self._db.inline and (self._paying is None or self._paying.done()):
            self._paying = asyncio.create_task(self._pay(), name="postgres notifier")

    async def _pay(self) -> None:
        await asyncio.sleep(EVERY)
        owed, self._owed = self._owed, set()
        with contextlib.suppress(StoreUnavailable):  # whoever waits also asks
            await self._db.write(lambda tx: self._tell(tx, owed), durable=False, alone=False)

    def _tell(self, tx: Tx, topics: Iterable[str]) -> None:
        self._told = time.monotonic()
        for topic in topics:
            tx.execute("SELECT pg_notify(?, ?)", (self.channel, topic))

    async def close(self) -> None:
        for task in (self._task, self._paying):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._task = self._paying = None
