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

from penstock.model import Ack, Dead, Release, Retry
from penstock.ports import Broker, Delivery, Out, Published, TopicSpec
from penstock.testing.broker_rig import LONG_LEASE, delays, leases_expire, sentence
from penstock.testing.membership import Membership
from penstock.testing.ordering import Ordering
from penstock.testing.outages import Outages

MIB = 1 << 20


class BrokerConformance(Ordering, Membership, Outages):
    """The tests of the suite. See `broker_rig` for the hooks that a subclass may define."""

    # -- publish, receive, settle ------------------------------------------------------------------

    @sentence()
    async def test_a_published_message_arrives_once_with_its_key_body_and_headers(
        self, broker: Broker
    ) -> None:
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
        assert await self.left(self.sub(broker)) == []
        await self.counts(broker, 0, 0, 0)
        assert (await broker.stats("t", "main")).oldest_age is None

    @sentence(topics=[TopicSpec(name="t"), TopicSpec(name="u")])
    async def test_publish_answers_for_each_message_in_order(self, broker: Broker) -> None:
        answers = await broker.publish(
            [Out(topic=t, id=f"{t}{i}", key="k", body=b"") for t in ("t", "u") for i in range(3)]
        )
        assert list(answers) == [Published.OK] * 6
        assert [d.id for d in await self.only(self.sub(broker, "u"), 3)] == ["u0", "u1", "u2"]
        assert list(await broker.publish([])) == []

    @sentence(
        lambda caps: caps.bounded, topics=[TopicSpec(name="t", max_depth=3), TopicSpec(name="u")]
    )
    async def test_a_full_topic_reports_full_per_message_and_accepts_more_after_an_ack(
        self, broker: Broker
    ) -> None:
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
        sub = await self.fill_and_subscribe(broker, ["a1", "a2"])
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
        sub = await self.fill_and_subscribe(broker, ["a1"], lease=self.lease)
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
        sub = await self.fill_and_subscribe(broker, ["a1", "a2"])
        got = await self.take(sub, 2)
        await sub.settle([(d, Release()) for d in got])
        await self.counts(broker, 2, 0, 0)
        assert sorted(d.id for d in await self.only(self.sub(broker, owner="w2"), 2)) == [
            "a1",
            "a2",
        ]

    @sentence(topics=[TopicSpec(name="t"), TopicSpec(name="t.dead")])
    async def test_a_dead_letter_keeps_bytes_headers_reason_and_position(
        self, broker: Broker
    ) -> None:
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

    @sentence(topics=[TopicSpec(name="t"), TopicSpec(name="t.dead")])
    async def test_a_dead_letter_can_be_redriven(self, broker: Broker) -> None:
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
        sub = await self.fill_and_subscribe(broker, ["a1", "a2"])
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
        sub = await self.fill_and_subscribe(broker, ["a1", "a2", "b1"])
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
