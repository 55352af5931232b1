"""Intake: turns URLs of `push` and findings of sources into events that the ledger has accepted.

An event gets its canonical URL, id, host key, route and trace here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.engine.lifecycle import Lifecycle
from penstock.model import Event, Priority, Reason, Route
from penstock.ports import Accepted, Batch, Clock, Durability, Finding, Transaction
from penstock.rules.events import ANY_ROUTE, Refused, event_of
from penstock.rules.identity import BadUrl

if TYPE_CHECKING:
    from penstock.intake.mapping import Mapping

JUDGED_TOGETHER = 50  # findings. With 64 KiB of data each, they take about 3 ms.
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


async def accept_all(
    lifecycle: Lifecycle,
    events: Sequence[Event],
    clock: Clock,
    *,
    cursor: tuple[str, bytes] | None = None,
    durability: Durability = Durability.CONFIGURED,
    in_transaction: Callable[[Transaction, list[Accepted]], None] | None = None,
    on_answers: Callable[[list[Accepted]], None] | None = None,
) -> list[Accepted]:
    """Accept all events, and return the answer of each. Durable when it returns.

    While the queue is full, the call waits and tries the refused events again. `in_transaction`
    gets the answers of one try, in its transaction. If it raises an exception, the transaction is
    rolled back. `on_answers` gets them when they are durable.
    """
    answers = [Accepted.FULL] * len(events)
    while True:
        waiting = [i for i, answer in enumerate(answers) if answer is Accepted.FULL]
        given = await lifecycle.accept(
            [events[i] for i in waiting],
            cursor=cursor,
            durability=durability,
            in_transaction=in_transaction,
        )
        for i, answer in zip(waiting, given, strict=True):
            answers[i] = answer
        if on_answers is not None:
            on_answers(given)
        if Accepted.FULL not in given:
            return answers
        await clock.sleep(FULL_WAIT)


async def push(
    lifecycle: Lifecycle,
    urls: Iterable[str | Event],
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
) -> Pushed:
    """Accept these events, and one event for each URL. While the queue is full, the call waits.

    URLs are read lazily, so a list of millions needs little memory. Each batch is durable before
    the next one is read.
    """
    result = Pushed(refused=[])
    waiting: list[Event] = []

    def count(answers: list[Accepted]) -> None:
        result.new += answers.count(Accepted.NEW)
        result.known += answers.count(Accepted.KNOWN)
        if on_progress is not None:
            on_progress(result)

    async def send() -> None:
        answers = await accept_all(lifecycle, waiting, clock, on_answers=count)
        if not result.first and Accepted.NEW in answers:
            result.first = waiting[answers.index(Accepted.NEW)].id
        waiting.clear()

    for given in urls:
        if isinstance(given, Event):
            waiting.append(given)
        else:
            try:
                waiting.append(
                    event_of(
                        given,
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
            except (BadUrl, Refused) as e:
                result.refused.append((given, e.reason))
        if len(waiting) >= batch:
            await send()
    if waiting:
        await send()
    return result


def objects_as_events(
    *,
    route: Route,
    priority: str,
    force: bool,
    window: float | None,
    trace: str | None,
    host_by: Literal["host", "domain"],
) -> Callable[[dict[str, Any]], Event]:
    """Return a function that makes the event of a pushed JSON object, as sources do.

    The arguments are the values that the object does not set. The function raises Refused.
    """
    from penstock.authoring.pipeline import Pipeline
    from penstock.intake.mapping import Mapping

    pipeline = Pipeline("push")
    pipeline.source("push:", name="push", route=route, priority=priority, window=window)
    mapping = Mapping(pipeline.sources[0], host_by=host_by)

    def make(payload: dict[str, Any]) -> Event:
        event = mapping.event(Finding(id=new_id(), payload=payload))
        assert event is not None  # there is no `where` and no hook
        return msgspec.structs.replace(event, force=force, trace=trace or event.trace)

    return make


# -- sources ---------------------------------------------------------------------------------------


class Taken(msgspec.Struct, kw_only=True):
    """Result of a source's findings."""

    events: list[Event] = []
    answers: list[Accepted] = []  # of each event, or in a transaction of each event that it tries
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


