"""Mapping of a finding to an event: precedence of values, and refusals with a reason.

Any payload, expression or hook ends as an event, as nothing, or as a refusal.
"""

from __future__ import annotations

import json
from typing import Any

import jmespath
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jmespath.exceptions import JMESPathError
from tests.sources.seeds_rig import spec_of

from penstock.authoring.routing import MAX_TEXT
from penstock.errors import ConfigError
from penstock.intake.mapping import KEYS, MAX_DATA, Mapping
from penstock.model import Event, Priority, Reason, decode_event, encode_event
from penstock.ports import Finding
from penstock.rules.events import Refused
from penstock.rules.reasons import code_of

URL = "https://shop.test/p/1"


def mapped(
    payload: dict[str, Any], *, finding: dict[str, Any] | None = None, **options: Any
) -> Event | None:
    return Mapping(spec_of("seeds:list", name="list", **options)).event(
        Finding(id="1" * 32, payload=payload, **(finding or {}))
    )


def event(payload: dict[str, Any], **options: Any) -> Event:
    found = mapped(payload, **options)
    assert found is not None
    return found


def reason(payload: dict[str, Any], **options: Any) -> str:
    with pytest.raises(Refused) as caught:
        mapped(payload, **options)
    return caught.value.reason


# -- precedence ------------------------------------------------------------------------------------


def test_an_event_has_the_values_of_its_source_declaration() -> None:
    options: dict[str, Any] = {
        "route": {"geo": "de"},
        "priority": "high",
        "window": "10m",
        "window_mode": "drop",
    }
    found = event(
        {"url": "HTTPS://Shop.Test:443/p/1#x", "sku": 7}, finding={"cause": "list:3"}, **options
    )
    assert (found.id, found.url, found.key, found.source, found.cause, found.trace) == (
        "1" * 32,
        URL,
        "shop.test",
        "list",
        "list:3",
        "1" * 32,
    )
    assert (found.route.geo, found.priority, found.window, found.window_mode, found.force) == (
        "de",
        Priority.HIGH,
        600.0,
        "drop",
        False,
    )
    assert found.data == {"url": "HTTPS://Shop.Test:443/p/1#x", "sku": 7}


@pytest.mark.parametrize(
    ("payload", "finding", "map_", "hook", "expected"),
    [
        ({"url": "/payload"}, {}, {}, None, "payload"),
        ({"url": "/payload"}, {"url": "/finding"}, {}, None, "finding"),
        ({"url": "/payload", "link": "/map"}, {"url": "/finding"}, {"url": "link"}, None, "map"),
        ({"url": "/payload"}, {"url": "/finding"}, {"url": "link"}, None, "finding"),
        (
            {"url": "/payload", "link": "/map"},
            {"url": "/finding"},
            {"url": "link"},
            "/hook",
            "hook",
        ),
        ({"url": "/payload", "link": "/map"}, {"url": "/finding"}, {"url": "link"}, "", "map"),
    ],
)
def test_the_url_comes_from_hook_map_finding_or_payload_in_that_order(
    payload: dict[str, Any],
    finding: dict[str, Any],
    map_: dict[str, str],
    hook: str | None,
    expected: str,
) -> None:
    def says(_: dict[str, Any]) -> dict[str, Any]:
        return {"url": f"https://shop.test{hook}" if hook else None}

    payload, finding = (
        {k: f"https://shop.test{v}" for k, v in each.items()} for each in (payload, finding)
    )
    assert (
        event(payload, finding=finding, map=map_, hook=None if hook is None else says).url
        == f"https://shop.test/{expected}"
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("geo", "at", "at"),
        ("pool", "home", "home"),
        ("account", "alice", "alice"),
        ("render", False, False),
        ("priority", "low", 2),
        ("priority", 0, 0),
        ("priority", None, 1),
        ("window", "1h30m", 5400.0),
        ("window", 2, 2.0),
        ("window", None, 60.0),
        ("window_mode", "delay", "delay"),
        ("force", True, True),
        ("trace", "order-7", "order-7"),
        ("trace", 7, "7"),
        ("data", {"a": 1}, {"a": 1}),
    ],
)
def test_a_mapped_value_is_set_on_the_event_and_null_keeps_the_static_value(
    key: str, value: Any, expected: Any
) -> None:
    payload = {"url": URL, "x": {"y": value}}
    by_map = event(payload, map={key: "x.y"}, window=60)
    by_hook = event(payload, hook=lambda p: {key: p["x"]["y"]}, window=60)
    assert by_map == by_hook
    assert (
        getattr(by_map.route if key in ("geo", "pool", "account", "render") else by_map, key)
        == expected
    )


