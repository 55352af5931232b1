"""The command line as a user sees it: process, directory, exit code, stdout and stderr."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest

from penstock.testing.web import product_page

PIPELINE = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/p/*", version=1, key="sku")
def product(page: Page):
    if page.url.endswith("/p/7"):
        raise ValueError("seven is [bold]bad[/bold] \\x1b[31m")
    if page.url.endswith("/p/8"):
        return
    yield {"sku": page.css("[data-sku]::attr(data-sku)").get(), "title": page.css("h1::text").get()}
    if page.url.endswith("/p/3"):
        yield from page.follow(["/p/30", "/urls.txt"])

shop.sink("jsonl:products.jsonl")
"""
STATES = ("pending", "in_flight", "delayed", "success", "duplicate", "dead")


# A process that has imported all modules and forks one child for each command. It behaves like the
# real command, without half a second of imports each time.
SERVER = """
import json, os, pkgutil, sys
import penstock.cli, penstock.runtime.supervisor, penstock.extraction.sandbox
from penstock.cli import main as cli

for module in pkgutil.iter_modules(penstock.cli.__path__):
    __import__("penstock.cli." + module.name)
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if not pid:
        code = 70
        try:
            os.chdir(job["cwd"])
            os.environ.clear()
            os.environ.update(job["env"])
            for fd, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
                os.dup2(os.open(job["files"][fd], mode), fd)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
            sys.argv = ["penstock", *job["args"]]
            code = cli.main()
            sys.stdout.flush()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Warm:
    def __init__(self, scratch: Path) -> None:
        self.files = [scratch / name for name in ("in", "out", "err")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, args: list[str], cwd: Path, env: dict[str, str], stdin: bytes) -> Done:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for file, content in zip(self.files, (stdin, b"", b""), strict=True):
            file.write_bytes(content)
        self.process.stdin.write(
            json.dumps(
                {"args": args, "cwd": str(cwd), "env": env, "files": [str(f) for f in self.files]}
            )
            + "\n"
        )
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        _, out, err = (f.read_bytes() for f in self.files)
        return Done(code, out.decode("utf-8", "replace"), err.decode(), out)


_servers: list[Warm] = []


def warm() -> Warm:
    return _servers[0]


@pytest.fixture(scope="module", autouse=True)
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    server = Warm(tmp_path_factory.mktemp("warm"))
    _servers.append(server)
    yield
    _servers.clear()
    assert server.process.stdin is not None
    assert server.process.stdout is not None
    server.process.stdin.close()
    server.process.wait(60)
    server.process.stdout.close()


@dataclass
class Done:
    code: int
    out: str
    err: str
    raw: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Shop:
    directory: Path
    port: int = 0

    def url(self, n: int) -> str:
        return f"http://127.0.0.1:{self.port}/p/{n}"

    def environment(self, **more: str) -> dict[str, str]:
        env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("PENSTOCK_", "NO_COLOR", "FORCE_COLOR"))
        }
        ours = {
            "PENSTOCK_PACE_RATE": "unlimited",
            "PENSTOCK_RETRY_BASE": "20ms",
            "PENSTOCK_DURABILITY": "process",
        }
        return (
            env
            | ours
            | ({"PENSTOCK_NET_ALLOW": f"127.0.0.1:{self.port}"} if self.port else {})
            | more
        )

    def __call__(self, *args: str, stdin: str | bytes = b"", **env: str) -> Done:
        return warm().call(
            list(args),
            self.directory,
            self.environment(**env),
            stdin.encode() if isinstance(stdin, str) else stdin,
        )

    def process(
        self, *args: str, stdout: int = subprocess.PIPE, timeout: float = 300
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the command in a new process, including all imports."""
        command = [sys.executable, "-m", "penstock.cli.main", *args]
        return subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment(),
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=timeout,
            check=False,
        )

    def copy(self, to: Path) -> Shop:
        shutil.copytree(self.directory, to / "copy")
        return Shop(to / "copy", self.port)

    def sql(self, statement: str) -> Any:
        db = apsw.Connection(str(self.directory / ".penstock" / "penstock.db"))
        try:
            return db.execute(statement).fetchall()
        finally:
            db.close()


