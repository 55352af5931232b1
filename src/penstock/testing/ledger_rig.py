"""The rig of the ledger conformance suite, and the steps of an engine that its tests call.

See `ledger_suite` for the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.model import Event, Record, decode_event, encode_event, page_id
from penstock.ports import (
    OPEN,
    DeadLetter,
    Delivery,
    End,
    EventState,
    NewEvent,
    PageMeta,
    QueueAudit,
    Start,
    Transaction,
    UnitOfWork,
)
from penstock.rules.events import event_of
from penstock.rules.identity import DEFAULT_TRACKING, url_key
from penstock.testing.store_rig import StoreRig

URL = "https://shop.test/p/"
TOPIC = "requests"
# `audit` also gets the figures of a broker. The suite has no broker.
NO_QUEUE = QueueAudit(queued=None, groups=[], expired=0)
Outcome = Literal["success", "retry", "park", "release", "dead", "handover", "writing"]
OUTCOMES: tuple[Outcome, ...] = (
    "success",
    "retry",
    "park",
    "release",
    "dead",
    "handover",
    "writing",
)


class Begun(msgspec.Struct, frozen=True):
    """A started event."""

    event: Event
    row: int
    fence: int
    writing: bool
    starts: int  # starts before this one


def new_event(id_: str, url: str | None = None, **fields: Any) -> Event:
    """Return an event for `url`, or for a new URL."""
    return msgspec.structs.replace(event_of(url or URL + id_, id_=id_), **fields)


def key_of(event: Event) -> bytes:
    """Return the URL key that a ledger with default options stores."""
    return url_key(event.url, tracking=DEFAULT_TRACKING, canonical=True)


def a_record(key: str = "a", price: int = 1, **fields: Any) -> Record:
    body = msgspec.json.encode({"sku": key, "price": price})
    return msgspec.structs.replace(
        Record(
            extractor="product",
            version=1,
            key=key,
            index=0,
            fields=body,
            hash=page_id(body).encode(),
        ),
        **fields,
    )


def a_letter(event: Event, reason: str = "HTTP 404", **fields: Any) -> DeadLetter:
    return msgspec.structs.replace(
        DeadLetter(
            event_id=event.id,
            topic=event.topic,
            url=event.url,
            host=event.key,
            stage="fetch",
            reason=reason,
            fingerprint="f1",
            envelope=encode_event(event),
        ),
        **fields,
    )


def an_end(begun: Begun, outcome: Outcome, *, page: bytes | None = None, **fields: Any) -> End:
    """Return an end of a start, with a page if `page` is its body."""
    meta = None
    if page is not None:
        meta = PageMeta(
            page=page_id(page),
            url=begun.event.url,
            status=200,
            headers={"etag": "x", "last-modified": "y"},
            fetched_at=1.0,
            size=len(page),
        )
    event = begun.event
    delivery = Delivery(
        topic=event.topic,
        group="main",
        id=event.id,
        key=event.key,
        body=encode_event(event),
        position=1,
        token=1,
        deliveries=1,
        priority=int(event.priority),
    )
    end = End(
        event=event,
        delivery=delivery,
        row=begun.row,
        fence=begun.fence,
        outcome=outcome,
        meta=meta,
        was_writing=begun.writing,
        restarted=begun.starts > 0,
    )
    for name, value in fields.items():
        setattr(end, name, value)
    return end


def apply_ends(tx: Transaction, ends: Sequence[End], now: float) -> list[bool]:
    """Record ends as the engine does. Return for each end whether its fence was current.

    The ledger counts every transition but an end. The engine adds the numbers of ends itself, once
    for a whole batch.
    """
    tx.events.prefetch_fences([end for end in ends if end.outcome != "success"])
    done = {id(end) for end in tx.events.succeed([e for e in ends if e.outcome == "success"], now)}
    counts: Counter[str] = Counter()
    answers = []
    for end in ends:
        match end.outcome:
            case "success":
                status, changed = "success", id(end) in done
            case "dead":
                status = "dead"
                letter = a_letter(end.event, end.reason, envelope=end.delivery.body)
                changed = tx.events.mark_dead(end, letter, now)
            case "writing":
                status, changed = "writing", tx.events.mark_writing(end, now)
            case "retry" | "park":
                status, changed = "delayed", tx.events.postpone(end, now, status="delayed")
            case _:
                status, changed = "pending", tx.events.postpone(end, now, status="pending")
        if changed:
            counts[status] += 1
            counts["writing" if end.was_writing else "in_flight"] -= 1
        answers.append(changed)
    tx.counters.add(TOPIC, counts)
    return answers


class LedgerRig(StoreRig[UnitOfWork]):
    """Base class of a rig. `open` returns the transactions of a worker."""

    async def accept(self, ledger: UnitOfWork, *events: Event) -> None:
        """Insert events as pending."""
        now = self.now()

        def work(tx: Transaction) -> None:
            rows = []
            for n, event in enumerate(events):
                stamped = msgspec.structs.replace(event, accepted_at=round(now, 3))
                rows.append(NewEvent(stamped, encode_event(stamped), n + 1))
            tx.events.enter(rows, now)

        await ledger.write(work)

    async def state(self, ledger: UnitOfWork, id_: str) -> EventState:
        return (await ledger.read(lambda tx: tx.lookup.states([id_])))[id_]

    async def status(self, ledger: UnitOfWork, *ids: str) -> str:
        """Return the statuses of events, separated by spaces."""
        states = await ledger.read(lambda tx: tx.lookup.states(ids))
        return " ".join(states[id_].status for id_ in ids)

    async def try_begin(
        self,
        ledger: UnitOfWork,
        *events: Event,
        worker: str = "w1",
        writing: bool = False,
        request: bool = True,
    ) -> list[Begun | None]:
        """Count starts of events. The result is None for an event that has ended."""
        now = self.now()

        def work(tx: Transaction) -> list[Begun | None]:
            states = tx.lookup.states([e.id for e in events])
            starts = [
                Start(
                    states[e.id].n,
                    e,
                    states[e.id].fence if states[e.id].status == "pending" else None,
                    request,
                )
                for e in events
            ]
            fences = tx.events.begin(starts, worker, now, writing=writing)
            return [
                None
                if fence is None
                else Begun(start.event, start.n, fence, writing, states[start.event.id].starts)
                for start, fence in zip(starts, fences, strict=True)
            ]

        return await ledger.write(work)

    async def begin(self, ledger: UnitOfWork, event: Event, **more: Any) -> Begun:
        """Count a start of an event that is open."""
        (begun,) = await self.try_begin(ledger, event, **more)
        assert begun is not None, f"{event.id} is open, but it was not started"
        return begun

    async def start(self, ledger: UnitOfWork, id_: str, **more: Any) -> Begun:
        """Accept an event for a new URL, and count its start."""
        event = new_event(id_)
        await self.accept(ledger, event)
        return await self.begin(ledger, event, **more)

    async def end(
        self,
        ledger: UnitOfWork,
        begun: Begun,
        outcome: Outcome,
        *,
        page: bytes | None = None,
        deleted: Counter[str] | None = None,
        **fields: Any,
    ) -> bool:
        """Record an end, and check the counters. Return whether its fence was current."""
        end, now = an_end(begun, outcome, page=page, **fields), self.now()
        (answer,) = await ledger.write(lambda tx: apply_ends(tx, [end], now))
        await self.check_counters(ledger, deleted)
        return answer

    async def reopen(
        self, ledger: UnitOfWork, id_: str, *, was: str, promoted: bool = False
    ) -> Event:
        """Make an ended event pending, as a redrive or a promotion does."""
        now = self.now()

        def work(tx: Transaction) -> Event:
            found = tx.reports.event(id_)
            assert found is not None
            event = decode_event(found.envelope)
            body = encode_event(msgspec.structs.replace(event, accepted_at=round(now, 3)))
            tx.events.reopen(
                event,
                found.n,
                was=was,
                reason="again",
                envelope=body,
                position=9,
                now=now,
                promoted=promoted,
            )
            tx.dead_letters.drop(id_)
            return event

        return await ledger.write(work)

    async def facts(self, ledger: UnitOfWork, *ids: str) -> list[Any]:
        """Return all that reports show about these events, and all counters, for comparison."""

        def work(tx: Transaction) -> list[Any]:
            rows = [tx.reports.event(id_) for id_ in ids]
            histories = [tx.reports.history(row.n) for row in rows if row is not None]
            return [
                rows,
                # Steps of one moment have no order.
                [sorted(steps, key=lambda step: (step.at, step.status)) for steps in histories],
                [tx.letter_reports.letter(id_) for id_ in ids],
                tx.status_reports.standing(),
            ]

        return await ledger.read(work)

    async def check_counters(self, ledger: UnitOfWork, deleted: Counter[str] | None = None) -> None:
        """Check I10: each counter equals the number of its events.

        `deleted` has the events by status that retention has deleted. They stay counted.
        """
        audit = await ledger.read(
            lambda tx: tx.status_reports.audit(NO_QUEUE, entered=tx.counters.entered())
        )
        counted = Counter({name: n for (_, name), n in audit.counters.items() if n})
        rows = Counter({name: n for (_, name), n in audit.rows.items()})
        rows.update(deleted or {})
        assert dict(counted) == dict(rows), "a counter differs from the number of its events"
        assert audit.letterless == 0, "a dead letter belongs to an event that is not dead"
        assert audit.links_waiting == audit.links_stored, "the counter of links differs from rows"
        pending = await ledger.read(lambda tx: tx.counters.pending(TOPIC))
        assert pending == sum(rows[status] for status in OPEN)
