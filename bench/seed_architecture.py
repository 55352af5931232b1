"""`seed`: measures the time from INSERT to the fetch and to the result row.

The row passes Debezium, Kafka, Penstock, Kafka and the JDBC sink connector, all of them real.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from common import BenchError, clean_environment, machine, say, server_url, stop_server, table

SERVERS = ("postgres", "kafka", "connect")
FETCH_BAR, ROW_BAR = 1.0, 3.0  # seconds, p95
PIPELINE = """
from penstock import Page, Pipeline

shop = Pipeline({name!r})
shop.source("kafka://{broker}/{topic}", connect={source!r})
shop.sink("kafka://{broker}/{products}?key=sku", connect={sink!r})

@shop.extract(match="*/p/*", key="sku")
def product(page: Page):
    yield {{
        "sku": page.css("[data-sku]::attr(data-sku)").get(),
        "title": page.css("h1::text").get(),
        "price": page.css(".price::text").get(),
    }}
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench seed", description=__doc__)
    parser.add_argument("--n", type=int, default=300, help="rows, one INSERT each (default 300)")
    parser.add_argument("--rate", type=float, default=20.0, help="rows a second (default 20)")
    parser.add_argument("--keep", action="store_true", help="leave the servers running")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    if o.n < 20 or o.rate <= 0:
        raise BenchError("too few rows for a 95th percentile", "--n 20 or more, --rate above 0")
    say(machine())
    try:
        urls = {name: server_url(name) for name in SERVERS}
        with TemporaryDirectory() as scratch:
            found = Measured(Path(scratch), urls, o.n).run(o.rate)
    finally:
        if not o.keep:
            for name in reversed(SERVERS):
                stop_server(name)
    rows = [
        (what, *(f"{1000 * found[what][p]:.0f} ms" for p in ("p50", "p95", "max")), f"{bar:g} s")
        for what, bar in (("fetch", FETCH_BAR), ("row", ROW_BAR))
    ]
    print("\n" + table(("INSERT to", "p50", "p95", "max", "bar (p95)"), rows), flush=True)
    within = found["fetch"]["p95"] < FETCH_BAR and found["row"]["p95"] < ROW_BAR
    summary = {
        "bench": "seed",
        "machine": machine(),
        "rows": o.n,
        "rate": o.rate,
        "insert_to_fetch": found["fetch"],
        "insert_to_row": found["row"],
        "bars": {"fetch_p95": FETCH_BAR, "row_p95": ROW_BAR},
        "within_bar": within,
    }
    if o.json:
        print(json.dumps(summary))
    return 0


