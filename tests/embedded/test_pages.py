"""The page store: unchanged bytes, retention, full disks, killed processes and damaged files."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StoreUnavailable, Unreachable
from penstock.locks import FileLock
from penstock.model import page_id
from penstock.pages import segments
from penstock.pages.segments import SegmentStore
from penstock.stores.sqlite import Database
from penstock.testing.clock import ManualClock


class Rig:
    def __init__(
        self,
        directory: Path,
        *,
        db: Database | None = None,
        clock: ManualClock | None = None,
        writer: str = "w1",
    ) -> None:
        self.directory = directory
        self.clock = clock or ManualClock()
        self.db = db or Database(":memory:")
        self.store = SegmentStore(self.db, directory, self.clock, writer=writer)

    def other(self, writer: str = "w2") -> Rig:
        return Rig(self.directory, db=self.db, clock=self.clock, writer=writer)

    async def put(self, *bodies: bytes) -> list[str]:
        ids = [page_id(b) for b in bodies]
        staged = self.store.stage(zip(ids, bodies, strict=True))
        gone = await self.db.write(lambda tx: self.store.index_in(tx, staged))
        assert gone == []
        return ids

    async def prune(
        self,
        *,
        older_than: float | None = None,
        max_bytes: int | None = None,
        keep: Sequence[str] = (),
    ) -> tuple[int, int]:
        removed = await self.db.write(
            lambda tx: self.store.prune_in(
                tx,
                older_than=older_than,
                max_bytes=max_bytes,
                keep=lambda pages: set(keep).intersection(pages),
            )
        )
        await self.db.write(self.store.sweep_in)
        return removed

    def segments(self) -> list[str]:
        return sorted(p.name for p in self.directory.glob("*.seg"))

    def packed(self) -> int:
        return sum(p.stat().st_size for p in self.directory.glob("*.seg"))


def noise(n: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "pages")
    yield rig
    rig.store.close()


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Limit the file size, so that the kernel refuses a write as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


# -- bytes -----------------------------------------------------------------------------------------


async def test_a_page_is_stored_once_for_all_workers(rig: Rig) -> None:
    body = noise(100_000)
    await rig.put(body, body)
    size = rig.packed()
    rig.clock.advance(10.0)
    await rig.put(body)
    assert rig.packed() == size
    assert await rig.db.read(lambda tx: tx.execute("SELECT count(*), max(seen) FROM page").get) == (
        1,
        rig.clock.now(),
    )
    await rig.other().put(body)
    assert await rig.db.read(lambda tx: tx.execute("SELECT count(*) FROM page").get) == 1
    assert await rig.store.get(page_id(body)) == body


async def test_a_full_segment_is_followed_by_a_new_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 10_000)
    ids = [(await rig.put(noise(6_000, i)))[0] for i in range(6)]
    assert len(rig.segments()) == 3
    assert [await rig.store.get(i) for i in ids] == [noise(6_000, i) for i in range(6)]


async def test_a_restarted_worker_with_the_same_name_overwrites_no_page(rig: Rig) -> None:
    (first,) = await rig.put(b"first")
    rig.store.close()
    again = rig.other("w1")
    (second,) = await again.put(b"second")
    assert (await again.store.get(first), await again.store.get(second)) == (b"first", b"second")
    again.store.close()


# -- failures --------------------------------------------------------------------------------------


async def test_a_full_disk_is_an_outage_and_the_page_is_stored_later(rig: Rig) -> None:
    await rig.put(b"before")
    body = noise(200_000)
    with files_no_larger_than(50_000), pytest.raises(StoreUnavailable, match="cannot write pages"):
        rig.store.stage([(page_id(b"small"), b"small"), (page_id(body), body)])
    assert await rig.put(b"small", body) == [page_id(b"small"), page_id(body)]
    assert [await rig.store.get(page_id(b)) for b in (b"before", b"small", body)] == [
        b"before",
        b"small",
        body,
    ]


async def test_a_directory_that_cannot_be_created_is_an_outage(tmp_path: Path) -> None:
    (tmp_path / "pages").write_text("a file is in the way")
    rig = Rig(tmp_path / "pages")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            rig.store.stage([(page_id(b"x"), b"x")])
    (tmp_path / "pages").unlink()
    await rig.put(b"x")
    rig.store.close()


async def test_a_page_without_a_row_is_invisible_and_its_segment_is_deleted_later(
    rig: Rig,
) -> None:
    rig.store.stage([(page_id(b"lost"), b"lost")])
    survivor = rig.other()
    assert await survivor.store.get(page_id(b"lost")) is None
    await survivor.put(b"lost")
    assert await survivor.store.get(page_id(b"lost")) == b"lost"
    (orphan,) = set(rig.segments()) - {"w2-1.seg"}
    await survivor.prune()
    assert orphan in rig.segments(), "its writer is running"
    rig.store.close()
    await survivor.prune()
    assert orphan in rig.segments(), "too new to be deleted"
    rig.clock._now = os.stat(rig.directory / orphan).st_mtime + 2 * segments.ORPHANED
    await survivor.prune()
    assert rig.segments() == ["w2-1.seg"]
    assert await survivor.store.get(page_id(b"lost")) == b"lost"
    survivor.store.close()


async def test_a_page_of_a_failed_transaction_is_invisible_and_can_be_stored_again(
    rig: Rig,
) -> None:
    staged = rig.store.stage([(page_id(b"x"), b"x")])

    def fails(tx: Any) -> None:
        rig.store.index_in(tx, staged)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await rig.db.write(fails)
    rig.store.forget(staged)
    assert await rig.store.get(page_id(b"x")) is None
    await rig.put(b"x")
    assert await rig.store.get(page_id(b"x")) == b"x"


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
async def test_a_damaged_page_is_an_error_and_other_pages_stay_readable(rig: Rig, how: str) -> None:
    (bad,) = await rig.put(noise(1000))
    (good,) = await rig.put(b"good")
    path = rig.directory / rig.segments()[0]
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[500] ^= 1
        path.write_bytes(bytes(data))
    elif how == "truncated":
        path.write_bytes(bytes(data[:500]))
    else:
        path.unlink()
    with pytest.raises(Unreachable, match=r"w1-1\.seg") as e:
        await rig.store.get(bad)
    assert e.value.hint
    if how == "flipped":
        assert await rig.store.get(good) == b"good"


async def test_a_damaged_segment_does_not_stop_retention_of_other_segments(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    old, *_ = [(await rig.put(noise(5000, i)))[0] for i in (0, 1)]
    await rig.put(noise(20_000, 9))  # in a separate segment
    first = rig.directory / "w1-1.seg"
    data = bytearray(first.read_bytes() + bytes(20_000))  # mostly empty, so it would be moved
    data[100] ^= 1
    first.write_bytes(bytes(data))
    rig.clock.advance(100.0)
    await rig.put(b"now", b"current")
    removed, freed = await rig.prune(older_than=rig.clock.now() - 50, keep=[old])
    assert (removed, freed > 0) == (2, True)
    with pytest.raises(Unreachable):
        await rig.store.get(old)


# -- retention -------------------------------------------------------------------------------------


async def test_retention_by_size_deletes_the_oldest_pages_and_frees_the_disk(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    ids = [(await rig.put(noise(10_000, i)))[0] for i in range(10)]
    assert rig.packed() > 100_000
    await rig.prune(max_bytes=45_000)
    assert rig.packed() <= 50_000
    stored = [await rig.store.get(i) is not None for i in ids]
    assert stored == sorted(stored), "the oldest pages are deleted first"
    assert stored.count(True) == 4


async def test_pages_of_a_mostly_empty_segment_are_moved_and_keep_their_age(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 30_000)
    # The last page starts a second segment.
    ids = [(await rig.put(noise(5_000, i)))[0] for i in range(7)]
    rig.store.close()
    rig.clock.advance(100.0)
    _, freed = await rig.prune(older_than=rig.clock.now(), keep=[ids[2], *ids[6:]])
    assert freed >= 30_000
    assert rig.segments() == ["w1-2.seg", "w1-3.seg"]
    assert await rig.store.get(ids[2]) == noise(5_000, 2)
    assert (await rig.prune(older_than=rig.clock.now()))[0] == 2, "a moved page keeps its age"


async def test_a_large_segment_is_moved_in_several_steps(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100_000)
    monkeypatch.setattr(segments, "MOVE_BYTES", 8_000)
    ids = [(await rig.put(noise(5_000, i)))[0] for i in range(21)]
    rig.store.close()
    rig.clock.advance(100.0)
    keep = ids[::3]
    passes = 0
    while "w1-1.seg" in rig.segments() and passes < 20:
        await rig.prune(older_than=rig.clock.now(), keep=keep)
        passes += 1
        assert [await rig.store.get(i) is not None for i in ids] == [i in keep for i in ids]
    assert 2 < passes < 10


async def test_a_segment_that_another_process_writes_is_not_deleted(rig: Rig) -> None:
    (id_,) = await rig.put(noise(1000))
    other = rig.other()
    rig.clock.advance(100.0)
    assert await other.prune(older_than=rig.clock.now()) == (1, 0)
    assert rig.segments() == ["w1-1.seg"]
    await rig.put(b"more")
    assert await rig.store.get(page_id(b"more")) == b"more"
    rig.store.close()
    rig.clock.advance(100.0)
    _, freed = await other.prune(older_than=rig.clock.now())
    assert freed > 0
    assert (rig.segments(), await other.store.get(id_)) == ([], None)


async def test_a_full_segment_is_not_deleted_before_its_pages_are_committed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    await rig.put(noise(1000, 1))
    staged = rig.store.stage([(page_id(noise(1000, 2)), noise(1000, 2))])  # second segment
    rig.clock.advance(100.0)
    # A third segment, before the page of the second is committed.
    rig.store.stage([(page_id(noise(1000, 3)), noise(1000, 3))])
    other = rig.other()
    monkeypatch.setattr(segments, "ORPHANED", -1e12)
    await other.prune(older_than=rig.clock.now())
    await rig.db.write(lambda tx: rig.store.index_in(tx, staged))
    assert await rig.store.get(page_id(noise(1000, 2))) == noise(1000, 2)


# -- durability ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("durability", "syncs"), [("full", True), ("process", False)])
async def test_page_bytes_are_synced_before_their_row_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, syncs: bool
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    rig = Rig(tmp_path / "pages", db=Database(str(tmp_path / "a.db"), durability=durability))
    log: list[str] = []

    def watched(name: str, call: Callable[[int], None]) -> Callable[[int], None]:
        def wrapper(fd: int) -> None:
            log.append(f"{name} {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")
            call(fd)

        return wrapper

    monkeypatch.setattr(os, "fdatasync", watched("sync", os.fdatasync))

    def commit() -> bool:
        log.append("commit")
        return False

    rig.db._writer.set_commit_hook(commit)
    await rig.put(b"x")
    assert log == (["sync w1-1.seg", "commit", "sync a.db-wal"] if syncs else ["commit"])
    log.clear()
    first = rig.store.stage([(page_id(b"y"), b"y")])
    rig.store.stage([(page_id(b"z"), b"z")])  # starts a third segment before the commit
    await rig.db.write(lambda tx: rig.store.index_in(tx, first))
    assert ("sync w1-2.seg" in log[: log.index("commit")]) is syncs
    log.clear()
    ahead = rig.store.stage([(page_id(b"a"), b"a")])
    await rig.store.send(ahead)
    assert any(entry.startswith("sync w1-") for entry in log) is syncs
    log.append("sent")
    await rig.db.write(lambda tx: rig.store.index_in(tx, ahead))
    assert log[log.index("sent") + 1] == "commit", (
        "synced pages are not synced again inside the transaction"
    )
    rig.store.close()
    rig.db.close_now()


async def test_staging_and_committing_run_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 20_000)
    rig = Rig(tmp_path / "pages", db=Database(str(tmp_path / "a.db")))
    bodies = [noise(3000, i) for i in range(60)]
    await asyncio.gather(*[rig.put(*bodies[i : i + 2]) for i in range(0, 60, 2)])
    assert [await rig.store.get(page_id(b)) for b in bodies] == bodies
    assert len(rig.segments()) > 5
    held = [
        name
        for name in rig.segments()
        if not FileLock(rig.directory / (name + ".lock")).try_acquire()
    ]
    assert len(held) == 2, "the current segment and the previous one"
    rig.store.close()
    rig.db.close_now()


# -- versions --------------------------------------------------------------------------------------


def rewrite_header(path: Path, version: int) -> None:
    with path.open("r+b") as f:
        f.write(segments.header(version))


async def test_a_segment_begins_with_its_version(rig: Rig) -> None:
    await rig.put(noise(100, 1))
    await rig.put(noise(100, 2))
    (name,) = rig.segments()
    raw = (rig.directory / name).read_bytes()
    assert raw.startswith(segments.header(1))
    assert raw.count(segments.header(1)) == 1
    assert segments.version_in(raw[:16]) == 1


async def test_a_segment_of_the_first_release_has_no_header_and_is_read(rig: Rig) -> None:
    (id_,) = await rig.put(noise(100))
    (name,) = rig.segments()
    path, size = rig.directory / name, len(segments.header(1))
    path.write_bytes(path.read_bytes()[size:])
    await rig.db.write(lambda tx: tx.execute("UPDATE page SET frame=frame-?", (size,)))
    assert await rig.other().store.get(id_) == noise(100)


async def test_a_segment_of_a_newer_release_is_refused_and_neither_moved_nor_deleted(
    rig: Rig,
) -> None:
    old, kept = await rig.put(noise(100_000, 1)) + await rig.put(noise(1000, 2))
    rig.store.close()
    other = rig.other()
    (name,) = rig.segments()
    rewrite_header(rig.directory / name, 2)
    with pytest.raises(StoreUnavailable, match=f"{name} has version 2") as e:
        await other.store.get(kept)
    assert "upgrade" in e.value.hint
    rig.clock.advance(100.0)
    await other.prune(older_than=rig.clock.now(), keep=[kept])
    assert rig.segments() == [name], "its pages are not moved"
    rewrite_header(rig.directory / name, 1)
    assert await other.store.get(kept) == noise(1000, 2)
    assert await other.store.get(old) is None
