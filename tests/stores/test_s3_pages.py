"""The page store on S3: bytes that come back unchanged from a real server, an index that is
committed with the books, and a sentence for each mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
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

from penstock.errors import ConfigError, PenstockError, StoreUnavailable, Unreachable
from penstock.model import page_id
from penstock.pages.s3 import S3Pages
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.s3 import bucket_at
from penstock.stores.sqlite import Database
from penstock.testing.clock import ManualClock

pytestmark = pytest.mark.server("s3")
Place = Callable[[str], Handle]


class Rig:
    """A worker: its own view of a shared bucket and a shared index."""

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
        await asyncio.wrap_future(
            self.store._remover.submit(lambda: None)
        )  # behind the removal, which is on that thread
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


async def test_bodies_come_back_unchanged_whatever_they_are(server: Place) -> None:
    async with rig(server) as r:
        await r.store.start()
        bodies = [b"", b"\x00\xff", html(1), random.Random(1).randbytes(100_000)]
        ids = await r.put(*bodies)
        assert [await r.store.get(i) for i in ids] == bodies
        assert r.db.read_now(lambda tx: [r.store.get_in(tx, i) for i in ids]) == bodies
        assert await r.store.get(page_id(b"other")) is None
        assert await r.store.get("no id") is None


async def test_a_page_is_stored_once_however_often_and_by_whomever_it_is_fetched(
    server: Place,
) -> None:
    async with rig(server) as r:
        for worker in (r, r, r.other()):
            await worker.put(html(1), html(2), html(1))
        assert r.objects() == 2
        assert r.db.read_now(r.store.totals_in)[0] == 2


async def test_two_that_store_the_same_page_at_once_leave_one_object(server: Place) -> None:
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


async def test_what_a_failed_transaction_sent_is_not_found_and_is_sent_again(server: Place) -> None:
    async with rig(server) as r:
        id_ = page_id(html(1))
        staged = r.store.stage([(id_, html(1))])
        await r.store.send(staged)
        r.store.forget(staged)
        assert await r.store.get(id_) is None
        await r.put(html(1))
        assert await r.store.get(id_) == html(1)


async def test_retention_removes_the_oldest_and_what_is_needed_stays(server: Place) -> None:
    async with rig(server) as r:
        old = await r.put(html(1), html(2))
        r.clock.advance(100.0)
        (new,) = await r.put(html(3))
        assert (await r.prune(older_than=r.clock.now() - 50.0, keep=[old[0]]))[0] == 1
        assert [await r.store.get(i) is not None for i in (*old, new)] == [True, False, True]
        assert r.objects() == 3, "only what is committed is removed"
        await r.sweep()
        assert r.objects() == 2
        removed, freed = await r.prune(max_bytes=0)
        assert removed == 2
        assert freed > 0
        await r.sweep()
        assert r.objects() == 0
        assert r.db.read_now(r.store.totals_in) == (0, 0)


async def test_a_page_that_comes_again_while_retention_removes_it_is_kept(server: Place) -> None:
    async with rig(server) as r:
        other = r.other()
        (id_,) = await r.put(html(1))
        staged = r.store.stage([(id_, html(1))])  # known here
        await r.store.send(staged)
        await other.prune(max_bytes=0)
        assert await r.db.write(lambda tx: r.store.index_in(tx, staged)) == [id_]
        r.store.forget(staged)
        await r.put(html(1))
        await other.sweep()
        assert await r.store.get(id_) == html(1)
        other.store.close()


async def test_pages_are_found_by_the_beginning_of_their_id_and_counted(server: Place) -> None:
    async with rig(server) as r:
        ids = await r.put(html(1), html(2))
        assert r.db.read_now(lambda tx: r.store.find_in(tx, ids[0][:12])) == [ids[0]]
        assert r.db.read_now(lambda tx: r.store.sizes_in(tx, [*ids, page_id(b"no")])) == {
            i: len(html(n)) for i, n in zip(ids, (1, 2), strict=True)
        }
        assert r.db.read_now(r.store.problems_in) == []


async def test_an_object_that_was_damaged_or_removed_is_told(server: Place) -> None:
    async with rig(server) as r:
        ids = await r.put(html(1), html(2))
        names = r.db.read_now(lambda tx: r.store._rows(tx, "hash, name", ids))
        obstore.put(r.store.bucket, names[ids[0]][0], b"rubbish")
        obstore.delete(r.store.bucket, names[ids[1]][0])
        with pytest.raises(Unreachable, match="no longer matches its hash"):
            await r.store.get(ids[0])
        with pytest.raises(Unreachable, match="is not in bucket"):
            await r.store.get(ids[1])


async def test_an_outage_is_waited_for_by_whoever_stores(server: Place) -> None:
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
async def test_the_index_lies_in_postgres_as_well(server: Place) -> None:
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


# -- what can be wrong at the start ----------------------------------------------------------------


async def told(url: str) -> PenstockError:
    r = Rig(url)
    with pytest.raises(PenstockError) as caught:
        await r.store.start()
    r.store.close()
    assert caught.value.hint
    assert "hunter2" not in caught.value.message + caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


async def test_each_mistake_at_the_start_is_a_sentence_of_its_own(server: Place) -> None:
    port = server("s3").port
    assert (
        "there is no bucket nosuch"
        in (
            await told(f"s3://nosuch/p?endpoint=http://127.0.0.1:{port}&key=x&secret=hunter2")
        ).message
    )
    with socket.socket() as taken:  # by us, who do not listen: nobody else does either
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
        """Keys and permissions are checked after so many requests."""
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
        ("s3://bucket/?regoin=x", "'regoin' is not an option"),
        ("s3://bucket/?key=x", "half of its credentials"),
        ("s3://bucket/?endpoint=localhost:9000", "endpoint is 'localhost:9000'"),
    ],
)
def test_a_mistyped_url_is_one_sentence_with_a_next_step(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bucket_at(url)
    assert says in caught.value.message
    assert caught.value.hint
    assert "hunter2" not in caught.value.message
