"""Tables of the ledger, as the engine uses them inside one transaction.

Every method belongs to the transaction that its object was bound to. Nothing is durable before that
transaction commits. A store may run a transaction again, so no method has an effect outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from penstock.model import Event
from penstock.ports.events import Baseline, End
from penstock.rules.freshness import Claim


class NewEvent(msgspec.Struct, frozen=True):
    """An event that enters the ledger, with its envelope and the position of its message."""

    event: Event
    envelope: bytes
    position: int


class EventState(msgspec.Struct, frozen=True):
    """The ledger row of an event, as far as decisions need it."""

    n: int
    status: str
    attempts: int
    starts: int
    crashes: int
    page: str | None
    page_meta: bytes | None
    accepted_at: float
    not_before: float | None
    fence: int


class StoredEvent(msgspec.Struct, frozen=True):
    """An event as the ledger stores it."""

    n: int
    id: str
    topic: str
    status: str
    url: str
    host: str
    envelope: bytes


class Start(msgspec.Struct, frozen=True):
    """A handler that is about to start."""

    n: int
    event: Event
    fence: int | None  # of the ledger row, if the event was pending at admission
    needs_request: bool  # False if a stored page is extracted or records are written


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An event that is not retried automatically: its bytes, and why it ended."""

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
        """Record that from now on only the sink write repeats. Return False if the fence was outdated."""

    def mark_dead(self, end: End, letter: DeadLetter, now: float) -> bool:
        """End an event as dead and store its dead letter. Return False if the fence was outdated."""

    def mark_duplicate(self, event: Event, was: EventState, of: str, now: float) -> None:
        """End an event as the duplicate of the event `of`."""

    def delay(self, event: Event, was: EventState, until: float, reason: str, now: float) -> None:
        """Delay an event that was not started."""

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
        """Ask for the fences of events that end next. A hint for pipelined stores."""


class EventLookup(Protocol):
    """Questions that decisions depend on."""

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that were accepted before."""

    def states(self, ids: Sequence[str]) -> dict[str, EventState]:
        """Return the state of each known id."""

    def claim_progress(self, owner: str, next_id: str | None) -> Claim | None:
        """Return how far the owner of a claim has come, or None if the claim is free."""

    def baseline(self, id: str) -> Baseline | None:
        """Return what a success left for conditional requests and change detection."""

    def is_fresh(self, id: str, since: float) -> bool:
        """Return True if the event is open, or if it succeeded and was requested after `since`."""

    def has_open(self, url_key: bytes) -> bool:
        """Return True if an event for this URL still waits to be fetched."""

    def failures(self, n: int) -> dict[str, int]:
        """Return recorded failures by error class, since the event last got a new budget."""

    def oldest_duplicate(self, owner: str) -> tuple[int, bytes] | None:
        """Return (n, envelope) of the duplicate to promote when `owner` is dead.

        Return None if there is no duplicate, or if `owner` was promoted itself.
        """

    def add_to_trace(self, trace: str, url_key: bytes, now: float) -> bool:
        """Add a URL to a trace. Return False if the trace has it."""


class EventMaintenance(Protocol):
    """Periodic work on events, and what operators change."""

    def has_due(self, now: float) -> bool:
        """Return True if a delayed event is due."""

    def release_due(self, now: float) -> None:
        """Make up to 1,000 due events pending. The broker delivers their messages itself."""

    def requeue_from(self, worker: str, ids: Sequence[str], now: float) -> int:
        """Make events pending that a crashed worker had in flight. Their starts stay counted."""

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
        """End an event as dead on an operator's order. Its letter can be redriven."""

    def parked(self, host: str, reasons: Sequence[str]) -> list[tuple[int, int]]:
        """Return (n, position) of the host's delayed events with one of these reasons."""

    def make_due(self, rows: Sequence[int], now: float) -> None:
        """End the delay of these events now."""

    def prune(self, before: float, keep: Callable[[bytes, str], bool]) -> int:
        """Delete a part of the events that ended before `before`, with their history.

        Dead events stay. A success stays if `keep(url_key, id)` is true. Counters do not change.
        Return the number of deleted events.
        """

    def pages_needed(self, pages: Iterable[str]) -> set[str]:
        """Return the pages that retention must keep for open or dead events."""


class Counters(Protocol):
    """Figures that cost the same at any depth (I10)."""

    def add(self, topic: str, deltas: Mapping[str, int]) -> None:
        """Add to counters by name."""

    def pending(self, topic: str) -> int:
        """Return how many accepted events have not ended."""

    def total(self, *names: str) -> int:
        """Return the sum of these counters over all topics."""

    def topics(self) -> list[str]:
        """Return the topics that have counters."""

    def record_ends(self, topic: str, ended: int, dead: int, now: float) -> None:
        """Add to the recent ends, which the breaker reads."""

    def recent_ends(self, topic: str, seconds: float, now: float) -> tuple[int, int]:
        """Return (ended, dead) of the last `seconds`."""

    def reset_ends(self, topic: str) -> None:
        """Forget the recent ends of a topic."""

    def entered(self) -> int | None:
        """Return the events ever entered, as the store counts them, or None if it does not."""


class DeadLetters(Protocol):
    """Dead letters of the ledger."""

    def put(self, letter: DeadLetter, now: float) -> None:
        """Store a letter. It replaces an older letter of the same event."""

    def has(self, event_id: str) -> bool:
        """Return True if the event has a letter."""

    def redrivable(self, event_id: str) -> tuple[int, bytes] | None:
        """Return (n, envelope) of a dead event that has a letter."""

    def drop(self, event_id: str, *, release_page: bool = False) -> int:
        """Delete a letter. Return 1 if there was one.

        `release_page` also lets retention delete the event's page.
        """
