"""Snapshot of a table followed by its WAL: every row is read once, even if the reader is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers import Handle
from tests.sources.postgres_rig import Rig, made, refused

from penstock.sources.postgres.position import Cursor, Part, Reading, saw


@pytest.fixture
def rig(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Rig]:
    yield from made(server("postgres").url, tmp_path, "cdc")


pytest_server = pytest.mark.server("postgres")


@pytest_server
async def test_existing_rows_are_read_before_the_changes(rig: Rig) -> None:
    rig.run(
        "INSERT INTO scrape_requests(url) SELECT 'https://shop.test/' || n "
        "FROM generate_series(1, 2500) n"
    )
    async with rig.reading(snapshot=True) as batches:
        await rig.ready(batches)
        rig.insert("https://shop.test/2501")  # the slot and its snapshot exist
        await rig.until(batches, lambda: len(rig.accepted) == 2501)
        await rig.idle(batches)
    assert rig.urls == [f"https://shop.test/{n}" for n in range(1, 2502)]
    kinds = [f.payload["_cdc"]["op"] for f in rig.accepted.values()]
    assert kinds == ["read"] * 2500 + ["insert"]
    assert rig.repeated == 0


@pytest_server
async def test_without_a_snapshot_only_changes_are_read(rig: Rig) -> None:
    rig.insert("https://shop.test/old")
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.insert("https://shop.test/new")
        await rig.until(batches, lambda: rig.accepted)
    assert rig.urls == ["https://shop.test/new"]


@pytest_server
async def test_a_snapshot_whose_reader_is_killed_continues_and_reads_each_row_once(
    rig: Rig,
) -> None:
    """The keys are texts: new rows are inserted before and after the position of the reader.

    The sort order of the database applies.
    """
    rig.run("CREATE TABLE texts(key text PRIMARY KEY, url text)")
    rig.run(
        "INSERT INTO texts SELECT lpad(n::text, 6, '0'), 'https://shop.test/' || n "
        "FROM generate_series(1, 6000, 2) n"
    )
    wanted = {f"https://shop.test/{n}" for n in range(1, 6000, 2)}
    options = {"table": "texts", "snapshot": True}
    for round_ in range(3):
        async with rig.reading(**options) as batches:
            before = len(rig.accepted)
            await rig.until(batches, lambda before=before: len(rig.accepted) > before)
        for n in (
            round_ * 2 + 2,
            5990 + round_ * 2,
            2000 + round_ * 2,
        ):  # before the position, after it, in the middle
            rig.run("INSERT INTO texts VALUES(%s, %s)", f"{n:06}", f"https://shop.test/{n}")
            wanted.add(f"https://shop.test/{n}")
    async with rig.reading(**options) as batches:
        await rig.until(batches, lambda: len(rig.accepted) >= len(wanted))
        rig.run("INSERT INTO texts VALUES('zzz', 'https://shop.test/last')")
        await rig.until(batches, lambda: "https://shop.test/last" in rig.urls)
        await rig.idle(batches)
    assert sorted(rig.urls) == sorted({*wanted, "https://shop.test/last"})
    assert rig.repeated == 0


@pytest_server
async def test_a_source_reset_to_the_start_reads_the_table_again_with_its_old_slot(
    rig: Rig,
) -> None:
    rig.insert("https://shop.test/1")
    async with rig.reading(snapshot=True) as batches:
        await rig.until(batches, lambda: rig.accepted)
        await rig.idle(batches)
    rig.insert("https://shop.test/2")
    rig.cursor = None
    async with rig.reading(snapshot=True) as batches:
        await rig.until(batches, lambda: len(rig.accepted) == 2)
        await rig.idle(batches)
    assert rig.urls == ["https://shop.test/1", "https://shop.test/2"]
    assert rig.repeated == 1


@pytest_server
async def test_several_tables_are_read_one_after_the_other(rig: Rig) -> None:
    rig.run("CREATE TABLE second(a int, b text, url text, PRIMARY KEY(b, a))")
    rig.run(
        "INSERT INTO second SELECT n % 10, (n / 10)::text, 'https://shop.test/s' || n "
        "FROM generate_series(1, 1500) n"
    )
    rig.run(
        "INSERT INTO scrape_requests(url) SELECT 'https://shop.test/' || n "
        "FROM generate_series(1, 1500) n"
    )
    options = {"table": "scrape_requests,second", "snapshot": True}
    for enough in (1, 1500, 2000):
        async with rig.reading(**options) as batches:
            await rig.until(batches, lambda enough=enough: len(rig.accepted) > enough)
    async with rig.reading(**options) as batches:
        await rig.until(batches, lambda: len(rig.accepted) == 3000)
        await rig.idle(batches)
    assert len(set(rig.urls)) == 3000
    assert rig.repeated == 0


@pytest_server
async def test_a_snapshot_of_a_table_without_a_primary_key_is_an_error(rig: Rig) -> None:
    rig.run("CREATE TABLE bare(url text)")
    async with rig.reading(table="bare", snapshot=True) as batches:
        trouble = await refused(batches)
    assert "public.bare has no primary key" in trouble.message
    assert "snapshot = false" in trouble.hint


# -- positions -------------------------------------------------------------------------------------


def test_a_cursor_is_equal_after_encoding_and_decoding() -> None:
    cursor = Cursor("7", 99, 3, Reading(1, ["a", "b"]), [Part(0, None, "1:5:2", 120)])
    assert Cursor.decode(cursor.encode(), "s") == cursor
    assert "after a, b" in str(cursor)
    assert str(Cursor("7", 0x16B374D848, 3)) == "16/B374D848, 3 changes into that transaction"


@given(
    st.integers(1, 1 << 40),
    st.integers(0, 1000),
    st.sets(st.integers(0, 1000), max_size=5),
    st.integers(-2000, 2000),
)
def test_snapshot_visibility_is_decided_by_the_low_32_bits_of_a_transaction_id(
    low: int, span: int, holes: set[int], offset: int
) -> None:
    high, full = low + span, low + offset
    if full < 3:
        return
    open_ = sorted({low + hole for hole in holes if low + hole < high})
    snapshot = f"{low}:{high}:{','.join(map(str, open_))}"
    assert saw(snapshot, full & 0xFFFFFFFF) == (full < high and full not in open_)
