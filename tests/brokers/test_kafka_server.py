"""Behaviour of the Kafka adapter only: topics and drift, retries, history, lag and errors."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from confluent_kafka import Producer, admin
from tests.brokers.kafka_rig import die, fill, open_kafka, sweep, take
from tests.servers import Handle

from penstock.brokers.kafka.broker import KafkaBroker
from penstock.brokers.kafka.producer import _Batch
from penstock.clock import SystemClock
from penstock.errors import ConfigError, PenstockError, Unreachable
from penstock.model import Ack, Dead, Release, Retry
from penstock.ports import Delivery, Out, Published, Subscription, TopicSpec
from penstock.runtime.stores import TOPOLOGY

pytestmark = pytest.mark.server("kafka")


@pytest.fixture
def kafka(server: Callable[[str], Handle]) -> Iterator[Handle]:
    yield server("kafka")
    sweep(server("kafka").url)


@pytest.fixture
def url(kafka: Handle) -> str:
    return kafka.url


def sub_of(broker: KafkaBroker, topic: str = "t", group: str = "main") -> Subscription:
    return broker.subscribe(topic, group, owner="w", lease=2.0)


# -- topics ----------------------------------------------------------------------------------------


async def test_topics_are_created_as_configured_and_drift_is_reported_and_not_changed(
    url: str,
) -> None:
    broker = open_kafka(url, options="partitions=4&retention=2d&replication=3")
    name = broker.topics.namespace
    assert list(await broker.ensure([TopicSpec(name="t")])) == []
    found = broker.topics.metadata("reading").topics
    mine = {
        topic.removeprefix(f"{name}."): len(found[topic].partitions)
        for topic in found
        if topic.startswith(f"{name}.")
    }
    assert mine == {"t": 4, "t.high": 4, "t.low": 4, "t.retry.0s": 1, "t.retry.5s": 1, "t.dead": 1}
    config = broker.topics.configs([f"{name}.t", f"{name}.t.dead"])
    assert (config[f"{name}.t"]["retention.ms"], config[f"{name}.t"]["min.insync.replicas"]) == (
        "172800000",
        "1",
    ), "one server: one copy"
    assert config[f"{name}.t.dead"]["retention.ms"] == str(30 * 86400 * 1000)
    await broker.close()
    other = open_kafka(url, name, "partitions=8&retention=3d")
    drift = list(await other.ensure([TopicSpec(name="t")]))
    assert (
        f"topic {name}.t: 4 partitions on the server and 8 in the configuration; "
        "nothing was changed"
    ) in drift
    assert (
        f"topic {name}.t: retention.ms is 172800000 on the server and 259200000 in the "
        "configuration; nothing was changed"
    ) in drift
    assert len(other.topics.metadata("reading").topics[f"{name}.t"].partitions) == 4
    await other.close()


async def test_a_second_start_reports_no_drift_of_the_topics_that_the_first_created(
    url: str,
) -> None:
    first = open_kafka(url)
    assert list(await first.ensure(TOPOLOGY)) == []
    await first.close()
    second = open_kafka(url, first.topics.namespace)
    assert list(await second.ensure(TOPOLOGY)) == []
    await second.close()


async def test_messages_of_another_program_are_read_unchanged_and_keep_their_id(
    url: str,
) -> None:
    broker = open_kafka(url)
    name = broker.topics.namespace
    broker.topics.admin.create_topics(
        [cast(Any, admin).NewTopic(f"{name}.t", num_partitions=1, replication_factor=1)]
    )[f"{name}.t"].result(30)
    producer = Producer({"bootstrap.servers": url.removeprefix("kafka://")})
    producer.produce(
        f"{name}.t",
        b"not ours",
        key=b"\xff\x00",
        headers=[("bin", b"\xfe"), ("none", None), ("penstock-not-before", b"inf")],
    )
    producer.produce(f"{name}.t", None)
    producer.flush(30)
    (drift, *_) = await broker.ensure([TopicSpec(name="t")])
    assert "made by another program" in drift
    sub = sub_of(broker)
    first, tombstone = await take(sub, 2)
    assert (first.body, first.key, first.headers) == (
        b"not ours",
        "\ufffd\x00",
        {"bin": "\ufffd", "none": ""},
    )
    assert (tombstone.body, tombstone.key, tombstone.headers) == (b"", "", {})
    assert first.id != tombstone.id
    assert all(await sub.settle([(first, Dead("unreadable")), (tombstone, Retry(5.5, "later"))]))
    (dead_letter,) = await take(sub_of(broker, "t.dead"), 1)
    assert (dead_letter.id, dead_letter.body) == (first.id, b"not ours")
    (again,) = await take(sub, 1, wait=30.0)
    assert again.id == tombstone.id
    await broker.close()


# -- time ------------------------------------------------------------------------------------------


async def test_a_retry_passes_the_retry_topics_and_is_redelivered_to_its_group_only(
    url: str,
) -> None:
    broker, clock = open_kafka(url, options="retry_levels=1s,3s"), SystemClock()
    await broker.ensure([TopicSpec(name="t", groups=("main", "archive"))])
    await fill(broker, ["a1"], priority=0)
    sub, archive = sub_of(broker), sub_of(broker, group="archive")
    (theirs,) = await take(archive, 1)
    assert all(await archive.settle([(theirs, Ack())]))
    (d,) = await take(sub, 1)
    asked = clock.now()
    assert all(await sub.settle([(d, Retry(4.4, "3s, then 1s, then a little"))]))
    # While it moves from one retry topic to the next, it may be counted twice.
    assert (await broker.stats("t", "main")).delayed == 1 or clock.now() > asked + 2.9
    (again,) = await take(sub, 1, wait=30.0)
    assert clock.now() >= asked + 4.4
    assert (again.id, again.body, again.key, again.priority, again.headers) == (
        "a1",
        b"a1",
        "a",
        0,
        {},
    )
    assert all(await sub.settle([(again, Ack())]))
    assert await take(archive, 1, wait=1.0) == [], "another group got the retry"
    for group in ("main", "archive"):
        while sum(reach.lag for reach in await broker.lag("t", group)):  # noqa: ASYNC110 (the skipped retry leaves the lag soon)
            await asyncio.sleep(0.1)
    await broker.close()


async def test_a_retry_delay_can_equal_the_shortest_delay_of_a_retry_topic(url: str) -> None:
    broker, clock = open_kafka(url, options="retry_levels=1s"), SystemClock()
    await broker.ensure([TopicSpec(name="t")])
    await fill(broker, ["a1"])
    sub = sub_of(broker)
    asked = clock.now()
    assert all(await sub.settle([(d, Retry(1.0, "later")) for d in await take(sub, 1)]))
    (again,) = await take(sub, 1, wait=30.0)
    assert clock.now() >= asked + 1.0
    assert again.id == "a1"
    await broker.close()


# -- windows ---------------------------------------------------------------------------------------


async def test_the_messages_in_memory_are_bounded_and_all_are_delivered(url: str) -> None:
    broker = open_kafka(url, options="partitions=1&window=100")
    await broker.ensure([TopicSpec(name="t")])
    ids = [f"{'abcdefgh'[i % 8]}{i}" for i in range(3000)]
    await fill(broker, ids)
    sub, peak = sub_of(broker), 0
    seen: list[str] = []
    while len(seen) < len(ids):
        some = await sub.receive(50, 1.0)
        peak = max(
            [peak, *(len(part.window) for part in broker._readers["t", "main"].partitions.values())]
        )
        seen += [d.id for d in some]
        assert all(await sub.settle([(d, Ack()) for d in some]))
    assert sorted(seen) == sorted(ids)
    assert peak <= 100 + 500, "the window and one batch"
    await broker.close()


async def test_a_slow_event_blocks_no_other_and_is_redelivered_alone_after_a_crash(
    url: str,
) -> None:
    broker = open_kafka(url, options="partitions=1")
    await broker.ensure([TopicSpec(name="t")])
    await fill(broker, ["slow1"])
    sub = sub_of(broker)
    (slow,) = await take(sub, 1)
    for i in range(0, 3000, 500):
        await fill(broker, [f"quick{n}" for n in range(i, i + 500)])
        assert all(await sub.settle([(d, Ack()) for d in await take(sub, 500)]))
    (reach,) = [r for r in await broker.lag("t", "main") if r.end]
    assert (reach.committed, len(reach.ahead), reach.lag) == (0, 3000, 1)
    await die(broker)
    again = open_kafka(url, broker.topics.namespace, "partitions=1")
    sub = sub_of(again)
    assert [d.id for d in await take(sub, 1) + await take(sub, 9, wait=1.0)] == [slow.id]
    await again.close()


async def test_a_full_local_queue_is_reported_for_each_message(url: str) -> None:
    broker = open_kafka(
        url, options="rdkafka.queue.buffering.max.messages=10&rdkafka.linger.ms=200"
    )
    await broker.ensure([TopicSpec(name="t")])
    answers = await broker.publish(
        [Out(topic="t", id=f"e{i}", key="k", body=b"") for i in range(30)]
    )
    assert (answers.count(Published.OK), answers.count(Published.FULL)) == (10, 20)
    await broker.close()


async def test_a_message_too_large_fails_alone(url: str) -> None:
    broker = open_kafka(url, options="max_message=100KiB")
    await broker.ensure([TopicSpec(name="t")])
    answers = await broker.publish(
        [Out(topic="t", id=f"e{n}", key="k", body=bytes(n)) for n in (10, 200_000, 20)]
    )
    assert list(answers) == ["ok", "failed", "ok"]
    await broker.close()


async def test_refused_messages_fail_and_messages_to_other_partitions_are_delivered(
    url: str,
) -> None:
    broker = open_kafka(url, options="partitions=1")
    await broker.ensure([TopicSpec(name="t"), TopicSpec(name="u")])
    api = cast(Any, admin)
    less = [
        api.ConfigEntry(
            "max.message.bytes", "2000", incremental_operation=api.AlterConfigOpType.SET
        )
    ]
    resource = api.ConfigResource("topic", f"{broker.topics.namespace}.u", incremental_configs=less)
    for future in broker.topics.admin.incremental_alter_configs([resource]).values():
        future.result(30)
    while list(await broker.publish([Out(topic="u", id="probe", key="k", body=bytes(3000))])) == [  # noqa: ASYNC110
        Published.OK
    ]:
        await asyncio.sleep(0.05)
    sizes = [("t", 10), ("u", 3000), ("t", 3000), ("u", 3000), ("t", 20)]
    answers = await broker.publish(
        [
            Out(topic=topic, id=f"e{i}", key="k", body=bytes(size))
            for i, (topic, size) in enumerate(sizes)
        ]
    )
    assert list(answers) == ["ok", "failed", "ok", "failed", "ok"], (
        "two equal messages have both failed"
    )
    assert sorted(d.id for d in await take(sub_of(broker), 3)) == ["e0", "e2", "e4"]
    await broker.close()


def test_equal_messages_of_which_one_failed_are_all_unknown() -> None:
    loop = asyncio.new_event_loop()
    batch, answers = _Batch(loop), [Published.OK] * 4
    batch.failures = [
        (("t", b"same", b"k"), Published.FAILED),
        (("t", b"other", b""), Published.FAILED),
    ]
    batch.mark_failures(
        [
            ("t", b"same", "k", {}),
            ("t", b"same", b"k", {}),
            ("t", b"other", "", {}),
            ("u", b"same", "k", {}),
        ],
        answers,
    )
    assert answers == ["unknown", "unknown", "failed", "ok"]
    loop.close()


# -- history ---------------------------------------------------------------------------------------


async def test_history_is_replayed_to_another_group_completely_by_time_and_by_offset(
    url: str,
) -> None:
    broker, clock = open_kafka(url, options="partitions=1"), SystemClock()
    await broker.ensure([TopicSpec(name="t")])
    await fill(broker, ["a1", "a2"])
    await asyncio.sleep(0.05)
    since = clock.now()
    await fill(broker, ["a3", "a4"])
    sub = sub_of(broker)
    assert all(await sub.settle([(d, Ack()) for d in await take(sub, 4)]))
    for group, more, expected in (
        ("whole", {}, "a1 a2 a3 a4"),
        ("time", {"since": since}, "a3 a4"),
        ("offset", {"offsets": {0: 1}}, "a2 a3 a4"),
    ):
        await broker.replay("t", group, **more)
        again = sub_of(broker, group=group)
        assert (
            " ".join(
                d.id
                for d in await take(again, len(expected.split())) + await take(again, 1, wait=0.5)
            )
            == expected
        )
    assert await take(sub, 1, wait=0.3) == [], "the replay changed another group"
    await broker.close()
    later = open_kafka(url, broker.topics.namespace, "partitions=1")
    assert await later.replay("t", "main", since=since) == 2, (
        "the group has no member, so its offset is moved back"
    )
    sub = sub_of(later)
    assert [d.id for d in await take(sub, 2) + await take(sub, 1, wait=0.5)] == ["a3", "a4"]
    await later.close()


async def test_history_can_be_replayed_twice_to_an_active_group(url: str) -> None:
    broker = open_kafka(url)
    await broker.ensure([TopicSpec(name="t")])
    await fill(broker, ["a1", "b1", "c1"])
    sub = sub_of(broker)
    for _ in range(2):
        got = {d.id: d for d in await take(sub, 3)}
        assert sorted(got) == ["a1", "b1", "c1"]
        assert all(await sub.settle([(d, Ack()) for d in got.values()]))
        assert await broker.replay("t", "main") == 3
    await broker.close()


async def test_a_purge_drops_prefetched_messages_and_keeps_deliveries_in_flight(url: str) -> None:
    broker = open_kafka(url)
    await broker.ensure([TopicSpec(name="t")])
    await fill(broker, [f"a{i}" for i in range(20)])
    sub = sub_of(broker)
    (out,) = await take(sub, 1)
    assert await broker.purge("t") == 20
    assert await take(sub, 5, wait=0.5) == []
    assert list(await sub.settle([(out, Ack())])) == [True]
    await fill(broker, ["a20"])
    assert [d.id for d in await take(sub, 1)] == ["a20"]
    await broker.close()


class _Later(SystemClock):
    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


async def test_messages_that_retention_will_soon_delete_unread_raise_an_alarm(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = _Later()
    broker = open_kafka(url, options="retention=2d", clock=clock)
    await broker.ensure([TopicSpec(name="t")])
    await fill(broker, ["a1", "a2"])
    sub = sub_of(broker)
    first, _ = await take(sub, 2)
    assert list(await broker.alarms()) == []
    clock.ahead = 1.5 * 86400
    (alarm,) = await broker.alarms()
    assert "group main is 36.0 h behind and retention deletes after 48.0 h" in alarm
    with caplog.at_level(logging.WARNING, "penstock"):
        broker._readers["t", "main"]._check_retention()
    assert alarm in caplog.text
    await sub.settle([(first, Ack())])
    assert len(await broker.alarms()) == 1, "the other message is not settled"
    await broker.close()


async def test_messages_deleted_unread_are_logged(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = open_kafka(url, options="partitions=1")
    await broker.ensure([TopicSpec(name="t")])
    await fill(broker, ["a1", "a2", "a3"])
    sub = sub_of(broker)
    got = await take(sub, 1)
    await sub.settle([(d, Ack()) for d in got])
    await broker.close()
    other = open_kafka(url, broker.topics.namespace, "partitions=1")
    await other.purge("t")  # like retention
    await fill(other, ["a4"])
    with caplog.at_level(logging.WARNING, "penstock"):
        assert [d.id for d in await take(sub_of(other), 1)] == ["a4"]
    assert "2 messages that group main had not read were deleted" in caplog.text
    await other.close()


# -- errors ----------------------------------------------------------------------------------------


async def refusal(broker: KafkaBroker) -> PenstockError:
    with pytest.raises(PenstockError) as e:
        await broker.ensure([TopicSpec(name="t")])
    await broker.close()
    assert e.value.hint
    assert "secret" not in e.value.message + e.value.hint
    assert "hunter2" not in e.value.message + e.value.hint
    return e.value


async def test_an_unreachable_server_and_an_unknown_host_have_different_errors(url: str) -> None:
    away, unknown = await asyncio.gather(
        refusal(open_kafka("kafka://127.0.0.1:9", options="timeout=1s")),
        refusal(open_kafka("kafka://kafka.invalid:9092", options="timeout=6s")),
    )
    assert isinstance(away, Unreachable)
    assert "127.0.0.1:9 cannot be reached" in away.message
    assert isinstance(unknown, Unreachable)
    assert "cannot be resolved" in unknown.message


async def test_tls_with_a_login_from_the_url_or_the_environment_works(
    kafka: Handle,
) -> None:
    ca = f"ca={kafka.file('kafka.pem')}"
    secure = f"127.0.0.1:{kafka.ports('secure')}"
    for broker in (
        open_kafka(f"kafka+ssl://penstock:secret@{secure}", options=ca),
        open_kafka(
            f"kafka+ssl://{secure}",
            env={"PENSTOCK_KAFKA_OPTIONS": f"{ca}&username=penstock&password=secret"},
        ),
    ):
        await broker.ensure([TopicSpec(name="t")])
        await fill(broker, ["a1"])
        assert [d.id for d in await take(sub_of(broker), 1)] == ["a1"]
        await broker.close()


async def test_bad_password_untrusted_certificate_and_plain_port_have_different_errors(
    kafka: Handle,
) -> None:
    ca, secure = f"ca={kafka.file('kafka.pem')}", f"127.0.0.1:{kafka.ports('secure')}"
    wrong, untrusted, plain = await asyncio.gather(
        refusal(open_kafka(f"kafka+ssl://penstock:hunter2@{secure}", options=ca + "&timeout=6s")),
        refusal(open_kafka(f"kafka+ssl://penstock:secret@{secure}", options="timeout=6s")),
        refusal(open_kafka(f"kafka://{secure}", options="timeout=6s")),
    )
    assert "refuses the login" in wrong.message
    assert "no TLS connection" in untrusted.message
    assert "ca=FILE" in untrusted.hint
    assert "kafka+ssl://" in plain.hint
    assert {type(e) for e in (wrong, untrusted, plain)} == {Unreachable}
    missing = await refusal(
        open_kafka(f"kafka+ssl://penstock:secret@{secure}", options="ca=/no/such/file")
    )
    assert isinstance(missing, ConfigError)


async def test_the_error_for_a_missing_right_lists_the_needed_rights(kafka: Handle) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    owner, api = open_kafka(kafka.url, name), cast(Any, admin)
    who = ("User:nobody", "*", api.AclOperation.CREATE, api.AclPermissionType.DENY)
    rules = [
        api.AclBinding(api.ResourceType.TOPIC, f"{name}.", api.ResourcePatternType.PREFIXED, *who),
        api.AclBinding(
            api.ResourceType.BROKER, "kafka-cluster", api.ResourcePatternType.LITERAL, *who
        ),
    ]
    for future in owner.topics.admin.create_acls(rules).values():
        future.result(30)
    try:
        login = f"kafka+ssl://nobody:secret@127.0.0.1:{kafka.ports('secure')}"
        for early in itertools.count():  # the server applies a new rule after a while
            broker = open_kafka(login, f"{name}.{early}", f"ca={kafka.file('kafka.pem')}")
            try:
                await broker.ensure([TopicSpec(name="t")])
            except PenstockError:
                break
            finally:
                await broker.close()
        denied = await refusal(open_kafka(login, name, f"ca={kafka.file('kafka.pem')}"))
    finally:
        mine = [
            api.AclBindingFilter(r.restype, r.name, r.resource_pattern_type, *who) for r in rules
        ]
        for future in owner.topics.admin.delete_acls(mine).values():
            future.result(30)
        await owner.close()
    assert isinstance(denied, Unreachable)
    assert f"does not permit creating topic {name}." in denied.message
    assert "Create, Describe, Read, Write" in denied.hint


async def test_a_topic_that_the_server_refuses_to_create_is_a_configuration_error(url: str) -> None:
    refused = await refusal(open_kafka(url, "n" * 300))
    assert isinstance(refused, ConfigError)
    assert "refuses to create topic" in refused.message


async def test_deliveries_of_a_closed_subscription_are_ready_for_others(url: str) -> None:
    broker = open_kafka(url)
    await broker.ensure([TopicSpec(name="t")])
    await fill(broker, ["a1", "b1"])
    sub, other = sub_of(broker), sub_of(broker)
    held: list[Delivery] = await take(sub, 2)
    await sub.close()
    assert sorted(d.id for d in await take(other, 2)) == ["a1", "b1"]
    assert list(await sub.settle([(d, Release()) for d in held])) == [False, False]
    await broker.close()
