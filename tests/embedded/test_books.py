"""Ledger transactions on the embedded store: order, atomicity, and counters after every step."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.brokers.sqlite import SqliteBroker
from penstock.claims.sql import SqlClaims
from penstock.engine.messages import PageMessage
from penstock.engine.settings import LifecycleSettings, SinkBinding
from penstock.errors import BadEnvelope, StoreUnavailable
from penstock.intake.accept import push
from penstock.ledgers.sql.ledger import SqlLedger
from penstock.ledgers.sql.maintenance import SqlEventMaintenance
from penstock.ledgers.sqlite import SqliteLedger
from penstock.locks import WorkerLock
from penstock.model import REMOVED, Event, Link, Record, decode_event, encode_event, page_id
from penstock.pages.segments import SegmentStore
from penstock.ports import Accepted, Admitted, Delivery, End, Out, PageMeta, Row, TopicSpec
from penstock.rules import pace
from penstock.rules.dependencies import dependencies
from penstock.rules.events import event_of
from penstock.runtime.assembly import Assembly
from penstock.stores.sqlite import Database
from penstock.testing.clock import ManualClock

URL = "https://shop.test/p/1"
OPEN = ("pending", "delayed", "in_flight", "writing")
STATES = (*OPEN, "success", "dead", "duplicate")
Held = tuple[Delivery, Event, Admitted]
Begun = tuple[Delivery, Event, Admitted, int]
Outcome = Literal["success", "retry", "park", "release", "dead", "handover", "writing"]
UNLIMITED = pace.Limits(rate=None)


class Ground:
    """Store of a rig: the embedded store. The tests of another store replace it by a subclass and
    run the same tests.
    """

    def store(self) -> Any:
        return Database(":memory:")

    def broker(self, db: Any, clock: Any) -> Any:
        return SqliteBroker(db, clock)

    def ledger(self, db: Any, clock: Any) -> SqlLedger:
        return SqliteLedger(db, clock)

    def tables(self, r: Rig) -> list[str]:
        return [
            name
            for (name,) in r.sql(
                "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'"
            )
        ]

    def columns(self, r: Rig, table: str) -> list[str]:
        return [row[1] for row in r.sql(f"PRAGMA table_info({table})")]

    def assert_queued(self, r: Rig) -> None:
        """Check that the counts of the queue tables equal the rows of the queue."""
        for gid, *noted in r.sql("SELECT id, ready, leased, delayed FROM grp"):
            found = dict(r.sql("SELECT state, count(*) FROM queue WHERE grp=? GROUP BY state", gid))
            assert noted == [found.get(state, 0) for state in range(3)]
        ready = {
            tuple(k): n for *k, n in r.sql("SELECT grp, prio, key, ready FROM keyq WHERE ready<>0")
        }
        assert ready == {
            tuple(k): n
            for *k, n in r.sql(
                "SELECT grp, prio, key, count(*) FROM queue WHERE state=0 GROUP BY grp, prio, key"
            )
        }


class Rig:
    """All parts of one worker on one store. A test calls each step of the worker. `other` returns
    a second worker on the same store.
    """

    ground: ClassVar[Ground] = Ground()

    def __init__(
        self,
        directory: Path,
        *,
        limits: pace.Limits = UNLIMITED,
        worker: str = "w1",
        lease: float = 30.0,
        base: Rig | None = None,
        **more: Any,
    ) -> None:
        self.directory, self.limits, self.lease = directory, limits, lease
        self.clock: ManualClock = base.clock if base else ManualClock()
        self.db: Any = base.db if base else self.ground.store()
        self.broker = self.ground.broker(self.db, self.clock)
        self.ledger = self.ground.ledger(self.db, self.clock)
        self.claims = SqlClaims(self.db, self.clock, limits, random.Random(1))
        self.pages = SegmentStore(self.db, directory / "pages", self.clock, writer=worker)
        self.settings: LifecycleSettings = (
            base.settings
            if base and not more
            else LifecycleSettings(sinks=(SinkBinding("out"),), **more)
        )
        self.assemble(self.broker, worker)
        self.db.write_now(
            lambda tx: self.broker.bind(tx).ensure(
                [TopicSpec(name=name) for name in ("requests", "pages", "records")]
            )
        )
        self.sub = self.broker.subscribe("requests", "main", owner=worker, lease=lease)
        self.worker = worker

    def assemble(self, broker: Any, worker: str) -> None:
        self.engine = e = Assembly(
            broker=broker,
            ledger=self.ledger,
            claims=self.claims,
            pages=self.pages,
            settings=self.settings,
            worker=worker,
            lease=self.lease,
            clock=self.clock,
        )
        self.uow, self.lifecycle, self.admission = e.uow, e.lifecycle, e.admission
        self.maintenance, self.dead_letters = e.maintenance, e.dead_letters

    def other(self, worker: str = "w2") -> Rig:
        return Rig(self.directory, limits=self.limits, worker=worker, lease=self.lease, base=self)

    def sql(self, query: str, *bindings: Any) -> list[Any]:
        found: list[Any] = self.db.read_now(lambda tx: tx.execute(query, bindings).fetchall())
        return found

    def row(self, event_id: str) -> dict[str, Any]:
        return dict(
            zip(
                self.ground.columns(self, "event"),
                self.sql("SELECT * FROM event WHERE id=?", event_id)[0],
                strict=True,
            )
        )

    def status(self, *ids: str) -> str:
        return " ".join(self.row(i)["status"] for i in ids)

    def count(self, name: str) -> int:
        return int(sum(n for (n,) in self.sql("SELECT n FROM counter WHERE name=?", name)))

    async def accept(self, *ids: str, url: str = URL, **more: Any) -> list[Accepted]:
        answers = await self.lifecycle.accept(
            [msgspec.structs.replace(event_of(url, id_=i), **more) for i in ids]
        )
        assert_books_balance(self)
        return answers

    async def receive(self, limit: int = 100) -> list[Delivery]:
        return list(await self.sub.receive(limit, 0.0))

    async def admit(
        self,
        deliveries: Sequence[Delivery] | None = None,
        *,
        fetches: bool = True,
        event: Event | None = None,
    ) -> list[Held]:
        """Admit deliveries, and return those with the verdict `go`."""
        got = await self.receive() if deliveries is None else deliveries
        pairs: list[tuple[Delivery, Event | BadEnvelope]] = []
        for d in got:
            try:
                pairs.append((d, event or decode_event(d.body)))
            except BadEnvelope as e:
                pairs.append((d, e))
        answers = await self.admission.admit(pairs, fetches=fetches)
        assert_books_balance(self)
        return [
            (d, e, a)
            for (d, e), a in zip(pairs, answers, strict=True)
            if a.verdict == "go" and isinstance(e, Event)
        ]

    async def begin(self, held: Sequence[Held], *, writing: bool = False) -> list[Begun]:
        """Record starts, and return the deliveries that were started."""
        fences = await self.admission.begin(
            held, asks=[a.slot > 0 and not a.page for _, _, a in held], writing=writing
        )
        assert_books_balance(self)
        return [(*h, fence) for h, fence in zip(held, fences, strict=True) if fence is not None]

    async def start(self, *ids: str) -> list[Begun]:
        """Receive, admit and start deliveries."""
        begun = await self.begin(await self.admit())
        if ids:
            assert [e.id for _, e, _, _ in begun] == list(ids)
        return begun

    async def conclude(
        self, begun: Begun, outcome: Outcome, *, body: bytes | None = None, **more: Any
    ) -> bool:
        d, e, a, fence = begun
        bodies = []
        if body is not None:
            more["meta"] = PageMeta(
                page=page_id(body),
                url=e.url,
                status=200,
                headers={"etag": "x"},
                fetched_at=self.clock.now(),
                size=len(body),
            )
            bodies.append((page_id(body), body))
        more.setdefault("extractors", "product@1")
        end = End(
            event=e,
            delivery=d,
            fence=fence,
            row=a.row,
            outcome=outcome,
            restarted=a.starts > 0,
            **more,
        )
        (answer,) = await self.lifecycle.conclude([end], bodies)
        assert_books_balance(self)
        return answer

    async def succeed(
        self,
        begun: Begun,
        *records: Record,
        body: bytes = b"page",
        links: Iterable[str] = (),
        **more: Any,
    ) -> bool:
        found = [Link(url=url, extractor="product") for url in links]
        return await self.conclude(
            begun, "success", body=body, records=records, links=found, **more
        )

    async def die(self, begun: Begun, reason: str = "HTTP 404") -> bool:
        return await self.conclude(
            begun,
            "dead",
            reason=reason,
            error_class="permanent",
            stage="fetch",
            fingerprint="f",
            response_status=404,
        )

    def assert_queued(self) -> None:
        self.ground.assert_queued(self)
        queued = "SELECT m.id FROM queue q JOIN message m ON m.seq=q.seq"
        assert (
            self.sql(f"SELECT id FROM event WHERE status IN {OPEN} AND id NOT IN ({queued})") == []
        ), "every open event needs a message that will be delivered"

    def lines(self) -> list[dict[str, Any]]:
        return [
            msgspec.json.decode(body) for (body,) in self.sql("SELECT body FROM outbox ORDER BY n")
        ]


def record(key: str = "a", price: int = 1, index: int = 0) -> Record:
    fields = msgspec.json.encode({"sku": key, "price": price})
    return Record(
        extractor="product",
        version=1,
        key=key,
        index=index,
        fields=fields,
        hash=page_id(fields).encode(),
    )


def assert_books_balance(r: Rig) -> None:
    """Check I10: every counter equals the number of its rows, and every open event has a message
    that will be delivered.
    """
    counters = {
        (t, s): n for t, s, n in r.sql("SELECT topic, name, n FROM counter") if s in STATES and n
    }
    assert counters == {
        (t, s): n
        for t, s, n in r.sql("SELECT topic, status, count(*) FROM event GROUP BY topic, status")
    }
    r.assert_queued()
    assert r.sql("SELECT id FROM event WHERE waits_for IS NOT NULL AND status<>'delayed'") == []
    assert r.sql("SELECT id FROM event WHERE status='duplicate' AND duplicate_of IS NULL") == []
    assert (
        r.sql("SELECT id FROM event WHERE status NOT IN ('duplicate') AND duplicate_of IS NOT NULL")
        == []
    )
    assert (
        r.sql("SELECT d.event FROM dead d JOIN event e ON e.id=d.event WHERE e.status<>'dead'")
        == []
    ), "every dead letter belongs to a dead event"
    for sink, next_, flushed in r.sql("SELECT id, next, flushed FROM sink"):
        assert [n for (n,) in r.sql("SELECT n FROM outbox WHERE sink=? ORDER BY n", sink)] == list(
            range(flushed + 1, next_)
        ), "outbox numbers have no gap after the flushed row"


async def changes(rig: Rig) -> list[tuple[int, bytes]]:
    return await rig.uow.read(lambda tx: tx.outbox.changes(10))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


# -- intake ----------------------------------------------------------------------------------------


async def test_an_end_whose_start_was_lost_is_refused_and_its_message_is_released(rig: Rig) -> None:
    """A crash of the database server may lose a commit that was not synced. The worker still runs
    the handler that it started.
    """
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    rig.db.write_now(
        lambda tx: tx.execute(
            "UPDATE event SET status='pending', starts=0, crashes=0, fence=0, worker=NULL "
            "WHERE id='e1'"
        )
    )
    rig.db.write_now(
        lambda tx: tx.execute(
            "UPDATE counter SET n=CASE name WHEN 'pending' THEN 1 ELSE 0 END WHERE topic='requests'"
        )
    )
    assert not await rig.conclude(begun, "success", body=b"x")
    assert rig.status("e1") == "pending"
    (again,) = await rig.start("e1")
    assert await rig.conclude(again, "success", body=b"x")


async def test_accepting_the_same_id_twice_creates_one_event(rig: Rig) -> None:
    assert await rig.accept("e1", "e1") == ["new", "known"]
    assert await rig.accept("e1", "e2", url=URL + "0") == ["known", "new"]
    assert len(await rig.receive()) == 2
    assert rig.count("pending") == 2


async def test_an_ended_event_is_still_known_and_not_queued_again(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start()
    await rig.succeed(begun)
    assert await rig.accept("e1") == ["known"]
    assert await rig.receive() == []


async def test_a_full_pipeline_answers_full_until_an_event_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_pending=2)
    assert await rig.accept("e1", "e1", "e2", "e3", url=URL) == ["new", "known", "new", "full"]
    first, second = await rig.admit()
    assert await rig.accept("e3", url=URL + "3") == ["full"]
    (begun,) = await rig.begin([first])
    await rig.succeed(begun)
    assert await rig.accept("e3", url=URL + "3") == ["new"]
    assert rig.status("e1", "e2", "e3") == "success pending pending"
    assert second[1].id == "e2"


async def test_the_cursor_moves_only_if_no_event_of_the_batch_was_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_pending=1)

    async def moved(*ids: str, to: bytes) -> bytes | None:
        await rig.lifecycle.accept([event_of(URL, id_=i) for i in ids], cursor=("feed", to))
        return await rig.uow.read(lambda tx: tx.sources.cursor("feed"))

    assert await moved("e1", to=b"1") == b"1"
    assert await moved("e1", "e2", to=b"2") == b"1"
    assert await moved("e1", to=b"3") == b"3", (
        "a known event was accepted before and is not refused"
    )
    assert await moved(to=b"4") == b"4"


async def test_push_waits_while_the_queue_is_full_and_refuses_a_bad_url(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_pending=2)
    pushing = asyncio.ensure_future(
        push(rig.lifecycle, [URL + str(i) for i in range(3)] + ["mailto:x"], clock=rig.clock)
    )
    await rig.clock.elapse(1.0)
    assert not pushing.done()
    for begun in await rig.start():
        await rig.succeed(begun)
    await rig.clock.elapse(1.0)
    result = await pushing
    assert (result.new, [url for url, _ in result.refused]) == (3, ["mailto:x"])
    more = [event_of(URL + name, id_=name) for name in ("a", "b")]
    assert await rig.lifecycle.accept(more) == [Accepted.NEW, Accepted.FULL]


async def test_an_event_that_bypassed_intake_enters_the_ledger_at_admission(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.succeed(begun)
    rig.clock.advance(5.0)
    await rig.broker.publish(
        [
            Out(
                topic="requests",
                id="x1",
                key="shop.test",
                body=encode_event(event_of(URL, id_="x1")),
            )
        ]
    )
    assert await rig.admit() == []
    assert rig.status("x1") == "delayed", (
        "the event arrived after the GET, so the page may have changed"
    )
    assert rig.row("x1")["accepted_at"] == rig.clock.now()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"{}",
        b'{"specversion":"1.0"}',
        b"\xff\xfe",
        encode_event(event_of(URL, id_="e"))[:-1],
    ],
)
async def test_an_unreadable_envelope_becomes_a_dead_letter_and_is_not_redelivered(
    rig: Rig, body: bytes
) -> None:
    await rig.broker.publish(
        [Out(topic="requests", id="x", key="k", body=body, headers={"a": "b"})]
    )
    assert await rig.admit() == []
    ((kept, headers, stage, reason),) = rig.sql("SELECT envelope, headers, stage, reason FROM dead")
    assert (kept, headers, stage) == (body, '{"a":"b"}', "intake")
    assert reason
    rig.clock.advance(100.0)
    assert await rig.receive() == []
    assert rig.count("unreadable") == 1
    ((letter,),) = rig.sql("SELECT event FROM dead")
    assert await rig.dead_letters.redrive([letter]) == 0, "the ledger has no event to redrive"
    assert await rig.dead_letters.drop([letter]) == 1


# -- the usual path --------------------------------------------------------------------------------


async def test_a_successful_event_is_recorded_in_its_row_history_outbox_and_page(rig: Rig) -> None:
    await rig.accept("e1")
    accepted = rig.clock.now()
    rig.clock.advance(1.0)
    (held,) = await rig.admit()
    assert (held[2].starts, held[2].attempts, held[2].crashes, held[2].baseline, held[2].page) == (
        0,
        0,
        0,
        None,
        None,
    )
    rig.clock.advance(1.0)
    (begun,) = await rig.begin([held])
    assert rig.row("e1") | {
        "status": "in_flight",
        "starts": 1,
        "crashes": 1,
        "worker": "w1",
        "dispatched_at": accepted + 2,
    } == rig.row("e1")
    rig.clock.advance(1.0)
    assert await rig.succeed(
        begun,
        record("a"),
        record("b", index=1),
        body=b"<html>",
        response_status=200,
        response_hash="h",
    )
    wanted = {
        "status": "success",
        "finished_at": accepted + 3,
        "crashes": 0,
        "attempts": 0,
        "response_status": 200,
        "extractors": "product@1",
    }
    assert rig.row("e1") | wanted == rig.row("e1")
    assert [s for (s,) in rig.sql("SELECT status FROM history ORDER BY at")] == [
        "pending",
        "in_flight",
        "success",
    ]
    assert [
        (line["sku"], line["_penstock"]["event_id"], line["_penstock"]["key"])
        for line in rig.lines()
    ] == [("a", "e1", "a"), ("b", "e1", "b")]
    assert await rig.pages.get(page_id(b"<html>")) == b"<html>"
    rig.clock.advance(1000.0)
    assert await rig.receive() == []


async def test_a_charged_retry_costs_an_attempt_and_a_release_or_park_does_not(rig: Rig) -> None:
    await rig.accept("e1")
    steps: list[tuple[Outcome, dict[str, Any], int]] = [
        ("retry", {"until": rig.clock.now() + 5, "reason": "HTTP 502"}, 1),
        ("park", {"until": rig.clock.now() + 20}, 1),
        ("release", {}, 1),
        ("retry", {"until": rig.clock.now() + 40, "charged": False}, 1),
        ("retry", {"until": rig.clock.now() + 60}, 2),
    ]
    for outcome, more, attempts in steps:
        (begun,) = await rig.start()
        await rig.conclude(begun, outcome, **more)
        assert rig.status("e1") == ("pending" if outcome == "release" else "delayed")
        if until := more.get("until"):
            assert await rig.receive() == []
            rig.clock.advance(float(until) - rig.clock.now())
            await rig.maintenance.release_due()
            assert rig.status("e1") == "pending"
        assert rig.row("e1")["attempts"] == attempts
    assert rig.row("e1") | {"starts": 5, "crashes": 0} == rig.row("e1")
    assert (await rig.admit())[0][2].attempts == 2


async def test_an_event_with_a_stored_page_is_admitted_with_the_page_and_no_slot(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start()
    await rig.conclude(begun, "retry", body=b"<html>", until=rig.clock.now() + 1)
    rig.clock.advance(2.0)
    (held,) = await rig.admit()
    assert held[2].page == page_id(b"<html>")
    assert msgspec.msgpack.decode(held[2].page_meta, type=PageMeta).size == 6
    assert held[2].slot == 0.0, "no slot of the host is reserved"


async def test_a_handover_continues_an_open_event_in_the_next_topic(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start()
    await rig.conclude(
        begun, "handover", body=b"x", publish=[Out(topic="pages", id="e1", key="k", body=b"page")]
    )
    assert rig.status("e1") == "pending"
    assert await rig.receive() == []
    (d,) = await rig.broker.subscribe("pages", "main", owner="w1", lease=30.0).receive(5, 0.0)
    (held,) = await rig.admit([d], fetches=False, event=begun[1])
    (again,) = await rig.begin([held])
    await rig.conclude(
        again, "writing", publish=[Out(topic="records", id="e1", key="k", body=b"rows")]
    )
    assert rig.status("e1") == "writing"
    (d,) = await rig.broker.subscribe("records", "main", owner="w1", lease=30.0).receive(5, 0.0)
    (held,) = await rig.admit([d], fetches=False, event=begun[1])
    (last,) = await rig.begin([held], writing=True)
    assert rig.status("e1") == "writing"
    await rig.conclude(last, "success", was_writing=True)
    assert rig.status("e1") == "success"


async def test_a_handover_to_a_full_topic_raises_and_the_event_stays_in_flight(rig: Rig) -> None:
    await rig.broker.ensure([TopicSpec(name="pages", max_depth=1)])
    await rig.accept("e1")
    await rig.accept("e2", url=URL + "2")
    first, second = await rig.start()
    await rig.conclude(
        first, "handover", publish=[Out(topic="pages", id=first[1].id, key="k", body=b"")]
    )
    with pytest.raises(StoreUnavailable):
        await rig.conclude(
            second, "handover", publish=[Out(topic="pages", id=second[1].id, key="k", body=b"")]
        )
    assert_books_balance(rig)
    assert rig.status(second[1].id) == "in_flight"


# -- fencing and crashes ---------------------------------------------------------------------------


async def test_reclaim_releases_the_events_of_a_killed_worker_and_counts_its_starts(
    rig: Rig, tmp_path: Path
) -> None:
    await rig.accept("e1")
    await rig.accept("e2", url=URL + "2")
    first, _ = await rig.admit()
    await rig.begin([first])
    with WorkerSign(tmp_path, "w1"):
        assert await rig.maintenance.reclaim(tmp_path) == []
    (tmp_path / "w1.alive").write_text("")  # a killed process leaves this file
    survivor = rig.other()
    assert await survivor.maintenance.reclaim(tmp_path) == ["w1"]
    assert_books_balance(rig)
    assert await survivor.maintenance.reclaim(tmp_path) == []
    held = {e.id: a for _, e, a in await survivor.admit()}
    assert (held["e1"].starts, held["e1"].crashes, held["e2"].starts, held["e2"].crashes) == (
        1,
        1,
        0,
        0,
    ), "an event that was not started is not charged"


class WorkerSign(WorkerLock):
    def __enter__(self) -> None:
        assert self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.parametrize(
    "outcome", ["success", "retry", "park", "release", "dead", "handover", "writing"]
)
async def test_a_worker_whose_lease_expired_cannot_end_the_event(
    rig: Rig, outcome: Outcome
) -> None:
    await rig.accept("e1")
    (old,) = await rig.start()
    rig.clock.advance(31.0)
    (new,) = await rig.other().start()
    before = _everything(rig)
    assert not await rig.conclude(
        old,
        outcome,
        reason="late",
        until=rig.clock.now() + 5,
        records=[record()],
        links=[Link(url=URL + "9", extractor="x")],
    )
    assert _everything(rig) == before
    assert await rig.succeed(new, record())
    assert len(rig.lines()) == 1


@pytest.mark.parametrize("outcome", ["success", "retry", "dead", "release"])
async def test_a_worker_whose_lease_expired_before_the_start_cannot_start(
    rig: Rig, outcome: Outcome
) -> None:
    await rig.accept("e1")
    held = await rig.admit()
    rig.clock.advance(31.0)
    other = rig.other()
    (new,) = await other.start()
    before = _everything(rig)
    assert await rig.begin(held) == []
    assert _everything(rig) == before
    assert await other.conclude(new, outcome, until=rig.clock.now() + 5)


async def test_a_late_admission_does_not_delay_an_event_that_another_worker_runs(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, limits=pace.Limits(rate=0.01, jitter=0.0))
    await rig.accept("e1")
    late = await rig.receive()
    rig.clock.advance(31.0)
    other = rig.other()
    (running,) = await other.start()
    assert await rig.admit(late) == []
    assert rig.status("e1") == "in_flight"
    assert await other.succeed(running)


@pytest.mark.parametrize("outcome", ["success", "retry", "dead", "park"])
async def test_accept_admit_begin_and_conclude_may_be_repeated_after_a_lost_answer(
    rig: Rig, outcome: Outcome
) -> None:
    assert [await rig.accept("e1"), await rig.accept("e1")] == [["new"], ["known"]]
    got = await rig.receive()
    first, (held,) = await rig.admit(got), await rig.admit(got)
    assert [(e.id, a.row) for _, e, a in first] == [(held[1].id, held[2].row)]
    _, (begun,) = await rig.begin([held]), await rig.begin([held])
    more: dict[str, Any] = (
        {"records": [record()], "body": b"page"}
        if outcome == "success"
        else {"reason": "no", "until": rig.clock.now() + 5.0}
    )
    assert await rig.conclude(begun, outcome, **more)
    before = _everything(rig)
    assert not await rig.conclude(begun, outcome, **more), "the event has ended already"
    assert _everything(rig) == before
    assert len(rig.lines()) == (outcome == "success")
    assert rig.row("e1")["attempts"] == (outcome in ("retry", "dead"))
    assert rig.row("e1")["crashes"] == 1, "the repeated start counts as one crashed start"


async def test_two_messages_of_one_event_end_it_once(rig: Rig) -> None:
    await rig.accept("e1")
    await rig.broker.publish(
        [
            Out(
                topic="requests",
                id="e1",
                key="shop.test",
                body=encode_event(event_of(URL, id_="e1")),
            )
        ]
    )
    first, second = await rig.start()
    assert not await rig.succeed(first, record())
    assert await rig.succeed(second, record())
    assert rig.status("e1") == "success"
    assert len(rig.lines()) == 1
    assert await rig.start() == [], "the other message was released, and its event has ended"
    assert await rig.receive() == []


async def test_an_event_that_ended_after_its_admission_is_not_started(rig: Rig) -> None:
    await rig.accept("e1")
    await rig.broker.publish(
        [
            Out(
                topic="requests",
                id="e1",
                key="shop.test",
                body=encode_event(event_of(URL, id_="e1")),
            )
        ]
    )
    first, second = await rig.admit()
    (begun,) = await rig.begin([first])
    await rig.die(begun)
    await rig.accept("e2")
    (newer,) = await rig.admit()
    assert [b[1].id for b in await rig.begin([newer, second])] == ["e2"]
    assert rig.status("e1", "e2") == "dead in_flight"


def _everything(rig: Rig) -> dict[str, list[Any]]:
    return {
        name: rig.sql(
            f"SELECT * FROM {name} ORDER BY 1, 2"
            if len(rig.ground.columns(rig, name)) > 1
            else f"SELECT * FROM {name}"
        )
        for name in rig.ground.tables(rig)
    }


# -- duplicates and freshness ----------------------------------------------------------------------


async def test_two_simultaneous_events_for_one_url_are_one_fetch_and_one_duplicate(
    rig: Rig,
) -> None:
    await rig.accept("e1", "e2")
    (begun,) = await rig.start()
    other = "e2" if begun[1].id == "e1" else "e1"
    assert rig.row(other) | {"status": "duplicate", "duplicate_of": begun[1].id} == rig.row(other)
    assert await rig.succeed(begun)
    assert await rig.receive() == []


@pytest.mark.parametrize(
    ("after", "status"),
    [
        (0.0, "duplicate"),
        (2.0, "duplicate"),
        (2.1, "delayed"),
        (59.0, "delayed"),
        (61.0, "in_flight"),
    ],
)
async def test_a_second_event_is_judged_by_its_delay_after_the_get(
    rig: Rig, after: float, status: str
) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.succeed(begun)
    rig.clock.advance(after)
    await rig.accept("e2")
    await rig.start()
    assert rig.status("e2") == status


async def test_the_trailing_event_waits_for_the_window_and_becomes_the_next_owner(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.succeed(begun)
    rig.clock.advance(10.0)
    await rig.accept("e2", "e3")
    assert await rig.start() == []
    assert {rig.status("e2"), rig.status("e3")} == {"delayed", "duplicate"}
    trailing, spare = ("e2", "e3") if rig.status("e2") == "delayed" else ("e3", "e2")
    assert rig.row(spare)["duplicate_of"] == trailing
    rig.clock.advance(49.9)
    assert await rig.receive() == []
    rig.clock.advance(0.2)
    (next_,) = await rig.start(trailing)
    rig.clock.advance(1.0)
    await rig.accept("e4")
    await rig.start()
    assert rig.row("e4")["duplicate_of"] == trailing
    assert await rig.succeed(next_)


async def test_the_trailing_event_waits_until_a_slow_owner_has_ended(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    rig.clock.advance(10.0)
    await rig.accept("e2")
    await rig.start()
    for _ in range(8):
        rig.clock.advance(10.0)
        await rig.sub.extend([begun[0]], 30.0)
        assert await rig.start() == []
    assert rig.status("e1", "e2") == "in_flight delayed"
    await rig.succeed(begun)
    rig.clock.advance(2.0)
    await rig.start("e2")


async def test_an_event_that_arrives_while_its_owner_waits_for_a_retry_is_a_duplicate(
    rig: Rig,
) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.conclude(begun, "retry", until=rig.clock.now() + 30)
    rig.clock.advance(10.0)
    await rig.accept("e2")
    assert await rig.start() == []
    assert rig.row("e2")["duplicate_of"] == "e1"


async def test_newer_data_is_not_hidden_behind_a_duplicate_with_the_data_of_the_owner(
    rig: Rig,
) -> None:
    await rig.accept("e1", data={"price": 10})
    (begun,) = await rig.start("e1")
    rig.clock.advance(10.0)
    await rig.accept("e2", data={"price": 10})
    assert await rig.start() == []
    await rig.accept("e3", data={"price": 12})
    assert await rig.start() == []
    assert (rig.status("e2"), rig.row("e3")["duplicate_of"]) == ("delayed", "e2")
    await rig.conclude(begun, "retry", until=rig.clock.now() + 60)
    rig.clock.advance(55.0)
    assert await rig.start() == []
    assert rig.row("e2")["duplicate_of"] == "e1"
    rig.clock.advance(10.0)
    (begun,) = await rig.start("e1")
    text = dependencies("product@1#x", url=URL, requested_url=URL, data=begun[1].data)
    await rig.succeed(begun, extractors=text)
    assert rig.status("e2", "e3") == "duplicate pending"


async def test_drop_mode_makes_a_later_event_within_the_window_a_duplicate(tmp_path: Path) -> None:
    rig = Rig(tmp_path, drop=True, window=3600.0)
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.succeed(begun)
    rig.clock.advance(3000.0)
    await rig.accept("e2")
    assert await rig.start() == []
    assert rig.row("e2")["duplicate_of"] == "e1"
    rig.clock.advance(601.0)
    await rig.accept("e3")
    await rig.start("e3")


async def test_an_event_may_set_its_own_window_and_force_ignores_the_window(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.succeed(begun)
    rig.clock.advance(5.0)
    await rig.accept("e2", window=4.0)
    (second,) = await rig.start("e2")
    await rig.accept("e3", force=True)
    (third,) = await rig.start("e3")
    assert third[2].baseline is None
    await rig.succeed(second)
    await rig.succeed(third)


async def test_a_dead_owners_oldest_duplicate_is_promoted_once_with_a_new_budget(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.accept("e2", "e3")
    await rig.start()
    assert rig.status("e2", "e3") == "duplicate duplicate"
    await rig.die(begun)
    assert rig.status("e1", "e2", "e3") == "dead pending duplicate"
    (second,) = await rig.start("e2")
    assert second[2].attempts == 0
    await rig.die(second)
    assert rig.status("e1", "e2", "e3") == "dead dead duplicate", (
        "only one duplicate is promoted, because the page may be missing for good"
    )
    assert await rig.receive() == []


@pytest.mark.parametrize("end", ["success", "retry", "dead", "purge"])
async def test_the_progress_of_a_redirect_is_kept_until_the_next_attempt_ends(
    rig: Rig, end: str
) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    assert begun[2].progress == b""
    await rig.conclude(begun, "park", until=rig.clock.now() + 60.0, progress=b"at b")
    rig.clock.advance(61.0)
    (begun,) = await rig.start("e1")
    assert begun[2].progress == b"at b"
    await rig.conclude(begun, "release", had_progress=True)
    (begun,) = await rig.start("e1")
    assert begun[2].progress == b"at b", "a shutdown does not lose it"
    await rig.conclude(
        begun, "park", until=rig.clock.now() + 60.0, progress=b"at c", had_progress=True
    )
    if end == "purge":
        await rig.dead_letters.purge("requests", "purged by hand")
    else:
        rig.clock.advance(61.0)
        (begun,) = await rig.start("e1")
        assert begun[2].progress == b"at c"
        more = {"body": b"page"} if end == "success" else {}
        await rig.conclude(begun, end, had_progress=True, **more)  # type: ignore[arg-type]
    assert rig.sql("SELECT * FROM redirect") == []


async def test_a_redriven_event_follows_its_redirects_from_the_beginning(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.conclude(begun, "park", until=rig.clock.now(), progress=b"at b")
    (begun,) = await rig.start("e1")
    await rig.die(begun)  # as if the progress had not been deleted
    assert await rig.dead_letters.redrive(["e1"]) == 1
    (begun,) = await rig.start("e1")
    assert begun[2].progress == b""


async def test_a_dead_owner_releases_its_claim_on_the_url(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.die(begun)
    await rig.accept("e2")
    await rig.start("e2")


async def test_the_baseline_is_the_last_success_even_after_a_dead_owner(rig: Rig) -> None:
    for i, ends in enumerate(("success", "dead", "")):
        await rig.accept(f"e{i}")
        (begun,) = await rig.start(f"e{i}")
        if ends == "success":
            await rig.succeed(begun, body=b"first")
        elif ends == "dead":
            assert begun[2].baseline is not None
            await rig.die(begun)
        rig.clock.advance(100.0)
    assert begun[2].baseline is not None
    assert (begun[2].baseline.page, begun[2].baseline.etag, begun[2].baseline.extractors) == (
        page_id(b"first"),
        "x",
        "product@1",
    )


# -- followed links --------------------------------------------------------------------------------


async def test_links_become_events_with_the_success_of_their_parent_or_are_counted(
    rig: Rig,
) -> None:
    await rig.accept("e1", trace="tr")
    (begun,) = await rig.start("e1")
    await rig.succeed(
        begun,
        links=[
            URL + "2",
            URL + "2#top",
            URL,
            "mailto:x",
            f"https://{'a' * 6000}.shop.test/",
            "https://else.where.test/",
            "https://www.shop.test/p/3",
        ],
    )
    assert {
        name: rig.count(name)
        for name in (
            "followed",
            "followed_seen",
            "followed_fresh",
            "followed_bad",
            "followed_offsite",
        )
    } == {
        "followed": 2,
        "followed_seen": 1,
        "followed_fresh": 1,
        "followed_bad": 2,
        "followed_offsite": 1,
    }
    children = [decode_event(d.body) for d in await rig.receive()]
    assert {(c.url, c.depth, c.parent, c.trace, c.source) for c in children} == {
        (URL + "2", 1, "e1", "tr", "follow:product"),
        ("https://www.shop.test/p/3", 1, "e1", "tr", "follow:product"),
    }


async def test_a_replayed_parent_creates_the_same_child_ids(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.succeed(begun, links=[URL + "2"])
    rig.clock.advance(2 * 86400.0)
    (first,) = rig.sql("SELECT id FROM event WHERE id<>'e1'")
    rig.db.write_now(lambda tx: tx.execute("DELETE FROM seen"))
    rig.db.write_now(lambda tx: tx.execute("DELETE FROM claim"))
    await rig.accept("e9", url=URL + "9")
    ((d, e, a, fence),) = [b for b in await rig.start() if b[1].id == "e9"]
    await rig.succeed(
        (d, msgspec.structs.replace(e, id="e1", url=URL), a, fence), links=[URL + "2"]
    )
    assert rig.sql("SELECT id FROM event WHERE id NOT IN ('e1','e9')") == [first]


async def test_links_are_not_followed_beyond_the_configured_depth(tmp_path: Path) -> None:
    rig = Rig(tmp_path, follow_depth=2)
    await rig.accept("e1")
    for i in range(2, 5):
        for begun in await rig.start():
            await rig.succeed(begun, links=[URL + str(i)])
    assert sorted(url for (url,) in rig.sql("SELECT url FROM event")) == [URL, URL + "2", URL + "3"]
    assert rig.count("followed_too_deep") == 1


async def test_a_link_to_a_url_accepted_within_a_day_is_counted_and_not_followed(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start()
    await rig.succeed(begun)
    await rig.accept("p1", url=URL + "0")
    (parent,) = await rig.start()
    rig.clock.advance(20.0)
    await rig.accept("waits", url=URL + "7")
    await rig.succeed(parent, links=[URL, URL + "7"])
    assert (rig.count("followed"), rig.count("followed_fresh")) == (0, 2)
    rig.clock.advance(86401.0)
    await rig.accept("p2", url=URL + "1")
    for begun in await rig.start():
        if begun[1].id == "p2":
            await rig.succeed(begun, links=[URL])
    assert rig.count("followed") == 1


async def test_a_link_with_a_window_of_zero_is_always_followed(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start()
    await rig.succeed(begun)
    rig.clock.advance(5.0)
    await rig.accept("p1", url=URL + "0")
    (parent,) = await rig.start()
    await rig.conclude(parent, "success", links=[Link(url=URL, extractor="x", window=0.0)])
    assert rig.count("followed") == 1


async def test_links_to_other_domains_are_followed_if_configured(tmp_path: Path) -> None:
    rig = Rig(tmp_path, follow_same_domain=False)
    await rig.accept("e1")
    (begun,) = await rig.start()
    await rig.succeed(begun, links=["https://else.where.test/"])
    assert rig.count("followed") == 1


# -- records and changes ---------------------------------------------------------------------------


async def _scrape(rig: Rig, event_id: str, *records: Record, url: str = URL, **more: Any) -> None:
    await rig.accept(event_id, url=url, **more)
    (begun,) = await rig.start(event_id)
    await rig.succeed(begun, *records)
    rig.clock.advance(100.0)


async def test_unchanged_records_are_emitted_if_forced_or_configured(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await _scrape(rig, "e1", record("a"))
    await _scrape(rig, "e2", record("a"), force=True)
    assert len(rig.lines()) == 2
    loud = Rig(tmp_path / "2", emit_unchanged=True)
    await _scrape(loud, "e1", record("a"))
    await _scrape(loud, "e2", record("a"))
    assert len(loud.lines()) == 2


async def test_a_removal_is_a_change_that_keeps_only_the_key_field(tmp_path: Path) -> None:
    rig = Rig(tmp_path, hooks=True)
    await _scrape(rig, "e1", record("a", 1))
    await _scrape(
        rig,
        "e2",
        msgspec.structs.replace(record("a"), hash=REMOVED, deleted=True, fields=b'{"sku":"a"}'),
    )
    ((_, body),) = await changes(rig)
    change = msgspec.msgpack.decode(body)
    assert (change["new"], change["fields"]) == ({"sku": "a"}, {"price": [1, None]})


async def test_a_change_waits_for_its_hook_with_the_old_and_the_new_values(tmp_path: Path) -> None:
    rig = Rig(tmp_path, hooks=True)
    await _scrape(rig, "e1", record("a", 1))
    await _scrape(rig, "e2", record("a", 2))
    ((n, body),) = await changes(rig)
    change = msgspec.msgpack.decode(body)
    assert (change["event_id"], change["key"], change["fields"]) == ("e2", "a", {"price": [1, 2]})
    await rig.uow.write(lambda tx: tx.outbox.mark_hooks_run([], [("boom", n)]))
    assert len(await changes(rig)) == 1, "a hook that failed runs again"
    await rig.uow.write(lambda tx: tx.outbox.mark_hooks_run([n], []))
    assert await changes(rig) == []


async def test_a_sink_receives_only_the_extractors_of_its_binding(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    settings = msgspec.structs.replace(
        rig.settings, sinks=(SinkBinding("all"), SinkBinding("none", only=("other",)))
    )
    rig.lifecycle.settings = settings
    await _scrape(rig, "e1", record("a"))
    assert rig.sql(
        "SELECT s.name, count(o.n) FROM sink s LEFT JOIN outbox o ON o.sink=s.id GROUP BY s.id"
    ) == [("all", 1)]


async def test_a_table_sink_that_raises_rolls_back_the_whole_end(tmp_path: Path) -> None:
    def refuses(tx: Any, rows: Sequence[Row]) -> None:
        raise ZeroDivisionError

    rig = Rig(tmp_path)
    rig.lifecycle.settings = msgspec.structs.replace(
        rig.settings, sinks=(SinkBinding("out"), SinkBinding("table"))
    )
    rig.engine.table_sinks["table"] = refuses
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    before = _everything(rig)
    with pytest.raises(ZeroDivisionError):
        await rig.succeed(begun, record("a"), body=b"p", links=[URL + "2"])
    assert _everything(rig) == before
    rig.lifecycle.settings = rig.settings
    assert await rig.succeed(begun, record("a"), body=b"p")
    assert await rig.pages.get(page_id(b"p")) == b"p"


# -- dead letters ----------------------------------------------------------------------------------


async def test_a_redriven_dead_letter_has_a_new_budget_and_its_old_history(rig: Rig) -> None:
    await rig.accept("e1", data={"a": 1})
    (begun,) = await rig.start("e1")
    await rig.conclude(begun, "retry", until=rig.clock.now())
    (begun,) = await rig.start("e1")
    await rig.die(begun)
    ((envelope, reason, stage, kind),) = rig.sql("SELECT envelope, reason, stage, class FROM dead")
    assert (decode_event(envelope).data, reason, stage, kind) == (
        {"a": 1},
        "HTTP 404",
        "fetch",
        "permanent",
    )
    assert rig.row("e1")["attempts"] == 2
    assert (
        await rig.dead_letters.redrive(
            ["e1", "e1", "nobody"], lambda e: msgspec.structs.replace(e, priority=0)
        )
        == 1
    )
    assert_books_balance(rig)
    assert rig.sql("SELECT count(*) FROM dead") == [(0,)]
    (again,) = await rig.start("e1")
    assert (again[2].attempts, again[2].crashes, again[2].starts, again[1].priority) == (0, 0, 2, 0)
    assert await rig.succeed(again)
    assert [s for (s,) in rig.sql("SELECT DISTINCT status FROM history")].count("dead") == 1
    assert await rig.dead_letters.redrive(["e1"]) == 0


async def test_dropping_a_dead_letter_leaves_its_event_dead(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    await rig.die(begun)
    assert await rig.dead_letters.drop(["e1", "e1"]) == 1
    assert_books_balance(rig)
    assert rig.status("e1") == "dead"
    assert await rig.dead_letters.redrive(["e1"]) == 0


async def test_an_event_that_is_dead_in_a_later_stage_can_be_redriven(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    meta = PageMeta(page=page_id(b"x"), url=URL, status=200, headers={}, fetched_at=0.0, size=1)
    message = PageMessage(event=begun[0].body, page=meta).write()
    await rig.conclude(
        begun, "handover", body=b"x", publish=[Out(topic="pages", id="e1", key="k", body=message)]
    )
    (d,) = await rig.broker.subscribe("pages", "main", owner="w1", lease=30.0).receive(5, 0.0)
    (again,) = await rig.begin(await rig.admit([d], fetches=False, event=begun[1]))
    await rig.die(again, "no title")
    assert await rig.dead_letters.redrive(["e1"]) == 1
    assert_books_balance(rig)
    await rig.start("e1")


# -- slots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [1.0, 8.0, 12.0, 60.0, 600.0])
@pytest.mark.parametrize("batch", [2, 100])
async def test_all_events_of_a_slow_host_are_requested_at_its_configured_rate(
    tmp_path: Path, gap: float, batch: int
) -> None:
    """Ten events of a host with one request per `gap` seconds. All are requested, at that interval,
    with at most 25 % and 10 s of extra time.
    """
    rig = Rig(tmp_path, limits=pace.Limits(rate=1 / gap, jitter=0.1))
    for i in range(10):
        await rig.accept(f"e{i}", url=URL + str(i))
    asked: list[float] = []
    start, waiting = rig.clock.now(), []
    while len(asked) < 10 and rig.clock.now() < start + 20 * gap + 60:
        waiting += await rig.admit(list(await rig.sub.receive(batch, 0.0, per_key=batch)))
        for held in [h for h in waiting if h[2].slot <= rig.clock.now()]:
            waiting.remove(held)
            (begun,) = await rig.begin([held])
            asked.append(rig.clock.now())
            await rig.succeed(begun, body=held[1].id.encode())
        await rig.sub.extend([d for d, _, _ in waiting], 30.0)
        assert all(h[2].slot <= rig.clock.now() + 10.0 for h in waiting), (
            "an event with a later slot is delayed and not held"
        )
        rig.clock.advance(min(gap / 20, 1.0))
    assert len(asked) == 10
    assert all(b - a >= gap * 0.94 for a, b in pairwise(asked))
    assert asked[-1] - asked[0] < 9 * gap * 1.25 + 10


async def test_a_rate_limited_host_does_not_delay_another_host(tmp_path: Path) -> None:
    rig = Rig(tmp_path, limits=pace.Limits(rate=0.01, jitter=0.0))
    for i in range(20):
        await rig.accept(f"s{i}", url=f"https://slow.test/{i}")
    await rig.accept("f1", url="https://fast.test/1")
    assert {e.id for _, e, _ in await rig.admit()} >= {"f1"}


# -- retention -------------------------------------------------------------------------------------


async def test_pruning_skips_dead_and_open_events_and_keeps_the_counters(rig: Rig) -> None:
    for i in range(6):
        await rig.accept(f"e{i}", url=URL + str(i))
    begun = {b[1].id: b for b in await rig.start()}
    for i in range(3):
        await rig.die(begun[f"e{i}"])
    await rig.succeed(begun["e4"], body=b"4")
    await rig.succeed(begun["e5"], body=b"5")
    rig.clock.advance(1000.0)
    gone = [
        await rig.db.write(
            lambda tx: SqlEventMaintenance(tx, rig.ledger).prune(
                rig.clock.now() - 500, lambda key, id_: False, limit=2
            )
        )
        for _ in range(8)
    ]
    assert sum(gone) == 2, "three dead and one open event before them do not stop the pruning"
    assert [i for (i,) in rig.sql("SELECT id FROM event ORDER BY n")] == ["e0", "e1", "e2", "e3"]
    assert rig.count("success") == 2


async def test_a_page_that_another_worker_pruned_is_stored_again(rig: Rig) -> None:
    await _scrape(rig, "e1", record("a"))
    other = rig.other()
    await rig.db.write(
        lambda tx: other.pages.prune_in(
            tx, older_than=rig.clock.now() + 1, max_bytes=None, keep=lambda pages: set()
        )
    )
    assert await rig.pages.get(page_id(b"page")) is None
    await _scrape(rig, "e2", record("a"))
    assert await rig.pages.get(page_id(b"page")) == b"page"


async def test_a_failed_page_write_changes_nothing_and_the_end_can_be_repeated(rig: Rig) -> None:
    await rig.accept("e1")
    (begun,) = await rig.start("e1")
    before = _everything(rig)
    (rig.directory / "pages").write_text("a file is in the way")
    with pytest.raises(StoreUnavailable):
        await rig.succeed(begun, record("a"))
    assert _everything(rig) == before
    (rig.directory / "pages").unlink()
    assert await rig.succeed(begun, record("a"))
    assert await rig.pages.get(page_id(b"page")) == b"page"


# -- all steps in any order ------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Three workers, a few URLs, and all steps in any order. The counters are checked after each
    step. Once faults stop, every event ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        # One event loop for all steps, as in a process.
        self.loop = asyncio.new_event_loop()
        self.rig = Rig(Path(self.place.name))
        self.rigs = [self.rig, self.rig.other("w2"), self.rig.other("w3")]
        self.received: list[list[Delivery]] = [[], [], []]
        self.held: list[list[Held]] = [[], [], []]
        self.begun: list[list[Begun]] = [[], [], []]
        self.accepted = 0
        self.ended: dict[str, str] = {}
        self.redriven: set[str] = set()

    def teardown(self) -> None:
        try:
            self.settle_down()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            self.rig.db.close_now()
            self.place.cleanup()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    workers = st.integers(0, 2)

    @rule(
        url=st.integers(0, 3),
        n=st.integers(1, 2),
        force=st.sampled_from([False, False, False, True]),
        priority=st.integers(0, 2),
    )
    def accept(self, url: int, n: int, force: bool, priority: int) -> None:
        ids = [f"e{self.accepted + i}" for i in range(n)]
        self.accepted += n
        self.run(self.rig.accept(*ids, url=f"{URL}{url}", force=force, priority=priority))

    @rule(w=workers, n=st.integers(1, 5))
    def receive(self, w: int, n: int) -> None:
        self.received[w] += self.run(self.rigs[w].receive(n))

    @precondition(lambda self: any(self.received))
    @rule(w=workers)
    def admit(self, w: int) -> None:
        got, self.received[w] = self.received[w], []
        self.held[w] += self.run(self.rigs[w].admit(got))

    @precondition(lambda self: any(self.held))
    @rule(w=workers, n=st.integers(1, 4))
    def begin(self, w: int, n: int) -> None:
        some, self.held[w] = self.held[w][:n], self.held[w][n:]
        self.begun[w] += self.run(self.rigs[w].begin(some))

    @rule(w=workers, n=st.integers(1, 3))
    def start(self, w: int, n: int) -> None:
        self.receive(w, n)
        self.admit(w)
        self.begin(w, 9)

    @precondition(lambda self: any(self.begun))
    @rule(w=workers)
    def lose_the_lease_to_another(self, w: int) -> None:
        """Let a worker hang until another worker takes over its events. Then it continues."""
        self.pass_time(31.0)
        self.start((w + 1) % 3, 5)

    @precondition(lambda self: any(self.begun))
    @rule(
        which=st.integers(0, 5),
        outcome=st.sampled_from(["success", "success", "retry", "dead", "release", "park"]),
        page=st.booleans(),
    )
    def conclude(self, which: int, outcome: Outcome, page: bool) -> None:
        running = [(w, begun) for w in range(3) for begun in self.begun[w]]
        w, begun = running[which % len(running)]
        self.begun[w].remove(begun)
        now = self.rig.clock.now()
        body = b"body of " + begun[1].url.encode() if page else None
        links = [Link(url=f"{URL}{int(now) % 5}", extractor="x")] if outcome == "success" else []
        self.run(
            self.rigs[w].conclude(
                begun,
                outcome,
                body=body,
                until=now + 7,
                reason="r",
                links=links,
                records=[record(begun[1].url, int(now) % 3)],
            )
        )

    @rule(w=workers)
    def crash(self, w: int) -> None:
        """Kill a worker: its memory is lost and its lock file is free."""
        (Path(self.place.name) / f"{self.rigs[w].worker}.alive").write_text("")
        self.received[w], self.held[w], self.begun[w] = [], [], []
        self.run(self.rigs[(w + 1) % 3].maintenance.reclaim(Path(self.place.name)))

    @rule(w=workers)
    def forget(self, w: int) -> None:
        """Lose a worker without a lock file: its deliveries return when their lease expires."""
        self.received[w], self.held[w], self.begun[w] = [], [], []

    @rule(w=workers)
    def extend(self, w: int) -> None:
        alive = [*self.received[w], *(h[0] for h in self.held[w]), *(b[0] for b in self.begun[w])]
        self.run(self.rigs[w].sub.extend(alive, 30.0))

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0, 31.0, 31.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.run(self.rig.maintenance.release_due())

    @rule()
    def redrive(self) -> None:
        dead = [i for (i,) in self.rig.sql("SELECT event FROM dead ORDER BY n LIMIT 2")]
        if dead:
            assert self.run(self.rig.dead_letters.redrive(dead)) == len(dead)
            self.redriven.update(dead)

    @rule()
    def publish_again(self) -> None:
        """Publish an event again, as a sender does that received no confirmation."""
        rows = self.rig.sql(
            "SELECT v.body FROM event e JOIN envelope v ON v.event=e.n ORDER BY e.n DESC LIMIT 1"
        )
        for (body,) in rows:
            e = decode_event(body)
            self.run(
                self.rig.broker.publish(
                    [Out(topic="requests", id=e.id, key=e.key, body=body, priority=e.priority)]
                )
            )

    @invariant()
    def the_books_balance(self) -> None:
        assert_books_balance(self.rig)

    @invariant()
    def an_end_is_an_end(self) -> None:
        """Check I2: only a redrive reopens a dead event, only a dead owner a duplicate."""
        now = dict(
            self.rig.sql(
                "SELECT id, status FROM event WHERE status IN ('success','dead','duplicate')"
            )
        )
        promoted = {i for (i,) in self.rig.sql("SELECT id FROM event WHERE promoted=1")}
        for event, end in self.ended.items():
            if now.get(event) != end:
                assert (end == "duplicate" and event in promoted) or (
                    end == "dead" and event in self.redriven
                ), (event, end, now.get(event))
        self.ended, self.redriven = now, set()

    @invariant()
    def no_line_is_there_twice_and_none_is_of_a_stranger(self) -> None:
        lines = Counter(line["_penstock"]["event_id"] for line in self.rig.lines())
        successes = {i for (i,) in self.rig.sql("SELECT id FROM event WHERE status='success'")}
        assert set(lines) <= successes
        assert all(n == 1 for n in lines.values())

    def settle_down(self) -> None:
        """Check I1 and I7: once faults stop, one worker ends all events in bounded time."""
        for w in range(3):
            self.forget(w)
        for _ in range(60):
            self.rig.clock.advance(31.0)
            self.run(self.rig.maintenance.release_due())
            for begun in self.run(self.rig.start()):
                self.run(
                    self.rig.succeed(begun, record(begun[1].url, 1), body=begun[1].url.encode())
                )
            if not self.rig.sql(f"SELECT 1 FROM event WHERE status IN {OPEN} LIMIT 1"):
                break
        assert self.rig.sql(f"SELECT id, status FROM event WHERE status IN {OPEN}") == []
        self.an_end_is_an_end()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.mark.parametrize("seed", range(16))
def test_counters_and_queue_stay_consistent_over_a_long_random_walk(seed: int) -> None:
    """Run many of the same steps in a row. Hypothesis prefers short sequences, and some faults need
    a long one.
    """
    dice = random.Random(seed)
    walk = AnyOrder()
    told: list[str] = []

    def move() -> tuple[str, tuple[Any, ...]]:
        w, n = dice.randrange(3), dice.randrange(1, 5)
        moves: list[tuple[int, str, tuple[Any, ...]]] = [
            (
                6,
                "accept",
                (dice.randrange(4), dice.randrange(1, 3), dice.random() < 0.2, dice.randrange(3)),
            ),
            (6, "start", (w, n)),
            (2, "receive", (w, n)),
            (3, "admit", (w,)),
            (3, "begin", (w, n)),
            (3, "pass_time", (dice.choice([0.5, 3.0, 8.0, 31.0, 61.0]),)),
            (1, "crash", (w,)),
            (1, "forget", (w,)),
            (1, "extend", (w,)),
            (1, "redrive", ()),
            (1, "publish_again", ()),
        ]
        if any(walk.begun):
            moves.append(
                (
                    12,
                    "conclude",
                    (
                        dice.randrange(6),
                        dice.choice(["success", "retry", "dead", "release", "park"]),
                        dice.random() < 0.5,
                    ),
                )
            )
            moves.append((3, "lose_the_lease_to_another", (w,)))
        _, name, arguments = dice.choices(moves, [weight for weight, _, _ in moves])[0]
        return name, arguments

    try:
        for _ in range(120):
            name, arguments = move()
            told.append(f"{name}{arguments}")
            getattr(walk, name)(*arguments)
            walk.the_books_balance()
            walk.an_end_is_an_end()
            walk.no_line_is_there_twice_and_none_is_of_a_stranger()
    except AssertionError as e:
        e.add_note("\n".join(told))
        raise
    finally:
        walk.teardown()
