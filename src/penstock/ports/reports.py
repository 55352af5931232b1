"""Reports about the ledger for operators: the ports, and the values that they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

from penstock.ports.broker import QueueAudit
from penstock.ports.events import PageMeta

SCAN = 200_000  # rows that a query without an index reads, newest first
_decode_meta = msgspec.msgpack.Decoder(PageMeta).decode
# Function of the page store. It returns page id -> size in bytes of those pages that are stored.
Sizes: TypeAlias = Callable[[Sequence[str]], Mapping[str, int]]


# -- dead letters ----------------------------------------------------------------------------------


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same fingerprint. Its texts are from the newest dead letter."""

    fingerprint: str
    letters: int  # number of dead letters
    exact: bool  # False if there may be more dead letters
    stage: str
    error_class: str
    reason: str
    newest: float  # time of the newest dead letter
    first: float  # time of the oldest dead letter
    event_id: str
    url: str


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A stored dead letter."""

    n: int  # number of the dead letter
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
    """Filter of dead letters.

    `reason` is a part of the text, and `fingerprint` may be a prefix. The others must be equal.
    """

    reason: str | None = None
    host: str | None = None
    error_class: str | None = None
    stage: str | None = None
    fingerprint: str | None = None


# -- status and audit ------------------------------------------------------------------------------


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Delayed events with the same reason."""

    reason: str
    events: int  # number of events
    next_at: float  # time at which the next of them is due


class SinkState(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a sink."""

    name: str
    flushed: int  # number of the last flushed row
    backlog: int  # rows that are not flushed
    mark: str  # recorded mark of the target after the last flushed row
    outage: str = ""  # why the target took no rows at the last try, "" if it took them
    outage_since: float | None = None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of `penstock status`."""

    topics: dict[str, dict[str, int]]  # topic -> `accepted`, and the six states that add up to it
    counters: dict[str, int]  # all other counters, summed over all topics
    paused: dict[str, str]  # topic -> reason
    waiting: list[Waiting]
    waiting_seen: int  # delayed events that `waiting` was counted from
    causes: list[Cause]
    sinks: list[SinkState]
    running: dict[str, int]  # worker -> number of its leases. At most SCAN leases are read.
    changes_waiting: bool  # a change waits for a hook
    oldest: float | None  # time at which the oldest unfinished message was queued


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of `penstock doctor` that must agree with each other."""

    counters: dict[tuple[str, str], int]  # (topic, status) -> counter
    rows: dict[tuple[str, str], int]  # (topic, status) -> rows
    links_waiting: int  # counter of links that wait for room
    links_stored: int  # links in the stored chunks
    entered: int | None  # events ever inserted, None if the store does not count them
    queue: QueueAudit
    unqueued: list[str]  # ids of the first five open events without a message
    unqueued_count: int
    lingering_count: int  # queued events that have ended. They are acked when delivered.
    letterless: int  # dead letters of events that are not dead
    outbox: list[tuple[str, int, int]]  # (sink, recorded backlog, rows)
    future: float  # latest acceptance time of the newest 1,000 events


# -- events ----------------------------------------------------------------------------------------


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger row of an event, with its envelope and page."""

    n: int  # row number
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
    result: str | None  # of a success without a page: "missing" or "gone"
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
    """Result of `EventReports.events`."""

    events: list[EventRow]
    complete: bool  # False if older events were not read


# -- the ports -------------------------------------------------------------------------------------
# Queries run inside one transaction. Each query uses an index or has a stated bound.


class StatusReports(Protocol):
    """Figures of the whole ledger."""

    def standing(self) -> Standing:
        """Return the figures of `status`. Reads counters and never counts events."""

    def sinks(self) -> list[SinkState]: ...

    def audit(self, queue: QueueAudit, *, entered: int | None) -> Audit:
        """Return figures that must agree with each other. Slow, because it counts whole tables."""


class EventReports(Protocol):
    """Queries for events, their traces, histories and records."""

    def event(self, id_: str) -> EventRow | None: ...

    def newest(self) -> EventRow | None: ...

    def events(
        self,
        *,
        status: str | None = None,
        host: str | None = None,
        source: str | None = None,
        result: str | None = None,
        url_key: bytes | None = None,
        limit: int = 50,
        everything: bool = False,
    ) -> Listing:
        """Return events, newest first. Delayed events are sorted by their due time.

        Filters without an index read only the newest SCAN events, unless `everything` is set.
        """

    def ids_like(self, prefix: str, most: int = 6) -> list[str]:
        """Return event ids that start with a prefix."""

    def traces_like(self, prefix: str, most: int = 6) -> list[str]:
        """Return trace ids that start with a prefix."""

    def of_url(self, key: bytes, most: int) -> list[EventRow]:
        """Return the events of a URL, newest first."""

    def of_trace(self, trace: str, most: int) -> list[EventRow]:
        """Return the events of a trace, in the order of acceptance."""

    def trace_size(self, trace: str) -> int:
        """Return the number of events of a trace, at most SCAN."""

    def history(self, n: int) -> list[Step]: ...

    def duplicates_of(self, id_: str, most: int = 20) -> list[tuple[str, str]]:
        """Return (event id, trace id) of events that ended as duplicates of an event."""

    def records_of(self, events: Iterable[int]) -> dict[int, list[tuple[str, str]]] | None:
        """Return row number -> (extractor, record key) of the current records of these events.

        Return None if the ledger has more than SCAN records.
        """


class PageReports(Protocol):
    """Queries for the stored pages of events."""

    def page_of_url(self, key: bytes, sizes: Sizes) -> str | None:
        """Return the id of the newest page of a URL that is still stored."""

    def event_of_page(self, page: str) -> EventRow | None:
        """Return the newest event that fetched the page, among the newest SCAN events."""

    def paged_events(
        self, limit: int, sizes: Sizes, host: str | None = None
    ) -> Iterator[tuple[EventRow, int | None]]:
        """Return the newest events with a page, each page once, with the page's size in bytes.

        The size is None if retention deleted the page. Reads the newest SCAN fetched events.
        """


class LetterReports(Protocol):
    """Queries for dead letters."""

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
        """Return the number of the newest dead letter, or 0 without dead letters."""

    def letters_like(self, prefix: str, most: int = 6) -> list[str]:
        """Return ids that start with a prefix, of events with a dead letter."""

    def letter_groups(self, which: Filter, most: int) -> tuple[list[Cause], int]:
        """Return (causes, number of all dead letters). The largest cause comes first."""
