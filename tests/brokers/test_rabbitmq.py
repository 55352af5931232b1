"""RabbitMQ: the suite every broker passes, and what is its own: the ladder, unroutable messages,
alarms, outages, and how it says no.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.brokers.served import Served
from tests.servers import Handle

from penstock.brokers.rabbitmq.broker import RabbitBroker
from penstock.brokers.rabbitmq.connection import read_address
from penstock.clock import SystemClock
from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.model import Ack, Dead, Release, Retry
from penstock.ports import Broker, Delivery, Out, Subscription, TopicSpec

pytestmark = pytest.mark.server("rabbitmq")


class Host:
    """A virtual host of its own, with everything in it gone afterwards; and what an administrator
    can do.
    """

    def __init__(self, server: Handle) -> None:
        self.server, self.vhost = server, "t" + secrets.token_hex(4)
        self.url = server.url + self.vhost
        self.ask("PUT", f"vhosts/{self.vhost}")
        self.ask(
            "PUT",
            f"permissions/{self.vhost}/guest",
            {"configure": ".*", "write": ".*", "read": ".*"},
        )

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        address = f"http://127.0.0.1:{self.server.ports('management')}/api/{path}"
        headers = {
            "authorization": "Basic " + base64.b64encode(b"guest:guest").decode(),
            "content-type": "application/json",
        }
        request = urllib.request.Request(
            address,
            method=method,
            headers=headers,
            data=None if body is None else json.dumps(body).encode(),
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or b"null")

    def control(self, *args: str) -> None:
        """`rabbitmqctl`, without the wrapper that insists on the machine's own server."""
        server = self.server._server
        program = next(Path("/usr/lib/rabbitmq/bin").glob("rabbitmqctl"))
        subprocess.run(
            [program, *args],
            env={**os.environ, **server.environment()},
            check=True,
            capture_output=True,
            timeout=60,
        )

    def broker(self, url: str = "", **more: Any) -> RabbitBroker:
        return RabbitBroker(
            read_address(url or self.url), "shop", SystemClock(), worker="tests", **more
        )

    def remove(self) -> None:
        self.ask("DELETE", f"vhosts/{self.vhost}")


@pytest.fixture
def host(server: Callable[[str], Handle]) -> Iterator[Host]:
    made = Host(server("rabbitmq"))
    yield made
    made.remove()


class TestRabbitMQ(Served):
    name = "rabbitmq"
    lease = 0.5
    patience = 0.5
    slack = 0.6

    @pytest.fixture(autouse=True)
    def _its_host(self, host: Host) -> None:
        self.host = host

    async def open(self) -> RabbitBroker:
        return self.host.broker(self.url + self.host.vhost)

    async def reopen(self, broker: Broker) -> RabbitBroker:
        assert isinstance(broker, RabbitBroker)
        drop(broker)
        return await self.open()


def drop(broker: RabbitBroker) -> None:
    """As a SIGKILL of the process would."""
    broker.consuming.abort()
    broker.publishing.abort()


def run(host: Host, test: Callable[[RabbitBroker], Awaitable[None]], **more: Any) -> None:
    async def within() -> None:
        broker = host.broker(**more)
        try:
            async with asyncio.timeout(120):
                await test(broker)
        finally:
            await broker.close()

    asyncio.run(within())


def out(id: str, **more: Any) -> Out:
    return Out(**{"topic": "t", "id": id, "key": "shop.test", "body": id.encode(), **more})


async def take(sub: Subscription, n: int, wait: float = 25.0) -> list[Delivery]:
    got: list[Delivery] = []
    while len(got) < n and (some := await sub.receive(n - len(got), wait)):
        got += some
    return got


# -- routing ---------------------------------------------------------------------------------------


def test_a_message_that_reaches_no_queue_is_reported_as_failed_and_the_others_are_not(
    host: Host,
) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        answers = await broker.publish(
            [
                out("a"),
                out("b", topic="nobody-listens"),
                out("c"),
                out("b", topic="nobody-listens"),
                out("b"),
            ]
        )
        assert list(answers) == ["ok", "failed", "ok", "failed", "ok"]

    run(host, test)


