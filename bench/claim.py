"""`claim`: measures the cost of taking an event, with a thousand and with a million waiting.

Also measures the cost of `status`, and the memory of `push` and of a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

from claiming import STEPS, Costs, compare
from common import (
    BENCH,
    BenchError,
    Watched,
    cache,
    clean_environment,
    last_json,
    machine,
    median,
    pin,
    refuse_taken,
    say,
    table,
    watch,
)
from looking import steps_of_status

HOST_COUNTS = "20,1,5000"
PORT = 8191
BAR = 1.5  # limit of the cost of a claim with many pending, as a multiple of the cost with few
LONG = 15.0  # seconds that a run needs for a verdict on its memory
FLAT_MB = 10.0  # MB of growth after warm-up that still count as flat
CLI = [sys.executable, "-m", "penstock.cli.main"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench claim", description=__doc__)
    parser.add_argument(
        "--pending", type=int, default=1_000_000, help="events that wait (default 1000000)"
    )
    parser.add_argument(
        "--few", type=int, default=1000, help="the backlog to compare with (default 1000)"
    )
    parser.add_argument(
        "--hosts",
        default=HOST_COUNTS,
        help=f"numbers of hosts of the events (default {HOST_COUNTS}), the first for memory",
    )
    parser.add_argument(
        "--slices",
        type=int,
        default=12,
        help="interleaved slices of 512 events on each backlog (default 12)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="how long the worker works while its memory is watched (default 60)",
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    try:
        counts = [int(x) for x in o.hosts.split(",")]
    except ValueError:
        raise BenchError(
            f"--hosts {o.hosts!r} is not a list of numbers", f"use --hosts {HOST_COUNTS}"
        ) from None
    if o.pending < 1 or o.few < 512 or min(counts) < 1:
        raise BenchError("--pending and --hosts must be positive, --few at least 512 (one slice)")
    say(machine())
    summary: dict[str, object] = {
        "bench": "claim",
        "pending": o.pending,
        "few": o.few,
        "machine": machine(),
    }
    costs: dict[int, Costs] = {}
    for i, hosts in enumerate(counts):
        few, many = (_fresh(f"claim-{hosts}-{name}") for name in ("few", "many"))
        try:
            pushed, rate = push(many, o.pending, hosts)
            push(few, o.few, hosts)
            if i == 0:
                print(push_line(pushed, rate, o.pending))
                summary["push"] = {"events_per_second": round(rate), **memory(pushed)}
                summary["status"] = status_costs = status(few, many)
                print(status_line(status_costs, o))
            costs[hosts] = compare(few, many, slices=o.slices, fresh=partial(urls, hosts=hosts))
            say(f"{hosts} hosts: the claim costs {costs[hosts].ratio('claim'):.2f} times as much")
            if i == 0:
                worked, done, seconds = work(many, min(hosts, 200), o.seconds)
                summary["worker"] = {
                    "events": done,
                    "events_per_second": round(done / seconds),
                    **memory(worked),
                }
                print(worker_line(worked, done, seconds))
        finally:
            shutil.rmtree(few, ignore_errors=True)
            shutil.rmtree(many, ignore_errors=True)
    print(cost_table(costs, o))
    summary["cpu_us"] = {str(hosts): c.medians() for hosts, c in costs.items()}
    summary["ratio"] = {
        str(hosts): {step: round(c.ratio(step), 3) for step in STEPS} for hosts, c in costs.items()
    }
    summary["claim_ratio"] = worst = round(max(c.ratio("claim") for c in costs.values()), 3)
    summary |= {"bar": BAR, "within_bar": worst <= BAR}
    if o.json:
        print(json.dumps(summary))
    return 0


def _fresh(name: str) -> Path:
    directory = cache() / "scratch" / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _core() -> set[int]:
    return {max(os.sched_getaffinity(0))}


def address(i: int) -> str:
    """Return the i-th loopback address. There are sixteen million."""
    return f"127.{1 + i // 62500}.{i // 250 % 250}.{2 + i % 250}"


def urls(start: int, end: int, hosts: int) -> list[str]:
    return [f"http://{address(i % hosts)}:{PORT}/product/{i}.html" for i in range(start, end)]


# -- pushing ---------------------------------------------------------------------------------------


def push(directory: Path, n: int, hosts: int) -> tuple[Watched, float]:
    """Run `penstock push -f -`, which reads a list from a pipe.

    Return its memory over time, and the events a second.
    """
    reading, writing = os.pipe()
    writer = threading.Thread(target=_feed, args=(os.fdopen(writing, "wb"), n, hosts), daemon=True)
    writer.start()
    started = time.time()
    try:
        w = watch(
            [*CLI, "push", "-f", "-", "--json"],
            cores=_core(),
            cwd=directory,
            env=clean_environment(),
            stdin=reading,
            timeout=3600,
        )
    finally:
        os.close(reading)  # also ends the writer, if push has ended early
    if w.code != 0 or last_json_document(w.out)["accepted"] != n:
        raise BenchError(f"penstock push ended with {w.code}: {(w.err or w.out).strip()[-800:]}")
    return w, n / (time.time() - started)


def last_json_document(text: str) -> dict[str, object]:
    try:
        found: dict[str, object] = json.loads(text)
        return found
    except ValueError:
        return last_json(text)


def _feed(pipe: IO[bytes], n: int, hosts: int) -> None:
    try:
        with pipe:
            for start in range(0, n, 1000):
                pipe.write(
                    "".join(f"{url}\n" for url in urls(start, min(n, start + 1000), hosts)).encode()
                )
    except BrokenPipeError:
        pass  # the reader has ended, and its exit code is checked


def memory(w: Watched) -> dict[str, float | bool | None]:
    """Return the RSS of the tree in MB: warm (after 30 % of the run), at the end, and the peak.

    A short run has no verdict.
    """
    # The last sample may be from the exit of the process.
    rss = [r for _, _, r in w.memory[:-1]] or [r for _, _, r in w.memory] or [0.0]
    rest = rss[len(rss) * 3 // 10 :]
    part = max(1, len(rest) // 5)
    warm, end = median(rest[:part]), median(rest[-part:])
    figures: dict[str, float | bool | None] = {
        "rss_warm_mb": round(warm, 1),
        "rss_end_mb": round(end, 1),
        "rss_peak_mb": round(max(rss), 1),
        "pss_peak_mb": round(w.pss, 1),
    }
    long = bool(w.memory) and w.memory[-1][0] - w.memory[0][0] >= LONG
    return {
        **figures,
        "growth_mb": round(end - warm, 1),
        "flat": end - warm <= FLAT_MB if long else None,
    }


def _memory_line(w: Watched) -> str:
    m = memory(w)
    verdict = "too short for a verdict" if m["flat"] is None else "flat" if m["flat"] else "GROWS"
    return (
        f"RSS {m['rss_warm_mb']} MB when warm, {m['rss_end_mb']} MB at the end, peak"
        f" {m['rss_peak_mb']} MB: {verdict}"
    )


def push_line(w: Watched, rate: float, n: int) -> str:
    return f"\npush: {n:,} URLs through a pipe, {rate:,.0f} a second; {_memory_line(w)}"


# -- status ----------------------------------------------------------------------------------------


def status(few: Path, many: Path) -> dict[str, object]:
    """Return the wall time of the command, and the cost of its statements.

    The cost is the number of virtual machine steps, and of rows read by full scans.
    """
    times: dict[str, list[float]] = {"few": [], "many": []}
    for _ in range(5):
        for name, directory in (("few", few), ("many", many)):
            started = time.perf_counter()
            done = subprocess.run(
                [*CLI, "status", "--json"],
                cwd=directory,
                env=clean_environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            times[name].append(time.perf_counter() - started)
            if done.returncode != 0:
                raise BenchError(
                    f"penstock status ended with {done.returncode}: {done.stderr.strip()[-400:]}"
                )
    few_steps, many_steps = steps_of_status(few), steps_of_status(many)
    return {
        "seconds_few": round(median(times["few"]), 3),
        "seconds": round(median(times["many"]), 3),
        "steps_few": few_steps.steps,
        "steps": many_steps.steps,
        "scanned_rows": many_steps.scanned,
        "scans": sorted(many_steps.scans),
        "reads_counters": many_steps.steps <= 1.5 * few_steps.steps and many_steps.scanned <= 1000,
    }


def status_line(s: dict[str, object], o: argparse.Namespace) -> str:
    verdict = "reads counters" if s["reads_counters"] else "COUNTS"
    return (
        f"status --json: {s['seconds']} s at {o.pending:,} pending, {s['seconds_few']} s at"
        f" {o.few:,} (most of it Python's start);"
        f" {s['steps']:,} and {s['steps_few']:,} steps of SQLite, {s['scanned_rows']:,} rows of"
        f" tables without an index: {verdict}"
    )


# -- working ---------------------------------------------------------------------------------------


def work(directory: Path, hosts: int, seconds: float) -> tuple[Watched, int, float]:
    """Run `penstock run` on the waiting events, against a small site.

    Return the memory of its tree over time, the events that ended, and the seconds it ran.
    """
    names = [address(i) for i in range(hosts)]
    refuse_taken(names[0], PORT)
    env = clean_environment(
        PENSTOCK_NET_ALLOW=",".join(f"{name}:{PORT}" for name in names), PENSTOCK_PACE_RATE="100000"
    )
    before = _successes(directory)
    site_core = {min(os.sched_getaffinity(0))}
    command = [sys.executable, str(BENCH / "responder.py"), str(PORT), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=pin(site_core)) as site:
        try:
            if site.stdout is None or site.stdout.readline() != b"ready\n":
                raise BenchError(f"the site did not start on port {PORT}")
            started = time.time()
            run = [*CLI, "run", str(BENCH / "pipeline.py")]
            w = watch(run, cores=_core(), cwd=directory, env=env, stop_after=seconds, timeout=120)
            took = time.time() - started
        finally:
            site.send_signal(signal.SIGTERM)
    if w.code != 0:
        raise BenchError(f"penstock run ended with {w.code}: {(w.err or w.out).strip()[-800:]}")
    done = _successes(directory) - before
    if not done:
        raise BenchError("the worker finished nothing", f"see {directory}/stderr.txt")
    return w, done, took


def _successes(directory: Path) -> int:
    done = subprocess.run(
        [*CLI, "status", "--json"],
        cwd=directory,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    total = json.loads(done.stdout)["total"]
    if total["dead"]:
        raise BenchError(
            f"{total['dead']} events ended dead",
            "this is a bug of the bench's site or of Penstock, not a slow run",
        )
    return int(total["success"])


def worker_line(w: Watched, done: int, seconds: float) -> str:
    return (
        f"run: {done:,} events in {seconds:.0f} s with start and drain, "
        f"process tree {_memory_line(w)}, PSS peak {w.pss:.0f} MB"
    )


# -- the table -------------------------------------------------------------------------------------


def cost_table(costs: dict[int, Costs], o: argparse.Namespace) -> str:
    rows = []
    for hosts, c in costs.items():
        for step in STEPS:
            m = c.medians()[step]
            rows.append(
                (
                    f"{hosts:,} hosts: {step}",
                    f"{m['few']:.1f}",
                    f"{m['many']:.1f}",
                    f"{c.ratio(step):.2f}",
                )
            )
    head = ("CPU µs an event", f"{o.few:,} pending", f"{o.pending:,} pending", "ratio")
    return (
        f"\nMedians of {o.slices} interleaved slices of 512 events, ratios within a pair of "
        f"slices. claim = receive + admit + begin, bar {BAR}.\n\n"
        f"{table(head, rows)}\n"
    )