@pytest.fixture
def empty(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture(scope="module")
def web() -> Iterator[int]:
    """Serve 40 pages on loopback. /p/9, /p/19, … return 404."""
    command = [
        sys.executable,
        "-m",
        "penstock.testing.web",
        "--pages",
        "40",
        "--dead-share",
        "0.1",
        "--with-parent",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["port"]
        server.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def ran(web: int, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """A directory in which /p/0 … /p/20 were scraped. Read only: change `ran.copy(tmp_path)`."""
    shop = Shop(tmp_path_factory.mktemp("shop"), web)
    (shop.directory / "shop.py").write_text(PIPELINE)
    pushed = shop("push", "-", stdin="\n".join(shop.url(n) for n in [*range(21), 3]))
    assert pushed.code == 0, pushed.err
    run = shop("run", "shop.py", "--until-idle")
    assert run.code == 1, run.err  # /p/7, /p/9 and /p/19 are dead
    return shop


# -- usage, configuration, errors ------------------------------------------------------------------


def test_help_lists_every_command_and_imports_no_parser(empty: Shop) -> None:
    check = (
        "import sys; from penstock.cli.main import main; main(['--help']); "
        "assert not {'cyclopts', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in (
        "demo",
        "init",
        "run",
        "push",
        "status",
        "trace",
        "events",
        "pages",
        "dlq",
        "topics",
        "doctor",
        "config",
        "completion",
        "version",
    ):
        assert f"\n  {name} " in done.stdout
    assert empty("--help").out == done.stdout


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["statsu"], "did you mean penstock status?"),
        (["--frobnicate"], "there is no option"),
        (["--state", "x"], "no command given"),
        (["push"], "no URL given"),
        (["push", "--geoo", "de", "http://x.example/"], "--geo"),
        (["push", "--priority", "urgent", "http://x.example/"], "high, normal or low"),
        (["push", "--window", "soon", "http://x.example/"], "not a duration"),
        (["push", "-f", "nowhere.txt"], "nowhere.txt"),
        (["dlq", "frob"], "frob"),
        (["dlq", "show"], "penstock dlq show --help"),
        (["dlq", "retry"], "no dead letters selected"),
        (["run", "x.py", "--role", "cook"], "source, serve, fetch, extract, sink"),
        (["run", "x.py", "--workers", "0"], "not a number from 1 to 256"),
        (["run", "x.py", "--workers", "many"], "many"),
        (["status", "--log-level", "loud"], "debug, info, warning, error"),
        (["status", "-o", "pace.rate"], "has no `=`"),
        (["events", "ls", "--status", "lost"], "there is no status"),
        (["init", "9 lives"], "not a valid pipeline name"),
        (["run"], "no pipeline given"),
    ],
)
def test_an_invalid_command_line_exits_2_with_a_hint(
    empty: Shop, args: list[str], expected: str
) -> None:
    done = empty(*args)
    assert done.code == 2, done.err
    assert done.err.startswith("Error: ")
    assert expected in done.err
    assert done.out == ""
    assert "Traceback" not in done.err


def test_commands_that_read_exit_4_if_there_is_no_state(empty: Shop) -> None:
    for args in (
        ["status"],
        ["trace", "last"],
        ["dlq", "ls"],
        ["events", "ls"],
        ["pages", "ls"],
        ["topics", "ls"],
        ["dlq", "retry", "--all", "--dry-run"],
    ):
        done = empty(*args)
        assert done.code == 4, args
        assert "there is no Penstock state" in done.err
    assert not (empty.directory / ".penstock").exists()


def test_an_unknown_option_is_an_error_that_suggests_the_likely_one(empty: Shop) -> None:
    (empty.directory / "penstock.toml").write_text("[pace]\nrat = 2\n")
    done = empty("status")
    assert (done.code, done.err) == (
        3,
        (
            "Error: pace.rat: there is no such option (in penstock.toml)\n"
            "Try:   did you mean pace.rate?\n"
        ),
    )
    (empty.directory / "penstock.toml").unlink()
    assert "did you mean PENSTOCK_LEASE?" in empty("status", PENSTOCK_LEESE="3s").err
    done = empty("push", "http://x.example/", "-o", "pace.rat=2")
    assert done.code == 3
    assert "did you mean pace.rate?" in done.err


def test_a_bad_pipeline_file_exits_3_with_the_line_number(empty: Shop) -> None:
    (empty.directory / "shop.py").write_text(
        "from penstock import Pipeline\nshop = Pipelin('shop')\n"
    )
    for args in (["run", "shop.py", "--until-idle"], ["config", "check", "shop.py"]):
        done = empty(*args)
        assert done.code == 3
        assert "shop.py:2: NameError" in done.err
    assert not (empty.directory / ".penstock").exists()


