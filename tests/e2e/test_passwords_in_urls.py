"""No command shows a password of a URL, whatever is wrong with the URL, also with `--debug`."""

from __future__ import annotations

import json
import subprocess
import sys
from urllib.parse import quote

import pytest
from tests.e2e.harness import Project

PASSWORD = "hunter2-Zq81"
Command = tuple[dict[str, str], list[str]]  # environment and arguments
# Runs commands in one process, which saves the imports. A line of JSON on stdin has the environment
# and the arguments of each. No command knows the passwords that an earlier one has learned.
RUNNER = """
import json, os, sys
from penstock.cli import hidden
from penstock.cli.main import main

before = dict(os.environ)
for line in sys.stdin:
    given = json.loads(line)
    hidden._passwords.clear()
    os.environ.clear()
    os.environ.update(before | given["environment"])
    print("COMMAND", given["arguments"], flush=True)
    print("CODE", main(given["arguments"]), flush=True)
"""
WRONG = [
    "{s}://me:{p}@127.0.0.1:1/a",  # nothing is wrong, but no server answers
    "{s}://me:{p}@127.0.0.1:port/a",
    "{s}://me:{p}@127.0.0.1:99999/a",
    "{s}://me:{p}",
    "{s}://:{p}",
    "{s}://me:{p}/a",
    "{s}://me:a/{p}@127.0.0.1:1/a",
    "{s}://me:a#{p}@127.0.0.1:1/a",
    "{s}://me:a?{p}@127.0.0.1:1/a",
    "{s}://me:a@{p}@127.0.0.1:1/a",
    "{s}://me:%zz{p}@127.0.0.1:1/a",
    "{s}://me:{p}@[::1/a",
    "{s}://me:{p}@",
    "{s}:/me:{p}@127.0.0.1:1/a",
    "{s}:me:{p}@127.0.0.1:1/a",
    "{s}//me:{p}@127.0.0.1:1/a",
    "me:{p}@127.0.0.1:1/a",
    "{s}x://me:{p}@127.0.0.1:1/a",
    "{s}://me:{p}@127.0.0.1:1/a?nothing=1",
    "{s}://127.0.0.1:1/a?password={p}&secret={p};x&token={p}#b",
    "{s}://me:{p}@127.0.0.1:1/a\n",
]
S3 = [
    "s3://bucket/p?endpoint=http://me:{p}@127.0.0.1:1&key=a&secret={p}",
    "s3://bucket/p?endpoint=me:{p}@127.0.0.1:1&key=a&secret=b",
    "s3://bucket/p?endpoint=http%3A%2F%2Fme%3A{p}%40127.0.0.1:1&key=a&secret=b",
    "s3://bucket/p?endpoint=ftp%3A%2F%2Fme%3A{p}%40127.0.0.1&key=a&secret=b",
    "s3://bucket/p?endpoint=http://127.0.0.1:1&key={p}",
    "s3://bucket/p?endpoint=http://127.0.0.1:1&secret={p}",
    "s3://me:{p}@bucket/p",
    "s3://bucket/p?region=x&nothing=1&password={p}",
]
SINK = """
from penstock import Pipeline

shop = Pipeline("shop")
shop.{kind}({url!r})
"""


def forms(scheme: str) -> list[str]:
    urls = S3 if scheme == "s3" else WRONG
    return [url.format(s=scheme, p=PASSWORD) for url in urls]


def output_of(project: Project, commands: list[Command]) -> str:
    lines = [json.dumps({"environment": env, "arguments": args}) + "\n" for env, args in commands]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        cwd=project.dir,
        env=project.env,
        input="".join(lines),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=280,
        encoding="utf-8",
        errors="replace",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("CODE ") == len(commands)
    return done.stdout


def check(output: str, urls: list[str]) -> None:
    for form in (PASSWORD, quote(PASSWORD, safe=""), PASSWORD.encode().hex()):
        lines = [
            line for line in output.split("\n") if form in line and not line.startswith("COMMAND")
        ]
        assert lines == [], urls


