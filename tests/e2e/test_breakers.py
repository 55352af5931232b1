"""Breakers: a failing host or extractor is paused, and everything else continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.harness import Project, Site, product, wait_for
from tests.e2e.layouts import Server, lay_out, layouts

from penstock.testing.web import Request, reply

FORBIDDEN = reply("no", status=403)
NOT_FOUND = reply("no such page", status=404)
TWO_EXTRACTORS = """
from pathlib import Path

from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/p/*", key="sku")
def product(page: Page):
    yield {"sku": page.css("[data-sku]::attr(data-sku)").get()}

@shop.extract(match="*/q/*", key="sku")
def question(page: Page):
    if not Path("fixed").exists():
        raise KeyError("the layout of the page has changed")
    yield {"sku": "Q-" + page.css("[data-sku]::attr(data-sku)").get()}

shop.sink("jsonl:products.jsonl")
"""


def a_product(request: Request) -> Any:
    return reply(product(request.path[3:]))


@pytest.fixture
def sites(project: Project) -> Iterator[Callable[[int], list[Site]]]:
    made: list[Site] = []

    def start(n: int) -> list[Site]:
        made.extend(Site() for _ in range(n))
        for site in made:
            site.serve("/p/*", a_product)
            site.serve("/q/*", a_product)
        project.allow(*(site.port for site in made))
        return made

    # A small prefetch window: events that were received before the pause may still be requested.
    project.set(fetch_concurrency="8", fetch_prefetch="16", retry_budget="1")
    yield start
    for site in made:
        site.close()


def host(site: Site) -> str:
    return f"127.0.0.1:{site.port}"


def waits(project: Project) -> dict[str, dict[str, Any]]:
    return {w["for"]: w for w in project.status()["waits"]}


def skus(project: Project) -> list[str]:
    return sorted(row["sku"] for row in project.rows())


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failing_host_is_paused_and_other_pages_have_rows(
    project: Project, sites: Callable[[int], list[Site]], workers: str
) -> None:
    bad, good = sites(2)
    bad.serve("/p/*", FORBIDDEN)
    project.push(*(bad.url(f"/p/{n}") for n in range(100)))
    project.push(*(good.url(f"/p/{n}") for n in range(100)))
    done = project.run("--workers", workers, expect=1)
    assert skus(project) == sorted(f"S-{n}" for n in range(100))
    total = project.total()
    assert 50 <= total["dead"] < 100
    assert total["dead"] + total["delayed"] == 100, done.output
    found = waits(project)[f"host:{host(bad)}"]
    assert found["events"] == total["delayed"]
    assert "HTTP 403" in found["reason"]
    assert found["next"] == f"penstock domains resume {host(bad)}"
    for text in (done.err, project.good("status")):
        assert found["next"] in text
        assert "HTTP 403" in text
    assert project.status()["breaker"] == "open"
    assert project.status()["paused"] == {}, "the topic is not paused"
    found_by_doctor = project.penstock("doctor")
    assert (found_by_doctor.code, "domains resume" in found_by_doctor.out) == (5, True)

    requests = len(bad.web.entries)
    project.run(expect=1)
    assert len(bad.web.entries) == requests, "a paused host gets no request"

    bad.serve("/p/*", a_product)
    project.good("domains", "resume", host(bad))
    project.run()
    assert project.total()["success"] == 100 + total["delayed"]
    assert waits(project) == {}
    project.good("dlq", "retry", "--all")
    project.run()
    assert project.total()["success"] == 200
    project.doctor()


def test_a_broken_extractor_is_paused_and_another_one_of_the_host_continues(
    project: Project, sites: Callable[[int], list[Site]]
) -> None:
    (site,) = sites(1)
    project.write("shop.py", TWO_EXTRACTORS)
    project.push(*(site.url(f"/q/{n}") for n in range(100)))
    project.push(*(site.url(f"/p/{n}") for n in range(100)))
    done = project.run(expect=1)
    assert skus(project) == sorted(f"S-{n}" for n in range(100))
    total = project.total()
    assert 50 <= total["dead"] < 100, done.output
    found = waits(project)
    assert list(found) == ["extractor:question"]
    assert found["extractor:question"]["events"] == total["delayed"] == 100 - total["dead"]
    assert "the layout of the page has changed" in found["extractor:question"]["reason"]
    assert "penstock extractors resume question" in done.err

    project.write("fixed", "")
    assert "released" in project.good("extractors", "resume", "question")
    project.run()
    assert project.total()["success"] == 100 + total["delayed"]
    asked = [entry.path for entry in site.web.entries]
    assert all(asked.count(f"/q/{n}") == 1 for n in range(100)), "no page was fetched again"
    project.doctor()


def test_split_roles_keep_the_pages_of_a_paused_extractor(
    project: Project, sites: Callable[[int], list[Site]]
) -> None:
    (site,) = sites(1)
    project.write("shop.py", TWO_EXTRACTORS)
    project.good("extractors", "pause", "question", "--reason", "we look into it")
    project.push(*(site.url(f"/q/{n}") for n in range(20)))
    project.push(*(site.url(f"/p/{n}") for n in range(20)))
    running = [
        project.start("run", "shop.py", "--role", role, "--until-idle")
        for role in ("fetch", "extract", "sink")
    ]
    for each in running:
        assert each.wait() == 1, each.output
        assert "penstock extractors resume question" in each.output
    assert project.total()["delayed"] == 20
    assert len(project.rows()) == 20
    project.write("fixed", "")
    project.good("extractors", "resume", "question")
    running = [
        project.start("run", "shop.py", "--role", role, "--until-idle")
        for role in ("fetch", "extract", "sink")
    ]
    for each in running:
        assert each.wait() == 0, each.output
    assert len(skus(project)) == 40
    asked = [entry.path for entry in site.web.entries if "robots" not in entry.path]
    assert len(asked) == len(set(asked)) == 40
    project.doctor()


def test_five_failing_hosts_pause_the_topic(
    project: Project, sites: Callable[[int], list[Site]]
) -> None:
    *bad, good = sites(6)
    project.set(breaker_min="5")
    for site in bad:
        site.serve("/p/*", FORBIDDEN)
        project.push(*(site.url(f"/p/{n}") for n in range(20)))
    done = project.run(expect=1)
    status = project.status()
    assert "active hosts are paused after blocked failures" in status["paused"]["requests"]
    assert "penstock topics resume requests" in done.err
    # At least the second host is half of the active hosts.
    assert 2 <= len([w for w in waits(project) if w.startswith("host:")]) <= 5

    project.push(good.url("/p/1"))
    project.run(expect=1)
    assert project.rows() == [], "a paused topic delivers nothing"
    project.good("topics", "resume", "requests")
    project.run(expect=1)
    assert len(project.rows()) == 1, "hosts that are paused stay paused, and the others continue"
    for site in bad:
        project.good("domains", "resume", host(site))
    project.doctor()


def test_pages_that_are_not_found_stop_neither_their_host_nor_another_one(
    project: Project, sites: Callable[[int], list[Site]]
) -> None:
    one, other = sites(2)
    for n in range(120):
        one.serve(f"/p/gone{n}", NOT_FOUND)
    project.push(*(one.url(f"/p/gone{n}") for n in range(120)))
    project.push(*(site.url(f"/p/{site.port}-{n}") for site in (one, other) for n in range(100)))
    project.run(expect=1)
    assert len(skus(project)) == len(set(skus(project))) == 200
    total = project.total()
    assert (total["success"], total["dead"], total["delayed"]) == (200, 120, 0)
    assert {letter["class"] for letter in project.dead_letters().values()} == {"not_found"}
    assert waits(project) == {}
    project.doctor()


def test_a_run_ends_while_an_operator_has_paused_the_host_of_all_events(
    project: Project, sites: Callable[[int], list[Site]]
) -> None:
    (site,) = sites(1)
    project.good("domains", "pause", host(site))
    project.push(*(site.url(f"/p/{n}") for n in range(40)))
    done = project.run(expect=1)
    assert f"penstock domains resume {host(site)}" in done.err
    assert waits(project)[f"host:{host(site)}"]["events"] == 40
    assert site.web.entries == []
    project.good("domains", "resume", host(site))
    project.run()
    assert len(project.rows()) == 40


def test_a_run_ends_although_a_source_reads_from_a_paused_host(
    project: Project, sites: Callable[[int], list[Site]]
) -> None:
    (site,) = sites(1)
    project.write("shop.py", TWO_EXTRACTORS + f'shop.source("feed+{site.url("/feed.xml")}")\n')
    project.good("domains", "pause", host(site))
    project.push(site.url("/p/1"))
    done = project.run(expect=1)
    assert f"host {host(site)} is paused until an operator resumes it" in done.err
    assert f"penstock domains resume {host(site)}" in done.err
    assert site.web.entries == []


@pytest.mark.parametrize("layout", layouts("redis", "postgres", "redis+postgres", "rabbitmq"))
def test_a_failing_host_is_paused_on_every_store(
    project: Project, sites: Callable[[int], list[Site]], layout: str, server: Server
) -> None:
    lay_out(project, layout, server)
    bad, good = sites(2)
    project.set(breaker_min="10")
    bad.serve("/p/*", FORBIDDEN)
    urls = [site.url(f"/p/{n}") for n in range(60) for site in (bad, good)]
    project.push(*urls)
    running = project.start("run", "shop.py", "--until-idle", "--workers", "2")
    assert running.wait() == 1, running.output
    assert f"penstock domains resume {host(bad)}" in running.output
    assert len(project.rows()) == 60
    total = project.total()
    assert total["delayed"] > 0
    assert total["delayed"] + total["dead"] == 60
    bad.serve("/p/*", a_product)
    project.good("domains", "resume", host(bad))
    done = project.start("run", "shop.py", "--until-idle")
    wait_for(lambda: done.ended, f"the end: {done.output}", 120, 0.2)
    assert done.wait() == 0, done.output
    assert project.total()["success"] == 60 + total["delayed"]
