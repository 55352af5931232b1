"""Change detection over several runs: ETag and 304, an unchanged body, a changed one, hooks, a
newer extractor, pages that match or yield nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tests.e2e.harness import SHOP, Project, Site, product, read_rows

from penstock.testing.web import Reply, Request, reply, tagged

HOOKED = (
    SHOP
    + """
import json

@shop.on_change
def record_change(change):
    with open(__file__.replace("shop.py", "changes.jsonl"), "a") as f:
        names = ("event_id", "key", "old", "new", "fields")
        f.write(json.dumps({name: getattr(change, name) for name in names}) + "\\n")
"""
)


def with_etag(html: str) -> Callable[[Request], Reply]:
    def handler(request: Request) -> Reply:
        return tagged(request, reply(html))

    return handler


def again(project: Project, *urls: str) -> None:
    project.push(*urls)
    project.run()


def test_an_unchanged_page_adds_no_row_and_a_changed_record_calls_the_hook(
    project: Project, site: Site
) -> None:
    project.set(dedup_window="0s", dedup_settle="0s")
    project.write("shop.py", HOOKED)
    urls = [
        site.serve("/p/etag", with_etag(product("etag"))),
        site.serve("/p/same", product("same")),
        site.serve("/p/moves", product("moves", "10.00")),
    ]
    again(project, *urls)
    assert len(project.rows()) == 3

    site.serve("/p/moves", product("moves", "12.50"))
    again(project, *urls)
    assert [entry.status for entry in site.asked("/p/etag")] == [200, 304]
    assert [
        (e["status"], e["reason"], e["response_status"]) for e in project.events("--url", urls[0])
    ] == [("success", "unchanged", 304), ("success", "", 200)]
    assert next((e["status"], e["reason"]) for e in project.events("--url", urls[1])) == (
        "success",
        "unchanged",
    )
    rows = project.rows()
    assert [(row["sku"], row["price"]) for row in rows[3:]] == [("S-moves", "12.50")]
    (change,) = read_rows(project.dir / "changes.jsonl")
    assert change["fields"] == {"price": ["10.00", "12.50"]}
    assert (change["old"]["price"], change["new"]["price"]) == ("10.00", "12.50")
    assert (change["key"], change["event_id"]) == ("S-moves", rows[3]["_penstock"]["event_id"])
    counters = project.status()["counters"]
    assert (counters["records"], counters["changes"], counters["unchanged"]) == (4, 1, 2)

    site.serve("/p/moves", product("moves", "12.50", "<p>another advertisement</p>"))
    again(project, *urls)
    assert len(project.rows()) == 4, "the page changed, the record did not"
    assert len(read_rows(project.dir / "changes.jsonl")) == 1
    assert project.status()["counters"]["records_unchanged"] == 1
    project.doctor()


def test_a_newer_extractor_reads_the_stored_page_again_after_a_304(
    project: Project, site: Site
) -> None:
    project.set(dedup_window="0s", dedup_settle="0s")
    url = site.serve("/p/1", with_etag(product(1)))
    again(project, url)
    project.write(
        "shop.py",
        SHOP.replace("version=1", "version=2").replace(
            '"title":', '"shout": page.css("h1::text").get().upper(),\n        "title":'
        ),
    )
    again(project, url)
    assert [entry.status for entry in site.asked("/p/1")] == [200, 304]
    first, second = project.rows()
    assert "shout" not in first
    assert second["shout"] == "PRODUCT 1"
    assert (first["_penstock"]["version"], second["_penstock"]["version"]) == (1, 2)
    again(project, url)
    assert len(project.rows()) == 2, "after a 304 with the same version no row is added"


def test_after_a_304_for_a_pruned_page_it_is_fetched_again_within_the_rate_limit(
    project: Project, site: Site
) -> None:
    project.set(dedup_window="0s", dedup_settle="0s", pace_rate="1")
    url = site.serve("/p/1", with_etag(product(1)))
    again(project, url)
    project.good("pages", "prune", "--max-bytes", "1")
    project.write("shop.py", SHOP.replace("version=1", "version=2"))
    again(project, url)
    asked = site.asked("/p/1")
    assert [entry.status for entry in asked] == [200, 304, 200]
    assert all(b.at - a.at >= 0.95e6 - site.late * 1e6 for a, b in itertools.pairwise(asked)), (
        "at most one request per second, including the repeated one"
    )


def test_unmatched_and_empty_pages_are_counted_and_shown_in_status(
    project: Project, site: Site
) -> None:
    project.write(
        "shop.py",
        SHOP.replace(
            "    yield {",
            '    if page.css("[data-sku]").get() is None:\n        return\n    yield {',
            1,
        ),
    )
    urls = [
        site.serve("/about", "<p>about us</p>"),
        site.serve("/p/redesigned", "<p>all new</p>"),
        site.serve("/p/1", product(1)),
    ]
    again(project, *urls)
    assert [project.event(url)["reason"] for url in urls] == ["unmatched", "empty", ""]
    counters = project.status()["counters"]
    assert (counters["unmatched"], counters["empty"], counters["records"]) == (1, 1, 1)
    shown = project.good("status")
    assert "no extractor matched" in shown
    assert "yielded nothing" in shown


def test_an_event_whose_record_has_an_empty_key_is_dead_with_that_reason(
    project: Project, site: Site
) -> None:
    url = site.serve("/p/1", "<h1>no sku here</h1>")
    project.push(url)
    project.run(expect=1)
    dead_letter = project.dead_letters()["1"]
    assert "key" in dead_letter["reason"]
    assert "sku" in dead_letter["reason"]
    assert len(site.asked("/p/1")) == 1
    assert project.rows() == []


def test_a_failed_hook_is_called_again_and_the_row_is_written_once(
    project: Project, site: Site
) -> None:
    project.set(dedup_window="0s", dedup_settle="0s")
    project.write(
        "shop.py",
        HOOKED.replace(
            "def record_change(change):\n",
            (
                "def record_change(change):\n    import os\n    if not os.path.exists('go'):\n"
                "        open('go', 'w').close()\n        raise OSError('not now')\n"
            ),
        ),
    )
    url = site.serve("/p/1", product(1, "10.00"))
    again(project, url)
    site.serve("/p/1", product(1, "11.00"))
    again(project, url)
    assert [row["price"] for row in project.rows()] == ["10.00", "11.00"]
    (change,) = read_rows(project.dir / "changes.jsonl")
    assert change["fields"] == {"price": ["10.00", "11.00"]}