async def judge_beside_the_loop(mapping: Mapping, findings: Sequence[Finding]) -> Taken:
    """Do the same as `judge`, but let the event loop continue.

    An expression takes about 2 µs for each value of a payload, and a payload may have many. So
    expressions run in a thread. A hook is user code that may not expect a thread. It runs on the
    loop, and other work of the loop runs between two findings.
    """
    if mapping.has_expressions and not mapping.has_hook:
        return await asyncio.to_thread(judge, mapping, findings)
    taken = Taken()
    for n in range(0, len(findings), JUDGED_TOGETHER):
        if n:
            await asyncio.sleep(0)
        part = judge(mapping, findings[n : n + JUDGED_TOGETHER])
        taken.events += part.events
        taken.refused += part.refused
        taken.skipped += part.skipped
    return taken


class Incomplete(Exception):
    """A batch that had to be accepted as a whole, and was not accepted.

    If `taken.refused` is empty, the queue is full.
    """

    def __init__(self, taken: Taken) -> None:
        super().__init__()
        self.taken = taken


class Intake:
    """Accepts the findings of one source into the ledger: of a reader and of a webhook."""

    def __init__(
        self, lifecycle: Lifecycle, mapping: Mapping, clock: Clock, *, source: str
    ) -> None:
        self.lifecycle, self.source = lifecycle, source
        self.mapping, self._clock = mapping, clock

    async def take(
        self,
        batch: Batch,
        *,
        whole: bool = False,
        in_transaction: Callable[[Transaction, Taken], None] | None = None,
    ) -> Taken:
        """Accept a batch together with the source's cursor, and count it. Durable when it returns.

        While the queue is full, the call waits. A refused finding becomes a dead letter. With
        `whole`, the sender keeps the batch and is answered: then a full queue or a refused finding
        raises Incomplete, and only the refused findings are counted.

        `in_transaction` runs in each transaction, with the answers of that try. If it raises an
        exception, the transaction is rolled back.
        """
        taken = await judge_beside_the_loop(self.mapping, batch.findings)
        if whole and taken.refused:
            refused = Taken(refused=taken.refused)
            await self.lifecycle.accept(
                (),
                durability=Durability.RELAXED,
                in_transaction=lambda tx, _: self._count(tx, refused),
            )
            raise Incomplete(taken)

        def together(tx: Transaction, given: list[Accepted]) -> None:
            taken.answers = given
            if in_transaction is not None:
                in_transaction(tx, taken)
            if Accepted.FULL not in given:
                for finding, reason, _ in taken.refused:
                    self.lifecycle.bury_finding(tx, finding, self.source, reason)
            elif whole:
                raise Incomplete(taken)
            self._count(tx, taken)

        only_counts = not taken.events and not taken.refused and batch.cursor is None
        taken.answers = await accept_all(
            self.lifecycle,
            taken.events,
            self._clock,
            cursor=None if batch.cursor is None else (self.source, batch.cursor),
            durability=Durability.RELAXED if only_counts else Durability.CONFIGURED,
            in_transaction=together,
        )
        return taken

    def _count(self, tx: Transaction, taken: Taken) -> None:
        """Add the answers of one try to the counters of the source.

        Skipped and refused findings count with the last try.
        """
        is_last = Accepted.FULL not in taken.answers
        tx.sources.count(
            self.source,
            new=taken.answers.count(Accepted.NEW),
            known=taken.answers.count(Accepted.KNOWN),
            skipped=taken.skipped if is_last else 0,
            refused=len(taken.refused) if is_last else 0,
            now=self._clock.now(),
        )