@pytest.mark.parametrize("scheme", ["postgres", "redis", "rediss", "amqp", "amqps", "kafka", "sqs"])
def test_no_command_shows_the_password_of_a_broker(project: Project, scheme: str) -> None:
    more = {"PENSTOCK_KAFKA_OPTIONS": "timeout=1s"} if scheme == "kafka" else {}
    commands = [
        (more | {"PENSTOCK_BROKER_URL": url}, [*command, "--debug"])
        for url in forms(scheme)
        for command in (["config", "show"], ["topics", "ls", "--json"])
    ]
    check(output_of(project, commands), forms(scheme))


@pytest.mark.parametrize(
    ("option", "scheme"),
    [("ledger", "postgres"), ("claims", "redis"), ("pages", "s3"), ("pages", "postgres")],
)
def test_no_command_shows_the_password_of_a_store(
    project: Project, option: str, scheme: str
) -> None:
    commands = [
        ({f"PENSTOCK_{option.upper()}_URL": url}, [*command, "--debug"])
        for url in forms(scheme)
        for command in (["config", "show", "--json"], ["push", "https://a.example/"])
    ]
    check(output_of(project, commands), forms(scheme))


@pytest.mark.parametrize("option", ["PROXIES_HOME_URLS", "PROXIES_HOME_LIST_URL", "CONNECT_URL"])
def test_no_command_shows_the_password_of_a_proxy_or_a_connect_worker(
    project: Project, option: str
) -> None:
    urls = [*forms("http"), *forms("socks5"), f"127.0.0.1:1:me:{PASSWORD}", f"h:x:me:{PASSWORD}"]
    commands = [
        ({f"PENSTOCK_{option}": url}, [*command, "--debug"])
        for url in urls
        for command in (["config", "show"], ["proxies", "ls", "--json"])
    ]
    check(output_of(project, commands), urls)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *(("sink", scheme) for scheme in ("postgres", "kafka", "sqlite", "csv", "nothing")),
        *(("source", scheme) for scheme in ("postgres", "kafka", "redis", "s3", "nothing")),
        *(("source", scheme) for scheme in ("feed+https", "api+https", "sitemap+https")),
    ],
)
def test_no_command_shows_the_password_of_a_pipeline(
    project: Project, kind: str, scheme: str
) -> None:
    commands: list[Command] = []
    for n, url in enumerate(forms(scheme)):
        file = project.write(f"shop{n}.py", SINK.format(kind=kind, url=url))
        commands.append(({}, ["config", "check", file.name, "--debug"]))
        if kind == "source":
            commands.append(({}, ["sources", "ls", "--pipeline", file.name, "--json", "--debug"]))
    check(output_of(project, commands), forms(scheme))


@pytest.mark.parametrize(
    "command", [("run",), ("fetch",), ("push",), ("trace",), ("dlq", "show"), ("sources", "show")]
)
def test_no_command_shows_the_password_of_its_argument(
    project: Project, command: tuple[str, ...]
) -> None:
    urls = [f"http://me:{PASSWORD}@127.0.0.1:1/p", f"redis://me:{PASSWORD}@127.0.0.1:port/0"]
    check(output_of(project, [({}, [*command, url, "--debug"]) for url in urls]), urls)


def test_doctor_and_a_run_do_not_show_the_password_of_a_sink_that_is_down(project: Project) -> None:
    urls = [
        f"postgres://me:{PASSWORD}@127.0.0.1:1/a",
        f"kafka://me:{PASSWORD}@127.0.0.1:1/a?timeout=1s",
    ]
    commands: list[Command] = []
    for n, url in enumerate(urls):
        file = project.write(f"shop{n}.py", SINK.format(kind="sink", url=url))
        commands += [
            ({}, ["doctor", file.name, "--json", "--debug"]),
            ({}, ["doctor", file.name, "--debug"]),
        ]
    check(output_of(project, commands), urls)


def test_a_password_in_a_configuration_file_with_a_mistake_is_not_shown(project: Project) -> None:
    project.write(
        "penstock.toml",
        f"""
        [broker]
        url = "amqp://me:{PASSWORD}@127.0.0.1:port/"
        [proxies.home]
        urls = ["http://me:{PASSWORD}@127.0.0.1"]
        """,
    )
    check(output_of(project, [({}, ["status", "--debug"]), ({}, ["config", "show"])]), [])
    project.write("penstock.toml", f'[broker]\nurl = "amqp://me:{PASSWORD}@h/" oops')
    check(output_of(project, [({}, ["status", "--debug"])]), [])
