"""Conformance suite for brokers, as a test class to inherit. A short rig opens the broker.

The whole test file of an adapter is:

    class TestMyBroker(BrokerConformance):
        lease = 1.0
        async def open(self) -> Broker: ...

A test is skipped if the broker's `Capabilities` do not promise the behaviour. Tests of outages need
hooks of the rig: to stop the server, or to open a broker through a proxy. Without these hooks they
are skipped. The suite needs pytest or unittest, and no asyncio plugin.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from math import inf

from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Broker, Delivery, Out, Published, Subscription, TopicSpec
from penstock.testing.broker_rig import LONG_LEASE, delays, leases_expire, orders, sentence
from penstock.testing.outages import Outages

MIB = 1 << 20


class BrokerConformance(Outages):
    """The tests of the suite. See `broker_rig` for the hooks that a subclass may define."""

    # -- publish, receive, settle ------------------------------------------------------------------

    @sentence()
    async def test_a_published_message_arrives_once_with_its_key_body_and_headers(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await broker.publish(
            [
                Out(
                    topic="t",
                    id="e1",
                    key="shop.test",
                    body=b"\x00\xffbytes",
                    headers={"traceparent": "00-é"},
                )
            ]
        )
        sub = self.sub(broker)
        (d,) = await self.only(sub, 1)
        assert (d.topic, d.group, d.id, d.key, d.body, d.headers) == (
            "t",
            "main",
            "e1",
            "shop.test",
            b"\x00\xffbytes",
            {"traceparent": "00-é"},
        )
        assert await self.left(sub) == []
        assert list(await sub.settle([(d, Ack())])) == [True]
        await self.sleep(self.lease + self.slack)
        assert await self.left(self.sub(broker, lease=self.lease)) == []

    @sentence()
    async def test_an_empty_topic_delivers_no_messages(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        assert await self.left(self.sub(broker)) == []
        await self.counts(broker, 0, 0, 0)
        assert (await broker.stats("t", "main")).oldest_age is None

    @sentence()
    async def test_publish_answers_for_each_message_in_order(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t"), TopicSpec(name="u")])
        answers = await broker.publish(
            [Out(topic=t, id=f"{t}{i}", key="k", body=b"") for t in ("t", "u") for i in range(3)]
        )
        assert list(answers) == [Published.OK] * 6
        assert [d.id for d in await self.only(self.sub(broker, "u"), 3)] == ["u0", "u1", "u2"]
        assert list(await broker.publish([])) == []

    @sentence(lambda caps: caps.bounded)
    async def test_a_full_topic_reports_full_per_message_and_accepts_more_after_an_ack(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t", max_depth=3), TopicSpec(name="u")])
        batch = [
            Out(topic=t, id=f"{t}{i}", key="k", body=b"") for i in range(5) for t in ("t", "u")
        ]
        answers = dict(zip([m.id for m in batch], await broker.publish(batch), strict=True))
        assert [answers[f"t{i}"] for i in range(5)] == ["ok", "ok", "ok", "full", "full"]
        assert {answers[f"u{i}"] for i in range(5)} == {"ok"}
        sub = self.sub(broker)
        got = await self.only(sub, 3)
        assert [d.id for d in got] == ["t0", "t1", "t2"]
        assert list(await broker.publish([Out(topic="t", id="t6", key="k", body=b"")])) == [
            "full"
        ], "a message in flight must count towards the depth"
        await sub.settle([(got[0], Ack()), (got[1], Retry(100, "later"))])
        assert list(
            await broker.publish([Out(topic="t", id=f"t{i}", key="k", body=b"") for i in (7, 8)])
        ) == ["ok", "full"]

    @sentence()
    async def test_an_empty_body_and_a_body_of_one_mebibyte_are_delivered_unchanged(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        large = bytes(range(256)) * (MIB // 256)
        await broker.publish(
            [
                Out(topic="t", id="empty", key="k", body=b""),
                Out(topic="t", id="large", key="k", body=large),
            ]
        )
        assert {d.id: d.body for d in await self.only(self.sub(broker), 2)} == {
            "empty": b"",
            "large": large,
        }

    @sentence()
    async def test_a_late_or_repeated_settle_is_refused_and_changes_no_other_message(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1", "a2"])
        sub = self.sub(broker)
        first, second = await self.take(sub, 2)
        assert list(await sub.settle([(first, Ack())])) == [True]
        for outcome in (Ack(), Retry(0.0, "again"), Release(), Dead("no")):
            assert list(await sub.settle([(first, outcome)])) == [False]
        await self.counts(broker, 0, 0, 1)
        assert list(await sub.settle([(second, Ack()), (second, Ack()), (first, Ack())])) == [
            True,
            False,
            False,
        ]
        await self.counts(broker, 0, 0, 0)

    @sentence(leases_expire)
    async def test_a_settle_is_refused_after_another_worker_received_the_message(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1"])
        slow, other = (
            self.sub(broker, owner=owner, lease=self.lease) for owner in ("slow", "other")
        )
        (old,) = await self.take(slow, 1)
        await self.sleep(self.lease + self.slack)
        (new,) = await self.take(other, 1)
        assert new.id == "a1"
        for outcome in (Retry(0.0, "x"), Release(), Dead("x"), Ack()):
            assert list(await slow.settle([(old, outcome)])) == [False]
        assert list(await slow.extend([old], self.lease)) == [False]
        await self.counts(broker, 0, 0, 1)
        assert list(await other.settle([(new, Ack())])) == [True]

    @sentence()
    async def test_a_crash_after_settling_out_of_order_redelivers_only_unsettled_messages(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, [f"a{i}" for i in range(6)])
        sub, began = self.sub(broker, lease=self.lease), self.now()
        got = await self.take(sub, 6)
        assert (
            list(await sub.settle([(got[4], Ack()), (got[1], Ack()), (got[3], Ack())]))
            == [True] * 3
        )
        after = self.sub(await self.crash(broker), owner="w2", lease=self.lease)
        back: list[Delivery] = []
        if broker.caps.lease == "time":
            back += await self.before(
                began + self.lease, after
            )  # the lease of the crashed subscription has not expired
            if not back:
                await self.sleep(self.lease + self.slack)
        back += await self.only(after, 3 - len(back))
        assert sorted(d.id for d in back) == ["a0", "a2", "a5"]

    @sentence(lambda caps: caps.counts_deliveries)
    async def test_the_delivery_count_includes_crashes_and_retries_but_not_releases(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1"])
        sub = self.sub(broker, lease=self.lease)
        seen = []
        for outcome in (Release(), Release(), None, Retry(0.0, "x"), Release()):
            (d,) = await self.take(sub, 1)
            seen.append(d.deliveries)
            if outcome is None:
                sub = await self.lose(broker, sub)
            else:
                assert list(await sub.settle([(d, outcome)])) == [True]
            if isinstance(outcome, Retry):
                await self.sleep(self.slack)
        assert seen == [1, 1, 1, 2, 3]

    @sentence()
    async def test_a_released_message_can_be_received_again_immediately(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1", "a2"])
        sub = self.sub(broker)
        got = await self.take(sub, 2)
        await sub.settle([(d, Release()) for d in got])
        await self.counts(broker, 2, 0, 0)
        assert sorted(d.id for d in await self.only(self.sub(broker, owner="w2"), 2)) == [
            "a1",
            "a2",
        ]

    @sentence()
    async def test_a_dead_letter_keeps_bytes_headers_reason_and_position(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t"), TopicSpec(name="t.dead")])
        await broker.publish(
            [Out(topic="t", id="e1", key="k", body=b"\xff\x00", headers={"a": "b"})]
        )
        sub = self.sub(broker, lease=self.lease)
        (d,) = await self.take(sub, 1)
        assert list(await sub.settle([(d, Dead("parsing: no title"))])) == [True]
        (letter,) = await self.only(self.sub(broker, "t.dead"), 1)
        assert (letter.id, letter.key, letter.body) == ("e1", "k", b"\xff\x00")
        assert letter.headers == {
            "a": "b",
            "penstock-reason": "parsing: no title",
            "penstock-position": str(d.position),
        }
        await self.sleep(self.lease + self.slack)
        assert await self.left(sub) == []
        assert (await broker.stats("t", "main")).dead == 1

    @sentence()
    async def test_a_dead_letter_can_be_redriven(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t"), TopicSpec(name="t.dead")])
        await broker.publish(
            [Out(topic="t", id="e1", key="k", body=b"\xff\x00", headers={"a": "b"})]
        )
        sub, dead = self.sub(broker), self.sub(broker, "t.dead")
        (d,) = await self.take(sub, 1)
        await sub.settle([(d, Dead("parsing: no title"))])
        (letter,) = await self.take(dead, 1)
        headers = {
            name: value
            for name, value in letter.headers.items()
            if not name.startswith("penstock-")
        }
        assert list(
            await broker.publish(
                [Out(topic="t", id=letter.id, key=letter.key, body=letter.body, headers=headers)]
            )
        ) == [Published.OK]
        assert list(await dead.settle([(letter, Ack())])) == [True]
        (again,) = await self.only(sub, 1)
        assert (again.id, again.key, again.body, again.headers) == (
            "e1",
            "k",
            b"\xff\x00",
            {"a": "b"},
        )
        assert list(await sub.settle([(again, Ack())])) == [True]
        assert await self.left(dead) == []

    # -- time --------------------------------------------------------------------------------------

    @sentence(delays)
    async def test_a_short_retry_is_delivered_before_an_earlier_long_retry(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1", "a2"])
        sub = self.sub(broker)
        long, short = await self.take(sub, 2)
        delay = 1.0 + self.patience  # longer than one receive call waits
        due = self.now() + delay
        await sub.settle([(long, Retry(60.0, "long")), (short, Retry(delay, "short"))])
        got = await self.before(due, sub)
        await self.counts(broker, 0, 2, 0, before=due)
        await self.sleep(delay + self.slack)
        got += await self.only(sub, 1 - len(got))
        assert [d.id for d in got] == [short.id]

    @sentence(delays)
    async def test_a_message_is_not_delivered_before_its_not_before_time(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        sub = self.sub(broker)
        # Joining a group takes time, which must not count towards the delays below.
        assert await self.left(sub) == []
        due = self.now() + 2.0
        await self.fill(broker, ["a1"], not_before=due)
        await self.fill(broker, ["a2"], not_before=self.now() - 5.0)
        got = await self.take(sub, 1)
        assert [d.id for d in got] == ["a2"] or self.now() >= due
        got += await self.before(due, sub)
        await self.counts(broker, 0, 1, 1, before=due)
        await self.sleep(2.0 + self.slack)
        got += await self.only(sub, 2 - len(got))
        assert sorted(d.id for d in got) == ["a1", "a2"]

    @sentence(leases_expire)
    async def test_an_extended_lease_is_kept_and_a_lease_without_extension_expires(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1", "a2"])
        sub, other = (self.sub(broker, owner=owner, lease=self.lease) for owner in ("w1", "w2"))
        extended, left = await self.take(sub, 2)
        for _ in range(8):  # often enough for a slow machine
            assert list(await sub.extend([extended], self.lease)) == [True]
            await self.sleep((self.lease + self.slack) / 8)
        assert list(await sub.extend([extended], LONG_LEASE)) == [True]
        (lapsed,) = await self.only(other, 1)
        assert lapsed.id == left.id
        assert list(await sub.extend([extended, left], self.lease)) == [True, False]
        assert list(await sub.settle([(extended, Ack()), (left, Ack())])) == [True, False]

    @sentence(lambda caps: caps.hold_keys)
    async def test_hold_delays_only_the_messages_of_the_held_keys(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1", "a2", "b1"])
        sub = self.sub(broker)
        due = self.now() + 5.0
        await sub.hold({"a": due, "c": due})
        await self.fill(broker, ["c1"])
        await self.fill(broker, ["a3"], priority=0)
        got = await self.take(sub, 1)
        assert [d.id for d in got] == ["b1"] or self.now() >= due
        got += await self.before(due, sub)
        await self.counts(broker, 4, 0, 1, before=due)
        await sub.hold({"a": self.now() + 1.0})  # an earlier time does not shorten a hold
        await self.sleep(1.0 + self.slack)
        got += await self.before(due, sub)
        await self.sleep(4.0)
        got += await self.only(sub, 5 - len(got))
        assert sorted(d.id for d in got) == ["a1", "a2", "a3", "b1", "c1"]

    # -- keys, order, priorities -------------------------------------------------------------------

    @sentence()
    async def test_a_batch_contains_at_most_per_key_messages_of_one_key(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, [f"a{i}" for i in range(10)] + ["b1", "b2", "b3", "c1"])
        sub, seen = self.sub(broker), set[str]()
        while seen != {"a", "b", "c"}:
            counts = Counter(d.key for d in await self.some(sub, 12, per_key=2))
            assert max(counts.values()) <= 2
            seen |= set(counts)

    @sentence(lambda caps: caps.fair_keys)
    async def test_a_slow_key_does_not_stop_the_others(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, [f"a{i}" for i in range(200)])
        await self.fill(broker, ["b1", "c1"])
        sub = self.sub(broker)
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
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, [f"old{i}" for i in range(50)])
        sub = self.sub(broker)
        served = 0
        for turn in range(40):  # the new messages alone would fill each batch
            await self.fill(broker, [f"new-{turn}-{i}" for i in range(2)], key=f"k{turn}")
            for d in await self.some(sub, 2):
                served += d.key == "old"
                await sub.settle([(d, Ack())])
            await self.sleep(0.01)
        assert served >= 5

    @sentence(orders)
    async def test_an_ordered_topic_delivers_one_message_of_a_key_at_a_time_in_order(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t", ordered=True)])
        await self.fill(broker, ["a1", "a2", "b1", "a3"])
        sub = self.sub(broker)
        got = {d.id: d for d in await self.only(sub, 2)}
        assert set(got) == {"a1", "b1"}
        await sub.settle([(got["a1"], Ack())])
        (a2,) = await self.only(sub, 1)
        assert a2.id == "a2"
        await sub.settle([(got["b1"], Ack()), (a2, Ack())])
        assert [d.id for d in await self.only(sub, 1)] == ["a3"]

    @sentence(orders)
    async def test_order_holds_over_retry_release_and_a_lost_lease(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t", ordered=True)])
        await self.fill(broker, ["a1", "a2"])
        sub = self.sub(broker, lease=self.lease)
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

    @sentence(lambda caps: orders(caps) and delays(caps))
    async def test_a_due_message_waits_while_another_message_of_its_key_is_unsettled(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t", ordered=True)])
        await self.fill(broker, ["a1"])
        await self.fill(broker, ["a2"], not_before=self.now() + 1.0)
        sub = self.sub(broker)
        (d,) = await self.only(sub, 1)
        await self.sleep(1.0 + self.slack)
        assert await self.left(sub) == []
        await sub.settle([(d, Ack())])
        assert [d.id for d in await self.only(sub, 1)] == ["a2"]

    @sentence(orders)
    async def test_in_an_ordered_topic_a_priority_does_not_change_the_order_of_a_key(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t", ordered=True)])
        await self.fill(broker, ["a1"], priority=2)
        await self.fill(broker, ["a2"], priority=0)
        sub = self.sub(broker)
        (d,) = await self.only(sub, 1)
        await sub.settle([(d, Ack())])
        assert [d.id, *[x.id for x in await self.only(sub, 1)]] == ["a1", "a2"]

    @sentence(orders)
    async def test_in_an_ordered_topic_keys_take_turns(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t", ordered=True)])
        await self.fill(broker, [f"a{i}" for i in range(10)] + [f"b{i}" for i in range(10)])
        sub = self.sub(broker)
        # Wait until both keys have arrived.
        await sub.settle([(d, Release()) for d in await self.take(sub, 2)])
        keys = ""
        for _ in range(8):
            (d,) = await self.take(sub, 1)
            keys += d.key
            await self.sleep(0.01)
            await sub.settle([(d, Ack())])
        assert Counter(keys) == {"a": 4, "b": 4}

    @sentence(orders)
    async def test_per_key_order_holds_under_many_workers(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t", ordered=True)])
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

    @sentence()
    async def test_priorities_are_weighted_high_is_preferred_and_low_is_not_starved(
        self, broker: Broker
    ) -> None:
        for batch in (1, 5, 20, 22, 50):
            topic = f"t{batch}"
            await broker.ensure([TopicSpec(name=topic)])
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
    async def test_a_message_with_an_unknown_priority_is_delivered(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1"], priority=9)
        await self.fill(broker, ["a2"], priority=-3)
        assert sorted(d.id for d in await self.only(self.sub(broker), 2)) == ["a1", "a2"]

    # -- groups and history ------------------------------------------------------------------------

    @sentence()
    async def test_two_groups_each_receive_all_messages(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t", groups=("main", "archive"))])
        await self.fill(broker, ["a1", "b1"])
        main, archive = self.sub(broker), self.sub(broker, group="archive")
        got = await self.only(main, 2)
        assert sorted(d.id for d in got) == ["a1", "b1"]
        await main.settle([(d, Ack()) for d in got])
        await self.counts(broker, 0, 0, 0)
        await self.counts(broker, 2, 0, 0, group="archive")
        assert sorted(d.id for d in await self.only(archive, 2)) == ["a1", "b1"]

    @sentence(lambda caps: caps.replay)
    async def test_replay_redelivers_settled_messages_since_a_time_but_not_unsettled_ones(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t", groups=("main", "other"))])
        await self.fill(broker, ["a1", "b1"])
        await self.sleep(1.0)
        since = self.now()
        await self.fill(broker, ["a2", "b2", "b3"])
        sub = self.sub(broker)
        got = {d.id: d for d in await self.only(sub, 5)}
        await sub.settle([(d, Ack()) for d in got.values() if d.id != "b3"])
        assert await broker.replay("t", "main", since=since) == 2
        await self.counts(broker, 2, 0, 1)
        assert sorted(d.id for d in await self.only(sub, 2)) == ["a2", "b2"]
        await self.counts(broker, 5, 0, 0, group="other")

    @sentence()
    async def test_a_position_is_never_reused(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        sub = self.sub(broker)
        seen: list[int] = []
        for i in range(20):
            await self.fill(broker, [f"a{i}"])
            (d,) = await self.take(sub, 1)
            seen.append(d.position)
            await sub.settle([(d, Ack())])
        assert len(set(seen)) == 20

    @sentence()
    async def test_two_messages_with_the_same_id_are_settled_independently(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1", "a1"])
        sub = self.sub(broker)
        got = await self.only(sub, 1)
        if len(got) == 2:  # a broker may also deduplicate by id and keep one message
            assert list(await sub.settle([(got[0], Ack())])) == [True]
            await self.counts(broker, 0, 0, 1)
            assert list(await sub.settle([(got[1], Ack())])) == [True]

    @sentence()
    async def test_ensure_keeps_messages_and_reports_changes_that_it_cannot_apply(
        self, broker: Broker
    ) -> None:
        assert list(await broker.ensure([TopicSpec(name="t")])) == []
        await self.fill(broker, ["a1"])
        assert list(await broker.ensure([TopicSpec(name="t", groups=("main", "late"))])) == []
        if orders(broker.caps):
            assert any(
                "t" in drift for drift in await broker.ensure([TopicSpec(name="t", ordered=True)])
            )
        assert [d.id for d in await self.only(self.sub(broker), 1)] == ["a1"]

    @sentence()
    async def test_peek_shows_waiting_messages_and_does_not_consume_them(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await broker.publish(
            [
                Out(topic="t", id=f"a{i}", key="a", body=b"%d" % i, headers={"h": "é"})
                for i in range(5)
            ]
        )
        for _ in range(2):
            seen = await broker.peek("t", 3)
            assert [(m.id, m.key, m.body, m.headers) for m in seen] == [
                (f"a{i}", "a", b"%d" % i, {"h": "é"}) for i in range(3)
            ]
        got = await self.only(self.sub(broker), 5)
        assert [(d.id, d.deliveries) for d in got] == [(f"a{i}", 1) for i in range(5)]

    @sentence()
    async def test_a_purged_topic_delivers_only_messages_published_after_the_purge(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t"), TopicSpec(name="u")])
        await self.fill(broker, ["a1", "a2", "b1"])
        await self.fill(broker, ["a3"], topic="u")
        removed = await broker.purge("t")
        assert removed == 3 or not broker.caps.exact_stats
        sub = self.sub(broker)
        assert await self.left(sub) == []
        await self.fill(broker, ["c1"])
        assert [d.id for d in await self.only(sub, 1)] == ["c1"]
        assert [d.id for d in await self.only(self.sub(broker, "u"), 1)] == ["a3"]

    # -- counts and members ------------------------------------------------------------------------

    @sentence(lambda caps: caps.exact_stats)
    async def test_the_counts_are_exact_after_every_step(self, broker: Broker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1", "a2", "b1", "b2", "c1"])
        await self.fill(broker, ["c2"], not_before=self.now() + 50.0)
        await self.counts(broker, 5, 1, 0)
        sub = self.sub(broker)
        got = await self.take(sub, 4)
        await self.counts(broker, 1, 1, 4)
        steps: list[tuple[Outcome, tuple[int, int, int]]] = [
            (Ack(), (1, 1, 3)),
            (Release(), (2, 1, 2)),
            (Dead("x"), (2, 1, 1)),
            (Retry(3.0, "x"), (2, 2, 0)),
        ]
        for d, (outcome, expected) in zip(got, steps, strict=True):
            due = self.now() + (outcome.delay if isinstance(outcome, Retry) else inf)
            await sub.settle([(d, outcome)])
            await self.counts(broker, *expected, before=due)
        await self.sleep(3.0 + self.slack)
        await self.take(self.sub(broker, owner="w2", lease=self.lease), 3)
        await self.counts(broker, 0, 1, 3)
        # If leases expire, the messages are ready again and are counted once.
        await self.sleep(self.lease + self.slack)
        s = await broker.stats("t", "main")
        assert s.ready + s.delayed + s.in_flight == 4
        assert s.oldest_age is not None
        assert s.oldest_age >= self.lease

    @sentence()
    async def test_no_message_is_lost_or_delivered_twice_while_members_join_and_leave(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        ids = [f"{'abcdefgh'[i % 8]}{i}" for i in range(240)]
        await self.fill(broker, ids)
        done: list[str] = []
        members: list[tuple[Subscription, list[Delivery]]] = []
        for turn in range(200):
            if len(done) == len(ids):
                break
            if turn % 3 == 0 and len(members) < 5:
                members.append((self.sub(broker, owner=f"m{turn}"), []))
            for sub, held in members:
                if len(held) < 9:  # a member with enough messages does not wait for more
                    held += await sub.receive(7, self.patience)
                finished, held[:] = held[:4], held[4:]
                assert all(await sub.settle([(d, Ack()) for d in finished]))
                done += [d.id for d in finished]
            if turn % 7 == 6:
                sub, held = members.pop(0)
                assert all(await sub.settle([(d, Release()) for d in held])), (
                    "a member that leaves must be able to release its messages"
                )
                await sub.close()
        assert sorted(done) == sorted(ids)

    @sentence()
    async def test_each_message_is_settled_once_while_members_change_during_publishing(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        ids = [f"{'abcdefgh'[i % 8]}{i}" for i in range(160)]
        settled: Counter[str] = Counter()
        reached = {n: asyncio.Event() for n in (40, 60, 100)}

        async def publish() -> None:
            for i in range(0, len(ids), 16):
                await self.fill(broker, ids[i : i + 16])
                await asyncio.sleep(0)

        async def work(owner: str, first: int, last: int) -> None:
            """Be a member from the time when `first` messages are settled until `last` are."""
            if first:
                await reached[first].wait()
            sub = self.sub(broker, owner=owner)
            while len(settled) < last:
                some = await sub.receive(5, self.patience)
                answers = await sub.settle([(d, Ack()) for d in some])
                settled.update(d.id for d, done in zip(some, answers, strict=True) if done)
                for n, event in reached.items():
                    if len(settled) >= n:
                        event.set()
                await asyncio.sleep(0)
            await sub.close()

        await asyncio.gather(
            publish(),
            work("w1", 0, 80),
            work("w2", 40, 120),
            work("w3", 60, 160),
            work("w4", 100, 160),
        )
        assert sorted(settled) == sorted(ids)
        assert set(settled.values()) == {1}, "a settled message was redelivered"

    @sentence()
    async def test_a_closed_subscription_returns_its_unprocessed_messages_immediately(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, [f"{'abcde'[i % 5]}{i}" for i in range(40)])
        leaving = self.sub(broker)
        done, *begun = await self.take(leaving, 4)
        await leaving.settle([(done, Ack()), *[(d, Release()) for d in begun]])
        await leaving.close()
        left = await self.only(self.sub(broker, owner="w2"), 39)
        assert len({d.id for d in left}) == len(left) == 39
        assert done.id not in {d.id for d in left}

    @sentence()
    async def test_the_counts_are_right_when_no_work_is_in_progress(self, broker: Broker) -> None:
        """The counts may be estimates while work is in progress."""
        await broker.ensure([TopicSpec(name="t")])

        async def figures(ready: int, in_flight: int) -> None:
            while True:
                s = await broker.stats("t", "main")
                if (s.ready, s.delayed, s.in_flight) == (ready, 0, in_flight):
                    return
                assert not s.exact, f"{s} is called exact"
                await self.sleep(0.1)

        await self.fill(broker, ["a1", "b1", "c1", "d1", "e1"])
        await figures(5, 0)
        sub = self.sub(broker)
        got = await self.only(sub, 5)
        await figures(0, 5)
        await sub.settle([(d, Ack()) for d in got])
        await figures(0, 0)
