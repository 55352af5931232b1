"""Broker in PostgreSQL.

It has topics, groups, leases with fencing, delays, priorities and fairness between keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.brokers.postgres import statements as sql
from penstock.brokers.postgres.notify import Notifier
from penstock.brokers.postgres.queue import PostgresQueue, Received
from penstock.brokers.sql import SqlQueue, SqlSubscription
from penstock.errors import StoreUnavailable
from penstock.ports import Clock, Delivery, Out, Published, Subscription
from penstock.stores.context import Context
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx

POLL_INTERVAL = 1.0  # longest wait in seconds without a check: a notification may be lost
# Seconds before the next attempt if other processes had locked all messages.
CONTENTION_DELAY = 0.02


class PostgresBroker(SqlQueue):
    """Implements ports.Broker."""

    def __init__(self, db: PostgresStore, clock: Clock) -> None:
        self.db: PostgresStore = db
        super().__init__(db, clock, sql.SCHEMA)
        self.notifier = Notifier(db, self.waiters, super().wake)

    def bind(self, tx: Tx) -> PostgresQueue:
        return PostgresQueue(tx, self, self.notifier)

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        if not batch:
            return []
        begun = False

        def work(tx: Tx) -> list[Published]:
            nonlocal begun
            begun = True
            return self.bind(tx).publish(batch)

        try:
            answers = await self.db.write(work)
        except StoreUnavailable:
            if not begun:  # no statement was sent
                raise
            # The lost reply may be the reply to COMMIT.
            return [Published.UNKNOWN] * len(batch)
        self.wake(m.topic for m in batch)
        return answers

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        return PostgresSubscription(self, topic, group, owner, lease)

    def wake(self, topics: Iterable[str]) -> None:
        """Wake receivers here and notify other processes. Call it after a commit, on the loop."""
        super().wake(topics)
        self.notifier.send_deferred()

    async def close(self) -> None:
        """Stop listening. The caller that opened the store closes it."""
        await self.notifier.close()


class PostgresSubscription(SqlSubscription[PostgresBroker]):
    """Implements ports.Subscription. A commit of another process sends a notification."""

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        b = self._queue
        until = b.clock.now() + wait

        def work(tx: Tx) -> Received:
            return b.bind(tx).receive(
                self.topic,
                self.group,
                limit,
                owner=self.owner,
                lease=self.lease,
                per_key=per_key,
            )

        while True:
            self._wake.clear()
            got = await b.db.write(work, durable=False, alone=False)
            if got.contended:  # the fleet's lock waits for the processes that hold row locks
                got = await b.db.write(work, durable=False)
            if got.deliveries:
                return got.deliveries
            now = b.clock.now()
            if now >= until:
                return []
            b.notifier.start()
            pause = (
                CONTENTION_DELAY
                if got.contended
                else POLL_INTERVAL
                if got.next_at is None
                else max(0.01, got.next_at - now)
            )
            await self._pause(min(until - now, POLL_INTERVAL, pause))


def open_broker(url: str, context: Context) -> PostgresBroker:
    store: Any = context.store(url)
    return PostgresBroker(store, context.clock)
