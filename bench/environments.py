"""Virtual environments of the peers, in the cache. Each is made from its pinned list."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from common import BENCH, BenchError, cache, say


def python_of(name: str) -> Path:
    """Return the interpreter of the peer's environment.

    The environment is made again if its list or the Python version has changed.
    """
    wanted = f"{sys.version}\n{(BENCH / 'requirements' / (name + '.txt')).read_text()}"
    directory = cache() / "venvs" / name
    stamp, python = directory / "stamp", directory / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    say(f"making the environment of {name} in {directory}")
    venv.create(directory, clear=True, with_pip=True)
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "-r",
        str(BENCH / "requirements" / (name + ".txt")),
    ]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise BenchError(
            f"installing the packages of {name} failed",
            "check the network or pip's configuration (pip config list), then run this again",
        )
    stamp.write_text(wanted)
    return python
