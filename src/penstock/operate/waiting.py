"""Waits of events that time alone does not end: their causes, and how they are ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from penstock.engine.publishing import end_delays
from penstock.operate.figures import plural
from penstock.operate.routes import unserved
from penstock.ports import LINKS_WAITING, OPEN, Clock, Transaction, UnitOfWork
from penstock.rules.waiting import APPROVAL, EXTRACTOR, TOPIC, Waiting, waiting

TOPICS = ("requests", "pages")  # topics on which the message of a delayed event may be
BATCH = 1000  # delayed events that become due in one transaction

# Row number, host and position of the message of a delayed event.
Parked: TypeAlias = tuple[int, str, int]


def waits_in(tx: Transaction) -> list[Waiting]:
    """Return each pause and each missing route, with the number of events that wait for it.

    Topics come first, then paused hosts and extractors, then causes of delayed events, then
    removals.
    """
    waits = tx.maintenance.waits()
    opened = tx.breakers.opened()
    found = [waiting(b.what, waits.pop(b.what, 0), reason=b.reason, since=b.at) for b in opened]
    found += unserved(tx, waits)
    topics = sorted(tx.queue.paused().items())
    # All other open events wait for the first topic. Events of later stages are few.
    others = [tx.counters.total(*OPEN) - sum(w.events for w in found)] if topics else []
    others += [0] * (len(topics) - 1)
    return [
        waiting(TOPIC + name, max(0, n), reason=reason)
        for (name, reason), n in zip(topics, others, strict=True)
    ] + [*found, *approvals_in(tx)]


def approvals_in(tx: Transaction) -> list[Waiting]:
    """Return the hosts of which too many pages disappeared, so that no record is removed."""
    return [
        waiting(
            APPROVAL + h.host,
            reason=f"{h.urls} of {h.known} known URLs disappeared, so no record is removed",
            since=h.since,
        )
        for h in tx.absences.held()
    ]


def all_ended(tx: Transaction) -> bool:
    """Return True if every accepted event has ended, and no link waits to become an event."""
    return tx.counters.total(*OPEN, LINKS_WAITING) == 0


def stuck_in(
    tx: Transaction, *, can_feed: Callable[[Transaction], bool] = lambda tx: False
) -> list[Waiting]:
    """Return the causes if every open event waits for a cause that time alone does not end.

    The list is empty if an event can still proceed without an operator. If a topic is paused, an
    event can proceed only if a worker holds its delivery. The list is also empty if `can_feed`
    returns True: waiting links can become events.
    """
    open_ = tx.counters.total(*OPEN)
    if not open_ or can_feed(tx):
        return []
    if tx.queue.paused():
        return waits_in(tx)
    if open_ != tx.counters.total("delayed"):
        return []
    blocked = sum(w.events for w in unserved(tx, tx.maintenance.waits()))
    return waits_in(tx) if blocked == open_ else []


def lines_about(found: Sequence[Waiting]) -> list[str]:
    """Return one line for each cause: its events, the reason and the next step."""
    return [
        f"{w.what}"
        + (f", {plural(w.events, 'event')} waiting" if w.events else "")
        + (f". {w.reason}" if w.reason else "")
        + f". Next: {w.next_step}"
        for w in found
    ]


def make_due(uow: UnitOfWork, parked: Sequence[Parked], clock: Clock) -> None:
    """End the delay of these events now."""
    for i in range(0, len(parked), BATCH):
        uow.write_now(partial(_make_due, parked[i : i + BATCH], clock.now()))


def _make_due(parked: Sequence[Parked], now: float, tx: Transaction) -> None:
    known = {name for name, _ in tx.queue_reports.groups()}
    end_delays(tx, parked, known.intersection(TOPICS), now)


# -- extractors ------------------------------------------------------------------------------------


def pause_extractor(uow: UnitOfWork, name: str, reason: str, clock: Clock) -> bool:
    """Pause an extractor for an operator. Return False if it was paused before."""
    now = clock.now()
    return uow.write_now(
        lambda tx: tx.breakers.open(EXTRACTOR + name, "", reason, now, counted=False)
    )


def resume_extractor(uow: UnitOfWork, name: str, clock: Clock) -> int | None:
    """Resume an extractor. Return the number of events that became due, None if it was not paused.

    From the first transaction on, no page is delayed for this extractor. So the later ones find all
    of them.
    """
    closed = uow.write_now(lambda tx: tx.breakers.close(EXTRACTOR + name))
    parked = uow.snapshot(lambda tx: tx.maintenance.waiting_for(EXTRACTOR + name))
    make_due(uow, parked, clock)
    return len(parked) if closed or parked else None
