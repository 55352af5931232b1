"""Event ids of PostgreSQL sources: unique across tables and across databases of one server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import pytest
from tests.servers import Handle
from tests.sources.postgres_rig import Rig, made, refused

from penstock.ports import Batch, Finding
from penstock.sources.postgres.position import Cursor

pytestmark = pytest.mark.server("postgres")


@pytest.fixture
def rig(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Rig]:
    yield from made(server("postgres").url, tmp_path, "cdc")


@pytest.fixture
def other(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Rig]:
    yield from made(server("postgres").url, tmp_path, "cdc")


async def first(batches: AsyncGenerator[Batch, None]) -> Finding:
    try:
        async for batch in batches:
            if batch.findings:
                return batch.findings[0]
        raise AssertionError("the source ended")
    finally:
        await batches.aclose()


async def test_rows_of_one_transaction_in_two_tables_have_different_ids(
    rig: Rig,
) -> None:
    rig.run("CREATE TABLE wishes(id bigserial PRIMARY KEY, url text)")
    readings = [
        rig.source(name=f"{rig.database}{table[0]}", table=table).read(None)
        for table in ("scrape_requests", "wishes")
    ]
    for reading in readings:
        while (await anext(reading)).cursor is None:
            pass  # a heartbeat. The slot exists when there is a cursor.
    with rig.db.transaction():
        rig.run("INSERT INTO scrape_requests(url) VALUES('https://shop.test/request')")
        rig.run("INSERT INTO wishes(url) VALUES('https://shop.test/wish')")
    found = [await first(reading) for reading in readings]
    assert [finding.payload["url"] for finding in found] == [
        "https://shop.test/request",
        "https://shop.test/wish",
    ]
    assert found[0].id != found[1].id


async def test_equal_rows_in_two_databases_of_a_server_have_different_ids(
    rig: Rig, other: Rig
) -> None:
    found = []
    for each in (rig, other):
        each.insert(f"https://shop.test/{each.database}")
        found.append(await first(each.source(snapshot=True).read(None)))
    assert found[0].payload["id"] == found[1].payload["id"]
    assert found[0].id != found[1].id


async def test_a_row_has_the_same_id_in_every_snapshot(
    rig: Rig,
) -> None:
    rig.insert("https://shop.test/1")
    assert (await first(rig.source(snapshot=True).read(None))).id == (
        await first(rig.source(snapshot=True).read(None))
    ).id


async def test_a_cursor_ahead_of_the_server_is_an_error(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
    assert rig.cursor is not None
    at = Cursor.decode(rig.cursor, "list")
    rig.cursor = Cursor(at.system, at.lsn + (1 << 40), 0).encode()
    rig.insert("https://shop.test/1")
    async with rig.reading() as batches:
        assert "is ahead of" in (await refused(batches)).message
