"""Redis Streams broker: leases, fencing, delays, priorities, order per key and fairness.

Each call is one Lua script. See `scripts` for the Lua code.

`ok` is as durable as the server's `appendfsync`. With `always` no message is lost. With `everysec`
a kill or a power cut may lose the last one or two seconds. The reason is that Redis answers before
it writes while a sync is running.

A lease is the idle time of an entry in the group's pending list, by the server's clock. All members
of a group must use the same lease.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from redis.exceptions import OutOfMemoryError, RedisError

from penstock.brokers.dead_copies import dead_headers
from penstock.brokers.redis import scripts as lua
from penstock.errors import PenstockError
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import (
    Capabilities,
    Clock,
    Delivery,
    Out,
    Published,
    Stats,
    Subscription,
    TopicSpec,
)
from penstock.rules.priority import CLASSES, class_of, shares
from penstock.stores.context import Context
from penstock.stores.redis import Argument, Layout, Lost, Server

VERSION = 1  # of the keys

# Milliseconds of the start of 2020. Positions count from it, so that they fit into 63 bits until
# 2054.
EPOCH = 1_577_836_800_000
# Seconds between two polls of a waiting `receive`. A publish wakes it earlier, but a message that
# another worker releases does not.
POLL_INTERVAL = 1.0
# Script calls of one `stats`. Each sorts up to a thousand unread entries of each priority class. If
# unread entries remain after them, the figures are not exact.
MAX_SORT_ROUNDS = 20
CAPS = Capabilities(
    order_per_key="emulated",
    delay="emulated",
    replay=True,
    bounded=True,
    counts_deliveries=True,
    hold_keys=True,
    exact_stats=True,
)


def position(priority: int, entry: bytes) -> int:
    """Combine an entry id (milliseconds and a number) and the priority class in one integer."""
    ms, _, seq = entry.partition(b"-")
    return ((int(ms) - EPOCH) << 23) | (int(seq) << 2) | priority


def entry_of(position: int) -> tuple[str, str]:
    """Return the priority class and the entry id of a position."""
    return CLASSES[position & 3], f"{(position >> 23) + EPOCH}-{(position >> 2) & 0x1FFFFF}"


def base_of(prefix: str, topic: str) -> str:
    """Return the key prefix of a topic.

    A topic and its dead letters have the same hash tag, so that one script may write to both.
    """
    root = topic
    while root.endswith(".dead"):
        root = root.removesuffix(".dead")
    name = f"{prefix}.{root}".replace("{", "_").replace("}", "_")
    return "{" + name + "}" + topic[len(root) :]


def layout_of(namespace: str) -> Layout:
    """Return the version of the broker's keys. `scripts` describes the keys."""
    topics = ("requests", "pages", "records")
    first = tuple(base_of(namespace, topic) for topic in topics)
    return Layout(namespace, "broker", VERSION, first)


def _headers(raw: bytes) -> dict[str, str]:
    with suppress(msgspec.MsgspecError, UnicodeError):  # written by another tool
        return msgspec.json.decode(raw or b"{}", type=dict[str, str])
    return {}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


class RedisBroker:
    """Implements ports.Broker."""

    caps = CAPS

    def __init__(self, server: Server, prefix: str, clock: Clock) -> None:
        self.server, self.prefix, self.clock = server, prefix, clock

    def base(self, topic: str) -> str:
        return base_of(self.prefix, topic)

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        await self.server.check()
        drift = []
        for t in topology:
            depth: Argument = "" if t.max_depth is None else t.max_depth
            found = await self.server.run(
                lua.ENSURE,
                [self.base(t.name)],
                int(t.ordered),
                depth,
                int(t.retention * 1000),
                *t.groups,
            )
            if (found == b"1") != t.ordered:
                drift.append(
                    f"topic {t.name}: ordered is {found == b'1'} on the server and {t.ordered}"
                    " in the configuration; use another name to change that"
                )
        return drift

    # -- publishing --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        if not batch:
            return []
        indexes: dict[str, list[int]] = defaultdict(list)
        args: dict[str, list[Argument]] = defaultdict(list)
        answers = [Published.FAILED] * len(batch)
        for i, m in enumerate(batch):
            try:
                id_, key = m.id.encode(), m.key.encode()
                headers = msgspec.json.encode(m.headers) if m.headers else b""
            except UnicodeEncodeError:  # a lone surrogate cannot be stored
                continue
            indexes[m.topic].append(i)
            due: Argument = int(m.not_before * 1000) if m.not_before else b""
            args[m.topic] += (
                class_of(m.priority),
                id_,
                key,
                headers,
                due,
                m.body,
            )
        calls = [(lua.PUBLISH, [self.base(topic)], args[topic]) for topic in indexes]
        try:
            replies = await self.server.run_all(calls)
        except Lost:
            return [Published.UNKNOWN] * len(batch)
        for topic_indexes, reply in zip(indexes.values(), replies, strict=True):
            if isinstance(reply, OutOfMemoryError):  # raised before any message was written
                reply = b"f" * len(topic_indexes)
            elif isinstance(reply, RedisError):
                if len(replies) == 1:
                    raise self.server.explained(reply)
                continue
            for i, code in zip(topic_indexes, reply, strict=True):
                answers[i] = Published.OK if code == ord("o") else Published.FULL
        return answers

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        return RedisSubscription(self, topic, group, owner, lease)

    # -- stats, peek, purge and replay -------------------------------------------------------------

    async def stats(self, topic: str, group: str) -> Stats:
        # Whether an entry is delayed is known only after it was read and sorted. Each call of the
        # script sorts up to a thousand entries of each priority class.
        for _ in range(MAX_SORT_ROUNDS):
            ready, delayed, in_flight, dead, age, exact = await self.server.run(
                lua.STATS, [self.base(topic)], group
            )
            if exact:
                break
        return Stats(
            ready=ready,
            delayed=delayed,
            in_flight=in_flight,
            dead=dead,
            oldest_age=None if age < 0 else age / 1000,
            exact=bool(exact),
        )

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        flat = await self.server.run(lua.PEEK, [self.base(topic)], limit)
        rows = sorted(
            (flat[i : i + 7] for i in range(0, len(flat), 7)),
            key=lambda row: position(row[0], row[1]),
        )
        return [
            Out(
                topic=topic,
                id=_text(id_),
                key=_text(key),
                body=body,
                headers=_headers(headers),
                priority=priority,
                not_before=due / 1000,
            )
            for priority, _, id_, key, headers, body, due in rows[:limit]
        ]

    async def purge(self, topic: str) -> int:
        """Delete the waiting messages and the history. Messages in flight are kept."""
        removed: dict[bytes, int] = defaultdict(int)
        done = 0
        while not done:
            done, *counts = await self.server.run(lua.PURGE, [self.base(topic)])
            for group, n in zip(counts[::2], counts[1::2], strict=True):
                removed[group] += n
        return max(removed.values(), default=0)

    async def replay(self, topic: str, group: str, *, since: float) -> int:
        added = 0
        for name in CLASSES:
            start = f"{int(since * 1000)}-0"
            while start:
                n, following = await self.server.run(
                    lua.REPLAY, [self.base(topic)], group, name, start
                )
                added, start = added + n, following.decode()
        return added

    async def close(self) -> None:
        await self.server.close()


