"""Programs of the Linux distribution: finds them, or installs them if this process may.

System services of these packages are not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .state import cache_directory, locked
from .trouble import ServiceError, say


def find(program: str, *places: str) -> str | None:
    """Return the newest file that matches the globs in `places`, or else the program on PATH."""
    for pattern in places:
        found = sorted(
            Path("/").glob(pattern.lstrip("/")),
            key=lambda path: [int(part) if part.isdigit() else 0 for part in path.parts],
        )
        if found:
            return str(found[-1])
    return shutil.which(program)


def program(name: str, package: str, why: str, *places: str) -> str:
    found = find(name, *places)
    if found is None:
        _install([package], why)
        found = find(name, *places)
    if found is None:
        raise ServiceError(
            f"{name} was not found, although {package} is installed",
            f"search it with: dpkg -L {package}",
        )
    return found


def _install(packages: Sequence[str], why: str) -> None:
    names = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise ServiceError(
            f"{names} is not installed ({why})",
            f"install it with your system's package manager (Debian's name: {names}), "
            "or use Docker: deploy/compose/compose.yaml",
        )
    if os.geteuid() != 0:
        raise ServiceError(
            f"{names} is not installed ({why})",
            f"run: sudo apt install --no-install-recommends {names}, then run this again",
        )
    say(f"installing {names} with apt: {why}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    wait = ["-o", "DPkg::Lock::Timeout=300"]  # waits for another apt on this machine
    with locked(cache_directory() / "apt.lock"):
        for step in (
            ["update", "-qq"],
            ["install", "-y", "-qq", "--no-install-recommends", *packages],
        ):
            if subprocess.run(
                ["apt-get", *wait, *step],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                check=False,
            ).returncode:
                raise ServiceError(
                    f"apt-get {step[0]} failed",
                    f"run: apt-get install {names}, then run this again",
                )
