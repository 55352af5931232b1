"""Cursor of a PostgreSQL change source.

It also records the parts of the first reading, which show the inserts that are known already.
"""

from __future__ import annotations

import msgspec

from penstock.errors import SourceDown
from penstock.sources.postgres.pgoutput import lsn_text

ALL_CHANGES = (1 << 63) - 1  # value of `done` if all changes of the transaction are accepted


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Part of the first reading that used a snapshot taken after the slot was created.

    Rows inserted between the two are in both the snapshot and the log of changes.
    """

    table: int  # number of the table in which this part starts
    # It starts after this key, or at the start of the table if None. It may continue in later
    # tables.
    after: list[str] | None
    snapshot: str  # xmin:xmax:xip, as pg_current_snapshot() writes it
    upto: int  # every transaction visible to the snapshot committed at or before this LSN


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """Position of an unfinished first reading: the next row is after key `after` of `table`."""

    table: int
    after: list[str] | None


class Cursor(msgspec.Struct, frozen=True):
    """Position in the log of changes.

    All transactions that committed before `lsn` are accepted, and the first `done` changes of the
    transaction that committed at `lsn`.
    """

    system: str  # the server's identifier: a position is valid on this server only
    lsn: int
    done: int
    reading: Reading | None = None
    parts: list[Part] = []

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes, source: str) -> Cursor:
        """Decode a cursor. Raises SourceDown if it is invalid."""
        try:
            return msgspec.msgpack.decode(raw, type=cls)
        except msgspec.MsgspecError:
            raise SourceDown(
                f"source {source}: its position cannot be read",
                hint=f"run `penstock sources reset {source} --to now` (or `--to start`)",
            ) from None

    @property
    def position(self) -> tuple[int, int]:
        return self.lsn, self.done

    def __str__(self) -> str:
        if self.reading is not None:
            after = f" after {', '.join(self.reading.after)}" if self.reading.after else ""
            return (
                f"reading existing rows: table {self.reading.table + 1}{after}, "
                f"then from {lsn_text(self.lsn)}"
            )
        return lsn_text(self.lsn) + (
            f", {self.done} changes into that transaction" if 0 < self.done < ALL_CHANGES else ""
        )


def saw(snapshot: str, xid: int) -> bool:
    """Return whether a transaction had ended when the snapshot was taken.

    `xid` has only the lower 32 bits of the transaction number, as the log does.
    """
    low, high, open_ = snapshot.split(":")
    least, next_ = int(low), int(high)
    full = (next_ & ~0xFFFFFFFF) | xid
    if full > next_ + (1 << 31):
        full -= 1 << 32
    elif full < next_ - (1 << 31):
        full += 1 << 32
    return full < least or (full < next_ and str(full) not in open_.split(","))
