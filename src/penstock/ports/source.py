"""Sources of events, and their state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, TypedDict, Unpack

import msgspec

from penstock.rules.signatures import Claim


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One change that a source reports. The source's mapping makes an event from it.

    The same cause has the same id.
    """

    id: str  # id minted from the cause, so that it is the same after a restart or a replay
    # URL, if the source knows it. Otherwise the mapping gives it, or else payload["url"].
    url: str | None = None
    base: str | None = None  # base of a relative URL, also of a URL from the mapping
    cause: str = ""  # description for operators: an LSN, the id of an entry
    payload: dict[str, Any] = {}  # data for mappings and hooks, and `event.data` of extractors
    at: float | None = None  # time of the change outside
    # Reason why the input cannot be read as a change. Then the finding becomes a dead letter with
    # the payload, independent of the mapping.
    refused: str = ""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Findings that are accepted together, at most a few thousand, and the cursor after them."""

    findings: Sequence[Finding] = ()
    cursor: bytes | None = None  # cursor after the batch, None if it stays unchanged
    idle: bool = False  # True if all current input is read
    lag: float | None = None  # seconds between the newest input and the input read, if known
    backlog: int | None = None  # unread input (bytes, messages or rows), if known


class Source(Protocol):
    """A source of findings.

    A source is opened without I/O. Opening raises ConfigError if its URL or options are wrong. I/O
    happens in `read`, `preview` and `place`.

    At run time these raise errors.SourceDown, model.Failure or StoreUnavailable. Then the reader
    reports the error, waits, and calls `read` again.
    """

    name: str
    # Seconds between two rounds of `read`. None if `read` does not end, or has only one round.
    every: float | None
    served: bool  # True if requests (role `serve`) bring the findings. Then `read` is never called.

    def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        """Yield batches from the cursor on, or from the beginning if the cursor is None.

        When the generator is resumed, all earlier batches are accepted and durable, and so is the
        cursor. Only then may the generator acknowledge a batch outside. If it is closed instead, it
        does not acknowledge its last batch. Findings may repeat, with the same id.

        Yield at least every few seconds, even if the batch is empty. A return ends the round.
        """

    def due(self, now: float) -> float | None:
        """Return the time of the next round, or None if `every` applies.

        A source may know a better time, for example from a feed's ttl or from Retry-After.
        """

    async def preview(self, cursor: bytes | None, limit: int) -> Sequence[Finding]:
        """Return up to `limit` findings that `read` would report next. No effects outside."""

    async def place(self, to: str) -> bytes | None:
        """Return the cursor for an operator's text: `now`, an offset or a time.

        The text `start` means None for every source and is not passed to this method. Raises
        UsageError if the source does not have the position.
        """

    def describe(self, cursor: bytes | None) -> str:
        """Return the cursor in words, for operators."""

    async def close(self) -> None: ...


class SourceState(msgspec.Struct, frozen=True):
    """State of a source in the ledger."""

    name: str
    url: str  # URL without its secrets
    paused: str | None  # reason of the pause, None if the source is not paused
    generation: int  # generation of the cursor. A reset starts a new generation.
    worker: str | None  # worker that reads the source
    settled_at: float | None  # time at which the reader was last idle: all input read, or an error
    looked_at: float | None  # time of the reader's last update
    next_at: float | None  # time of the next round
    event_at: float | None  # time of the last new event
    events: int  # findings that became new events
    known: int  # findings whose id was already in the ledger
    skipped: int  # findings that `where` or a hook skipped
    refused: int  # findings that became dead letters of stage `source` and not events
    error: str | None
    error_at: float | None
    lag: float | None  # seconds
    backlog: int | None  # unread input (bytes, messages or rows)
    position: str | None  # cursor in words


class ServedSource(Protocol):
    """A source that gets its findings from HTTP requests.

    The HTTP server calls it for each request to its path. It has no cursor, no rounds and no I/O.
    """

    name: str
    path: str  # path of the endpoint
    served: bool
    signed: str  # signature scheme of the requests, "" if they are unsigned
    local: bool  # True if only requests from this machine are accepted
    max_body: int  # bytes
    rate: float  # requests per second
    burst: int  # requests

    def screen(self, method: str, headers: Mapping[str, Sequence[str]], now: float) -> Claim | None:
        """Check a request before its body is read. Raises errors.RequestRefused.

        Return the signature that `verify` compares with the body. Return None if there is nothing
        to compare: the source is unsigned, or a token in the headers is verified already.
        """

    def verify(self, claim: Claim | None, body: bytes) -> str | None:
        """Return the signed id of the request, or None. Raises errors.RequestRefused."""

    def findings(
        self, headers: Mapping[str, Sequence[str]], body: bytes, signed_id: str | None
    ) -> Sequence[Finding]:
        """Return all findings of a verified request.

        Raises errors.RequestRefused if the request is not valid. Raises no other exception, for any
        body.
        """


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A replication slot. The server keeps its log until the slot's reader has confirmed it."""

    name: str
    # True if the slot belongs to this source. Other slots are listed because they use the same
    # disk.
    own: bool
    active: bool  # True if a client reads the slot now
    position: str  # last confirmed position
    behind: int  # bytes of log after that position
    held: int  # bytes of log that the server must keep for the slot
    status: str  # status in the server's words: reserved, extended, unreserved, lost


class Slotted(Protocol):
    """A source with a replication slot on its server, for `penstock sources slots`.

    Its methods raise SourceDown if the server cannot be used.
    """

    async def slots(self) -> Sequence[SlotInfo]: ...

    async def create_slot(self) -> SlotInfo: ...

    async def drop_slot(self) -> bool:
        """Drop the source's slot. Return False if the slot does not exist."""


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
        """Return the cursor of a source, or None for the beginning."""

    def move_cursor(self, name: str, body: bytes | None, now: float) -> None:
        """Set the cursor of a source. Durable when the transaction commits."""

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
        """Start a new generation. An operator set the cursor, and the reader starts there."""
