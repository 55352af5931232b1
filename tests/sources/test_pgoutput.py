"""The decoder of PostgreSQL's change stream: every kind of message, every kind of value, and bytes
that are neither.
"""

from __future__ import annotations

import contextlib
import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sources.postgres import pgoutput
from penstock.sources.postgres.pgoutput import (
    BadChange,
    Begin,
    Commit,
    Decoder,
    Delete,
    Emitted,
    Insert,
    Origin,
    Relation,
    Truncate,
    Type,
    Update,
)

UNCHANGED = object()


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def relation(
    oid: int = 7,
    columns: tuple[tuple[str, int, bool], ...] = (("id", 20, True), ("url", 25, False)),
    *,
    name: str = "scrape_requests",
) -> bytes:
    head = (
        b"R"
        + struct.pack(">I", oid)
        + text("public")
        + text(name)
        + b"d"
        + struct.pack(">H", len(columns))
    )
    return head + b"".join(
        bytes([key]) + text(column) + struct.pack(">Ii", kind, -1) for column, kind, key in columns
    )


def row(*values: Any) -> bytes:
    out = struct.pack(">H", len(values))
    for value in values:
        if value is None:
            out += b"n"
        elif value is UNCHANGED:
            out += b"u"
        else:
            out += b"t" + struct.pack(">I", len(value.encode())) + value.encode()
    return out


def change(kind: bytes, *parts: bytes, oid: int = 7) -> bytes:
    return kind + struct.pack(">I", oid) + b"".join(parts)


def decoder_with_table(*columns: tuple[str, int, bool]) -> Decoder:
    decoder = Decoder()
    decoder.decode(relation(columns=columns or (("id", 20, True), ("url", 25, False))))
    return decoder


def inserted(decoder: Decoder, *values: Any) -> dict[str, Any]:
    found = decoder.decode(change(b"I", b"N", row(*values)))
    assert isinstance(found, Insert)
    return found.row


# -- each message ----------------------------------------------------------------------------------


def test_begin_and_commit_messages_are_decoded_with_position_and_time() -> None:
    assert Decoder().decode(b"B" + struct.pack(">QqI", 0x1_0000_0010, 1_500_000, 77)) == Begin(
        0x1_0000_0010, pgoutput.EPOCH + 1.5, 77
    )
    assert Decoder().decode(b"C" + struct.pack(">BQQq", 0, 16, 24, 2_000_000)) == Commit(
        16, 24, pgoutput.EPOCH + 2
    )


def test_origin_type_and_emitted_messages_are_decoded() -> None:
    assert Decoder().decode(b"O" + struct.pack(">Q", 9) + text("elsewhere")) == Origin(
        9, "elsewhere"
    )
    assert Decoder().decode(b"Y" + struct.pack(">I", 900) + text("public") + text("mood")) == Type(
        900, "public", "mood"
    )
    assert Decoder().decode(
        b"M" + struct.pack(">BQ", 1, 5) + text("outbox") + struct.pack(">I", 2) + b"hi"
    ) == Emitted(True, 5, "outbox", b"hi")


def test_a_row_of_an_undescribed_table_is_an_error() -> None:
    decoder = Decoder()
    with pytest.raises(BadChange, match="has not described"):
        decoder.decode(change(b"I", b"N", row("1", "x")))
    table = decoder.decode(relation())
    assert isinstance(table, Relation)
    assert table.label == "public.scrape_requests"
    assert [c.key for c in table.columns] == [True, False]
    assert inserted(decoder, "1", "x") == {"id": 1, "url": "x"}


def test_rows_after_a_table_change_have_the_new_columns() -> None:
    decoder = decoder_with_table()
    assert inserted(decoder, "1", "x") == {"id": 1, "url": "x"}
    decoder.decode(relation(columns=(("id", 20, True), ("url", 25, False), ("rank", 23, False))))
    assert inserted(decoder, "2", "y", "3") == {"id": 2, "url": "y", "rank": 3}
    with pytest.raises(BadChange, match="has 2 columns, and the table has 3"):
        inserted(decoder, "2", "y")


def test_an_update_without_an_old_row_lists_the_unchanged_columns() -> None:
    found = decoder_with_table().decode(change(b"U", b"N", row("1", UNCHANGED)))
    assert isinstance(found, Update)
    assert found.row == {"id": 1}
    assert found.unchanged == ("url",)
    assert found.old is None


def test_an_update_with_a_new_key_has_only_the_old_key_as_its_old_row() -> None:
    found = decoder_with_table().decode(change(b"U", b"K", row("1", None), b"N", row("2", "x")))
    assert isinstance(found, Update)
    assert found.old == {"id": 1}
    assert found.row == {"id": 2, "url": "x"}


def test_an_update_with_a_full_old_row_fills_in_the_unchanged_columns() -> None:
    found = decoder_with_table().decode(
        change(b"U", b"O", row("1", "long"), b"N", row("1", UNCHANGED))
    )
    assert isinstance(found, Update)
    assert found.row == {"id": 1, "url": "long"}
    assert found.unchanged == ()
    assert found.old == {"id": 1, "url": "long"}


def test_delete_and_truncate_messages_are_decoded() -> None:
    decoder = decoder_with_table()
    gone = decoder.decode(change(b"D", b"K", row("1", None)))
    assert isinstance(gone, Delete)
    assert gone.old == {"id": 1}
    gone = decoder.decode(change(b"D", b"O", row("1", None)))
    assert isinstance(gone, Delete)
    assert gone.old == {"id": 1, "url": None}
    empty = decoder.decode(b"T" + struct.pack(">IBI", 1, 3, 7))
    assert isinstance(empty, Truncate)
    assert empty.relations[0].name == "scrape_requests"
    assert empty.cascade
    assert empty.restart


