"""Writes the pages of docs/ that are made from the code, all those in PAGES. `--check` only says
whether they are up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts import App

HERE = Path(__file__).parent
NOTE = "<!-- Made by docs/generate.py; edit the code it is made from, then run it: ./dev exec python docs/generate.py -->"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _table(*head: str) -> list[str]:
    return [_row(*head), "|" + "---|" * len(head)]


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# -- configuration ---------------------------------------------------------------------------------

CONFIGURATION = """\
# Configuration

Every option can be set in three places. The first that has it wins:

1. the command line: `-o pace.rate=5` (or `--set pace.rate=5`), on every command; `--state DIR` is short for `state.dir`;
2. the environment: `PENSTOCK_PACE_RATE=5`;
3. the file `penstock.toml` in the current directory, or the one that `--config FILE` or `PENSTOCK_CONFIG` names:

   ```toml config
   [pace]
   rate = "5"
   ```

`penstock init` writes a `penstock.toml` with every option in it, commented out.
`penstock config show --origin` tells what holds now and where it came from. `penstock config check` reads everything as `run` would and opens nothing.

- An unknown key or variable is an error that names the nearest known one. So is a bad value, even where a better one overrides it. The exit code is 3.
- An empty variable counts as unset.
- Relative paths are relative to the current directory, not to the file they are written in.
- Options marked *secret* may hold a password. It is masked wherever the configuration is shown. The variable may end in `_FILE` and then names a file
  that holds the value, without its last newline: `PENSTOCK_BROKER_URL_FILE=/run/secrets/broker`.
- `namespace` is the prefix of everything on a server: topics, tables, keys. Without it, it is `penstock`.
- `PENSTOCK_LOG_LEVEL` (debug, info, warning, error) and `PENSTOCK_DEBUG=1` (show tracebacks) are variables of the command line itself. `--log-level` and
  `--debug` say the same.

How values are written:

| kind | written as |
|---|---|
"""
WRITTEN_AS = """\
| duration | `500ms`, `30s`, `5m`, `1h`, `2d`, `1h30m`; a bare number is seconds |
| size | `512KiB`, `64MiB`, `10GiB`, `10 GB`; a bare number is bytes |
| rate | requests a second (`2`, `0.5`), or with a unit (`30/m`, `100/h`, `1/d`), or `unlimited` |
| share | a number from 0 to 1 |
| list of targets | `127.0.0.1:8000,[::1]:8000,10.1.0.0/16:443,shop.test:*`: address, network or name, always with its port; `*` is any port |
| list of ports | `80,443` |
| true or false | `true`, `yes`, `on`, `1`, or `false`, `no`, `off`, `0` |
"""


def configuration() -> str:
    from penstock.config.schema import OPTIONS, pool_options

    lines = [CONFIGURATION + WRITTEN_AS]
    section: str | None = None
    for option in (*OPTIONS, *pool_options("NAME")):
        of = option.path.rpartition(".")[0]
        if of != section:
            section = of
            lines += [
                "",
                f"## [{of}]" if of else "## At the top level",
                "",
                *_table("option", "variable", "kind", "default", "what it is"),
            ]
        variables = " or ".join(_code(v) for v in option.variables)
        what = option.help + (" (*secret*)" if option.secret else "")
        lines.append(
            _row(
                _code(option.path),
                variables,
                option.kind.name,
                _code(option.default_text) or "not set",
                what,
            )
        )
    return "\n".join(lines)


# -- the command line ------------------------------------------------------------------------------

CLI = """\
# Command line

`penstock COMMAND --help` says the same in the terminal. Answers go to stdout, logs and errors to stderr. An error is two lines: `Error:` and `Try:`.

Exit codes:

| code | meaning |
|---|---|
| 0 | it went well |
| 1 | it ran, but something ended dead, a breaker is open (`run --until-idle`), an input was refused (`push`), or what was asked for was not found |
| 2 | the command line makes no sense |
| 3 | the configuration or the pipeline is wrong, or an extra is missing |
| 4 | the store or a server cannot be reached, or refuses |
| 5 | differences were found (`doctor`) |

