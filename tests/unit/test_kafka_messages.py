"""Messages of other programs: JSON, all forms of Debezium, CloudEvents, and unreadable messages."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.ports import Finding
from penstock.sources.kafka.messages import FORMATS, Message, MessageReader

AUTO = MessageReader(cluster="c", topic_id="t")


def message(
    value: Any,
    *,
    offset: int = 0,
    key: bytes | None = b"k",
    headers: list[tuple[str, bytes | None]] | None = None,
) -> Message:
    raw = value if value is None or isinstance(value, bytes) else msgspec.json.encode(value)
    return Message("shop.public.products", 0, offset, 1763265600.0, key, raw, headers or [])


def read(value: Any, reading: MessageReader = AUTO, **more: Any) -> Finding:
    found = reading.finding(message(value, **more))
    assert found is not None
    assert not found.refused, found.refused
    return found


def envelope(op: str = "c", *, lsn: int | None = 24023128, **row: Any) -> dict[str, Any]:
    """Return a change event as Debezium's PostgreSQL connector writes it."""
    full = {"id": 1, "url": "https://shop.example/p/1", **row}
    return {
        "before": full if op == "d" else None,
        "after": None if op in "dt" else full,
        "source": {
            "version": "3.6.0.Final",
            "connector": "postgresql",
            "name": "shop",
            "ts_ms": 1763265500123,
            "db": "shop",
            "snapshot": "true" if op == "r" else "false",
            "sequence": '["24023119","24023128"]',
            "ts_us": 1763265500123000,
            "ts_ns": 1763265500123000000,
            "schema": "public",
            "table": "products",
            "txId": 555,
            "lsn": lsn,
            "xmin": None,
        },
        "transaction": None,
        "op": op,
        "ts_ms": 1763265500310,
        "ts_us": 1763265500310000,
        "ts_ns": 1763265500310000000,
    }


def with_schema(payload: Any) -> dict[str, Any]:
    return {
        "schema": {
            "type": "struct",
            "fields": [],
            "optional": False,
            "name": "shop.public.products.Envelope",
            "version": 2,
        },
        "payload": payload,
    }


# -- Debezium --------------------------------------------------------------------------------------


def test_the_payload_of_a_change_is_its_row_with_its_origin() -> None:
    found = read(envelope("u", sku="A"), key=b'{"schema":{"type":"struct"},"payload":{"id":1}}')
    assert {name: value for name, value in found.payload.items() if not name.startswith("_")} == {
        "id": 1,
        "url": "https://shop.example/p/1",
        "sku": "A",
    }
    assert found.payload["_cdc"] == {
        "op": "u",
        "db": "shop",
        "schema": "public",
        "table": "products",
        "lsn": 24023128,
        "tx": 555,
        "ts_ms": 1763265500123,
    }
    assert found.payload["_kafka"]["key"] == {"id": 1}
    assert (found.at, found.cause) == (1763265500.123, "shop.public.products/0@0")


def test_a_change_with_a_schema_gives_the_same_finding() -> None:
    assert read(with_schema(envelope())) == read(envelope())


def test_a_repeated_change_has_one_id_and_rows_of_one_position_have_different_ids() -> None:
    assert read(envelope(), offset=7).id == read(envelope(), offset=9000).id
    assert read(envelope(), key=b'{"id":1}').id != read(envelope(), key=b'{"id":2}').id
    assert read(envelope(id=1), key=None).id != read(envelope(id=2), key=None).id, (
        "without a table key, the row is part of the id"
    )
    assert read(envelope()).id != read(envelope(lsn=24023129)).id
    assert (
        read(envelope(lsn=None) | {"source": {}}, offset=7).id
        != read(envelope(lsn=None) | {"source": {}}, offset=8).id
    ), "without a position, the offset is part of the id"


