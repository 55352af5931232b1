"""Tables of the ledger, as the engine uses them inside one transaction.

Every method belongs to the transaction that its object was bound to. Changes are durable when that
transaction commits. A store may run a transaction again, so methods have no effect outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from penstock.model import Event
from penstock.ports.events import Baseline, End
from penstock.rules.freshness import Claim

MAX_CAUSES = 1000  # causes of waits that one call returns


class NewEvent(msgspec.Struct, frozen=True):
    """An event to insert, with its envelope and the position of its message."""

    event: Event
    envelope: bytes
    position: int


class EventState(msgspec.Struct, frozen=True):
    """Fields of an event's ledger row that decisions need."""

    n: int  # row number
    status: str
    attempts: int
    starts: int
    crashes: int  # crashed starts
    page: str | None  # id of the fetched page
    page_meta: bytes | None  # PageMeta of that page, as msgpack
    accepted_at: float
    not_before: float | None  # time until which a delayed event waits
    fence: int


class StoredEvent(msgspec.Struct, frozen=True):
    """An event as the ledger stores it."""

    n: int  # row number
    id: str
    topic: str
    status: str
    url: str
    host: str  # host key
    envelope: bytes


class Start(msgspec.Struct, frozen=True):
    """A handler that is about to start."""

    n: int  # row number
    event: Event
    fence: int | None  # fence of the ledger row, if the event was pending at admission
    needs_request: bool  # False if a stored page is extracted or records are written


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """Stored copy of an event that is not retried automatically, with the reason."""

    event_id: str
    topic: str
    url: str = ""
    host: str = ""
    stage: str
    error_class: str = "permanent"
    reason: str
    fingerprint: str
    detail: str = ""  # traceback
    envelope: bytes
    headers: str = "{}"  # JSON


class Events(Protocol):
    """Transitions of events. A transition with an outdated fence changes nothing (I12)."""

    def enter(self, rows: Sequence[NewEvent], now: float) -> None:
        """Insert events as pending. Their ids must be new."""

    def begin(
        self, starts: Sequence[Start], worker: str, now: float, *, writing: bool
    ) -> list[int | None]:
        """Count starts before the work. Return each event's fence, or None if it has ended."""

    def succeed(self, ends: Sequence[End], now: float) -> list[End]:
        """End these events as successes. Return those whose fence was current."""

    def postpone(self, end: End, now: float, *, status: Literal["delayed", "pending"]) -> bool:
        """Set an event back for a retry, a delay, a release or a hand-over.

        Only a charged retry adds an attempt. Return False if the fence was outdated.
        """

    def mark_writing(self, end: End, now: float) -> bool:
        """Set an event to `writing`: from now on only the sink write repeats.

        Return False if the fence was outdated.
        """

    def mark_dead(self, end: End, letter: DeadLetter, now: float) -> bool:
        """End an event as dead, and store its dead letter.

        Return False if the fence was outdated.
        """

    def mark_duplicate(self, event: Event, was: EventState, of: str, now: float) -> None:
        """End an event as the duplicate of the event `of`. Its own duplicates follow it."""

    def reassign_duplicates(self, owner: str, to: str) -> None:
        """Make the duplicates of the event `owner` duplicates of the event `to`."""

    def delay(
        self,
        event: Event,
        was: EventState,
        until: float,
        reason: str,
        now: float,
        *,
        waits_for: str = "",
    ) -> None:
        """Delay an event that was not started. See `End.waits_for`."""

    def delay_unread(self, was: EventState, until: float, reason: str, now: float) -> None:
        """Delay an event that was not started and whose envelope only a newer release can read."""

    def reopen(
        self,
        event: Event,
        n: int,
        *,
        was: str,
        reason: str,
        envelope: bytes,
        position: int,
        now: float,
        promoted: bool,
    ) -> None:
        """Make an ended event pending, with a new budget. Its history is kept."""

    def set_position(self, n: int, position: int) -> None:
        """Record the position of an event's message at an external broker."""

    def prefetch_fences(self, ends: Iterable[End]) -> None:
        """Request the fences of events that end next. A hint for pipelined stores."""


class EventLookup(Protocol):
    """Queries that decisions depend on."""

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that were accepted before."""

    def states(self, ids: Sequence[str]) -> dict[str, EventState]:
        """Return the state of each known id."""

    def claim_progress(self, owner: str, next_id: str | None) -> Claim | None:
        """Return the progress of a claim's owner, or None if the claim is free."""

    def baseline(self, id: str) -> Baseline | None:
        """Return the baseline of a success, or None if the event has none."""

    def is_fresh(self, id: str, since: float) -> bool:
        """Return True if the event is open, or if it succeeded and was requested after `since`."""

    def with_open(self, url_keys: Sequence[bytes]) -> set[bytes]:
        """Return those URLs for which an event is open and waits to be fetched."""

    def failures(self, n: int) -> dict[str, int]:
        """Return recorded failures by error class, since the start of the current budget."""

    def progress(self, n: int) -> bytes:
        """Return the progress of an event's delayed redirect chain, or b""."""

    def oldest_duplicate(self, owner: str) -> StoredEvent | None:
        """Return the duplicate to promote when `owner` is dead.

        Return None if there is no duplicate, or if `owner` was promoted itself.
        """

    def newest_duplicate(self, owner: str) -> StoredEvent | None:
        """Return the newest duplicate of `owner`, or None if it has none."""

    def in_trace(self, trace: str, url_key: bytes) -> bool:
        """Return True if the trace has this URL."""

    def add_to_trace(self, trace: str, url_key: bytes, now: float) -> bool:
        """Add a URL to a trace. Return False if the trace has it."""


