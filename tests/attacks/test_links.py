"""Link bombs: few pages with very many links."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.attacks.harness import Ground, ground, survives
from tests.e2e.harness import product, wait_for
from tests.servers import Handle

from penstock.testing.web import Reply, Request, reply

PAGES, LINKS = 6, 40_000
MAX_PENDING = "100"
LONG_LINKS = 200
# A query of which canonicalisation sorts the parameters and decodes the bytes.
LONG_QUERY = "".join(f"&z{n}=%7e%e2%82%ac" for n in range(80, 0, -1))


def bomb(g: Ground) -> Sequence[str]:
    def answer(request: Request) -> Reply:
        _, _, name = request.path.rpartition("/")
        if "-" in name:
            return reply(product(name))
        more = "".join(f'<a class="related" href="/p/{name}-{n}">m</a>' for n in range(LINKS))
        return reply(product(name, more=more))

    g.hostile.web.route("/p/*", answer)
    return [g.hostile.url(f"/p/{n}") for n in range(PAGES)]


def bomb_of_long_urls(g: Ground) -> Sequence[str]:
    def answer(request: Request) -> Reply:
        _, _, name = request.path.rpartition("/")
        if "-" in name:
            return reply(product(name))
        more = "".join(
            f'<a class="related" href="/p/{name}-{n}?{LONG_QUERY}">m</a>' for n in range(LONG_LINKS)
        )
        return reply(product(name, more=more))

    g.hostile.web.route("/p/*", answer)
    return [g.hostile.url(f"/p/{n}") for n in range(PAGES)]


def all_bombs_received(g: Ground) -> bool:
    asked = {e.path for e in list(g.hostile.web.entries)}
    return {f"/p/{n}" for n in range(PAGES)} <= asked


def test_a_link_bomb_does_not_disturb_other_hosts(tmp_path: Path) -> None:
    # There is room for the pages of the healthy site, and for about 250 links.
    survives(tmp_path, bomb, until=all_bombs_received, intake_max_pending="2500")


def test_links_with_long_urls_do_not_disturb_other_hosts(tmp_path: Path) -> None:
    survives(tmp_path, bomb_of_long_urls, until=all_bombs_received, intake_max_pending="5000")


@pytest.mark.parametrize(
    "store", ["sqlite", pytest.param("postgres", marks=pytest.mark.server("postgres"))]
)
def test_a_push_is_answered_within_5_s_while_a_link_bomb_is_processed(
    tmp_path: Path, store: str, server: Callable[[str], Handle]
) -> None:
    with ground(tmp_path / "project") as g:
        g.project.set(pace_rate="20", intake_max_pending=MAX_PENDING)
        if store == "postgres":
            namespace = f"t{g.project.mark[:12]}"
            g.project.set(broker_url=server("postgres").url, namespace=namespace)
        g.project.push(*bomb(g))
        running = g.project.start("run", "shop.py")
        times = []
        wait_for(lambda: g.hostile.asked("/p/0") or running.ended, "a bomb is requested", 120)
        for n in range(20):
            began = time.monotonic()
            g.project.push(g.healthy.url(f"/p/{n}"))
            times.append(time.monotonic() - began)
            total = g.project.status()["total"]
            open_ = total["pending"] + total["in_flight"] + total["delayed"]
            assert open_ <= int(MAX_PENDING), total
        links = g.project.status()["links"]
        print(times, links)
        assert max(times) < 5.0
        assert all_bombs_received(g)
        assert links["waiting"] > LINKS
        wait_for(
            lambda: (
                len({e.path for e in list(g.healthy.web.entries) if e.path != "/robots.txt"}) == 20
                or running.ended
            ),
            "the pushed pages are fetched",
            120,
        )
        assert not running.ended, running.output
        running.kill()
