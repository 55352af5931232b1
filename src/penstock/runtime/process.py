"""The worker process: opens the adapters of a configuration and runs the chosen roles.

This module connects all parts of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import io
import ipaddress
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import locks
from penstock.authoring.load import load
from penstock.authoring.pipeline import Pipeline, SourceSpec
from penstock.clock import SystemClock
from penstock.config.schema import Config
from penstock.engine.admission import PARK_AFTER
from penstock.engine.flusher import Flusher
from penstock.engine.hooks import HookRunner
from penstock.engine.relay import RelayChores
from penstock.engine.settings import SinkBinding
from penstock.engine.signals import Signals
from penstock.engine.worker import ENTRY, Options, Stage, Worker
from penstock.errors import OK, RAN_WITH_FAILURES, ConfigError, StoreUnavailable, Unreachable
from penstock.extraction.in_process import InProcess
from penstock.extraction.sandbox import Limits, Sandbox
from penstock.fetching.proxies import Proxies, fetch_list
from penstock.fetching.source_client import SourceWeb
from penstock.fetching.stage import FetchOptions, FetchStage
from penstock.intake.accept import Intake
from penstock.intake.mapping import Mapping as SourceMapping
from penstock.intake.reader import Reader
from penstock.ledgers.sql.events import OPEN
from penstock.locks import WorkerLock
from penstock.model import mint
from penstock.net.guard import Guard, parse_allow
from penstock.net.http import CurlFetcher
from penstock.net.transfer import HttpOptions
from penstock.operate.hosts import apply_configured_exceptions
from penstock.ports import (
    Clock,
    Durability,
    Extraction,
    Fetcher,
    ServedSource,
    Sink,
    Source,
    TableSink,
    Transaction,
)
from penstock.rules import retry
from penstock.rules.masking import mask
from penstock.rules.proxies import Member
from penstock.rules.robots import product_token
from penstock.runtime.assembly import HostAccess
from penstock.runtime.stores import (
    Politeness,
    Stores,
    adapter,
    open_stores,
    settings,
    worker_id,
)
from penstock.sources.base import SourceContext

if TYPE_CHECKING:
    from penstock.intake.http_server import Listener

log = logging.getLogger("penstock")
ROLES = ("source", "serve", "fetch", "extract", "sink")
STAGES: tuple[Stage, ...] = ("fetch", "extract", "sink")
# Bytes. A store file up to this size is checked before the start, and a larger one during the work.
SMALL_STORE = 256 << 20
UPKEEP = 60.0  # seconds between two runs of retention
# Seconds added to 2 × grace. Then a stuck worker task is abandoned, and a background task is
# cancelled again.
END_SPARE = 10.0
# Maximum bytes of one decoded response to a source. This is the limit of the sitemap protocol.
SOURCE_BODY = 50 * 2**20
# Seconds between new rows and the wake-up of a flusher. Rows of several transactions then share
# one sync of the file.
FLUSH_LINGER = 0.1


# -- running ---------------------------------------------------------------------------------------


class Running:
    """One worker process: its open adapters, its tasks and its shutdown."""

    def __init__(
        self,
        config: Config,
        pipeline_file: Path,
        *,
        roles: frozenset[str],
        clock: Clock | None = None,
    ) -> None:
        """Check the pipeline, roles, sources and sinks before any store is opened."""
        self.config, self.file, self.roles = config, pipeline_file, roles
        self.pipeline = load(pipeline_file)
        self.sinks = open_sinks(self.pipeline, Path.cwd())
        self.web = SourceWeb()
        _check_roles(self.pipeline, roles)
        self.id = worker_id()
        self.clock: Clock = clock or SystemClock()
        self.rng = random.Random()
        context = SourceContext(config, self.clock, self.rng, self.web, Path.cwd())
        self.sources = (
            open_sources(self.pipeline, context) if "source" in roles or "serve" in roles else []
        )
        self.served: list[tuple[Any, SourceSpec]] = [
            (source, spec) for source, spec in self.sources if source.served and "serve" in roles
        ]
        check_served([source for source, _ in self.served], config.serve.host)
        _check_sources(self.sources, roles)
        self.readers: list[Reader] = []
        self.listener: Listener | None = None
        self.signals = Signals()
        self.workers: list[Worker] = []
        self.flushers: list[Flusher] = []
        self.notices: list[str] = []
        self.proxies: Proxies | None = None  # None if this process does not fetch
        self._backlog = 0
        self._wake_set = False

    # -- run and shutdown --------------------------------------------------------------------------

    async def run(
        self,
        stop: asyncio.Event,
        *,
        until_idle: bool = False,
        opened: Callable[[Running], None] | None = None,
    ) -> int:
        self.stores = open_stores(self.config, worker=self.id, clock=self.clock)
        lock = WorkerLock(self.stores.workers_directory, self.id)
        lock.acquire()
        background: list[asyncio.Task[None]] = []
        extraction: Extraction | None = None
        suspects: Extraction | None = None
        fetcher: CurlFetcher | None = None
        for_sources: CurlFetcher | None = None
        try:
            await self._check_after_unclean_stop()
            await self.stores.start()
            # A process that does not fetch may get all its pages inside messages. Then it does not
            # need the page store.
            if self.stores.pages.remote and (
                "fetch" in self.roles or not self.config.pages.inline_max
            ):
                await self.stores.pages.start()
            await self.stores.maintenance.reclaim(self.stores.workers_directory)
            if "extract" in self.roles:
                extraction, suspects = await self._open_extraction()
            if "fetch" in self.roles:
                fetcher = open_fetcher(self.config)
                await self.stores.claims.refresh()
                await self.stores.uow.write(
                    lambda tx: apply_configured_exceptions(
                        tx.hosts, exceptions(self.config), operator()
                    ),
                    durability=Durability.RELAXED,
                )
                self.proxies = Proxies(
                    self.config.proxies,
                    self.stores.proxies,
                    fetcher,
                    self.clock,
                    self.stores.context.rng,
                )
                await self.stores.proxies.refresh()
            bindings = self._bind_sinks()
            self.stores.with_settings(
                settings(self.config, sinks=bindings, hooks=bool(self.pipeline.hooks))
            )
            dead_before = await self._dead()
            if "source" in self.roles and not all(source.served for source, _ in self.sources):
                for_sources = open_fetcher(self.config, max_body=SOURCE_BODY)
                self._open_readers(for_sources)
                await self.stores.claims.refresh()
            if self.served:
                self.listener = self._open_listener()
            background += [
                asyncio.create_task(f.run(), name=f"flush {f.sink.name}") for f in self.flushers
            ]
            hooks = None
            if self.pipeline.hooks and extraction is not None and "sink" in self.roles:
                hooks = HookRunner(
                    self.stores.uow,
                    extraction,
                    self.stores.db.lock(self.config.state.dir / "hooks.lock"),
                    self.clock,
                )
                background.append(asyncio.create_task(hooks.run(), name="hooks"))
            background.append(asyncio.create_task(self._upkeep(), name="upkeep"))
            if self.stores.relay_chores is not None:
                relay = self._relay(self.stores.relay_chores)
                background.append(asyncio.create_task(relay, name="relay"))
            self._open_workers(fetcher, extraction, suspects, hooks)
            if opened is not None:
                opened(self)
            await self._work(stop, until_idle, background)
            for f in self.flushers:
                if not await f.drain(self.config.grace):
                    self._notice(
                        f"sink {f.sink.name}: {f.down or 'rows are still waiting'}; they stay in the outbox for the next run"
                    )
            failed = (
                await self._dead() > dead_before
                or await self._breaker()
                or any(r.error for r in self.readers)
            )
            return RAN_WITH_FAILURES if until_idle and failed else OK
        finally:
            await self._cancelled(background)
            for opened_extraction in (extraction, suspects):
                if opened_extraction is not None:
                    await opened_extraction.close()
            if self.proxies is not None:
                await self.proxies.close()
            for opened_fetcher in (fetcher, for_sources):
                if opened_fetcher is not None:
                    await opened_fetcher.close()
            await self.stores.stop()
            lock.release()
            self.stores.close()

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
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait())]
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
            results = await self._cancelled(readers)
            results += await self._end_of(tasks) if tasks else []
        for result in [
            *results,
            *(t.exception() for t in background if t.done() and not t.cancelled()),
        ]:
            if isinstance(result, BaseException):
                raise result

    async def _end_of(self, tasks: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
        """Wait for draining workers. Cancel a worker that does not end in time.

        The deliveries of a cancelled worker are redelivered when their leases expire.
        """
        _, late = await asyncio.wait(tasks, timeout=self._longest_end)
        for task in late:
            where = io.StringIO()
            task.print_stack(file=where)
            log.error(
                "%s does not end; leaving it where it stands:\n%s",
                task.get_name(),
                where.getvalue(),
            )
            task.cancel()
        return [task.exception() for task in tasks if task.done() and not task.cancelled()]

    async def _cancelled(self, tasks: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
        """Cancel tasks until all have ended. Return their exceptions.

        A library may lose a cancellation, so tasks that still run are cancelled again. `wait_for`
        of Python 3.11 loses a cancellation if the awaited task finishes at the same moment.
        """
        left = set(tasks)
        while left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=self._longest_end)
        return [task.exception() for task in tasks if not task.cancelled()]

    @property
    def _longest_end(self) -> float:
        return 2 * self.config.grace + END_SPARE

    async def _until_idle(self) -> None:
        """Wait until the pipeline is idle, or until a breaker has stopped it.

        The pipeline is idle when every source is read and every accepted event has ended. All rows
        must be in their sinks, and hooks must have run for all changes. After a breaker, the call
        waits until no worker of this process holds a delivery.
        """
        while True:
            with contextlib.suppress(StoreUnavailable):
                # Check the readers first. Their last findings are then in the ledger when the
                # ledger is checked.
                read = all([await r.settled() for r in self.readers])
                if (
                    read
                    and await self.stores.uow.read(self._is_idle)
                    and all([await f.backlog() == 0 for f in self.flushers])
                ):
                    return
                if await self._breaker() and not any(w.held for w in self.workers):
                    return
            await self.clock.sleep(0.1)

    def _is_idle(self, tx: Transaction) -> bool:
        return tx.counters.total(*OPEN) == 0 and not (
            self.pipeline.hooks and tx.outbox.has_changes()
        )

    async def _dead(self) -> int:
        return await self.stores.uow.read(lambda tx: tx.counters.total("dead"))

    async def _breaker(self) -> str | None:
        paused = await self.stores.uow.read(lambda tx: tx.queue.paused())
        return next(iter(paused.values()), None)

    async def _check_after_unclean_stop(self) -> None:
        """Check the store file if a worker of this machine did not stop cleanly.

        A file larger than `SMALL_STORE` is checked during the work.
        """
        if not locks.dead_workers(self.stores.workers_directory):
            return
        file = self.stores.db.file
        if file is None:  # a database server checks its own files
            return
        if file.stat().st_size <= SMALL_STORE:
            self._judge(await asyncio.to_thread(self.stores.db.check))
        else:
            self._check = asyncio.create_task(self._check_aside())

    async def _check_aside(self) -> None:
        problems = await asyncio.to_thread(self.stores.db.check)
        if problems:
            log.critical("the store is damaged: %s", problems[0])

    def _judge(self, problems: Sequence[str]) -> None:
        if problems:
            raise Unreachable(
                f"{self.stores.db.path} is damaged: {problems[0]}",
                hint="stop all workers, keep a copy, and restore a backup or recover it with the sqlite3 shell's .recover",
            )

    # -- parts of the process ----------------------------------------------------------------------

    async def _open_extraction(self) -> tuple[Extraction, Extraction | None]:
        """Return the extraction for user code, and the extraction for suspects.

        The second is None if all pages run in sandboxed children. Otherwise it is a sandbox for
        pages that may have crashed a worker process.
        """
        c = self.config.extract
        sandbox = Sandbox(
            self.file,
            size=c.processes,
            limits=Limits(seconds=c.seconds, memory=c.memory, output=c.output),
        )
        await sandbox.start()
        return (sandbox, None) if c.isolation == "process" else (InProcess(self.pipeline), sandbox)

    def _bind_sinks(self) -> list[SinkBinding]:
        """Connect the pipeline's sinks to the ledger.

        A table in the ledger's file or database is written in the success transaction. Rows of
        every other sink go through the sink outbox.
        """
        bindings = []
        for sink, options in self.sinks:
            only = tuple(options.get("only", ()))
            bindings.append(SinkBinding(sink.name, only))
            if isinstance(sink, TableSink) and sink.shares(self.config.ledger.url):
                self.stores.db.write_now(sink.prepare_in)
                self.stores.table_sinks[sink.name] = sink.write_in
            elif "sink" in self.roles:
                lock = self.stores.db.lock(sink_lock(self.config, sink.name))
                self.flushers.append(
                    Flusher(sink, self.stores.uow, lock, self.clock, on_notice=self._notice)
                )
        return bindings

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
            intake = Intake(
                self.stores.lifecycle,
                SourceMapping(spec, host_by=self.config.pace.by),
                self.clock,
                source=spec.name,
            )
            lock = self.stores.db.lock(
                self.config.state.dir / "sources" / f"{mint('source', spec.name)[:16]}.lock"
            )
            self.readers.append(
                Reader(
                    source,
                    mask(spec.url),
                    intake,
                    self.stores.uow,
                    lock,
                    self.clock,
                    self.rng,
                    worker=self.id,
                )
            )

    def _open_listener(self) -> Listener:
        # Imported here, because most pipelines have no webhook and need no HTTP server.
        from penstock.intake.endpoint import Endpoint, Hook
        from penstock.intake.http_server import Listener

        c = self.config.serve
        hooks = [
            Hook(
                source,
                spec.url,
                Intake(
                    self.stores.lifecycle,
                    SourceMapping(spec, host_by=self.config.pace.by),
                    self.clock,
                    source=spec.name,
                ),
            )
            for source, spec in self.served
        ]
        endpoint = Endpoint(hooks, self.stores.uow, self.clock, worker=self.id, timeout=c.timeout)
        lock = self.config.state.dir / f"serve-{c.host}-{c.port or self.id}.lock"
        return Listener(
            endpoint,
            host=c.host,
            port=c.port,
            connections=c.max_connections,
            timeout=c.timeout,
            grace=self.config.grace,
            lock=lock,
            clock=self.clock,
        )

    def _open_workers(
        self,
        fetcher: CurlFetcher | None,
        extraction: Extraction | None,
        suspects: Extraction | None,
        hooks: HookRunner | None,
    ) -> None:
        c = self.config
        limited = c.pace.rate != float("inf")
        options = Options(
            concurrency=c.fetch.concurrency,
            window=c.fetch.prefetch,
            byte_budget=c.fetch.bytes,
            deadline=c.fetch.deadline,
            extract_group=c.extract.group,
            lease=c.lease,
            grace=c.grace,
            per_key=max(1, int(c.pace.rate * 2)) if limited else None,
            max_age=c.retry.max_age,
            inline_max=c.pages.inline_max,
            message_max=self.stores.topics.caps_of("pages").max_body,
        )
        # Messages that contain pages use memory from the moment they are received. So fewer of
        # them fit into the prefetch window.
        narrow = msgspec.structs.replace(
            options, window=min(options.window, c.fetch.bytes // max(1, c.pages.inline_max))
        )
        policies = retry.table(
            base=c.retry.base, cap=c.retry.max, budget=c.retry.budget, next_pool=c.retry.next_pool
        )

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
                    policies=policies,
                    options=narrow if first == "extract" else options,
                    clock=self.clock,
                    rng=self.stores.context.rng,
                    signals=self.signals,
                    paused=self.paused,
                    on_records=on_records,
                )
            )

    def paused(self) -> str | None:
        """Return why workers receive no deliveries now, or None if they may.

        The reason is a sink of this process that is down or too far behind.
        """
        for f in self.flushers:
            if f.down:
                return f"sink {f.sink.name} is down: {f.down}"
        return "a sink is too far behind" if self._backlog > self.config.sink.max_backlog else None

    async def _upkeep(self) -> None:
        """Run periodic work until cancelled.

        The view of blocked hosts is read ten times a second. Ended workers, due delays and sink
        backlogs are checked every second. Retention runs every minute.
        """
        beats = 0
        while True:
            await self.clock.sleep(0.1)
            beats += 1
            try:
                await self.stores.claims.refresh()
                if beats % 10 == 0:
                    if self.config.proxies:
                        await self.stores.proxies.refresh()
                    for worker in await self.stores.maintenance.reclaim(
                        self.stores.workers_directory
                    ):
                        log.warning("worker %s is gone; its work was taken back", worker)
                    if self.stores.relay_chores is not None:
                        await self.stores.relay_chores.heartbeat()
                    await self.stores.maintenance.release_due()
                    self._backlog = max([await f.backlog() for f in self.flushers], default=0)
                if beats % int(UPKEEP * 10) == 0:
                    await self._retention()
            except StoreUnavailable as e:
                log.error("%s", e.message)
                await self.clock.sleep(1.0)

    async def _relay(self, chores: RelayChores) -> None:
        """Publish due messages on the external broker, and messages that the broker has lost.

        This is a separate task from `_upkeep`. If the broker does not answer, this worker's
        heartbeat must continue.
        """
        beats = 0
        while True:
            await self.clock.sleep(0.1)
            beats += 1
            try:
                await chores.publish_due()
                if beats % max(10, int(self.config.lease * 10)) == 0 and (
                    again := await chores.recover()
                ):
                    log.warning(
                        "the broker had lost %d messages of open events; they were published again",
                        again,
                    )
            except StoreUnavailable as e:
                log.warning("%s", e.message)
                await self.clock.sleep(1.0)

    async def _retention(self) -> None:
        await self.stores.proxies.prune()
        await retain(
            self.stores,
            pages_keep=self.config.pages.keep,
            pages_bytes=self.config.pages.max_bytes,
            history_keep=self.config.history.keep,
        )

    def _notice(self, text: str) -> None:
        log.warning("%s", text)
        self.notices.append(text)


def open_fetcher(config: Config, *, max_body: int = 0) -> CurlFetcher:
    """Return the HTTP client with the configured limits and exceptions.

    `max_body` raises the limit on a response body if it is larger than the configured one.
    """
    n = config.net
    max_body = max(n.max_body, max_body)
    guard = Guard(parse_allow(",".join(n.allow)), ports=n.ports)
    options = HttpOptions(
        user_agent=n.user_agent,
        connect_timeout=n.timeout.connect,
        first_byte_timeout=n.timeout.first_byte,
        total_timeout=n.timeout.total,
        max_encoded_bytes=max_body,
        max_decoded_bytes=max_body,
        max_held_bytes=config.fetch.bytes,
        remote_dns=n.remote_dns,
    )
    return CurlFetcher(guard, options)


def exceptions(config: Config) -> dict[str, str]:
    """Return each rule that a configuration can turn off for all hosts, with the reason.

    The reason is "" if the rule is kept. A worker records the exceptions when it starts.
    """
    return {
        "robots": 'robots = "ignore" in the configuration' if config.robots == "ignore" else "",
        "remote_dns": "net.remote_dns = true in the configuration: proxies resolve names, unchecked"
        if config.net.remote_dns
        else "",
    }


def operator() -> str:
    """Return user@machine of this process, for records of an operator's decisions."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def fetch_options(
    config: Config, *, ignore_robots: bool = False, slot_wait: float = FetchOptions().slot_wait
) -> FetchOptions:
    return FetchOptions(
        slot_wait=slot_wait,
        agent=product_token(config.net.user_agent),
        robots="ignore" if ignore_robots else config.robots,
        allow_downgrade=config.fetch.allow_downgrade,
        key_by=config.pace.by,
        soft_404=config.fetch.soft_404,
    )


