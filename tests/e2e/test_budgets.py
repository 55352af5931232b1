"""Budgets in real runs: waiting events, the output of `status`, and a raised limit."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from tests.e2e.harness import Project, Running, Site, product, wait_for
from tests.e2e.layouts import Server, lay_out, layouts
from tests.e2e.test_routes import proxy  # noqa: F401 (a fixture)
from tests.embedded.proxy_servers import Proxy

LARGE = product(1, more="<!--" + "x" * 100_000 + "-->")


def asked(site: Site) -> Counter[str]:
    return Counter(e.path for e in site.web.entries if e.path.startswith("/p/"))


def waits(project: Project) -> dict[str, int]:
    return {w["for"]: w["events"] for w in project.status()["waits"]}


def links(*urls: str) -> str:
    return "".join(f'<a class="related" href="{url}">more</a>' for url in urls)


@pytest.fixture(autouse=True)
def _not_at_midnight() -> None:
    """Wait if a daily budget could be renewed during a test."""
    left = 86400 - time.time() % 86400
    if left < 120:
        time.sleep(left + 1)


@pytest.mark.parametrize(
    "layout",
    layouts("embedded", "apart", "redis", "rabbitmq", "kafka", "postgres", "redis+postgres"),
)
def test_pushed_events_over_a_budget_wait_until_an_operator_raises_the_limit(
    project: Project, site: Site, server: Server, layout: str
) -> None:
    lay_out(project, layout, server)
    for n in range(5):
        site.serve(f"/p/{n}", product(n, more=links("/p/7", "/p/8")))
    project.set(limits_pages_per_host="3", follow_depth="1")
    project.push(*(site.url(f"/p/{n}") for n in range(5)))
    done = project.run("--workers", "2", expect=1)
    assert f"the page budget of host 127.0.0.1:{site.port} is used up, 2 events waiting" in done.err
    assert "Next: raise limits.pages_per_host and start the workers again" in done.err
    assert sum(asked(site).values()) == 3
    status = project.status()
    assert (status["total"]["success"], status["total"]["delayed"]) == (3, 2)
    (wait,) = status["waits"]
    assert (wait["for"], wait["events"]) == (f"budget:pages:host:127.0.0.1:{site.port}", 2)
    (refused,) = status["links_not_accepted"]
    assert (refused["counter"], refused["links"]) == ("followed_over_host", 6)
    shown = project.good("status")
    assert "6 links not accepted: the page budget of their host is used up" in shown
    assert "raise limits.pages_per_host and start the workers again" in shown

    project.set(limits_pages_per_host="100", follow_depth="0")
    project.run("--workers", "2")
    assert asked(site) == {f"/p/{n}": 1 for n in range(5)}
    assert waits(project) == {}
    assert project.total()["success"] == 5
    project.doctor()


def test_a_running_worker_with_a_higher_limit_releases_events_of_another_one(
    project: Project, site: Site
) -> None:
    for n in range(4):
        site.serve(f"/p/{n}", product(n))
    project.set(limits_pages_per_host="2")
    project.push(*(site.url(f"/p/{n}") for n in range(4)))
    project.run(expect=1)
    project.env.pop("PENSTOCK_LIMITS_PAGES_PER_HOST")
    running = project.start("run", "shop.py")
    wait_for(lambda: project.written() == 4, "all rows")
    stop(running)


def stop(running: Running) -> None:
    running.signal(15)
    assert running.wait() == 0, running.output


def test_each_run_command_has_its_own_budget_for_all_its_workers(
    project: Project, site: Site
) -> None:
    for n in range(10):
        site.serve(f"/p/{n}", product(n))
    project.set(limits_pages_per_run="4")
    project.push(*(site.url(f"/p/{n}") for n in range(10)))
    for fetched, code in ((4, 1), (8, 1), (10, 0)):
        done = project.run("--workers", "3", expect=code)
        assert sum(asked(site).values()) == fetched
        assert ("start `penstock run` again for a new budget" in done.err) == bool(code)
    assert asked(site) == {f"/p/{n}": 1 for n in range(10)}


def test_a_page_of_1000_links_is_followed_up_to_each_limit(project: Project, site: Site) -> None:
    site.serve("/p/*", product(1))
    site.serve("/p/0", product(0, more=links(*(f"/p/{n}" for n in range(1, 1001)))))
    project.set(limits_links_per_page="40", limits_pages_per_trace="31")
    project.push(site.url("/p/0"))
    project.run()
    assert sum(asked(site).values()) == 31
    counters = project.status()["counters"]
    assert counters["followed_over_page"] == 960
    assert counters["followed_over_trace"] == 10


def test_bytes_of_a_day_delay_the_rest_until_the_utc_day_ends(project: Project, site: Site) -> None:
    for n in range(8):
        site.serve(f"/p/{n}", LARGE)
    project.set(limits_bytes_per_day="250KiB", fetch_concurrency="1")
    project.push(*(site.url(f"/p/{n}") for n in range(8)))
    done = project.run(expect=1)
    assert "the byte budget of this UTC day is used up, 5 events waiting" in done.err
    assert "wait until 00:00 UTC, or raise limits.bytes_per_day" in done.err
    assert sum(asked(site).values()) == 3, "the last page exceeds the limit"
    (delay,) = project.status()["delays"]
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert datetime.fromisoformat(delay["next_at"]) == midnight + timedelta(days=1)
    project.run(expect=1)
    assert sum(asked(site).values()) == 3, "the next run has the same day"
    project.set(limits_bytes_per_day="10MiB")
    project.run()
    assert asked(site) == {f"/p/{n}": 1 for n in range(8)}


def test_bytes_of_a_proxy_pool_delay_only_the_events_of_its_route(
    project: Project,
    site: Site,
    proxy: Proxy,  # noqa: F811
) -> None:
    for n in range(12):
        site.serve(f"/p/{n}", LARGE)
    project.set(
        proxies_home_urls=proxy.dsn, proxies_home_bytes_per_day="250KiB", fetch_concurrency="1"
    )
    project.push(*(site.url(f"/p/{n}") for n in range(8)), options=("--pool", "home"))
    project.push(*(site.url(f"/p/{n}") for n in range(8, 12)))
    done = project.run(expect=1)
    assert "the byte budget of proxy pool home is used up" in done.err
    assert "proxies.home.bytes_per_day" in done.err
    fetched = asked(site)
    assert {f"/p/{n}" for n in range(8, 12)} < set(fetched)
    assert sum(fetched.values()) == 4 + 3
    assert waits(project) == {"budget:bytes:pool:home": 5}
    project.set(proxies_home_bytes_per_day="10MiB")
    project.run()
    assert asked(site) == {f"/p/{n}": 1 for n in range(12)}
    assert {project.event(site.url(f"/p/{n}"))["status"] for n in range(12)} == {"success"}


def test_an_event_of_a_geo_takes_the_next_pool_when_one_is_used_up(
    project: Project,
    site: Site,
    proxy: Proxy,  # noqa: F811
) -> None:
    for n in range(8):
        site.serve(f"/p/{n}", LARGE)
    project.set(
        proxies_one_urls=proxy.dsn,
        proxies_one_geo="de",
        proxies_two_urls=proxy.dsn.replace("hunter2-", "hunter2%2D"),  # another text of the same
        proxies_two_geo="de",
        limits_pool_bytes_per_day="150KiB",
        fetch_concurrency="1",
    )
    project.push(*(site.url(f"/p/{n}") for n in range(8)), options=("--geo", "de"))
    project.run(expect=1)
    assert sum(asked(site).values()) == 4, "two pages of each pool"
    assert sum(waits(project).values()) == 4


def test_budgets_hold_with_one_process_for_each_role(project: Project, site: Site) -> None:
    site.serve("/p/*", product(1))
    site.serve("/p/0", product(0, more=links(*(f"/p/{n}" for n in range(1, 101)))))
    project.set(limits_pages_per_host="10")
    project.push(site.url("/p/0"))
    running = [
        project.start("run", "shop.py", "--role", role) for role in ("fetch", "extract", "sink")
    ]
    wait_for(lambda: project.total()["success"] == 10, "ten pages", every=0.2)
    project.push(site.url("/p/200"))
    wait_for(
        lambda: waits(project) == {f"budget:pages:host:127.0.0.1:{site.port}": 1},
        "the pushed event waits",
        every=0.2,
    )
    for each in running:
        stop(each)
    assert sum(asked(site).values()) == 10
    assert project.status()["counters"]["followed_over_host"] == 91


def test_a_run_ends_while_an_event_waits_for_a_budget_and_links_wait_for_the_event(
    project: Project, site: Site
) -> None:
    site.serve("/p/a", product("a", more=links(*(f"/p/{n}" for n in range(30)))))
    site.serve("/p/b", product("b"))
    for n in range(30):
        site.serve(f"/p/{n}", product(n))
    project.set(limits_pages_per_day="1", intake_max_pending="2")
    project.push(site.url("/p/a"))
    project.push(site.url("/p/b"))
    done = project.run("--workers", "2", expect=1)
    assert "the page budget of this UTC day is used up, 1 event waiting" in done.err
    status = project.status()
    assert (status["total"]["success"], status["total"]["delayed"]) == (1, 1)
    assert status["links"]["waiting"] == 30
    project.set(limits_pages_per_day="100")
    project.run("--workers", "2")
    assert project.total()["accepted"] == project.total()["success"] == 32
    project.doctor()
