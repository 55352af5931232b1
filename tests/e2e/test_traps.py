"""Crawler traps: three hostile sites without an end, each with the exact number of its pages."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable
from datetime import date, timedelta

from tests.e2e.harness import Done, Project, Site

from penstock.testing.web import HTML, Reply, Request, reply

CRAWL = """
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*", key="url")
def page(page: Page):
    yield {"url": page.url}
    yield from page.follow("a")

shop.sink("jsonl:products.jsonl")
"""


def document(*links: str) -> Reply:
    return reply("".join(f'<a href="{link}">more</a>' for link in links), HTML)


def crawl(
    project: Project, site: Site, answer: Callable[[Request], Reply], start: str, workers: int = 2
) -> Done:
    """Crawl a site until idle. The depth of links does not end the crawl."""
    site.serve("/*", answer)
    site.serve("/robots.txt", reply("", status=404))
    project.write("shop.py", CRAWL)
    project.set(follow_depth="10000")
    project.push(site.url(start))
    return project.run("--workers", str(workers))


def pages(site: Site) -> Counter[str]:
    asked = Counter(e.path for e in site.web.entries if e.path != "/robots.txt")
    return Counter(path.split("/")[1] for path in asked.elements())


def test_an_endless_calendar_gets_as_many_pages_as_limits_traps(
    project: Project, site: Site
) -> None:
    def answer(request: Request) -> Reply:
        match request.path.split("/")[1:]:
            case ["calendar", year, month]:
                n = int(year) * 12 + int(month) - 1
                around = [f"/calendar/{m // 12}/{m % 12 + 1:02}" for m in (n - 1, n + 1)]
                return document(*around, "/p/1")
            case ["events"]:
                day = date.fromisoformat(request.query.removeprefix("date=").partition("&")[0])
                following = day + timedelta(days=1)
                return document(f"/events?date={following}&view=day")
            case ["p", _]:
                return document("/")
        return document(
            "/p/1", "/p/2", "/p/3", "/calendar/2026/11", "/events?date=2026-11-18&view=day"
        )

    project.set(limits_traps="40")
    done = crawl(project, site, answer, "/", workers=1)
    assert pages(site) == {"": 1, "p": 3, "calendar": 40, "events": 40}
    status = project.status()
    assert status["total"]["accepted"] == status["total"]["success"] == 84
    assert status["counters"]["followed_trap_date"] == 3  # two months and a day
    templates = [site.url("/calendar/{date}"), site.url("/events?date={date}&view=day")]
    assert sorted(t["template"] for t in status["traps"]) == templates
    for template in templates:
        assert done.err.count(template) == 1, done.err  # each worker logs a template once
    shown = project.good("status")
    assert "3 links not accepted: trap: a calendar without an end" in shown
    assert templates[0] in shown


def test_a_page_is_fetched_with_five_session_ids_that_change_on_every_visit(
    project: Project, site: Site
) -> None:
    visits = itertools.count()
    names = ("home", "about", "list", "help")

    def answer(request: Request) -> Reply:
        token = hashlib.sha256(str(next(visits)).encode()).hexdigest()[:24]
        paths = [f"/s/{token}/{name}" for name in names]
        if request.path.startswith("/s/"):
            return document(*paths)
        return document(
            *(paths if request.path == "/" else ()),
            *(f"/j/{name};jsessionid={token.upper()}" for name in names),
            *(f"/n/(S({token}))/{name}.aspx" for name in names),
        )

    crawl(project, site, answer, "/")
    # The first page has no id in its URL. So its links to /s/ may be parts of an item.
    assert pages(site) == {"": 1, "s": 4 + 5 * 4, "j": 5 * 4, "n": 5 * 4}
    status = project.status()
    assert status["total"]["success"] == 65
    assert {t["template"] for t in status["traps"]} == {
        site.url(path)
        for name in names
        for path in (
            f"/s/{{session}}/{name}",
            f"/j/{name};jsessionid={{session}}",
            f"/n/{{session}}/{name}.aspx",
        )
    }
    assert "trap: session ids in paths" in project.good("status")


def test_growing_relative_links_end_after_three_repetitions(project: Project, site: Site) -> None:
    crawl(project, site, lambda _: document("next/", "more/"), "/grow/")
    # Paths of `next` and `more` with at most three repetitions: 1 + 2 + 4 + 8 + 14 + 20.
    assert pages(site) == {"grow": 49}
    status = project.status()
    assert status["total"]["success"] == 49
    assert status["counters"]["followed_trap_path"] > 0
    assert {t["kind"] for t in status["traps"]} == {"path"}
    assert "trap: a path that repeats itself" in project.good("status")
