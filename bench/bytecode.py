"""`bytecode`: counts the Python bytecodes that one page costs, by module.

The count hardly depends on the load of the machine, so it shows differences of a few per cent that
CPU times on a shared machine cannot show. It counts the worker's process, not its children, and no
work of C libraries.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common import BENCH, BenchError, cache, machine, median, say, table, watch
from contenders import (
    OUT,
    Job,
    check_ended,
    check_rows,
    fresh,
    penstock_commands,
    penstock_environment,
    write_urls,
)
from target import make_site, serving

SERVER_CORE, CLIENT_CORE = 0, 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench bytecode", description=__doc__)
    parser.add_argument("--n", type=int, default=4000, help="pages (default 4000)")
    parser.add_argument("--reps", type=int, default=1, help="interleaved repetitions (default 1)")
    parser.add_argument("--late", action="store_true", help="parse whole pages, as in `pages`")
    parser.add_argument(
        "--isolated", action="store_true", help="extract in a child, whose work is not counted"
    )
    parser.add_argument(
        "--against", metavar="DIR", type=Path, help="compare with the code of another checkout"
    )
    parser.add_argument("--top", type=int, default=20, help="rows of the table (default 20)")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    o = parser.parse_args(arguments)
    pythons = {"this": Path(sys.executable)}
    if o.against is not None:
        pythons["other"] = o.against.resolve() / ".venv/bin/python"
        if not pythons["other"].exists():
            raise BenchError(f"{o.against} has no environment", f"{o.against}/dev exec true")
    # The first pages also count the start of the process, so a short run is subtracted.
    short = o.n // 3
    site = cache() / "site"
    make_site(site, o.n)
    by_module: dict[str, Counter[str]] = {name: Counter() for name in pythons}
    totals: dict[str, list[float]] = {name: [] for name in pythons}
    with serving(cache() / "nginx", site, core=SERVER_CORE):
        for rep in range(o.reps):
            for name, python in pythons.items():
                counts = count(python, o.n, o)
                counts.subtract(count(python, short, o))
                by_module[name].update(counts)
                totals[name].append(sum(counts.values()) / (o.n - short))
                say(f"{rep + 1}/{o.reps} {name}: {totals[name][-1]:,.0f} bytecodes a page")
    pages = (o.n - short) * o.reps
    rows = [
        (module, *(f"{by_module[name][module] / pages:,.0f}" for name in pythons))
        for module, _ in by_module["this"].most_common(o.top)
    ]
    print(f"\n{machine()}\n")
    print(table(("module", *pythons), rows))
    figures = {name: round(median(values), 1) for name, values in totals.items()}
    result: dict[str, object] = {"bench": "bytecode", "bytecodes_per_page": figures}
    if "other" in totals:
        ratios = [a / b for a, b in zip(totals["this"], totals["other"], strict=True)]
        result["ratio"] = round(median(ratios), 4)
        print(f"\nthis / other: {median(ratios):.3f} (median of {o.reps})")
    if o.json:
        print(json.dumps(result))
    return 0


def count(python: Path, n: int, o: argparse.Namespace) -> Counter[str]:
    """Run `n` pages with this interpreter. Return the bytecodes of each module."""
    job = Job(n=n, cores=frozenset({CLIENT_CORE}), late=o.late)
    directory = fresh("bytecode")
    write_urls(directory / "urls.txt", job)
    env = penstock_environment(job, isolation="process" if o.isolated else "none")
    push, run = ([str(python), *command[1:]] for command in penstock_commands(job))
    check_ended(watch(push, cores={CLIENT_CORE}, cwd=directory, env=env), "penstock push")
    env |= {
        "PYTHONPATH": str(BENCH / "bytecode_hook"),
        "BENCH_BYTECODE": str(directory / "counts"),
    }
    check_ended(watch(run, cores={CLIENT_CORE}, cwd=directory, env=env), "penstock run")
    check_rows(directory / OUT, n, "penstock")
    counts: Counter[str] = Counter()
    for file in directory.glob("counts.*"):
        for path, executed in json.loads(file.read_text()).items():
            counts[module_of(path)] += executed
    return counts


def module_of(path: str) -> str:
    """Return the path below `src` or `site-packages`, or the file name."""
    for folder in ("/src/", "/site-packages/", "/bench/"):
        if folder in path:
            return path.rpartition(folder)[2]
    return Path(path).name
