"""Locks on files, by which processes of one machine know who is alive; a pid may be reused, a lock
may not. No waiting, no leases.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.ports import Transaction

# bytes; written when the file is made, so that a note on a full disk overwrites and allocates
# nothing
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
    """Take the exclusive lock of an open file, never waiting. True: held until `unlock_descriptor`,
    or until this process is gone. Where the file system knows no locks this is True as well: the
    caller's own lock file has to do.
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
    """Give the lock back and close it. Nothing to do in a forked child, where it is closed already
    and the number may be another file's.
    """
    if fd in _private:
        _private.discard(fd)
        with contextlib.suppress(OSError):
            fcntl.flock(
                fd, fcntl.LOCK_UN
            )  # a child forked this instant has a copy, and closing ours would leave the lock with it
        os.close(fd)


class Lost(Exception):
    """The lock is another's by now: what was to be noted under it is not."""


class FileLock:
    """An exclusive lock on a file of its own. Held by one object of one process; ends with it,
    however it ends. Implements Lock.
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
        """It ends with the process, never before."""

    def try_acquire(self) -> bool:
        """Never waits. Raises OSError where the file cannot be made or locked at all."""
        if self.held:
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_at(
                    fd, self.path
                ):  # removed between open and lock: whoever comes next would lock another file
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
        """Leave a line for those who do not hold it. Raises OSError; the lock does not depend on
        it.
        """
        raw = text.encode("utf-8", "replace").replace(b"\n", b" ")[: _NOTE - 1]
        os.pwrite(self._fd, raw.ljust(_NOTE - 1) + b"\n", 0)

    def status(self) -> str:
        return note_of(self.path)

    def release(self, *, remove: bool = False) -> None:
        if not self.held:
            return
        if remove:  # while still held, so nobody's fresh file is removed
            with contextlib.suppress(OSError):
                self.path.unlink()
        fd, self._fd = self._fd, -1
        unlock_descriptor(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def holder_alive(path: Path | str) -> bool:
    """Somebody holds it now. Looks with a shared lock, so that two who look at once do not take
    each other for the holder.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
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
    """The holder's last note; "" where there is none. Of use only while somebody holds the lock."""
    try:
        with open(path, "rb") as f:
            return f.read(_NOTE).decode("utf-8", "replace").strip()
    except OSError:
        return ""


class WorkerLock:
    """A worker's sign of life: `<dir>/<worker_id>.alive`, locked as long as its process lives.
    Worker ids are not used twice at a time.
    """

    def __init__(self, directory: Path | str, worker_id: str) -> None:
        self.worker_id = worker_id
        self._lock = FileLock(_sign(directory, worker_id))

    def acquire(self, *, patience: float = 2.0) -> bool:
        """False: a living process goes by this id. Blocks a few milliseconds where somebody is just
        looking.
        """
        until = time.monotonic() + patience
        while not self._lock.try_acquire():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def release(self) -> None:
        self._lock.release(remove=True)


def worker_alive(directory: Path | str, worker_id: str) -> bool:
    return holder_alive(_sign(directory, worker_id))


def dead_workers(directory: Path | str) -> list[str]:
    """Those that went without saying goodbye, until `forget_worker`."""
    signs = sorted(Path(directory).glob("*.alive"))
    return [sign.name.removesuffix(".alive") for sign in signs if not holder_alive(sign)]


def forget_worker(directory: Path | str, worker_id: str) -> bool:
    """Remove a dead worker's sign, after its work was taken back. False: it lives (again)."""
    lock = FileLock(_sign(directory, worker_id))
    if not lock.try_acquire():
        return False
    lock.release(remove=True)
    return True


def _sign(directory: Path | str, worker_id: str) -> Path:
    if not worker_id or "/" in worker_id or "\0" in worker_id or worker_id.startswith("."):
        raise ValueError(f"a worker id names a file: {worker_id!r}")
    return Path(directory) / f"{worker_id}.alive"
