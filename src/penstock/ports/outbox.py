"""Records for the sinks: change detection, the sink outbox, and changes for hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from penstock.model import Event, Record
from penstock.ports.events import PageMeta
from penstock.ports.sink import Row


class Line(msgspec.Struct, frozen=True):
    """One record for the sinks."""

    extractor: str
    key: str  # record key
    body: bytes  # JSON
    order: int  # row number of the event. A keyed sink never replaces a row by an older one.


class RecordsOfEvent(Protocol):
    """Records that an event has written, or removed."""

    @property
    def event(self) -> Event: ...

    @property
    def row(self) -> int: ...  # row number of the event

    @property
    def records(self) -> Sequence[Record]: ...

    @property
    def meta(self) -> PageMeta | None: ...


class OutboxTable(Protocol):
    """The sink outbox of the ledger, inside one transaction."""

    def diff(
        self,
        ends: Sequence[tuple[RecordsOfEvent, bytes]],
        counts: Mapping[str, Counter[str]],
        *,
        emit_unchanged: bool,
        hooks: bool,
    ) -> list[Line]:
        """Compare records with the last records of their keys, and return the records to send.

        `ends` are successes, each with its URL key. `counts` is updated by topic. If `hooks` is
        true, changes are stored for the hooks.
        """

    def append(self, sink: str, lines: Sequence[Line]) -> None:
        """Add rows for a sink, in order. If the sink's table is in this store, write to it."""

    def position(self, sink: str) -> tuple[int, str]:
        """Return the last row that was flushed, and the target's mark after it."""

    def rows(self, sink: str, *, after: int, limit: int, max_bytes: int) -> list[Row]:
        """Return the rows after a row: at most `limit`, and at most one row beyond `max_bytes`."""

    def mark_flushed(self, sink: str, *, upto: int, mark: str) -> None:
        """Record the position of a sink, and delete the rows up to it."""

    def outage(self, sink: str) -> str:
        """Return why the sink took no rows when it was last tried, or "" if it took them."""

    def set_outage(self, sink: str, reason: str, *, since: float | None) -> None:
        """Record why the sink takes no rows, or "" if it takes them again."""

    def backlog(self, sink: str) -> int:
        """Return how many rows are not flushed."""

    def has_changes(self) -> bool:
        """Return True if a change waits for a hook."""

    def changes(self, limit: int) -> list[tuple[int, bytes]]:
        """Return the oldest changes that wait for hooks: (number, encoded change)."""

    def mark_hooks_run(self, done: Sequence[int], failed: Sequence[tuple[str, int]]) -> None:
        """Delete the changes in `done`. Count a failed try of each `failed` (error, number)."""
