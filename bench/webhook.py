"""`webhook`: measures the time of a signed POST until its 202, at a steady rate of requests.

At the 202, the event is durable and published.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import hmac
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common import BenchError, cache, clean_environment, cpu, machine, pin, refuse_taken, say, table

SERVER_CORE, CLIENT_CORE = 1, 0
PORT = 8197
BAR_MS = 500.0  # p95
KEY = bytes(range(32))
PIPELINE = f"""
from penstock import Pipeline

shop = Pipeline("shop")
shop.extract(name="page")(lambda page: None)
shop.sink("jsonl:records.jsonl")
shop.source("webhook:shop", secret="whsec_{base64.b64encode(KEY).decode()}", rate="unlimited")
"""


@dataclass
class Seen:
    # Measured from the time at which a request was due. So a stall counts for all delayed requests.
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0

    def share(self, part: float) -> float:
        """Return the latency quantile `part` in milliseconds."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1000 if ordered else 0.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench webhook", description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second (default 200)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument(
        "--connections", type=int, default=32, help="connections of the senders (default 32)"
    )
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="priority of server and senders, e.g. -15 as root on a busy machine",
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    if o.rate <= 0 or o.seconds <= 0 or not 1 <= o.connections <= 200:
        raise BenchError("--rate and --seconds are above 0, --connections between 1 and 200")
    refuse_taken("127.0.0.1", PORT)
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {CLIENT_CORE})
    directory = cache() / "webhook"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    if o.nice:
        os.nice(o.nice)
    with serving(directory, o.nice) as pid:
        asyncio.run(send(50.0, 1.0, 8))  # warm-up
        before = cpu(pid)
        steady = asyncio.run(send(o.rate, o.seconds, o.connections))
        cpu_us = (cpu(pid) - before) / max(1, len(steady.latencies)) * 1e6
        say(
            f"{o.rate:g} requests/s: p50 {steady.share(0.5):.1f} ms, p95 {steady.share(0.95):.1f}"
            f" ms, p99 {steady.share(0.99):.1f} ms"
        )
        flat_out = asyncio.run(send(0.0, min(o.seconds, 5.0), o.connections))
    accepted = count(directory)
    answered = steady.statuses[202] + flat_out.statuses[202] + 50
    if set(steady.statuses) != {202} or accepted != answered:
        raise BenchError(
            f"{accepted} events for {answered} answers of 202; statuses {dict(steady.statuses)}",
            f"the log is {directory / 'serve.log'}",
        )
    most = flat_out.statuses[202] / flat_out.seconds
    rows = [
        (
            f"{o.rate:g}/s",
            len(steady.latencies),
            *(f"{steady.share(part):.1f}" for part in (0.5, 0.95, 0.99, 1.0)),
        ),
        (
            f"flat out: {most:,.0f}/s",
            len(flat_out.latencies),
            *(f"{flat_out.share(part):.1f}" for part in (0.5, 0.95, 0.99, 1.0)),
        ),
    ]
    print(
        f"\nSigned POST to 202, {o.connections} connections, every event durable"
        f" (synchronous=FULL). Milliseconds.\n"
    )
    print(table(("", "requests", "p50", "p95", "p99", "max"), rows))
    within = steady.share(0.95) < BAR_MS
    print(
        f"\np95 at {o.rate:g} requests/s: {steady.share(0.95):.1f} ms (bar: {BAR_MS:g} ms);"
        f" {cpu_us:,.0f} µs of the server's CPU for each\n"
    )
    if o.json:
        found = {
            "bench": "webhook",
            "rate": o.rate,
            "seconds": o.seconds,
            "connections": o.connections,
            "requests": len(steady.latencies),
        }
        found |= {
            f"p{int(part * 100)}_ms": round(steady.share(part), 2) for part in (0.5, 0.95, 0.99)
        } | {"max_ms": round(steady.share(1.0), 2)}
        found |= {"cpu_us_per_request": round(cpu_us)}
        found |= {
            "requests_per_second_flat_out": round(most, 1),
            "bar_ms": BAR_MS,
            "within_bar": within,
            "machine": machine(),
        }
        print(json.dumps(found))
    return 0


@contextmanager
def serving(directory: Path, nice: int) -> Iterator[int]:
    (directory / "shop.py").write_text(PIPELINE)
    core = {SERVER_CORE} if (os.cpu_count() or 1) > 1 else {0}
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "shop.py", "--port", str(PORT)]
    command += ["-o", "serve.max_per_address=256"]  # all senders have one address
    with (directory / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=clean_environment(),
            stdout=log,
            stderr=log,
            preexec_fn=pin(core, nice),
        )
        try:
            until = time.monotonic() + 30
            while b"listening on" not in (directory / "serve.log").read_bytes():
                if process.poll() is not None or time.monotonic() > until:
                    raise BenchError(
                        "penstock serve did not start", f"its log is {directory / 'serve.log'}"
                    )
                time.sleep(0.05)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def count(directory: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "status", "--json"],
        cwd=directory,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    accepted: int = json.loads(done.stdout)["total"]["accepted"]
    return accepted


def request(n: int) -> bytes:
    body = b'{"url": "https://shop.example/p/%d", "sku": "S-%d", "price": 10.5, "note": "%s"}' % (
        n,
        n,
        b"x" * 200,
    )
    id_, at = f"msg_{time.time_ns()}_{n}", str(int(time.time()))
    digest = base64.b64encode(
        hmac.new(KEY, f"{id_}.{at}.".encode() + body, hashlib.sha256).digest()
    ).decode()
    head = (
        f"POST /hooks/shop HTTP/1.1\r\nhost: 127.0.0.1:{PORT}\r\ncontent-type:"
        f" application/json\r\ncontent-length: {len(body)}\r\n"
        f"webhook-id: {id_}\r\nwebhook-timestamp: {at}\r\nwebhook-signature: v1,{digest}\r\n\r\n"
    )
    return head.encode() + body


async def send(rate: float, seconds: float, connections: int) -> Seen:
    """Send `rate` requests a second, even if answers are slow.

    If `rate` is 0, each connection sends the next request when it has the answer.
    """
    seen, loop = Seen(), asyncio.get_running_loop()
    total = int(rate * seconds)
    numbers = iter(range(total)) if rate else iter(range(10**9))
    begin = loop.time() + 0.05

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        try:
            for n in numbers:
                due = begin + n / rate if rate else loop.time()
                if not rate and due > begin + seconds:
                    return
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(wait)
                writer.write(request(n))
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(
                    int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                )
                seen.latencies.append(loop.time() - due)
                seen.statuses[int(head[9:12])] += 1
        finally:
            writer.close()

    await asyncio.gather(*[one() for _ in range(connections)])
    seen.seconds = loop.time() - begin
    return seen
