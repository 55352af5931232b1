"""Conformance suite for ledgers, as a test class to inherit. A short rig opens the ledger.

The whole test file of an adapter is:

    class TestMyLedger(LedgerConformance):
        async def open(self) -> UnitOfWork: ...

The suite tests the contracts in `ports.ledger`, `ports.outbox` and `ports.source` with the tables
of a `Transaction`. It needs pytest or unittest, and no asyncio plugin.
"""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.model import decode_event, encode_event, page_id
from penstock.ports import NewEvent, Start, Transaction, UnitOfWork
from penstock.testing.ledger_budgets import LedgerBudgets
from penstock.testing.ledger_links import LedgerLinks
from penstock.testing.ledger_lookups import LedgerLookups
from penstock.testing.ledger_maintenance import LedgerMaintenance
from penstock.testing.ledger_outbox import LedgerOutbox
from penstock.testing.ledger_rig import (
    OUTCOMES,
    TOPIC,
    Outcome,
    an_end,
    apply_ends,
    new_event,
)
from penstock.testing.ledger_walk import LedgerWalk
from penstock.testing.store_rig import kill_this_process, sentence


class Undo(Exception):
    """Raised by a test to roll a transaction back."""


class LedgerConformance(
    LedgerBudgets, LedgerLinks, LedgerLookups, LedgerMaintenance, LedgerOutbox, LedgerWalk
):
    """The tests of the suite. See `ledger_rig` for the hooks that a subclass may define."""

    # -- accepting ---------------------------------------------------------------------------------

    @sentence()
    async def test_an_accepted_event_is_pending_and_known_with_its_envelope(
        self, ledger: UnitOfWork
    ) -> None:
        events = [new_event("e1", priority=0), new_event("e2", data={"sku": "é\x00"})]
        await self.accept(ledger, *events)
        assert await ledger.read(lambda tx: tx.lookup.known(["e1", "x", "e2"])) == {"e1", "e2"}
        assert await ledger.read(lambda tx: tx.lookup.states(["x"])) == {}
        assert await ledger.read(lambda tx: tx.lookup.known([])) == set()
        state = await self.state(ledger, "e2")
        assert (state.status, state.attempts, state.starts, state.crashes, state.page) == (
            "pending",
            0,
            0,
            0,
            None,
        )
        assert abs(state.accepted_at - self.now()) < 60
        row = await ledger.read(lambda tx: tx.reports.event("e2"))
        assert row is not None
        found = decode_event(row.envelope)
        assert (found.id, found.url, found.data) == ("e2", events[1].url, events[1].data)
        assert (row.url, row.host, row.topic, row.n) == (
            events[1].url,
            "shop.test",
            TOPIC,
            state.n,
        )
        await self.check_counters(ledger)

    @sentence()
    async def test_row_numbers_grow_in_the_order_of_acceptance(self, ledger: UnitOfWork) -> None:
        await self.accept(ledger, new_event("b"), new_event("a"))
        await self.accept(ledger, new_event("c"))
        numbers = [(await self.state(ledger, id_)).n for id_ in ("b", "a", "c")]
        assert numbers == sorted(set(numbers))
        assert await ledger.read(lambda tx: tx.counters.pending(TOPIC)) == 3

    @sentence()
    async def test_cursor_and_events_are_committed_together_or_not_at_all(
        self, ledger: UnitOfWork
    ) -> None:
        event, now = new_event("e1"), self.now()

        def work(tx: Transaction, fails: bool) -> None:
            tx.events.enter([NewEvent(event, encode_event(event), 1)], now)
            tx.sources.move_cursor("feed", b"\x00\xff2", now)
            if fails:
                raise Undo

        await ledger.write(lambda tx: tx.sources.move_cursor("feed", b"1", now))
        try:
            await ledger.write(lambda tx: work(tx, fails=True))
        except Undo:
            pass
        else:
            raise AssertionError("an exception of `work` must reach the caller")
        assert await ledger.read(lambda tx: tx.sources.cursor("feed")) == b"1"
        assert await ledger.read(lambda tx: tx.lookup.known(["e1"])) == set()
        await self.check_counters(ledger)
        await ledger.write(lambda tx: work(tx, fails=False))
        other = await self.open()
        assert await other.read(lambda tx: tx.sources.cursor("feed")) == b"\x00\xff2"
        assert await other.read(lambda tx: tx.lookup.known(["e1"])) == {"e1"}
        await self.check_counters(other)

    async def _killed_in_a_transaction(self, ledger: UnitOfWork) -> None:
        await self.accept(ledger, new_event("e1"))
        begun = await self.begin(ledger, new_event("e1"))
        now = self.now()

        def work(tx: Transaction) -> None:
            apply_ends(tx, [an_end(begun, "success", page=b"x")], now)
            event = new_event("e2")
            tx.events.enter([NewEvent(event, encode_event(event), 1)], now)
            kill_this_process()

        await ledger.write(work)

    @sentence(killed_after=_killed_in_a_transaction)
    async def test_a_worker_killed_in_a_transaction_leaves_no_part_of_it(
        self, ledger: UnitOfWork
    ) -> None:
        assert await ledger.read(lambda tx: tx.lookup.known(["e1", "e2"])) == {"e1"}
        assert await self.status(ledger, "e1") == "in_flight"
        await self.check_counters(ledger)
        again = await self.begin(ledger, new_event("e1"), worker="w2")
        assert again.starts == 1, "the start of the killed worker is counted"
        assert (await self.state(ledger, "e1")).crashes == 2
        assert await self.end(ledger, again, "success", page=b"x")

    async def _killed_after_a_commit(self, ledger: UnitOfWork) -> None:
        begun = await self.start(ledger, "e1")
        await self.end(ledger, begun, "retry", until=self.now() + 5, reason="HTTP 502")

    @sentence(killed_after=_killed_after_a_commit)
    async def test_a_committed_transaction_survives_a_killed_worker(
        self, ledger: UnitOfWork
    ) -> None:
        state = await self.state(ledger, "e1")
        assert (state.status, state.attempts, state.starts, state.crashes) == ("delayed", 1, 1, 0)
        await self.check_counters(ledger)

    @sentence()
    async def test_concurrent_workers_count_every_event_once(self, ledger: UnitOfWork) -> None:
        workers = [ledger, await self.open(), await self.open()]
        await asyncio.gather(
            *(
                self.accept(worker, *(new_event(f"e{w}-{i}-{k}") for k in range(3)))
                for i in range(5)
                for w, worker in enumerate(workers)
            )
        )
        await self.check_counters(ledger)
        assert await ledger.read(lambda tx: tx.counters.pending(TOPIC)) == 45

    # -- starts and ends ---------------------------------------------------------------------------

    @sentence()
    async def test_a_start_is_counted_before_the_work_and_its_end_is_recorded(
        self, ledger: UnitOfWork
    ) -> None:
        begun = await self.start(ledger, "e1")
        state = await self.state(ledger, "e1")
        assert (state.status, state.starts, state.crashes) == ("in_flight", 1, 1)
        assert state.fence == begun.fence
        await self.check_counters(ledger)
        assert await self.end(
            ledger, begun, "success", page=b"<html>", response_status=200, extractors="product@1"
        )
        state = await self.state(ledger, "e1")
        assert (state.status, state.starts, state.crashes, state.attempts) == ("success", 1, 0, 0)
        assert state.page == page_id(b"<html>")
        row = await ledger.read(lambda tx: tx.reports.event("e1"))
        assert row is not None
        assert (row.response_status, row.extractors, row.worker) == (200, "product@1", "w1")
        assert row.finished_at is not None
        assert row.meta is not None
        assert row.meta.size == 6
        steps = await ledger.read(lambda tx: tx.reports.history(row.n))
        assert {step.status for step in steps} == {"pending", "in_flight", "success"}

    @sentence()
    async def test_each_outcome_leads_to_its_status_and_charges_its_attempt(
        self, ledger: UnitOfWork
    ) -> None:
        expected = {
            "success": ("success", 0),
            "retry": ("delayed", 1),
            "park": ("delayed", 0),
            "release": ("pending", 0),
            "dead": ("dead", 1),
            "handover": ("pending", 0),
            "writing": ("writing", 0),
        }
        for outcome in OUTCOMES:
            begun = await self.start(ledger, outcome)
            until = self.now() + 20 if outcome in ("retry", "park") else 0.0
            assert await self.end(ledger, begun, outcome, until=until, reason=f"by {outcome}")
            state = await self.state(ledger, outcome)
            assert ((state.status, state.attempts), state.crashes) == (expected[outcome], 0)
            if until:
                assert state.not_before == until
            row = await ledger.read(lambda tx: tx.reports.event(outcome))  # noqa: B023 (awaited here)
            assert row is not None
            assert (row.reason, row.status) == (f"by {outcome}", state.status)

    @sentence()
    async def test_only_a_charged_retry_adds_an_attempt(self, ledger: UnitOfWork) -> None:
        event = new_event("e1")
        await self.accept(ledger, event)
        steps: list[tuple[Outcome, bool, int]] = [
            ("retry", True, 1),
            ("retry", False, 1),
            ("park", True, 1),
            ("release", True, 1),
            ("retry", True, 2),
        ]
        for outcome, charged, attempts in steps:
            begun = await self.begin(ledger, event)
            assert await self.end(ledger, begun, outcome, charged=charged, until=self.now())
            assert (await self.state(ledger, "e1")).attempts == attempts
        state = await self.state(ledger, "e1")
        assert (state.starts, state.crashes) == (5, 0)

    @sentence()
    async def test_recorded_failures_are_listed_by_class_until_the_event_is_dead(
        self, ledger: UnitOfWork
    ) -> None:
        event = new_event("e1")
        await self.accept(ledger, event)
        for error_class in ("network", "blocked", "network"):
            begun = await self.begin(ledger, event)
            await self.end(ledger, begun, "retry", error_class=error_class, until=self.now())
            await self.sleep(0.01)  # two lines of a history have different times
        found = await ledger.read(lambda tx: tx.lookup.failures(begun.row))
        assert found == {"network": 2, "blocked": 1}
        await self.end(ledger, await self.begin(ledger, event), "dead", error_class="network")
        await self.sleep(0.01)
        await self.reopen(ledger, "e1", was="dead")
        assert await ledger.read(lambda tx: tx.lookup.failures(begun.row)) == {}

    @sentence()
    async def test_an_ended_event_is_not_started_and_not_changed(self, ledger: UnitOfWork) -> None:
        for outcome in ("success", "dead"):
            begun = await self.start(ledger, outcome)
            await self.end(ledger, begun, outcome)
        twin = new_event("twin")
        await self.accept(ledger, twin)
        state, now = await self.state(ledger, "twin"), self.now()
        await ledger.write(lambda tx: tx.events.mark_duplicate(twin, state, "success", now))
        ids = ("success", "dead", "twin")
        before = await self.facts(ledger, *ids)
        tried = await self.try_begin(ledger, *(new_event(id_) for id_ in ids))
        assert tried == [None, None, None]
        assert await self.facts(ledger, *ids) == before

    @sentence()
    async def test_one_batch_may_start_and_end_many_events(self, ledger: UnitOfWork) -> None:
        events = [new_event(f"e{i}") for i in range(len(OUTCOMES))]
        await self.accept(ledger, *events)
        begun = await self.try_begin(ledger, *events)
        await self.check_counters(ledger)
        ends = [
            an_end(b, outcome, until=self.now())
            for b, outcome in zip(begun, OUTCOMES, strict=True)
            if b is not None
        ]
        now = self.now()
        assert await ledger.write(lambda tx: apply_ends(tx, ends, now)) == [True] * 7
        await self.check_counters(ledger)
        assert (await self.status(ledger, *(e.id for e in events))).split() == [
            "success",
            "delayed",
            "delayed",
            "pending",
            "dead",
            "pending",
            "writing",
        ]

    @sentence()
    async def test_an_event_that_is_twice_in_a_batch_gets_two_fences(
        self, ledger: UnitOfWork
    ) -> None:
        event = new_event("e1")
        await self.accept(ledger, event)
        first, second = await self.try_begin(ledger, event, event)
        assert first is not None
        assert second is not None
        assert first.fence < second.fence
        await self.check_counters(ledger)
        assert (await self.state(ledger, "e1")).starts == 2
        assert not await self.end(ledger, first, "success")
        assert await self.end(ledger, second, "success")

    @sentence()
    async def test_a_written_event_stays_writing_through_its_starts(
        self, ledger: UnitOfWork
    ) -> None:
        begun = await self.start(ledger, "e1")
        assert await self.end(ledger, begun, "writing", page=b"x", extractors="product@1")
        for _ in range(2):  # the first write crashed
            writer = await self.begin(ledger, begun.event, writing=True, request=False)
            assert await self.status(ledger, "e1") == "writing"
            await self.check_counters(ledger)
        assert await self.end(ledger, writer, "success")
        assert await self.status(ledger, "e1") == "success"

    # -- fences (I12) ------------------------------------------------------------------------------

    @sentence()
    async def test_an_end_with_an_outdated_fence_changes_nothing(self, ledger: UnitOfWork) -> None:
        other = await self.open()
        for outcome in OUTCOMES:
            old = await self.start(ledger, outcome)
            new = await self.begin(other, old.event, worker="w2")
            assert new.fence > old.fence
            before = await self.facts(other, outcome)
            assert not await self.end(
                ledger, old, outcome, page=b"late", reason="late", until=self.now() + 5
            )
            assert await self.facts(other, outcome) == before
            assert await self.end(other, new, "success")

    @sentence()
    async def test_an_end_that_is_repeated_after_a_lost_answer_changes_nothing(
        self, ledger: UnitOfWork
    ) -> None:
        for outcome in OUTCOMES:
            begun = await self.start(ledger, outcome)
            more: dict[str, Any] = {"page": b"x", "reason": "no", "until": self.now() + 5}
            assert await self.end(ledger, begun, outcome, **more)
            before = await self.facts(ledger, outcome)
            assert not await self.end(ledger, begun, outcome, **more), (
                f"the start had ended as {outcome}"
            )
            assert await self.facts(ledger, outcome) == before

    @sentence()
    async def test_a_batch_applies_only_the_ends_with_a_current_fence(
        self, ledger: UnitOfWork
    ) -> None:
        starts = [await self.start(ledger, f"e{i}") for i in range(6)]
        newer = [await self.begin(ledger, b.event, worker="w2") for b in starts[::2]]
        ends = [
            an_end(b, "dead" if i < 2 else "retry" if i < 4 else "success", until=self.now())
            for i, b in enumerate(starts)
        ]
        now = self.now()
        answers = await ledger.write(lambda tx: apply_ends(tx, ends, now))
        assert answers == [False, True, False, True, False, True]
        await self.check_counters(ledger)
        for begun in newer:
            assert await self.end(ledger, begun, "success")

    @sentence()
    async def test_a_start_with_the_fence_of_an_earlier_admission_gets_a_new_fence(
        self, ledger: UnitOfWork
    ) -> None:
        event = new_event("e1")
        await self.accept(ledger, event)
        admitted, now = await self.state(ledger, "e1"), self.now()
        running = await self.begin(ledger, event, worker="w2")
        late = Start(admitted.n, event, admitted.fence, True)
        (fence,) = await ledger.write(lambda tx: tx.events.begin([late], "w1", now, writing=False))
        assert fence is not None
        assert fence > running.fence
        await self.check_counters(ledger)
        assert not await self.end(ledger, running, "success")

    @sentence()
    async def test_two_workers_that_start_one_event_get_different_fences(
        self, ledger: UnitOfWork
    ) -> None:
        other = await self.open()
        for i in range(5):
            event = new_event(f"e{i}")
            await self.accept(ledger, event)
            one, two = await asyncio.gather(
                self.begin(ledger, event), self.begin(other, event, worker="w2")
            )
            assert one.fence != two.fence
            answers = [
                await self.end(ledger, one, "success"),
                await self.end(other, two, "success"),
            ]
            assert sorted(answers) == [False, True]
