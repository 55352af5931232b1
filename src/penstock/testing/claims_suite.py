"""Conformance suite for claims, as a test class to inherit. A short rig opens the store.

The whole test file of an adapter is:

    class TestMyClaims(ClaimsConformance):
        async def open(self) -> ClaimsWorker: ...

The suite tests the contracts in `ports.claims` and `ports.hosts`. `claims_rig` has one worker for
claims in the ledger's store, and one for claims in an external store. The suite needs pytest or
unittest, and no asyncio plugin.
"""

from __future__ import annotations

import asyncio
import unittest

from penstock.ports import ClaimChange, Holder, Transaction
from penstock.rules import freshness
from penstock.testing.claims_hosts import ClaimsOfHosts
from penstock.testing.claims_rig import ClaimsWorker, SharedClaimsWorker, take_in
from penstock.testing.store_rig import kill_this_process, sentence

KEY = b"\x00\xffurl"
WINDOW, SETTLE = 60.0, 2.0  # seconds


class Undo(Exception):
    """Raised by a test to roll a transaction back."""


class ClaimsConformance(ClaimsOfHosts):
    """The tests of the suite. See `claims_rig` for the hooks that a subclass may define."""

    # -- one owner ---------------------------------------------------------------------------------

    @sentence()
    async def test_a_claim_has_one_owner_and_changes_only_from_the_expected_one(
        self, one: ClaimsWorker
    ) -> None:
        two = await self.open()
        assert await two.holders(KEY, b"other") == {}
        assert await self.take(one, KEY, "e1")
        assert not await self.take(two, KEY, "e2"), "the claim is not free"
        assert not await self.take(two, KEY, "e2", expected="e9")
        for worker in (one, two):
            assert await worker.holders(KEY, b"other") == {KEY: Holder("e1", None, None)}
        assert await self.take(two, KEY, "e2", expected="e1", last_success="e1")
        assert not await self.take(one, KEY, "e3", expected="e1")
        assert await self.holder(one, KEY) == Holder("e2", "e1", None)

    @sentence()
    async def test_a_call_that_is_repeated_after_a_lost_answer_has_the_same_result(
        self, one: ClaimsWorker
    ) -> None:
        for _ in range(2):
            assert await self.take(one, KEY, "e1")
        assert await one.set_next(KEY, "e2", "e1")
        assert await self.take(one, KEY, "e1")
        assert await self.holder(one, KEY) == Holder("e1", None, "e2"), (
            "a repeated call keeps the next event"
        )
        for _ in range(2):
            assert await self.take(one, KEY, "e2", expected="e1", last_success="e1")
        assert await self.holder(one, KEY) == Holder("e2", "e1", None)

    @sentence()
    async def test_a_batch_takes_each_claim_independently(self, one: ClaimsWorker) -> None:
        assert await one.take([], self.now()) == []
        await self.take(one, b"held", "e1")
        changes = [
            ClaimChange(b"free", "e2"),
            ClaimChange(b"held", "e2"),
            ClaimChange(b"also free", "e3", "g3"),
        ]
        assert await one.take(changes, self.now()) == [True, False, True]
        assert await one.holders(b"free", b"held", b"also free", b"none") == {
            b"free": Holder("e2", None, None),
            b"held": Holder("e1", None, None),
            b"also free": Holder("e3", "g3", None),
        }
        many = [ClaimChange(b"%d" % i, "m") for i in range(300)]
        assert await one.take(many, self.now()) == [True] * 300
        assert len(await one.holders(*(c.key for c in many))) == 300

    @sentence()
    async def test_one_of_several_workers_that_race_for_a_claim_gets_it(
        self, one: ClaimsWorker
    ) -> None:
        workers = [one, await self.open(), await self.open()]
        for i in range(20):
            key = b"u%d" % i
            answers = await asyncio.gather(
                *(self.take(worker, key, f"e{w}") for w, worker in enumerate(workers))
            )
            assert sorted(answers) == [False, False, True]
            assert await self.holder(one, key) == Holder(f"e{answers.index(True)}", None, None)
            answers = await asyncio.gather(
                *(
                    self.take(worker, key, f"n{w}", expected=f"e{answers.index(True)}")
                    for w, worker in enumerate(workers)
                )
            )
            assert sorted(answers) == [False, False, True]

    # -- window ------------------------------------------------------------------------------------

    async def _arrive(
        self, worker: ClaimsWorker, id_: str, after: float, *, began: float, ended: bool
    ) -> str:
        """Let an event arrive `after` seconds after the owner's GET, and apply the decision."""
        holder = await self.holder(worker, KEY)
        assert holder is not None
        claim = freshness.Claim(holder.owner, began, ended, holder.next)
        now = began + after
        verdict = freshness.decide(claim, id_, accepted=now, now=now, window=WINDOW, settle=SETTLE)
        if isinstance(verdict, freshness.Duplicate):
            return f"duplicate of {verdict.of}"
        if isinstance(verdict, freshness.Delay):
            if verdict.becomes_next:
                assert await worker.set_next(KEY, id_, holder.owner)
            return f"delayed {verdict.until - began:g} s"
        last = holder.owner if ended else holder.good
        taken = await self.take(worker, KEY, id_, expected=holder.owner, last_success=last)
        return "owner" if taken else "refused"

    @sentence()
    async def test_events_are_judged_by_the_settle_time_and_the_window_of_the_owner(
        self, one: ClaimsWorker
    ) -> None:
        two, began = await self.open(), self.now()
        assert await self.take(one, KEY, "e1")
        steps = [
            (one, "e2", 0.0, "duplicate of e1"),
            (two, "e3", SETTLE, "duplicate of e1"),
            (two, "e4", SETTLE + 0.1, f"delayed {WINDOW:g} s"),
            (one, "e5", SETTLE + 0.2, "duplicate of e4"),
            (one, "e4", WINDOW - 0.1, f"delayed {WINDOW:g} s"),
            (two, "e6", WINDOW + 5.0, "duplicate of e4"),
            (two, "e4", WINDOW, "owner"),
        ]
        for worker, id_, after, expected in steps:
            assert await self._arrive(worker, id_, after, began=began, ended=True) == expected
        assert await self.holder(one, KEY) == Holder("e4", "e1", None)
        assert await self._arrive(one, "e7", 0.0, began=began + WINDOW, ended=True) == (
            "duplicate of e4"
        )

    @sentence()
    async def test_the_next_event_belongs_to_the_current_owner_and_is_cleared_with_it(
        self, one: ClaimsWorker
    ) -> None:
        assert not await one.set_next(KEY, "e2", "e1"), "the claim is free"
        assert await self.holder(one, KEY) is None
        await self.take(one, KEY, "e1")
        assert not await one.set_next(KEY, "e2", "e9")
        assert await one.set_next(KEY, "e2", "e1")
        assert await self.holder(one, KEY) == Holder("e1", None, "e2")
        assert await self.take(one, KEY, "e2", expected="e1", last_success="e1")
        assert not await one.set_next(KEY, "e3", "e1"), "a late decision about the earlier owner"
        assert await self.holder(one, KEY) == Holder("e2", "e1", None)

    @sentence()
    async def test_a_promoted_duplicate_takes_the_claim_of_a_dead_owner_once(
        self, one: ClaimsWorker
    ) -> None:
        two = await self.open()
        await self.take(one, KEY, "e0")
        await self.take(one, KEY, "dead", expected="e0", last_success="e0")
        # The last success is not the dead owner, but the success before it.
        assert await self.take(two, KEY, "promoted", expected="dead", last_success="e0")
        assert not await self.take(one, KEY, "another", expected="dead", last_success="e0")
        assert await self.holder(one, KEY) == Holder("promoted", "e0", None)

    # -- crashes -----------------------------------------------------------------------------------

    async def _killed_after_it_took_a_claim(self, worker: ClaimsWorker) -> None:
        assert await self.take(worker, KEY, "e1")

    @sentence(killed_after=_killed_after_it_took_a_claim)
    async def test_an_event_keeps_its_claim_if_its_worker_is_killed_before_the_start(
        self, one: ClaimsWorker
    ) -> None:
        assert not await self.take(one, KEY, "e2")
        assert await self.take(one, KEY, "e1"), "the owner is an event, not a worker"
        assert await self.holder(one, KEY) == Holder("e1", None, None)

    async def _killed_in_a_transaction(self, worker: ClaimsWorker) -> None:
        await self.take(worker, b"before", "e1")
        if isinstance(worker, SharedClaimsWorker):
            now = self.now()

            def work(tx: Transaction) -> None:
                take_in(tx, [ClaimChange(KEY, "e1"), ClaimChange(b"before", "e2", "e1", "e1")], now)
                tx.hosts.reserve({"shop.test": 100}, 60.0)
                kill_this_process()

            await worker.ledger.write(work)

    @sentence(killed_after=_killed_in_a_transaction)
    async def test_a_worker_killed_in_a_transaction_takes_no_claim_and_no_slot(
        self, one: ClaimsWorker
    ) -> None:
        assert await one.holders(KEY, b"before") == {b"before": Holder("e1", None, None)}
        (slot,) = await self.slots(one, "shop.test")
        assert self.near(slot, self.now())

    @sentence()
    async def test_an_undone_transaction_takes_no_claim_and_no_slot(
        self, one: ClaimsWorker
    ) -> None:
        if not isinstance(one, SharedClaimsWorker):
            raise unittest.SkipTest("these claims are not part of the ledger's transaction")
        now = self.now()
        await self.take(one, b"held", "e1")

        def work(tx: Transaction) -> None:
            assert take_in(tx, [ClaimChange(KEY, "e1")], now) == [True]
            tx.claims.set_next(b"held", "e2")
            tx.hosts.reserve({"shop.test": 100}, 60.0)
            assert tx.claims.references(KEY, "e1")
            raise Undo

        try:
            await one.ledger.write(work)
        except Undo:
            pass
        assert await one.holders(KEY, b"held") == {b"held": Holder("e1", None, None)}
        (slot,) = await self.slots(one, "shop.test")
        assert self.near(slot, now)

    @sentence()
    async def test_a_claim_refers_to_its_owner_and_to_the_last_success(
        self, one: ClaimsWorker
    ) -> None:
        if not isinstance(one, SharedClaimsWorker):
            raise unittest.SkipTest("an external store has no `references`")
        await self.take(one, KEY, "e1")
        await self.take(one, KEY, "e2", expected="e1", last_success="e1")
        await one.set_next(KEY, "e3", "e2")

        def work(tx: Transaction) -> list[bool]:
            return [tx.claims.references(KEY, id_) for id_ in ("e1", "e2", "e3", "e0")] + [
                tx.claims.references(b"other", "e1")
            ]

        assert await one.ledger.read(work) == [True, True, False, False, False]

    # -- expiry ------------------------------------------------------------------------------------

    @sentence()
    async def test_pruning_deletes_old_claims_and_keeps_young_ones(self, one: ClaimsWorker) -> None:
        old = [ClaimChange(b"old%d" % i, "e1") for i in range(100)]
        await one.take(old, self.now())
        await self.take(one, KEY, "e1")
        await self.sleep(1.0)
        between = self.now()
        await self.sleep(1.0)
        await self.take(one, b"young", "e2")
        await self.take(one, KEY, "e2", expected="e1")  # taken again, so it is young
        await one.prune(between)
        found = await one.holders(*(c.key for c in old), KEY, b"young")
        assert set(found) == {KEY, b"young"}
        assert await self.take(one, b"old1", "e9"), "the claim is free again"