def open_stage(
    config: Config,
    store: Politeness,
    fetcher: Fetcher,
    pace: HostAccess,
    *,
    lists_by: Fetcher,
    ignore_robots: bool = False,
) -> tuple[FetchStage, Proxies]:
    """Return the fetch stage and the proxies for requests of one command.

    `lists_by` fetches the lists of proxies.
    """
    proxies = Proxies(config.proxies, store.proxies, lists_by, store.clock, store.context.rng)
    options = fetch_options(config, ignore_robots=ignore_robots)
    return FetchStage(fetcher, pace, pace, store.clock, options, proxies), proxies


async def listed_proxies(fetcher: Fetcher, url: str) -> tuple[Member, ...]:
    """Fetch a provider's list of proxies. Raises Failure."""
    return await fetch_list(fetcher, url)


def open_sandbox(file: Path) -> Sandbox:
    """Return a sandbox without configured limits, to check that it starts."""
    return Sandbox(file)


def chains(roles: frozenset[str]) -> list[tuple[Stage, Stage]]:
    """Return (first, last) stage for each stage among the roles.

    Work from the topic of the first stage runs through all following stages up to the last one
    without a gap. The topics of later stages are also read, because processes with fewer roles may
    have left work there.
    """
    found: list[tuple[Stage, Stage]] = []
    for i, first in enumerate(STAGES):
        if first in roles:
            last = i
            while last + 1 < len(STAGES) and STAGES[last + 1] in roles:
                last += 1
            found.append((first, STAGES[last]))
    return found


