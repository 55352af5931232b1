"""Test of the ledger conformance suite: a random walk over all transitions, against a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable

from penstock.ports import OPEN, Transaction, UnitOfWork
from penstock.testing.ledger_rig import (
    OUTCOMES,
    Begun,
    LedgerRig,
    a_letter,
    new_event,
)
from penstock.testing.store_rig import sentence

STEPS = 150
ENDED = ("success", "dead", "duplicate")


class Expected:
    """The state that one event must have."""

    def __init__(self) -> None:
        self.status = "pending"
        self.attempts = self.starts = self.crashes = 0
        self.fence: int | None = None  # fence of the start that has not ended
        self.fences: set[int] = set()
        self.worker = ""
        self.until = 0.0


class Walk:
    """Random steps on one ledger. Each step changes the ledger and the model."""

    def __init__(self, rig: LedgerRig, workers: list[UnitOfWork], seed: int) -> None:
        self.rig, self.workers, self.dice = rig, workers, random.Random(seed)
        self.events: dict[str, Expected] = {}
        self.starts: list[Begun] = []  # current and outdated ones
        self.deleted: Counter[str] = Counter()
        self.steps: list[str] = []
        self.accepted = 0

    @property
    def ledger(self) -> UnitOfWork:
        return self.dice.choice(self.workers)

    def some(self, *statuses: str) -> str | None:
        """Return the id of an event with one of these statuses, or None if no event has one."""
        ids = [id_ for id_, e in self.events.items() if e.status in statuses]
        return self.dice.choice(ids) if ids else None

    async def accept(self) -> None:
        ids = [f"e{self.accepted + i}" for i in range(self.dice.randrange(1, 4))]
        self.accepted += len(ids)
        await self.rig.accept(self.ledger, *(new_event(id_) for id_ in ids))
        self.events |= {id_: Expected() for id_ in ids}

    async def begin(self) -> None:
        """Start some events in one batch, perhaps ended ones and one of them twice."""
        if not self.events:
            return
        ids = [self.dice.choice([*self.events]) for _ in range(self.dice.randrange(1, 4))]
        writing, worker = self.dice.random() < 0.2, self.dice.choice(["w1", "w2"])
        begun = await self.rig.try_begin(
            self.ledger, *(new_event(id_) for id_ in ids), writing=writing, worker=worker
        )
        for id_, start in zip(ids, begun, strict=True):
            event = self.events[id_]
            assert (start is None) == (event.status in ENDED), (id_, event.status)
            if start is None:
                continue
            assert all(start.fence > fence for fence in event.fences), "fences must grow"
            event.status, event.worker = "writing" if writing else "in_flight", worker
            event.starts, event.crashes = event.starts + 1, event.crashes + 1
            event.fence = start.fence
            event.fences.add(start.fence)
            self.starts.append(start)

    async def end(self) -> None:
        if not self.starts:
            return
        begun = self.starts.pop(self.dice.randrange(len(self.starts)))
        event, outcome = self.events[begun.event.id], self.dice.choice(OUTCOMES)
        charged, until = self.dice.random() < 0.7, self.rig.now() + self.dice.random()
        current = event.fence == begun.fence
        changed = await self.rig.end(
            self.ledger,
            begun,
            outcome,
            page=b"x" if self.dice.random() < 0.5 else None,
            until=until,
            charged=charged,
            deleted=self.deleted,
        )
        assert changed == current, (begun.event.id, outcome)
        if self.dice.random() < 0.3:
            self.starts.append(begun)  # the start has an outdated fence now
        if not current:
            return
        event.fence, event.crashes = None, event.crashes - 1
        if outcome == "dead" or (outcome == "retry" and charged):
            event.attempts += 1
        if outcome in ("retry", "park"):
            event.status, event.until = "delayed", until
        elif outcome in ("release", "handover"):
            event.status = "pending"
        else:
            event.status = outcome

    async def delay(self) -> None:
        if id_ := self.some("pending", "delayed"):
            now, until, event = self.rig.now(), self.rig.now() + self.dice.random(), new_event(id_)
            await self.ledger.write(
                lambda tx: tx.events.delay(event, tx.lookup.states([id_])[id_], until, "w", now)
            )
            self.events[id_].status, self.events[id_].until = "delayed", until

    async def mark_duplicate(self) -> None:
        if id_ := self.some("pending", "delayed"):
            now, event = self.rig.now(), new_event(id_)
            await self.ledger.write(
                lambda tx: tx.events.mark_duplicate(
                    event, tx.lookup.states([id_])[id_], "owner", now
                )
            )
            self.events[id_].status = "duplicate"

    async def reopen(self) -> None:
        if id_ := self.some("dead", "duplicate"):
            event = self.events[id_]
            await self.rig.reopen(
                self.ledger, id_, was=event.status, promoted=event.status == "duplicate"
            )
            event.status, event.attempts, event.crashes = "pending", 0, 0

    async def abandon(self) -> None:
        if id_ := self.some("pending", "delayed"):
            now = self.rig.now()

            def work(tx: Transaction) -> None:
                stored = tx.maintenance.waiting(id_)
                assert stored is not None
                tx.maintenance.abandon(stored, a_letter(new_event(id_)), now)

            await self.ledger.write(work)
            self.events[id_].status = "dead"

    async def release_due(self) -> None:
        await self.rig.sleep(0.05)
        now = self.rig.now()
        await self.ledger.write(lambda tx: tx.maintenance.release_due(now))
        for event in self.events.values():
            if event.status == "delayed" and event.until <= now:
                event.status = "pending"

    async def requeue(self) -> None:
        worker, now = self.dice.choice(["w1", "w2"]), self.rig.now()
        ids = [*self.events]
        count = await self.ledger.write(lambda tx: tx.maintenance.requeue_from(worker, ids, now))
        lost = [e for e in self.events.values() if e.status == "in_flight" and e.worker == worker]
        assert count == len(lost)
        for event in lost:
            event.status, event.fence = "pending", None

    async def prune(self) -> None:
        await self.rig.sleep(0.01)
        now = self.rig.now()
        count = await self.ledger.write(
            lambda tx: tx.maintenance.prune(now, lambda key, id_: id_ < "e2")
        )
        known = await self.ledger.read(lambda tx: tx.lookup.known([*self.events]))
        gone = set(self.events) - known
        assert count == len(gone)
        for id_ in gone:
            event = self.events.pop(id_)
            assert event.status == "duplicate" or (event.status == "success" and id_ >= "e2")
            self.deleted[event.status] += 1
        self.starts = [start for start in self.starts if start.event.id in self.events]

    async def check(self) -> None:
        """Compare all events and counters with the model."""
        ledger = self.ledger
        states = await ledger.read(lambda tx: tx.lookup.states([*self.events]))
        found = {id_: (s.status, s.attempts, s.starts, s.crashes) for id_, s in states.items()}
        assert found == {
            id_: (e.status, e.attempts, e.starts, e.crashes) for id_, e in self.events.items()
        }
        await self.rig.check_counters(ledger, self.deleted)

    async def step(self) -> None:
        moves: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (4, self.accept),
            (8, self.begin),
            (9, self.end),
            (2, self.delay),
            (1, self.mark_duplicate),
            (2, self.reopen),
            (1, self.abandon),
            (2, self.release_due),
            (1, self.requeue),
            (1, self.prune),
        ]
        (move,) = self.dice.choices([m for _, m in moves], [weight for weight, _ in moves])
        self.steps.append(getattr(move, "__name__", "?"))
        await move()
        await self.check()


class LedgerWalk(LedgerRig):
    """Tests of the ledger as a whole."""

    async def _walk(self, ledger: UnitOfWork, seed: int) -> None:
        walk = Walk(self, [ledger, await self.open()], seed)
        try:
            for _ in range(STEPS):
                await walk.step()
        except AssertionError as e:
            e.add_note(f"seed {seed}: {' '.join(walk.steps)}")
            raise
        # I1: when faults stop, every event ends, each in one of three ways.
        for id_, event in walk.events.items():
            if event.status in OPEN:
                begun = await self.begin(ledger, new_event(id_))
                assert await self.end(ledger, begun, "success", deleted=walk.deleted)
                event.status = "success"
                event.starts += 1
        states = await ledger.read(lambda tx: tx.lookup.states([*walk.events]))
        assert {id_: s.status for id_, s in states.items()} == {
            id_: e.status for id_, e in walk.events.items()
        }
        assert {s.status for s in states.values()} <= set(ENDED)

    @sentence()
    async def test_a_random_walk_keeps_counters_and_states_consistent(
        self, ledger: UnitOfWork
    ) -> None:
        await self._walk(ledger, 1)

    @sentence()
    async def test_a_second_random_walk_keeps_counters_and_states_consistent(
        self, ledger: UnitOfWork
    ) -> None:
        await self._walk(ledger, 2)

    @sentence()
    async def test_a_third_random_walk_keeps_counters_and_states_consistent(
        self, ledger: UnitOfWork
    ) -> None:
        await self._walk(ledger, 3)