def test_the_command_line_overrides_the_environment_which_overrides_the_file(empty: Shop) -> None:
    (empty.directory / "penstock.toml").write_text(
        'lease = "11s"\n[retry]\nbase = "1s"\nmax = "40s"\n'
    )
    shown = empty(
        "config",
        "show",
        "--origin",
        "--json",
        "-o",
        "retry.max=77s",
        PENSTOCK_RETRY_BASE="2s",
        PENSTOCK_RETRY_MAX="50s",
    )
    options = {o["path"]: (o["value"], o["origin"]) for o in shown.json["options"]}
    assert options["lease"] == ("11s", "penstock.toml")
    assert options["retry.base"] == ("2s", "PENSTOCK_RETRY_BASE")
    assert options["retry.max"] == ("77s", "command line")
    assert options["retry.budget"] == ("3", "default")
    leading = empty("--set", "retry.max=77s", "--state", "elsewhere", "config", "show", "--json")
    assert {o["path"]: o["value"] for o in leading.json["options"]}["state.dir"] == str(
        empty.directory / "elsewhere"
    )
    human = empty("config", "show", "retry", "--origin")
    assert "PENSTOCK_RETRY_BASE" in human.out
    assert "lease" not in human.out


def test_a_password_is_never_printed(empty: Shop) -> None:
    url = "amqp://me:hunter2@broker.example/"
    for args in (
        ["config", "show", "--origin"],
        ["config", "show", "--json"],
        ["status"],
        ["doctor"],
        ["push", "http://x.example/"],
        ["config", "check"],
    ):
        done = empty(*args, PENSTOCK_BROKER_URL=url)
        assert "hunter2" not in done.out + done.err, args
    assert "amqp://me:***@broker.example/" in empty("config", "show", PENSTOCK_BROKER_URL=url).out
    done = empty("push", "http://me:hunter2@x.example/")
    assert done.code == 1
    assert "hunter2" not in done.out + done.err


def test_a_broker_whose_extra_is_missing_exits_3_and_names_it(empty: Shop) -> None:
    (empty.directory / "aiormq.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'aiormq'\", name='aiormq')\n"
    )
    done = empty(
        "push",
        "http://x.example/",
        PENSTOCK_BROKER_URL="amqp://broker.example/",
        PYTHONPATH=str(empty.directory),
    )
    assert done.code == 3
    assert "pip install 'penstock[rabbitmq]'" in done.err


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1/0",
        "kafka://127.0.0.1:1",
        "sqs://x:x@127.0.0.1:1/?region=x",
        "amqp://127.0.0.1:1/",
    ],
)
def test_an_external_broker_without_shared_stores_exits_3_and_names_the_options(
    empty: Shop, url: str
) -> None:
    done = empty("push", "http://x.example/", PENSTOCK_BROKER_URL=url)
    assert done.code == 3
    for variable in ("PENSTOCK_LEDGER_URL", "PENSTOCK_PAGES_URL"):
        assert variable in done.err
    assert ("PENSTOCK_CLAIMS_URL" in done.err) is not url.startswith("redis:")
    assert not (empty.directory / ".penstock").exists(), "no local file was created instead"


ONE_MACHINE = {
    "PENSTOCK_LEDGER_URL": "sqlite:ledger.db",
    "PENSTOCK_CLAIMS_URL": "sqlite:ledger.db",
    "PENSTOCK_PAGES_URL": "file:pages",
}


@pytest.mark.parametrize(
    "url",
    [
        "postgres://me:hunter2@127.0.0.1:1/db",
        "redis://:hunter2@127.0.0.1:1/0",
        "amqp://me:hunter2@127.0.0.1:1/",
        "kafka://me:hunter2@127.0.0.1:1",
        "sqs://me:hunter2@127.0.0.1:1/?region=x&tls=false",
    ],
)
def test_an_unreachable_server_exits_4_with_an_error_message(empty: Shop, url: str) -> None:
    more = {} if url.startswith("postgres") else ONE_MACHINE
    done = empty("push", "http://x.example/", PENSTOCK_BROKER_URL=url, **more)
    assert done.code == 4, done.err
    assert done.err.startswith("Error: ")
    assert "\nTry: " in done.err
    assert "Traceback" not in done.err
    assert "hunter2" not in done.err + done.out


@pytest.mark.parametrize(
    "url",
    [
        "postgres://127.0.0.1:port/db",
        "redis://127.0.0.1:port",
        "amqp://127.0.0.1:port",
        "kafka://",
        "sqs://127.0.0.1:port",
        "reddis://x",
    ],
)
def test_a_mistyped_url_exits_3_with_an_error_message(empty: Shop, url: str) -> None:
    done = empty("push", "http://x.example/", PENSTOCK_BROKER_URL=url, **ONE_MACHINE)
    assert done.code == 3, done.err
    assert done.err.startswith("Error: ")
    assert "Traceback" not in done.err