def test_the_id_of_a_mysql_change_comes_from_its_binary_log_position() -> None:
    def change(pos: int, row: int) -> dict[str, Any]:
        source = {
            "connector": "mysql",
            "name": "m",
            "db": "shop",
            "table": "p",
            "server_id": 1,
            "file": "binlog.000003",
            "pos": pos,
            "row": row,
            "ts_ms": 1,
        }
        return {"before": None, "after": {"id": 1}, "source": source, "op": "c", "ts_ms": 2}

    assert read(change(484, 0), offset=1).id == read(change(484, 0), offset=2).id
    assert len({read(change(484, 0)).id, read(change(484, 1)).id, read(change(502, 0)).id}) == 3


def test_a_mongodb_document_in_a_string_is_parsed() -> None:
    value = {
        "after": '{"_id": 4, "url": "https://a.example/"}',
        "source": {"connector": "mongodb", "collection": "p", "ord": 1, "ts_ms": 3},
        "op": "c",
        "ts_ms": 4,
    }
    assert read(value).payload["url"] == "https://a.example/"


def test_the_id_of_a_mongodb_change_comes_from_its_time_and_ordinal() -> None:
    def change(ts_ms: int, number: int) -> dict[str, Any]:
        source = {
            "connector": "mongodb",
            "name": "m",
            "db": "shop",
            "collection": "p",
            "ord": number,
            "ts_ms": ts_ms,
        }
        return {
            "after": '{"_id": 4, "url": "https://a.example/"}',
            "source": source,
            "op": "u",
            "ts_ms": 9,
        }

    assert read(change(1000, 1), offset=1).id == read(change(1000, 1), offset=2).id
    assert (
        len({read(change(1000, 1)).id, read(change(1000, 2)).id, read(change(2000, 1)).id}) == 3
    ), "two updates of one document are two events"


@pytest.mark.parametrize(
    "marks", [{"__txId": 7}, {"__file": "binlog.000003"}, {"__pos": 484}, {"__ord": 1, "__op": "u"}]
)
def test_an_incomplete_position_is_ignored_and_the_offset_is_used_for_the_id(
    marks: dict[str, Any],
) -> None:
    row = {"id": 1, "url": "https://a.example/", "__deleted": "false", **marks}
    assert read(row, offset=7).id != read(row, offset=8).id


@pytest.mark.parametrize(
    ("operations", "taken"), [("cru", "cru"), ("c", "c"), ("d", "d"), ("crudtm", "crudtm")]
)
def test_only_changes_of_the_selected_operations_are_read(operations: str, taken: str) -> None:
    reading = MessageReader(operations=frozenset(operations))
    assert (
        "".join(op for op in "crudtm" if reading.finding(message(envelope(op))) is not None)
        == taken
    )


def test_the_payload_of_a_deletion_is_the_deleted_row() -> None:
    found = read(envelope("d", sku="A"), MessageReader(operations=frozenset("d")))
    assert (found.payload["sku"], found.payload["_cdc"]["op"]) == ("A", "d")


def test_a_tombstone_is_skipped_unless_tombstones_are_deletions() -> None:
    assert AUTO.finding(message(None)) is None
    found = read(None, MessageReader(tombstones=True), key=b'{"schema":{},"payload":{"id":9}}')
    assert (found.payload["id"], found.payload["_cdc"]) == (9, {"op": "d"})


def test_the_metadata_of_an_unwrapped_change_is_not_part_of_its_row() -> None:
    value = {
        "id": 1,
        "url": "https://a.example/",
        "__deleted": "false",
        "__op": "u",
        "__lsn": 17,
        "__table": "products",
        "__source_ts_ms": 1763265500123,
    }
    found = read(value)
    assert sorted(found.payload) == ["_cdc", "_kafka", "id", "url"]
    assert found.payload["_cdc"] == {
        "op": "u",
        "table": "products",
        "lsn": 17,
        "ts_ms": 1763265500123,
    }
    assert found.id == read(value, offset=99).id
    assert AUTO.finding(message({"id": 1, "__deleted": "true"})) is None
    assert (
        read({"id": 1, "__deleted": "true"}, MessageReader(operations=frozenset("d"))).payload[
            "_cdc"
        ]["op"]
        == "d"
    )
    assert read(with_schema({"id": 1, "__deleted": "false"})).payload["id"] == 1


