"""Declaring a pipeline, and loading a pipeline from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Page, Pipeline
from penstock.authoring.changes import Change
from penstock.authoring.load import load, load_to_run
from penstock.authoring.pipeline import SinkSpec, SourceSpec
from penstock.errors import ConfigError
from penstock.model import Priority, Route


def one(page: Page) -> Iterator[dict[str, Any]]:
    yield {"url": page.url}


def test_a_declared_extractor_can_still_be_called() -> None:
    shop = Pipeline("shop")

    @shop.extract(match="*/product/*", key="sku")
    def product(page: Page) -> Iterator[dict[str, Any]]:
        yield {"sku": page.css("b::text").get()}

    assert list(product(Page("https://x.test/", b"<b>7</b>"))) == [{"sku": "7"}]
    (extractor,) = shop.extractors
    assert (extractor.name, extractor.version, extractor.match, extractor.key) == (
        "product",
        1,
        ("*/product/*",),
        "sku",
    )


def test_extract_works_without_parentheses() -> None:
    shop = Pipeline("shop")
    assert shop.extract(one) is one
    assert shop.extractors[0].fits("https://any.test/")


@pytest.mark.parametrize(
    ("match", "url", "fits"),
    [
        (None, "https://x.test/", True),
        ("*/product/*", "https://x.test/product/1?a=b", True),
        ("*/product/*", "https://x.test/products/1", False),
        ("*/Product/*", "https://x.test/product/1", False),
        (["*/a/*", "*/b/*"], "https://x.test/b/1", True),
        ("*\n*", "https://x.test/", False),
        ("https://x.test/?page=*", "https://x.test/?page=2", True),
    ],
)
def test_match_is_a_glob_on_the_complete_url(match: Any, url: str, fits: bool) -> None:
    shop = Pipeline("shop")
    shop.extract(match=match)(one)
    assert shop.extractors[0].fits(url) is fits


def test_a_page_matches_by_its_final_url_or_its_requested_url() -> None:
    shop = Pipeline("shop")
    shop.extract(match="*/old/*")(one)
    assert shop.matching("https://x.test/new/1", "https://x.test/old/1")
    assert not shop.matching("https://x.test/new/1")


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:a@hunter2@127.0.0.1:6379/0?list=a",  # Redis accepts it
        "postgres://me:a/hunter2@127.0.0.1/a",
        "kafka://me:hunter2",
        "feed:https://me:hunter2@shop.example/feed.xml",
    ],
)
def test_the_name_of_a_source_has_no_part_of_a_password(url: str) -> None:
    # The name is in every event of the source, on the broker and in the ledger.
    shop = Pipeline("shop")
    shop.source(url)
    assert "hunter2" not in shop.sources[0].name


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (
            "feed+https://me:secret@shop.example:8080/feed/@ada",
            "feed-https-shop.example-8080-feed-ada",
        ),
        ("kafka://h1:9092,h2:9092/shop", "kafka-h1-9092-h2-9092-shop"),
        ("redis://[::1]:6379/0?list=a", "redis-1-6379-0"),
        ("seeds:lists/a@b.txt", "seeds-lists-a-b.txt"),
    ],
)
def test_the_name_of_a_source_stays_so_that_its_cursor_is_found(url: str, name: str) -> None:
    shop = Pipeline("shop")
    shop.source(url)
    assert shop.sources[0].name == name


def test_the_signature_names_the_matching_extractors_and_their_versions() -> None:
    shop = Pipeline("shop")
    shop.extract(match="*/a/*", version=3, name="a")(one)
    shop.extract(name="all")(one)
    shop.files_hash = "1f"
    assert shop.signature("https://x.test/a/1") == "a@3,all@1#1f"
    assert shop.signature("https://x.test/b") == "all@1#1f"
    assert shop.signature("https://x.test/b", "https://x.test/a/1") == "a@3,all@1#1f"
    assert Pipeline("none").signature("https://x.test/") == "#"


def test_sinks_and_sources_are_recorded_as_written() -> None:
    shop = Pipeline("shop")
    shop.sink("jsonl:out/products.jsonl", fsync=True)
    shop.source(
        "feed+https://x.test/f",
        every="5m",
        route={"geo": "de"},
        priority="high",
        window=30,
        limit=5,
    )
    assert shop.sinks == (SinkSpec("jsonl:out/products.jsonl", {"fsync": True}),)
    assert shop.sources == (
        SourceSpec(
            "feed+https://x.test/f",
            "feed-https-x.test-f",
            300.0,
            Route(geo="de"),
            Priority.HIGH,
            30.0,
            None,
            {},
            None,
            None,
            {"limit": 5},
        ),
    )


def change(**changed: Any) -> Change:
    values: dict[str, Any] = {
        "event_id": "e",
        "trace_id": "t",
        "url": "u",
        "extractor": "a",
        "key": "k",
        "old": None,
        "new": {},
        "fields": {"price": [1, 2]},
    }
    return Change(**{**values, **changed})


def test_a_connector_is_stored_separately_from_the_options() -> None:
    shop = Pipeline("shop")
    shop.source(
        "kafka://127.0.0.1:9092/requests",
        connect={"kind": "debezium-postgres", "table": "public.requests"},
        group="g",
    )
    shop.sink("kafka://127.0.0.1:9092/products?key=sku", connect={"kind": "jdbc-postgres"})
    assert shop.sources[0].connect == {"kind": "debezium-postgres", "table": "public.requests"}
    assert shop.sources[0].options == {"group": "g"}
    assert (shop.sinks[0].connect, shop.sinks[0].options) == ({"kind": "jdbc-postgres"}, {})


def test_a_hook_gets_only_changes_of_its_fields_and_extractor() -> None:
    shop = Pipeline("shop")
    changes: list[Change] = []
    shop.on_change(changes.append)
    shop.on_change(fields=["price", "title"])(print)
    shop.on_change(extractor="b")(print)
    every, price, other = shop.hooks
    assert every.wants(change())
    assert price.wants(change())
    assert not other.wants(change())
    assert not price.wants(change(fields={"stock": [1, 2]}))
    assert other.wants(change(extractor="b"))


async def coroutine(change: Change) -> None: ...


def test_a_hook_may_be_async() -> None:
    shop = Pipeline("shop")
    shop.on_change(coroutine)
    assert [h.fn for h in shop.hooks] == [coroutine]


NOT_A_NAME: Any = None


async def agen(page: Page) -> Any:
    yield {}


def twice(shop: Pipeline) -> None:
    shop.extract(one)
    shop.extract(one)


@pytest.mark.parametrize(
    ("declare", "expected_message"),
    [
        (lambda _: Pipeline(""), "cannot be called ''"),
        (lambda _: Pipeline("a b"), "cannot be called 'a b'"),
        (lambda _: Pipeline(NOT_A_NAME), "cannot be called None"),
        (twice, "two extractors are called 'one'"),
        (lambda p: p.extract(version=0)(one), "version 0"),
        (lambda p: p.extract(version="2")(one), "version '2'"),
        (lambda p: p.extract(version=True)(one), "version True"),
        (lambda p: p.extract("*/product/*"), "@extract was given"),
        (lambda p: p.extract()(3), "needs a function"),
        (lambda p: p.extract()(dict), "needs a function"),
        (lambda p: p.extract(lambda page: None), "lambda has no name"),
        (lambda p: p.extract(coroutine), "coroutine is async"),
        (lambda p: p.extract(agen), "agen is async"),
        (lambda p: p.extract(match="")(one), "is not a glob"),
        (lambda p: p.extract(match=3)(one), "is not a glob"),
        (lambda p: p.extract(key="")(one), "names no field"),
        (lambda p: p.extract(key=())(one), "names no field"),
        (lambda p: p.extract(key=3)(one), "names no field"),
        (lambda p: p.extract(name="a,b")(one), "cannot be called 'a,b'"),
        (lambda p: p.sink("products.jsonl"), "does not begin with a kind"),
        (lambda p: p.sink(None), "does not begin with a kind"),
        (lambda p: p.source("feed:x", every="soon"), "not a length of time"),
        (lambda p: p.source("feed:x", priority="urgent"), "priority 'urgent'"),
        (lambda p: p.source("feed:x", route={"planet": "x"}), "route"),
        (lambda p: p.source("feed:x", route="US"), "route 'US' is not a table"),
        (lambda p: p.source("feed:x", route=Route(geo=5)), "geo 5 is not a text"),  # type: ignore[arg-type]
        (lambda p: p.source("feed:x", route={"pool": ""}), "pool '' is not a text"),
        (lambda p: p.source("feed:x", route={"render": True}), "has no renderer"),
        (lambda p: p.source("feed:x", route={"render": "yes"}), "neither true nor false"),
        (lambda p: p.source("feed:x", geo="US"), "geo is a part of the route"),
        (lambda p: p.source("feed:x", window="-1h"), "not a length of time"),
        (lambda p: p.source("feed:x", window=-1), "not a length of time"),
        (lambda p: p.source("feed:x", window_mode="dorp"), "window_mode 'dorp'"),
        (lambda p: p.source("feed:x", priority=7), "priority 7"),
        (lambda p: p.source("kafka://h/t", connect="debezium"), "not a table with a kind"),
        (lambda p: p.sink("kafka://h/t", connect={"table": "t"}), "not a table with a kind"),
        (lambda p: p.sink("jsonl:x.jsonl", connect={"kind": "s3"}), "connect is for kafka:// URLs"),
        (lambda p: p.sink("jsonl:x.jsonl", only=[]), "only=[] names no extractor"),
        (lambda p: p.sink("jsonl:x.jsonl", only=7), "only=7 names no extractor"),
        (lambda p: p.sink("jsonl:x.jsonl", only=["a", None]), "names no extractor"),
        (lambda p: p.on_change(fields="price"), "not a list of field names"),
        (lambda p: p.on_change(agen), "is async"),
    ],
)
def test_an_invalid_declaration_is_refused_with_a_hint(declare: Any, expected_message: str) -> None:
    with pytest.raises(ConfigError) as e:
        declare(Pipeline("shop"))
    assert expected_message in e.value.message
    assert e.value.hint


@pytest.mark.parametrize(
    ("options", "suggestion"),
    [
        ({"priority": "hihg"}, "did you mean high?"),
        ({"route": {"goe": "US"}}, "did you mean geo?"),
        ({"route": {"accounts": "a"}}, "did you mean account?"),
        ({"window_mode": "dely"}, "did you mean delay?"),
        ({"pool": "main"}, "write route={'pool': 'main'}"),
    ],
)
def test_a_wrong_route_value_is_refused_with_a_suggestion(
    options: dict[str, Any], suggestion: str
) -> None:
    with pytest.raises(ConfigError) as e:
        Pipeline("shop").source("feed:x", **options)
    assert e.value.hint == suggestion


def test_null_in_a_static_route_means_absent() -> None:
    pipeline = Pipeline("shop")
    pipeline.source("feed:x", route={"geo": "US", "account": None, "render": False})
    assert pipeline.sources[0].route == Route(geo="US")


# -- files -----------------------------------------------------------------------------------------

GOOD = 'from penstock import Pipeline\nshop = Pipeline("shop")\n'


def test_a_pipeline_is_loaded_from_a_python_file(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_shop.py").write_text("NAME = 'shop'\n")
    file = tmp_path / "shop.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom penstock import Pipeline\n"
        "from neighbour_of_shop import NAME\nshop = also = Pipeline(NAME)\n"
        "@dataclass\nclass Item:\n    sku: str\n@shop.extract\ndef product(page):\n"
        "    yield Item('1')\n"
        "if __name__ == '__main__':\n    raise SystemExit('not me')\n"
    )
    shop = load(file)
    assert (shop.name, shop.path, [e.name for e in shop.extractors]) == (
        "shop",
        str(file.resolve()),
        ["product"],
    )


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("x = (\n", "shop.py:1: SyntaxError"),
        ("import nonesuch_module\n", "shop.py:1: ModuleNotFoundError"),
        (
            GOOD + "def f():\n    return 1 / 0\nf()\n",
            "shop.py:4: ZeroDivisionError: division by zero",
        ),
        (GOOD + "shop.sink('x')\n", "shop.py:3: sink 'x'"),
        (GOOD + "import sys\nsys.exit(3)\n", "shop.py:4: SystemExit: 3"),
        (
            GOOD + "other = Pipeline('other')\n",
            "found: shop = Pipeline('shop'), other = Pipeline('other')",
        ),
        ("x = 1\n", "found: none"),
        (GOOD + "@shop.on_change(extractor='x')\ndef f(c): ...\n", "no extractor 'x'"),
        ("\0", "shop.py:"),
        ("x = '\udcff'\n" + GOOD, "shop.py:"),
    ],
)
def test_the_error_of_a_bad_python_file_names_the_line(
    tmp_path: Path, text: str, expected_message: str
) -> None:
    file = tmp_path / "shop.py"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as e:
        load(file)
    assert expected_message in e.value.message
    assert e.value.hint


EXTRACTOR = "@shop.extract\ndef product(page):\n    yield {}\n"
TOML = '[pipeline]\nname = "shop"\n[[extract]]\nname = "product"\nfields.title = "h1::text"\n'


@pytest.mark.parametrize(
    ("name", "text", "expected_message", "expected_hint"),
    [
        (
            "shop.py",
            GOOD + "shop.sink('jsonl:a', only='prodct')\n" + EXTRACTOR,
            "shop.py:3: sink 'jsonl:a': only: there is no extractor 'prodct'",
            "did you mean product?",
        ),
        (
            "shop.py",
            GOOD + EXTRACTOR + "shop.sink('csv:a', only=['product',\n  'x'])\n",
            "shop.py:6: sink 'csv:a': only: there is no extractor 'x'",
            "extractors: product",
        ),
        (
            "shop.py",
            GOOD + EXTRACTOR + "@shop.on_change(extractor='prodct')\ndef f(c): ...\n",
            "shop.py:6: @on_change: there is no extractor 'prodct'",
            "did you mean product?",
        ),
        (
            "shop.toml",
            TOML + '[[sink]]\nurl = "jsonl:a"\n[[sink]]\nurl = "csv:a"\nonly = ["prodct"]\n',
            "shop.toml: sink[1].only: there is no extractor 'prodct'",
            "did you mean product?",
        ),
    ],
)
def test_a_sink_or_hook_for_an_unknown_extractor_is_refused(
    tmp_path: Path, name: str, text: str, expected_message: str, expected_hint: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError) as e:
        load(file)
    assert (e.value.message, e.value.hint) == (f"{tmp_path}/{expected_message}", expected_hint)


SINK = "shop.sink('jsonl:a')\n"


@pytest.mark.parametrize(
    ("name", "text", "expected_message"),
    [
        ("shop.py", GOOD + EXTRACTOR, "has no sink and no @on_change hook"),
        ("shop.py", GOOD + SINK, "has no extractor"),
        ("shop.toml", TOML, "has no sink, so its records would be dropped"),
        (
            "shop.toml",
            '[pipeline]\nname = "shop"\n[[sink]]\nurl = "jsonl:a"\n',
            "has no extractor",
        ),
        (
            "shop.toml",
            TOML
            + '[[extract]]\nname = "other"\nfields.x = "p"\n'
            + '[[sink]]\nurl = "jsonl:a"\nonly = "product"\n',
            "no sink takes the records of extractor 'other'",
        ),
    ],
)
def test_a_pipeline_whose_records_would_be_dropped_loads_but_does_not_run(
    tmp_path: Path, name: str, text: str, expected_message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert load(file).name == "shop"
    with pytest.raises(ConfigError, match=expected_message) as e:
        load_to_run(file)
    assert str(file) in e.value.message
    assert e.value.hint


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shop.py", GOOD + EXTRACTOR + SINK),
        ("shop.py", GOOD + EXTRACTOR + "@shop.on_change\ndef f(change): ...\n"),
        (
            "shop.toml",
            TOML
            + '[[extract]]\nname = "listing"\nfollow = ["a"]\n'
            + '[[sink]]\nurl = "jsonl:a"\nonly = "product"\n',
        ),
    ],
)
def test_a_pipeline_with_a_sink_or_hook_may_run(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert load_to_run(file).untaken == ({"listing"} if "listing" in text else set())


@pytest.mark.parametrize(
    ("name", "expected_message"),
    [
        ("none.py", "there is no pipeline file"),
        ("shop.yaml", "neither .py nor .toml"),
        (".", "cannot read"),
    ],
)
def test_an_invalid_pipeline_file_is_refused(
    tmp_path: Path, name: str, expected_message: str
) -> None:
    (tmp_path / "shop.yaml").write_text("")
    with pytest.raises(ConfigError, match=expected_message):
        load(tmp_path / name)
