"""The SQLite broker: the conformance suite, in a file and in memory, and SQLite's own promises."""

# ruff: noqa: ASYNC220 (processes are started and awaited outside the loop on purpose)

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import apsw
import pytest

from penstock.brokers.sqlite import SqliteBroker
from penstock.clock import SystemClock
from penstock.model import Ack, Release, Retry
from penstock.ports import Broker, Out, TopicSpec
from penstock.stores.sql import Tx
from penstock.stores.sqlite import Database
from penstock.testing.clock import ManualClock
from penstock.testing.conformance import BrokerConformance


class _Rig(BrokerConformance):
    def _database(self) -> Database:
        raise NotImplementedError

    async def open(self) -> Broker:
        self.clock = ManualClock()
        self.db = self._database()
        return SqliteBroker(self.db, self.clock)

    async def shut(self, broker: Broker) -> None:
        self.db.close_now()

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock.now()


class TestInMemory(_Rig):
    def _database(self) -> Database:
        return Database(":memory:")

    async def reopen(self, broker: Broker) -> Broker:
        return SqliteBroker(self.db, self.clock)


class TestInAFile(_Rig):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "state.db"

    def _database(self) -> Database:
        return Database(str(self.path), durability="process")

    async def reopen(self, broker: Broker) -> Broker:
        self.db.close_now()
        self.db = self._database()
        return SqliteBroker(self.db, self.clock)


# -- promises of SQLite only -----------------------------------------------------------------------


def _broker(path: str = ":memory:") -> tuple[Database, SqliteBroker, ManualClock]:
    db, clock = Database(path, inline=True), ManualClock()
    return db, SqliteBroker(db, clock), clock


def _out(i: int, *, key: str | None = None, topic: str = "t", **more: Any) -> Out:
    return Out(topic=topic, id=f"e{i}", key=key or f"k{i % 50}", body=b"x" * 200, **more)


async def test_a_topic_created_in_a_failed_transaction_is_not_cached() -> None:
    db, broker, _ = _broker()

    def fails(tx: Tx) -> None:
        for _ in range(2):  # the second call finds the topic of the first
            broker.bind(tx).publish([_out(1, topic="lost")])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await db.write(fails)
    await broker.ensure([TopicSpec(name="taken")])  # gets the id that `lost` would have had
    await broker.ensure([TopicSpec(name="lost")])
    await broker.publish([_out(2, topic="lost")])
    assert (await broker.stats("lost", "main")).ready == 1
    assert (await broker.stats("taken", "main")).ready == 0


async def test_one_receive_returns_high_priority_first_then_publication_order() -> None:
    _, broker, _ = _broker()
    await broker.ensure([TopicSpec(name="t")])
    await broker.publish([_out(i, priority=i % 2) for i in range(120)])
    got = await broker.subscribe("t", "main", owner="w", lease=600.0).receive(120, 0.0)
    assert [d.id for d in got] == [f"e{i}" for i in [*range(0, 120, 2), *range(1, 120, 2)]]


async def test_a_repeated_or_late_ack_does_not_affect_the_other_acks() -> None:
    _, broker, clock = _broker()
    await broker.ensure([TopicSpec(name="t")])
    await broker.publish([_out(i) for i in range(6)])
    sub = broker.subscribe("t", "main", owner="w", lease=1.0)
    late = await sub.receive(2, 0.0)
    clock.advance(2.0)
    got = await sub.receive(6, 0.0)
    assert await sub.settle([(d, Ack()) for d in [late[0], got[3], got[3], got[4]]]) == [
        False,
        True,
        False,
        True,
    ]
    assert await broker.db.read(lambda tx: broker.bind(tx).holds([late[1], *got])) == [
        False,
        True,
        True,
        True,
        False,
        False,
        True,
    ]
    stats = await broker.stats("t", "main")
    assert (stats.ready, stats.in_flight) == (0, 4)


async def test_a_key_keeps_its_order_when_more_delays_end_than_one_poll_returns() -> None:
    _, broker, clock = _broker()
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


@pytest.mark.parametrize("keys", [1, 50, 5000])
async def test_the_cost_of_a_receive_does_not_grow_with_the_queue(keys: int) -> None:
    async def steps(depth: int) -> int:
        db, broker, _ = _broker()
        await broker.ensure([TopicSpec(name="t"), TopicSpec(name="t.dead", groups=())])
        for start in range(0, depth, 5000):
            await broker.publish([_out(i, key=f"k{i % keys}") for i in range(start, start + 5000)])
        sub = broker.subscribe("t", "main", owner="w", lease=30.0)
        held = await sub.receive(100, 0.0)
        count = 0

        def tick() -> bool:
            nonlocal count
            count += 1
            return False

        db._writer.set_progress_handler(tick, 20)  # counts every 20 steps of the virtual machine
        for _ in range(3):
            held = [*held, *await sub.receive(100, 0.0)]
        await sub.settle([(d, Ack()) for d in held])
        await broker.stats("t", "main")
        db._writer.set_progress_handler(None)
        return count

    shallow, deep = await steps(5_000), await steps(40_000)
    assert deep < 1.5 * shallow


