"""Import rules of the package, checked in its source. The table of rooms is data. Rules are pure,
adapters do not import each other, only runtime names them, and only net connects to the web.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from penstock import ports

# ruff: noqa: SIM905 (the tables read better as words)

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"

# -- the table -------------------------------------------------------------------------------------

CORE = set("errors model rules ports".split())
BASE = CORE | set("private_files clock locks config".split())
ADAPTERS = set("brokers ledgers claims pages sinks sources".split())
PUBLIC = "penstock"  # the package itself, which users import

# Room → rooms that it may import besides itself. An entry with a dot is one module of a room.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "model": {"errors"},
    "rules": {"errors", "model"},
    "ports": {"errors", "model", "rules"},
    "private_files": CORE,
    "clock": CORE,
    "locks": CORE | {"private_files"},
    "config": CORE,
    "authoring": BASE,
    "net": BASE,
    "stores": BASE | {PUBLIC},
    **{room: BASE | {"stores", "authoring"} for room in ADAPTERS},
    "sources": BASE | {"stores", "authoring", "net"},
    "engine": CORE | {"clock", "locks"},
    "extraction": BASE | {"authoring", PUBLIC},
    "connect": BASE | {"authoring"},
    "fetching": BASE | {"net"},
    "intake": BASE | {"authoring", "engine", PUBLIC},
    "operate": BASE | {"authoring", "engine", "intake"},
    PUBLIC: {"model", "authoring"},
}
MAY_IMPORT["runtime"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = BASE | set(
    "runtime operate intake authoring connect demo engine.messages penstock".split()
)
MAY_IMPORT["demo"] = BASE | set("runtime operate cli testing penstock".split())
MAY_IMPORT["testing"] = BASE | ADAPTERS | {"stores"}

# -- other rules as data ---------------------------------------------------------------------------

# Modules of ports and engine that may use `Any`.
MAY_USE_ANY = {"ports.source"}  # a finding's payload: JSON of another system

PURE = ("model", "rules", "ports")
# Modules that make a decision depend on more than its arguments. Entries are prefixes:
# `urllib.request` does not ban `urllib.parse`.
IMPURE = (
    "asyncio threading multiprocessing concurrent subprocess signal selectors select socket ssl "
    "time sched random secrets uuid logging structlog urllib.request http.client http.server "
    "sqlite3 apsw pycurl tempfile shutil os sys io pathlib contextvars"
).split()
IMPURE_NAMES = set("now utcnow today fromtimestamp urandom".split())
IMPURE_CALLS = set("open print input".split())

# These rooms may name an adapter's module, also as text for importlib.
NAMES_ADAPTERS = {"runtime", "testing", *ADAPTERS}
ADAPTER_AS_TEXT = re.compile(rf"penstock\.({'|'.join(sorted(ADAPTERS))})(\.\w+)+(:\w+)?")

DIALS = (
    "pycurl urllib.request urllib3 http.client requests httpx aiohttp websockets ftplib smtplib "
    "telnetlib"
).split()
DIAL_CALLS = set("create_connection open_connection getaddrinfo gethostbyname sock_connect".split())
# In the product, only net connects to the web, through the guard. `testing` contains the simulated
# web, which connects only to itself. The APIs of a broker and of a Connect worker are called at the
# configured address, never at an address that came from the web.
MAY_DIAL = "net testing brokers.rabbitmq.management connect.rest".split()

# Names of messages for people, of exceptions, and of methods that look into a text.
MESSAGES = set("reason message sentence why".split())
ERRORS = set("e err error exc failure problem".split())
TEXT_TESTS = set("startswith endswith find index count match search fullmatch".split())
# These modules read messages of other programs, which give no better code: libcurl, RabbitMQ,
# Redis, S3, libxml2. The exception of the sitemap parser contains the name of an element.
READS_MESSAGES = (
    "net.http brokers.rabbitmq.connection stores.redis sources.redis pages.s3 sources.seeds.s3 "
    "sources.feed_parser sources.sitemap_parser"
).split()

EXECUTES = "pickle marshal shelve dill cloudpickle jsonpickle".split()

# -- reading the source ----------------------------------------------------------------------------


def under(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def target(name: str) -> str:
    """Return the place of a module: its name without "penstock.". The package is `penstock`."""
    return name.removeprefix("penstock.")


def room_of(place: str) -> str:
    return place.partition(".")[0]


def adapter_of(place: str) -> str | None:
    """Return `brokers.kafka` for all modules of that folder and for a module of that name."""
    parts = place.split(".")
    return ".".join(parts[:2]) if parts[0] in ADAPTERS and len(parts) > 1 else None


@dataclass(frozen=True)
class Module:
    name: str
    tree: ast.Module
    is_package: bool = False

    @property
    def place(self) -> str:
        return target(self.name)

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yield every imported dotted name of the module: `from a.b import c` counts as `a.b` and
        `a.b.c`.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield base, node.lineno
                for alias in node.names:
                    yield f"{base}.{alias.name}", node.lineno

    def ours(self) -> Iterator[tuple[str, int]]:
        """Yield the place of every Penstock module that this module imports."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if under(name, ("penstock",)):
                    yield _module_in(name), node.lineno

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        above = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*above, *([node.module] if node.module else [])])


