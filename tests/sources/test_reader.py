"""The reader: findings are accepted together with their cursor, also after a crash, a full queue,
a pause, a reset or an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.authoring.pipeline import Pipeline
from penstock.clock import SystemClock
from penstock.config import files as configuration
from penstock.errors import SourceDown
from penstock.fetching.source_client import SourceWeb
from penstock.intake.accept import Intake
from penstock.intake.mapping import Mapping
from penstock.intake.reader import Reader
from penstock.model import mint
from penstock.ports import Batch, Finding, Transaction
from penstock.runtime.stores import Stores, open_stores
from penstock.sources.base import BaseSource, SourceContext


class Pages(BaseSource):
    """A source over a list that grows. Its cursor is the number of paths that were read. It records
    how many paths it acknowledged.
    """

    def __init__(
        self, spec: Any, paths: list[str], *, size: int = 2, endless: bool = False
    ) -> None:
        config = configuration.load({}, {}, Path.cwd()).config
        super().__init__(
            spec,
            SourceContext(config, SystemClock(), random.Random(1), SourceWeb(), Path.cwd()),
        )
        self.paths, self.size, self.endless, self.acknowledged, self.broken = (
            paths,
            size,
            endless,
            0,
            "",
        )

    async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
        at = int(cursor or 0)
        while True:
            if self.broken:
                raise SourceDown(self.broken, hint="mend it")
            while at < len(self.paths):
                some = self.paths[at : at + self.size]
                at += len(some)
                yield Batch(
                    findings=[
                        Finding(
                            id=mint("page", p), payload={"path": p, "url": f"https://shop.test{p}"}
                        )
                        for p in some
                    ],
                    cursor=b"%d" % at,
                )
                self.acknowledged = at
            if not self.endless:
                return
            yield Batch(idle=True)
            await asyncio.sleep(0.01)

    async def place(self, to: str) -> bytes | None:
        return b"%d" % int(to)


class Rig:
    def __init__(self, directory: Path, **settings: str) -> None:
        self.directory, self.settings, self.clock = directory, settings, SystemClock()
        self.stores: Stores

    def open(self) -> Stores:
        loaded = configuration.load(
            {"state.dir": str(self.directory), **self.settings}, {}, self.directory
        )
        self.stores = open_stores(loaded.config)
        return self.stores

    def reader(self, source: Any, *, worker: str = "w1") -> Reader:
        intake = Intake(self.stores.lifecycle, Mapping(source.spec), self.clock, source=source.name)
        return Reader(
            source,
            source.spec.url,
            intake,
            self.stores.uow,
            self.stores.db.lock(self.directory / "s.lock"),
            self.clock,
            random.Random(1),
            worker=worker,
        )

    def state(self) -> Any:
        return self.stores.uow.snapshot(lambda tx: tx.sources.state("pages"))

    def urls(self) -> list[str]:
        return [
            url.removeprefix("https://shop.test")
            for (url,) in self.stores.db.read_now(
                lambda tx: list(tx.execute("SELECT url FROM event ORDER BY n"))
            )
        ]

    def cursor(self) -> bytes | None:
        return self.stores.uow.snapshot(lambda tx: tx.sources.cursor("pages"))

    async def reset(self, cursor: bytes | None) -> None:
        """Set the position of the source, as `penstock sources reset` does."""

        def work(tx: Transaction) -> None:
            tx.sources.move_cursor("pages", cursor, 0.0)
            tx.sources.reset("pages")

        await self.stores.uow.write(work)

    @contextlib.asynccontextmanager
    async def reading(self, *readers: Reader) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(r.run()) for r in readers]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(r, asyncio.CancelledError) for r in results), results


@pytest.fixture(name="rig")
def _rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "state")
    (tmp_path / "state").mkdir()
    made.open()
    yield made
    made.stores.close()


def spec(**more: Any) -> Any:
    pipeline = Pipeline("shop")
    pipeline.source("pages:list", name="pages", **more)
    return pipeline.sources[0]


async def until(holds: Callable[[], Any], what: str) -> None:
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


async def until_settled(reader: Reader) -> None:
    for _ in range(6000):
        if await reader.settled():
            return
        # The ledger has the state slightly before the reader.
        await asyncio.sleep(0.01)
    raise AssertionError("the reader never became idle")


async def test_findings_are_accepted_with_their_cursor_and_then_acknowledged(rig: Rig) -> None:
    source = Pages(spec(), ["/1", "/2", "/3"])
    reader = rig.reader(source)
    async with rig.reading(reader):
        await until(lambda: rig.cursor() == b"3", "read to its end")
        await until(lambda: source.acknowledged == 3, "acknowledged")
        assert rig.urls() == ["/1", "/2", "/3"]
        await until(lambda: rig.state().settled_at, "settled")
        await until_settled(reader)
    assert rig.state().events == 3
    assert rig.state().position == "3"


async def test_findings_that_are_read_again_after_a_crash_create_no_second_event(rig: Rig) -> None:
    first = Pages(spec(), ["/1", "/2", "/3", "/4"])
    batches = first.read(None)
    batch = await anext(batches)
    events = [rig.reader(first).intake.mapping.event(f) for f in batch.findings]
    # The events are accepted, and the cursor is lost.
    await rig.stores.lifecycle.accept([event for event in events if event is not None])
    await batches.aclose()
    assert first.acknowledged == 0
    async with rig.reading(rig.reader(Pages(spec(), ["/1", "/2", "/3", "/4"]))):
        await until(lambda: rig.cursor() == b"4", "read again")
    assert rig.urls() == ["/1", "/2", "/3", "/4"]
    assert (rig.state().events, rig.state().known) == (2, 2)


async def test_a_full_queue_stops_the_reader_and_drops_no_finding(rig: Rig) -> None:
    rig.stores.close()
    rig.settings["intake.max_pending"] = "3"
    rig.open()
    source = Pages(spec(), [f"/{i}" for i in range(6)])
    async with rig.reading(rig.reader(source)):
        await until(lambda: len(rig.urls()) == 3, "filled")
        await asyncio.sleep(0.7)  # longer than one wait for a full queue
        assert len(rig.urls()) == 3
        assert rig.cursor() == b"2"
        assert source.acknowledged == 2
        await rig.stores.dead_letters.purge("requests", "make room")
        await until(lambda: len(rig.urls()) == 6, "continued")
    assert rig.urls() == [f"/{i}" for i in range(6)]


async def test_known_findings_are_counted_once_if_the_queue_becomes_full(rig: Rig) -> None:
    async with rig.reading(rig.reader(Pages(spec(), ["/0"]))):
        await until(lambda: rig.cursor() == b"1", "read")
    await rig.stores.uow.write(lambda tx: tx.sources.move_cursor("pages", None, 0.0))
    rig.stores.close()
    rig.settings["intake.max_pending"] = "2"
    rig.open()
    async with rig.reading(rig.reader(Pages(spec(), ["/0", "/1", "/2"], size=3))):
        await until(lambda: len(rig.urls()) == 2, "filled")
        await rig.stores.dead_letters.purge("requests", "make room")
        await until(lambda: rig.cursor() == b"3", "continued")
    assert (rig.state().events, rig.state().known) == (3, 1)


async def test_a_finding_with_a_bad_url_is_one_dead_letter_even_if_it_is_read_twice(
    rig: Rig,
) -> None:
    source = Pages(spec(map={"url": "path"}), ["/nowhere", "https://ok.test/"])
    async with rig.reading(rig.reader(source)):
        await until(lambda: rig.cursor() == b"2", "read")
    await rig.reset(None)
    async with rig.reading(
        rig.reader(Pages(spec(map={"url": "path"}), ["/nowhere", "https://ok.test/"]))
    ):
        await until(lambda: rig.cursor() == b"2", "read again")
    letters = rig.stores.db.read_now(lambda tx: list(tx.execute("SELECT stage, reason FROM dead")))
    assert len(letters) == 1
    assert letters[0][0] == "source"
    assert "URL" in letters[0][1]


async def test_a_dead_letter_masks_the_api_key_in_the_address_of_its_finding(rig: Rig) -> None:
    class Api(Pages):
        async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
            yield Batch(
                findings=[
                    Finding(
                        id="1",
                        base="https://api.test/items?api_key=hush&page=2",
                        payload={"sku": 1},
                    )
                ],
                cursor=b"1",
            )

    async with rig.reading(rig.reader(Api(spec(), []))):
        await until(lambda: rig.cursor() == b"1", "read")
    (envelope,) = rig.stores.db.read_now(
        lambda tx: next(iter(tx.execute("SELECT envelope FROM dead")))
    )
    assert b"https://api.test/items?api_key=***&page=2" in envelope
    assert b"hush" not in envelope


async def test_a_source_whose_row_was_deleted_is_declared_again_and_read(rig: Rig) -> None:
    source = Pages(spec(), ["/1"], endless=True)
    async with rig.reading(rig.reader(source)):
        await until(lambda: rig.cursor() == b"1", "read")
        rig.stores.db.write_now(lambda tx: tx.execute("DELETE FROM source"))
        source.paths.append("/2")
        await until(lambda: rig.cursor() == b"2", "read the second path")
    assert rig.urls() == ["/1", "/2"]


async def test_findings_that_where_or_the_hook_rejects_are_skipped(rig: Rig) -> None:
    def hook(payload: dict[str, Any]) -> dict[str, Any] | None:
        return None if payload["path"] == "/2" else {"priority": "high", "geo": "de"}

    source = Pages(spec(where="path != '/1'", hook=hook, map={"trace": "path"}), ["/1", "/2", "/3"])
    async with rig.reading(rig.reader(source)):
        await until(lambda: rig.cursor() == b"3", "read")
    assert rig.urls() == ["/3"]
    assert rig.state().skipped == 2
    trace, source_name = rig.stores.db.read_now(
        lambda tx: next(iter(tx.execute("SELECT trace, source FROM event")))
    )
    assert (trace, source_name) == ("/3", "pages")


async def test_a_paused_source_is_not_read_until_it_is_resumed(rig: Rig) -> None:
    source = Pages(spec(), ["/1"], endless=True)
    async with rig.reading(rig.reader(source)):
        await until(lambda: rig.cursor() == b"1", "read")
        await rig.stores.uow.write(lambda tx: tx.sources.pause("pages", "moving house"))
        await asyncio.sleep(1.2)  # the pause is noticed within a second
        source.paths.append("/2")
        await asyncio.sleep(0.3)
        assert rig.urls() == ["/1"]
        await rig.stores.uow.write(lambda tx: tx.sources.pause("pages", None))
        await until(lambda: rig.urls() == ["/1", "/2"], "resumed")


async def test_a_reset_source_is_read_again_without_second_events(rig: Rig) -> None:
    source = Pages(spec(), ["/1", "/2"], endless=True)
    async with rig.reading(rig.reader(source)):
        await until(lambda: rig.cursor() == b"2", "read")
        await rig.reset(None)
        await until(lambda: rig.state().known == 2, "read again")
    assert rig.urls() == ["/1", "/2"]
    assert rig.cursor() == b"2"


async def test_a_reset_during_a_round_starts_the_next_round_without_waiting(rig: Rig) -> None:
    class Reset(Pages):
        async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
            async for batch in super().read(cursor):
                yield batch
            if cursor is None:
                await rig.reset(b"1")
                self.paths.append("/3")

    async with rig.reading(rig.reader(Reset(spec(every=3600), ["/1", "/2"]))):
        await until(lambda: rig.cursor() == b"3", "read again without waiting")
    assert rig.urls() == ["/1", "/2", "/3"]


async def test_a_source_that_is_down_shows_its_error_and_is_read_again(rig: Rig) -> None:
    source = Pages(spec(every=0.05), ["/1"])
    source.broken = "its server is away"
    reader = rig.reader(source)
    async with rig.reading(reader):
        await until(lambda: rig.state() and rig.state().error, "error recorded")
        assert "its server is away" in rig.state().error
        assert "mend it" in rig.state().error
        assert await reader.settled()  # a run until idle does not wait for this source
        source.broken = ""
        await until(lambda: rig.urls() == ["/1"], "read after the error")
        await until(lambda: rig.state().error is None, "recovered")
        assert reader.error == ""


async def test_a_bug_in_a_source_is_logged_and_the_source_is_read_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy(Pages):
        async def read(self, cursor: bytes | None) -> AsyncGenerator[Batch, None]:
            if self.size:
                self.size = 0
                raise KeyError("slip")
            self.size = 2
            async for batch in super().read(cursor):
                yield batch

    async with rig.reading(rig.reader(Buggy(spec(every=0.05), ["/1"]))):
        await until(lambda: rig.urls() == ["/1"], "read after the bug")
    assert "bug in the source" in caplog.text


async def test_one_of_two_readers_reads_and_the_other_takes_over(rig: Rig) -> None:
    paths = ["/1"]
    one, other = Pages(spec(), paths, endless=True), Pages(spec(), paths, endless=True)
    second = rig.reader(other, worker="w2")
    async with rig.reading(second):
        async with rig.reading(rig.reader(one)):
            await until(lambda: rig.cursor() == b"1", "read by one reader")
            await until(
                lambda: one.acknowledged + other.acknowledged == 1, "acknowledged by one reader"
            )
            await until(lambda: rig.state().settled_at, "settled")
        paths.append("/2")
        await until(lambda: rig.cursor() == b"2", "read by the remaining reader")
    assert rig.urls() == ["/1", "/2"]


async def test_rounds_follow_their_interval_even_after_a_restart(rig: Rig) -> None:
    source = Pages(spec(every=0.2), ["/1"])
    async with rig.reading(rig.reader(source)):
        await until(lambda: rig.cursor() == b"1", "a round")
        await until(lambda: rig.state().next_at, "the next round is planned")
        source.paths.append("/2")
        await until(lambda: rig.cursor() == b"2", "another round")
    calm = Pages(spec(every=3600), source.paths)
    await rig.stores.uow.write(lambda tx: tx.sources.note("pages", next_at=rig.clock.now() + 3000))
    source.paths.append("/3")
    async with rig.reading(rig.reader(calm)):
        await asyncio.sleep(0.5)
        assert rig.cursor() == b"2"


async def test_a_shorter_interval_applies_from_the_next_start(rig: Rig) -> None:
    async with rig.reading(rig.reader(Pages(spec(every=86400), ["/1"]))):
        await until(
            lambda: rig.cursor() == b"1" and rig.state().next_at,
            "a round, and the next round is planned for tomorrow",
        )
    async with rig.reading(rig.reader(Pages(spec(every=0.2), ["/1", "/2"]))):
        await until(lambda: rig.cursor() == b"2", "another round")
