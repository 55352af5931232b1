"""Opens the stores of a configuration: chooses adapters by URL and binds them to transactions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock import locks
from penstock.authoring.pipeline import Pipeline
from penstock.brokers.sql import SqlQueue
from penstock.claims.sql import SqlClaims, SqlHosts
from penstock.clock import SystemClock
from penstock.config.options import suggest
from penstock.config.schema import Config
from penstock.engine.settings import LifecycleSettings, SinkBinding
from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.fetching.proxies import served_pools
from penstock.ledgers.sql.ledger import SqlLedger
from penstock.pages.bound import IndexedPages
from penstock.ports import (
    Broker,
    Clock,
    ExtractorKeys,
    HostTable,
    StoreFacts,
    TopicSpec,
)
from penstock.rules import breaker, budgets, gone
from penstock.runtime.assembly import Assembly, ClaimServer, proxies_of
from penstock.stores import sqlite_checks
from penstock.stores.context import Context

T = TypeVar("T")
sqlite_version = sqlite_checks.sqlite_version  # for commands, which may not import `stores`
TOPICS = ("requests", "pages", "records")
TOPOLOGY = tuple(TopicSpec(name=name) for name in TOPICS) + tuple(
    TopicSpec(name=name + ".dead", groups=()) for name in TOPICS
)
NOUNS = {
    "brokers": "broker",
    "ledgers": "ledger",
    "claims": "claims",
    "pages": "page store",
    "sinks": "sink",
    "sources": "source",
}
# Scheme -> package extra, for schemes whose extra has another name.
EXTRAS = {
    "amqp": "rabbitmq",
    "amqps": "rabbitmq",
    "postgresql": "postgres",
    "rediss": "redis",
}
# Bytes. A store file up to this size is checked before the start, and a larger one during the work.
SMALL_STORE = 256 << 20
log = logging.getLogger("penstock")


class Stores(Assembly):
    """All open stores of one configuration. Close them once."""

    def __init__(
        self,
        config: Config,
        context: Context,
        *,
        broker: SqlQueue | Mapping[str, Broker],
        ledger: SqlLedger,
        claims: SqlClaims | ClaimServer,
        pages: IndexedPages,
    ) -> None:
        self.config, self.context = config, context
        super().__init__(
            broker=broker,
            ledger=ledger,
            claims=claims,
            pages=pages,
            settings=settings(config),
            worker=context.worker,
            lease=config.lease,
            clock=context.clock,
        )

    @property
    def workers_directory(self) -> Path:
        return self.config.state.dir / "workers"

    async def check_after_unclean_stop(self) -> None:
        """Check the store file if a worker of this machine did not stop cleanly.

        A file larger than `SMALL_STORE` is checked during the work.
        """
        file = self.db.file  # None for a database server, which checks its own files
        if file is None or not locks.dead_workers(self.workers_directory):
            return
        if file.stat().st_size > SMALL_STORE:
            self._check = asyncio.create_task(self._check_aside())
        elif problems := await asyncio.to_thread(self.db.check):
            raise Unreachable(
                f"{self.db.path} is damaged: {problems[0]}",
                hint="stop all workers, keep a copy, and restore a backup or recover it with the "
                "sqlite3 shell's .recover",
            )

    async def _check_aside(self) -> None:
        if problems := await asyncio.to_thread(self.db.check):
            log.critical("the store is damaged: %s", problems[0])

    async def start(self) -> None:
        """Declare the topics of external brokers, and record that this worker is alive.

        Called before the first event is accepted or delivered.
        """
        if self.relay_chores is not None:
            for drift in await self.topics.ensure(TOPOLOGY):
                log.warning("%s", drift)
            await self.relay_chores.heartbeat()
            # Commands that accept events have no pipeline. Their messages name the owner.
            owner, self.former_owners = await self.uow.read(
                lambda tx: (tx.owner.pipeline(), tx.owner.former())
            )
            self.with_settings(msgspec.structs.replace(self.settings, pipeline=owner or ""))

    async def stop(self) -> None:
        if self.relay_chores is not None:
            with contextlib.suppress(StoreUnavailable):
                await self.relay_chores.unregister()
            await self.topics.close()
        if self.external_claims is not None:
            await self.external_claims.close()

    def perform(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` between start and stop in a new event loop, for commands."""

        async def whole() -> T:
            try:
                await self.start()
                return await work()
            finally:
                await self.stop()

        return asyncio.run(whole())

    def close(self) -> None:
        self.pages.close()
        self.context.close()


