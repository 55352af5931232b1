"""`brokers`: measures publish, lease and ack of each broker: messages a second and client CPU.

The raw client library does the same work for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from common import BenchError, machine, median, say, server_url, stop_server, table
from raw_clients import RAW, Turn

from penstock.clock import SystemClock
from penstock.config import files as config
from penstock.model import Ack
from penstock.ports import Out, TopicSpec
from penstock.runtime.stores import adapter
from penstock.stores.context import Context

BODY = b'{"specversion":"1.0","data":"' + b"x" * 400 + b'"}'
BATCHES = {1: 300, 50: 6_000, 500: 20_000}  # batch size -> messages
KEYS = 50
BAR = 1.5  # limit of the client CPU, as a multiple of the raw client's, at the largest batch
NAMES = ("sqlite", "postgres", "redis", "rabbitmq", "kafka", "sqs")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench brokers", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        default=list(NAMES),
        help=f"brokers to measure, whose servers are started (default: {' '.join(NAMES)})",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="interleaved rounds, the median counts (default 3)"
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    if unknown := [name for name in o.names if name not in NAMES]:
        raise BenchError(f"there is no broker {unknown[0]!r}", f"one of: {', '.join(NAMES)}")
    say(machine())
    summary: dict[str, object] = {"bench": "brokers", "machine": machine(), "bar": BAR}
    ratios: dict[str, float] = {}
    for name in o.names:
        found = measured(name, o.rounds)
        summary[name] = found
        ratios[name] = found[max(BATCHES)]["cpu_ratio"]
        rows = [
            (
                batch,
                f"{f['ours_per_second']:,}",
                f"{f['raw_per_second']:,}",
                f["ours_us"],
                f["raw_us"],
                f["cpu_ratio"],
            )
            for batch, f in found.items()
        ]
        print(
            f"\n{name}\n"
            + table(("batch", "msg/s", "raw msg/s", "CPU µs", "raw CPU µs", "ratio"), rows),
            flush=True,
        )
    # The embedded broker is its own server. So its CPU is not comparable with a client's CPU.
    summary |= {
        "cpu_ratio": ratios,
        "within_bar": all(ratio <= BAR for name, ratio in ratios.items() if name != "sqlite"),
    }
    if o.json:
        print(json.dumps(summary))
    return 0


def measured(name: str, rounds: int) -> dict[int, dict[str, float]]:
    with TemporaryDirectory() as scratch:
        url = f"sqlite:{scratch}/broker.db" if name == "sqlite" else server_url(name)
        try:
            costs: dict[tuple[str, int], list[tuple[float, float]]] = {}
            for turn in range(rounds):
                for batch, total in BATCHES.items():
                    sides: list[
                        tuple[str, Callable[[int, int], Awaitable[tuple[float, float]]]]
                    ] = [
                        ("ours", lambda b, t: ours(url, Path(scratch), b, t)),
                        ("raw", lambda b, t: raw(name, url, Path(scratch), b, t)),
                    ]
                    for side, work in sides if turn % 2 else reversed(sides):
                        cost = asyncio.run(work(batch, total))  # type: ignore[arg-type]
                        costs.setdefault((side, batch), []).append(cost)
                say(f"{name}: round {turn + 1} of {rounds}")
        finally:
            if name != "sqlite":
                stop_server(name)
    found = {}
    for batch in BATCHES:
        (mine, cpu), (theirs, their_cpu) = (
            [median([c[i] for c in costs[side, batch]]) for i in (0, 1)] for side in ("ours", "raw")
        )
        found[batch] = {
            "ours_per_second": round(mine),
            "raw_per_second": round(theirs),
            "ours_us": round(cpu, 1),
            "raw_us": round(their_cpu, 1),
            "cpu_ratio": round(cpu / their_cpu, 2),
        }
    return found


async def timed(
    turn: Callable[[int], Awaitable[None]], batch: int, total: int
) -> tuple[float, float]:
    """Return messages a second, and CPU µs of this process per message, after a warm-up."""
    for _ in range(3):
        await turn(batch)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(total // batch):
        await turn(batch)
    return total / (time.perf_counter() - began), (time.process_time() - cpu) / total * 1e6


async def ours(url: str, scratch: Path, batch: int, total: int) -> tuple[float, float]:
    namespace = f"b{os.urandom(4).hex()}"
    loaded = config.load(
        {"state.dir": str(scratch / "state"), "namespace": namespace}, {}, scratch
    ).config
    context = Context(loaded, SystemClock(), random.Random(), worker="bench")
    broker = adapter("brokers", url)(url, context)
    try:
        await broker.ensure([TopicSpec(name="t")])
        sub = broker.subscribe("t", "main", owner="bench", lease=60.0)
        sent, ack = 0, Ack()

        async def turn(n: int) -> None:
            nonlocal sent
            answers = await broker.publish(
                [
                    Out(topic="t", id=f"{sent + i:032x}", key=f"h{i % KEYS}.test", body=BODY)
                    for i in range(n)
                ]
            )
            assert set(answers) == {"ok"}, set(answers)
            sent += n
            left = n
            while left:
                got = await sub.receive(left, 5.0)
                assert all(await sub.settle([(d, ack) for d in got]))
                left -= len(got)

        try:
            return await timed(turn, batch, total)
        finally:
            await sub.close()
            await broker.purge("t")
    finally:
        await broker.close()
        context.close()


async def raw(name: str, url: str, scratch: Path, batch: int, total: int) -> tuple[float, float]:
    turn: Turn
    async with RAW[name](url, scratch, BODY) as turn:
        return await timed(turn, batch, total)
