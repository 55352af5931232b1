"""Tests of the ledger conformance suite: links that wait for room."""

from __future__ import annotations

import msgspec

from penstock.ports import LINKS_WAITING, LinkChunk, Transaction, UnitOfWork
from penstock.testing.ledger_rig import TOPIC, LedgerRig
from penstock.testing.store_rig import sentence


class Undo(Exception):
    """Ends a transaction without a commit."""


class LedgerLinks(LedgerRig):
    """Tests of the table of waiting links."""

    async def store(self, ledger: UnitOfWork, page: int, *chunks: tuple[int, bytes]) -> None:
        await ledger.write(lambda tx: tx.links.store(page, TOPIC, chunks))

    async def next_after(self, ledger: UnitOfWork, page: int, limit: int = 9) -> list[LinkChunk]:
        await self.check_counters(ledger)
        return await ledger.read(lambda tx: tx.links.next_after(page, limit))

    @sentence()
    async def test_waiting_links_come_from_each_page_in_turn_and_oldest_first(
        self, ledger: UnitOfWork
    ) -> None:
        await self.store(ledger, 7, (100, b"7a"), (20, b"7b"))
        await self.store(ledger, 3, (100, b"3a"))
        await self.store(ledger, 9, (1, b"9a\0\xff"))
        found = await self.next_after(ledger, 0)
        assert [(c.page, c.links, c.body) for c in found] == [
            (3, 100, b"3a"),
            (7, 100, b"7a"),
            (9, 1, b"9a\0\xff"),
        ]
        assert [c.page for c in await self.next_after(ledger, 3, 1)] == [7]
        assert await self.next_after(ledger, 9) == []
        assert await ledger.read(lambda tx: tx.counters.total(LINKS_WAITING)) == 221

    @sentence()
    async def test_a_chunk_of_links_gets_shorter_and_disappears_with_its_last_link(
        self, ledger: UnitOfWork
    ) -> None:
        await self.store(ledger, 1, (3, b"abc"), (2, b"de"))
        (chunk,) = await self.next_after(ledger, 0)
        await ledger.write(lambda tx: tx.links.shorten(chunk, TOPIC, 1, b"c"))
        assert not await ledger.read(lambda tx: tx.links.holds(chunk)), "another worker has it"
        (shorter,) = await self.next_after(ledger, 0)
        assert shorter == msgspec.structs.replace(chunk, links=1, body=b"c")
        assert await ledger.read(lambda tx: tx.links.holds(shorter))
        await ledger.write(lambda tx: tx.links.shorten(shorter, TOPIC, 0, b""))
        (second,) = await self.next_after(ledger, 0)
        assert second.body == b"de"
        assert not await ledger.read(lambda tx: tx.links.holds(shorter))
        await ledger.write(lambda tx: tx.links.shorten(second, TOPIC, 0, b""))
        assert await self.next_after(ledger, 0) == []
        assert await ledger.read(lambda tx: tx.counters.total(LINKS_WAITING)) == 0

    @sentence()
    async def test_waiting_links_belong_to_their_transaction(self, ledger: UnitOfWork) -> None:
        await self.store(ledger, 1, (3, b"abc"))
        (chunk,) = await self.next_after(ledger, 0)

        def work(tx: Transaction) -> None:
            tx.links.store(2, TOPIC, [(5, b"x")])
            tx.links.shorten(chunk, TOPIC, 0, b"")
            raise Undo

        try:
            await ledger.write(work)
        except Undo:
            pass
        assert await self.next_after(ledger, 0) == [chunk]

    @sentence()
    async def test_waiting_links_survive_the_deletion_of_their_pages_event(
        self, ledger: UnitOfWork
    ) -> None:
        begun = await self.start(ledger, "e1")
        await self.end(ledger, begun, "success")
        await self.store(ledger, begun.row, (2, b"ab"))
        deleted = await ledger.write(
            lambda tx: tx.maintenance.prune(self.now() + 60, lambda key, id_: False)
        )
        assert deleted == 1
        assert [c.body for c in await ledger.read(lambda tx: tx.links.next_after(0, 9))] == [b"ab"]
