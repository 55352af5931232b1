"""What this clone remembers of a server: its directory, its ports, its pid, its lock. How a server
is run, others know.
"""

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
PORTS_PER_SERVER = 200  # clones on one machine, before we give up


def cache_directory() -> Path:
    """Jars and the table of ports: shared by all clones of this user, so outside every one of them."""
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
    borrowed: bool = False  # started by tests, which stop it when the last of them has ended


@dataclass(frozen=True)
class Place:
    """One server's directory. `state.json` is replaced as a whole, so a reader sees all of it or
    the one before.
    """

    directory: Path

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def lock(self) -> Path:
        return self.directory.with_suffix(".lock")  # beside it, so that it outlives a wipe

    def noted(self) -> Noted:
        try:
            return Noted(**json.loads((self.directory / "state.json").read_text()))
        except FileNotFoundError:
            return Noted()
        except (ValueError, TypeError):
            raise ServiceError(
                f"{self.directory}/state.json cannot be read",
                f"stop what runs there, then rm -r {self.directory}",
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
        """The ones it always had, or now the first free ones from the usual ones on."""
        ports = self.noted().ports
        missing = {
            name: _free(first, self.directory)
            for name, first in wanted.items()
            if name not in ports
        }
        return self.note(ports={**ports, **missing}).ports if missing else ports

    def data(self, user: str | None) -> Path:
        """Where the server keeps its own. A server that runs as another user may be unable to come
        here: then it is in the temporary directory, by a link.
        """
        place = self.directory / "data"
        if place.exists():
            return place.resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        if place.is_symlink():
            place.unlink()  # what it led to was cleaned away
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


def _free(first: int, owner: Path) -> int:
    """A port that no clone has taken and nobody listens on. Taking is making a file: two that look
    at once cannot both have it.
    """
    table = cache_directory() / "ports"
    table.mkdir(parents=True, exist_ok=True)
    for port in range(first, first + PORTS_PER_SERVER):
        taken = table / str(port)
        try:
            whose = Path(taken.read_text() or "/")  # empty: being written just now
            if whose != owner and whose.exists():
                continue
            taken.unlink()
        except FileNotFoundError:
            pass
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as servers do: what is only lingering is free
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        try:
            with open(taken, "x") as file:
                file.write(str(owner))
        except FileExistsError:
            continue
        return port
    raise ServiceError(
        f"no free port from {first} to {first + PORTS_PER_SERVER - 1}",
        f"stop what listens there, or remove {table}",
    )
