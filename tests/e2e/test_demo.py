"""`penstock demo` as a new user runs it.

One page of its shop responds with 429 once, and one page is broken on purpose.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.e2e.harness import PENSTOCK, Project, Site, wait_for

from penstock.testing.web import read_log

pytestmark = pytest.mark.slow
BROKEN, LIMITED = "/product/mystery-box", "/product/founders-kettle"


def demo_of(project: Project) -> Project:
    """Return the directory that the demo created, as a project of the same user."""
    there = Project(project.dir / "penstock-demo")
    there.env = project.env
    return there


def lines_starting_with(text: str, beginning: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip().startswith(beginning)]


def test_a_first_demo_run_exits_with_records_a_retried_page_and_one_dead_letter(
    project: Project, site: Site
) -> None:
    began = time.time()
    project.good("version")
    # Seconds: 10 on a machine that starts a program within half a second, and more on a slower one.
    slow = 10 + 20 * max(0.0, time.time() - began - 0.5)
    began = time.time()
    done = project.penstock("demo", "--seconds", "12")
    assert done.code == 0, done.output
    assert not done.err, done.output
    out = demo_of(project)

    rows = out.rows("records.jsonl")
    assert len({row["sku"] for row in rows}) >= 45, done.output
    assert out.total()["dead"] == 1
    first = (out.dir / "shop.log").read_text().splitlines()[0]
    stood_still = sum(late for late in site.lateness if late > 0.1)
    assert json.loads(first)["at"] / 1e6 - began < slow + stood_still
    assert float(re.search(r"first row came after ([\d.]+) s", done.out)[1]) < slow + stood_still  # type: ignore[index]
    db = sqlite3.connect(out.dir / "products.db")
    assert db.execute("SELECT count(*) FROM products").fetchone()[0] == len(
        {row["sku"] for row in rows}
    )
    db.close()

    asked = [e for e in read_log(out.dir / "shop.log") if e.path == LIMITED]
    assert [e.status for e in asked[:2]] == [429, 200]
    waited = (asked[1].at - asked[0].at) / 1e6
    assert waited >= 2.9
    assert f"requested again {waited:.1f} s later" in done.out

    (dead_letter,) = out.dead_letters().values()
    assert dead_letter["url"].endswith(BROKEN)
    assert dead_letter["reason"] == "empty key: field 'sku' is empty in a record of product"
    assert len([e for e in read_log(out.dir / "shop.log") if e.path == BROKEN]) == 1

    moved = [
        row for n, row in enumerate(rows) if any(row["sku"] == before["sku"] for before in rows[:n])
    ]
    reported = (out.dir / "changes.txt").read_text("utf-8").splitlines()
    assert moved, "no price moved in twelve seconds"
    # Hooks of the last changes, which the next run would call.
    waiting = out.status()["hooks_waiting"]
    assert [line.rpartition("€")[2] for line in reported] == [row["price"] for row in moved][
        : len(moved) - waiting
    ]
    found = json.loads(out.penstock("doctor", "--json").out)["findings"]
    # The shop has ended with the demo, so its sources do not answer. All else is well.
    assert {f["code"] for f in found} <= {"source.unreachable"}, found


def test_output_without_a_terminal_is_plain_lines_and_the_commands_it_names_work(
    project: Project,
) -> None:
    done = project.penstock("demo", "--seconds", "6", "--break")
    assert done.code == 0, done.output
    assert "\x1b" not in done.out
    lines = done.out.splitlines()
    assert len(lines) < 45, "one line every two seconds, and the summary"
    assert lines[0].startswith("penstock demo: the shop is at http://127.0.0.1:")
    assert len(lines_starting_with(done.out, "dead     http")) == 1
    assert len(lines_starting_with(done.out, "delayed ")) >= 1
    assert re.search(r"the shop was redesigned after \d+ s", done.out)
    empty = int(re.search(r"Since then (\d+) pages? gave no row", done.out)[1])  # type: ignore[index]
    out = demo_of(project)
    assert empty == out.status()["counters"]["empty"] >= 1
    for command in ("status", "trace last", "dlq ls"):
        (line,) = lines_starting_with(done.out, f"{sys.executable} -m penstock.cli.main {command}")
        assert (
            subprocess.run(
                line.strip().split("  ")[0],
                shell=True,
                cwd=out.dir,
                env=out.env,
                capture_output=True,
            ).returncode
            == 0
        )


def test_the_demo_runs_its_full_time_if_the_machine_is_suspended_at_its_start(
    project: Project,
) -> None:
    running = project.start("demo", "--seconds", "2", "--break")
    wait_for(
        lambda: running.ended or (project.dir / "penstock-demo" / "penstock.toml").exists(),
        f"its shop is there: {running.output}",
        every=0.001,
    )
    standing = list(project.processes())
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in standing:
            os.kill(pid, number)
        # Longer than the two seconds and the time that open events get after them.
        time.sleep(5.5 if number == signal.SIGSTOP else 0)
    assert running.wait() == 0, running.output
    assert re.search(r"Since then \d+ pages? gave no row", running.output), (
        "rows, then a redesign, and pages after it"
    )


def test_a_second_demo_run_starts_empty_and_a_foreign_directory_is_refused(
    project: Project,
) -> None:
    began = ""
    for _ in range(2):
        began = datetime.now(UTC).isoformat()
        done = project.penstock("demo", "--seconds", "2")
        assert done.code == 0, done.output
    out = demo_of(project)
    assert min(
        datetime.fromisoformat(e["accepted_at"]) for e in out.events()
    ) >= datetime.fromisoformat(began), "the first run's events are still there"
    assert len(out.rows("records.jsonl")) == out.status()["counters"]["records"]
    own = project.dir / "mine"
    own.mkdir()
    (own / "records.jsonl").write_text("mine\n")
    refused = project.penstock("demo", "--seconds", "2", "--out", "mine")
    assert refused.code == 2
    assert "not from a demo" in refused.err
    assert (own / "records.jsonl").read_text() == "mine\n"
    assert sorted(p.name for p in own.iterdir()) == ["records.jsonl"]


def test_ctrl_c_on_a_terminal_ends_the_demo_with_its_summary_and_no_process_left(
    project: Project,
) -> None:
    terminal, child_end = pty.openpty()
    env = {name: value for name, value in project.env.items() if name != "NO_COLOR"} | {
        "TERM": "xterm-256color",
        "COLUMNS": "80",
        "LINES": "24",
    }
    process = subprocess.Popen(
        [*PENSTOCK, "demo"],
        cwd=project.dir,
        env=env,
        stdin=child_end,
        stdout=child_end,
        stderr=child_end,
        start_new_session=True,
    )
    os.close(child_end)
    screen = b""

    def read() -> bytes:
        nonlocal screen
        while select.select([terminal], [], [], 0)[0]:
            try:
                screen += os.read(terminal, 65536)
            except OSError:
                break
        return screen

    try:
        wait_for(
            lambda: (
                b"links followed" in read()
                and _has_rows(project.dir / "penstock-demo" / "records.jsonl")
            ),
            "a picture and a row",
            120,
        )
        process.send_signal(signal.SIGINT)

        def ended() -> bool:
            read()  # the demo blocks while its terminal is full
            return process.poll() is not None

        wait_for(ended, "the end", 120)
        assert process.returncode == 0
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", read().decode())
        assert "Done after" in shown
        assert "dlq ls" in shown
        assert b"\x1b[?25h" in screen, "the cursor stays hidden"
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    project.nothing_runs()


def _has_rows(path: Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()
