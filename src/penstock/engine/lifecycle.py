"""Transactions that accept events and end them.

See `admission` for the transactions between acceptance and end.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from penstock.engine.breakers import Breakers, Tripped
from penstock.engine.claim_session import Claims, ClaimSession
from penstock.engine.gone import Visits
from penstock.engine.link_feeder import LinkFeeder
from penstock.engine.links import LinkAcceptor, share_out
from penstock.engine.messages import Message
from penstock.engine.publishing import insert_events, publish, reopen_duplicate
from penstock.engine.settings import LifecycleSettings
from penstock.errors import NewerMessage
from penstock.model import (
    Ack,
    Dead,
    Event,
    Outcome,
    Reason,
    Release,
    Retry,
    decode_event,
    mint,
)
from penstock.ports import (
    Accepted,
    Clock,
    DeadLetter,
    Delivery,
    Durability,
    End,
    Finding,
    PageStore,
    RecordsOfEvent,
    StagedPages,
    Topics,
    Transaction,
    UnitOfWork,
)
from penstock.rules.dependencies import read_other_data, reads_data
from penstock.rules.fingerprint import fingerprint
from penstock.rules.masking import mask
from penstock.rules.reasons import sentence

_by_row = operator.attrgetter("row")


def _encode_finding(finding: Finding, source: str) -> bytes:
    """Encode a finding for its dead letter.

    A hook may have put a value into the payload that JSON cannot encode. Then up to 10,000
    characters of the payload's `ascii` text are stored, so that no finding stops its source.
    """
    try:
        # Mask the base URL: the URL of an API often contains its key.
        base = None if finding.base is None else mask(finding.base)
        return msgspec.json.encode(
            {"source": source, **msgspec.to_builtins(msgspec.structs.replace(finding, base=base))}
        )
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        try:
            shown = ascii(finding.payload)[:10_000]
        except Exception as e:  # `ascii` calls code of the user's object
            shown = f"a payload that cannot be shown: {type(e).__name__}"
        return msgspec.json.encode(
            {
                "source": source,
                "id": finding.id,
                "cause": ascii(finding.cause),
                "payload": {"shown": shown},
            }
        )


class _PagesGone(Exception):
    """Retention deleted pages that the page store believed to be stored."""


class Lifecycle:
    """Accepts events and ends them. One transaction for each call."""

    def __init__(
        self,
        uow: UnitOfWork,
        claims: Claims,
        pages: PageStore,
        topics: Topics,
        breakers: Breakers,
        settings: LifecycleSettings,
        *,
        url_key: Callable[[str], bytes],
        clock: Clock,
    ) -> None:
        self._uow, self._claims, self.pages, self._topics = uow, claims, pages, topics
        self.settings, self._url_key, self._clock = settings, url_key, clock
        self.breakers = breakers
        self._links = LinkAcceptor(settings, url_key)
        self.feeder = LinkFeeder(uow, claims, topics, self._links, settings.max_pending, clock)

    # -- accepting ---------------------------------------------------------------------------------

    async def accept(
        self,
        events: Sequence[Event],
        *,
        cursor: tuple[str, bytes | None] | None = None,
        durability: Durability = Durability.CONFIGURED,
        in_transaction: Callable[[Transaction, list[Accepted]], None] | None = None,
    ) -> list[Accepted]:
        """Insert events and publish their messages.

        Durable when it returns, at the level of `durability`. An event with a known id
        is not inserted again. The source's cursor moves in the same transaction, unless the limit
        of pending events refused an event. `in_transaction` runs in the transaction too. An
        exception from `in_transaction` undoes the transaction.
        """
        answers = await self._uow.write(
            lambda tx: self._accept(tx, events, cursor, in_transaction), durability=durability
        )
        self._topics.wake(e.topic for e in events)
        return answers

    def _accept(
        self,
        tx: Transaction,
        events: Sequence[Event],
        cursor: tuple[str, bytes | None] | None,
        in_transaction: Callable[[Transaction, list[Accepted]], None] | None,
    ) -> list[Accepted]:
        now = self._clock.now()
        room = {
            topic: self.settings.max_pending - tx.counters.pending(topic)
            for topic in {e.topic for e in events}
        }
        answers: list[Accepted] = []
        fresh: dict[str, Event] = {}
        known = tx.lookup.known([e.id for e in events])
        for e in events:
            if e.id in fresh or e.id in known:
                answers.append(Accepted.KNOWN)
            elif room[e.topic] <= 0:
                answers.append(Accepted.FULL)
            else:
                room[e.topic] -= 1
                fresh[e.id] = e
                answers.append(Accepted.NEW)
        insert_events(tx, list(fresh.values()), now, self.settings.pipeline)
        if cursor is not None and Accepted.FULL not in answers:
            tx.sources.move_cursor(*cursor, now)
        if in_transaction is not None:
            in_transaction(tx, answers)
        return answers

    def bury_finding(self, tx: Transaction, finding: Finding, source: str, reason: str) -> None:
        """Store a finding as a dead letter, if it cannot become an event. Once for each finding."""
        id_ = mint("refused", source, finding.id)
        if tx.dead_letters.has(id_):
            return
        tx.dead_letters.put(
            DeadLetter(
                event_id=id_,
                topic="requests",
                url=(finding.url or "").encode("utf-8", "replace").decode(),
                stage="source",
                reason=reason,
                fingerprint=fingerprint("source", "permanent", reason),
                envelope=_encode_finding(finding, source),
            ),
            self._clock.now(),
        )
        tx.counters.add("requests", {"unreadable": 1})

    # -- ending ------------------------------------------------------------------------------------

    async def conclude(
        self, ends: Sequence[End], bodies: Sequence[tuple[str, bytes]] = ()
    ) -> list[bool]:
        """Write all consequences of these ends in one transaction.

        Durable when it returns, at the level of the option `durability`. The result is False if the
        fence of an end was outdated. Such an end changes nothing. The outcome `absent` becomes
        `success` or `dead`, also in `ends`.
        """
        session = await self._claims.open(lambda: self._links.keys([end.links for end in ends]))
        while True:
            staged = self.pages.stage(bodies)
            try:
                await self.pages.send(staged)
                answers, tripped, written = await self._uow.write(
                    partial(self._conclude, session=session, ends=ends, staged=staged)
                )
                break
            except _PagesGone:  # stage the bodies again
                self.pages.forget(staged)
            except BaseException:
                self.pages.forget(staged)
                raise
        if written is not ends:
            for end, final in zip(ends, written, strict=True):
                if end.outcome == "absent":
                    end.outcome, end.reason, end.result = final.outcome, final.reason, final.result
        self._topics.wake(
            {o.topic for end in ends for o in end.publish}
            | {end.event.topic for end in ends if end.links or end.outcome in ("dead", "release")}
        )
        self.feeder.wake(links=any(end.links for end in ends))
        if tripped:
            await self.breakers.open(tripped)
        return answers

    def _conclude(
        self, tx: Transaction, session: ClaimSession, ends: Sequence[End], staged: StagedPages
    ) -> tuple[list[bool], list[Tripped], Sequence[End]]:
        """Return if each fence was current, what exceeded the breaker's limits, and the ends."""
        shares, room = share_out([end.links for end in ends]), self._links.room(tx)
        now = self._clock.now()
        ends = self.breakers.causes(tx, ends)
        if tx.pages.index(staged):
            raise _PagesGone
        visits = Visits(tx, ends, self.settings.gone, self._url_key)
        ends = visits.ends
        tx.events.prefetch_fences([end for end in ends if end.outcome != "success"])
        successes = tx.events.succeed(
            sorted([end for end in ends if end.outcome == "success"], key=_by_row), now
        )
        applied = {id(end) for end in successes}
        answers: list[bool] = []
        delta: dict[str, Counter[str]] = {
            topic: Counter() for topic in {end.event.topic for end in ends}
        }
        settles: list[tuple[Delivery, Outcome]] = []
        dead: list[End] = []
        with_records = [(end, self._url_key(end.event.url)) for end in successes if end.records]
        self.write_records(tx, with_records, delta)
        visits.record(successes, now)
        for end, share in zip(ends, shares, strict=True):
            count = delta[end.event.topic]
            if end.outcome == "success":
                outcome: Outcome = Ack()
                changed = id(end) in applied
                if changed:
                    if end.links:
                        self._links.accept_or_keep(tx, session, end, share, room, now, count)
                    if reads_data(end.extractors):
                        self._reopen_newer_data(tx, end, now)
                    count["success"] += 1
                    if name := end.result or end.reason:
                        count[name] += 1
            else:
                changed, outcome = self._end(tx, end, now, count)
            answers.append(changed)
            if changed:
                if end.outcome == "dead":
                    dead.append(end)
                if end.waits_for:  # the message of its next start is this one
                    tx.events.set_position(end.row, end.delivery.position)
                count["writing" if end.was_writing else "in_flight"] -= 1
                if end.publish:
                    publish(tx, end.publish)
            # If the fence is outdated, another worker has the event, or a server crash lost the
            # start, which is not synced. Release the message. The next worker that receives it
            # decides by the ledger row.
            settles.append((end.delivery, outcome if changed else Release()))
        for topic, count in delta.items():
            tx.counters.add(topic, count)
        tripped = self.breakers.count(tx, successes, dead, now) if successes or dead else []
        tx.queue.settle(settles)
        return answers, tripped, ends

    def _end(
        self, tx: Transaction, end: End, now: float, count: Counter[str]
    ) -> tuple[bool, Outcome]:
        """Record an end that is not a success.

        Return whether its fence was current, and the outcome of the delivery.
        """
        match end.outcome:
            case "dead":
                changed = tx.events.mark_dead(end, _dead_letter(end), now)
                if changed:
                    count["dead"] += 1
                    self._promote_duplicate(tx, end.event, now)
                return changed, Dead(end.reason)
            case "retry" | "park":
                changed = tx.events.postpone(end, now, status="delayed")
                count["delayed"] += changed
                return changed, Retry(max(0.0, end.until - now), end.reason)
            case "writing":
                changed = tx.events.mark_writing(end, now)
                count["writing"] += changed
                return changed, Ack()
            case _:  # release, handover
                changed = tx.events.postpone(end, now, status="pending")
                count["pending"] += changed
                return changed, Release() if end.outcome == "release" else Ack()

    def write_records(
        self,
        tx: Transaction,
        written: Sequence[tuple[RecordsOfEvent, bytes]],
        delta: Mapping[str, Counter[str]],
    ) -> None:
        """Compare records with earlier ones, and append the records to send to the outboxes.

        `written` has the URL key of each event.
        """
        s = self.settings
        lines = tx.outbox.diff(written, delta, emit_unchanged=s.emit_unchanged, hooks=s.hooks)
        for sink in s.sinks:
            chosen = [x for x in lines if not sink.only or x.extractor in sink.only]
            if chosen:
                tx.outbox.append(sink.name, chosen)

    def _promote_duplicate(self, tx: Transaction, dead: Event, now: float) -> None:
        """Reopen the oldest duplicate of a dead owner, once, with a new budget."""
        found = tx.lookup.oldest_duplicate(dead.id)
        if found is not None:
            reason = sentence(Reason.PROMOTED, dead.id)
            reopen_duplicate(tx, found, reason=reason, now=now, promoted=True)
            tx.events.reassign_duplicates(dead.id, found.id)

    def _reopen_newer_data(self, tx: Transaction, end: End, now: float) -> None:
        """Reopen the newest duplicate of a success whose extractors have read older event data.

        The duplicate then waits for the end of the freshness window, as a later event does.
        """
        found = tx.lookup.newest_duplicate(end.event.id)
        if found is None or found.n < end.row:
            return
        try:
            event = decode_event(found.envelope)
        except NewerMessage:
            pass  # a newer release reads the data
        else:
            if self.settings.drops(event) or not read_other_data(end.extractors, event.data):
                return
        reopen_duplicate(tx, found, reason=sentence(Reason.NEWER_DATA, end.event.id), now=now)


def _dead_letter(end: End) -> DeadLetter:
    # A message on `pages` or `records` contains the envelope. The dead letter needs the envelope,
    # with the fields that only a newer release knows.
    own, body = end.delivery.topic == end.event.topic, end.delivery.body
    return DeadLetter(
        event_id=end.event.id,
        topic=end.event.topic,
        url=end.event.url,
        host=end.event.key,
        stage=end.stage,
        error_class=end.error_class,
        reason=end.reason,
        fingerprint=end.fingerprint,
        detail=end.detail,
        envelope=body if own else Message.read(body).event,
        headers=msgspec.json.encode(end.delivery.headers).decode(),
    )
