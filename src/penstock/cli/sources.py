"""`penstock sources …`: lists sources with their position, and tests, resets or pauses them.

See `intake.reader` for the reading itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from cyclopts import App, Parameter

from penstock.cli import slots
from penstock.cli.options import DEFAULTS, Common, Json, PipelineFile, ask, pipeline_file
from penstock.cli.output import (
    FOLD,
    RIGHT,
    plain,
    print_json,
    report,
    report_pause,
    say,
    show,
    styled,
    table,
)
from penstock.errors import UsageError
from penstock.operate.figures import count, iso, lasting, moment, plural
from penstock.rules.masking import mask

if TYPE_CHECKING:
    from penstock.authoring.pipeline import SourceSpec
    from penstock.config.schema import Config
    from penstock.intake.accept import Taken
    from penstock.ports import SourceState, Transaction

T = TypeVar("T")
app = App(name="sources", help="sources of events: list, test, reset, pause, resume")
app.command(slots.app)
Name = Annotated[str, Parameter(help="name of the source in `sources ls`")]
# Seconds without a sign of a reader before a source is shown without one. One page may take long.
READER_TIMEOUT = 300.0


@app.command
def ls(*, pipeline: PipelineFile = None, json: Json = False, common: Common = DEFAULTS) -> None:
    """List the sources of the pipeline and of the ledger: position, events, lag and errors."""
    config = common.load().config
    specs = _declared(config, pipeline)
    recorded: list[SourceState] = _read(common, config, lambda tx: list(tx.sources.all()), [])
    states = {state.name: state for state in recorded}
    names = [*specs, *(name for name in states if name not in specs)]
    if json:
        print_json(
            {"sources": [_document(name, specs.get(name), states.get(name)) for name in names]}
        )
        return
    if not names:
        say(
            'no sources: declare one with shop.source("feed+https://…") in a pipeline, '
            "or with [[source]] in a TOML pipeline"
        )
        return
    columns = (
        "source",
        "state",
        ("events", RIGHT),
        ("refused", RIGHT),
        "last event",
        ("behind", RIGHT),
        ("position", FOLD),
    )
    show(table(*columns, rows=[_row(name, states.get(name), name in specs) for name in names]))
    for name in names:
        if (state := states.get(name)) and state.error:
            say(styled(plain(f"{name}: {state.error}"), "yellow"))


@app.command(name="test")
def try_(
    name: Name,
    /,
    *,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="findings to show")] = 10,
    start: Annotated[
        bool, Parameter(name="--start", help="from the beginning, not from its position")
    ] = False,
    pipeline: PipelineFile = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Read as the source does, and show the events it would create.

    No event is published, and the position of the source does not change.
    """
    config = common.load().config
    spec = _one(config, pipeline, name)
    cursor = None
    if not start:
        cursor = _read(common, config, lambda tx: tx.sources.cursor(name), None)
    judged = asyncio.run(_preview(config, spec, cursor, max(1, limit)))
    if json:
        document = {
            "source": name,
            "events": [msgspec.to_builtins(e) for e in judged.events],
            "refused": [
                {"finding": msgspec.to_builtins(f), "reason": reason}
                for f, reason, _ in judged.refused
            ],
            "skipped": judged.skipped,
        }
        print_json(document)
        return
    if judged.events:
        priorities = ("high", "normal", "low")
        rows = [
            (e.id[:12], priorities[e.priority], plain(e.cause), plain(e.url)) for e in judged.events
        ]
        show(table("event", "priority", "cause", ("url", FOLD), rows=rows))
    for finding, reason, _ in judged.refused:
        say(styled(plain(f"refused: {finding.cause or finding.id}: {reason}"), "yellow"))
    passed = f", {judged.skipped} skipped" if judged.skipped else ""
    say(f"preview: {plural(len(judged.events), 'event')} would be published{passed}")