def test_a_mapped_part_of_the_route_keeps_the_other_static_parts() -> None:
    route = event(
        {"url": URL, "g": "at"}, route={"geo": "de", "pool": "home"}, map={"geo": "g"}
    ).route
    assert (route.geo, route.pool) == ("at", "home")


@pytest.mark.parametrize(
    ("where", "passes"),
    [
        ("in_stock", True),
        ("!in_stock", False),
        ("price > `5`", True),
        ("missing", False),
        ("tags[?@=='x']", False),
    ],
)
def test_a_finding_that_fails_the_condition_makes_no_event(where: str, passes: bool) -> None:
    found = mapped({"url": URL, "in_stock": True, "price": 7, "tags": ["y"]}, where=where)
    assert (found is not None) is passes


def test_a_hook_that_returns_none_makes_no_event() -> None:
    assert mapped({"url": URL}, hook=lambda p: None) is None


def test_a_relative_url_is_resolved_against_the_base_of_the_finding() -> None:
    assert event({"url": "../p/1"}, finding={"base": "https://shop.test/feeds/x.xml"}).url == URL


def test_a_finding_refused_by_its_source_is_refused_with_any_mapping() -> None:
    assert (
        reason({"url": URL}, finding={"refused": "no JSON"}, where="`false`", hook=lambda p: None)
        == "no JSON"
    )


# -- the payload of the seeds ----------------------------------------------------------------------

ROUTING = {"geo": "US", "pool": "residential", "account": None}


