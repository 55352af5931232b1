"""The three embedded sinks (JSON Lines, CSV, SQLite) with real files."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.ports import Reopen, Row, TableSink
from penstock.sinks import csv as csv_sink
from penstock.sinks import jsonl, sqlite
from penstock.sinks.append_file import Mark, read_mark

csv.field_size_limit(1 << 30)
RECORDS = st.dictionaries(
    st.text(max_size=3), st.text(max_size=5) | st.integers() | st.none(), max_size=4
)
OPENERS: dict[str, Callable[..., Any]] = {
    "jsonl": jsonl.open_sink,
    "csv": csv_sink.open_sink,
    "sqlite": sqlite.open_sink,
}


def row(n: int, key: str | None = None, order: int | None = None, /, **fields: Any) -> Row:
    key = key if key is not None else f"k{n}"
    origin = {
        "event_id": f"e{n}",
        "trace_id": "t",
        "url": "https://shop.example/" + key,
        "key": key,
        "extractor": "product",
        "version": 1,
        "fetched_at": 12.5,
    }
    return Row(
        n,
        key,
        json.dumps(fields | {"_penstock": origin}).encode(),
        order if order is not None else n,
    )


def removal(n: int, key: str, order: int | None = None) -> Row:
    made = row(n, key, order, sku=key)
    return Row(n, key, made.body.replace(b'"event_id"', b'"deleted": true, "event_id"'), made.order)


def cells(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f, strict=True))


def lines(path: Path) -> list[Any]:
    raw = path.read_bytes()
    assert raw == b"" or raw.endswith(b"\n")
    return [json.loads(line) for line in raw.splitlines()]


def table(path: Path, sql: str) -> list[tuple[Any, ...]]:
    db = apsw.Connection(str(path))
    try:
        return list(db.execute(sql))
    finally:
        db.close()


# -- URLs and options ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", OPENERS)
def test_a_path_is_relative_to_the_base_unless_it_is_absolute(scheme: str, tmp_path: Path) -> None:
    for url, path in {
        f"{scheme}:out/a.x": tmp_path / "out" / "a.x",
        f"{scheme}:../a.x": tmp_path.parent / "a.x",
        f"{scheme}:/abs/a.x": Path("/abs/a.x"),
        f"{scheme}:///abs/a.x": Path("/abs/a.x"),
        f"{scheme}:what%3F.x": tmp_path / "what?.x",
    }.items():
        sink = OPENERS[scheme](url, {}, tmp_path)
        assert sink.path == path
        assert sink.name == url
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", OPENERS)
@pytest.mark.parametrize(
    "rest", ["", "-", "out/", ".", "//host/file", ":memory:", "a.x?colour=red", "a\0b"]
)
def test_a_url_without_a_file_is_refused_with_a_hint(
    scheme: str, rest: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as e:
        OPENERS[scheme](f"{scheme}:{rest}", {}, tmp_path)
    assert e.value.hint


def test_an_unknown_or_invalid_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tabel") as e:
        sqlite.open_sink("sqlite:a.db", {"tabel": "x"}, tmp_path)
    assert "table" in e.value.hint
    for url in (
        "?mode=replace",
        "?table=sqlite_x",
        "?table=_penstock_x",
        "?table=",
        "?max_columns=many",
        "?max_columns=0",
        "?max_columns=5000",
    ):
        with pytest.raises(ConfigError):
            sqlite.open_sink("sqlite:a.db" + url, {}, tmp_path)
    with pytest.raises(ConfigError, match="not a jsonl URL"):
        jsonl.open_sink("csv:a.csv", {}, tmp_path)


# -- files: both jsonl and csv ---------------------------------------------------------------------


@pytest.fixture(params=["jsonl", "csv"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    return lambda: OPENERS[request.param](f"{request.param}:out/deep/rows", {}, tmp_path)


def ns(sink: Any) -> list[int]:
    rows = lines(sink.path) if isinstance(sink, jsonl.JsonLinesSink) else cells(sink.path)
    return [int(each["n"]) for each in rows]


def test_a_missing_file_is_created_with_its_directories(make: Callable[[], Any]) -> None:
    sink = make()
    sink.open(0, "")
    assert sink.path.read_bytes() == b""
    sink.write([row(1, n=1), row(2, n=2)])
    sink.close()
    assert ns(sink) == [1, 2]
    assert sink.notice == ""


def test_rows_after_the_recorded_mark_are_truncated_and_written_again(
    make: Callable[[], Any],
) -> None:
    sink = make()
    first = sink.open(0, "")
    mark = sink.write([row(1, n=1)])
    sink.write([row(2, n=2), row(3, n=3)])
    sink.close()
    complete = sink.path.read_bytes()
    recorded = read_mark(mark)
    assert recorded is not None
    start = len(complete[: recorded.at])
    for torn in range(start, len(complete) + 1):
        sink.path.write_bytes(complete[:torn])
        again = make()
        assert again.open(1, mark) == mark
        assert again.notice == ""
        again.write([row(2, n=2), row(3, n=3)])
        again.close()
        assert again.path.read_bytes() == complete
    for torn in range(len(complete) + 1):
        sink.path.write_bytes(complete[:torn])
        again = make()
        assert again.open(0, first) == first
        assert again.path.read_bytes() == b""
        again.close()


def test_a_file_shorter_than_its_mark_is_continued_on_a_new_line(
    make: Callable[[], Any],
) -> None:
    sink = make()
    sink.open(0, "")
    sink.write([row(1, n=1)])
    mark = sink.write([row(2, n=2)])
    sink.close()
    complete = sink.path.read_bytes()
    sink.path.write_bytes(complete[:-1].removesuffix(b"\r"))  # as an editor without a final newline
    again = make()
    again.open(2, mark)
    assert "after row 2" in again.notice
    again.write([row(3, n=3)])
    again.close()
    assert ns(again) == [1, 2, 3]


def test_an_edited_file_is_not_truncated(make: Callable[[], Any]) -> None:
    sink = make()
    sink.open(0, "")
    sink.write([row(1, n=1, title="first")])
    mark = sink.write([row(2, n=2, title="old")])
    sink.close()
    edited = sink.path.read_bytes().replace(b"old", b"much longer than it was")
    sink.path.write_bytes(edited)
    again = make()
    again.open(2, mark)
    assert again.notice
    assert again.path.read_bytes() == edited
    again.close()


def test_an_existing_file_is_continued_and_never_truncated(
    make: Callable[[], Any],
) -> None:
    sink = make()
    sink.open(0, "")
    sink.write([row(1, n=1)])
    sink.close()
    second = make()
    mark = second.open(0, "")
    second.write([row(1, n=7)])
    second.close()
    assert ns(second) == [1, 7]
    killed = make()
    assert killed.open(0, mark) == mark
    killed.close()
    assert ns(killed) == [1]


def test_a_replaced_file_is_not_truncated_even_if_no_row_was_written(
    make: Callable[[], Any],
) -> None:
    sink = make()
    mark = sink.open(0, "")
    sink.close()
    other = sink.path.with_name("other")
    other.write_bytes(b"n\r\n7\r\n" if isinstance(sink, csv_sink.CsvSink) else b'{"n": 7}\n')
    os.replace(other, sink.path)
    again = make()
    again.open(0, mark)
    again.write([row(1, n=1)]) if isinstance(sink, jsonl.JsonLinesSink) else None
    again.close()
    assert ns(again)[0] == 7


@pytest.mark.parametrize("harm", ["removed", "replaced", "cut", "appended"])
def test_a_file_changed_while_open_raises_reopen_before_a_write(
    make: Callable[[], Any], harm: str
) -> None:
    sink = make()
    sink.open(0, "")
    mark = sink.write([row(1, n=1)])
    if harm in ("removed", "replaced"):
        sink.path.rename(sink.path.with_name("rotated"))
    if harm == "replaced":
        sink.path.touch()
    if harm == "cut":
        os.truncate(sink.path, 3)
    if harm == "appended":
        with open(sink.path, "ab") as f:
            f.write(b"x")
    before = sink.path.read_bytes() if sink.path.exists() else None
    with pytest.raises(Reopen):
        sink.write([row(2, n=2)])
    assert (sink.path.read_bytes() if sink.path.exists() else None) == before
    if harm == "cut":  # three bytes are a valid CSV header
        sink.close()
        return
    sink.open(1, mark)
    sink.write([row(2, n=2)])
    sink.close()
    assert ns(sink) == ([2] if harm in ("removed", "replaced") else [1, 2])


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_full_disk_leaves_no_partial_line_and_loses_no_row(
    make: Callable[[], Any], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = make()
    sink.open(0, "")
    mark = sink.write([row(1, n=1)])
    before = sink.path.read_bytes()
    real = os.write

    def full(fd: int, data: Any = b"") -> int:
        if call == "write" and len(data) > 10:
            return real(fd, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match=r"No space.*out/deep/rows"):
            sink.write([row(2, n=2)])
    assert sink.path.read_bytes() == before
    sink.open(1, mark)
    try:
        sink.write([row(2, n=2)])
    finally:
        sink.close()
    assert ns(sink) == [1, 2]


def test_two_sinks_cannot_open_one_file_together(make: Callable[[], Any]) -> None:
    first, second = make(), make()
    first.open(0, "")
    with pytest.raises(Unreachable, match="another process"):
        second.open(0, "")
    first.close()
    second.open(0, "")
    second.close()


def test_a_target_that_is_not_a_regular_file_is_refused(make: Callable[[], Any]) -> None:
    sink = make()
    sink.path.parent.mkdir(parents=True)
    os.mkfifo(sink.path)
    with pytest.raises(ConfigError, match="regular file"):
        sink.open(0, "")


@pytest.mark.parametrize("scheme", ["jsonl", "csv"])
def test_the_files_of_several_machines_are_each_truncated_to_their_mark(
    scheme: str, tmp_path: Path
) -> None:
    a, b = (OPENERS[scheme](f"{scheme}:out", {}, tmp_path / name) for name in "ab")
    mark = a.open(0, "")
    a.write([row(1, x=1)])  # killed before the mark is recorded
    a.close()
    mark = b.open(0, mark)
    mark = b.write([row(1, x=1)])
    b.close()
    a.restore(mark)
    assert (tmp_path / "a" / "out").read_bytes() == b""
    mark = a.open(1, mark)
    mark = a.write([row(2, x=2)])
    a.write([row(3, x=3)])
    a.close()
    mark = b.open(2, mark)
    assert b.notice == ""
    mark = b.write([row(3, x=3)])
    b.close()
    complete = (tmp_path / "b" / "out").read_bytes()
    a.restore(mark)
    b.restore(mark)
    assert (tmp_path / "b" / "out").read_bytes() == complete
    keys = (
        [line["_penstock"]["key"] for line in lines(tmp_path / "a" / "out")]
        if scheme == "jsonl"
        else [c["_penstock_key"] for c in cells(tmp_path / "a" / "out")]
    )
    assert keys == ["k2"]


def test_a_file_that_was_concatenated_from_older_files_is_not_truncated(tmp_path: Path) -> None:
    sink = jsonl.open_sink("jsonl:out", {}, tmp_path)
    sink.open(0, "")
    mark = sink.write([row(1)])
    (tmp_path / "out").rename(tmp_path / "old")
    mark = sink.open(1, mark)
    mark = sink.write([row(2)])
    sink.close()
    (tmp_path / "both").write_bytes(
        (tmp_path / "old").read_bytes() + (tmp_path / "out").read_bytes()
    )
    (tmp_path / "both").rename(tmp_path / "out")
    sink.open(2, mark)
    sink.close()
    assert [line["_penstock"]["key"] for line in lines(tmp_path / "out")] == ["k1", "k2"]


def test_a_mark_may_be_a_plain_offset_and_an_invalid_mark_is_ignored() -> None:
    assert read_mark("120") == Mark(120)
    assert [read_mark(text) for text in ("", "-1", "x", "[]", '{"at":-1}', "{}")] == [None] * 6


# -- jsonl -----------------------------------------------------------------------------------------


def test_a_record_with_line_breaks_in_its_json_is_one_line(tmp_path: Path) -> None:
    sink = jsonl.open_sink("jsonl:a.jsonl", {}, tmp_path)
    sink.open(0, "")
    sink.write([Row(1, "k", b'{\r\n  "a": "x\\ny"\n}', 1), Row(2, "k", b'{"a":"\xe2\x82\xac"}', 2)])
    sink.close()
    assert lines(sink.path) == [{"a": "x\ny"}, {"a": "€"}]


# -- csv -------------------------------------------------------------------------------------------


def open_csv(tmp_path: Path, options: dict[str, Any] | None = None) -> csv_sink.CsvSink:
    return csv_sink.open_sink("csv:a.csv", options or {}, tmp_path)


def write_csv(sink: csv_sink.CsvSink, position: int, mark: str, rows: list[Row]) -> str:
    """Write rows and open the sink again if needed, as the flusher does."""
    try:
        return sink.write(rows)
    except Reopen:
        sink.open(position, mark)
        return sink.write(rows)


def test_columns_are_the_fields_in_order_followed_by_the_provenance(tmp_path: Path) -> None:
    sink = open_csv(tmp_path)
    sink.open(0, "")
    sink.write([row(1, sku="a", price=1.5), row(2, sku="b", title="T")])
    sink.close()
    assert sink.path.read_bytes().split(b"\r\n")[0].decode() == (
        "sku,price,title,_penstock_event_id,_penstock_trace_id,_penstock_url,_penstock_key,_penstock_extractor,_penstock_version,_penstock_fetched_at"
    )
    assert cells(sink.path)[1] == {
        "sku": "b",
        "price": "",
        "title": "T",
        "_penstock_event_id": "e2",
        "_penstock_trace_id": "t",
        "_penstock_url": "https://shop.example/k2",
        "_penstock_key": "k2",
        "_penstock_extractor": "product",
        "_penstock_version": "1",
        "_penstock_fetched_at": "12.5",
    }


def test_values_are_quoted_by_rfc_4180_and_nested_ones_are_json(tmp_path: Path) -> None:
    hard = {
        "a": 'a "quote", twice\r\nand again\n',
        "b": [1, {"c": None}],
        "d": True,
        "e": None,
        "f": " padded ",
        "g": "=1+1",
        'h,\n"': 10**30,
    }
    sink = open_csv(tmp_path)
    sink.open(0, "")
    sink.write([row(1, **hard)])
    sink.close()
    (got,) = cells(sink.path)
    assert {k: v for k, v in got.items() if not k.startswith("_")} == {
        "a": hard["a"],
        "b": '[1,{"c":null}]',
        "d": "true",
        "e": "",
        "f": " padded ",
        "g": "=1+1",
        'h,\n"': "1" + "0" * 30,
    }


def test_a_new_field_adds_a_column_to_every_existing_line(tmp_path: Path) -> None:
    sink = open_csv(tmp_path)
    sink.open(0, "")
    mark = sink.write([row(1, n=1, text='two\r\n"lines"\n'), row(2, n=2, text="x" * 3_000_000)])
    sink.path.chmod(0o640)
    mark = write_csv(sink, 2, mark, [row(3, n=3, new="N")])
    mark = write_csv(sink, 3, mark, [row(4, n=4, newer="M")])
    sink.close()
    got = cells(sink.path)
    assert [(each["n"], each["new"], each["newer"]) for each in got] == [
        ("1", "", ""),
        ("2", "", ""),
        ("3", "N", ""),
        ("4", "", "M"),
    ]
    assert got[0]["text"] == 'two\r\n"lines"\n'
    assert len(got[1]["text"]) == 3_000_000
    assert all(each["_penstock_event_id"] == f"e{each['n']}" for each in got)
    assert stat.S_IMODE(sink.path.stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert sink.notice == ""


def test_a_symbolic_link_is_kept_when_a_column_is_added(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "a.csv").symlink_to("data/real.csv")
    sink = open_csv(tmp_path)
    sink.open(0, "")
    mark = sink.write([row(1, n=1)])
    write_csv(sink, 1, mark, [row(2, n=2, new=1)])
    sink.close()
    assert (tmp_path / "a.csv").is_symlink()
    assert len(cells(tmp_path / "data" / "real.csv")) == 2


def test_a_failed_rewrite_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = open_csv(tmp_path)
    sink.open(0, "")
    mark = sink.write([row(1, n=1)])
    before = sink.path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            sink.write([row(2, n=2, new=1)])
    assert sink.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert sink.open(1, mark) == mark
    sink.close()


def test_an_existing_csv_keeps_its_columns_even_if_names_repeat(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("\ufeffn,a,a\n0,x,y".encode())
    sink = open_csv(tmp_path)
    mark = sink.open(0, "")
    write_csv(sink, 0, mark, [row(1, n=1, a="z")])
    sink.close()
    raw = list(csv.reader(io.StringIO(sink.path.read_text("utf-8-sig"), newline="")))
    assert raw[0][:3] == ["n", "a", "a"]
    assert raw[1] == ["0", "x", "y", *[""] * 7]
    assert raw[2][:4] == ["1", "z", "z", "e1"]


def test_a_file_that_is_not_csv_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\x89PNG\xff\xfe\n\0")
    sink = open_csv(tmp_path)
    with pytest.raises(Unreachable, match="not a CSV") as e:
        sink.open(0, "")
    assert e.value.hint
    sink.close()
    assert (tmp_path / "a.csv").read_bytes() == b"\x89PNG\xff\xfe\n\0"


def test_csv_fields_beyond_max_columns_are_stored_as_json_with_a_notice(tmp_path: Path) -> None:
    sink = open_csv(tmp_path, {"max_columns": 10})
    sink.open(0, "")
    mark = sink.write([row(1, a=1, b=2)])
    for n in (2, 3):
        mark = write_csv(sink, n - 1, mark, [row(n, a=n, c=3, d={"e": [4]})])
    sink.close()
    got = cells(sink.path)
    assert len(got[0]) == 10
    assert [each["_penstock_rest"] for each in got] == [
        "",
        '{"c":3,"d":{"e":[4]}}',
        '{"c":3,"d":{"e":[4]}}',
    ]
    assert "max_columns" in sink.notice


FORMULAS = [
    ("=1+1", "'=1+1"),
    ("+1+cmd|' /C calc'!A0", "'+1+cmd|' /C calc'!A0"),
    ("-2+3", "'-2+3"),
    ("@SUM(A1)", "'@SUM(A1)"),
    ("\t=1", "'\t=1"),
    ("\r=1", "'\r=1"),
    ("\n=1", "'\n=1"),
    ("\uff1d1+1", "'\uff1d1+1"),
    (" =1+1", "' =1+1"),
    ("\u00a0\u3000=1+1", "'\u00a0\u3000=1+1"),
    ("\ufeff=1+1", "'\ufeff=1+1"),
    ("  -5", "  -5"),
    ("  a", "  a"),
    ("-5", "-5"),
    ("+4.50", "+4.50"),
    ("-1,234.5", "-1,234.5"),
    ("-5\n", "'-5\n"),
    ("a=1", "a=1"),
    ("", ""),
    (-5, "-5"),
    ({"=a": "=b"}, '{"=a":"=b"}'),
]


@pytest.mark.parametrize(("value", "cell"), FORMULAS)
def test_formulas_escape_writes_an_apostrophe_before_a_formula(
    tmp_path: Path, value: Any, cell: str
) -> None:
    sink = open_csv(tmp_path, {"formulas": "escape"})
    write_csv(sink, 0, sink.open(0, ""), [row(1, value=value)])
    sink.close()
    assert cells(sink.path)[0]["value"] == cell


def test_formulas_escape_covers_names_and_keys_and_loses_no_field(tmp_path: Path) -> None:
    sink = open_csv(tmp_path, {"formulas": "escape"})
    write_csv(sink, 0, sink.open(0, ""), [row(1, "=k", **{"=a": 1, "'=a": 2, "=b": 3})])
    sink.close()
    [found] = cells(sink.path)
    assert found["_penstock_key"] == "'=k"
    assert (found["'=a"], found["'=b"]) == ("2", "3")
    assert json.loads(found["_penstock_rest"]) == {"=a": 1}
    assert not any(name.startswith("=") for name in found)


def test_csv_keeps_formulas_by_default_and_refuses_an_unknown_choice(tmp_path: Path) -> None:
    sink = open_csv(tmp_path)
    write_csv(sink, 0, sink.open(0, ""), [row(1, value="=1+1")])
    sink.close()
    assert cells(sink.path)[0]["value"] == "=1+1"
    with pytest.raises(ConfigError, match="formulas"):
        open_csv(tmp_path, {"formulas": "drop"})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(RECORDS, min_size=1, max_size=3), max_size=5))
def test_any_record_written_to_csv_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[dict[str, Any]]]
) -> None:
    sink = open_csv(tmp_path_factory.mktemp("csv"))
    mark, n, want = sink.open(0, ""), 0, []
    for batch in batches:
        rows = [row(n + i + 1, **fields) for i, fields in enumerate(batch)]
        mark = write_csv(sink, n, mark, rows)
        n += len(rows)
        want += [json.loads(each.body) for each in rows]
    sink.close()
    got = cells(sink.path)
    assert len(got) == len(want)
    for line, record in zip(got, want, strict=True):
        del record["_penstock"]
        assert {k: v for k, v in line.items() if v and not k.startswith("_penstock")} == {
            k: str(v) for k, v in record.items() if v not in (None, "")
        }


# -- sqlite ----------------------------------------------------------------------------------------


def open_sqlite(tmp_path: Path, **options: Any) -> sqlite.SqliteSink:
    return sqlite.open_sink("sqlite:out/a.db?table=products", options, tmp_path)


def test_upsert_keeps_one_row_per_key_from_the_newest_accepted_event(tmp_path: Path) -> None:
    sink = open_sqlite(tmp_path)
    sink.open(0, "")
    sink.write(
        [
            row(1, "a", 5, price=1),
            row(2, "a", 9, price=2),
            row(3, "b", 6, price=3),
            row(4, "a", 7, price=4, late=True),
        ]
    )
    sink.write([row(5, "a", 8, price=5), row(6, "b", 6, price=6)])
    sink.close()
    assert table(
        sink.path, "SELECT _penstock_key, price, _penstock_event_id, late FROM products ORDER BY 1"
    ) == [("a", 2, "e2", None), ("b", 6, "e6", None)]


def test_a_missing_field_becomes_null_and_a_column_of_the_user_is_kept(
    tmp_path: Path,
) -> None:
    sink = open_sqlite(tmp_path)
    mark = sink.open(0, "")
    sink.write([row(1, "a", price=1, offer="yes")])
    sink.close()
    table(sink.path, "ALTER TABLE products ADD COLUMN checked TEXT DEFAULT 'by hand'")
    sink.open(1, mark)
    sink.write([row(2, "a", price=2)])
    sink.close()
    assert table(sink.path, "SELECT price, offer, checked FROM products") == [(2, None, "by hand")]


def test_append_mode_stores_one_row_per_record(tmp_path: Path) -> None:
    sink = open_sqlite(tmp_path, mode="append")
    sink.open(0, "")
    sink.write([row(1, "a", price=1), row(2, "a", price=2), row(3, "a", 0, price=3)])
    sink.close()
    assert table(sink.path, "SELECT price FROM products ORDER BY rowid") == [(1,), (2,), (3,)]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_repeated_batch_writes_no_row_twice(tmp_path: Path, mode: str) -> None:
    sink = open_sqlite(tmp_path, mode=mode)
    mark = sink.open(0, "")
    sink.write([row(1, price=1), row(2, price=2)])
    sink.open(0, mark)  # killed before the mark is recorded
    sink.write([row(1, price=8), row(2, price=9), row(3, price=3)])
    sink.close()
    assert sink.notice == ""
    assert table(sink.path, "SELECT price FROM products ORDER BY rowid") == [(1,), (2,), (3,)]


def test_rows_of_a_new_ledger_are_not_taken_for_rows_of_the_old_one(tmp_path: Path) -> None:
    old = open_sqlite(tmp_path, mode="append")
    old_mark = old.open(0, "")
    old.write([row(n, price=n) for n in range(1, 6)])
    old.close()
    new = open_sqlite(tmp_path, mode="append")
    new.open(0, "")
    new.write([row(1, price=10)])
    new.close()
    old.open(5, old_mark)
    old.write([row(5, price=5), row(6, price=6)])
    old.close()
    assert [price for (price,) in table(old.path, "SELECT price FROM products")] == [
        1,
        2,
        3,
        4,
        5,
        10,
        6,
    ]


def test_a_replaced_or_restored_database_causes_a_notice_and_is_continued(tmp_path: Path) -> None:
    sink = open_sqlite(tmp_path, mode="append")
    mark = sink.open(0, "")
    sink.write([row(1, price=1)])
    backup = sink.path.read_bytes()
    sink.write([row(2, price=2)])
    sink.close()
    sink.path.write_bytes(backup)
    assert sink.open(2, mark) == mark
    assert "older than row 2" in sink.notice
    sink.write([row(2, price=2), row(3, price=3)])
    assert table(sink.path, "SELECT price FROM products") == [(1,), (3,)]
    sink.path.unlink()
    with pytest.raises(Reopen):
        sink.write([row(4, price=4)])
    assert sink.open(3, mark) != mark
    assert "not the database" in sink.notice
    sink.write([row(4, price=4)])
    sink.close()
    assert table(sink.path, "SELECT price FROM products") == [(4,)]


def test_the_first_value_decides_the_column_type_and_every_value_stays_exact(
    tmp_path: Path,
) -> None:
    sink = open_sqlite(tmp_path, mode="append")
    sink.open(0, "")
    sink.write([row(1, i=1, f=1.5, s="x", b=True, o={"a": [1]}, none=None), row(2, none=3)])
    sink.write(
        [row(3, i="007", f=2**60, s=12, b="n/a", late=None), row(4, i=10**30, s="7.0", f="1e3")]
    )
    sink.close()
    types = dict(
        table(
            sink.path,
            (
                "SELECT name, type FROM pragma_table_info('products') "
                "WHERE name NOT LIKE '\\_%' ESCAPE '\\'"
            ),
        )
    )
    assert types == {
        "i": "INTEGER",
        "f": "REAL",
        "s": "TEXT",
        "b": "INTEGER",
        "o": "TEXT",
        "none": "INTEGER",
        "late": "",
    }
    rows = table(
        sink.path, "SELECT i, f, s, b, o, none, _penstock_rest FROM products ORDER BY rowid"
    )
    assert rows[0] == (1, 1.5, "x", 1, '{"a":[1]}', None, None)
    assert rows[1][5] == 3
    assert rows[2][2:4] == ("12", "n/a")
    assert json.loads(rows[2][6]) == {"i": "007", "f": 2**60}
    assert json.loads(rows[3][6]) == {"i": 10**30, "f": "1e3"}


@pytest.mark.parametrize(
    "name",
    [
        "select",
        "rowid",
        'a"b',
        "",
        "a b",
        "'; DROP TABLE products; --",
        "été",
        "a.b[0]",
        "sqlite_x",
        "excluded",
        "1",
    ],
)
def test_any_field_name_is_a_column_name(tmp_path: Path, name: str) -> None:
    sink = open_sqlite(tmp_path, table=name if name and not name.startswith("sqlite_") else "t")
    sink.open(0, "")
    sink.write([row(1, "a", **{name: "v1"})])
    sink.write([row(2, "a", **{name: "v2", "order": 1})])
    sink.close()
    quoted = name.replace('"', '""')
    assert table(
        sink.path,
        f'SELECT "{quoted}" FROM "{(quoted if name and not name.startswith("sqlite_") else "t")}"',
    ) == [("v2",)]


def test_sqlite_fields_without_a_column_are_stored_as_json_with_a_notice(tmp_path: Path) -> None:
    sink = open_sqlite(tmp_path, max_columns=12)
    sink.open(0, "")
    sink.write(
        [
            row(1, "a", Title=1, title=2, _penstock_url=3, b=4, c=5, d=6, e=7),
            row(2, "b", **{"nul\0": 1}),
        ]
    )
    sink.write(
        [
            row(3, "c", _PENSTOCK_KEY="mine"),
            Row(4, "d", b"[not an object", 4),
            Row(5, "e", b'"text"', 5),
        ]
    )
    sink.close()
    got = dict(table(sink.path, "SELECT _penstock_key, _penstock_rest FROM products"))
    assert json.loads(got["a"]) == {"title": 2, "_penstock_url": 3, "d": 6, "e": 7}
    assert json.loads(got["b"]) == {"nul\0": 1}
    assert json.loads(got["c"]) == {"_PENSTOCK_KEY": "mine"}
    assert json.loads(got["d"]) == {"body": "[not an object"}
    assert json.loads(got["e"]) == {"body": '"text"'}
    assert "max_columns" in sink.notice


def test_columns_with_matching_names_in_a_table_of_the_user_are_filled(tmp_path: Path) -> None:
    sink = open_sqlite(tmp_path)
    sink.path.parent.mkdir()
    table(sink.path, "CREATE TABLE products (id INTEGER PRIMARY KEY, price, double AS (price * 2))")
    table(sink.path, "INSERT INTO products (price) VALUES (0)")
    sink.open(0, "")
    sink.write([row(1, "a", price=1, double=9), row(2, "a", price=2)])
    sink.close()
    assert table(
        sink.path, "SELECT id, price, double, _penstock_key FROM products ORDER BY id"
    ) == [(1, 0, 0, None), (2, 2, 4, "a")]


def test_a_view_or_a_table_with_duplicate_keys_is_refused(tmp_path: Path) -> None:
    appending = open_sqlite(tmp_path, mode="append")
    appending.open(0, "")
    appending.write([row(1, "a"), row(2, "a")])
    appending.close()
    upserting = open_sqlite(tmp_path)
    with pytest.raises(ConfigError, match="several rows"):
        upserting.open(0, "")
    upserting.close()
    table(appending.path, "CREATE VIEW seen AS SELECT 1")
    seen = open_sqlite(tmp_path, table="seen")
    with pytest.raises(ConfigError, match="view"):
        seen.open(0, "")
    seen.close()


def test_a_table_may_change_from_upsert_to_append(tmp_path: Path) -> None:
    sink = open_sqlite(tmp_path)
    mark = sink.open(0, "")
    sink.write([row(1, "a")])
    sink.close()
    sink = open_sqlite(tmp_path, mode="append")
    sink.open(1, mark)
    sink.write([row(2, "a")])
    sink.close()
    assert table(sink.path, "SELECT count(*) FROM products") == [(2,)]


def test_a_locked_full_or_damaged_database_is_an_outage_without_partial_rows(
    tmp_path: Path,
) -> None:
    sink = open_sqlite(tmp_path)
    sink.open(0, "")
    sink.write([row(1, price=1)])
    blocker = apsw.Connection(str(sink.path))
    blocker.execute("BEGIN EXCLUSIVE")
    assert sink._db is not None
    sink._db.set_busy_timeout(1)
    with pytest.raises(StoreUnavailable, match="Busy"):
        sink.write([row(2, price=2)])
    blocker.execute("ROLLBACK")
    sink._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StoreUnavailable, match="Full"):
        sink.write([row(2, new="x" * 100_000)])
    assert list(blocker.execute("SELECT price FROM products")) == [(1,)]
    blocker.close()
    sink._db.execute("PRAGMA max_page_count = 100000")
    sink.write([row(2, price=2)])
    sink.close()
    sink.path.write_bytes(b"no database" * 100)
    with pytest.raises(StoreUnavailable, match="NotADB"):
        sink.open(2, "")
    sink.close()


# -- sqlite, in the caller's transaction -----------------------------------------------------------


def test_rows_in_the_callers_transaction_are_committed_or_rolled_back_with_it(
    tmp_path: Path,
) -> None:
    sink = open_sqlite(tmp_path)
    db: Any = apsw.Connection(str(tmp_path / "ledger.db"))
    other = apsw.Connection(str(tmp_path / "ledger.db"))
    with db:
        sink.prepare_in(db)
    db.execute("BEGIN")
    sink.write_in(db, [row(1, "a", price=1)])
    db.execute("ROLLBACK")
    other.execute("CREATE TABLE unrelated (x)")  # the schema version now equals the rolled-back one
    db.execute("BEGIN")
    sink.write_in(db, [row(1, "a", price=1)])
    sink.write_in(db, [row(2, "b", price=1, new=1)])
    db.execute("ROLLBACK")
    other.execute("CREATE TABLE unrelated2 (x)")
    other.execute("CREATE TABLE unrelated3 (x)")
    with db:
        sink.write_in(db, [row(1, "a", price=1)])
        sink.write_in(db, [row(2, "a", price=2, new=1), row(3, "b", 0, price=3)])
        sink.write_in(db, [])
    assert list(other.execute("SELECT price, new FROM products ORDER BY _penstock_key")) == [
        (2, 1),
        (3, None),
    ]
    db.close()
    other.close()


def test_two_workers_may_add_columns_to_one_table_alternately(tmp_path: Path) -> None:
    connections: list[Any] = [apsw.Connection(str(tmp_path / "ledger.db")) for _ in range(2)]
    sinks = [open_sqlite(tmp_path) for _ in range(2)]
    for n in range(1, 9):
        with connections[n % 2] as db:
            sinks[n % 2].write_in(db, [row(n, f"k{n}", **{f"f{n}": n, f"f{n - 1}": n})])
    assert list(connections[0].execute("SELECT f7, f8 FROM products WHERE f8 = 8")) == [(8, 8)]
    assert list(connections[0].execute("SELECT count(*) FROM products")) == [(8,)]
    for db in connections:
        db.close()


def test_a_table_of_another_application_is_never_a_sink(tmp_path: Path) -> None:
    db: Any = apsw.Connection(str(tmp_path / "ledger.db"))
    db.execute("CREATE TABLE products (id)")
    with pytest.raises(ConfigError, match="belongs to another application"):
        open_sqlite(tmp_path).prepare_in(db)
    with pytest.raises(ConfigError, match="belongs to another application"):
        open_sqlite(tmp_path).write_in(db, [row(1)])
    assert list(db.execute("SELECT name FROM pragma_table_info('products')")) == [("id",)]
    own = open_sqlite(tmp_path, table="mine")
    for _ in range(2):
        own.prepare_in(db)
        own.write_in(db, [row(1)])
    assert list(db.execute("SELECT count(*) FROM mine")) == [(1,)]
    db.close()


def test_a_sink_is_transactional_only_if_it_uses_the_ledgers_file(tmp_path: Path) -> None:
    store = tmp_path / ".penstock" / "penstock.db"
    ledger = f"sqlite:{store}"

    def shares(url: str, base: Path = tmp_path, ledger: str = ledger) -> bool:
        return sqlite.open_sink(url, {}, base).shares(ledger)

    assert shares("sqlite:.penstock/penstock.db?table=products")
    assert shares(f"sqlite:{store}?table=products", tmp_path / "elsewhere")
    assert not shares("sqlite:products.db")
    assert not shares("sqlite:.penstock/penstock.db", ledger=f"postgres:{store}")
    file = jsonl.open_sink("jsonl:.penstock/penstock.db", {}, tmp_path)
    assert not isinstance(file, TableSink)
    store.parent.mkdir()
    store.touch()
    (tmp_path / "link.db").symlink_to(store)
    os.link(store, tmp_path / "hard.db")
    assert shares("sqlite:link.db")
    assert shares("sqlite:hard.db")


# -- removals --------------------------------------------------------------------------------------


def test_a_removal_deletes_the_row_of_its_key_unless_the_row_is_newer(
    tmp_path: Path,
) -> None:
    sink = sqlite.open_sink("sqlite:a.db", {}, tmp_path)
    sink.open(0, "")
    sink.write([removal(1, "never there")])
    sink.write(
        [
            row(2, "a", 5, sku="a"),
            row(3, "b", 5, sku="b"),
            removal(4, "a", 6),
            removal(5, "b", 4),
            row(6, "c", sku="c"),
            removal(7, "c", 9),
            row(8, "c", 10, sku="c"),
        ]
    )
    assert table(sink.path, "SELECT sku FROM records ORDER BY 1") == [("b",), ("c",)]


def test_a_removal_in_append_mode_is_a_row_marked_as_deleted(tmp_path: Path) -> None:
    for scheme, options in (("jsonl", {}), ("csv", {}), ("sqlite", {"mode": "append"})):
        sink = OPENERS[scheme](f"{scheme}:{scheme}.x", options, tmp_path)
        mark = sink.open(0, "")
        batch = [row(1, "a", sku="a", price=1), removal(2, "a")]
        try:
            sink.write(batch)
        except Reopen:
            sink.open(0, mark)
            sink.write(batch)
        assert sink.notice == ""
        sink.close()
    assert [line["_penstock"].get("deleted") for line in lines(tmp_path / "jsonl.x")] == [
        None,
        True,
    ]
    assert [(line["price"], line["_penstock_rest"]) for line in cells(tmp_path / "csv.x")] == [
        ("1", ""),
        ("", '{"_penstock_deleted":true}'),
    ]
    assert table(tmp_path / "sqlite.x", "SELECT price, _penstock_rest FROM records") == [
        (1, None),
        (None, '{"_penstock_deleted":true}'),
    ]
