"""Polling sources do not request an address that the guard forbids.

Neither by URL, redirect, child sitemap and robots.txt, nor by the link to the next page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.sources.web_rig import run

from penstock.authoring.pipeline import Pipeline
from penstock.config import files as config
from penstock.errors import SourceDown
from penstock.model import Failure
from penstock.runtime.sources_and_sinks import source_to_look_at
from penstock.testing.web import Reply, Request, Web, json_reply, reply

FEED = b"<rss><channel><item><guid>1</guid><link>https://shop.test/1</link></item></channel></rss>"
SITEMAP = b"<urlset><url><loc>https://shop.test/1</loc></url></urlset>"


def index(child: str) -> bytes:
    return f"<sitemapindex><sitemap><loc>{child}</loc></sitemap></sitemapindex>".encode()


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("feed+http://INSIDE/feed", {}),
        ("sitemap+http://INSIDE/sitemap.xml", {}),
        ("api+http://INSIDE/api", {}),
        ("feed+http://OUTSIDE/redirect/feed", {}),
        ("sitemap+http://OUTSIDE/redirect/sitemap.xml", {}),
        ("api+http://OUTSIDE/redirect/api", {}),
        ("sitemap+http://OUTSIDE/index.xml", {"same_site": False}),
        ("sitemap+http://OUTSIDE/", {"same_site": False}),
        ("api+http://OUTSIDE/pages", {"items": "items", "next": "next"}),
    ],
)
@pytest.mark.parametrize("may", [False, True], ids=["forbidden", "allowed"])
def test_a_polling_source_requests_only_addresses_that_the_guard_allows(
    source: str, options: dict[str, Any], may: bool, tmp_path: Path
) -> None:
    async def work() -> None:
        asked: list[str] = []

        def inside(request: Request) -> Reply:
            asked.append(request.path)
            if request.path == "/robots.txt":
                return reply("", status=404)
            return reply(
                FEED if "feed" in request.path else SITEMAP if "sitemap" in request.path else b"[]"
            )

        async with Web() as web:
            port = await web.listen(handler=inside)

            def outside(request: Request) -> Reply:
                there = f"http://127.0.0.1:{port}"
                if request.path.startswith("/redirect"):
                    return reply(
                        "", status=302, location=there + request.path.removeprefix("/redirect")
                    )
                if request.path == "/robots.txt":
                    return (
                        reply(f"Sitemap: {there}/sitemap.xml\n")
                        if source.endswith("OUTSIDE/")
                        else reply("", status=404)
                    )
                return (
                    reply(index(there + "/sitemap.xml"))
                    if request.path == "/index.xml"
                    else json_reply({"items": [], "next": there + "/api"})
                )

            web.route("/*", outside)
            pipeline = Pipeline("test")
            pipeline.source(
                source.replace("INSIDE", f"127.0.0.1:{port}").replace(
                    "OUTSIDE", f"127.0.0.1:{web.port}"
                ),
                name="it",
                **options,
            )
            allowed = f"127.0.0.1:{web.port}" + (f",127.0.0.1:{port}" if may else "")
            settings = config.load(
                {}, {"PENSTOCK_NET_ALLOW": allowed, "PENSTOCK_PACE_RATE": "unlimited"}, tmp_path
            ).config
            async with source_to_look_at(settings, pipeline.sources[0]) as (it, _):
                try:
                    async for _ in it.read(None):
                        pass
                except (Failure, SourceDown):
                    pass
        assert bool(asked) == may, asked

    run(work())
