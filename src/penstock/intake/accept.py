"""Intake: turns URLs of `push` and findings of sources into events that the ledger has accepted.

An event gets its canonical URL, id, host key, route and trace here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.engine.lifecycle import Lifecycle
from penstock.model import Event, Priority, Reason, Route
from penstock.ports import Accepted, Batch, Clock, Finding, Transaction
from penstock.rules.events import ANY_ROUTE, Refused, event_of
from penstock.rules.identity import BadUrl

if TYPE_CHECKING:
    from penstock.intake.mapping import Mapping

FULL_WAIT = 0.5  # seconds between two tries while the queue is full. No event is dropped.


class Pushed(msgspec.Struct, kw_only=True):
    """Result of a push."""

    new: int = 0
    known: int = 0
    refused: list[tuple[str, str]] = []  # (input, reason)
    first: str = ""  # id of the first new event, for `penstock trace`


def new_id() -> str:
    """Return a random id for an event whose cause has no id, such as a push."""
    return secrets.token_hex(16)


async def push(
    lifecycle: Lifecycle,
    urls: Iterable[str],
    *,
    clock: Clock,
    source: str = "push",
    route: Route = ANY_ROUTE,
    priority: str = "normal",
    force: bool = False,
    window: float | None = None,
    trace: str | None = None,
    batch: int = 1000,
    on_progress: Callable[[Pushed], None] | None = None,
    wait_when_full: bool = True,
) -> Pushed:
    """Accept one event for each URL.

    URLs are read lazily, so a list of millions needs little memory. Each batch is durable before
    the next one is read. If the queue is full, the call waits and tries the rest again. If
    `wait_when_full` is False, the rest of the batch is refused instead.
    """
    result = Pushed(refused=[])
    waiting: list[Event] = []

    async def send() -> None:
        nonlocal waiting
        while waiting:
            answers = await lifecycle.accept(waiting)
            if not result.first and Accepted.NEW in answers:
                result.first = waiting[answers.index(Accepted.NEW)].id
            result.new += answers.count(Accepted.NEW)
            result.known += answers.count(Accepted.KNOWN)
            waiting = [e for e, a in zip(waiting, answers, strict=True) if a is Accepted.FULL]
            if waiting and not wait_when_full:
                result.refused.extend((e.url, "the queue is full") for e in waiting)
                waiting = []
            if on_progress is not None:
                on_progress(result)
            if waiting:
                await clock.sleep(FULL_WAIT)

    for url in urls:
        try:
            waiting.append(
                event_of(
                    url,
                    id_=new_id(),
                    source=source,
                    route=route,
                    priority=Priority.named(priority),
                    force=force,
                    window=window,
                    trace=trace,
                    host_by=lifecycle.settings.host_by,
                )
            )
        except BadUrl as e:
            result.refused.append((url, e.reason))
        if len(waiting) >= batch:
            await send()
    await send()
    return result


# -- sources ---------------------------------------------------------------------------------------


class Taken(msgspec.Struct, kw_only=True):
    """Result of a source's findings."""

    events: list[Event] = []
    answers: list[Accepted] = []  # of each event
    refused: list[tuple[Finding, str, Reason]] = []  # with the sentence and its code
    skipped: int = 0


def judge(mapping: Mapping, findings: Sequence[Finding]) -> Taken:
    """Turn findings into events, refusals and skips, without writing."""
    taken = Taken()
    for finding in findings:
        try:
            event = mapping.event(finding)
        except Refused as e:
            taken.refused.append((finding, e.reason, e.code))
            continue
        if event is None:
            taken.skipped += 1
        else:
            taken.events.append(event)
    return taken


class Intake:
    """Accepts the findings of one source into the ledger."""

    def __init__(
        self, lifecycle: Lifecycle, mapping: Mapping, clock: Clock, *, source: str
    ) -> None:
        self.lifecycle, self.source = lifecycle, source
        self.mapping, self._clock = mapping, clock

    async def take(
        self, batch: Batch, *, in_transaction: Callable[[Transaction, Taken], None] | None = None
    ) -> Taken:
        """Accept a batch together with the source's cursor. Durable when it returns.

        If the queue is full, the call waits and tries the remaining events again. A refused finding
        becomes a dead letter. `in_transaction` runs in each transaction. If it raises an exception,
        the transaction is rolled back.
        """
        judged = judge(self.mapping, batch.findings)
        cursor = None if batch.cursor is None else (self.source, batch.cursor)
        waiting, answers = judged.events, {}
        while True:
            now = Taken(events=waiting, refused=judged.refused, skipped=judged.skipped)

            def together(tx: Transaction, given: list[Accepted], now: Taken = now) -> None:
                now.answers = given
                if Accepted.FULL not in given:
                    for finding, reason, _ in now.refused:
                        self.lifecycle.bury_finding(tx, finding, self.source, reason)
                if in_transaction is not None:
                    in_transaction(tx, now)

            given = await self.lifecycle.accept(waiting, cursor=cursor, in_transaction=together)
            answers.update({e.id: a for e, a in zip(waiting, given, strict=True)})
            waiting = [e for e, a in zip(waiting, given, strict=True) if a is Accepted.FULL]
            if not waiting:
                return msgspec.structs.replace(
                    judged, answers=[answers[e.id] for e in judged.events]
                )
            await self._clock.sleep(FULL_WAIT)