def test_a_file_that_is_not_a_store_exits_4_and_stays_unchanged(empty: Shop) -> None:
    state = empty.directory / ".penstock"
    state.mkdir()
    (state / "penstock.db").write_bytes(
        b"not a database at all, but long enough to look like one" * 50
    )
    before = (state / "penstock.db").read_bytes()
    for args in (["status"], ["push", "http://x.example/"], ["doctor"]):
        done = empty(*args)
        assert done.code == 4, (args, done.err)
        assert "Traceback" not in done.err
    assert (state / "penstock.db").read_bytes() == before


# -- push ------------------------------------------------------------------------------------------


def test_push_accepts_valid_urls_and_reports_the_lines_of_invalid_ones(empty: Shop) -> None:
    (empty.directory / "urls.txt").write_bytes(
        (
            b"\xef\xbb\xbfhttp://a.example/1\r\n\r\n# a comment\nftp://a.example/\n"
            b"  http://a.example/2  \nhttp://a.example/"
        )
        + b"x" * 100_000
        + b"\n\xff\xfe\nhttp://a.example/3"
    )
    done = empty("push", "-f", "urls.txt", "--json")
    assert done.code == 1
    assert (done.json["accepted"], done.json["known"], done.json["refused"]) == (3, 0, 3)
    assert [r["where"] for r in done.json["refusals"]] == ["urls.txt:4", "urls.txt:6", "urls.txt:7"]
    assert done.json["refusals"][0]["reason"] == "the scheme is not http or https"
    assert len(done.json["refusals"][1]["input"]) <= 200
    done = empty("push", "http://a.example/4", "nonsense")
    assert (done.code, done.out) == (1, "accepted 1 URL, 1 refused\n")
    assert "refused argument 2: 'nonsense'" in done.err
    assert empty("status", "--json").json["total"]["accepted"] == 4


def test_push_reads_stdin_and_stores_its_options_on_the_event(empty: Shop) -> None:
    hints = [
        "--geo",
        "de",
        "--pool",
        "homes",
        "--account",
        "ann",
        "--priority",
        "high",
        "--force",
        "--window",
        "1h",
        "--trace",
        "order-66",
    ]
    assert empty("push", "-", *hints, stdin="http://a.example/1\nhttp://a.example/2\n").code == 0
    (first, second) = empty("trace", "order-66", "--json").json["events"]
    assert first["route"] == {"geo": "de", "pool": "homes", "account": "ann"}
    assert (first["priority"], first["force"], second["url"]) == (0, True, "http://a.example/2")
    assert empty("push", "-f", "-", stdin="# nothing\n\n").code == 2


# -- status, trace, events -------------------------------------------------------------------------


def test_status_adds_up_per_topic_and_in_total(ran: Shop) -> None:
    s = ran("status", "--json").json
    for row in (*s["topics"].values(), s["total"]):
        assert row["accepted"] == sum(row[name] for name in STATES)
    # 21 URLs and a duplicate were pushed, and two links followed.
    assert s["total"] == {
        "accepted": 24,
        "pending": 0,
        "in_flight": 0,
        "delayed": 0,
        "success": 20,
        "duplicate": 1,
        "dead": 3,
    }
    assert (s["breaker"], s["paused"], s["workers"], s["oldest_pending_age"]) == (
        "closed",
        {},
        [],
        None,
    )
    assert {k: s["counters"][k] for k in ("records", "empty", "unmatched", "followed")} == {
        "records": 18,
        "empty": 1,
        "unmatched": 1,
        "followed": 2,
    }
    assert s["sinks"] == [
        {
            "name": "jsonl:products.jsonl",
            "flushed": 18,
            "backlog": 0,
            "down": None,
            "down_since": None,
        }
    ]
    assert {c["reason"]: c["letters"] for c in s["dead_causes"] if c["stage"] == "fetch"} == {
        "HTTP 404": 2
    }


def test_status_text_lists_pages_without_records_and_has_no_control_codes(
    ran: Shop,
) -> None:
    done = ran("status")
    assert done.code == 0
    assert "1 page: no extractor matched" in done.out
    assert "1 page: yielded nothing" in done.out
    assert "seven is [bold]bad[/bold] \\x1b[31m" in done.out
    for args in (
        ["status"],
        ["trace", ran.url(7)],
        ["dlq", "ls"],
        ["dlq", "show", ran.url(7)],
        ["events", "ls"],
        ["doctor"],
        ["push", "--help"],
        ["--help"],
    ):
        assert "\x1b" not in ran(*args).out, args