def _module_in(name: str) -> str:
    """Return the place of the longest prefix of a dotted name that is a module."""
    while name not in NAMES:
        name = name.rpartition(".")[0]
    return target(name)


def read(path: Path) -> Module:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return Module(".".join(parts[:-1] if is_package else parts), tree, is_package)


def adapters_of_the_distribution() -> set[str]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = document["project"]["entry-points"].values()
    modules = {entry.partition(":")[0] for entries in groups for entry in entries.values()}
    return {found for name in modules if (found := adapter_of(target(name)))}


MODULES = [read(path) for path in sorted(PACKAGE.rglob("*.py"))]
NAMES = {m.name for m in MODULES}
OWN_ADAPTERS = adapters_of_the_distribution()

# -- the rules, each as a function from modules to breaches ----------------------------------------


def wrong_rooms(modules: Sequence[Module]) -> list[str]:
    found = []
    for module in modules:
        own = room_of(module.place)
        allowed = MAY_IMPORT.get(own, set())
        for place, line in module.ours():
            room = room_of(place)
            if room != own and room not in allowed and not under(place, [*allowed]):
                found.append(f"{module.name}:{line} ({own}) imports {place}")
    return found


def wrong_adapters(modules: Sequence[Module]) -> list[str]:
    """Find adapters that import another adapter. Modules that a room shares among its adapters are
    allowed, such as the SQL that two adapters run.
    """
    found = []
    for module in modules:
        own = adapter_of(module.place)
        if room_of(module.place) not in ADAPTERS:
            continue
        for place, line in module.ours():
            if (other := adapter_of(place)) in OWN_ADAPTERS and other != own:
                found.append(f"{module.name}:{line} imports {place}")
    return found


def adapters_named_as_text(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name}:{node.lineno} names {node.value!r}"
        for module in modules
        if room_of(module.place) not in NAMES_ADAPTERS
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and ADAPTER_AS_TEXT.fullmatch(node.value)
    ]


def impure_imports(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name}:{line} imports {name}"
        for module in modules
        if room_of(module.place) in PURE
        for name, line in module.imports()
        if under(name, IMPURE)
    ]


def impure_calls(modules: Sequence[Module]) -> list[str]:
    found = []
    for module in modules:
        if room_of(module.place) not in PURE:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in IMPURE_NAMES:
                found.append(f"{module.name}:{node.lineno} uses {node.attr}")
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in IMPURE_CALLS
            ):
                found.append(f"{module.name}:{node.lineno} calls {node.func.id}")
    return found


def dials(modules: Sequence[Module]) -> list[str]:
    found = []
    for module in modules:
        if under(module.place, MAY_DIAL):
            continue
        found += [
            f"{module.name}:{line} imports {name}"
            for name, line in module.imports()
            if under(name, DIALS)
        ]
        found += [
            f"{module.name}:{node.lineno} uses {node.attr}"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and node.attr in DIAL_CALLS
        ]
    return found


def executes(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name}:{line} imports {name}"
        for module in modules
        for name, line in module.imports()
        if under(name, EXECUTES)
    ]


def ledger_tables(modules: Sequence[Module]) -> set[str]:
    """Return the names of the tables that the room `ledgers` creates."""
    return {
        name
        for module in modules
        if room_of(module.place) == "ledgers"
        for _, text in _texts(module)
        for name in re.findall(r"CREATE TABLE (\w+)", text)
    }


