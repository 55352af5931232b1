"""Sinks, sources, proxies and servers of a configuration, as `penstock doctor` opens them.

An opening creates no file, takes no lock and moves no cursor.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from penstock.authoring.pipeline import Pipeline, SourceSpec
from penstock.brokers.sql import SqlQueue
from penstock.claims.sql import SqlClaims
from penstock.clock import SystemClock
from penstock.config.schema import Config
from penstock.errors import PenstockError, Unreachable
from penstock.extraction.sandbox import Sandbox
from penstock.model import Failure
from penstock.net.dial import probe_proxy
from penstock.operate.doctor import compare_clocks
from penstock.operate.figures import plural
from penstock.operate.findings import Finding, Opening
from penstock.ports import Broker, ProbedSink, Sink
from penstock.rules.masking import mask
from penstock.rules.proxies import parse_members
from penstock.runtime.sources_and_sinks import open_sinks, source_to_look_at
from penstock.runtime.stores import TOPICS, Politeness, adapter, has_state, open_stores, worker_id
from penstock.stores.context import Context

PROXY_SECONDS = 5.0
SERVER = "check that the server runs, and host, port and credentials in its URL"


def open_sandbox(file: Path) -> Sandbox:
    """Return a sandbox without configured limits, to check that it starts."""
    return Sandbox(file)


def pipeline_openings(config: Config, pipeline: Pipeline) -> Iterator[Opening]:
    """Return the sinks and sources of a pipeline. Raises ConfigError if one is not valid."""
    for sink, _ in open_sinks(pipeline, Path.cwd(), config.state.dir):
        fix = "mend the target of the sink. Rows wait in the outbox until then"
        yield Opening("sink", sink.name, partial(_probe_sink, sink), fix)
    cursors = _cursors(config, pipeline)
    for spec in pipeline.sources:
        fix = f"run `penstock sources test {spec.name}`, and check the URL of the source"
        yield Opening("source", spec.name, partial(_read_source, config, spec, cursors), fix)


def server_openings(config: Config) -> Iterator[Opening]:
    """Return the proxies, external brokers and external claims of a configuration."""
    for pool, options in config.proxies.items():
        for member in parse_members(options.urls):
            fix = f"remove it from [proxies.{pool}], or run `penstock proxies test {pool}`"
            work = partial(probe_proxy, member.dsn, member.label, PROXY_SECONDS)
            yield Opening("proxy", f"proxy {member.label} of pool {pool}", work, fix)
    by_url = {getattr(config.topics, topic): topic for topic in TOPICS}
    for url, topic in by_url.items():
        if not url.startswith(("sqlite:", "postgres")):
            # Import the client here: on a busy machine that takes a part of the time limit.
            with contextlib.suppress(PenstockError):
                adapter("brokers", url)
            yield Opening(
                "broker", f"broker {mask(url)}", partial(_read_broker, config, url, topic), SERVER
            )
    if not config.claims.url.startswith(("sqlite:", "postgres")):
        name = f"claims {mask(config.claims.url)}"
        yield Opening("claims", name, partial(_read_claims, config), SERVER)


def _probe_sink(sink: Sink) -> str:
    if not isinstance(sink, ProbedSink):
        return "not opened, because this plug-in has no method `probe`"
    sink.probe()
    return "can be opened"


def _cursors(config: Config, pipeline: Pipeline) -> Mapping[str, bytes | None]:
    """Return the recorded cursors. Without a store, a source is read from its beginning."""
    with contextlib.suppress(PenstockError):
        if pipeline.sources and has_state(config.ledger.url):
            stores = open_stores(config, create=False, inline=True)
            try:
                names = [spec.name for spec in pipeline.sources]
                return stores.uow.snapshot(
                    lambda tx: {name: tx.sources.cursor(name) for name in names}
                )
            finally:
                stores.close()
    return {}


def _read_source(config: Config, spec: SourceSpec, cursors: Mapping[str, bytes | None]) -> str:
    async def probe() -> str:
        async with source_to_look_at(config, spec) as (source, _):
            if source.served:
                return "is served by this pipeline"
            found = await source.preview(cursors.get(spec.name), 1)
            return f"can be read ({plural(len(found), 'finding')} next)"

    try:
        return asyncio.run(probe())
    except Failure as e:
        raise Unreachable(f"{spec.name}: {e.reason}") from e


def _read_broker(config: Config, url: str, topic: str) -> str:
    async def probe() -> str:
        context = Context(config, SystemClock(), random.Random(), worker=worker_id(), inline=True)
        try:
            broker: SqlQueue | Broker = adapter("brokers", url)(url, context)
            try:
                found = await broker.stats(topic, "main")
            finally:
                await broker.close()
        finally:
            context.close()
        return f"answers ({plural(found.ready, 'message')} ready on {topic})"

    return asyncio.run(probe())


def _read_claims(config: Config) -> str | Finding:
    async def probe() -> str | Finding:
        politeness = Politeness(config)
        try:
            await politeness.claims.refresh()
            assert not isinstance(politeness.claims, SqlClaims)
            skew = politeness.claims.skew
        finally:
            await politeness.close()
        return compare_clocks(skew, mask(config.claims.url)) or "answers"

    return asyncio.run(probe())