async def test_no_frequent_query_scans_a_table() -> None:
    db, broker, clock = _broker()
    await broker.ensure([TopicSpec(name="t")])
    await broker.publish([_out(i) for i in range(10)])
    sub = broker.subscribe("t", "main", owner="w", lease=1.0)
    asked: set[str] = set()
    db._writer.trace_v2(
        apsw.SQLITE_TRACE_STMT, lambda e: asked.add(e["sql"]) if e.get("sql") else None
    )
    got = await sub.receive(5, 0.0)
    await sub.extend(got, 1.0)
    await sub.settle([(got[0], Ack()), (got[1], Retry(1.0, "x")), (got[2], Release())])
    clock.advance(5.0)
    await sub.receive(5, 0.0)
    await db.read(lambda tx: broker.bind(tx).has_work("t", "main"))
    await sub.hold({"k1": 5.0})
    db._writer.trace_v2(0, None)
    scans = {}
    for sql in asked:
        if re.match(r"\s*(SELECT|UPDATE|DELETE|INSERT)", sql):
            # `?`, `?2` and `?3` are three parameters, even if they occur several times.
            numbered = len(set(re.findall(r"\?[2-9]", sql)))
            bindings = [None] * (numbered + 1 if numbered else sql.count("?"))
            plan = [row[3] for row in db._writer.execute("EXPLAIN QUERY PLAN " + sql, bindings)]
            if bad := [
                step
                for step in plan
                if re.match(r"SCAN (?!token|CONSTANT|json_each)", step) or "TEMP B-TREE" in step
            ]:
                scans[sql] = bad
    assert scans == {}
    assert len(asked) > 8


async def test_pruning_skips_unsettled_rows_and_deletes_settled_rows_after_retention() -> None:
    db, broker, clock = _broker()
    await broker.ensure(
        [TopicSpec(name="t", retention=100.0), TopicSpec(name="u", retention=10_000.0)]
    )
    await broker.publish([_out(i) for i in range(30)])  # stays queued
    await broker.publish([_out(i, topic="u") for i in range(30, 60)])
    sub = broker.subscribe("u", "main", owner="w", lease=30.0)
    await sub.settle([(d, Ack()) for d in await sub.receive(30, 0.0)])
    # No group reads this topic, so its messages are kept for a day.
    await broker.publish([_out(i, topic="gone") for i in range(60, 70)])
    await broker.publish([_out(i, key="done") for i in range(70, 90)])
    sub = broker.subscribe("t", "main", owner="w", lease=30.0)
    await sub.settle(
        [(d, Ack() if d.key == "done" else Release()) for d in await sub.receive(100, 0.0)]
    )
    clock.advance(200.0)
    await broker.publish([_out(100, key="young")])
    gone = 0
    for _ in range(30):
        gone += await db.write(lambda tx: broker.bind(tx).prune(limit=2))
    assert gone == 20
    assert (await broker.stats("t", "main")).ready == 31
    assert await broker.replay("u", "main", since=0.0) == 30


async def test_processes_share_a_file_and_a_killed_one_loses_and_repeats_no_message(
    tmp_path: Path,
) -> None:
    path, total = str(tmp_path / "state.db"), 1500
    db = Database(path, durability="process")
    broker = SqliteBroker(db, SystemClock())
    await broker.ensure([TopicSpec(name="t")])
    await broker.publish([_out(i) for i in range(total)])
    logs = [tmp_path / f"{name}.log" for name in ("one", "two", "victim")]
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                WORKER,
                path,
                log.stem,
                str(log),
                "0.3" if log.stem == "victim" else "30",
            ],
            stdin=subprocess.DEVNULL,
        )
        for log in logs
    ]
    try:
        deadline = time.monotonic() + 60
        while not all(log.exists() for log in logs):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()
        assert await asyncio.to_thread(workers[2].wait, 60) == -signal.SIGKILL
        for worker in workers[:2]:
            assert await asyncio.to_thread(worker.wait, 60) == 0
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
    done = [line for log in logs for line in log.read_text().splitlines() if line]
    # The victim may be killed between its commit and its log lines. Then only the messages of that
    # one settle are missing.
    assert len(done) == len(set(done)), "no message was acked twice"
    assert total - 5 <= len(done) <= total
    s = await broker.stats("t", "main")
    assert (s.ready, s.delayed, s.in_flight) == (0, 0, 0)
    assert db.check() == []
    db.close_now()


WORKER = """
import asyncio, os, pathlib, random, signal, sys, threading
from penstock.brokers.sqlite import SqliteBroker
from penstock.clock import SystemClock
from penstock.model import Ack, Release
from penstock.stores.sqlite import Database

async def main(path, name, log, lease):
    db = Database(path, durability="process")
    broker = SqliteBroker(db, SystemClock())
    sub = broker.subscribe("t", "main", owner=name, lease=lease)
    kill_pending = pathlib.Path(log).parent / "kill_pending"
    with open(log, "a", buffering=1) as f:
        while not (pathlib.Path(log).parent / "go").exists():
            await asyncio.sleep(0.005)
        done = 0
        while True:
            s = await broker.stats("t", "main")
            if name != "victim" and s.ready < 200 and not kill_pending.exists():
                await asyncio.sleep(0.005)
                continue
            got = await sub.receive(5, 0.05)
            if not got:
                s = await broker.stats("t", "main")
                if not s.ready + s.delayed + s.in_flight:
                    break
            await asyncio.sleep(0.002)
            for d, ok in zip(got, await sub.settle([(d, Ack()) for d in got])):
                if ok:
                    f.write(d.id + "\\n")
                    done += 1
                if name == "victim" and done == 21:  # the delay is random
                    kill_pending.touch()
                    kill = (os.getpid(), signal.SIGKILL)
                    threading.Timer(random.uniform(0.0, 0.02), os.kill, kill).start()
                    done += 1
    db.close_now()

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
"""
