"""Recorder: decides how failed events end, and records the ends of events in batches."""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from penstock.engine.batching import Batcher
from penstock.engine.inflight import InflightEvent, State
from penstock.engine.lifecycle import Lifecycle
from penstock.engine.outage import Outage
from penstock.engine.settings import Options, Stage
from penstock.engine.signals import Signals
from penstock.engine.window import PrefetchWindow
from penstock.model import ErrorClass, Failure, Reason
from penstock.ports import Clock, End
from penstock.rules import retry
from penstock.rules.fingerprint import fingerprint
from penstock.rules.masking import mask_text
from penstock.rules.proxies import PoolExhausted
from penstock.rules.reasons import sentence
from penstock.rules.waiting import RECHECK

log = logging.getLogger("penstock.worker")

_MAX_TEXT = 16_384  # characters of a stored reason or detail
_MAX_SEARCHED = 65_536  # characters of a text that are searched for passwords


class Recorder:
    """Ends of one worker's events. One transaction for each batch."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        window: PrefetchWindow,
        options: Options,
        clock: Clock,
        outage: Outage,
        *,
        first: Stage,
        last: Stage,
        policies: Mapping[tuple[str, ErrorClass], retry.Policy],
        rng: random.Random,
        signals: Signals,
        on_recorded: Callable[[Sequence[End]], None],
    ) -> None:
        self._lifecycle, self._window, self._options = lifecycle, window, options
        self._clock, self._outage, self._first, self._last = clock, outage, first, last
        self._policies, self._rng, self._signals = policies, rng, signals
        self._on_recorded = on_recorded
        self.batches: Batcher[tuple[InflightEvent, End]] = Batcher(
            options.conclude_group,
            lambda: window.linger(options.conclude_linger),
            self._record,
        )

    def end(
        self,
        item: InflightEvent,
        outcome: Literal[
            "success", "retry", "park", "release", "dead", "handover", "writing", "absent"
        ],
        **more: object,
    ) -> None:
        """Add the event's end to the next batch. `more` has further fields of End.

        An event ends once. A later end is ignored, for example that of a cancelled handler.
        """
        if item.state is State.OUTCOME:
            return
        meta, admitted = item.meta, item.admitted
        end = End(
            event=item.event,
            delivery=item.delivery,
            row=admitted.row,
            fence=item.fence,
            outcome=outcome,
            stage=self._last if outcome == "success" else self._first,
            meta=meta,
            response_status=meta.status if meta else None,
            response_hash=meta.page if meta else None,
            was_writing=self._first == "sink",
            restarted=admitted.starts > 0,
            had_progress=bool(admitted.progress),
        )
        end = msgspec.structs.replace(end, **more)
        item.state = State.OUTCOME
        self.batches.add((item, end))

    def fail(
        self, item: InflightEvent, stage: str, f: Failure, *, extractors: Sequence[str] = ()
    ) -> None:
        """End an event after a failure: delay it, retry it, or mark it as dead.

        `extractors` are the names of those that failed.
        """
        if item.state is State.OUTCOME:
            return  # the event has ended, for example before its handler was cancelled
        now, max_age = self._clock.now(), self._options.max_age
        if f.waits_for:
            self.end(
                item,
                "park",
                reason=_clean(f.reason),
                until=now + (f.after or RECHECK),
                waits_for=f.waits_for,
                progress=f.progress,
                stage=stage,
                error_class=f.kind,
            )
            return
        # The host or its proxies are blocked. No request was sent, so no attempt is charged.
        if f.kind is ErrorClass.THROTTLED and f.status is None:
            if not isinstance(f, PoolExhausted) or now - item.event.accepted_at <= max_age:
                self.end(
                    item,
                    "park",
                    reason=_clean(f.reason),
                    until=now + (f.after or 1.0),
                    progress=f.progress,
                    stage=stage,
                    error_class=f.kind,
                )
                return
            f = Failure(
                ErrorClass.PERMANENT,
                sentence(Reason.TOO_OLD, detail=f.reason),
                code=Reason.TOO_OLD,
                detail=f.detail,
            )
        decision = retry.decide(
            self._policies,
            stage,
            f.kind,
            failures=item.admitted.attempts,
            after=f.after,
            jitter=self._rng.random(),
            age=now - (item.event.accepted_at or now),
            max_age=max_age,
        )
        reason = _clean(f.reason)
        # If the URL had a success before, this answer is one too. The transaction decides.
        absent = (
            f.kind is ErrorClass.NOT_FOUND
            and stage == "fetch"
            and item.event.ask.method in ("GET", "HEAD")
        )
        self.end(
            item,
            "absent" if absent else "dead" if decision.dead else "retry",
            reason=reason,
            detail=_clean(f.detail),
            until=now + decision.delay,
            progress=f.progress,
            stage=stage,
            error_class=f.kind,
            response_status=f.status,
            charged=decision.charged,
            failed_extractors=extractors,
            fingerprint=fingerprint(stage, f.kind, reason),
        )
        if not absent:
            self._signals.failed(
                item.event, stage, f.kind, reason, dead=decision.dead, delay=decision.delay
            )

    async def _record(self, batch: Sequence[tuple[InflightEvent, End]]) -> None:
        """Write a batch of ends. If the ledger rejects an end alone, mark its event as dead."""
        ends = [end for _, end in batch]
        absent = [end for end in ends if end.outcome == "absent"]
        bodies = [
            (item.meta.page, item.body)
            for item, _ in batch
            if item.response is not None and item.meta is not None
        ]
        try:
            applied = await self._outage.retry_until_stored(
                lambda: self._lifecycle.conclude(ends, bodies)
            )
        except Exception as e:
            # The ledger rejected one of the ends because of a bug, or because no column accepts its
            # bytes. Write each end separately, so that the other ends are recorded.
            if len(batch) > 1:
                for one in batch:
                    await self._record([one])
                return
            ((item, end),) = batch
            log.exception("could not record the outcome of event %s", end.event.id)
            if end.outcome == "dead":
                item.state = State.HANDLER  # the shutdown releases its delivery
                return
            await self._record([(item, _rejected(end, e))])
            return
        now = self._clock.now()
        self._window.drop(item for item, _ in batch)
        for end in absent:
            if end.outcome == "dead":
                kind, reason = end.error_class, end.reason
                self._signals.failed(end.event, end.stage, kind, reason, dead=True, delay=0.0)
        for end, ok in zip(ends, applied, strict=True):
            self._signals.ended(end, now, applied=ok)
        self._on_recorded(ends)


def _rejected(end: End, e: Exception) -> End:
    """Return the end of an event whose own end the ledger rejected."""
    reason = sentence(Reason.UNRECORDED, detail=type(e).__name__)
    return End(
        event=end.event,
        delivery=end.delivery,
        row=end.row,
        fence=end.fence,
        outcome="dead",
        reason=reason,
        error_class=ErrorClass.OURS,
        stage=end.stage,
        detail=_clean("".join(traceback.format_exception(e))),
        fingerprint=fingerprint(end.stage, ErrorClass.OURS, reason),
        was_writing=end.was_writing,
        had_progress=end.had_progress,
    )


def _clean(text: str) -> str:
    """Replace invalid characters, mask passwords in URLs, and cut the text to 16,384 characters.

    Exceptions of user code may contain any text, but a column accepts only valid UTF-8.
    """
    # Mask before the cut, which could separate a password from the rest of its URL.
    return mask_text(text.encode("utf-8", "replace").decode()[:_MAX_SEARCHED])[:_MAX_TEXT]