@pytest.mark.parametrize(
    ("routing", "options", "expected"),
    [
        (ROUTING, {}, {"geo": "US", "pool": "residential"}),
        (json.dumps(ROUTING), {}, {"geo": "US", "pool": "residential"}),
        (None, {}, {}),
        ("", {}, {}),
        ("null", {}, {}),
        ({}, {}, {}),
        ({"planet": None}, {}, {}),
        (ROUTING, {"route": {"geo": "DE", "account": "a"}}, {**ROUTING, "account": "a"}),
        # A mapping that sets a part of the route replaces `routing`.
        ({"land": "FR"}, {"map": {"geo": "routing.land"}}, {"geo": "FR"}),
        (ROUTING, {"map": {"geo": "missing"}}, {"geo": "US", "pool": "residential"}),
        ({"land": "FR"}, {"hook": lambda p: {"geo": p["routing"]["land"]}}, {"geo": "FR"}),
        (ROUTING, {"hook": lambda p: {"geo": None}}, {"geo": "US", "pool": "residential"}),
    ],
)
def test_routing_in_the_payload_is_the_route_without_a_map(
    routing: Any, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    payload = {"url": URL, "routing": routing}
    found = event(payload, **options)
    assert msgspec.to_builtins(found.route) == {k: v for k, v in expected.items() if v}
    assert found.data == payload


@pytest.mark.parametrize(
    ("routing", "says"),
    [
        ({"planet": "Mars"}, "its routing has no 'planet'; it has geo, pool, account, render"),
        ({"geo": 7}, "its geo is no text"),
        ({"pool": ""}, "its pool is no text"),
        ({"render": "yes"}, "its render is neither"),
        ("US", "its routing is not an object but text"),
        ("[1]", "its routing is not an object but list"),
        (["US"], "its routing is not an object but list"),
        (7, "its routing is not an object but int"),
        ({1: 2}, "its routing has no '1'"),
    ],
)
def test_wrong_routing_in_the_payload_is_refused(routing: Any, says: str) -> None:
    found = reason({"url": URL, "routing": routing})
    assert says in found
    assert code_of(found) is Reason.REFUSED


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("url", 7, "no URL in it"),
        ("url", "", "no URL in it"),
        ("url", ["https://x.test"], "no URL in it"),
        ("url", "ftp://shop.test/", "its URL: "),
        ("url", "https://", "its URL: "),
        ("url", "https://shop.test/\ud800", "its URL: "),
        ("geo", 7, "its geo is no text"),
        ("pool", "", "its pool is no text"),
        ("account", "x" * 513, "its account is no text"),
        ("geo", "\ud800", "its geo is no text"),
        ("geo", "a\0b", "its geo is no text"),
        ("render", "yes", "its render is neither"),
        ("render", True, "render=true asks for a browser, and this release has no renderer"),
        ("force", 1, "its force is neither"),
        ("priority", "urgent", "its priority"),
        ("priority", 3, "its priority"),
        ("priority", [1], "its priority"),
        ("priority", 0.5, "its priority"),
        ("window", "soon", "its window"),
        ("window", -1, "its window"),
        ("window", float("inf"), "its window"),
        ("window", float("nan"), "its window"),
        ("window", 10**400, "its window"),
        ("window", [1], "its window"),
        ("window_mode", "wait", "its window_mode"),
        ("window_mode", [1], "its window_mode"),
        ("trace", "", "its trace"),
        ("trace", "x" * 513, "its trace"),
        ("trace", "a\0b", "its trace"),
        ("trace", [1], "its trace"),
        ("trace", 10**600, "its trace"),
        ("trace", "\ud800", "its trace"),
        ("data", [1], "its data is no object"),
        ("data", {"a": "x" * MAX_DATA}, "its data has"),
        ("data", {"a": float("nan")}, ""),
        ("data", {"a": "\ud800"}, "its data"),
        ("data", {"a": object()}, "its data"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_an_invalid_value_is_refused_with_the_name_of_its_field(
    key: str, value: Any, says: str
) -> None:
    payload = {"url": URL, "x": value}
    if says:
        assert says in reason(
            payload, map={key: "x"} if key == "data" else {key: "x", "data": "{a: url}"}
        )
        assert says in reason({"url": URL}, hook=lambda p: {key: value})
    else:
        # JSON has no NaN: the value is encoded as null.
        assert event({"url": URL, "x": value}, map={key: "x"}).data


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (lambda p: p["missing"], "the hook raised KeyError"),
        (lambda p: {"uri": URL}, "the hook's answer has no 'uri'"),
        (lambda p: {1: 2}, "the hook's answer has no '1'"),
        (lambda p: [URL], "the hook's answer is no list"),
        (lambda p: p.clear() or {}, "no URL in it"),
    ],
)
def test_a_hook_that_fails_or_returns_an_invalid_value_refuses_its_finding(
    hook: Any, says: str
) -> None:
    assert says in reason({"url": URL}, hook=hook)


def test_an_expression_that_cannot_be_applied_refuses_the_finding() -> None:
    assert "its mapping cannot be applied" in reason(
        {"url": URL, "price": "x"}, map={"priority": "abs(price)"}
    )
    assert "its mapping cannot be applied" in reason({"url": URL}, where="length(missing) > `1`")
    assert "its mapping cannot be applied" in reason(
        {"url": URL, "price": "inf"}, map={"window": "floor(to_number(price))"}
    )