def test_a_trace_is_found_by_url_by_last_and_by_an_id_prefix(ran: Shop) -> None:
    trace = ran("trace", ran.url(3), "--json").json
    (root,) = [e for e in trace["events"] if e["url"] == ran.url(3)]
    assert (root["status"], root["records"], root["response_status"]) == (
        "success",
        [{"extractor": "product", "key": "T-3"}],
        200,
    )
    assert [s["status"] for s in root["history"]] == ["pending", "in_flight", "success"]
    assert {e["parent"] for e in trace["events"]} == {None, root["event_id"]}
    assert trace["total"] == len(trace["events"]) == 3
    for name in (root["event_id"], root["event_id"][:12], trace["trace_id"]):
        assert ran("trace", name, "--json").json["trace_id"] == trace["trace_id"]
    # The links of this trace were accepted last.
    assert ran("trace", "last", "--json").json["trace_id"] == trace["trace_id"]
    child = next(e for e in trace["events"] if e["parent"])
    assert ran("trace", child["event_id"][:12], "--json").json["asked"] == child["event_id"]


def test_a_duplicate_and_its_original_refer_to_each_other(ran: Shop) -> None:
    (twin,) = ran("events", "ls", "--status", "duplicate", "--json").json["events"]
    original = ran("trace", ran.url(3), "--json").json["events"][0]
    assert twin["duplicate_of"] == original["event_id"]
    assert original["duplicates"] == [{"event_id": twin["event_id"], "trace_id": twin["trace_id"]}]
    (shown_twin,) = ran("trace", twin["event_id"], "--json").json["events"]
    assert shown_twin["duplicate_of_trace"] == original["trace_id"]
    assert original["event_id"][:12] in ran("trace", twin["event_id"]).out


def test_an_ambiguous_id_prefix_exits_2_and_an_unknown_one_exits_1(ran: Shop) -> None:
    ids = [e["event_id"] for e in ran("events", "ls", "--json").json["events"]]
    shared = next(
        c for c in "0123456789abcdef" if sum(i.startswith(c) for i in ids) > 1
    )  # 24 ids, 16 digits
    done = ran("trace", shared)
    assert done.code == 2
    assert "more than one" in done.err
    done = ran("trace", "zzz")
    assert (done.code, done.out) == (1, "")


def test_events_are_listed_newest_first_and_filtered(ran: Shop) -> None:
    found = ran("events", "ls", "--status", "dead", "--json").json
    assert found["complete"] is True
    assert [e["url"] for e in found["events"]] == [ran.url(19), ran.url(9), ran.url(7)]
    assert (
        len(ran("events", "ls", "--source", "push", "--limit", "5", "--json").json["events"]) == 5
    )
    assert ran("events", "ls", "--host", "nobody.example", "--json").json["events"] == []
    assert {
        e["source"]
        for e in ran("events", "ls", "--source", "follow:product", "--json").json["events"]
    } == {"follow:product"}
    assert len(ran("events", "ls", "--url", ran.url(3), "--json").json["events"]) == 2


# -- dead letters ----------------------------------------------------------------------------------


def test_dead_letters_are_grouped_by_cause_and_shown_in_full(ran: Shop) -> None:
    groups = ran("dlq", "ls", "--json").json
    assert groups["total"] == 3
    assert [(g["count"], g["stage"], g["class"]) for g in groups["groups"]] == [
        (2, "fetch", "not_found"),
        (1, "extract", "permanent"),
    ]
    assert len(ran("dlq", "ls", "--all", "--reason", "http 404", "--json").json["letters"]) == 2
    assert ran("dlq", "ls", "--stage", "sink", "--json").json["total"] == 0
    dead_letter = ran("dlq", "show", groups["groups"][1]["newest"]["event_id"][:10], "--json").json
    assert dead_letter["url"] == ran.url(7)
    assert "raise ValueError" in dead_letter["detail"]
    assert [s["status"] for s in dead_letter["attempts"]] == ["pending", "in_flight", "dead"]
    assert (
        json.loads(base64.b64decode(dead_letter["envelope_base64"]))["id"]
        == dead_letter["event_id"]
    )
    assert "raise ValueError" in ran("dlq", "show", ran.url(7)).out