def adapter(kind: str, url: str) -> Callable[..., Any]:
    """Return the `open_*` function of the entry point for this URL's scheme.

    Raises ConfigError if no adapter has the scheme, or if a package of the adapter is missing.
    """
    scheme = url.partition(":")[0].partition("+")[0]
    known = {e.name: e for e in entry_points(group=f"penstock.{kind}")}
    if scheme not in known:
        raise ConfigError(
            f"no {NOUNS[kind]} adapter for {scheme!r}",
            hint=suggest(scheme, known, f"there are: {', '.join(sorted(known)) or 'none'}"),
        )
    try:
        opener: Callable[..., Any] = known[scheme].load()
    except ImportError as e:
        raise ConfigError(
            f"the {scheme!r} {NOUNS[kind]} adapter needs a package that is missing: {e.name or e}",
            hint=f"pip install 'penstock[{EXTRAS.get(scheme, scheme)}]'",
        ) from e
    return opener


def has_state(url: str) -> bool:
    """Return False if the URL names a SQLite file that does not exist yet."""
    return not url.startswith("sqlite:") or Path(url.removeprefix("sqlite:")).exists()


def open_stores(
    config: Config,
    *,
    worker: str | None = None,
    create: bool = True,
    inline: bool = False,
    clock: Clock | None = None,
) -> Stores:
    """Open the stores of a configuration.

    Raises ConfigError or Unreachable, and then closes the stores that were already open.
    """
    if not create and not has_state(config.ledger.url):
        raise Unreachable(
            f"there is no Penstock state in {config.state.dir}",
            hint="run `penstock push URL` or `penstock run FILE` here first, "
            "or name another place with --state",
        )
    adapter("brokers", config.broker.url)
    _refuse_missing(config)
    context = Context(
        config,
        clock or SystemClock(),
        random.Random(),
        worker=worker or worker_id(),
        inline=inline,
    )
    try:
        ledger = adapter("ledgers", config.ledger.url)(config.ledger.url, context)
        claims = adapter("claims", config.claims.url)(config.claims.url, context)
        if isinstance(claims, SqlClaims) and claims.db is not ledger.db:
            raise ConfigError(
                "the claims are in another store than the ledger",
                hint="give PENSTOCK_CLAIMS_URL the URL of the ledger",
            )
        broker = _open_broker(config, context, ledger)
        pages = adapter("pages", config.pages.url)(config.pages.url, context)
        stores = Stores(config, context, broker=broker, ledger=ledger, claims=claims, pages=pages)
        # Most commands only read, so the topics are written only if one is missing.
        if (
            create
            and isinstance(broker, SqlQueue)
            and not broker.db.read_now(lambda tx: broker.bind(tx).has([t.name for t in TOPOLOGY]))
        ):
            broker.db.write_now(lambda tx: broker.bind(tx).ensure(TOPOLOGY))
        return stores
    except BaseException:
        context.close()
        raise


def _refuse_missing(config: Config) -> None:
    """Raise ConfigError if the URL of the ledger, the claims or the pages is not set.

    A file of one machine is never chosen silently as a store of a fleet.
    """
    kinds = {
        "ledger": (config.ledger.url, "postgres://…", "sqlite:FILE"),
        "claims": (config.claims.url, "redis://… or postgres://…", "sqlite:FILE"),
        "pages": (config.pages.url, "s3://bucket/prefix or postgres://…", "file:DIR"),
    }
    missing = {name: advice for name, (url, *advice) in kinds.items() if not url}
    if missing:
        variables = " ".join(
            f"PENSTOCK_{name.upper()}_URL={fleet}" for name, (fleet, _) in missing.items()
        )
        alone = " ".join(
            f"PENSTOCK_{name.upper()}_URL={file}" for name, (_, file) in missing.items()
        )
        scheme = config.broker.url.partition(":")[0]
        names = f"the {', the '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        raise ConfigError(
            f"{names} not set, and a {scheme} broker cannot store the state that a fleet shares",
            hint=f"set {variables} (or, for one machine only, {alone})",
        )


