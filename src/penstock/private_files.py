"""Creates the files and directories of the state, which only their owner may read.

The state holds pages, rows of databases and events of the user. A umask of 022 would show them to
every user of the machine.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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


def is_below(path: Path, directory: Path) -> bool:
    """Return True if the path is in the directory, after links are resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))
