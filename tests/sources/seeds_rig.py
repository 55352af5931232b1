"""Sources declared in a pipeline and read like the reader does, for seed and Redis lists."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.authoring.pipeline import Pipeline, SourceSpec
from penstock.config import files as config
from penstock.fetching.source_client import SourceWeb
from penstock.ports import Clock, Finding, Source
from penstock.sources.base import SourceContext


class Skipping:
    """A clock whose `sleep` returns immediately and advances the time."""

    def __init__(self, now: float) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds


def spec_of(url: str, **options: Any) -> SourceSpec:
    pipeline = Pipeline("shop")
    pipeline.source(url, **options)
    return pipeline.sources[0]


def context(base: Path, clock: Clock) -> SourceContext:
    return SourceContext(
        config.load({}, {}, base).config, clock, random.Random(1), SourceWeb(), base
    )


async def read(
    source: Source, cursor: bytes | None = None, *, max_batches: int = 10**9
) -> tuple[list[Finding], bytes | None]:
    """Read one round, or `max_batches` batches with findings. Return findings and cursor."""
    batches = source.read(cursor)
    found: list[Finding] = []
    try:
        async for batch in batches:
            found += batch.findings
            cursor = batch.cursor or cursor
            max_batches -= bool(batch.findings)
            if max_batches <= 0:
                break
    finally:
        await batches.aclose()
    return found, cursor


def urls(findings: Sequence[Finding]) -> list[str | None]:
    return [f.url for f in findings]


def ids(findings: Sequence[Finding]) -> list[str]:
    return [f.id for f in findings]
