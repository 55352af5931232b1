"""Sinks: targets of records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

Tx = TypeVar("Tx", contravariant=True)  # a transaction of the database that has the table


class Row(msgspec.Struct, frozen=True):
    """One line of a sink's outbox: its number, and the record as a JSON object with `_penstock`."""

    n: int
    key: str
    body: bytes
    order: int  # acceptance order of its event: a keyed sink never goes back


class Reopen(OSError):
    """Nothing was written; the target is not in the noted state any more (moved, rewritten). Open
    it again and write then.
    """


class Sink(Protocol):
    """Where records go; writing one twice leaves one. Fed in order by one flusher that holds its
    lock.
    """

    name: str
    # what the last open found that somebody should know ("" if nothing): a file that was replaced,
    # cut or edited
    notice: str

    def open(self, position: int, mark: str) -> str:
        """Bring the target to exactly the state noted after row `position` (truncate to the offset
        in `mark`). Blocking; may be called again. Returns the mark of the state it is in now; where
        that is another one, it must be noted before anything is written.
        """

    def write(self, rows: Sequence[Row]) -> str:
        """Append or upsert all rows, durable when it returns; returns the new mark (a byte offset,
        …). Blocking. Raises OSError or StoreUnavailable for an outage of the target: the rows stay
        in the outbox and are tried again.
        """

    def close(self) -> None: ...


@runtime_checkable
class FileSink(Sink, Protocol):
    """A sink whose target is a file that can be cut. On several machines these are several files,
    and their marks are kept side by side in one.
    """

    def restore(self, mark: str) -> None:
        """While it is not open: cut a file that is there to what is noted of it. Makes none, and
        touches none that `mark` does not know.
        """


@runtime_checkable
class TableSink(Sink, Protocol[Tx]):
    """A sink whose table may lie in a database that is also a store: then it is written in the
    books' transaction, and needs no outbox.
    """

    def shares(self, url: str) -> bool:
        """Is this store's database the table's own?"""

    def prepare_in(self, tx: Tx) -> None:
        """Before the first `write_in`. Raises ConfigError: the table is somebody else's."""

    def write_in(self, tx: Tx, rows: Sequence[Row]) -> None:
        """As `write`, in the caller's transaction."""
