"""Two events for one URL at the same instant: one request, one row, and a duplicate that names the
other.
"""

from __future__ import annotations

import subprocess

import pytest
from tests.e2e.harness import PENSTOCK, Project, Site, product, wait_for

URLS = 10


@pytest.mark.parametrize(
    "already_running", [False, True], ids=["pushed before the run", "pushed while it runs"]
)
def test_two_sources_that_fire_together_cause_one_fetch_and_one_row(
    project: Project, site: Site, already_running: bool
) -> None:
    project.set(dedup_settle="30s")  # "the same instant", even on a slow machine
    urls = [site.serve(f"/p/{n}", product(n)) for n in range(URLS)]
    running = project.start("run", "shop.py") if already_running else None
    if running:
        wait_for(lambda: project.tree()[1] or running.ended, "a worker")
    sources = [
        subprocess.Popen(
            [*PENSTOCK, "push", "--trace", f"source-{name}", *urls],
            cwd=project.dir,
            env=project.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for name in ("a", "b")
    ]
    for source in sources:
        printed, _ = source.communicate(timeout=60)
        assert source.returncode == 0, printed
    if running:
        wait_for(
            lambda: project.total()["success"] == URLS and project.total()["duplicate"] == URLS,
            "ten ends and ten duplicates",
            every=0.1,
        )
        wait_for(lambda: project.written() == URLS, "all rows")
        running.signal(15)
        assert running.wait() == 0, running.output
    else:
        project.run()

    total = project.total()
    assert (total["accepted"], total["success"], total["duplicate"]) == (2 * URLS, URLS, URLS)
    assert {path: len(site.asked(path)) for path in (f"/p/{n}" for n in range(URLS))} == {
        f"/p/{n}": 1 for n in range(URLS)
    }
    rows = project.rows()
    assert sorted(row["sku"] for row in rows) == sorted(f"S-{n}" for n in range(URLS))
    written = {row["_penstock"]["url"]: row["_penstock"]["event_id"] for row in rows}
    events = {e["event_id"]: e for e in project.events()}
    for e in events.values():
        if e["status"] == "duplicate":
            assert e["duplicate_of"] == written[e["url"]]
            assert {e["trace_id"], events[e["duplicate_of"]]["trace_id"]} == {
                "source-a",
                "source-b",
            }

    loser = next(e for e in events.values() if e["status"] == "duplicate")
    winner = events[loser["duplicate_of"]]
    seen_from_loser, seen_from_winner = (
        project.event(loser["event_id"]),
        project.event(winner["event_id"]),
    )
    assert (seen_from_loser["duplicate_of"], seen_from_loser["duplicate_of_trace"]) == (
        winner["event_id"],
        winner["trace_id"],
    )
    assert {"event_id": loser["event_id"], "trace_id": loser["trace_id"]} in seen_from_winner[
        "duplicates"
    ]
    assert winner["event_id"][:8] in project.good("trace", loser["event_id"])
    project.doctor()


def test_an_event_inside_the_window_is_delayed_to_its_end_and_force_is_not(
    project: Project, site: Site
) -> None:
    project.set(dedup_settle="0s", dedup_window="3s")
    url = site.serve("/p/1", product(1))
    project.push(url)
    project.run()
    site.serve("/p/1", product(1, "11.00"))
    project.push(url, url)
    project.run()
    first, second = site.asked("/p/1")
    assert second.at - first.at >= 3_000_000 - 50_000 - site.late * 1e6, (
        "requested again inside the window"
    )
    assert [row["price"] for row in project.rows()] == ["10.00", "11.00"]
    assert project.total() == {
        "accepted": 3,
        "pending": 0,
        "in_flight": 0,
        "delayed": 0,
        "success": 2,
        "duplicate": 1,
        "dead": 0,
    }
    project.push(url, options=("--force",))
    project.run()
    assert len(site.asked("/p/1")) == 3
    assert [row["price"] for row in project.rows()] == ["10.00", "11.00", "11.00"], (
        "--force writes an unchanged record"
    )


def test_in_drop_mode_a_later_event_inside_the_window_is_a_duplicate(
    project: Project, site: Site
) -> None:
    project.set(dedup_settle="0s", dedup_window="1h", dedup_mode="drop")
    url = site.serve("/p/1", product(1))
    project.push(url)
    project.run()
    project.push(url)
    project.run()
    assert len(site.asked("/p/1")) == 1
    second, first = project.events("--url", url)
    assert (second["status"], second["duplicate_of"]) == ("duplicate", first["event_id"])
    assert len(project.rows()) == 1


def test_a_tracking_parameter_is_ignored_and_one_removed_from_the_list_is_not(
    project: Project, site: Site
) -> None:
    site.serve("/p/1", product(1))
    project.set(dedup_tracking="ref,-gclid", dedup_window="1h", dedup_mode="drop")
    project.push(
        *(
            site.url(f"/p/1?{query}")
            for query in ("ref=a", "ref=b", "gclid=1", "gclid=2", "utm_source=x")
        )
    )
    project.run()
    assert (project.total()["success"], project.total()["duplicate"]) == (3, 2)
    assert len(project.events("--url", site.url("/p/1?ref=anything"))) == 3, (
        "a search by URL finds all of them"
    )
