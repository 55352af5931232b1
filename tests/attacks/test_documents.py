"""Hostile documents of sources: feeds, sitemaps, URL lists, API pages, and pages with selectors."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.attacks.harness import Attack, Ground, survives
from tests.e2e.harness import SHOP
from tests.unit.test_doubling_parsers import CSV, FEEDS, JSON, SITEMAPS, Make

from penstock.testing.web import Reply, Request

SIZE = 4 << 20  # bytes of a document, before it is compressed
EMPTY_MEMBER = gzip.compress(b"", mtime=0)

# The pattern of `slow` needs exponential time for a text of `a`.
SLOW_EXTRACTOR = """
import re

@shop.extract(match="*/slow/*")
def slow(page: Page):
    yield {"found": bool(re.search(r"(a+)+$", page.css("p::text").get()))}

@shop.extract(match="*/deep/*")
def deep(page: Page):
    yield {"n": len(page.xpath("//div[.//div[.//div]]"))}

@shop.extract(match="*/wide/*")
def wide(page: Page):
    yield {"n": len(page.css("body"))}
"""


def source(kind: str, documents: Sequence[bytes], content_type: str, options: str = "") -> Attack:
    """Return an attack with a source for each document. The sources read again every second."""

    def attack(g: Ground) -> Sequence[str]:
        text = SHOP
        for n, document in enumerate(documents):
            answer = Reply(200, {"content-type": content_type}, document)
            g.hostile.web.route(f"/d/{n}", answer)
            url = g.hostile.url(f"/d/{n}")
            text += f'shop.source("{kind}+{url}", name="s{n}", every="1s"{options})\n'
        g.project.write("shop.py", text)
        return []

    return attack


def received(requests: int, g: Ground) -> bool:
    return len([e for e in list(g.hostile.web.entries) if e.path != "/robots.txt"]) >= requests


def shapes(of: dict[str, Make], *names: str) -> list[bytes]:
    return [of[name](SIZE) for name in names]


def many_members() -> bytes:
    return EMPTY_MEMBER * (SIZE // len(EMPTY_MEMBER))


SOURCES: dict[str, tuple[str, Callable[[], list[bytes]], str, str]] = {
    "feeds": (
        "feed",
        lambda: shapes(FEEDS, "long xml:base", "xml:base of links", "attributes", "namespaces"),
        "application/rss+xml",
        ', first="none"',
    ),
    "sitemaps": (
        "sitemap",
        lambda: [
            *shapes(SITEMAPS, "long name above tiny elements", "open comment", "URLs"),
            gzip.compress(SITEMAPS["tiny elements"](10 * SIZE)),
            many_members(),
        ],
        "application/xml",
        ', emit=["changed"]',
    ),
    "JSON": (
        "api",
        lambda: [
            *shapes(JSON, "numbers", "objects", "nesting", "digits"),
            JSON["numbers"](SIZE // 8),
        ],
        "application/json",
        ', first="none"',
    ),
    "CSV": (
        "api",
        lambda: shapes(CSV, "short rows below a wide header", "carriage returns", "open quote"),
        "text/csv",
        ', first="none"',
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_hostile_documents_of_sources_do_not_disturb_other_hosts(tmp_path: Path, name: str) -> None:
    kind, make, content_type, options = SOURCES[name]
    documents = make()
    survives(
        tmp_path,
        source(kind, documents, content_type, options),
        until=partial(received, len(documents)),
    )


def test_hostile_url_lists_do_not_disturb_other_hosts(tmp_path: Path) -> None:
    lists = {
        "members.csv.gz": many_members(),
        # Each of these lines becomes a dead letter, so there are few of them.
        "quotes.csv": b"url\n" + b'x","\n' * 20_000,
        "objects.jsonl": JSON["objects"](SIZE // 5) + b"\n" + b"[" * SIZE,
        "lines.txt": b"\n " * (SIZE // 2),
    }

    def attack(g: Ground) -> Sequence[str]:
        inbox = g.project.dir / "inbox"
        inbox.mkdir()
        for name, body in lists.items():
            (inbox / name).write_bytes(body)
        g.project.write("shop.py", SHOP + 'shop.source("seeds:inbox/", name="lists", every="1s")\n')
        return [g.hostile.url("/p/1")]

    survives(tmp_path, attack, until=partial(received, 1))


def test_slow_selectors_and_hostile_pages_do_not_disturb_other_hosts(tmp_path: Path) -> None:
    # The parser merges the attributes of these tags in quadratic time and memory.
    wide = b"".join(b"<body a%d>" % n for n in range(40_000))
    bodies = {"slow": b"<p>" + b"a" * 40 + b"!", "deep": b"<div>" * 4000, "wide": wide}

    def answer(request: Request) -> Reply:
        _, kind, _ = request.path.split("/")
        return Reply(200, {"content-type": "text/html"}, bodies[kind])

    def attack(g: Ground) -> Sequence[str]:
        g.project.write("shop.py", SHOP + SLOW_EXTRACTOR)
        for kind in bodies:
            g.hostile.web.route(f"/{kind}/*", answer)
        return [g.hostile.url(f"/{kind}/{n}") for n in range(3) for kind in bodies]

    limits = {"extract_seconds": "1", "extract_memory": "64MiB"}
    survives(tmp_path, attack, until=partial(received, 9), **limits)
