"""Admission of deliveries and start of handlers: duplicates, freshness, slots, claims, fences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.engine.budgets import StartGate, Traffic
from penstock.engine.claim_session import Claims, ClaimSession, baseline_of, last_success
from penstock.engine.foreign import refuse_foreign
from penstock.engine.publishing import state_of
from penstock.engine.routes import RouteGate
from penstock.engine.settings import LifecycleSettings
from penstock.engine.unreadable import dead_letter_for_bad_envelope, leave_to_newer
from penstock.errors import BadEnvelope, NewerMessage
from penstock.model import Ack, Event, Outcome, Reason, Release, Retry
from penstock.ports import (
    Admitted,
    ClaimChange,
    Clock,
    Delivery,
    Durability,
    EventState,
    Holder,
    NewEvent,
    Pace,
    Start,
    Transaction,
    UnitOfWork,
)
from penstock.rules import freshness, gone
from penstock.rules.dependencies import read_other_data
from penstock.rules.reasons import sentence
from penstock.rules.routes import needs_proxy
from penstock.rules.waiting import HOST

PARK_AFTER = 10.0  # seconds. If a slot is further away, the event is delayed in the ledger.
HOLD_AFTER = 0.05  # seconds. If a slot is further away, the broker holds the host until then.
ALREADY_SETTLED = Admitted(verdict="settled")
ENDED = ("success", "dead", "duplicate")


class _SlotPlan(msgspec.Struct):
    """Consequences of reserved slots."""

    answers: list[Admitted] = []
    far: list[tuple[Delivery, Event, float]] = []  # deliveries that are delayed until the slot
    holds: dict[tuple[str, str], dict[str, float]] = {}  # (topic, group) -> host key -> until


class Admission:
    """Decides which deliveries may start, and records their starts.

    Each call writes one transaction. `admit` writes a second one if claims are in an external store
    and a host must wait for its slot.

    Messages of an external broker may be copies, may be early, or may belong to an event that
    another worker processes. `admit` decides by the ledger row.
    """

    def __init__(
        self,
        uow: UnitOfWork,
        claims: Claims,
        pace: Pace,
        settings: LifecycleSettings,
        *,
        url_key: Callable[[str], bytes],
        worker: str,
        clock: Clock,
        durability: Durability,
        traffic: Traffic,
    ) -> None:
        self._traffic = traffic
        self._uow, self._claims, self._pace, self.settings = uow, claims, pace, settings
        self._url_key, self._worker, self._clock = url_key, worker, clock
        self._durability = durability  # of `admit`

    # -- a delivery arrives ------------------------------------------------------------------------

    async def admit(
        self, deliveries: Sequence[tuple[Delivery, Event | BadEnvelope]], *, fetches: bool
    ) -> list[Admitted]:
        """Decide for each delivery whether it may start.

        Deliveries of duplicates, of delayed and ended events, and of unreadable messages are
        settled here. `fetches` is False for pages and records, which need neither a claim nor a
        slot.
        """
        session = await self._claims.open(
            lambda: [
                self._url_key(e.url) for _, e in deliveries if fetches and isinstance(e, Event)
            ]
        )
        answers, wants = await self._uow.write(
            lambda tx: self._admit(tx, session, deliveries, fetches), durability=self._durability
        )
        await session.apply()
        if not wants:
            return answers
        slots = await self._pace.reserve(wants, within=PARK_AFTER)
        plan = self._assign_slots(deliveries, answers, slots)
        if plan.far or plan.holds:
            await self._uow.write(
                lambda tx: self._record_slots(tx, plan), durability=self._durability
            )
        return plan.answers

    def _admit(
        self,
        tx: Transaction,
        session: ClaimSession,
        deliveries: Sequence[tuple[Delivery, Event | BadEnvelope]],
        fetches: bool,
    ) -> tuple[list[Admitted], Counter[str]]:
        """Return the answers, and the slots that must still be reserved for each host."""
        answers, wants = self._classify(tx, session, deliveries, fetches)
        slots = session.reserve(tx, wants, PARK_AFTER) if wants else None
        if slots is None:
            return answers, wants
        plan = self._assign_slots(deliveries, answers, slots)
        self._record_slots(tx, plan)
        return plan.answers, Counter()

    def _classify(
        self,
        tx: Transaction,
        session: ClaimSession,
        deliveries: Sequence[tuple[Delivery, Event | BadEnvelope]],
        fetches: bool,
    ) -> tuple[list[Admitted], Counter[str]]:
        """Return which deliveries may start, without slots, and how many slots each host needs."""
        now = self._clock.now()
        answers: list[Admitted] = []
        settles: list[tuple[Delivery, Outcome]] = []
        wants: Counter[str] = Counter()
        readable = [e for _, e in deliveries if not isinstance(e, BadEnvelope)]
        states = tx.lookup.states([e.id for e in readable])
        keys = [self._url_key(e.url) for e in readable if not e.force] if fetches else []
        holders = session.holders(tx, keys)
        gate = RouteGate(tx, self.settings, now)
        budgets = StartGate(tx, self.settings, self._traffic, now)
        if fetches:
            budgets.peek(readable)
        for d, e in deliveries:
            outcome: Outcome | None = None
            admitted = ALREADY_SETTLED
            if isinstance(e, NewerMessage):
                outcome = leave_to_newer(tx, d, e, now)
            elif isinstance(e, BadEnvelope):
                outcome = dead_letter_for_bad_envelope(tx, d, e, now)
            else:
                # Use each state once. If an event is in the batch twice, its first delivery may
                # have changed the state.
                state = states.pop(e.id, None) or self._state_or_enter(tx, d, e, now)
                if state.status in ENDED:
                    outcome = Ack()
                else:
                    outcome = tx.queue.defer_copy(d, state, now)
                if outcome is None:
                    needs_request = fetches and not state.page
                    if needs_request and (needs_proxy(e.route) or e.route.render):
                        outcome = gate.delay(e, state)
                if outcome is None:
                    holder = (
                        _pop_holder(tx, session, holders, self._url_key(e.url))
                        if needs_request and not e.force
                        else None
                    )
                    if holder is not None:
                        outcome = self._apply_freshness(tx, session, e, state, holder, now)
                    if outcome is None and needs_request and self.settings.budgets.any:
                        outcome = budgets.delay_early(e, state)
                    if outcome is None:
                        wants[e.key] += needs_request
                        admitted = self._admitted(tx, e, state, holder, needs_request)
            if outcome is not None:
                settles.append((d, outcome))
            answers.append(admitted)
        if settles:
            tx.queue.settle(settles)
        return answers, +wants

    def _state_or_enter(self, tx: Transaction, d: Delivery, e: Event, now: float) -> EventState:
        """Return the event's state. Insert the event if it was published without intake.

        Raises StoreRefused if the event belongs to the ledger of another pipeline.
        """
        state = state_of(tx, e.id)
        if state is None:
            refuse_foreign(e, self.settings, d.topic)
            accepted = msgspec.structs.replace(e, accepted_at=round(now, 3))
            tx.events.enter([NewEvent(accepted, d.body, d.position)], now)
            state = state_of(tx, e.id)
            assert state is not None
        return state

    def _admitted(
        self,
        tx: Transaction,
        e: Event,
        state: EventState,
        holder: Holder | None,
        needs_request: bool,
    ) -> Admitted:
        return Admitted(
            verdict="go",
            row=state.n,
            fence=state.fence if state.status == "pending" else None,
            free=holder is None,
            slot=-1.0 if needs_request else 0.0,
            starts=state.starts,
            attempts=state.attempts,
            failures=tx.lookup.failures(state.n) if state.attempts and needs_proxy(e.route) else {},
            crashes=state.crashes,
            page=state.page,
            page_meta=state.page_meta or b"",
            progress=tx.lookup.progress(state.n) if state.starts and needs_request else b"",
            baseline=None if holder is None else baseline_of(tx, holder),
        )

    # -- freshness ---------------------------------------------------------------------------------

    def _decide(
        self, tx: Transaction, e: Event, state: EventState, holder: Holder, now: float
    ) -> freshness.Take | freshness.Duplicate | freshness.Delay:
        s = self.settings
        window = e.window if e.window is not None else s.follow_window if e.parent else s.window
        claim = tx.lookup.claim_progress(holder.owner, holder.next)
        return freshness.decide(
            claim,
            e.id,
            accepted=state.accepted_at,
            now=now,
            window=window,
            settle=s.settle,
            drop=s.drops(e),
            other_data=claim is not None and read_other_data(claim.extractors, e.data),
            removed=gone.says_removed(e.data),
        )

    def _apply_freshness(
        self,
        tx: Transaction,
        session: ClaimSession,
        e: Event,
        state: EventState,
        holder: Holder,
        now: float,
    ) -> Outcome | None:
        """Return None if the event may be fetched.

        Otherwise record it as a duplicate or as delayed, and return its delivery's outcome.
        """
        match self._decide(tx, e, state, holder, now):
            case freshness.Take():
                return None
            case freshness.Duplicate(of=of):
                tx.events.mark_duplicate(e, state, of, now)
                return Ack()
            case freshness.Delay(until=until, becomes_next=becomes_next):
                if becomes_next:
                    session.set_next(tx, self._url_key(e.url), e.id)
                tx.events.delay(e, state, until, sentence(Reason.WINDOW), now)
                return Retry(until - now, "window")

    # -- slots -------------------------------------------------------------------------------------

    def _assign_slots(
        self,
        deliveries: Sequence[tuple[Delivery, Event | BadEnvelope]],
        answers: Sequence[Admitted],
        reserved: Mapping[str, Sequence[float]],
    ) -> _SlotPlan:
        """Give each admitted delivery its slot, in order."""
        now = self._clock.now()
        slots = {host: iter(times) for host, times in reserved.items()}
        plan = _SlotPlan()
        for (d, e), a in zip(deliveries, answers, strict=True):
            if a.slot < 0 and isinstance(e, Event):
                a.slot = slot = next(slots[e.key])
                # All messages of a paused host are delivered, and each event becomes `delayed`.
                if slot > now + HOLD_AFTER and not self._is_paused(e.key):
                    until = plan.holds.setdefault((d.topic, d.group), {})
                    # Hold the host until its last assigned slot. If some slots are too far away,
                    # hold it until the first of these, which is still free.
                    if until.get(d.key, 0.0) <= now + PARK_AFTER:
                        until[d.key] = slot
                if slot > now + PARK_AFTER:
                    plan.far.append((d, e, slot))
                    a = ALREADY_SETTLED
            plan.answers.append(a)
        return plan

    def _is_paused(self, host: str) -> bool:
        """Return True if the host is paused until an operator resumes it."""
        return self._pace.blocked_until(host) == math.inf

    def _record_slots(self, tx: Transaction, plan: _SlotPlan) -> None:
        """Delay events whose slot is far away, and hold hosts until their slots."""
        now = self._clock.now()
        for d, e, slot in plan.far:
            # If the lease was lost, another worker may have the event.
            if tx.queue.settle([(d, Retry(slot - now, "slot"))])[0]:
                state = state_of(tx, e.id)
                assert state is not None
                if self._is_paused(e.key):
                    reason, cause = sentence(Reason.HOST_PAUSED, e.key), HOST + e.key
                else:
                    reason, cause = sentence(Reason.SLOT, e.key), ""
                tx.events.delay(e, state, slot, reason, now, waits_for=cause)
        for (topic, group), until in plan.holds.items():
            tx.queue.hold_keys(topic, group, until)

    # -- a handler starts --------------------------------------------------------------------------

    async def begin(
        self,
        starts: Sequence[tuple[Delivery, Event, Admitted]],
        *,
        asks: Sequence[bool],
        writing: bool = False,
    ) -> list[int | None]:
        """Count starts before the work, and take the claims of events that send a request (`asks`).

        Return each fence. It is None if the event does not start. Then its delivery is settled, or
        its lease was lost. A power cut may lose the starts.
        """

        def wanted() -> dict[bytes, Event]:
            events: dict[bytes, Event] = {}
            for (_, e, _), needs_request in zip(starts, asks, strict=True):
                if needs_request and not e.force:
                    events.setdefault(self._url_key(e.url), e)
            return events

        session = await self._claims.open_for_start(wanted, self._takeovers)
        return await self._uow.write(
            lambda tx: self._begin(tx, session, starts, asks, writing),
            durability=Durability.RELAXED,
        )

    def _takeovers(
        self, tx: Transaction, holders: Mapping[bytes, Holder], wanted: Mapping[bytes, Event]
    ) -> list[ClaimChange]:
        """Return changes of claims that other events have and `wanted` events may take over."""
        changes = []
        for key, e in wanted.items():
            holder, state = holders.get(key), state_of(tx, e.id)
            if holder is None or holder.owner == e.id or state is None:
                continue
            if isinstance(self._decide(tx, e, state, holder, self._clock.now()), freshness.Take):
                changes.append(ClaimChange(key, e.id, last_success(tx, holder), holder.owner))
        return changes

    def _begin(
        self,
        tx: Transaction,
        session: ClaimSession,
        starts: Sequence[tuple[Delivery, Event, Admitted]],
        asks: Sequence[bool],
        writing: bool,
    ) -> list[int | None]:
        now = self._clock.now()
        settles: list[tuple[Delivery, Outcome]] = []
        leases = tx.queue.holds([d for d, _, _ in starts])
        unstarted = iter(
            tx.queue.may_start(
                [a.row for (_, _, a), held in zip(starts, leases, strict=True) if held]
            )
        )
        keys = [
            self._url_key(e.url) if held and needs_request and not e.force else None
            for (_, e, _), needs_request, held in zip(starts, asks, leases, strict=True)
        ]
        free: dict[bytes, str] = {}
        for (_, e, a), key in zip(starts, keys, strict=True):
            if key is not None and a.free:
                free.setdefault(key, e.id)
        acquired = session.acquire(tx, free, now)
        taken = dict(acquired)
        holders = session.holders(
            tx, [key for key in keys if key is not None and key not in acquired]
        )
        may: list[bool] = []
        gate = StartGate(tx, self.settings, self._traffic, now)
        gate.read([start for start, ask in zip(starts, asks, strict=True) if ask])
        for (d, e, a), key, needs_request, held in zip(starts, keys, asks, leases, strict=True):
            outcome: Outcome | None = None
            if key is not None and not (key in acquired and acquired[key].owner == e.id):
                outcome = self._take_claim(tx, session, e, key, taken, holders, now)
            if held and not next(unstarted):
                outcome = Release()
            if held and needs_request and outcome is None and self.settings.budgets.any:
                outcome = gate.delay(e, a)
            may.append(held and outcome is None)
            if outcome is not None:
                settles.append((d, outcome))
        gate.write()
        session.take_over(tx, [c for key, c in taken.items() if key not in acquired], now)
        going = [
            Start(a.row, e, a.fence, needs_request)
            for (_, e, a), needs_request, ok in zip(starts, asks, may, strict=True)
            if ok
        ]
        begun = iter(tx.events.begin(going, self._worker, now, writing=writing))
        fences = [next(begun) if ok else None for ok in may]
        settles += [
            (d, Ack())
            for (d, _, _), ok, fence in zip(starts, may, fences, strict=True)
            if ok and fence is None
        ]
        if settles:
            tx.queue.settle_undurably(settles)
        return fences

    def _take_claim(
        self,
        tx: Transaction,
        session: ClaimSession,
        e: Event,
        key: bytes,
        taken: dict[bytes, ClaimChange],
        holders: dict[bytes, Holder | None],
        now: float,
    ) -> Outcome | None:
        """Take the claim for an event. Return an outcome if the event cannot have the claim.

        Another event may have taken the claim since admission, for example an event of this batch.
        """
        holder = _pop_holder(tx, session, holders, key)
        owner = taken[key].owner if key in taken else holder.owner if holder is not None else None
        if owner is None:
            if not session.takes_over:
                return Release()  # another event had the claim when this event tried to take it
            taken[key] = ClaimChange(key, e.id)
        elif owner != e.id:
            state = state_of(tx, e.id)
            assert state is not None
            if state.status in ENDED:
                return Ack()
            if key in taken:
                tx.events.mark_duplicate(e, state, owner, now)
                return Ack()
            assert holder is not None
            outcome = self._apply_freshness(tx, session, e, state, holder, now)
            if outcome is not None or not session.takes_over:
                return outcome or Release()
            taken[key] = ClaimChange(key, e.id, last_success(tx, holder))
        return None


def _pop_holder(
    tx: Transaction, session: ClaimSession, holders: dict[bytes, Holder | None], key: bytes
) -> Holder | None:
    """Return the holder from the batch's result. Each result is used once, then read again."""
    return holders.pop(key) if key in holders else session.holder(tx, key)
