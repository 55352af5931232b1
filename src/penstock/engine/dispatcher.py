"""Dispatcher: chooses which admitted events start now, by permits, slots and limits of each host.

Slots are reserved by `admission`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from penstock.engine.admission import Admission
from penstock.engine.inflight import InflightEvent, State
from penstock.engine.outage import Outage
from penstock.engine.settings import Options, Stage
from penstock.engine.window import PrefetchWindow
from penstock.errors import BadEnvelope
from penstock.model import Event
from penstock.ports import Clock, Delivery, Pace
from penstock.rules.pace import LATE

# Share of the interval that is kept after a late request. Below 1, so that the host catches up.
MIN_GAP_SHARE = 0.95
TIMER_RESOLUTION = 0.005  # seconds. A shorter wait is not worth a timer.
# Hosts. Above this, the last requests of hosts without one in the last 60 s are dropped.
MAX_LAST_REQUESTS = 8192


class Dispatcher:
    """Queue of admitted events. An event that waits here holds no permit.

    If `receive` has no limit per host key, requests to a host are spaced only after an event of
    that host had to wait for a slot.
    """

    def __init__(
        self,
        admission: Admission,
        pace: Pace,
        window: PrefetchWindow,
        options: Options,
        clock: Clock,
        outage: Outage,
        *,
        stage: Stage,
    ) -> None:
        self._admission, self._pace, self._window = admission, pace, window
        self._options, self._clock, self._outage, self._stage = options, clock, outage, stage
        self._ready: deque[InflightEvent] = deque()  # events that can start when a permit is free
        self.active = 0  # permits in use
        self._returning = 0  # handlers that waited for a slot and need a permit again
        self._startable, self._freed = asyncio.Event(), asyncio.Event()
        self._in_flight: dict[str, int] = {}  # host key -> requests in flight
        self._waiting_for_host: dict[str, deque[InflightEvent]] = {}  # host key -> events
        # Host key -> (slot, start) of the last request, for hosts whose requests are spaced.
        self._last_requests: dict[str, tuple[float, float]] = {}
        self._reslots: set[asyncio.Task[None]] = set()  # tasks that admit late events again

    @property
    def idle(self) -> bool:
        """True if no handler runs and no event is ready."""
        return not self.active and not self._ready

    # -- admitting ---------------------------------------------------------------------------------

    async def admit(
        self,
        items: Sequence[InflightEvent],
        unreadable: Sequence[tuple[Delivery, BadEnvelope]] = (),
    ) -> None:
        """Admit events. Make each one ready when its slot comes, and drop the settled ones.

        Called again for events whose slot has passed or was voided. A slot passes while its event
        waits for a permit or for its host. A request would then exceed the host's rate limit. A
        slot is voided if the host needs longer intervals. `Admission.admit` reserves a new slot, or
        delays the event in the ledger if the slot is far away.
        """
        fetches, asked = self._stage == "fetch", self._clock.now()
        deliveries: list[tuple[Delivery, Event | BadEnvelope]] = [
            (item.delivery, item.event) for item in items
        ]
        deliveries += unreadable
        answers = await self._outage.retry_until_stored(
            lambda: self._admission.admit(deliveries, fetches=fetches)
        )
        now = self._clock.now()
        for item, answer in zip(items, answers, strict=False):
            if answer.verdict == "settled":
                self._window.drop([item])
                continue
            item.admitted, item.slot, item.slot_requested = answer, math.inf, asked
            item.needs_request = fetches and not answer.page
            if answer.slot > now:
                self._set_timer(item, answer.slot - now)
                if answer.slot > now + 0.01:
                    item.slot = answer.slot
            else:
                item.state = State.PERMIT
                self._ready.append(item)
        self._startable.set()

    def _set_timer(self, item: InflightEvent, seconds: float) -> None:
        item.state = State.SLOT
        item.timer = asyncio.get_running_loop().call_later(seconds, self._on_timer, item)

    def _on_timer(self, item: InflightEvent) -> None:
        item.state, item.timer = State.PERMIT, None
        self._ready.append(item)
        self._startable.set()

    # -- starting ----------------------------------------------------------------------------------

    async def run(self, start: Callable[[InflightEvent], None]) -> None:
        """Start ready events while permits are free and the byte budget allows it."""
        while not self._window.stopping:
            permits = self._free_permits()
            if not self._ready or permits <= 0 or self._window.over_budget:
                self._startable.clear()
                await self._startable.wait()
                continue
            if permits < self._options.start_group and permits < len(self._ready) and self.active:
                # A transaction for one start costs as much as a transaction for many starts.
                await self._clock.sleep(self._options.start_linger)
                permits = self._free_permits()
            if items := self._choose(permits):
                await self._begin(items, start)

    async def _begin(
        self, items: Sequence[InflightEvent], start: Callable[[InflightEvent], None]
    ) -> None:
        """Count the starts in the ledger, then start the handlers."""
        # Take the permits before the `await`. Otherwise they could be given out twice.
        self.active += len(items)
        begin = partial(
            self._admission.begin,
            [(item.delivery, item.event, item.admitted) for item in items],
            asks=[item.needs_request for item in items],
            writing=self._stage == "sink",
        )
        try:
            fences = await self._outage.retry_until_stored(begin)
        except BaseException:
            self.active -= len(items)
            raise
        now = self._clock.now()
        for item, fence in zip(items, fences, strict=True):
            if fence is None:
                # The event did not start: it is a duplicate, delayed or ended, and its delivery is
                # settled, or the lease was lost.
                self.finish(item)
                self._window.drop([item])
            else:
                item.state, item.fence, item.started = State.HANDLER, fence, now
                start(item)

    def _choose(self, permits: int) -> list[InflightEvent]:
        """Take up to `permits` events that may start now. Set timers for early ones, reslot late
        ones.
        """
        chosen: list[InflightEvent] = []
        late: list[InflightEvent] = []
        ready, in_flight, pace = self._ready, self._in_flight, self._pace
        paced, now = self._options.per_key is not None, self._clock.now()
        while ready and len(chosen) < permits:
            item = ready.popleft()
            if item.needs_request:
                host = item.event.key
                n = in_flight.get(host, 0)
                if n and n >= pace.concurrency(host):
                    item.state = State.HOST
                    self._waiting_for_host.setdefault(host, deque()).append(item)
                    continue
                if item.slot < now - LATE or item.slot_requested < pace.voided(host):
                    item.state = State.ADMISSION
                    late.append(item)
                    self._call_next(host)
                    continue
                if (paced or item.slot < math.inf or host in self._last_requests) and (
                    wait := self._wait_for_interval(host, item.admitted.slot, now)
                ):
                    self._set_timer(item, wait)
                    self._call_next(host)
                    continue
                in_flight[host] = n + 1
            item.state = State.START
            chosen.append(item)
        if late:
            task = asyncio.create_task(self.admit(late))
            self._reslots.add(task)
            task.add_done_callback(self._reslots.discard)
        return chosen

    def _wait_for_interval(self, host: str, slot: float, now: float) -> float:
        """Return the seconds until the host may get the request. If 0, record the request.

        After a late request, keep most of the interval. Otherwise several requests would start
        together.
        """
        last, sent = self._last_requests.get(host, (slot, 0.0))
        # At most the host's interval: the time between two slots may also be long because the host
        # had no work, or because this worker was slow.
        due = sent + MIN_GAP_SHARE * min(slot - last, self._pace.gap(host))
        if due > now + TIMER_RESOLUTION:
            return due - now
        if len(self._last_requests) > MAX_LAST_REQUESTS:
            self._last_requests = {
                host: last for host, last in self._last_requests.items() if last[1] > now - 60.0
            }
        self._last_requests[host] = slot, now
        return 0.0

    # -- permits -----------------------------------------------------------------------------------

    def _free_permits(self) -> int:
        return self._options.concurrency - self.active - self._returning

    def finish(self, item: InflightEvent) -> None:
        """Free the event's permit and its place at its host.

        The host's next waiting event is chosen first.
        """
        if item.needs_request:
            host = item.event.key
            n = self._in_flight[host] - 1
            if n:
                self._in_flight[host] = n
            else:
                del self._in_flight[host]
            if self._waiting_for_host:
                self._call_next(host)
        self.free_permit()

    def free_permit(self) -> None:
        self.active -= 1
        if self._returning:
            self._freed.set()
        self._startable.set()

    async def take_permit_again(self, wait: float) -> None:
        """Take a permit again after `wait` seconds, before events that have not started.

        The caller has the permit afterwards, even if it is cancelled.
        """
        try:
            await self._clock.sleep(wait)
            self._returning += 1
            try:
                while self.active >= self._options.concurrency:
                    self._freed.clear()
                    await self._freed.wait()
            finally:
                self._returning -= 1
        finally:
            self.active += 1

    def wake(self) -> None:
        """Check now whether events can start."""
        self._startable.set()

    def clear(self) -> None:
        """Forget the events that have not started."""
        self._ready.clear()
        self._waiting_for_host.clear()
        for task in list(self._reslots):
            task.cancel()

    # -- hosts: events of a slow host must not fill the prefetch window ----------------------------

    @property
    def waits_for_hosts(self) -> bool:
        """True if events wait because their host is at its concurrency limit."""
        return bool(self._waiting_for_host)

    @property
    def mixed(self) -> bool:
        """True if requests to more than one host are in flight."""
        return len(self._in_flight) > 1

    def full_hosts(self) -> list[str]:
        """Return the hosts whose waiting events use their whole share of the window."""
        return [
            host
            for host, waiting in self._waiting_for_host.items()
            if len(waiting) >= self._share(host)
        ]

    def take_excess(self) -> list[InflightEvent]:
        """Remove and return the newest waiting events beyond each host's share."""
        return [
            waiting.pop()
            for host, waiting in self._waiting_for_host.items()
            for _ in range(len(waiting) - self._share(host))
        ]

    def _share(self, host: str) -> int:
        """Return the host's share: proportional to its concurrency limit, at most a quarter."""
        window = self._options.window
        share = self._pace.concurrency(host) * (window // max(1, self._options.concurrency))
        return max(1, min(share, window // 4))

    def _call_next(self, host: str) -> None:
        """Make the host's longest-waiting event ready.

        Called when a place at the host is free, or when the chosen event could not use it.
        """
        if waiting := self._waiting_for_host.get(host):
            item = waiting.popleft()
            item.state = State.PERMIT
            self._ready.appendleft(item)
            if not waiting:
                del self._waiting_for_host[host]
