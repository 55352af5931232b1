"""The page store on a real S3 server: unchanged bytes, an index that is committed with the ledger,
and an error for each mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import obstore
import psycopg
import pytest
from psycopg import sql
from tests.servers import Handle
from tests.stores.workers import OnPostgres, OnSqlite

from penstock.errors import ConfigError, PenstockError, StoreUnavailable, Unreachable
from penstock.model import page_id
from penstock.pages.s3 import S3Pages
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.s3 import bucket_at
from penstock.stores.sqlite import Database
from penstock.testing.clock import ManualClock
from penstock.testing.pages_suite import PagesConformance, PagesWorker

pytestmark = pytest.mark.server("s3")
Place = Callable[[str], Handle]


class OnS3(PagesConformance):
    """A prefix of the bucket for each test."""

    @pytest.fixture(autouse=True)
    def _prefix(self, server: Place) -> None:
        self.bucket = server("s3").url.replace("/pages?", f"/{uuid.uuid4().hex}?")

    async def after_sweep(self, worker: PagesWorker) -> None:
        # The removal runs on this thread. Wait until it has ended.
        await asyncio.wrap_future(_store(worker)._remover.submit(lambda: None))

    async def damage(self, worker: PagesWorker, page: str) -> None:
        obstore.put(_store(worker).bucket, self._object(worker, page), b"rubbish")

    async def lose(self, worker: PagesWorker, page: str) -> None:
        obstore.delete(_store(worker).bucket, self._object(worker, page))

    def _object(self, worker: PagesWorker, page: str) -> str:
        store = _store(worker)
        found: str = store.db.read_now(lambda tx: store._rows(tx, "hash, name", [page]))[page][0]
        return found


def _store(worker: PagesWorker) -> S3Pages:
    assert isinstance(worker.store, S3Pages)
    return worker.store


class TestIndexInSqlite(OnSqlite, OnS3):
    async def open(self) -> PagesWorker:
        engine = self.worker(
            self, pages=lambda db, _: S3Pages(db, *bucket_at(self.bucket), self.clock)
        )
        return PagesWorker(engine.pages, engine.uow)


@pytest.mark.server("postgres")
class TestIndexInPostgres(OnPostgres, OnS3):
    async def open(self) -> PagesWorker:
        engine = self.worker(
            self, pages=lambda db, _: S3Pages(db, *bucket_at(self.bucket), self.clock)
        )
        return PagesWorker(engine.pages, engine.uow)


# -- promises of S3 only ---------------------------------------------------------------------------


class Rig:
    """One worker that shares a bucket and an index with other workers."""

    def __init__(self, url: str, db: Any = None, clock: ManualClock | None = None) -> None:
        self.url, self.db, self.clock = url, db or Database(":memory:"), clock or ManualClock()
        self.store = S3Pages(self.db, *bucket_at(url), self.clock)

    def other(self) -> Rig:
        return Rig(self.url, self.db, self.clock)

    async def put(self, *bodies: bytes) -> list[str]:
        ids = [page_id(b) for b in bodies]
        while True:
            staged = self.store.stage(zip(ids, bodies, strict=True))
            await self.store.send(staged)
            if not await self.db.write(lambda tx: self.store.index_in(tx, staged)):  # noqa: B023 (awaited here)
                return ids
            self.store.forget(staged)

    async def prune(
        self,
        *,
        older_than: float | None = None,
        max_bytes: int | None = None,
        keep: Sequence[str] = (),
    ) -> tuple[int, int]:
        return await self.db.write(
            lambda tx: self.store.prune_in(
                tx,
                older_than=older_than,
                max_bytes=max_bytes,
                keep=lambda pages: set(keep).intersection(pages),
            )
        )

    async def sweep(self) -> None:
        await self.db.write(self.store.sweep_in)
        # The removal runs on this thread. Wait until it has ended.
        await asyncio.wrap_future(self.store._remover.submit(lambda: None))
        await self.db.write(self.store.sweep_in)

    def objects(self) -> int:
        return sum(len(chunk) for chunk in obstore.list(self.store.bucket))


@contextlib.asynccontextmanager
async def rig(server: Place) -> AsyncIterator[Rig]:
    found = Rig(server("s3").url.replace("/pages?", f"/{uuid.uuid4().hex}?"))
    try:
        yield found
    finally:
        found.store.close()
        found.db.close_now()


def html(n: int) -> bytes:
    return b"<html>" + b"%d " % n * 500 + b"</html>"


async def test_a_page_that_workers_store_several_times_is_one_object(server: Place) -> None:
    async with rig(server) as r:
        for worker in (r, r, r.other()):
            await worker.put(html(1), html(2), html(1))
        assert r.objects() == 2
        assert r.db.read_now(r.store.totals_in)[0] == 2


async def test_two_workers_that_store_one_page_together_leave_one_object(server: Place) -> None:
    async with rig(server) as r:
        one, other = r, r.other()
        staged = [w.store.stage([(page_id(html(1)), html(1))]) for w in (one, other)]
        await asyncio.gather(one.store.send(staged[0]), other.store.send(staged[1]))
        assert r.objects() == 2
        for w, s in zip((one, other), staged, strict=True):
            assert await r.db.write(lambda tx: w.store.index_in(tx, s)) == []  # noqa: B023 (awaited here)
        await r.sweep()
        assert r.objects() == 1
        assert await r.store.get(page_id(html(1))) == html(1)


async def test_retention_removes_the_oldest_pages_and_keeps_needed_ones(server: Place) -> None:
    async with rig(server) as r:
        old = await r.put(html(1), html(2))
        r.clock.advance(100.0)
        (new,) = await r.put(html(3))
        assert (await r.prune(older_than=r.clock.now() - 50.0, keep=[old[0]]))[0] == 1
        assert [await r.store.get(i) is not None for i in (*old, new)] == [True, False, True]
        assert r.objects() == 3, "objects are removed after the commit"
        await r.sweep()
        assert r.objects() == 2
        removed, freed = await r.prune(max_bytes=0)
        assert removed == 2
        assert freed > 0
        await r.sweep()
        assert r.objects() == 0
        assert r.db.read_now(r.store.totals_in) == (0, 0)


async def test_a_page_that_is_stored_again_while_it_is_pruned_is_kept(server: Place) -> None:
    async with rig(server) as r:
        other = r.other()
        (id_,) = await r.put(html(1))
        staged = r.store.stage([(id_, html(1))])  # this worker has the page in its cache
        await r.store.send(staged)
        await other.prune(max_bytes=0)
        assert await r.db.write(lambda tx: r.store.index_in(tx, staged)) == [id_]
        r.store.forget(staged)
        await r.put(html(1))
        await other.sweep()
        assert await r.store.get(id_) == html(1)
        other.store.close()


async def test_a_damaged_or_removed_object_raises_an_error(server: Place) -> None:
    async with rig(server) as r:
        ids = await r.put(html(1), html(2))
        names = r.db.read_now(lambda tx: r.store._rows(tx, "hash, name", ids))
        obstore.put(r.store.bucket, names[ids[0]][0], b"rubbish")
        obstore.delete(r.store.bucket, names[ids[1]][0])
        with pytest.raises(Unreachable, match="no longer matches its hash"):
            await r.store.get(ids[0])
        with pytest.raises(Unreachable, match="is no longer in bucket"):
            await r.store.get(ids[1])


async def test_an_outage_raises_and_pages_can_be_stored_after_it(server: Place) -> None:
    handle = server("s3")
    async with rig(server) as r:
        await r.put(html(1))
        await asyncio.to_thread(handle.stop)
        with pytest.raises(StoreUnavailable, match="could not be stored"):
            await r.put(html(2))
        with pytest.raises(StoreUnavailable, match="cannot be read"):
            await r.store.get(page_id(html(1)))
        await asyncio.to_thread(handle.start)
        (id_,) = await r.put(html(2))
        assert await r.store.get(id_) == html(2)


@pytest.mark.server("postgres")
async def test_the_index_can_be_stored_in_postgres(server: Place) -> None:
    made_at = server("postgres").url
    made = PostgresStore(
        made_at, namespace=f"test_{uuid.uuid4().hex[:12]}", durability="process", inline=True
    )
    r = Rig(server("s3").url.replace("/pages?", f"/{uuid.uuid4().hex}?"), made)
    try:
        one, two = await r.put(html(1), html(2))
        r.clock.advance(100.0)
        await r.other().put(html(2), html(3))
        assert await r.store.get(two) == html(2)
        assert (await r.prune(older_than=r.clock.now() - 50.0))[0] == 1
        assert await r.store.get(one) is None
        await r.sweep()
        assert r.objects() == 2
        assert r.db.read_now(
            lambda tx: (r.store.find_in(tx, two[:9]), r.store.sizes_in(tx, [two]))
        ) == ([two], {two: len(html(2))})
    finally:
        r.store.close()
        made.close_now()
        with psycopg.connect(made_at, autocommit=True) as connection:
            connection.execute(
                sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(made.namespace))
            )


# -- mistakes at the start -------------------------------------------------------------------------


async def told(url: str) -> PenstockError:
    r = Rig(url)
    with pytest.raises(PenstockError) as caught:
        await r.store.start()
    r.store.close()
    assert caught.value.hint
    assert "hunter2" not in caught.value.message + caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


async def test_each_mistake_at_the_start_has_a_different_error(server: Place) -> None:
    port = server("s3").port
    assert (
        "there is no bucket nosuch"
        in (
            await told(f"s3://nosuch/p?endpoint=http://127.0.0.1:{port}&key=x&secret=hunter2")
        ).message
    )
    with socket.socket() as taken:  # bound without listening, so that the port stays unused
        taken.bind(("127.0.0.1", 0))
        unused = taken.getsockname()[1]
        assert (
            "cannot be reached"
            in (
                await told(
                    f"s3://penstock/p?endpoint=http://127.0.0.1:{unused}&key=x&secret=hunter2"
                )
            ).message
        )

    def checking(after: str) -> None:
        """Let the server check keys and permissions after `after` requests."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/moto-api/reset-auth",
            data=after.encode(),
            headers={"Content-Type": "text/plain"},
        )
        urllib.request.urlopen(request).close()

    await asyncio.to_thread(checking, "0")
    try:
        assert (
            "does not accept these credentials"
            in (
                await told(f"s3://penstock/p?endpoint=http://127.0.0.1:{port}&key=x&secret=hunter2")
            ).message
        )
    finally:
        await asyncio.to_thread(checking, "inf")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:///prefix", "names no bucket"),
        ("s3://key:hunter2@bucket/", "names no bucket"),
        ("s3://bucket/?regoin=x", "no option 'regoin'"),
        ("s3://bucket/?key=x", "half of its credentials"),
        ("s3://bucket/?endpoint=localhost:9000", "endpoint is 'localhost:9000'"),
    ],
)
def test_a_mistyped_url_is_refused_with_a_hint(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bucket_at(url)
    assert says in caught.value.message
    assert caught.value.hint
    assert "hunter2" not in caught.value.message
