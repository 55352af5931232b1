"""Encoded values: they are decoded unchanged by any version, and invalid bytes are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import model
from penstock.authoring.page import Page
from penstock.errors import BadEnvelope, NewerMessage
from penstock.model import (
    Ask,
    Event,
    Priority,
    Route,
    child_id,
    decode_event,
    encode_event,
    mint,
    page_id,
)
from penstock.rules.envelopes import encode_again

EVENT = Event(id="e1", url="https://shop.test/p/1", key="shop.test")
FULL = Event(
    id="é\n",
    url="https://shop.test/p/1",
    key="shop.test",
    topic="urgent",
    source="feed:https://shop.test/feed",
    trace="t1",
    cause="lsn/0/16B",
    route=Route(geo="de", pool="home", account="a", render=True),
    priority=Priority.HIGH,
    depth=3,
    parent="e0",
    force=True,
    window=0.0,
    window_mode="drop",
    accepted_at=1700000000.123,
    ask=Ask(method="POST", headers={"accept": "application/json"}, body=b"\x00\xff"),
    data={"row": {"id": 1, "tags": ["a", None, True, 1.5]}},
)


@pytest.mark.parametrize("event", [EVENT, FULL])
def test_an_event_is_decoded_unchanged(event: Event) -> None:
    assert decode_event(encode_event(event)) == event


def test_the_envelope_is_a_valid_cloudevent() -> None:
    raw = json.loads(encode_event(FULL))
    assert (raw["specversion"], raw["id"], raw["type"], raw["source"]) == (
        "1.0",
        "é\n",
        "penstock.request.v1",
        "/penstock/feed:https://shop.test/feed",
    )
    assert (raw["subject"], raw["traceid"], raw["priority"], raw["data"]["url"]) == (
        FULL.url,
        "t1",
        0,
        FULL.url,
    )
    assert all(name == name.lower() and name.isalnum() for name in raw), (
        "CloudEvents attribute names are lower-case letters and digits"
    )


def test_unknown_envelope_attributes_are_ignored() -> None:
    raw = json.loads(encode_event(EVENT)) | {"time": "2026-01-01T00:00:00Z", "partitionkey": "x"}
    assert decode_event(json.dumps(raw).encode()) == EVENT


def change(**more: Any) -> bytes:
    return json.dumps(json.loads(encode_event(EVENT)) | more).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"\x00",
        b"[" * 100_000,
        b'{"data":' * 50_000,
        change(specversion="0.3"),
        change(type="penstock.request.v"),
        change(type="penstock.request.v\u00b2"),
        change(type="penstock.request.v0"),
        change(type="order.created"),
        change(data=None),
        change(data={"url": "x"}),
        change(id=5),
        change(id=None),
        change(priority="high"),
        change(priority=1.5),
        change(id=""),
        change(data={"url": "", "key": "k"}),
        change(data={"url": "https://x.test/", "key": "k", "route": {"moon": True}}),
        encode_event(EVENT)[:-1],
        encode_event(EVENT) + b"x",
        b'{"specversion":"1.0","id":"\\ud800"}',
    ],
)
def test_bytes_that_are_not_an_event_are_refused_with_a_message(raw: bytes) -> None:
    with pytest.raises(BadEnvelope) as e:
        decode_event(raw)
    assert e.value.message


@pytest.mark.parametrize(
    "raw",
    [
        change(type="penstock.request.v2"),
        change(type="penstock.request.v2", specversion="2.0"),
        change(type="penstock.request.v2", id=5, data={"target": "https://shop.test/p/1"}),
        b'{"type":"penstock.request.v12"}',
    ],
)
def test_a_newer_envelope_version_is_not_a_broken_envelope(raw: bytes) -> None:
    with pytest.raises(NewerMessage, match="newer than version 1") as e:
        decode_event(raw)
    assert "upgrade" in e.value.hint
    assert (e.value.version, e.value.known) in {(2, 1), (12, 1)}


def test_an_older_envelope_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encode_event(FULL)
    monkeypatch.setattr(model, "CODEC_VERSION", 2)
    monkeypatch.setattr(model, "EVENT_TYPE", "penstock.request.v2")
    assert decode_event(raw) == FULL
    assert json.loads(encode_event(FULL))["type"] == "penstock.request.v2"


def of_newer_minor(event: Event) -> dict[str, Any]:
    """Return an envelope with a field of a newer minor version at every level."""
    raw: dict[str, Any] = json.loads(encode_event(event))
    raw |= {"penstockminor": 7, "tenant": "acme"}
    raw["data"]["budget"] = {"bytes": 5}
    raw["data"].setdefault("route", {})["moon"] = True
    raw["data"].setdefault("ask", {})["trailers"] = ["x"]
    return raw


@pytest.mark.parametrize("event", [EVENT, FULL])
def test_unknown_fields_of_a_newer_minor_version_are_ignored_and_kept(event: Event) -> None:
    raw = of_newer_minor(event)
    before = json.dumps(raw).encode()
    assert decode_event(before) == event
    changed = msgspec.structs.replace(event, accepted_at=9.0, route=Route(geo="fr"))
    again = encode_again(changed, before)
    assert decode_event(again) == changed
    expected = json.loads(encode_event(changed)) | {"penstockminor": 7, "tenant": "acme"}
    expected["data"]["budget"] = {"bytes": 5}
    expected["data"]["route"] = {"geo": "fr", "moon": True}
    expected["data"].setdefault("ask", {})["trailers"] = ["x"]
    assert json.loads(again) == expected


def test_a_new_envelope_without_unknown_fields_is_encoded_as_usual() -> None:
    changed = msgspec.structs.replace(FULL, accepted_at=9.0)
    assert encode_again(changed, encode_event(FULL)) == encode_event(changed)


@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(str.encode)
    | st.integers(0, len(encode_event(FULL))).map(lambda n: encode_event(FULL)[:n] + b"}")
)
def test_any_bytes_are_decoded_or_raise_bad_envelope(raw: bytes) -> None:
    try:
        decode_event(raw)
    except BadEnvelope:
        pass


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(
    texts,
    texts,
    texts,
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.integers(0, 2),
    st.binary(max_size=50),
    st.dictionaries(texts, json_values, max_size=4),
)
def test_an_event_with_any_values_is_decoded_unchanged(
    id_: str, url: str, key: str, cause: str, priority: int, body: bytes, data: dict[str, Any]
) -> None:
    event = Event(
        id=id_, url=url, key=key, cause=cause, priority=priority, ask=Ask(body=body), data=data
    )
    assert decode_event(encode_event(event)) == event


# -- ids -------------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_ids_are_equal_only_for_equal_causes(a: list[str], b: list[str]) -> None:
    assert (mint(*a) == mint(*b)) is (a == b)


def test_an_id_is_32_hex_digits_and_does_not_change_between_releases() -> None:
    assert mint("feed", "https://shop.test/feed", "entry-1") == "c2789254fbab036b4d123a2bbb56d53b"
    assert mint() != mint("")
    assert mint("ab", "c") != mint("a", "bc")
    assert len(mint("\ud800")) == 32, "a lone surrogate is a valid part of a cause"


def test_the_id_of_a_child_comes_from_its_parent_extractor_and_url() -> None:
    assert child_id("p", "product", "https://x.test/") == child_id(
        "p", "product", "https://x.test/"
    )
    assert (
        len(
            {
                child_id("p", "a", "u"),
                child_id("q", "a", "u"),
                child_id("p", "b", "u"),
                child_id("p", "a", "v"),
                mint("p", "a", "u"),
            }
        )
        == 5
    )


# -- pages -----------------------------------------------------------------------------------------


def test_the_page_id_is_a_hash_of_the_content() -> None:
    assert page_id(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert page_id(b"a") != page_id(b"b")


def test_a_page_from_a_file_can_be_queried_and_followed(tmp_path: Path) -> None:
    (tmp_path / "saved.html").write_bytes(
        "<h1 data-sku=A1>Täller</h1><a class=related href='/p/2'>x</a>".encode()
    )
    page = Page.from_file(
        tmp_path / "saved.html",
        url="https://shop.test/p/1",
        headers={"Content-Type": "text/html; charset=utf-8"},
    )
    assert (page.css("h1::text").get(), page.css("[data-sku]::attr(data-sku)").get()) == (
        "Täller",
        "A1",
    )
    assert [link.url for link in page.follow("a.related")] == ["https://shop.test/p/2"]
    assert page.headers == {"content-type": "text/html; charset=utf-8"}
    assert (page.status, page.url, page.requested_url) == (
        200,
        "https://shop.test/p/1",
        "https://shop.test/p/1",
    )


def test_an_event_is_immutable() -> None:
    with pytest.raises(AttributeError):
        EVENT.url = "https://else.test/"  # type: ignore[misc]
    assert msgspec.structs.replace(EVENT, depth=1).depth == 1
    assert EVENT.depth == 0


def test_priorities_are_found_by_name() -> None:
    assert [Priority.named(n) for n in ("high", "Normal", "LOW")] == [0, 1, 2]
