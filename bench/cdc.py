"""`cdc`: measures the time from a row in PostgreSQL to a durable event in the ledger.

Also measures the rows a second of one large transaction.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
from common import (
    BenchError,
    cache,
    clean_environment,
    machine,
    say,
    server_url,
    stop_server,
    table,
)
from psycopg import sql

BAR = 0.1  # seconds from INSERT to event, 95th percentile
CLI = [sys.executable, "-m", "penstock.cli.main"]
STEP = 0.001  # seconds between two reads of the ledger
PIPELINE = """
from penstock import Pipeline

bench = Pipeline("bench")
bench.extract(name="page")(lambda page: None)
bench.sink("jsonl:records.jsonl")
bench.source({url!r}, name="asked")
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench cdc", description=__doc__)
    parser.add_argument(
        "--n", type=int, default=1500, help="rows, each a transaction (default 1500)"
    )
    parser.add_argument("--rate", type=float, default=50.0, help="rows a second (default 50)")
    parser.add_argument(
        "--bulk",
        type=int,
        default=20_000,
        help="rows of one transaction afterwards (default 20000; 0 for none)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the server running")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    if o.n < 1 or o.rate <= 0 or o.bulk < 0:
        raise BenchError("--n and --rate must be positive, --bulk not negative")
    say(machine())
    directory = cache() / "scratch" / "cdc"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        with _database(server_url("postgres")) as url, _reader(directory, url):
            ledger = _Ledger(directory)
            sent, committed = _insert(url, o.n, o.rate)
            seen = ledger.wait(o.n)
            rows = _bulk(url, ledger, o.n, o.bulk) if o.bulk else None
            ledger.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if not o.keep:
            stop_server("postgres")
    figures = {
        "insert_to_event": _percentiles([seen[i] - sent[i] for i in range(o.n)]),
        "commit_to_event": _percentiles([seen[i] - committed[i] for i in range(o.n)]),
    }
    head = ("milliseconds", "p50", "p95", "p99", "max")
    print(
        f"\n{o.n:,} rows at {o.rate:g} a second, each in its own transaction. "
        "The ledger is in SQLite, with full durability. "
        "An event counts when another process can read it.\n"
    )
    print(
        table(
            head,
            [
                (name.replace("_", " "), *[f"{1000 * value:.1f}" for value in found.values()])
                for name, found in figures.items()
            ],
        )
    )
    p95 = figures["insert_to_event"]["p95"]
    print(f"\np95 from INSERT to event: {1000 * p95:.1f} ms, bar {1000 * BAR:.0f} ms")
    if rows is not None:
        print(f"one transaction of {o.bulk:,} rows: {rows:,.0f} events a second")
    if o.json:
        milliseconds = {
            name: {key: round(1000 * value, 2) for key, value in found.items()}
            for name, found in figures.items()
        }
        summary = {
            "bench": "cdc",
            "n": o.n,
            "rate": o.rate,
            **milliseconds,
            "bulk_events_per_second": rows and round(rows),
        }
        print(
            json.dumps(
                {**summary, "bar_ms": 1000 * BAR, "within_bar": p95 <= BAR, "machine": machine()}
            )
        )
    return 0


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in (50, 95, 99)} | {
        "max": ordered[-1]
    }


@contextlib.contextmanager
def _database(server: str) -> Iterator[str]:
    name = f"bench_{secrets.token_hex(6)}"
    url = server.rpartition("/")[0] + "/" + name
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            with psycopg.connect(url, autocommit=True) as db:
                db.execute(
                    "CREATE TABLE scrape_requests(id bigserial PRIMARY KEY, url text NOT NULL)"
                )
            yield url
        finally:
            admin.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE database=%s AND NOT active",
                (name,),
            )
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextlib.contextmanager
def _reader(directory: Path, url: str) -> Iterator[None]:
    """Run `penstock run --role source`. It reads when the block starts."""
    (directory / "bench.py").write_text(
        PIPELINE.format(url=url.replace("postgres:", "postgres+cdc:"))
    )
    output = directory / "stderr.txt"
    with output.open("wb") as err:
        process = subprocess.Popen(
            [*CLI, "run", "bench.py", "--role", "source"],
            cwd=directory,
            env=clean_environment(),
            stdout=err,
            stderr=err,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 30
        with psycopg.connect(url, autocommit=True) as db:
            while not db.execute(
                "SELECT 1 FROM pg_replication_slots WHERE database=current_database() AND active"
            ).fetchone():
                if process.poll() is not None or time.monotonic() > until:
                    raise BenchError(f"the reader does not read: {output.read_text()[-600:]}")
                time.sleep(0.05)
        yield
        if process.poll() is not None:
            raise BenchError(f"the reader ended: {output.read_text()[-600:]}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class _Ledger:
    """Times at which another process could first read each event, in the order of acceptance."""

    def __init__(self, directory: Path) -> None:
        self.seen: list[float] = []
        self._path = directory / ".penstock" / "penstock.db"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        with contextlib.closing(
            sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, isolation_level=None)
        ) as books:
            while not self._ended.wait(STEP):
                last = books.execute("SELECT max(n) FROM event").fetchone()[0] or 0
                if last > len(self.seen):
                    self.seen += [time.time()] * (last - len(self.seen))

    def wait(self, n: int) -> list[float]:
        until = time.monotonic() + 60
        while len(self.seen) < n:
            if time.monotonic() > until or not self._thread.is_alive():
                raise BenchError(f"{len(self.seen)} of {n} events came")
            time.sleep(0.01)
        return self.seen

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def _insert(url: str, n: int, rate: float) -> tuple[list[float], list[float]]:
    sent, committed = [], []
    with psycopg.connect(url, autocommit=True) as db:
        begun = time.monotonic()
        for i in range(n):
            time.sleep(max(0.0, begun + i / rate - time.monotonic()))
            sent.append(time.time())
            db.execute("INSERT INTO scrape_requests(url) VALUES(%s)", (f"https://shop.test/p/{i}",))
            committed.append(time.time())
    return sent, committed


def _bulk(url: str, ledger: _Ledger, before: int, rows: int) -> float:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "INSERT INTO scrape_requests(url) SELECT 'https://shop.test/b/' || n"
            " FROM generate_series(1, %s) n",
            (rows,),
        )
    begun = time.time()
    return rows / (ledger.wait(before + rows)[before + rows - 1] - begun)
