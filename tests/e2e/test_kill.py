"""SIGKILL at random moments: every URL ends once, with one row.

The target gets only as many extra requests as the crashes explain.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import Project, Target, read_rows, wait_for

from penstock.testing.web import ends_dead, read_log

PAGES, KILLS, DEAD_SHARE = 5000, 20, 0.02
CONCURRENCY, HELD = 32, 64  # per worker. Held: received, or fetched and not yet written.


def check(
    status: dict[str, Any], log: Path, sink: Path, *, pages: int, crashes: int, at_once: int
) -> None:
    """Check the result independently of the code under test.

    Reads the output of `status --json`, the target's access log and the sink's file.
    """
    dead = {f"/p/{n}" for n in range(pages) if ends_dead(n, DEAD_SHARE)}
    alive = {f"/p/{n}" for n in range(pages)} - dead
    total = status["total"]
    assert (total["accepted"], total["success"], total["dead"]) == (pages, len(alive), len(dead)), (
        total
    )
    assert all(total[name] == 0 for name in ("pending", "in_flight", "delayed", "duplicate")), total
    rows = read_rows(sink)
    written = Counter("/p/" + row["_penstock"]["url"].rpartition("/p/")[2] for row in rows)
    assert set(written) == alive, (
        sorted(alive - set(written))[:5],
        sorted(set(written) - alive)[:5],
    )
    assert max(written.values()) == 1, written.most_common(3)
    assert len({row["_penstock"]["event_id"] for row in rows}) == len(rows)
    for row in rows:
        assert row["sku"] == "T-" + row["_penstock"]["url"].rpartition("/p/")[2], row
    asked = Counter(entry.path for entry in read_log(log) if entry.path.startswith("/p/"))
    assert set(asked) == alive | dead
    assert max(asked.values()) <= 1 + crashes, asked.most_common(3)
    assert sum(asked.values()) <= pages + crashes * at_once, sum(asked.values())


def check_starts(project: Project, target: Target) -> None:
    """Check I6: no URL was requested more often than its event was started."""
    asked = target.asked()
    events = project.events()
    assert len(events) == target.pages
    for event in events:
        path = "/p/" + event["url"].rpartition("/p/")[2]
        assert 1 <= asked[path] <= event["starts"], event
        assert event["retry_count"] == (event["status"] == "dead"), event


def run_and_kill(
    project: Project,
    target: Target,
    rng: random.Random,
    args: tuple[str, ...],
    later: int,
    strike: Callable[[Any], None],
) -> None:
    """Start a run, and end it with `strike` after a random part of the work or during its start.

    Leave enough work for the `later` runs.
    """
    left = target.pages - len(target.asked())
    begun, running = (
        target.lines(),
        project.start("run", "shop.py", "--until-idle", "--log-level", "warning", *args),
    )
    if rng.random() < 0.25:
        until = time.monotonic() + rng.uniform(0.0, 0.8)
        wait_for(
            lambda: time.monotonic() >= until or target.lines() > begun,
            "a random moment of the start",
            every=0.002,
        )
    else:
        # At most half of the remaining work: a late check must still find the run at work.
        share = rng.randrange(1, max(2, left // (later + 2)))
        wait_for(
            lambda: running.ended or target.lines() - begun >= share,
            f"{share} requests: {running.output}",
            every=0.002,
        )
        time.sleep(rng.uniform(0.0, 0.02))
    strike(running)


def finish(
    project: Project, target: Target, args: tuple[str, ...], *, crashes: int, at_once: int
) -> None:
    started = time.monotonic()
    done = project.penstock("run", "shop.py", "--until-idle", *args)
    print(
        f"the last run took {time.monotonic() - started:.1f} s, {sum(target.asked().values())} "
        f"requests for {target.pages} pages"
    )
    assert done.code in (0, 1), done.output  # 1: events ended dead in this run
    check(
        project.status(),
        target.log,
        project.dir / "products.jsonl",
        pages=target.pages,
        crashes=crashes,
        at_once=at_once,
    )
    check_starts(project, target)
    project.doctor()
    project.nothing_runs()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_killed_twenty_times_at_random_writes_every_row_once(
    project: Project, target: Callable[..., Target], seed: int, workers: int
) -> None:
    rng = random.Random(seed)
    project.set(fetch_concurrency=str(CONCURRENCY), fetch_prefetch=str(HELD))
    web = target(pages=PAGES, dead_share=DEAD_SHARE, delay=0.02)
    project.push(*web.urls)
    args = ("--workers", str(workers))

    def strike(running: Any) -> None:
        assert not running.ended, running.output
        running.kill()
        if rng.random() < 0.5:
            # Otherwise the next run starts while processes of this run are still alive.
            project.nothing_runs()

    for later in reversed(range(KILLS)):
        run_and_kill(project, web, rng, args, later, strike)
    assert project.total()["success"] < PAGES * (1 - DEAD_SHARE), (
        "all was done before the last kill"
    )
    finish(project, web, args, crashes=KILLS, at_once=HELD * workers)


@pytest.mark.slow
def test_a_killed_worker_or_zygote_is_replaced_while_the_run_continues(
    project: Project, target: Callable[..., Target], seed: int
) -> None:
    rng = random.Random(seed)
    project.set(fetch_concurrency=str(CONCURRENCY), fetch_prefetch=str(HELD))
    web = target(pages=3000, dead_share=DEAD_SHARE, delay=0.2)
    project.push(*web.urls)
    running = project.start("run", "shop.py", "--until-idle", "--workers", "2")
    crashes = 0
    kinds = ("worker", "zygote", "worker", "zygote", "zygote", "worker")
    for n, kind in enumerate(kinds):
        begun = web.lines()
        # Late kills must leave work for the last kill.
        limit = max(4, (3000 - begun) // (len(kinds) - n + 2))
        some = rng.randrange(limit // 4, limit // 2)

        def victims(kind: str = kind, begun: int = begun, limit: int = limit) -> list[int]:
            """Return the pids if both zygotes run, or if waiting would leave too little work."""
            workers, zygotes = project.tree()
            return (
                (workers if kind == "worker" else zygotes)
                if len(zygotes) == 2 or web.lines() - begun >= limit
                else []
            )

        wait_for(
            lambda begun=begun, some=some: web.lines() - begun >= some or running.ended,
            f"some requests: {running.output}",
        )
        found = wait_for(
            lambda: running.ended or victims(), "workers with their zygotes", every=0.05
        )
        assert not running.ended, running.output
        os.kill(rng.choice(found), signal.SIGKILL)
        crashes += kind == "worker"
    assert running.wait() in (0, 1), running.output
    check(
        project.status(),
        web.log,
        project.dir / "products.jsonl",
        pages=3000,
        crashes=crashes,
        at_once=HELD,
    )
    check_starts(project, web)
    project.doctor()
    project.nothing_runs()
    assert "Traceback" not in running.output


def test_the_checker_detects_lost_repeated_and_torn_rows_and_extra_requests(tmp_path: Path) -> None:
    """A check that cannot fail proves nothing."""
    pages = 100
    log, sink = tmp_path / "log", tmp_path / "sink"
    entry = {
        "at": 0,
        "port": 1,
        "method": "GET",
        "query": "",
        "host": "",
        "agent": "",
        "status": 200,
        "answered": 0,
    }
    paths = [f"/p/{n}" for n in range(pages)]
    good = [n for n in range(pages) if not ends_dead(n, DEAD_SHARE)]
    lines = [
        json.dumps({"sku": f"T-{n}", "_penstock": {"url": f"http://t/p/{n}", "event_id": str(n)}})
        + "\n"
        for n in good
    ]
    total = {
        "accepted": pages,
        "success": len(good),
        "dead": pages - len(good),
        "pending": 0,
        "in_flight": 0,
        "delayed": 0,
        "duplicate": 0,
    }

    def passes(rows: list[str], asked: list[str], **wrong: int) -> bool:
        sink.write_text("".join(rows))
        log.write_text("".join(json.dumps({**entry, "path": path}) + "\n" for path in asked))
        try:
            check({"total": {**total, **wrong}}, log, sink, pages=pages, crashes=1, at_once=5)
        except AssertionError:
            return False
        return True

    assert passes(lines, paths)
    assert passes(lines, [*paths, *paths[:5]])
    assert not passes(lines[:-1], paths), "a lost row"
    assert not passes([*lines, lines[0]], paths), "a row twice"
    assert not passes([*lines, lines[0].replace("/p/0", "/p/49")], paths), "a row for a dead page"
    assert not passes([*lines[:-1], lines[-1][:-9]], paths), "a torn row"
    assert not passes(lines, paths, success=len(good) - 1, pending=1), "an event that has not ended"
    assert not passes(lines, [*paths, paths[3], paths[3]]), "one page asked for too often"
    assert not passes(lines, [*paths, *paths[:6]]), "too many requests in all"
