"""Compare the test ids of this checkout with the recorded ones.

An id may change only if bench/baseline/renamed-tests.txt lists the change. Each line there is
`old -> new`. `old` is a whole id, or the part of an id before `/`, `::` or `[`: a line may rename a
folder, a file, a class or a test function. The lines apply in order, each to the result of the
lines before it.
Lines that start with `#` are comments.

Exit code 1 if an id vanished without a rename.
"""

from __future__ import annotations

import argparse
import gzip
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "bench" / "baseline"
ARROW = " -> "
# The id of a test with a gzip body contains the time at which the body was made.
GZIP_TIME = re.compile(r"(\\x1f\\x8b\\x08\\x00).*?(\\x02\\xff)")


def only_ids(lines: Iterable[str]) -> set[str]:
    """Return the lines of `pytest --collect-only -q` that are ids."""
    tests = (line for line in lines if line.startswith("tests/") and "::" in line)
    return {GZIP_TIME.sub(r"\1TIME\2", test) for test in tests}


def recorded(file: Path) -> set[str]:
    raw = file.read_bytes()
    text = gzip.decompress(raw) if file.suffix == ".gz" else raw
    return only_ids(text.decode().splitlines())


def collected() -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"pytest cannot collect the tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return only_ids(done.stdout.splitlines())


def renames(file: Path) -> list[tuple[str, str]]:
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        old, arrow, new = line.partition(ARROW)
        if not arrow or not old or not new:
            sys.exit(f"{file}:{number}: the line is not `old{ARROW}new`: {line}")
        found.append((old, new))
    return found


def renamed(test: str, old: str, new: str) -> str:
    """Return `test` with `new` in the place of `old` if `old` is the whole id or a part of it."""
    rest = test.removeprefix(old)
    if test.startswith(old) and (
        not rest or old.endswith("/") or rest.startswith(("/", "::", "["))
    ):
        return new + rest
    return test


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--old", type=Path, default=BASELINE / "test-ids.txt.gz", help="recorded ids")
    add("--renamed", type=Path, default=BASELINE / "renamed-tests.txt", help="table of renamed ids")
    add("--new", type=Path, help="output of `pytest --collect-only -q` (default: collect now)")
    add("--added", action="store_true", help="also list the ids that are new")
    args = parser.parse_args()

    expected = {test: test for test in recorded(args.old)}  # recorded id: its id today
    unused = []
    for old, new in renames(args.renamed):
        changed = {test: renamed(now, old, new) for test, now in expected.items()}
        if changed == expected:
            unused.append(f"{old}{ARROW}{new}")
        expected = changed
    current = recorded(args.new) if args.new else collected()
    vanished = {test: now for test, now in expected.items() if now not in current}
    added = current.difference(expected.values())

    for test, now in sorted(vanished.items()):
        print(f"vanished: {test}" + (f"{ARROW}{now}" if now != test else ""))
    for line in unused:
        print(f"renames no id: {line}")
    if args.added:
        for test in sorted(added):
            print(f"added: {test}")
    moved = sum(now != test for test, now in expected.items())
    print(
        f"{len(expected)} recorded ids, {moved} renamed, {len(vanished)} vanished, "
        f"{len(added)} added, {len(current)} now"
    )
    return 1 if vanished else 0


if __name__ == "__main__":
    sys.exit(main())
