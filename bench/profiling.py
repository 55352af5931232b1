"""`profile`: measures the time of one run by thread, module and function, with py-spy or perf."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from common import BenchError, cache, machine, say, table, watch
from contenders import OUT, Job, check_ended, check_rows, penstock_prepared, penstock_span
from environments import python_of
from target import make_site, serving

SERVER_CORE, CLIENT_CORE = 0, 1
LIBRARIES = {  # file names that do not show the library
    "__init__": "apsw (SQLite)",
    "_html": "turbohtml",
    "backend_c": "zstandard",
    "loop": "uvloop",
    "_core": "msgspec",
    "[kernel.kallsyms]": "the kernel",
}
FRAME = re.compile(r"^(?P<function>.*) \((?P<place>[^()]*?)(?::\d+)?\)$")
THREAD = re.compile(r"^thread \([^)]*\)(?:: (?P<name>.*))?$|^process (?P<process>\d+).*$")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench profile", description=__doc__)
    parser.add_argument("--n", type=int, default=10000, help="pages (default 10000)")
    parser.add_argument(
        "--isolated",
        action="store_true",
        help="extract in a child, as by default, instead of in process",
    )
    parser.add_argument(
        "--native", action="store_true", help="name C functions too (slower, finer)"
    )
    parser.add_argument(
        "--perf",
        action="store_true",
        help="sample with perf instead: libraries, C functions and the kernel, no Python frames",
    )
    parser.add_argument("--rate", type=int, default=250, help="samples a second (default 250)")
    parser.add_argument(
        "--top", type=int, default=30, help="rows of the function tables (default 30)"
    )
    parser.add_argument(
        "--keep", metavar="FILE", help="keep the raw stacks (flame graph tools read them)"
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    site = cache() / "site"
    make_site(site, o.n)
    spy = Path() if o.perf else python_of("profile").parent / "py-spy"
    os.sched_setaffinity(0, {SERVER_CORE})
    with serving(cache() / "nginx", site, core=SERVER_CORE):
        if o.perf:
            return with_perf(o)
        stacks, cpu_us, rate = record(spy, o)
    if o.keep:
        Path(o.keep).write_text(
            "".join(f"{';'.join(frames)} {count}\n" for frames, count in stacks)
        )
    by = shares(stacks)
    print(heading(o, cpu_us, rate))
    print(
        "µs: a table's share of that. A library's time counts for the Penstock function that"
        " called it, except in the last table.\n"
    )
    tables = [("thread", "thread", 20), ("module of Penstock", "module", 40)]
    tables += [
        ("function of Penstock, libraries below it included", "function", o.top),
        ("innermost frame", "leaf", o.top),
    ]
    for title, key, top in tables:
        total = sum(by[key].values())
        rows = [
            (name, f"{count / total:.1%}", f"{count / total * cpu_us:.0f}")
            for name, count in by[key].most_common(top)
        ]
        print(table((title, "share", "µs/page"), rows) + "\n")
    if o.json:
        total = sum(by["module"].values()) or 1
        print(
            json.dumps(
                {
                    "bench": "profile",
                    "n": o.n,
                    "isolated": o.isolated,
                    "cpu_us_per_page": round(cpu_us, 1),
                    "modules": {k: round(v / total, 4) for k, v in by["module"].most_common()},
                }
            )
        )
    return 0


def heading(o: argparse.Namespace, cpu_us: float, rate: float) -> str:
    where = "in a child" if o.isolated else "in process"
    return (
        f"\n{machine()}\n{o.n} pages, extraction {where}, while being sampled: {rate:,.0f}"
        f" pages/s, {cpu_us:,.0f} µs of CPU a page"
    )


def sampled(
    o: argparse.Namespace, sampler: Callable[[int, Path], list[str]]
) -> tuple[Path, float, float, str]:
    """Run Penstock, with a sampler that starts when the worker has opened its store.

    Return the directory, the CPU µs of a page, the pages a second, and the sampler's output. The
    sampler runs on the site's core. As the worker's parent, it would share the worker's core.
    """
    directory, env, command = penstock_prepared(
        Job(n=o.n, cores=frozenset({CLIENT_CORE})), "profile", "process" if o.isolated else "none"
    )
    attached: list[subprocess.Popen[bytes]] = []

    def attach() -> None:
        for _ in range(500):
            if pid := _started(directory):
                with open(directory / "sampler.txt", "wb") as out:
                    attached.append(
                        subprocess.Popen(sampler(pid, directory), stdout=out, stderr=out)
                    )
                return
            time.sleep(0.01)

    thread = threading.Thread(target=attach)
    thread.start()
    say("running with a sampler attached")
    w = watch(command, cores={CLIENT_CORE}, cwd=directory, env=env)
    thread.join()
    for process in attached:
        process.wait(60)
    check_ended(w, "penstock")
    check_rows(directory / OUT, o.n, "penstock")
    start, end = penstock_span(directory, o.n, "penstock")
    output = (
        (directory / "sampler.txt").read_text().strip()[-400:] if attached else "it never attached"
    )
    return directory, w.cpu_between(start, end) / o.n * 1e6, o.n / (end - start), output


def record(spy: Path, o: argparse.Namespace) -> tuple[list[tuple[list[str], int]], float, float]:
    def command(pid: int, directory: Path) -> list[str]:
        options = [
            "--format",
            "raw",
            "--function",
            "--threads",
            "--rate",
            str(o.rate),
            "--output",
            str(directory / "stacks.txt"),
        ]
        # Without pausing the process, the sampler can distinguish waiting threads from busy ones.
        options += ["--native"] if o.native else ["--nonblocking"]
        return [str(spy), "record", "--pid", str(pid), *options, *["--subprocesses"] * o.isolated]

    directory, cpu_us, rate, output = sampled(o, command)
    raw = directory / "stacks.txt"
    if not raw.exists():
        raise BenchError(
            f"py-spy left no samples: {output}",
            "it needs the right to trace: run as root, or set kernel.yama.ptrace_scope to 0",
        )
    stacks = []
    for line in raw.read_text().splitlines():
        frames, _, count = line.rpartition(" ")
        if "importlib" not in frames:  # skips the start-up
            stacks.append((frames.split(";"), int(count)))
    return stacks, cpu_us, rate


def with_perf(o: argparse.Namespace) -> int:
    if not shutil.which("perf"):
        raise BenchError(
            "perf was not found",
            "install it (Debian: apt install linux-perf), or leave --perf away",
        )
    directory, cpu_us, rate, output = sampled(
        o,
        lambda pid, d: [
            "perf",
            "record",
            "--freq",
            "999",
            "--inherit",
            "--pid",
            str(pid),
            "--output",
            str(d / "perf.data"),
        ],
    )
    if not (directory / "perf.data").exists():
        raise BenchError(
            f"perf left no samples: {output}",
            "it needs the right to: run as root, or set kernel.perf_event_paranoid to 1",
        )
    print(heading(o, cpu_us, rate) + "\n")
    for title, sort in (("library", "dso"), ("function", "symbol,dso")):
        report = subprocess.run(
            [
                "perf",
                "report",
                "--input",
                str(directory / "perf.data"),
                "--stdio",
                "--quiet",
                "--sort",
                sort,
                "--field-separator",
                "\t",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        rows = []
        for line in report.stdout.splitlines()[: o.top * 2]:
            share, *names = [
                LIBRARIES.get(name := part.strip().partition(".cpython-")[0], name)
                for part in line.split("\t")
            ]
            if share.rstrip("%").replace(".", "").isdigit() and len(rows) < o.top:
                rows.append(
                    (
                        " ".join(name for name in names if name.strip("- "))[:90],
                        share,
                        f"{float(share.rstrip('%')) / 100 * cpu_us:.0f}",
                    )
                )
        print(table((title, "share", "µs/page"), rows) + "\n")
    return 0


def _started(directory: Path) -> int:
    """Return the worker's pid from the name of its lock file, when it has opened its store."""
    workers = directory / ".penstock" / "workers"
    for file in workers.iterdir() if workers.is_dir() else ():
        for part in file.name.split("-"):
            if part.isdigit() and os.path.exists(f"/proc/{part}/stat"):
                return int(part)
    return 0


