"""The rig of the broker conformance suite, which opens a broker, and helpers of the tests.

See `conformance`, `ordering`, `membership` and `outages` for the tests.
"""

from __future__ import annotations

import asyncio
import time
import unittest
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any, TypeVar

from penstock.errors import StoreUnavailable
from penstock.model import Ack
from penstock.ports import Broker, Capabilities, Delivery, Out, Published, Subscription, TopicSpec
from penstock.testing.proxy import Proxy

# Messages that are known to exist may take this many times `patience`.
EXPECTED_FACTOR = 50
# Seconds. It does not expire within a test, even on a slow machine.
LONG_LEASE = 30.0
T = TypeVar("T")
Test = Callable[[Any, Any], Awaitable[None]]
# Test name -> True if a broker with these capabilities promises this behaviour.
SENTENCES: dict[str, Callable[[Capabilities], bool]] = {}


def sentence(
    needs: Callable[[Capabilities], bool] = lambda caps: True,
    *,
    topics: Sequence[TopicSpec] = (TopicSpec(name="t"),),
    proxied: bool = False,
    limits: int = 1,
) -> Callable[[Test], Callable[[Any], None]]:
    """Turn `async def test(self, broker)` into a plain test method with a new broker.

    The broker has the topics `topics`. The test is skipped if the broker does not promise `needs`.
    With `proxied`, the broker is behind `self.proxy`. The time limit is `limits` times that of the
    rig, for tests in which servers start or clients time out.
    """

    def wrap(test: Test) -> Callable[[Any], None]:
        async def with_broker(self: BrokerRig, broker: Broker) -> None:
            try:
                if not needs(broker.caps):
                    raise unittest.SkipTest("not promised by this broker")
                if topics:
                    await broker.ensure(topics)
                await test(self, broker)
            finally:
                await self.shut(self._latest or broker)

        async def run(self: BrokerRig) -> None:
            async with asyncio.timeout(limits * self.limit):
                if not proxied:
                    await with_broker(self, await self.open())
                    return
                async with self.in_front() as self.proxy:
                    await with_broker(self, await self.open_through(self.proxy))

        def runner(self: BrokerRig) -> None:
            self._latest = None
            asyncio.run(run(self))

        runner.__name__, runner.__doc__ = test.__name__, test.__doc__
        runner.__qualname__ = f"BrokerConformance.{runner.__name__}"
        SENTENCES[runner.__name__] = needs
        return runner

    return wrap


def orders(caps: Capabilities) -> bool:
    return caps.order_per_key != "none"


def leases_expire(caps: Capabilities) -> bool:
    return caps.lease == "time"


def delays(caps: Capabilities) -> bool:
    return caps.delay != "none"