def sink_lock(config: Config, name: str) -> Path:
    """Return the lock file of a sink.

    The process that writes the sink holds it. Its status text describes errors of the target.
    """
    return config.state.dir / "sinks" / f"{mint('sink', name)[:16]}.lock"


def _check_roles(pipeline: Pipeline, roles: frozenset[str]) -> None:
    """Raise ConfigError if the roles have no work in this pipeline.

    Otherwise the user would notice the mistake only when data is missing.
    """
    if roles.intersection(STAGES):
        return
    if not pipeline.sources:
        raise ConfigError(
            f"nothing to do for the role {', '.join(sorted(roles))}: the pipeline has no source",
            hint="declare one, give it fetch, extract or sink, or leave --role out for all of them",
        )


def check_served(sources: Sequence[ServedSource], host: str) -> None:
    """Raise ConfigError if a webhook is unsafe or two webhooks have the same path.

    If other machines could reach an unsigned webhook, any client could make this pipeline send
    requests.
    """
    loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    for source in sources:
        if source.local and not loopback:
            raise ConfigError(
                f"source {source.name}: the hook is unsigned, and others can reach serve.host {host}",
                hint='give it a secret (secret = "env:SHOP_SECRET"), or say unsigned = "anywhere"',
            )
    paths = [source.path for source in sources]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ConfigError(
            f"two sources are served at {twice[0]}",
            hint="webhook:NAME, each with a name of its own",
        )


