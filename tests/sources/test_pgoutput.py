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


def introduced(*columns: tuple[str, int, bool]) -> Decoder:
    decoder = Decoder()
    decoder.decode(relation(columns=columns or (("id", 20, True), ("url", 25, False))))
    return decoder


def inserted(decoder: Decoder, *values: Any) -> dict[str, Any]:
    found = decoder.decode(change(b"I", b"N", row(*values)))
    assert isinstance(found, Insert)
    return found.row


# -- each message ----------------------------------------------------------------------------------


def test_a_transaction_says_its_commit_when_it_begins() -> None:
    assert Decoder().decode(b"B" + struct.pack(">QqI", 0x1_0000_0010, 1_500_000, 77)) == Begin(
        0x1_0000_0010, pgoutput.EPOCH + 1.5, 77
    )
    assert Decoder().decode(b"C" + struct.pack(">BQQq", 0, 16, 24, 2_000_000)) == Commit(
        16, 24, pgoutput.EPOCH + 2
    )


def test_origins_types_and_messages_are_read() -> None:
    assert Decoder().decode(b"O" + struct.pack(">Q", 9) + text("elsewhere")) == Origin(
        9, "elsewhere"
    )
    assert Decoder().decode(b"Y" + struct.pack(">I", 900) + text("public") + text("mood")) == Type(
        900, "public", "mood"
    )
    assert Decoder().decode(
        b"M" + struct.pack(">BQ", 1, 5) + text("outbox") + struct.pack(">I", 2) + b"hi"
    ) == Emitted(True, 5, "outbox", b"hi")


def test_a_table_is_introduced_before_its_rows() -> None:
    decoder = Decoder()
    with pytest.raises(BadChange, match="has not described"):
        decoder.decode(change(b"I", b"N", row("1", "x")))
    table = decoder.decode(relation())
    assert isinstance(table, Relation)
    assert table.label == "public.scrape_requests"
    assert [c.key for c in table.columns] == [True, False]
    assert inserted(decoder, "1", "x") == {"id": 1, "url": "x"}


def test_a_table_that_changed_is_introduced_again() -> None:
    decoder = introduced()
    assert inserted(decoder, "1", "x") == {"id": 1, "url": "x"}
    decoder.decode(relation(columns=(("id", 20, True), ("url", 25, False), ("rank", 23, False))))
    assert inserted(decoder, "2", "y", "3") == {"id": 2, "url": "y", "rank": 3}
    with pytest.raises(BadChange, match="has 2 columns, and the table has 3"):
        inserted(decoder, "2", "y")


def test_an_update_without_an_old_row_names_what_was_not_touched() -> None:
    found = introduced().decode(change(b"U", b"N", row("1", UNCHANGED)))
    assert isinstance(found, Update)
    assert found.row == {"id": 1}
    assert found.unchanged == ("url",)
    assert found.old is None


def test_an_update_with_a_new_key_tells_the_old_key_and_nothing_else() -> None:
    found = introduced().decode(change(b"U", b"K", row("1", None), b"N", row("2", "x")))
    assert isinstance(found, Update)
    assert found.old == {"id": 1}
    assert found.row == {"id": 2, "url": "x"}


def test_an_update_with_the_whole_old_row_keeps_what_was_not_touched() -> None:
    found = introduced().decode(change(b"U", b"O", row("1", "long"), b"N", row("1", UNCHANGED)))
    assert isinstance(found, Update)
    assert found.row == {"id": 1, "url": "long"}
    assert found.unchanged == ()
    assert found.old == {"id": 1, "url": "long"}


def test_deletions_and_truncations_are_read() -> None:
    decoder = introduced()
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
def test_a_value_has_the_type_that_json_has_for_it(oid: int, written: str, value: Any) -> None:
    assert inserted(introduced(("v", oid, False)), written) == {"v": value}
    assert pgoutput.value(oid, written) == value
    assert pgoutput.value(oid, None) is None


def test_a_null_is_none_and_bytes_that_are_no_text_are_still_read() -> None:
    decoder = introduced(("v", 25, False))
    assert inserted(decoder, None) == {"v": None}
    found = decoder.decode(
        change(b"I", b"N", struct.pack(">H", 1) + b"t" + struct.pack(">I", 2) + b"\xff\xfe")
    )
    assert isinstance(found, Insert)
    assert found.row == {"v": "��"}


def test_a_position_is_written_as_postgres_writes_it() -> None:
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
def test_whatever_a_row_holds_it_comes_out_under_its_columns(
    values: list[str | None], oid: int
) -> None:
    decoder = (
        introduced(*[(f"c{i}", oid, i == 0) for i in range(len(values))]) if values else Decoder()
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
def test_a_message_that_is_cut_anywhere_or_has_more_is_one_declared_error(sample: bytes) -> None:
    introduced().decode(sample)
    for cut in range(len(sample)):
        with pytest.raises(BadChange):
            introduced().decode(sample[:cut])
    with pytest.raises(BadChange, match="1 too many"):
        introduced().decode(sample + b"\0")


@pytest.mark.parametrize("kind", [*"SEcAbPKrp", "?", "\0", "ÿ"])
def test_a_message_that_was_not_asked_for_is_refused(kind: str) -> None:
    with pytest.raises(BadChange):
        introduced().decode(kind.encode("latin-1") + bytes(40))


@settings(max_examples=500)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.tuples(st.sampled_from(b"BCORYIUDTM"), st.binary(max_size=120)).map(
            lambda p: bytes([p[0]]) + p[1]
        ),
    )
)
def test_no_bytes_make_it_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(BadChange):
        introduced().decode(data)


@settings(max_examples=500)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_no_flipped_bytes_make_it_raise_anything_else(
    sample: bytes, flips: list[tuple[int, int]]
) -> None:
    damaged = bytearray(sample)
    for at, byte in flips:
        damaged[at % len(damaged)] = byte
    decoder = introduced()
    with contextlib.suppress(BadChange):
        decoder.decode(bytes(damaged))
    with contextlib.suppress(BadChange):
        decoder.decode(change(b"I", b"N", row("1", "x")))
