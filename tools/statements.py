"""Count the AST statements of a source tree by folder, and list the largest modules.

A statement is an `ast.stmt` node. Its line breaks do not matter, so formatting does not change the
count. A docstring is one statement.

The table also counts some marks of untyped code:
  Any           uses of the name `Any`, without imports
  cast          calls of `cast` or `typing.cast`
  type: ignore  comments that silence the type checker
  tx: Any       parameters `tx` that are annotated with `Any`
  .apart        uses of an attribute `apart`
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKS = ("Any", "cast", "type: ignore", "tx: Any", ".apart")
COLUMNS = ("modules", "lines", "statements", *MARKS)


def named(node: ast.expr | None, name: str) -> bool:
    """Return True if `node` is `name` or ends in `.name`."""
    if isinstance(node, ast.Attribute):
        return node.attr == name
    return isinstance(node, ast.Name) and node.id == name


def count(source: str) -> Counter[str]:
    found = Counter(modules=1, lines=len(source.splitlines()))
    for node in ast.walk(ast.parse(source)):
        found["statements"] += isinstance(node, ast.stmt)
        if isinstance(node, ast.expr):
            found["Any"] += named(node, "Any")
        if isinstance(node, ast.Call):
            found["cast"] += named(node.func, "cast")
        elif isinstance(node, ast.arg):
            found["tx: Any"] += node.arg == "tx" and named(node.annotation, "Any")
        elif isinstance(node, ast.Attribute):
            found[".apart"] += node.attr == "apart"
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found["type: ignore"] += "type: ignore" in token.string
    return found


def room(package: Path, file: Path) -> str:
    """Return the folder of `file` below the package, or "." for a module of the package itself."""
    parts = file.relative_to(package).parts
    return parts[0] if len(parts) > 1 else "."


def measure(package: Path, largest: int) -> dict[str, object]:
    rooms: dict[str, Counter[str]] = {}
    lines: Counter[str] = Counter()
    for file in sorted(package.rglob("*.py")):
        found = count(file.read_text(encoding="utf-8"))
        rooms.setdefault(room(package, file), Counter()).update(found)
        lines[file.relative_to(package).as_posix()] = found["lines"]
    total = sum(rooms.values(), Counter())

    def row(found: Counter[str]) -> dict[str, int]:
        return {column: found[column] for column in COLUMNS}

    return {
        "rooms": {name: row(rooms[name]) for name in sorted(rooms)},
        "total": row(total),
        "largest": dict(lines.most_common(largest)),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[str(c) for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "package",
        nargs="?",
        type=Path,
        default=ROOT / "src" / "penstock",
        help="folder of the package (default: src/penstock of this checkout)",
    )
    add("--largest", type=int, default=10, metavar="N", help="modules to list by lines (10)")
    add("--json", action="store_true", help="print one JSON document instead of the tables")
    args = parser.parse_args()
    if not args.package.is_dir():
        parser.error(f"{args.package} is not a folder")

    found = measure(args.package, args.largest)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    rooms, total, largest = found["rooms"], found["total"], found["largest"]
    assert isinstance(rooms, dict)
    assert isinstance(total, dict)
    assert isinstance(largest, dict)
    rows = [(name, *row.values()) for name, row in rooms.items()]
    print(table(("room", *COLUMNS), [*rows, ("total", *total.values())]))
    print()
    print(table(("largest modules", "lines"), list(largest.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