class BrokerRig:
    """Base class of a rig. Only `open` is required.

    Tests use real time. A broker with its own clock overrides `sleep` and `now`.
    """

    # Seconds of a lease whose end a test waits for. With real time it should be short, but longer
    # than a busy machine may stall.
    lease = LONG_LEASE
    # Seconds that one `receive` waits before a topic counts as empty. Messages that are known to
    # exist may take EXPECTED_FACTOR times as long.
    patience = 0.0
    slack = 0.5  # seconds by which a delay may end late
    limit = 120.0  # seconds that a test may take
    proxy: Proxy
    _latest: Broker | None = None

    async def open(self) -> Broker:
        """Open a broker that is empty, or has its own namespace."""
        raise NotImplementedError

    async def reopen(self, broker: Broker) -> Broker:
        """Open the same broker again after its process was killed without closing it.

        By default this returns the same connection.
        """
        return broker

    async def shut(self, broker: Broker) -> None:
        await broker.close()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def now(self) -> float:
        return time.time()

    # Hooks of a rig with its own server.

    async def stop_server(self) -> None:
        """Kill the server with SIGKILL and wait for its end. Confirmed data must be kept."""
        raise unittest.SkipTest("this rig cannot stop its server")

    async def start_server(self) -> None:
        """Start the server and wait until it is ready. Do nothing if it is running."""

    def in_front(self) -> Proxy:
        """Return a proxy in front of the server."""
        raise unittest.SkipTest("this rig has no server for a proxy")

    async def open_through(self, proxy: Proxy) -> Broker:
        """Open a broker as in `open`, with the proxy's address instead of the server's."""
        raise NotImplementedError

    def last_word(self, broker: Broker, message: bytes) -> bytes:
        """Return the last bytes that an already connected broker sends to publish a message.

        This is the message itself, or the request that commits it.
        """
        return message

    # -- helpers -----------------------------------------------------------------------------------

    async def crash(self, broker: Broker) -> Broker:
        self._latest = await self.reopen(broker)
        return self._latest

    async def lose(self, broker: Broker, sub: Subscription) -> Subscription:
        """End the leases of `sub` without settling, and return the subscription to continue with.

        The leases expire, or the broker is opened again after a crash.
        """
        if broker.caps.lease == "time":
            await self.sleep(self.lease + self.slack)
            return sub
        return self.sub(await self.crash(broker), owner="w2")

    async def eventually(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat `attempt` until the server is available, and return its result.

        The time limit of the test ends it.
        """
        while True:
            try:
                return await attempt()
            except StoreUnavailable:
                await asyncio.sleep(0.05)

    async def confirmed(self, broker: Broker, ids: Sequence[str]) -> None:
        """Publish each id again until the broker confirms it."""
        for i in ids:

            async def again(i: str = i) -> None:
                if list(await broker.publish([Out(topic="t", id=i, key="k", body=i.encode())])) != [
                    Published.OK
                ]:
                    raise StoreUnavailable("not yet")

            await self.eventually(again)

    async def finish(
        self, sub: Subscription, held: Sequence[Delivery], others: Sequence[str] = ()
    ) -> None:
        """Check the state after an outage.

        A settle that returned True is final. Messages whose settle was refused are redelivered, and
        so are `others`, possibly more than once.
        """
        settled: set[str] = set()
        for d in held:
            settled.update([d.id] if all(await self._acked(sub, [d])) else [])
        missing = {d.id for d in held} - settled | set(others)
        while missing:
            some = await self.eventually(lambda: sub.receive(10, max(self.patience, 0.1)))
            assert not settled & {d.id for d in some}, "a settled message was redelivered"
            missing -= {
                d.id for d, done in zip(some, await self._acked(sub, some), strict=True) if done
            }
        await self.sleep(self.lease + self.slack)
        assert {d.id for d in await self.left(sub)} <= set(others)

    async def _acked(self, sub: Subscription, deliveries: Sequence[Delivery]) -> Sequence[bool]:
        return await self.eventually(lambda: sub.settle([(d, Ack()) for d in deliveries]))

    def sub(
        self,
        broker: Broker,
        topic: str = "t",
        group: str = "main",
        owner: str = "w1",
        lease: float = LONG_LEASE,
    ) -> Subscription:
        """Subscribe. Tests that wait for the end of a lease pass `self.lease`."""
        return broker.subscribe(topic, group, owner=owner, lease=lease)

    async def some(self, sub: Subscription, limit: int, **more: Any) -> Sequence[Delivery]:
        """Receive messages that are known to exist, with a long timeout for a slow machine."""
        return await sub.receive(limit, EXPECTED_FACTOR * self.patience, **more)

    async def take(self, sub: Subscription, n: int) -> list[Delivery]:
        """Receive `n` messages that are known to exist. A shorter result is a broker error."""
        got: list[Delivery] = []
        while len(got) < n and (some := await self.some(sub, n - len(got))):
            got += some
        return got

    async def left(self, sub: Subscription) -> list[Delivery]:
        """Receive all further messages, until none arrives within `patience`."""
        got: list[Delivery] = []
        while some := await sub.receive(10, self.patience):
            got += some
        return got

    async def only(self, sub: Subscription, n: int) -> list[Delivery]:
        """Receive `n` messages and all others. The caller checks that there are no others."""
        return await self.take(sub, n) + await self.left(sub)

    async def before(self, due: float, sub: Subscription) -> list[Delivery]:
        """Check that no message arrives before `due`, unless the machine stalled until then.

        Return the messages that arrived.
        """
        early = await self.left(sub)
        assert not early or self.now() > due - 0.05, "a message arrived before it was due"
        return early

    async def fill(
        self, broker: Broker, ids: Sequence[str], *, topic: str = "t", **more: Any
    ) -> None:
        """Publish messages. The id `a1` has the key `a`, unless `more` sets another key."""
        batch = [
            Out(
                **{
                    "topic": topic,
                    "id": i,
                    "key": i.rstrip("0123456789") or "k",
                    "body": i.encode(),
                    **more,
                }
            )
            for i in ids
        ]
        answers = await broker.publish(batch)
        assert list(answers) == [Published.OK] * len(batch)

    async def fill_and_subscribe(
        self, broker: Broker, ids: Sequence[str], *, lease: float = LONG_LEASE
    ) -> Subscription:
        """Publish messages as `fill` does, and subscribe to their topic."""
        await self.fill(broker, ids)
        return self.sub(broker, lease=lease)

    async def counts(
        self,
        broker: Broker,
        ready: int,
        delayed: int,
        in_flight: int,
        *,
        topic: str = "t",
        group: str = "main",
        before: float = inf,
    ) -> None:
        """Check the counts if they are exact, and if the time is before `before`."""
        s = await broker.stats(topic, group)
        if s.exact and self.now() < before:
            assert (s.ready, s.delayed, s.in_flight) == (ready, delayed, in_flight)
