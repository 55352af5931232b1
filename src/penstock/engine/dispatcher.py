"""Dispatcher: chooses which admitted events start now, by permits, slots and limits of each host.

Slots are reserved by `admission`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from penstock.engine.admission import Admission
from penstock.engine.inflight import InflightEvent, State
from penstock.engine.outage import Outage
from penstock.engine.settings import Options, Stage
from penstock.engine.shares import DomainShares, domain_of
from penstock.engine.window import PrefetchWindow
from penstock.errors import BadEnvelope
from penstock.model import Event
from penstock.ports import Clock, Delivery, Pace
from penstock.rules.pace import LATE
from penstock.rules.permits import may_use_reserved
from penstock.rules.speed import Scarcity

# Share of the interval that is kept after a late request. Below 1, so that the host catches up.
MIN_GAP_SHARE = 0.95
TIMER_RESOLUTION = 0.005  # seconds. A shorter wait is not worth a timer.
# Hosts. Above this, the last requests of hosts without one in the last 60 s are dropped.
MAX_LAST_REQUESTS = 8192
MEASURE_EVERY = 1.0  # seconds between two counts of long requests while permits are scarce


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
        self._paced = options.per_key is not None
        self._options, self._clock, self._outage, self._stage = options, clock, outage, stage
        self._ready: deque[InflightEvent] = deque()  # events that can start when a permit is free
        self.active = 0  # permits in use
        # Started events that wait for a slot without a permit, and how many of them need one again.
        self._sleeping: set[InflightEvent] = set()
        self._returning = 0
        self._startable, self._freed = asyncio.Event(), asyncio.Event()
        self._in_flight: dict[str, int] = {}  # host key -> requests in flight
        self._waiting_for_host: dict[str, deque[InflightEvent]] = {}  # host key -> events
        self._shares = DomainShares(options.concurrency)  # events that wait for their domain
        self._measured: tuple[float, Scarcity | None] = -math.inf, None  # time and result
        # Permits of each domain, for returning handlers. None after a change of the permits.
        self._held_cache: Counter[str] | None = None
        # Host key -> (slot, start) of the last request, for hosts whose requests are spaced.
        self._last_requests: dict[str, tuple[float, float]] = {}
        self._reslots: set[asyncio.Task[None]] = set()  # tasks that admit late events again

    @property
    def idle(self) -> bool:
        """True if no handler runs and no event is ready."""
        return not (self.active or self._ready or self._shares.waiting)

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
            waiting = self._shares.waiting
            if not (self._ready or waiting) or permits <= 0 or self._window.over_budget:
                self._startable.clear()
                await self._startable.wait()
                continue
            if (
                permits < self._options.start_group
                and (waiting or permits < len(self._ready))
                and self.active
            ):
                # A transaction for one start costs as much as a transaction for many starts.
                await self._clock.sleep(self._options.start_linger)
                permits = self._free_permits()
            if items := self._choose(permits):
                await self._begin(items, start)
            elif self._shares.waiting and not self._ready:
                # No domain may use the free permits. The end of any request wakes this loop.
                self._startable.clear()
                await self._startable.wait()

    async def _begin(
        self, items: Sequence[InflightEvent], start: Callable[[InflightEvent], None]
    ) -> None:
        """Count the starts in the ledger, then start the handlers."""
        # Take the permits before the `await`. Otherwise they could be given out twice.
        self.active += len(items)
        self._held_cache = None
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
        ready, in_flight, shares = self._ready, self._in_flight, self._shares
        pace, now = self._pace, self._clock.now()
        if shares.waiting and not shares.has_slow and not self._others_wait():
            # The requests of all other hosts have ended, so permits need not be shared.
            ready.extendleft(reversed(list(shares.items())))
            shares.waiting.clear()
        # The last free permits are shared by domain, unless only one host has requests.
        spare = max(0, permits - shares.kept)
        alone = len(in_flight) <= 1 and not shares.has_slow
        limit = 0 if shares.waiting else permits if alone else spare
        while ready and len(chosen) < limit:
            item = ready.popleft()
            if item.needs_request:
                host = item.event.key
                if n := in_flight.get(host, 0):
                    if n >= pace.concurrency(host):
                        self._wait_for_host(item)
                        continue
                elif in_flight:  # a second host
                    limit = min(limit, spare)
                    if len(chosen) >= limit:
                        ready.appendleft(item)
                        break
                if not self._is_due(item, host, now, late):
                    continue
                in_flight[host] = n + 1
            item.state = State.START
            chosen.append(item)
        if (ready or shares.waiting) and len(chosen) < permits:
            self._choose_by_domain(permits, now, chosen, late)
        if late:
            task = asyncio.create_task(self.admit(late))
            self._reslots.add(task)
            task.add_done_callback(self._reslots.discard)
        return chosen

    def _choose_by_domain(
        self, permits: int, now: float, chosen: list[InflightEvent], late: list[InflightEvent]
    ) -> None:
        """Share the remaining permits by registrable domain."""
        in_flight, shares = self._in_flight, self._shares
        self._queue_by_domain()
        # The others request nothing: their pages are stored.
        while self._ready and len(chosen) < permits:
            item = self._ready.popleft()
            item.state = State.START
            chosen.append(item)
        turns = shares.turns(self._held(), now)
        while (domain := turns.next(permits - len(chosen))) is not None:
            item = shares.take(domain)
            host = item.event.key
            n = in_flight.get(host, 0)
            if n and n >= self._pace.concurrency(host):
                self._wait_for_host(item)
            elif self._is_due(item, host, now, late):
                in_flight[host] = n + 1
                item.state = State.START
                chosen.append(item)
                turns.start(domain)
            if domain in shares.waiting:
                turns.again(domain)

    def _queue_by_domain(self) -> None:
        """Put the ready events that need a request into the queues of their domains."""
        others: deque[InflightEvent] = deque()
        for item in self._ready:
            if item.needs_request:
                self._shares.put(item)
            else:
                others.append(item)
        self._ready = others

    def _wait_for_host(self, item: InflightEvent) -> None:
        item.state = State.HOST
        self._waiting_for_host.setdefault(item.event.key, deque()).append(item)

    def _is_due(
        self, item: InflightEvent, host: str, now: float, late: list[InflightEvent]
    ) -> bool:
        """Return True if the event's slot is valid now. Otherwise, let it wait for a slot."""
        if item.slot < now - LATE or item.slot_requested < self._pace.voided(host):
            item.state = State.ADMISSION
            late.append(item)
            self._call_next(host)
            return False
        if (self._paced or item.slot < math.inf or host in self._last_requests) and (
            wait := self._wait_for_interval(host, item.admitted.slot, now)
        ):
            self._set_timer(item, wait)
            self._call_next(host)
            return False
        return True

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
        """Return the permits for events that have not started.

        Returning handlers come first, but they may not get the reserved permits.
        """
        free = self._options.concurrency - self.active
        return free - min(self._returning, max(0, free - self._shares.reserved))

    def _held(self) -> Counter[str]:
        """Return the permits of each domain that has requests in flight."""
        return self._shares.by_domain(self._in_flight, self._sleeping)

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
        self._free_permit()

    def _free_permit(self) -> None:
        self.active -= 1
        self._held_cache = None
        if self._returning:
            self._freed.set()
        self._startable.set()

    def leave_permit(self, item: InflightEvent) -> None:
        """Free the permit of a started event. Call `take_permit_again` afterwards."""
        self._sleeping.add(item)
        self._free_permit()

    async def take_permit_again(self, item: InflightEvent, wait: float) -> None:
        """Take a permit again after `wait` seconds, before events that have not started.

        The caller has the permit afterwards, even if it is cancelled.
        """
        try:
            await self._clock.sleep(wait)
            self._returning += 1
            try:
                while not self._may_return(item):
                    self._freed.clear()
                    await self._freed.wait()
            finally:
                self._returning -= 1
        finally:
            self._sleeping.discard(item)
            self.active += 1
            self._held_cache = None

    def _may_return(self, item: InflightEvent) -> bool:
        free = self._options.concurrency - self.active
        if free <= 0 or free > self._shares.reserved or len(self._in_flight) <= 1:
            return free > 0
        # Each free permit wakes all returning handlers, so the permits are counted once for them.
        if self._held_cache is None:
            self._held_cache = self._held()
        return may_use_reserved(self._held_cache[domain_of(item.event.key)], free)

    def scarcity(self) -> Scarcity | None:
        """Return the lowest accepted speed if slow requests make permits scarce.

        The HTTP client calls this several times a second.
        """
        free, now = self._free_permits(), self._clock.now()
        if free > self._shares.reserved or not (self._ready or self._shares.waiting):
            return None
        at, found = self._measured
        if not at <= now < at + MEASURE_EVERY:
            # A single host may keep all permits, also if it is slow.
            long = self._count_long(now) if self._others_wait() else 0
            if long and free <= 0:
                self._queue_by_domain()
            found = self._shares.scarcity(free, long)
            self._measured = now, found
        return found

    def _count_long(self, now: float) -> int:
        """Return the number of long requests, and remember that their domains are slow."""
        held, sleeping = self._window.held.values(), self._sleeping
        return self._shares.count_long((item for item in held if item not in sleeping), now)

    def _others_wait(self) -> bool:
        """Return True if more than one host has requests in flight or events for a permit."""
        waiting = chain(self._ready, self._shares.items())
        return self.mixed or any(item.event.key not in self._in_flight for item in waiting)

    def wake(self) -> None:
        """Check now whether events can start."""
        self._startable.set()

    def clear(self) -> None:
        """Forget the events that have not started."""
        self._ready.clear()
        self._waiting_for_host.clear()
        self._shares.waiting.clear()
        for task in list(self._reslots):
            task.cancel()

    # -- hosts: events of a slow host must not fill the prefetch window ----------------------------

    @property
    def waits_for_hosts(self) -> bool:
        """True if events wait for their host's concurrency limit, or for their domain's share."""
        return bool(self._waiting_for_host or self._shares.waiting)

    @property
    def mixed(self) -> bool:
        """True if requests to more than one host are in flight."""
        return len(self._in_flight) > 1

    def is_crowded(self, seconds: float) -> bool:
        """Return True if most handlers with a permit have lasted so long."""
        begun, held = self._clock.now() - seconds, self._window.held.values()
        lasting = sum(
            i.started < begun
            for i in held
            if i.state is State.HANDLER and i.task and i not in self._sleeping
        )
        return 2 * lasting > self.active

    def full_hosts(self, *, crowded: bool = False) -> list[str]:
        """Return the hosts whose waiting events use their whole share of the window."""
        return [host for host, (n, share) in self._window_shares(crowded).items() if n >= share]

    def take_excess(self, *, crowded: bool) -> list[InflightEvent]:
        """Remove and return the newest waiting events beyond each host's share of the window."""
        # If events of more hosts wait than there are shares, some hosts have no share.
        room = max(1, self._options.window // 4) if crowded else self._options.window
        excess: Counter[str] = Counter()
        for host, (n, share) in self._window_shares(crowded).items():
            kept = min(n, share, room)
            excess[host], room = n - kept, room - kept
        taken: list[InflightEvent] = []
        for item in reversed(list(self._shares.items())):
            if excess[item.event.key] > 0:
                excess[item.event.key] -= 1
                taken.append(item)
        self._shares.remove(taken)
        for host, n in excess.items():
            if n:
                queue = self._waiting_for_host[host]
                taken.extend(queue.pop() for _ in range(n))
                if not queue:
                    del self._waiting_for_host[host]
        return taken

    def _window_shares(self, crowded: bool) -> dict[str, tuple[int, int]]:
        """Return the waiting events of each host, and its share of the window.

        A share is proportional to the host's concurrency limit, and at most a quarter. If the host
        is slow, or the window is crowded, all waiting hosts share that quarter.
        """
        is_slow, o = self._shares.is_slow, self._options
        waiting = {host: len(queue) for host, queue in self._waiting_for_host.items()}
        if crowded or self._shares.has_slow:
            # Events of fast domains that wait for a permit start soon. They do not count.
            for item in self._shares.items():
                if crowded or is_slow(item.event.key):
                    host = item.event.key
                    waiting[host] = waiting.get(host, 0) + 1
        quarter = o.window // 4
        return {
            host: (
                n,
                max(
                    1,
                    min(
                        self._pace.concurrency(host) * (o.window // max(1, o.concurrency)),
                        quarter // len(waiting) if crowded or is_slow(host) else quarter,
                    ),
                ),
            )
            for host, n in waiting.items()
        }

    def _call_next(self, host: str) -> None:
        """Make the host's longest-waiting event ready.

        Called when a place at the host is free, or when the chosen event could not use it.
        """
        if waiting := self._waiting_for_host.get(host):
            item = waiting.popleft()
            item.state = State.PERMIT
            if self._shares.waiting:
                self._shares.put_first(item)
            else:
                self._ready.appendleft(item)
            if not waiting:
                del self._waiting_for_host[host]
