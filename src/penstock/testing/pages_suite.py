"""Conformance suite for page stores, as a test class to inherit. A short rig opens the store.

The whole test file of an adapter is:

    class TestMyPages(PagesConformance):
        async def open(self) -> PagesWorker: ...

The suite tests the contracts in `ports.pages`. Tests of damaged pages need hooks of the rig.
Without these hooks they are skipped. The suite needs pytest or unittest, and no asyncio plugin.
"""

from __future__ import annotations

import asyncio
import random
import unittest
from collections.abc import Callable, Sequence

import msgspec

from penstock.errors import Unreachable
from penstock.model import page_id
from penstock.ports import PageStore, StagedPages, Transaction, UnitOfWork
from penstock.testing.store_rig import StoreRig, sentence

UNKNOWN = (page_id(b"never stored"), "", "not hex", "ab", "é", "0" * 64)
MIB = 1 << 20


class PagesWorker(msgspec.Struct, frozen=True):
    """One worker: its page store, and the transactions of the ledger with the page index."""

    store: PageStore
    ledger: UnitOfWork


class Undo(Exception):
    """Raised by a test to roll a transaction back."""


def noise(size: int, seed: int = 0) -> bytes:
    """Return bytes that cannot be compressed."""
    return random.Random(seed).randbytes(size)


class PagesRig(StoreRig[PagesWorker]):
    """Base class of a rig. `open` returns a worker."""

    # False if the bodies are in another store than the index. Then a page that retention deletes
    # between `send` and `index` is not reported.
    index_checks = True
    # False if retention by size deletes several pages together, for example a whole file.
    deletes_single_pages = True

    async def damage(self, worker: PagesWorker, page: str) -> None:
        """Change bytes of a stored body, as a broken disk does."""
        raise unittest.SkipTest("this rig cannot damage a page")

    async def lose(self, worker: PagesWorker, page: str) -> None:
        """Delete a stored body, as an operator's mistake does. Its index stays."""
        raise unittest.SkipTest("this rig cannot delete a body")

    async def after_sweep(self, worker: PagesWorker) -> None:
        """Wait until the work that `sweep` started in the background has ended."""

    # -- helpers -----------------------------------------------------------------------------------

    def _need_single_pages(self) -> None:
        if not self.deletes_single_pages:
            raise unittest.SkipTest("retention by size deletes several pages together")

    async def put(self, worker: PagesWorker, *bodies: bytes) -> list[str]:
        """Store pages as the engine does. Return their ids."""
        ids = [page_id(body) for body in bodies]
        for _ in range(5):
            staged = worker.store.stage(zip(ids, bodies, strict=True))
            await worker.store.send(staged)
            if not await self.index(worker, staged):
                return ids
            worker.store.forget(staged)  # retention has deleted a page: stage it again
        raise AssertionError("the index reports a page as deleted that was just stored")

    async def index(self, worker: PagesWorker, staged: StagedPages) -> Sequence[str]:
        return await worker.ledger.write(lambda tx: tx.pages.index(staged))

    async def prune(
        self,
        worker: PagesWorker,
        *,
        older_than: float | None = None,
        max_bytes: int | None = None,
        keep: Sequence[str] = (),
    ) -> tuple[int, int]:
        """Delete pages, and sweep after the commit as the coordinator does."""
        removed = await worker.ledger.write(
            lambda tx: tx.pages.prune(
                older_than=older_than,
                max_bytes=max_bytes,
                keep=lambda pages: set(keep).intersection(pages),
            )
        )
        for _ in range(2):  # the second call records what the first has deleted
            await worker.ledger.write(lambda tx: tx.pages.sweep())
            await self.after_sweep(worker)
        return removed

    async def stored(self, worker: PagesWorker, ids: Sequence[str]) -> list[bool]:
        return [await worker.store.get(id_) is not None for id_ in ids]

    async def totals(self, worker: PagesWorker) -> tuple[int, int]:
        return await worker.ledger.read(lambda tx: tx.pages.totals())


