"""The page store on a real PostgreSQL server, in the ledger's database and in another database."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
from tests.servers import Handle

from penstock.errors import StoreUnavailable, Unreachable
from penstock.model import page_id
from penstock.pages.postgres import PostgresPages
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx
from penstock.stores.sqlite import Database
from penstock.testing.clock import ManualClock

pytestmark = pytest.mark.server("postgres")


class Rig:
    def __init__(self, url: str, shared: bool, namespace: str | None = None) -> None:
        self.url = url
        self.namespace = namespace or f"t{secrets.token_hex(6)}"
        self.clock = ManualClock()
        self.own = PostgresStore(url, namespace=self.namespace)
        self.ledger: Any = self.own if shared else Database(":memory:")
        self.pages = PostgresPages(self.own, self.clock, shared=shared)

    async def put(self, *bodies: bytes) -> list[str]:
        ids = [page_id(b) for b in bodies]
        staged = self.pages.stage(zip(ids, bodies, strict=True))
        await self.pages.send(staged)
        assert await self.ledger.write(lambda tx: self.pages.index_in(tx, staged)) == []
        return ids

    async def prune(
        self,
        *,
        older_than: float | None = None,
        max_bytes: int | None = None,
        keep: Sequence[str] = (),
    ) -> tuple[int, int]:
        found: tuple[int, int] = await self.ledger.write(
            lambda tx: self.pages.prune_in(
                tx,
                older_than=older_than,
                max_bytes=max_bytes,
                keep=lambda pages: set(keep).intersection(pages),
            )
        )
        return found

    def close(self) -> None:
        self.own.close_now()
        self.ledger.close_now()


def noise(n: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n)


@pytest.fixture(params=[True, False], ids=["with the ledger", "apart"])
def rig(request: pytest.FixtureRequest, server: Callable[[str], Handle]) -> Iterator[Rig]:
    made = Rig(server("postgres").url, request.param)
    yield made
    made.close()
    with psycopg.connect(made.url) as db:
        db.execute(f"DROP SCHEMA {made.namespace} CASCADE")


async def test_bodies_are_read_unchanged_and_stored_compressed(rig: Rig) -> None:
    bodies = [b"", b"\0\xff" * 10, b"<p>same again</p>" * 5000, noise(3_000_000)]
    ids = await rig.put(*bodies)
    assert [await rig.pages.get(id_) for id_ in ids] == bodies
    assert await rig.pages.get("0" * 64) is None
    assert await rig.pages.get("nonsense") is None
    pages, size = await rig.ledger.read(rig.pages.totals_in)
    assert pages == 4
    assert size < 3_010_000
    assert await rig.ledger.read(lambda tx: rig.pages.sizes_in(tx, [ids[2], "f" * 64])) == {
        ids[2]: len(bodies[2])
    }
    assert await rig.ledger.read(lambda tx: rig.pages.find_in(tx, ids[0][:12])) == [ids[0]]
    assert await rig.ledger.read(lambda tx: rig.pages.get_in(tx, ids[2])) == bodies[2]


async def test_a_page_that_two_workers_store_is_kept_once(rig: Rig) -> None:
    other = Rig(rig.url, rig.pages.shared, rig.namespace)
    try:
        for _ in range(2):
            await asyncio.gather(
                *[
                    r.put(*[noise(5000, n) for n in order])
                    for r, order in ((rig, range(40)), (other, range(39, -1, -1)))
                    for _ in range(3)
                ]
            )
    finally:
        other.close()
    assert (await rig.ledger.read(rig.pages.totals_in))[0] == 40


async def test_retention_keeps_pages_that_were_stored_again_or_are_needed(rig: Rig) -> None:
    old, again, needed = await rig.put(b"old", b"again", b"needed")
    rig.clock.advance(100.0)
    await rig.put(b"again")
    assert (await rig.prune(older_than=rig.clock.now() - 50.0, keep=[needed]))[0] == 1
    assert [await rig.pages.get(id_) for id_ in (old, again, needed)] == [None, b"again", b"needed"]


async def test_a_page_that_another_worker_pruned_is_stored_again(rig: Rig) -> None:
    (id_,) = await rig.put(b"body")
    other = Rig(rig.url, rig.pages.shared, rig.namespace)
    try:
        other.clock.advance(10.0)
        assert (await other.prune(older_than=other.clock.now()))[0] == 1
    finally:
        other.close()
    assert await rig.put(b"body") == [id_]  # this process has the page in its cache
    assert await rig.pages.get(id_) == b"body"


async def test_a_size_limit_removes_the_oldest_pages_that_are_not_needed(rig: Rig) -> None:
    ids = []
    for n in range(6):
        ids += await rig.put(noise(10_000, n))
        rig.clock.advance(1.0)
    removed, freed = await rig.prune(max_bytes=35_000, keep=[ids[0]])
    assert removed == 2
    assert 20_000 <= freed <= 21_000
    assert [await rig.pages.get(id_) is not None for id_ in ids] == [
        True,
        False,
        False,
        True,
        True,
        True,
    ]


async def test_pruning_finds_a_page_behind_more_needed_pages_than_one_batch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pages.postgres.PRUNE", 3)
    needed = await rig.put(*[noise(10, n) for n in range(7)])
    rig.clock.advance(1.0)
    (gone,) = await rig.put(b"gone")
    rig.clock.advance(1.0)
    assert (await rig.prune(older_than=rig.clock.now(), keep=needed))[0] == 1
    assert await rig.pages.get(gone) is None


async def test_a_page_of_a_failed_transaction_can_be_stored_again(rig: Rig) -> None:
    staged = rig.pages.stage([(page_id(b"lost"), b"lost")])
    await rig.pages.send(staged)
    rig.pages.forget(staged)  # the transaction failed
    assert await rig.put(b"lost") == [page_id(b"lost")]


async def test_a_damaged_body_raises_an_error_about_its_hash(rig: Rig) -> None:
    (id_,) = await rig.put(b"body")
    for harm in (b"garbage", __import__("zstandard").compress(b"other")):

        def damage(tx: Tx, harm: bytes = harm) -> None:
            tx.execute("UPDATE page_body SET body=?", (harm,))

        await rig.own.write(damage)
        with pytest.raises(Unreachable, match="hash"):
            await rig.pages.get(id_)


async def test_pages_can_be_sent_again_after_the_server_was_unreachable(rig: Rig) -> None:
    staged = rig.pages.stage([(page_id(b"body"), b"body")])
    where = dict(rig.own.address.options)
    rig.own.address.options["port"] = "1"
    try:
        with pytest.raises(StoreUnavailable):
            await rig.pages.send(staged)
    finally:
        rig.own.address.options.update(where)
    await rig.pages.send(staged)
    assert await rig.pages.get(page_id(b"body")) == b"body"
