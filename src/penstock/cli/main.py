"""The entry point: table of commands, top-level help, and the exit code of every error.

Commands are imported only when called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import App
    from rich.console import Console

# (name, import path, group, one line of help). The top-level help is printed from this table, so it
# needs no import.
COMMANDS: tuple[tuple[str, str, str, str], ...] = (
    (
        "demo",
        "penstock.cli.demo:demo",
        "Begin",
        "scrape a shop on this machine, to see every part at work",
    ),
    (
        "init",
        "penstock.cli.init:init",
        "Begin",
        "write a pipeline and a commented penstock.toml to start from",
    ),
    (
        "run",
        "penstock.cli.run:run",
        "Begin",
        "run a pipeline: all roles in one process, or some of them",
    ),
    (
        "serve",
        "penstock.cli.serve:serve",
        "Begin",
        "serve only the webhooks of a pipeline",
    ),
    ("push", "penstock.cli.push:push", "Begin", "accept URLs to scrape"),
    (
        "fetch",
        "penstock.cli.fetch:fetch",
        "Look",
        "fetch one URL as a worker does, and show each step",
    ),
    (
        "status",
        "penstock.cli.status:status",
        "Look",
        "how many events are pending, in flight, delayed, done, dead",
    ),
    (
        "trace",
        "penstock.cli.trace:trace",
        "Look",
        "the history of an event or a URL, step by step",
    ),
    ("events", "penstock.cli.events:app", "Look", "list events"),
    ("pages", "penstock.cli.pages:app", "Look", "stored pages: show, list, prune"),
    (
        "sources",
        "penstock.cli.sources:app",
        "Look",
        "sources of events: list, test, reset, pause, resume",
    ),
    (
        "domains",
        "penstock.cli.domains:app",
        "Look",
        "hosts: their limits, pauses, robots.txt and exceptions",
    ),
    (
        "proxies",
        "penstock.cli.proxies:app",
        "Look",
        "proxy pools: list the proxies with their health, test them",
    ),
    (
        "connect",
        "penstock.cli.connect:app",
        "Look",
        "plan, apply and monitor the Kafka Connect connectors of a pipeline",
    ),
    ("dlq", "penstock.cli.dlq:app", "Repair", "dead letters: list, show, retry, drop, export"),
    ("topics", "penstock.cli.topics:app", "Repair", "list, pause and resume topics"),
    (
        "extractors",
        "penstock.cli.extractors:app",
        "Repair",
        "list, pause and resume extractors",
    ),
    (
        "adopt",
        "penstock.cli.adopt:adopt",
        "Repair",
        "make a pipeline the owner of the stored events",
    ),
    (
        "doctor",
        "penstock.cli.doctor:doctor",
        "Repair",
        "check the store, the ledger and the machine",
    ),
    (
        "migrate",
        "penstock.cli.migrate:migrate",
        "Repair",
        "change the stores of an older release to the version of this one",
    ),
    (
        "config",
        "penstock.cli.config:app",
        "Settings",
        "show each option with its origin, and check files",
    ),
    ("completion", "penstock.cli.completion:app", "Settings", "completion for bash, zsh and fish"),
    (
        "version",
        "penstock.cli.version:version",
        "Settings",
        "versions of Penstock and of the libraries it uses",
    ),
)
EPILOGUE = """\
Exit codes: 0 ok · 1 ran, but an event ended dead, or an input was refused or not found · 2 usage
· 3 configuration, or refused · 4 store or server unreachable · 5 differences found.
`penstock COMMAND --help` shows the options of a command. Commands that read have `--json`."""
# Replaces a bare "-", which the parser would take for an option.
STDIN = "<stdin>"
LEADING = {"--config": 1, "--state": 1, "--set": 1, "-o": 1, "--log-level": 1, "--debug": 0}


def main(argv: Sequence[str] | None = None) -> int:
    tokens = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in tokens or os.environ.get("PENSTOCK_DEBUG", "") not in ("", "0")
    try:
        code = _dispatch(tokens)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the pipe has exited. Redirect stdout, so that the flush at exit succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as e:
        from penstock.cli.hidden import learn

        learn(tokens)
        if debug:
            _print_traceback()
        return _explain(e, debug)


def _dispatch(tokens: list[str]) -> int:
    tokens = _common_last(tokens)
    if not tokens or tokens[0] in ("--help", "-h", "help"):
        if len(tokens) > 1 and tokens[0] == "help":
            return _dispatch([*tokens[1:], "--help"])
        print(help_text(_styled()))
        return 0
    if tokens[0] in ("--version", "-V"):
        from penstock import __version__

        print(f"penstock {__version__}")
        return 0
    names = [name for name, *_ in COMMANDS]
    if tokens[0] not in names:
        from penstock.config.options import suggest
        from penstock.errors import UsageError

        if tokens[0].partition("=")[0] in LEADING:
            raise UsageError("no command given", hint="penstock --help lists them")
        what = "option" if tokens[0].startswith("-") else "command"
        raise UsageError(
            f"there is no {what} {tokens[0]!r}",
            hint=suggest(tokens[0], names, "penstock --help lists them", command="penstock "),
        )
    if tokens[0] == "push":
        tokens = [STDIN if token == "-" else token for token in tokens]
    held: AbstractContextManager[None] = nullcontext()
    if tokens[0] in ("run", "serve"):
        from penstock.runtime.early_signals import hold_sigterm

        held = hold_sigterm()
    with held:
        result = build()(tokens, exit_on_error=False, print_error=False, console=_help_console())
    return result if isinstance(result, int) else 0


def _help_console() -> Console | None:
    """Return None for the parser's own console, or a console without styles for NO_COLOR.

    The parser's console would still print bold.
    """
    if not os.environ.get("NO_COLOR"):
        return None
    from rich.console import Console

    return Console(color_system=None)


def build() -> App:
    """Build the application. Each command is imported when it is called."""
    from cyclopts import App, Parameter

    app = App(
        name="penstock",
        help="Event-driven web scraping: a change goes in, one correct row comes out.",
        help_format="plaintext",
        version_flags=[],
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        default_parameter=Parameter(negative="", show_default=False),
    )
    for name, where, *_ in COMMANDS:
        app.command(where, name=name)
    return app


def _common_last(tokens: list[str]) -> list[str]:
    """Move common options behind the command.

    `penstock --state DIR status` becomes `penstock status --state DIR`.
    """
    i = 0
    while i < len(tokens):
        name, equals, _ = tokens[i].partition("=")
        if name not in LEADING:
            break
        i += 1 + (LEADING[name] if not equals else 0)
    leading, rest = tokens[:i], tokens[i:]
    at = rest.index("--") if "--" in rest else len(rest)
    return rest[:at] + leading + rest[at:] if rest else tokens


# -- help and errors -------------------------------------------------------------------------------


def help_text(styled: bool = False) -> str:
    bold, dim, end = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if styled else ("", "", "")
    lines = [
        f"{bold}Usage:{end} penstock COMMAND [ARGS]",
        "",
        "Event-driven web scraping: a change goes in, one correct row comes out.",
    ]
    group = ""
    for name, _, of, text in COMMANDS:
        if of != group:
            lines += ["", f"{bold}{of}{end}"]
            group = of
        lines.append(f"  {bold}{name:<12}{end}{text}")
    return "\n".join([*lines, "", *(f"{dim}{line}{end}" for line in EPILOGUE.splitlines())])


def _styled() -> bool:
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def complain(message: str, hint: str = "") -> None:
    """Print `Error: …` and `Try: …` on stderr, without control characters and passwords."""
    from penstock.cli.hidden import hidden
    from penstock.cli.output import plain

    bold, red, end = (
        ("\x1b[1m", "\x1b[1;31m", "\x1b[0m")
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        else ("", "", "")
    )
    _write_error(
        f"{red}Error:{end} {plain(hidden(message))}\n"
        + (f"{bold}Try:{end}   {plain(hidden(hint))}\n" if hint else "")
    )


def _print_traceback() -> None:
    """Print the traceback of the current exception, without control characters and passwords."""
    import traceback

    from penstock.cli.hidden import hidden
    from penstock.cli.output import plain

    _write_error(plain(hidden(traceback.format_exc())))


def _write_error(text: str) -> None:
    try:
        sys.stderr.write(
            text.encode(sys.stderr.encoding or "utf-8", "replace").decode(
                sys.stderr.encoding or "utf-8", "replace"
            )
        )
        sys.stderr.flush()
    except OSError:
        pass  # stderr is closed. The exit code still shows the error.


def _explain(e: Exception, debug: bool) -> int:
    from penstock.errors import RAN_WITH_FAILURES, UNREACHABLE, USAGE, PenstockError

    if isinstance(e, PenstockError):
        complain(e.message, e.hint)
        return e.exit_code
    if type(e).__module__.startswith("cyclopts"):
        command = " ".join(getattr(e, "command_chain", None) or ())
        complain(" ".join(str(e).split()), f"penstock {command + ' ' if command else ''}--help")
        return USAGE
    if type(e).__module__.startswith("apsw"):
        complain(f"the store cannot be read: {e}", "run `penstock doctor`")
        return UNREACHABLE
    if isinstance(e, OSError) and e.strerror:
        complain(f"{e.filename}: {e.strerror}" if e.filename else e.strerror)
        return UNREACHABLE
    import traceback

    where = traceback.extract_tb(e.__traceback__)[-1]
    place = (
        f"{os.path.basename(os.path.dirname(where.filename))}/"
        f"{os.path.basename(where.filename)}:{where.lineno}"
    )
    complain(
        f"unexpected error: {type(e).__name__}: {e} ({place})",
        "" if debug else "set PENSTOCK_DEBUG=1 to see the traceback, and report it",
    )
    return RAN_WITH_FAILURES


if __name__ == "__main__":
    sys.exit(main())