The options of the last table, [Common options](#common-options), are on every command that has *common options* behind its name.
They may also stand before the command.
"""


def _arguments(app: App) -> tuple[list[Any], list[Any], bool]:
    own, common = [], []
    for argument in app.assemble_argument_collection():
        if argument.show:
            (common if argument.parameter.group[0]._name == "Common options" else own).append(
                argument
            )
    return own, common, bool(common)


def _names(argument: Any) -> str:
    flag = argument.hint is bool
    names = [name for name in argument.names if not name.startswith(("--no-", "--empty-"))]
    if names and not names[0].startswith("-"):
        return _code(names[0])
    return ", ".join(_code(name) for name in names) + ("" if flag else " …")


def _command(app: App, name: str) -> Iterator[str]:
    own, _, common = _arguments(app)
    yield f"## penstock {name}" + (" (*common options*)" if common else "")
    yield ""
    yield " ".join((app.help or "").split())
    yield ""
    if own:
        yield from _table("argument or option", "what it is")
        for argument in own:
            yield _row(_names(argument), " ".join((argument.parameter.help or "").split()))
        yield ""


def _leaves(app: App, path: str) -> Iterator[tuple[str, App]]:
    inner = [n for n in app if not n.startswith("-")]
    for n in inner:
        yield from _leaves(app[n], f"{path} {n}")
    if not inner:
        yield path, app


def cli() -> str:
    from penstock.cli.main import COMMANDS, build

    app = build()
    lines = [CLI]
    group = ""
    for _, _, of, _ in COMMANDS:
        if of != group:
            group = of
            lines.append(
                f"- **{of}**: " + ", ".join(_code(n) for n, _, o, _ in COMMANDS if o == of)
            )
    lines.append("")
    last: list[Any] = []
    for name, *_ in COMMANDS:
        command = app[name]
        for path, leaf in _leaves(command, name):
            lines += _command(leaf, path)
            last = last if " " in path else _arguments(leaf)[1] or last
    lines += ["## Common options", "", *_table("option", "what it is")]
    lines += [_row(_names(a), " ".join((a.parameter.help or "").split())) for a in last]
    lines += [
        "",
        "Where a command has `-o` for an output file (`pages show`, `dlq export`), only the long form `--set` sets an option.",
    ]
    return "\n".join(lines)


# -- the outcome table -----------------------------------------------------------------------------

OUTCOMES = """\
# Outcome table

What an answer, a transport error or a breach of our own limits means. [Fetching](fetching.md) says how an answer comes about;
the class decides what happens next:

"""


def outcomes() -> str:
    from penstock.config.schema import RetryConfig
    from penstock.model import ErrorClass
    from penstock.rules.reasons import LIBCURL, sentence
    from penstock.rules.retry import table
    from penstock.rules.verdict import (
        CHALLENGES,
        CURL,
        LIMITS,
        SMALL,
        SMALL_MARKS,
        SOFT_404,
        STATUS,
    )

    usual = RetryConfig()
    soft = ", ".join(f"“{mark.decode()}”" for mark in SOFT_404)
    policies = table(base=usual.base, cap=usual.max, budget=usual.budget)
    meaning = {
        ErrorClass.THROTTLED: "the host asks for patience; it is left alone by every worker",
        ErrorClass.TRANSIENT: "it may work next time",
        ErrorClass.BLOCKED: "the site does not want us, or wants proof that we are human",
        ErrorClass.PERMANENT: "it will not work next time either",
        ErrorClass.POISON: "the extractor died of the page while it ran alone",
        ErrorClass.OURS: "our own fault or our own outage; spends nobody's budget",
    }
    lines = [OUTCOMES + "\n".join(_table("class", "meaning", "retries", "first back-off"))]
    for kind in ErrorClass:
        p = policies["*", kind]
        retries = "without end" if p.free else str(p.budget) if p.budget else "none"
        lines.append(
            _row(kind.value, meaning[kind], retries, f"{p.base:g} s" if p.budget or p.free else "")
        )
    lines += [
        "",
        "Retries are with the default `retry.budget` (3), `retry.base` (10s) and `retry.max` (15m).",
        "A back-off doubles with each failure; chance takes away up to half of it.",
        "A `Retry-After` goes before the back-off. An event that is older than `retry.max_age` (7 d) is not put off again.",
        "",
        "## Answers",
        "",
        *_table("status", "class"),
        _row("2xx, and 304 where it was asked for", "good, unless a row below says otherwise"),
        _row("200 with an HTML body that is empty", ErrorClass.BLOCKED.value),
        _row("2xx with a challenge page", ErrorClass.BLOCKED.value),
        _row("304 that was not asked for, 1xx", ErrorClass.TRANSIENT.value),
        _row("3xx without a usable `Location`", ErrorClass.PERMANENT.value),
    ]
    by_class: dict[ErrorClass, list[int]] = {}
    for status, kind in STATUS.items():
        by_class.setdefault(kind, []).append(status)
    lines += [
        _row(", ".join(map(str, sorted(found))), kind.value) for kind, found in by_class.items()
    ]
    lines += [
        _row("429 or 503 with a challenge page and no `Retry-After`", ErrorClass.BLOCKED.value),
        _row("other 4xx", ErrorClass.PERMANENT.value),
        _row("other 5xx", ErrorClass.TRANSIENT.value),
        "",
        "A challenge page is known by a header (`cf-mitigated`, `x-amzn-waf-action`) or by marks in its body: "
        + ", ".join(sorted({who for _, who in CHALLENGES}))
        + f". On an HTML page of at most {SMALL} bytes these words are enough: "
        + ", ".join(f"“{mark.decode()}”" for mark in SMALL_MARKS)
        + ".",
        "",
        f"With `fetch.soft_404 = true`, an HTML page of at most {SMALL} bytes that says 404 with status 200 ({soft}) is blocked too: "
        "another route may be shown the page.",
        "",
        "## Our own limits",
        "",
        *_table("reason", "class"),
    ]
    lines += [_row(sentence(limit), kind.value) for limit, kind in LIMITS.items()]
    lines += ["", "## What libcurl says", "", *_table("CURLcode", "reason", "class")]
    lines += [_row(str(code), text, CURL[code].value) for code, (_, text) in LIBCURL.items()]
    lines += [_row("any other", "libcurl error N", ErrorClass.TRANSIENT.value)]
    lines += [
        "",
        "A failed TLS handshake (35) in which both sides disagree on version, cipher or name is permanent.",
    ]
    return "\n".join(lines)


# -- what brokers promise --------------------------------------------------------------------------

BROKERS = """\
# What each broker promises

All brokers pass one suite, `penstock.testing.conformance`, each on a real server (`./dev test brokers`). What they can do besides is data,
`Capabilities` in `src/penstock/ports/`. A sentence of the suite that needs a capability is skipped where a broker does not claim it.
This page is made from that data and from the suite. How to choose and how to connect is in [Brokers](brokers.md).

## Capabilities

"""
ADAPTERS = {
    "sqlite": "SQLite",
    "postgres": "PostgreSQL",
    "redis": "Redis Streams",
    "amqp": "RabbitMQ",
    "kafka": "Kafka",
    "sqs": "SQS",
}  # by scheme
CAPABILITIES = {
    "order_per_key": "a topic can be ordered: one message of a key at a time, in the order of publication",
    "strict_priority": "a higher class always goes first (the classes high, normal and low are weighted on every broker)",
    "delay": "a message can wait until its time without holding up others",
    "replay": "keeps history, and hands it out again from a time on",
    "bounded": "answers `full` itself (through intake, `intake.max_pending` does so on every broker)",
    "counts_deliveries": "counts how often a message was handed out, crashes included (poison is judged from the ledger on every broker)",
    "hold_keys": "keeps a host's messages back until its slot (elsewhere they are put aside in the ledger)",
    "exact_stats": "its figures are exact at every moment; else they are right once all is quiet",
    "transactional": "shares a transaction with the ledger in the same store; else a relay publishes after the commit, and again until it is confirmed",
    "lease": "what ends a delivery's lease when its worker dies: time, or the end of its connection",
    "fair_keys": "a host with much work does not keep others waiting",
    "max_body": "bytes that a message always takes",
}


def _cell(value: object) -> str:
    return (
        {True: "yes", False: "–", "none": "–", None: "no limit"}.get(value, str(value))
        if isinstance(value, bool | str | None)
        else f"{value:,}"
    )


def asked_for(needs: Callable[[Any], bool]) -> list[str]:
    """The capabilities that a sentence of the suite depends on, found by asking it on behalf of a
    broker that has them all.
    """
    from penstock.brokers.sql import CAPS

    names: list[str] = []

    class Asked:
        def __getattr__(self, name: str) -> object:
            names.append(name)
            return getattr(CAPS, name)

    needs(Asked())
    return names


def adapters() -> dict[str, Any]:
    """Title → capabilities, of the adapters of this project."""
    from importlib.metadata import entry_points

    modules = {
        e.name: e.module
        for e in entry_points(group="penstock.brokers")
        if e.module.startswith("penstock.")
    }
    shared = import_module("penstock.brokers.sql").CAPS  # of the brokers that lie in an SQL store
    return {
        title: getattr(import_module(modules[scheme]), "CAPS", shared)
        for scheme, title in ADAPTERS.items()
    }


def broker_guarantees() -> str:
    import penstock.testing.conformance  # fills SENTENCES
    from penstock.testing.broker_rig import SENTENCES

    assert penstock.testing.conformance.BrokerConformance
    brokers = adapters()
    lines = [BROKERS + "\n".join(_table("capability", "meaning", *brokers))]
    lines += [
        _row(_code(name), meaning, *[_cell(getattr(caps, name)) for caps in brokers.values()])
        for name, meaning in CAPABILITIES.items()
    ]
    lines += [
        "",
        "“native” is the server's own; “emulated” is made by the adapter from what the server has.",
        "",
        "## Sentences of the suite that need a capability",
        "",
    ]
    lines += _table("sentence", "needs", *brokers)
    words = {name: name.removeprefix("test_").replace("_", " ") for name in SENTENCES}
    gated = {name: asked_for(needs) for name, needs in SENTENCES.items()}
    for name, needed in gated.items():
        if needed:
            lines.append(
                _row(
                    words[name],
                    ", ".join(map(_code, needed)),
                    *[_cell(SENTENCES[name](caps)) for caps in brokers.values()],
                )
            )
    lines += [
        "",
        "## Sentences that hold on every broker",
        "",
        *[f"- {words[name]}" for name, needed in gated.items() if not needed],
    ]
    lines += [
        "",
        "The sentences about servers that die and connections that are cut are for brokers with a server of their own. SQLite has none; its tests kill",
        "processes. The SQS server of the tests forgets everything when it dies, so its death proves nothing and is left out.",
    ]
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "cli.md": cli,
    "outcomes.md": outcomes,
    "broker-guarantees.md": broker_guarantees,
}


def stale() -> list[str]:
    """Pages that are not what the code says now."""
    found = []
    for name, make in PAGES.items():
        path = HERE / name
        if not path.exists() or path.read_text("utf-8") != render(make):
            found.append(name)
    return found


def render(make: Callable[[], str]) -> str:
    return f"{NOTE}\n\n{make().rstrip()}\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = stale()
        for name in found:
            print(
                f"docs/{name} is not up to date: ./dev exec python docs/generate.py",
                file=sys.stderr,
            )
        return 5 if found else 0
    for name, make in PAGES.items():
        (HERE / name).write_text(render(make), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
