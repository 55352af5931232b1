"""Rows polled from a PostgreSQL table: each is read once and marked when it is accepted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.servers import Handle
from tests.sources.postgres_rig import Rig, made, refused

pytestmark = pytest.mark.server("postgres")


@pytest.fixture
def rig(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Rig]:
    for rig in made(server("postgres").url, tmp_path, "table"):
        rig.run("ALTER TABLE scrape_requests ADD COLUMN penstock_taken_at timestamptz")
        yield rig


def taken(rig: Rig) -> list[int]:
    return [
        id_
        for (id_,) in rig.run(
            "SELECT id FROM scrape_requests WHERE penstock_taken_at IS NOT NULL ORDER BY id"
        )
    ]


async def test_rows_are_marked_when_they_are_accepted_and_not_before(rig: Rig) -> None:
    rig.insert("https://shop.test/1", "https://shop.test/2")
    async with rig.reading() as batches:
        rig.accept(await anext(batches))
        assert taken(rig) == []
        await rig.idle(batches)
        assert taken(rig) == [1, 2]
        rig.insert("https://shop.test/3")
        await rig.until(batches, lambda: len(rig.accepted) == 3)
        await rig.idle(batches)
    assert rig.urls == ["https://shop.test/1", "https://shop.test/2", "https://shop.test/3"]
    assert taken(rig) == [1, 2, 3]


async def test_large_json_values_are_not_decoded_on_the_event_loop(rig: Rig) -> None:
    rig.run("ALTER TABLE scrape_requests ADD COLUMN extra json")
    rig.run(
        "INSERT INTO scrape_requests(url, extra) SELECT 'https://shop.test/' || n, "
        "(SELECT json_object_agg('key' || i, i) FROM generate_series(1, 100000) i) "
        "FROM generate_series(1, 10) n"
    )
    longest, before = 0.0, time.thread_time()

    def tick() -> None:
        nonlocal longest, before
        longest, before = max(longest, time.thread_time() - before), time.thread_time()
        timer[0] = loop.call_later(0.001, tick)

    loop = asyncio.get_running_loop()
    async with rig.reading() as batches:
        timer = [loop.call_soon(tick)]
        batch = await anext(batches)
        await asyncio.sleep(0.01)  # for the last tick
        timer[0].cancel()
    assert len(batch.findings) == 10
    assert longest < 0.2  # seconds of CPU time. Decoding these values takes 0.6 s.


async def test_a_reader_that_ended_before_it_marked_rows_repeats_their_ids(rig: Rig) -> None:
    rig.insert("https://shop.test/1", "https://shop.test/2")
    async with rig.reading() as batches:
        rig.accept(await anext(batches))
    assert taken(rig) == []
    async with rig.reading() as batches:
        await rig.idle(batches)
    assert (len(rig.accepted), rig.repeated) == (2, 2)
    assert taken(rig) == [1, 2]


async def test_a_row_whose_mark_is_removed_is_a_new_event(rig: Rig) -> None:
    rig.insert("https://shop.test/1")
    async with rig.reading() as batches:
        await rig.idle(batches)
        rig.run("UPDATE scrape_requests SET penstock_taken_at = NULL")
        await rig.until(batches, lambda: len(rig.accepted) == 2)
    assert rig.repeated == 0


async def test_locked_rows_are_skipped_and_read_later(rig: Rig) -> None:
    rig.insert("https://shop.test/1", "https://shop.test/2")
    with psycopg.connect(rig.url) as other:
        other.execute("SELECT 1 FROM scrape_requests WHERE id = 1 FOR UPDATE")
        async with rig.reading() as batches:
            await rig.idle(batches)
            assert rig.urls == ["https://shop.test/2"]
            other.rollback()
            await rig.until(batches, lambda: len(rig.accepted) == 2)


async def test_thousands_of_rows_are_read_in_bounded_batches(rig: Rig) -> None:
    rig.run(
        "INSERT INTO scrape_requests(url) SELECT 'https://shop.test/' || n "
        "FROM generate_series(1, 3500) n"
    )
    sizes = []
    async with rig.reading() as batches:
        async for batch in batches:
            rig.accept(batch)
            if batch.idle:
                break
            sizes.append(len(batch.findings))
    assert sizes == [1000, 1000, 1000, 500]
    assert rig.urls == [f"https://shop.test/{n}" for n in range(1, 3501)]
    assert len(taken(rig)) == len(rig.accepted) == 3500


async def test_an_accepted_row_gets_a_status_or_is_deleted_if_configured(rig: Rig) -> None:
    rig.run("ALTER TABLE scrape_requests ADD COLUMN status text DEFAULT 'pending'")
    rig.insert("https://shop.test/1")
    rig.run("INSERT INTO scrape_requests(url, status) VALUES('https://shop.test/2', 'on hold')")
    async with rig.reading(done="status", taken="queued") as batches:
        await rig.idle(batches)
    assert rig.run("SELECT status FROM scrape_requests ORDER BY id") == [("queued",), ("on hold",)]
    async with rig.reading(done="delete") as batches:
        await rig.idle(batches)
    assert rig.run("SELECT count(*) FROM scrape_requests") == [(0,)]
    assert len(rig.accepted) == 3


async def test_a_notify_starts_a_poll_before_the_interval_ends(rig: Rig) -> None:
    async with rig.reading(listen="scrape", every="1h") as batches:
        await rig.idle(batches)
        rig.insert("https://shop.test/1")
        rig.run("NOTIFY scrape")
        await rig.until(batches, lambda: rig.accepted)
        await rig.idle(batches)
    assert taken(rig) == [1]


async def test_rows_with_composite_keys_of_any_type_are_marked(rig: Rig) -> None:
    rig.run(
        'CREATE TABLE "Odd Rows"(shop text, "at %" timestamptz, url text, penstock_taken_at '
        'timestamptz, PRIMARY KEY(shop, "at %"))'
    )
    rig.run(
        """INSERT INTO "Odd Rows" VALUES\
