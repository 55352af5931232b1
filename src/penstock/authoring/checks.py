"""Checks of a whole pipeline: the names in its declarations, and where its records go."""

from __future__ import annotations

from pathlib import Path

from penstock.authoring.pipeline import Line, Pipeline
from penstock.config.options import suggest
from penstock.errors import ConfigError
from penstock.rules.masking import mask


def check_names(pipeline: Pipeline, path: Path) -> None:
    """Raise ConfigError if a sink or hook names an extractor that does not exist."""
    for i, sink in enumerate(pipeline.sinks):
        where = (
            f"{path}: sink[{i}].only"
            if path.suffix == ".toml"
            else f"{_place(path, sink.line)}: sink {mask(sink.url)!r}: only"
        )
        for name in sink.only:
            _check_extractor(pipeline, name, where)
    for hook in pipeline.hooks:
        if hook.extractor is not None:
            _check_extractor(pipeline, hook.extractor, f"{_place(path, hook.line)}: @on_change")


def check_outputs(pipeline: Pipeline, path: Path) -> None:
    """Raise ConfigError if records of the pipeline cannot reach a sink or hook.

    An extractor in Python that no sink takes is allowed, because it may only follow links. If it
    yields a record, `extraction.run` ends the page with an error.
    """
    is_toml = path.suffix == ".toml"
    if not pipeline.extractors:
        raise ConfigError(
            f"{path}: the pipeline has no extractor, so its pages would give no record",
            hint='add [[extract]] with [extract.fields], for example title = "h1::text"'
            if is_toml
            else "put @pipeline.extract above a function that yields the records of a page",
        )
    if not pipeline.sinks and not pipeline.hooks:
        raise ConfigError(
            f"{path}: the pipeline has no sink{'' if is_toml else ' and no @on_change hook'}, "
            "so its records would be dropped",
            hint='add [[sink]] with url = "jsonl:records.jsonl"'
            if is_toml
            else 'add one: pipeline.sink("jsonl:records.jsonl")',
        )
    for extractor in pipeline.extractors:
        if extractor.name in pipeline.yielding and not pipeline.takes(extractor.name):
            raise ConfigError(
                f"{path}: no sink takes the records of extractor {extractor.name!r}, "
                "so they would be dropped",
                hint=f"add {extractor.name!r} to `only` of a sink, "
                "or add a [[sink]] without `only`",
            )


def _place(path: Path, line: Line | None) -> str:
    """Return FILE:LINE of a declaration. The pipeline file is named as the user named it."""
    if line is None:
        return str(path)
    file, number = line
    return f"{path if file == str(path.resolve()) else file}:{number}"


def _check_extractor(pipeline: Pipeline, name: str, where: str) -> None:
    known = [extractor.name for extractor in pipeline.extractors]
    if name not in known:
        raise ConfigError(
            f"{where}: there is no extractor {name!r}",
            hint=suggest(name, known, f"extractors: {', '.join(known) or 'none'}"),
        )
