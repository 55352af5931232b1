"""`penstock push`: accepts URLs from arguments, files or stdin, which are read lazily.

An input is a URL, or a JSON object with a URL. Inputs that are not valid are reported with their
line. The others are accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
from cyclopts import Parameter

from penstock.cli.main import STDIN
from penstock.cli.options import DEFAULTS, Common, Json, read_route_options, read_value
from penstock.cli.output import (
    console,
    print_json,
    say,
    styled,
)
from penstock.config import units
from penstock.errors import OK, RAN_WITH_FAILURES, UsageError
from penstock.operate.figures import plural, short
from penstock.rules.masking import mask

if TYPE_CHECKING:
    from penstock.intake.accept import Pushed
    from penstock.model import Event

MAX_PRINTED = 20  # refused inputs that are printed
# Refused inputs that --json lists. The others are only counted.
MAX_IN_JSON = 1000
# Bytes of a line. The rest is skipped, so that it cannot fill memory.
MAX_LINE = 65536


class RefusedInput(msgspec.Struct, frozen=True):
    where: str
    input: str
    reason: str


class Inputs:
    """Iterator over the valid URLs, and the events of JSON objects.

    It counts the refused inputs and keeps the first ones.
    """

    def __init__(
        self,
        arguments: tuple[str, ...],
        files: list[str],
        event_of_object: Callable[[dict[str, Any]], Event],
    ) -> None:
        self.arguments, self.files, self._event_of_object = arguments, files, event_of_object
        self.refused: list[RefusedInput] = []
        self.refused_count = 0
        self.read = 0

    def __iter__(self) -> Iterator[str | Event]:
        from penstock.rules.events import Refused
        from penstock.rules.identity import BadUrl, canonical_url

        for where, text in self._texts():
            self.read += 1
            try:
                if text.startswith("{"):
                    yield self._event_of_object(_object(text))
                else:
                    yield canonical_url(text)
            except (BadUrl, Refused) as e:
                self.refused_count += 1
                if len(self.refused) < MAX_IN_JSON:
                    self.refused.append(RefusedInput(where, mask(text[:200]), e.reason))

    def _texts(self) -> Iterator[tuple[str, str]]:
        for i, text in enumerate(self.arguments, 1):
            if text == STDIN:
                yield from _lines("stdin", sys.stdin.buffer)
            else:
                yield f"argument {i}", text
        for file in self.files:
            if file in (STDIN, "-"):
                yield from _lines("stdin", sys.stdin.buffer)
                continue
            with open(file, "rb") as f:
                yield from _lines(file, f)


def _object(text: str) -> dict[str, Any]:
    from penstock.rules.events import Refused

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError) as e:
        raise Refused(f"it is not a JSON object: {str(e)[:200]}") from None


def _lines(name: str, stream: BinaryIO) -> Iterator[tuple[str, str]]:
    """Yield each line with its place. Blank lines and lines that begin with # are skipped."""
    number = 0
    while line := stream.readline(MAX_LINE):
        number += 1
        piece = line
        # Skip the rest of a line that is too long.
        while not piece.endswith(b"\n") and (piece := stream.readline(MAX_LINE)):
            pass
        text = line.decode("utf-8-sig" if number == 1 else "utf-8", "replace").strip()
        if text and not text.startswith("#"):
            yield f"{name}:{number}", text


