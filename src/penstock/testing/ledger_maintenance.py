"""Tests of the ledger conformance suite: delays, crashed workers, retention, counters, sources."""

from __future__ import annotations

from collections import Counter

from penstock.model import page_id
from penstock.ports import Transaction, UnitOfWork
from penstock.testing.ledger_rig import (
    TOPIC,
    URL,
    LedgerRig,
    Outcome,
    a_letter,
    new_event,
)
from penstock.testing.store_rig import sentence


class LedgerMaintenance(LedgerRig):
    """Tests of the periodic work on a ledger, and of its counters and sources."""

    # -- delayed events ----------------------------------------------------------------------------

    @sentence()
    async def test_a_delayed_event_is_pending_when_it_is_due_and_not_before(
        self, ledger: UnitOfWork
    ) -> None:
        start = self.now()
        for id_, until in (("soon", start + 5), ("late", start + 60)):
            await self.end(ledger, await self.start(ledger, id_), "retry", until=until)

        async def release(now: float) -> bool:
            due = await ledger.read(lambda tx: tx.maintenance.has_due(now))
            await ledger.write(lambda tx: tx.maintenance.release_due(now))
            await self.check_counters(ledger)
            return due

        assert not await release(start + 4.9)
        assert await self.status(ledger, "soon", "late") == "delayed delayed"
        assert await release(start + 5.1)
        assert await self.status(ledger, "soon", "late") == "pending delayed"
        assert not await release(start + 5.1)
        state = await self.state(ledger, "soon")
        assert (state.attempts, state.starts) == (1, 1), "a release keeps the budget"

    @sentence()
    async def test_an_event_that_was_not_started_can_be_delayed_more_than_once(
        self, ledger: UnitOfWork
    ) -> None:
        event, now = new_event("e1"), self.now()
        await self.accept(ledger, event)
        for until in (now + 5, now + 9):
            was = await self.state(ledger, "e1")
            await ledger.write(
                lambda tx: tx.events.delay(event, was, until, "window", now)  # noqa: B023 (awaited here)
            )
            await self.check_counters(ledger)
        state = await self.state(ledger, "e1")
        assert (state.status, state.not_before, state.attempts) == ("delayed", now + 9, 0)
        begun = await self.begin(ledger, event)  # a delayed event may be started early
        await self.check_counters(ledger)
        assert await self.end(ledger, begun, "success")

    @sentence()
    async def test_parked_events_of_a_host_can_be_made_due(self, ledger: UnitOfWork) -> None:
        now = self.now()
        for id_, reason in (("e1", "paused"), ("e2", "other"), ("e3", "paused")):
            begun = await self.start(ledger, id_)
            await self.end(ledger, begun, "park", until=now + 600, reason=reason)
        elsewhere = new_event("e4", "https://other.test/")
        await self.accept(ledger, elsewhere)
        begun = await self.begin(ledger, elsewhere)
        await self.end(ledger, begun, "park", until=now + 600, reason="paused")
        parked = await ledger.read(lambda tx: tx.maintenance.parked("shop.test", ["paused", "no"]))
        rows = [(await self.state(ledger, id_)).n for id_ in ("e1", "e3")]
        assert sorted(n for n, _ in parked) == rows
        await ledger.write(lambda tx: tx.maintenance.make_due(rows, now))
        await ledger.write(lambda tx: tx.maintenance.release_due(now))
        await self.check_counters(ledger)
        assert (await self.status(ledger, "e1", "e2", "e3", "e4")).split() == [
            "pending",
            "delayed",
            "pending",
            "delayed",
        ]

    @sentence()
    async def test_events_that_wait_for_more_than_time_are_counted_by_their_cause(
        self, ledger: UnitOfWork
    ) -> None:
        now, host = self.now(), "host:shop.test"
        for id_, cause in (
            ("held", host),
            ("timed", ""),
            ("fetched", ""),
            ("coded", "extractor:x"),
        ):
            page = b"x" if id_ == "fetched" else None
            begun = await self.start(ledger, id_)
            await self.end(
                ledger, begun, "park", page=page, until=now + 600, waits_for=cause, reason=id_
            )
        elsewhere = new_event("elsewhere", "https://other.test/")
        await self.accept(ledger, elsewhere)
        was = await self.state(ledger, "elsewhere")
        await ledger.write(
            lambda tx: tx.events.delay(
                elsewhere, was, now + 600, "no browser", now, waits_for="render"
            )
        )

        async def waits() -> dict[str, int]:
            return await ledger.read(lambda tx: tx.maintenance.waits())

        assert await waits() == {host: 1, "extractor:x": 1, "render": 1}
        await ledger.write(lambda tx: tx.maintenance.hold("shop.test", host, now + 600))
        assert await waits() == {host: 2, "extractor:x": 1, "render": 1}, (
            "the event with a stored page needs no request"
        )
        found = await ledger.read(lambda tx: tx.maintenance.waiting_for(host))
        rows = [(await self.state(ledger, id_)).n for id_ in ("held", "timed")]
        assert sorted((n, name) for n, name, _ in found) == [(n, "shop.test") for n in rows]
        await ledger.write(lambda tx: tx.maintenance.make_due(rows, now))
        assert await waits() == {"extractor:x": 1, "render": 1}
        await self.begin(ledger, new_event("coded"))
        await ledger.write(lambda tx: tx.maintenance.release_due(now + 601))
        assert await waits() == {}
        await self.check_counters(ledger)

    # -- crashed workers ---------------------------------------------------------------------------

    @sentence()
    async def test_events_of_a_crashed_worker_are_pending_and_its_ends_change_nothing(
        self, ledger: UnitOfWork
    ) -> None:
        lost = await self.start(ledger, "e1", worker="w1")
        kept = await self.start(ledger, "e2", worker="w2")
        await self.accept(ledger, new_event("e3"))
        now = self.now()
        count = await ledger.write(
            lambda tx: tx.maintenance.requeue_from("w1", ["e1", "e2", "e3", "unknown"], now)
        )
        assert count == 1
        await self.check_counters(ledger)
        assert await self.status(ledger, "e1", "e2", "e3") == "pending in_flight pending"
        state = await self.state(ledger, "e1")
        assert (state.starts, state.crashes) == (1, 1), "the crashed start stays counted"
        assert not await self.end(ledger, lost, "success")
        assert await self.status(ledger, "e1") == "pending"
        assert await self.end(ledger, kept, "success")

    @sentence()
    async def test_open_events_without_history_since_a_time_are_stalled(
        self, ledger: UnitOfWork
    ) -> None:
        await self.accept(ledger, new_event("old"))
        started = await self.start(ledger, "started")
        delayed = await self.start(ledger, "delayed")
        await self.end(ledger, delayed, "retry", until=self.now() + 99)
        await self.end(ledger, await self.start(ledger, "done"), "success")
        await self.sleep(0.1)
        between = self.now()
        await self.sleep(0.1)
        await self.accept(ledger, new_event("new"))
        found = await ledger.read(lambda tx: tx.maintenance.stalled(between, 10))
        assert [id_ for _, id_, _ in found] == ["old", "started"]
        now = self.now()
        await ledger.write(
            lambda tx: tx.maintenance.note(started.row, "in_flight", "published again", now)
        )
        assert await self.status(ledger, "started") == "in_flight"
        found = await ledger.read(lambda tx: tx.maintenance.stalled(between, 10))
        assert [id_ for _, id_, _ in found] == ["old"]
        assert len(await ledger.read(lambda tx: tx.maintenance.stalled(now + 9, 2))) == 2

    @sentence()
    async def test_waiting_events_are_found_by_the_topic_of_their_next_message(
        self, ledger: UnitOfWork
    ) -> None:
        await self.accept(ledger, new_event("new"))
        await self.start(ledger, "running")
        fetched = await self.start(ledger, "fetched")
        await self.end(ledger, fetched, "handover", page=b"x")
        written = await self.start(ledger, "written")
        await self.end(ledger, written, "writing", page=b"y")

        def work(tx: Transaction) -> dict[str, list[str]]:
            topics = ("requests", "pages", "records")
            return {t: [e.id for e in tx.maintenance.waiting_on(t, 10)] for t in topics}

        assert await ledger.read(work) == {
            "requests": ["new"],
            "pages": ["fetched"],
            "records": ["written"],
        }
        assert await ledger.read(lambda tx: tx.maintenance.waiting("running")) is None
        assert await ledger.read(lambda tx: tx.maintenance.waiting("unknown")) is None
        found = await ledger.read(lambda tx: tx.maintenance.waiting("new"))
        assert found is not None
        assert (found.id, found.url, found.host) == ("new", f"{URL}new", "shop.test")

    @sentence()
    async def test_an_abandoned_event_is_dead_and_can_be_redriven(self, ledger: UnitOfWork) -> None:
        now = self.now()
        for id_ in ("pending", "delayed", "writing"):
            event = new_event(id_)
            await self.accept(ledger, event)
            if id_ != "pending":
                begun = await self.begin(ledger, event)
                outcome: Outcome = "retry" if id_ == "delayed" else "writing"
                await self.end(ledger, begun, outcome, until=now + 99)

            def work(tx: Transaction, id_: str = id_) -> None:
                stored = tx.maintenance.waiting(id_)
                assert stored is not None
                tx.maintenance.abandon(stored, a_letter(new_event(id_), "purged"), now)

            await ledger.write(work)
            await self.check_counters(ledger)
            assert await self.status(ledger, id_) == "dead"
            assert await ledger.read(lambda tx: tx.dead_letters.redrivable(id_))  # noqa: B023 (awaited here)

    # -- retention ---------------------------------------------------------------------------------

    @sentence()
    async def test_pruning_deletes_only_old_ends_and_keeps_the_counters(
        self, ledger: UnitOfWork
    ) -> None:
        for id_ in ("kept", "gone", "dead"):
            begun = await self.start(ledger, id_)
            await self.end(ledger, begun, "dead" if id_ == "dead" else "success", page=b"x")
        twin, now = new_event("twin"), self.now()
        await self.accept(ledger, twin, new_event("open"))
        was = await self.state(ledger, "twin")
        await ledger.write(lambda tx: tx.events.mark_duplicate(twin, was, "kept", now))
        await self.sleep(0.2)
        between = self.now()
        await self.sleep(0.2)
        await self.end(ledger, await self.start(ledger, "young"), "success")
        asked: set[str] = set()

        def keep(key: bytes, id_: str) -> bool:
            asked.add(id_)
            return id_ == "kept"

        async def prune() -> int:
            return await ledger.write(lambda tx: tx.maintenance.prune(between, keep))

        # Each call deletes a part. An adapter may need several calls for all events.
        assert sum([await prune() for _ in range(5)]) == 2
        ids = ("kept", "gone", "dead", "twin", "open", "young")
        left = await ledger.read(lambda tx: tx.lookup.known(ids))
        assert left == {"kept", "dead", "open", "young"}
        assert asked <= {"kept", "gone"}, "only old successes may be baselines"
        assert await ledger.read(lambda tx: tx.reports.event("gone")) is None
        await self.check_counters(ledger, Counter(success=1, duplicate=1))
        assert await ledger.read(lambda tx: tx.counters.total("success")) == 3

    @sentence()
    async def test_pages_of_delayed_and_dead_events_are_needed_until_success(
        self, ledger: UnitOfWork
    ) -> None:
        bodies = {"delayed": b"1", "dead": b"2", "success": b"3"}
        pages = {id_: page_id(body) for id_, body in bodies.items()}

        async def needed() -> set[str]:
            found = await ledger.read(
                lambda tx: tx.maintenance.pages_needed([*pages.values(), "f" * 64])
            )
            return {id_ for id_, page in pages.items() if page in found}

        outcomes: dict[str, Outcome] = {"delayed": "retry", "dead": "dead", "success": "success"}
        for id_, outcome in outcomes.items():
            begun = await self.start(ledger, id_)
            await self.end(ledger, begun, outcome, page=bodies[id_], until=self.now())
        assert await needed() == {"delayed", "dead"}
        state = await self.state(ledger, "delayed")
        assert state.page == pages["delayed"], "a redelivery does not fetch the page again"
        begun = await self.begin(ledger, new_event("delayed"), request=False)
        await self.end(ledger, begun, "success", page=bodies["delayed"])
        assert await needed() == {"dead"}
        await self.reopen(ledger, "dead", was="dead")
        assert await needed() == set(), "the event is fetched again"

    # -- counters ----------------------------------------------------------------------------------

    @sentence()
    async def test_counters_add_up_by_topic_and_over_all_topics(self, ledger: UnitOfWork) -> None:
        await ledger.write(lambda tx: tx.counters.add("a", {"followed": 2, "records": 0}))
        await ledger.write(lambda tx: tx.counters.add("a", {"followed": 3}))
        await ledger.write(lambda tx: tx.counters.add("b", {"followed": 10, "changes": 1}))
        await self.accept(ledger, new_event("e1"), new_event("e2", topic="other"))

        def work(tx: Transaction) -> list[int]:
            return [
                tx.counters.total("followed"),
                tx.counters.total("followed", "changes"),
                tx.counters.total("never"),
                tx.counters.pending(TOPIC),
                tx.counters.pending("other"),
                tx.counters.pending("never"),
            ]

        assert await ledger.read(work) == [15, 16, 0, 1, 1, 0]
        topics = await ledger.read(lambda tx: tx.counters.topics())
        assert sorted(topics) == ["a", "b", "other", TOPIC]
        await ledger.write(lambda tx: tx.counters.add("b", {"followed": -10}))
        assert await ledger.read(lambda tx: tx.counters.topics_with("followed")) == ["a"]

    @sentence()
    async def test_recent_ends_are_counted_within_their_time_and_can_be_reset(
        self, ledger: UnitOfWork
    ) -> None:
        now = self.now()
        for what, kind, n, at in (
            ("host:a", "", 5, now - 300),
            ("host:a", "", 3, now),
            ("host:a", "blocked", 2, now),
            ("host:a", "", 4, now),
            ("host:b", "blocked", 9, now),
        ):
            await ledger.write(
                lambda tx: tx.breakers.record_ends({(what, kind): n}, at)  # noqa: B023 (awaited here)
            )

        def recent(seconds: float) -> dict[str, int]:
            return ledger.snapshot(lambda tx: tx.breakers.recent_ends("host:a", seconds, now))

        assert recent(60.0) == {"": 7, "blocked": 2}
        assert recent(600.0) == {"": 12, "blocked": 2}
        await ledger.write(lambda tx: tx.breakers.reset_ends("host:a"))
        assert recent(600.0) == {}
        other = await ledger.read(lambda tx: tx.breakers.recent_ends("host:b", 60.0, now))
        assert other == {"blocked": 9}

    # -- sources -----------------------------------------------------------------------------------

    @sentence()
    async def test_the_state_of_a_source_is_kept_for_all_workers(self, ledger: UnitOfWork) -> None:
        other, now = await self.open(), self.now()

        def work(tx: Transaction) -> None:
            tx.sources.declare("feed", "https://old.test")
            tx.sources.declare("api", "https://api.test")
            tx.sources.declare("feed", "https://feed.test")
            tx.sources.count("feed", new=2, known=3, skipped=4, refused=1, now=now)
            tx.sources.count("feed", new=1, known=0, skipped=0, refused=0, now=now)
            tx.sources.note("feed", worker="w1", lag=1.5, error="down", error_at=now)
            tx.sources.pause("feed", "by hand")

        await ledger.write(work)
        assert [s.name for s in await other.read(lambda tx: tx.sources.all())] == ["api", "feed"]
        found = await other.read(lambda tx: tx.sources.state("feed"))
        assert found is not None
        assert (found.url, found.events, found.known, found.skipped, found.refused) == (
            "https://feed.test",
            3,
            3,
            4,
            1,
        )
        assert (found.worker, found.lag, found.error, found.paused) == (
            "w1",
            1.5,
            "down",
            "by hand",
        )
        await other.write(lambda tx: tx.sources.pause("feed", None))
        await other.write(lambda tx: tx.sources.reset("feed"))
        after = await ledger.read(lambda tx: tx.sources.state("feed"))
        assert after is not None
        assert (after.paused, after.generation, after.error) == (None, found.generation + 1, None)
        assert await ledger.read(lambda tx: tx.sources.state("never")) is None
        assert await ledger.read(lambda tx: tx.sources.cursor("feed")) is None