@pytest.mark.parametrize(
    ("oid", "written", "value"),
    [
        (16, "t", True),
        (16, "f", False),
        (20, "-9223372036854775808", -(2**63)),
        (21, "3", 3),
        (23, "x", "x"),
        (26, "4294967295", 4294967295),
        (701, "1.5", 1.5),
        (701, "NaN", "NaN"),
        (700, "-Infinity", "-Infinity"),
        (1700, "1.10", "1.10"),
        (3802, '{"a": [1, null]}', {"a": [1, None]}),
        (114, "{broken", "{broken"),
        (3802, "[" * 100_000, "[" * 100_000),
        (1184, "2026-11-16 04:09:02.123+00", "2026-11-16T04:09:02.123+00:00"),
        (1184, "2026-11-16 04:09:02+05:30", "2026-11-16T04:09:02+05:30"),
        (1114, "2026-11-16 04:09:02", "2026-11-16T04:09:02"),
        (1184, "infinity", "infinity"),
        (1114, "0044-03-15 00:00:00 BC", "0044-03-15 00:00:00 BC"),
        (1082, "2026-11-16", "2026-11-16"),
        (17, "\\x00ff", "00ff"),
        (1007, "{1,2}", "{1,2}"),
        (2950, "6f1c4bae-0000-0000-0000-000000000000", "6f1c4bae-0000-0000-0000-000000000000"),
    ],
)
def test_a_column_value_is_converted_to_its_json_type(oid: int, written: str, value: Any) -> None:
    assert inserted(decoder_with_table(("v", oid, False)), written) == {"v": value}
    assert pgoutput.row_of([("a", oid), ("b", oid)], [written, None]) == {"a": value, "b": None}


def test_a_null_is_none_and_invalid_utf8_is_decoded_with_replacement() -> None:
    decoder = decoder_with_table(("v", 25, False))
    assert inserted(decoder, None) == {"v": None}
    found = decoder.decode(
        change(b"I", b"N", struct.pack(">H", 1) + b"t" + struct.pack(">I", 2) + b"\xff\xfe")
    )
    assert isinstance(found, Insert)
    assert found.row == {"v": "��"}


def test_an_lsn_is_parsed_and_formatted_as_postgres_does() -> None:
    assert pgoutput.lsn_of("16/B374D848") == 0x16B374D848
    assert pgoutput.lsn_text(0x16B374D848) == "16/B374D848"
    for wrong in ("", "16", "16/", "x/1", "1/123456789", "-1/1"):
        with pytest.raises(ValueError):
            pgoutput.lsn_of(wrong)


# -- properties ------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(), st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
)


@given(st.lists(VALUES, max_size=8), st.sampled_from([25, 16, 20, 701, 3802, 1184, 17]))
def test_any_row_is_decoded_under_its_column_names(values: list[str | None], oid: int) -> None:
    decoder = (
        decoder_with_table(*[(f"c{i}", oid, i == 0) for i in range(len(values))])
        if values
        else Decoder()
    )
    if not values:
        decoder.decode(relation(columns=()))
    found = inserted(decoder, *values)
    assert list(found) == [f"c{i}" for i in range(len(values))]
    for value, written in zip(found.values(), values, strict=True):
        assert (value is None) == (written is None) or (oid == 3802 and written is not None)
        assert not (isinstance(value, float) and not math.isfinite(value))
        if oid == 25:
            assert value == written


SAMPLES = (
    b"B" + struct.pack(">QqI", 16, 1, 77),
    b"C" + struct.pack(">BQQq", 0, 16, 24, 2),
    b"O" + struct.pack(">Q", 9) + text("elsewhere"),
    b"Y" + struct.pack(">I", 900) + text("public") + text("mood"),
    relation(8),
    change(b"I", b"N", row("1", "x")),
    change(b"U", b"O", row("1", "long"), b"N", row("1", UNCHANGED)),
    change(b"D", b"K", row("1", None)),
    b"T" + struct.pack(">IBI", 1, 3, 7),
    b"M" + struct.pack(">BQ", 1, 5) + text("outbox") + struct.pack(">I", 2) + b"hi",
)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: chr(sample[0]))
def test_a_truncated_message_and_one_with_extra_bytes_raise_bad_change(sample: bytes) -> None:
    decoder_with_table().decode(sample)
    for cut in range(len(sample)):
        with pytest.raises(BadChange):
            decoder_with_table().decode(sample[:cut])
    with pytest.raises(BadChange, match="1 too many"):
        decoder_with_table().decode(sample + b"\0")


@pytest.mark.parametrize("kind", [*"SEcAbPKrp", "?", "\0", "ÿ"])
def test_a_message_of_an_unexpected_kind_raises_bad_change(kind: str) -> None:
    with pytest.raises(BadChange):
        decoder_with_table().decode(kind.encode("latin-1") + bytes(40))


@settings(max_examples=500)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.tuples(st.sampled_from(b"BCORYIUDTM"), st.binary(max_size=120)).map(
            lambda p: bytes([p[0]]) + p[1]
        ),
    )
)
def test_random_bytes_raise_only_bad_change(data: bytes) -> None:
    with contextlib.suppress(BadChange):
        decoder_with_table().decode(data)


@settings(max_examples=500)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_corrupted_message_raises_only_bad_change(
    sample: bytes, flips: list[tuple[int, int]]
) -> None:
    damaged = bytearray(sample)
    for at, byte in flips:
        damaged[at % len(damaged)] = byte
    decoder = decoder_with_table()
    with contextlib.suppress(BadChange):
        decoder.decode(bytes(damaged))
    with contextlib.suppress(BadChange):
        decoder.decode(change(b"I", b"N", row("1", "x")))
