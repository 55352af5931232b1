"""The WAL limit of a slot whose queue is full: a warning, then a spill file, then an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import pytest
from tests.servers import Handle
from tests.sources.postgres_rig import Rig, made, refused

from penstock.ports import Batch, Finding
from penstock.sources.postgres.spill import Frame, Spill

MIB = 1 << 20


@pytest.fixture
def rig(server: Callable[[str], Handle], tmp_path: Path) -> Iterator[Rig]:
    yield from made(server("postgres").url, tmp_path, "cdc")


postgres = pytest.mark.server("postgres")


async def fill_without_reading(
    rig: Rig,
    batches: AsyncGenerator[Batch, None],
    holds: Callable[[], object],
    *,
    rows: int = 20_000,
) -> Batch:
    """Read only one batch, like a full queue, while the WAL grows by about 24 MB.

    Return the batch as soon as `holds()` is true.
    """
    rig.run(
        (
            "INSERT INTO scrape_requests(url, note) "
            "SELECT 'https://shop.test/' || n, repeat('x', 1000) FROM generate_series(1, %s) n"
        ),
        rows,
    )
    batch = Batch()
    while not batch.findings:
        batch = await anext(batches)
        rig.accept(batch)
    for _ in range(300):
        rig.run("CHECKPOINT")  # the server advances restart_lsn only at a checkpoint
        if holds():
            return batch
        await asyncio.sleep(0.1)
    raise AssertionError(f"the condition never became true: {await refused_at_last(rig, batches)}")


@postgres
@pytest.mark.slow
async def test_a_full_queue_is_spilled_to_a_file_so_that_the_server_can_discard_wal(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_lag": "16MiB"}
    with caplog.at_level(logging.WARNING, "penstock"):
        async with rig.reading(**options) as batches:
            await rig.ready(batches)
            await fill_without_reading(
                rig,
                batches,
                lambda: (
                    rig.slot_row("pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)") < 8 * MIB
                ),
            )
            files = list(rig.directory.glob("sources/*.spill"))
            assert files[0].stat().st_size > 15 * MIB
            assert files[0].stat().st_mode & 0o077 == 0
            await rig.until(batches, lambda: len(rig.accepted) == 20_000)
            await rig.idle(batches)
            rig.when(lambda: files[0].stat().st_size == 0, "the spill file is emptied")
            rig.insert("https://shop.test/after")
            await rig.until(batches, lambda: len(rig.accepted) == 20_001)
    assert rig.repeated == 0
    assert rig.urls == [
        *[f"https://shop.test/{n}" for n in range(1, 20_001)],
        "https://shop.test/after",
    ]
    messages = [record.getMessage() for record in caplog.records]
    assert any("of WAL on the server" in line and "the limit is 16MiB" in line for line in messages)
    assert any(
        "the queue is full, so changes are written to the spill file" in line for line in messages
    )


@postgres
@pytest.mark.slow
async def test_a_slot_never_holds_more_wal_than_the_limit_while_the_queue_is_full(
    rig: Rig,
) -> None:
    limit, transactions, peak = 32 * MIB, 64, 0

    def held() -> int:
        rig.run("CHECKPOINT")  # the server advances restart_lsn only at a checkpoint
        return int(rig.slot_row("pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)"))

    async with rig.reading(max_lag=limit) as batches:
        await rig.ready(batches)
        for number in range(transactions):  # each of about 1 MB
            rig.run(
                (
                    "INSERT INTO scrape_requests(url, note) SELECT %s || n, repeat('x', 1000) "
                    "FROM generate_series(1, 900) n"
                ),
                f"https://shop.test/{number}/",
            )
            if not number:
                await rig.until(batches, lambda: rig.accepted)
            now = held()
            peak = max(peak, now)
            # A slot also holds WAL that is written faster than any reader reads. So the inserts
            # wait for the reader.
            if now >= limit * 3 // 4:
                rig.when(
                    lambda: held() < limit * 3 // 4,
                    "the slot advances although no batch is taken",
                )
        assert limit // 2 < peak <= limit
        assert (
            rig.slot_row("pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)")
            < limit * 3 // 4
        )
        await rig.until(batches, lambda: len(rig.accepted) == transactions * 900)
    assert len(set(rig.urls)) == transactions * 900
    assert rig.repeated == 0


@postgres
@pytest.mark.slow
async def test_a_killed_reader_continues_with_the_changes_in_its_spill_file(
    rig: Rig,
) -> None:
    options = {"max_lag": "16MiB"}
    async with rig.reading(**options) as batches:
        await rig.ready(batches)
        await fill_without_reading(
            rig,
            batches,
            lambda: (
                rig.slot_row("pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)") < MIB
            ),
        )
    for enough in (3000, 9000):
        async with rig.reading(**options) as batches:
            await rig.until(batches, lambda enough=enough: len(rig.accepted) >= enough)
    rig.insert("https://shop.test/after")
    async with rig.reading(**options) as batches:
        await rig.until(batches, lambda: len(rig.accepted) == 20_001)
        await rig.idle(batches)
    assert len(set(rig.urls)) == 20_001
    assert rig.repeated <= 4000  # ids that were accepted and not yet recorded in the file


@postgres
@pytest.mark.slow
async def test_a_slot_over_its_limit_is_dropped_only_with_on_limit_drop(
    rig: Rig,
) -> None:
    options = {"max_lag": "4MiB", "max_spill": "2MiB"}
    async with rig.reading(**options) as batches:
        await rig.ready(batches)
        await fill_without_reading(rig, batches, lambda: rig.slot_row("NOT active"))
        trouble = await refused_at_last(rig, batches)
        assert "the limit is 4MiB, and the queue stays full" in trouble
    assert rig.slot_row("slot_name")
    # The remaining changes are read as soon as the queue has space.
    async with rig.reading(**options) as batches:
        await rig.until(batches, lambda: len(rig.accepted) == 20_000)
        await rig.idle(batches)
    rig.accepted.clear()
    async with rig.reading(**options, on_limit="drop") as batches:
        await fill_without_reading(rig, batches, lambda: rig.slot_row("slot_name") is None)
        trouble = await refused_at_last(rig, batches)
        assert "it was dropped" in trouble
    assert 0 < len(rig.accepted) < 20_000
    async with rig.reading(**options) as batches:  # spilled changes are still yielded
        trouble = await refused_at_last(rig, batches)
    assert "does not exist any longer, so changes after" in trouble


async def refused_at_last(rig: Rig, batches: AsyncGenerator[Batch, None]) -> str:
    async def accepting() -> AsyncGenerator[Batch, None]:
        async for batch in batches:
            rig.accept(batch)
            yield batch

    return (await refused(accepting())).message


# -- the file --------------------------------------------------------------------------------------


def frame(number: int) -> Frame:
    return Frame([Finding(id=f"id-{number}", payload={"n": number})], number, 0, None)


def numbers(spill: Spill) -> list[int]:
    found = []
    while (read := spill.next()) is not None:
        found.append(read[0].lsn)
    return found


def test_a_spill_file_returns_unaccepted_frames_in_order_after_a_restart(
    tmp_path: Path,
) -> None:
    spill = Spill(tmp_path / "s.spill", 1 << 20)
    ends = [spill.append(frame(n)) for n in range(5)]
    spill.sync()
    spill.accept(ends[1])
    spill.close()
    again = Spill(tmp_path / "s.spill", 1 << 20)
    assert again.last() == (4, 0)
    assert numbers(again) == [2, 3, 4]
    again.accept(ends[4])
    assert not again.active
    assert (tmp_path / "s.spill").stat().st_size == 0
    again.append(frame(7))
    again.close()
    third = Spill(tmp_path / "s.spill", 1 << 20)
    assert numbers(third) == [7]
    third.close()


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_or_damaged_last_frame_of_a_spill_file_is_removed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "s.spill"
    spill = Spill(path, 1 << 20)
    ends = [spill.append(frame(n)) for n in range(3)]
    spill.close()
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    torn = Spill(path, 1 << 20)
    assert numbers(torn) == [0, 1]
    assert path.stat().st_size == ends[1]
    torn.close()
    path.write_bytes(raw[:-cut] + bytes([raw[-cut] ^ 1]) + raw[len(raw) - cut + 1 :])
    damaged = Spill(path, 1 << 20)
    assert numbers(damaged) == [0, 1]
    damaged.close()