def push(
    *urls: Annotated[str, Parameter(help="URLs, JSON objects with a URL, or - for stdin")],
    file: Annotated[
        list[str],
        Parameter(
            name=["--file", "-f"],
            help="a file with one URL or JSON object on each line (- is stdin)",
        ),
    ] = [],  # noqa: B006
    geo: Annotated[str | None, Parameter(help="location to fetch from")] = None,
    pool: Annotated[str | None, Parameter(help="proxy pool")] = None,
    account: Annotated[str | None, Parameter(help="account to fetch as")] = None,
    priority: Annotated[str, Parameter(help="high, normal or low")] = "normal",
    force: Annotated[
        bool,
        Parameter(help="fetch even inside the freshness window, and write unchanged records too"),
    ] = False,
    window: Annotated[str | None, Parameter(help="freshness window of these URLs, e.g. 1h")] = None,
    trace: Annotated[
        str | None, Parameter(help="one trace id for all URLs (else each has its own)")
    ] = None,
    json: Json = False,
    common: Common = DEFAULTS,
) -> int:
    """Accept URLs to scrape. They are durable when the command returns.

    A JSON object sets its own route: {"url": "https://…", "routing": {"geo": "US"}}.
    `penstock run` does the work. Exit code 1 if any URL was refused.
    """
    if not urls and not file:
        raise UsageError(
            "no URL given",
            hint="penstock push URL, penstock push -f FILE, or penstock push - to read stdin",
        )
    if priority not in ("high", "normal", "low"):
        raise UsageError(f"--priority {priority!r} is unknown", hint="high, normal or low")
    if trace is not None and not (0 < len(trace) <= 128 and trace.isprintable()):
        raise UsageError("--trace must be printable, and at most 128 characters")
    route = read_route_options(geo, pool, account)
    seconds = None if window is None else read_value("--window", window, units.durations())
    for name in file:
        if name not in (STDIN, "-"):
            try:
                open(name, "rb").close()
            except OSError as e:
                hint = "a file with one URL on each line"
                raise UsageError(f"{name}: {e.strerror}", hint=hint) from None

    from penstock.cli.progress import bar
    from penstock.intake import accept as intake

    config = common.load().config
    inputs = Inputs(
        urls,
        file,
        intake.objects_as_events(
            route=route,
            priority=priority,
            force=force,
            window=seconds,
            trace=trace,
            host_by=config.pace.by,
        ),
    )
    with (
        common.stores(create=True, config=config) as stores,
        bar("pushing", None) as show_progress,
    ):
        done = stores.perform(
            lambda: intake.push(
                stores.lifecycle,
                inputs,
                clock=stores.clock,
                route=route,
                priority=priority,
                force=force,
                window=seconds,
                trace=trace,
                on_progress=lambda p: show_progress(p.new + p.known),
            )
        )
        running = any(stores.workers_directory.glob("*.alive"))
    for text, reason in done.refused:  # by intake itself
        inputs.refused_count += 1
        inputs.refused.append(RefusedInput("", mask(text[:200]), reason))
    if not inputs.read:
        raise UsageError(
            "there was no URL in the input",
            hint="one URL on each line (lines that begin with # are skipped)",
        )
    if json:
        print_json(
            {
                "accepted": done.new,
                "known": done.known,
                "refused": inputs.refused_count,
                "refusals": msgspec.to_builtins(inputs.refused),
                "first_event_id": done.first or None,
            }
        )
    else:
        _report(inputs, done, running)
    return RAN_WITH_FAILURES if inputs.refused_count else OK


def _report(inputs: Inputs, done: Pushed, running: bool) -> None:
    err = console(stderr=True)
    for r in inputs.refused[:MAX_PRINTED]:
        err.print(styled(f"refused {r.where}: {r.input!r}: {r.reason}", "yellow"))
    if inputs.refused_count > MAX_PRINTED:
        err.print(
            styled(
                f"… and {inputs.refused_count - MAX_PRINTED:,} more "
                f"(--json lists the first {MAX_IN_JSON:,})",
                "yellow",
            )
        )
    known = f", {done.known:,} known already" if done.known else ""
    refused = f", {inputs.refused_count:,} refused" if inputs.refused_count else ""
    say(f"accepted {plural(done.new, 'URL')}{known}{refused}")
    if done.first and sys.stdout.isatty():
        say(
            styled(
                f"penstock trace {short(done.first)} follows the first"
                + ("" if running else ", `penstock run FILE` does the work"),
                "dim",
            )
        )
