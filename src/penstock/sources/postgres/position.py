"""Where a reader of PostgreSQL's log stands: its cursor, and which inserts it has read already with
the table. Values only.
"""

from __future__ import annotations

import msgspec

from penstock.errors import SourceDown
from penstock.sources.postgres.pgoutput import lsn_text

WHOLE = (1 << 63) - 1  # of a transaction's changes: all of them


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of the first reading, under a snapshot that is younger than the slot: what was
    inserted between the two is in both.
    """

    table: int  # it begins in this one …
    after: list[str] | None  # … behind this key (None: at its beginning) and goes on into the next
    snapshot: str  # xmin:xmax:xip, as pg_current_snapshot() writes it
    upto: int  # LSN by which everything it saw was committed


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """The first reading, not finished: what comes next."""

    table: int
    after: list[str] | None


class Cursor(msgspec.Struct, frozen=True):
    """All transactions that committed before `lsn` are accepted, and the first `done` changes of
    the one that committed there.
    """

    system: str  # the server's own identifier: a position of another server means nothing
    lsn: int
    done: int
    reading: Reading | None = None
    parts: list[Part] = []

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes, source: str) -> Cursor:
        """Raises SourceDown."""
        try:
            return msgspec.msgpack.decode(raw, type=cls)
        except msgspec.MsgspecError:
            raise SourceDown(
                f"source {source}: its position cannot be read",
                hint=f"penstock sources reset {source} --to now (or start)",
            ) from None

    @property
    def place(self) -> tuple[int, int]:
        return self.lsn, self.done

    def __str__(self) -> str:
        if self.reading is not None:
            after = f" behind {', '.join(self.reading.after)}" if self.reading.after else ""
            return f"reading what is there: table {self.reading.table + 1}{after}, then from {lsn_text(self.lsn)}"
        return lsn_text(self.lsn) + (
            f", {self.done} changes into that transaction" if 0 < self.done < WHOLE else ""
        )


def saw(snapshot: str, xid: int) -> bool:
    """Whether a transaction, by the 32 bits of its number that the log tells, had ended for this
    snapshot.
    """
    low, high, open_ = snapshot.split(":")
    least, next_ = int(low), int(high)
    full = (next_ & ~0xFFFFFFFF) | xid
    if full > next_ + (1 << 31):
        full -= 1 << 32
    elif full < next_ - (1 << 31):
        full += 1 << 32
    return full < least or (full < next_ and str(full) not in open_.split(","))
