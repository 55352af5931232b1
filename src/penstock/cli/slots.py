"""`penstock sources slots …`: the replication slots of sources. The source itself reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from cyclopts import App, Parameter

from penstock.cli.options import DEFAULTS, Common, Json, PipelineFile, pipeline_file
from penstock.cli.output import (
    FOLD,
    RIGHT,
    plain,
    print_json,
    report,
    say,
    show,
    styled,
    table,
)
from penstock.config import units
from penstock.errors import DIFFERENCES, OK, UsageError

if TYPE_CHECKING:
    from penstock.authoring.pipeline import SourceSpec
    from penstock.config.schema import Config
    from penstock.ports import SlotInfo

T = TypeVar("T")
app = App(name="slots", help="replication slots of the pipeline's databases: list, create, drop")
Name = Annotated[
    str | None,
    Parameter(help="name of the source in `sources ls` (else every source that has a slot)"),
]


@app.command
def ls(
    name: Name = None,
    /,
    *,
    pipeline: PipelineFile = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """List replication slots on the sources' servers, with the WAL that each server keeps for them.

    A slot without a reader fills the server's disk.
    """
    config = common.load().config
    found = [
        (spec.name, slot)
        for spec in _chosen(config, pipeline, name)
        for slot in _ask(config, spec, lambda source: source.slots())
    ]
    if json:
        print_json(
            {
                "slots": [
                    {
                        "source": source if slot.own else None,
                        "asked": source,
                        **msgspec.to_builtins(slot),
                    }
                    for source, slot in found
                ]
            }
        )
        return
    if not found:
        say("no slots: `penstock run` or `penstock sources slots create` creates them")
        return
    made = table("slot", ("source", FOLD), "state", ("held", RIGHT), ("behind", RIGHT), "position")
    shown: set[str] = set()
    for source, slot in sorted(found, key=lambda pair: not pair[1].own):
        if slot.name in shown:
            continue
        shown.add(slot.name)
        made.add_row(
            styled(slot.name, "bold"),
            plain(source) if slot.own else styled("other", "dim"),
            _state(slot),
            units.write_size(slot.held >> 20 << 20) if slot.held >> 20 else "<1MiB",
            units.write_size(slot.behind >> 20 << 20) if slot.behind >> 20 else "<1MiB",
            slot.position,
        )
    show(made)


@app.command
def create(
    name: Name = None,
    /,
    *,
    pipeline: PipelineFile = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Create slot and publication before the first run, so that changes are kept from now on.

    The server waits for open transactions to end before it creates the slot.
    """
    config = common.load().config
    made = [
        (spec.name, _ask(config, spec, lambda source: source.create_slot()))
        for spec in _chosen(config, pipeline, name)
    ]
    if json:
        print_json(
            {"slots": [{"source": source, **msgspec.to_builtins(slot)} for source, slot in made]}
        )
        return
    for source, slot in made:
        say(f"{source}: slot {slot.name} keeps changes from {slot.position} on")


@app.command
def drop(
    name: Annotated[str, Parameter(help="name of the source in `sources ls`")],
    /,
    *,
    pipeline: PipelineFile = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Drop a source's slot, and its publication if Penstock created it.

    Changes that were not read yet are lost.
    """
    config = common.load().config
    (spec,) = _chosen(config, pipeline, name)
    dropped = _ask(config, spec, lambda source: source.drop_slot())
    sentence = f"{name}: {'its slot is dropped' if dropped else 'there was no slot'}"
    report({"source": name, "dropped": dropped}, sentence, json=json)
    return OK if dropped else DIFFERENCES


def _state(slot: SlotInfo) -> Any:
    if slot.status == "lost":
        return styled("lost", "bold red")
    if slot.status == "unreserved":
        return styled("about to be lost", "yellow")
    return "read" if slot.active else styled("no reader", "yellow")


def _chosen(config: Config, file: str | None, name: str | None) -> list[SourceSpec]:
    from penstock.authoring.load import load

    specs = [
        spec
        for spec in load(pipeline_file(config, file)).sources
        if spec.url.partition(":")[0].endswith("+cdc")
    ]
    if name is None:
        return specs
    found = [spec for spec in specs if spec.name == name]
    if not found:
        names = ", ".join(spec.name for spec in specs)
        raise UsageError(
            f"there is no source {name!r} with a slot",
            hint=f"there are: {names}" if names else "only postgres+cdc: sources have a slot",
        )
    return found


def _ask(config: Config, spec: SourceSpec, question: Callable[[Any], Awaitable[T]]) -> T:
    from penstock.runtime.sources_and_sinks import source_to_look_at

    async def ask_and_close() -> T:
        async with source_to_look_at(config, spec) as (source, _):
            return await question(source)

    return asyncio.run(ask_and_close())
