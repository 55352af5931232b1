"""A server's process: started in a session of its own, known again later, ended with all it
started. Which server it is, others know.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def identity(pid: int) -> str | None:
    """When the process began, since a pid may be used again; None: there is none, or nothing but
    its exit status is left.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            alone = (
                len(os.listdir(stat.with_name("task"))) == 1
            )  # a thread that still waits for the disk keeps the port
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
    """Runs on after us, in a session of its own, so that a Ctrl-C here does not reach it. Returns
    its pid, which is also its process group.
    """
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, env=dict(environment), cwd=directory, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            user=user, group=user, extra_groups=[] if user else None,
        )  # fmt: skip
    process.returncode = 0  # nobody waits for it here: without this, Python says so when we end
    return process.pid


def _reap(pid: int) -> None:
    """Where it is a child of ours, its exit status is ours to take."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _children(pid: int) -> dict[int, str]:
    """Those of now, each with when it began. Postgres puts each of them into a group of its own."""
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
    """Asks politely, waits, then kills; gone with its whole group and its children when it returns."""
    if identity(pid) == began and first != signal.SIGKILL:
        os.kill(pid, first)
        until = time.monotonic() + patience
        while identity(pid) == began and time.monotonic() < until:
            _reap(pid)
            time.sleep(0.02)
    left = {}
    if identity(pid) == began:
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more of them
        left = {pid: began, **_children(pid)}
    for one, since in left.items():
        if identity(one) == since:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
    try:
        os.killpg(
            pid, signal.SIGKILL
        )  # a group's number is not given to another while one of its members lives
    except (ProcessLookupError, PermissionError):
        pass
    until = time.monotonic() + 10
    while any(identity(one) == since for one, since in left.items()) and time.monotonic() < until:
        _reap(pid)
        time.sleep(0.02)
    _reap(
        pid
    )  # what is left of a killed one would be taken for alive: Postgres does not start beside its old pid
