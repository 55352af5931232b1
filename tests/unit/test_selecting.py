"""Queries on a page: CSS and XPath as in parsel, charsets, JSON-LD, links and hostile pages."""

from __future__ import annotations

import time

import pytest

from penstock.authoring.page import Page
from penstock.authoring.selectors import decode, parse

HTML = b"""<!doctype html><html lang=en><head><title>Shop</title></head><body>
<h1 class="t big" id=x>Lamp <b>bold</b> tail<!--c--></h1>
<ul><li class=a>one</li><li class=b data-n=2>two</li><li class=a>three</li></ul>
<div class=desc>a<div>b</div>c</div><input disabled>
<p>Price: <span class=price content="9.90">EUR&nbsp;9.90</span> or <span class=price>10</span></p>
<a href="/1">x</a><a name=q>y</a><a href=2>z</a></body></html>"""


def page(body: bytes = HTML, url: str = "https://shop.test/a/b", **headers: str) -> Page:
    return Page(url, body, headers={k.replace("_", "-"): v for k, v in headers.items()})


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("h1", ['<h1 class="t big" id="x">Lamp <b>bold</b> tail<!--c--></h1>']),
        ("h1::text", ["Lamp ", " tail"]),
        ("h1 ::text", ["bold"]),
        ("h1 *::text", ["bold"]),
        ("h1::attr(class)", ["t big"]),
        ('h1::attr("id")', ["x"]),
        ("html::attr(lang)", ["en"]),
        ("input::attr(disabled)", [""]),
        ("a::attr(href)", ["/1", "2"]),
        ("li.a::text, li.b::text", ["one", "two", "three"]),
        ("li.a::text, li.b::attr(data-n)", ["one", "2", "three"]),
        ("li.b::attr(data-n), h1::text, b", ["Lamp ", "<b>bold</b>", " tail", "2"]),
        (".desc::text, .desc div::text", ["a", "b", "c"]),
        ("div::text", ["a", "b", "c"]),
        ("h1:not(.a, .b)::text", ["Lamp ", " tail"]),
        ('li:contains("wo")::text', ["two"]),
        ("li:nth-child(2)::text", ["two"]),
        (".none::text", []),
        ('[data-n="::text"]::text', []),
        ("body > ::attr(id)", ["x"]),
    ],
)
def test_css_gives_the_results_of_parsel(query: str, expected: list[str]) -> None:
    found = page().css(query)
    assert found.getall() == expected
    assert found.get() == (expected[0] if expected else None)
    assert [s.get() for s in page().css(query)] == expected
    assert len(page().css(query)) == len(expected)


def test_get_returns_the_first_match_with_the_attribute_or_a_text() -> None:
    body = b"<h1><img></h1><h1><b>in</b>Title</h1><a>x</a><a href=y>z</a>"
    assert page(body).css("h1::text").get() == "Title"
    assert page(body).css("a::attr(href)").get() == "y"
    assert page(b"<div><b>x</b>tail</div>").css("body *::text").get() == "x"
    assert page(body).css("h2::text").get("none") == "none"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("//h1/text()", ["Lamp ", " tail"]),
        ("//a/@href", ["/1", "2"]),
        ("string(//title)", ["Shop"]),
        ("count(//li)", ["3.0"]),
        ("boolean(//li)", ["1"]),
        ("//nothing", []),
        ("body/h1/@id", ["x"]),
        ("//li[re:test(@class, '^b$')]/text()", ["two"]),
        ("//h1/b", ["<b>bold</b>"]),
        ("//h1/comment()", ["<!--c-->"]),
    ],
)
def test_xpath_gives_nodes_attributes_texts_and_values(query: str, expected: list[str]) -> None:
    assert page().xpath(query).getall() == expected
    assert page().xpath(query).get() == (expected[0] if expected else None)


def test_xpath_takes_variables() -> None:
    assert parse(HTML).xpath("//li[@class=$c]/text()", c="b").getall() == ["two"]


def test_a_query_on_an_element_matches_it_and_its_descendants_only() -> None:
    first = page().css("ul").first
    assert first is not None
    assert [li.css("::text").get() for li in first.css("li")] == ["one", "two", "three"]
    assert [li.css("li::attr(class)").get() for li in first.css("li")] == ["a", "b", "a"]
    assert first.css("ul > li.b::text").getall() == ["two"]
    assert first.css("body li").getall() == []
    assert first.css("body li::text").get() is None
    assert first.xpath("li[2]/text()").get() == "two"
    assert page().css("ul").css("li").xpath("@class").getall() == ["a", "b", "a"]


def test_a_list_of_selectors_behaves_like_a_list() -> None:
    items = page().css("li")
    assert len(items) == 3
    assert bool(items)
    assert not page().css("nope")
    assert items[-1].text == "three"
    assert items[1:].getall() == ['<li class="b" data-n="2">two</li>', '<li class="a">three</li>']
    assert items.attrib == {"class": "a"}
    assert items[1].attrib == {"class": "b", "data-n": "2"}
    assert page().css("nope").attrib == {}
    assert page().css("nope").first is None
    assert page().css("h1")[0].text == "Lamp bold tail"


def test_a_query_on_a_string_is_empty() -> None:
    text = page().css("h1::text")
    assert text.css("b").getall() == []
    assert text.xpath("..").get() is None
    assert text.attrib == {}


def test_regular_expressions_give_groups_or_complete_matches() -> None:
    prices = page().css(".price::text")
    assert prices.re(r"\d+") == ["9", "90", "10"]
    assert prices.re(r"(\d+)\.(\d+)") == ["9", "90"]
    assert prices.re_first(r"(?P<extract>\d+)$") == "90"
    assert prices.re_first("x", "none") == "none"
    assert page().css("span.price").re_first(r"EUR\s") == "EUR\xa0"


