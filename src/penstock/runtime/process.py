"""The worker process: opens the adapters of a configuration and runs the chosen roles.

This module connects all parts of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.authoring.load import load_to_run
from penstock.authoring.pipeline import SourceSpec
from penstock.clock import SystemClock
from penstock.config.schema import Config
from penstock.engine.admission import PARK_AFTER
from penstock.engine.flusher import Flusher
from penstock.engine.hooks import HookRunner
from penstock.engine.settings import SinkBinding
from penstock.engine.signals import Signals
from penstock.engine.worker import ENTRY, Worker
from penstock.errors import CONFIGURATION, OK, RAN_WITH_FAILURES, StoreUnavailable
from penstock.extraction.in_process import InProcess
from penstock.extraction.sandbox import Limits, Sandbox
from penstock.fetching.proxies import Proxies
from penstock.fetching.source_client import SourceWeb
from penstock.fetching.stage import FetchStage
from penstock.intake.accept import Intake
from penstock.intake.mapping import Mapping as SourceMapping
from penstock.intake.reader import Reader
from penstock.locks import WorkerLock
from penstock.model import mint
from penstock.net.http import CurlFetcher
from penstock.operate.hosts import apply_configured_exceptions
from penstock.operate.ownership import Membership
from penstock.operate.waiting import all_ended, approvals_in, lines_about, stuck_in
from penstock.ports import Clock, Durability, Extraction, TableSink, Transaction
from penstock.rules.budgets import Run
from penstock.rules.masking import mask
from penstock.rules.waiting import Waiting
from penstock.runtime import sink_watch
from penstock.runtime.fetching import (
    SOURCE_BODY,
    exceptions,
    fetch_options,
    open_fetcher,
    operator,
)
from penstock.runtime.periodic import PeriodicWork
from penstock.runtime.roles import chains, check_roles
from penstock.runtime.sources_and_sinks import check_served, open_sinks, open_sources, sink_lock
from penstock.runtime.stores import open_stores, settings, worker_id
from penstock.runtime.tasks import cancel_all, wait_or_cancel
from penstock.runtime.worker_options import retry_policies, worker_options
from penstock.sources.base import SourceContext
from penstock.stores.migrations.other_workers import status_text

if TYPE_CHECKING:
    from penstock.intake.http_server import Listener

log = logging.getLogger("penstock")
# Seconds added to 2 × grace. Then a stuck worker task is abandoned, and a background task is
# cancelled again.
END_SPARE = 10.0
# Seconds between new rows and the wake-up of a flusher. Rows of several transactions then share
# one sync of the file.
FLUSH_LINGER = 0.1


# -- running ---------------------------------------------------------------------------------------


class WorkerProcess:
    """One worker process: its open adapters, its tasks and its shutdown."""

    def __init__(
        self,
        config: Config,
        pipeline_file: Path,
        *,
        roles: frozenset[str],
        clock: Clock | None = None,
        run: Run | None = None,
    ) -> None:
        """Check the pipeline, roles, sources and sinks before any store is opened.

        `run` is the command that started this process. By default it is this process.
        """
        self.config, self.file, self.roles = config, pipeline_file, roles
        self.pipeline = load_to_run(pipeline_file)
        self.sinks = open_sinks(self.pipeline, Path.cwd(), config.state.dir)
        self.web = SourceWeb()
        self.id = worker_id()
        self.clock: Clock = clock or SystemClock()
        self.rng = random.Random()
        self._run = run or Run(self.id, self.clock.now())
        context = SourceContext(config, self.clock, self.rng, self.web, Path.cwd())
        self.sources = (
            open_sources(self.pipeline, context) if "source" in roles or "serve" in roles else []
        )
        self.served: list[tuple[Any, SourceSpec]] = [
            (source, spec) for source, spec in self.sources if source.served and "serve" in roles
        ]
        check_served([source for source, _ in self.served], config.serve.host)
        check_roles(self.pipeline, self.sources, roles)
        self.readers: list[Reader] = []
        self.listener: Listener | None = None
        self.signals = Signals()
        self.workers: list[Worker] = []
        self.flushers: list[Flusher] = []
        self.proxies: Proxies | None = None  # None if this process does not fetch
        self._wake_set = False
        self.stuck: Sequence[
            Waiting
        ] = ()  # causes for which the last events wait, under --until-idle
        self._gave_up: sink_watch.SinkGaveUp | None = None

    # -- run and shutdown --------------------------------------------------------------------------

    async def run(
        self,
        stop: asyncio.Event,
        *,
        until_idle: bool = False,
        opened: Callable[[WorkerProcess], None] | None = None,
    ) -> int:
        async with contextlib.AsyncExitStack() as closing:  # closes in reverse order
            self.stores = open_stores(self.config, worker=self.id, clock=self.clock)
            closing.callback(self.stores.close)
            lock = WorkerLock(self.stores.workers_directory, self.id, status=status_text())
            self._lock = lock
            lock.acquire()
            closing.callback(lock.release)
            closing.push_async_callback(self.stores.stop)
            await self.stores.check_after_unclean_stop()
            self._membership = await self._enter_store(closing)
            await self.stores.start()
            # A process that does not fetch may get all its pages inside messages. Then it does not
            # need the page store.
            if self.stores.pages.remote and (
                "fetch" in self.roles or not self.config.pages.inline_max
            ):
                await self.stores.pages.start()
            await self.stores.maintenance.reclaim(self.stores.workers_directory)
            extraction, suspects = await self._open_extraction(closing)
            fetcher = await self._open_fetcher(closing)
            self.stores.with_settings(
                settings(self.config, self.pipeline, sinks=self._bind_sinks(), run=self._run)
            )
            closing.push_async_callback(self.stores.budgets.finish)
            await self.stores.budgets.refresh(fetches="fetch" in self.roles)
            dead_before = await self._dead()
            if "source" in self.roles and not all(source.served for source, _ in self.sources):
                for_sources = open_fetcher(self.config, self.stores.meter, max_body=SOURCE_BODY)
                closing.push_async_callback(for_sources.close)
                self._open_readers(for_sources)
                await self.stores.claims.refresh()
            if self.served:
                self.listener = self._open_listener()
            hooks = None
            if self.pipeline.hooks and extraction is not None and "sink" in self.roles:
                lock_file = self.config.state.dir / "hooks.lock"
                hooks = HookRunner(
                    self.stores.uow, extraction, self.stores.db.lock(lock_file), self.clock
                )
            await self.stores.breakers.refresh()
            background = self._start_background(hooks)
            closing.push_async_callback(cancel_all, background, timeout=self._longest_end)
            await sink_watch.wait_until_open(self.flushers, stop)
            self._open_workers(fetcher, extraction, suspects, hooks)
            if opened is not None:
                opened(self)
            try:
                await self._work(stop, until_idle, background)
            except Exception:
                # Statements of this release may fail on tables of another release.
                if not await self._periodic.check_store_version():
                    raise
            if self._periodic.store_changed.is_set():
                return CONFIGURATION if until_idle else OK
            await sink_watch.drain(self.flushers, self.config.grace)
            if self._gave_up is not None:
                raise self._gave_up
            for line in lines_about(self.stuck):
                log.error("the rest waits: %s", line)
            failed = (
                await self._dead() > dead_before
                or bool(self.stuck)
                or await self._is_paused()
                or any(r.error for r in self.readers)
            )
            return RAN_WITH_FAILURES if until_idle and failed else OK

    async def _enter_store(self, closing: contextlib.AsyncExitStack) -> Membership:
        """Check that the stores belong to this pipeline, before anything is taken from them."""
        stores, name = self.stores, self.pipeline.name
        member = Membership(stores.uow, stores.db, self.clock, pipeline=name, worker=self.id)
        await member.enter()
        closing.push_async_callback(member.leave)
        return member

    def _start_background(self, hooks: HookRunner | None) -> list[asyncio.Task[None]]:
        work = {f"flush {f.sink.name}": f.run() for f in self.flushers}
        if hooks is not None:
            work["hooks"] = hooks.run()
        self._periodic = PeriodicWork(
            self.config, self.stores, self.flushers, self._lock, fetches="fetch" in self.roles
        )
        work["links"] = self.stores.lifecycle.feeder.run()
        work["upkeep"] = self._periodic.maintain()
        work["heartbeat"] = self._periodic.heartbeat(self._membership)
        if self.stores.relay_chores is not None:
            work["relay"] = self._periodic.relay(self.stores.relay_chores)
        return [asyncio.create_task(run, name=name) for name, run in work.items()]

    async def _work(
        self, stop: asyncio.Event, until_idle: bool, background: Sequence[asyncio.Task[None]]
    ) -> None:
        ended = asyncio.Event()
        tasks = [
            asyncio.create_task(w.run(ended), name=f"{w.first}..{w.last}") for w in self.workers
        ]
        readers = [
            asyncio.create_task(r.run(), name=f"source {r.source.name}") for r in self.readers
        ]
        if self.listener is not None:
            readers.append(asyncio.create_task(self.listener.run(), name="serve"))
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(self._periodic.store_changed.wait()),
        ]
        if until_idle:
            waits.append(asyncio.create_task(self._until_idle()))
        try:
            await asyncio.wait(
                [*tasks, *waits, *readers, *background], return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ended.set()
            for wait in waits:
                wait.cancel()
            # Stop the readers and the HTTP server first, so that they accept no event while the
            # workers drain.
            results = await cancel_all(readers, timeout=self._longest_end)
            if tasks:
                results += await wait_or_cancel(tasks, timeout=self._longest_end)
        for result in [
            *results,
            *(t.exception() for t in background if t.done() and not t.cancelled()),
        ]:
            if isinstance(result, BaseException):
                raise result

    @property
    def _longest_end(self) -> float:
        return 2 * self.config.grace + END_SPARE

    async def _until_idle(self) -> None:
        """Wait until the pipeline is idle, waits for an operator, or has a sink that is stuck.

        The pipeline is idle when every source is read and every accepted event has ended. All rows
        must be in their sinks, and hooks must have run for all changes. If a topic is paused, the
        call waits only until no worker of this process holds a delivery.
        """
        while True:
            self._gave_up = sink_watch.stuck_sink(self.flushers, self.config.sink.give_up_after)
            if self._gave_up is not None:
                return
            with contextlib.suppress(StoreUnavailable):
                # Check the readers first. Their last findings are then in the ledger when the
                # ledger is checked.
                read = all([await r.settled() for r in self.readers])
                if (
                    read
                    and await self.stores.uow.read(self._is_idle)
                    and not await self._periodic.remove(idle=True)
                    and all([await f.backlog() == 0 for f in self.flushers])
                ):
                    self.stuck = await self.stores.uow.read(approvals_in)
                    return
                if (read or await self._is_paused()) and not any(w.held for w in self.workers):
                    stuck = await self.stores.uow.read(
                        partial(stuck_in, can_feed=self.stores.lifecycle.feeder.can_feed)
                    )
                    if stuck and not await self.stores.budgets.refresh_all(
                        fetches="fetch" in self.roles
                    ):
                        self.stuck = stuck
                        return
            await self.clock.sleep(0.1)

    def _is_idle(self, tx: Transaction) -> bool:
        return all_ended(tx) and not (self.pipeline.hooks and tx.outbox.has_changes())

    async def _dead(self) -> int:
        return await self.stores.uow.read(lambda tx: tx.counters.total("dead"))

    async def _is_paused(self) -> bool:
        """Return True if a topic is paused."""
        return bool(await self.stores.uow.read(lambda tx: tx.queue.paused()))

    # -- parts of the process ----------------------------------------------------------------------

    async def _open_fetcher(self, closing: contextlib.AsyncExitStack) -> CurlFetcher | None:
        """Open the HTTP client and the proxies, and record the configured exceptions."""
        if "fetch" not in self.roles:
            return None
        fetcher = open_fetcher(self.config, self.stores.meter)
        closing.push_async_callback(fetcher.close)
        await self.stores.claims.refresh()
        await self.stores.uow.write(
            lambda tx: apply_configured_exceptions(tx.hosts, exceptions(self.config), operator()),
            durability=Durability.RELAXED,
        )
        c, s, health = self.config, self.stores, self.stores.proxies
        self.proxies = Proxies(c.proxies, health, fetcher, s.clock, s.context.rng, s.meter)
        closing.push_async_callback(self.proxies.close)
        await health.refresh()
        closing.push_async_callback(self.stores.routes.withdraw)
        await self.stores.routes.announce()
        return fetcher

    async def _open_extraction(
        self, closing: contextlib.AsyncExitStack
    ) -> tuple[Extraction | None, Extraction | None]:
        """Return the extraction for user code, and the extraction for suspects.

        The second is None if all pages run in sandboxed children. Otherwise it is a sandbox for
        pages that may have crashed a worker process.
        """
        if "extract" not in self.roles:
            return None, None
        c = self.config.extract
        sandbox = Sandbox(
            self.file,
            size=c.processes,
            limits=Limits(seconds=c.seconds, memory=c.memory, output=c.output),
        )
        await sandbox.start()
        closing.push_async_callback(sandbox.close)
        if c.isolation == "process":
            return sandbox, None
        extraction = InProcess(self.pipeline)
        closing.push_async_callback(extraction.close)
        return extraction, sandbox

    def _bind_sinks(self) -> list[SinkBinding]:
        """Connect the pipeline's sinks to the ledger.

        A table in the ledger's file or database is written in the success transaction. Rows of
        every other sink go through the sink outbox.
        """
        bindings = []
        for sink, only in self.sinks:
            bindings.append(SinkBinding(sink.name, only))
            in_ledger = isinstance(sink, TableSink) and sink.shares(self.config.ledger.url)
            if isinstance(sink, TableSink) and in_ledger:
                self.stores.db.write_now(sink.prepare_in)
                self.stores.table_sinks[sink.name] = sink.write_in
            if "sink" in self.roles and (not in_ledger or self._has_backlog(sink.name)):
                lock = self.stores.db.lock(sink_lock(self.config, sink.name))
                notice = partial(log.warning, "%s")
                self.flushers.append(
                    Flusher(sink, self.stores.uow, lock, self.clock, on_notice=notice)
                )
        return bindings

    def _has_backlog(self, sink: str) -> bool:
        """True if the outbox has rows of the sink. A release before may have left some."""
        return self.stores.uow.snapshot(lambda tx: tx.outbox.backlog(sink)) > 0

    def _open_readers(self, fetcher: CurlFetcher) -> None:
        claims = self.stores.claims
        self.web.bind(
            FetchStage(fetcher, claims, claims, self.clock, fetch_options(self.config)),
            claims,
            self.clock,
        )
        for source, spec in self.sources:
            if source.served:
                continue
            lock = self.stores.db.lock(
                self.config.state.dir / "sources" / f"{mint('source', spec.name)[:16]}.lock"
            )
            self.readers.append(
                Reader(
                    source,
                    mask(spec.url),
                    self._intake(spec),
                    self.stores.uow,
                    lock,
                    self.clock,
                    self.rng,
                    worker=self.id,
                )
            )

    def _intake(self, spec: SourceSpec) -> Intake:
        mapping = SourceMapping(spec, host_by=self.config.pace.by)
        return Intake(self.stores.lifecycle, mapping, self.clock, source=spec.name)

    def _open_listener(self) -> Listener:
        # Imported here, because most pipelines have no webhook and need no HTTP server.
        from penstock.runtime.serving import open_listener

        hooks = [(source, spec.url, self._intake(spec)) for source, spec in self.served]
        return open_listener(self.config, hooks, self.stores.uow, self.clock, worker=self.id)

    def _open_workers(
        self,
        fetcher: CurlFetcher | None,
        extraction: Extraction | None,
        suspects: Extraction | None,
        hooks: HookRunner | None,
    ) -> None:
        c = self.config
        message_max = self.stores.topics.caps_of("pages").max_body
        policies = retry_policies(c)

        def on_records() -> None:
            if not any(w.held for w in self.workers):  # no further rows are expected
                wake()
            elif not self._wake_set:
                self._wake_set = True
                asyncio.get_running_loop().call_later(FLUSH_LINGER, wake)

        def wake() -> None:
            self._wake_set = False
            for f in self.flushers:
                f.wake()
            if hooks is not None:
                hooks.wake()

        for first, last in chains(self.roles):
            fetch = (
                FetchStage(
                    fetcher,
                    self.stores.claims,
                    self.stores.claims,
                    self.clock,
                    fetch_options(c, slot_wait=PARK_AFTER),
                    self.proxies,
                )
                if first == "fetch" and fetcher is not None
                else None
            )
            self.workers.append(
                Worker(
                    first=first,
                    last=last,
                    admission=self.stores.admission,
                    lifecycle=self.stores.lifecycle,
                    pace=self.stores.claims,
                    subscription=self.stores.topics.subscribe(
                        ENTRY[first], "main", owner=self.id, lease=c.lease
                    ),
                    fetch=fetch,
                    extraction=extraction,
                    suspects=suspects,
                    signature=self.pipeline.signature,
                    extractors=self.pipeline.names_for,
                    policies=policies,
                    options=worker_options(c, first, message_max),
                    clock=self.clock,
                    rng=self.stores.context.rng,
                    signals=self.signals,
                    paused=self.paused,
                    on_records=on_records,
                )
            )
            if fetch is not None and fetcher is not None:
                fetcher.scarcity = self.workers[-1].scarcity

    def paused(self) -> str | None:
        """Return why workers receive no deliveries now, or None if they may.

        The reason is a sink of this process that is down or too far behind.
        """
        for f in self.flushers:
            if f.down:
                return f"sink {f.sink.name} is down: {f.down}"
        return (
            "a sink is too far behind"
            if self._periodic.backlog > self.config.sink.max_backlog
            else None
        )