class Measured:
    """Two tables and two topics with unique names, which are removed at the end."""

    def __init__(self, scratch: Path, urls: dict[str, str], n: int) -> None:
        self.n, self.scratch, self.database, self.connect = (
            n,
            scratch,
            urls["postgres"],
            urls["connect"],
        )
        self.id = "b" + uuid.uuid4().hex[:8]
        self.requests, self.products = f"{self.id}_requests", f"{self.id}_products"
        source = {
            "kind": "debezium-postgres",
            "database": self.database,
            "table": f"public.{self.requests}",
        }
        sink = {"kind": "jdbc-postgres", "database": self.database, "table": self.products}
        broker = urls["kafka"].removeprefix("kafka://")
        text = PIPELINE.format(
            name=self.id,
            broker=broker,
            topic=f"{self.id}.public.{self.requests}",
            products=self.products,
            source=source,
            sink=sink,
        )
        (scratch / "shop.py").write_text(text)
        self.seen: dict[str, float] = {}

    def run(self, rate: float) -> dict[str, dict[str, float]]:
        log = self.scratch / "target.jsonl"
        web = [
            sys.executable,
            "-m",
            "penstock.testing.web",
            "--pages",
            str(self.n + 1),
            "--log",
            str(log),
            "--with-parent",
        ]
        target = subprocess.Popen(web, stdout=subprocess.PIPE, text=True)
        assert target.stdout is not None
        site = json.loads(target.stdout.readline())
        env = clean_environment(
            PENSTOCK_CONNECT_URL=self.connect,
            PENSTOCK_NET_ALLOW=f"127.0.0.1:{site['port']}",
            PENSTOCK_PACE_RATE="unlimited",
        )
        penstock = [sys.executable, "-m", "penstock.cli.main"]
        sql = psycopg.connect(self.database, autocommit=True)
        sql.execute(f"CREATE TABLE {self.requests} (id bigserial PRIMARY KEY, url text NOT NULL)")
        worker: subprocess.Popen[bytes] | None = None
        try:
            self._do([*penstock, "connect", "apply", "shop.py"], env)
            with open(self.scratch / "run.log", "wb") as out:
                worker = subprocess.Popen(
                    [*penstock, "run", "shop.py"], cwd=self.scratch, env=env, stdout=out, stderr=out
                )
            say("the whole chain once, so that everything is open")
            sql.execute(
                f"INSERT INTO {self.requests} (url) VALUES (%s)", (f"{site['url']}/p/{self.n}",)
            )
            watcher = threading.Thread(target=self._watch, daemon=True)
            watcher.start()
            self._until(1, 60.0)
            say(f"{self.n} rows, {rate:g} a second")
            inserted: dict[str, float] = {}
            began = time.monotonic()
            for i in range(self.n):
                time.sleep(max(0.0, began + i / rate - time.monotonic()))
                inserted[f"/p/{i}"] = time.time()
                sql.execute(
                    f"INSERT INTO {self.requests} (url) VALUES (%s)", (f"{site['url']}/p/{i}",)
                )
            self._until(self.n + 1, 60.0)
            fetched: dict[str, float] = {}
            for line in log.read_text().splitlines():
                entry = json.loads(line)
                fetched.setdefault(entry["path"], entry["at"] / 1e6)
            return {
                "fetch": figures([fetched[path] - at for path, at in inserted.items()]),
                "row": figures(
                    [
                        self.seen[f"T-{path.rpartition('/')[2]}"] - at
                        for path, at in inserted.items()
                    ]
                ),
            }
        finally:
            if worker is not None:
                worker.send_signal(signal.SIGTERM)
                worker.wait(60)
            target.terminate()
            target.wait()
            self._clear(sql, penstock, env)

    def _watch(self) -> None:
        """Record when each row can first be read, to a hundredth of a second."""
        with psycopg.connect(self.database, autocommit=True) as sql:
            while len(self.seen) <= self.n:
                try:
                    found = sql.execute(
                        f"SELECT sku FROM {self.products} WHERE NOT sku = ANY(%s)",
                        (list(self.seen),),
                    ).fetchall()
                except psycopg.errors.UndefinedTable:
                    found = []
                except psycopg.Error:
                    return  # the bench has ended
                now = time.time()
                self.seen |= {sku: now for (sku,) in found}
                time.sleep(0.01)

    def _until(self, rows: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while len(self.seen) < rows:
            if time.monotonic() > until:
                log = (self.scratch / "run.log").read_text("utf-8", "replace")[-1500:]
                raise BenchError(
                    f"{len(self.seen)} of {rows} rows after {seconds:.0f} s",
                    f"last output of the worker: {log}",
                )
            time.sleep(0.02)

    def _do(self, command: list[str], env: dict[str, str]) -> None:
        done = subprocess.run(
            command, cwd=self.scratch, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BenchError(
                f"{' '.join(command[3:])} ended with {done.returncode}",
                (done.stdout + done.stderr)[-1500:],
            )

    def _clear(
        self, sql: psycopg.Connection[Any], penstock: list[str], env: dict[str, str]
    ) -> None:
        subprocess.run(
            [*penstock, "connect", "delete", "--all", "--yes", "--pipeline", self.id],
            cwd=self.scratch,
            env=env,
            capture_output=True,
            check=False,
        )
        slots = f"FROM pg_replication_slots WHERE slot_name LIKE '%{self.id}%'"
        for _ in range(100):
            if not sql.execute(f"SELECT 1 {slots} AND active").fetchone():
                break
            time.sleep(0.1)
        sql.execute(f"SELECT pg_drop_replication_slot(slot_name) {slots} AND NOT active")
        sql.execute(f"DROP TABLE IF EXISTS {self.requests}, {self.products}")
        sql.close()


def figures(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": round(ordered[len(ordered) // 2], 4),
        "p95": round(ordered[int(len(ordered) * 0.95)], 4),
        "max": round(ordered[-1], 4),
    }
