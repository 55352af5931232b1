"""Sinks: targets of records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

Tx = TypeVar("Tx", contravariant=True)  # transaction of the database that has the table


class Row(msgspec.Struct, frozen=True):
    """One row of a sink outbox."""

    n: int  # row number
    key: str  # record key
    body: bytes  # record as a JSON object with `_penstock`
    order: int  # acceptance order of the event. A keyed sink never replaces a row by an older one.


class Reopen(OSError):
    """The target is no longer in the recorded state, for example because it was moved or rewritten.

    The sink wrote no row. Open the sink again, then write.
    """


class Sink(Protocol):
    """Target of records. One flusher, which holds the sink's lock, writes its rows in order.

    If a row is written twice, the target contains it once.
    """

    name: str
    # Notice of the last `open` for the operator, for example that a file was replaced, truncated or
    # edited. "" if there is no notice.
    notice: str

    def open(self, position: int, mark: str) -> str:
        """Bring the target exactly into the recorded state after row `position`.

        For example, truncate a file to the offset in `mark`. Return the mark of the target's
        current state. If that mark differs from `mark`, record it before the first write. Blocking.
        May be repeated.
        """

    def write(self, rows: Sequence[Row]) -> str:
        """Append or upsert all rows. Return the new mark, for example a byte offset.

        Durable when it returns. Blocking. The same rows may be written again after a failure.
        Raises OSError or StoreUnavailable if the target is unavailable, and Reopen if it was
        changed. Then the rows stay in the outbox and are written again.
        """

    def close(self) -> None: ...


@runtime_checkable
class ProbedSink(Sink, Protocol):
    """A sink that `penstock doctor` can check while workers write to it."""

    def probe(self) -> None:
        """Check that the target can be reached and written to, and change nothing.

        Takes no lock and creates no file or table. Blocking. May run beside `open` and `write` of
        another process. Raises OSError or PenstockError if the target cannot be used.
        """


class FilePath(Protocol):
    """A path, such as pathlib.Path."""

    def __fspath__(self) -> str: ...


@runtime_checkable
class LocalSink(Sink, Protocol):
    """A sink whose target is a file of this machine."""

    @property
    def path(self) -> FilePath:
        """The file."""

    # If True, a new file and new directories are for their owner only. Otherwise the umask decides.
    private: bool


@runtime_checkable
class FileSink(Sink, Protocol):
    """A sink whose target is a file that can be truncated.

    Several machines write several files. One mark text contains the marks of all these files.
    """

    def restore(self, mark: str) -> None:
        """Truncate the file to its recorded length. Call this only while the sink is not open.

        Creates no file, and does not change a file that `mark` does not contain.
        """


@runtime_checkable
class TableSink(Sink, Protocol[Tx]):
    """A sink whose target is a table.

    If the table is in the ledger's database, the ledger's transaction writes the rows directly.
    Then the sink needs no outbox.
    """

    def shares(self, url: str) -> bool:
        """Return True if the table is in the database of the store with this URL."""

    def prepare_in(self, tx: Tx) -> None:
        """Prepare the table in the caller's transaction, before the first `write_in`.

        Raises ConfigError if the table belongs to another program.
        """

    def write_in(self, tx: Tx, rows: Sequence[Row]) -> None:
        """Write rows as `write` does, in the caller's transaction. Durable when it commits."""
