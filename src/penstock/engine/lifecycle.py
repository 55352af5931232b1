"""The order of writes: what becomes true together when an event is accepted, admitted, begun or
concluded, and what follows for the broker.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.engine.claim_session import Seen
from penstock.engine.maintenance import Upkeep
from penstock.engine.unit_of_work import out_of
from penstock.errors import BadEnvelope
from penstock.model import (
    Ack,
    Dead,
    Event,
    Link,
    Outcome,
    Release,
    Retry,
    child_id,
    decode_event,
    encode_event,
    mint,
)
from penstock.ports import Accepted, Admitted, Delivery, End, Finding, Holder, Published
from penstock.rules import breaker, freshness
from penstock.rules.fingerprint import fingerprint
from penstock.rules.identity import BadUrl, canonical_url, host_key
from penstock.rules.masking import mask
from penstock.rules.proxies import needs_proxy

PARK_BEYOND = 10.0  # a longer wait for a slot is a delay in the books, not a place in the window
HOLD_BEYOND = 0.05
SETTLED = Admitted(verdict="settled")
ACK: Outcome = Ack()
# seconds after which a copy of a message, whose event another worker has in flight, is looked at
# again
BUSY = 2.0
EARLY = 0.05
_by_row = operator.attrgetter("row")


def _own_envelope(end: End) -> bytes:
    """The event's bytes as they came; on another topic than its own they lie inside that topic's
    message, and the event has to do.
    """
    return end.delivery.body if end.delivery.topic == end.event.topic else encode_event(end.event)


def _letter_of(finding: Finding, source: str) -> bytes:
    """Its JSON. A hook may have left something in the payload that has none: then it is shown as it
    prints, so that no finding stops its source.
    """
    try:
        base = (
            None if finding.base is None else mask(finding.base)
        )  # an API's own address often holds its key
        return msgspec.json.encode(
            {"source": source, **msgspec.to_builtins(msgspec.structs.replace(finding, base=base))}
        )
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        try:
            shown = ascii(finding.payload)[:10_000]
        except Exception as e:  # whatever a user's object does when it is printed
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
    """Pages that the page store took for known are not there any more."""


class Books(Upkeep):
    """One transaction per call; what the ledger and the broker come to know together.

    A broker that lies apart (`broker.apart`: a relay) notes there what it is to be told, and is
    told after the commit. Its messages may come in copies, early, or for an event that somebody is
    at already: the ledger knows, and `admit` decides by it.
    """

    # -- intake ------------------------------------------------------------------------------------

    async def accept(
        self,
        events: Sequence[Event],
        *,
        cursor: tuple[str, bytes | None] | None = None,
        beside: Callable[[Any, list[Accepted]], None] | None = None,
    ) -> list[Accepted]:
        """Durable when it returns. The cursor moves in the same transaction, and only if nothing
        was refused as full.

        `beside` belongs to it too; what it raises undoes it.
        """
        answers = await self.write(lambda tx: self._accept(tx, events, cursor, beside))
        self.broker.wake(e.topic for e in events)
        return answers

    def _accept(
        self,
        tx: Any,
        events: Sequence[Event],
        cursor: tuple[str, bytes | None] | None,
        beside: Callable[[Any, list[Accepted]], None] | None,
    ) -> list[Accepted]:
        now = self.clock.now()
        room = {
            topic: self.settings.max_pending - self.ledger.pending_in(tx, topic)
            for topic in {e.topic for e in events}
        }
        answers: list[Accepted] = []
        fresh: dict[str, Event] = {}
        known = self.ledger.known_in(tx, [e.id for e in events])
        for e in events:
            if e.id in fresh or e.id in known:
                answers.append(Accepted.KNOWN)
            elif room[e.topic] <= 0:
                answers.append(Accepted.FULL)
            else:
                room[e.topic] -= 1
                fresh[e.id] = e
                answers.append(Accepted.NEW)
        self._enter(tx, list(fresh.values()), now)
        if cursor is not None and Accepted.FULL not in answers:
            self.ledger.move_cursor_in(tx, *cursor, now)
        if beside is not None:
            beside(tx, answers)
        return answers

    def refuse_in(self, tx: Any, finding: Finding, source: str, reason: str) -> None:
        """What a source found and no event can be made of: a dead letter, once however often it is
        read.
        """
        id_ = mint("refused", source, finding.id)
        if self.ledger.has_letter_in(tx, id_):
            return
        self.ledger.letter_in(
            tx,
            event_id=id_,
            topic="requests",
            url=(finding.url or "").encode("utf-8", "replace").decode(),
            host="",
            now=self.clock.now(),
            stage="source",
            kind="permanent",
            reason=reason,
            fingerprint=fingerprint("source", "permanent", reason),
            detail="",
            envelope=_letter_of(finding, source),
            headers="{}",
        )
        self.ledger.count_in(tx, "requests", {"unreadable": 1})

    def _enter(self, tx: Any, events: Sequence[Event], now: float) -> None:
        stamped = [msgspec.structs.replace(e, accepted_at=round(now, 3)) for e in events]
        outs = [out_of(e, encode_event(e)) for e in stamped]
        placed = self.broker.place_in(tx, outs)
        assert all(answer is Published.OK for answer, _ in placed), (
            "the bound is kept here, not by the broker's own depth"
        )
        self.ledger.enter_in(
            tx,
            [
                (e, out.body, position)
                for e, out, (_, position) in zip(stamped, outs, placed, strict=True)
            ],
            now,
        )

    # -- a delivery arrives ------------------------------------------------------------------------

    async def admit(
        self, deliveries: Sequence[tuple[Delivery, Event | BadEnvelope]], *, fetches: bool
    ) -> list[Admitted]:
        """Dedup, freshness, the slot. What is a duplicate, delayed or long ended is settled here
        and now; `fetches=False` (pages, records) skips both.
        """
        if not self.claims.apart:
            return await self.write(
                lambda tx: self._admit(tx, deliveries, fetches), durable=self.broker.apart
            )
        seen = Seen(
            await self.claims.holders(
                [self.ledger.url_key(e.url) for _, e in deliveries if isinstance(e, Event)]
                if fetches
                else []
            )
        )
        answers, wants = await self.write(
            lambda tx: self._judge(tx, seen, deliveries, fetches), durable=self.broker.apart
        )
        for following in seen.nexts:
            await self.claims.set_next(*following)
        if not wants:
            return answers
        slots = await self.claims.reserve(wants, within=PARK_BEYOND)
        if max(times[-1] for times in slots.values()) <= self.clock.now() + HOLD_BEYOND:
            return self._slots(None, deliveries, answers, slots)
        return await self.write(
            lambda tx: self._slots(tx, deliveries, answers, slots), durable=self.broker.apart
        )

    def _admit(
        self, tx: Any, deliveries: Sequence[tuple[Delivery, Event | BadEnvelope]], fetches: bool
    ) -> list[Admitted]:
        answers, wants = self._judge(tx, self.claims, deliveries, fetches)
        return (
            self._slots(
                tx, deliveries, answers, self.claims.reserve_in(tx, wants, within=PARK_BEYOND)
            )
            if wants
            else answers
        )

    def _judge(
        self,
        tx: Any,
        claims: Any,
        deliveries: Sequence[tuple[Delivery, Event | BadEnvelope]],
        fetches: bool,
    ) -> tuple[list[Admitted], Counter[str]]:
        """Who may go on, without slots yet, and how many of these each host has to give."""
        now = self.clock.now()
        answers: list[Admitted] = []
        settles: list[tuple[Delivery, Outcome]] = []
        wants: Counter[str] = Counter()
        readable = [e for _, e in deliveries if not isinstance(e, BadEnvelope)]
        standings = self.ledger.standings_in(tx, [e.id for e in readable])
        holders = self._holders(
            tx,
            claims,
            [self.ledger.url_key(e.url) for e in readable if not e.force] if fetches else [],
        )
        for d, e in deliveries:
            outcome: Outcome | None = None
            admitted = SETTLED
            if isinstance(e, BadEnvelope):
                outcome = self._unreadable(tx, d, e, now)
            else:
                # Each looked at once: of one that is here twice, the first may have changed what
                # holds for the second.
                standing = standings.pop(e.id, None) or self.ledger.standing_in(tx, e.id)
                if (
                    standing is None
                ):  # published past intake: taken into the books on arrival, which is when it was accepted
                    self.ledger.enter_in(
                        tx,
                        [
                            (
                                msgspec.structs.replace(e, accepted_at=round(now, 3)),
                                d.body,
                                d.position,
                            )
                        ],
                        now,
                    )
                    standing = self.ledger.standing_in(tx, e.id)
                if standing.status in ("success", "dead", "duplicate"):
                    outcome = Ack()
                elif self.broker.apart and (put_off := self._put_off(tx, d, standing, now)):
                    outcome = put_off
                else:
                    asks = fetches and not standing.page
                    holder = (
                        self._holder(tx, claims, holders, self.ledger.url_key(e.url))
                        if asks and not e.force
                        else None
                    )
                    outcome = holder and self._freshness(tx, claims, e, standing, holder, now)
                    if outcome is None:
                        wants[e.key] += asks
                        admitted = Admitted(
                            verdict="go",
                            row=standing.n,
                            fence=standing.fence if standing.status == "pending" else None,
                            free=holder is None,
                            slot=-1.0 if asks else 0.0,
                            starts=standing.starts,
                            attempts=standing.attempts,
                            failures=self.ledger.failures_in(tx, standing.n)
                            if standing.attempts and needs_proxy(e.route)
                            else {},
                            crashes=standing.crashes,
                            page=standing.page,
                            page_meta=standing.page_meta or b"",
                            baseline=holder and self._baseline(tx, holder),
                        )
            if outcome is not None:
                settles.append((d, outcome))
            answers.append(admitted)
        if settles:
            self.broker.settle_in(tx, settles)
        return answers, +wants

    def _holders(self, tx: Any, claims: Any, keys: Sequence[bytes]) -> dict[bytes, Any]:
        """Of all these URLs at once, where the claims lie in the store; of others `claims` knows
        them already.
        """
        return claims.holders_in(tx, keys) if keys and not claims.apart else {}

    def _holder(self, tx: Any, claims: Any, holders: dict[bytes, Any], key: bytes) -> Any:
        """From what was read for the whole batch; again for a URL that comes a second time."""
        return holders.pop(key) if key in holders else claims.holder_in(tx, key)

    def _put_off(self, tx: Any, d: Delivery, standing: Any, now: float) -> Outcome | None:
        """A message of a broker apart, whose event is in other hands or not due yet."""
        if standing.status in ("in_flight", "writing") and self.broker.busy_in(tx, standing.n):
            return Retry(BUSY, "another worker is at it")
        if (
            standing.status == "delayed"
            and standing.not_before is not None
            and standing.not_before > now + EARLY
        ):
            return Retry(standing.not_before - now, "its time has not come")
        self.ledger.found_at_in(tx, standing.n, d.position)
        return None

    def _unreadable(self, tx: Any, d: Delivery, e: BadEnvelope, now: float) -> Outcome:
        """Bytes that are no event: kept as a dead letter, never acked away and never stuck."""
        self.ledger.letter_in(
            tx,
            event_id=mint("envelope", d.topic, str(d.position)),
            topic=d.topic,
            url="",
            host=d.key,
            now=now,
            stage="intake",
            kind="permanent",
            reason=e.message,
            fingerprint=fingerprint("intake", "permanent", e.message),
            detail="",
            envelope=d.body,
            headers=msgspec.json.encode(d.headers).decode(),
        )
        self.ledger.count_in(tx, d.topic, {"unreadable": 1})
        return Dead(e.message)

    def _decide(
        self, tx: Any, e: Event, standing: Any, holder: Holder, now: float
    ) -> freshness.Take | freshness.Duplicate | freshness.Delay:
        s = self.settings
        claim = self.ledger.owner_in(tx, holder.owner, holder.next)
        window = e.window if e.window is not None else s.follow_window if e.parent else s.window
        drop = (
            (s.drop or e.parent is not None) if e.window_mode is None else e.window_mode == "drop"
        )
        return freshness.decide(
            claim,
            e.id,
            accepted=standing.accepted_at,
            now=now,
            window=window,
            settle=s.settle,
            drop=drop,
        )

    def _freshness(
        self, tx: Any, claims: Any, e: Event, standing: Any, holder: Holder, now: float
    ) -> Outcome | None:
        """None: it may ask. Otherwise it is a duplicate or delayed, noted as such, and this is how
        its delivery is settled.
        """
        match self._decide(tx, e, standing, holder, now):
            case freshness.Take():
                return None
            case freshness.Duplicate(of=of):
                self.ledger.duplicate_in(tx, e, standing, of, now)
                return Ack()
            case freshness.Delay(until=until, becomes_next=becomes_next):
                if becomes_next:
                    claims.next_in(tx, self.ledger.url_key(e.url), e.id)
                self.ledger.delay_in(
                    tx, e, standing, until, "fetched less than its window ago", now
                )
                return Retry(until - now, "window")

    def _baseline(self, tx: Any, holder: Any) -> Any:
        found = self.ledger.baseline_in(tx, holder.owner)
        return (
            found
            if found is not None or holder.good is None
            else self.ledger.baseline_in(tx, holder.good)
        )

    def _slots(
        self,
        tx: Any,
        deliveries: Sequence[tuple[Delivery, Any]],
        answers: list[Admitted],
        reserved: Mapping[str, Sequence[float]],
    ) -> list[Admitted]:
        """Each its slot, in order. Whose is far away is delayed, and needs the transaction for it."""
        now = self.clock.now()
        slots = {host: iter(times) for host, times in reserved.items()}
        holds: dict[tuple[str, str], dict[str, float]] = {}
        placed = []
        for (d, e), a in zip(deliveries, answers, strict=True):
            if a.slot < 0:
                a.slot = slot = next(slots[e.key])
                if slot > now + HOLD_BEYOND:
                    until = holds.setdefault((d.topic, d.group), {})
                    if (
                        until.get(d.key, 0.0) <= now + PARK_BEYOND
                    ):  # to the last slot given, or the first that is still free
                        until[d.key] = slot
                if slot > now + PARK_BEYOND:
                    if self.broker.settle_in(tx, [(d, Retry(slot - now, "slot"))])[
                        0
                    ]:  # else its lease was lost, and another may be at it
                        self.ledger.delay_in(
                            tx,
                            e,
                            self.ledger.standing_in(tx, e.id),
                            slot,
                            f"waiting for a slot of {e.key}",
                            now,
                        )
                    a = SETTLED
            placed.append(a)
        for (topic, group), until in holds.items():
            self.broker.hold_in(tx, topic, group, until)
        return placed

    # -- a handler starts --------------------------------------------------------------------------

    async def begin(
        self,
        starts: Sequence[tuple[Delivery, Event, Admitted]],
        *,
        asks: Sequence[bool],
        writing: bool = False,
    ) -> list[int | None]:
        """Counted before the work, and the claim is taken with it. The fence of each, or None: it
        ended meanwhile and is settled, or its lease was lost.
        """
        claims = await self._claim_ahead(starts, asks) if self.claims.apart else self.claims
        return await self.write(
            lambda tx: self._begin(tx, claims, starts, asks, writing), durable=False
        )

    async def _claim_ahead(
        self, starts: Sequence[tuple[Delivery, Event, Admitted]], asks: Sequence[bool]
    ) -> Seen:
        """Claims of a store apart are taken before the start is noted: their owner is the event, so
        one that dies in between finds it is its own.
        """
        wanted: dict[bytes, Event] = {}
        for (_, e, _), asking in zip(starts, asks, strict=True):
            if asking and not e.force:
                wanted.setdefault(self.ledger.url_key(e.url), e)
        seen = Seen(await self.claims.holders(list(wanted)))
        rows: list[tuple[bytes, str, str | None, str | None]] = [
            (key, e.id, None, None) for key, e in wanted.items() if key not in seen.holders
        ]
        if any(seen.holders[key].owner != e.id for key, e in wanted.items() if key in seen.holders):
            rows += await self.store.read(lambda tx: self._ripe(tx, seen, wanted))
        lost = []
        for (key, owner, good, _), won in zip(rows, await self.claims.take(rows), strict=True):
            if won:
                seen.won(key, owner, good)
            else:
                lost.append(key)
        if lost:
            seen.holders |= await self.claims.holders(lost)
        return seen

    def _ripe(
        self, tx: Any, seen: Seen, wanted: Mapping[bytes, Event]
    ) -> list[tuple[bytes, str, str | None, str | None]]:
        """Claims of others that may be taken over: (URL, new owner, last success, owner so far)."""
        rows: list[tuple[bytes, str, str | None, str | None]] = []
        for key, e in wanted.items():
            holder, standing = seen.holders.get(key), self.ledger.standing_in(tx, e.id)
            if holder is None or holder.owner == e.id or standing is None:
                continue
            if isinstance(self._decide(tx, e, standing, holder, self.clock.now()), freshness.Take):
                rows.append((key, e.id, self._good(tx, holder), holder.owner))
        return rows

    def _good(self, tx: Any, holder: Holder) -> str | None:
        return holder.owner if self.ledger.baseline_in(tx, holder.owner) else holder.good

    def _begin(
        self,
        tx: Any,
        claims: Any,
        starts: Sequence[tuple[Delivery, Event, Admitted]],
        asks: Sequence[bool],
        writing: bool,
    ) -> list[int | None]:
        now = self.clock.now()
        settles: list[tuple[Delivery, Outcome]] = []
        may: list[bool] = []
        rows: set[int] = set()
        leases = self.broker.holds_in(tx, [d for d, _, _ in starts])
        keys = [
            self.ledger.url_key(e.url) if held and asking and not e.force else None
            for (_, e, _), asking, held in zip(starts, asks, leases, strict=True)
        ]
        free: dict[bytes, str] = {}
        for (_, e, a), key in zip(starts, keys, strict=True):
            if key is not None and a.free:
                free.setdefault(key, e.id)
        won = (
            dict(claims.taken)
            if claims.apart
            else {key: (free[key], None) for key in claims.claim_in(tx, free, now)}
        )
        taken: dict[bytes, tuple[str, str | None]] = dict(won)
        holders = self._holders(
            tx, claims, [key for key in keys if key is not None and key not in won]
        )
        for (d, e, a), key, held in zip(starts, keys, leases, strict=True):
            outcome = (
                None
                if key is None or (key in won and won[key][0] == e.id)
                else self._take(tx, claims, e, key, taken, holders, now)
            )
            if held and self.broker.apart:
                if a.row in rows or self.broker.busy_in(tx, a.row):  # another copy was quicker
                    outcome = Release()
                rows.add(a.row)
            may.append(held and outcome is None)
            if outcome is not None:
                settles.append((d, outcome))
        claims.take_in(tx, [(key, *claim) for key, claim in taken.items() if key not in won], now)
        going = [(a.row, e, a.fence) for (_, e, a), ok in zip(starts, may, strict=True) if ok]
        asking = [asking for asking, ok in zip(asks, may, strict=True) if ok]
        fences = iter(
            self.ledger.begin_in(
                tx,
                going,
                self.worker,
                now,
                asks=asking,
                status="writing" if writing else "in_flight",
            )
        )
        answers = [next(fences) if ok else None for ok in may]
        settles += [
            (d, Ack())
            for (d, _, _), ok, fence in zip(starts, may, answers, strict=True)
            if ok and fence is None
        ]
        if settles:
            # this commit may not outlive a power cut: let them come back, and be settled by one
            # that does
            if self.broker.apart:
                settles = [(d, Release()) for d, _ in settles]
            self.broker.settle_in(tx, settles)
        return answers

    def _take(
        self,
        tx: Any,
        claims: Any,
        e: Event,
        key: bytes,
        taken: dict[bytes, tuple[str, str | None]],
        holders: dict[bytes, Any],
        now: float,
    ) -> Outcome | None:
        """Between admission and the start another event may have taken the claim, in this very
        batch even.
        """
        holder = self._holder(tx, claims, holders, key)
        if holder is None and key not in taken:
            if claims.apart:  # we tried to take it, and it was another's for a moment
                return Release()
            taken[key] = (e.id, None)
        elif (taken[key][0] if key in taken else holder.owner) != e.id:
            standing = self.ledger.standing_in(tx, e.id)
            if standing.status in ("success", "dead", "duplicate"):
                return Ack()
            if key in taken:
                self.ledger.duplicate_in(tx, e, standing, taken[key][0], now)
                return Ack()
            outcome = self._freshness(tx, claims, e, standing, holder, now)
            if outcome is not None or claims.apart:
                return outcome or Release()
            taken[key] = (e.id, self._good(tx, holder))
        return None

    # -- a handler ends ----------------------------------------------------------------------------

    async def conclude(
        self, ends: Sequence[End], bodies: Sequence[tuple[str, bytes]] = ()
    ) -> list[bool]:
        """Everything that follows from these ends, in one transaction. False: the fence was old,
        that end changed nothing.
        """
        claims = await self._holders_of_links(ends) if self.claims.apart else self.claims
        while True:
            staged = self.pages.stage(bodies)
            try:
                await self.pages.send(staged)
                answers = await self.write(
                    partial(self._conclude, claims=claims, ends=ends, staged=staged)
                )
                break
            except _PagesGone:  # retention was quicker: their bytes are needed again
                self.pages.forget(staged)
            except BaseException:
                self.pages.forget(staged)
                raise
        self.broker.wake(
            {o.topic for end in ends for o in end.publish}
            | {end.event.topic for end in ends if end.links or end.outcome in ("dead", "release")}
        )
        return answers

    async def _holders_of_links(self, ends: Sequence[End]) -> Seen:
        keys = set()
        for end in ends:
            for link in end.links:
                with contextlib.suppress(BadUrl):  # counted when they are followed
                    keys.add(self.ledger.url_key(canonical_url(link.url)))
        return Seen(await self.claims.holders(list(keys)))

    def _conclude(self, tx: Any, claims: Any, ends: Sequence[End], staged: Any) -> list[bool]:
        now = self.clock.now()
        if self.pages.index_in(tx, staged):
            raise _PagesGone
        self.ledger.look_ahead_in(tx, [end for end in ends if end.outcome != "success"])
        good = self.ledger.succeed_in(
            tx, sorted([end for end in ends if end.outcome == "success"], key=_by_row), now
        )
        applied = {id(end) for end in good}
        answers: list[bool] = []
        delta: dict[str, Counter[str]] = {
            topic: Counter() for topic in {end.event.topic for end in ends}
        }
        settles: list[tuple[Delivery, Outcome]] = []
        self._emit(tx, [end for end in good if end.records], delta)
        for end in ends:
            e, outcome = end.event, ACK
            count = delta[e.topic]
            match end.outcome:
                case "success":
                    n = end.row if id(end) in applied else None
                    if n is not None:
                        if end.links:
                            self._follow(tx, claims, e, end.links, now, count)
                        count["success"] += 1
                        if end.reason:
                            count[end.reason] += 1
                case "dead":
                    n = self.ledger.bury_in(
                        tx,
                        end,
                        now,
                        envelope=_own_envelope(end),
                        headers=msgspec.json.encode(end.delivery.headers).decode(),
                    )
                    outcome = Dead(end.reason)
                    if n is not None:
                        count["dead"] += 1
                        self._promote(tx, e, now)
                case "retry" | "park":
                    n = self.ledger.put_off_in(tx, end, now, status="delayed")
                    outcome = Retry(max(0.0, end.until - now), end.reason)
                    count["delayed"] += n is not None
                case "release":
                    n = self.ledger.put_off_in(tx, end, now, status="pending")
                    outcome = Release()
                    count["pending"] += n is not None
                case "handover":
                    n = self.ledger.put_off_in(tx, end, now, status="pending")
                    count["pending"] += n is not None
                case "writing":
                    n = 1 if self.ledger.writing_in(tx, end, now) else None
                    count["writing"] += n is not None
            answers.append(n is not None)
            if n is not None:
                count["writing" if end.was_writing else "in_flight"] -= 1
                if end.publish:
                    self.publish_in(tx, end.publish)
            # Refused: somebody else has the event, or the start was forgotten with a server that
            # died. Whoever is handed the message next will see.
            settles.append((end.delivery, Release() if n is None else outcome))
        for topic, count in delta.items():
            self.ledger.count_in(tx, topic, dict(count))
            if count["success"] or count["dead"]:
                self.ledger.tally_in(
                    tx, topic, count["success"] + count["dead"], count["dead"], now
                )
            if count["dead"]:
                self._trip(tx, topic, now)
        self.broker.settle_in(tx, settles)
        return answers

    def _emit(self, tx: Any, ends: Sequence[End], delta: Mapping[str, Counter[str]]) -> None:
        s = self.settings
        lines = self.outbox.emit_in(
            tx,
            [(end, self.ledger.url_key(end.event.url)) for end in ends],
            delta,
            emit_unchanged=s.emit_unchanged,
            hooks=s.hooks,
        )
        for binding in s.sinks:
            rows = [
                (key, line, order)
                for extractor, key, line, order in lines
                if not binding.only or extractor in binding.only
            ]
            if rows and binding.write is not None:
                binding.write(tx, rows)
            elif rows:
                self.outbox.put_in(tx, binding.name, rows)

    def _follow(
        self,
        tx: Any,
        claims: Any,
        parent: Event,
        links: Sequence[Link],
        now: float,
        count: Counter[str],
    ) -> None:
        """Children are accepted before their parent's success, in its transaction; one inside its
        window is counted, not accepted.
        """
        s = self.settings
        home = host_key(parent.url, by="domain") if s.follow_same_domain else None
        children = []
        for link in links:
            try:
                url = canonical_url(link.url)
            except BadUrl:
                count["followed_bad"] += 1
                continue
            key = self.ledger.url_key(url)
            if parent.depth + 1 > s.follow_depth:
                count["followed_too_deep"] += 1
            elif home is not None and host_key(url, by="domain") != home:
                count["followed_offsite"] += 1
            elif not self.ledger.first_in_trace_in(tx, parent.trace, key, now):
                count["followed_seen"] += 1
            elif url == parent.url or self._is_fresh(
                tx, claims, key, now - (s.follow_window if link.window is None else link.window)
            ):
                count["followed_fresh"] += 1
            else:
                child = Event(
                    id=child_id(parent.id, link.extractor, url),
                    url=url,
                    key=host_key(url, by=s.host_by),
                    topic=parent.topic,
                    source=f"follow:{link.extractor}",
                    trace=parent.trace,
                    cause=parent.id,
                    route=link.route or parent.route,
                    priority=link.priority,
                    depth=parent.depth + 1,
                    parent=parent.id,
                    window=link.window,
                )
                if not self.ledger.knows_in(tx, child.id):
                    children.append(child)
                    count["followed"] += 1
        self._enter(tx, children, now)

    def _is_fresh(self, tx: Any, claims: Any, key: bytes, since: float) -> bool:
        holder = claims.holder_in(tx, key)
        return bool(
            holder is not None and self.ledger.is_fresh_in(tx, holder.owner, since)
        ) or bool(self.ledger.has_open_in(tx, key))

    def _promote(self, tx: Any, dead: Event, now: float) -> None:
        """The owner died: its oldest duplicate gets its chance, once, with a budget of its own."""
        row = self.ledger.eldest_duplicate_in(tx, dead.id)
        if row is None:
            return
        n, _, envelope = row
        self.republish_in(
            tx,
            n,
            decode_event(envelope),
            "duplicate",
            f"promoted: {dead.id} died",
            now,
            promoted=True,
        )

    def _trip(self, tx: Any, topic: str, now: float) -> None:
        limits = self.settings.breaker
        ended, dead = self.ledger.recent_in(tx, topic, limits.window, now)
        if breaker.judge(limits, ended, dead) == "open":
            self.broker.pause_in(
                tx,
                topic,
                f"breaker: {dead} of {ended} events ended dead within {limits.window:g} s",
            )
