"""Links that find no room wait in the ledger: none is lost, and none is accepted twice."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from tests.e2e.harness import Project, Site, product, wait_for
from tests.e2e.layouts import Server, lay_out, layouts

from penstock.testing.web import Reply, Request, reply


def links(urls: list[str]) -> str:
    return "".join(f'<a class="related" href="{url}">more</a>' for url in urls)


def serve(site: Site, parents: int, children: int) -> None:
    """Serve pages whose links lead to `children` pages each."""

    def answer(request: Request) -> Reply:
        name = request.path.rpartition("/")[2]
        found = [f"/p/{name}-{n}" for n in range(children)] if "-" not in name else []
        return reply(product(name, more=links(found)))

    site.web.route("/p/*", answer)


def fetched(site: Site) -> Counter[str]:
    return Counter(e.path for e in list(site.web.entries) if e.path.startswith("/p/"))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_page_of_1000_links_ends_although_one_event_may_be_pending(
    project: Project, site: Site, workers: str
) -> None:
    serve(site, 1, 1000)
    project.set(intake_max_pending="1")
    project.push(site.url("/p/0"))
    began = time.monotonic()
    project.run("--workers", workers)
    print(f"{time.monotonic() - began:.1f} s")
    asked = fetched(site)
    assert len(asked) == 1001
    assert max(asked.values()) == 1
    status = project.status()
    assert status["total"]["accepted"] == status["total"]["success"] == 1001
    assert status["counters"]["followed"] == 1000
    assert status["links"]["waiting"] == 0
    assert len(project.rows()) == 1001
    project.doctor()


def test_a_page_does_not_hold_back_the_links_of_another_page(project: Project, site: Site) -> None:
    serve(site, 2, 300)
    project.set(intake_max_pending="4")
    project.push(site.url("/p/0"), site.url("/p/1"))
    project.run()
    order = [e.path[3] for e in site.web.entries if "-" in e.path]
    assert len(order) == 600
    # The last link of the first finished page is fetched when most links of the other one are.
    first = min(len(order) - 1 - order[::-1].index(name) for name in "01")
    assert first > 500


def test_workers_that_are_killed_lose_no_waiting_link(project: Project, site: Site) -> None:
    serve(site, 3, 400)
    # The rate leaves links for each of the kills, also on a fast machine.
    project.set(intake_max_pending="20", lease="2s", pace_rate="150")
    project.push(*[site.url(f"/p/{n}") for n in range(3)])
    rng = random.Random(14)
    for kill in range(6):
        running = project.start("run", "shop.py", "--workers", "2")
        before = sum(fetched(site).values())
        wait_for(lambda n=before: sum(fetched(site).values()) > n + 40, "pages are fetched")
        time.sleep(rng.random() * 0.2)
        running.kill()
        print(kill, sum(fetched(site).values()), project.status()["links"])
    project.run("--workers", "2")
    assert len(fetched(site)) == 3 + 1200
    status = project.status()
    assert status["total"]["accepted"] == status["total"]["success"] == 1203
    assert status["counters"]["followed"] == 1200
    rows = project.rows()
    assert len(rows) == len({row["sku"] for row in rows}) == 1203
    project.doctor()


@pytest.mark.parametrize(
    "layout",
    layouts("apart", "redis", "rabbitmq", "kafka", "sqs", "postgres", "redis+postgres"),
)
def test_a_kill_in_any_layout_loses_and_doubles_no_waiting_link(
    project: Project, site: Site, server: Server, layout: str
) -> None:
    lay_out(project, layout, server, quick=True)
    serve(site, 2, 150)
    project.set(intake_max_pending="10", lease="2s")
    project.push(site.url("/p/0"), site.url("/p/1"))
    running = project.start("run", "shop.py")
    wait_for(lambda: sum(fetched(site).values()) > 60, "links are fetched", 120)
    running.kill()
    waiting = project.status()["links"]["waiting"]
    assert 0 < waiting < 300
    project.run()
    status = project.status()
    assert status["total"]["accepted"] == status["total"]["success"] == 302
    assert status["counters"]["followed"] == 300
    assert len(fetched(site)) == 302
    rows = project.rows()
    assert len(rows) == len({row["sku"] for row in rows}) == 302


def test_links_of_split_roles_wait_in_the_process_that_ends_the_events(
    project: Project, site: Site
) -> None:
    serve(site, 1, 700)
    project.set(intake_max_pending="30")
    project.push(site.url("/p/0"))
    running = [
        project.start("run", "shop.py", "--role", role) for role in ("fetch", "extract", "sink")
    ]
    wait_for(lambda: project.total()["success"] == 701, "all links are fetched", 240, every=0.5)
    for one in running:
        one.kill()
    asked = fetched(site)
    assert len(asked) == 701
    assert max(asked.values()) == 1
    assert project.status()["links"]["waiting"] == 0
