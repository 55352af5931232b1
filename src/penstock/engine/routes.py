"""Routes of this worker: which events it can fetch, and which it leaves to others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from penstock.engine.publishing import end_delays
from penstock.engine.settings import LifecycleSettings
from penstock.errors import StoreUnavailable
from penstock.model import Event, Outcome, Reason, Retry
from penstock.ports import Clock, Durability, EventState, Topics, Transaction, UnitOfWork
from penstock.rules.reasons import sentence
from penstock.rules.routes import ROUTE, ServedPool, cause_of, describe, route_of, serves
from penstock.rules.waiting import RECHECK

HEARTBEAT = 5.0  # seconds between two announcements
LIFETIME = 4 * HEARTBEAT  # seconds after which a worker without an announcement serves nothing
# Seconds that an event waits before it is released on a broker that gives all events of a host to
# one worker. The same worker gets it again, until another worker gets the host.
PARTITIONED_HOLD = 60.0
BATCH = 1000  # events that become due in one transaction
TOPIC = "requests"


class RouteGate:
    """Delays the events of one transaction whose route this worker does not serve."""

    def __init__(self, tx: Transaction, settings: LifecycleSettings, now: float) -> None:
        self._tx, self._settings, self._now = tx, settings, now
        self._fleet: Sequence[Sequence[ServedPool]] | None = None  # read when it is needed

    def delay(self, e: Event, state: EventState) -> Outcome | None:
        """Return None if this worker may start the event.

        Otherwise the event waits in the ledger, and the result is the outcome of its delivery. A
        worker that serves the route releases it: see `Routes`.
        """
        s, now, route = self._settings, self._now, e.route
        if serves(s.pools, route):
            return None
        if self._fleet is None:
            self._fleet = list(self._tx.routes.served().values())
        elsewhere = any(serves(pools, route) for pools in self._fleet)
        accepted = e.accepted_at or state.accepted_at  # a redrive renews only that of the envelope
        ends = accepted + s.max_age if s.max_age and not elsewhere else math.inf
        if ends <= now:
            return None  # too old to wait: the fetch fails, and the event ends dead
        until = min(now + RECHECK, ends)
        if route.render:
            reason = sentence(Reason.RENDER)
        else:
            code = Reason.OTHER_WORKER if elsewhere else Reason.NO_ROUTE
            reason = sentence(code, describe(route))
        self._tx.events.delay(e, state, until, reason, now, waits_for=cause_of(route))
        return Retry(until - now, "route")


class Routes:
    """The proxy pools of one worker, and the events that wait for them.

    A worker that gets an event and does not serve its route delays it. This worker then makes it
    due within a second, and usually receives it first.
    """

    def __init__(
        self,
        uow: UnitOfWork,
        topics: Topics,
        pools: Sequence[ServedPool],
        *,
        worker: str,
        clock: Clock,
    ) -> None:
        self._uow, self._topics, self._pools = uow, topics, pools
        self._worker, self._clock = worker, clock

    async def announce(self) -> int:
        """Record what this worker serves, and make events due that waited for it. Return how many.

        Called at the start and every `HEARTBEAT` seconds. Does nothing if there are no pools.
        """
        if not self._pools:
            return 0
        await self._uow.write(
            lambda tx: tx.routes.announce(self._worker, self._pools, LIFETIME),
            durability=Durability.RELAXED,
        )
        return await self.release()

    async def release(self) -> int:
        """Make events due that wait for a route of this worker. Return how many.

        Called every second. Reads one row for each cause of a wait.
        """
        if not self._pools:
            return 0
        released = 0
        for cause in await self._uow.read(self._served_causes):
            while some := await self._uow.write(partial(self._release, cause)):
                released += some
        if released:
            self._topics.wake([TOPIC])
        return released

    def _served_causes(self, tx: Transaction) -> list[str]:
        routes = {cause: route_of(cause) for cause in tx.maintenance.causes(ROUTE)}
        return [c for c, route in routes.items() if route and serves(self._pools, route)]

    def _release(self, cause: str, tx: Transaction) -> int:
        now = self._clock.now()
        caps = self._topics.caps_of(TOPIC)
        # A member of the group has the order of a host: these are partitions.
        partitioned = caps.lease == "connection" and caps.order_per_key == "native"
        hold = PARTITIONED_HOLD if partitioned else 0.0
        rows = tx.maintenance.some_waiting_for(cause, BATCH, due_before=now + RECHECK - hold)
        end_delays(tx, rows, (TOPIC,), now)
        return len(rows)

    async def withdraw(self) -> None:
        """Record that this worker serves nothing, before it stops."""
        if self._pools:
            with suppress(StoreUnavailable):  # then the row expires
                await self._uow.write(
                    lambda tx: tx.routes.withdraw(self._worker), durability=Durability.RELAXED
                )
