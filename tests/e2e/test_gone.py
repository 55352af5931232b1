"""Known pages that answer 404 or 410: visits, removals, limits of hosts, and pages that return."""

from __future__ import annotations

import json
import sqlite3

import psycopg
import pytest
from tests.e2e.harness import SHOP, Project, Site, product, read_rows, wait_for
from tests.e2e.layouts import Server, lay_out, layouts

from penstock.testing.web import Reply, Request, reply, tagged

MISSING, GONE = reply("no such page", status=404), reply("sold out", status=410)
HOOKED = (
    SHOP
    + """
import json

shop.sink("sqlite:products.db")

@shop.on_change
def record_change(change):
    with open(__file__.replace("shop.py", "changes.jsonl"), "a") as f:
        f.write(json.dumps({"key": change.key, "old": change.old, "new": change.new}) + "\\n")
"""
)


@pytest.fixture
def shop(project: Project) -> Project:
    project.set(dedup_window="0s", dedup_settle="0s")
    project.write("shop.py", HOOKED)
    return project


def visit(project: Project, *urls: str, expect: int = 0) -> None:
    project.push(*urls)
    project.run(expect=expect)


def table(project: Project) -> set[str]:
    with sqlite3.connect(project.dir / "products.db") as db:
        return {sku for (sku,) in db.execute("SELECT sku FROM records")}


def results(project: Project, url: str) -> list[tuple[str, str | None, str]]:
    """Return the visits of a URL, oldest first."""
    rows = project.events("--url", url)
    return [(e["status"], e["result"], e["reason"]) for e in reversed(rows)]


def removals(project: Project) -> list[str]:
    return [row["sku"] for row in project.rows() if row["_penstock"].get("deleted")]


def serve(site: Site, count: int) -> list[str]:
    return [site.serve(f"/p/{n}", product(n)) for n in range(count)]


def test_a_known_page_with_two_404_visits_leaves_the_sinks(shop: Project, site: Site) -> None:
    urls = serve(site, 2)
    visit(shop, *urls)
    assert table(shop) == {"S-0", "S-1"}

    site.serve("/p/0", MISSING)
    visit(shop, *urls)
    assert table(shop) == {"S-0", "S-1"}
    assert removals(shop) == []

    visit(shop, *urls)
    assert table(shop) == {"S-1"}
    assert results(shop, urls[0]) == [
        ("success", None, ""),
        ("success", "missing", "missing, 1 of 2 visits"),
        ("success", "gone", "gone"),
    ]
    (line,) = [row for row in shop.rows() if row["_penstock"].get("deleted")]
    newest = shop.event(urls[0])
    assert {name for name in line if name != "_penstock"} == {"sku"}
    assert line["_penstock"]["event_id"] == newest["event_id"]
    assert line["_penstock"]["fetched_at"] > "2000"
    assert read_rows(shop.dir / "changes.jsonl") == [
        {
            "key": "S-0",
            "old": {"sku": "S-0", "title": "Product 0", "price": "10.00"},
            "new": {"sku": "S-0"},
        }
    ]

    visit(shop, *urls)  # the page stays gone, without another removal
    assert results(shop, urls[0])[-1] == ("success", "gone", "gone")
    assert removals(shop) == ["S-0"]
    status = shop.status()
    assert (status["counters"]["gone"], status["counters"]["missing"]) == (2, 1)
    assert status["total"]["success"] == 8
    assert {e["url"] for e in shop.events("--result", "gone")} == {urls[0]}
    assert "(gone)" in shop.good("trace", urls[0])
    assert "pages gone 2" in shop.good("status")
    shop.doctor()


def test_a_410_needs_one_visit(shop: Project, site: Site) -> None:
    urls = serve(site, 2)
    visit(shop, *urls)
    site.serve("/p/0", GONE)
    visit(shop, *urls)
    assert table(shop) == {"S-1"}
    assert removals(shop) == ["S-0"]
    assert results(shop, urls[0])[-1] == ("success", "gone", "gone")


def test_gone_after_sets_the_number_of_visits(shop: Project, site: Site) -> None:
    shop.set(gone_after="3")
    (url,) = serve(site, 1)
    visit(shop, url)
    site.serve("/p/0", MISSING)
    for n in (1, 2):
        visit(shop, url)
        assert results(shop, url)[-1] == ("success", "missing", f"missing, {n} of 3 visits")
    assert table(shop) == {"S-0"}
    visit(shop, url)
    assert table(shop) == set()


