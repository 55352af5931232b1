"""What can be asked of the ledger for people: the answers as values, and the port that gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

from penstock.ports.broker import QueueAudit
from penstock.ports.events import PageMeta

SCAN = 200_000  # rows looked at, newest first, where no index answers
_decode_meta = msgspec.msgpack.Decoder(PageMeta).decode
Sizes: TypeAlias = Callable[
    [Sequence[str]], Mapping[str, int]
]  # the page store's: of these pages, the ones that are stored


# -- dead letters ----------------------------------------------------------------------------------


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with one fingerprint, told by the newest of them."""

    fingerprint: str
    letters: int
    exact: bool
    stage: str
    error_class: str
    reason: str
    newest: float
    first: float
    event_id: str
    url: str


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    n: int
    event: str
    topic: str
    url: str
    host: str
    at: float
    stage: str
    error_class: str
    reason: str
    fingerprint: str
    detail: str
    envelope: bytes
    headers: str


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which letters; reason is a part of the text, the rest is exact (a fingerprint may be a
    prefix).
    """

    reason: str | None = None
    host: str | None = None
    error_class: str | None = None
    stage: str | None = None
    fingerprint: str | None = None


# -- status and audit ------------------------------------------------------------------------------


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    events: int
    next_at: float


class SinkState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    flushed: int
    backlog: int
    mark: str


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    topics: dict[str, dict[str, int]]  # per topic: accepted and the six states, which add up to it
    counters: dict[str, int]  # everything else that is counted, over all topics
    paused: dict[str, str]  # topic → why
    waiting: list[Waiting]
    waiting_seen: int  # of how many delayed events the reasons are
    causes: list[Cause]
    sinks: list[SinkState]
    running: dict[str, int]  # worker → leases it holds, at most SCAN of all
    changes_waiting: bool
    oldest: float | None  # when the oldest unfinished message was queued


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    counters: dict[tuple[str, str], int]  # (topic, status)
    rows: dict[tuple[str, str], int]
    entered: int | None  # events ever entered, where the store knows
    queue: QueueAudit
    letterless: int  # letters of events that are not dead
    outbox: list[tuple[str, int, int]]  # sink, noted backlog, rows
    future: float  # newest note in the history


# -- events ----------------------------------------------------------------------------------------


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    n: int
    id: str
    topic: str
    position: int | None
    source: str
    trace: str
    url: str
    host: str
    status: str
    attempts: int
    starts: int
    crashes: int
    accepted_at: float
    dispatched_at: float | None
    finished_at: float | None
    not_before: float | None
    response_status: int | None
    response_hash: str | None
    reason: str | None
    worker: str | None
    extractors: str | None
    page: str | None
    duplicate_of: str | None
    promoted: int
    page_meta: bytes | None
    envelope: bytes

    @property
    def meta(self) -> PageMeta | None:
        return _decode_meta(self.page_meta) if self.page_meta else None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an event's history."""

    at: float
    status: str
    worker: str | None
    stage: str | None
    error_class: str | None
    reason: str | None


class Listing(msgspec.Struct, frozen=True):
    events: list[EventRow]
    complete: bool  # False: older ones were not looked at


# -- the port --------------------------------------------------------------------------------------


class Reports(Protocol):
    """Reads for people, inside one transaction. Each uses an index or has a stated bound."""

    # -- status and audit --------------------------------------------------------------------------

    def standing(self) -> Standing:
        """All that `status` shows. Reads counters, never counts events."""

    def sinks(self) -> list[SinkState]: ...

    def audit(self, queue: QueueAudit, *, entered: int | None) -> Audit:
        """Everything that must agree with something else. Slow: it counts whole tables."""

    # -- events ------------------------------------------------------------------------------------

    def event(self, id_: str) -> EventRow | None: ...

    def newest(self) -> EventRow | None: ...

    def events(
        self,
        *,
        status: str | None = None,
        host: str | None = None,
        source: str | None = None,
        url_key: bytes | None = None,
        limit: int = 50,
        everything: bool = False,
    ) -> Listing:
        """Newest first (delayed: due next first). Filters without an index look at the newest SCAN
        events only, unless everything is asked for.
        """

    def ids_like(self, prefix: str, most: int = 6) -> list[str]:
        """Event ids that begin so."""

    def traces_like(self, prefix: str, most: int = 6) -> list[str]:
        """Trace ids that begin so."""

    def of_url(self, key: bytes, most: int) -> list[EventRow]:
        """Newest first."""

    def of_trace(self, trace: str, most: int) -> list[EventRow]:
        """In the order they were accepted."""

    def trace_size(self, trace: str) -> int:
        """At most SCAN."""

    def history(self, n: int) -> list[Step]: ...

    def duplicates_of(self, id_: str, most: int = 20) -> list[tuple[str, str]]:
        """(event, trace) of what ended as a duplicate of it."""

    def records_of(self, events: Iterable[int]) -> dict[int, list[tuple[str, str]]] | None:
        """Event number → (extractor, key) of the records that are still from it. None: too many
        records to look through.
        """

    # -- pages -------------------------------------------------------------------------------------

    def page_of_url(self, key: bytes, sizes: Sizes) -> str | None:
        """The newest page of a URL that is still stored."""

    def event_of_page(self, page: str) -> EventRow | None:
        """The newest event that fetched it, among the newest SCAN."""

    def paged_events(
        self, limit: int, sizes: Sizes, host: str | None = None
    ) -> Iterator[tuple[EventRow, int | None]]:
        """The newest events that have a page, each page once, with its size (None: retention took
        it).
        """

    # -- dead letters ------------------------------------------------------------------------------

    def letter(self, event_id: str) -> Letter | None: ...

    def letters(
        self,
        which: Filter,
        *,
        after: int = 0,
        upto: int | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> list[Letter]: ...

    def letter_count(self, which: Filter) -> int: ...

    def last_letter(self) -> int:
        """The number of the newest. 0: there is none."""

    def letters_like(self, prefix: str, most: int = 6) -> list[str]:
        """Events with a letter whose id begins so."""

    def letter_groups(self, which: Filter, most: int) -> tuple[list[Cause], int]:
        """(causes, letters in all), the largest cause first."""
