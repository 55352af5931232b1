"""A query on the prefix of a page gives the result of the full page, for random invalid HTML."""

from __future__ import annotations

import random
import re

import pytest
from turbohtml import parse as parse_html

from penstock.authoring import queries
from penstock.authoring.prefix import SMALLEST, Beginning, beginning
from penstock.authoring.selectors import FORGETTING, parse

UTF8 = "text/html; charset=utf-8"
TAGS = re.findall(
    r"\S+",
    """div p span a b i em nobr h1 ul li table caption tbody tr td th select option button form
    template svg math foreignObject title script style textarea noscript dl dd dt br img hr input
    main section article pre center ruby rt object marquee desc mi annotation-xml label""",
)
ODD = [
    "<!-- c > c -->",
    "<!-- <p class=x>",
    "-->",
    "<![CDATA[x>]]>",
    "<selectedcontent></selectedcontent>",
    "<?pi >",
    "</body>",
    "</html>",
    "</head>",
    "<head>",
]
SELECTORS = [
    ".x",
    "p.x::text",
    ".y::attr(d)",
    "div .x",
    "div > .x::text",
    "b > p",
    "p, .z",
    "td.x",
    "b .y",
    "span::text",
    "a.z::attr(d)",
    "ul li",
    "h1 + p",
    "h1 ~ .x",
    "table .x",
    "[d]",
    "a",
    "select",
    "option::text",
    "svg .x",
    "* > .y::text",
    "tr",
    "div[d] .x, b .z",
    "div div::attr(d)",
    "li:first-child",
]


def soup(rng: random.Random, pieces: int) -> str:
    out = []
    for _ in range(pieces):
        kind, tag = rng.random(), rng.choice(TAGS)
        if kind < 0.5:
            attributes = f" class={rng.choice('xyz')}" * (
                rng.random() < 0.5
            ) + f" d={rng.randrange(9)}" * (rng.random() < 0.3)
            attributes += " shadowrootmode=open" * (
                tag == "template" and rng.random() < 0.5
            ) + " selected" * (tag == "option" and rng.random() < 0.5)
            out.append(f"<{tag}{attributes}>")
        elif kind < 0.75:
            out.append(f"</{tag}>")
        else:
            out.append(
                rng.choice(["t", "  ", " u ", "&amp;", "a>b", "é"])
                if kind < 0.95
                else rng.choice(ODD)
            )
    return "".join(out)


@pytest.mark.parametrize("seed", range(8))
def test_a_result_from_the_prefix_equals_the_result_from_the_full_page(seed: int) -> None:
    rng = random.Random(seed)
    compiled = [queries.css(selector) for selector in SELECTORS]
    answered = 0
    for _ in range(400):
        start = rng.choice(
            ["", "<p>", "<!doctype html><body>", "<!doctype html><title>T</title><body>"]
        ) + soup(rng, rng.randrange(3, 30))
        page = (start + soup(rng, rng.randrange(1, 14))).encode()
        cut = page.rfind(b">", 0, len(start.encode())) + 1
        first, full = (
            Beginning(parse_html(page[:cut], encoding="utf-8")),
            parse_html(page, encoding="utf-8"),
        )
        for query in compiled:
            if (value := first.first(query)) is not None:
                answered += 1
                assert value == query.first(full), (
                    f"{query.source} of {page[:cut]!r} and {page[cut:]!r}"
                )
    assert answered > 100


def long(start: str, end: str = "") -> bytes:
    return (start + "<p>words</p>" * 4000 + end).encode()


@pytest.mark.parametrize(
    ("start", "selector", "end", "answer"),
    [
        ("<body><h1 class=x>A</h1>", ".x::text", "", "A"),
        ("<body><h1 class=x>A</h1>", ".x::text", "<h1 class=x>B</h1>", "A"),
        ("<body><h1>A</h1>", ".late::text", "<i class=late>L</i>", "L"),
        ("<body><p><b class=x>A</p>", ".x::text", "</b>", "A"),
        (
            "<body><table><tr><td class=x>in</td>",
            ".x::text",
            "<div class=x>out</div>",
            "out",  # the parser moves a div inside a table to before the table
        ),
        (
            "<p class=x>A</p>",
            ".y::attr(class)",
            "<body class=y>",
            "y",  # a second body tag adds attributes to the first
        ),
        ("<p class=y>A</p>", ".y::attr(class)", "<BODY class='y z'>", "y z"),
        ("<p class=x>A</p>", "html::attr(lang)", "<html lang=de>", "de"),
        ("<title>a > b", "title::text", "</title>", None),
    ],
)
def test_the_first_match_of_a_long_page_equals_that_of_the_full_page(
    start: str, selector: str, end: str, answer: str | None
) -> None:
    body = long(start, end)
    # Without a charset in the header, the full page is parsed.
    query, full = queries.css(selector), parse(body)
    assert parse(body, UTF8).css(selector).get() == query.first(full.root)  # type: ignore[arg-type]
    if answer is not None:
        assert parse(body, UTF8).css(selector).get() == answer


def test_a_frameset_that_replaces_the_body_is_detected() -> None:
    body = b"<p class=x></p>" + b"<p></p>" * 6000 + b"<FrameSet><frame class=y>"
    assert parse(body, UTF8).css(".x").get() is None
    assert parse(body, UTF8).css(".y::attr(class)").get() == "y"


@pytest.mark.parametrize("encoding", ["utf-16", "iso-2022-jp", "windows-1252", None])
def test_a_prefix_is_used_only_for_utf8_pages_that_are_long_enough(encoding: str | None) -> None:
    assert beginning(long("<body>"), encoding, SMALLEST) is None
    assert beginning(long("<body>"), "UTF-8", SMALLEST) is not None
    assert beginning(b"\xff\xfe" + long("<body>"), "utf-8", SMALLEST) is None
    assert beginning(b"x" * 8 * SMALLEST, "utf-8", SMALLEST) is None
    assert beginning(b"<p>" * (SMALLEST // 3), "utf-8", SMALLEST) is None


def test_a_selector_learns_how_long_its_prefix_must_be() -> None:
    queries.css.cache_clear()
    first = queries.css("h1::text")
    body = long("<body><h1>A</h1>" + "<p>words</p>" * 1000 + "<i>M</i>")
    assert parse(body, UTF8).css("h1::text").get() == "A"
    assert first.reach == SMALLEST
    for _ in range(3 * FORGETTING):
        page = parse(body, UTF8)
        assert (page.css("h1::text").get(), page.css("i::text").get()) == ("A", "M")
        assert 12_000 < first.reach <= len(body) // 2


def test_a_selector_skips_the_prefix_if_the_full_page_is_parsed_anyway() -> None:
    queries.css.cache_clear()
    early = queries.css("h1::text")
    body = long("<body><h1>A</h1>", "<i>L</i>")
    page = parse(body, UTF8)
    assert (page.css("h1::text").get(), page.css("i::text").get()) == ("A", "L")
    assert early.reach == len(body)
    for _ in range(FORGETTING):
        assert parse(body, UTF8).css("h1::text").get() == "A"
    assert early.reach < len(body) // 2  # the prefix is tried again and is sufficient


def test_getall_uses_the_full_page() -> None:
    page = parse(long("<body><h1>A</h1>", "<h1>B</h1>"), UTF8)
    assert page.css("h1::text").get() == "A"
    assert page.css("h1::text").getall() == ["A", "B"]
    assert [s.get() for s in page.xpath("//h1/text()")] == ["A", "B"]