def test_a_redriven_dead_letter_is_pending_again_with_its_overrides(
    ran: Shop, tmp_path: Path
) -> None:
    shop = ran.copy(tmp_path)
    assert shop("dlq", "retry", "--all", "--dry-run", "--json").json == {
        "would_retry": 3,
        "retried": 0,
        "skipped": 0,
    }
    done = shop(
        "dlq",
        "retry",
        "--reason",
        "404",
        "--geo",
        "fr",
        "--priority",
        "low",
        "--force",
        "--rate",
        "50/s",
        "--json",
    )
    assert (done.code, done.json) == (0, {"would_retry": 2, "retried": 2, "skipped": 0})
    s = shop("status", "--json").json["total"]
    assert (s["pending"], s["dead"], s["accepted"]) == (2, 1, 24)
    event = shop("trace", shop.url(9), "--json").json["events"][0]
    assert (event["route"], event["priority"], event["force"], event["status"]) == (
        {"geo": "fr"},
        2,
        True,
        "pending",
    )
    assert shop("doctor").code == 0
    # No worker serves the new route, so both events wait for one.
    assert shop("run", "shop.py", "--until-idle").code == 1
    s = shop("status", "--json").json
    assert (s["total"]["delayed"], s["total"]["dead"]) == (2, 1)
    assert [(w["for"], w["events"]) for w in s["waits"]] == [("route:geo=fr", 2)]
    one = shop(
        "dlq", "retry", shop("dlq", "ls", "--all", "--json").json["letters"][0]["event_id"][:12]
    )
    assert (one.code, one.out) == (0, "retried 1 dead letter\n")
    assert shop("dlq", "retry", "0" * 32).code == 1


def test_a_run_without_new_dead_events_exits_0(ran: Shop, tmp_path: Path) -> None:
    shop = ran.copy(tmp_path)
    assert shop("push", shop.url(21)).code == 0
    assert shop.process("run", "shop.py", "--until-idle").returncode == 0


def test_dead_letters_are_dropped_only_with_yes_and_exported_in_full(
    ran: Shop, tmp_path: Path
) -> None:
    shop = ran.copy(tmp_path)
    done = shop("dlq", "drop", "--all")
    assert done.code == 2
    assert "--yes" in done.err
    exported = [json.loads(line) for line in shop("dlq", "export").out.splitlines()]
    assert sorted(e["url"] for e in exported) == sorted(shop.url(n) for n in (7, 9, 19))
    assert all(
        json.loads(base64.b64decode(e["envelope_base64"]))["data"]["url"] == e["url"]
        for e in exported
    )
    assert shop("dlq", "export", "--stage", "extract", "-o", "letters.jsonl").out == ""
    assert len((shop.directory / "letters.jsonl").read_text().splitlines()) == 1
    assert shop("dlq", "drop", "--all", "--yes", "--json").json == {"dropped": 3}
    assert shop("dlq", "ls", "--json").json == {"total": 0, "groups": []}
    assert shop("status", "--json").json["total"]["dead"] == 3  # the events stay dead
    assert shop("doctor").code == 0


# -- pages, topics ---------------------------------------------------------------------------------


def test_a_stored_page_is_returned_unchanged_by_url_event_or_page_id(ran: Shop) -> None:
    expected = product_page(3)
    (event,) = [
        e for e in ran("trace", ran.url(3), "--json").json["events"] if e["url"] == ran.url(3)
    ]
    for name in (ran.url(3), event["event_id"][:12], event["page"], event["page"][:12]):
        assert ran("pages", "show", name).raw == expected
    about = ran("pages", "show", event["page"], "--json").json
    assert (about["url"], about["status"], about["size"]) == (ran.url(3), 200, len(expected))
    listed = ran("pages", "ls", "--json").json
    assert listed["total"]["pages"] == len(listed["pages"]) == 21
    assert all(page["stored"] for page in listed["pages"])
    for unknown in ("f" * 64, "http://nobody.example/", ran.url(9)):
        assert ran("pages", "show", unknown).code == 1


def test_pruning_deletes_pages_except_those_of_dead_letters(ran: Shop, tmp_path: Path) -> None:
    shop = ran.copy(tmp_path)
    shop.sql("UPDATE page SET seen=seen-1000; UPDATE segment SET made=made-1000")
    done = shop("pages", "prune", "--keep", "10m", "--json")
    assert (done.code, done.json["removed"]) == (0, 20)
    assert shop("pages", "show", shop.url(7), "-o", "seven.html").code == 0
    assert (shop.directory / "seven.html").read_bytes() == product_page(7)
    gone = shop("pages", "show", shop.url(3))
    assert gone.code == 1
    assert shop("doctor").code == 0


