"""A file that is only appended to, or cut back to a noted mark; the ground under the JSON-lines and
CSV sinks. Knows nothing of records.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import zlib
from pathlib import Path

import msgspec

from penstock.errors import ConfigError, Unreachable
from penstock.locks import lock_descriptor, unlock_descriptor
from penstock.ports import Reopen

_TAIL = 4096
_FILES = 32  # of one sink whose marks are kept: one for each machine that ever wrote it


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the noted state ends, and how to know that a file is the one it was noted of."""

    at: int
    tail: int | None = None  # checksum of the bytes just before `at`
    ino: int = 0
    columns: tuple[str, ...] = ()  # CSV
    host: str = ""
    others: tuple[
        Mark, ...
    ] = ()  # of the files that other machines wrote, for when they go on with theirs; the newest first

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def read_mark(text: str) -> Mark | None:
    """None: nothing was ever noted (or nothing we understand). A bare number is an offset."""
    try:
        mark = Mark(int(text)) if text.isdecimal() else msgspec.json.decode(text, type=Mark)
    except ValueError:
        return None
    return mark if mark.at >= 0 else None


class AppendFile:
    """Open between `open` and `close`; then `at` is its end, and nobody else's process writes to
    it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0
        self._fd = -1
        self._tail = b""
        self._others: tuple[Mark, ...] = ()

    # -- opening: the caller looks at it with `is_at`, then calls `cut` or `adopt` -----------------

    def open(self) -> None:
        """Made if it is missing, its directories too. Raises OSError, ConfigError (no file),
        Unreachable (another process writes to it).
        """
        self.close()
        while True:
            fd = self._descriptor()
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise ConfigError(
                        f"{self.path} is no ordinary file",
                        hint="name a file; its end must be seekable to survive a crash",
                    )
                if not lock_descriptor(fd):
                    raise Unreachable(
                        f"another process or sink writes to {self.path}",
                        hint="give every sink a file of its own",
                    )
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd
            if self._in_place():  # else replaced between open and lock
                return
            self.close()

    def _descriptor(self) -> int:
        flags = os.O_RDWR | os.O_APPEND
        while True:
            with contextlib.suppress(FileNotFoundError):
                return os.open(self.path, flags)
            real = Path(os.path.realpath(self.path))  # a dangling link: made where it points
            _make_directories(real.parent)
            with contextlib.suppress(FileExistsError):
                fd = os.open(real, flags | os.O_CREAT | os.O_EXCL, 0o666)
                try:
                    sync_directory(real.parent)
                except BaseException:
                    os.close(fd)
                    raise
                return fd

    def is_at(self, mark: Mark) -> bool:
        """The file is the one the mark was noted of, and at least as long."""
        found = os.fstat(self._fd)
        if found.st_size < mark.at:
            return False
        if mark.at == 0:  # no bytes to know it by
            return mark.ino in (0, found.st_ino)
        return mark.tail is None or zlib.crc32(self._read_tail(mark.at)) == mark.tail

    def own(self, noted: Mark | None) -> Mark | None:
        """Which of the noted marks is this file's. The others are kept in those we make."""
        known = [] if noted is None else [msgspec.structs.replace(noted, others=()), *noted.others]
        fit = [
            mark for mark in known if self.is_at(mark) and (mark is known[0] or self._is_old(mark))
        ]
        ino, host = os.fstat(self._fd).st_ino, socket.gethostname()
        # Bytes alone do not tell: rows that were written here and not noted may have been noted of
        # another machine's file since.
        found = max(
            fit, key=lambda mark: (mark.host == host, mark.ino == ino, mark.at > 0), default=None
        )
        self._others = tuple([mark for mark in known if mark is not found][:_FILES])
        return found

    def _is_old(self, mark: Mark) -> bool:
        """More is asked of a mark that is not the last: a file somebody put together from older
        ones may begin like one of them.
        """
        return mark.ino == os.fstat(self._fd).st_ino and (
            mark.at > 0 or mark.host == socket.gethostname()
        )

    def restore(self, text: str) -> None:
        """As ports.FileSink.restore."""
        if os.path.exists(self.path):
            try:
                self.open()
            except Unreachable:  # a file that machines share, and another of them is at it
                return
            try:
                found = self.own(read_mark(text))
                if found is not None:
                    self.cut(found.at)
            finally:
                self.close()

    def cut(self, at: int) -> None:
        """Remove what was written and never noted."""
        if os.fstat(self._fd).st_size > at:
            os.ftruncate(self._fd, at)
            os.fsync(self._fd)
        self.at, self._tail = at, self._read_tail(at)

    def adopt(self) -> None:
        """Go on at its real end, on a line of its own; nothing in it is touched."""
        size = os.fstat(self._fd).st_size
        self.at, self._tail = size, self._read_tail(size)
        if self._tail and not self._tail.endswith(b"\n"):
            self.append(b"\n")

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    # -- writing -----------------------------------------------------------------------------------

    def append(self, data: bytes) -> None:
        """Durable when it returns. Raises OSError; then the file is as it was, as far as the disk
        lets us.
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
        self._tail = (self._tail + data)[-_TAIL:] if len(data) < _TAIL else data[-_TAIL:]

    def check(self) -> None:
        """Raises Reopen where the file was removed, replaced, cut or written to: what we append
        would be lost or torn.
        """
        if not self._in_place():
            raise Reopen(f"{self.path} was moved or removed")
        if self.size != self.at:
            raise Reopen(f"{self.path} was changed by somebody else")

    def mark(self, columns: tuple[str, ...] = ()) -> str:
        return Mark(
            self.at,
            zlib.crc32(self._tail),
            os.fstat(self._fd).st_ino,
            columns,
            socket.gethostname(),
            self._others,
        ).text()

    def lines(self, end: int) -> contextlib.closing[Lines]:
        return contextlib.closing(Lines(self._fd, end))

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            unlock_descriptor(fd)

    def _in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _read_tail(self, at: int) -> bytes:
        start = max(0, at - _TAIL)
        tail = b""
        while len(tail) < at - start and (
            piece := os.pread(self._fd, at - start - len(tail), start + len(tail))
        ):
            tail += piece
        return tail


class Lines:
    """Lines from the start of an open file up to an offset, in bounded pieces; leaves the
    descriptor as it is.
    """

    def __init__(self, fd: int, end: int) -> None:
        self._fd, self._end, self._at, self._buffer = fd, end, 0, b""

    def line(self, limit: int = 1 << 20) -> bytes:
        """Up to and with the next newline, at most about `limit` bytes; b"" at the end."""
        searched = 0
        while (found := self._buffer.find(b"\n", searched)) < 0 and len(self._buffer) < limit:
            searched = len(self._buffer)
            piece = (
                os.pread(self._fd, min(1 << 18, self._end - self._at), self._at)
                if self._at < self._end
                else b""
            )
            if not piece:
                found = len(self._buffer) - 1
                break
            self._at += len(piece)
            self._buffer += piece
        cut = (
            found + 1 if found >= 0 else len(self._buffer) - self._buffer.endswith(b"\r")
        )  # CRLF stays together
        line, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return line

    def close(self) -> None:
        self._buffer = b""


def sync_directory(directory: Path) -> None:
    """A name in a directory is durable only after this."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_directories(directory: Path) -> None:
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
        if directory == directory.parent:
            break
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_directory(each.parent)
