"""Output of the commands: console, tables and JSON.

See `penstock.operate.figures` for the format of times, sizes and ids.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# Control characters in pages, headers and exceptions must not move the cursor or colour the
# terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# In JSON they can only occur in strings. msgspec escapes those below U+0020.
_IN_JSON = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
PIPED_WIDTH = 200
STATUS_STYLE = {
    "pending": "cyan",
    "in_flight": "blue",
    "writing": "blue",
    "delayed": "yellow",
    "success": "green",
    "duplicate": "magenta",
    "dead": "bold red",
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
}


def plain(text: str) -> str:
    """Return text that is safe to print: control characters escaped, lone surrogates replaced."""
    return (
        _CONTROL.sub(
            lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text
        )
        .encode("utf-8", "replace")
        .decode()
    )


@functools.cache
def console(stderr: bool = False) -> Console:
    from rich.console import Console

    class PenstockConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    piped = not stream.isatty()
    # NO_COLOR switches off all styles, also bold.
    system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return PenstockConsole(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=piped,
        width=PIPED_WIDTH if piped else None,
        color_system=system,
    )


def say(*parts: str | Text) -> None:
    from rich.text import Text

    console().print(Text().join(Text(plain(p)) if isinstance(p, str) else p for p in parts))


def styled(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(plain(text), style)


def status_text(status: str) -> Text:
    return styled(status, STATUS_STYLE.get(status, ""))


def json_bytes(document: Any, *, line: bool = False) -> bytes:
    """Return a JSON document with a line feed. It has no control characters, only their escapes."""
    import msgspec

    raw = msgspec.json.encode(document)
    text = (raw if line else msgspec.json.format(raw, indent=2)).decode()
    return _IN_JSON.sub(lambda m: f"\\u{ord(m[0]):04x}", text).encode() + b"\n"


def print_json(document: Any, *, line: bool = False) -> None:
    """Print one JSON document on stdout. With `line` it is on one line, for JSON lines."""
    raw = json_bytes(document, line=line)
    sys.stdout.flush()
    sys.stdout.buffer.write(raw)


def print_bytes(data: bytes, *, raw: bool) -> None:
    """Write outside bytes on stdout. A terminal gets its control characters escaped, unless `raw`.

    A file or a pipe gets the bytes unchanged.
    """
    if sys.stdout.isatty() and not raw:
        data = plain(data.decode("utf-8", "replace")).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def report(document: Any, sentence: str, *, json: bool) -> None:
    """Print the document with --json, and the sentence without it."""
    if json:
        print_json(document)
    else:
        say(sentence)


def report_pause(command: str, name: str, *, until: str = "", paused: bool) -> None:
    """Print that a topic, source or host is paused or resumed, and the command that resumes it."""
    say(
        f"{name} is paused{until} (`penstock {command} resume {name}` resumes it)"
        if paused
        else f"{name} is resumed"
    )


def table(
    *columns: str | tuple[str, dict[str, Any]],
    rows: Iterable[Sequence[str | Text]] = (),
    header: bool = True,
) -> Table:
    """Return a table without a box, with a dim header."""
    from rich.table import Table

    made = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        show_header=header,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        name, options = (column, {}) if isinstance(column, str) else column
        made.add_column(name, **options)
    for row in rows:
        made.add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def show(made: Table) -> None:
    console().print(made)


RIGHT: dict[str, Any] = {"justify": "right", "no_wrap": True}
FIXED: dict[str, Any] = {"no_wrap": True}
FOLD: dict[str, Any] = {"overflow": "fold"}
