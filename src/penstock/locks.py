"""File locks that show which processes of this machine are alive.

A process id may be reused, but a lock ends with its process. Taking a lock never waits, except in
`WorkerLock.acquire`. Locks have no leases.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import Unreachable
from penstock.private_files import make_directory, open_own

if TYPE_CHECKING:
    from penstock.ports import Transaction

# Bytes of the status text. They are written when the lock is taken. So a later status text
# overwrites them and needs no disk space, even if the disk is full.
_NOTE = 512
_private: set[int] = set()  # descriptors that hold a lock


def _close_in_child() -> None:
    # A forked child shares the open file, so it would keep the lock of a parent that was killed.
    # Closing its copy takes nothing from the parent.
    for fd in list(_private):
        with contextlib.suppress(OSError):
            os.close(fd)
    _private.clear()


os.register_at_fork(after_in_child=_close_in_child)


def lock_descriptor(fd: int) -> bool:
    """Take the exclusive lock of an open file. Never waits.

    Return True if the lock is held. It ends with `unlock_descriptor` or with this process. Return
    True also if the file system has no locks. Then only the caller's separate lock file protects
    the file.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    _private.add(fd)
    return True


def unlock_descriptor(fd: int) -> None:
    """Release the lock and close the file.

    Does nothing in a forked child. There the descriptor is already closed, and its number may
    belong to another file.
    """
    if fd in _private:
        _private.discard(fd)
        with contextlib.suppress(OSError):
            # Unlock before closing. A child that was just forked may still have a copy of the
            # descriptor, which would keep the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


class Lost(Exception):
    """Another process has taken the lock. The transaction under the lock is rolled back."""


class FileLock:
    """An exclusive lock on a separate lock file. Implements ports.Lock.

    One object of one process holds the lock. The lock ends with the process, even if the process is
    killed.
    """

    shared = False

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._fd = -1

    @property
    def held(self) -> bool:
        return self._fd in _private

    @property
    def here(self) -> bool:
        return self.held

    async def take(self) -> bool:
        return self.try_acquire()

    def verify(self, tx: Transaction) -> None:
        """Do nothing: only processes of this machine compete for the lock."""

    def lose(self) -> None:
        """Do nothing: another process cannot take the lock while this process holds it."""

    def try_acquire(self) -> bool:
        """Try to take the lock. Return False if another process holds it. Never waits.

        Raises OSError if the file cannot be created or locked. Raises Unreachable if it is a link
        or belongs to another user.
        """
        if self.held:
            return True
        make_directory(self.path.parent)
        while True:
            fd = open_own(self.path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file was removed between open and lock. The next process would create and lock
                # another file.
                if not _is_at(fd, self.path):
                    os.close(fd)
                    continue
                _private.add(fd)
                self._fd = fd
                with contextlib.suppress(OSError):
                    self.note("")
                return True
            except OSError as e:
                os.close(fd)
                if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return False
                raise

    def note(self, text: str) -> None:
        """Write the status text, which other processes can read.

        Raises OSError if the text cannot be written. The lock stays held.
        """
        raw = text.encode("utf-8", "replace").replace(b"\n", b" ")[: _NOTE - 1]
        os.pwrite(self._fd, raw.ljust(_NOTE - 1) + b"\n", 0)

    def touch(self) -> None:
        """Set the time of the lock file to now, if the lock is held."""
        if self.held:
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    def status(self) -> str:
        return note_of(self.path)

    def release(self, *, remove: bool = False) -> None:
        if not self.held:
            return
        if remove:  # while the lock is held, so that a new file of another process is not removed
            with contextlib.suppress(OSError):
                self.path.unlink()
        fd, self._fd = self._fd, -1
        unlock_descriptor(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Return True if the open file is the file at this path."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def holder_alive(path: Path | str) -> bool:
    """Return True if a process holds the lock.

    Checks with a shared lock, so that two checks at the same time do not report each other. Raises
    Unreachable if the file is a link or belongs to another user.
    """
    try:
        fd = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
        raise
    finally:
        os.close(fd)
    return False


def note_of(path: Path | str) -> str:
    """Return the last status text, or "". It is valid only while a process holds the lock."""
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as f:
            return f.read(_NOTE).decode("utf-8", "replace").strip()
    except (OSError, Unreachable):
        return ""


class WorkerLock:
    """Lock file of a worker: `<dir>/<worker_id>.alive`, locked while its process lives.

    Two live processes cannot have the same worker id.
    """

    def __init__(self, directory: Path | str, worker_id: str, *, status: str = "") -> None:
        """`status` is the status text of the lock file."""
        self.worker_id, self._status = worker_id, status
        self._lock = FileLock(_sign(directory, worker_id))

    def acquire(self, *, patience: float = 2.0) -> bool:
        """Take the lock. Return False if a live process has this id.

        Retries for up to `patience` seconds, because `holder_alive` of another process holds a
        shared lock for a few milliseconds. Blocking.
        """
        until = time.monotonic() + patience
        while not self._lock.try_acquire():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        with contextlib.suppress(OSError):
            self._lock.note(self._status)
        return True

    def beat(self) -> None:
        """Set the time of the lock file to now. `silence` reads it."""
        self._lock.touch()

    def release(self) -> None:
        self._lock.release(remove=True)


def silence(sign: Path, now: float) -> float:
    """Return the seconds since the last heartbeat of a worker. Return 0 if it has no lock file."""
    try:
        return now - sign.stat().st_mtime
    except OSError:
        return 0.0


def worker_alive(directory: Path | str, worker_id: str) -> bool:
    return holder_alive(_sign(directory, worker_id))


def dead_workers(directory: Path | str) -> list[str]:
    """Return the ids of crashed workers whose lock files `forget_worker` has not removed."""
    signs = sorted(Path(directory).glob("*.alive"))
    return [sign.name.removesuffix(".alive") for sign in signs if not holder_alive(sign)]


def live_workers(directory: Path | str) -> dict[str, str]:
    """Return the ids of live workers of this machine, with the status texts of their lock files."""
    signs = sorted(Path(directory).glob("*.alive"))
    return {s.name.removesuffix(".alive"): note_of(s) for s in signs if holder_alive(s)}


def forget_worker(directory: Path | str, worker_id: str) -> bool:
    """Remove the lock file of a crashed worker, after its leases were expired.

    Return False if a worker with this id is alive.
    """
    lock = FileLock(_sign(directory, worker_id))
    if not lock.try_acquire():
        return False
    lock.release(remove=True)
    return True


def _sign(directory: Path | str, worker_id: str) -> Path:
    """Return the path of a worker's lock file. Raise ValueError if the id cannot be a file name."""
    if not worker_id or "/" in worker_id or "\0" in worker_id or worker_id.startswith("."):
        raise ValueError(f"a worker id names a file: {worker_id!r}")
    return Path(directory) / f"{worker_id}.alive"
