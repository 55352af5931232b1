"""Connections to an SQLite file, with the settings of a store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import apsw

from penstock.errors import Unreachable
from penstock.private_files import create_file, make_directory
from penstock.stores.sql import Tx

# Each connection is used by one thread at a time, so it needs no mutexes. They cost a tenth of
# SQLite's time.
_ONE_THREAD = apsw.SQLITE_OPEN_NOMUTEX
APPLICATION_ID = 0x50454E53  # "PENS"
OUTAGE = (
    apsw.FullError,
    apsw.IOError,
    apsw.ReadOnlyError,
    apsw.BusyError,
    apsw.CantOpenError,
    apsw.LockedError,
    apsw.PermissionsError,
    # Damage is an error of the store, not of the job that found it.
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.NoMemError,
)


class Connection(apsw.Connection):
    """A connection that is also the argument of `work(tx)`."""

    in_wal = False  # some file systems do not support WAL mode

    @property
    def tx(self) -> Tx:
        """The connection with the types of `stores.sql`: apsw types its rows as `Any`."""
        return cast(Tx, self)

    def each(self, sql: str, rows: Sequence[Any], /) -> list[bool]:
        """Return for each row whether the statement changed something.

        `executemany` fetches the rows one by one. So the generator sees the number of changes
        before each row.
        """
        counts: list[int] = []

        def counted() -> Iterator[Any]:
            for row in rows:
                counts.append(self.total_changes())
                yield row

        self.executemany(sql, counted())
        return [after > before for before, after in pairwise([*counts, self.total_changes()])]


def connect(path: str, busy_seconds: float) -> Connection:
    """Open a connection that reads and writes. Create the file if it does not exist.

    Raises Unreachable.
    """
    until = time.monotonic() + busy_seconds
    # The busy timeout does not apply while another process switches a new file to WAL mode or
    # closes its last connection.
    while True:
        try:
            return _open(path, busy_seconds)
        except Unreachable as e:
            if not isinstance(e.__cause__, apsw.BusyError) or time.monotonic() > until:
                raise
        time.sleep(0.01)


def _open(path: str, busy_seconds: float) -> Connection:
    try:
        if path != ":memory:":
            make_directory(Path(path).parent)
            create_file(path)
        c = Connection(
            path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | _ONE_THREAD
        )
        c.set_busy_timeout(int(busy_seconds * 1000))
        # Keys are not in order. So a commit changes about one page per row, and writes all of
        # that page.
        c.execute("PRAGMA page_size=4096")
        # One statement reads one snapshot: another process may be creating the file now.
        known, tables = c.execute(
            "SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id"
        ).get
        if known not in (0, APPLICATION_ID) or (known == 0 and tables):
            raise Unreachable(
                f"{path} is an SQLite database, but not one of Penstock's",
                hint="set PENSTOCK_STATE or the store URL to another path",
            )
        c.in_wal = path != ":memory:" and c.execute("PRAGMA journal_mode=WAL").get == "wal"
        # Only for a new file: the PRAGMA takes the write lock, and most processes only read.
        if not known:
            c.execute(f"PRAGMA application_id={APPLICATION_ID}")
        c.execute("PRAGMA cache_size=-65536; PRAGMA temp_store=MEMORY")
        c.execute(
            f"PRAGMA synchronous={'NORMAL' if c.in_wal else 'FULL'}; "
            "PRAGMA journal_size_limit=67108864"
        ).fetchall()
        # This PRAGMA returns a row, and APSW runs the statements behind it in the same string
        # only after the row is read. So it has its own call.
        c.execute("PRAGMA wal_autocheckpoint=0").fetchall()
        c.execute(
            "CREATE TABLE IF NOT EXISTS part"
            "(name TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID"
        )
        return c
    except (apsw.Error, OSError) as e:
        raise Unreachable(
            f"cannot open the store {path}: {e}",
            hint="check that the directory exists, is writable and has free space. "
            "If the file is damaged, restore a backup",
        ) from e


def read_only(path: str, busy_seconds: float) -> Connection:
    c = Connection(path, flags=apsw.SQLITE_OPEN_READONLY | _ONE_THREAD)
    c.set_busy_timeout(int(busy_seconds * 1000))
    return c
