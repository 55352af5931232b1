"""Tests of the ledger conformance suite: duplicates, queries for decisions, dead letters."""

from __future__ import annotations

from penstock.model import decode_event, encode_event, page_id
from penstock.ports import EventState, Transaction, UnitOfWork
from penstock.testing.ledger_rig import LedgerRig, a_letter, key_of, new_event
from penstock.testing.store_rig import sentence


class LedgerLookups(LedgerRig):
    """Tests of the queries that decisions depend on."""

    # -- duplicates and claims ---------------------------------------------------------------------

    async def _duplicate(self, ledger: UnitOfWork, id_: str, of: str) -> None:
        event, now = new_event(id_), self.now()
        await self.accept(ledger, event)
        was: EventState = await self.state(ledger, id_)
        await ledger.write(lambda tx: tx.events.mark_duplicate(event, was, of, now))
        await self.check_counters(ledger)

    @sentence()
    async def test_the_oldest_duplicate_of_a_dead_owner_is_promoted_once(
        self, ledger: UnitOfWork
    ) -> None:
        owner = await self.start(ledger, "owner")
        await self._duplicate(ledger, "d2", "owner")
        await self._duplicate(ledger, "d1", "owner")
        await self._duplicate(ledger, "other", "another")
        assert await self.end(ledger, owner, "dead")
        found = await ledger.read(lambda tx: tx.lookup.oldest_duplicate("owner"))
        assert found is not None
        assert decode_event(found.envelope).id == found.id == "d2"
        assert found.n == (await self.state(ledger, "d2")).n
        promoted = await self.reopen(ledger, "d2", was="duplicate", promoted=True)
        await self.check_counters(ledger)
        state = await self.state(ledger, "d2")
        assert (state.status, state.attempts) == ("pending", 0)
        await self._duplicate(ledger, "d3", "d2")
        assert await self.end(ledger, await self.begin(ledger, promoted), "dead")
        assert await ledger.read(lambda tx: tx.lookup.oldest_duplicate("d2")) is None
        assert await ledger.read(lambda tx: tx.reports.duplicates_of("owner")) == [("d1", "d1")]

    @sentence()
    async def test_duplicates_can_be_reassigned_to_their_newest_one(
        self, ledger: UnitOfWork
    ) -> None:
        assert await ledger.read(lambda tx: tx.lookup.newest_duplicate("owner")) is None
        for id_ in ("d1", "d2", "d3"):
            await self._duplicate(ledger, id_, "owner")
        newest = await ledger.read(lambda tx: tx.lookup.newest_duplicate("owner"))
        assert newest is not None
        assert decode_event(newest.envelope).id == newest.id == "d3"
        await self.reopen(ledger, "d3", was="duplicate", promoted=True)
        await ledger.write(lambda tx: tx.events.reassign_duplicates("owner", "d3"))
        moved = await ledger.read(lambda tx: tx.reports.duplicates_of("d3"))
        assert sorted(id_ for id_, _ in moved) == ["d1", "d2"]
        assert await ledger.read(lambda tx: tx.reports.duplicates_of("owner")) == []
        await self.check_counters(ledger)

    @sentence()
    async def test_the_progress_of_a_claim_follows_its_owner(self, ledger: UnitOfWork) -> None:
        async def progress() -> tuple[bool, bool] | None:
            """Return (has sent its request, has ended) of the owner."""
            claim = await ledger.read(lambda tx: tx.lookup.claim_progress("e1", "e2"))
            assert claim is None or (claim.owner, claim.next) == ("e1", "e2")
            return None if claim is None else (claim.began > 0, claim.ended)

        assert await progress() is None, "the owner is unknown"
        event = new_event("e1")
        await self.accept(ledger, event)
        assert await progress() is None, "the owner has not sent a request"
        begun = await self.begin(ledger, event)
        assert await progress() == (True, False)
        await self.end(ledger, begun, "retry", until=self.now())
        assert await progress() == (False, False), "the owner waits for its retry"
        begun = await self.begin(ledger, event)
        await self.end(ledger, begun, "handover", page=b"x")
        assert await progress() == (True, False), "the page is fetched"
        begun = await self.begin(ledger, event, request=False)
        await self.end(ledger, begun, "success")
        assert await progress() == (True, True)
        dead = await self.start(ledger, "dead")
        await self.end(ledger, dead, "dead")
        assert await ledger.read(lambda tx: tx.lookup.claim_progress("dead", None)) is None

    @sentence()
    async def test_the_baseline_belongs_to_a_success_with_a_page(self, ledger: UnitOfWork) -> None:
        begun = await self.start(ledger, "e1")
        read = lambda tx: tx.lookup.baseline("e1")  # noqa: E731
        await self.end(ledger, begun, "retry", page=b"x", until=self.now())
        assert await ledger.read(read) is None
        begun = await self.begin(ledger, begun.event, request=False)
        await self.end(ledger, begun, "success", page=b"x", extractors="product@2")
        found = await ledger.read(read)
        assert found is not None
        assert (found.etag, found.last_modified, found.page, found.extractors) == (
            "x",
            "y",
            page_id(b"x"),
            "product@2",
        )
        bare = await self.start(ledger, "bare")
        await self.end(ledger, bare, "success")
        assert await ledger.read(lambda tx: tx.lookup.baseline("bare")) is None

    @sentence()
    async def test_a_url_is_fresh_while_open_and_after_its_request(
        self, ledger: UnitOfWork
    ) -> None:
        event = new_event("e1")
        await self.accept(ledger, event)
        key, before = key_of(event), self.now()
        none = b"no event"
        assert await ledger.read(lambda tx: tx.lookup.with_open([none, key])) == {key}
        assert await ledger.read(lambda tx: tx.lookup.is_fresh("e1", before + 999))
        begun = await self.begin(ledger, event)
        await self.end(ledger, begun, "success")
        assert not await ledger.read(lambda tx: tx.lookup.with_open([none, key]))
        assert await ledger.read(lambda tx: tx.lookup.is_fresh("e1", before - 1))
        assert not await ledger.read(lambda tx: tx.lookup.is_fresh("e1", self.now() + 1))
        assert not await ledger.read(lambda tx: tx.lookup.is_fresh("unknown", 0.0))

    @sentence()
    async def test_a_url_is_added_to_a_trace_once(self, ledger: UnitOfWork) -> None:
        now = self.now()

        def work(tx: Transaction) -> list[bool]:
            pairs = (("t1", b"u1"), ("t1", b"u1"), ("t1", b"u2"), ("t2", b"u1"))
            return [tx.lookup.add_to_trace(trace, key, now) for trace, key in pairs]

        assert await ledger.write(work) == [True, False, True, True]
        assert not await ledger.write(lambda tx: tx.lookup.add_to_trace("t2", b"u1", now))

    # -- dead letters ------------------------------------------------------------------------------

    @sentence()
    async def test_a_dead_letter_keeps_the_bytes_and_can_be_redriven_with_a_new_budget(
        self, ledger: UnitOfWork
    ) -> None:
        begun = await self.start(ledger, "e1")
        assert await ledger.read(lambda tx: tx.dead_letters.redrivable("e1")) is None
        await self.end(ledger, begun, "dead", page=b"x", reason="HTTP 404")
        letter = await ledger.read(lambda tx: tx.letter_reports.letter("e1"))
        assert letter is not None
        assert (letter.reason, letter.envelope) == ("HTTP 404", encode_event(begun.event))
        assert await ledger.read(lambda tx: tx.dead_letters.redrivable("e1")) == (
            begun.row,
            letter.envelope,
        )
        await self.reopen(ledger, "e1", was="dead")
        await self.check_counters(ledger)
        state = await self.state(ledger, "e1")
        assert (state.status, state.attempts, state.crashes, state.page) == ("pending", 0, 0, None)
        assert not await ledger.read(lambda tx: tx.dead_letters.has("e1"))
        assert not await self.end(ledger, begun, "success"), "its fence is outdated"
        steps = await ledger.read(lambda tx: tx.reports.history(begun.row))
        assert "dead" in {step.status for step in steps}, "the history is kept"
        assert await self.end(ledger, await self.begin(ledger, begun.event), "success")

    @sentence()
    async def test_a_newer_dead_letter_replaces_the_older_one_of_its_event(
        self, ledger: UnitOfWork
    ) -> None:
        event = new_event("e1")
        for reason in ("first", "second"):
            letter = a_letter(event, reason, envelope=reason.encode(), headers='{"a":"b"}')
            await ledger.write(lambda tx: tx.dead_letters.put(letter, self.now()))  # noqa: B023 (awaited here)
        found = await ledger.read(lambda tx: tx.letter_reports.letter("e1"))
        assert found is not None
        assert (found.reason, found.envelope, found.headers) == ("second", b"second", '{"a":"b"}')
        assert await ledger.read(lambda tx: tx.dead_letters.redrivable("e1")) is None, (
            "the ledger has no event to redrive"
        )
        assert await ledger.write(lambda tx: tx.dead_letters.drop("e1")) == 1
        assert await ledger.write(lambda tx: tx.dead_letters.drop("e1")) == 0

    @sentence()
    async def test_a_dropped_dead_letter_leaves_its_event_dead(self, ledger: UnitOfWork) -> None:
        begun = await self.start(ledger, "e1")
        await self.end(ledger, begun, "dead", page=b"x")
        page = page_id(b"x")
        assert await ledger.read(lambda tx: tx.maintenance.pages_needed([page])) == {page}
        assert await ledger.write(lambda tx: tx.dead_letters.drop("e1", release_page=True)) == 1
        assert await self.status(ledger, "e1") == "dead"
        assert await ledger.read(lambda tx: tx.dead_letters.redrivable("e1")) is None
        assert await ledger.read(lambda tx: tx.maintenance.pages_needed([page])) == set()
        await self.check_counters(ledger)
