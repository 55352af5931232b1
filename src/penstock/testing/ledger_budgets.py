"""Tests of the ledger conformance suite: budgets of pages and bytes, and crawler traps."""

from __future__ import annotations

import asyncio
from functools import partial

from penstock.ports import Transaction, UnitOfWork
from penstock.testing.ledger_rig import LedgerRig, key_of, new_event
from penstock.testing.store_rig import sentence

HOST, DAY = ("pages:host:shop.test", ""), ("pages:day", "2026-11-18")


def _stop(template: str, now: float, tx: Transaction) -> None:
    tx.budgets.stop(template, "date", 2, now)


class LedgerBudgets(LedgerRig):
    """Tests of budgets and of stopped traps."""

    @sentence()
    async def test_a_charge_returns_the_amount_that_was_used_before(
        self, ledger: UnitOfWork
    ) -> None:
        now = self.now()
        assert await ledger.read(lambda tx: tx.budgets.used([HOST, DAY])) == {HOST: 0, DAY: 0}
        assert await ledger.write(lambda tx: tx.budgets.spend({HOST: 3, DAY: 1}, now)) == {
            HOST: 0,
            DAY: 0,
        }
        assert await ledger.write(lambda tx: tx.budgets.spend({DAY: 0, HOST: 2}, now)) == {
            HOST: 3,
            DAY: 1,
        }
        next_day = ("pages:day", "2026-11-19")
        assert await ledger.read(lambda tx: tx.budgets.used([HOST, DAY, next_day])) == {
            HOST: 5,
            DAY: 1,
            next_day: 0,
        }
        assert await ledger.write(lambda tx: tx.budgets.spend({}, now)) == {}

    @sentence()
    async def test_concurrent_workers_never_charge_more_than_the_limit(
        self, ledger: UnitOfWork
    ) -> None:
        workers, limit = [ledger, await self.open(), await self.open()], 20

        async def charge(worker: UnitOfWork) -> int:
            now = self.now()

            def work(tx: Transaction) -> int:
                budgets = tx.budgets
                fits = bool(budgets.spend({HOST: 0}, now)[HOST] < limit)
                if fits:
                    budgets.spend({HOST: 1}, now)
                return int(fits)

            return await worker.write(work)

        charged = await asyncio.gather(*(charge(workers[n % 3]) for n in range(45)))
        assert sum(charged) == limit
        assert await ledger.read(lambda tx: tx.budgets.used([HOST])) == {HOST: limit}

    @sentence()
    async def test_unchanged_budgets_are_pruned_except_those_that_events_wait_for(
        self, ledger: UnitOfWork
    ) -> None:
        now = self.now()
        waited = ("pages:host:waited.test", "")
        await ledger.write(lambda tx: tx.budgets.spend({HOST: 1, waited: 1}, now))
        await ledger.write(lambda tx: tx.budgets.spend({DAY: 1}, now + 100))
        await ledger.write(lambda tx: tx.budgets.stop("https://a.test/{date}", "date", 1, now))
        event = new_event("e1")
        await self.accept(ledger, event)
        was = await self.state(ledger, "e1")
        await ledger.write(
            lambda tx: tx.events.delay(
                event, was, now + 600, "over", now, waits_for="budget:" + waited[0]
            )
        )
        await ledger.write(lambda tx: tx.budgets.prune(now + 50))
        assert await ledger.read(lambda tx: tx.budgets.used([HOST, waited, DAY])) == {
            HOST: 0,
            waited: 1,
            DAY: 1,
        }
        assert await ledger.read(lambda tx: list(tx.budgets.traps())) == []

    @sentence()
    async def test_at_most_100_templates_of_traps_are_kept(self, ledger: UnitOfWork) -> None:
        now = self.now()
        for n in range(102):
            name = f"https://a.test/{n}/{{date}}"
            await ledger.write(partial(_stop, name, now + n))
        first = "https://a.test/0/{date}"
        await ledger.write(lambda tx: tx.budgets.stop(first, "date", 5, now + 200))
        traps = await ledger.read(lambda tx: list(tx.budgets.traps()))
        assert len(traps) == 100
        assert (traps[0].template, traps[0].kind, traps[0].links) == (first, "date", 7)
        assert traps[1].template == "https://a.test/99/{date}"

    @sentence()
    async def test_a_trace_has_the_urls_that_were_added_to_it(self, ledger: UnitOfWork) -> None:
        key, now = key_of(new_event("e1")), self.now()
        assert not await ledger.read(lambda tx: tx.lookup.in_trace("t1", key))
        await ledger.write(lambda tx: tx.lookup.add_to_trace("t1", key, now))
        assert await ledger.read(lambda tx: tx.lookup.in_trace("t1", key))
        assert not await ledger.read(lambda tx: tx.lookup.in_trace("t2", key))
