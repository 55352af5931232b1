"""Errors of PostgreSQL sources with their hints, and `sources test`, `reset` and `slots`."""

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
from tools.services.control import down, up
from tools.services.servers import Postgres
from tools.services.state import Place

from penstock.authoring.pipeline import Pipeline
from penstock.clock import SystemClock
from penstock.config import files as configuration
from penstock.errors import ConfigError, UsageError
from penstock.fetching.source_client import SourceWeb
from penstock.sources.base import SourceContext
from penstock.sources.postgres import open_source
from penstock.sources.postgres.settings import derived_name

postgres = pytest.mark.server("postgres")


@pytest.fixture
def rig(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Rig]:
    yield from made(server("postgres").url, tmp_path, "cdc")


def opened(url: str, directory: Path, **options: Any) -> Any:
    pipeline = Pipeline("shop")
    pipeline.source(url, name="asked", **options)
    config = configuration.load({"state.dir": str(directory)}, {}, directory).config
    context = SourceContext(config, SystemClock(), random.Random(1), SourceWeb(), directory)
    return open_source(pipeline.sources[0], context)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("postgres://u:hidden@h/db", {}, "can be read in two ways"),
        ("postgres+cdc:db", {}, "has no //"),
        ("postgres+cdc://u:hidden@h:port/db", {}, "cannot be read"),
        ("postgres+cdc://u:hidden@h/db?sslmood=require", {}, "cannot be read"),
        ("postgres+cdc://u:so?hidden@h/db", {}, "the URL has an invalid option after the ?"),
        ("postgres+cdc://u:hidden@h/db", {"tabel": "x"}, "there is no option 'tabel'"),
        ("postgres+cdc://u:hidden@h/db", {"table": "a.b.c"}, "is not a table name"),
        ("postgres+cdc://u:hidden@h/db?table=a", {"table": "b"}, "table is set twice"),
        ("postgres+cdc://u:hidden@h/db?slot=Mine", {}, "is not a valid slot name"),
        ("postgres+cdc://u:hidden@h/db?operations=merge", {}, "operations is 'merge'"),
        ("postgres+cdc://u:hidden@h/db?snapshot=maybe", {}, "snapshot is 'maybe'"),
        ("postgres+cdc://u:hidden@h/db", {"max_lag": "lots"}, "max_lag is 'lots'"),
        ("postgres+cdc://u:hidden@h/db", {"max_lag": "1KiB"}, "max_lag is '1KiB'"),
        ("postgres+cdc://u:hidden@h/db", {"on_limit": "wait"}, "on_limit is 'wait'"),
        ("postgres+table://u:hidden@h/db", {"done": "forget"}, "done is 'forget'"),
        ("postgres+table://u:hidden@h/db?table=a,b", {}, "option table has 2 tables"),
        ("postgres+table://u:hidden@h/db", {"key": 3}, "key is 3"),
    ],
)
def test_an_invalid_url_or_option_is_a_configuration_error_without_the_password(
    url: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(url, tmp_path, **options)
    assert message in caught.value.message
    assert caught.value.hint
    assert "hidden" not in caught.value.message + caught.value.hint


def test_options_in_the_url_are_read_and_the_others_go_to_the_connection(tmp_path: Path) -> None:
    s = opened(
        "postgres+cdc://u@h/db?table=a,b.c&sslmode=require&snapshot=true&max_lag=64MiB&operations=insert,update",
        tmp_path,
    ).settings
    assert [table.label for table in s.tables] == ["public.a", "b.c"]
    assert (s.snapshot, s.max_lag, s.operations) == (True, 64 << 20, {"insert", "update"})
    assert s.address.options["sslmode"] == "require"
    assert (s.slot, s.publication, s.owned) == ("penstock_asked", "penstock_asked", True)


def test_a_slot_name_is_derived_from_namespace_and_source_within_63_characters() -> None:
    assert (
        derived_name("shop", "postgres-cdc-db.example-5432") == "shop_postgres_cdc_db_example_5432"
    )
    long = derived_name("shop", "x" * 64)
    assert len(long) == 63
    assert long != derived_name("shop", "x" * 65)


# -- errors of the server --------------------------------------------------------------------------


@postgres
async def test_an_unreachable_server_and_a_refused_login_are_errors_with_a_hint(rig: Rig) -> None:
    for old, new, message in (
        (f"/{rig.database}", "/nowhere", "there is no such database"),
        ("postgres@", "nobody:hidden@", "the server has no user nobody"),
        (rig.server.rpartition("/")[0].rpartition(":")[2], "1", "cannot be reached"),
    ):
        source = opened(
            rig.url.replace(old, new).replace("postgres:", "postgres+cdc:"), rig.directory
        )
        trouble = await refused(source.read(None))
        assert message in trouble.message
        assert trouble.hint
        assert "hidden" not in trouble.message + trouble.hint


class WithoutDecoding(Postgres):
    def command(self) -> list[str]:
        return [*super().command(), "-c", "wal_level=replica"]


@postgres  # without PostgreSQL, this test is skipped like the others
async def test_the_error_without_logical_decoding_suggests_the_polling_source(
    tmp_path: Path,
) -> None:
    server = WithoutDecoding(Place(tmp_path / "services" / "postgres"), {})
    await asyncio.to_thread(up, server, borrowed=False)
    try:
        url = server.url()
        with psycopg.connect(url) as db:
            db.execute(
                "CREATE TABLE scrape_requests(id int PRIMARY KEY, url text, penstock_taken_at "
                "timestamptz)"
            )
            db.execute("INSERT INTO scrape_requests VALUES(1, 'https://shop.test/1')")
        trouble = await refused(
            opened(url.replace("postgres:", "postgres+cdc:"), tmp_path).read(None)
        )
        assert "has wal_level=replica" in trouble.message
        assert "postgres+table://" in trouble.hint
        batches = opened(url.replace("postgres:", "postgres+table:"), tmp_path).read(None)
        assert [f.payload["url"] for f in (await anext(batches)).findings] == [
            "https://shop.test/1"
        ]
        await batches.aclose()
    finally:
        await asyncio.to_thread(down, server, wipe=True)


@postgres
async def test_a_missing_table_is_an_error_and_no_slot_is_created(rig: Rig) -> None:
    async with rig.reading(table="nowhere") as batches:
        assert "there is no table public.nowhere" in (await refused(batches)).message
    assert rig.slot_row("slot_name") is None


@postgres
async def test_the_error_for_a_missing_right_has_the_statement_that_grants_it(rig: Rig) -> None:
    user = f"u_{rig.database}"
    rig.run(f"CREATE ROLE {user} LOGIN")
    rig.run(f"GRANT SELECT ON scrape_requests TO {user}")
    url = rig.url.replace("postgres@", f"{user}@").replace("postgres:", "postgres+cdc:")
    options = {"slot": rig.slot, "publication": ""}
    try:
        trouble = await refused(opened(url, rig.directory, **options).read(None))
        assert f"{user} has no right to replicate" in trouble.message
        assert f"ALTER ROLE {user} REPLICATION" in trouble.hint
        rig.run(f"ALTER ROLE {user} REPLICATION")
        trouble = await refused(opened(url, rig.directory, **options).read(None))
        assert (
            f"there is no publication penstock_asked, and {user} could not create it"
            in trouble.message
        )
        assert (
            'CREATE PUBLICATION "penstock_asked" FOR TABLE "public"."scrape_requests"'
            in trouble.hint
        )
        rig.run("CREATE PUBLICATION given FOR TABLE scrape_requests")
        batches = opened(url, rig.directory, slot=rig.slot, publication="given").read(None)
        await rig.ready(batches)
        rig.insert("https://shop.test/1")
        await rig.until(batches, lambda: rig.accepted)
        await batches.aclose()
    finally:
        rig.run(f"DROP OWNED BY {user}; DROP ROLE {user}")


@postgres
async def test_a_publication_of_the_user_is_not_changed_and_one_of_penstock_is(rig: Rig) -> None:
    rig.run("CREATE TABLE second(id int PRIMARY KEY, url text)")
    rig.run("CREATE PUBLICATION given FOR TABLE scrape_requests WITH (publish = 'insert')")
    async with rig.reading(publication="given", table="second") as batches:
        trouble = await refused(batches)
    assert "publication given does not publish table public.second" in trouble.message
    assert trouble.hint == 'ALTER PUBLICATION "given" ADD TABLE "public"."second"'
    async with rig.reading(publication="given", operations="update") as batches:
        assert "publication given does not publish updates" in (await refused(batches)).message
    async with rig.reading() as batches:
        await rig.ready(batches)
    async with rig.reading(table="scrape_requests,second", operations="insert,update") as batches:
        published = (
            "SELECT 1 FROM pg_publication p JOIN pg_publication_tables t USING(pubname) "
            "WHERE pubname=%s AND pubupdate AND tablename='second'"
        )
        # Rows that were written before the publication was changed are not read.
        await rig.until(batches, lambda: rig.run(published, rig.slot))
        rig.run("INSERT INTO second VALUES(1, 'https://shop.test/1')")
        rig.run("UPDATE second SET url = 'https://shop.test/2'")
        await rig.until(batches, lambda: len(rig.accepted) == 2)


@postgres
async def test_a_missing_busy_or_foreign_slot_is_an_error_with_a_hint(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
        rig.when(lambda: rig.slot_row("active"), "the first reader uses the slot")
        async with rig.reading() as second:
            trouble = await refused(second)
        assert f"slot {rig.slot} is being read by another client" in trouble.message
        assert trouble.after == 1.0
    rig.when(lambda: not rig.slot_row("active"), "the slot is inactive")
    rig.run("SELECT pg_drop_replication_slot(%s)", rig.slot)
    async with rig.reading() as batches:
        trouble = await refused(batches)
    assert f"slot {rig.slot} does not exist any longer" in trouble.message
    assert f"penstock sources reset {rig.database} --to start" in trouble.hint
    rig.run("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", rig.slot)
    async with rig.reading() as batches:
        assert f"slot {rig.slot} belongs to test_decoding" in (await refused(batches)).message
    assert rig.cursor is not None
    rig.cursor = rig.cursor[:-3]  # torn
    async with rig.reading() as batches:
        assert "its position cannot be read" in (await refused(batches)).message


@postgres
async def test_a_slot_whose_wal_the_server_discarded_is_an_error_with_a_hint(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
    rig.run("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    rig.run("SELECT pg_reload_conf()")
    try:
        for _ in range(50):
            rig.run("CREATE TABLE IF NOT EXISTS noise(n int)")
            rig.run("INSERT INTO noise VALUES(1)")
            rig.run("SELECT pg_switch_wal()")
            rig.run("CHECKPOINT")
            if rig.slot_row("wal_status") == "lost":
                break
        async with rig.reading() as batches:
            trouble = await refused(batches)
    finally:
        rig.run("ALTER SYSTEM RESET max_slot_wal_keep_size")
        rig.run("SELECT pg_reload_conf()")
    assert f"the server has discarded WAL that slot {rig.slot} still needed" in trouble.message
    assert "penstock sources slots drop" in trouble.hint


# -- commands --------------------------------------------------------------------------------------


@postgres
async def test_a_preview_shows_table_rows_without_a_slot_and_waiting_changes_with_one(
    rig: Rig,
) -> None:
    rig.insert("https://shop.test/there")
    source = rig.source()
    found = await source.preview(None, 5)
    assert [(f.payload["url"], "as if it were inserted now" in f.cause) for f in found] == [
        ("https://shop.test/there", True)
    ]
    assert rig.slot_row("slot_name") is None
    slot = await source.create_slot()
    assert (slot.name, slot.own, slot.active) == (rig.slot, True, False)
    rig.insert("https://shop.test/1", "https://shop.test/2", "https://shop.test/3")
    for _ in range(2):  # a preview does not consume changes
        found = await source.preview(None, 2)
        assert [f.payload["url"] for f in found] == ["https://shop.test/1", "https://shop.test/2"]
    assert next((s.name, s.own) for s in await source.slots()) == (rig.slot, True)
    assert await source.drop_slot()
    assert not await source.drop_slot()
    assert rig.run("SELECT count(*) FROM pg_publication") == [(0,)]


@postgres
async def test_a_position_can_be_set_forward_to_now_or_to_an_lsn(rig: Rig) -> None:
    source = rig.source()
    with pytest.raises(UsageError, match="there is no slot"):
        await source.place("now")
    await source.create_slot()
    rig.insert("https://shop.test/1")
    ((lsn,),) = rig.run("SELECT pg_current_wal_lsn()::text")
    rig.insert("https://shop.test/2")
    rig.cursor = await source.place(lsn)
    assert source.describe(rig.cursor) == lsn
    async with rig.reading() as batches:
        await rig.until(batches, lambda: rig.accepted)
        await rig.idle(batches)
        rig.insert("https://shop.test/3")
    assert rig.urls == ["https://shop.test/2"]
    rig.cursor = await source.place("now")
    rig.insert("https://shop.test/4")
    async with rig.reading() as batches:
        await rig.until(batches, lambda: len(rig.accepted) == 2)
    assert rig.urls == ["https://shop.test/2", "https://shop.test/4"]
    for wrong in ("yesterday", "0/1", "FFFFFFFF/0"):
        with pytest.raises(UsageError):
            await source.place(wrong)


@postgres
async def test_a_cursor_of_another_server_is_an_error(rig: Rig) -> None:
    async with rig.reading() as batches:
        await rig.ready(batches)
    assert rig.cursor is not None
    system = rig.run("SELECT system_identifier::text FROM pg_control_system()")[0][0].encode()
    rig.cursor = rig.cursor.replace(system, b"1" * len(system))
    async with rig.reading() as batches:
        assert "belongs to another server" in (await refused(batches)).message
