"""Worker: receive → admit → begin → handle → conclude, for the stages that this process runs.

See `lifecycle` and `admission` for the writes and their order.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

import msgspec

from penstock.engine.admission import Admission
from penstock.engine.batching import Group
from penstock.engine.dispatch import Item, Turns
from penstock.engine.lifecycle import Lifecycle
from penstock.engine.messages import PageMessage, RecordsMessage, page_message
from penstock.engine.signals import Signals
from penstock.errors import BadEnvelope, StoreUnavailable
from penstock.model import ErrorClass, Event, Failure, Release, decode_event, page_id
from penstock.ports import (
    Baseline,
    Clock,
    Delivery,
    End,
    Extracted,
    Extraction,
    FetchedPage,
    Out,
    Pace,
    PageFetcher,
    PageMeta,
    Response,
    Subscription,
)
from penstock.rules import retry
from penstock.rules.fingerprint import fingerprint
from penstock.rules.identity import BadUrl, canonical_url, host_key
from penstock.rules.proxies import PoolExhausted

T = TypeVar("T")
Stage = Literal["fetch", "extract", "sink"]
ENTRY: dict[Stage, str] = {"fetch": "requests", "extract": "pages", "sink": "records"}
# Seconds for which a host is held at the broker, if its waiting deliveries use its whole share of
# the prefetch window.
CROWD_REST = 0.25
# Seconds without room in the prefetch window. Then deliveries beyond their host's share are
# released.
CROWD_PATIENCE = 1.0
# Characters of an id, trace, host key, source, cause or parent. Indexes of database servers accept
# only a few times as many.
LONGEST_NAME = 512
SUSPECT = 2  # crashed starts. From then on the page is extracted alone, outside this process.
log = logging.getLogger("penstock.worker")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one worker."""

    concurrency: int = 256  # permits: handlers in progress at the same time
    window: int = 1024  # prefetch window: deliveries held at the same time
    byte_budget: int = 64 << 20  # bytes of held page bodies. Above this, no work is taken.
    extract_group: int = 32  # pages of a full extraction batch
    extract_linger: float = 0.01  # seconds that a page waits for a full batch
    conclude_group: int = 512  # outcomes of a full batch
    conclude_linger: float = 0.02  # seconds that an outcome waits for a full batch
    # Permits. If fewer are free, and more deliveries than that are ready, starts wait for more.
    start_group: int = 48
    start_linger: float = 0.01  # seconds of that wait
    lease: float = 30.0  # seconds, extended every third of it
    grace: float = 25.0  # seconds in which started work may finish at shutdown
    deadline: float = 600.0  # seconds of one handler. The watchdog cancels longer ones.
    per_key: int | None = None  # deliveries of one host key in one `receive`, None for no limit
    max_age: float = 7 * 86400.0  # seconds since acceptance, after which a failed event is dead
    inline_max: int = 0  # bytes of the largest body that is sent inside its `pages` message
    message_max: int | None = None  # bytes of the largest message on `pages`, None for no limit


