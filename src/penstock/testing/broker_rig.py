"""What the sentences of the broker suite stand on: the rig that opens a broker, and helpers. The
sentences are in conformance.py and outages.py.
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
from penstock.ports import Broker, Capabilities, Delivery, Out, Published, Subscription
from penstock.testing.proxy import Proxy

KNOWN = 50
OUTLASTS = (
    30.0  # seconds; a lease that does not lapse within a sentence, however late the machine is
)
T = TypeVar("T")
Test = Callable[[Any, Any], Awaitable[None]]
SENTENCES: dict[
    str, Callable[[Capabilities], bool]
] = {}  # by name: does a broker with these capabilities promise it


def sentence(
    needs: Callable[[Capabilities], bool] = lambda caps: True,
    *,
    proxied: bool = False,
    limits: int = 1,
) -> Callable[[Test], Callable[[Any], None]]:
    """An `async def test(self, broker)` becomes a plain test method with a broker of its own;
    skipped where `needs` is not promised. Proxied: the broker is behind `self.proxy`. Limits: how
    many of the rig's it may take, where servers start and clients give up in their own time.
    """

    def wrap(test: Test) -> Callable[[Any], None]:
        async def with_broker(self: BrokerRig, broker: Broker) -> None:
            try:
                if not needs(broker.caps):
                    raise unittest.SkipTest("not promised by this broker")
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


def lapses(caps: Capabilities) -> bool:
    return caps.lease == "time"


def delays(caps: Capabilities) -> bool:
    return caps.delay != "none"


class BrokerRig:
    """The rig: `open` is all that must be there. Real time by default; a broker on a clock of its
    own overrides `sleep` and `now`.
    """

    # seconds, where a sentence waits for its end: as short as can be where time is real, and longer
    # than the machine may stand still
    lease = OUTLASTS
    # how long one `receive` waits until it is said that nothing comes; what is known to be there
    # may take KNOWN times that
    patience = 0.0
    slack = 0.5  # how much later than asked a delay may end
    limit = 120.0  # seconds a sentence may take
    proxy: Proxy
    _latest: Broker | None = None

    async def open(self) -> Broker:
        """A broker that is empty, or in a namespace of its own."""
        raise NotImplementedError

    async def reopen(self, broker: Broker) -> Broker:
        """The same place after the death of whoever had it open: nothing was said goodbye to.
        Default: the same connection.
        """
        return broker

    async def shut(self, broker: Broker) -> None:
        await broker.close()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def now(self) -> float:
        return time.time()

    # What a rig with a server of its own may offer as well.

    async def stop_server(self) -> None:
        """Gone when it returns, and without a goodbye (SIGKILL); what it had confirmed is still
        there when it comes back.
        """
        raise unittest.SkipTest("this rig cannot stop its server")

    async def start_server(self) -> None:
        """Ready when it returns; nothing to do where it runs."""

    def in_front(self) -> Proxy:
        """A proxy in front of the server."""
        raise unittest.SkipTest("this rig has no server that a proxy could stand in front of")

    async def open_through(self, proxy: Proxy) -> Broker:
        """As `open`, with the proxy's address in place of the server's."""
        raise NotImplementedError

    def last_word(self, broker: Broker, message: bytes) -> bytes:
        """What is said last on the wire when something is published, once the broker is warm: the
        message itself, or what commits it.
        """
        return message

    # -- helpers -----------------------------------------------------------------------------------

    async def crash(self, broker: Broker) -> Broker:
        self._latest = await self.reopen(broker)
        return self._latest

    async def lose(self, broker: Broker, sub: Subscription) -> Subscription:
        """Whoever held the subscription is gone, and its leases with it. The one that goes on."""
        if broker.caps.lease == "time":
            await self.sleep(self.lease + self.slack)
            return sub
        return self.sub(await self.crash(broker), owner="w2")

    async def eventually(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What comes of it once the server can be had; the sentence's limit ends it."""
        while True:
            try:
                return await attempt()
            except StoreUnavailable:
                await asyncio.sleep(0.05)

    async def confirmed(self, broker: Broker, ids: Sequence[str]) -> None:
        """Published again with the same id until the broker says ok."""
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
        """After an outage: a settle that says True is true, what it refuses comes again, and so do
        `others`, perhaps more than once.
        """
        settled: set[str] = set()
        for d in held:
            settled.update([d.id] if all(await self._acked(sub, [d])) else [])
        missing = {d.id for d in held} - settled | set(others)
        while missing:
            some = await self.eventually(lambda: sub.receive(10, max(self.patience, 0.1)))
            assert not settled & {d.id for d in some}, "what was settled came again"
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
        lease: float = OUTLASTS,
    ) -> Subscription:
        """Whoever waits for the end of a lease asks for `self.lease`."""
        return broker.subscribe(topic, group, owner=owner, lease=lease)

    async def some(self, sub: Subscription, limit: int, **more: Any) -> Sequence[Delivery]:
        """Of those that are known to be there, however loaded the machine is."""
        return await sub.receive(limit, KNOWN * self.patience, **more)

    async def take(self, sub: Subscription, n: int) -> list[Delivery]:
        """`n` that are known to be there; fewer is a fault."""
        got: list[Delivery] = []
        while len(got) < n and (some := await self.some(sub, n - len(got))):
            got += some
        return got

    async def left(self, sub: Subscription) -> list[Delivery]:
        """What else comes, until nothing does for `patience`."""
        got: list[Delivery] = []
        while some := await sub.receive(10, self.patience):
            got += some
        return got

    async def only(self, sub: Subscription, n: int) -> list[Delivery]:
        """`n`, and nothing more."""
        return await self.take(sub, n) + await self.left(sub)

    async def before(self, due: float, sub: Subscription) -> list[Delivery]:
        """What comes although it is to wait until `due`: a fault, unless the machine stood still
        until then.
        """
        early = await self.left(sub)
        assert not early or self.now() > due - 0.05, "it came before its time"
        return early

    async def fill(
        self, broker: Broker, ids: Sequence[str], *, topic: str = "t", **more: Any
    ) -> None:
        """Ids like `a1` belong to key `a`, unless told otherwise."""
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
        """Before that time, where some of it is to change then."""
        s = await broker.stats(topic, group)
        if s.exact and self.now() < before:
            assert (s.ready, s.delayed, s.in_flight) == (ready, delayed, in_flight)
