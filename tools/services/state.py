"""Stored state of a server in this clone: directory, ports, pid and lock."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .processes import identity
from .trouble import ServiceError

ROOT = Path(__file__).resolve().parents[2]
PORTS_PER_SERVER = 200  # candidates per port, which limits the number of clones on one machine


def cache_directory() -> Path:
    """Return the directory of jars and of the port table, which all clones of this user share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def state_directory(chosen: str | None = None) -> Path:
    return Path(chosen or os.environ.get("PENSTOCK_SERVICES_DIR") or ROOT / ".services").absolute()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Noted:
    ports: Mapping[str, int] = field(default_factory=dict)
    pid: int = 0
    began: str = ""
    version: str = ""
    borrowed: bool = False  # started by tests, which stop it when the last test has ended


@dataclass(frozen=True)
class Place:
    """Directory of one server. `state.json` is replaced atomically."""

    directory: Path

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def lock(self) -> Path:
        return self.directory.with_suffix(".lock")  # outside the directory, so that a wipe keeps it

    def noted(self) -> Noted:
        try:
            return Noted(**json.loads((self.directory / "state.json").read_text()))
        except FileNotFoundError:
            return Noted()
        except (ValueError, TypeError):
            raise ServiceError(
                f"{self.directory}/state.json cannot be read",
                f"stop the server that runs there, then rm -r {self.directory}",
            ) from None

    def note(self, **changes: Any) -> Noted:
        noted = replace(self.noted(), **changes)
        self.directory.mkdir(parents=True, exist_ok=True)
        fresh = self.directory / "state.json.new"
        fresh.write_text(json.dumps(asdict(noted)) + "\n")
        fresh.replace(self.directory / "state.json")
        return noted

    def running(self) -> bool:
        noted = self.noted()
        return bool(noted.pid) and identity(noted.pid) == noted.began

    def ports(self, wanted: Mapping[str, int]) -> Mapping[str, int]:
        """Return the stored ports. Choose missing ones: the first free port from `wanted` on."""
        ports = self.noted().ports
        if set(wanted) <= set(ports):
            return ports
        # A reservation is valid while the directory of its owner exists.
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(cache_directory() / "ports.lock"):
            missing = {
                name: _reserve(first, self.directory)
                for name, first in wanted.items()
                if name not in ports
            }
        return self.note(ports={**ports, **missing}).ports

    def data(self, user: str | None) -> Path:
        """Return the data directory of the server.

        If the server runs as another user that cannot reach this clone, the directory is a link to
        a temporary directory.
        """
        place = self.directory / "data"
        if place.exists():
            return place.resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        if place.is_symlink():
            place.unlink()  # its target was deleted
        if user is None:
            place.mkdir()
            return place
        if all(parent.stat().st_mode & 0o001 for parent in place.parents):
            place.mkdir(mode=0o700)
        else:
            elsewhere = Path(
                tempfile.mkdtemp(
                    prefix=f"penstock-services-{hashlib.sha256(bytes(place)).hexdigest()[:8]}-"
                )
            )
            place.symlink_to(elsewhere)
        shutil.chown(place, user, user)
        return place.resolve()

    def wipe(self) -> None:
        data = self.directory / "data"
        if data.is_symlink():
            shutil.rmtree(data.resolve(), ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def _reserve(first: int, owner: Path) -> int:
    """Return a port that no clone has reserved and no process listens on, and reserve it.

    A reservation is a file that names the directory of its owner. The caller holds `ports.lock`.
    """
    table = cache_directory() / "ports"
    table.mkdir(parents=True, exist_ok=True)
    for port in range(first, first + PORTS_PER_SERVER):
        taken = table / str(port)
        if taken.exists():
            other = Path(taken.read_text() or "/nowhere")  # empty if its writer was killed
            if other != owner and other.exists():
                continue
        with socket.socket() as probe:
            # Servers set it too. A port with only lingering connections counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        taken.write_text(str(owner))
        return port
    raise ServiceError(
        f"no free port from {first} to {first + PORTS_PER_SERVER - 1}",
        f"stop the processes that listen there, or remove {table}",
    )
