"""Creates and opens the files and directories of the state, which only their owner may read.

The state holds pages, rows of databases and events of the user. A umask of 022 would show them to
every user of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from penstock.errors import Unreachable

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600


def make_directory(path: Path | str) -> None:
    """Create a directory and its missing parents for their owner only.

    A directory that exists keeps its mode: `penstock doctor --repair` changes it.
    """
    path = Path(path)
    missing = []
    while not path.is_dir():
        missing.append(path)
        if path == path.parent:
            break
        path = path.parent
    for each in reversed(missing):
        each.mkdir(DIRECTORY_MODE, exist_ok=True)


def create_file(path: Path | str) -> None:
    """Create an empty file for its owner only. Do nothing if the path exists.

    SQLite gives its -wal and -shm files the mode of the database. An existing file is not opened,
    because closing it would drop the locks that SQLite holds on it in this process.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def open_own(path: Path | str, flags: int) -> int:
    """Open a regular file of this user. With O_CREAT, create it for its owner only.

    In a directory such as /tmp, another user could have put a link or a file there first. Raises
    Unreachable for them, and OSError.
    """
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, safe, FILE_MODE)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.EMLINK):
            raise _not_ours(path, "is a link") from None
        raise
    try:
        file, directory = os.fstat(fd), os.stat(os.path.dirname(os.path.abspath(path)))
        if not stat.S_ISREG(file.st_mode):
            raise _not_ours(path, "is not a regular file")
        # Root may look at the state of a user, whose files belong to the owner of the directory.
        if file.st_uid not in (os.geteuid(), directory.st_uid):
            raise _not_ours(path, f"belongs to another user (uid {file.st_uid})")
        if file.st_nlink > 1 and directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _not_ours(path, "has a second name, so it may be another file of yours")
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _not_ours(path: Path | str, what: str) -> Unreachable:
    return Unreachable(
        f"{path} {what}, so Penstock does not use it",
        hint=f"find out who made it (ls -l {path}), then delete it. "
        "Keep the state in a directory that only you may write to",
    )


def is_below(path: Path, directory: Path) -> bool:
    """Return True if the path is in the directory, after links are resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))
