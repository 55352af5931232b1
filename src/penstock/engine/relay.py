"""Relay to external brokers: publishes and settles after the ledger's transaction."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from penstock.engine.maintenance import abandon
from penstock.engine.publishing import GROUP, message_again, publish_again
from penstock.errors import PenstockError
from penstock.model import Ack, Outcome, Reason, Release, Retry
from penstock.ports import (
    Broker,
    Capabilities,
    Clock,
    Delivery,
    Durability,
    Events,
    EventState,
    LeaseTracking,
    Members,
    Out,
    Outgoing,
    Partitioned,
    Published,
    Stats,
    Subscription,
    TopicSpec,
    Transaction,
    UnitOfWork,
)
from penstock.rules.reasons import sentence

T = TypeVar("T")

# Seconds in which the worker that inserted a message should publish it. After that, any worker
# publishes it.
RESERVATION = 15.0
# Seconds. A message with a longer delay waits in the outgoing table and not in the broker.
PARK_AFTER = 10.0
BATCH = 500  # messages published together
PAUSE_CACHE = 0.5  # seconds for which the paused topics are cached
COPY_RECHECK_DELAY = 2.0  # seconds until a copy of running work is delivered again
CLOCK_TOLERANCE = 0.05  # seconds by which a delayed message may arrive too early
STALE_MEMBER = 3600.0  # seconds after which a worker without a heartbeat is deleted
log = logging.getLogger("penstock.relay")


class PendingBrokerWork(msgspec.Struct):
    """Broker calls that a transaction decided. They are made after the commit."""

    confirmed: list[int] = []  # rows of published messages, which the transaction deletes
    publish: list[tuple[int, Out]] = []  # (row, message)
    settle: list[tuple[Delivery, Outcome]] = []


class Relay:
    """All external brokers of a pipeline.

    Publishing and settling are repeated until the broker confirms them. If this process crashes
    first, other workers publish the rows, and the broker redelivers the unsettled messages.
    """

    def __init__(self, brokers: Mapping[str, Broker], uow: UnitOfWork, clock: Clock) -> None:
        self.clock, self._uow = clock, uow
        self._brokers = dict(brokers)  # topic -> broker
        self._subscriptions: dict[tuple[str, str], RelayedSubscription] = {}
        self.published: set[int] = set()  # rows that the next transaction deletes
        self.too_large: list[tuple[int, Out]] = []  # (row, message) refused because of the size
        # Deliveries that are settled again later, because the broker was unavailable.
        self._unsettled: list[tuple[Delivery, Outcome]] = []
        self.next_due = 0.0  # time of the next due message known to this process, 0 if none
        self._paused: dict[str, str] = {}  # topic -> reason, as of `_paused_at`
        self._paused_at = 0.0  # time at which the paused topics were read
        self._checked_at = 0.0  # time of the last check in `publish_due`

    def broker(self, topic: str) -> Broker:
        return self._brokers[topic.removesuffix(".dead")]

    def has_topic(self, topic: str) -> bool:
        return topic.removesuffix(".dead") in self._brokers

    def caps_of(self, topic: str) -> Capabilities:
        return self.broker(topic).caps

    @property
    def brokers(self) -> list[Broker]:
        return list({id(b): b for b in self._brokers.values()}.values())

    @property
    def groups(self) -> list[tuple[str, str]]:
        return [(topic, GROUP) for topic in sorted(self._brokers)]

    # -- topics ------------------------------------------------------------------------------------

    async def ensure(self, topology: Sequence[TopicSpec]) -> Sequence[str]:
        drift: list[str] = []
        for broker in self.brokers:
            drift += await broker.ensure([t for t in topology if self.broker(t.name) is broker])
        return drift

    def wake(self, topics: Iterable[str]) -> None:
        """Do nothing: external brokers wake their receivers without help."""

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        inner = self.broker(topic).subscribe(topic, group, owner=owner, lease=lease)
        made = RelayedSubscription(self, topic, inner)
        self._subscriptions[topic, group] = made
        return made

    def holds(self, delivery: Delivery) -> bool:
        """Return True if the lease is held, as far as this process knows.

        The fence decides whether a write applies.
        """
        return self._subscriptions[delivery.topic, delivery.group].holds(delivery)

    async def stats(self, topic: str, group: str) -> Stats:
        return await self.broker(topic).stats(topic, group)

    async def partitions(self, topic: str, group: str) -> list[dict[str, object]]:
        broker = self.broker(topic)
        return await broker.partitions(topic, group) if isinstance(broker, Partitioned) else []

    async def peek(self, topic: str, limit: int) -> Sequence[Out]:
        return await self.broker(topic).peek(topic, limit)

    async def purge(self, topic: str) -> int:
        removed = await self._uow.write(lambda tx: tx.outgoing.purge(topic))
        return removed + await self.broker(topic).purge(topic)

    async def replay(
        self,
        topic: str,
        group: str,
        *,
        since: float,
        offsets: Mapping[int, int] | None = None,
    ) -> int:
        broker = self.broker(topic)
        if offsets is not None and isinstance(broker, Partitioned):
            return await broker.replay(topic, group, since=since, offsets=offsets)
        return await broker.replay(topic, group, since=since)

    async def paused(self, topic: str) -> bool:
        if self.clock.now() > self._paused_at + PAUSE_CACHE:
            self._paused = await self._uow.read(lambda tx: tx.outgoing.paused())
            self._paused_at = self.clock.now()
        return topic in self._paused

    def forget_paused(self) -> None:
        """Clear the cache, so that the next call of `paused` reads the topics again."""
        self._paused_at = 0.0

    async def is_empty(self) -> bool:
        """Return True if no topic is paused and no message waits, is delayed or in flight."""
        for topic in self._brokers:
            if await self.paused(topic):
                return False
            s = await self.stats(topic, GROUP)
            if s.ready or s.delayed or s.in_flight:
                return False
        return True

    async def close(self) -> None:
        for broker in self.brokers:
            await broker.close()

    # -- after the commit --------------------------------------------------------------------------

    async def deliver(self, pending: PendingBrokerWork) -> None:
        """Publish, then settle.

        `publish_due` of any worker repeats a failed publish. `publish_due` of this worker repeats a
        failed settle.
        """
        self.published.difference_update(pending.confirmed)
        if pending.publish:
            await self._publish(pending.publish)
        await self._settle(pending.settle)

    async def _settle(self, items: Iterable[tuple[Delivery, Outcome]]) -> None:
        """Settle deliveries, and keep deliveries that the broker did not confirm.

        Some leases end only with the connection. Without this list, the broker would not redeliver
        such an unsettled delivery while this process lives.
        """
        groups: dict[tuple[str, str], list[tuple[Delivery, Outcome]]] = defaultdict(list)
        for d, outcome in items:
            groups[d.topic, d.group].append((d, outcome))
        for key, some in groups.items():
            try:
                await self._subscriptions[key].settle(some)
            except PenstockError as e:
                log.warning(
                    "%d deliveries of %s are not settled yet: %s", len(some), key[0], e.message
                )
                self._unsettled += some

    async def _publish(self, rows: Sequence[tuple[int, Out]]) -> None:
        """Publish messages. An unconfirmed message keeps its row and is published again."""
        by_broker: dict[int, list[tuple[int, Out]]] = defaultdict(list)
        for n, out in rows:
            by_broker[id(self.broker(out.topic))].append((n, out))
        for some in by_broker.values():
            for i in range(0, len(some), BATCH):
                batch = some[i : i + BATCH]
                broker = self.broker(batch[0][1].topic)
                largest = broker.caps.max_body  # bytes of a body that the broker always accepts
                try:
                    answers = await broker.publish([out for _, out in batch])
                except PenstockError as e:  # the rows stay in the outgoing table
                    log.warning("%d messages wait for the broker: %s", len(batch), e.message)
                    continue
                for (n, out), answer in zip(batch, answers, strict=True):
                    if answer is Published.OK:
                        self.published.add(n)
                    elif answer is Published.FAILED and largest and len(out.body) > largest:
                        self.too_large.append((n, out))

    async def publish_due(self, inner: UnitOfWork) -> None:
        """Publish due messages, including messages that other workers did not publish.

        Called several times a second. Returns immediately unless a message is due or one second
        has passed since the last check.
        """
        now = self.clock.now()
        if not (now >= self._checked_at + 1.0 or (self.next_due and now >= self.next_due)):
            return
        self._checked_at = now
        if self._unsettled:
            again, self._unsettled = self._unsettled, []
            await self._settle(again)
        due, self.next_due = await inner.read(lambda tx: tx.outgoing.next_due(self.clock.now()))
        if due or self.published:

            def reserve(tx: Transaction) -> tuple[list[tuple[int, Out]], list[int]]:
                confirmed = self.remove_confirmed(tx)
                now = self.clock.now()
                return tx.outgoing.reserve_due(now, now + RESERVATION, BATCH), confirmed

            rows, confirmed = await inner.write(reserve, durability=Durability.RELAXED)
            self.published.difference_update(confirmed)
            if rows:
                await self._publish(rows)

    def remove_confirmed(self, tx: Transaction) -> list[int]:
        """Delete the rows of published messages. Return the row numbers."""
        confirmed = list(self.published)
        if confirmed:
            tx.outgoing.remove(confirmed)
        return confirmed


class RelayedSubscription:
    """A subscription of an external broker. It receives nothing while its topic is paused."""

    def __init__(self, relay: Relay, topic: str, inner: Subscription) -> None:
        self._relay, self._topic, self._inner = relay, topic, inner

    async def receive(
        self, limit: int, wait: float, *, per_key: int | None = None
    ) -> Sequence[Delivery]:
        if await self._relay.paused(self._topic):
            await self._relay.clock.sleep(wait)
            return []
        return await self._inner.receive(limit, wait, per_key=per_key)

    async def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
        return await self._inner.settle(items)

    async def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Sequence[bool]:
        return await self._inner.extend(deliveries, seconds)

    async def hold(self, until: Mapping[str, float]) -> None:
        await self._inner.hold(until)

    def holds(self, delivery: Delivery) -> bool:
        return not isinstance(self._inner, LeaseTracking) or self._inner.holds(delivery)

    async def close(self) -> None:
        await self._inner.close()


class RelayedQueue:
    """Queue of external brokers inside one transaction.

    It records the broker calls that are made after the commit.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        members: Members,
        events: Events,
        relay: Relay,
        pending: PendingBrokerWork | None,
    ) -> None:
        """If `pending` is None, `settle` fails, and a worker publishes the messages later."""
        self._outgoing, self._members, self._events = outgoing, members, events
        self._relay, self._pending = relay, pending

    def enqueue(self, batch: Sequence[Out]) -> list[tuple[Published, int]]:
        now = self._relay.clock.now()
        answers = []
        for message in batch:
            if message.not_before > now:
                due = message.not_before
                n = self._outgoing.add(message, due=due, reserved_until=0.0)
                self._relay.next_due = min(self._relay.next_due or due, due)
            else:
                n = self._outgoing.add(message, due=now, reserved_until=now + RESERVATION)
                if self._pending is not None:
                    self._pending.publish.append((n, message))
            answers.append((Published.OK, n))
        return answers

    def settle(self, items: Sequence[tuple[Delivery, Outcome]]) -> list[bool]:
        assert self._pending is not None, "deliveries are settled only by RelayedUnitOfWork.write"
        now = self._relay.clock.now()
        for d, outcome in items:
            if isinstance(outcome, Retry) and outcome.delay > PARK_AFTER:
                due = now + outcome.delay
                self.enqueue([message_again(d, not_before=due, elsewhere=outcome.elsewhere)])
                outcome = Ack()
            self._pending.settle.append((d, outcome))
        return [True] * len(items)

    def settle_undurably(self, items: Sequence[tuple[Delivery, Outcome]]) -> None:
        self.settle([(d, Release()) for d, _ in items])

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return [self._relay.holds(d) for d in deliveries]

    def defer_copy(self, delivery: Delivery, state: EventState, now: float) -> Outcome | None:
        if state.status in ("in_flight", "writing") and self._is_running(state.n):
            return Retry(COPY_RECHECK_DELAY, "another worker is at it")
        due = state.not_before
        if state.status == "delayed" and due is not None and due > now + CLOCK_TOLERANCE:
            return Retry(due - now, "its time has not come")
        self._events.set_position(state.n, delivery.position)
        return None

    def may_start(self, rows: Sequence[int]) -> list[bool]:
        seen: set[int] = set()
        answers = []
        for row in rows:
            answers.append(row not in seen and not self._is_running(row))
            seen.add(row)
        return answers

    def _is_running(self, row: int) -> bool:
        """Return True if a live worker has the event in flight. Then a new delivery is a copy."""
        return self._members.has_event(row, self._relay.clock.now())

    def hold_keys(self, topic: str, group: str, until: Mapping[str, float]) -> None:
        """Do nothing: an external broker delivers in its own order. Far events are delayed."""

    def reclaim(self, worker: str) -> list[str]:
        """Delete a crashed worker. The broker redelivers the worker's messages without help."""
        self._members.leave(worker)
        return []

    def pause(self, topic: str, reason: str | None) -> bool:
        if not self._relay.has_topic(topic):
            return False
        self._relay.forget_paused()
        self._outgoing.pause(topic, reason)
        return True

    def paused(self) -> dict[str, str]:
        return self._outgoing.paused()

    def make_due(
        self, topic: str, group: str, key: str, messages: Sequence[tuple[int, int]]
    ) -> None:
        # Not by key: other programs, and delays for newer workers, give messages other keys.
        self._outgoing.make_due(topic, [row for row, _ in messages], self._relay.clock.now())

    def prune(self) -> int:
        """Delete workers without a heartbeat. External brokers delete old messages themselves."""
        self._members.prune(self._relay.clock.now() - STALE_MEMBER)
        return 0