class PagesConformance(PagesRig):
    """The tests of the suite. See `PagesRig` for the hooks that a subclass may define."""

    # -- bytes -------------------------------------------------------------------------------------

    @sentence()
    async def test_stored_bodies_are_returned_unchanged_to_every_worker(
        self, one: PagesWorker
    ) -> None:
        await one.store.start()
        bodies = [
            b"",
            b"\x00",
            b"\xff\xfe" * 10,
            b"<p>same again</p>" * 5000,
            "é".encode(),
            *[b"page %d" % i for i in range(100)],
        ]
        ids = await self.put(one, *bodies)
        two = await self.open()
        for worker in (one, two):
            assert [await worker.store.get(id_) for id_ in ids] == bodies
        assert await two.ledger.read(lambda tx: [tx.pages.read(id_) for id_ in ids]) == bodies
        assert (await self.totals(two))[0] == len(set(bodies))

    @sentence()
    async def test_large_bodies_are_stored_compressed_and_returned_unchanged(
        self, one: PagesWorker
    ) -> None:
        random_body, text = noise(5 * MIB), b"<p>row</p>" * (2 * MIB)
        ids = await self.put(one, random_body, text)
        assert await one.store.get(ids[0]) == random_body
        assert await one.store.get(ids[1]) == text
        pages, size = await self.totals(one)
        assert pages == 2
        assert 5 * MIB <= size < 6 * MIB
        sizes = await one.ledger.read(lambda tx: tx.pages.sizes([*ids, *UNKNOWN]))
        assert dict(sizes) == {ids[0]: 5 * MIB, ids[1]: 20 * MIB}

    @sentence()
    async def test_get_returns_none_for_a_missing_page_which_has_no_size(
        self, one: PagesWorker
    ) -> None:
        assert await self.totals(one) == (0, 0)
        await self.put(one, b"another page")
        for page in UNKNOWN:
            assert await one.store.get(page) is None
        assert await one.ledger.read(lambda tx: [tx.pages.read(p) for p in UNKNOWN]) == [None] * 6
        assert not await one.ledger.read(lambda tx: tx.pages.sizes(UNKNOWN))
        assert not await one.ledger.read(lambda tx: tx.pages.sizes([]))
        assert list(await one.ledger.read(lambda tx: tx.pages.problems())) == []

    @sentence()
    async def test_page_ids_are_found_by_a_prefix(self, one: PagesWorker) -> None:
        ids = await self.put(one, *(b"%d" % i for i in range(20)))

        def find(prefix: str) -> Callable[[Transaction], list[str]]:
            return lambda tx: sorted(tx.pages.find(prefix))

        for id_ in ids[:3]:
            assert await one.ledger.read(find(id_[:12])) == [id_]
            assert await one.ledger.read(find(id_)) == [id_]
        short = ids[0][:1]
        assert await one.ledger.read(find(short)) == sorted(i for i in ids if i[0] == short)
        assert await one.ledger.read(find("zz")) == []

    # -- one copy ----------------------------------------------------------------------------------

    @sentence()
    async def test_storing_a_page_again_does_not_add_bytes(self, one: PagesWorker) -> None:
        body = noise(100_000)
        await self.put(one, body, body)
        first = await self.totals(one)
        assert first[0] == 1
        await self.put(one, body)
        restarted = await self.open()
        await self.put(restarted, b"another")
        before = await self.totals(restarted)
        await self.put(one, body)
        assert await self.totals(restarted) == before

    @sentence()
    async def test_concurrent_writers_of_the_same_pages_store_each_page_once(
        self, one: PagesWorker
    ) -> None:
        two = await self.open()
        bodies = [noise(5000, n) for n in range(40)]
        for _ in range(2):
            await asyncio.gather(
                *(
                    self.put(worker, *order)
                    for worker, order in ((one, bodies), (two, bodies[::-1]))
                    for _ in range(3)
                )
            )
        assert (await self.totals(one))[0] == 40
        for worker in (one, two, await self.open()):
            assert [await worker.store.get(page_id(b)) for b in bodies] == bodies

    # -- transactions ------------------------------------------------------------------------------

    @sentence()
    async def test_a_staged_page_is_not_found_before_it_is_indexed(self, one: PagesWorker) -> None:
        two, id_ = await self.open(), page_id(b"body")
        staged = one.store.stage([(id_, b"body")])
        for worker in (one, two):
            assert await worker.store.get(id_) is None
        await one.store.send(staged)
        assert list(await self.index(one, staged)) == []
        for worker in (one, two):
            assert await worker.store.get(id_) == b"body"

    @sentence()
    async def test_a_page_of_an_undone_transaction_can_be_stored_again(
        self, one: PagesWorker
    ) -> None:
        staged = one.store.stage([(page_id(b"body"), b"body")])
        await one.store.send(staged)

        def fails(tx: Transaction) -> None:
            assert list(tx.pages.index(staged)) == []
            raise Undo

        try:
            await one.ledger.write(fails)
        except Undo:
            one.store.forget(staged)
        (id_,) = await self.put(one, b"body")
        assert await one.store.get(id_) == b"body"
        assert (await self.totals(one))[0] == 1

    async def _killed_before_the_index(self, worker: PagesWorker) -> None:
        await self.put(worker, b"indexed")
        await worker.store.send(worker.store.stage([(page_id(b"sent"), b"sent")]))

    @sentence(killed_after=_killed_before_the_index)
    async def test_a_worker_killed_before_the_index_loses_no_indexed_page(
        self, one: PagesWorker
    ) -> None:
        assert await one.store.get(page_id(b"indexed")) == b"indexed"
        (id_,) = await self.put(one, b"sent")
        assert await one.store.get(id_) == b"sent"
        assert (await self.totals(one))[0] == 2

    # -- retention ---------------------------------------------------------------------------------

    @sentence()
    async def test_retention_by_age_counts_from_the_last_time_a_page_was_stored(
        self, one: PagesWorker
    ) -> None:
        old, again = await self.put(one, b"old", b"again")
        await self.sleep(100.0)
        (new,) = await self.put(await self.open(), b"new")
        await self.put(one, b"again")
        removed, _ = await self.prune(one, older_than=self.now() - 50.0)
        assert removed == 1
        assert await self.stored(one, [old, again, new]) == [False, True, True]
        assert (await self.totals(one))[0] == 2
        assert (await self.prune(one, older_than=self.now() - 50.0))[0] == 0
        await self.put(one, b"old")
        assert await one.store.get(old) == b"old"

    @sentence()
    async def test_a_needed_page_survives_retention_by_age_and_by_size(
        self, one: PagesWorker
    ) -> None:
        ids = []
        for n in range(5):
            ids += await self.put(one, noise(3000, n))
            await self.sleep(1.0)
        await self.sleep(100.0)
        await self.prune(one, older_than=self.now(), max_bytes=0, keep=ids[1:3])
        assert await self.stored(one, ids) == [False, True, True, False, False]
        assert await one.store.get(ids[1]) == noise(3000, 1)

    @sentence()
    async def test_retention_by_size_deletes_the_oldest_pages_until_the_rest_fits(
        self, one: PagesWorker
    ) -> None:
        self._need_single_pages()
        ids = []
        for n in range(10):
            ids += await self.put(one, noise(10_000, n))
            await self.sleep(1.0)
        assert (await self.prune(one, max_bytes=150_000))[0] == 0
        removed, freed = await self.prune(one, max_bytes=45_000)
        assert removed == 6
        assert freed >= 50_000
        assert await self.stored(one, ids) == [False] * 6 + [True] * 4
        pages, size = await self.totals(one)
        assert pages == 4
        assert size <= 45_000

    @sentence()
    async def test_needed_pages_do_not_count_as_deleted_by_the_size_limit(
        self, one: PagesWorker
    ) -> None:
        self._need_single_pages()
        (needed,) = await self.put(one, noise(50_000))
        ids = []
        for n in range(1, 6):
            await self.sleep(1.0)
            ids += await self.put(one, noise(10_000, n))
        await self.prune(one, max_bytes=75_000, keep=[needed])
        assert await self.stored(one, [needed, *ids]) == [True, False, False, False, True, True]

    @sentence()
    async def test_a_page_that_another_worker_deleted_is_stored_again(
        self, one: PagesWorker
    ) -> None:
        (id_,) = await self.put(one, b"body")
        two = await self.open()
        await self.sleep(100.0)
        assert (await self.prune(two, older_than=self.now()))[0] == 1
        assert await two.store.get(id_) is None
        await self.put(one, b"body")  # this worker believed that the page is stored
        for worker in (one, two):
            assert await worker.store.get(id_) == b"body"

    @sentence()
    async def test_the_index_reports_a_page_that_was_deleted_after_it_was_sent(
        self, one: PagesWorker
    ) -> None:
        if not self.index_checks:
            raise unittest.SkipTest("the index of this store does not see the bodies")
        (id_,) = await self.put(one, b"body")
        await self.sleep(100.0)
        staged = one.store.stage([(id_, b"body")])
        await one.store.send(staged)
        await self.prune(await self.open(), max_bytes=0)
        assert list(await self.index(one, staged)) == [id_]
        one.store.forget(staged)
        await self.put(one, b"body")
        assert await one.store.get(id_) == b"body"

    # -- damage ------------------------------------------------------------------------------------

    @sentence()
    async def test_a_damaged_page_raises_an_error_and_other_pages_are_returned(
        self, one: PagesWorker
    ) -> None:
        (bad,) = await self.put(one, noise(1000))
        (good,) = await self.put(one, b"good")
        await self.damage(one, bad)
        await self._unreadable(bad)
        assert await one.store.get(good) == b"good"
        await self.sleep(100.0)
        (new,) = await self.put(one, b"new")
        await self.prune(one, older_than=self.now() - 50.0, keep=[bad])
        assert await self.stored(one, [good, new]) == [False, True], "retention still works"

    @sentence()
    async def test_a_lost_body_raises_an_error_and_is_not_taken_for_a_deleted_page(
        self, one: PagesWorker
    ) -> None:
        (bad,) = await self.put(one, noise(1000))
        await self.lose(one, bad)
        await self._unreadable(bad)

    async def _unreadable(self, page: str) -> None:
        worker = await self.open()
        try:
            found = await worker.store.get(page)
        except Unreachable as e:
            hint = e.hint
        else:
            raise AssertionError(f"no error, but {found!r:.80}")
        assert hint, "the error has no next step"
