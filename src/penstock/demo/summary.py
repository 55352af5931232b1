"""The summary at the end of the demo: results, intended failures and commands to try next."""

from __future__ import annotations

import contextlib
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
class DemoResult:
    """Data of the summary."""

    out: Path
    cwd: Path
    elapsed: float
    first_row: float | None
    look: Look
    limited: str
    redesigned: float | None  # seconds after the start
    requests: Path  # the shop's own log


def summary(e: DemoResult) -> tuple[Text, Text]:
    """Return the results, and the commands to type.

    The commands must not be wrapped, on a terminal or in a pipe.
    """
    c, n = e.look.counts, e.look.counters
    named = ("success", "duplicate", "dead", "delayed", "pending", "in_flight")
    states = [f"{getattr(c, name)} {name.replace('_', ' ')}" for name in named if getattr(c, name)]
    made, typed = Text(), Text()

    def line(*parts: str | tuple[str, str], to: Text = made) -> None:
        to.append_text(Text.assemble(*parts)).append("\n")

    first = f" The first row came after {e.first_row:.1f} s." if e.first_row is not None else ""
    line(
        ("Done", "bold green") if n.get("records") else ("No record was written", "bold red"),
        f" after {e.elapsed:.1f} s.{first}",
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
        ("status", "counts of events by status"),
        ("trace last", "history of the newest event"),
        ("dlq ls", "dead events with their reasons"),
    ):
        line("  ", (f"{again} {command:<12}", "cyan"), (about, "dim"), to=typed)
    typed.rstrip()
    return made, typed


# -- results ---------------------------------------------------------------------------------------


def _place(e: DemoResult) -> str:
    return (
        str(e.out.relative_to(e.cwd))
        if e.out.is_relative_to(e.cwd) and e.out != e.cwd
        else str(e.out)
    )


def _files(out: Path) -> list[tuple[str, str, str]]:
    records, products, changes, log = (
        out / name for name in ("records.jsonl", "products.db", "changes.txt", "shop.log")
    )
    listed = (
        (records, f"{_lines(records)} rows", "every record, in order of arrival"),
        (products, f"{_rows(products)} rows", "the newest row of each product"),
        (changes, f"{_lines(changes)} lines", "lines written by the on_change hook"),
        (out / "shop.py", "", "the pipeline (settings are in penstock.toml)"),
        (log, f"{_lines(log)} lines", "requests, logged by the shop"),
    )
    return [(file.name, size, about) for file, size, about in listed if file.exists()]


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _rows(file: Path) -> int:
    """Return the number of products, read with the standard library as a user could do."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)
        ) as db:
            return int(db.execute("SELECT count(*) FROM products").fetchone()[0])
    except sqlite3.OperationalError:  # the demo ended before the first row
        return 0


# -- intended failures -----------------------------------------------------------------------------


def visits(requests: Path, limited: str) -> list[Entry]:
    """Return the requests for the limited edition's page, from the shop's log."""
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


def _limited(e: DemoResult) -> list[str]:
    sent = visits(e.requests, e.limited)
    if not sent or sent[0].status != 429:
        return []
    first = f"{sent[0].path} answered 429 with Retry-After"
    if len(sent) == 1:
        return [f"{first}. The demo ended before the next request."]
    return [
        f"{first}. It was requested again {(sent[1].at - sent[0].at) / 1e6:.1f} s later "
        f"and answered {sent[-1].status}."
    ]


def _dead(e: DemoResult) -> list[str]:
    shown = e.look.dead[:3]
    lines = [f"{urlsplit(d.url).path} is dead: {d.reason}." for d in shown]
    return lines + [f"… and {e.look.counts.dead - len(shown)} more are dead."] * (
        e.look.counts.dead > len(shown)
    )


def _redesigned(e: DemoResult) -> list[str]:
    if e.redesigned is None:
        return []
    empty = e.look.counters.get("empty", 0)
    pages = "1 page" if empty == 1 else f"{empty} pages"
    return [
        f"The shop was redesigned after {e.redesigned:.0f} s. Since then {pages} gave no row "
        "(`empty` in `status`). The last good rows stay."
    ]


# -- commands to try -------------------------------------------------------------------------------


def program(out: Path) -> str:
    """Return the command that runs penstock from `out`.

    This is `penstock` if the shell finds it, or else the way in which it was called now.
    """
    if script := os.environ.get("DEV_SCRIPT"):  # set by ./dev: the path of the script
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
