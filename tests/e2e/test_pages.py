"""Stored pages: returned byte for byte, kept while an event needs them, then removed."""

from __future__ import annotations

import gzip
import json
import random
import subprocess

import pytest
from tests.e2e.harness import PENSTOCK, Project, Site, product, wait_for

from penstock.testing.web import Reply

SIZES = """
from penstock import Pipeline

shop = Pipeline("shop")

@shop.extract
def size(page):
    yield {"n": len(page.body)}

shop.sink("jsonl:products.jsonl")
"""


def shown(project: Project, what: str) -> bytes:
    return subprocess.run(
        [*PENSTOCK, "pages", "show", what],
        cwd=project.dir,
        env=project.env,
        capture_output=True,
        check=True,
    ).stdout


@pytest.mark.slow
def test_pages_show_prints_the_unchanged_bytes_by_url_event_id_and_page_id(
    project: Project, site: Site
) -> None:
    noise = random.Random(7).randbytes(200_000)
    bodies = {
        "/p/noise": noise,
        "/p/every-byte": bytes(range(256)) * 3,
        "/p/crlf": b"<h1>a\r\nb</h1>\r\n\n\r",
        "/p/latin": "<h1>caf\xe9</h1>".encode("latin-1"),
        "/p/large": b"<p>" + b"x" * 3_000_000,
    }
    for path, body in bodies.items():
        site.serve(path, Reply(200, {"content-type": "application/octet-stream"}, body))
    site.serve(
        "/p/gzip",
        Reply(
            200,
            {"content-type": "application/octet-stream", "content-encoding": "gzip"},
            gzip.compress(noise[:50_000]),
        ),
    )
    bodies["/p/gzip"] = noise[:50_000]
    project.write("shop.py", SIZES)
    project.push(*(site.url(path) for path in bodies))
    project.run()
    for path, body in bodies.items():
        url = site.url(path)
        assert shown(project, url) == body, path
        if path in ("/p/noise", "/p/gzip"):  # the same bytes by event id and by page id
            event = project.event(url)
            assert shown(project, event["event_id"]) == body
            assert shown(project, event["page"]) == body
    assert sorted(row["n"] for row in project.rows()) == sorted(
        len(body) for body in bodies.values()
    )


@pytest.mark.slow
def test_pruning_keeps_the_pages_of_open_events_and_of_dead_letters(
    project: Project, site: Site
) -> None:
    done = [site.serve(f"/p/done{n}", product(f"done{n}")) for n in range(5)]
    project.push(*done)
    project.run()
    waiting = [site.serve(f"/p/open{n}", product(f"open{n}")) for n in range(5)]
    dead = site.serve("/p/dead", "<h1>no sku</h1>")
    project.push(*waiting, dead)
    fetch = project.start("run", "shop.py", "--role", "fetch")
    wait_for(
        lambda: all(e["page"] for e in project.events() if e["url"] in (*waiting, dead)),
        f"fetched, not extracted: {fetch.output}",
        every=0.1,
    )
    fetch.signal(15)
    assert fetch.wait() == 0

    assert json.loads(project.good("pages", "prune", "--keep", "1h", "--json"))["removed"] == 0
    removed = json.loads(project.good("pages", "prune", "--max-bytes", "0", "--json"))
    assert removed["removed"] == 5
    gone = project.penstock("pages", "show", done[0])
    assert gone.code == 1
    assert "retention" in gone.err
    for url in waiting:
        assert shown(project, url) == product(url.rpartition("/")[2]).encode()

    project.run(expect=1)
    assert sorted(row["sku"] for row in project.rows()) == sorted(
        [f"S-done{n}" for n in range(5)] + [f"S-open{n}" for n in range(5)]
    )
    assert all(len(site.asked(f"/p/open{n}")) == 1 for n in range(5)), (
        "its page was removed, so it was fetched again"
    )
    assert set(project.dead_letters()) == {"dead"}
    project.good("pages", "prune", "--max-bytes", "0")
    assert shown(project, dead) == b"<h1>no sku</h1>", "the page of a dead letter is kept"
    left = json.loads(project.good("pages", "ls", "--json"))["total"]
    assert left["pages"] == 1
    project.doctor()


def test_a_changed_page_is_extracted_and_stored_after_the_old_one_was_pruned(
    project: Project, site: Site
) -> None:
    project.set(dedup_window="0s", dedup_settle="0s")
    url = site.serve("/p/1", product(1))
    project.push(url)
    project.run()
    project.good("pages", "prune", "--max-bytes", "0")
    site.serve("/p/1", product(1, "11.00"))
    project.push(url)
    project.run()
    assert [row["price"] for row in project.rows()] == ["10.00", "11.00"]
    assert shown(project, url) == product(1, "11.00").encode()
