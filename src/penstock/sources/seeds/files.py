"""Seed lists in local files: lists and opens the objects of a file, a directory or a glob."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath
from typing import Protocol

import msgspec

from penstock.errors import PenstockError, SourceDown

SUFFIXES = {"txt": "txt", "csv": "csv", "jsonl": "jsonl", "ndjson": "jsonl"}
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))
MAX_OBJECTS = 50_000  # of one source: its cursor has a position for each


class SeedObject(msgspec.Struct, frozen=True, kw_only=True):
    """A list that a scan found: a file or an S3 object."""

    name: str  # relative to its place
    path: str  # path for opening it
    stamp: bytes  # hash of its metadata: if it differs, the content may have changed
    size: int
    at: float  # last modification, in epoch seconds
    version: str | None = None  # None if only the content shows a change


class OpenObject(Protocol):
    """An open object. Its bytes do not change while it is open."""

    found: SeedObject

    def read_at(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes, none after the end.

        Raises ObjectUnreadable and ObjectChanged.
        """

    def close(self) -> None: ...


class SeedPlace(Protocol):
    """Place with seed lists. All methods block."""

    identity: str  # of the place, which is part of the ids of its findings

    def scan(self) -> tuple[list[SeedObject], list[ObjectUnreadable]]:
        """Return the objects in the order of their names, and errors of unreadable objects.

        Raises SourceDown if the place itself cannot be read.
        """

    def open(self, found: SeedObject) -> OpenObject:
        """Open an object. Raises ObjectUnreadable and ObjectChanged."""


class ObjectUnreadable(PenstockError):
    """One object cannot be read now. The others can."""


class ObjectChanged(Exception):
    """The object was replaced or deleted after the scan. The next round reads it again."""


