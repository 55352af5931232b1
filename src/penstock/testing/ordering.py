"""Tests of the conformance suite for keys, order and priorities."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from penstock.model import Ack, Release, Retry
from penstock.ports import Broker, Delivery, TopicSpec
from penstock.testing.broker_rig import BrokerRig, delays, orders, sentence

BATCH_SIZES = (1, 5, 20, 22, 50)  # messages that one `receive` may return


class Ordering(BrokerRig):
    @sentence()
    async def test_a_batch_contains_at_most_per_key_messages_of_one_key(
        self, broker: Broker
    ) -> None:
        await self.fill(broker, [f"a{i}" for i in range(10)] + ["b1", "b2", "b3", "c1"])
        sub, seen = self.sub(broker), set[str]()
        while seen != {"a", "b", "c"}:
            counts = Counter(d.key for d in await self.some(sub, 12, per_key=2))
            assert max(counts.values()) <= 2
            seen |= set(counts)

    @sentence(lambda caps: caps.fair_keys)
    async def test_a_slow_key_does_not_stop_the_others(self, broker: Broker) -> None:
        await self.fill(broker, [f"a{i}" for i in range(200)])
        sub = await self.fill_and_subscribe(broker, ["b1", "c1"])
        first: list[Delivery] = []
        # The messages of `a` are not settled, because its work is slow.
        while len(first) < 100 and not {"b1", "c1"} <= {d.id for d in first}:
            first += await self.some(sub, 10)
            # The work takes time, so the server can deliver messages that it has not sent yet.
            await asyncio.sleep(0.1)
        assert {"b1", "c1"} <= {d.id for d in first}, (
            "100 of the 200 earlier messages were delivered first"
        )

    @sentence()
    async def test_a_steady_flow_of_new_keys_does_not_starve_an_old_key(
        self, broker: Broker
    ) -> None:
        sub = await self.fill_and_subscribe(broker, [f"old{i}" for i in range(50)])
        served = 0
        for turn in range(40):  # the new messages alone would fill each batch
            await self.fill(broker, [f"new-{turn}-{i}" for i in range(2)], key=f"k{turn}")
            for d in await self.some(sub, 2):
                served += d.key == "old"
                await sub.settle([(d, Ack())])
            await self.sleep(0.01)
        assert served >= 5

    @sentence(orders, topics=[TopicSpec(name="t", ordered=True)])
    async def test_an_ordered_topic_delivers_one_message_of_a_key_at_a_time_in_order(
        self, broker: Broker
    ) -> None:
        sub = await self.fill_and_subscribe(broker, ["a1", "a2", "b1", "a3"])
        got = {d.id: d for d in await self.only(sub, 2)}
        assert set(got) == {"a1", "b1"}
        await sub.settle([(got["a1"], Ack())])
        (a2,) = await self.only(sub, 1)
        assert a2.id == "a2"
        await sub.settle([(got["b1"], Ack()), (a2, Ack())])
        assert [d.id for d in await self.only(sub, 1)] == ["a3"]

    @sentence(orders, topics=[TopicSpec(name="t", ordered=True)])
    async def test_order_holds_over_retry_release_and_a_lost_lease(self, broker: Broker) -> None:
        sub = await self.fill_and_subscribe(broker, ["a1", "a2"], lease=self.lease)
        early: list[Delivery] = []
        for outcome, pause in (
            (Retry(2.0, "x"), 2.0 + self.slack),
            (Release(), 0.0),
            (None, 0.0),
            (Retry(0.0, "x"), self.slack),
        ):
            (d,) = early or await self.only(sub, 1)
            assert d.id == "a1"
            settled_at, early = self.now(), []
            if outcome is not None:
                await sub.settle([(d, outcome)])
            else:
                sub = await self.lose(broker, sub)
            if isinstance(outcome, Retry) and outcome.delay:
                # The next message of the key waits for the retry of the earlier one.
                early = await self.before(settled_at + outcome.delay, sub)
            if not early:
                await self.sleep(pause)
        (d,) = await self.only(sub, 1)
        await sub.settle([(d, Ack())])
        assert [d.id for d in await self.only(sub, 1)] == ["a2"]

    @sentence(
        lambda caps: orders(caps) and delays(caps), topics=[TopicSpec(name="t", ordered=True)]
    )
    async def test_a_due_message_waits_while_another_message_of_its_key_is_unsettled(
        self, broker: Broker
    ) -> None:
        await self.fill(broker, ["a1"])
        await self.fill(broker, ["a2"], not_before=self.now() + 1.0)
        sub = self.sub(broker)
        (d,) = await self.only(sub, 1)
        await self.sleep(1.0 + self.slack)
        assert await self.left(sub) == []
        await sub.settle([(d, Ack())])
        assert [d.id for d in await self.only(sub, 1)] == ["a2"]

    @sentence(orders, topics=[TopicSpec(name="t", ordered=True)])
    async def test_in_an_ordered_topic_a_priority_does_not_change_the_order_of_a_key(
        self, broker: Broker
    ) -> None:
        await self.fill(broker, ["a1"], priority=2)
        await self.fill(broker, ["a2"], priority=0)
        sub = self.sub(broker)
        (d,) = await self.only(sub, 1)
        await sub.settle([(d, Ack())])
        assert [d.id, *[x.id for x in await self.only(sub, 1)]] == ["a1", "a2"]

    @sentence(orders, topics=[TopicSpec(name="t", ordered=True)])
    async def test_in_an_ordered_topic_keys_take_turns(self, broker: Broker) -> None:
        sub = await self.fill_and_subscribe(
            broker, [f"a{i}" for i in range(10)] + [f"b{i}" for i in range(10)]
        )
        # Wait until both keys have arrived.
        await sub.settle([(d, Release()) for d in await self.take(sub, 2)])
        keys = ""
        for _ in range(8):
            (d,) = await self.take(sub, 1)
            keys += d.key
            await self.sleep(0.01)
            await sub.settle([(d, Ack())])
        assert Counter(keys) == {"a": 4, "b": 4}

    @sentence(orders, topics=[TopicSpec(name="t", ordered=True)])
    async def test_per_key_order_holds_under_many_workers(self, broker: Broker) -> None:
        ids = [f"{key}{i}" for i in range(12) for key in ("a", "b", "c", "d")]
        await self.fill(broker, ids)
        done: list[str] = []

        async def work(n: int) -> None:
            sub = self.sub(broker, owner=f"w{n}")
            dice = random.Random(n)
            while len(done) < len(ids):
                for d in await sub.receive(3, self.patience):
                    await asyncio.sleep(0)
                    if dice.random() < 0.3:
                        await sub.settle([(d, Release())])
                        continue
                    done.append(d.id)
                    await sub.settle([(d, Ack())])
                await asyncio.sleep(0)
            await sub.close()

        await asyncio.gather(*[work(n) for n in range(20)])
        assert sorted(done) == sorted(ids)
        for key in "abcd":
            assert [i for i in done if i[0] == key] == [f"{key}{i}" for i in range(12)]

    @sentence(topics=[TopicSpec(name=f"t{batch}") for batch in BATCH_SIZES])
    async def test_priorities_are_weighted_high_is_preferred_and_low_is_not_starved(
        self, broker: Broker
    ) -> None:
        for batch in BATCH_SIZES:
            topic = f"t{batch}"
            for prio, name in enumerate(("high", "normal", "low")):
                await self.fill(
                    broker, [f"{name}{i}" for i in range(210)], topic=topic, priority=prio
                )
            sub = self.sub(broker, topic)
            seen: list[Delivery] = []
            while len({d.key for d in seen}) < 3:  # wait for messages of all classes
                seen += await self.some(sub, 21)
            await sub.settle([(d, Release()) for d in seen])
            got: Counter[str] = Counter()
            while got.total() < 126:
                some = await self.some(sub, batch)
                await sub.settle([(d, Ack()) for d in some])
                got.update(d.key for d in some)
            assert got["high"] > got["normal"] > got["low"] > 0, f"batches of {batch}: {dict(got)}"

    @sentence()
    async def test_a_delivery_has_its_messages_priority_also_after_release_and_retry(
        self, broker: Broker
    ) -> None:
        priorities = {"high": 0, "normal": 1, "low": 2}
        for name, priority in priorities.items():
            await self.fill(broker, [name], key=name, priority=priority)
        sub = self.sub(broker)
        # A worker publishes the message of a long wait again, with the delivery's priority.
        for outcome in (Release(), Retry(0.0, "x"), Ack()):
            got = await self.only(sub, 3)
            assert {d.id: d.priority for d in got} == priorities
            await sub.settle([(d, outcome) for d in got])
            if isinstance(outcome, Retry):
                await self.sleep(self.slack)

    @sentence()
    async def test_a_message_with_an_unknown_priority_is_delivered(self, broker: Broker) -> None:
        await self.fill(broker, ["a1"], priority=9)
        await self.fill(broker, ["a2"], priority=-3)
        assert sorted(d.id for d in await self.only(self.sub(broker), 2)) == ["a1", "a2"]
