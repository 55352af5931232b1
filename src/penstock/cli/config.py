"""`penstock config …`: shows every option with its value and origin, and checks the files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from penstock.cli.hidden import learn_file
from penstock.cli.options import DEFAULTS, Common, Json
from penstock.cli.output import (
    FIXED,
    FOLD,
    plain,
    print_json,
    say,
    styled,
    table,
)
from penstock.cli.output import (
    show as show_table,
)
from penstock.operate.figures import plural
from penstock.rules.masking import mask

if TYPE_CHECKING:
    from rich.text import Text

app = App(name="config", help="show each option with its origin, and check files")


@app.command
def show(
    only: Annotated[
        str | None, Parameter(help="only this section or option: pace, net.timeout")
    ] = None,
    /,
    *,
    origin: Annotated[bool, Parameter(help="show where each value comes from")] = False,
    changed: Annotated[bool, Parameter(help="only options that are set")] = False,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Show every option and its value. Passwords are masked."""
    from penstock.config import files as config

    loaded = common.load()
    by_path = {option.path: option for option in config.options(loaded.config)}
    rows = [
        row
        for row in config.show(loaded)
        if (only is None or row.path == only or row.path.startswith(only.rstrip(".") + "."))
        and not (changed and row.origin == "default")
    ]
    if json:
        options = [
            {
                "path": r.path,
                "value": r.value,
                "origin": r.origin,
                "variable": by_path[r.path].env,
                "help": by_path[r.path].help,
            }
            for r in rows
        ]
        print_json({"file": str(loaded.file) if loaded.file else None, "options": options})
        return
    columns = (
        *(("option", FIXED), ("value", FOLD)),
        *([("origin", FIXED)] if origin else []),
        ("", FOLD),
    )
    cells: list[tuple[str | Text, ...]] = [
        (
            styled(r.path, "bold" if r.origin != "default" else ""),
            plain(r.value),
            *([styled(r.origin, "dim" if r.origin == "default" else "cyan")] if origin else []),
            styled(by_path[r.path].help, "dim"),
        )
        for r in rows
    ]
    show_table(table(*columns, rows=cells))


@app.command
def check(
    file: Annotated[
        str | None, Parameter(help="a pipeline to check as well (else `pipeline` of penstock.toml)")
    ] = None,
    /,
    *,
    json: Json = False,
    common: Common = DEFAULTS,
) -> None:
    """Read the configuration and the pipeline as `run` does, and open nothing.

    Exit code 3: an option, a file or the pipeline is wrong.
    """
    loaded = common.load()
    chosen = file or loaded.config.pipeline
    found: dict[str, object] = {
        "config": str(loaded.file) if loaded.file else None,
        "pipeline": None,
    }
    if chosen:
        from penstock.authoring.load import load_to_run
        from penstock.runtime.sources_and_sinks import check_sources, open_sinks

        learn_file(chosen)
        pipeline = load_to_run(chosen)
        open_sinks(pipeline, Path.cwd(), loaded.config.state.dir)
        check_sources(pipeline, loaded.config)
        found["pipeline"] = {
            "file": chosen,
            "name": pipeline.name,
            "extractors": [f"{e.name}@{e.version}" for e in pipeline.extractors],
            "sinks": [mask(s.url) for s in pipeline.sinks],
            "sources": [mask(s.url) for s in pipeline.sources],
        }
    if json:
        print_json(found)
        return
    say(
        f"{loaded.file.name}: good"
        if loaded.file
        else "no penstock.toml here: defaults, environment and command line are good"
    )
    if chosen:
        say(
            f"{chosen}: good: pipeline {pipeline.name}, "
            f"{plural(len(pipeline.extractors), 'extractor')}, "
            f"{plural(len(pipeline.sinks), 'sink')}, {plural(len(pipeline.sources), 'source')}"
        )
