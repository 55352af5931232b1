"""Checks before an SQLite store is opened: the file system, and the WAL-reset bug of SQLite."""

from __future__ import annotations

import os
import re
from pathlib import Path

import apsw

from penstock.errors import Unreachable
from penstock.locks import FileLock

# First version without the WAL-reset bug. Versions 3.7.0 to 3.51.2 may corrupt a WAL that several
# processes write and checkpoint.
WAL_RESET_FIXED = (3, 51, 3)
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.s3fs",
    }
)


def file_system_of(path: Path, mountinfo: str = "/proc/self/mountinfo") -> str:
    """Return the type of the file system of `path`, or "" if it cannot be determined."""
    try:
        real = os.path.realpath(path)
        best, kind = "", ""
        with open(mountinfo, encoding="utf-8", errors="replace") as f:
            for line in f:
                left, _, right = line.partition(" - ")
                # Space, tab, newline and backslash are written as octal escapes.
                point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split()[4])
                if (real == point or real.startswith(point.rstrip("/") + "/")) and len(
                    point
                ) >= len(best):
                    best, kind = point, right.split()[0]
        return kind
    except (OSError, IndexError, UnicodeError):
        return ""


def refuse_network_file_system(path: Path) -> None:
    kind = file_system_of(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise Unreachable(
            f"{path} is on a network file system ({kind}), where SQLite's locks are not reliable",
            hint="put the state on a local disk (PENSTOCK_STATE=/var/lib/penstock)",
        )


def sqlite_version() -> tuple[int, ...]:
    return tuple(int(x) for x in apsw.sqlite_lib_version().split("."))


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    return (3, 7, 0) <= version < WAL_RESET_FIXED


def single_writer_if_needed(path: Path) -> FileLock | None:
    """Lock the file for one process if SQLite has the WAL-reset bug, and return the lock.

    With one writing process, the bug has no effect.
    """
    if not has_wal_reset_bug(sqlite_version()):
        return None
    lock = FileLock(path.with_name(path.name + ".single"))
    if not lock.try_acquire():
        raise Unreachable(
            f"SQLite {apsw.sqlite_lib_version()} has the WAL-reset bug, "
            f"so only one process may write {path}, and another process does",
            hint="run: pip install --upgrade apsw (3.51.3 or newer), or stop the other process",
        )
    return lock
