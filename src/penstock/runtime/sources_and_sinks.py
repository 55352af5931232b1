"""Opens the sources and sinks of a pipeline, and checks them before any store is opened."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.authoring.pipeline import Pipeline, SourceSpec
from penstock.clock import SystemClock
from penstock.config.schema import Config
from penstock.errors import ConfigError, PenstockError
from penstock.fetching.source_client import SourceWeb
from penstock.fetching.stage import FetchStage
from penstock.intake.mapping import Mapping as SourceMapping
from penstock.model import mint
from penstock.ports import LocalSink, ServedSource, Sink, Source
from penstock.private_files import is_below
from penstock.rules.masking import mask
from penstock.runtime.fetching import SOURCE_BODY, fetch_options, open_fetcher
from penstock.runtime.stores import Politeness, adapter
from penstock.sources.base import SourceContext

log = logging.getLogger("penstock")


def open_sources(pipeline: Pipeline, context: SourceContext) -> list[tuple[Source, SourceSpec]]:
    """Return the pipeline's sources. They and their mappings are checked, but not opened."""
    for spec in pipeline.sources:
        SourceMapping(spec)
    return [(adapter("sources", spec.url)(spec, context), spec) for spec in pipeline.sources]


def open_sinks(pipeline: Pipeline, base: Path, state: Path) -> list[tuple[Sink, tuple[str, ...]]]:
    """Return the pipeline's sinks, checked but not opened, with the extractors that each takes.

    A file in the state directory is for its owner only, as the rest of the state. Other files
    belong to the user, and the umask decides.
    Raises ConfigError if two sinks have the same target, because they would corrupt its file.
    """
    found: list[tuple[Sink, tuple[str, ...]]] = []
    for spec in pipeline.sinks:
        sink = _make_sink(spec.url, dict(spec.options), base)
        if any(sink.name == other.name for other, _ in found):
            raise ConfigError(f"two sinks write to {sink.name}", hint="give each its own file")
        if isinstance(sink, LocalSink):
            sink.private = is_below(Path(sink.path), state)
        found.append((sink, spec.only))
    return found


def _make_sink(url: str, options: Mapping[str, Any], base: Path) -> Sink:
    try:
        sink: Sink = adapter("sinks", url)(url, options, base)
    except PenstockError:
        raise
    except Exception as e:
        log.error("bug in the sink %s", mask(url), exc_info=e)
        raise ConfigError(
            f"sink {mask(url)} cannot be made: bug in the sink: {e!r}",
            hint="read the traceback above, and mend the sink",
        ) from e
    return sink


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
        await politeness.close()


def check_served(sources: Sequence[ServedSource], host: str) -> None:
    """Raise ConfigError if a webhook is unsafe or two webhooks have the same path.

    If other machines could reach an unsigned webhook, any client could make this pipeline send
    requests.
    """
    loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    for source in sources:
        if source.local and not loopback:
            raise ConfigError(
                f"source {source.name}: the hook is unsigned, "
                f"and others can reach serve.host {host}",
                hint='give it a secret (secret = "env:SHOP_SECRET"), or set unsigned = "anywhere"',
            )
    paths = [source.path for source in sources]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ConfigError(
            f"two sources are served at {twice[0]}",
            hint="webhook:NAME, each with another name",
        )


def sink_lock(config: Config, name: str) -> Path:
    """Return the lock file of a sink.

    The process that writes the sink holds it. Its status text describes errors of the target.
    """
    return config.state.dir / "sinks" / f"{mint('sink', name)[:16]}.lock"
