"""`slow-host`: measures the cost of a slow host for fifty other hosts.

The slow host allows one request in ten seconds, and has ten thousand waiting events.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import apsw
from common import (
    BENCH,
    BenchError,
    clean_environment,
    machine,
    median,
    pin,
    refuse_taken,
    say,
    table,
    watch,
)
from contenders import check_ended, fresh

SERVER_CORE, CLIENT_CORE = 0, 1
PORT = 8196
SLOW = "127.0.0.2"
BAR = 0.95


@dataclass(frozen=True)
class Run:
    rate: float  # pages a second of the other hosts
    cpu_us: float  # for each of these pages
    slow: int  # requests that the slow host got during the run


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench slow-host", description=__doc__)
    parser.add_argument(
        "--n", type=int, default=10000, help="pages of the other hosts (default 10000)"
    )
    parser.add_argument(
        "--hosts", type=int, default=50, help="other hosts (default 50, at most 200)"
    )
    parser.add_argument(
        "--slow", type=int, default=10000, help="events of the slow host (default 10000)"
    )
    parser.add_argument("--rate", default="0.1/s", help="what the slow host allows (default 0.1/s)")
    parser.add_argument("--reps", type=int, default=5, help="interleaved repetitions (default 5)")
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="priority of site and worker, e.g. -15 as root on a busy machine",
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    if (os.cpu_count() or 1) < 2:
        raise BenchError(
            "this needs two cores: one for the site, one for the worker",
            "run it on another machine",
        )
    if not 1 <= o.hosts <= 200:
        raise BenchError(f"--hosts {o.hosts}: between 1 and 200 loopback addresses")
    hosts = [f"127.0.0.{n}" for n in range(3, 3 + o.hosts)]
    os.sched_setaffinity(0, {SERVER_CORE})
    runs: dict[str, list[Run]] = {"alone": [], "beside": []}
    with responding([SLOW, *hosts], o.nice):
        for rep in range(o.reps):
            for name in ("alone", "beside") if rep % 2 == 0 else ("beside", "alone"):
                r = run(hosts, o, slow=name == "beside")
                runs[name].append(r)
                say(
                    f"{rep + 1}/{o.reps} {name}: {r.rate:,.0f} pages/s, {r.cpu_us:,.0f} µs of CPU"
                    f" a page, {r.slow} requests to the slow host"
                )
    by_rate, by_cpu = (
        median([pair(a, b) for a, b in zip(runs["alone"], runs["beside"], strict=True)])
        for pair in (_by_rate, _by_cpu)
    )
    rows = [
        (
            name,
            f"{median([r.rate for r in rs]):,.0f}",
            f"{median([r.cpu_us for r in rs]):,.0f}",
            max(r.slow for r in rs),
        )
        for name, rs in runs.items()
    ]
    print(
        f"\n{o.hosts} hosts with {o.n} pages, and one slow host at {o.rate} with {o.slow} events, "
        f"which are published first. Medians of {o.reps}.\n"
    )
    print(table(("", "pages/s", "CPU µs/page", "requests to the slow host"), rows))
    print(f"\nbeside / alone: {by_rate:.3f} by rate, {by_cpu:.3f} by CPU (bar: {BAR})\n")
    if o.json:
        found = {
            "bench": "slow-host",
            "ratio": round(by_rate, 3),
            "ratio_by_cpu": round(by_cpu, 3),
            "bar": BAR,
            "within_bar": by_rate >= BAR,
        }
        found |= {
            "pages_per_second": {
                name: round(median([r.rate for r in rs]), 1) for name, rs in runs.items()
            }
        }
        found |= {
            "cpu_us_per_page": {
                name: round(median([r.cpu_us for r in rs]), 1) for name, rs in runs.items()
            }
        }
        print(
            json.dumps(
                found
                | {
                    "hosts": o.hosts,
                    "n": o.n,
                    "slow": o.slow,
                    "slow_rate": o.rate,
                    "reps": o.reps,
                    "machine": machine(),
                }
            )
        )
    return 0


def _by_rate(alone: Run, beside: Run) -> float:
    return beside.rate / alone.rate


def _by_cpu(alone: Run, beside: Run) -> float:
    return alone.cpu_us / beside.cpu_us


@contextmanager
def responding(hosts: Sequence[str], nice: int) -> Iterator[None]:
    refuse_taken(hosts[0], PORT)
    command = [sys.executable, str(BENCH / "responder.py"), str(PORT), *hosts]
    site = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=pin({SERVER_CORE}, nice)
    )
    try:
        assert site.stdout is not None
        if site.stdout.readline().strip() != "ready":
            raise BenchError("the site did not start")
        yield
    finally:
        site.send_signal(signal.SIGTERM)
        site.wait()


def run(hosts: Sequence[str], o: argparse.Namespace, *, slow: bool) -> Run:
    directory = fresh("slow-host")
    env = clean_environment(
        PENSTOCK_NET_ALLOW=",".join(f"{host}:{PORT}" for host in (SLOW, *hosts)),
        PENSTOCK_PACE_RATE="100000",
        PENSTOCK_DURABILITY="full",
    )
    commands = (
        [["domains", "limit", f"{SLOW}:{PORT}", o.rate], ["push", "-f", "slow.txt"]] if slow else []
    )
    (directory / "slow.txt").write_text(
        "".join(f"http://{SLOW}:{PORT}/product/slow-{i}\n" for i in range(o.slow))
    )
    (directory / "urls.txt").write_text(
        "".join(f"http://{hosts[i % len(hosts)]}:{PORT}/product/{i}\n" for i in range(o.n))
    )
    for arguments in [*commands, ["push", "-f", "urls.txt"]]:
        check_ended(
            watch(_penstock(*arguments), cores={CLIENT_CORE}, nice=o.nice, cwd=directory, env=env),
            f"penstock {arguments[0]}",
        )
    ledger = Ledger(directory, o.n)
    command = _penstock("run", str(BENCH / "pipeline.py"))
    w = watch(
        command,
        cores={CLIENT_CORE},
        nice=o.nice,
        cwd=directory,
        env=env,
        stop_when=lambda: ledger.ended() >= o.n,
    )
    check_ended(w, "penstock run")
    start, end, good = ledger.span()
    if good != o.n:
        raise BenchError(
            f"{good} of {o.n} pages of the other hosts were a success",
            f"see {directory}/stderr.txt",
        )
    return Run(o.n / (end - start), w.cpu_between(start, end) / o.n * 1e6, ledger.asked())


def _penstock(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *arguments]


class Ledger:
    """Reads the ledger from outside the worker."""

    def __init__(self, directory: Path, enough: int) -> None:
        self._file, self._enough = str(directory / ".penstock" / "penstock.db"), enough

    def ended(self) -> int:
        """Return the number of ended events, from the counters, which are cheap to read.

        The events of the slow host are counted only at the end.
        """
        ended: int = self._ask(
            "SELECT coalesce(sum(n), 0) FROM counter WHERE name IN ('success','dead')"
        )[0]
        return ended if ended < self._enough else ended - self.asked()

    def span(self) -> tuple[float, float, int]:
        """Return first start, last success and number of events of the other hosts."""
        start, end, good = self._ask(
            "SELECT min(dispatched_at), max(finished_at), sum(status='success') FROM event"
            " WHERE host<>?"
        )
        return start, end, good

    def asked(self) -> int:
        found: int = self._ask("SELECT count(*) FROM event WHERE host=? AND status='success'")[0]
        return found

    def _ask(self, sql: str) -> tuple:  # type: ignore[type-arg]
        db = apsw.Connection(self._file, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            db.set_busy_timeout(5000)
            bindings = (f"{SLOW}:{PORT}",) if "?" in sql else ()
            row: tuple = db.execute(sql, bindings).fetchall()[0]  # type: ignore[type-arg]
            return row
        finally:
            db.close()