def shares(stacks: Sequence[tuple[Sequence[str], int]]) -> dict[str, Counter[str]]:
    by: dict[str, Counter[str]] = {
        key: Counter() for key in ("thread", "module", "function", "leaf")
    }
    for frames, count in stacks:
        threads = [
            m["name"] or "main" for f in frames if (m := THREAD.match(f)) and m["process"] is None
        ]
        inner = [f for f in frames if not THREAD.match(f)]
        if not inner:
            continue
        by["thread"][threads[-1] if threads else "main"] += count
        module, function = _ours(inner)
        by["module"][module] += count
        by["function"][f"{module}  {function}"] += count
        by["leaf"][_short(inner[-1])] += count
    return by


def _ours(frames: Sequence[str]) -> tuple[str, str]:
    """Return the innermost frame of Penstock or of the pipeline, or else of other code."""
    for frame in reversed(frames):
        m = FRAME.match(frame)
        if m is None:
            continue
        place = m["place"]
        if "penstock/" in place and "site-packages" not in place:
            return place.rpartition("penstock/")[2], m["function"]
        if place.endswith("bench/pipeline.py"):
            return "the pipeline's code", m["function"]
    return "elsewhere (loop, threads, start)", _short(frames[-1])


def _short(frame: str) -> str:
    m = FRAME.match(frame)
    if m is None:
        return frame
    return f"{m['function']} ({'/'.join(m['place'].split('/')[-2:])})"
