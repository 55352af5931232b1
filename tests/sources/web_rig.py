"""A polling source on a local test site, with the guard, robots.txt and a real HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from penstock.authoring.pipeline import Pipeline
from penstock.config import files as config
from penstock.intake.mapping import Mapping
from penstock.ports import Finding, Source
from penstock.runtime.sources_and_sinks import source_to_look_at
from penstock.testing.web import Web

T = TypeVar("T")


class PolledSource:
    """One source and its durable cursor, as the reader keeps them."""

    def __init__(self, source: Source, mapping: Mapping) -> None:
        self.source, self.mapping = source, mapping
        self.cursor: bytes | None = None

    async def round(self, *, killed_after: int | None = None) -> list[Finding]:
        """Poll once and return the findings. Accept all batches, or the first `killed_after`."""
        found: list[Finding] = []
        batches, taken = self.source.read(self.cursor), 0
        try:
            async for batch in batches:
                found += batch.findings
                if killed_after is not None and taken >= killed_after:
                    break
                taken += 1
                self.cursor = batch.cursor if batch.cursor is not None else self.cursor
        finally:
            await batches.aclose()
        return found

    def urls(self, findings: list[Finding]) -> list[str]:
        return [event.url for f in findings if (event := self.mapping.event(f)) is not None]


@contextlib.asynccontextmanager
async def polled_source(
    web: Web, url: str, tmp_path: Path, **options: Any
) -> AsyncIterator[PolledSource]:
    """Open the source `url`, in which {} stands for the address of the test site."""
    pipeline = Pipeline("test")
    pipeline.source(url.replace("{}", f"127.0.0.1:{web.port}"), name="it", **options)
    allowed = {"PENSTOCK_NET_ALLOW": "127.0.0.1:*", "PENSTOCK_PACE_RATE": "unlimited"}
    settings = config.load({}, allowed, tmp_path).config
    async with source_to_look_at(settings, pipeline.sources[0]) as (source, mapping):
        yield PolledSource(source, mapping)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 180))
