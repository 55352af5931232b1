"""Pipelines in TOML: the same records as in Python, and errors that name their path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import Page
from penstock.authoring.load import load
from penstock.authoring.toml import compile_toml
from penstock.errors import ConfigError
from penstock.extraction.run import run

SHOP_PY = """\
from penstock import Page, Pipeline

shop = Pipeline("shop")

@shop.extract(match="*/product/*", version=1, key="sku")
def product(page: Page):
    yield {
        "sku": page.css("[data-sku]::attr(data-sku)").get(),
        "title": page.css("h1::text").get(),
        "price": page.css(".price::text").get(),
    }
    yield from page.follow("a.related")

shop.sink("jsonl:products.jsonl")
"""
SHOP_TOML = """\
[pipeline]
name = "shop"
[[extract]]
match = "*/product/*"
version = 1
key = "sku"
follow = ["a.related"]
[extract.fields]
sku = "[data-sku]::attr(data-sku)"
title = "h1::text"
price = { css = [".price::text", "[data-price]::attr(data-price)"], as = "decimal" }
[[sink]]
url = "jsonl:products.jsonl"
"""
HTML = b"""<!doctype html><body data-price="20.00"><h1>Oak lamp</h1>\
<div data-sku="L-7">In stock</div><span class="price">19.90</span>
<a class="related" href="/product/8">8</a><a class="related" href="9#x">9</a>\
<a href="/no">no</a></body>"""
URL = "https://shop.test/product/7"


def test_both_forms_of_the_example_give_the_same_records(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP_PY)
    (tmp_path / "shop.toml").write_text(SHOP_TOML)
    in_python, in_toml = load(tmp_path / "shop.py"), load(tmp_path / "shop.toml")
    assert in_python.sinks == in_toml.sinks
    assert in_python.name == in_toml.name == "shop"
    a, b = run(in_python, Page(URL, HTML)), run(in_toml, Page(URL, HTML))
    assert a.error == b.error == ""
    assert (
        [r.fields for r in a.records]
        == [b'{"sku":"L-7","title":"Oak lamp","price":"19.90"}']
        == [r.fields for r in b.records]
    )
    assert [(r.key, r.hash, r.version, r.index) for r in a.records] == [
        (r.key, r.hash, r.version, r.index) for r in b.records
    ]
    assert (
        [x.url for x in a.links]
        == [x.url for x in b.links]
        == ["https://shop.test/product/8", "https://shop.test/product/9"]
    )
    assert not run(in_toml, Page("https://shop.test/", HTML)).matched


def read(field: str, html: str = "", url: str = "https://x.test/a/") -> Any:
    """Return the value of one field, or the error. `field` is the TOML after the equals sign."""
    toml = f'[pipeline]\nname = "p"\n[[extract]]\n[extract.fields]\nv = {field}\n'
    out = run(compile_toml(toml.encode(), "p.toml"), Page(url, html.encode()))
    return out.error or msgspec.json.decode(out.records[0].fields)["v"]


@pytest.mark.parametrize(
    ("field", "html", "expected"),
    [
        ('"b::text"', "<b> x </b>", "x"),
        ('"b"', "<b> x<i>y</i> </b>", "xy"),
        ('"u::text"', "", None),
        ('{css="b", as="text"}', "<b> x </b>", " x "),
        ('{css="b", as="html"}', "<b>x</b>", "<b>x</b>"),
        ('{css=["u::text", "b::text"]}', "<u> </u><b>x</b>", "x"),
        ('"b::text"', "<b> </b><b>x</b>", "x"),
        ('{css="u::text", xpath="//b/text()"}', "<b>x</b>", "x"),
        ('{css="b", as="list"}', "<b>x</b><b> y</b><b></b>", ["x", "y"]),
        ('{css="u", many=true}', "", []),
        ('{css="b", many=true, as="int"}', "<b>1</b><b>2</b>", [1, 2]),
        ('{css="b", join=", "}', "<b>x</b><b>y</b>", "x, y"),
        ('{css="u", default="none"}', "", "none"),
        ('{css="b", as="int", default=0}', "<b>many</b>", 0),
        ("{const=7}", "", 7),
        ('{css="b", regex="no ([0-9]+)"}', "<b>is no 12.</b>", "12"),
        ('{css="b", regex="[0-9]+", as="int"}', "<b>is no 12.</b>", 12),
        ('{css="b", regex="x"}', "<b>y</b>", None),
        ('{css="a::attr(href)", as="url"}', "<a href='../b#c'>x</a>", "https://x.test/b"),
        ('{css="b", as="bool"}', "<b> Yes</b>", True),
        ('{css="b", as="date"}', "<b>2026-03-01T10:00:00Z</b>", "2026-03-01"),
        ('{css="b", as="datetime"}', "<b>2026-03-01T10:00:00Z</b>", "2026-03-01T10:00:00Z"),
        ('{css="b", as="float"}', "<b>1.5 kg</b>", 1.5),
        ('{css=["u::text", "b::text"], as="decimal"}', "<u>sold out</u><b>2.50</b>", "2.50"),
    ],
)
def test_a_field_is_found_transformed_or_missing(field: str, html: str, expected: Any) -> None:
    assert read(field, html) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("19.90", "19.90"),
        ("$1,299.00", "1299.00"),
        ("1.299,00 €", "1299.00"),
        ("1 299,50 Kč", "1299.50"),
        ("1&nbsp;299,50", "1299.50"),
        ("CHF 1'299.-", "1299"),
        ("1,299", "1299"),
        ("12,5", "12.5"),
        ("1.234.567", "1234567"),
        ("-5", "-5"),
        ("−5,25", "-5.25"),
        (".5", "0.5"),
        ("EUR 7", "7"),
        ("1,234,567.8", "1234567.8"),
    ],
)
def test_prices_are_read_in_common_notations(text: str, expected: str) -> None:
    assert read('{css="b", as="decimal"}', f"<b>{text}</b>") == expected


@pytest.mark.parametrize("text", ["2 for 10.00", "sold out", "12 34"])
def test_a_text_without_a_single_number_is_an_error_that_quotes_it(text: str) -> None:
    assert read('{css="b", as="decimal"}', f"<b>{text}</b>").startswith(
        f"field 'v': '{text}' is no decimal"
    )


def test_a_required_field_that_is_missing_is_an_error() -> None:
    assert (
        read('{css="u::text", required=true}') == "field 'v' is required, and u::text found nothing"
    )


LD = (
    "<script "
    'type="application/ld+json">[{"@type":"Org","name":"o"},{"@type":["Product","X"],'
    '"name":"p","offers":[{"price":1.5},{"price":2}]}]</script>'
)


@pytest.mark.parametrize(
    ("field", "body", "expected"),
    [
        ('{jsonld="Product.name"}', LD, "p"),
        ('{jsonld="name"}', LD, "o"),
        ('{jsonld="Product.offers.price", as="decimal"}', LD, "1.5"),
        ('{jsonld="Product.offers.1.price"}', LD, 2),
        ('{jsonld="Product.offers.price", many=true}', LD, [1.5, 2]),
        ('{jsonld="Product.none", css="b"}', LD + "<b>x</b>", "x"),
        ('{json="items.0.name"}', '{"items":[{"name":"n"}]}', "n"),
        ('{json="items.9.name"}', '{"items":[{"name":"n"}]}', None),
        ('{json="items.name", many=true}', '{"items":[{"name":"n"},{"name":"m"}]}', ["n", "m"]),
        ('{json="ok"}', '{"ok":false}', False),
        ('{json="ok"}', "<p>not JSON", None),
    ],
)
def test_json_and_json_ld_are_read_by_dotted_paths(field: str, body: str, expected: Any) -> None:
    assert read(field, body) == expected


HEAD = '[pipeline]\nname = "p"\n[[extract]]\n'


@pytest.mark.parametrize(
    ("toml", "expected_message"),
    [
        (
            HEAD + '[extract.fields]\nprice = {cs = "x"}',
            "p.toml: extract[0].fields.price.cs: unknown key; did you mean css?",
        ),
        (
            HEAD + 'mtach = "x"\n[extract.fields]\na = "b"',
            "extract[0].mtach: unknown key; did you mean match?",
        ),
        ('[pipline]\nname = "p"', "pipline: unknown key; did you mean pipeline?"),
        ('[pipeline]\nnme = "p"', "pipeline.nme: unknown key; did you mean name?"),
        ('[[sink]]\nurl = "jsonl:x"', "there is no [pipeline]"),
        ("[pipeline]", "cannot be called ''"),
        ("[pipeline", "not valid TOML"),
        (HEAD, "neither fields nor follow"),
        (
            HEAD + 'key = "sk"\n[extract.fields]\nsku = "b"',
            "extract[0].key: there is no field sk; did you mean sku?",
        ),
        (HEAD + '[extract.fields]\na = "b["', "extract[0].fields.a.css: CSS selector 'b['"),
        (HEAD + '[extract.fields]\na = {xpath = "//["}', "extract[0].fields.a.xpath: XPath '//['"),
        (HEAD + '[extract.fields]\na = {json = "a..b"}', "not a dotted path"),
        (HEAD + 'follow = ["a["]', "extract[0].follow[0]: CSS selector 'a['"),
        (HEAD + "follow = 3", "extract[0].follow: expected a string or a list of strings, found 3"),
        (
            HEAD + '[extract.fields]\na = {css = "b", as = "decimel"}',
            "'decimel' is not a transform; did you mean decimal?",
        ),
        (HEAD + '[extract.fields]\na = {css = "b", regex = "("}', "extract[0].fields.a.regex"),
        (
            HEAD + f'[extract.fields]\na = {{css = "b", regex = "{"x" * 501}"}}',
            "at most 500 characters",
        ),
        (
            HEAD + '[extract.fields]\na = {css = "b", many = 1}',
            "extract[0].fields.a.many: expected true or false",
        ),
        (HEAD + '[extract.fields]\na = {as = "int"}', "needs a selector or const"),
        (HEAD + '[extract.fields]\na = {css = "b", const = 1}', "not both"),
        (
            HEAD + '[extract.fields]\na = {css = "b", required = true, default = 1}',
            "exclude each other",
        ),
        (
            HEAD + "[extract.fields]\na = 3",
            "extract[0].fields.a: expected a CSS selector or a table, found 3",
        ),
        (HEAD + '[extract.fields]\n_penstock = "b"', "reserved"),
        (HEAD + 'version = "1"\n[extract.fields]\na = "b"', "extract[0]: extractor p: version '1'"),
        (
            HEAD + '[extract.fields]\na = "b"\n[[extract]]\nname = "q"\n[extract.fields]\na = "b"',
            "extract[0]: each of several [[extract]] needs a name",
        ),
        ('[pipeline]\nname = "p"\n[extract]\nmatch = "x"', "extract: must be a list of tables"),
        (
            '[pipeline]\nname = "p"\n[[sink]]\nurll = "jsonl:x"',
            "sink[0]: url is missing; did you mean urll?",
        ),
        (
            '[pipeline]\nname = "p"\n[[source]]\nurl = "feed:x"\nevery = "soon"',
            "source[0]: source 'feed:x': every: 'soon'",
        ),
        (
            '[pipeline]\nname = "p"\n[[source]]\nurl = "feed:x"\nroute = {goe = "US"}',
            "source[0]: source 'feed:x': route has no 'goe'",
        ),
        (
            '[pipeline]\nname = "p"\n[[source]]\nurl = "feed:x"\nroute = {render = true}',
            "source[0]: source 'feed:x': route: render=true asks for a browser",
        ),
    ],
)
def test_an_error_names_the_path_of_the_invalid_value(toml: str, expected_message: str) -> None:
    with pytest.raises(ConfigError) as e:
        compile_toml(toml.encode(), "p.toml")
    assert expected_message in e.value.message
    assert e.value.hint


def test_sinks_and_sources_are_recorded() -> None:
    toml = (
        '[pipeline]\nname = "p"\n[[sink]]\nurl = "csv:a.csv"\ncolumns = ["a"]\n[[source]]\n'
        'url = "feed:x"\nevery = "1m"\nroute = {geo = "de"}\n'
    )
    pipeline = compile_toml(toml.encode(), "p.toml")
    assert pipeline.sinks[0].options == {"columns": ["a"]}
    assert (pipeline.sources[0].every, pipeline.sources[0].route.geo) == (60.0, "de")