def test_another_program_binds_its_own_queue_by_stage_class_and_target(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t"), TopicSpec(name="t.dead")])
        channel = await broker.consuming.channel()
        await channel.queue_declare("theirs", exclusive=True)
        await channel.queue_bind("theirs", "shop", "t.high.#.test")
        await broker.publish(
            [
                out("a"),
                out("b", priority=0),
                out("c", priority=0, key="other.example"),
                out("d", topic="t.dead", priority=0),
            ]
        )
        assert [
            (await channel.basic_get("theirs", no_ack=True)).header.properties.message_id
            for _ in range(2)
        ] == ["b", None]

    run(host, test)


def test_a_message_of_another_program_gets_an_id_once_and_keeps_it(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        for i in range(2):
            host.ask(
                "POST",
                f"exchanges/{host.vhost}/shop/publish",
                {
                    "properties": {"headers": {"count": 3, "flag": True}},
                    "routing_key": "t.normal.their.shop",
                    "payload": f"body {i}",
                    "payload_encoding": "string",
                },
            )
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        first, second = await take(sub, 2)
        assert first.id
        assert second.id
        assert first.id != second.id
        assert {first.body, second.body} == {b"body 0", b"body 1"}
        assert (first.key, first.headers, first.deliveries) == (
            "their.shop",
            {"count": "3", "flag": "True"},
            1,
        )
        await sub.settle([(first, Retry(0.0, "x")), (second, Ack())])
        (again,) = await take(sub, 1)
        assert (again.id, again.deliveries) == (first.id, 2)

    run(host, test)


def test_a_key_that_is_long_or_odd_is_delivered_unchanged(host: Host) -> None:
    keys = ["x" * 400, "", "a b*#.c", "日本" * 60, "a..b."]

    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        assert set(await broker.publish([out(f"m{i}", key=key) for i, key in enumerate(keys)])) == {
            "ok"
        }
        got = await take(broker.subscribe("t", "main", owner="w", lease=30), len(keys))
        assert {d.id: d.key for d in got} == {f"m{i}": key for i, key in enumerate(keys)}

    run(host, test)


def test_what_cannot_be_put_into_a_message_fails_alone(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        assert list(
            await broker.publish(
                [out("a"), out("b", headers={"h": "\ud800"}), out("i" * 300), out("c")]
            )
        ) == ["ok", "failed", "failed", "ok"]

    run(host, test)


# -- waiting ---------------------------------------------------------------------------------------


def test_many_delays_end_in_the_order_of_their_times_whatever_was_asked_for_first(
    host: Host,
) -> None:
    delays = [
        4.0,
        1.0,
        2.5,
        0.0,
        1.8,
        1.4,
        3.2,
        0.6,
    ]  # the shortest is longer than it takes to publish them all

    async def watch(worst: list[float]) -> None:
        """How long this machine stood still at most: what ends within that time may end in any
        order.
        """
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.02)
            worst.append(max(worst.pop(), time.monotonic() - began))

    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        stood = [0.0]
        watching = asyncio.create_task(watch(stood))
        began = time.time()
        assert set(
            await broker.publish([out(f"{delay:g}", not_before=began + delay) for delay in delays])
        ) == {"ok"}
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        seen: list[tuple[str, float]] = []
        while len(seen) < len(delays):
            for d in await sub.receive(10, 5.0):
                seen.append((d.id, time.time() - began))
                await sub.settle([(d, Ack())])
        watching.cancel()
        order = [float(id) for id, _ in seen]
        assert sorted(order) == sorted(delays)
        assert all(a < b + stood[0] + 0.2 for i, a in enumerate(order) for b in order[i + 1 :]), (
            f"{order}, and the machine stood still for {stood[0]:.1f} s"
        )
        assert all(at >= float(id) - 0.01 for id, at in seen), "none came before its time"

    run(host, test)


def test_a_retry_waits_for_its_own_group_only(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t", groups=("main", "archive"))])
        await broker.publish([out("a")])
        main, archive = (
            broker.subscribe("t", group, owner=group, lease=30) for group in ("main", "archive")
        )
        (theirs,) = await take(archive, 1)
        await archive.settle([(theirs, Ack())])
        (ours,) = await take(main, 1)
        await main.settle([(ours, Retry(1.1, "x"))])
        (again,) = await take(main, 1)
        assert (again.id, again.deliveries, again.headers) == ("a", 2, {})
        assert await take(archive, 1, 0.5) == []

    run(host, test)


def test_what_the_server_gives_up_is_a_dead_letter_that_says_so(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        broker.names.delivery_limit = 2
        await broker.ensure([TopicSpec(name="t")])
        await broker.publish([out("poison", headers={"h": "v"})])
        for n in (1, 2, 3):
            victim = host.broker()
            (d,) = await take(victim.subscribe("t", "main", owner="victim", lease=30), 1)
            assert d.deliveries == n
            drop(victim)
        (letter,) = await take(broker.subscribe("t.dead", "main", owner="w", lease=30), 1)
        assert (letter.id, letter.key, letter.body, letter.headers["h"]) == (
            "poison",
            "shop.test",
            b"poison",
            "v",
        )
        assert "gave it up" in letter.headers["penstock-reason"]

    run(host, test)


# -- trouble ---------------------------------------------------------------------------------------


def test_a_server_short_of_memory_is_full_acks_get_through_and_it_goes_on_afterwards(
    host: Host,
) -> None:
    async def watermark(*level: str) -> None:
        await asyncio.to_thread(host.control, "set_vm_memory_high_watermark", *level)

    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await broker.publish([out("a")])
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        (a,) = await take(sub, 1)
        await watermark("absolute", "1MB")
        try:
            while (answers := list(await broker.publish([out("b")]))) == ["ok"]:
                pass  # the alarm goes round in its own time
            assert answers == ["unknown"], (
                "it was sent before the server said that it takes nothing"
            )
            assert list(await broker.publish([out("c"), out("d")])) == ["full", "full"]
            with pytest.raises(StoreUnavailable):
                await sub.settle([(a, Retry(0.0, "x"))])
            assert list(await sub.settle([(a, Ack())])) == [True]
        finally:
            await watermark("0.4")
        while list(await broker.publish([out("e")])) != ["ok"]:
            pass
        got: set[str] = set()
        while "e" not in got:
            got |= {d.id for d in await take(sub, 1)}
        assert got <= {"b", "e"}

    run(host, test, url=host.url + "?publish_timeout=1")


def test_a_queue_at_its_limit_says_full(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t", max_depth=5)])
        answers = [(await broker.publish([out(f"m{i}")]))[0] for i in range(20)]
        assert answers[:5] == ["ok"] * 5
        assert answers[-1] == "full"
        drift = await broker.ensure([TopicSpec(name="t", max_depth=6)])
        assert drift[0] == (
            "queue shop.t/main.high: x-max-length is 5 on the server and 6 in the configuration; delete the queue when it is empty to change that"
        )

    run(host, test)


def test_what_another_channel_held_is_refused_and_touches_nothing(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await broker.publish([out("a")])
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        (old,) = await take(sub, 1)
        drop(broker)
        while True:
            try:
                (new,) = await take(sub, 1)
                break
            except StoreUnavailable:
                await asyncio.sleep(0.05)
        assert new.id == old.id
        assert (new.token, new.position) != (old.token, old.position)
        assert new.deliveries == 2
        assert list(await sub.extend([old, new], 30)) == [False, True]
        for outcome in (Ack(), Retry(0.0, "x"), Release(), Dead("x")):
            assert list(await sub.settle([(old, outcome)])) == [False]
        assert list(await sub.settle([(new, Ack())])) == [True]

    run(host, test)


def test_a_queue_that_was_deleted_is_made_again(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        assert await take(sub, 1, 0.1) == []
        channel = await broker.consuming.channel()
        await channel.queue_delete("shop.t/main.normal")
        assert list(await broker.publish([out("a")])) == ["failed"]
        while list(await broker.publish([out("a")])) != ["ok"]:
            try:
                await sub.receive(1, 0.1)
            except StoreUnavailable:
                pass
        assert [d.id for d in await take(sub, 1)] == ["a"]

    run(host, test)


def test_with_the_management_api_figures_know_what_others_have_in_flight(host: Host) -> None:
    api = f"{host.url}?management=http://127.0.0.1:{host.server.ports('management')}"

    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await broker.publish([out("a"), out("b")])
        other = host.broker()
        assert len(await take(other.subscribe("t", "main", owner="other", lease=30), 2)) == 2
        seen = 0
        while seen != 2:  # the server counts once in a while
            seen = (await broker.stats("t", "main")).in_flight
            await asyncio.sleep(0.1)
        await other.close()

    run(host, test, url=api)
    assert (
        "refuses the user 'nobody'"
        in refused(host.broker(api.replace("http://", "http://nobody:x@"))).message
    )
    assert (
        "cannot be reached"
        in refused(host.broker(f"{host.url}?management=http://127.0.0.1:1")).message
    )


# -- how it says no --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("amqp://", "names no RabbitMQ server"),
        ("amqp:///vhost", "names no RabbitMQ server"),
        ("amqp://me:secret@host:port/", "is not an address"),
        ("amqp://me:secret@host/a/b", "'/'"),
        ("amqp://me:se#cret@host/", "'#'"),
        ("amqp://me:secret@host/?prefetch=3", "no option 'prefetch'"),
        ("amqp://me:secret@host/?heartbeat=soon", "heartbeat is not a number"),
        ("amqp://me:secret@host/?management=localhost:15672", "management API"),
        ("amqp://me:secret@host/?publish_timeout=-1", "publish_timeout is not a number"),
    ],
)
def test_a_mistyped_address_is_told_without_its_password(dsn: str, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        read_address(dsn)
    assert said in told.value.message
    assert told.value.hint
    assert "cret" not in told.value.message + told.value.hint


def refused(broker: RabbitBroker) -> Unreachable:
    async def attempt() -> None:
        try:
            await broker.ensure([TopicSpec(name="t")])
        finally:
            await broker.close()

    with pytest.raises(Unreachable) as told:
        asyncio.run(attempt())
    assert told.value.hint
    return told.value


def test_each_way_of_not_getting_in_has_its_own_sentence(host: Host) -> None:
    place = f"127.0.0.1:{host.server.port}"
    assert (
        refused(host.broker(f"amqp://guest:hunter2@{place}/")).message
        == f"RabbitMQ at {place} refuses the user 'guest' or its password"
    )
    nowhere = refused(host.broker(f"amqp://guest:guest@{place}/nowhere"))
    assert (
        nowhere.message
        == f"RabbitMQ at {place} has no virtual host 'nowhere', or does not let the user 'guest' in"
    )
    assert "add_vhost nowhere" in nowhere.hint
    assert "cannot be reached: " in refused(host.broker("amqp://guest:guest@127.0.0.1:1/")).message
    assert (
        "cannot be reached: "
        in refused(host.broker("amqp://guest:guest@no.such.host.invalid/")).message
    )
    assert "do not agree on TLS" in refused(host.broker(f"amqps://guest:guest@{place}/")).message


def test_a_server_that_speaks_another_protocol_is_told_apart(host: Host) -> None:
    async def test() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(8)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
            port = other.sockets[0].getsockname()[1]
            broker = host.broker(f"amqp://guest:guest@127.0.0.1:{port}/")
            with pytest.raises(Unreachable, match="is no RabbitMQ"):
                await broker.ensure([TopicSpec(name="t")])
            await broker.close()

    asyncio.run(test())


def test_a_user_who_may_not_declare_is_told_what_is_missing(host: Host) -> None:
    host.ask("PUT", "users/reader", {"password": "reader", "tags": ""})
    host.ask(
        "PUT", f"permissions/{host.vhost}/reader", {"configure": "", "write": "", "read": ".*"}
    )
    told = refused(host.broker(host.url.replace("guest:guest", "reader:reader")))
    assert "may not declare" in told.message
    assert "set_permissions" in told.hint


def test_an_ordered_topic_is_refused_with_a_way_out(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        with pytest.raises(ConfigError, match="order per key"):
            await broker.ensure([TopicSpec(name="t", ordered=True)])

    run(host, test)