def test_a_page_that_returns_before_it_is_gone_keeps_its_row(shop: Project, site: Site) -> None:
    def etag(request: Request) -> Reply:
        return tagged(request, reply(product(0)))

    url = site.serve("/p/0", etag)
    visit(shop, url)
    for _ in range(2):
        site.serve("/p/0", MISSING)
        visit(shop, url)
        site.serve("/p/0", etag)
        visit(shop, url)
    assert [entry.status for entry in site.asked("/p/0")] == [200, 404, 304, 404, 304]
    assert [(result, reason) for _, result, reason in results(shop, url)] == [
        (None, ""),
        ("missing", "missing, 1 of 2 visits"),
        (None, "unchanged"),
        ("missing", "missing, 1 of 2 visits"),
        (None, "unchanged"),
    ]
    assert table(shop) == {"S-0"}
    assert len(shop.rows()) == 1


@pytest.mark.parametrize("conditional", [False, True])
def test_a_gone_page_that_returns_unchanged_is_written_again(
    shop: Project, site: Site, conditional: bool
) -> None:
    def page(request: Request) -> Reply:
        return tagged(request, reply(product(0))) if conditional else reply(product(0))

    url = site.serve("/p/0", page)
    visit(shop, url)
    site.serve("/p/0", GONE)
    visit(shop, url)
    assert table(shop) == set()

    site.serve("/p/0", page)
    visit(shop, url)
    assert [e.status for e in site.asked("/p/0")] == [200, 410, 304 if conditional else 200]
    assert table(shop) == {"S-0"}
    assert [row["_penstock"].get("deleted", False) for row in shop.rows()] == [False, True, False]
    visit(shop, url)
    assert len(shop.rows()) == 3, "unchanged again"

    site.serve("/p/0", GONE)
    visit(shop, url)
    assert table(shop) == set()


def test_a_page_without_an_earlier_success_is_dead_as_not_found(shop: Project, site: Site) -> None:
    urls = [site.serve("/p/0", MISSING), site.serve("/p/1", GONE)]
    visit(shop, *urls, expect=1)
    assert {(d["class"], d["reason"]) for d in shop.dead_letters().values()} == {
        ("not_found", "HTTP 404"),
        ("not_found", "HTTP 410"),
    }
    assert (
        len(
            json.loads(shop.good("dlq", "ls", "--class", "not_found", "--all", "--json"))["letters"]
        )
        == 2
    )


def test_forced_visits_count_too(shop: Project, site: Site) -> None:
    (url,) = serve(site, 1)
    visit(shop, url)
    for answer in (GONE, product(0)):
        site.serve("/p/0", answer)
        shop.push(url, options=("--force",))
        shop.run()
    assert table(shop) == {"S-0"}
    assert removals(shop) == ["S-0"]
    assert [result for _, result, _ in results(shop, url)] == [None, "gone", None]


def test_a_record_with_a_newer_value_from_another_page_stays(shop: Project, site: Site) -> None:
    first, second = site.serve("/p/0", product("x")), site.serve("/p/1", product("x", "9.00"))
    visit(shop, first)
    visit(shop, second)
    site.serve("/p/0", GONE)
    visit(shop, first)
    assert table(shop) == {"S-x"}
    assert removals(shop) == []
    assert results(shop, first)[-1] == ("success", "gone", "gone")


def test_a_page_that_left_its_sitemap_needs_one_visit(shop: Project, site: Site) -> None:
    def listed(*urls: str) -> Reply:
        entries = "".join(f"<url><loc>{url}</loc></url>" for url in urls)
        return reply(f"<urlset>{entries}</urlset>", "application/xml")

    urls = serve(site, 2)
    map_ = site.serve("/sitemap.xml", listed(*urls))
    shop.write(
        "shop.py",
        HOOKED + f'\nshop.source("sitemap+{map_}", emit=["new", "removed"], every="100ms")\n',
    )
    shop.run()
    assert table(shop) == {"S-0", "S-1"}
    site.serve("/p/0", MISSING)
    site.serve("/sitemap.xml", listed(urls[1]))
    shop.run()
    assert table(shop) == {"S-1"}
    assert removals(shop) == ["S-0"]


