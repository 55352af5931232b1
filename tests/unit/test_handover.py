"""Messages on `pages`: always a reference, and optionally a small body that matches its id."""

from __future__ import annotations

import random

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.messages import (
    MAX_INLINE_BODY,
    Inline,
    PageMessage,
    RecordsMessage,
    page_message,
)
from penstock.errors import BadEnvelope, NewerMessage
from penstock.model import page_id
from penstock.ports import PageMeta

TEXT = b"<p>the same again</p>" * 500
NOISE = random.Random(1).randbytes(10_000)


def meta(body: bytes) -> PageMeta:
    return PageMeta(
        page=page_id(body),
        url="https://shop.test/p/1",
        status=200,
        headers={"etag": '"1"'},
        fetched_at=1.5,
        size=len(body),
    )


def written(body: bytes, *, inline_max: int = 64 << 10, largest: int | None = None) -> bytes:
    return page_message(b"event", meta(body), body, inline_max=inline_max, largest=largest)


def carrying(body: bytes, codec: str, data: bytes) -> bytes | None:
    return PageMessage.read(
        PageMessage(event=b"event", page=meta(body), inline=Inline(codec=codec, data=data)).write()
    ).body()


@given(st.binary(max_size=3000))
def test_an_inline_body_is_returned_unchanged(body: bytes) -> None:
    message = PageMessage.read(written(body))
    assert message.body() == body
    assert (message.event, message.page) == (b"event", meta(body))


def test_without_inline_max_a_message_has_only_a_reference() -> None:
    raw = written(TEXT, inline_max=0)
    assert raw == PageMessage(event=b"event", page=meta(TEXT)).write()
    assert set(msgspec.json.decode(raw)) == {"type", "event", "page"}
    assert PageMessage.read(raw).body() is None


def test_a_body_of_inline_max_bytes_is_inline_and_a_larger_one_is_not() -> None:
    assert PageMessage.read(written(NOISE, inline_max=len(NOISE))).body() == NOISE
    assert PageMessage.read(written(NOISE, inline_max=len(NOISE) - 1)).inline is None


def test_a_body_is_compressed_only_if_it_becomes_smaller() -> None:
    text, noise = PageMessage.read(written(TEXT)).inline, PageMessage.read(written(NOISE)).inline
    assert text is not None
    assert text.codec == "zstd"
    assert len(text.data) < len(TEXT) / 10
    assert noise == Inline(codec="raw", data=NOISE)


def test_a_message_too_large_for_the_broker_has_only_a_reference() -> None:
    size = len(written(NOISE))
    assert PageMessage.read(written(NOISE, largest=size)).body() == NOISE
    small = written(NOISE, largest=size - 1)
    assert PageMessage.read(small).inline is None
    assert PageMessage.read(small).page == meta(NOISE)


def test_a_reader_without_inline_support_reads_the_reference() -> None:
    class Before(msgspec.Struct, kw_only=True, tag="penstock.page.v1"):
        event: bytes
        page: PageMeta

    assert msgspec.json.decode(written(TEXT), type=Before).page == meta(TEXT)


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        ("raw", TEXT[:-1]),
        ("raw", b"x" * len(TEXT)),
        ("brotli", TEXT),
        ("zstd", TEXT),
        ("zstd", b""),
        ("zstd", zstandard.compress(TEXT)[:-3]),
        ("zstd", zstandard.compress(b"x" * len(TEXT))),
        ("zstd", zstandard.compress(bytes(64 << 20))),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(TEXT)),
    ],
    ids=[
        "cut",
        "another page",
        "unknown codec",
        "no frame",
        "empty",
        "torn frame",
        "another page in a frame",
        "a bomb",
        "a frame without its size",
    ],
)
def test_an_invalid_inline_body_is_not_used(codec: str, data: bytes) -> None:
    assert carrying(TEXT, codec, data) is None


def test_an_inline_body_over_the_limit_is_not_decompressed() -> None:
    assert carrying(
        bytes(MAX_INLINE_BODY), "zstd", zstandard.compress(bytes(MAX_INLINE_BODY))
    ) == bytes(MAX_INLINE_BODY)
    assert (
        carrying(bytes(MAX_INLINE_BODY + 1), "zstd", zstandard.compress(bytes(MAX_INLINE_BODY + 1)))
        is None
    )


def test_an_invalid_inline_part_is_a_bad_envelope() -> None:
    raw = msgspec.json.decode(written(TEXT))
    with pytest.raises(BadEnvelope, match="not a PageMessage"):
        PageMessage.read(
            msgspec.json.encode(raw | {"inline": {"codec": "raw", "data": "not base64!"}})
        )


@pytest.mark.parametrize(
    ("kind", "name"), [(PageMessage, "page"), (RecordsMessage, "records")], ids=["page", "records"]
)
def test_a_message_of_a_newer_version_is_not_a_broken_message(
    kind: type[PageMessage | RecordsMessage], name: str
) -> None:
    raw = {"type": f"penstock.{name}.v2", "event": "", "parts": []}
    with pytest.raises(NewerMessage, match="version 2 is newer than version 1"):
        kind.read(msgspec.json.encode(raw))
    with pytest.raises(BadEnvelope) as e:
        kind.read(msgspec.json.encode(raw | {"type": f"penstock.{name}.v1"}))
    assert not isinstance(e.value, NewerMessage)
