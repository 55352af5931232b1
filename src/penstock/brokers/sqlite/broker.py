"""Embedded broker in one SQLite file.

It has topics, groups, leases with fencing, delays, priorities and fairness between keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.brokers.sql import SqlQueue, SqlSubscription
from penstock.brokers.sqlite.queue import SqliteQueue
from penstock.ports import Clock, Delivery, Subscription
from penstock.stores.context import Context
from penstock.stores.sql import Tx
from penstock.stores.sqlite import Database

SCHEMA = """
CREATE TABLE topic(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, ordered INTEGER NOT NULL,
    max_depth INTEGER, retention REAL NOT NULL, paused TEXT,
  letters INTEGER NOT NULL DEFAULT 0);
CREATE TABLE grp(id INTEGER PRIMARY KEY, topic INTEGER NOT NULL, name TEXT NOT NULL, ready INTEGER
    NOT NULL DEFAULT 0, leased INTEGER NOT NULL DEFAULT 0,
  delayed INTEGER NOT NULL DEFAULT 0, UNIQUE(topic, name));
-- AUTOINCREMENT: with a reused number, a late settle could remove another message.
CREATE TABLE message(seq INTEGER PRIMARY KEY AUTOINCREMENT, topic INTEGER NOT NULL, id TEXT NOT
    NULL, key TEXT NOT NULL, prio INTEGER NOT NULL,
  headers TEXT, body BLOB NOT NULL, at REAL NOT NULL);
CREATE TABLE queue(grp INTEGER NOT NULL, seq INTEGER NOT NULL, prio INTEGER NOT NULL, key TEXT NOT
    NULL, state INTEGER NOT NULL,
  at REAL NOT NULL DEFAULT 0, owner TEXT, token INTEGER NOT NULL DEFAULT 0,
  deliveries INTEGER NOT NULL DEFAULT 0, PRIMARY KEY(grp, seq)) WITHOUT ROWID;
CREATE INDEX queue_ready ON queue(grp, prio, key, seq) WHERE state=0;
CREATE INDEX queue_leased ON queue(grp, at) WHERE state=1;
CREATE INDEX queue_delayed ON queue(grp, at) WHERE state=2;
-- One row per key with messages. `receive` picks keys, then their oldest messages. So its cost does
-- not depend on the depth.
CREATE TABLE keyq(grp INTEGER NOT NULL, prio INTEGER NOT NULL, key TEXT NOT NULL, ready INTEGER NOT
    NULL, next_at REAL NOT NULL, PRIMARY KEY(grp,
  prio, key)) WITHOUT ROWID;
CREATE INDEX keyq_next ON keyq(grp, prio, next_at) WHERE ready>0;
CREATE TABLE token(n INTEGER NOT NULL);
INSERT INTO token VALUES(0);
"""
POLL_INTERVAL = 0.1  # seconds between two checks for messages of other processes


class SqliteBroker(SqlQueue):
    """Implements ports.Broker."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self.db: Database = db
        super().__init__(db, clock, SCHEMA)

    def bind(self, tx: Tx) -> SqliteQueue:
        return SqliteQueue(tx, self)

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        return SqliteSubscription(self, topic, group, owner, lease)

    async def close(self) -> None:
        """Do nothing: the caller that opened the database closes it."""


class SqliteSubscription(SqlSubscription[SqliteBroker]):
    """Implements ports.Subscription. A commit of another process is found by polling."""

    _expects_more = False

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        b = self._queue
        until = b.clock.now() + wait
        while True:
            self._wake.clear()
            if self._expects_more or await b.db.read(
                lambda tx: b.bind(tx).has_work(self.topic, self.group)
            ):
                got = await b.db.write(
                    lambda tx: b.bind(tx).receive(
                        self.topic,
                        self.group,
                        limit,
                        owner=self.owner,
                        lease=self.lease,
                        per_key=per_key,
                    ),
                    durable=False,
                )
                # After a full batch there are probably more messages. Then the next call does not
                # check first.
                self._expects_more = len(got) == limit
                if got:
                    return got
            left = until - b.clock.now()
            if left <= 0:
                return []
            await self._pause(min(left, POLL_INTERVAL))


def open_broker(url: str, context: Context) -> SqliteBroker:
    return SqliteBroker(context.database(url), context.clock)