class Worker:
    """Runs the stages `first` to `last` of fetch → extract → sink.

    Its deliveries come from the topic of the stage `first`.
    """

    def __init__(
        self,
        *,
        first: Stage,
        last: Stage,
        admission: Admission,
        lifecycle: Lifecycle,
        pace: Pace,
        subscription: Subscription,
        fetch: PageFetcher | None,
        extraction: Extraction | None,
        suspects: Extraction | None,
        signature: Callable[[str], str],
        policies: dict[tuple[str, ErrorClass], retry.Policy],
        options: Options,
        clock: Clock,
        rng: random.Random,
        signals: Signals,
        paused: Callable[[], str | None],
        on_records: Callable[[], None],
    ) -> None:
        self.first, self.last, self._admission, self._lifecycle = first, last, admission, lifecycle
        self._settings, self._pages = lifecycle.settings, lifecycle.pages
        self.sub, self.fetch, self.extraction = subscription, fetch, extraction
        self.signature, self.policies, self.o, self.clock, self.rng, self.signals = (
            signature,
            policies,
            options,
            clock,
            rng,
            signals,
        )
        # Extraction in other processes. It is set if `extraction` runs in this process, and gets
        # the pages that may have crashed it.
        self._suspects = suspects
        self._paused, self._on_records = paused, on_records
        self.held: dict[int, Item] = {}  # position -> delivery without a committed outcome
        self.outage: str | None = None  # why the store is unavailable
        self._turns = Turns(
            pace,
            paced=options.per_key is not None,
            window=options.window,
            concurrency=options.concurrency,
        )
        self._active = 0  # permits in use
        self._reslotting: set[asyncio.Task[None]] = set()
        self._received = 0.0  # time of the last `receive` or release of excess deliveries
        self._bytes = 0  # bytes of held page bodies
        self._extracts: Group[Item] = Group(
            options.extract_group,
            partial(self._linger, options.extract_linger),
            self._extract_group,
        )
        self._ends: Group[tuple[Item, End]] = Group(
            options.conclude_group, partial(self._linger, options.conclude_linger), self._conclude
        )
        self._returning = 0  # handlers that waited for a slot and need a permit again
        self._room, self._startable, self._freed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._stopping = False

    # -- life --------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Process deliveries until `stop` is set. Then finish or release them within the grace.

        Every received delivery has an outcome when this returns, unless the store is unavailable
        for too long.
        """
        taking = [
            asyncio.create_task(self._receive(), name="receive"),
            asyncio.create_task(self._start(), name="start"),
        ]
        keeping = [
            asyncio.create_task(self._heartbeat(), name="heartbeat"),
            asyncio.create_task(self._watchdog(), name="watchdog"),
        ]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([*taking, *keeping, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in [*taking, *keeping]:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise error
        finally:
            stopped.cancel()
            try:
                await self._drain(taking)
            finally:
                for task in [*taking, *keeping]:
                    task.cancel()
                await asyncio.gather(*taking, *keeping, return_exceptions=True)
                await self.sub.close()

    async def _drain(self, taking: Sequence[asyncio.Task[None]]) -> None:
        """Shut down in four steps.

        Stop receiving. Release deliveries without a start. Wait until the others finish. Release
        those that are not finished when the grace ends.
        """
        until = self.clock.now() + self.o.grace
        self._stopping = True
        self._room.set()
        self._startable.set()
        # A `begin` in progress counts starts. Its deliveries must not be released without an end.
        await asyncio.wait(taking, timeout=self.o.grace)
        waiting = [item for item in self.held.values() if not item.begun]
        for item in waiting:
            if item.timer is not None:
                item.timer.cancel()
            self.held.pop(item.delivery.position)
        self._turns.clear()
        for reslotting in list(self._reslotting):
            reslotting.cancel()
        # The ledger has no start of these deliveries, so releasing the leases is enough.
        if waiting:
            await self._insist(
                lambda: self.sub.settle([(item.delivery, Release()) for item in waiting])
            )
        while self.held and self.clock.now() < until:
            self._extracts.flush()
            self._ends.flush()
            await self.clock.sleep(0.01)
        for task in [*(item.task for item in self.held.values()), *self._extracts.under_way]:
            if task is not None:
                task.cancel()
        await asyncio.sleep(0)
        ending = {id(item) for item, _ in self._ends.waiting}
        for item in self.held.values():
            # If another end of the item is being written, its fence is outdated after that write,
            # and this release changes nothing.
            if id(item) not in ending:
                self._end(item, "release", reason="shutdown")
        while self._ends.waiting or self._ends.under_way:
            self._ends.flush()
            await asyncio.wait(self._ends.under_way, timeout=0.1)
            if self.outage and self.clock.now() > until + self.o.grace:
                log.error(
                    "the store takes no writes; leaving %d deliveries to come back when their lease ends",
                    len(self.held),
                )
                return

    # -- receiving ---------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Receive and admit deliveries while the prefetch window and the byte budget allow it."""
        while not self._stopping:
            self._room.clear()
            room = self.o.window - len(self.held)
            full = room < max(1, self.o.window // 2)
            if self._paused() or full or self._bytes > self.o.byte_budget:
                if (
                    full
                    and self._turns.crowded
                    and self.clock.now() > self._received + CROWD_PATIENCE
                ):
                    await self._disperse()
                else:
                    await self._nap(self._room, 0.1)
                continue
            if self._turns.crowded and self._turns.mixed:
                await self._rest_crowds()
            got = await self._insist(partial(self.sub.receive, room, 0.5, per_key=self.o.per_key))
            self._received = self.clock.now()
            if got:
                await self._admit(got)

    async def _rest_crowds(self) -> None:
        """Hold hosts whose waiting deliveries use their whole share of the prefetch window."""
        until = self.clock.now() + CROWD_REST
        if full := dict.fromkeys(self._turns.full(), until):
            await self._insist(partial(self.sub.hold, full))

    async def _disperse(self) -> None:
        """Release deliveries beyond each host's share of the prefetch window.

        Slow hosts have filled the window. After the release, work for other hosts can be received.
        """
        self._received = self.clock.now()
        if back := self._turns.excess():
            await self._rest_crowds()
            for item in back:
                self.held.pop(item.delivery.position, None)
            await self._insist(
                lambda: self.sub.settle([(item.delivery, Release()) for item in back])
            )

    async def _admit(self, got: Sequence[Delivery]) -> None:
        pairs: list[tuple[Delivery, Event | BadEnvelope]] = []
        items: list[Item | None] = []
        for d in got:
            try:
                item = self._open(d)
            except BadEnvelope as bad:
                pairs.append((d, bad))
                items.append(None)
            else:
                self.held[d.position] = item
                pairs.append((d, item.event))
                items.append(item)
        await self._place(pairs, items)

    async def _place(
        self, pairs: Sequence[tuple[Delivery, Event | BadEnvelope]], items: Sequence[Item | None]
    ) -> None:
        """Admit deliveries. Make each one ready when its slot comes, and drop the settled ones."""
        fetches, asked = self.first == "fetch", self.clock.now()
        answers = await self._insist(lambda: self._admission.admit(pairs, fetches=fetches))
        now, loop = self.clock.now(), asyncio.get_running_loop()
        for held, answer in zip(items, answers, strict=True):
            if held is None:
                continue
            if answer.verdict == "settled":
                self.held.pop(held.delivery.position, None)
                continue
            held.admitted, held.slot, held.given = answer, math.inf, asked
            held.asks = fetches and not answer.page
            if answer.slot > now:
                held.timer = loop.call_later(answer.slot - now, self._make_ready, held)
                if answer.slot > now + 0.01:
                    held.slot = answer.slot
            else:
                self._turns.ready.append(held)
        self._startable.set()

    def _open(self, d: Delivery) -> Item:
        """Decode a message. Raise BadEnvelope if it is not valid."""
        if self.first == "fetch":
            return Item(d, self._known_form(decode_event(d.body)))
        if self.first == "extract":
            message = PageMessage.read(d.body)
            item = Item(d, decode_event(message.event))
            item.meta = message.page
            return item
        letter = RecordsMessage.read(d.body)
        item = Item(d, decode_event(letter.event))
        item.meta, item.extracted = (
            letter.page,
            Extracted(records=letter.records, links=letter.links, matched=letter.matched),
        )
        return item

    def _known_form(self, event: Event) -> Event:
        """Bring an event that bypassed intake into canonical form.

        Deduplication and rate limits use that form. Raise BadEnvelope if a name is too long for an
        index or contains NUL, or if the URL cannot be fetched.
        """
        names = event.id, event.trace, event.key, event.source, event.cause, event.parent or ""
        together = "".join(names)
        if (
            len(together) > LONGEST_NAME and max(map(len, names)) > LONGEST_NAME
        ) or "\0" in together:
            raise BadEnvelope(
                f"an id, trace, key, source or cause of more than {LONGEST_NAME} characters, or with a NUL"
            )
        try:
            url = canonical_url(event.url)
        except BadUrl as e:
            raise BadEnvelope(f"its URL cannot be fetched: {e.reason}") from e
        if url != event.url or not event.key:
            return msgspec.structs.replace(
                event, url=url, key=host_key(url, self._settings.host_by)
            )
        return event

    def _make_ready(self, item: Item) -> None:
        item.timer = None
        self._turns.ready.append(item)
        self._startable.set()

    # -- starting ----------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Start ready deliveries while permits are free and the byte budget allows it."""
        while not self._stopping:
            permits = self._permits()
            if not self._turns.ready or permits <= 0 or self._bytes > self.o.byte_budget:
                self._startable.clear()
                await self._startable.wait()
                continue
            if permits < self.o.start_group and permits < len(self._turns.ready) and self._active:
                # A transaction for one start costs as much as a transaction for many starts.
                await self.clock.sleep(self.o.start_linger)
                permits = self._permits()
            items = self._choose(permits)
            if not items:
                continue
            # Take the permits before the `await`. Otherwise they could be given out twice.
            self._active += len(items)
            starts = [(i.delivery, i.event, i.admitted) for i in items]
            try:
                fences = await self._insist(
                    partial(
                        self._admission.begin,
                        starts,
                        asks=[i.asks for i in items],
                        writing=self.first == "sink",
                    )
                )
            except BaseException:
                self._active -= len(items)
                raise
            now = self.clock.now()
            for item, fence in zip(items, fences, strict=True):
                # The event did not start: it is a duplicate, delayed or ended, and its delivery is
                # settled, or the lease was lost.
                if fence is None:
                    self._active -= 1
                    self._freed.set()
                    self._turns.leave(item)
                    self.held.pop(item.delivery.position, None)
                    continue
                item.fence, item.begun = fence, now
                self._set_out(item)

    def _choose(self, permits: int) -> list[Item]:
        """Return deliveries that start now. Set timers for early ones, and reslot late ones."""
        chosen = self._turns.choose(permits, self.clock.now())
        for item, wait in chosen.early:
            item.timer = asyncio.get_running_loop().call_later(wait, self._make_ready, item)
        if chosen.late:
            reslotting = asyncio.create_task(self._reslot(chosen.late))
            self._reslotting.add(reslotting)
            reslotting.add_done_callback(self._reslotting.discard)
        return chosen.start

    async def _reslot(self, items: Sequence[Item]) -> None:
        """Admit deliveries again whose slot has passed or was voided.

        A slot passes while its delivery waits for a permit or for its host. Sending the request now
        would exceed the host's rate limit. A slot is voided if the host needs longer intervals.
        `admit` reserves a new slot, or delays the event in the ledger if the slot is far away.
        """
        await self._place([(item.delivery, item.event) for item in items], items)

    def _set_out(self, item: Item) -> None:
        """Start the work for an item. Most requests run without a task. All other work has one."""
        if item.asks and self.fetch is not None:
            try:
                item.task = self.fetch.begin(
                    item.event, self._usable(item), partial(self._answered, item)
                )
            except Exception as e:
                self._missed(item, "fetch", e)
                self._leave(item)
                return
        if item.task is None:
            item.task = asyncio.create_task(self._handle(item))

    def _answered(self, item: Item, answer: Response | BaseException) -> None:
        """Handle the result of a request without a task. Create a task if it is not final."""
        assert self.fetch is not None
        try:
            if isinstance(answer, BaseException):
                raise answer
            if not self.fetch.is_final(item.event, answer):
                item.task = asyncio.create_task(self._handle(item, answer))
                return
            self._received_page(item, answer)
        except (Exception, asyncio.CancelledError) as e:
            self._missed(item, "fetch", e)
        self._leave(item)

    async def _handle(self, item: Item, answer: Response | None = None) -> None:
        """Process one delivery. Every exception becomes an end of the event."""
        stage = self.first
        try:
            if self.first == "sink":
                self._extracted(item, item.extracted or Extracted())
            elif item.asks:
                assert self.fetch is not None
                response = await self.fetch.fetch(
                    item.event,
                    self._usable(item),
                    turn=self._turn(item),
                    answer=answer,
                    sleep=self._stand_aside,
                )
                await self._fetched(item, response)
            else:
                stage = "extract"
                await self._load(item)
        except (Exception, asyncio.CancelledError) as e:
            self._missed(item, stage, e)
        finally:
            self._leave(item)

    def _missed(self, item: Item, stage: str, e: BaseException) -> None:
        """End an item whose handler raised an exception."""
        if isinstance(e, Failure):
            self._fail(item, stage, e)
        elif isinstance(e, asyncio.CancelledError):
            if self._stopping:
                self._end(item, "release", reason="shutdown")
            else:
                self._fail(
                    item,
                    stage,
                    Failure(
                        ErrorClass.TRANSIENT, f"watchdog: not done after {self.o.deadline:g} s"
                    ),
                )
        elif isinstance(e, StoreUnavailable):
            self._fail(item, stage, Failure(ErrorClass.OURS, e.message))
        else:
            self._fail(
                item,
                stage,
                Failure(
                    ErrorClass.TRANSIENT,
                    f"{type(e).__name__}: {e}",
                    detail="".join(traceback.format_exception(e)),
                ),
            )

    async def _stand_aside(self, seconds: float) -> None:
        """Wait for a slot in the middle of a request, without a permit.

        Redirects wait for a slot, and so does a page whose slot was used for robots.txt. After the
        wait, the item gets a permit before deliveries that have not started.
        """
        self._give_permit_back()
        try:
            await self.clock.sleep(seconds)
            self._returning += 1
            try:
                while self._active >= self.o.concurrency:
                    self._freed.clear()
                    await self._freed.wait()
            finally:
                self._returning -= 1
        finally:
            self._active += 1

    def _permits(self) -> int:
        return self.o.concurrency - self._active - self._returning

    def _leave(self, item: Item) -> None:
        item.task = None
        self._turns.leave(item)
        self._give_permit_back()

    def _give_permit_back(self) -> None:
        self._active -= 1
        self._freed.set()
        self._startable.set()
        if not self._active:
            self._hurry(0)

    def _turn(self, item: Item) -> int:
        """Return by how many pools the event's route has moved on."""
        return (
            retry.turns(self.policies, "fetch", item.admitted.failures)
            if item.admitted.failures
            else 0
        )

    def _usable(self, item: Item) -> Baseline | None:
        """Return the baseline for a conditional request, or None if a 304 would not help.

        A 304 helps if the page is stored, or if the same extractors have already extracted it.
        """
        b = item.admitted.baseline
        return (
            b
            if b is not None and (b.page or b.extractors == self.signature(item.event.url))
            else None
        )

    # -- fetched -----------------------------------------------------------------------------------

    async def _fetched(self, item: Item, r: Response) -> None:
        """Handle a final response.

        After a 304, end the event as unchanged if the extractors are the same. Otherwise extract
        the stored page again, or fetch the page without conditions if it is not stored.
        """
        b = item.admitted.baseline
        if r.status == 304 and b is not None:
            if b.extractors == self.signature(item.event.url):
                self._end(
                    item,
                    "success",
                    reason="unchanged",
                    response_status=304,
                    response_hash=b.response_hash,
                    extractors=b.extractors,
                )
                return
            body = await self._pages.get(b.page) if b.page else None
            if body is None:
                assert self.fetch is not None
                r = await self.fetch.fetch(
                    item.event, None, turn=self._turn(item), sleep=self._stand_aside, again=True
                )
            else:  # the extractors have changed: extract the stored page again
                r = msgspec.structs.replace(r, status=200, body=body)
        self._received_page(item, r)

    def _received_page(self, item: Item, r: Response) -> None:
        """Extract the page, publish it on `pages`, or end the event as unchanged."""
        b, hash_ = item.admitted.baseline, page_id(r.body)
        item.response, item.body = r, r.body
        self._bytes += len(r.body)
        item.meta = PageMeta(
            page=hash_,
            url=r.url,
            status=r.status,
            headers=r.headers,
            fetched_at=self.clock.now(),
            size=len(r.body),
        )
        if (
            b is not None
            and b.response_hash == hash_
            and b.extractors == self.signature(item.event.url)
            and not self._settings.emit_unchanged
        ):
            self._end(item, "success", reason="unchanged", extractors=b.extractors)
        elif self.last == "fetch":
            self._hand_over(item, item.meta)
        else:
            self._extracts.add(item)

    def _hand_over(self, item: Item, meta: PageMeta) -> None:
        """Publish the page on `pages`, for the workers of the stage `extract`."""
        message = page_message(
            item.delivery.body,
            meta,
            item.body,
            inline_max=self.o.inline_max,
            largest=self.o.message_max,
        )
        self._end(
            item,
            "handover",
            publish=(
                Out(
                    topic="pages",
                    id=item.event.id,
                    key=item.event.key,
                    body=message,
                    priority=int(item.event.priority),
                ),
            ),
        )

    async def _load(self, item: Item) -> None:
        """Load a page that the ledger knows. It is never fetched again.

        Raises Failure if the page is no longer stored.
        """
        meta = item.meta or msgspec.msgpack.decode(item.admitted.page_meta, type=PageMeta)
        body = PageMessage.read(item.delivery.body).body() if self.first == "extract" else None
        if body is None:
            body = await self._pages.get(meta.page)
        if body is None:
            raise Failure(ErrorClass.PERMANENT, "its stored page is gone", detail=meta.page)
        item.meta, item.body = meta, body
        self._bytes += len(body)
        # The request was delivered again, and its message on `pages` may be lost.
        if self.last == "fetch":
            self._hand_over(item, meta)
        else:
            self._extracts.add(item)

    # -- extracting --------------------------------------------------------------------------------

    async def _extract_group(self, items: Sequence[Item]) -> None:
        """Extract a batch of pages. Suspects run alone, outside this process."""
        assert self.extraction is not None
        if self._suspects is not None and (
            suspects := [i for i in items if i.admitted.crashes >= SUSPECT]
        ):
            others = [i for i in items if i.admitted.crashes < SUSPECT]
            await asyncio.gather(
                self._extract(suspects, self._suspects), self._extract(others, self.extraction)
            )
        else:
            await self._extract(items, self.extraction)

    async def _extract(self, items: Sequence[Item], by: Extraction) -> None:
        try:
            pages = [
                FetchedPage(m.url, i.body, m.status, m.headers, m.fetched_at, i.event, i.event.url)
                for i in items
                if (m := i.meta) is not None
            ]
            results = await by.extract(pages, alone=by is self._suspects)
        except asyncio.CancelledError:
            raise  # shutdown: `_drain` releases the deliveries
        except Exception as e:
            f = Failure(
                ErrorClass.OURS,
                f"extraction is not available: {type(e).__name__}: {e}",
                detail=traceback.format_exc(),
            )
            for item in items:
                self._fail(item, "extract", f)
            return
        for item, result in zip(items, results, strict=True):
            self._extracted(item, result)
        self._hurry(1)

    def _extracted(self, item: Item, x: Extracted) -> None:
        """End an item with its extraction result, or publish the result on `records`."""
        if x.error:
            self._fail(
                item,
                "extract",
                Failure(ErrorClass(x.kind or "permanent"), x.error, detail=x.detail, after=x.after),
            )
            return
        if self.last == "extract":
            message = RecordsMessage(
                event=_envelope(item, self.first),
                page=item.meta,
                records=x.records,
                links=x.links,
                matched=x.matched,
            )
            self._end(
                item,
                "writing",
                publish=(
                    Out(
                        topic="records",
                        id=item.event.id,
                        key=item.event.key,
                        body=message.write(),
                        priority=int(item.event.priority),
                    ),
                ),
            )
            return
        made = self.signature(item.event.url)
        reason = "" if x.records or x.links else "empty" if x.matched else "unmatched"
        self._end(item, "success", reason=reason, records=x.records, links=x.links, extractors=made)

    # -- ending ------------------------------------------------------------------------------------

    def _fail(self, item: Item, stage: str, f: Failure) -> None:
        """End an item after a failure: delay it, retry it, or mark it as dead."""
        now = self.clock.now()
        # The host or its proxies are blocked. No request was sent, so no attempt is charged.
        if f.kind is ErrorClass.THROTTLED and f.status is None:
            if not isinstance(f, PoolExhausted) or now - item.event.accepted_at <= self.o.max_age:
                self._end(
                    item,
                    "park",
                    reason=_clean(f.reason),
                    until=now + (f.after or 1.0),
                    stage=stage,
                    error_class=f.kind,
                )
                return
            f = Failure(
                ErrorClass.PERMANENT, f"too old to wait any longer: {f.reason}", detail=f.detail
            )
        d = retry.decide(
            self.policies,
            stage,
            f.kind,
            failures=item.admitted.attempts,
            after=f.after,
            jitter=self.rng.random(),
            age=now - (item.event.accepted_at or now),
            max_age=self.o.max_age,
        )
        reason, detail = _clean(f.reason), _clean(f.detail)
        self._end(
            item,
            "dead" if d.dead else "retry",
            reason=reason,
            detail=detail,
            until=now + d.delay,
            stage=stage,
            error_class=f.kind,
            response_status=f.status,
            charged=d.charged,
            fingerprint=fingerprint(stage, f.kind, reason),
        )
        self.signals.failed(item.event, stage, f.kind, reason, dead=d.dead, delay=d.delay)

    def _end(
        self,
        item: Item,
        outcome: Literal["success", "retry", "park", "release", "dead", "handover", "writing"],
        **more: object,
    ) -> None:
        """Add the item's end to the batch for `_conclude`. `more` has further fields of End."""
        meta, admitted = item.meta, item.admitted
        end = End(
            event=item.event,
            delivery=item.delivery,
            row=admitted.row,
            fence=item.fence,
            outcome=outcome,
            stage=self.last if outcome == "success" else self.first,
            meta=meta,
            response_status=meta.status if meta else None,
            response_hash=meta.page if meta else None,
            was_writing=self.first == "sink",
            restarted=admitted.starts > 0,
        )
        for name, value in more.items():
            setattr(end, name, value)
        self._ends.add((item, end))

    async def _conclude(self, batch: Sequence[tuple[Item, End]]) -> None:
        """Write a batch of ends. If the ledger rejects an end alone, mark its event as dead."""
        ends = [end for _, end in batch]
        bodies = [
            (item.meta.page, item.body)
            for item, _ in batch
            if item.response is not None and item.meta is not None
        ]
        try:
            applied = await self._insist(lambda: self._lifecycle.conclude(ends, bodies))
        except Exception as e:
            # The ledger rejected one of the ends because of a bug, or because no column accepts its
            # bytes. Write each end separately, so that the other ends are recorded.
            if len(batch) > 1:
                for one in batch:
                    await self._conclude([one])
                return
            log.exception("could not record the outcome of event %s", ends[0].event.id)
            if ends[0].outcome == "dead":
                raise
            reason = f"the books refused it: {type(e).__name__}"
            item, end = batch[0]
            dead = End(
                event=end.event,
                delivery=end.delivery,
                row=end.row,
                fence=end.fence,
                outcome="dead",
                reason=reason,
                error_class=ErrorClass.OURS,
                stage=end.stage,
                detail=_clean(traceback.format_exc()),
                fingerprint=fingerprint(end.stage, ErrorClass.OURS, reason),
                was_writing=end.was_writing,
            )
            await self._conclude([(item, dead)])
            return
        now = self.clock.now()
        for (item, end), ok in zip(batch, applied, strict=True):
            if self.held.get(item.delivery.position) is item:
                del self.held[item.delivery.position]
            self._bytes -= len(item.body)
            self.signals.ended(end, now, applied=ok)
        self._room.set()
        self._startable.set()
        if any(end.records for end in ends):
            self._on_records()

    # -- keeping -----------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        """Extend the leases of held deliveries, three times per lease."""
        while True:
            await self.clock.sleep(self.o.lease / 3)
            held = [item.delivery for item in self.held.values()]
            if held:
                await self._insist(partial(self.sub.extend, held, self.o.lease))

    async def _watchdog(self) -> None:
        """Cancel handlers that run longer than the deadline."""
        while True:
            await self.clock.sleep(min(1.0, self.o.deadline / 4))
            late = self.clock.now() - self.o.deadline
            for item in list(self.held.values()):
                if item.begun and item.begun < late and item.task is not None:
                    item.task.cancel()

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat `call` every 0.5 s while the store is unavailable.

        No attempt is charged and no work is dropped.
        """
        while True:
            try:
                result = await call()
            except StoreUnavailable as e:
                if self.outage is None:
                    log.error("%s (%s)", e.message, e.hint)
                self.outage = e.message
                await self.clock.sleep(0.5)
            else:
                self.outage = None
                return result

    async def _nap(self, event: asyncio.Event, seconds: float) -> None:
        """Wait until the event is set, at most `seconds`."""
        try:
            # In Python 3.11, `wait_for` loses a cancellation that arrives together with the event.
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            pass

    def _linger(self, alone: float) -> float:
        """Return the seconds that a partial batch waits for more items.

        Under load return 8 × `alone`, so that more events share a batch or a sync. Otherwise
        return `alone`, so that a single event does not wait long for others.
        """
        return 8 * alone if len(self.held) > self.o.concurrency else alone

    def _hurry(self, ourselves: int) -> None:
        """Flush partial batches if other items cannot join them.

        That is the case if no handler is running and no delivery is ready. `ourselves` is the
        number of extraction tasks to ignore: 1 if the caller is such a task.
        """
        if not self._active and not self._turns.ready:
            if self._extracts.waiting:
                self._extracts.flush()
            elif len(self._extracts.under_way) <= ourselves:
                self._ends.flush()


def _envelope(item: Item, first: Stage) -> bytes:
    return item.delivery.body if first == "fetch" else PageMessage.read(item.delivery.body).event


def _clean(text: str) -> str:
    """Replace invalid characters, and cut the text to 16,384 characters.

    Exceptions of user code may contain any text, but a column accepts only valid UTF-8.
    """
    return text.encode("utf-8", "replace").decode()[:16384]
