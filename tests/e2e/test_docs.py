"""The documentation is correct: commands run, output matches, links work, pages are current."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest
from tests.e2e.harness import free_port

from penstock.authoring.load import load
from penstock.brokers.kafka import url as kafka_dsn
from penstock.brokers.rabbitmq import connection as rabbitmq_link
from penstock.brokers.sqs import message as sqs_wire
from penstock.cli.main import COMMANDS, build
from penstock.config import files as config
from penstock.config.schema import OPTIONS, pool_options
from penstock.errors import PenstockError
from penstock.ports import Capabilities, Row
from penstock.stores import redis
from penstock.testing.broker_rig import SENTENCES
from penstock.testing.conformance import BrokerConformance

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclass
class Block:
    info: str
    body: str
    expected: str = ""  # body of the ```text block that follows
    end: int = 0


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    for m in FENCE.finditer(page.read_text("utf-8")):
        info = m["info"].strip()
        if (
            info == "text"
            and found
            and found[-1].info == "sh run"
            and m.start() == found[-1].end + 1
        ):
            found[-1].expected = m["body"]
        else:
            found.append(Block(info, m["body"], end=m.end()))
    return found


# -- commands are executed -------------------------------------------------------------------------


def line_pattern(line: str) -> re.Pattern[str]:
    """Return a pattern for `line`: `…` matches any text, and spaces match any whitespace."""
    parts = [re.sub(r"(\\? )+", r"\\s+", re.escape(part)) for part in line.strip().split("…")]
    return re.compile(r"\s*" + ".*".join(parts) + r"\s*$")


def missing(expected: str, output: str) -> str | None:
    """Return the first expected line that is missing in the output, or None. Order matters."""
    lines = iter(output.splitlines())
    for line in expected.splitlines():
        if line.strip():
            pattern = line_pattern(line)
            if not any(pattern.match(seen) for seen in lines):
                return line
    return None


@contextlib.contextmanager
def session(directory: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run all blocks of a page in one bash. At the end, kill all processes it left behind."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PENSTOCK_") or name == "PENSTOCK_VENV"
    }
    env |= {
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
    }
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/tutorial.md",
        "docs/sources/webhook.md",
        "docs/sources/seeds.md",
        "docs/from-cron-to-events.md",
    ],
)
def test_every_runnable_block_of_a_page_exits_with_0_and_prints_the_documented_lines(
    page: str, tmp_path: Path
) -> None:
    work, results = tmp_path / "work", tmp_path / "results"
    work.mkdir()
    results.mkdir()
    first, second = free_port(), free_port()

    def moved(text: str) -> str:
        text = re.sub(r"\b8000\b", str(first), re.sub(r"\b8001\b", str(second), text))
        # A fixed sleep is not always enough: wait until the shop runs and a price has changed.
        text = text.replace(
            "> shop.json &\nsleep 2\n",
            "> shop.json &\nuntil [ -s shop.json ]; do sleep 0.1; done\n",
        )
        again = "penstock push --window 1s -f seeds.txt\npenstock run --until-idle || true\n"
        return text.replace(
            f"sleep 10\n{again}cat moved.txt\n",
            f"until [ -s moved.txt ]; do\nsleep 2\n{again}done\ncat moved.txt\n",
        )

    (work / "dev").write_text(f'#!/bin/sh\nexec {ROOT}/dev "$@"\n')
    (work / "dev").chmod(0o755)
    steps: list[Block] = []
    script = "set -u\n"
    for block in blocks(ROOT / page):
        if block.info.startswith(("python file=", "toml file=")):
            name = block.info.partition("file=")[2]
            (work / name).write_text(moved(block.body), "utf-8")
        elif block.info == "sh run":
            n = len(steps)
            steps.append(block)
            script += (
                f"{{\n{moved(block.body)}}} > {results}/{n}.out 2> {results}/{n}.err\n"
                f"echo $? > {results}/{n}.code\n"
            )
    assert steps, f"{page} has no runnable block"
    with session(work, script) as process:
        process.wait(600)
    for n, step in enumerate(steps):
        out, err = (
            (results / f"{n}.{kind}").read_text("utf-8", "replace") for kind in ("out", "err")
        )
        shown = f"$ {moved(step.body)}\n{out}\n{err}"
        assert (results / f"{n}.code").read_text().strip() == "0", shown
        absent = missing(moved(step.expected), out)
        assert absent is None, f"{page} promises the line\n{absent}\nbut:\n{shown}"


def test_the_check_of_promised_output_can_fail() -> None:
    assert missing("a … c\nd", "x\na b  c\nd\n") is None
    assert missing("a … c\nd", "d\na b c\n") == "d"
    assert missing("accepted 18 URLs", "accepted 17 URLs") == "accepted 18 URLs"


# -- examples are valid ----------------------------------------------------------------------------


def pipelines() -> list[tuple[str, str, str]]:
    return [
        (str(page.relative_to(ROOT)), b.info.partition(" ")[0], b.body)
        for page in PAGES
        for b in blocks(page)
        if b.info in ("python pipeline", "toml pipeline")
    ]


@pytest.mark.parametrize(
    ("page", "kind", "text"), pipelines(), ids=lambda value: value if len(value) < 40 else ""
)
def test_every_pipeline_in_the_text_loads(page: str, kind: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / ("shop.py" if kind == "python" else "shop.toml")
    file.write_text(text, "utf-8")
    try:
        assert load(file).extractors, page
    except PenstockError as e:
        pytest.fail(f"{page}: {e.message}")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_configuration_example_in_the_text_is_valid(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.info == "toml config":
            (tmp_path / "penstock.toml").write_text(textwrap.dedent(block.body), "utf-8")
            try:
                config.load({}, {}, tmp_path)
            except PenstockError as e:
                pytest.fail(f"{page.name}: {e.message}")


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, in GitHub's form."""
    text = FENCE.sub("", page.read_text("utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.M)
    }


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_relative_link_has_an_existing_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text("utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in headings(there), (
                f"{page.name} links to {target}, which has no such heading"
            )


def test_every_documentation_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text("utf-8")
    for page in DOCS.rglob("*.md"):
        if page.name != "index.md" and page.name != "benchmarks.md":
            assert f"({page.relative_to(DOCS)})" in index, page.name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_in_the_text_exists(page: Path) -> None:
    app = build()
    names = {name for name, *_ in COMMANDS}
    text = page.read_text("utf-8")
    code = [b.body for b in blocks(page) if b.info.startswith("sh")] + re.findall(
        r"`([^`\n]+)`", FENCE.sub("", text)
    )
    for line in code:
        for m in re.finditer(
            r"(?<!from )(?:^|(?<=[\s;|&(]))penstock ([a-z]+)(?: ([a-z]+)\b)?", line
        ):
            name, inner = m[1], m[2]
            assert name in names, f"{page.name}: penstock {name}"
            subcommands = [n for n in app[name] if not n.startswith("-")]
            if subcommands and inner:
                assert inner in subcommands, f"{page.name}: penstock {name} {inner}"


def test_every_test_and_source_file_in_the_text_exists() -> None:
    defined = {
        name
        for folder in (ROOT / "tests", ROOT / "src/penstock/testing")
        for file in folder.rglob("*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text("utf-8"))
    }
    for page in PAGES:
        text = page.read_text("utf-8")
        for name in re.findall(r"`(test_\w+)`", text):
            assert name in defined or list((ROOT / "tests").rglob(f"{name}.py")), (
                f"{page.name}: {name}"
            )
        for path in re.findall(r"`((?:src|tests|bench|docs|deploy)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for module in re.findall(
            r"`((?!(?:src|tests|bench|docs|deploy|tools)/)(?:[a-z_]+/)+\w+\.py|\w+\.py)`",
            text,
        ):
            known = (
                (ROOT / "src/penstock" / module).exists()
                or list(DOCS.glob(module))
                or module in ("shop.py",)
            )
            assert known or "/" not in module, f"{page.name}: {module}"


def finding_codes() -> set[str]:
    """Return the codes of the findings of `penstock doctor`."""
    package = ROOT / "src" / "penstock"
    files = [*(package / "operate").glob("*.py"), package / "cli" / "doctor.py"]
    text = "".join(file.read_text("utf-8") for file in files)
    opened = (package / "runtime" / "openings.py").read_text("utf-8")
    checks = re.findall(r'Opening\(\s*"([a-z]+)"', opened)
    return {
        *re.findall(r'"([a-z]+\.[a-z_]+)"', text),
        *(f"{check}.unreachable" for check in checks),
        *(f"breaker.{kind}" for kind in ("host", "extractor", "topic")),
    }


def test_options_named_in_the_text_exist() -> None:
    variables = {v for option in (*OPTIONS, *pool_options("NAME")) for v in option.variables}
    ours = {
        "PENSTOCK_CONFIG",
        "PENSTOCK_VENV",
        "PENSTOCK_DEBUG",
        "PENSTOCK_LOG_LEVEL",
        "PENSTOCK_SERVICES_DIR",
        "PENSTOCK_KAFKA_OPTIONS",
    }
    paths = {option.path for option in OPTIONS}
    codes = finding_codes()
    sections = {path.partition(".")[0] for path in paths if "." in path}
    for page in PAGES:
        text = page.read_text("utf-8")
        for name in re.findall(r"\bPENSTOCK_[A-Z_]+\b", text):
            assert name in variables | ours or name.removesuffix("_FILE") in variables, (
                f"{page.name}: {name}"
            )
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", text):
            if name.partition(".")[0] in sections and not name.endswith((".py", ".db", ".md")):
                assert name in paths | codes or any(p.startswith(name + ".") for p in paths), (
                    f"{page.name}: {name}"
                )


# -- generated pages -------------------------------------------------------------------------------


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_match_the_code() -> None:
    assert generator().stale() == [], "run ./dev exec python docs/generate.py"


def test_every_option_and_command_is_in_the_reference() -> None:
    configuration, cli = (
        (DOCS / name).read_text("utf-8") for name in ("configuration.md", "cli.md")
    )
    for option in OPTIONS:
        assert f"| `{option.path}` |" in configuration
        assert all(f"`{variable}`" in configuration for variable in option.variables)
    for name, *_ in COMMANDS:
        assert f"## penstock {name}" in cli


def test_the_broker_table_has_every_adapter_capability_and_conformance_test() -> None:
    made = generator()
    modules = {
        entry.module
        for entry in entry_points(group="penstock.brokers")
        if entry.module.startswith("penstock.")
    }
    assert {
        entry.module
        for entry in entry_points(group="penstock.brokers")
        if entry.name in made.ADAPTERS
    } == modules
    assert set(made.CAPABILITIES) == set(Capabilities.__struct_fields__)
    page = (DOCS / "broker-guarantees.md").read_text("utf-8")
    assert set(SENTENCES) == {name for name in dir(BrokerConformance) if name.startswith("test_")}
    for name, needs in SENTENCES.items():
        sentence, gates = name.removeprefix("test_").replace("_", " "), made.asked_for(needs)
        assert set(gates) <= set(made.CAPABILITIES)
        row = next(line for line in page.splitlines() if sentence in line)
        assert row.startswith(
            f"| {sentence} | {', '.join(f'`{gate}`' for gate in gates)} |"
            if gates
            else f"- {sentence}"
        )


def test_no_broker_adapter_overrides_a_conformance_test() -> None:
    """A guarantee that an adapter does not give needs a capability, which the table shows."""
    for file in [
        *(ROOT / "tests/brokers").glob("test_*.py"),
        ROOT / "tests/embedded/test_broker_sqlite.py",
    ]:
        found = set(
            re.findall(r"^    (?:async def |def )?(test_\w+)", file.read_text("utf-8"), re.M)
        ) & set(SENTENCES)
        assert not found, f"{file.name} overrides {found}"


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("redis", {*redis.OPTIONS, *redis.TLS_OPTIONS}),
        ("amqp", set(rabbitmq_link.OPTIONS)),
        ("kafka", set(kafka_dsn.OPTIONS)),
        ("sqs", set(sqs_wire.OPTIONS)),
    ],
)
def test_the_documented_options_of_a_broker_url_are_those_of_the_code(
    scheme: str, options: set[str]
) -> None:
    section = (
        (DOCS / "brokers.md")
        .read_text("utf-8")
        .partition(f"\n### {scheme}://")[2]
        .partition("\n### ")[0]
        .partition("\n## ")[0]
    )
    documented = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([\w.]+)`", line.split(" | ")[0])
    }
    assert documented - {"rdkafka.NAME"} == options


# -- the examples for contributors -----------------------------------------------------------------


def test_the_example_sink_for_contributors_loads_and_writes_every_row_once(
    tmp_path: Path,
) -> None:
    example = next(
        b.body for b in blocks(ROOT / "CONTRIBUTING.md") if b.info == "python file=tab_sink.py"
    )
    entry_point = next(
        b.body
        for b in blocks(ROOT / "CONTRIBUTING.md")
        if b.info == "toml" and "entry-points" in b.body
    )
    found = tomllib.loads(entry_point)["project"]["entry-points"]["penstock.sinks"]
    (tmp_path / "tab_sink.py").write_text(example, "utf-8")
    about = tmp_path / "tab_sink-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tab-sink\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[penstock.sinks]\n" + "".join(f"{k} = {v}\n" for k, v in found.items())
    )
    (tmp_path / "shop.py").write_text(
        'from penstock import Pipeline\nshop = Pipeline("shop")\n@shop.extract\ndef all(page):\n'
        '    yield {"t": page.text}\nshop.sink("tab:out.tsv")\n'
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    checked = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "config", "check", "shop.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr

    module = ModuleType("tab_sink")
    exec(compile(example, "tab_sink.py", "exec"), module.__dict__)  # noqa: S102  our own documentation
    rows = [Row(n, f"k{n}", b"{}", n) for n in range(1, 5)]
    (tmp_path / "out.tsv").write_bytes(b"there before\n")
    sink = module.open_sink("tab:out.tsv", {}, tmp_path)
    mark = sink.write(rows[:2]) if sink.open(0, "") else ""
    sink.write(rows[2:])  # killed before the mark was recorded
    again = module.open_sink("tab:out.tsv", {}, tmp_path)
    assert again.open(2, mark) == mark
    again.write(rows[2:])
    again.close()
    sink.close()
    assert (tmp_path / "out.tsv").read_text() == "there before\n" + "".join(
        f"k{n}\t{{}}\n" for n in range(1, 5)
    )


def test_the_example_suites_for_plug_in_authors_pass(tmp_path: Path) -> None:
    example = next(
        b.body
        for b in blocks(DOCS / "store-suites.md")
        if b.info == "python file=test_my_stores.py"
    )
    (tmp_path / "test_my_stores.py").write_text(example, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "test_my_stores.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