def _open_broker(
    config: Config, context: Context, ledger: SqlLedger
) -> SqlQueue | dict[str, Broker]:
    """Return the queue in the ledger's store, or the external broker of each topic."""
    urls = {name: getattr(config.topics, name) for name in TOPICS}
    opened = {url: adapter("brokers", url)(url, context) for url in dict.fromkeys(urls.values())}
    broker = opened[config.topics.requests]
    if len(opened) == 1 and isinstance(broker, SqlQueue) and broker.db is ledger.db:
        return broker
    return {name: opened[url] for name, url in urls.items()}


class Politeness:
    """The claims that one request needs, without a queue, a ledger and pages.

    If the SQLite file does not exist yet, the claims are in memory.
    """

    def __init__(self, config: Config) -> None:
        url = config.claims.url if has_state(config.claims.url) else "sqlite::memory:"
        self.clock = SystemClock()
        self.context = Context(config, self.clock, random.Random(), worker=worker_id(), inline=True)
        try:
            self.claims: SqlClaims | ClaimServer = adapter("claims", url)(url, self.context)
            self.proxies = proxies_of(self.claims, self.clock)
        except BaseException:
            self.context.close()
            raise

    async def note(self, work: Callable[[HostTable], T]) -> T:
        """Change the state of hosts. This is one transaction if the claims are in SQL."""
        claims = self.claims
        if isinstance(claims, SqlClaims):
            return await claims.db.write(lambda sql: work(SqlHosts(sql, claims)))
        return work(claims.hosts)

    async def close(self) -> None:
        if not isinstance(self.claims, SqlClaims):
            await self.claims.close()
        self.context.close()


def store_facts(directory: Path) -> StoreFacts:
    """Return the SQLite version and the file system of this directory, with known risks."""
    version, kind = sqlite_version(), sqlite_checks.file_system_of(directory)
    return StoreFacts(
        sqlite=version,
        wal_reset_bug=sqlite_checks.has_wal_reset_bug(version),
        file_system=kind,
        network=kind in sqlite_checks.NETWORK_FILE_SYSTEMS,
    )


def worker_id() -> str:
    return f"{socket.gethostname()[:40] or 'worker'}-{os.getpid()}-{secrets.token_hex(3)}"


def _key_fields(pipeline: Pipeline) -> ExtractorKeys:
    """Return the fields of the extractors' record keys, for records that are removed."""
    keys = {}
    for e in pipeline.extractors:
        named = () if e.key is None or callable(e.key) else e.key
        keys[e.name] = (e.version, (named,) if isinstance(named, str) else tuple(named))
    return keys


def settings(
    config: Config,
    pipeline: Pipeline | None = None,
    *,
    sinks: Sequence[SinkBinding] = (),
    run: budgets.Run | None = None,
) -> LifecycleSettings:
    b, g, n = config.breaker, config.gone, config.limits
    pool_bytes = {p: c.bytes_per_day or n.pool_bytes_per_day for p, c in config.proxies.items()}
    return LifecycleSettings(
        max_pending=config.intake.max_pending,
        window=config.dedup.window,
        settle=config.dedup.settle,
        drop=config.dedup.mode == "drop",
        follow_window=config.follow.window,
        follow_depth=config.follow.depth,
        follow_same_domain=config.follow.same_domain,
        emit_unchanged=config.output.unchanged == "emit",
        hooks=pipeline is not None and bool(pipeline.hooks),
        sinks=tuple(sinks),
        host_by=config.pace.by,
        pools=tuple(served_pools(config.proxies)),
        max_age=config.retry.max_age,
        pipeline="" if pipeline is None else pipeline.name,
        breaker=breaker.Limits(
            dead_share=b.dead_share, at_least=b.min, window=b.window, alert_share=b.alert
        ),
        gone=gone.Limits(after=g.after, share=g.limit, settle=g.settle),
        budgets=budgets.Limits(
            pages_per_host=n.pages_per_host,
            pages_per_trace=n.pages_per_trace,
            pages_per_run=n.pages_per_run,
            pages_per_day=n.pages_per_day,
            bytes_per_day=n.bytes_per_day,
            links_per_page=n.links_per_page,
            traps=n.traps,
            pool_bytes={pool: limit for pool, limit in pool_bytes.items() if limit},
        ),
        run=run or budgets.Run(),
        keys={} if pipeline is None else _key_fields(pipeline),
    )
