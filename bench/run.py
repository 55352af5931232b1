"""Command `./dev bench NAME …`: runs a bench, or prints an error and a hint."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import BenchError

BENCHES = {
    "pages": (
        "pages",
        "pages a second on one core, against Scrapy and other peers (--all), with full durability",
    ),
    "claim": (
        "claim",
        "cost of taking an event, with a thousand and with a million waiting, `status`, memory",
    ),
    "slow-host": (
        "slow_host",
        "cost of a host with a request in ten seconds and ten thousand events for fifty other"
        " hosts",
    ),
    "brokers": ("brokers", "publish, lease and ack on each broker, against its raw client library"),
    "cdc": (
        "cdc",
        "how long a row in PostgreSQL takes until its event is durable, read from the server's log",
    ),
    "webhook": (
        "webhook",
        "how long a signed webhook takes until its event is durable, at 200 requests a second",
    ),
    "seed": (
        "seed_architecture",
        "INSERT to fetch, and to result row, through Debezium, Kafka, Penstock and the JDBC sink",
    ),
    "bytecode": ("bytecode", "Python bytecodes of one page, by module, against another checkout"),
    "profile": ("profiling", "where the time of one Penstock run goes, by module and function"),
}


def main() -> int:
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name in ("", "-h", "--help"):
        print("Usage: ./dev bench NAME [ARGS] [--json]\n")
        for known, (_, text) in BENCHES.items():
            print(f"  {known:<11}{text}")
        print("\nFor the options of a bench: ./dev bench NAME --help")
        return 0
    try:
        if name not in BENCHES:
            raise BenchError(f"there is no bench {name!r}", f"one of: {', '.join(BENCHES)}")
        if sys.platform != "linux":
            raise BenchError(
                "the benches pin processes and read /proc: they need Linux",
                "run them on a Linux machine with two cores",
            )
        code: int = importlib.import_module(BENCHES[name][0]).main(arguments)
        return code
    except BenchError as e:
        print(f"Error: {e.message}" + (f"\nTry:   {e.hint}" if e.hint else ""), file=sys.stderr)
        return 2 if name not in BENCHES else 1


if __name__ == "__main__":
    sys.exit(main())
