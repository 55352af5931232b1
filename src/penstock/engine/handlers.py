"""Handlers: the stages of one event (fetch, extract, record) from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec

from penstock.engine.batching import Batcher
from penstock.engine.breakers import Breakers
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.inflight import InflightEvent
from penstock.engine.messages import PageMessage, RecordsMessage, page_message
from penstock.engine.recorder import Recorder
from penstock.engine.settings import Options, Stage
from penstock.engine.window import PrefetchWindow
from penstock.errors import StoreUnavailable
from penstock.model import ErrorClass, Failure, Reason, page_id
from penstock.ports import (
    Baseline,
    Clock,
    Extracted,
    Extraction,
    FetchedPage,
    Out,
    PageFetcher,
    PageMeta,
    PageStore,
    Response,
)
from penstock.rules import retry
from penstock.rules.dependencies import are_unchanged, dependencies
from penstock.rules.links import unpack_all
from penstock.rules.masking import mask_headers
from penstock.rules.reasons import sentence
from penstock.rules.waiting import EXTRACTOR

CRASHES_BEFORE_ISOLATION = 2  # crashed starts. Then the page is extracted alone, in a child.


class Handlers:
    """Runs the stages `first` to `last` of fetch → extract → sink.

    `suspects` extracts in other processes. It is set if `extraction` runs in this process, and gets
    the pages that may have crashed it.
    """

    def __init__(
        self,
        window: PrefetchWindow,
        dispatcher: Dispatcher,
        recorder: Recorder,
        options: Options,
        clock: Clock,
        *,
        first: Stage,
        last: Stage,
        fetch: PageFetcher | None,
        extraction: Extraction | None,
        suspects: Extraction | None,
        pages: PageStore,
        signature: Callable[[str, str], str],
        extractors: Callable[[str, str], Sequence[str]],
        breakers: Breakers,
        policies: Mapping[tuple[str, ErrorClass], retry.Policy],
        emit_unchanged: bool,
    ) -> None:
        self._window, self._dispatcher, self._recorder = window, dispatcher, recorder
        self._options, self._clock, self._first, self._last = options, clock, first, last
        self._fetch, self._extraction, self._suspects, self._pages = (
            fetch,
            extraction,
            suspects,
            pages,
        )
        self._signature, self._policies = signature, policies
        self._emit_unchanged = emit_unchanged
        # Names of the extractors of a page, by its URL and the requested URL.
        self._extractors, self._breakers = extractors, breakers
        self._extracts: Batcher[InflightEvent] = Batcher(
            options.extract_group,
            lambda: window.linger(options.extract_linger),
            self._extract_batch,
        )
        # Next step of a page.
        self._pass_on = self._publish_page if last == "fetch" else self._extracts.add

    # -- life of a handler -------------------------------------------------------------------------

    def start(self, item: InflightEvent) -> None:
        """Start the first stage of an event. Every exception becomes an end of the event."""
        try:
            if item.needs_request:
                self._request(item, item.admitted.baseline)
                return
            if self._first != "sink":
                item.task = asyncio.create_task(self._load_page(item))
                return
            self._on_extracted(item, item.extracted or Extracted())
        except Exception as e:
            self._on_error(item, self._first, e)
        self._finish(item)

    def _on_error(self, item: InflightEvent, stage: str, e: BaseException) -> None:
        """End an event whose handler raised an exception."""
        if isinstance(e, Failure):
            self._recorder.fail(item, stage, e)
            return
        if isinstance(e, asyncio.CancelledError):
            if self._window.stopping:
                self._recorder.end(item, "release", reason=sentence(Reason.SHUTDOWN))
                return
            failure = Failure(
                ErrorClass.TRANSIENT,
                sentence(Reason.WATCHDOG, self._options.deadline),
                code=Reason.WATCHDOG,
            )
        elif isinstance(e, StoreUnavailable):
            failure = Failure(ErrorClass.OURS, e.message)
        else:
            failure = Failure(
                ErrorClass.TRANSIENT,
                f"{type(e).__name__}: {e}",
                detail="".join(traceback.format_exception(e)),
            )
        self._recorder.fail(item, stage, failure)

    async def _wait_without_permit(self, item: InflightEvent, seconds: float) -> None:
        """Wait for a slot in the middle of a request, without a permit.

        Redirects wait for a slot, and so does a page whose slot was used for robots.txt.
        """
        self._dispatcher.leave_permit(item)
        self._flush_if_idle()
        await self._dispatcher.take_permit_again(item, seconds)

    def _finish(self, item: InflightEvent) -> None:
        item.task = None
        self._dispatcher.finish(item)
        if not self._dispatcher.active:
            self._flush_if_idle()

    def _flush_if_idle(self, own_tasks: int = 0) -> None:
        """Flush partial batches if other events cannot join them.

        `own_tasks` is the number of extraction tasks to ignore: 1 if the caller is such a task.
        """
        if self._dispatcher.idle:
            if self._extracts.waiting:
                self._extracts.flush()
            elif len(self._extracts.under_way) <= own_tasks:
                self._recorder.batches.flush()

    def flush(self) -> None:
        """Process all partial batches now."""
        self._extracts.flush()
        self._recorder.batches.flush()

    def cancel_late(self) -> None:
        """Cancel handlers that run longer than the deadline."""
        late = self._clock.now() - self._options.deadline
        for item in list(self._window.held.values()):
            if item.task is not None and item.started < late:
                item.task.cancel()

    def release(self) -> None:
        """Cancel all handlers, and release the deliveries that have no outcome."""
        held = list(self._window.held.values())
        for task in [*(item.task for item in held), *self._extracts.under_way]:
            if task is not None:
                task.cancel()
        for item in held:
            self._recorder.end(item, "release", reason=sentence(Reason.SHUTDOWN))

    # -- fetching ----------------------------------------------------------------------------------

    def _request(
        self, item: InflightEvent, baseline: Baseline | None, *, again: bool = False
    ) -> None:
        assert self._fetch is not None
        failures = item.admitted.failures
        item.task = self._fetch.start(
            item.event,
            baseline,
            partial(self._on_response, item),
            # By how many pools the event's route has moved on.
            turn=retry.turns(self._policies, "fetch", failures) if failures else 0,
            sleep=partial(self._wait_without_permit, item),
            again=again,
            progress=b"" if again else item.admitted.progress,
        )

    def _on_response(self, item: InflightEvent, answer: Response | BaseException) -> None:
        """Handle the final response of an event, or the failure of its fetch."""
        try:
            if isinstance(answer, BaseException):
                raise answer
            b = item.admitted.baseline
            if answer.status != 304 or b is None:
                self._on_page(item, answer)
            elif not self._is_up_to_date(item, b, answer):
                item.task = asyncio.create_task(self._extract_again(item, b, answer))
                return
            else:
                self._recorder.end(
                    item,
                    "success",
                    reason=sentence(Reason.UNCHANGED),
                    response_status=304,
                    response_hash=b.response_hash,
                    extractors=b.extractors,
                )
        except (Exception, asyncio.CancelledError) as e:
            self._on_error(item, "fetch", e)
        self._finish(item)

    async def _extract_again(self, item: InflightEvent, b: Baseline, r: Response) -> None:
        """Extract the stored page after a 304, because something else has changed.

        Fetch the page without conditions if it is not stored.
        """
        try:
            body = await self._pages.get(b.page) if b.page else None
            if body is None:
                item.admitted.baseline = None
                self._request(item, None, again=True)
                return
            # A 304 has only the headers that changed.
            headers = {**b.headers, **r.headers}
            self._on_page(item, msgspec.structs.replace(r, status=200, headers=headers, body=body))
        except (Exception, asyncio.CancelledError) as e:
            self._on_error(item, "fetch", e)
        self._finish(item)

    def _on_page(self, item: InflightEvent, r: Response) -> None:
        """Extract the page, publish it on `pages`, or end the event as unchanged."""
        b, hash_ = item.admitted.baseline, page_id(r.body)
        # The page store, the ledger and the broker must not contain cookies and tokens.
        headers = mask_headers(r.headers)
        item.response, item.body = r, r.body
        item.meta = PageMeta(
            page=hash_,
            url=r.url,
            status=r.status,
            headers=headers,
            fetched_at=self._clock.now(),
            size=len(r.body),
            # A URL that was gone has a baseline without extractors.
            first=b is None or not b.extractors,
        )
        self._window.body_bytes += len(r.body)
        if (
            b is not None
            and b.response_hash == hash_
            and not self._emit_unchanged
            and self._is_up_to_date(item, b, r)
        ):
            self._recorder.end(
                item, "success", reason=sentence(Reason.UNCHANGED), extractors=b.extractors
            )
        else:
            self._pass_on(item)

    def _is_up_to_date(self, item: InflightEvent, b: Baseline, r: Response) -> bool:
        """Return True if an extraction of the same page would give what the last one gave."""
        event = item.event
        return are_unchanged(
            b.extractors,
            self._signature(r.url, event.url),
            url=r.url,
            requested_url=event.url,
            data=event.data,
        )

    async def _load_page(self, item: InflightEvent) -> None:
        """Load a page that the ledger knows. It is never fetched again.

        If this worker only fetches, the request was delivered again, and its message on `pages` may
        be lost.
        """
        try:
            meta = item.meta or msgspec.msgpack.decode(item.admitted.page_meta, type=PageMeta)
            body = PageMessage.read(item.delivery.body).body() if self._first == "extract" else None
            if body is None:
                body = await self._pages.get(meta.page)
            if body is None:
                raise Failure(
                    ErrorClass.PERMANENT,
                    sentence(Reason.PAGE_GONE),
                    code=Reason.PAGE_GONE,
                    detail=meta.page,
                )
            item.meta, item.body = meta, body
            self._window.body_bytes += len(body)
            self._pass_on(item)
        except (Exception, asyncio.CancelledError) as e:
            self._on_error(item, "extract", e)
        finally:
            self._finish(item)

    def _publish_page(self, item: InflightEvent) -> None:
        """Publish the page on `pages`, for the workers of the stage `extract`."""
        assert item.meta is not None
        message = page_message(
            item.delivery.body,
            item.meta,
            item.body,
            inline_max=self._options.inline_max,
            largest=self._options.message_max,
        )
        self._publish(item, "handover", "pages", message)

    # -- extracting --------------------------------------------------------------------------------

    async def _extract_batch(self, items: Sequence[InflightEvent]) -> None:
        """Extract a batch of pages. Suspects run alone, outside this process."""
        assert self._extraction is not None
        if self._breakers.extractors:
            items = await self._without_paused(items)
            if not items:
                self._flush_if_idle(own_tasks=1)
                return
        suspects = [i for i in items if i.admitted.crashes >= CRASHES_BEFORE_ISOLATION]
        if self._suspects is None or not suspects:
            await self._extract(items, self._extraction)
            return
        others = [i for i in items if i.admitted.crashes < CRASHES_BEFORE_ISOLATION]
        await asyncio.gather(
            self._extract(suspects, self._suspects), self._extract(others, self._extraction)
        )

    async def _without_paused(self, items: Sequence[InflightEvent]) -> list[InflightEvent]:
        """Delay pages of paused extractors, with their stored pages. Return the other pages."""
        # An operator may have resumed an extractor since the last refresh.
        with contextlib.suppress(StoreUnavailable):
            await self._breakers.refresh()
        others = []
        for item in items:
            paused = self._breakers.extractors.intersection(self._names(item))
            if not paused:
                others.append(item)
                continue
            name = min(paused)
            failure = Failure(
                ErrorClass.OURS,
                sentence(Reason.EXTRACTOR_PAUSED, name),
                code=Reason.EXTRACTOR_PAUSED,
                waits_for=EXTRACTOR + name,
            )
            self._recorder.fail(item, "extract", failure)
        return others

    def _names(self, item: InflightEvent) -> Sequence[str]:
        """Return the names of the extractors that match the page of an event."""
        url = item.event.url
        return self._extractors(item.meta.url if item.meta else url, url)

    async def _extract(self, items: Sequence[InflightEvent], by: Extraction) -> None:
        try:
            pages = [
                FetchedPage(m.url, i.body, m.status, m.headers, m.fetched_at, i.event, i.event.url)
                for i in items
                if (m := i.meta) is not None
            ]
            results = await by.extract(pages, alone=by is self._suspects)
        except Exception as e:
            f = Failure(
                ErrorClass.OURS,
                sentence(Reason.EXTRACTION, detail=f"{type(e).__name__}: {e}"),
                code=Reason.EXTRACTION,
                detail=traceback.format_exc(),
            )
            for item in items:
                self._recorder.fail(item, "extract", f)
            return
        for item, result in zip(items, results, strict=True):
            item.depends_on = self._dependencies(item, result)
            self._on_extracted(item, result)
        self._flush_if_idle(own_tasks=1)

    def _dependencies(self, item: InflightEvent, x: Extracted) -> str:
        assert item.meta is not None
        url, event = item.meta.url, item.event
        return dependencies(
            self._signature(url, event.url),
            url=url,
            requested_url=event.url,
            data=event.data if x.read_event else None,
            headers=x.read_headers,
        )

    def _on_extracted(self, item: InflightEvent, x: Extracted) -> None:
        """End an event with its extraction result, or publish the result on `records`."""
        if x.error:
            kind = ErrorClass(x.kind or "permanent")
            code = x.code or Reason.OTHER
            failure = Failure(kind, x.error, code=code, detail=x.detail, after=x.after)
            names = [x.extractor] if x.extractor else self._names(item)
            self._recorder.fail(item, "extract", failure, extractors=names)
        elif self._last == "extract":
            body = item.delivery.body
            message = RecordsMessage(
                event=body if self._first == "fetch" else PageMessage.read(body).event,
                page=item.meta,
                records=x.records,
                links=[*x.links, *unpack_all(x.more_links)],
                matched=x.matched,
                depends_on=item.depends_on,
            )
            self._publish(item, "writing", "records", message.write())
        else:
            reason = ""
            if not x.records and not x.links:
                reason = sentence(Reason.EMPTY if x.matched else Reason.UNMATCHED)
            self._recorder.end(
                item,
                "success",
                reason=reason,
                extracted=True,
                records=x.records,
                links=x.links,
                more_links=x.more_links,
                extractors=item.depends_on,
            )

    def _publish(
        self,
        item: InflightEvent,
        outcome: Literal["handover", "writing"],
        topic: str,
        body: bytes,
    ) -> None:
        """End the event's part in this worker. Its message goes to the next stage's topic."""
        event = item.event
        message = Out(
            topic=topic, id=event.id, key=event.key, body=body, priority=int(event.priority)
        )
        self._recorder.end(item, outcome, publish=(message,))
