"""Redis Streams: the conformance suite and tests of this adapter."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from tests.brokers.served import Served
from tests.servers import Handle

from penstock.brokers.redis import broker as adapter
from penstock.brokers.redis.broker import RedisBroker, base_of, entry_of, position
from penstock.clock import SystemClock
from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.model import Ack, Dead, Retry
from penstock.ports import Broker, Delivery, Out, Published, Subscription, TopicSpec
from penstock.rules.priority import CLASSES
from penstock.stores.redis import Server, parse

pytestmark = pytest.mark.server("redis")
Servers = Callable[[str], Handle]


def fresh(url: str, prefix: str = "") -> RedisBroker:
    return RedisBroker(
        Server(url, evictable=False), prefix or f"t{uuid.uuid4().hex[:8]}", SystemClock()
    )


class TestRedis(Served):
    name = "redis"
    lease = 4.0
    slack = 0.6

    async def open(self) -> Broker:
        self.broker = fresh(self.url)
        return self.broker

    async def reopen(self, broker: Broker) -> Broker:
        await broker.close()
        return fresh(self.url, self.broker.prefix)


@pytest.fixture
def by_hand(server: Servers) -> Iterator[Redis]:
    """A client for commands of an operator. Restores the settings of the server afterwards."""
    with Redis.from_url(server("redis").url) as client:
        names = ("maxmemory", "maxmemory-policy", "appendonly")
        before = {name: client.config_get(name)[name] for name in names}
        yield client
        for name, value in before.items():
            client.config_set(name, value)
        while (info := client.info("persistence"))["aof_rewrite_in_progress"] or info[
            "aof_rewrite_scheduled"
        ]:
            time.sleep(0.05)  # an unfinished append-only file is lost by a kill


@contextlib.asynccontextmanager
async def opened(url: str, *topics: TopicSpec, prefix: str = "") -> AsyncIterator[RedisBroker]:
    broker = fresh(url, prefix)
    try:
        await broker.ensure(topics or [TopicSpec(name="t")])
        yield broker
    finally:
        await broker.close()


def messages(*ids: str, topic: str = "t") -> list[Out]:
    return [Out(topic=topic, id=i, key=i[0], body=i.encode()) for i in ids]


async def drained(sub: Subscription) -> list[Delivery]:
    got: list[Delivery] = []
    while some := await sub.receive(100, 0):
        got += some
    return got


# -- outages ---------------------------------------------------------------------------------------


async def test_a_killed_and_restarted_server_keeps_all_messages_and_settles(
    server: Servers,
) -> None:
    redis = server("redis")
    async with opened(redis.url) as broker:
        await broker.publish(messages(*[f"a{i}" for i in range(50)]))
        sub = broker.subscribe("t", "main", owner="w1", lease=1.0)
        got = await sub.receive(20, 0)
        await sub.settle([(d, Ack()) for d in got[:5]] + [(got[5], Retry(0.0, "x"))])
        redis.kill()
        for call in (
            sub.receive(5, 0),
            sub.settle([(got[6], Ack())]),
            sub.extend(got, 1.0),
            broker.stats("t", "main"),
        ):
            with pytest.raises(StoreUnavailable, match="Redis at 127"):
                await call
        redis.start()
        assert list(await sub.settle([(got[6], Ack()), (got[0], Ack())])) == [True, False], (
            "the lease survives the restart of the server"
        )
        done = {d.id for d in [*got[:5], got[6]]}
        seen: set[str] = set()
        while len(seen) < 44:
            some = await sub.receive(10, 1.0)
            assert all(await sub.settle([(d, Ack()) for d in some]))
            seen |= {d.id for d in some}
        assert seen == {f"a{i}" for i in range(50)} - done
        s = await broker.stats("t", "main")
        assert (s.ready, s.delayed, s.in_flight) == (0, 0, 0)


async def test_publishing_to_an_unreachable_server_raises_an_error(server: Servers) -> None:
    redis = server("redis")
    async with opened(redis.url) as broker:
        redis.kill()
        # Or unknown, on a connection whose end was not detected yet.
        with contextlib.suppress(StoreUnavailable):
            assert list(await broker.publish(messages("a1"))) == [Published.UNKNOWN]
        with pytest.raises(StoreUnavailable):
            await broker.publish(messages("a1"))


async def test_scripts_are_loaded_again_after_a_script_flush(
    server: Servers, by_hand: Redis
) -> None:
    async with opened(server("redis").url) as broker:
        by_hand.script_flush()
        assert list(await broker.publish(messages("a1"))) == [Published.OK]
        by_hand.script_flush()
        assert [d.id for d in await drained(broker.subscribe("t", "main", owner="w", lease=5))] == [
            "a1"
        ]


async def test_a_full_server_refuses_new_messages_and_can_be_drained(
    server: Servers, by_hand: Redis
) -> None:
    async with opened(server("redis").url) as broker:
        await broker.publish(messages("a1", "a2", "b1"))
        by_hand.config_set("maxmemory", "1mb")  # less than an empty server has
        assert list(await broker.publish(messages("c1", "c2"))) == [Published.FULL] * 2
        sub = broker.subscribe("t", "main", owner="w", lease=5)
        got = await drained(sub)
        assert {d.id for d in got} == {"a1", "a2", "b1"}
        assert all(
            await sub.settle([(got[0], Ack()), (got[1], Retry(0.0, "x")), (got[2], Dead("no"))])
        )
        assert len(await drained(sub)) == 1
        by_hand.config_set("maxmemory", "0")
        assert list(await broker.publish(messages("c1"))) == [Published.OK]


# -- starting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://", "names no host"),
        ("redis:/var/run", "names no host"),
        ("redis://h:port/0", "port that is not a number"),
        ("redis://h:99999/0", "port that is not a number"),
        ("redis://h/zero", "names a database that is not a number"),
        ("redis://u:secret@h/?password=secret", "no option 'password'"),
        ("redis://u:secret@h/?volatile=maybe", "volatile"),
        ("redis://h/?ssl_ca_certs=x", "ssl_ca_certs"),
        ("rediss://h/?ssl_ca_certs=/no/such.pem", "ssl_ca_certs is '/no/such.pem'"),
    ],
)
def test_an_invalid_address_is_an_error_that_does_not_show_the_password(
    url: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as e:
        parse(url)
    assert "secret" not in e.value.message + e.value.hint
    assert e.value.hint


def test_an_address_with_all_options_is_parsed() -> None:
    options, volatile = parse(
        f"rediss://us%40er:p%2Fw@h.test:1234/5?volatile=allow&ssl_ca_certs={__file__}"
    )
    assert options == {
        "host": "h.test",
        "port": 1234,
        "db": 5,
        "username": "us@er",
        "password": "p/w",
        "ssl_ca_certs": __file__,
    }
    assert volatile


FINE = {
    "redis_version": "7.0.15",
    "role": "master",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
    "cluster_enabled": "0",
}


@pytest.mark.parametrize(
    ("fact", "says"),
    [
        ({"redis_version": "6.2.14"}, "version 6.2.14; Penstock needs 7.0 or newer"),
        ({"role": "slave"}, "is a replica"),
        ({"cluster_enabled": "1"}, "is a cluster node"),
        ({"maxmemory_policy": "allkeys-lru"}, "may evict keys of Penstock"),
        ({"aof_enabled": "0"}, "loses its data on a restart"),
    ],
)
def test_an_unsuitable_server_is_refused_with_its_reason(fact: dict[str, str], says: str) -> None:
    Server("redis://h:1", evictable=True).judge(FINE)
    with pytest.raises(Unreachable, match=says) as e:
        Server("redis://h:1", evictable=False).judge({**FINE, **fact})
    assert e.value.hint


def test_a_policy_that_evicts_expiring_keys_is_refused_for_expiring_keys() -> None:
    facts = {**FINE, "maxmemory_policy": "volatile-ttl"}
    Server("redis://h:1", evictable=False).judge(facts)
    with pytest.raises(Unreachable, match="volatile-ttl"):
        Server("redis://h:1", evictable=True).judge(facts)


@pytest.mark.parametrize(
    ("name", "value"), [("maxmemory-policy", "allkeys-lfu"), ("appendonly", "no")]
)
async def test_an_evicting_or_volatile_server_is_refused_unless_allowed(
    server: Servers, by_hand: Redis, name: str, value: str
) -> None:
    by_hand.config_set(name, value)
    broker = fresh(server("redis").url)
    with pytest.raises(
        Unreachable, match="evict keys of Penstock" if name.startswith("max") else "loses its data"
    ):
        await broker.ensure([TopicSpec(name="t")])
    await broker.close()
    async with opened(server("redis").url + "?volatile=allow") as allowed:
        assert list(await allowed.publish(messages("a1"))) == [Published.OK]


async def test_bad_password_missing_permission_and_no_server_have_different_errors(
    server: Servers, by_hand: Redis
) -> None:
    place = f"127.0.0.1:{server('redis').port}"
    by_hand.execute_command(
        "ACL", "SETUSER", "reader", "on", ">right", "~*", "+@read", "+info", "+@connection"
    )
    try:
        for url, says in [
            (f"redis://reader:wrong@{place}", "refuses the user or password"),
            (f"redis://reader:right@{place}", "denies this user a command"),
            ("redis://reader:right@127.0.0.1:1", "no Redis server answers at 127.0.0.1:1"),
        ]:
            broker = fresh(url)
            with pytest.raises(Unreachable, match=says) as e:
                await broker.ensure([TopicSpec(name="t")])
            assert "right" not in e.value.message + e.value.hint
            assert e.value.hint
            await broker.close()
    finally:
        by_hand.execute_command("ACL", "DELUSER", "reader")


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Start a server that accepts only TLS. Yield its port and its certificate."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = (
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        certificate,
        "-subj",
        "/CN=localhost",
    )
    subprocess.run(
        [*made, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True
    )
    options = (
        "--tls-cert-file",
        certificate,
        "--tls-key-file",
        key,
        "--tls-ca-cert-file",
        certificate,
        "--tls-auth-clients",
        "no",
        "--appendonly",
        "yes",
    )
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen(
            ["redis-server", "--port", "0", "--tls-port", str(port), "--dir", tmp_path, *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        log = []
        for line in process.stdout:
            log.append(line)
            if "Ready to accept connections" in line:
                break
        else:
            process.wait()
            # Another process has taken the port, perhaps for an outgoing connection.
            assert "Address already in use" in "".join(log)
            continue
        break
    yield port, certificate
    process.kill()
    process.communicate()


async def test_over_tls_the_certificate_must_be_trusted(tls: tuple[int, Path]) -> None:
    port, certificate = tls
    async with opened(f"rediss://localhost:{port}?ssl_ca_certs={certificate}") as broker:
        assert list(await broker.publish(messages("a1"))) == [Published.OK]
    for url, says in [
        (f"rediss://localhost:{port}", "certificate of Redis at localhost"),
        (f"redis://localhost:{port}", "no Redis server answers"),
    ]:
        broker = fresh(url)
        with pytest.raises(Unreachable, match=says):
            await broker.ensure([TopicSpec(name="t")])
        await broker.close()


# -- streams ---------------------------------------------------------------------------------------


def test_a_position_is_unique_and_can_be_converted_back_to_its_entry() -> None:
    rng = random.Random(5)
    seen = set()
    for _ in range(2000):
        rank, ms, seq = (
            rng.randrange(3),
            rng.randrange(1_600_000_000_000, 2_600_000_000_000),
            rng.choice([0, 1, 7, 999_999, 2_000_000]),
        )
        p = position(rank, f"{ms}-{seq}".encode())
        assert 0 < p < 1 << 63
        assert entry_of(p) == (CLASSES[rank], f"{ms}-{seq}")
        seen.add((p, (rank, ms, seq)))
    assert len({p for p, _ in seen}) == len(seen)


def test_a_topic_and_its_dead_letters_share_a_hash_tag() -> None:
    assert base_of("shop", "requests") == "{shop.requests}"
    assert base_of("shop", "requests.dead") == "{shop.requests}.dead"
    assert base_of("a{b}", "c") == "{a_b_.c}"


async def test_deliveries_in_flight_are_in_the_pending_list_under_their_owner(
    server: Servers, by_hand: Redis
) -> None:
    async with opened(server("redis").url) as broker:
        await broker.publish(messages("a1", "a2", "b1"))
        sub = broker.subscribe("t", "main", owner="w1", lease=30)
        got = await sub.receive(2, 0)
        rows = by_hand.xpending_range(broker.base("t") + ":normal", "main", "-", "+", 10)
        assert [(r["consumer"], r["times_delivered"]) for r in rows] == [(b"w1", 1)] * 2
        await sub.settle([(d, Ack()) for d in got])
        await sub.close()
        assert by_hand.xinfo_consumers(broker.base("t") + ":normal", "main") == []


async def test_an_entry_of_another_tool_is_delivered_and_can_be_dead_lettered(
    server: Servers, by_hand: Redis
) -> None:
    async with opened(server("redis").url) as broker:
        by_hand.xadd(broker.base("t") + ":normal", {"payload": b"\xff{"})
        by_hand.xadd(
            broker.base("t") + ":normal", {"body": b"{}", "key": b"\xff", "headers": "no json"}
        )
        sub = broker.subscribe("t", "main", owner="w", lease=5)
        got = await drained(sub)
        assert sorted((d.body, d.headers) for d in got) == [(b"{}", {}), (b"\xff{", {})]
        assert all(await sub.settle([(d, Dead("no envelope")) for d in got]))
        assert {m.body for m in await broker.peek("t.dead", 5)} == {b"{}", b"\xff{"}


async def test_messages_of_a_consumer_removed_by_an_operator_are_redelivered(
    server: Servers, by_hand: Redis
) -> None:
    async with opened(server("redis").url) as broker:
        await broker.publish(messages("a1", "b1"))
        await broker.subscribe("t", "main", owner="gone", lease=0.2).receive(5, 0)
        by_hand.xgroup_delconsumer(broker.base("t") + ":normal", "main", "gone")
        sub = broker.subscribe("t", "main", owner="w", lease=0.2)
        ids: set[str] = set()
        while len(ids) < 2:
            ids |= {d.id for d in await sub.receive(5, 1.0)}
        assert ids == {"a1", "b1"}


async def test_trimming_keeps_entries_that_a_group_has_not_read_or_settled(
    server: Servers, by_hand: Redis
) -> None:
    spec = TopicSpec(name="t", groups=("main", "slow"), retention=0.0)
    async with opened(server("redis").url, spec) as broker:
        stream = broker.base("t") + ":normal"
        by_hand.xgroup_create(stream, "foreign", "0")
        ids = [f"a{i}" for i in range(600)]
        await broker.publish(messages(*ids))
        main, slow = (broker.subscribe("t", g, owner="w", lease=60) for g in ("main", "slow"))
        await main.settle([(d, Ack()) for d in await drained(main)])
        assert by_hand.xlen(stream) == 600, "unread by two groups"
        by_hand.xreadgroup("foreign", "x", {stream: ">"}, count=600, noack=True)
        rest = await drained(slow)
        await slow.settle([(d, Ack()) for d in rest[1:]])
        assert by_hand.xlen(stream) == 600, "the oldest is in flight"
        await slow.settle([(rest[0], Retry(0.0, "x"))])
        assert by_hand.xlen(stream) == 600, "the oldest is delayed"
        (last,) = await drained(slow)
        assert last.id == "a0"
        await broker.publish(messages("b1"))
        await slow.settle([(last, Ack())])
        assert by_hand.xlen(stream) < 200
        assert [d.id for d in await drained(main)] == ["b1"]


async def test_history_within_its_retention_stays_and_can_be_replayed_into_a_new_group(
    server: Servers,
) -> None:
    async with opened(server("redis").url) as broker:
        await broker.publish(messages("a1", "b1"))
        sub = broker.subscribe("t", "main", owner="w", lease=5)
        await sub.settle([(d, Ack()) for d in await drained(sub)])
        assert await broker.replay("t", "audit", since=0) == 2
        assert {
            d.id for d in await drained(broker.subscribe("t", "audit", owner="w", lease=5))
        } == {"a1", "b1"}
        assert await drained(sub) == []


async def test_the_first_group_gets_all_messages_and_a_later_group_only_new_ones(
    server: Servers,
) -> None:
    broker = fresh(server("redis").url)
    await broker.publish(messages("a1"))
    assert [d.id for d in await drained(broker.subscribe("t", "main", owner="w", lease=5))] == [
        "a1"
    ]
    late = broker.subscribe("t", "late", owner="w", lease=5)
    assert await drained(late) == []
    await broker.publish(messages("a2"))
    assert [d.id for d in await drained(late)] == ["a2"]
    await broker.close()


async def test_a_receiver_that_waits_is_woken_by_a_publish_and_by_the_end_of_a_delay(
    server: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "POLL_INTERVAL", 3600.0)  # polling would be too late
    async with opened(server("redis").url) as broker:
        sub = broker.subscribe("t", "main", owner="w", lease=5)
        waiting = asyncio.create_task(sub.receive(5, 3600.0))
        await asyncio.sleep(0)
        async with opened(server("redis").url, prefix=broker.prefix) as other:
            await other.publish(messages("a1"))
        (d,) = await waiting
        await sub.settle([(d, Retry(0.3, "x"))])
        assert [d.id for d in await sub.receive(5, 3600.0)] == ["a1"]


async def test_held_keys_without_messages_do_not_block_other_keys(server: Servers) -> None:
    async with opened(server("redis").url) as broker:
        sub = broker.subscribe("t", "main", owner="w", lease=5)
        await sub.hold({f"h{i}": SystemClock().now() - 1.0 for i in range(300)})
        await broker.publish(messages("z1"))
        assert [d.id for d in await sub.receive(10, 0)] == ["z1"]


async def test_a_message_behind_thousands_of_a_held_key_is_delivered(server: Servers) -> None:
    async with opened(server("redis").url) as broker:
        sub = broker.subscribe("t", "main", owner="w", lease=5)
        await sub.hold({"a": SystemClock().now() + 60.0})
        for n in range(7):
            await broker.publish(messages(*[f"a{n}-{i}" for i in range(1000)]))
        await broker.publish(messages("b1"))
        assert [d.id for d in await sub.receive(10, 30.0)] == ["b1"]
        s = await broker.stats("t", "main")
        assert (s.ready, s.in_flight, s.exact) == (7000, 1, True)
        assert await broker.purge("t") == 7000


async def test_a_message_that_cannot_be_encoded_fails_alone(server: Servers) -> None:
    async with opened(server("redis").url) as broker:
        batch = [*messages("a1"), Out(topic="t", id="b\udcff", key="b", body=b""), *messages("c1")]
        assert list(await broker.publish(batch)) == [Published.OK, Published.FAILED, Published.OK]


# -- versions of the keys --------------------------------------------------------------------------


def of_release(url: str, namespace: str) -> RedisBroker:
    server = Server(url, evictable=False, layout=adapter.layout_of(namespace))
    return RedisBroker(server, namespace, SystemClock())


async def test_a_new_namespace_gets_a_version_and_a_newer_one_is_refused(
    server: Servers, by_hand: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, namespace = server("redis").url, f"t{uuid.uuid4().hex[:8]}"
    topic = TopicSpec(name="requests")
    monkeypatch.setattr(adapter, "VERSION", 2)
    newer = of_release(url, namespace)
    await newer.ensure([topic])
    await newer.publish([Out(topic="requests", id="a", key="k", body=b"a")])
    await newer.close()
    assert by_hand.hgetall(f"{namespace}.layout") == {b"broker": b"2"}
    monkeypatch.undo()
    older = of_release(url, namespace)
    for _ in range(2):
        with pytest.raises(ConfigError, match="version 2, this Penstock knows 1; a newer") as e:
            await older.ensure([topic])
        assert "namespace" in e.value.hint
    await older.close()
    assert by_hand.hgetall(f"{namespace}.layout") == {b"broker": b"2"}


async def test_a_namespace_of_the_first_release_has_version_1(
    server: Servers, by_hand: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, namespace = server("redis").url, f"t{uuid.uuid4().hex[:8]}"
    first = fresh(url, namespace)  # release 0.1.0 wrote no version
    await first.ensure([TopicSpec(name="requests")])
    await first.close()
    assert by_hand.exists(f"{namespace}.layout") == 0
    monkeypatch.setattr(adapter, "VERSION", 2)
    newer = of_release(url, namespace)
    with pytest.raises(ConfigError, match="an older release wrote them"):
        await newer.ensure([TopicSpec(name="requests")])
    await newer.close()
    monkeypatch.undo()
    today = of_release(url, namespace)
    assert list(await today.ensure([TopicSpec(name="requests")])) == []
    await today.close()
    assert by_hand.hgetall(f"{namespace}.layout") == {b"broker": b"1"}