def short_hash(text: str) -> bytes:
    """Return a hash of eight bytes, which stands for the text in a cursor."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def format_of(name: str) -> tuple[str, bool] | None:
    """Return the format and whether it is gzip by the suffix, or None for an unknown suffix."""
    stem = name.lower()
    compressed = stem.endswith(".gz")
    suffix = stem.removesuffix(".gz").rpartition(".")[2]
    return (SUFFIXES[suffix], compressed) if suffix in SUFFIXES and "." in stem else None


def is_wanted(name: str, *, any_name: bool) -> bool:
    """Return whether a name of a directory or prefix is read. `any_name`: its suffix may be any.

    Hidden files and names that programs give to incomplete files are skipped.
    """
    return (
        not any(part.startswith(".") for part in PurePath(name).parts)
        and not name.endswith((".part", ".tmp", ".temp", ".partial", ".crdownload", ".swp", "~"))
        and (any_name or format_of(name) is not None)
    )


def stamp(*parts: object) -> bytes:
    return short_hash("\0".join(map(str, parts)))


class Files:
    """Files on this machine.

    Links are followed only inside the directory. A file that is named in the URL may be anywhere.
    """

    def __init__(self, path: str, *, any_name: bool) -> None:
        """`any_name`: files of a directory are read regardless of their suffix."""
        self.path, self.identity, self._any_name = path, "file:" + path, any_name
        self.is_glob = glob.has_magic(path) and not os.path.lexists(path)

    @property
    def is_directory(self) -> bool:
        return self.path.endswith(os.sep) or os.path.isdir(self.path)

    def scan(self) -> tuple[list[SeedObject], list[ObjectUnreadable]]:
        try:
            if self.is_glob:
                root, names = self._expand_glob()
            elif self.is_directory:
                root = self.path
                with os.scandir(self.path) as entries:
                    names = self._limit(
                        e.name for e in entries if is_wanted(e.name, any_name=self._any_name)
                    )
            else:
                return [self._single()], []
        except ObjectUnreadable as e:
            raise SourceDown(e.message, hint=e.hint) from None
        except OSError as e:
            raise SourceDown(
                f"{self.path} cannot be read: {_reason(e)}",
                hint="check that it exists and that this user may read it",
            ) from None
        real_root = os.path.realpath(root)
        folders: dict[str, str] = {}  # real path of each folder
        found, failures = [], []
        for name in names:
            folder, base = os.path.split(os.path.join(root, name))
            try:
                if folder not in folders:
                    folders[folder] = _resolve_inside(folder, real_root)
                seen = self._stat(name, os.path.join(folders[folder], base), real_root)
                found += [] if seen is None else [seen]
            except ObjectUnreadable as e:
                failures.append(e)
            except ObjectChanged:
                continue  # deleted after it was listed
        return found, failures

    def _expand_glob(self) -> tuple[str, list[str]]:
        root = self.path
        while glob.has_magic(root):
            root = os.path.dirname(root)
        found = glob.iglob(os.path.relpath(self.path, root), root_dir=root, recursive=True)
        return root, self._limit(name for name in found if is_wanted(name, any_name=True))

    def _limit(self, names: Iterator[str]) -> list[str]:
        listed = list(islice(names, MAX_OBJECTS + 1))
        if len(listed) > MAX_OBJECTS:
            raise ObjectUnreadable(
                f"there are more than {MAX_OBJECTS} files in {self.path}",
                hint="move files that were read elsewhere, or use several sources",
            )
        return sorted(listed)

    def _single(self) -> SeedObject:
        try:
            return _found(os.path.basename(self.path), self.path, os.stat(self.path))
        except FileNotFoundError:
            raise ObjectUnreadable(
                f"there is no {self.path}", hint="create it, or correct the path of the source"
            ) from None

    def _stat(self, name: str, path: str, real_root: str) -> SeedObject | None:
        """Return the object, or None for a directory.

        There may be thousands of files in every round, so a file takes one system call. Only a
        link takes more.
        """
        with _errors(path):
            state = os.lstat(path)
            if stat.S_ISLNK(state.st_mode):
                path = _resolve_inside(path, real_root)
                state = os.stat(path)
        return None if stat.S_ISDIR(state.st_mode) else _found(name, path, state)

    def open(self, found: SeedObject) -> OpenObject:
        named = found.path == self.path
        with _errors(found.path):
            descriptor = os.open(
                found.path,
                os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if named else os.O_NOFOLLOW),
            )
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise ObjectUnreadable(
                    f"{display_path(found.path)} is not a file",
                    hint="name a file, a directory or a glob",
                )
            return OpenFile(descriptor, _found(found.name, found.path, state))
        except BaseException:
            os.close(descriptor)
            raise


class OpenFile:
    def __init__(self, descriptor: int, found: SeedObject) -> None:
        self._descriptor, self.found = descriptor, found

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to the size that the file had when it was opened.

        Otherwise a file that grows all the time would never end.
        """
        with _errors(self.found.path, hint="check the disk"):
            return os.pread(self._descriptor, max(0, min(length, self.found.size - offset)), offset)

    def close(self) -> None:
        os.close(self._descriptor)


def display_path(path: str) -> str:
    """Return a path as text for messages and storage. A file name may contain any bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@contextlib.contextmanager
def _errors(path: str, hint: str = "let this user read it") -> Iterator[None]:
    """Raise ObjectChanged if the file is missing, and ObjectUnreadable for any other error."""
    try:
        yield
    except FileNotFoundError:
        raise ObjectChanged from None
    except OSError as e:
        raise ObjectUnreadable(
            f"{display_path(path)} cannot be read: {_reason(e)}", hint=hint
        ) from None


def _resolve_inside(path: str, real_root: str) -> str:
    real = os.path.realpath(path)
    if os.path.commonpath([real, real_root]) != real_root:
        raise ObjectUnreadable(
            f"{display_path(path)} is a link to a path outside {display_path(real_root)}",
            hint="copy the file there, or add a source for it",
        )
    return real


def _found(name: str, path: str, state: os.stat_result) -> SeedObject:
    # Without the device number, which may change when the machine restarts.
    hashed = stamp(state.st_ino, state.st_size, state.st_mtime_ns)
    return SeedObject(
        name=display_path(name), path=path, stamp=hashed, size=state.st_size, at=state.st_mtime
    )


def _reason(e: OSError) -> str:
    return (e.strerror or str(e)).lower()
