"""Failures of the target: retries and back-off, permanent failures, Retry-After, redrive."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

from tests.e2e.harness import Project, Site, product, wait_for

from penstock.testing.web import Reply, Request, reply


def answering(*answers: Reply) -> Callable[[Request], Reply]:
    """Return a handler that sends these replies in order and then repeats the last one."""
    left = list(answers)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


DOWN, GONE = reply("oops", status=500), reply("no such page", status=404)


def test_a_page_that_fails_twice_succeeds_with_two_charged_attempts(
    project: Project, site: Site
) -> None:
    url = site.serve("/p/1", answering(DOWN, DOWN, reply(product(1))))
    project.push(url)
    project.run()
    event = project.event(url)
    assert (event["status"], event["retry_count"], event["starts"]) == ("success", 2, 3)
    assert [(s["class"], s["reason"]) for s in event["history"] if s["class"]] == [
        ("transient", "HTTP 500")
    ] * 2
    assert len(site.asked("/p/1")) == 3
    assert len(project.rows()) == 1


def test_a_page_that_fails_four_times_is_dead_with_its_history_and_exit_code_1(
    project: Project, site: Site
) -> None:
    url = site.serve("/p/1", DOWN)
    other = site.serve("/p/2", product(2))
    project.push(url, other)
    project.run(expect=1)
    times = [entry.at / 1e6 for entry in site.asked("/p/1")]
    assert len(times) == 4, "three retries are four attempts"
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[0] >= 0.05, "back-off begins at half of retry.base at least"
    assert gaps[1] >= 0.1
    assert gaps[2] >= 0.2
    assert project.total()["dead"] == 1
    dead_letter = json.loads(project.good("dlq", "show", url, "--json"))
    assert (
        dead_letter["reason"],
        dead_letter["stage"],
        dead_letter["class"],
        dead_letter["response_status"],
    ) == (
        "HTTP 500",
        "fetch",
        "transient",
        500,
    )
    assert len([a for a in dead_letter["attempts"] if a["class"] == "transient"]) == 4
    assert dead_letter["event"]["url"] == url
    assert [row["sku"] for row in project.rows()] == ["S-2"]
    project.doctor()


def test_a_404_is_dead_without_a_retry_and_dlq_retry_fetches_the_repaired_page(
    project: Project, site: Site
) -> None:
    url = site.serve("/p/1", GONE)
    project.push(url)
    project.run(expect=1)
    assert len(site.asked("/p/1")) == 1
    assert project.dead_letters()["1"]["reason"] == "HTTP 404"
    assert project.rows() == []

    project.good("dlq", "retry", url)
    assert project.dead_letters() == {}
    project.run(expect=1)
    assert len(site.asked("/p/1")) == 2, "still broken: dead again, with a dead letter again"
    assert set(project.dead_letters()) == {"1"}

    site.serve("/p/1", product(1))
    project.good("dlq", "retry", "--all")
    project.run()
    assert project.total() == {
        "accepted": 1,
        "pending": 0,
        "in_flight": 0,
        "delayed": 0,
        "success": 1,
        "duplicate": 0,
        "dead": 0,
    }
    assert [row["sku"] for row in project.rows()] == ["S-1"]
    assert project.dead_letters() == {}
    project.doctor()


def test_retry_after_blocks_the_whole_host_until_it_expires(project: Project, site: Site) -> None:
    seconds = 3
    site.serve("/p/*", lambda request: reply(product(request.path[3:])))
    site.serve(
        "/p/0",
        answering(reply("slow down", status=429, retry_after=str(seconds)), reply(product(0))),
    )
    project.push(site.url("/p/0"))
    running = project.start("run", "shop.py", "--workers", "2")
    throttled = wait_for(lambda: site.asked("/p/0"), f"the first request: {running.output}")[0]
    project.push(*(site.url(f"/p/{n}") for n in range(1, 40)))
    wait_for(
        lambda: running.ended or project.total()["success"] == 40,
        f"all done: {running.output}",
        every=0.2,
    )
    running.signal(15)
    assert running.wait() == 0, running.output
    early = [
        e.path
        for e in site.web.entries
        if e.path.startswith("/p/")
        and throttled.answered + 250_000 < e.at < throttled.answered + seconds * 1_000_000
    ]
    assert early == [], f"requested {len(early)} times while the host was blocked"
    assert {e["status"] for e in project.events()} == {"success"}
    assert len(site.asked("/p/0")) == 2
    assert len(project.rows()) == 40


def test_the_oldest_duplicate_of_a_dead_owner_is_promoted_once(
    project: Project, site: Site
) -> None:
    mended = site.serve("/p/1", answering(GONE, reply(product(1))))
    broken = site.serve("/p/2", GONE)
    project.push(mended, mended, broken, broken, broken)
    project.run(expect=1)
    events = project.events("--url", mended)[::-1]
    assert [e["status"] for e in events] == ["dead", "success"]
    assert project.trace(events[1]["event_id"])["events"][0]["promoted"] is True
    (row,) = project.rows()
    assert row["_penstock"]["event_id"] == events[1]["event_id"]
    assert [e["status"] for e in project.events("--url", broken)[::-1]] == [
        "dead",
        "dead",
        "duplicate",
    ], "a second duplicate was promoted"
    assert len(site.asked("/p/2")) == 2
    project.doctor()


def test_a_fetch_beyond_its_deadline_is_ended_by_the_watchdog_and_retried(
    project: Project, site: Site
) -> None:
    url = site.serve("/p/1", answering(Reply(body=b"never", delay=30.0), reply(product(1))))
    project.push(url)
    # The second attempt has enough time even if the machine is suspended for a while.
    project.run("-o", "fetch.deadline=6s")
    event = project.event(url)
    assert (event["status"], event["retry_count"], event["starts"]) == ("success", 1, 2)
    assert [s["reason"] for s in event["history"] if s["class"]] == ["watchdog: not done after 6 s"]
    assert len(project.rows()) == 1


def test_an_event_that_takes_longer_than_its_lease_is_not_started_by_another_worker(
    project: Project, site: Site
) -> None:
    slow = reply(product(1))
    url = site.serve("/p/1", Reply(slow.status, slow.headers, slow.body, delay=11.0))
    project.push(url)
    # The request takes two leases. A lease is longer than a suspension of the machine.
    project.run("-o", "lease=5s", "--workers", "2")
    event = project.event(url)
    assert (event["status"], event["starts"]) == ("success", 1)
    assert len(site.asked("/p/1")) == 1
