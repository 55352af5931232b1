"""The relay to an external broker: it publishes and settles after the commit, late or twice, and
loses no event.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.embedded.test_books import OPEN, URL, Rig, assert_books_balance
from tests.embedded.test_books import Outcome as EndOutcome

from penstock.brokers.sqlite import SqliteBroker
from penstock.engine.relay import RESERVATION
from penstock.errors import StoreUnavailable
from penstock.model import Outcome, Priority, decode_event
from penstock.ports import Accepted, Delivery, Out, Published, Subscription, TopicSpec
from penstock.stores.sqlite import Database

TOPICS = ("requests", "pages", "records")


class Line:
    """Connection to a real broker that drops the calls and answers that a test selects. The broker
    handles all other calls.
    """

    def __init__(self, broker: SqliteBroker) -> None:
        self._broker = broker
        self.caps = broker.caps
        self.down = False
        self.deaf = False  # if True, publish results are lost
        self.cut_settles = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    async def publish(self, batch: Sequence[Out]) -> Sequence[Published]:
        if self.down:
            raise StoreUnavailable("the broker is away")
        largest = self.caps.max_body
        small = [m for m in batch if largest is None or len(m.body) <= largest]
        if len(small) < len(batch):
            await self._broker.publish(small)
            return [Published.OK if m in small else Published.FAILED for m in batch]
        answers = await self._broker.publish(batch)
        return [Published.UNKNOWN] * len(batch) if self.deaf else answers

    def subscribe(self, topic: str, group: str, *, owner: str, lease: float) -> Subscription:
        sub = self._broker.subscribe(topic, group, owner=owner, lease=lease)
        settle = sub.settle

        async def cut(items: Sequence[tuple[Delivery, Outcome]]) -> Sequence[bool]:
            if self.cut_settles:
                raise StoreUnavailable("the broker is away")
            return await settle(items)

        sub.settle = cut  # type: ignore[method-assign]
        return sub


class ApartRig(Rig):
    def __init__(self, directory: Path, **more: Any) -> None:
        base = more.get("base")
        super().__init__(directory, **more)
        self.line: Any = base.line if base else Line(SqliteBroker(Database(":memory:"), self.clock))
        self.assemble(dict.fromkeys(TOPICS, self.line), self.worker)
        assert self.engine.relay is not None
        assert self.engine.relay_chores is not None
        self.relay, self.chores = self.engine.relay, self.engine.relay_chores
        self.line.db.write_now(
            lambda tx: self.line.bind(tx).ensure([TopicSpec(name=name) for name in TOPICS])
        )
        self.sub = self.relay.subscribe("requests", "main", owner=self.worker, lease=self.lease)
        self.beat()

    def beat(self) -> None:
        until = self.clock.now() + self.lease
        self.uow.write_now(lambda tx: tx.members.heartbeat(self.worker, until))

    def other(self, worker: str = "w2") -> ApartRig:
        return ApartRig(
            self.directory, limits=self.limits, worker=worker, lease=self.lease, base=self
        )

    def assert_queued(self) -> None:
        """Check that every open event has a message in the broker or an outgoing row."""
        with_message = {
            id_
            for (id_,) in self.line.db.read_now(
                lambda tx: tx.execute(
                    "SELECT m.id FROM queue q JOIN message m ON m.seq=q.seq"
                ).fetchall()
            )
        }
        noted = {id_ for (id_,) in self.sql("SELECT id FROM outgoing")}
        assert {
            id_ for (id_,) in self.sql(f"SELECT id FROM event WHERE status IN {OPEN}")
        } <= with_message | noted

    async def later(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.beat()
        await self.chores.publish_due()
        await self.chores.heartbeat()
        await self.maintenance.release_due()


@pytest.fixture
def rig(tmp_path: Path) -> ApartRig:
    return ApartRig(tmp_path)


async def test_an_accepted_event_is_published_and_its_outgoing_row_is_deleted(
    rig: ApartRig,
) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.conclude(begun, "success", body=b"x")
    assert rig.status("e1") == "success"
    await rig.later(2.0)
    assert rig.sql("SELECT count(*) FROM outgoing") == [(0,)]
    await rig.later(100.0)
    assert await rig.receive() == []


async def test_outgoing_rows_are_published_when_the_broker_is_available_again(
    rig: ApartRig,
) -> None:
    rig.line.down = True
    assert await rig.accept("e1", "e2", url="https://a.test/1") == [Accepted.NEW, Accepted.NEW]
    assert await rig.receive() == []
    rig.line.down = False
    await rig.later(RESERVATION + 1.0)
    assert sorted(d.id for d in await rig.receive()) == ["e1", "e2"]


async def test_a_message_that_is_too_large_makes_only_its_own_event_dead(rig: ApartRig) -> None:
    rig.line.caps = msgspec.structs.replace(rig.line.caps, max_body=2000)
    await rig.accept("large", data={"note": "x" * 3000})
    await rig.accept("small", url=URL + "?small")
    await rig.later(1)
    assert rig.status("large", "small") == "dead pending"
    ((reason, envelope),) = rig.sql("SELECT reason, envelope FROM dead")
    assert "more than the broker takes" in reason
    assert decode_event(envelope).data == {"note": "x" * 3000}
    await rig.later(RESERVATION + 1)
    assert rig.sql("SELECT id FROM outgoing") == []
    assert_books_balance(rig)


async def test_another_worker_publishes_the_rows_of_a_killed_worker(rig: ApartRig) -> None:
    rig.line.down = True
    await rig.accept("e1")
    rig.line.down = False
    other = rig.other()
    await other.later(RESERVATION + 1.0)
    assert [d.id for d in await other.receive()] == ["e1"]


async def test_an_unknown_publish_result_makes_a_copy_that_changes_nothing(rig: ApartRig) -> None:
    rig.line.deaf = True
    await rig.accept("e1")
    rig.line.deaf = False
    await rig.later(RESERVATION + 1.0)
    first, copy = await rig.receive()
    begun = await rig.begin(await rig.admit([first]))
    assert await rig.admit([copy]) == [], "a live worker processes the event"
    assert await rig.conclude(begun[0], "success", body=b"x")
    await rig.later(3.0)
    assert await rig.start() == []
    await rig.later(100.0)
    assert await rig.receive() == [], "the copy was acked when its event had ended"
    assert rig.row("e1")["starts"] == 1


async def test_two_copies_in_one_batch_start_the_event_once(rig: ApartRig) -> None:
    rig.line.deaf = True
    await rig.accept("e1")
    rig.line.deaf = False
    await rig.later(RESERVATION + 1.0)
    held = await rig.admit()
    assert len(held) == 2
    assert len(await rig.begin(held[:1])) == 1
    assert await rig.begin(held[1:]) == []
    assert rig.row("e1")["starts"] == 1


async def test_a_settle_that_did_not_reach_the_broker_is_repeated(rig: ApartRig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    rig.line.cut_settles = True
    assert await rig.conclude(begun, "success", body=b"x")
    rig.line.cut_settles = False
    await rig.later(2.0)
    stats = await rig.relay.stats("requests", "main")
    assert (stats.ready, stats.in_flight, stats.delayed) == (0, 0, 0)


async def test_a_redelivered_message_of_an_ended_event_is_acked_and_not_started(
    rig: ApartRig,
) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    rig.line.cut_settles = True
    assert await rig.conclude(begun, "success", body=b"x")  # then the worker is killed
    rig.line.cut_settles = False
    other = rig.other()
    await other.later(rig.lease + 1.0)
    (back,) = await other.receive()
    assert await other.admit([back]) == []
    await other.later(rig.lease + 1.0)
    assert await other.receive() == []
    assert rig.row("e1")["starts"] == 1


async def test_a_retry_that_did_not_reach_the_broker_still_waits_until_it_is_due(
    rig: ApartRig,
) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    rig.line.cut_settles = True
    assert await rig.conclude(begun, "retry", until=rig.clock.now() + rig.lease + 8.0, reason="503")
    rig.line.cut_settles = False
    await rig.later(rig.lease + 1.0)
    assert await rig.start() == [], "the lease expired, but the retry is not due"
    await rig.later(8.0)
    assert len(await rig.start("e1")) == 1


async def test_a_long_delay_is_kept_in_the_ledger_and_not_in_the_broker(rig: ApartRig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.conclude(begun, "retry", until=rig.clock.now() + 3600.0, reason="429")
    stats = await rig.relay.stats("requests", "main")
    assert (stats.ready, stats.delayed, stats.in_flight) == (0, 0, 0)
    await rig.later(3500.0)
    assert await rig.receive() == []
    await rig.later(101.0)
    assert len(await rig.start("e1")) == 1


@pytest.mark.parametrize("priority", list(Priority))
async def test_an_event_keeps_its_priority_over_a_long_delay(
    rig: ApartRig, priority: Priority
) -> None:
    await rig.accept("e1", priority=priority)
    (begun,) = await rig.start("e1")
    await rig.conclude(begun, "park", until=rig.clock.now() + 60.0, reason="slot")
    await rig.later(61.0)
    (again,) = await rig.start("e1")
    assert again[0].priority == priority
    stored = "SELECT prio FROM queue"
    assert rig.line.db.read_now(lambda tx: tx.execute(stored).fetchall()) == [(priority,)]


async def test_a_killed_workers_event_is_started_again_after_its_heartbeat_expired(
    rig: ApartRig,
) -> None:
    await rig.accept("e1")
    await rig.start("e1")  # then the worker is killed
    other = rig.other()
    rig.clock.advance(rig.lease / 2)
    await other.later(rig.lease / 2 + 1.0)
    (begun,) = await other.start("e1")
    assert rig.row("e1")["crashes"] == 2
    assert await other.conclude(begun, "success", body=b"x")


async def test_a_worker_cannot_end_an_event_that_another_worker_started(rig: ApartRig) -> None:
    await rig.accept("e1")
    (stale,) = await rig.start("e1")
    other = rig.other()
    rig.clock.advance(rig.lease + 1.0)
    (begun,) = await other.start("e1")
    assert not await rig.conclude(stale, "dead", reason="late")
    assert await other.conclude(begun, "success", body=b"x")
    assert rig.status("e1") == "success"


async def test_messages_that_the_broker_lost_are_published_again(rig: ApartRig) -> None:
    await rig.accept("e1")
    await rig.accept("e2", url="https://other.test/2")
    await rig.line.purge("requests")
    await rig.later(3 * rig.lease)
    assert await rig.chores.recover() == 0, "one poll may see a temporary state"
    assert await rig.chores.recover() == 2
    assert sorted(d.id for d in await rig.receive()) == ["e1", "e2"]
    assert await rig.chores.recover() == 0


async def test_a_paused_topic_delivers_nothing_and_loses_nothing(rig: ApartRig) -> None:
    await rig.accept("e1")
    rig.uow.write_now(lambda tx: tx.queue.pause("requests", "by hand"))
    assert await rig.receive() == []
    assert rig.uow.snapshot(lambda tx: tx.queue.paused()) == {"requests": "by hand"}
    rig.uow.write_now(lambda tx: tx.queue.pause("requests", None))
    assert [d.id for d in await rig.receive()] == ["e1"]


@pytest.mark.parametrize("seed", range(12))
async def test_every_event_ends_once_despite_lost_answers_settles_and_workers(
    tmp_path: Path, seed: int
) -> None:
    """Answers, settles and workers are lost at random. The counters are checked after every step.
    Once the losses stop, every event ends.
    """
    dice = random.Random(seed)
    rig = ApartRig(tmp_path, lease=5.0)
    workers = [rig, rig.other("w2"), rig.other("w3")]
    ids = [f"e{i}" for i in range(30)]
    for i, id_ in enumerate(ids):
        rig.line.deaf = dice.random() < 0.2
        await rig.accept(id_, url=f"https://shop.test/{i}")
    running: list[tuple[ApartRig, Any]] = []
    for step in range(400):
        calm = step > 250
        rig.line.deaf, rig.line.cut_settles, rig.line.down = (
            not calm and dice.random() < p for p in (0.2, 0.3, 0.1)
        )
        who = dice.choice(workers)
        if not calm and dice.random() < 0.1:
            # Kill a worker. Its handlers never end, and a new worker replaces it.
            running = [(w, b) for w, b in running if w is not who]
            workers[workers.index(who)] = rig.other(f"w{step + 10}")
        elif running and dice.random() < 0.5:
            owner, begun = running.pop(dice.randrange(len(running)))
            outcome: EndOutcome = "success"
            if not calm:
                outcome = dice.choice(["success", "retry", "success", "release"])
            await owner.conclude(
                begun,
                outcome,
                body=b"x" if outcome == "success" else None,
                until=rig.clock.now() + dice.choice([0.5, 20.0]),
                charged=False,
            )
        else:
            running += [(who, b) for b in await who.begin(await who.admit(await who.receive(3)))]
        for w in workers:
            await w.later(dice.random())
        assert_books_balance(rig)
    for _ in range(60):
        for owner, begun in running:
            await owner.conclude(begun, "success", body=b"x")
        running = [(w, b) for w in workers for b in await w.start()]
        for w in workers:
            await w.later(4.0)
            await w.chores.recover()
    assert {rig.status(i) for i in ids} == {"success"}
    assert sorted(r[0] for r in rig.sql("SELECT id FROM event WHERE status='success'")) == sorted(
        ids
    )
    stats = await rig.relay.stats("requests", "main")
    assert (stats.ready, stats.in_flight, stats.delayed) == (0, 0, 0)