def reads_ledger_tables(modules: Sequence[Module]) -> list[str]:
    """Find SQL of other rooms that names a table of the ledger. Migrations change all tables."""
    tables = "|".join(sorted(ledger_tables(MODULES)))
    statement = re.compile(rf"\b(?:FROM|JOIN|INTO|UPDATE|TABLE|TRUNCATE)\s+({tables})\b")
    return [
        f"{module.name}:{line} names the table {name}"
        for module in modules
        if room_of(module.place) != "ledgers" and not under(module.place, ["stores.migrations"])
        for line, text in _texts(module)
        for name in statement.findall(text)
        # A common table expression of the same statement may have the name of a table.
        if not re.search(rf"\b{name} AS \(|\b{name} AS MATERIALIZED \(", text)
    ]


def _texts(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def without_docstring(modules: Sequence[Module]) -> list[str]:
    return [m.name for m in modules if not (ast.get_docstring(m.tree) or "").split("\n")[0].strip()]


def compared_messages(modules: Sequence[Module]) -> list[str]:
    """Find decisions by the text of a message. A code, such as `model.Reason`, decides instead."""
    return [
        f"{module.name}:{node.lineno} compares the text of a message"
        for module in modules
        if not under(module.place, READS_MESSAGES)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Compare | ast.Call | ast.MatchClass) and _compares_message(node)
    ]


def _compares_message(node: ast.Compare | ast.Call | ast.MatchClass) -> bool:
    if isinstance(node, ast.MatchClass):  # `case Dead(reason="…")`
        named = zip(node.kwd_attrs, node.kwd_patterns, strict=True)
        return any(n in MESSAGES and isinstance(p, ast.MatchValue) for n, p in named)
    if isinstance(node, ast.Compare):
        if not isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            return False
        sides = [node.left, *node.comparators]
    elif isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_TESTS:
        sides = [node.func.value, *node.args]
    else:
        return False
    return any(map(_is_message, sides)) and any(map(_is_fixed_text, sides))


def _is_message(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name.lstrip("_") in MESSAGES or name.endswith("_reason")
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
            return name in ERRORS
        case ast.Call(func=ast.Attribute(value=inner, attr="lower" | "strip" | "casefold")):
            return _is_message(inner)
        case ast.Subscript(value=ast.Attribute(attr="args")):
            return True
    return False


def _is_fixed_text(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return bool(text)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return any(map(_is_fixed_text, parts))
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
    return isinstance(node, ast.JoinedStr)


# -- the source follows the rules ------------------------------------------------------------------


def test_the_whole_tree_is_read() -> None:
    names = "model ports errors rules.identity rules.pace net.guard sources.feed".split()
    assert {f"penstock.{name}" for name in names} <= NAMES
    assert len(OWN_ADAPTERS) > 20


def test_every_module_belongs_to_a_room_of_the_table() -> None:
    assert not [m.name for m in MODULES if room_of(m.place) not in MAY_IMPORT]


def test_a_room_imports_only_the_rooms_that_the_table_allows() -> None:
    assert not wrong_rooms(MODULES)


def test_an_adapter_never_imports_another_adapter() -> None:
    assert not wrong_adapters(MODULES)


def test_no_room_but_runtime_and_testing_names_an_adapter_as_text() -> None:
    assert not adapters_named_as_text(MODULES)


def test_model_rules_and_ports_import_no_clock_randomness_or_io() -> None:
    assert not impure_imports(MODULES)


def test_model_rules_and_ports_read_no_clock_and_open_no_file() -> None:
    assert not impure_calls(MODULES)


def test_only_net_connects_to_the_web() -> None:
    assert not dials(MODULES)


def test_no_module_imports_a_format_that_executes_code() -> None:
    assert not executes(MODULES)


def test_ports_and_engine_have_no_untyped_value() -> None:
    assert not untyped(MODULES)


def test_the_engine_uses_only_transaction_members_that_a_port_declares() -> None:
    assert not undeclared(MODULES)


def test_no_module_reads_the_old_flag_of_external_stores() -> None:
    assert not [
        f"{m.name}:{node.lineno}"
        for m in MODULES
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Attribute) and node.attr == "apart"
    ]


def test_no_room_but_ledgers_names_a_table_of_the_ledger_in_sql() -> None:
    assert {"event", "envelope", "history", "dead", "outbox", "outgoing", "cursor"} <= (
        ledger_tables(MODULES)
    )
    assert not reads_ledger_tables(MODULES)


def test_no_module_decides_by_the_text_of_a_message() -> None:
    assert not compared_messages(MODULES)


def test_every_module_has_a_docstring_with_a_first_line() -> None:
    assert not without_docstring(MODULES)


# -- typed ports -----------------------------------------------------------------------------------

# The members of each table of a transaction, as its port declares them.
TABLES = {
    name: {member for member in dir(port) if not member.startswith("_")}
    for name, port in get_type_hints(ports.Transaction).items()
}


def untyped(modules: Sequence[Module]) -> list[str]:
    """Find uses of `Any` in ports and engine. mypy strict checks every value that is not `Any`."""
    return [
        f"{m.name}:{node.lineno} uses Any"
        for m in modules
        if room_of(m.place) in ("ports", "engine") and m.place not in MAY_USE_ANY
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Name) and node.id == "Any"
    ]