def _check_sources(sources: Sequence[tuple[Source, SourceSpec]], roles: frozenset[str]) -> None:
    if roles.intersection(STAGES) or any(
        ("serve" if source.served else "source") in roles for source, _ in sources
    ):
        return
    served, role = "serve" in roles, ", ".join(sorted(roles))
    raise ConfigError(
        f"nothing to do for the role {role}: the pipeline has no source that is {'served' if served else 'read'}",
        hint='declare one: shop.source("webhook:shop")'
        if served
        else "the role serve is for webhooks",
    )


def open_sources(pipeline: Pipeline, context: SourceContext) -> list[tuple[Source, SourceSpec]]:
    """Return the pipeline's sources. They and their mappings are checked, but not opened."""
    for spec in pipeline.sources:
        SourceMapping(spec)
    return [(adapter("sources", spec.url)(spec, context), spec) for spec in pipeline.sources]


def open_sinks(pipeline: Pipeline, base: Path) -> list[tuple[Sink, Mapping[str, Any]]]:
    """Return the pipeline's sinks, checked but not opened.

    Raises ConfigError if two sinks have the same target, because they would corrupt its file.
    """
    found: list[tuple[Sink, Mapping[str, Any]]] = []
    for spec in pipeline.sinks:
        options = dict(spec.options)
        only = options.pop("only", ())
        sink: Sink = adapter("sinks", spec.url)(spec.url, options, base)
        if any(sink.name == other.name for other, _ in found):
            raise ConfigError(f"two sinks write to {sink.name}", hint="give each its own file")
        found.append((sink, {"only": (only,) if isinstance(only, str) else tuple(only)}))
    return found


