"""Changes from PostgreSQL's WAL: each committed row is accepted exactly once.

Also after rollbacks, kills, restarts and schema changes.
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


async def test_rows_of_many_transactions_are_read_in_commit_order(rig: Rig) -> None:
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


async def test_rolled_back_rows_are_never_findings(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        with rig.db.transaction(force_rollback=True):
            rig.run("INSERT INTO scrape_requests(url) VALUES('https://shop.test/never')")
        with rig.db.transaction():
            rig.run("INSERT INTO scrape_requests(url) VALUES('https://shop.test/before')")
            with rig.db.transaction(force_rollback=True):
                rig.run("INSERT INTO scrape_requests(url) VALUES('https://shop.test/never either')")
        await rig.until(batches, lambda: rig.accepted)
        await rig.idle(batches)
    assert rig.urls == ["https://shop.test/before"]


# -- accepted and unaccepted batches ---------------------------------------------------------------


async def test_a_reader_killed_inside_a_transaction_continues_inside_that_transaction(
    rig: Rig,
) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.run(
            "INSERT INTO scrape_requests(url) SELECT 'https://shop.test/' || n "
            "FROM generate_series(1, 5000) n"
        )
        # A batch may be smaller than its limit when the server pauses.
        await rig.until(batches, lambda: len(rig.accepted) >= 2000)
        assert len(rig.accepted) < 5000
        while not (await anext(batches)).findings:
            pass  # this batch is yielded and never accepted
    async with rig.reading() as batches:
        await rig.until(batches, lambda: len(rig.accepted) == 5000)
        await rig.idle(batches)
    assert rig.urls == [f"https://shop.test/{n}" for n in range(1, 5001)]
    assert rig.repeated == 0


async def test_a_lost_cursor_repeats_the_same_ids_and_adds_no_event(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        before = rig.cursor
        rig.insert(*[f"https://shop.test/{n}" for n in range(50)])
        await rig.until(batches, lambda: len(rig.accepted) == 50)
    rig.cursor = before  # the slot did not advance either, as the generator was not resumed
    async with rig.reading() as batches:
        await rig.until(batches, lambda: rig.repeated == 50)
        await rig.idle(batches)
    assert len(rig.accepted) == 50


async def test_the_slot_advances_only_after_a_batch_is_accepted(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.insert("https://shop.test/1")
        await rig.until(batches, lambda: rig.accepted)
        (end,) = rig.run("SELECT pg_current_wal_lsn()")[0]
        assert rig.slot_row(f"confirmed_flush_lsn < '{end}'")
        await rig.until(batches, lambda: rig.slot_row(f"confirmed_flush_lsn >= '{end}'"))


async def test_the_slot_of_an_idle_table_on_a_busy_server_advances(rig: Rig) -> None:
    rig.run("CREATE TABLE noise(n int, filler text)")
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.run("INSERT INTO noise SELECT n, repeat('x', 500) FROM generate_series(1, 20000) n")
        (end,) = rig.run("SELECT pg_current_wal_lsn()")[0]
        await rig.until(batches, lambda: rig.slot_row(f"confirmed_flush_lsn >= '{end}'"))
    assert not rig.accepted


async def test_a_terminated_connection_is_an_error_and_the_next_reader_continues(
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


async def test_no_row_is_lost_when_the_server_is_killed_and_restarted(
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


async def test_a_slot_that_waits_for_open_transactions_yields_empty_batches(
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


# -- other changes than inserts --------------------------------------------------------------------


async def test_configured_updates_are_findings_that_list_their_unchanged_columns(
    rig: Rig,
) -> None:
    rig.run("ALTER TABLE scrape_requests ALTER COLUMN note SET STORAGE EXTERNAL")
    async with rig.reading(operations="insert,update") as batches:
        await rig.ready(batches)
        rig.run(
            "INSERT INTO scrape_requests(url, note) "
            "VALUES('https://shop.test/1', repeat('x', 20000))"
        )
        rig.run("UPDATE scrape_requests SET url = 'https://shop.test/2'")
        await rig.until(batches, lambda: len(rig.accepted) == 2)
        rig.run("ALTER TABLE scrape_requests REPLICA IDENTITY FULL")
        rig.run("UPDATE scrape_requests SET url = 'https://shop.test/3'")
        rig.run("DELETE FROM scrape_requests")
        rig.run("TRUNCATE scrape_requests")
        await rig.until(batches, lambda: len(rig.accepted) == 3)
        await rig.idle(batches)
    _, partly, full = rig.accepted.values()
    assert "note" not in partly.payload
    assert partly.payload["_cdc"]["unchanged"] == ["note"]
    assert full.payload["note"] == "x" * 20000
    assert full.payload["_cdc"]["old"]["url"] == "https://shop.test/2"
    assert "unchanged" not in full.payload["_cdc"]


async def test_configured_deletes_are_findings_with_the_columns_of_the_deleted_row(
    rig: Rig,
) -> None:
    async with rig.reading(operations="insert") as batches:
        await rig.ready(batches)
    async with rig.reading(operations="insert,delete") as batches:
        await rig.ready(batches)
        rig.run("ALTER TABLE scrape_requests REPLICA IDENTITY FULL")
        rig.insert("https://shop.test/1", "https://shop.test/2")
        rig.run("UPDATE scrape_requests SET note = 'x'")
        rig.run("DELETE FROM scrape_requests WHERE url = 'https://shop.test/1'")
        await rig.until(batches, lambda: len(rig.accepted) == 3)
        await rig.idle(batches)
    assert rig.urls == ["https://shop.test/1", "https://shop.test/2", "https://shop.test/1"]
    assert [f.payload["_cdc"]["op"] for f in rig.accepted.values()] == ["insert"] * 2 + ["delete"]


async def test_updates_are_ignored_by_default(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.insert("https://shop.test/1")
        rig.run("UPDATE scrape_requests SET url = 'https://shop.test/2'")
        rig.insert("https://shop.test/3")
        await rig.until(batches, lambda: len(rig.accepted) == 2)
        await rig.idle(batches)
    assert rig.urls == ["https://shop.test/1", "https://shop.test/3"]


async def test_findings_have_the_columns_of_their_row_while_the_table_is_altered(rig: Rig) -> None:
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


async def test_values_of_every_column_type_are_json_values(rig: Rig) -> None:
    rig.run("CREATE TYPE mood AS ENUM('good', 'bad')")
    rig.run(
        "CREATE TABLE kinds(id uuid PRIMARY KEY, url text, b bool, i int8, f float8, nan float4, "
        "n numeric, j jsonb, t timestamptz, d date, raw bytea,"
        " a int[], m mood, nothing text)"
    )
    async with rig.reading(table="kinds") as batches:
        await rig.ready(batches)
        rig.run(
            "INSERT INTO kinds "
            "VALUES('00000000-0000-0000-0000-000000000001', 'ü', true, 9223372036854775807, 0.1, "
            "'NaN', 1.10, '{\"a\": [1, null]}',"
            " '2026-11-16 04:09:02.5+02', '2026-11-16', '\\x00ff', '{1,2}', 'good', NULL)"
        )
        await rig.until(batches, lambda: rig.accepted)
    (finding,) = rig.accepted.values()
    row = {k: v for k, v in finding.payload.items() if k != "_cdc"}
    assert row == {
        "id": "00000000-0000-0000-0000-000000000001",
        "url": "ü",
        "b": True,
        "i": 9223372036854775807,
        "f": 0.1,
        "nan": "NaN",
        "n": "1.10",
        "j": {"a": [1, None]},
        "t": "2026-11-16T02:09:02.5+00:00",
        "d": "2026-11-16",
        "raw": "00ff",
        "a": "{1,2}",
        "m": "good",
        "nothing": None,
    }


async def test_several_tables_and_a_partitioned_table_are_read_under_their_own_names(
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
async def test_a_transaction_of_100000_rows_is_read_with_bounded_memory(
    rig: Rig,
) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.run(
            "INSERT INTO scrape_requests(url, note) "
            "SELECT 'https://shop.test/' || n, repeat('x', 1000) FROM generate_series(1, 100000) n"
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


async def test_a_chunk_of_rows_with_many_values_stays_small(rig: Rig) -> None:
    rig.run("ALTER TABLE scrape_requests ADD COLUMN extra jsonb")
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.run(
            "INSERT INTO scrape_requests(url, extra) SELECT 'https://shop.test/' || n, "
            "('[' || repeat('{},', 100000) || '{}]')::jsonb FROM generate_series(1, 6) n"
        )
        sizes: list[int] = []
        async for batch in batches:
            sizes += [len(batch.findings)] if batch.findings else []
            if sum(sizes) == 6:
                break
    assert sizes == [1] * 6


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# -- random combinations ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_each_committed_row_is_accepted_once_with_random_commits_and_reader_kills(
    rig: Rig, seed: int
) -> None:
    """Interleave transactions, some of them large or rolled back, and end readers at random.

    The last batch of a reader is accepted, not accepted, or accepted without its cursor.
    """
    rng = random.Random(seed)
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
                for _ in range(rng.randrange(1, 4)):
                    first = write(one, rng.choice((1, 10, 300)))
                    second = write(two, rng.choice((1, 50, 2500)))
                    more = write(one, 5)
                    for db, urls in rng.sample([(one, first + more), (two, second)], 2):
                        if rng.random() < 0.2:
                            db.rollback()
                        else:
                            db.commit()
                            wanted += urls
                for _ in range(rng.randrange(0, 6)):
                    before = rig.cursor
                    batch = await anext(batches)
                    fate = rng.random()
                    if fate > 0.1:
                        rig.accept(batch)
                    # The reader ends before the batch or its cursor was accepted.
                    if fate < 0.2:
                        rig.cursor = before
                        break
        async with rig.reading(**options) as batches:
            await rig.until(batches, lambda: len(rig.accepted) >= len(wanted))
            await rig.idle(batches)
    assert sorted(rig.urls) == sorted(wanted)
