"""File that is appended to, or truncated to a recorded mark. Base of the JSONL and CSV sinks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import zlib
from pathlib import Path

import msgspec

from penstock.errors import ConfigError, Unreachable
from penstock.locks import lock_descriptor, unlock_descriptor
from penstock.ports import Reopen
from penstock.private_files import DIRECTORY_MODE, FILE_MODE

_TAIL_BYTES = 4096  # bytes before the end of a file that are in its checksum
_MAX_MARKS = 32  # files of one sink whose marks are kept: one for each machine that wrote the sink


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """Recorded state of a file: its end, and values that identify the file."""

    at: int
    tail: int | None = None  # checksum of the bytes before `at`
    ino: int = 0
    columns: tuple[str, ...] = ()  # CSV
    host: str = ""
    # Marks of the files of other machines, the newest first. Those machines continue with them.
    others: tuple[Mark, ...] = ()
    path: str = ""  # absolute. `doctor` finds the mark of a deleted file with it.


def read_mark(text: str) -> Mark | None:
    """Return the mark, or None if the text is empty or invalid. A number is an offset."""
    try:
        mark = Mark(int(text)) if text.isdecimal() else msgspec.json.decode(text, type=Mark)
    except ValueError:
        return None
    return mark if mark.at >= 0 else None


class AppendFile:
    """A file that this process has locked between `open` and `close`. `at` is its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.private = False  # True: create it for its owner only, not with the umask
        self.at = 0
        self._fd = -1
        self._tail = b""
        self._others: tuple[Mark, ...] = ()

    # -- opening: call `open`, then `find_mark`, then `truncate` or `continue_at_end` -------------

    def open(self) -> None:
        """Open and lock the file. Create it and its directories if they are missing.

        Raise OSError, ConfigError if it is not a regular file, and Unreachable if another process
        writes to it.
        """
        self.close()
        while True:
            fd = self._descriptor()
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise ConfigError(
                        f"{self.path} is not a regular file",
                        hint="name a regular file: its end must be seekable after a crash",
                    )
                if not lock_descriptor(fd):
                    raise Unreachable(
                        f"another process or sink writes to {self.path}",
                        hint="use a different file for every sink",
                    )
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd
            if self._is_same_file():  # otherwise it was replaced between open and lock
                return
            self.close()

    def _descriptor(self) -> int:
        flags = os.O_RDWR | os.O_APPEND
        mode = FILE_MODE if self.private else 0o666
        while True:
            with contextlib.suppress(FileNotFoundError):
                return os.open(self.path, flags)
            real = Path(os.path.realpath(self.path))  # the target of a dangling link is created
            _make_directories(real.parent, DIRECTORY_MODE if self.private else 0o777)
            with contextlib.suppress(FileExistsError):
                fd = os.open(real, flags | os.O_CREAT | os.O_EXCL, mode)
                try:
                    sync_directory(real.parent)
                except BaseException:
                    os.close(fd)
                    raise
                return fd

    def is_at(self, mark: Mark) -> bool:
        """Return True if this is the file of the mark, and at least as long."""
        found = os.fstat(self._fd)
        if found.st_size < mark.at:
            return False
        if mark.at == 0:  # there are no bytes to compare
            return mark.ino in (0, found.st_ino)
        return mark.tail is None or zlib.crc32(self._read_tail(mark.at)) == mark.tail

    def find_mark(self, recorded: Mark | None) -> Mark | None:
        """Return the mark of this file, or None. The other marks are kept in new marks."""
        known = (
            []
            if recorded is None
            else [msgspec.structs.replace(recorded, others=()), *recorded.others]
        )
        fit = [
            mark
            for mark in known
            if self.is_at(mark) and (mark is known[0] or self._is_certain(mark))
        ]
        ino, host = os.fstat(self._fd).st_ino, socket.gethostname()
        # The bytes alone are not enough: rows that were written here but not recorded may since
        # have been recorded for the file of another machine.
        found = max(
            fit, key=lambda mark: (mark.host == host, mark.ino == ino, mark.at > 0), default=None
        )
        self._others = tuple([mark for mark in known if mark is not found][:_MAX_MARKS])
        return found

    def _is_certain(self, mark: Mark) -> bool:
        """Return True if an older mark is certainly of this file.

        A file that was assembled from older files may begin like one of them.
        """
        return mark.ino == os.fstat(self._fd).st_ino and (
            mark.at > 0 or mark.host == socket.gethostname()
        )

    def restore(self, text: str) -> None:
        """See ports.FileSink.restore."""
        if os.path.exists(self.path):
            try:
                self.open()
            except Unreachable:  # machines share this file, and another one writes to it
                return
            try:
                found = self.find_mark(read_mark(text))
                if found is not None:
                    self.truncate(found.at)
            finally:
                self.close()

    def truncate(self, at: int) -> None:
        """Remove rows that were written but not recorded."""
        if os.fstat(self._fd).st_size > at:
            os.ftruncate(self._fd, at)
            os.fsync(self._fd)
        self.at, self._tail = at, self._read_tail(at)

    def continue_at_end(self) -> None:
        """Append after the current contents, which stay unchanged.

        Add a newline if the last line is incomplete.
        """
        size = os.fstat(self._fd).st_size
        self.at, self._tail = size, self._read_tail(size)
        if self._tail and not self._tail.endswith(b"\n"):
            self.append(b"\n")

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    # -- writing -----------------------------------------------------------------------------------

    def append(self, data: bytes) -> None:
        """Append data. Durable when it returns.

        Raise OSError. The file is then truncated to its old size, if the disk allows it.
        """
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._fd, left) :]
            os.fdatasync(self._fd)
        except OSError as e:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.at)
            raise OSError(e.errno, e.strerror, str(self.path)) from e
        self.at += len(data)
        self._tail = (
            (self._tail + data)[-_TAIL_BYTES:] if len(data) < _TAIL_BYTES else data[-_TAIL_BYTES:]
        )

    def check(self) -> None:
        """Raise Reopen if the file was removed, replaced, truncated or written to.

        Data that is appended then would be lost or damaged.
        """
        if not self._is_same_file():
            raise Reopen(f"{self.path} was moved or removed")
        if self.size != self.at:
            raise Reopen(f"{self.path} was changed by another program")

    def mark(self, columns: tuple[str, ...] = ()) -> str:
        mark = Mark(
            self.at,
            zlib.crc32(self._tail),
            os.fstat(self._fd).st_ino,
            columns,
            socket.gethostname(),
            self._others,
            os.path.abspath(self.path),
        )
        return msgspec.json.encode(mark).decode()

    def changed(self, recorded: Mark, position: int) -> str:
        """Return the notice that the file is not the one of the recorded mark."""
        return (
            f"{self.path} was changed or removed by another program ({recorded.at} bytes after row "
            f"{position}, now {self.size}): appending at its end, missing rows are not rewritten"
        )

    def lines(self, end: int) -> Lines:
        return Lines(self._fd, end)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            unlock_descriptor(fd)

    def _is_same_file(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _read_tail(self, at: int) -> bytes:
        start = max(0, at - _TAIL_BYTES)
        tail = b""
        while len(tail) < at - start and (
            chunk := os.pread(self._fd, at - start - len(tail), start + len(tail))
        ):
            tail += chunk
        return tail


class AppendingSink:
    """Base of sinks that append to a file. The file belongs to the sink while it is open: data of
    other programs is removed like an unrecorded row after a crash.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path, self.notice = name, path, ""
        self._file = AppendFile(path)

    @property
    def private(self) -> bool:
        """See ports.LocalSink."""
        return self._file.private

    @private.setter
    def private(self, value: bool) -> None:
        self._file.private = value

    def restore(self, mark: str) -> None:
        self._file.restore(mark)

    def probe(self) -> None:
        """See ports.ProbedSink.probe."""
        probe_file(self.path)

    def close(self) -> None:
        self._file.close()


class Lines:
    """Lines from the start of an open file up to an offset, read in bounded chunks.

    The position of the descriptor does not change.
    """

    def __init__(self, fd: int, end: int) -> None:
        self._fd, self._end, self._at, self._buffer = fd, end, 0, b""

    def line(self, limit: int = 1 << 20) -> bytes:
        """Return the next line with its newline, at most about `limit` bytes, b"" at the end."""
        searched = 0
        while (found := self._buffer.find(b"\n", searched)) < 0 and len(self._buffer) < limit:
            searched = len(self._buffer)
            chunk = (
                os.pread(self._fd, min(1 << 18, self._end - self._at), self._at)
                if self._at < self._end
                else b""
            )
            if not chunk:
                found = len(self._buffer) - 1
                break
            self._at += len(chunk)
            self._buffer += chunk
        # Do not split CRLF.
        end = found + 1 if found >= 0 else len(self._buffer) - self._buffer.endswith(b"\r")
        line, self._buffer = self._buffer[:end], self._buffer[end:]
        return line


def probe_file(path: Path) -> None:
    """Raise OSError if the file cannot be opened for writing, or cannot be created."""
    with contextlib.suppress(FileNotFoundError):
        os.close(os.open(path, os.O_RDWR | os.O_APPEND))
        return
    directory = Path(os.path.realpath(path)).parent
    while not directory.exists():
        directory = directory.parent
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


def sync_directory(directory: Path) -> None:
    """Sync a directory. A new file name is only durable after this."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_directories(directory: Path, mode: int) -> None:
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
        if directory == directory.parent:
            break
    for each in reversed(missing):
        each.mkdir(mode, exist_ok=True)
        sync_directory(each.parent)
