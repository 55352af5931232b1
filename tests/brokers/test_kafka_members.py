"""Several processes in one Kafka group: every event is settled once.

Members join and leave under load, and processes are killed.
"""

# ruff: noqa: ASYNC220 (the killed process is started outside the event loop on purpose)

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from tests.brokers.kafka_rig import fill, open_kafka, sweep, take
from tests.servers import Handle

from penstock.brokers.kafka.broker import KafkaBroker
from penstock.model import Ack
from penstock.ports import Delivery, TopicSpec

pytestmark = pytest.mark.server("kafka")
protocols = pytest.mark.parametrize("protocol", ["classic", "consumer"])


@pytest.fixture
def url(server: Callable[[str], Handle]) -> Iterator[str]:
    yield server("kafka").url
    sweep(server("kafka").url)


@protocols
async def test_members_join_and_leave_under_load_and_each_event_is_settled_once(
    url: str, protocol: str
) -> None:
    options = f"partitions=6&protocol={protocol}"
    first = open_kafka(url, options=options)
    name = first.topics.namespace
    await first.ensure([TopicSpec(name="t")])
    ids = [f"{'abcdefghijkl'[i % 12]}{i}" for i in range(600)]
    settled: Counter[str] = Counter()
    refused = 0
    enough = {n: asyncio.Event() for n in (80, 200, 320, 420)}
    limits = {"first": 420, "second": 320}

    async def work(owner: str, broker: KafkaBroker, begin: int) -> None:
        nonlocal refused
        if begin:
            await enough[begin].wait()
        sub = broker.subscribe("t", "main", owner=owner, lease=5.0)
        while len(settled) < limits.get(owner, len(ids)):
            some = await sub.receive(7, 0.3)
            await asyncio.sleep(0.02)  # simulated work
            answers = await sub.settle([(d, Ack()) for d in some])
            settled.update(d.id for d, done in zip(some, answers, strict=True) if done)
            refused += list(answers).count(False)
            for n, event in enough.items():
                if len(settled) >= n:
                    event.set()
        await broker.close()

    async def publish() -> None:
        for i in range(0, len(ids), 30):
            await fill(first_publisher, ids[i : i + 30])
            await asyncio.sleep(0.02)

    first_publisher = open_kafka(url, name, options)
    others = [open_kafka(url, name, options) for _ in range(3)]
    await asyncio.gather(
        publish(),
        work("first", first, 0),
        work("second", others[0], 0),
        work("third", others[1], 80),
        work("fourth", others[2], 200),
    )
    assert sorted(settled) == sorted(ids), "an event was lost"
    assert set(settled.values()) == {1}, "a settled event was redelivered"
    await first_publisher.close()


# The `consumer` protocol can take much longer, so it is not tested here.
@pytest.mark.parametrize("protocol", ["classic"])
async def test_a_leaving_partition_lets_settled_work_finish_and_redelivers_the_rest(
    url: str, protocol: str
) -> None:
    options = f"protocol={protocol}&grace=5s"
    one = open_kafka(url, options=options)
    two = open_kafka(url, one.topics.namespace, options)
    await one.ensure([TopicSpec(name="t")])
    await fill(one, [f"{key}1" for key in "abcdefghijkl"])
    sub, other = (
        one.subscribe("t", "main", owner="w1", lease=5.0),
        two.subscribe("t", "main", owner="w2", lease=5.0),
    )
    held = await take(sub, 12)
    joining = asyncio.ensure_future(other.receive(20, 0.1))
    reader = one._readers["t", "main"]
    async with asyncio.timeout(60):
        while not any(part.leaving for part in reader.partitions.values()):  # noqa: ASYNC110 (the server decides when)
            await asyncio.sleep(0.01)
    leaving = [d for d in held if reader.handed_out[d.position].part.leaving]
    done, late = leaving[:1], leaving[1:]
    assert list(await sub.settle([(d, Ack()) for d in done])) == [True], (
        "a delivery of a leaving partition can be settled"
    )
    got = list(await joining)
    async with asyncio.timeout(60):
        while len(got) < len(late):
            got += await other.receive(20, 0.2)
    assert sorted(d.id for d in got) == sorted(d.id for d in late), (
        "only unsettled deliveries are redelivered"
    )
    assert not any(sub.holds(d) for d in late)  # type: ignore[attr-defined]
    assert list(await sub.settle([(d, Ack()) for d in late])) == [False] * len(late), (
        "another worker has the delivery now"
    )
    staying = [d for d in held if d not in leaving]
    assert all(await sub.settle([(d, Ack()) for d in staying]))
    assert all(await other.settle([(d, Ack()) for d in got]))
    assert all(reach.lag == 0 for reach in await one.lag("t", "main"))
    await one.close()
    await two.close()


_WORKER = """
import asyncio, sys
from penstock.model import Ack
from tests.brokers.kafka_rig import open_kafka, take
async def main():
    url, name = sys.argv[1:3]
    sub = open_kafka(url, name, "session=4s").subscribe("t", "main", owner="w", lease=2.0)
    got = await take(sub, 12)
    some = got[1::3]
    assert all(await sub.settle([(d, Ack()) for d in some]))
    print(*[d.id for d in some], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_unsettled_messages_of_a_killed_process_are_redelivered_after_its_session(
    url: str,
) -> None:
    broker = open_kafka(url)
    await broker.ensure([TopicSpec(name="t")])
    ids = [f"{'abcd'[i % 4]}{i}" for i in range(12)]
    await fill(broker, ids)
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, url, broker.topics.namespace],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    settled = (await asyncio.to_thread(worker.stdout.readline)).split()
    assert len(settled) == 4
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    sub = broker.subscribe("t", "main", owner="w2", lease=2.0)
    got: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(got) < 8:
            got += await sub.receive(20, 0.2)
    assert sorted(d.id for d in got) == sorted(set(ids) - set(settled))
    await broker.close()


async def test_a_consumer_without_a_partition_waits_and_raises_no_error(url: str) -> None:
    brokers = [open_kafka(url, options="partitions=1")]
    brokers += [open_kafka(url, brokers[0].topics.namespace, "partitions=1") for _ in range(2)]
    await brokers[0].ensure([TopicSpec(name="t", ordered=True)])
    subs = [b.subscribe("t", "main", owner=f"w{i}", lease=2.0) for i, b in enumerate(brokers)]
    assert [list(await sub.receive(1, 0.1)) for sub in subs] == [[], [], []]
    await fill(brokers[0], ["a1"])
    got: list[Delivery] = []
    async with asyncio.timeout(60):
        while not got:
            got = [d for sub in subs for d in await sub.receive(1, 0.1)]
    assert [d.id for d in got] == ["a1"]
    for broker in brokers:
        await broker.close()
