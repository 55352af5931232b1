"""Running extractors on one page: valid records, keys, links, and the error of each mistake."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import sys
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from penstock import Failure, Page, Pipeline, Removed
from penstock.extraction import run as module
from penstock.extraction.run import run
from penstock.model import ErrorClass, Follow, Priority, Reason, Route
from penstock.ports import Extracted

URL = "https://shop.test/p/1"


def extracted(
    fn: Callable[[Page], Any],
    *,
    body: bytes = b"<b>x</b>",
    max_output: int = 1 << 20,
    **options: Any,
) -> Extracted:
    pipeline = Pipeline("shop")
    pipeline.extract(name="item", **options)(fn)
    return run(pipeline, Page(URL, body), max_output=max_output)


def yielding(*values: Any) -> Callable[[Page], Iterator[Any]]:
    def fn(page: Page) -> Iterator[Any]:
        yield from values

    return fn


def fields(out: Extracted) -> list[Any]:
    assert out.error == ""
    return [msgspec.json.decode(r.fields) for r in out.records]


@dataclasses.dataclass
class Item:
    sku: str
    tags: tuple[str, ...] = ()


class Struct(msgspec.Struct):
    sku: str


def test_dicts_dataclasses_and_structs_are_records() -> None:
    out = extracted(
        yielding({"sku": "a"}, Item("b", ("t",)), Struct("c"), MappingProxyType({"sku": "d"})),
        key="sku",
        version=4,
    )
    assert fields(out) == [{"sku": "a"}, {"sku": "b", "tags": ["t"]}, {"sku": "c"}, {"sku": "d"}]
    assert [(r.key, r.index) for r in out.records] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    assert {(r.version, r.extractor) for r in out.records} == {(4, "item")}


def test_pydantic_models_are_records() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Model", sku=(str, ...), price=(Decimal, ...))
    assert fields(extracted(yielding(model(sku="d", price=Decimal("1.50"))), key="sku")) == [
        {"sku": "d", "price": "1.50"}
    ]


def test_values_without_a_json_type_are_written_as_text_in_field_order() -> None:
    moment, unique = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), uuid.UUID(int=7)
    out = extracted(
        yielding(
            {
                "z": moment,
                "a": unique,
                "d": Decimal("0.10"),
                "s": {"b", "a"},
                "n": {"k": [None, True, 1.5]},
            }
        )
    )
    assert out.records[0].fields == (
        b'{"z":"2026-01-02T00:00:00Z","a":"00000000-0000-0000-0000-000000000007",'
        b'"d":"0.10","s":["a","b"],"n":{"k":[null,true,1.5]}}'
    )


def test_the_hash_does_not_depend_on_the_order_of_fields() -> None:
    a, b, c = extracted(
        yielding(
            {"a": 1, "b": {"c": 2, "d": 3}},
            {"b": {"d": 3, "c": 2}, "a": 1},
            {"a": 2, "b": {"c": 2, "d": 3}},
        )
    ).records
    assert a.hash == b.hash != c.hash
    assert a.fields != b.fields
    assert a.hash == hashlib.blake2b(b'{"a":1,"b":{"c":2,"d":3}}', digest_size=16).digest()


def test_a_function_may_return_one_record_or_none_or_an_iterator() -> None:
    assert fields(extracted(lambda page: {"a": 1})) == [{"a": 1}]
    assert fields(extracted(lambda page: Item("x"))) == [{"sku": "x", "tags": []}]
    assert extracted(lambda page: None) == Extracted()
    assert fields(extracted(lambda page: ({"a": n} for n in range(2)))) == [{"a": 0}, {"a": 1}]


def test_a_page_without_a_matching_extractor_is_unmatched() -> None:
    assert extracted(yielding({"a": 1}), match="*/other/*") == Extracted(matched=False)
    assert extracted(yielding()) == Extracted(matched=True)


def test_every_matching_extractor_runs_and_records_are_numbered_consecutively() -> None:
    pipeline = Pipeline("shop")
    pipeline.extract(name="a")(yielding({"n": 1}))
    pipeline.extract(name="no", match="*/no/*")(yielding({"n": 0}))
    pipeline.extract(name="b")(yielding({"n": 2}))
    assert [(r.extractor, r.index) for r in run(pipeline, Page(URL, b"")).records] == [
        ("a", 0),
        ("b", 1),
    ]


def test_followed_links_carry_their_extractor_and_hints() -> None:
    def fn(page: Page) -> Iterator[Any]:
        yield from page.follow("a", priority="high", route=Route(geo="de"), window=5.0)
        yield Follow("../x")

    out = extracted(fn, body=b"<a href=2#f>2</a>")
    assert [(x.url, x.extractor, x.priority, x.route, x.window) for x in out.links] == [
        ("https://shop.test/p/2", "item", Priority.HIGH, Route(geo="de"), 5.0),
        ("https://shop.test/x", "item", Priority.NORMAL, None, None),
    ]


def test_a_link_takes_a_window_as_text_and_a_route_as_a_table() -> None:
    def fn(page: Page) -> Iterator[Any]:
        yield from page.follow("a", priority=0, route={"geo": "de", "pool": None}, window="1h")

    (link,) = extracted(fn, body=b"<a href=2>2</a>").links
    assert (link.priority, link.route, link.window) == (Priority.HIGH, Route(geo="de"), 3600.0)


WRONG_LINKS: list[tuple[dict[str, Any], str]] = [
    ({"window": "soon"}, "window 'soon' is not a length of time; write seconds"),
    ({"window": -1}, "window -1 is not a length of time"),
    ({"window": float("nan")}, "window nan is not a length of time"),
    ({"window": [1]}, "window [1] is not a length of time"),
    ({"priority": "hihg"}, "priority 'hihg' is not known; did you mean high?"),
    ({"priority": None}, "priority None is not known; use high, normal or low"),
    ({"priority": True}, "priority True is not known"),
    ({"priority": 9}, "priority 9 is not known"),
    ({"route": {"goe": "US"}}, "route has no 'goe'; did you mean geo?"),
    ({"route": {"pool": 5}}, "route: pool 5 is not a text"),
    ({"route": "US"}, "route 'US' is not a table"),
    ({"route": Route(render=True)}, "route: render=true asks for a browser"),
]
WRONG_LINK = "the extractor follows a link with a wrong value (test_extracting.py line {}): {}"


@pytest.mark.parametrize(("options", "expected"), WRONG_LINKS)
def test_a_wrong_value_of_follow_is_an_error_at_its_line(
    options: dict[str, Any], expected: str
) -> None:
    def fn(page: Page) -> Iterator[Any]:
        yield {"sku": "a"}
        yield from page.follow("a", **options)

    out = extracted(fn)  # no link matches, and the values are checked all the same
    line = fn.__code__.co_firstlineno + 2
    assert out.error.startswith(WRONG_LINK.format(line, expected))
    assert (out.code, out.kind, out.records, out.links) == (Reason.BAD_LINK, "permanent", [], [])
    assert f'test_extracting.py", line {line}, in fn' in out.detail
    assert "authoring" not in out.detail, "the last line is the user's"


@pytest.mark.parametrize(("options", "expected"), WRONG_LINKS)
def test_a_wrong_value_of_a_yielded_follow_is_an_error_at_its_line(
    options: dict[str, Any], expected: str
) -> None:
    def links() -> Iterator[Follow]:
        yield Follow("/1")
        yield Follow("/2", **options)

    def fn(page: Page) -> Iterator[Any]:
        yield {"sku": "a"}
        yield from links()

    out = extracted(fn)
    line = links.__code__.co_firstlineno + 2
    assert out.error.startswith(WRONG_LINK.format(line, expected))
    assert (out.code, out.kind, out.records, out.links) == (Reason.BAD_LINK, "permanent", [], [])
    assert f'test_extracting.py", line {line}, in item' in out.detail


def test_a_wrong_follow_that_a_function_returns_names_the_function() -> None:
    def fn(page: Page) -> Any:
        return Follow("/1", priority="hihg")  # type: ignore[arg-type]

    line = fn.__code__.co_firstlineno
    assert extracted(fn).error.startswith(WRONG_LINK.format(line, "priority 'hihg'"))


def test_follow_checks_its_values_before_its_result_is_used() -> None:
    with pytest.raises(Failure, match="window '1y' is not a length of time"):
        Page(URL, b"").follow("a", window="1y")


@pytest.mark.parametrize(
    ("key", "record", "expected"),
    [
        (None, {"a": 1}, URL),
        ("a", {"a": 7}, "7"),
        ("a", {"a": 0}, "0"),
        ("a", {"a": Decimal("1.0")}, "1.0"),
        (("a", "b"), {"a": "x", "b": 2}, "x|2"),
        (("a", "b"), {"a": "x|", "b": "\\"}, "x\\||\\\\"),
        (lambda record: record["a"].lower(), {"a": "X"}, "x"),
    ],
)
def test_the_record_key_is_built_from_the_key_option(
    key: Any, record: dict[str, Any], expected: str
) -> None:
    assert [r.key for r in extracted(yielding(record), key=key).records] == [expected]


@pytest.mark.parametrize(
    ("key", "record", "expected_error"),
    [
        ("sku", {"sku": None}, "empty key: field 'sku' is None in a record of item"),
        ("sku", {"sku": " "}, "empty key: field 'sku' is empty in a record of item"),
        ("sku", {}, "empty key: field 'sku' is missing in a record of item"),
        (("a", "b"), {"a": 1}, "empty key: field 'b' is missing in a record of item"),
        (
            lambda record: None,
            {},
            "empty key: the key function of item gave None in a record of item",
        ),
        ("sku", {"sku": ["a"]}, "item: field 'sku' is a list, which cannot be a key"),
        ("sku", {"sku": "x" * 5000}, "item: field 'sku' is no usable key: longer than 4096"),
        (
            lambda record: "\ud800",
            {},
            "item: the key function of item gave no usable key: not text",
        ),
    ],
)
def test_a_record_without_a_usable_key_is_an_error(
    key: Any, record: dict[str, Any], expected_error: str
) -> None:
    out = extracted(yielding({"sku": "good", "a": 1, "b": 2}, record), key=key)
    assert (out.error, out.kind, out.records) == (expected_error, "permanent", [])


@pytest.mark.parametrize(
    ("key", "removed", "expected", "kept"),
    [
        ("sku", Removed("a"), "a", {"sku": "a"}),
        ("sku", Removed({"sku": 5, "shop": "s"}), "5", {"sku": 5, "shop": "s"}),
        (
            ("shop", "sku"),
            Removed({"sku": "a", "shop": "s|"}),
            "s\\||a",
            {"sku": "a", "shop": "s|"},
        ),
        (None, Removed(), URL, {}),
        (None, Removed("https://shop.test/p/2"), "https://shop.test/p/2", {}),
        (lambda record: record["sku"].upper(), Removed({"sku": "a"}), "A", {"sku": "a"}),
        (lambda record: record["sku"].upper(), Removed("A"), "A", {}),
    ],
)
def test_a_removal_has_the_key_of_the_record(
    key: Any, removed: Removed, expected: str, kept: dict[str, Any]
) -> None:
    out = extracted(yielding(removed), key=key)
    assert fields(out) == [kept]
    (record,) = out.records
    assert (record.key, record.deleted) == (expected, True)


def test_a_removal_without_a_usable_key_is_an_error() -> None:
    assert "empty key" in extracted(yielding(Removed("")), key="sku").error
    assert (
        "Removed({'shop': …, 'sku': …})"
        in extracted(yielding(Removed("a")), key=("shop", "sku")).error
    )
    assert "empty key" in extracted(yielding(Removed()), key="sku").error


class Loop:
    def __init__(self) -> None:
        self.value: list[Any] = []
        self.value.append(self.value)


@pytest.mark.parametrize(
    ("value", "expected_error"),
    [
        ([{"a": 1}], "item: yielded a list; yield a dict"),
        (None, "item: yielded None; yield a dict"),
        ("text", "item: yielded a str; yield a dict"),
        (Item, "item: yielded a type; yield a dict"),
        ({"p": float("nan")}, "item: field 'p' is nan, which JSON cannot hold"),
        ({"p": {"q": [1, float("inf")]}}, "item: field 'p.q[1]' is inf"),
        ({"p": Decimal("NaN")}, "item: field 'p' is NaN"),
        ({1: 2}, "item: field name 1 is a int; names are strings"),
        ({"p": {1: 2}}, "item: field 'p' has the key 1; keys are strings"),
        ({"t": "\ud800"}, "item: field 't' holds half a surrogate pair"),
        ({"t": ["\udfff"]}, "item: field 't' holds half a surrogate pair"),
        ({"\ud800": 1}, "holds half a surrogate pair"),
        ({"a": 1, "t": object()}, "item: field 't' cannot be written as JSON"),
        ({"t": Loop().value}, "item: field 't' is nested too deeply"),
        ({"_penstock": {}}, "item: field '_penstock' is reserved"),
        ({"t": Page(URL, b"<b>").css("b")}, "item: field 't' is a SelectorList; add .get()"),
        (Follow("mailto:x@y"), "item: yielded Follow('mailto:x@y'), which cannot be fetched"),
    ],
)
def test_an_invalid_record_is_refused_with_its_field_or_type(
    value: Any, expected_error: str
) -> None:
    out = extracted(yielding(value))
    assert expected_error in out.error
    assert (out.kind, out.records, out.links) == ("permanent", [], [])


def test_a_returned_list_or_a_value_returned_after_yield_is_an_error() -> None:
    def late(page: Page) -> Any:
        yield {"a": 1}
        return {"b": 2}

    assert extracted(lambda page: [{"a": 1}]).error.startswith(
        "item: returned a list; yield its records one by one"
    )
    assert (
        extracted(late).error
        == "item: returned a dict after yielding, which would be lost; yield it"
    )


def test_an_exception_of_user_code_is_one_line_and_a_traceback_of_user_frames() -> None:
    def broken(page: Page) -> Iterator[Any]:
        yield {"a": 1}
        raise ValueError("no\nprice")

    out = extracted(broken)
    assert (out.error, out.kind, out.records) == ("ValueError: no price", "permanent", [])
    assert 'raise ValueError("no\\nprice")' in out.detail
    assert 'extraction/run.py", line' not in out.detail


def test_the_error_of_a_bad_selector_names_it_and_the_line_of_user_code() -> None:
    out = extracted(lambda page: {"a": page.css("b[").get()})
    assert out.error.startswith("ValueError: CSS selector 'b['")
    assert "selectors.py" not in out.detail
    assert 'page.css("b[")' in out.detail


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


def leave(page: Page) -> None:
    sys.exit(3)


def deep(page: Page) -> Any:
    return deep(page)


def hungry(page: Page) -> Any:
    raise MemoryError


def rude(page: Page) -> Any:
    raise Rude


def endless_message(page: Page) -> Any:
    raise ValueError("x" * 100_000)


@pytest.mark.parametrize(
    ("fn", "error", "kind"),
    [
        (leave, "SystemExit: 3", "permanent"),
        (deep, "RecursionError: maximum recursion depth exceeded", "permanent"),
        (hungry, "MemoryError", "poison"),
        (rude, "Rude", "permanent"),
        (endless_message, "ValueError: xxx", "permanent"),
    ],
)
def test_any_exception_of_user_code_becomes_a_bounded_error(fn: Any, error: str, kind: str) -> None:
    out = extracted(fn)
    assert out.error.startswith(error)
    assert len(out.error) <= 500
    assert out.kind == kind
    assert len(out.detail) <= module.MAX_DETAIL


class ArrayMemoryError(MemoryError):
    """Stands for the error of a library for arrays, which is a subclass."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), Reason.MEMORY),
        (ArrayMemoryError("8 GiB"), Reason.MEMORY),
        (Failure(ErrorClass.POISON, "MemoryError of a shop"), None),
        (ValueError("MemoryError"), None),
    ],
)
def test_only_a_memory_error_has_the_code_of_the_memory_limit(
    error: Exception, code: Reason | None
) -> None:
    def raising(page: Page) -> Any:
        raise error

    assert extracted(raising).code is code