@pytest.mark.parametrize("answer", [MISSING, GONE], ids=["404", "410"])
def test_removals_wait_for_an_operator_if_too_many_pages_of_a_host_are_gone(
    shop: Project, site: Site, answer: Reply
) -> None:
    urls = serve(site, 20)
    host = f"127.0.0.1:{site.port}"
    visit(shop, *urls)
    for n in range(8):
        site.serve(f"/p/{n}", answer)
    if answer is MISSING:
        visit(shop, *urls)
    shop.push(*urls)
    done = shop.run(expect=1)
    assert f"penstock domains approve {host}" in done.err
    assert len(table(shop)) == 20, "no record is removed, not even of the first pages"
    assert removals(shop) == []
    (wait,) = shop.status()["waits"]
    assert wait["for"] == f"approval:{host}"
    assert wait["reason"].startswith("8 of 20 known URLs disappeared")
    assert f"penstock domains approve {host}" in shop.good("status")
    assert f"penstock domains approve {host}" in shop.good("domains", "show", host)
    assert json.loads(shop.good("domains", "show", host, "--json"))["removals_held"] == 8
    assert "domains approve" in shop.good("domains", "ls")

    site.serve("/p/0", product(0))  # a page that returns is not removed
    visit(shop, urls[0], expect=1)
    assert shop.status()["waits"][0]["reason"].startswith("7 of 20 ")
    assert "7 removals approved" in shop.good("domains", "approve", host)
    shop.run()
    assert table(shop) == {f"S-{n}" for n in (0, *range(8, 20))}
    assert sorted(removals(shop)) == [f"S-{n}" for n in range(1, 8)]
    assert shop.status()["waits"] == []
    assert shop.status()["counters"]["gone"] == 7

    for n in range(8, 12):  # the approval lasts for an hour
        site.serve(f"/p/{n}", GONE)
    visit(shop, *urls[8:])
    assert len(table(shop)) == 9
    shop.doctor()


def test_a_service_removes_records_when_the_host_has_settled(shop: Project, site: Site) -> None:
    shop.set(gone_settle="500ms")
    urls = serve(site, 10)
    visit(shop, *urls)
    for n in range(2):
        site.serve(f"/p/{n}", GONE)
    worker = shop.start("run", "shop.py")
    shop.push(*urls)
    wait_for(lambda: len(table(shop)) == 8, "the removal")
    wait_for(lambda: len(removals(shop)) == 2, "the lines of the removals")
    worker.signal(15)
    assert worker.wait() == 0, worker.output


def test_waiting_removals_survive_a_killed_worker(shop: Project, site: Site) -> None:
    urls = serve(site, 4)
    visit(shop, *urls)
    site.serve("/p/0", GONE)
    worker = shop.start("run", "shop.py")
    shop.push(*urls)
    wait_for(lambda: shop.total()["success"] == 8, "all visits")
    worker.kill()
    worker.wait()
    assert len(table(shop)) == 4, "gone.settle is a minute"
    assert results(shop, urls[0])[-1] == ("success", "missing", "missing, 1 of 1 visits")
    shop.run()
    assert len(table(shop)) == 3
    assert removals(shop) == ["S-0"]
    shop.doctor()


def test_processes_with_one_role_each_remove_a_gone_page(shop: Project, site: Site) -> None:
    shop.set(gone_settle="200ms")
    urls = serve(site, 3)
    running = [shop.start("run", "shop.py", "--role", r) for r in ("fetch", "extract", "sink")]
    shop.push(*urls)
    wait_for(lambda: shop.written() == 3, "all rows")
    for _ in range(2):
        site.serve("/p/0", MISSING)
        before = shop.total()["success"]
        shop.push(*urls)
        wait_for(lambda n=before: shop.total()["success"] == n + 3, "all visits")
    wait_for(lambda: table(shop) == {"S-1", "S-2"}, "the removal")
    wait_for(lambda: removals(shop) == ["S-0"], "the line of the removal")
    for each in running:
        each.signal(15)
    for each in running:
        assert each.wait() == 0, each.output


@pytest.mark.parametrize("layout", layouts("postgres", "redis+postgres", "redis"))
def test_a_gone_page_leaves_the_table_of_each_layout(
    project: Project, site: Site, server: Server, layout: str
) -> None:
    lay_out(project, layout, server)
    project.set(dedup_window="0s", dedup_settle="0s")
    name = f"t{project.mark[:12]}_products"
    url = server("postgres").url if "postgres" in layout else ""
    sink = f"{url}?table={name}" if url else "sqlite:products.db"
    project.write("shop.py", HOOKED.replace("sqlite:products.db", sink))

    def skus() -> set[str]:
        if not url:
            return table(project)
        with psycopg.connect(url) as db:
            return {sku for (sku,) in db.execute(f"SELECT sku FROM {name}")}

    urls = serve(site, 20)
    visit(project, *urls)
    site.serve("/p/0", MISSING)
    visit(project, *urls)
    assert len(skus()) == 20
    visit(project, *urls)
    assert len(skus()) == 19
    assert removals(project) == ["S-0"]
    site.serve("/p/0", product(0))
    visit(project, *urls)
    assert len(skus()) == 20

    for n in range(8):
        site.serve(f"/p/{n}", GONE)
    visit(project, *urls, expect=1)
    assert len(skus()) == 20
    project.good("domains", "approve", f"127.0.0.1:{site.port}")
    project.run()
    assert len(skus()) == 12
    project.doctor()