('ü', '2026-11-16 00:00:00.123456+00', 'https://shop.test/1'), \
('ü', 'infinity', 'https://shop.test/2')"""
    )
    async with rig.reading(table='public."Odd Rows"') as batches:
        await rig.idle(batches)
    assert len(rig.accepted) == 2
    assert rig.run('SELECT count(*) FROM "Odd Rows" WHERE penstock_taken_at IS NULL') == [(0,)]


async def test_a_preview_marks_no_row(rig: Rig) -> None:
    rig.insert("https://shop.test/1", "https://shop.test/2")
    found = await rig.source().preview(None, 1)
    assert [f.payload["url"] for f in found] == ["https://shop.test/1"]
    assert taken(rig) == []


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"table": "nowhere"}, "there is no table public.nowhere", "name another table"),
        (
            {"column": "done_at"},
            "has no column done_at",
            "ALTER TABLE public.scrape_requests ADD COLUMN done_at timestamptz",
        ),
        ({"key": "sku"}, "has no column sku", "it has id, url, note"),
    ],
)
async def test_a_missing_table_or_column_is_an_error_with_a_hint(
    rig: Rig, options: dict[str, str], message: str, hint: str
) -> None:
    async with rig.reading(**options) as batches:
        trouble = await refused(batches)
    assert message in trouble.message
    assert hint in trouble.hint


async def test_a_table_without_a_key_and_a_user_without_rights_are_errors(
    rig: Rig,
) -> None:
    rig.run("CREATE TABLE bare(url text, penstock_taken_at timestamptz)")
    async with rig.reading(table="bare") as batches:
        assert "has no primary key" in (await refused(batches)).message
    user = f"u_{rig.database}"
    rig.run(f"CREATE ROLE {user} LOGIN")
    try:
        rig.url = rig.url.replace("postgres@", f"{user}@")
        rig.run(f"GRANT SELECT ON scrape_requests TO {user}")
        rig.insert("https://shop.test/1")
        async with rig.reading() as batches:
            trouble = await refused(batches)
        assert f'GRANT SELECT, UPDATE ON "public"."scrape_requests" TO {user}' in trouble.hint
    finally:
        rig.run(f"DROP OWNED BY {user}; DROP ROLE {user}")