def test_a_failure_raised_by_user_code_keeps_its_error_class() -> None:
    def blocked(page: Page) -> Any:
        raise Failure(ErrorClass.BLOCKED, "a challenge page")

    assert (extracted(blocked).error, extracted(blocked).kind) == ("a challenge page", "blocked")


def test_output_is_limited_in_bytes_records_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(value: Any) -> Callable[[Page], Iterator[Any]]:
        def fn(page: Page) -> Iterator[Any]:
            while True:
                yield value

        return fn

    assert (
        extracted(forever({"a": "x" * 1000}), max_output=10_000).error
        == "item: more than 10000 bytes of output from one page"
    )
    monkeypatch.setattr(module, "MAX_RECORDS", 5)
    monkeypatch.setattr(module, "MAX_LINKS", 5)
    assert extracted(forever({})).error.startswith("item: more than 5 records")
    assert extracted(forever(Follow("https://x.test/"))).error.startswith("item: more than 5 links")


def test_a_record_that_no_sink_takes_is_a_failure_of_its_extractor() -> None:
    pipeline = Pipeline("shop")
    pipeline.extract(name="item")(yielding({"sku": "a"}))
    pipeline.extract(name="listing")(yielding({"sku": "b"}))
    pipeline.untaken = frozenset({"listing"})
    out = run(pipeline, Page(URL, b"<b>x</b>"))
    assert (out.code, out.extractor) == (Reason.NO_SINK, "listing")
