"""Where seed lists lie on this machine: a file, a directory, a glob. What is found there and how
its bytes are read; not what they mean.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from pathlib import PurePath
from typing import Protocol

import msgspec

from penstock.errors import PenstockError, SourceDown
from penstock.sources.seeds.formats import format_of, short

MOST = 50_000  # objects of one source: its position has a line for each


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """An object with lines, as it was seen."""

    name: str  # within its place
    path: str  # what opens it
    stamp: bytes  # another one, and it may have changed
    size: int
    at: float
    version: str | None = None  # None: only its content tells


class Opened(Protocol):
    """One object, the same bytes for as long as it is open."""

    found: Found

    def read_at(self, offset: int, length: int) -> bytes:
        """At most so much; nothing behind the end. Raises Unread, Changed."""

    def close(self) -> None: ...


class Place(Protocol):
    """All of its methods block."""

    identity: str  # of what lies there: part of an event's cause

    def scan(self) -> tuple[list[Found], list[Unread]]:
        """In the order of names, and what cannot be read though it should be. Raises SourceDown
        when the place itself cannot.
        """

    def open(self, found: Found) -> Opened:
        """Raises Unread, Changed."""


class Unread(PenstockError):
    """One object cannot be read now; the others can."""


class Changed(Exception):
    """It is not what was found any more: the next round sees what it is now."""


def passed_over(name: str) -> bool:
    """Hidden and half-written: names that a writer gives to what is not ready."""
    parts = PurePath(name).parts
    return any(part.startswith(".") for part in parts) or name.endswith(
        (".part", ".tmp", ".temp", ".partial", ".crdownload", ".swp", "~")
    )


def stamp(*parts: object) -> bytes:
    return short("\0".join(map(str, parts)))


class Files:
    """Links are followed as long as they stay in the directory; a file that was named by itself may
    lie anywhere.
    """

    def __init__(self, path: str, *, any_name: bool) -> None:
        """`any_name`: what is in a directory counts whatever it is called."""
        self.path, self.identity, self._any_name = path, "file:" + path, any_name
        self.is_glob = glob.has_magic(path) and not os.path.lexists(path)

    @property
    def is_directory(self) -> bool:
        return self.path.endswith(os.sep) or os.path.isdir(self.path)

    def scan(self) -> tuple[list[Found], list[Unread]]:
        try:
            if self.is_glob:
                root, names = self._globbed()
            elif self.is_directory:
                root = self.path
                with os.scandir(self.path) as entries:
                    names = self._counted(
                        e.name
                        for e in entries
                        if not passed_over(e.name) and (self._any_name or format_of(e.name))
                    )
            else:
                return [self._named()], []
        except Unread as e:
            raise SourceDown(e.message, hint=e.hint) from None
        except OSError as e:
            raise SourceDown(
                f"{self.path} cannot be read: {_why(e)}",
                hint="see that it exists and that this user may read it",
            ) from None
        inside = os.path.realpath(root)
        folders: dict[str, str] = {}  # by how they were reached: where they really are
        found, troubles = [], []
        for name in names:
            folder, base = os.path.split(os.path.join(root, name))
            try:
                if folder not in folders:
                    folders[folder] = _inside(folder, inside)
                seen = self._seen(name, os.path.join(folders[folder], base), inside)
                found += [] if seen is None else [seen]
            except Unread as e:
                troubles.append(e)
            except Changed:
                continue  # gone since it was listed
        return found, troubles

    def _globbed(self) -> tuple[str, list[str]]:
        root = self.path
        while glob.has_magic(root):
            root = os.path.dirname(root)
        found = glob.iglob(os.path.relpath(self.path, root), root_dir=root, recursive=True)
        return root, self._counted(name for name in found if not passed_over(name))

    def _counted(self, names: Iterator[str]) -> list[str]:
        listed: list[str] = []
        for name in names:
            listed.append(name)
            if len(listed) > MOST:
                raise Unread(
                    f"there are more than {MOST} files in {self.path}",
                    hint="move those away that were read, or divide them among several sources",
                )
        return sorted(listed)

    def _named(self) -> Found:
        try:
            return _found(os.path.basename(self.path), self.path, os.stat(self.path))
        except FileNotFoundError:
            raise Unread(
                f"there is no {self.path}", hint="create it, or correct the path of the source"
            ) from None

    def _seen(self, name: str, path: str, inside: str) -> Found | None:
        """None: a directory. One look at most of them: there may be thousands, every few seconds."""
        try:
            state = os.lstat(path)
            if stat.S_ISLNK(state.st_mode):
                path = _inside(path, inside)
                state = os.stat(path)
        except FileNotFoundError:
            raise Changed from None
        except OSError as e:
            raise Unread(
                f"{shown(path)} cannot be read: {_why(e)}", hint="let this user read it"
            ) from None
        return None if stat.S_ISDIR(state.st_mode) else _found(name, path, state)

    def open(self, found: Found) -> Opened:
        try:
            named = found.path == self.path
            descriptor = os.open(
                found.path,
                os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if named else os.O_NOFOLLOW),
            )
        except FileNotFoundError:
            raise Changed from None
        except OSError as e:
            raise Unread(
                f"{shown(found.path)} cannot be read: {_why(e)}", hint="let this user read it"
            ) from None
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise Unread(
                    f"{shown(found.path)} is no file", hint="name a file, a directory or a glob"
                )
            return OpenFile(descriptor, _found(found.name, found.path, state))
        except BaseException:
            os.close(descriptor)
            raise


class OpenFile:
    def __init__(self, descriptor: int, found: Found) -> None:
        self._descriptor, self.found = descriptor, found

    def read_at(self, offset: int, length: int) -> bytes:
        """Up to the size it had when it was opened: one that grows for ever does not keep us for
        ever.
        """
        try:
            return os.pread(self._descriptor, max(0, min(length, self.found.size - offset)), offset)
        except OSError as e:
            raise Unread(
                f"{shown(self.found.path)} cannot be read: {_why(e)}",
                hint="see whether its disk is well",
            ) from None

    def close(self) -> None:
        os.close(self._descriptor)


def shown(path: str) -> str:
    """A name may be any bytes; what is stored and printed is text."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _inside(path: str, inside: str) -> str:
    real = os.path.realpath(path)
    if os.path.commonpath([real, inside]) != inside:
        raise Unread(
            f"{shown(path)} is a link that leads out of {shown(inside)}",
            hint="copy the file there, or name it as a source of its own",
        )
    return real


def _found(name: str, path: str, state: os.stat_result) -> Found:
    seen = stamp(
        state.st_ino, state.st_size, state.st_mtime_ns
    )  # no device: its number changes when a machine starts again
    return Found(name=shown(name), path=path, stamp=seen, size=state.st_size, at=state.st_mtime)


def _why(e: OSError) -> str:
    return (e.strerror or str(e)).lower()