class EventMaintenance(Protocol):
    """Periodic work on events, and changes by operators."""

    def has_due(self, now: float) -> bool:
        """Return True if a delayed event is due."""

    def release_due(self, now: float) -> None:
        """Make up to 1,000 due events pending. The broker delivers their messages itself."""

    def requeue_from(self, worker: str, ids: Sequence[str], now: float) -> int:
        """Make the events pending that a crashed worker had in flight. Their starts are kept."""

    def stalled(self, before: float, limit: int) -> list[tuple[int, str, bytes]]:
        """Return (n, id, envelope) of open, undelayed events without history since `before`.

        Reads all events.
        """

    def note(self, n: int, status: str, reason: str, now: float) -> None:
        """Add a line to an event's history. The status of the event does not change."""

    def waiting_on(self, topic: str, limit: int) -> list[StoredEvent]:
        """Return open events whose next message is on this topic. Reads all events."""

    def waiting(self, id: str) -> StoredEvent | None:
        """Return the event if it is open and no worker has started it."""

    def abandon(self, event: StoredEvent, letter: DeadLetter, now: float) -> None:
        """End an event as dead although it has not failed. Its dead letter can be redriven."""

    def parked(self, host: str, reasons: Sequence[str]) -> list[tuple[int, int]]:
        """Return (n, position) of the host's delayed events with one of these reasons."""

    def make_due(self, rows: Sequence[int], now: float) -> None:
        """End the delay of these events now. They no longer wait for an operator."""

    def hold(self, host: str, waits_for: str, until: float) -> None:
        """Delay the delayed requests to a host until a time, because they wait for more than time.

        The broker may deliver their messages earlier. Reads all delayed events.
        """

    def waiting_for(self, cause: str) -> list[tuple[int, str, int]]:
        """Return (n, host, position) of the events that wait for this cause."""

    def causes(self, kind: str, *, after: str = "") -> list[str]:
        """Return up to MAX_CAUSES causes of `waits` that start with `kind`, without the numbers.

        The causes follow `after` in ascending order. Reads one row for each cause.
        """

    def some_waiting_for(
        self, cause: str, limit: int, *, due_before: float
    ) -> list[tuple[int, str, int]]:
        """Return (n, host, position) of delayed events that wait for this cause.

        Only events that are due at `due_before` or earlier.
        """

    def waits(self) -> dict[str, int]:
        """Return how many open events wait for each cause that time alone does not end.

        Reads only these events.
        """

    def prune(self, before: float, keep: Callable[[bytes, str], bool]) -> int:
        """Delete a part of the events that ended before `before`, with their history.

        Dead events stay. A success stays if `keep(url_key, id)` is true. Counters do not change.
        Return the number of deleted events.
        """

    def pages_needed(self, pages: Iterable[str]) -> set[str]:
        """Return the pages that retention must keep for open or dead events."""


class Counters(Protocol):
    """Counters. Reading them costs the same at any queue depth (I10)."""

    def add(self, topic: str, deltas: Mapping[str, int]) -> None:
        """Add to counters by name."""

    def pending(self, topic: str) -> int:
        """Return how many accepted events have not ended."""

    def total(self, *names: str) -> int:
        """Return the sum of these counters over all topics."""

    def topics(self) -> list[str]:
        """Return the topics that have counters."""

    def topics_with(self, name: str) -> list[str]:
        """Return the topics of which this counter is more than 0."""

    def entered(self) -> int | None:
        """Return how many events were ever inserted, or None if the store does not count them."""


class DeadLetters(Protocol):
    """Dead letters of the ledger."""

    def put(self, letter: DeadLetter, now: float) -> None:
        """Store a dead letter. It replaces an older dead letter of the same event."""

    def has(self, event_id: str) -> bool:
        """Return True if the event has a dead letter."""

    def redrivable(self, event_id: str) -> tuple[int, bytes] | None:
        """Return (n, envelope) of a dead event with a dead letter, or None if it is not one."""

    def drop(self, event_id: str, *, release_page: bool = False) -> int:
        """Delete a dead letter. Return how many were deleted, 0 or 1.

        With `release_page`, retention may also delete the event's page.
        """
