"""Worker: receive → admit → begin → handle → conclude, for the stages that this process runs.

The prefetch window receives, the dispatcher starts, the handlers process, and the recorder ends.
See `lifecycle` and `admission` for the writes and their order.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from penstock.engine.admission import Admission
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.handlers import Handlers
from penstock.engine.inflight import InflightEvent
from penstock.engine.lifecycle import Lifecycle
from penstock.engine.outage import Outage
from penstock.engine.recorder import Recorder
from penstock.engine.settings import ENTRY, Options, Stage
from penstock.engine.signals import Signals
from penstock.engine.window import PrefetchWindow
from penstock.model import ErrorClass
from penstock.ports import Clock, End, Extraction, Pace, PageFetcher, Subscription
from penstock.rules import retry
from penstock.rules.speed import Scarcity

__all__ = ["ENTRY", "Options", "Stage", "Worker"]

log = logging.getLogger("penstock.worker")


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
        signature: Callable[[str, str], str],
        extractors: Callable[[str, str], Sequence[str]],
        policies: dict[tuple[str, ErrorClass], retry.Policy],
        options: Options,
        clock: Clock,
        rng: random.Random,
        signals: Signals,
        paused: Callable[[], str | None],
        on_records: Callable[[], None],
    ) -> None:
        self.first, self.last, self._options, self._clock = first, last, options, clock
        self._on_records = on_records
        self._outage = Outage(clock)
        self._window = PrefetchWindow(
            subscription,
            options,
            clock,
            self._outage,
            stage=first,
            host_by=lifecycle.settings.host_by,
            paused=paused,
        )
        self._dispatcher = Dispatcher(
            admission, pace, self._window, options, clock, self._outage, stage=first
        )
        self._recorder = Recorder(
            lifecycle,
            self._window,
            options,
            clock,
            self._outage,
            first=first,
            last=last,
            policies=policies,
            rng=rng,
            signals=signals,
            on_recorded=self._on_recorded,
        )
        self._handlers = Handlers(
            self._window,
            self._dispatcher,
            self._recorder,
            options,
            clock,
            first=first,
            last=last,
            fetch=fetch,
            extraction=extraction,
            suspects=suspects,
            pages=lifecycle.pages,
            signature=signature,
            extractors=extractors,
            breakers=lifecycle.breakers,
            policies=policies,
            emit_unchanged=lifecycle.settings.emit_unchanged,
        )

    @property
    def held(self) -> dict[int, InflightEvent]:
        """Events without a committed outcome, by the position of their delivery."""
        return self._window.held

    def scarcity(self) -> Scarcity | None:
        """Return the lowest accepted speed of responses while permits are scarce, or None."""
        return self._dispatcher.scarcity()

    def _on_recorded(self, ends: Sequence[End]) -> None:
        self._dispatcher.wake()
        if any(end.records for end in ends):
            self._on_records()

    async def run(self, stop: asyncio.Event) -> None:
        """Process deliveries until `stop` is set. Then finish or release them within the grace.

        Every received delivery has an outcome when this returns, unless the store is unavailable
        for too long.
        """
        taking = [
            asyncio.create_task(self._window.run(self._dispatcher), name="receive"),
            asyncio.create_task(self._dispatcher.run(self._handlers.start), name="start"),
        ]
        keeping = [
            asyncio.create_task(self._window.renew_leases(), name="heartbeat"),
            asyncio.create_task(self._watch_deadlines(), name="watchdog"),
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
                await self._window.close()

    async def _drain(self, taking: Sequence[asyncio.Task[None]]) -> None:
        """Shut down in four steps.

        Stop receiving. Release deliveries without a start. Wait until the others finish. Release
        those that are not finished when the grace ends.
        """
        until = self._clock.now() + self._options.grace
        self._window.stop()
        self._dispatcher.wake()
        # A `begin` in progress counts starts. Its deliveries must not be released without an end.
        await asyncio.wait(taking, timeout=self._options.grace)
        self._dispatcher.clear()
        await self._window.release_unstarted()
        while self.held and self._clock.now() < until:
            self._handlers.flush()
            await self._clock.sleep(0.01)
        self._handlers.release()
        ends = self._recorder.batches
        while ends.waiting or ends.under_way:
            ends.flush()
            await asyncio.wait(ends.under_way, timeout=0.1)
            if self._outage.reason and self._clock.now() > until + self._options.grace:
                log.error(
                    "shutting down while the store is unavailable: %d deliveries are not settled "
                    "and will be redelivered when their leases expire",
                    len(self.held),
                )
                return

    async def _watch_deadlines(self) -> None:
        while True:
            await self._clock.sleep(min(1.0, self._options.deadline / 4))
            self._handlers.cancel_late()