@pytest.mark.parametrize(
    "query",
    [
        "h1[",
        "",
        "a:nope",
        "h1::before",
        "h1,",
        "a::attr()",
        "a::attr(href) b",
        "h1::text::text",
        "li:not(a::text)",
    ],
)
def test_an_invalid_css_selector_is_an_error_that_names_it(query: str) -> None:
    with pytest.raises(ValueError, match="CSS selector") as e:
        page().css(query)
    assert repr(query) in str(e.value)


@pytest.mark.parametrize("query", ["//h1[", "", "nofunc(1)", "//x:y", "$v"])
def test_an_invalid_xpath_is_an_error_that_names_it(query: str) -> None:
    with pytest.raises(ValueError, match="XPath") as e:
        page().xpath(query).get()
    assert repr(query) in str(e.value)


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        ("é".encode(), "text/html; charset=utf-8", "é"),
        ("é".encode("latin-1"), 'text/html; charset="ISO-8859-1"', "é"),
        ("é".encode(), None, "é"),
        (b"\xef\xbb\xbf" + "é".encode(), "text/html; charset=latin1", "é"),
        ("é".encode("utf-16-le"), "text/html; charset=utf-16le", "é"),
        (b"\xff\xfe" + "é".encode("utf-16-le"), "text/html; charset=utf-8", "é"),
        ("<meta charset=windows-1251>я".encode("windows-1251"), None, "я"),
        ("é".encode(), "text/html; charset=nonsense", "é"),
        ("é".encode(), "text/html; charset=", "é"),
        ("é".encode(), "text/html; charset=\u00e9\u2028", "é"),
        (b"\xff", "text/html; charset=utf-8", "\ufffd"),
        ("€".encode("windows-1252"), "text/html; charset=latin1", "€"),
        (b"", None, ""),
    ],
)
def test_the_charset_is_taken_from_bom_header_meta_or_content(
    body: bytes, content_type: str | None, expected: str
) -> None:
    assert decode(body, content_type).endswith(expected)
    assert parse(body, content_type).text == expected


def test_json_ld_is_flattened_and_a_broken_block_is_skipped() -> None:
    body = b"""\
<script type="application/ld+json">{"@context":"x","@graph":[{"@type":"A"},[{"@type":"B"}]]}\
</script>
    <script type="application/ld+json">{broken</script>\
<script type="APPLICATION/LD+JSON; charset=utf-8">[{"@type":"C","n":"a
b"},3]</script><script type="application/ld+json">{"v":NaN}</script>\
<script type="application/ld+json"></script>
    <script type="application/ld+json">{"@id":"d","@graph":{"@type":"E"}}</script>"""
    body += b'<script type="application/ld+json">' + b"[" * 100_000 + b"</script>"
    found = page(body).jsonld()
    assert found == [
        {"@type": "A"},
        {"@type": "B"},
        {"@type": "C", "n": "a\nb"},
        {"@id": "d"},
        {"@type": "E"},
    ]


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (b"", "https://shop.test/a/b"),
        (b"<base href=/c/>", "https://shop.test/c/"),
        (b"<base target=x><base href='https://cdn.test/d'>", "https://cdn.test/d"),
        (b"<base href='javascript:x'>", "https://shop.test/a/b"),
        (b"<base href='http://['>", "https://shop.test/a/b"),
    ],
)
def test_links_are_relative_to_the_base_element_if_it_is_valid(base: bytes, expected: str) -> None:
    assert page(base + b"<p>").base_url == expected


def test_followed_links_are_absolute_canonical_unique_and_in_order() -> None:
    body = b"""<a class=r href="../x?b=1#f">1</a><a class=r href="../x?b=1">same</a>\
<a class=r href="HTTP://Other.test:80">2</a><a class=r>no</a>
    <a class=r href="mailto:a@b">m</a><a class=r href="javascript:x">j</a>\
<a class=r href="#top">t</a><a class=r href="">e</a><a class=r href="http://[">b</a>
    <a class=r href=" y ">3</a><img class=i src=z.png>"""
    expected = ["https://shop.test/x?b=1", "http://other.test/", "https://shop.test/a/y"]
    assert [f.url for f in page(body).follow("a.r")] == expected
    assert [f.url for f in page(body).follow("a.r::attr(href)")] == expected
    assert [f.url for f in page(body).follow(page(body).css("a.r"))] == expected
    assert [f.url for f in page(body).follow("img::attr(src)")] == ["https://shop.test/a/z.png"]
    assert [f.url for f in page(body).follow(["/p", None, 3, "/p", "ftp://x/"])] == [
        "https://shop.test/p"
    ]
    assert [f.url for f in page(body).follow("https://one.test")] == ["https://one.test/"]


@pytest.mark.parametrize(
    "body",
    [
        b"<div>" * 200_000 + b"<span>x</span>",
        b"<b>" * 50_000 + b"x",
        b"\0" * 1_000_000,
        b"<p>abc</p>" * 1_000_000,
        b"<a href=x " + b"y=1 " * 100_000 + b">z",
    ],
    ids=["nested", "formatting", "nul", "10MB", "attributes"],
)
def test_a_hostile_page_is_parsed_in_reasonable_time(body: bytes) -> None:
    started = time.process_time()
    hostile = page(body)
    for query in ("h1::text", "div span::text", "div ::text", "a::attr(href)", "*::text"):
        hostile.css(query).get()
    assert isinstance(hostile.css("body").get(), str)
    assert isinstance(hostile.xpath("//span/text()").getall(), list)
    assert hostile.jsonld() == []
    assert isinstance(list(hostile.follow("a")), list)
    assert time.process_time() - started < 60  # quadratic work would take hours
