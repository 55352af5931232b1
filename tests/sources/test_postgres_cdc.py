"""Changes read from PostgreSQL's log: each exactly once in the books, whatever is rolled back,
killed, restarted, altered or full.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import Handle
from tests.sources.postgres_rig import Rig, made, refused

pytestmark = pytest.mark.server("postgres")


@pytest.fixture
def rig(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Rig]:
    yield from made(server("postgres").url, tmp_path, "cdc")


async def test_a_committed_row_is_a_finding_with_its_columns(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.run("INSERT INTO scrape_requests(url, note) VALUES('https://shop.test/1', 'first')")
        await rig.until(batches, lambda: rig.accepted)
    (finding,) = rig.accepted.values()
    assert (
        finding.payload["_cdc"].items()
        >= {"op": "insert", "table": "public.scrape_requests", "index": 0}.items()
    )
    assert {k: v for k, v in finding.payload.items() if k != "_cdc"} == {
        "id": 1,
        "url": "https://shop.test/1",
        "note": "first",
    }
    assert finding.at is not None


async def test_many_rows_of_many_transactions_come_in_order(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        wanted = []
        for number in range(20):
            some = [f"https://shop.test/{number}/{i}" for i in range(25)]
            rig.insert(*some)
            wanted += some
        await rig.until(batches, lambda: len(rig.accepted) >= 500)
        await rig.idle(batches)
    assert rig.urls == wanted
    assert rig.repeated == 0


async def test_what_is_rolled_back_is_never_seen(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        with rig.db.transaction() as t:
            rig.run("INSERT INTO scrape_requests(url) VALUES('https://shop.test/never')")
            raise psycopg.Rollback(t)
        with rig.db.transaction():
            rig.run("INSERT INTO scrape_requests(url) VALUES('https://shop.test/before')")
            with rig.db.transaction() as inner:
                rig.run("INSERT INTO scrape_requests(url) VALUES('https://shop.test/never either')")
                raise psycopg.Rollback(inner)
        await rig.until(batches, lambda: rig.accepted)
        await rig.idle(batches)
    assert rig.urls == ["https://shop.test/before"]


# -- what was accepted and what was not ------------------------------------------------------------


async def test_a_reader_that_is_killed_inside_a_transaction_goes_on_inside_it(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.run(
            "INSERT INTO scrape_requests(url) SELECT 'https://shop.test/' || n FROM generate_series(1, 5000) n"
        )
        await rig.until(
            batches, lambda: len(rig.accepted) >= 2000
        )  # a piece may be smaller than it can be, where the server pauses
        assert len(rig.accepted) < 5000
        while not (await anext(batches)).findings:
            pass  # what comes is handed over and never accepted
    async with rig.reading() as batches:
        await rig.until(batches, lambda: len(rig.accepted) == 5000)
        await rig.idle(batches)
    assert rig.urls == [f"https://shop.test/{n}" for n in range(1, 5001)]
    assert rig.repeated == 0


async def test_a_cursor_that_was_lost_repeats_ids_and_nothing_else(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        before = rig.cursor
        rig.insert(*[f"https://shop.test/{n}" for n in range(50)])
        await rig.until(batches, lambda: len(rig.accepted) == 50)
    rig.cursor = before  # the slot was not told either: the generator was not resumed
    async with rig.reading() as batches:
        await rig.until(batches, lambda: rig.repeated == 50)
        await rig.idle(batches)
    assert len(rig.accepted) == 50


async def test_the_server_keeps_what_is_not_accepted_and_forgets_what_is(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.insert("https://shop.test/1")
        await rig.until(batches, lambda: rig.accepted)
        (end,) = rig.run("SELECT pg_current_wal_lsn()")[0]
        assert rig.slot_row(f"confirmed_flush_lsn < '{end}'")
        await rig.until(batches, lambda: rig.slot_row(f"confirmed_flush_lsn >= '{end}'"))


async def test_an_idle_table_on_a_busy_server_holds_no_log(rig: Rig) -> None:
    rig.run("CREATE TABLE noise(n int, filler text)")
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.run("INSERT INTO noise SELECT n, repeat('x', 500) FROM generate_series(1, 20000) n")
        (end,) = rig.run("SELECT pg_current_wal_lsn()")[0]
        await rig.until(batches, lambda: rig.slot_row(f"confirmed_flush_lsn >= '{end}'"))
    assert not rig.accepted


async def test_a_reader_whose_connection_is_ended_by_the_server_says_so_and_goes_on(
    rig: Rig,
) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.insert("https://shop.test/1")
        await rig.until(batches, lambda: len(rig.accepted) == 1)
        rig.admin.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name=%s",
            (rig.slot,),
        )
        trouble = await refused(batches)
        assert trouble.hint
    rig.insert("https://shop.test/2")
    async with rig.reading() as batches:
        await rig.until(batches, lambda: len(rig.accepted) == 2)
    assert rig.urls == ["https://shop.test/1", "https://shop.test/2"]
    assert rig.repeated == 0


async def test_a_server_that_is_killed_and_comes_back_loses_nothing(
    rig: Rig, server: Callable[[str], Handle]
) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.insert("https://shop.test/1", "https://shop.test/2")
        await rig.until(batches, lambda: len(rig.accepted) == 2)
        rig.insert("https://shop.test/3")
        await asyncio.to_thread(server("postgres").kill)
        await refused(batches)
    async with rig.reading() as batches:
        trouble = await refused(batches)
        assert "cannot be reached" in trouble.message
        assert trouble.hint
    await asyncio.to_thread(server("postgres").start)
    rig.reconnect()
    async with rig.reading() as batches:
        await rig.until(batches, lambda: len(rig.accepted) == 3)
        await rig.idle(batches)
    assert rig.urls == [f"https://shop.test/{n}" for n in (1, 2, 3)]
    assert rig.repeated == 0


async def test_a_slot_that_waits_for_other_peoples_transactions_says_so_little_and_can_be_left(
    rig: Rig,
) -> None:
    with psycopg.connect(rig.url) as other:
        other.execute("INSERT INTO scrape_requests(url) VALUES('https://shop.test/open')")
        async with rig.reading() as batches:
            for _ in range(2):
                batch = await anext(batches)
                assert not batch.findings
                assert not batch.idle
        assert rig.cursor is None
        other.rollback()


# -- what changes besides inserts ------------------------------------------------------------------


async def test_updates_are_findings_when_asked_for_and_name_what_they_did_not_touch(
    rig: Rig,
) -> None:
    rig.run("ALTER TABLE scrape_requests ALTER COLUMN note SET STORAGE EXTERNAL")
    async with rig.reading(operations="insert,update") as batches:
        await rig.ready(batches)
        rig.run(
            "INSERT INTO scrape_requests(url, note) VALUES('https://shop.test/1', repeat('x', 20000))"
        )
        rig.run("UPDATE scrape_requests SET url = 'https://shop.test/2'")
        await rig.until(batches, lambda: len(rig.accepted) == 2)
        rig.run("ALTER TABLE scrape_requests REPLICA IDENTITY FULL")
        rig.run("UPDATE scrape_requests SET url = 'https://shop.test/3'")
        rig.run("DELETE FROM scrape_requests")
        rig.run("TRUNCATE scrape_requests")
        await rig.until(batches, lambda: len(rig.accepted) == 3)
        await rig.idle(batches)
    _, partly, whole = rig.accepted.values()
    assert "note" not in partly.payload
    assert partly.payload["_cdc"]["unchanged"] == ["note"]
    assert whole.payload["note"] == "x" * 20000
    assert whole.payload["_cdc"]["old"]["url"] == "https://shop.test/2"
    assert "unchanged" not in whole.payload["_cdc"]


async def test_updates_are_passed_over_by_default(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.insert("https://shop.test/1")
        rig.run("UPDATE scrape_requests SET url = 'https://shop.test/2'")
        rig.insert("https://shop.test/3")
        await rig.until(batches, lambda: len(rig.accepted) == 2)
        await rig.idle(batches)
    assert rig.urls == ["https://shop.test/1", "https://shop.test/3"]


async def test_a_column_that_is_added_or_dropped_while_reading_is_followed(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.insert("https://shop.test/1")
        rig.run("ALTER TABLE scrape_requests ADD COLUMN rank int DEFAULT 7")
        rig.insert("https://shop.test/2")
        rig.run("ALTER TABLE scrape_requests DROP COLUMN note")
        rig.insert("https://shop.test/3")
        await rig.until(batches, lambda: len(rig.accepted) == 3)
    shapes = [sorted(set(f.payload) - {"_cdc"}) for f in rig.accepted.values()]
    assert shapes == [["id", "note", "url"], ["id", "note", "rank", "url"], ["id", "rank", "url"]]


async def test_values_of_every_kind_come_as_json_has_them(rig: Rig) -> None:
    rig.run("CREATE TYPE mood AS ENUM('good', 'bad')")
    rig.run(
        "CREATE TABLE kinds(id uuid PRIMARY KEY, url text, b bool, i int8, f float8, nan float4, n numeric, j jsonb, t timestamptz, d date, raw bytea,"
        " a int[], m mood, nothing text)"
    )
    async with rig.reading(table="kinds") as batches:
        await rig.ready(batches)
        rig.run(
            "INSERT INTO kinds VALUES('00000000-0000-0000-0000-000000000001', 'ü', true, 9223372036854775807, 0.1, 'NaN', 1.10, '{\"a\": [1, null]}',"
            " '2026-11-16 04:09:02.5+02', '2026-11-16', '\\x00ff', '{1,2}', 'good', NULL)"
        )
        await rig.until(batches, lambda: rig.accepted)
    (finding,) = rig.accepted.values()
    row = {k: v for k, v in finding.payload.items() if k != "_cdc"}
    assert row == {
        "id": "00000000-0000-0000-0000-000000000001", "url": "ü", "b": True, "i": 9223372036854775807, "f": 0.1, "nan": "NaN", "n": "1.10",
        "j": {"a": [1, None]}, "t": "2026-11-16T02:09:02.5+00:00", "d": "2026-11-16", "raw": "00ff", "a": "{1,2}", "m": "good", "nothing": None,
    }  # fmt: skip


async def test_several_tables_and_partitions_are_read_by_the_names_that_were_asked_for(
    rig: Rig,
) -> None:
    rig.run("CREATE TABLE parts(id int, url text, PRIMARY KEY(id)) PARTITION BY RANGE(id)")
    rig.run("CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100)")
    rig.run("CREATE TABLE others(url text)")
    async with rig.reading(table=["scrape_requests", "public.parts"]) as batches:
        await rig.ready(batches)
        rig.run("INSERT INTO others VALUES('https://shop.test/not asked for')")
        rig.run("INSERT INTO parts VALUES(1, 'https://shop.test/part')")
        rig.insert("https://shop.test/row")
        await rig.until(batches, lambda: len(rig.accepted) == 2)
    assert [f.payload["_cdc"]["table"] for f in rig.accepted.values()] == [
        "public.parts",
        "public.scrape_requests",
    ]


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_transaction_of_a_hundred_thousand_rows_needs_no_more_memory_than_its_pieces(
    rig: Rig,
) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.run(
            "INSERT INTO scrape_requests(url, note) SELECT 'https://shop.test/' || n, repeat('x', 1000) FROM generate_series(1, 100000) n"
        )
        seen, before, peak = 0, 0, 0
        async for batch in batches:
            assert len(batch.findings) <= 1000
            seen += len(batch.findings)
            if not before and seen >= 5000:
                before = resident()
            peak = max(peak, resident())
            if seen == 100_000:
                break
    assert peak - before < 40 << 20, f"{(peak - before) >> 20} MiB for 100 MB of rows"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# -- all of it at once -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_order_transactions_and_deaths_come_in_each_committed_row_is_accepted_once(
    rig: Rig, seed: int
) -> None:
    """Interleaved transactions, some rolled back, some large; readers that die with their last
    batch accepted, or not, or its cursor lost.
    """
    chance = random.Random(seed)
    wanted: list[str] = []
    rows = iter(range(10**6))
    options = {"max_lag": "8MiB", "snapshot": bool(seed % 2)}

    def write(db: psycopg.Connection[Any], size: int) -> list[str]:
        urls = [f"https://shop.test/{next(rows)}" for _ in range(size)]
        with db.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO scrape_requests(url, note) VALUES(%s, repeat('x', 200))",
                [(url,) for url in urls],
            )
        return urls

    if options["snapshot"]:
        with rig.db.transaction():
            wanted += write(rig.db, 1500)
    with psycopg.connect(rig.url) as one, psycopg.connect(rig.url) as two:
        for _ in range(8):
            async with rig.reading(**options) as batches:
                if rig.cursor is None:
                    await rig.ready(batches)
                for _ in range(chance.randrange(1, 4)):
                    first = write(one, chance.choice((1, 10, 300)))
                    second = write(two, chance.choice((1, 50, 2500)))
                    more = write(one, 5)
                    for db, urls in chance.sample([(one, first + more), (two, second)], 2):
                        if chance.random() < 0.2:
                            db.rollback()
                        else:
                            db.commit()
                            wanted += urls
                for _ in range(chance.randrange(0, 6)):
                    before = rig.cursor
                    batch = await anext(batches)
                    fate = chance.random()
                    if fate > 0.1:
                        rig.accept(batch)
                    if (
                        fate < 0.2
                    ):  # dead before it was accepted, or before its cursor was; the last of its life
                        rig.cursor = before
                        break
        async with rig.reading(**options) as batches:
            await rig.until(batches, lambda: len(rig.accepted) >= len(wanted))
            await rig.idle(batches)
    assert sorted(rig.urls) == sorted(wanted)
