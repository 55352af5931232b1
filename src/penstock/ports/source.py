"""Sources of events, and their state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, TypedDict, Unpack

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One change outside, as its source tells it; the source's mapping makes the event of it. Same
    cause, same id.
    """

    id: str  # minted from the cause: a restart or a replay repeats it
    url: str | None = (
        None  # where the source itself knows it; else the mapping's, else payload["url"]
    )
    base: str | None = None  # what a relative URL is relative to, whoever gave it
    cause: str = ""  # for people: an LSN, an entry's id
    payload: dict[
        str, Any
    ] = {}  # what mappings and hooks are given, and what extractors find in `event.data`
    at: float | None = None  # when it happened outside
    # what came was no change that can be read, and why: a dead letter with the payload, whatever
    # the mapping says
    refused: str = ""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in one piece, at most a few thousand, and where reading goes on after it."""

    findings: Sequence[Finding] = ()
    cursor: bytes | None = None  # None: the position stays
    idle: bool = False  # there is nothing more to read now
    lag: float | None = (
        None  # seconds between what is read and what is there, where the source knows
    )
    backlog: int | None = (
        None  # what is there and not read (bytes, messages, rows), where the source knows
    )


class Source(Protocol):
    """Opened without I/O (mistakes in its URL and options are ConfigError then); all else happens
    in `read`, `preview` and `place`.

    Run-time trouble is raised as errors.SourceDown, model.Failure or StoreUnavailable: the reader
    says so, waits, and calls `read` again.
    """

    name: str
    every: (
        float | None
    )  # seconds between two rounds of `read`; None: `read` goes on for ever, or there is only one round
    served: (
        bool  # it is told by requests (role `serve`) instead of looking, and `read` is never called
    )

    def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        """From the cursor on (None: from the beginning). A repeated finding carries the same id.

        When the generator is resumed, everything it yielded before is accepted and durable, and so
        is the cursor: only then may it acknowledge outside. Closed instead, it acknowledges nothing
        of its last batch. It yields at least every few seconds, if need be an empty batch.
        Returning ends a round.
        """

    def due(self, now: float) -> float | None:
        """When to look again, where the source knows better than `every` (a feed's ttl,
        Retry-After); None: it does not.
        """

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        """What `read` would find next, without any effect outside."""

    async def place(self, to: str) -> bytes | None:
        """The cursor for what a person calls a position (`now`, an offset, a time); `start` is None
        everywhere and not asked for. Raises UsageError.
        """

    def describe(self, cursor: bytes | None) -> str:
        """The position in words."""

    async def close(self) -> None: ...


class SourceState(msgspec.Struct, frozen=True):
    """What the books know of a source."""

    name: str
    url: str  # without its secrets
    paused: str | None  # why, if it is
    generation: int  # of its position: a reset begins the next
    worker: str | None  # who reads it
    settled_at: float | None  # when there was last nothing left to read
    looked_at: float | None
    next_at: float | None
    event_at: float | None  # the last new event
    events: int
    known: int  # findings whose id was in the books already
    skipped: int  # passed over by `where` or a hook
    refused: int  # made no event; they are dead letters of stage `source`
    error: str | None
    error_at: float | None
    lag: float | None
    backlog: int | None
    position: str | None  # in words


class ServedSource(Protocol):
    """A source that is told rather than asked: `serving` calls it for each request to its path. No
    cursor, no rounds, no I/O.
    """

    name: str
    path: str  # of its endpoint
    served: bool
    signed: str  # by what its senders are known; "" where by nothing
    local: bool  # serves this machine only
    max_body: int
    rate: float  # requests a second
    burst: int

    def screen(self, method: str, headers: Mapping[str, Sequence[str]]) -> None:
        """All that can be said before the body is read. Raises errors.RequestRefused."""

    def findings(
        self, method: str, headers: Mapping[str, Sequence[str]], body: bytes, now: float
    ) -> Sequence[Finding]:
        """What the request tells, all of it or errors.RequestRefused; never anything else, whatever
        the bytes.
        """


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server keeps so that a reader misses nothing, and what that costs it."""

    name: str
    own: bool  # of the source that was asked; others are shown because they cost the same disk
    active: bool  # somebody reads it now
    position: str  # what was confirmed
    behind: int  # bytes of log after that
    held: int  # bytes of log that the server must keep for it
    status: str  # the server's word: reserved, extended, unreserved, lost


class Slotted(Protocol):
    """A source with a slot on its server; `penstock sources slots` asks for this by its methods.
    Raises SourceDown.
    """

    async def slots(self) -> Sequence[SlotInfo]: ...

    async def create_slot(self) -> SlotInfo: ...

    async def drop_slot(self) -> bool:
        """False: there was none."""


class SourceNote(TypedDict, total=False):
    """Columns of a source's state that its reader sets."""

    worker: str | None
    settled_at: float | None
    looked_at: float | None
    next_at: float | None
    error: str | None
    error_at: float | None
    lag: float | None
    backlog: int | None
    position: str | None


class Sources(Protocol):
    """State and cursors of sources in the ledger, inside one transaction."""

    def cursor(self, name: str) -> bytes | None:
        """Return the durable position of a source."""

    def move_cursor(self, name: str, body: bytes | None, now: float) -> None: ...

    def declare(self, name: str, url: str) -> None:
        """Insert the source, or update its URL."""

    def state(self, name: str) -> SourceState | None: ...

    def all(self) -> list[SourceState]:
        """Return all sources, by name."""

    def count(
        self, name: str, *, new: int, known: int, skipped: int, refused: int, now: float
    ) -> None:
        """Add to the counters of a source."""

    def note(self, name: str, **values: Unpack[SourceNote]) -> None:
        """Set columns of a source's state."""

    def pause(self, name: str, reason: str | None) -> None:
        """Pause a source, or resume it if `reason` is None."""

    def reset(self, name: str) -> None:
        """Start a new generation: an operator set the position, and its reader starts there."""
