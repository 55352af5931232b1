"""Records as messages for a JDBC sink connector: the key, and a schema whose types never change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.ports import Row
from penstock.sinks.kafka import open_sink
from penstock.sinks.kafka_records import Shape

ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


def row(fields: dict[str, Any], *, key: str = "k", deleted: bool = False) -> Row:
    origin = {
        "event_id": "e1",
        "trace_id": "t",
        "url": "https://a.example/",
        "key": key,
        "extractor": "product",
        "version": 2,
        "fetched_at": "2026-11-16T04:00:00.000Z",
    }
    return Row(
        1,
        key,
        json.dumps(
            fields | {"_penstock": origin | ({"deleted": True} if deleted else {})}
        ).encode(),
        1,
    )


def made(shape: Shape, fields: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    key, value, _ = shape.message(row(fields, **more), schemas=True)
    return json.loads(key), None if value is None else json.loads(value)


def types(value: Any) -> dict[str, str]:
    assert value["schema"]["type"] == "struct"
    assert all(field["optional"] for field in value["schema"]["fields"])
    return {field["field"]: field["type"] for field in value["schema"]["fields"]}


def test_the_key_is_a_struct_of_the_key_fields_as_strings() -> None:
    key, value = made(Shape(["sku"]), {"sku": 5, "price": 1})
    assert key == {
        "schema": {
            "type": "struct",
            "fields": [{"field": "sku", "type": "string", "optional": False}],
            "optional": False,
        },
        "payload": {"sku": "5"},
    }
    assert value["payload"] == {"sku": "5", "price": 1.0}
    key, _ = made(Shape(["shop", "sku"]), {"sku": "a", "shop": "s"})
    assert key["payload"] == {"shop": "s", "sku": "a"}
    key, value = made(Shape(), {"price": 1}, key="https://a.example/")
    assert key["payload"] == {"_penstock_key": "https://a.example/"}
    assert "_penstock_key" not in value["payload"]


def test_a_record_without_the_key_field_uses_its_record_key() -> None:
    shape = Shape(["sku"])
    key, value = made(shape, {"title": "x"}, key="own")
    assert (key["payload"], value["payload"]["sku"]) == ({"sku": "own"}, "own")
    assert "sku" in shape.notice


def test_the_first_value_decides_the_type_and_integers_are_doubles() -> None:
    shape = Shape()
    _, first = made(
        shape,
        {
            "a": "x",
            "b": 10,
            "c": True,
            "d": None,
            "e": {"x": [1]},
            "f": 1 << 60,
            "g": 1 << 70,
            "h": 1.5,
        },
    )
    assert types(first) == {
        "a": "string",
        "b": "double",
        "c": "boolean",
        "e": "string",
        "f": "int64",
        "g": "string",
        "h": "double",
    }
    assert first["payload"] == {
        "a": "x",
        "b": 10.0,
        "c": True,
        "e": '{"x":[1]}',
        "f": 1 << 60,
        "g": str(1 << 70),
        "h": 1.5,
    }
    _, second = made(shape, {"a": 7, "b": 9.99, "d": "late", "e": "plain"})
    assert second["payload"] == {
        "a": "7",
        "b": 9.99,
        "c": None,
        "e": "plain",
        "f": None,
        "g": None,
        "h": None,
        "d": "late",
    }


def test_a_value_of_another_type_is_stored_in_rest_and_the_schema_is_kept() -> None:
    shape = Shape(types={"stock": "int64"})
    _, first = made(shape, {"price": 1.0, "stock": 3, "sold": False})
    _, second = made(shape, {"price": "call us", "stock": 2.5, "sold": 0})
    assert second["payload"] == {
        "stock": None,
        "price": None,
        "sold": None,
        "_penstock_rest": '{"price":"call us","stock":2.5,"sold":0}',
    }
    assert types(second) == types(first) | {"_penstock_rest": "string"}
    assert "_penstock_rest" in shape.notice
    _, third = made(shape, {"price": 2, "stock": 4.0})
    assert third["payload"] == {"stock": 4, "price": 2.0, "sold": None, "_penstock_rest": None}


def test_the_types_are_kept_after_a_restart() -> None:
    shape = Shape(["sku"])
    made(shape, {"sku": "a", "price": 1})
    again = Shape(["sku"])
    again.restore(shape.fields)
    _, value = made(again, {"sku": "a", "price": None})
    assert (types(value)["price"], value["payload"]["price"]) == ("double", None), (
        "a null field must reset the column"
    )


# No deadline and no speed check, because the machine may be busy.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(st.sampled_from("abc"), ANY, max_size=3), max_size=6))
def test_for_any_records_types_never_change_and_every_value_has_its_type(
    records: list[dict[str, Any]],
) -> None:
    shape, seen = Shape(["a"]), dict[str, str]()
    python = {"string": str, "double": float, "int64": int, "boolean": bool}
    for record in records:
        _, value = made(shape, record)
        found = types(value)
        assert all(found[name] == kind for name, kind in seen.items())
        seen = found
        assert list(value["payload"]) == list(found)
        assert all(
            cell is None or type(cell) is python[found[name]]
            for name, cell in value["payload"].items()
        )
        assert "\0" not in json.dumps(value)
        rest = json.loads(value["payload"].get("_penstock_rest") or "{}")
        assert all(
            value["payload"].get(name) is not None or name in rest
            for name, given in record.items()
            if given is not None
        )


def test_fields_beyond_the_limit_are_stored_in_rest() -> None:
    _, value = made(Shape(), {f"f{n}": n for n in range(1200)})
    assert len(types(value)) == 1001
    assert len(json.loads(value["payload"]["_penstock_rest"])) == 200


def test_a_removal_is_a_key_without_a_value() -> None:
    key, value = made(Shape(["sku"]), {"sku": "a"}, deleted=True)
    assert (key["payload"], value) == ({"sku": "a"}, None)


def test_provenance_fields_are_added_if_the_option_is_set() -> None:
    _, value = made(Shape(provenance=True), {"a": 1})
    assert (value["payload"]["_penstock_event_id"], value["payload"]["_penstock_version"]) == (
        "e1",
        2,
    )
    assert types(value)["_penstock_version"] == "int64"


def test_plain_json_has_no_schema() -> None:
    key, value, _ = Shape(["sku"]).message(row({"sku": "a", "n": 1}), schemas=False)
    assert (key, value) == (b'{"sku":"a"}', b'{"sku":"a","n":1}')
    key, value, _ = Shape(provenance=True).message(row({"n": 1}, key="own"), schemas=False)
    assert (key, json.loads(value or b"")["_penstock"]["event_id"]) == (b"own", "e1")
    assert Shape().message(row({}, deleted=True), schemas=False)[1] is None


@pytest.mark.parametrize(
    ("url", "expected_message"),
    [
        ("kafka://127.0.0.1:9092", "names no topic"),
        ("kafka://127.0.0.1/t?kye=sku", "no option 'kye'"),
        ("kafka://127.0.0.1/t?types=price:decimal", "types"),
        ("kafka://127.0.0.1/t?key=", "key"),
        ("kafka://127.0.0.1/t?key=_penstock_x", "key"),
        ("kafka://127.0.0.1/t?mode=replace", "mode"),
        ("kafka://u:p@127.0.0.1/t?partitions=0", "partitions"),
    ],
)
def test_a_mistake_in_the_url_is_found_when_the_sink_is_created(
    url: str, expected_message: str, tmp_path: Any
) -> None:
    with pytest.raises(ConfigError, match=expected_message) as caught:
        open_sink(url, {}, tmp_path)
    assert caught.value.hint