def test_a_paused_topic_is_shown_and_resuming_closes_the_breaker(ran: Shop, tmp_path: Path) -> None:
    shop = ran.copy(tmp_path)
    assert shop("topics", "pause", "--reason", "a long lunch").code == 0
    assert shop("status", "--json").json["paused"] == {"requests": "a long lunch"}
    shop.sql(
        "UPDATE topic SET paused='breaker: 60 of 70 events ended dead within 60 s' "
        "WHERE name='requests'"
    )
    assert shop("status", "--json").json["breaker"] == "open"
    assert "penstock topics resume requests" in shop("status").out
    assert shop("topics", "resume", "requests").code == 0
    assert shop("status", "--json").json["breaker"] == "closed"
    assert shop.sql("SELECT count(*) FROM ends WHERE what='topic:requests'") == [(0,)]
    assert [
        t["paused"]
        for t in shop("topics", "ls", "--json").json["topics"]
        if t["topic"] == "requests"
    ] == [None]
    assert shop("topics", "pause", "reqests").code == 1


def test_topics_peek_consumes_no_message_and_stats_are_exact(empty: Shop) -> None:
    empty("push", "http://x.example/1", "http://x.example/2")
    for _ in range(2):
        seen = empty("topics", "peek", "requests", "--json").json["messages"]
        assert [m["url"] for m in seen[-2:]] == ["http://x.example/1", "http://x.example/2"]
    stats = {s["topic"]: s for s in empty("topics", "stats", "--json").json["topics"]}
    assert stats["requests"]["ready"] + stats["requests"]["delayed"] >= 2
    assert stats["requests"]["exact"]
    assert "http://x.example/1" in empty("topics", "peek").out
    assert empty("topics", "peek", "reqests").code == 1
    assert empty("topics", "ensure", "--json").json["drift"] == []


def test_purged_events_are_dead_and_can_be_redriven(empty: Shop) -> None:
    empty("push", "http://x.example/1", "http://x.example/2")
    refused = empty("topics", "purge", "requests")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert empty("topics", "purge", "requests", "--yes", "--json").json == {
        "topic": "requests",
        "purged": 2,
    }
    total = empty("status", "--json").json["total"]
    assert (total["dead"], total["pending"]) == (2, 0)
    assert empty("topics", "peek", "--json").json["messages"] == []
    assert empty("dlq", "retry", "--all").code == 0
    assert len(empty("topics", "peek", "--json").json["messages"]) == 2
    assert empty("doctor").code == 0


def test_rewind_redelivers_published_messages_to_a_group(empty: Shop) -> None:
    empty("push", "http://x.example/1", "http://x.example/2")
    assert (
        empty("topics", "rewind", "requests", "--group", "audit", "--since", "1h", "--json").json[
            "messages"
        ]
        == 2
    )
    wrong = empty("topics", "rewind", "requests", "--group", "audit", "--since", "soon")
    assert wrong.code == 2
    assert "is not a time" in wrong.err


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_finds_no_problem_after_a_finished_run(ran: Shop) -> None:
    done = ran("doctor", "shop.py", "--json")
    assert (done.code, done.json["ok"]) == (0, True), done.out
    assert {c["check"] for c in done.json["checks"]} >= {
        "sqlite",
        "file system",
        "disk",
        "integrity",
        "accounting",
        "queue",
        "leases",
        "sink",
        "pages",
        "pipeline",
        "extraction",
        "locale",
        "clock",
    }
    assert all(c["result"] == "ok" for c in done.json["checks"]), done.out


@pytest.mark.parametrize(
    ("harm", "check"),
    [
        ("UPDATE counter SET n=n+1 WHERE name='success'", "accounting"),
        ("DELETE FROM event WHERE status='dead'", "accounting"),
        ("UPDATE event SET status='pending', finished_at=NULL WHERE n=1", "queue"),
        ("UPDATE grp SET ready=5", "queue"),
        ("UPDATE sink SET next=next+1", "outbox"),
        ("UPDATE event SET accepted_at=accepted_at+1e6", "clock"),
    ],
)
def test_doctor_finds_inconsistent_data_and_exits_5(
    ran: Shop, tmp_path: Path, harm: str, check: str
) -> None:
    shop = ran.copy(tmp_path)
    shop.sql(harm)
    done = shop("doctor", "--json")
    assert done.code == 5, done.out
    failed = {c["check"]: c for c in done.json["checks"] if c["result"] == "fail"}
    assert check in failed
    assert failed[check]["fix"]


def test_doctor_finds_a_truncated_sink_file_and_a_missing_segment(
    ran: Shop, tmp_path: Path
) -> None:
    shop = ran.copy(tmp_path)
    lines = (shop.directory / "products.jsonl").read_bytes()
    (shop.directory / "products.jsonl").write_bytes(lines[:-10])
    for segment in (shop.directory / ".penstock" / "pages").glob("*.seg"):
        segment.unlink()
    done = shop("doctor", "--json")
    assert done.code == 5
    assert {c["check"] for c in done.json["checks"] if c["result"] == "fail"} == {"sink", "pages"}


