"""Seed lists and Redis lists with a reader that is killed repeatedly: every line is one event."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from tests.e2e.harness import Project, wait_for
from tests.servers import Handle

LINES, KILLS = 20_000, 6
PIPELINE = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/p/*", version=1, key="url")
def product(page: Page):
    yield {"url": page.url}

shop.source("SOURCE", name="list")
shop.sink("jsonl:products.jsonl")
"""


def accepted(project: Project) -> int:
    """Count the accepted events while another process writes. Return 0 if there is no ledger."""
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(
            sqlite3.connect(f"file:{project.dir}/.penstock/penstock.db?mode=ro", uri=True)
        ) as db,
    ):
        return int(db.execute("SELECT count(*) FROM event").fetchone()[0])
    return 0


def read_and_kill(project: Project, rng: random.Random) -> int:
    """Kill readers during their start or after a part of the work. Let the last reader finish.

    Return the number of readers that were killed in the middle of the list.
    """
    middle = 0
    for round_ in range(1, KILLS + 1):
        before = accepted(project)
        limit = round_ * LINES // (KILLS + 1)
        # Even a late kill must leave work for the next reader.
        project.set(intake_max_pending=str(limit))
        running = project.start("run", "shop.py", "--role", "source", "--log-level", "warning")
        if rng.random() < 0.2:
            until = time.monotonic() + rng.uniform(0.0, 1.0)
            wait_for(
                lambda: time.monotonic() >= until or accepted(project) > before,  # noqa: B023
                "a random moment of the start",
                every=0.001,
            )
        else:
            part = min(limit, before + rng.randrange(1, LINES // (2 * KILLS)))
            wait_for(
                lambda: accepted(project) >= part or running.ended,  # noqa: B023
                f"{part} events: {running.output}",
                every=0.001,
            )
        assert not running.ended, running.output
        running.kill()
        middle += 0 < accepted(project) < LINES
    del project.env["PENSTOCK_INTAKE_MAX_PENDING"]
    last = project.start("run", "shop.py", "--role", "source", "--log-level", "warning")
    wait_for(lambda: accepted(project) >= LINES or last.ended, f"all of them: {last.output}")
    wait_for(lambda: source(project)["settled"], f"the end of the list: {last.output}", every=0.2)
    last.signal(15)
    assert last.wait() == 0, last.output
    return middle


def read_json(project: Project, *args: str) -> Any:
    return json.loads(project.good(*args, "--json"))


def source(project: Project) -> dict[str, object]:
    found: dict[str, object] = read_json(project, "sources", "ls", "--pipeline", "shop.py")[
        "sources"
    ][0]
    return found | {
        "settled": found["events"] == LINES and not found["error"] and not found["backlog"]
    }


def check(project: Project) -> None:
    total = project.total()
    assert (total["accepted"], total["pending"]) == (LINES, LINES), total
    seen = Counter(event["url"] for event in project.events())
    assert seen == Counter(f"https://shop.test/p/{n}" for n in range(LINES))
    project.doctor()
    project.nothing_runs()


@pytest.mark.slow
@pytest.mark.parametrize("url", ["seeds:urls.txt", "seeds:inbox/"])
def test_every_line_of_a_seed_list_is_one_event_although_the_reader_is_killed(
    project: Project, seed: int, url: str
) -> None:
    project.write("shop.py", PIPELINE.replace("SOURCE", url))
    lines = [f"https://shop.test/p/{n}\n" for n in range(LINES)]
    if url.endswith("/"):
        for part in range(10):
            project.write(f"inbox/{part}.txt", "".join(lines[part::10]))
    else:
        project.write("urls.txt", "".join(lines))
    assert read_and_kill(project, random.Random(seed)) > 0
    check(project)
    with next(iter(sorted((project.dir / "inbox").glob("*")) or [project.dir / "urls.txt"])).open(
        "a"
    ) as file:
        file.write("https://shop.test/late\n")
    running = project.start("run", "shop.py", "--role", "source", "--log-level", "warning")
    wait_for(
        lambda: accepted(project) == LINES + 1 or running.ended,
        f"the appended line: {running.output}",
    )
    running.kill()


@pytest.mark.slow
@pytest.mark.server("redis")
def test_every_item_of_a_redis_list_is_one_event_although_the_reader_is_killed(
    project: Project, seed: int, server: Callable[[str], Handle]
) -> None:
    key = f"t{uuid.uuid4().hex[:8]}:start_urls"
    project.write("shop.py", PIPELINE.replace("SOURCE", f"{server('redis').url}?list={key}"))
    with Redis.from_url(server("redis").url) as client:
        client.rpush(key, *[f"https://shop.test/p/{n}" for n in range(LINES)])
        try:
            assert read_and_kill(project, random.Random(seed)) > 0
            check(project)
            assert client.llen(key) == 0
            wait_for(lambda: client.hlen(f"{key}:penstock:list") == 0, "no item is reserved")
        finally:
            client.delete(key, f"{key}:penstock:list", f"{key}:penstock:list:count")


def test_an_invalid_line_of_a_seed_list_is_a_dead_letter_with_its_reason(project: Project) -> None:
    project.write("shop.py", PIPELINE.replace("SOURCE", "seeds:list.jsonl"))
    project.write(
        "list.jsonl", '{"url": "https://shop.test/p/1"}\nrubbish\n{"url": "ftp://shop.test/"}\n'
    )
    shown = project.good("sources", "test", "list", "--pipeline", "shop.py")
    assert "list.jsonl:2" in shown
    assert "no JSON" in shown
    running = project.start("run", "shop.py", "--role", "source", "--log-level", "warning")
    wait_for(
        lambda: (
            running.ended
            or read_json(project, "sources", "ls", "--pipeline", "shop.py")["sources"][0]["refused"]
            == 2
        ),
        "all of the list",
        every=0.1,
    )
    running.signal(15)
    running.wait()
    dead_letters = read_json(project, "dlq", "ls", "--all")["letters"]
    assert len(dead_letters) == 2, dead_letters
    assert any("the line is no JSON" in dead_letter["reason"] for dead_letter in dead_letters), (
        dead_letters
    )
    state = read_json(project, "sources", "ls", "--pipeline", "shop.py")["sources"][0]
    assert (state["events"], state["refused"]) == (1, 2)
