"""Settings of the lifecycle, read from the configuration at the start."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.rules import breaker


class SinkBinding(msgspec.Struct, frozen=True):
    """A sink of the pipeline, and the extractors whose records it gets."""

    name: str
    only: tuple[str, ...] = ()  # names of extractors, () for all


class LifecycleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of admission and lifecycle."""

    max_pending: int = 10_000_000  # events of a topic that have not ended. More are refused.
    window: float = 60.0  # seconds after a request in which the URL is fresh
    settle: float = 2.0  # seconds after a request in which an accepted event is its duplicate
    drop: bool = (
        False  # treat later events inside the window as duplicates, instead of delaying them
    )
    follow_window: float = 24 * 3600.0  # seconds: freshness window of followed links
    follow_depth: int = 10  # largest depth: number of links from the first event of a trace
    follow_same_domain: bool = True  # follow only links to the domain of their page
    emit_unchanged: bool = False  # send records to the sinks even if they are unchanged
    hooks: bool = False  # store changes for on_change hooks
    sinks: tuple[SinkBinding, ...] = ()
    host_by: Literal["host", "domain"] = "host"
    breaker: breaker.Limits = breaker.Limits()