def undeclared(modules: Sequence[Module]) -> list[str]:
    """Find tables and members of a transaction that the engine uses and no port declares."""
    found = []
    for m in modules:
        if room_of(m.place) != "engine":
            continue
        for node in ast.walk(m.tree):
            if not isinstance(node, ast.Attribute):
                continue
            table = node.value
            if isinstance(table, ast.Name) and table.id == "tx" and node.attr not in TABLES:
                found.append(f"{m.name}:{node.lineno} uses tx.{node.attr}")
            if (
                isinstance(table, ast.Attribute)
                and isinstance(table.value, ast.Name)
                and table.value.id == "tx"
                and node.attr not in TABLES.get(table.attr, ())
            ):
                found.append(f"{m.name}:{node.lineno} uses tx.{table.attr}.{node.attr}")
    return found


def test_a_planted_untyped_value_is_found() -> None:
    source = "from typing import Any\n\ndef f(tx: Any) -> None: ..."
    assert untyped(planted("engine.worker", source)) == ["penstock.engine.worker:3 uses Any"]
    assert not untyped(planted("runtime.process", source))


def test_a_planted_call_that_no_port_declares_is_found() -> None:
    source = "def f(tx):\n    tx.events.begin([])\n    tx.events.fly()\n    tx.moon"
    assert undeclared(planted("engine.worker", source)) == [
        "penstock.engine.worker:4 uses tx.moon",
        "penstock.engine.worker:3 uses tx.events.fly",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "x = failure.code in (Reason.BODY, Reason.HEADERS)",
        "x = code is Reason.BREAKER",
        "x = reason == self.down",
        "x = which.reason is not None",
        "x = str(path).startswith('/dev')",
        "match x:\n    case Dead(reason=reason):\n        y",
    ],
)
def test_a_comparison_of_codes_or_of_two_messages_is_not_reported(source: str) -> None:
    assert not compared_messages(planted("engine.planted", source))


# -- the rules find planted breaches ---------------------------------------------------------------