@app.command
def reset(
    name: Name,
    /,
    *,
    to: Annotated[
        str,
        Parameter(help="start, now, or a position of this source: an LSN, an offset, a time"),
    ],
    pipeline: PipelineFile = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Set the position from which a source continues to read.

    Events that the ledger already has keep their ids and are not created again.
    """
    config = common.load().config
    spec = _one(config, pipeline, name)
    cursor, description = (
        (None, "at the start") if to == "start" else asyncio.run(_place(config, spec, to))
    )
    with common.stores(create=True, config=config) as stores:

        def work(tx: Transaction) -> None:
            tx.sources.declare(name, mask(spec.url))
            tx.sources.move_cursor(name, cursor, stores.clock.now())
            tx.sources.reset(name)

        stores.uow.write_now(work)
    document = {"source": name, "position": description}
    report(document, f"{name}: new position: {description}", json=json)


@app.command
def pause(
    name: Name,
    /,
    *,
    reason: Annotated[
        str, Parameter(help="reason, shown to other operators")
    ] = "paused by a person",
    pipeline: PipelineFile = None,
    common: Common = DEFAULTS,
) -> None:
    """Stop reading a source until it is resumed. Its reader stops within two seconds."""
    _pause(common, pipeline, name, " ".join(reason.split()) or "paused by a person")


@app.command
def resume(name: Name, /, *, pipeline: PipelineFile = None, common: Common = DEFAULTS) -> None:
    """Resume a paused source at its position."""
    _pause(common, pipeline, name, None)


def _pause(common: Common, pipeline: str | None, name: str, reason: str | None) -> None:
    config = common.load().config
    known = _declared(config, pipeline)
    with common.stores(create=True, config=config) as stores:

        def work(tx: Transaction) -> list[str]:
            if name in known:
                tx.sources.declare(name, mask(known[name].url))
            tx.sources.pause(name, reason)
            return [s.name for s in tx.sources.all()]

        there = stores.uow.write_now(work)
    if name not in there:
        raise _unknown(name, [*known, *there])
    report_pause("sources", name, paused=reason is not None)


# -- declared and recorded sources -----------------------------------------------------------------


def _declared(config: Config, file: str | None) -> dict[str, SourceSpec]:
    """Return the sources of the pipeline by name, or none if no pipeline is given."""
    if not (file or config.pipeline):
        return {}
    from penstock.authoring.load import load

    return {spec.name: spec for spec in load(pipeline_file(config, file)).sources}


def _one(config: Config, file: str | None, name: str) -> SourceSpec:
    specs = _declared(config, pipeline_file(config, file))
    if name not in specs:
        raise _unknown(name, [*specs])
    return specs[name]


def _unknown(name: str, known: list[str]) -> UsageError:
    return UsageError(
        f"there is no source {name!r}",
        hint=f"there are: {', '.join(dict.fromkeys(known))}"
        if known
        else "declare a source in the pipeline",
    )


def _read(
    common: Common, config: Config, question: Callable[[Transaction], T], without_state: T
) -> T:
    """Return the answer to a question, or `without_state` if there is no state yet."""
    from penstock.runtime.stores import has_state

    if not has_state(config.ledger.url):
        return without_state
    with common.stores(config=config) as stores:
        return ask(stores, question)


def _document(name: str, spec: SourceSpec | None, state: SourceState | None) -> dict[str, Any]:
    times = ("looked_at", "next_at", "event_at", "error_at")
    return {
        "name": name,
        "url": mask(spec.url) if spec else state.url if state else "",
        "declared": spec is not None,
        "every": spec.every if spec else None,
        "paused": state.paused if state else None,
        "position": state.position if state else None,
        "worker": state.worker if state else None,
        **{
            key: getattr(state, key) if state else 0
            for key in ("events", "known", "skipped", "refused")
        },
        **{
            key: iso(at) if state and (at := getattr(state, key)) is not None else None
            for key in times
        },
        "error": state.error if state else None,
        "lag_seconds": state.lag if state else None,
        "backlog": state.backlog if state else None,
    }


def _row(name: str, state: SourceState | None, declared: bool) -> list[Any]:
    first = [styled(name, "bold"), _state_text(state, declared=declared, now=time.time())]
    if state is None:
        return first
    return [
        *first,
        count(state.events),
        count(state.refused) if state.refused else "",
        moment(state.event_at) if state.event_at else "",
        _behind(state),
        plain(state.position or ""),
    ]


def _behind(state: SourceState) -> str:
    if state.lag is not None:
        return lasting(state.lag)
    return "" if state.backlog is None else count(state.backlog)


def _state_text(state: SourceState | None, *, declared: bool, now: float) -> Any:
    if state is None:
        return "never read"
    if state.paused:
        return styled(plain(f"paused: {state.paused}"), "bold red")
    if state.error:
        return styled("failing", "yellow")
    if not declared:
        return styled("not in this pipeline", "dim")
    # Readers update these times every few seconds, webhooks with each request.
    last_seen = max(state.settled_at or 0.0, state.looked_at or 0.0)
    return (
        "read"
        if state.url.startswith("webhook:") or now - last_seen < READER_TIMEOUT
        else styled(
            f"no reader since {moment(last_seen)}" if last_seen else "not read yet", "yellow"
        )
    )


# -- calls to the source ---------------------------------------------------------------------------


async def _preview(config: Config, spec: SourceSpec, cursor: bytes | None, limit: int) -> Taken:
    from penstock.intake.accept import judge
    from penstock.runtime.sources_and_sinks import source_to_look_at

    async with source_to_look_at(config, spec) as (source, mapping):
        return judge(mapping, await source.preview(cursor, limit))


async def _place(config: Config, spec: SourceSpec, to: str) -> tuple[bytes | None, str]:
    from penstock.runtime.sources_and_sinks import source_to_look_at

    async with source_to_look_at(config, spec) as (source, _):
        cursor = await source.place(to)
        return cursor, source.describe(cursor)
