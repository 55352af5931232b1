"""What the demo says when it is over: what there is, what went wrong on purpose, and what to try
next.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from rich.text import Text

from penstock.demo.monitor import Look
from penstock.testing.web import Entry, read_log


@dataclass(frozen=True, kw_only=True)
class Ending:
    """All that the summary is made of."""

    out: Path
    cwd: Path
    elapsed: float
    first_row: float | None
    look: Look
    limited: str
    redesigned: float | None  # seconds after the start
    requests: Path  # the shop's own log


def text(e: Ending) -> tuple[Text, Text]:
    """What there is, and what to type: the second must not be wrapped. For people and for pipes
    alike.
    """
    c, n = e.look.counts, e.look.counters
    named = ("success", "duplicate", "dead", "delayed", "pending", "in_flight")
    states = [f"{getattr(c, name)} {name.replace('_', ' ')}" for name in named if getattr(c, name)]
    made, typed = Text(), Text()

    def line(*parts: str | tuple[str, str], to: Text = made) -> None:
        to.append_text(Text.assemble(*parts)).append("\n")

    first = f"; the first row came after {e.first_row:.1f} s" if e.first_row is not None else ""
    line(
        ("Done", "bold green") if n.get("records") else ("No record was written", "bold red"),
        f" after {e.elapsed:.1f} s{first}.",
    )
    line(f"{c.accepted} events: {', '.join(states) or 'none'}.")
    line()
    line("In ", (_place(e), "bold"), ":")
    for name, what, about in _files(e.out):
        line("  ", (f"{name:<15}", "cyan"), f"{what:>10}", (f"   {about}", "dim"))
    line()
    for remark in (*_limited(e), *_dead(e), *_redesigned(e)):
        line(remark)
    line()
    again = program(e.out)
    line(("Try:", "bold"), to=typed)
    line("  ", (f"cd {shlex.quote(_place(e))}", "cyan"), to=typed)
    for command, about in (
        ("status", "how much of everything"),
        ("trace last", "what happened to the newest event"),
        ("dlq ls", "what is dead, and why"),
    ):
        line("  ", (f"{again} {command:<12}", "cyan"), (about, "dim"), to=typed)
    typed.rstrip()
    return made, typed


# -- what there is ---------------------------------------------------------------------------------


def _place(e: Ending) -> str:
    return (
        str(e.out.relative_to(e.cwd))
        if e.out.is_relative_to(e.cwd) and e.out != e.cwd
        else str(e.out)
    )


def _files(out: Path) -> list[tuple[str, str, str]]:
    found = []
    if (file := out / "records.jsonl").exists():
        found.append((file.name, f"{_lines(file)} rows", "every record, as it came"))
    if (file := out / "products.db").exists():
        found.append((file.name, f"{_rows(file)} rows", "one row a product, the newest"))
    if (file := out / "changes.txt").exists():
        found.append((file.name, f"{_lines(file)} lines", "what the on_change hook wrote"))
    found.append(("shop.py", "", "the pipeline; penstock.toml has its settings"))
    found.append(
        ("shop.log", f"{_lines(out / 'shop.log')} lines", "what the shop was asked, by its own log")
    )
    return found


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _rows(file: Path) -> int:
    """Asked the way a user would, with the standard library."""
    db = sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)
    try:
        return int(db.execute("SELECT count(*) FROM products").fetchone()[0])
    except sqlite3.OperationalError:  # it ended before the first row
        return 0
    finally:
        db.close()


# -- what went wrong on purpose --------------------------------------------------------------------


def visits(requests: Path, limited: str) -> list[Entry]:
    """When the limited edition's page was asked for, by the shop's log."""
    port = urlsplit(limited).port
    return (
        [
            entry
            for entry in read_log(requests)
            if entry.port == port and entry.path.startswith("/product/")
        ]
        if requests.exists()
        else []
    )


def _limited(e: Ending) -> list[str]:
    asked = visits(e.requests, e.limited)
    if not asked or asked[0].status != 429:
        return []
    said = f"{asked[0].path} answered 429 with Retry-After"
    if len(asked) == 1:
        return [f"{said}; the demo ended before it was asked again."]
    return [
        f"{said}; it was asked again {(asked[1].at - asked[0].at) / 1e6:.1f} s later and answered {asked[-1].status}."
    ]


def _dead(e: Ending) -> list[str]:
    shown = e.look.dead[:3]
    said = [f"{urlsplit(letter.url).path} is dead: {letter.reason}." for letter in shown]
    return said + [f"… and {e.look.counts.dead - len(shown)} more are dead."] * (
        e.look.counts.dead > len(shown)
    )


def _redesigned(e: Ending) -> list[str]:
    if e.redesigned is None:
        return []
    empty = e.look.counters.get("empty", 0)
    pages = "1 page" if empty == 1 else f"{empty} pages"
    return [
        f"The shop was redesigned after {e.redesigned:.0f} s; since then {pages} gave no row: `empty` in `status`. The last good rows stay."
    ]


# -- what to try -----------------------------------------------------------------------------------


def program(out: Path) -> str:
    """How this command can be called again from there: `penstock` where the shell finds it, else as
    it was called now.
    """
    if script := os.environ.get("DEV_SCRIPT"):  # ./dev says where it is
        return f"{shlex.quote(_shorter(Path(script), out))} exec penstock"
    called = Path(sys.argv[0])
    if called.name != "penstock":
        return f"{shlex.quote(sys.executable)} -m penstock.cli.main"
    found = shutil.which("penstock")
    return (
        "penstock"
        if found and called.exists() and os.path.samefile(found, called)
        else shlex.quote(_shorter(called.absolute(), out))
    )


def _shorter(path: Path, start: Path) -> str:
    relative = os.path.relpath(path, start)
    return relative if len(relative) < len(str(path)) else str(path)
