"""Tests of the conformance suite for a killed server and a cut connection."""

from __future__ import annotations

import asyncio

from penstock.errors import StoreUnavailable
from penstock.model import Ack, Release
from penstock.ports import Broker, Out, Published
from penstock.testing.broker_rig import BrokerRig, sentence


class Outages(BrokerRig):
    @sentence(limits=3)
    async def test_a_killed_server_loses_no_confirmed_message(self, broker: Broker) -> None:
        sub = await self.fill_and_subscribe(
            broker, ["a0", "b1", "c2", "d3", "e4", "f5"], lease=self.lease
        )
        done, *held = await self.take(sub, 3)
        assert list(await sub.settle([(done, Ack())])) == [True]
        await self.stop_server()
        try:
            try:
                assert Published.OK not in await broker.publish(
                    [Out(topic="t", id="lost", key="k", body=b"")]
                )
                # The subscription may have prefetched a message.
                held += await sub.receive(1, self.patience)
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
    async def test_a_cut_connection_loses_no_message_and_no_settled_message_is_redelivered(
        self, broker: Broker
    ) -> None:
        sub = await self.fill_and_subscribe(broker, ["a0", "b1", "c2", "d3"], lease=self.lease)
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
        await self.fill(broker, ["a1"])
        await self.proxy.lose_answer_to(self.last_word(broker, b"message2"))
        publishing = asyncio.ensure_future(
            broker.publish([Out(topic="t", id="message2", key="message", body=b"message2")])
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
            assert answer is Published.FAILED, "the broker did not confirm the message"
            got = await self.eventually(lambda: self.only(sub, 1))
            assert [d.id for d in got] == ["a1"], "a message reported as failed was published"
            await sub.settle([(d, Release()) for d in got])
        await self.confirmed(broker, ["message2"])
        await self.finish(sub, [], ["a1", "message2"])