def test_doctor_finds_a_pipeline_that_does_not_load(ran: Shop, tmp_path: Path) -> None:
    shop = ran.copy(tmp_path)
    (shop.directory / "shop.py").write_text("import nowhere\n")
    done = shop("doctor", "shop.py", "--json")
    assert done.code == 5
    assert [c["check"] for c in done.json["checks"] if c["result"] == "fail"] == ["pipeline"]


# -- init, version, completion ---------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--toml"]], ids=["python", "toml"])
def test_init_writes_a_valid_project_and_overwrites_no_file(empty: Shop, flags: list[str]) -> None:
    assert empty("init", "my-shop", *flags).code == 0
    file = empty.directory / ("my-shop.toml" if flags else "my-shop.py")
    checked = empty("config", "check", "--json")
    assert checked.code == 0, checked.err
    assert (
        checked.json["pipeline"]["extractors"]
        == [e for e in checked.json["pipeline"]["extractors"] if e.endswith("@1")]
        != []
    )
    file.write_text("precious")
    again = empty("init", "my-shop", *flags)
    assert again.code == 2
    assert file.read_text() == "precious"
    (empty.directory / "penstock.toml").write_text("# mine\n")
    assert empty("init", "another", *flags).code == 0
    assert (empty.directory / "penstock.toml").read_text() == "# mine\n"


def test_every_commented_option_of_init_is_valid_when_uncommented(empty: Shop) -> None:
    assert empty("init").code == 0
    file = empty.directory / "penstock.toml"
    lines = [
        line[2:] if line.startswith("# ") and " = " in line and "-o " not in line else line
        for line in file.read_text().splitlines()
    ]
    file.write_text("\n".join(lines))
    done = empty("config", "show", "--json", "--changed")
    assert done.code == 0, done.err
    assert len(done.json["options"]) >= 40
    assert empty("config", "check").code == 0


def test_version_is_printed_and_completion_scripts_are_written(empty: Shop) -> None:
    from penstock import __version__

    assert empty("--version").out == f"penstock {__version__}\n"
    found = empty("version", "--json").json
    assert found["penstock"] == __version__
    assert found["sqlite"].startswith("3.")
    for shell in ("bash", "zsh", "fish"):
        script = empty("completion", "show", shell)
        assert script.code == 0, script.err
        assert "until-idle" in script.out
    assert (
        empty("completion", "install", "bash", "-o", str(empty.directory / "penstock.bash")).code
        == 0
    )
    assert "penstock" in (empty.directory / "penstock.bash").read_text()
    assert empty("completion", "show", SHELL="/bin/tcsh").code == 2


# -- pipes -----------------------------------------------------------------------------------------


def test_a_closed_output_pipe_exits_141_without_an_error_message(ran: Shop) -> None:
    for args in (["events", "ls"], ["status", "--json"], ["pages", "show", ran.url(3)]):
        read, write = os.pipe()
        os.close(read)
        try:
            done = ran.process(*args, stdout=write)
        finally:
            os.close(write)
        assert (done.returncode, done.stderr) == (141, b"")


def test_output_on_a_terminal_is_coloured_unless_no_color_is_set(ran: Shop) -> None:
    import pty

    def shown(args: list[str], **env: str) -> bytes:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "penstock.cli.main", *args]
        with subprocess.Popen(
            command,
            cwd=ran.directory,
            env=ran.environment(TERM="xterm-256color", **env),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        ):
            os.close(theirs)
            output = b""
            try:
                while part := os.read(ours, 65536):
                    output += part
            except OSError:  # the other end of the terminal is closed
                pass
        os.close(ours)
        return output

    assert b"\x1b[" in shown(["status"])
    for args in (["status"], ["push", "--help"], ["--help"], ["statsu"], ["dlq", "ls"]):
        assert b"\x1b" not in shown(args, NO_COLOR="1"), args


def test_logs_are_written_to_stderr_and_only_the_json_to_stdout(ran: Shop, tmp_path: Path) -> None:
    shop = ran.copy(tmp_path)
    assert (
        shop("status", "--json", "--log-level", "debug", PENSTOCK_DEBUG="1").json["total"][
            "accepted"
        ]
        == 24
    )
    shop("push", shop.url(7), "--force")
    run = shop("run", "shop.py", "--until-idle")
    assert run.out == ""
    assert "seven is [bold]bad[/bold] \\x1b[31m" in run.err
    assert "\x1b" not in run.err
