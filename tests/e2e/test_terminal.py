"""Text from a site cannot control the operator's terminal, and a pipe gets the bytes unchanged."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess

import pytest
from tests.e2e.harness import Project, Site

from penstock.testing.web import Reply

# Colours, a window title, C1 forms of both, DEL, and an override of the direction.
EVIL = "\x1b[31m\x1b]0;owned\x07\x9b31m\x9d0;owned\x9c\x7f\u202egnp.exe\u2066\x08\r"
BODY = f"<h1 data-sku='S'>{EVIL}</h1>\tx\n".encode()
# Everything that a terminal may act on, except a line feed and a tab.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
PIPELINE = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/p/*")
def product(page: Page):
    yield {"title": page.css("h1::text").get()}

@shop.extract(match="*/broken")
def broken(page: Page):
    raise ValueError(page.css("h1::text").get())

shop.sink("jsonl:products.jsonl")
"""


def on_terminal(project: Project, *args: str) -> str:
    """Return what a command writes to a terminal, on stdout and stderr."""
    ours, theirs = pty.openpty()
    # NO_COLOR is set, so Penstock itself writes no sequence. A terminal turns \\n into \\r\\n.
    process = subprocess.Popen(
        [*project.command, *args],
        cwd=project.dir,
        env=project.env | {"TERM": "dumb"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    found = b""
    try:
        while chunk := os.read(ours, 65536):
            found += chunk
    except OSError:  # the terminal is closed
        pass
    os.close(ours)
    assert process.wait(60) in (0, 1)
    return found.decode("utf-8", "replace").replace("\r\n", "\n")


@pytest.fixture
def urls(project: Project, site: Site) -> list[str]:
    """Fetch a page and break another. Both come with controls in body, headers and errors."""
    project.write("shop.py", PIPELINE)
    headers = {"content-type": "text/html; charset=utf-8", "x-evil": "\x9b31m\x7f\x85x"}
    found = [site.serve("/p/1", Reply(200, headers, BODY))]
    found.append(site.serve("/broken", Reply(200, headers, BODY)))
    project.push(*found)
    project.run(expect=1)
    return found


def test_a_page_on_a_terminal_has_no_control_characters(project: Project, urls: list[str]) -> None:
    shown = on_terminal(project, "pages", "show", urls[0])
    assert not CONTROL.search(shown)
    assert "\\x1b[31m" in shown
    assert "\\u202egnp.exe" in shown
    assert "</h1>\tx\n" in shown
    raw = on_terminal(project, "pages", "show", urls[0], "--raw")
    assert EVIL.rstrip("\r") in raw
    piped = subprocess.run(
        [*project.command, "pages", "show", urls[0]],
        cwd=project.dir,
        env=project.env,
        capture_output=True,
        check=True,
    )
    assert piped.stdout == BODY


@pytest.mark.parametrize(
    "command",
    [
        ("pages", "show", "PAGE", "--headers"),
        ("pages", "ls"),
        ("trace", "PAGE"),
        ("trace", "BROKEN"),
        ("events", "ls"),
        ("dlq", "ls"),
        ("dlq", "ls", "--all"),
        ("dlq", "show", "BROKEN"),
        ("dlq", "export"),
        ("fetch", "PAGE"),
        ("status",),
        ("push", "http://127.0.0.1:1/\u202e\x9b31m", "\x1b[31m"),
        ("pages", "show", "\x1b[31m\x9b"),
    ],
    ids=" ".join,
)
def test_outside_text_on_a_terminal_has_no_control_characters(
    project: Project, urls: list[str], command: tuple[str, ...]
) -> None:
    words = {"PAGE": urls[0], "BROKEN": urls[1]}
    shown = on_terminal(project, *(words.get(word, word) for word in command))
    assert shown
    assert not CONTROL.search(shown), shown


def test_json_escapes_controls(project: Project, urls: list[str]) -> None:
    for command in (
        ("pages", "show", urls[0], "--json"),
        ("dlq", "show", urls[1], "--json"),
        ("dlq", "ls", "--all", "--json"),
        ("dlq", "export"),
        ("trace", urls[1], "--json"),
        ("fetch", urls[0], "--json"),
        ("events", "ls", "--json"),
    ):
        done = project.penstock(*command)
        assert not CONTROL.search(done.out), command
        found = json.loads(done.out)
        if command[0] == "pages":
            assert found["headers"]["x-evil"] == "\x9b31m\x7f\x85x"
