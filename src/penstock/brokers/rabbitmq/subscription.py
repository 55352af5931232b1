"""Consuming from RabbitMQ: a bounded prefetch that is shared out fairly by class and key, given
back when nobody asks, and settled in any order.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from aiormq import exceptions as amqp
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from penstock.brokers.rabbitmq.connection import ANSWER, TROUBLE, Link
from penstock.brokers.rabbitmq.message import Held, open_letter
from penstock.brokers.rabbitmq.publisher import Letter, Publisher
from penstock.brokers.rabbitmq.topology import CLASSES, DEAD, Names, level_for, ranks
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Clock, Delivery, Out, Published
from penstock.rules.priority import TURNS

# messages of a class that are looked at beyond what is asked for, so that a key with many does not
# hide the others
AHEAD = 256
AHEAD_BYTES = 32 << 20  # and not more than this much of them
# seconds that a message may lie here unasked for while others could have it; longer after each time
# that it came back
LINGER = 0.2
LONGEST = 30.0  # the same where nobody else is there
QUIET = 0.003  # seconds without an arrival after which a burst is over
BURST = 0.2  # seconds a burst is waited for at most
MAX_PREFETCH = 65535  # by the protocol
STUBBORN = 1.0  # seconds until a message that could not be passed on is passed on again


class Home(Protocol):
    """What a subscription needs of the broker that it belongs to."""

    consuming: Link
    publisher: Publisher
    names: Names
    clock: Clock
    looks: dict[tuple[str, str], int]
    subscriptions: set[RabbitSubscription]

    def letter(
        self, m: Out, *, group: str | None = None, count: int = 0, at: str = ""
    ) -> Letter: ...

    async def declared(self, topic: str, group: str) -> None: ...

    def forget(self, topic: str) -> None: ...


class RabbitSubscription:
    """Implements ports.Subscription. A lease lasts as long as the channel it came through: `token`
    names that channel.
    """

    def __init__(self, broker: Home, topic: str, group: str, owner: str) -> None:
        self.broker, self.topic, self.group, self.owner = broker, topic, group, owner
        self.ranks = ranks(topic)
        self._gate = asyncio.Lock()  # opening and standing down exclude each other
        self._closed = False
        self._asking = 0
        self._asked = 0.0  # when it last ended
        self._ahead = AHEAD
        self._places = 0
        self._linger = LINGER
        self._watch: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._forget()

    def _forget(self) -> None:
        """A channel that ended took everything with it."""
        self._epoch = secrets.randbits(30) + 1
        self._channel: Channel | None = None
        self._consumers: dict[int, list[tuple[str, int]]] = {
            rank: [] for rank in self.ranks
        }  # (tag, prefetch)
        self._ready: dict[int, OrderedDict[str, deque[Held]]] = {
            rank: OrderedDict() for rank in self.ranks
        }
        self._buffered = 0
        self._bytes = 0
        self._soon: dict[int, tuple[Held, asyncio.TimerHandle]] = {}
        self._out: dict[int, Held] = {}  # handed out, by position
        self._busy = dict.fromkeys(self.ranks, 0)  # of each class
        self._tags: dict[
            int, None
        ] = {}  # everything unsettled on the channel, in the order of arrival
        self._wake = asyncio.Event()
        self._fresh = False
        self._written = self._known = 0
        self._syncing = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return (
            self._channel is not None and not self._channel.is_closed and self.broker.consuming.up
        )

    @property
    def buffered(self) -> int:
        return self._buffered + len(self._soon)

    @property
    def in_flight(self) -> int:
        return len(self._out) if self.alive else 0

    # -- receiving ---------------------------------------------------------------------------------

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        if limit <= 0:
            return []
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        self._asking += 1
        try:
            while True:
                await self._open(limit)
                self._wake.clear()
                if self._buffered and (self._fresh or self._buffered < limit):
                    await self._gather(limit)
                if not self.alive:
                    raise StoreUnavailable(
                        f"the connection to RabbitMQ at {self.broker.consuming.address.place} was lost"
                    )
                if got := self._pick(limit, per_key or limit):
                    return got
                left = until - loop.time()
                if left <= 0:
                    return []
                try:
                    async with asyncio.timeout(left):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            self._asking -= 1
            self._asked = loop.time()

    async def _gather(self, limit: int) -> None:
        """A burst is arriving: a full batch, and a fair one, is worth some milliseconds."""
        loop = asyncio.get_running_loop()
        until, seen = loop.time() + (BURST if self._fresh else QUIET), -1
        while (
            self._buffered != seen
            and (self._fresh or self._buffered < limit)
            and loop.time() < until
        ):
            seen = self._buffered
            await asyncio.sleep(QUIET)
        self._fresh = False

    async def _open(self, limit: int) -> None:
        """See to it that the server may send what is asked for, and somewhat ahead of that."""
        if self.alive and all(
            self._wanted(rank, limit) <= self._granted(rank) for rank in self.ranks
        ):
            return
        async with self._gate:
            if self._closed:
                raise StoreUnavailable("this subscription was closed")
            if not self.alive:
                await self._start()
            channel = self._channel
            assert channel is not None
            with self.broker.consuming.outage():
                async with asyncio.timeout(ANSWER):
                    for rank in self.ranks:
                        missing = self._wanted(rank, limit) - self._granted(rank)
                        if missing > 0:
                            try:
                                await self._consume(
                                    channel, rank, max(8, 1 << (missing - 1).bit_length())
                                )
                            except amqp.ChannelNotFoundEntity:
                                self.broker.forget(self.topic)
                                raise
            if self._watch is None:
                self._watch = asyncio.get_running_loop().call_later(
                    self._linger / 2, self._spawn, self._look_after
                )

    def _wanted(self, rank: int, limit: int) -> int:
        return self._busy[rank] + max(limit + min(limit, self._ahead), self._ahead)

    def _granted(self, rank: int) -> int:
        return sum(prefetch for _, prefetch in self._consumers[rank])

    async def _start(self) -> None:
        self._drop_timers()
        self._forget()
        await self.broker.declared(self.topic, self.group)
        channel = await self.broker.consuming.channel()
        wake = self._wake
        channel.closing.add_done_callback(lambda _: wake.set())
        channel.on_consumer_cancel_callbacks.add(partial(self._cancelled, channel))
        self._channel = channel

    async def _consume(self, channel: Channel, rank: int, prefetch: int) -> None:
        """More room is one more consumer: the prefetch of one that runs cannot be changed."""
        queue = self.broker.names.queue(self.topic, self.group, rank)
        tag = f"{self.owner}.{CLASSES[rank]}.{secrets.token_hex(4)}"
        self._fresh = True
        async with self._syncing:  # nobody else may set another prefetch between these two
            await channel.basic_qos(prefetch_count=min(prefetch, MAX_PREFETCH))
            await channel.basic_consume(
                queue, partial(self._arrived, self._epoch, rank), consumer_tag=tag
            )
        self._consumers[rank].append((tag, prefetch))

    def _cancelled(self, channel: Channel, _: Any) -> None:
        """The server ended a consumer (its queue was deleted, or moved): begin again with a new
        channel.
        """
        self._spawn(partial(self._hang_up, channel))

    async def _hang_up(self, channel: Channel) -> None:
        with self.broker.consuming.outage():
            await channel.close()

    async def _arrived(self, epoch: int, rank: int, message: DeliveredMessage) -> None:
        if epoch != self._epoch:
            return
        held = open_letter(message, rank)
        self._tags[held.tag] = None
        if looks := self.broker.looks.pop((self.topic, held.id), 0):
            held.deliveries = max(1, held.deliveries - looks)
        now = self.broker.clock.now()
        if not held.id:  # another program's: it gets an id of its own, once, and keeps it
            held.id = secrets.token_hex(16)
            self._spawn(partial(self._pass_on, held))
        elif held.due > now and level_for(held.due - now) is not None:
            self._spawn(partial(self._pass_on, held))
        elif held.due > now:
            timer = asyncio.get_running_loop().call_later(held.due - now, self._is_due, held.tag)
            self._soon[held.tag] = (held, timer)
        else:
            self._is_ready(held)

    def _is_due(self, tag: int) -> None:
        held, _ = self._soon.pop(tag)
        self._is_ready(held)

    def _is_ready(self, held: Held) -> None:
        held.arrived = asyncio.get_running_loop().time()
        self._ready[held.rank].setdefault(held.key, deque()).append(held)
        self._buffered += 1
        self._bytes += len(held.body)
        if self._bytes > AHEAD_BYTES and self._ahead:
            self._ahead = 0
            self._spawn(self._hold_back)
        self._wake.set()

    async def _pass_on(self, held: Held) -> None:
        """Not for now: once more into the ladder, or out again with an id; the copy first, then the
        ack.
        """
        epoch, letter = self._epoch, self._letter(held, due=held.due, count=held.deliveries - 1)
        while epoch == self._epoch and self.alive:
            try:
                if (await self.broker.publisher.send([letter]))[0] is Published.OK:
                    await self._ack([held.tag])
                    return
            except StoreUnavailable:
                pass
            await asyncio.sleep(STUBBORN)

    def _pick(self, limit: int, per_key: int) -> list[Delivery]:
        """By class in turns of 16 : 4 : 1, by key in turns, a key's own in order."""
        picked: list[Held] = []
        taken: dict[str, int] = defaultdict(int)
        dry: set[int] = set()
        while len(picked) < limit and len(dry) < len(self.ranks):
            turn = TURNS[self._places % len(TURNS)]
            for rank in (turn, *self.ranks):
                if rank in self._ready and rank not in dry:
                    held = self._next(rank, taken, per_key)
                    if held is not None:
                        picked.append(held)
                        break
                    dry.add(rank)
            self._places += 1
        for held in picked:
            self._out[self._position(held)] = held
            self._busy[held.rank] += 1
            self._bytes -= len(held.body)
        self._buffered -= len(picked)
        if picked and not self._buffered:  # all of it was wanted: look further ahead again
            self._ahead = min(AHEAD, max(8, self._ahead * 2))
            self._linger = LINGER
        return [self._delivery(held) for held in picked]

    def _next(self, rank: int, taken: dict[str, int], per_key: int) -> Held | None:
        ready = self._ready[rank]
        for key in ready:
            if taken[key] < per_key:
                waiting = ready[key]
                held = waiting.popleft()
                if waiting:
                    ready.move_to_end(key)
                else:
                    del ready[key]
                taken[key] += 1
                return held
        return None

    def _position(self, held: Held) -> int:
        return self._epoch << 32 | held.tag

    def _delivery(self, held: Held) -> Delivery:
        return Delivery(
            topic=self.topic, group=self.group, id=held.id, key=held.key, body=held.body, headers=held.headers,
            position=self._position(held), token=self._epoch, deliveries=held.deliveries,
        )  # fmt: skip

    # -- giving back -------------------------------------------------------------------------------

    async def _hold_back(self) -> None:
        """What lies here is large: no more of it until it is asked for."""
        async with self._gate:
            if self.alive and self._channel is not None:
                await self._cancel(self._channel)

    async def _cancel(self, channel: Channel) -> None:
        with self.broker.consuming.outage():
            async with asyncio.timeout(ANSWER):
                for consumers in self._consumers.values():
                    while consumers:
                        await channel.basic_cancel(consumers[-1][0])
                        consumers.pop()

    async def _look_after(self) -> None:
        """What lies here unasked for goes to others, if there are any; if not, it is as well off
        here, and not counted once more.
        """
        self._watch = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        resting = not self._asking and now >= self._asked + self._linger
        stale = (
            min(
                (keys[key][0].arrived for keys in self._ready.values() for key in keys), default=now
            )
            < now - self._linger
        )
        if (resting and now > self._asked + LONGEST) or (
            (resting or stale) and await self._others()
        ):
            await self._stand_down()
            if not self._ahead:
                self._linger = min(LONGEST, self._linger * 2)
        if self.alive and any(self._consumers.values()) and not self._closed:
            self._watch = loop.call_later(self._linger / 2, self._spawn, self._look_after)

    async def _others(self) -> bool:
        """Does anybody else consume these queues?"""
        if not self.alive or self._channel is None:
            return True
        with self.broker.consuming.outage():
            async with asyncio.timeout(ANSWER):
                for rank in self.ranks:
                    found = await self._channel.queue_declare(
                        self.broker.names.queue(self.topic, self.group, rank), passive=True
                    )
                    if (found.consumer_count or 0) > len(self._consumers[rank]):
                        return True
        return False

    async def _stand_down(self) -> None:
        """It goes back to where it was in the queue; up to RabbitMQ 4.2 the server counts that as a
        delivery.
        """
        async with self._gate:
            channel = self._channel
            if not self.alive or channel is None:
                return
            await self._cancel(channel)
            with self.broker.consuming.outage():
                async with asyncio.timeout(ANSWER):
                    back = [
                        held.tag
                        for keys in self._ready.values()
                        for waiting in keys.values()
                        for held in waiting
                    ]
                    back += self._soon
                    self._drop_timers()
                    for keys in self._ready.values():
                        keys.clear()
                    self._buffered = self._bytes = 0
                    for tag in sorted(back):
                        await channel.basic_nack(tag, requeue=True, wait=False)
                    # not before the last of them is sent: an ack of all up to a tag must never
                    # reach one that goes back
                    for tag in back:
                        del self._tags[tag]
            if back:
                self._ahead = self._ahead // 2 if self._ahead > 8 else 0
            self._wake.set()

    def _drop_timers(self) -> None:
        for _, timer in self._soon.values():
            timer.cancel()
        self._soon.clear()

    # -- settling ----------------------------------------------------------------------------------

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        """Copies first (retry, release, dead letter), then the acks; where a copy is not confirmed
        nothing is acked, and all of it stays ours.
        """
        answers: list[bool] = []
        mine: list[tuple[Delivery, Held]] = []
        copies: list[Letter] = []
        for delivery, outcome in items:
            held = self._out.pop(delivery.position, None) if self.holds(delivery) else None
            answers.append(held is not None)
            if held is not None:
                mine.append((delivery, held))
                if not isinstance(outcome, Ack):
                    copies.append(self._copy(delivery, held, outcome))
        if not mine:
            return answers
        epoch = self._epoch
        try:
            if copies:
                await self._send(copies)
            await self._ack([held.tag for _, held in mine])
        except BaseException:
            if epoch == self._epoch and self.alive:
                self._out.update({d.position: held for d, held in mine})
            raise
        if epoch == self._epoch:
            for _, held in mine:
                self._busy[held.rank] -= 1
        return answers

    def _copy(self, delivery: Delivery, held: Held, outcome: Outcome) -> Letter:
        match outcome:
            case Retry(delay=delay):
                return self._letter(
                    held,
                    due=self.broker.clock.now() + delay if delay > 0 else 0.0,
                    count=held.deliveries,
                )
            case Release():
                return self._letter(held, due=0.0, count=held.deliveries - 1)
            case _:
                reason = outcome.reason if isinstance(outcome, Dead) else ""
                headers = {
                    **held.headers,
                    "penstock-reason": reason,
                    "penstock-position": str(delivery.position),
                }
                return self.broker.letter(
                    Out(
                        topic=self.topic + DEAD,
                        id=held.id,
                        key=held.key,
                        body=held.body,
                        headers=headers,
                    )
                )

    def _letter(self, held: Held, *, due: float, count: int) -> Letter:
        out = Out(
            topic=self.topic,
            id=held.id,
            key=held.key,
            body=held.body,
            headers=held.headers,
            priority=held.rank,
            not_before=due,
        )
        return self.broker.letter(out, group=self.group, count=count, at=held.at)

    async def _send(self, copies: Sequence[Letter]) -> None:
        answers = await self.broker.publisher.send(copies)
        if (
            Published.FAILED in answers
        ):  # its queue is not there, or no longer: make it, and try once more
            self.broker.forget(self.topic)
            await self.broker.declared(self.topic, self.group)
            answers = await self.broker.publisher.send(copies)
        if any(answer is not Published.OK for answer in answers):
            worst = next(answer for answer in answers if answer is not Published.OK)
            raise StoreUnavailable(
                f"RabbitMQ at {self.broker.consuming.address.place} does not take a message back now ({worst})"
            )

    async def _ack(self, tags: Sequence[int]) -> None:
        """Returns when the server has them: an ack has no answer of its own, but what is asked
        after it on the same channel is answered after it.
        """
        channel, wanted, upto = self._channel, set(tags), 0
        if channel is None:
            raise StoreUnavailable("the connection to RabbitMQ was lost")
        for tag in self._tags:
            if tag not in wanted:
                break
            upto = tag
        with self.broker.consuming.outage():
            if upto:
                await channel.basic_ack(upto, multiple=True, wait=False)
            for tag in sorted(wanted):
                if tag > upto:
                    await channel.basic_ack(tag, wait=False)
        for tag in wanted:
            self._tags.pop(tag, None)
        self._written += 1
        mine = self._written
        async with self._syncing:
            if self._known >= mine:
                return
            upto = self._written
            with self.broker.consuming.outage():
                async with asyncio.timeout(ANSWER):
                    await channel.basic_qos(prefetch_count=1)
            self._known = upto

    def holds(self, delivery: Delivery) -> bool:
        """Is the lease still ours? Known without asking: it ends with the channel."""
        return delivery.token == self._epoch and delivery.position in self._out and self.alive

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        return [self.holds(d) for d in deliveries]

    async def hold(self, until: Mapping[str, float]) -> None:
        """RabbitMQ cannot keep a key back (caps.hold_keys)."""

    # -- the end -----------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _quietly(self, work: Any) -> None:
        """A lost connection needs no second report: the next question is answered with it."""
        try:
            await work()
        except (StoreUnavailable, *TROUBLE):
            self._wake.set()

    async def close(self) -> None:
        if self._closed:
            return
        if self._watch is not None:
            self._watch.cancel()
        await self._quietly(self._stand_down)
        self._closed = True
        self._drop_timers()
        for task in list(self._tasks):
            task.cancel()
        if self._channel is not None and self.alive:
            await self._quietly(partial(self._hang_up, self._channel))
        self.broker.subscriptions.discard(self)
