"""Routes in a fleet of real processes: workers with and without the proxy pool of an event."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.harness import SHOP, Project, Running, Site, product, wait_for
from tests.e2e.webhook_rig import Server
from tests.embedded.proxy_servers import Proxy

from penstock.errors import CONFIGURATION

NO_RENDERER = "render=true asks for a browser, and this release has no renderer"


@pytest.fixture
def proxy(project: Project) -> Iterator[Proxy]:
    """A real HTTP proxy on a thread."""
    made, loop = Proxy(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy")
    thread.start()
    asyncio.run_coroutine_threadsafe(made.start(), loop).result(60)
    project.allow(made.port)
    yield made
    asyncio.run_coroutine_threadsafe(made.stop(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def start_with(project: Project, proxy: Proxy | None) -> Running:
    """Start a worker with the pool `home`, or with no pool."""
    project.env.pop("PENSTOCK_PROXIES_HOME_URLS", None)
    if proxy is not None:
        project.set(proxies_home_urls=proxy.dsn)
    running = project.start("run", "shop.py")
    project.env.pop("PENSTOCK_PROXIES_HOME_URLS", None)
    return running


def stop(running: Running) -> None:
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.output


def findings(project: Project) -> list[dict[str, Any]]:
    done = project.penstock("doctor", "--json")
    assert done.code == 0, done.output
    return [each for each in json.loads(done.out)["checks"] if each["check"] == "waiting"]


def test_events_wait_for_their_route_until_a_worker_that_serves_it_starts(
    project: Project, site: Site, proxy: Proxy
) -> None:
    for n in range(6):
        site.serve(f"/p/{n}", product(n))
    routed = [site.url(f"/p/{n}") for n in range(3)]
    project.push(*routed, options=("--pool", "home"))
    project.push(*[site.url(f"/p/{n}") for n in range(3, 6)])
    other = start_with(project, None)
    wait_for(
        lambda: project.total()["success"] == 3 and project.total()["delayed"] == 3,
        f"the events without a route end, and the others wait: {other.output}",
    )
    assert site.asked("/p/0") == []
    event = project.event(routed[0])
    assert event["reason"] == "no live worker serves pool 'home'"
    (found,) = findings(project)
    assert found["found"] == "no live worker serves the route pool=home, 3 events waiting"
    assert found["fix"] == "start a worker with [proxies.home] in its configuration"
    (waiting,) = project.status()["waits"]
    assert (waiting["for"], waiting["events"]) == ("route:pool=home", 3)
    assert waiting["next"] == found["fix"]
    assert found["fix"] in project.good("status").replace("\n", " ")
    (delay,) = project.status()["delays"]
    assert (delay["events"], delay["reason"]) == (3, "no live worker serves pool 'home'")

    serving = start_with(project, proxy)
    wait_for(
        lambda: project.total()["success"] == 6,
        f"the new worker fetches the events: {serving.output}",
    )
    assert findings(project) == []
    assert len(proxy.connects) == 3, "each routed event was fetched once, and by the proxy"
    assert project.dead_letters() == {}
    stop(serving)
    stop(other)


def test_a_worker_without_the_pool_does_not_end_events_of_the_other_worker(
    project: Project, site: Site, proxy: Proxy
) -> None:
    n = 20
    for i in range(2 * n):
        site.serve(f"/p/{i}", product(i))
    project.push(site.url(f"/p/{n}"))
    workers = [start_with(project, proxy), start_with(project, None)]
    wait_for(lambda: sum(w["alive"] for w in project.status()["workers"]) == 2, "both workers run")
    project.push(*[site.url(f"/p/{i}") for i in range(n)], options=("--pool", "home"))
    project.push(*[site.url(f"/p/{i}") for i in range(n + 1, 2 * n)])
    wait_for(
        lambda: project.total()["success"] == 2 * n,
        f"all events end: {[w.output for w in workers]}",
    )
    assert len(proxy.connects) == n
    assert all(len(site.asked(f"/p/{i}")) == 1 for i in range(2 * n))
    for worker in workers:
        stop(worker)
    assert project.total()["dead"] == project.total()["delayed"] == 0


def test_a_webhook_item_with_render_is_refused_with_a_sentence(project: Project) -> None:
    server = Server(
        project, pipeline=SHOP + 'shop.source("webhook:shop", map={"render": "render"})\n'
    )
    answer = server.post({"url": "https://shop.example/p/1", "render": True})
    assert (answer.status, answer.json["reasons"]) == (422, [{"item": 0, "reason": NO_RENDERER}])
    assert server.post({"url": "https://shop.example/p/1", "render": False}).status == 202


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ('route={"goe": "US"}', "route has no 'goe'", "did you mean geo?"),
        ('route={"render": True}', NO_RENDERER, "leave render out"),
        ('priority="hihg"', "priority 'hihg' is not known", "did you mean high?"),
        ('window="soon"', "window 'soon' is not a length of time", 'write seconds, or "30s"'),
    ],
)
def test_a_pipeline_with_a_wrong_route_value_is_not_loaded(
    project: Project, options: str, message: str, hint: str
) -> None:
    project.write("shop.py", SHOP + f'shop.source("webhook:shop", {options})\n')
    for command in (("run", "shop.py", "--until-idle"), ("config", "check", "shop.py")):
        done = project.penstock(*command)
        assert done.code == CONFIGURATION, done.output
        assert "source 'webhook:shop': " in done.err, done.output
        assert message in done.err
        assert hint in done.err


def test_until_idle_ends_with_1_if_only_events_without_a_served_route_are_left(
    project: Project, site: Site
) -> None:
    project.push(site.serve("/p/1", product(1)))
    project.push(site.serve("/p/2", product(2)), options=("--pool", "home"))
    done = project.run(expect=1)
    assert "no live worker serves the route pool=home" in done.err
    assert "start a worker with [proxies.home] in its configuration" in done.err
    assert [row["sku"] for row in project.rows()] == ["S-1"]
    assert project.total()["delayed"] == 1
