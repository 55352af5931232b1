"""Modes of the state's files for `penstock doctor`: only their owner may use them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.operate.figures import plural
from penstock.operate.findings import Finding

if TYPE_CHECKING:
    from penstock.config.schema import Config

OTHERS = 0o007  # permission bits of other users
NOT_OWNER = 0o077  # permission bits of the group and of other users
OWNER = 0o700
SQLITE_FILES = ("", "-wal", "-shm", "-journal")


class Loose(msgspec.Struct, frozen=True):
    """A file or directory of the state that more than its owner may use."""

    path: Path
    mode: int


def check_permissions(config: Config, *, repair: bool) -> Finding | None:
    """Find files of the state that other users may read. With `repair`, take that right away.

    Return None if no state exists yet.
    """
    roots = [path for path in _roots(config) if path.exists()]
    found = [loose for root in roots for loose in _loose(root)]
    if not roots:
        return None
    if not found:
        return Finding("permissions", "ok", "only its owner may read the state")
    if repair:
        left = list(_repair(found))
        done = len(found) - len(left)
        if not left:
            return Finding(
                "permissions",
                "ok",
                f"repaired: only their owner may use {plural(done, 'file')} of the state",
                code="permissions.repaired",
            )
        return Finding(
            "permissions",
            "fail",
            f"{left[0].path} has mode {left[0].mode:04o} and belongs to {_owner(left[0].path)}, so "
            f"its mode cannot be changed ({plural(len(left), 'file')} of this kind)",
            "run `penstock doctor --repair` as the owner of the state",
            "permissions.state",
        )
    # A directory that others cannot enter protects the files in it.
    state = Path(os.path.realpath(config.state.dir))
    closed = state.exists() and not stat.S_IMODE(state.stat().st_mode) & OTHERS
    exposed = any(
        loose.mode & OTHERS
        and loose.path.is_file()
        and not (closed and loose.path.is_relative_to(state))
        for loose in found
    )
    return Finding(
        "permissions",
        "fail" if exposed else "warn",
        f"other users of this machine may use {plural(len(found), 'file')} of the state, such as "
        f"{found[0].path} (mode {found[0].mode:04o})",
        "penstock doctor --repair",
        "permissions.state",
    )


def _roots(config: Config) -> Iterator[Path]:
    """Return the state directory, and the files and directories of stores outside it."""
    state = config.state.dir
    yield state
    topics = config.topics
    urls = (config.ledger.url, config.claims.url, topics.requests, topics.pages, topics.records)
    for url in dict.fromkeys((*urls, config.pages.url)):
        scheme, _, rest = url.partition(":")
        path = Path(rest.removeprefix("//").partition("?")[0])
        if scheme not in ("sqlite", "file") or not path.is_absolute():
            continue
        if not path.is_relative_to(state):
            suffixes = SQLITE_FILES if scheme == "sqlite" else ("",)
            yield from (path.with_name(path.name + suffix) for suffix in suffixes)


def _loose(root: Path) -> Iterator[Loose]:
    """Return the regular files and directories at and below `root` with a wrong mode.

    The root may be a link that the operator made. Other links are not followed.
    """
    real = Path(os.path.realpath(root))
    paths: Iterable[Path] = [real]
    if real.is_dir():
        paths = [real, *(Path(at) / n for at, ds, fs in os.walk(real) for n in (*ds, *fs))]
    for path in paths:
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:  # a worker has removed the file
            continue
        if (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and mode & NOT_OWNER:
            yield Loose(path, stat.S_IMODE(mode))


def _repair(found: Iterable[Loose]) -> Iterator[Loose]:
    """Change the modes. Return those that cannot be changed."""
    for loose in found:
        try:
            # The descriptor belongs to the file itself, even if a link replaces the path.
            fd = os.open(loose.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError:
            yield loose
            continue
        try:
            os.fchmod(fd, loose.mode & OWNER)
        except OSError:
            yield loose
        finally:
            os.close(fd)


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return "another user"
