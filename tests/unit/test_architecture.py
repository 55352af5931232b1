"""Who may know whom, read from the source: rules are pure, adapters are strangers to each other,
only the composition root names them, only net/ dials.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# ruff: noqa: SIM905 (the tables read better as words)

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"
ADAPTER_PACKAGES = ("brokers", "ledgers", "claims", "pages", "sinks", "sources")
ADAPTER = re.compile(rf"penstock\.({'|'.join(ADAPTER_PACKAGES)})\.\w+(:\w+)?")

# What makes a decision depend on more than its arguments. Prefixes: `urllib.request` does not ban
# `urllib.parse`.
IMPURE = (
    "asyncio threading multiprocessing concurrent subprocess signal selectors select socket ssl time sched random secrets uuid logging structlog "
    "urllib.request http.client http.server sqlite3 apsw pycurl tempfile shutil os sys io pathlib contextvars"
).split()
IMPURE_NAMES = {"now", "utcnow", "today", "fromtimestamp", "urandom"}
IMPURE_CALLS = {"open", "print", "input"}

# Only these name adapters, each for the reason given; whatever else wants one gets it handed in.
MAY_NAME_ADAPTERS = {
    "penstock.app": "the composition root: it runs what the configuration chose",
    "penstock.opening": "its half that opens stores: commands need no more than that",
}
MAY_NAME_ADAPTERS_UNDER = ("penstock.testing.",)  # the conformance suites
READ_BY_COMMANDS = (
    "penstock.ledgers.sql_queries",
)  # `status`, `trace`, `events` read the books without running a pipeline

DIALS = "pycurl urllib.request urllib3 http.client requests httpx aiohttp websockets ftplib smtplib telnetlib".split()
DIAL_CALLS = {
    "create_connection",
    "open_connection",
    "getaddrinfo",
    "gethostbyname",
    "sock_connect",
}
# Inside the product, net/ alone goes out, through the guard. `testing` ships the pretend web, which
# only ever talks to itself. A broker's own API, or a Connect worker's, is asked where its
# administrator said it is, never at an address that came from the web.
MAY_DIAL = (
    "penstock.net.",
    "penstock.testing.",
    "penstock.brokers.rabbitmq_management",
    "penstock.connect.rest",
)


@dataclass(frozen=True)
class Module:
    name: str
    tree: ast.Module
    is_package: bool

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every imported dotted name, wherever it stands: `from a.b import c` counts as `a.b` and
        `a.b.c`.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = self.name.split(".")
                    above = parts[: len(parts) - node.level + self.is_package]
                    base = ".".join([*above, *([base] if base else [])])
                yield base, node.lineno
                for alias in node.names:
                    yield f"{base}.{alias.name}", node.lineno


def read(path: Path) -> Module:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return Module(
        ".".join(parts[:-1] if is_package else parts),
        ast.parse(path.read_text(encoding="utf-8"), str(path)),
        is_package,
    )


MODULES = [read(path) for path in sorted(PACKAGE.rglob("*.py"))]
NAMES = {m.name for m in MODULES}
PURE = [m for m in MODULES if m.name == "penstock.model" or m.name.startswith("penstock.rules")]


def under(name: str, prefixes: tuple[str, ...] | list[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def adapter_package(name: str) -> str | None:
    parts = name.split(".")
    return (
        parts[1]
        if len(parts) > 1 and parts[0] == "penstock" and parts[1] in ADAPTER_PACKAGES
        else None
    )


def by_name(module: Module) -> str:
    return module.name


def test_the_tree_is_really_read() -> None:
    assert {
        "penstock.model",
        "penstock.ports",
        "penstock.rules.identity",
        "penstock.rules.pace",
        "penstock.net.guard",
    } <= NAMES


@pytest.mark.parametrize("module", PURE, ids=by_name)
def test_a_decision_imports_no_clock_no_chance_and_no_outside_world(module: Module) -> None:
    allowed = {"os.PathLike", "os"} if module.name == "penstock.model" else set()  # for a type only
    found = [
        (name, line)
        for name, line in module.imports()
        if under(name, IMPURE) and name not in allowed
    ]
    assert not found


@pytest.mark.parametrize("module", PURE, ids=by_name)
def test_a_decision_asks_no_clock_and_opens_nothing(module: Module) -> None:
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in IMPURE_NAMES:
            found.append((node.attr, node.lineno))
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in IMPURE_CALLS
        ):
            found.append((node.func.id, node.lineno))
    if module.name == "penstock.model":  # Page.from_file is how a user's test loads a saved page
        found = [f for f in found if f[0] != "open"]
    assert not found


@pytest.mark.parametrize("module", [m for m in PURE if m.name != "penstock.model"], ids=by_name)
def test_a_rule_knows_only_values_errors_and_other_rules(module: Module) -> None:
    known = ("penstock.rules", "penstock.model", "penstock.errors", "penstock.ports")
    assert not [
        (name, line)
        for name, line in module.imports()
        if under(name, ("penstock",)) and name != "penstock" and not under(name, known)
    ]


@pytest.mark.parametrize(
    "module", [m for m in MODULES if m.name in ("penstock.ports", "penstock.errors")], ids=by_name
)
def test_ports_and_errors_know_nothing_but_values(module: Module) -> None:
    assert not [
        (name, line)
        for name, line in module.imports()
        if under(name, ("penstock",)) and not under(name, ("penstock.model", "penstock.errors"))
    ]


def test_adapters_never_import_each_other() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "entry-points"
    ]
    adapters = {
        target.partition(":")[0] for entries in groups.values() for target in entries.values()
    }
    assert adapters
    found = []
    for module in MODULES:
        own = adapter_package(module.name)
        if own is None:
            continue
        for name, line in module.imports():
            other = adapter_package(name)
            # What a package shares among its adapters may be used there, such as the SQL that two
            # of them run; nothing else.
            if other is not None and (other != own or (name in adapters and module.name != name)):
                found.append(f"{module.name}:{line} imports {name}")
    assert not found


def test_only_the_composition_root_names_adapters() -> None:
    found = []
    for module in MODULES:
        if (
            adapter_package(module.name)
            or module.name in MAY_NAME_ADAPTERS
            or module.name.startswith(MAY_NAME_ADAPTERS_UNDER)
        ):
            continue
        for name, line in module.imports():
            reads = (
                module.name.startswith(("penstock.cli.", "penstock.demo."))
                and name in READ_BY_COMMANDS
            )
            if name in NAMES and ADAPTER.fullmatch(name) and not reads:
                found.append(f"{module.name}:{line} imports {name}")
        strings = (
            node
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        found += [
            f"{module.name}:{node.lineno} names {node.value!r}"
            for node in strings
            if ADAPTER.fullmatch(str(node.value))
        ]  # for importlib
    assert not found


def test_nothing_but_net_dials_out() -> None:
    found = []
    for module in MODULES:
        if module.name.startswith(MAY_DIAL):
            continue
        found += [
            f"{module.name}:{line} imports {name}"
            for name, line in module.imports()
            if under(name, DIALS)
        ]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in DIAL_CALLS:
                found.append(f"{module.name}:{node.lineno} uses {node.attr}")
    assert not found


def test_nothing_from_the_wire_is_ever_executed() -> None:
    banned = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle")
    assert not [
        f"{m.name}:{line} imports {name}"
        for m in MODULES
        for name, line in m.imports()
        if under(name, banned)
    ]


def test_a_module_says_in_its_first_line_what_lives_there() -> None:
    assert not [
        m.name for m in MODULES if not (ast.get_docstring(m.tree) or "").split("\n")[0].strip()
    ]
