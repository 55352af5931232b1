"""Receiving from SQS: classes in turn, long polls for those that are empty, leases that are also
known here, and settling.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from penstock.brokers.sqs import message as wire
from penstock.brokers.sqs.message import NOTE, Place, Where
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Clock, Delivery, Out, Published
from penstock.rules.priority import shares

BATCH = 10  # what SQS gives at once
WIDEST = 16  # polls of one queue at once, while it is full
SURPLUS = (
    256  # messages looked at beyond what was asked for, to find other keys behind a crowded one
)
KEPT = 64  # of those, kept for the next call
ASIDE = 5  # seconds for which the rest of them is hidden: at once they would only come again
SITTING = 2.0  # seconds for which something stays here that nobody asks for
LONGEST = 12 * 3600 - 60  # seconds from its receipt for which SQS hides a message at most
log = logging.getLogger("penstock.sqs")


class Queues(Protocol):
    """What a subscription needs of its broker."""

    place: Place
    clock: Clock

    async def on(self, where: Where, operation: str, **arguments: Any) -> dict[str, Any]: ...
    async def each(
        self, where: Where, operation: str, entries: Sequence[dict[str, Any]]
    ) -> list[bool | None]: ...
    async def send(self, items: Sequence[tuple[Out, Sequence[Where]]]) -> list[Published]: ...
    def left(self, sub: Any) -> None: ...


class _Held(msgspec.Struct):
    """A message that is ours for a time."""

    where: Where
    receipt: str
    taken: float  # loop time
    until: float
    seq: int
    delivery: Delivery


class _Lane(msgspec.Struct):
    """One class. While it is wet it is asked on demand; once it gave less than it was asked for, a
    long poll watches it.
    """

    where: Where
    wet: bool = True
    width: int = 1
    spare: list[_Held] = []
    watch: asyncio.Task[None] | None = None


class SqsSubscription:
    """Implements ports.Subscription. No poll is ever cancelled on the way: what SQS had handed out
    to it would be hidden for a whole lease.
    """

    def __init__(self, broker: Queues, topic: str, group: str, lease: float) -> None:
        self.broker, self.topic, self.group, self.lease = broker, topic, group, lease
        self._lanes = [_Lane(w, spare=[]) for w in wire.lanes(topic, group)]
        self._tokens = itertools.count(1)
        self._out: dict[int, _Held] = {}
        self._done: set[int] = (
            set()
        )  # settled by a call that failed for others: the next one is told so
        self._places = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._landed = asyncio.Event()
        self._trouble: StoreUnavailable | None = None
        self._tidy: asyncio.TimerHandle | None = None
        self._swept = 0.0

    # -- receiving ---------------------------------------------------------------------------------

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        now = asyncio.get_running_loop().time
        until = now() + wait
        self._stay()
        self._sweep(now())
        self._trouble = None  # of a poll that nobody waited for
        batch = _Batch(limit, per_key or limit, self._quotas(limit))
        try:
            while True:
                self._landed.clear()
                await self._gather(batch)
                left = until - now()
                if batch.got or left <= 0:
                    return self._hand_out(batch)
                self._watch(self._lanes, limit)
                try:
                    async with asyncio.timeout(left):
                        await self._landed.wait()
                except TimeoutError:
                    until = now()  # one last look at what is here
                self._complain()
        except BaseException:  # cancelled, or an outage after the first part: nobody gets these, so they are here for the next call
            for held in batch.got:
                next(lane for lane in self._lanes if lane.where == held.where).spare.append(held)
            raise
        finally:
            self._leave()

    def _complain(self) -> None:
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def _hand_out(self, batch: _Batch) -> list[Delivery]:
        self._places += len(batch.got)
        self._watch([lane for lane in self._lanes if not lane.wet], batch.limit)
        for held in batch.got:
            self._out[held.delivery.token] = held
        return [held.delivery for held in sorted(batch.got, key=_by_class_and_age)]

    async def _gather(self, batch: _Batch) -> None:
        """First each class its part, then whoever still has work fills the batch."""
        budget = batch.limit + SURPLUS
        for share in (True, False):
            self._pick(batch, share)
            while batch.left and budget > 0 and (plan := self._plan(batch, share)):
                budget -= await self._fetch(plan)
                self._pick(batch, share)
        if sum(len(lane.spare) for lane in self._lanes) > KEPT:
            self._put_aside()

    def _plan(self, batch: _Batch, share: bool) -> list[tuple[_Lane, int]]:
        wet = [lane for lane in self._lanes if lane.wet]
        if not share:
            return [(lane, batch.left) for lane in wet[:1]]
        if len(wet) == 1:
            return []  # nobody to share with
        return [
            (lane, min(batch.left, quota))
            for lane in wet
            if (quota := batch.quotas.get(lane.where.rank, 0)) > 0
        ]

    def _pick(self, batch: _Batch, share: bool) -> None:
        for lane in self._lanes:
            quota = batch.quotas.get(lane.where.rank, 0) if share else batch.left
            left: list[_Held] = []
            for held in lane.spare:
                if quota > 0 and batch.left and batch.take(held):
                    quota -= 1
                else:
                    left.append(held)
            lane.spare[:] = left

    def _quotas(self, limit: int) -> dict[int, int]:
        """How many of the next `limit` places belong to each class."""
        if len(self._lanes) == 1:
            return {wire.NORMAL: limit}
        return dict(enumerate(shares(self._places, limit)))

    async def _fetch(self, plan: Iterable[tuple[_Lane, int]]) -> int:
        """Ask for what is there now, with as many polls as the queue could answer lately. Returns
        how many came.
        """
        asked: list[tuple[_Lane, int, list[asyncio.Task[int]]]] = []
        for lane, want in plan:
            want = min(want, lane.width * BATCH)
            sizes = [min(BATCH, want - start) for start in range(0, want, BATCH)]
            asked.append((lane, want, [self._start(self._poll(lane, size, 0)) for size in sizes]))
        await asyncio.wait([task for *_, tasks in asked for task in tasks])
        total, trouble = 0, None
        for lane, want, tasks in asked:
            came = 0
            for task in tasks:
                if (error := task.exception()) is None:
                    came += task.result()
                else:
                    trouble = error
            lane.wet = came >= want
            lane.width = min(2 * lane.width, WIDEST) if lane.wet else 1
            total += came
        if trouble is not None and not total:
            raise trouble
        return total

    async def _poll(self, lane: _Lane, most: int, wait: int) -> int:
        hidden = math.ceil(self.lease)
        answer = await self.broker.on(
            lane.where,
            "receive_message",
            MaxNumberOfMessages=most,
            WaitTimeSeconds=wait,
            VisibilityTimeout=hidden,
            MessageAttributeNames=[NOTE],
        )
        messages = answer.get("Messages", ())
        self._land(lane, messages)
        return len(messages)

    def _land(self, lane: _Lane, messages: Sequence[dict[str, Any]]) -> None:
        loop, wall = asyncio.get_running_loop().time(), self.broker.clock.now()
        early: list[tuple[_Held, float]] = []
        for message in messages:
            note, body = wire.unpack(message)
            headers = note.headers
            if self.topic.endswith(wire.DEAD) and "penstock-reason" not in headers:
                headers = {
                    **headers,
                    "penstock-reason": "given up by SQS: received too often without an end",
                }
            held = _Held(
                where=lane.where, receipt=message["ReceiptHandle"], taken=loop, until=loop + self._sure(self.lease), seq=note.seq,
                delivery=Delivery(
                    topic=self.topic, group=self.group, id=note.id, key=note.key, body=body, headers=headers,
                    position=wire.position(message["MessageId"]), token=next(self._tokens), deliveries=1, priority=note.prio,
                ),
            )  # fmt: skip
            if note.after > wall:
                early.append((held, note.after - wall))
            else:
                lane.spare.append(held)
        lane.spare.sort(key=_by_class_and_age)
        if early:
            self._start(
                self._show([(held, min(math.ceil(delay), LONGEST)) for held, delay in early])
            )

    def _sure(self, lease: float) -> float:
        """A lease ends here a little before it ends there: a receipt that is another's already may
        be accepted by AWS.
        """
        return lease - min(1.0, 0.05 * lease)

    def _watch(self, lanes: Iterable[_Lane], limit: int) -> None:
        for lane in lanes:
            if lane.watch is None or lane.watch.done():
                lane.watch = self._start(self._wait_for(lane, min(BATCH, limit)))

    async def _wait_for(self, lane: _Lane, most: int) -> None:
        try:
            if await self._poll(lane, most, self.broker.place.poll):
                lane.wet = True
                if self._tidy is not None:  # nobody is receiving
                    self._leave()
        except StoreUnavailable as e:
            self._trouble = e
        self._landed.set()  # also for nothing: whoever waits asks again

    # -- what is here and nobody has ---------------------------------------------------------------

    def _stay(self) -> None:
        if self._tidy is not None:
            self._tidy.cancel()
            self._tidy = None

    def _leave(self) -> None:
        """What is left over, or comes in from a long poll, is kept for the next call, but not for
        long.
        """
        self._stay()
        self._tidy = asyncio.get_running_loop().call_later(
            min(SITTING, self.lease / 4), self._give_back
        )

    def _give_back(self) -> None:
        spare = [held for lane in self._lanes for held in lane.spare]
        for lane in self._lanes:
            lane.spare.clear()
        if spare:
            self._start(self._show([(held, 0) for held in spare]))

    def _put_aside(self) -> None:
        """Of a crowded key there is always more: hidden for a while, so that others come first."""
        for lane in self._lanes:
            rest = lane.spare[KEPT:]
            del lane.spare[KEPT:]
            if rest:
                self._start(self._show([(held, ASIDE) for held in rest]))

    def _sweep(self, now: float) -> None:
        """Leases that ended here: they could not be settled any more."""
        for lane in self._lanes:
            lane.spare[:] = [held for held in lane.spare if held.until > now]
        if now > self._swept + self.lease:
            self._swept = now
            for token in [token for token, held in self._out.items() if held.until <= now]:
                del self._out[token]

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait for polls that are on their way, and give back what they bring."""
        self._stay()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._give_back()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.broker.left(self)

    def abandon(self) -> None:
        """The connection is about to go."""
        self._stay()
        for task in self._tasks:
            task.cancel()

    # -- settling ----------------------------------------------------------------------------------

    def holds(self, delivery: Delivery) -> bool:
        held = self._out.get(delivery.token)
        return held is not None and held.until > asyncio.get_running_loop().time()

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        """Raises StoreUnavailable where it is not known for some; then the whole may be settled
        again.
        """
        now = asyncio.get_running_loop().time()
        answers: list[bool | None] = [False] * len(items)
        mine: dict[int, _Held] = {}
        deletes: list[int] = []
        shows: list[tuple[int, int]] = []
        moves: list[tuple[int, Out, Where]] = []
        for i, (d, outcome) in enumerate(items):
            if d.token in self._done:
                self._done.discard(d.token)
                answers[i] = True
                continue
            held = self._out.pop(d.token, None)
            if held is None or held.until <= now:
                continue
            mine[i] = held
            match outcome:
                case Ack():
                    deletes.append(i)
                case Release():
                    shows.append((i, 0))
                case Retry(delay=delay) if now - held.taken + delay <= LONGEST:
                    shows.append((i, math.ceil(delay)))
                case Retry(delay=delay):
                    moves.append(
                        (
                            i,
                            _copy(d, d.topic, held.where.rank, self.broker.clock.now() + delay),
                            held.where,
                        )
                    )
                case Dead(reason=reason):
                    marks = {"penstock-reason": reason, "penstock-position": str(d.position)}
                    moves.append(
                        (
                            i,
                            _copy(d, d.topic + wire.DEAD, wire.NORMAL, 0.0, marks),
                            wire.dead_queue(d.topic),
                        )
                    )
        done, shown, moved = await asyncio.gather(
            self._delete([mine[i] for i in deletes]),
            self._show([(mine[i], seconds) for i, seconds in shows]),
            self._move(mine, moves),
        )
        for indices, results in (
            (deletes, done),
            ([i for i, _ in shows], shown),
            ([i for i, *_ in moves], moved),
        ):
            for i, result in zip(indices, results, strict=True):
                answers[i] = result
        unknown = [i for i, answer in enumerate(answers) if answer is None]
        if unknown:
            self._out.update({items[i][0].token: mine[i] for i in unknown})
            self._done.update(items[i][0].token for i in mine if answers[i])
            raise StoreUnavailable(
                f"{self.broker.place.shown} has not confirmed what became of {len(unknown)} messages"
            )
        return [bool(answer) for answer in answers]

    async def _delete(self, helds: Sequence[_Held]) -> list[bool | None]:
        return await self._each(
            "delete_message_batch", [(held, {"ReceiptHandle": held.receipt}) for held in helds]
        )

    async def _show(self, helds: Sequence[tuple[_Held, int]]) -> list[bool | None]:
        """Hide them for so many seconds from now."""
        return await self._each(
            "change_message_visibility_batch",
            [(held, {"ReceiptHandle": held.receipt, "VisibilityTimeout": s}) for held, s in helds],
        )

    async def _each(
        self, operation: str, entries: Sequence[tuple[_Held, dict[str, Any]]]
    ) -> list[bool | None]:
        answers: list[bool | None] = [None] * len(entries)
        queues: dict[Where, list[int]] = defaultdict(list)
        for i, (held, _) in enumerate(entries):
            queues[held.where].append(i)
        results = await asyncio.gather(
            *[
                self.broker.each(where, operation, [entries[i][1] for i in some])
                for where, some in queues.items()
            ]
        )
        for some, result in zip(queues.values(), results, strict=True):
            for i, answer in zip(some, result, strict=True):
                answers[i] = answer
        return answers

    async def _move(
        self, mine: Mapping[int, _Held], moves: Sequence[tuple[int, Out, Where]]
    ) -> list[bool | None]:
        """Is it still ours? Then the copy first, and only then is the original removed."""
        if not moves:
            return []
        answers = await self._show([(mine[i], math.ceil(self.lease)) for i, *_ in moves])
        ours = [n for n, answer in enumerate(answers) if answer]
        try:
            sent = await self.broker.send([(moves[n][1], [moves[n][2]]) for n in ours])
        except StoreUnavailable:
            sent = [Published.UNKNOWN] * len(ours)
        safe = [n for n, answer in zip(ours, sent, strict=True) if answer is Published.OK]
        answers = [None if n in ours else answer for n, answer in enumerate(answers)]
        for n, answer in zip(
            safe, await self._delete([mine[moves[n][0]] for n in safe]), strict=True
        ):
            answers[n] = answer
        return answers

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        now = asyncio.get_running_loop().time()
        mine = [
            (i, held)
            for i, d in enumerate(deliveries)
            if (held := self._out.get(d.token)) is not None and held.until > now
        ]
        answers = [False] * len(deliveries)
        for (i, held), answer in zip(
            mine, await self._show([(held, math.ceil(seconds)) for _, held in mine]), strict=True
        ):
            if answer:
                held.until = now + self._sure(seconds)
            answers[i] = answer is not False  # not known: it is ours for as long as it was
        return answers

    async def hold(self, until: Mapping[str, float]) -> None:
        """SQS cannot keep a key back."""


class _Batch:
    """What one call hands out."""

    def __init__(self, limit: int, per_key: int, quotas: dict[int, int]) -> None:
        self.limit, self.per_key, self.quotas = limit, per_key, quotas
        self.got: list[_Held] = []
        self._keys: Counter[str] = Counter()

    @property
    def left(self) -> int:
        return self.limit - len(self.got)

    def take(self, held: _Held) -> bool:
        if self._keys[held.delivery.key] >= self.per_key:
            return False
        self._keys[held.delivery.key] += 1
        self.quotas[held.where.rank] -= 1
        self.got.append(held)
        return True


def _by_class_and_age(held: _Held) -> tuple[int, int]:
    return held.where.rank, held.seq


def _copy(
    d: Delivery, topic: str, rank: int, not_before: float, marks: Mapping[str, str] | None = None
) -> Out:
    return Out(
        topic=topic,
        id=d.id,
        key=d.key,
        body=d.body,
        headers={**d.headers, **(marks or {})},
        priority=rank,
        not_before=not_before,
    )
