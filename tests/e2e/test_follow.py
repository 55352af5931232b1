"""Followed links: each page is fetched once, and every link is counted."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from tests.e2e.harness import SHOP, Project, Site, product

PAGES = 30


def links(*urls: str) -> str:
    return "".join(f'<a class="related" href="{url}">more</a>' for url in urls)


def test_every_page_of_a_cyclic_link_graph_is_fetched_once_under_one_trace(
    project: Project, site: Site
) -> None:
    made = 0
    # Links lead forward, to the page itself with a fragment, and back to the start.
    for n in range(PAGES):
        out = [f"/p/{(n + step) % PAGES}" for step in (1, 2, 7)] + [
            f"#{n}",
            "/p/0",
            "https://elsewhere.example/p/1",
        ]
        made += len(out)
        site.serve(f"/p/{n}", product(n, more=links(*out)))
    site.serve("/p/0", product(0, more=links("/p/1", "/p/2", "/p/7", "mailto:us@shop.example")))
    project.set(follow_depth="100")
    project.push(site.url("/p/0"))
    project.run("--workers", "2")
    assert Counter(e.path for e in site.web.entries if e.path.startswith("/p/")) == {
        f"/p/{n}": 1 for n in range(PAGES)
    }
    assert sorted(row["sku"] for row in project.rows()) == sorted(f"S-{n}" for n in range(PAGES))
    status = project.status()
    assert status["total"]["accepted"] == status["total"]["success"] == PAGES
    counters = status["counters"]
    assert counters["followed"] == PAGES - 1
    assert counters["followed_offsite"] > 0
    assert {row["_penstock"]["trace_id"] for row in project.rows()} == {
        project.event(site.url("/p/0"))["trace_id"]
    }
    tree = project.trace(site.url("/p/0"))
    assert tree["total"] == PAGES
    assert all(e["parent"] for e in tree["events"] if e["event_id"] != tree["asked"])
    project.doctor()


def test_links_are_followed_up_to_the_configured_depth(project: Project, site: Site) -> None:
    for n in range(6):
        site.serve(f"/p/{n}", product(n, more=links(f"/p/{n + 1}")))
    project.set(follow_depth="3")
    project.push(site.url("/p/0"))
    project.run()
    assert sorted(row["sku"] for row in project.rows()) == ["S-0", "S-1", "S-2", "S-3"]
    assert project.status()["counters"]["followed_too_deep"] == 1


def test_a_link_inside_its_window_is_counted_and_not_accepted(project: Project, site: Site) -> None:
    site.serve("/p/1", product(1))
    site.serve("/p/0", product(0, more=links("/p/1")))
    project.push(site.url("/p/1"))
    project.run()
    project.push(site.url("/p/0"))
    project.run()
    assert len(site.asked("/p/1")) == 1
    status = project.status()
    assert status["total"]["accepted"] == 2
    assert status["counters"]["followed_fresh"] == 1


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_a_wrong_value_of_follow_makes_a_dead_letter_with_the_extractors_line(
    project: Project, site: Site, isolation: str
) -> None:
    for n in range(4):
        site.serve(f"/p/{n}", product(n, more=links("/p/3")))
    text = SHOP.replace(
        'page.follow("a.related")',
        'page.follow("a.related", window={"/p/0": "soon", "/p/2": "1h"}.get(path), priority=rank)',
    ).replace(
        "    yield {\n",
        '    path = page.url[page.url.index("/p/"):]\n'
        '    rank = "hihg" if path == "/p/1" else "high"\n'
        "    yield {\n",
    )
    line = text[: text.index("page.follow")].count("\n") + 1
    project.write("shop.py", text)
    project.set(extract_isolation=isolation)
    project.push(*[site.url(f"/p/{n}") for n in range(3)])
    project.run(expect=1)
    letters = project.dead_letters()
    start = f"the extractor follows a link with a wrong value (shop.py line {line}): "
    assert {name: letter["reason"] for name, letter in letters.items()} == {
        "0": start
        + 'window \'soon\' is not a length of time; write seconds, or "30s", "5m", "1h", "1d"',
        "1": start + "priority 'hihg' is not known; did you mean high?",
    }
    assert {letter["class"] for letter in letters.values()} == {"permanent"}
    detail = json.loads(project.good("dlq", "show", letters["0"]["event_id"], "--json"))["detail"]
    assert f'shop.py", line {line}, in product' in detail
    assert sorted(row["sku"] for row in project.rows()) == ["S-2", "S-3"]
