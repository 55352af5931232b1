"""Process of a server: start in a separate session, identification, end with its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def identity(pid: int) -> str | None:
    """Return the start time of a process, which identifies it: a pid may be reused.

    Return None if there is no such process, or if only its exit status remains.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            # A thread that still waits for the disk keeps the port.
            alone = len(os.listdir(stat.with_name("task"))) == 1
        except OSError:
            return None
        return None if fields[0] in "ZX" and alone else fields[19]
    shown = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split(maxsplit=1)
    return None if len(shown) < 2 or shown[0].startswith("Z") else shown[1].strip()


def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    directory: Path,
    user: str | None,
) -> int:
    """Start a process that continues after this one ends. Return its pid and process group id.

    It has a separate session. So Ctrl-C in this terminal does not reach it.
    """
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=[] if user else None,
        )
    # This process does not wait for it. Without a return code, Python would warn at exit.
    process.returncode = 0
    return process.pid


def _reap(pid: int) -> None:
    """Collect the exit status, if it is a child of this process."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _children(pid: int) -> dict[int, str]:
    """Return the current children with their start times.

    PostgreSQL puts each of its children into a separate process group.
    """
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(
                entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
        if parent == pid and (began := identity(int(entry.parent.name))):
            found[int(entry.parent.name)] = began
    return found


def end(pid: int, began: str, first: signal.Signals, *, patience: float) -> None:
    """Send `first`, wait up to `patience` seconds, then kill. Also kills its group and children."""
    if identity(pid) == began and first != signal.SIGKILL:
        os.kill(pid, first)
        until = time.monotonic() + patience
        while identity(pid) == began and time.monotonic() < until:
            _reap(pid)
            time.sleep(0.02)
    left = {}
    if identity(pid) == began:
        os.kill(pid, signal.SIGSTOP)  # so that it cannot start more children
        left = {pid: began, **_children(pid)}
    for one, since in left.items():
        if identity(one) == since:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
    try:
        # The id of a process group is not reused while one of its members is alive.
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    until = time.monotonic() + 10
    while any(identity(one) == since for one, since in left.items()) and time.monotonic() < until:
        _reap(pid)
        time.sleep(0.02)
    # PostgreSQL would take an unreaped process for alive, and not start while its old pid exists.
    _reap(pid)
