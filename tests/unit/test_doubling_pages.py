"""CPU time and memory of pages, selectors and links grow at most linearly with the page.

Repeated `<body>` and `<html>` tags are an exception. The parser needs quadratic time to merge their
attributes. `tests/attacks/test_documents.py` shows that the limits of child processes stop it.
"""

from __future__ import annotations

import pytest
from tests.unit.doubling import grows_linearly
from tests.unit.test_doubling_parsers import Make, repeat

from penstock.authoring.page import Page

pytestmark = pytest.mark.slow
# A tree of 512 KiB fits into the cache of the processor, and larger trees do not. So growth is
# judged from this time on. Quadratic work is still found.
MIN_SECONDS = 0.02

PAGES: dict[str, Make] = {
    "siblings": repeat(b"<body>", b"<p class='a b'>x</p>"),
    "nested elements": repeat(b"<body>", b"<span class=a>"),
    "badly nested elements": repeat(b"<body>", b"<b><i></b>x</i>"),
    "links": repeat(b"<body>", b"<a href=/p/%d>x</a>"),
    "cells": repeat(b"<body>", b"<table><tr><td>"),
    "attributes": repeat(b"<body><p", b" a%d=b", b">"),
    "entities": repeat(b"<body>", b"&notanentity"),
    "end tags": repeat(b"<body>", b"</p>"),
    "JSON-LD": repeat(b"", b'<script type="application/ld+json">{"@type":"a"}</script>'),
    "a graph": repeat(
        b'<script type="application/ld+json">{"@graph":[', b'{"a":1},', b"{}]}</script>"
    ),
    "another charset": repeat(b"\xff\xfe", "é<p>".encode("utf-16-le")),
}


@pytest.mark.parametrize("shape", PAGES)
def test_a_page_and_its_selectors_take_linear_time_and_memory(shape: str) -> None:
    grows_linearly(PAGES[shape], read, min_seconds=MIN_SECONDS)


def read(body: bytes) -> None:
    page = Page("https://shop.example/", body)
    page.css("p.a::text").get()
    page.css("div p > span::text").getall()
    page.xpath("//a/@href").getall()
    page.jsonld()
    list(page.follow("a"))