def test_the_metadata_of_an_unwrapped_change_may_be_in_headers() -> None:
    assert AUTO.finding(message({"id": 1}, headers=[("__op", b"d")])) is None
    assert read({"id": 1}, headers=[("__op", b"c"), ("__lsn", b"5")]).payload["_cdc"] == {
        "op": "c",
        "lsn": "5",
    }


# -- CloudEvents -----------------------------------------------------------------------------------

EVENT = {
    "specversion": "1.0",
    "id": "e-1",
    "source": "/shop",
    "type": "price.changed",
    "time": "2026-11-16T04:00:00Z",
    "data": {"url": "https://a.example/"},
}


def test_a_structured_cloudevent_is_its_data_with_an_id_from_source_and_id() -> None:
    found = read(EVENT)
    assert (found.payload["url"], found.payload["_cloudevent"]["type"], found.at) == (
        "https://a.example/",
        "price.changed",
        1794801600.0,
    )
    assert found.id == read(EVENT, offset=12).id != read(EVENT | {"source": "/other"}).id


def test_a_binary_cloudevent_gives_the_same_finding() -> None:
    headers = [
        (f"ce_{name}", str(value).encode()) for name, value in EVENT.items() if name != "data"
    ] + [("content-type", b"application/json; charset=utf-8")]
    found = read(EVENT["data"], headers=headers)
    assert (found.id, found.payload["url"], found.at) == (
        read(EVENT).id,
        "https://a.example/",
        1794801600.0,
    )


def test_the_data_of_a_cloudevent_may_be_base64_text_or_a_change() -> None:
    raw = {name: value for name, value in EVENT.items() if name != "data"}
    assert (
        read(raw | {"data_base64": base64.b64encode(b'{"url": "u"}').decode()}).payload["url"]
        == "u"
    )
    assert read(raw | {"data": "hello"}).payload["value"] == "hello"
    changed = read(raw | {"data": with_schema(envelope())})
    assert (changed.payload["id"], changed.payload["_cdc"]["op"]) == (1, "c")
    assert AUTO.finding(message(raw | {"data": with_schema(envelope("d"))})) is None


# -- other JSON, and invalid messages --------------------------------------------------------------


def test_any_json_object_is_a_payload_with_an_id_from_its_offset() -> None:
    found = read(
        {"url": "https://a.example/", "op": "something else"},
        offset=3,
        headers=[("h", b"\xff"), ("n", None)],
    )
    assert {name: found.payload[name] for name in ("url", "op")} == {
        "url": "https://a.example/",
        "op": "something else",
    }
    assert found.payload["_kafka"] == {
        "topic": "shop.public.products",
        "partition": 0,
        "offset": 3,
        "timestamp": 1763265600.0,
        "key": "k",
        "headers": {"h": {"base64": "/w=="}, "n": None},
    }
    assert found.id != read({"url": "https://a.example/", "op": "something else"}, offset=4).id
    assert found.id != read({}, MessageReader(cluster="c", topic_id="made again"), offset=3).id


def test_a_message_may_be_only_a_url() -> None:
    assert read(b"https://a.example/x?y=1").url == "https://a.example/x?y=1"
    assert read("https://a.example/x").url == "https://a.example/x"
    assert read([1, 2]).payload["value"] == [1, 2]


def test_with_format_json_a_change_event_is_not_unwrapped() -> None:
    assert read(envelope("d"), MessageReader(format="json")).payload["op"] == "d"