def planted(place: str, source: str) -> list[Module]:
    return [Module(f"penstock.{place}", ast.parse(source))]


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("errors", "from penstock.model import Event"),
        ("model", "from penstock.rules import identity"),
        ("model", "def f():\n    from penstock.authoring.page import Page"),
        ("rules.planted", "import penstock.ports"),
        ("ports.planted", "from penstock import locks"),
        ("clock", "from penstock.config.files import load"),
        ("config.planted", "from penstock.authoring.pipeline import Pipeline"),
        ("authoring.planted", "from penstock.net.guard import Guard"),
        ("net.planted", "from penstock.stores.redis import Redis"),
        ("stores.planted", "from penstock.ledgers.sql.events import OPEN"),
        ("brokers.kafka.planted", "from penstock.engine.relay import Relay"),
        ("brokers.kafka.planted", "from penstock.ledgers.sql import events"),
        ("sinks.planted", "from penstock.net.http import CurlFetcher"),
        ("engine.planted", "from penstock.config.schema import Config"),
        ("engine.planted", "from penstock.stores.context import Context"),
        ("engine.deep.planted", "from penstock.fetching.stage import FetchStage"),
        ("extraction.planted", "from penstock.engine.worker import Worker"),
        ("connect.planted", "from penstock.net.http import CurlFetcher"),
        ("fetching.planted", "from penstock.intake.accept import push"),
        ("intake.planted", "from penstock.fetching.stage import FetchStage"),
        ("operate.planted", "from penstock.runtime.stores import Stores"),
        ("operate.planted", "from penstock.cli.output import say"),
        ("runtime.planted", "from penstock.cli.main import main"),
        ("cli.planted", "from penstock.engine.worker import Worker"),
        ("cli.planted", "from penstock.ledgers.sql import reports"),
        ("cli.planted", "from penstock.net.http import CurlFetcher"),
        ("demo.planted", "from penstock.stores.sql import Tx"),
        ("testing.planted", "from penstock.runtime.process import WorkerProcess"),
        ("penstock", "from penstock.runtime.process import WorkerProcess"),
        ("attic.planted", "from penstock.model import Event"),
    ],
)
def test_an_import_against_the_table_is_found(place: str, source: str) -> None:
    assert wrong_rooms(planted(place, source))


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("rules.planted", "from penstock.model import Event"),
        ("brokers.kafka.planted", "from penstock.stores.kafka import parse"),
        ("sources.planted", "from penstock.net.decoding import decode"),
        ("cli.planted", "from penstock.engine.messages import PageMessage"),
        ("runtime.planted", "from penstock.brokers.kafka.broker import KafkaBroker"),
    ],
)
def test_an_import_that_the_table_allows_is_not_reported(place: str, source: str) -> None:
    assert not wrong_rooms(planted(place, source))


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("brokers.kafka.broker", "from penstock.brokers.rabbitmq.message import open_letter"),
        ("brokers.kafka.deep.planted", "from penstock.brokers.rabbitmq import broker"),
        ("brokers.kafka.planted", "from ..rabbitmq import broker"),
        ("brokers.sqlite", "import penstock.brokers.redis"),
        ("brokers.sql", "from penstock.brokers.sqlite import SqliteBroker"),
        ("sinks.csv", "from penstock.sinks import jsonl"),
    ],
)
def test_an_adapter_that_imports_another_is_found(place: str, source: str) -> None:
    assert wrong_adapters(planted(place, source))


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("brokers.kafka.broker", "from penstock.brokers.kafka.topics import Place"),
        ("brokers.sqlite", "from penstock.brokers.sql import SqlQueue"),
        ("ledgers.postgres", "from penstock.ledgers.sql.events import OPEN"),
    ],
)
def test_an_adapter_may_use_its_own_folder_and_shared_modules(place: str, source: str) -> None:
    assert not wrong_adapters(planted(place, source))


@pytest.mark.parametrize(
    ("rule", "place", "source"),
    [
        (adapters_named_as_text, "cli.planted", 'x = "penstock.brokers.kafka"'),
        (adapters_named_as_text, "engine.planted", 'x = "penstock.brokers.kafka.broker"'),
        (adapters_named_as_text, "operate.planted", 'x = "penstock.sinks.csv:open_sink"'),
        (impure_imports, "rules.planted", "import time"),
        (impure_imports, "model", "from os import PathLike"),
        (impure_imports, "ports.planted", "import logging.handlers"),
        (impure_calls, "rules.planted", "x = datetime.now()"),
        (impure_calls, "model", "x = open('f')"),
        (dials, "engine.planted", "import pycurl"),
        (dials, "brokers.kafka.planted", "import urllib.request"),
        (dials, "sources.planted", "socket.create_connection(a)"),
        (executes, "cli.planted", "import pickle"),
        (executes, "stores.planted", "from marshal import loads"),
        (reads_ledger_tables, "brokers.planted", 'x = "SELECT id FROM event WHERE n=?"'),
        (reads_ledger_tables, "runtime.planted", "x = f'DELETE FROM history WHERE {what}'"),
        (without_docstring, "cli.planted", "x = 1"),
        (compared_messages, "rules.planted", "x = failure.reason.startswith('the body')"),
        (compared_messages, "rules.planted", "x = failure.reason.startswith(_OVERSIZED)"),
        (compared_messages, "cli.planted", "x = 'there is no state' not in e.message"),
        (compared_messages, "cli.planted", "x = [r for r in rows if reason == 'breaker: open']"),
        (compared_messages, "extraction.planted", "x = self._kill_reason == _CLOSED"),
        (compared_messages, "intake.planted", "x = reason in (f'{name} failed', 'other')"),
        (compared_messages, "rules.planted", "x = str(e).startswith('it')"),
        (compared_messages, "rules.planted", "x = 'timed out' in str(error).lower()"),
        (compared_messages, "rules.planted", "x = error.args[0] == 'html'"),
        (
            compared_messages,
            "brokers.planted",
            "match x:\n    case Dead(reason='gone'):\n        y",
        ),
    ],
)
def test_a_planted_breach_of_any_other_rule_is_found(
    rule: Callable[[Sequence[Module]], list[str]], place: str, source: str
) -> None:
    assert rule(planted(place, source))
