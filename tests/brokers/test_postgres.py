"""The PostgreSQL broker: the conformance suite and tests of this adapter, on a real server."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import psycopg
import pytest
from tests.brokers.served import Served
from tests.servers import Handle

from penstock.brokers.postgres.broker import PostgresBroker
from penstock.brokers.postgres.notify import NOTIFY_INTERVAL
from penstock.clock import SystemClock
from penstock.errors import StoreUnavailable
from penstock.model import Ack, Dead, Release, Retry
from penstock.ports import Broker, Clock, Delivery, Out, Published, TopicSpec
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sql import Tx
from penstock.testing.clock import ManualClock

pytestmark = pytest.mark.server("postgres")


class TestPostgres(Served):
    """A manual clock instead of sleeping. The server, its locks and its transactions are real."""

    name = "postgres"

    @pytest.fixture(autouse=True)
    def _schema(self, _its_server: None) -> Iterator[None]:
        self.namespace = f"t{secrets.token_hex(6)}"
        yield
        with psycopg.connect(self.served.url) as db:
            db.execute(f"DROP SCHEMA IF EXISTS {self.namespace} CASCADE")

    async def open(self) -> Broker:
        self.clock = ManualClock()
        self.stores: list[PostgresStore] = []
        return self._opened()

    def _opened(self) -> Broker:
        self.stores.append(PostgresStore(self.url, namespace=self.namespace))
        return PostgresBroker(self.stores[-1], self.clock)

    async def reopen(self, broker: Broker) -> Broker:
        return self._opened()

    async def shut(self, broker: Broker) -> None:
        await broker.close()
        for store in self.stores:
            store.close_now()

    def last_word(self, broker: Broker, message: bytes) -> bytes:
        return (
            b"\0" + self.stores[-1]._exclusive._wire._names["COMMIT"] + b"\0"
        )  # binds the prepared statement

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock.now()


# -- guarantees of PostgreSQL only -----------------------------------------------------------------


class Fleet:
    """Processes of one pipeline: each has separate connections to one schema."""

    def __init__(self, url: str) -> None:
        self.url, self.namespace = url, f"t{secrets.token_hex(6)}"
        self.brokers: list[PostgresBroker] = []

    def join(self, clock: Clock | None = None) -> PostgresBroker:
        self.brokers.append(
            PostgresBroker(
                PostgresStore(self.url, namespace=self.namespace, durability="process"),
                clock or SystemClock(),
            )
        )
        return self.brokers[-1]

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute(f"SET search_path = {self.namespace}")
            cursor = db.execute(text)
            return cursor.fetchall() if cursor.description else []

    def counters_match(self) -> bool:
        """Return True if the counters per key match the rows of the queue."""
        counters = (
            "SELECT grp, prio, key, ready, leased, delayed FROM keyq "
            "WHERE ready<>0 OR leased<>0 OR delayed<>0"
        )
        counted = (
            "SELECT grp, prio, key, count(*) FILTER (WHERE state=0), "
            "count(*) FILTER (WHERE state=1), count(*) FILTER (WHERE state=2)"
            " FROM queue GROUP BY grp, prio, key"
        )
        return (
            self.sql(f"({counters} EXCEPT {counted}) UNION ALL ({counted} EXCEPT {counters})") == []
        )


@pytest.fixture
def fleet(server: Callable[[str], Handle]) -> Iterator[Fleet]:
    made = Fleet(server("postgres").url)
    yield made
    for broker in made.brokers:
        broker.db.close_now()
    made.sql(f"DROP SCHEMA {made.namespace} CASCADE")


def _out(i: int, *, key: str | None = None, topic: str = "t", **more: Any) -> Out:
    return Out(topic=topic, id=f"e{i}", key=key or f"k{i % 50}", body=b"x" * 200, **more)


async def test_every_message_is_acked_once_by_concurrent_processes(
    fleet: Fleet,
) -> None:
    brokers = [fleet.join() for _ in range(4)]
    await brokers[0].ensure(
        [
            TopicSpec(name="t"),
            TopicSpec(name="o", ordered=True),
            TopicSpec(name="t.dead", groups=()),
        ]
    )
    total, acked = 400, Counter[str]()

    async def work(n: int, topic: str) -> None:
        sub = brokers[n % 4].subscribe(topic, "main", owner=f"w{n}", lease=30.0)
        rng = random.Random(n)
        while sum(id_[0] == topic for id_ in acked) < total:
            outcomes = [
                (d, rng.choice((Ack(), Ack(), Retry(0.0, "x"), Release())))
                for d in await sub.receive(20, 0.05)
            ]
            assert all(await sub.settle(outcomes)), "a delivery was lost to another process"
            acked.update(d.id for d, outcome in outcomes if isinstance(outcome, Ack))
        await sub.close()

    async def fill(n: int, topic: str) -> None:
        for i in range(0, total // 2, 20):
            await brokers[n].publish(
                [
                    Out(topic=topic, id=f"{topic}{n}-{i + j}", key=f"k{(i + j) % 7}", body=b"")
                    for j in range(20)
                ]
            )

    await asyncio.gather(
        *[fill(n, topic) for n in range(2) for topic in "to"],
        *[work(n, topic) for n in range(6) for topic in "to"],
    )
    assert set(acked.values()) == {1}
    assert len(acked) == 2 * total
    for topic in "to":
        s = await brokers[0].stats(topic, "main")
        assert (s.ready, s.delayed, s.in_flight) == (0, 0, 0)
    assert fleet.counters_match()
    for broker in brokers:
        await broker.close()


async def test_a_publish_in_one_process_wakes_a_receiver_in_another(fleet: Fleet) -> None:
    one, other = fleet.join(), fleet.join()
    await one.ensure([TopicSpec(name="t")])
    sub = other.subscribe("t", "main", owner="w", lease=30.0)
    waiting = asyncio.create_task(sub.receive(5, 50.0))
    while (  # noqa: ASYNC110
        fleet.sql(f"SELECT 1 FROM pg_stat_activity WHERE query='LISTEN {other.notifier.channel}'")
        == []
    ):
        await asyncio.sleep(0.01)
    woken = 0
    asked = other.notifier._wake

    def counting(topics: Any) -> None:
        nonlocal woken
        woken += 1
        asked(topics)

    other.notifier._wake = counting
    began = time.monotonic()
    # The first publish notifies with its commit. The others share one later notification.
    for i in range(20):
        await one.publish([_out(i)])
    got = [d.id for d in await waiting]
    while len(got) < 20:
        got += [d.id for d in await sub.receive(20, 30.0)]
    assert sorted(got) == sorted(f"e{i}" for i in range(20))
    assert 1 <= woken <= 3 + 2 * (time.monotonic() - began) / NOTIFY_INTERVAL
    await one.close()
    await other.close()


async def test_a_topic_of_a_failed_transaction_is_not_cached(fleet: Fleet) -> None:
    broker = fleet.join(ManualClock())

    def fails(tx: Tx) -> None:
        for _ in range(2):
            broker.bind(tx).publish([_out(1, topic="lost")])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await broker.db.write(fails)
    await broker.ensure([TopicSpec(name="taken")])
    await broker.ensure([TopicSpec(name="lost")])
    await broker.publish([_out(2, topic="lost")])
    assert (await broker.stats("lost", "main")).ready == 1
    assert (await broker.stats("taken", "main")).ready == 0


async def test_many_delayed_messages_never_change_the_order_of_a_key(
    fleet: Fleet,
) -> None:
    clock = ManualClock()
    broker = fleet.join(clock)
    await broker.ensure([TopicSpec(name="t", ordered=True)])
    await broker.publish([_out(i, key=f"k{i:04}") for i in range(1500)])
    sub = broker.subscribe("t", "main", owner="w", lease=600.0)
    await sub.settle([(d, Retry(1.0, "x")) for d in await sub.receive(1500, 0.0)])
    await broker.publish([Out(topic="t", id="younger", key="k1499", body=b"")])
    clock.advance(2.0)
    seen: list[str] = []
    while got := await sub.receive(100, 0.0):
        seen += [d.id for d in got]
    assert len(seen) == 1500
    assert "younger" not in seen
    assert fleet.counters_match()


async def test_a_key_locked_by_a_publisher_is_skipped_without_waiting(
    fleet: Fleet,
) -> None:
    broker = fleet.join()
    await broker.ensure([TopicSpec(name="t")])
    await broker.publish([_out(1, key="busy"), _out(2, key="free")])
    with psycopg.connect(fleet.url) as slow:  # a slow transaction
        slow.execute(f"SELECT * FROM {fleet.namespace}.keyq WHERE key='busy' FOR UPDATE")
        sub = broker.subscribe("t", "main", owner="w", lease=30.0)
        assert [d.id for d in await sub.receive(10, 0.0)] == ["e2"]
    assert [d.id for d in await sub.receive(10, 30.0)] == ["e1"]


async def test_the_deliveries_of_a_lost_worker_can_be_reclaimed(fleet: Fleet) -> None:
    broker = fleet.join(ManualClock())
    await broker.ensure([TopicSpec(name="t"), TopicSpec(name="o", ordered=True)])
    await broker.publish(
        [_out(1), _out(2), _out(3, topic="o", key="k"), _out(4, topic="o", key="k")]
    )
    held = [
        d
        for topic in "to"
        for d in await broker.subscribe(topic, "main", owner="gone", lease=600.0).receive(1, 0.0)
    ]
    other = await broker.subscribe("t", "main", owner="alive", lease=600.0).receive(5, 0.0)
    assert sorted(await broker.db.write(lambda tx: broker.bind(tx).reclaim("gone"))) == sorted(
        d.id for d in held
    )
    assert await broker.db.read(lambda tx: broker.bind(tx).holds([*held, *other])) == [
        False,
        False,
        True,
    ]
    assert [
        d.id for d in await broker.subscribe("o", "main", owner="w", lease=600.0).receive(5, 0.0)
    ] == ["e3"]
    assert await broker.db.read(lambda tx: broker.bind(tx).leases_by_worker(100)) == {
        "alive": 1,
        "w": 1,
    }
    assert fleet.counters_match()


async def test_pruning_removes_only_settled_messages_older_than_their_retention(
    fleet: Fleet,
) -> None:
    clock = ManualClock()
    broker = fleet.join(clock)
    await broker.ensure(
        [TopicSpec(name="t", retention=100.0), TopicSpec(name="u", retention=10_000.0)]
    )
    await broker.publish([_out(i) for i in range(30)])  # stays queued
    await broker.publish([_out(i, topic="u") for i in range(30, 60)])
    sub = broker.subscribe("u", "main", owner="w", lease=30.0)
    await sub.settle([(d, Ack()) for d in await sub.receive(30, 0.0)])
    await broker.publish([_out(i, key="done") for i in range(70, 90)])
    sub = broker.subscribe("t", "main", owner="w", lease=30.0)
    await sub.settle(
        [(d, Ack() if d.key == "done" else Release()) for d in await sub.receive(100, 0.0)]
    )
    clock.advance(200.0)
    await broker.publish([_out(100, key="young")])
    gone = 0
    for _ in range(30):
        gone += await broker.db.write(lambda tx: broker.bind(tx).prune(limit=2))
    assert gone == 20
    assert (await broker.stats("t", "main")).ready == 31
    assert await broker.replay("u", "main", since=0.0) == 30
    assert fleet.counters_match()


async def test_a_purge_keeps_deliveries_in_flight_and_the_order_of_their_key(fleet: Fleet) -> None:
    broker = fleet.join(ManualClock())
    await broker.ensure([TopicSpec(name="o", ordered=True)])
    await broker.publish([_out(i, topic="o", key="k") for i in range(3)])
    sub = broker.subscribe("o", "main", owner="w", lease=600.0)
    (d,) = await sub.receive(5, 0.0)
    assert await broker.purge("o") == 2
    await broker.publish([_out(9, topic="o", key="k")])
    assert await sub.receive(5, 0.0) == []
    assert list(await sub.settle([(d, Ack())])) == [True]
    assert [d.id for d in await sub.receive(5, 0.0)] == ["e9"]
    assert fleet.counters_match()


async def test_text_that_postgres_cannot_store_fails_alone_and_hostile_text_is_kept(
    fleet: Fleet,
) -> None:
    broker = fleet.join(ManualClock())
    await broker.ensure([TopicSpec(name="t")])
    hostile = "'; DROP TABLE queue; -- ? $1 {\"} \\ ☃"
    answers = await broker.publish(
        [
            Out(topic="t", id="a\0b", key="k", body=b""),
            Out(topic="t", id=hostile, key=hostile, body=hostile.encode(), headers={hostile: "\0"}),
            Out(topic="t", id="x", key="\ud800", body=b""),
        ]
    )
    assert list(answers) == [Published.FAILED, Published.OK, Published.FAILED]
    sub = broker.subscribe("t", "main", owner=hostile, lease=30.0)
    (d,) = await sub.receive(5, 0.0)
    assert (d.id, d.key, d.body, d.headers) == (hostile, hostile, hostile.encode(), {hostile: "\0"})
    assert list(await sub.settle([(d, Dead(hostile))])) == [True]


async def test_frequent_statements_touch_few_rows_with_statistics_of_an_empty_queue(
    fleet: Fleet,
) -> None:
    broker = fleet.join(ManualClock())
    await broker.ensure([TopicSpec(name="t")])
    sub = broker.subscribe("t", "main", owner="w", lease=30.0)
    for _ in range(8):  # so that plans are prepared and cached
        await broker.publish([_out(0)])
        await sub.settle([(d, Ack()) for d in await sub.receive(5, 0.0)])
    fleet.sql("ANALYZE")
    for start in range(0, 20_000, 5000):
        await broker.publish([_out(i, key=f"k{i % 500}") for i in range(start, start + 5000)])

    async def touched() -> int:
        for alone in (True, False):
            await broker.db.write(
                lambda tx: tx.execute("SELECT pg_stat_force_next_flush()").get, alone=alone
            )
            await broker.db.write(lambda tx: None, alone=alone)
        return int(
            fleet.sql(
                "SELECT sum(seq_tup_read+coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables "
                "WHERE schemaname=current_schema()"
            )[0][0]
        )

    def holds(deliveries: Sequence[Delivery], tx: Tx) -> list[bool]:
        return broker.bind(tx).holds(deliveries)

    before = await touched()
    for _ in range(10):
        got = await sub.receive(20, 0.0)
        assert len(got) == 20
        await sub.extend(got, 30.0)
        await broker.db.write(partial(holds, got))
        await sub.settle(
            [(got[0], Retry(1.0, "x")), (got[1], Release()), *[(d, Ack()) for d in got[2:]]]
        )
        await sub.hold({"k1": 1e9})
    assert await touched() - before < 10 * 20 * 30


async def test_no_message_is_lost_when_the_server_terminates_connections(
    fleet: Fleet,
) -> None:
    broker = fleet.join()
    await broker.ensure([TopicSpec(name="t")])
    sub = broker.subscribe("t", "main", owner="w", lease=30.0)
    sent: list[str] = []
    got: list[Delivery] = []
    for i in range(6):
        if i % 2:
            fleet.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name LIKE 'penstock%'"
            )
        while f"e{i}" not in sent:
            try:
                assert list(await broker.publish([_out(i)])) == [Published.OK]
                sent.append(f"e{i}")
            except StoreUnavailable:
                continue
        while len(got) <= i:
            try:
                got += await sub.receive(1, 1.0)
            except StoreUnavailable:
                continue
    assert {d.id for d in got} == set(sent)
    await broker.close()