class RelayedUnitOfWork:
    """Unit of work with an external queue. It publishes and settles after each commit."""

    def __init__(self, inner: UnitOfWork, relay: Relay) -> None:
        self._inner, self._relay = inner, relay

    async def write(
        self,
        work: Callable[[Transaction], T],
        *,
        durability: Durability = Durability.CONFIGURED,
    ) -> T:
        def job(tx: Transaction) -> tuple[T, PendingBrokerWork]:
            # Use a new object for each run, because the store may run the job again.
            pending = PendingBrokerWork(confirmed=self._relay.remove_confirmed(tx))
            queue = RelayedQueue(tx.outgoing, tx.members, tx.events, self._relay, pending)
            return work(replace(tx, queue=queue)), pending

        result, pending = await self._inner.write(job, durability=durability)
        await self._relay.deliver(pending)
        return result

    async def read(self, work: Callable[[Transaction], T]) -> T:
        return await self._inner.read(work)

    def write_now(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` without an event loop. A worker publishes the messages later."""
        return self._inner.write_now(work)

    def snapshot(self, work: Callable[[Transaction], T]) -> T:
        return self._inner.snapshot(work)


class RelayChores:
    """Periodic work of a worker whose brokers are external."""

    def __init__(
        self,
        relay: Relay,
        uow: UnitOfWork,
        inner: UnitOfWork,
        *,
        worker: str,
        lease: float,
        clock: Clock,
    ) -> None:
        self._relay, self._uow, self._inner = relay, uow, inner
        self._worker, self._lease, self._clock = worker, lease, clock
        self._empty_checks = 0  # checks in a row that found the broker empty

    async def heartbeat(self) -> None:
        """Record that this worker is alive."""
        await self._inner.write(
            lambda tx: tx.members.heartbeat(self._worker, self._clock.now() + self._lease),
            durability=Durability.RELAXED,
        )

    async def unregister(self) -> None:
        """Delete this worker and the rows of its published messages, before it stops."""

        def work(tx: Transaction) -> list[int]:
            confirmed = self._relay.remove_confirmed(tx)
            tx.members.leave(self._worker)
            return confirmed

        confirmed = await self._inner.write(work, durability=Durability.RELAXED)
        self._relay.published.difference_update(confirmed)

    async def publish_due(self) -> None:
        """Publish due messages. End events whose message is too large for the broker."""
        await self._relay.publish_due(self._inner)
        rows, self._relay.too_large = self._relay.too_large, []
        if rows:
            await self._uow.write(lambda tx: self._abandon_too_large(tx, rows))

    def _abandon_too_large(self, tx: Transaction, rows: Sequence[tuple[int, Out]]) -> None:
        """End events as dead, because the broker would refuse their messages again."""
        for n, out in rows:
            tx.outgoing.remove([n])
            event = tx.maintenance.waiting(out.id)
            if event is not None:
                reason = sentence(Reason.MESSAGE_SIZE, out.topic, len(out.body))
                abandon(tx, event, reason, self._clock.now())

    async def recover(self) -> int:
        """Publish events again if an external broker has lost their messages. Return how many.

        Called once per lease. Messages count as lost if the broker is empty while the ledger has
        open events. The broker must be empty in two checks in a row, because the broker and the
        ledger are not read at the same moment. A superfluous copy is harmless.
        """
        self._empty_checks = self._empty_checks + 1 if await self._relay.is_empty() else 0
        if self._empty_checks < 2:
            return 0
        self._empty_checks = 0
        return await self._uow.write(self._recover)

    def _recover(self, tx: Transaction) -> int:
        now = self._clock.now()
        lost = [
            row
            for row in tx.maintenance.stalled(now - 2 * self._lease, limit=500)
            if not tx.members.has_event(row[0], now) and not tx.outgoing.has(row[1])
        ]
        again = [n for n, _, envelope in lost if publish_again(tx, envelope)]
        for n in again:
            tx.maintenance.note(n, "pending", sentence(Reason.REPUBLISHED), now)
        return len(again)
