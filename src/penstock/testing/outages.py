"""What every broker must do when its server dies or a connection is cut. Part of the suite in
conformance.py.
"""

from __future__ import annotations

import asyncio

from penstock.errors import StoreUnavailable
from penstock.model import Ack, Release
from penstock.ports import Broker, Out, Published, TopicSpec
from penstock.testing.broker_rig import BrokerRig, sentence


class Outages(BrokerRig):
    @sentence(limits=3)
    async def test_a_server_that_dies_and_comes_back_has_lost_nothing_that_it_confirmed(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a0", "b1", "c2", "d3", "e4", "f5"])
        sub = self.sub(broker, lease=self.lease)
        done, *held = await self.take(sub, 3)
        assert list(await sub.settle([(done, Ack())])) == [True]
        await self.stop_server()
        try:
            try:
                assert Published.OK not in await broker.publish(
                    [Out(topic="t", id="lost", key="k", body=b"")]
                )
                held += await sub.receive(
                    1, self.patience
                )  # what it had fetched before, if anything
            except StoreUnavailable:
                pass
        finally:
            await self.start_server()
        await self.confirmed(broker, ["lost", "late"])
        others = {"a0", "b1", "c2", "d3", "e4", "f5", "lost", "late"} - {
            d.id for d in [done, *held]
        }
        await self.finish(sub, held, sorted(others))

    @sentence(proxied=True, limits=3)
    async def test_a_connection_that_is_cut_loses_nothing_and_what_was_settled_stays_settled(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a0", "b1", "c2", "d3"])
        sub = self.sub(broker, lease=self.lease)
        done, *held = await self.take(sub, 4)
        assert list(await sub.settle([(done, Ack())])) == [True]
        await self.proxy.cut()
        await self.proxy.heal()
        await self.confirmed(broker, ["late"])
        await self.finish(sub, held, ["late"])

    @sentence(proxied=True, limits=3)
    async def test_a_publish_whose_answer_is_lost_is_reported_as_unknown(
        self, broker: Broker
    ) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await self.fill(broker, ["a1"])
        await self.proxy.lose_answer_to(self.last_word(broker, b"letter2"))
        publishing = asyncio.ensure_future(
            broker.publish([Out(topic="t", id="letter2", key="letter", body=b"letter2")])
        )
        await self.proxy.passed()
        await self.proxy.cut()
        try:
            (answer,) = await publishing
        except StoreUnavailable:
            answer = Published.FAILED
        await self.proxy.heal()
        sub = self.sub(broker, lease=self.lease)
        if answer is not Published.UNKNOWN:
            assert answer is Published.FAILED, "nobody said ok"
            got = await self.eventually(lambda: self.only(sub, 1))
            assert [d.id for d in got] == ["a1"], "it said failed, and yet it was there"
            await sub.settle([(d, Release()) for d in got])
        await self.confirmed(broker, ["letter2"])
        await self.finish(sub, [], ["a1", "letter2"])
