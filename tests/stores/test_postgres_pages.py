"""The page store on a real PostgreSQL server, in the ledger's database and in another database."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
import zstandard
from tests.servers import Handle
from tests.stores.workers import OnPostgres, OnSqlite

from penstock.errors import StoreUnavailable, Unreachable
from penstock.model import page_id
from penstock.pages.postgres import PostgresPages
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx
from penstock.stores.sqlite import Database
from penstock.testing.clock import ManualClock
from penstock.testing.pages_suite import PagesConformance, PagesWorker

pytestmark = pytest.mark.server("postgres")


def damage(url: str, namespace: str, page: str) -> None:
    """Replace the stored body of a page by another body."""
    with psycopg.connect(url) as db:
        db.execute(
            f"UPDATE {namespace}.page_body SET body=%s WHERE hash=%s",
            (zstandard.compress(b"other"), bytes.fromhex(page)),
        )


class TestWithTheLedger(OnPostgres, PagesConformance):
    """The page store in the ledger's schema."""

    async def open(self) -> PagesWorker:
        engine = self.worker(self, pages=lambda db, _: PostgresPages(db, self.clock, shared=True))
        return PagesWorker(engine.pages, engine.uow)

    async def damage(self, worker: PagesWorker, page: str) -> None:
        damage(self.url, self.namespace, page)


class TestApart(OnSqlite, PagesConformance):
    """The page store on a server, and the ledger in a file."""

    index_checks = False

    @pytest.fixture(autouse=True)
    def _schema(self, server: Callable[[str], Handle]) -> Iterator[None]:
        self.url, self.namespace = server("postgres").url, f"t{secrets.token_hex(6)}"
        yield
        with psycopg.connect(self.url) as db:
            db.execute(f"DROP SCHEMA IF EXISTS {self.namespace} CASCADE")

    async def open(self) -> PagesWorker:
        own = PostgresStore(self.url, namespace=self.namespace, durability="process")
        self.at_end(own.close_now)
        engine = self.worker(self, pages=lambda *_: PostgresPages(own, self.clock, shared=False))
        return PagesWorker(engine.pages, engine.uow)

    async def damage(self, worker: PagesWorker, page: str) -> None:
        damage(self.url, self.namespace, page)


# -- promises of PostgreSQL only -------------------------------------------------------------------


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


async def test_a_damaged_body_raises_an_error_about_its_hash(rig: Rig) -> None:
    (id_,) = await rig.put(b"body")
    for harm in (b"garbage", zstandard.compress(b"other")):

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