class RedisSubscription:
    """Implements ports.Subscription."""

    def __init__(
        self, broker: RedisBroker, topic: str, group: str, owner: str, lease: float
    ) -> None:
        self.broker, self.topic, self.group, self.owner, self.lease = (
            broker,
            topic,
            group,
            owner,
            max(1, int(lease * 1000)),
        )
        self._server, self._keys = broker.server, [broker.base(topic)]
        self._streams = [f"{broker.base(topic)}:{name}" for name in CLASSES]
        # deliveries so far. The number decides the next shares of the priority classes.
        self._delivered_count = 0

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        clock = self.broker.clock
        until = clock.now() + wait
        while limit > 0:
            reply = await self._server.run(
                lua.RECEIVE,
                self._keys,
                self.group,
                self.owner,
                self.lease,
                limit,
                min(per_key or limit, limit),
                *shares(self._delivered_count, limit),
            )
            if reply[0]:
                return self._deliveries(reply)
            left = until - clock.now()
            if left <= 0:
                break
            pause = int(min(left, reply[1] / 1000, POLL_INTERVAL) * 1000)
            if pause > 0:  # a publish ends the wait early
                await self._server.command(
                    "XREAD", "COUNT", 1, "BLOCK", pause, "STREAMS", *self._streams, *reply[2:]
                )
        return []

    def _deliveries(self, reply: list[Any]) -> list[Delivery]:
        token = reply[0]
        got = [
            Delivery(
                topic=self.topic,
                group=self.group,
                id=_text(id_),
                key=_text(key),
                body=body,
                headers=_headers(headers),
                position=position(priority, entry),
                token=token,
                deliveries=count,
                priority=priority,
            )
            for priority, entry, count, id_, key, headers, body in zip(
                *(reply[i::7] for i in range(2, 9)), strict=True
            )
        ]
        self._delivered_count += len(got)
        return got

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        if not items:
            return []
        args: list[Argument] = []
        for d, outcome in items:
            match outcome:
                case Ack():
                    verb, more = "ack", ""
                case Retry(delay=delay):
                    verb, more = "retry", str(int(delay * 1000))
                case Release():
                    verb, more = "release", ""
                case Dead(reason=reason):
                    verb, more = "dead", msgspec.json.encode(dead_headers(d, reason)).decode()
            args += (*entry_of(d.position), d.token, verb, d.deliveries, more)
        reply: bytes = await self._server.run(lua.SETTLE, self._keys, self.group, *args)
        return [code == ord("1") for code in reply]

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        """Let the leases end `seconds` from now, at most one whole lease from now.

        A lease ends after an idle time of one lease, so it cannot end later. The result is False
        for each delivery whose lease was lost.
        """
        if not deliveries:
            return []
        args = [value for d in deliveries for value in (*entry_of(d.position), d.token)]
        idle = max(0, self.lease - int(seconds * 1000))
        reply: bytes = await self._server.run(
            lua.EXTEND, self._keys, self.group, self.owner, idle, *args
        )
        return [code == ord("1") for code in reply]

    async def hold(self, until: Mapping[str, float]) -> None:
        args = [value for key, at in until.items() for value in (key, int(at * 1_000_000))]
        if args:
            await self._server.run(lua.HOLD, self._keys, self.group, *args)

    async def close(self) -> None:
        with suppress(PenstockError):  # a later `settle` removes consumers that are idle for 1 h
            await self._server.run(lua.LEAVE, self._keys, self.group, self.owner)


def open_broker(url: str, context: Context) -> RedisBroker:
    """Create the broker without I/O. `ensure` sends the first request.

    Broker keys never expire, so only a server that evicts keys without an expiry is refused.
    """
    namespace = context.config.namespace or "penstock"
    server = Server(url, evictable=False, layout=layout_of(namespace))
    return RedisBroker(server, namespace, context.clock)
