"""Settings of lifecycle and worker, read from the configuration at the start."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.model import Event
from penstock.ports import ExtractorKeys
from penstock.rules import breaker, budgets, gone
from penstock.rules.routes import ServedPool

Stage = Literal["fetch", "extract", "sink"]
ENTRY: dict[Stage, str] = {"fetch": "requests", "extract": "pages", "sink": "records"}
HostKind = Literal["host", "domain"]


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
    host_by: HostKind = "host"
    # The owner of the ledger, in messages of an external broker. "" if the broker is embedded.
    pipeline: str = ""
    former: frozenset[str] = frozenset()  # former owners, which old messages may name
    breaker: breaker.Limits = breaker.Limits()
    gone: gone.Limits = gone.Limits()
    run: budgets.Run = budgets.Run()  # the command of this worker
    budgets: budgets.Limits = budgets.Limits()
    keys: ExtractorKeys = {}
    pools: tuple[ServedPool, ...] = ()  # proxy pools of this worker
    max_age: float = 7 * 86400.0  # seconds since acceptance, after which no event waits for a route

    def drops(self, event: Event) -> bool:
        """Return True if the event is a duplicate, not delayed, inside the window of its URL."""
        if event.window_mode is not None:
            return event.window_mode == "drop"
        return self.drop or event.parent is not None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one worker."""

    concurrency: int = 256  # permits: handlers in progress at the same time
    window: int = 1024  # prefetch window: deliveries held at the same time
    byte_budget: int = 64 << 20  # bytes of held page bodies. Above this, no work is taken.
    extract_group: int = 32  # pages of a full extraction batch
    extract_linger: float = 0.01  # seconds that a page waits for a full batch
    conclude_group: int = 512  # outcomes of a full batch
    conclude_linger: float = 0.02  # seconds that an outcome waits for a full batch
    # Permits. If fewer are free, and more deliveries than that are ready, starts wait for more.
    start_group: int = 48
    start_linger: float = 0.01  # seconds of that wait
    lease: float = 30.0  # seconds, extended every third of it
    grace: float = 25.0  # seconds in which started work may finish at shutdown
    deadline: float = 600.0  # seconds of one handler. The watchdog cancels longer ones.
    per_key: int | None = None  # deliveries of one host key in one `receive`, None for no limit
    max_age: float = 7 * 86400.0  # seconds since acceptance, after which a failed event is dead
    inline_max: int = 0  # bytes of the largest body that is sent inside its `pages` message
    message_max: int | None = None  # bytes of the largest message on `pages`, None for no limit