def test_json_with_a_registry_header_is_read_and_binary_formats_are_refused() -> None:
    assert read(b'\x00\x00\x00\x00\x07{"url": "u"}').payload["url"] == "u"
    found = AUTO.finding(message(b"\x00\x00\x00\x00\x07\x02\x06abc"))
    assert found is not None
    assert "schema registry" in found.refused


@pytest.mark.parametrize(
    ("value", "reading", "reason"),
    [
        (b"{", AUTO, "no JSON"),
        (b"", AUTO, "empty"),
        (b"\xff\xfe", AUTO, "no JSON"),
        (b"[" * 100_000, AUTO, "JSON"),
        ({"a": 1}, MessageReader(format="cloudevents"), "no CloudEvent"),
        ([1], MessageReader(format="debezium"), "no change event"),
        ({"specversion": "1.0", "id": "", "source": "s", "type": "t"}, AUTO, "source and an id"),
        (
            {"specversion": "1.0", "id": "i", "source": "s", "type": "t", "data_base64": "!"},
            AUTO,
            "base64",
        ),
    ],
)
def test_an_unreadable_message_is_refused_with_its_bytes_and_the_reason(
    value: Any, reading: MessageReader, reason: str
) -> None:
    found = reading.finding(message(value))
    assert found is not None
    assert reason in found.refused
    raw = value if isinstance(value, bytes) else msgspec.json.encode(value)
    stored = found.payload["_kafka"]["value"]
    assert raw == (
        base64.b64decode(stored["base64"]) if isinstance(stored, dict) else stored.encode()
    )
    msgspec.json.encode(found.payload)


@pytest.mark.parametrize("ts", ["1" + "0" * 400, "1e308", "-1", "true", '"now"', "[1]"])
def test_a_change_with_an_impossible_time_has_the_time_of_its_message(ts: str) -> None:
    assert read(b'{"op":"c","after":{"a":1},"source":{"lsn":1,"ts_ms":%s}}' % ts.encode()).at in (
        1763265600.0,
        0.001,
    )


# -- random messages -------------------------------------------------------------------------------

LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.just(10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
JSON = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = [
    "schema",
    "payload",
    "op",
    "before",
    "after",
    "source",
    "ts_ms",
    "lsn",
    "name",
    "specversion",
    "id",
    "type",
    "data",
    "data_base64",
    "time",
    "__op",
    "__deleted",
    "__lsn",
    "value",
    "url",
    "snapshot",
    "message",
]
KNOWN_FIELDS = st.recursive(
    LEAF | st.sampled_from(["c", "d", "u", "m", "t", "true", "1.0", "2026-11-16T04:00:00Z"]),
    lambda inner: (
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=6) | st.lists(inner, max_size=2)
    ),
    max_leaves=12,
)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["ce_specversion", "ce_id", "ce_source", "content-type", "__op", "x"]),
        st.none() | st.binary(max_size=6),
    ),
    max_size=4,
)


# No deadline and no speed check, because the machine may be busy.
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.binary(max_size=60)
    | (JSON | KNOWN_FIELDS).map(lambda value: json.dumps(value).encode())
    | st.none(),
    st.none() | st.binary(max_size=10) | KNOWN_FIELDS.map(lambda value: json.dumps(value).encode()),
    HEADERS,
    st.sampled_from(FORMATS),
)
def test_any_message_is_found_refused_or_skipped_and_can_be_stored(
    value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]], format: str
) -> None:
    reading = MessageReader(format=format, operations=frozenset("crudtm"), tombstones=True)
    found = reading.finding(Message("t", 0, 1, 1.0, key, value, headers))
    assert found == reading.finding(Message("t", 0, 1, 1.0, key, value, headers)), (
        "the same message gives the same finding"
    )
    if found is not None:
        assert len(found.id) == 32
        assert found.at is None or math.isfinite(found.at)
        assert (
            msgspec.json.decode(msgspec.json.encode(found.payload)).keys() == found.payload.keys()
        )
