"""RabbitMQ: the conformance suite, and tests of its retry queues, routing, alarms and errors."""

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
    """A new virtual host, deleted after the test, and commands of an administrator."""

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
        """Run `rabbitmqctl` without the wrapper, which needs the server of the machine."""
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
    """End the connections like a SIGKILL of the process."""
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


def test_only_an_unroutable_message_is_reported_as_failed(
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


def test_another_program_can_bind_a_queue_by_topic_priority_class_and_key(host: Host) -> None:
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


def test_a_message_of_another_program_gets_an_id_that_stays_the_same(host: Host) -> None:
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


def test_a_message_that_cannot_be_encoded_fails_alone(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        assert list(
            await broker.publish(
                [out("a"), out("b", headers={"h": "\ud800"}), out("i" * 300), out("c")]
            )
        ) == ["ok", "failed", "failed", "ok"]

    run(host, test)


# -- waiting ---------------------------------------------------------------------------------------


def test_delayed_messages_are_delivered_in_the_order_of_their_due_times(
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
    ]  # the shortest is longer than publishing takes

    async def watch(worst: list[float]) -> None:
        """Measure the longest pause of this machine.

        Delays that end within such a pause may end in any order.
        """
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.02)
            worst.append(max(worst.pop(), time.monotonic() - began))

    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        pause = [0.0]
        watching = asyncio.create_task(watch(pause))
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
        assert all(a < b + pause[0] + 0.2 for i, a in enumerate(order) for b in order[i + 1 :]), (
            f"{order}, and the machine paused for {pause[0]:.1f} s"
        )
        assert all(at >= float(id) - 0.01 for id, at in seen), (
            "a message was delivered before it was due"
        )

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


def test_a_message_over_the_delivery_limit_is_a_dead_letter_with_that_reason(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        broker.names.delivery_limit = 2
        await broker.ensure([TopicSpec(name="t")])
        await broker.publish([out("poison", headers={"h": "v"})])
        for n in (1, 2, 3):
            victim = host.broker()
            (d,) = await take(victim.subscribe("t", "main", owner="victim", lease=30), 1)
            assert d.deliveries == n
            drop(victim)
        (dead_letter,) = await take(broker.subscribe("t.dead", "main", owner="w", lease=30), 1)
        assert (dead_letter.id, dead_letter.key, dead_letter.body, dead_letter.headers["h"]) == (
            "poison",
            "shop.test",
            b"poison",
            "v",
        )
        assert "gave it up" in dead_letter.headers["penstock-reason"]

    run(host, test)


# -- failures --------------------------------------------------------------------------------------


def test_a_memory_alarm_blocks_publishing_but_not_acks_and_ends_with_the_alarm(
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
                pass  # the alarm takes a while to arrive
            assert answers == ["unknown"], "the message was sent before the alarm arrived"
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


def test_publishing_to_a_queue_at_its_limit_is_reported_as_full(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t", max_depth=5)])
        answers = [(await broker.publish([out(f"m{i}")]))[0] for i in range(20)]
        assert answers[:5] == ["ok"] * 5
        assert answers[-1] == "full"
        drift = await broker.ensure([TopicSpec(name="t", max_depth=6)])
        assert drift[0] == (
            "queue shop.t/main.high: x-max-length is 5 on the server and 6 in the configuration; "
            "delete the queue when it is empty to change that"
        )

    run(host, test)


def test_a_delivery_of_a_closed_channel_cannot_be_settled(host: Host) -> None:
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


def test_a_deleted_queue_is_created_again(host: Host) -> None:
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


def test_stats_with_the_management_api_count_deliveries_of_other_processes(host: Host) -> None:
    api = f"{host.url}?management=http://127.0.0.1:{host.server.ports('management')}"

    async def test(broker: RabbitBroker) -> None:
        await broker.ensure([TopicSpec(name="t")])
        await broker.publish([out("a"), out("b")])
        other = host.broker()
        assert len(await take(other.subscribe("t", "main", owner="other", lease=30), 2)) == 2
        seen = 0
        while seen != 2:  # the server updates its counters periodically
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


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dsn", "message"),
    [
        ("amqp://", "names no RabbitMQ server"),
        ("amqp:///vhost", "names no RabbitMQ server"),
        ("amqp://me:secret@host:port/", "is not an address"),
        ("amqp://me:secret@host/a/b", "'/'"),
        ("amqp://me:se#cret@host/", "'#'"),
        ("amqp://me:secret@host/?prefetch=3", "no option 'prefetch'"),
        ("amqp://me:secret@host/?heartbeat=soon", "heartbeat is 'soon'"),
        ("amqp://me:secret@host/?management=localhost:15672", "management API"),
        ("amqp://me:secret@host/?publish_timeout=-1", "publish_timeout is '-1'"),
    ],
)
def test_an_invalid_address_is_an_error_that_does_not_show_the_password(
    dsn: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_address(dsn)
    assert message in caught.value.message
    assert caught.value.hint
    assert "cret" not in caught.value.message + caught.value.hint


def refused(broker: RabbitBroker) -> Unreachable:
    async def attempt() -> None:
        try:
            await broker.ensure([TopicSpec(name="t")])
        finally:
            await broker.close()

    with pytest.raises(Unreachable) as caught:
        asyncio.run(attempt())
    assert caught.value.hint
    return caught.value


def test_bad_password_unknown_vhost_and_unreachable_server_have_different_errors(
    host: Host,
) -> None:
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
    assert "no TLS connection" in refused(host.broker(f"amqps://guest:guest@{place}/")).message


def test_a_server_with_another_protocol_is_an_error(host: Host) -> None:
    async def test() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(8)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
            port = other.sockets[0].getsockname()[1]
            broker = host.broker(f"amqp://guest:guest@127.0.0.1:{port}/")
            with pytest.raises(Unreachable, match="is not RabbitMQ"):
                await broker.ensure([TopicSpec(name="t")])
            await broker.close()

    asyncio.run(test())


def test_the_error_for_a_user_without_permissions_names_the_fix(host: Host) -> None:
    host.ask("PUT", "users/reader", {"password": "reader", "tags": ""})
    host.ask(
        "PUT", f"permissions/{host.vhost}/reader", {"configure": "", "write": "", "read": ".*"}
    )
    caught = refused(host.broker(host.url.replace("guest:guest", "reader:reader")))
    assert "may not declare" in caught.message
    assert "set_permissions" in caught.hint


def test_an_ordered_topic_is_refused_with_its_reason(host: Host) -> None:
    async def test(broker: RabbitBroker) -> None:
        with pytest.raises(ConfigError, match="order per key"):
            await broker.ensure([TopicSpec(name="t", ordered=True)])

    run(host, test)
