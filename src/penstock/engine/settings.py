"""Settings of the lifecycle, taken from the configuration once."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.rules import breaker


class SinkBinding(msgspec.Struct, frozen=True):
    """A sink of the pipeline, and the extractors whose records it gets."""

    name: str
    only: tuple[str, ...] = ()  # extractors; () means all


class LifecycleSettings(msgspec.Struct, frozen=True, kw_only=True):
    max_pending: int = 10_000_000
    window: float = 60.0
    settle: float = 2.0
    drop: bool = False
    follow_window: float = 24 * 3600.0
    follow_depth: int = 10
    follow_same_domain: bool = True
    emit_unchanged: bool = False
    hooks: bool = False
    sinks: tuple[SinkBinding, ...] = ()
    host_by: Literal["host", "domain"] = "host"
    breaker: breaker.Limits = breaker.Limits()
