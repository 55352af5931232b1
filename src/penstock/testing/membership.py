"""Tests of the conformance suite for groups, history, counts and members."""

from __future__ import annotations

import asyncio
from collections import Counter
from math import inf

from penstock.model import Ack, Dead, Outcome, Release, Retry
from penstock.ports import Broker, Delivery, Out, Subscription, TopicSpec
from penstock.testing.broker_rig import BrokerRig, orders, sentence


class Membership(BrokerRig):
    # -- groups and history ------------------------------------------------------------------------

    @sentence(topics=[TopicSpec(name="t", groups=("main", "archive"))])
    async def test_two_groups_each_receive_all_messages(self, broker: Broker) -> None:
        await self.fill(broker, ["a1", "b1"])
        main, archive = self.sub(broker), self.sub(broker, group="archive")
        got = await self.only(main, 2)
        assert sorted(d.id for d in got) == ["a1", "b1"]
        await main.settle([(d, Ack()) for d in got])
        await self.counts(broker, 0, 0, 0)
        await self.counts(broker, 2, 0, 0, group="archive")
        assert sorted(d.id for d in await self.only(archive, 2)) == ["a1", "b1"]

    @sentence(lambda caps: caps.replay, topics=[TopicSpec(name="t", groups=("main", "other"))])
    async def test_replay_redelivers_settled_messages_since_a_time_but_not_unsettled_ones(
        self, broker: Broker
    ) -> None:
        await self.fill(broker, ["a1", "b1"])
        await self.sleep(1.0)
        since = self.now()
        sub = await self.fill_and_subscribe(broker, ["a2", "b2", "b3"])
        got = {d.id: d for d in await self.only(sub, 5)}
        await sub.settle([(d, Ack()) for d in got.values() if d.id != "b3"])
        assert await broker.replay("t", "main", since=since) == 2
        await self.counts(broker, 2, 0, 1)
        assert sorted(d.id for d in await self.only(sub, 2)) == ["a2", "b2"]
        await self.counts(broker, 5, 0, 0, group="other")

    @sentence()
    async def test_a_position_is_never_reused(self, broker: Broker) -> None:
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
        sub = await self.fill_and_subscribe(broker, ["a1", "a1"])
        got = await self.only(sub, 1)
        if len(got) == 2:  # a broker may also deduplicate by id and keep one message
            assert list(await sub.settle([(got[0], Ack())])) == [True]
            await self.counts(broker, 0, 0, 1)
            assert list(await sub.settle([(got[1], Ack())])) == [True]

    @sentence(topics=())
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

    @sentence(topics=[TopicSpec(name="t"), TopicSpec(name="u")])
    async def test_a_purged_topic_delivers_only_messages_published_after_the_purge(
        self, broker: Broker
    ) -> None:
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
        leaving = await self.fill_and_subscribe(broker, [f"{'abcde'[i % 5]}{i}" for i in range(40)])
        done, *begun = await self.take(leaving, 4)
        await leaving.settle([(done, Ack()), *[(d, Release()) for d in begun]])
        await leaving.close()
        left = await self.only(self.sub(broker, owner="w2"), 39)
        assert len({d.id for d in left}) == len(left) == 39
        assert done.id not in {d.id for d in left}

    @sentence()
    async def test_the_counts_are_right_when_no_work_is_in_progress(self, broker: Broker) -> None:
        """The counts may be estimates while work is in progress."""

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
