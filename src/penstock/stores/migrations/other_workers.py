"""Workers that use a store with another version. A migration must wait until they have stopped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from penstock import __version__
from penstock.errors import StoreRefused
from penstock.locks import live_workers
from penstock.stores.migrations.versions import newest
from penstock.stores.sql import SqlStore

_ID = re.compile(r"(?P<host>.*)-(?P<pid>\d+)-[0-9a-f]+")  # see runtime.stores.worker_id
_STATUS = re.compile(r"penstock (?P<release>\S+) store (?P<version>\d+)")


class OtherWorker(Struct, frozen=True):
    """A worker of another release, as far as its lock file or its connection shows it."""

    host: str
    process: str
    release: str = ""  # "" for releases that do not record their number

    def __str__(self) -> str:
        release = f"release {self.release}" if self.release else "an earlier release"
        return f"{self.process} on host {self.host or 'unknown'} ({release})"


def status_text() -> str:
    """Return the status text in the lock file of a worker of this release."""
    return f"penstock {__version__} store {newest()}"


def other_workers(store: SqlStore, workers_directory: Path) -> list[OtherWorker]:
    """Return live workers of this machine, and connections of other releases to a server.

    The store has an older version, so every live worker that uses it is of an older release.
    """
    found = []
    for worker, status in live_workers(workers_directory).items():
        name, text = _ID.fullmatch(worker), _STATUS.match(status)
        found.append(
            OtherWorker(
                host=name["host"] if name else "",
                process=f"pid {name['pid']}" if name else f"worker {worker}",
                release=text["release"] if text else "",
            )
        )
    return found + store.other_workers()


def refuse_other_workers(label: str, found: Sequence[OtherWorker]) -> None:
    """Raise StoreRefused if there are such workers."""
    if found:
        raise StoreRefused(
            f"{label} cannot be migrated while workers of another release use it: "
            + ", ".join(map(str, found)),
            hint="stop them, or run `penstock migrate --wait`, which waits until they have stopped",
        )