def check_sources(pipeline: Pipeline, config: Config) -> None:
    """Check the pipeline's sources as `run` does. Raises ConfigError."""
    open_sources(
        pipeline, SourceContext(config, SystemClock(), random.Random(), SourceWeb(), Path.cwd())
    )


@contextlib.asynccontextmanager
async def source_to_look_at(
    config: Config, spec: SourceSpec
) -> AsyncIterator[tuple[Source, SourceMapping]]:
    """Open one source with a separate HTTP client, for a command."""
    politeness = Politeness(config)
    web, claims = SourceWeb(), politeness.claims
    mapping = SourceMapping(spec, host_by=config.pace.by)
    source: Source = adapter("sources", spec.url)(
        spec, SourceContext(config, politeness.clock, random.Random(), web, Path.cwd())
    )
    fetcher = open_fetcher(config, max_body=SOURCE_BODY)
    stage = FetchStage(fetcher, claims, claims, politeness.clock, fetch_options(config))
    web.bind(stage, claims, politeness.clock)
    try:
        await claims.refresh()
        yield source, mapping
    finally:
        await source.close()
        await stage.close()
        await fetcher.close()
        await politeness.stop()
        politeness.close()


async def retain(
    stores: Stores,
    *,
    pages_keep: float | None,
    pages_bytes: int | None,
    history_keep: float | None,
    seconds: float = 5.0,
) -> tuple[int, int]:
    """Apply retention to pages, history and ended events. Return (pages removed, bytes freed).

    Runs small transactions until all is deleted or `seconds` have passed.
    """
    until = stores.clock.now() + seconds
    removed = freed = 0
    while True:
        pages, size = await stores.uow.write(
            partial(_retain_pages, stores.clock, pages_keep, pages_bytes)
        )
        done = [pages, size, await stores.uow.write(lambda tx: tx.queue.prune())]
        if history_keep is not None:
            before = stores.clock.now() - history_keep
            if stores.external_claims is None:
                done.append(await stores.uow.write(partial(_retain_events, before, True)))
            else:
                await stores.external_claims.prune(before)
                # An event that a claim still names is deleted too. Its URL is then fetched without
                # a baseline.
                done.append(await stores.uow.write(partial(_retain_events, before, False)))
        removed, freed = removed + pages, freed + size
        if not any(done) or stores.clock.now() > until:
            return removed, freed
        await stores.clock.sleep(0.01)  # let other transactions write


def _retain_pages(
    clock: Clock, keep: float | None, max_bytes: int | None, tx: Transaction
) -> tuple[int, int]:
    tx.pages.sweep()
    return tx.pages.prune(
        older_than=None if keep is None else clock.now() - keep,
        max_bytes=max_bytes,
        keep=tx.maintenance.pages_needed,
    )


def _retain_events(before: float, has_claims: bool, tx: Transaction) -> int:
    if not has_claims:
        return tx.maintenance.prune(before, lambda key, id_: False)
    tx.claims.prune(before)
    return tx.maintenance.prune(before, tx.claims.references)
