"""Shared code of all benches: errors, scratch directory, pinning, measured processes, tables."""

from __future__ import annotations

import bisect
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
TICK = os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """Ends the bench with a message and a hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def cache() -> Path:
    """Return the directory of the peers' environments, of the site and of scratch files.

    It is outside the clone, on a real disk: on a file system in memory, a sync would cost nothing.
    """
    base = os.environ.get("BENCH_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "penstock-bench"
    )
    directory = Path(base).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment without the developer's settings, which could change a figure."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PENSTOCK_", "SCRAPY_", "CRAWLEE_"))
    }
    return kept | {"PYTHONHASHSEED": "0", "NO_COLOR": "1"} | more


def pin(cores: set[int], nice: int = 0) -> Callable[[], None]:
    """Return a `preexec_fn` that pins the process tree to these cores.

    It also starts a separate session: with autogroups, Linux applies the priority per session.
    """

    def apply() -> None:
        os.setsid()
        os.sched_setaffinity(0, cores)
        if nice:
            try:
                with open("/proc/self/autogroup", "w") as f:
                    f.write(str(nice))
                os.nice(nice)
            except OSError:
                pass  # not root, or no autogroups: keep the default priority

    return apply


def refuse_taken(host: str, port: int) -> None:
    """Raise BenchError if the port is in use. Two benches at a time would disturb each other."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise BenchError(
                f"{host}:{port} is taken ({e.strerror})",
                "is another benchmark running? Wait for it, then run this again",
            ) from e


# -- watching a process tree -----------------------------------------------------------------------


def _tree(root: int) -> list[int]:
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as f:
                    todo += [int(child) for child in f.read().split()]
        except OSError:
            continue
    return found


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process and of the children that it has waited for."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(x) for x in fields[11:15]) / TICK


def _memory(pid: int) -> tuple[float, float]:
    """Return PSS and RSS in MB."""
    pss = rss = 0.0
    try:
        with open(f"/proc/{pid}/smaps_rollup") as f:
            for line in f:
                if line.startswith("Pss:"):
                    pss = int(line.split()[1]) / 1024
                elif line.startswith("Rss:"):
                    rss = int(line.split()[1]) / 1024
    except OSError:
        pass
    return pss, rss


@dataclass
class Watched:
    """Result of a run: exit code and output, and CPU and memory of its process tree over time.

    Times are epoch seconds.
    """

    code: int = 0
    out: str = ""
    err: str = ""
    cpu: list[tuple[float, float]] = field(default_factory=list)
    memory: list[tuple[float, float, float]] = field(default_factory=list)  # time, PSS, RSS

    def cpu_between(self, start: float, end: float) -> float:
        return self._cpu_at(end) - self._cpu_at(start)

    def _cpu_at(self, at: float) -> float:
        times = [t for t, _ in self.cpu]
        i = bisect.bisect_left(times, at)
        if i == 0:
            return self.cpu[0][1]
        if i == len(times):
            return self.cpu[-1][1]
        (t0, c0), (t1, c1) = self.cpu[i - 1], self.cpu[i]
        return c0 + (c1 - c0) * (at - t0) / (t1 - t0)

    @property
    def pss(self) -> float:
        return max((pss for _, pss, _ in self.memory), default=0.0)

    @property
    def rss(self) -> float:
        return max((rss for _, _, rss in self.memory), default=0.0)


def watch(
    command: Sequence[str],
    *,
    cores: set[int],
    cwd: Path,
    env: Mapping[str, str],
    nice: int = 0,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    timeout: float = 600.0,
    every: float = 0.05,
    stop_after: float | None = None,
    stop_when: Callable[[], bool] | None = None,
) -> Watched:
    """Run a pinned command, and sample its process tree from the bench's own core.

    It gets a SIGTERM after `stop_after` seconds, or when `stop_when` returns True.
    """
    w = Watched()
    with open(cwd / "stdout.txt", "w+") as out, open(cwd / "stderr.txt", "w+") as err:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            stdin=stdin,
            cwd=cwd,
            env=dict(env),
            preexec_fn=pin(cores, nice),
        )
        ended = threading.Event()
        sampler = threading.Thread(target=_sample, args=(w, process.pid, ended, every), daemon=True)
        sampler.start()
        try:
            if stop_after is not None:
                try:
                    process.wait(stop_after)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGTERM)
            until = time.monotonic() + timeout
            while stop_when is not None and process.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
                if stop_when():
                    process.send_signal(signal.SIGTERM)
                    break
            process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise BenchError(
                f"{' '.join(command[:3])} … was not done after {timeout:.0f} s",
                "give it fewer pages (--n)",
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            ended.set()
            sampler.join()
        w.code = process.returncode
        for f in (out, err):
            f.seek(0)
        w.out, w.err = out.read(), err.read()
    return w


def _sample(w: Watched, root: int, ended: threading.Event, every: float) -> None:
    beats = 0
    while not ended.is_set():
        pids = _tree(root)
        total = sum(map(cpu, pids))
        # A child that has ended, but was not yet waited for, is missing in the total.
        if not w.cpu or total >= w.cpu[-1][1]:
            w.cpu.append((time.time(), total))
        if beats % 4 == 0:  # memory costs more to read than CPU time
            each = [_memory(pid) for pid in pids]
            w.memory.append((time.time(), sum(p for p, _ in each), sum(r for _, r in each)))
        beats += 1
        ended.wait(every)


def server_url(name: str) -> str:
    """Start the server if necessary, and return its URL."""
    dev = BENCH.parent / "dev"
    if subprocess.run(
        [dev, "services", "up", name], check=False, stdout=subprocess.DEVNULL
    ).returncode:
        raise BenchError(f"{name} did not start", f"run ./dev services up {name} for the reason")
    return subprocess.run(
        [dev, "services", "url", name], check=True, capture_output=True, text=True
    ).stdout.strip()


def stop_server(name: str) -> None:
    subprocess.run(
        [BENCH.parent / "dev", "services", "down", name],
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# -- output ----------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a text table. The first column is aligned left, the others right."""
    cells = [[str(c) for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def machine() -> str:
    model = ""
    try:
        with open("/proc/cpuinfo") as f:
            model = next(
                (line.partition(":")[2].strip() for line in f if line.startswith("model name")), ""
            )
    except OSError:
        pass
    return (
        f"{os.cpu_count()} x {model or 'unknown CPU'}, Python {sys.version.split()[0]}, load"
        f" {os.getloadavg()[0]:.1f}"
    )


def last_json(text: str) -> dict[str, object]:
    for line in reversed(text.strip().splitlines()):
        if line.startswith("{"):
            found: dict[str, object] = json.loads(line)
            return found
    raise ValueError("no JSON in the output")