def test_a_cause_that_is_too_long_for_an_index_is_truncated() -> None:
    assert event({"url": URL}, finding={"cause": "x" * 2000 + "\0"}).cause == "x" * MAX_TEXT
    assert "\0" not in event({"url": URL}, finding={"cause": "a\0b"}).cause


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"map": {"uri": "x"}}, "map has no 'uri'"),
        ({"map": {"url": "a..b"}}, "map.url: 'a..b' is not valid JMESPath"),
        ({"map": {"url": 7}}, "is not a JMESPath expression"),
        ({"where": "a ="}, "where: 'a =' is not valid JMESPath"),
        ({"map": {"url": ""}}, "is not valid JMESPath"),
    ],
)
def test_an_invalid_expression_is_a_configuration_error_with_a_hint(
    said: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Mapping(spec_of("seeds:list", **said))
    assert says in caught.value.message
    assert caught.value.hint


# -- properties ------------------------------------------------------------------------------------

texts = st.text(st.characters(), max_size=20) | st.sampled_from(
    [URL, "high", "drop", "1h", "/p", "//x", "https://shop.test/\ud800", "a\0b"]
)
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**4000), 2**63, True, False])
values = st.recursive(
    st.none() | texts | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
answers = st.none() | values | st.dictionaries(st.sampled_from(KEYS) | texts, values, max_size=5)
EXPRESSIONS = (
    "x",
    "x.y",
    "[x, url]",
    "{a: x}",
    "length(x)",
    "x[0]",
    "x[?y > `1`]",
    "sort(x)",
    "to_number(x)",
    "max_by(x, &y)",
    "join('', x)",
    "keys(x)",
    "url",
    "@",
)
expressions = st.sampled_from(EXPRESSIONS)


def fits(payload: dict[str, Any], options: dict[str, Any], *, base: str | None = None) -> None:
    refused: Refused | None = None
    found: Event | None = None
    try:
        found = mapped(payload, finding={"base": base, "cause": ascii(list(payload))}, **options)
    except Refused as e:
        refused = e
    if refused is not None:
        assert refused.reason.encode()
        assert "\n" not in refused.reason
    elif found is not None:
        again = decode_event(encode_event(found))
        assert (again.url, again.trace, again.route, again.window) == (
            found.url,
            found.trace,
            found.route,
            found.window,
        )


@settings(max_examples=300, deadline=None)
@given(
    payload=st.dictionaries(st.sampled_from(["url", "x"]) | texts, values, max_size=4),
    map_=st.dictionaries(st.sampled_from(KEYS), expressions, max_size=4),
    where=st.none() | expressions,
    base=st.sampled_from([None, "https://shop.test/a/b"]),
)
def test_any_payload_is_an_event_that_can_be_encoded_nothing_or_a_refusal(
    payload: dict[str, Any], map_: dict[str, str], where: str | None, base: str | None
) -> None:
    fits(payload, {"map": map_, "where": where}, base=base)


@settings(max_examples=300, deadline=None)
@given(payload=st.dictionaries(st.sampled_from(["url", "x"]), values, max_size=2), answer=answers)
def test_any_result_of_a_hook_is_an_encodable_event_nothing_or_a_refusal(
    payload: dict[str, Any], answer: Any
) -> None:
    fits(payload, {"hook": lambda _: answer})


@pytest.mark.filterwarnings("ignore:deprecated string literal syntax")
@settings(max_examples=200, deadline=None)
@given(text=st.text("abx.[]{}()|&!<>=`'\"@*?:, 019-\\", max_size=25) | st.text(max_size=15))
def test_any_text_is_an_expression_or_a_configuration_error(text: str) -> None:
    try:
        Mapping(spec_of("seeds:list", map={"url": text}))
    except ConfigError:
        with pytest.raises(JMESPathError):
            jmespath.compile(text)
    else:
        fits(
            json.loads(
                '{"url": "https://shop.test/", "a": {"b": [1, {"x": "y"}]}, "x": [3, 1, 2]}'
            ),
            {"map": {"trace": text}},
        )
