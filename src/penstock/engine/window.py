"""Prefetch window: the deliveries that a worker holds, their leases, and when more are received."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from penstock.clock import wait
from penstock.engine.inflight import UNSTARTED, InflightEvent, read_delivery
from penstock.engine.outage import Outage
from penstock.engine.settings import HostKind, Options, Stage
from penstock.errors import BadEnvelope, NewerMessage
from penstock.model import Release
from penstock.ports import Clock, Delivery, Subscription
from penstock.rules.permits import LONG

if TYPE_CHECKING:
    from penstock.engine.dispatcher import Dispatcher

HOST_HOLD = 0.25  # seconds for which the broker holds a host that uses its whole share
# Seconds without room in the prefetch window. Then deliveries beyond their host's share are
# released.
GIVE_BACK_AFTER = 1.0
# Seconds between two calls of `receive` while messages of a newer release arrive and no others. The
# calls do not wait for messages, so that workers of that release usually get them.
NEWER_PAUSE = 2.0
NEWER_MEMORY = 120.0  # seconds after the last such message in which the worker pauses
log = logging.getLogger("penstock.worker")


class PrefetchWindow:
    """Deliveries that one worker holds. It stays below a number of deliveries and body bytes."""

    def __init__(
        self,
        subscription: Subscription,
        options: Options,
        clock: Clock,
        outage: Outage,
        *,
        stage: Stage,
        host_by: HostKind,
        paused: Callable[[], str | None],
    ) -> None:
        self._subscription, self._options, self._clock = subscription, options, clock
        self._outage, self._stage, self._host_by, self._paused = outage, stage, host_by, paused
        self.held: dict[int, InflightEvent] = {}  # position -> event without a committed outcome
        self.body_bytes = 0  # bytes of held page bodies
        self.stopping = False
        self._room = asyncio.Event()
        self._newer_at = 0.0  # time of the last message of a newer release
        self._newer: set[str] = set()  # logged sentences about messages of a newer release
        self._received = 0.0  # time of the last `receive` or release of excess deliveries

    @property
    def over_budget(self) -> bool:
        """True if the bodies of held pages use more memory than allowed."""
        return self.body_bytes > self._options.byte_budget

    def linger(self, alone: float) -> float:
        """Return the seconds that a partial batch waits for more events.

        Under load return 8 × `alone`, so that more events share a batch or a sync. Otherwise
        return `alone`, so that a single event does not wait long for others.
        """
        return 8 * alone if len(self.held) > self._options.concurrency else alone

    # -- receiving ---------------------------------------------------------------------------------

    async def run(self, dispatcher: Dispatcher) -> None:
        """Receive deliveries and admit them, while their number and the byte budget allow it."""
        while not self.stopping:
            self._room.clear()
            room = self._options.window - len(self.held)
            full = room < max(1, self._options.window // 2)
            if self._paused() or full or self.over_budget:
                patient = self._clock.now() <= self._received + GIVE_BACK_AFTER
                if full and dispatcher.waits_for_hosts and not patient:
                    await self._give_back_excess(dispatcher)
                else:
                    await wait(self._clock, self._room, 0.1)
                continue
            longest_wait = 0.5
            if (
                dispatcher.waits_for_hosts
                and dispatcher.mixed
                and (full_hosts := dispatcher.full_hosts())
            ):
                await self._hold(full_hosts)
                longest_wait = HOST_HOLD / 2  # the hold must not end while `receive` waits
            if not self.held and self._clock.now() < self._newer_at + NEWER_MEMORY:
                await wait(self._clock, self._room, NEWER_PAUSE)
                longest_wait = 0.0
            got = await self._outage.retry_until_stored(
                partial(
                    self._subscription.receive, room, longest_wait, per_key=self._options.per_key
                )
            )
            self._received = self._clock.now()
            if got:
                await self._admit(dispatcher, got)

    async def _admit(self, dispatcher: Dispatcher, got: Sequence[Delivery]) -> None:
        items: list[InflightEvent] = []
        unreadable: list[tuple[Delivery, BadEnvelope]] = []
        for d in got:
            try:
                item = self.held[d.position] = read_delivery(d, self._stage, self._host_by)
                items.append(item)
            except BadEnvelope as e:
                unreadable.append((d, e))
        await dispatcher.admit(items, unreadable)
        for d, error in unreadable:
            if isinstance(error, NewerMessage):
                self._warn_of_newer(d.topic, error)

    def _warn_of_newer(self, topic: str, e: NewerMessage) -> None:
        """Log once that messages wait for workers of a newer release."""
        self._newer_at = self._clock.now()
        if e.message not in self._newer:
            self._newer.add(e.message)
            log.warning(
                "topic %s: %s. Such messages are left to workers of the newer release: %s",
                topic,
                e.message,
                e.hint,
            )

    async def _hold(self, hosts: Sequence[str]) -> None:
        """Let the broker hold hosts whose waiting events use their whole share of the window."""
        full = dict.fromkeys(hosts, self._clock.now() + HOST_HOLD)
        await self._outage.retry_until_stored(partial(self._subscription.hold, full))

    async def _give_back_excess(self, dispatcher: Dispatcher) -> None:
        """Release deliveries beyond each host's share of the prefetch window.

        Slow hosts have filled the window. After the release, work for other hosts can be received.
        """
        self._received = self._clock.now()
        # Otherwise permits are free soon, and a release would only cause other deliveries.
        crowded = dispatcher.is_crowded(LONG)
        full = dispatcher.full_hosts(crowded=crowded)
        if excess := dispatcher.take_excess(crowded=crowded):
            await self._hold(full)
            await self._release(excess)

    # -- holding -----------------------------------------------------------------------------------

    async def renew_leases(self) -> None:
        """Extend the leases of held deliveries, three times per lease."""
        while True:
            await self._clock.sleep(self._options.lease / 3)
            if held := [item.delivery for item in self.held.values()]:
                await self._outage.retry_until_stored(
                    partial(self._subscription.extend, held, self._options.lease)
                )

    def drop(self, items: Iterable[InflightEvent]) -> None:
        """Remove events whose delivery is settled, or whose lease was lost."""
        held = self.held
        for item in items:
            if held.get(item.delivery.position) is item:
                del held[item.delivery.position]
            self.body_bytes -= len(item.body)
        self._room.set()

    def stop(self) -> None:
        """End `run` before its next `receive`."""
        self.stopping = True
        self._room.set()

    async def release_unstarted(self) -> None:
        """Release deliveries without a start. The ledger has no start that needs an end."""
        unstarted = [item for item in self.held.values() if item.state in UNSTARTED]
        for item in unstarted:
            if item.timer is not None:
                item.timer.cancel()
        if unstarted:
            await self._release(unstarted)

    async def _release(self, items: Sequence[InflightEvent]) -> None:
        for item in items:
            self.held.pop(item.delivery.position, None)
        settles = [(item.delivery, Release()) for item in items]
        await self._outage.retry_until_stored(partial(self._subscription.settle, settles))

    async def close(self) -> None:
        await self._subscription.close()
