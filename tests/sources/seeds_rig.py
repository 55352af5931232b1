"""What the tests of seed lists and Redis lists share: a source as a pipeline declares it, read as
the reader does. No assertions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from penstock.authoring.pipeline import Pipeline, SourceSpec
from penstock.config import files as config
from penstock.ports import Clock, Finding, Source
from penstock.sources.base import SourceContext, Web


class Skipping:
    """A clock that nobody waits for: sleeping sets it on."""

    def __init__(self, now: float) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds


def spec_of(url: str, **said: Any) -> SourceSpec:
    pipeline = Pipeline("shop")
    pipeline.source(url, **said)
    return pipeline.sources[0]


def context(base: Path, clock: Clock) -> SourceContext:
    return SourceContext(
        config.load({}, {}, base).config, clock, random.Random(1), cast(Web, None), base
    )


async def read(
    source: Source, cursor: bytes | None = None, *, most: int = 10**9
) -> tuple[list[Finding], bytes | None]:
    """One round, or as many accepted batches with findings of it, and the position behind them."""
    batches = source.read(cursor)
    found: list[Finding] = []
    try:
        async for batch in batches:
            found += batch.findings
            cursor = batch.cursor or cursor
            most -= bool(batch.findings)
            if most <= 0:
                break
    finally:
        await batches.aclose()
    return found, cursor


def urls(findings: Sequence[Finding]) -> list[str | None]:
    return [f.url for f in findings]


def ids(findings: Sequence[Finding]) -> list[str]:
    return [f.id for f in findings]
