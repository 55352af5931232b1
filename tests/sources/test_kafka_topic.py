"""A Kafka topic as a source: every message is one finding, even after restarts and failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    Message,
    Producer,
    TopicPartition,
    admin,
)
from tests.servers import Handle
from tests.sources.kafka_ground import Ground, context, numbers, until_idle

from penstock.authoring.pipeline import Pipeline
from penstock.errors import ConfigError, SourceDown, UsageError
from penstock.ports import Batch
from penstock.sources.base import BATCH
from penstock.sources.kafka.client import Client
from penstock.sources.kafka.source import KafkaSource, open_source

T = TypeVar("T")

pytestmark = pytest.mark.server("kafka")
_api: Any = admin


@pytest.fixture
def ground(server: Callable[[str], Handle]) -> Iterator[Ground]:
    ground = Ground(server("kafka").url)
    yield ground
    ground.sweep()


# -- reading ---------------------------------------------------------------------------------------


async def test_every_message_is_one_finding_in_partition_order_and_batches_are_bounded(
    ground: Ground,
) -> None:
    topic = ground.topic(3)
    for p in range(3):
        ground.write(topic, [{"n": n, "p": p} for n in range(1500)], partition=p)
    batches: list[Batch] = []
    found, _ = await until_idle(ground.source(topic), batches=batches)
    assert [[f.payload["n"] for f in found if f.payload["p"] == p] for p in range(3)] == [
        list(range(1500))
    ] * 3
    assert len({f.id for f in found}) == 4500
    assert max(len(batch.findings) for batch in batches) <= BATCH
    assert (batches[-1].idle, batches[-1].backlog, batches[-1].lag) == (True, 0, 0.0)
    assert all(batch.lag is not None and batch.lag < 60 for batch in batches if batch.findings)


async def test_batches_of_large_messages_are_small(ground: Ground) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": n, "filling": "x" * 1_000_000} for n in range(12)])
    batches: list[Batch] = []
    found, _ = await until_idle(ground.source(topic), batches=batches)
    assert numbers(found) == list(range(12))
    assert max(len(batch.findings) for batch in batches) <= 5


async def test_batches_of_messages_with_many_values_are_small(ground: Ground) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": n, "values": [{}] * 60_000} for n in range(6)])
    batches: list[Batch] = []
    found, _ = await until_idle(ground.source(topic), batches=batches)
    assert numbers(found) == list(range(6))
    assert max(len(batch.findings) for batch in batches) == 1


async def test_a_restart_continues_after_the_accepted_batch_and_repeats_unaccepted_ids(
    ground: Ground,
) -> None:
    topic = ground.topic(2)
    ground.write(topic, [{"n": n} for n in range(3000)])
    source = ground.source(topic)
    accepted: list[str] = []
    unsure: set[str] = set()
    cursor: bytes | None = None
    for _ in range(2):  # the reader ends with a second batch that was not accepted
        rounds = source.read(cursor)
        held = Batch()
        async for batch in rounds:
            if not batch.findings:
                continue  # the start position or a heartbeat
            accepted += [f.id for f in held.findings]
            cursor = held.cursor or cursor
            if held.findings:
                unsure |= {f.id for f in batch.findings}
                break
            held = batch
        await rounds.aclose()
    assert 0 < len(accepted) < 3000
    assert unsure
    rest, cursor = await until_idle(source, cursor)
    accepted += [f.id for f in rest]
    assert len(accepted) == len(set(accepted)) == 3000
    assert unsure <= set(accepted)
    ground.write(topic, [{"n": 3000}])
    assert numbers((await until_idle(source, cursor))[0]) == [3000]


async def test_start_latest_reads_messages_after_the_first_poll_even_after_a_restart(
    ground: Ground,
) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": 0}])
    source = ground.source(topic, start="latest")
    rounds = source.read(None)
    first = await anext(rounds)
    await rounds.aclose()
    assert first.cursor is not None
    ground.write(topic, [{"n": 1}])
    assert numbers((await until_idle(source, first.cursor))[0]) == [1]


async def test_an_unreadable_message_is_refused_and_the_following_messages_are_read(
    ground: Ground,
) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": 0}, b"{broken", None, b"\x00\x00\x00\x00\x01\x02\x03", {"n": 1}])
    found, _ = await until_idle(ground.source(topic))
    assert [bool(f.refused) for f in found] == [False, True, True, False]
    assert f"{topic}/0@1" in found[1].refused


async def test_aborted_transactions_are_not_read_and_control_records_are_not_backlog(
    ground: Ground,
) -> None:
    topic = ground.topic()
    producer = Producer(
        {"bootstrap.servers": ground.servers, "transactional.id": topic, "log_level": 0}
    )
    producer.init_transactions(60)
    for commit in (True, False):
        producer.begin_transaction()
        producer.produce(topic, b'{"n": %d}' % commit)
        producer.flush(30)
        producer.commit_transaction(60) if commit else producer.abort_transaction(60)
    await asyncio.to_thread(_when_decided, ground, topic, 4)
    batches: list[Batch] = []
    found, cursor = await until_idle(ground.source(topic), batches=batches)
    assert numbers(found) == [1]
    assert batches[-1].backlog == 0
    assert ground.source(topic).describe(cursor) == "at 0:4"


async def test_added_partitions_are_read_from_their_first_message(ground: Ground) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": 0}])
    source = ground.source(topic, start="latest")
    source.refresh = 0.2
    rounds = source.read(None)
    await anext(rounds)
    ground.admin.create_partitions([_api.NewPartitions(topic, 2)])[topic].result(20)
    await asyncio.to_thread(_when_there, ground, topic, 2)
    ground.write(topic, [{"n": 1}], partition=1)
    async for batch in rounds:
        if batch.findings:
            assert numbers(batch.findings) == [1]
            break
    await rounds.aclose()
    _, cursor = await until_idle(ground.source(topic, name="other"))
    ground.admin.create_partitions([_api.NewPartitions(topic, 3)])[topic].result(20)
    await asyncio.to_thread(_when_there, ground, topic, 3)
    ground.write(topic, [{"n": 2}], partition=2)
    assert numbers((await until_idle(source, cursor))[0]) == [2], (
        "also after a restart, with any value of start"
    )


def _when_decided(ground: Ground, topic: str, end: int) -> None:
    """Wait for the control record of a transaction, which Kafka writes after its response."""
    while (
        next(
            iter(
                ground.admin.list_offsets(
                    ground.ends(topic), isolation_level=IsolationLevel.READ_COMMITTED
                ).values()
            )
        )
        .result(20)
        .offset
        < end
    ):
        time.sleep(0.05)


def _when_there(ground: Ground, topic: str, partitions: int) -> None:
    while len(ground.admin.list_topics(topic, timeout=20).topics[topic].partitions) < partitions:
        time.sleep(0.05)


async def test_a_preview_shows_the_next_messages_and_does_not_move_the_source(
    ground: Ground,
) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": n} for n in range(30)])
    source = ground.source(topic, group="watched")
    assert numbers(await source.preview(None, 5)) == [0, 1, 2, 3, 4]
    assert numbers((await until_idle(source))[0]) == list(range(30))
    assert await source.preview((await until_idle(source))[1], 5) == []


async def test_the_offset_after_the_accepted_messages_is_committed_for_monitoring(
    ground: Ground,
) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": n} for n in range(10)])
    group = f"watch-{topic}"
    source = ground.source(topic, group=group)
    rounds = source.read(None)
    async for batch in rounds:
        if batch.idle:
            break
    await rounds.aclose()
    request = [ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])]
    (answer,) = ground.admin.list_consumer_group_offsets(request).values()
    assert answer.result(20).topic_partitions[0].offset == 10


# -- positions -------------------------------------------------------------------------------------


async def test_a_source_can_be_reset_to_the_end_to_offsets_and_to_a_time(ground: Ground) -> None:
    topic = ground.topic(2, retention_ms="-1")
    for p in range(2):
        ground.write(topic, [{"n": n} for n in range(3)], partition=p, timestamp=1_700_000_000_000)
        ground.write(
            topic, [{"n": n} for n in range(3, 6)], partition=p, timestamp=1_700_003_600_000
        )
    source = ground.source(topic)
    for to, expected in [
        ("now", []),
        ("end", []),
        ("0:5,1:4", [4, 5, 5]),
        ("2023-11-14T23:00:00Z", [3, 3, 4, 4, 5, 5]),
        ("2023-11-14T23:00", [3, 3, 4, 4, 5, 5]),
        ("1h", []),
        ("earliest", [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
    ]:
        cursor = await source.place(to)
        assert sorted(numbers((await until_idle(source, cursor))[0])) == expected, to
    assert source.describe(await source.place("0:5, 1:4")) == "at 0:5, 1:4"
    for wrong in ("0:5", "0:5,1:7", "0:1,1:1,2:1", "yesterday", "0:1,1"):
        with pytest.raises(UsageError):
            await source.place(wrong)


# -- failures --------------------------------------------------------------------------------------


async def test_messages_deleted_unread_are_counted_reported_once_and_skipped(
    ground: Ground,
) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": n} for n in range(10)])
    source = ground.source(topic)
    cursor = await source.place("0:2")
    for future in ground.admin.delete_records([TopicPartition(topic, 0, 7)]).values():
        future.result(20)
    with pytest.raises(SourceDown, match="5 messages were deleted unread"):
        await until_idle(source, cursor)
    found, cursor = await until_idle(source, cursor)
    assert numbers(found) == [7, 8, 9]
    assert source.describe(cursor) == "at 0:10; 5 messages were deleted unread"


async def test_retention_that_overtakes_the_reader_is_reported_with_the_lost_count(
    ground: Ground,
) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": n, "filling": "x" * 1_000_000} for n in range(40)])
    source = ground.source(
        topic,
        **{
            "rdkafka.queued.min.messages": 1,
            "rdkafka.queued.max.messages.kbytes": 1,
            "rdkafka.fetch.max.bytes": 1_100_000,
        },
    )
    rounds = source.read(None)
    found: list[int] = []
    cursor: bytes | None = None

    async def accept(*, only: int | None = None) -> None:
        nonlocal cursor
        while only is None or len(found) < only:
            batch = await anext(rounds)
            cursor = batch.cursor or cursor
            found.extend(numbers(batch.findings))

    await accept(only=1)
    for future in ground.admin.delete_records([TopicPartition(topic, 0, 38)]).values():
        future.result(20)
    with pytest.raises(SourceDown, match="deleted before it was read"):
        await accept()
    lost = 38 - len(found)
    assert found == list(range(len(found)))
    assert lost > 0
    with pytest.raises(SourceDown, match=f"{lost} messages were deleted unread"):
        await until_idle(source, cursor)
    rest, cursor = await until_idle(source, cursor)
    assert numbers(rest) == [38, 39]
    assert source.describe(cursor) == f"at 0:40; {lost} messages were deleted unread"


async def test_a_gap_reported_right_after_a_message_is_raised_by_the_next_poll(
    ground: Ground,
) -> None:
    class Late(Client):
        """A client that waits after every message, while librdkafka continues to fetch."""

        def _call(self, activity: str, work: Callable[..., T], *args: Any, **named: Any) -> T:
            found = super()._call(activity, work, *args, **named)
            if isinstance(found, Message):
                time.sleep(2)
            return found

    topic = ground.topic()
    ground.write(topic, [{"filling": "x" * 1_000_000} for _ in range(10)])
    source = ground.source(
        topic,
        **{
            "rdkafka.queued.min.messages": 1,
            "rdkafka.queued.max.messages.kbytes": 1,
            "rdkafka.fetch.max.bytes": 1_100_000,
        },
    )
    client = Late(source.topic, "late")

    def read() -> None:
        client.open()
        client.assign({0: 0})
        while not client.take(1, 1):
            pass
        time.sleep(2)  # the next message has probably arrived too
        for future in ground.admin.delete_records([TopicPartition(topic, 0, 9)]).values():
            future.result(20)
        while not client.is_at_end:
            client.take(1000, 4 << 20)

    try:
        with pytest.raises(SourceDown, match="deleted before it was read"):
            await asyncio.to_thread(read)
    finally:
        await asyncio.to_thread(client.close)


async def test_a_recreated_topic_is_reported_and_read_from_its_start_with_new_ids(
    ground: Ground,
) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": n} for n in range(3)])
    source = ground.source(topic)
    before, cursor = await until_idle(source)
    ground.remove(topic)
    while topic in await asyncio.to_thread(lambda: ground.admin.list_topics(timeout=20).topics):
        pass
    ground.make(topic)
    ground.write(topic, [{"n": n} for n in range(3)])
    with pytest.raises(SourceDown, match="another of the same name"):
        await until_idle(source, cursor)
    after, _ = await until_idle(source, cursor)
    assert numbers(after) == [0, 1, 2]
    assert {f.id for f in before}.isdisjoint(f.id for f in after)


async def test_a_missing_topic_and_an_unreachable_server_have_different_errors(
    ground: Ground,
) -> None:
    with pytest.raises(SourceDown, match=r"has no topic t0\.nothing") as caught:
        await until_idle(ground.source("t0.nothing"))
    assert "A connector creates its topic" in caught.value.hint
    pipeline = Pipeline("test")
    pipeline.source("kafka://user:s3cret@127.0.0.1:9/x?timeout=1s")
    away = open_source(pipeline.sources[0], context())
    with pytest.raises(SourceDown, match=r"127\.0\.0\.1:9 cannot be reached") as caught:
        await until_idle(away)
    assert "s3cret" not in caught.value.message + caught.value.hint


@pytest.mark.slow
async def test_a_killed_server_is_reported_and_reading_continues_after_its_restart(
    ground: Ground, server: Callable[[str], Handle]
) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": n} for n in range(5)])
    source = ground.source(topic, timeout="5s")
    rounds = source.read(None)
    cursor: bytes | None = None
    found: list[int] = []
    async for batch in rounds:
        cursor = batch.cursor or cursor
        found += numbers(batch.findings)
        if batch.idle:
            break
    await asyncio.to_thread(server("kafka").kill)
    with pytest.raises(SourceDown, match="cannot be reached"):
        async for _ in rounds:
            pass
    await asyncio.to_thread(server("kafka").start)
    ground.write(topic, [{"n": 5}])
    more, _ = await until_idle(ground.source(topic, timeout="30s"), cursor)
    assert found + numbers(more) == [0, 1, 2, 3, 4, 5]


async def test_tls_with_a_login_works_and_a_wrong_password_is_not_shown_in_the_error(
    ground: Ground, server: Callable[[str], Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = ground.topic()
    ground.write(topic, [{"n": 1}])
    secure, ca = (
        f"127.0.0.1:{server('kafka').ports('secure')}/{topic}",
        str(server("kafka").file("kafka.pem")),
    )
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")

    def opened(url: str, timeout: str = "30s", **options: Any) -> KafkaSource:
        pipeline = Pipeline("test")
        pipeline.source(url, timeout=timeout, **options)
        return open_source(pipeline.sources[0], context())

    for good in (
        opened(f"kafka+ssl://penstock:secret@{secure}", ca=ca),
        opened(f"kafka+ssl://{secure}", ca=ca, username="penstock", password="env:KAFKA_PASSWORD"),
    ):
        assert numbers((await until_idle(good))[0]) == [1]
    for wrong, message in (
        (opened(f"kafka+ssl://penstock:hunter2@{secure}", "6s", ca=ca), "refuses the login"),
        (opened(f"kafka+ssl://penstock:hunter2@{secure}", "6s"), "no TLS connection"),
        (
            opened(f"kafka://penstock:hunter2@{secure}", "1s"),
            "cannot be reached",
        ),  # a TLS port does not respond to a plain connection
    ):
        with pytest.raises(SourceDown, match=message) as caught:
            await until_idle(wrong)
        assert "hunter2" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("kafka://127.0.0.1:9092", {}, "names no topic"),
        ("kafka://127.0.0.1:9092/a b", {}, "cannot be a topic"),
        ("kafka://127.0.0.1:x/t", {}, "not a host and port"),
        ("kafka://127.0.0.1/t", {"fromat": "json"}, "no option 'fromat'"),
        ("kafka://127.0.0.1/t?format=xml", {}, "format is 'xml'"),
        ("kafka://127.0.0.1/t?operations=c,x", {}, "operations"),
        ("kafka://u@127.0.0.1/t", {}, "the user or the password is missing"),
        (
            "kafka://127.0.0.1/t",
            {"username": "u", "password": "env:NOT_SET_ANYWHERE"},
            "NOT_SET_ANYWHERE, which is not set",
        ),
        ("kafka://127.0.0.1/t", {"every": "5s"}, "has no `every`"),
    ],
)
def test_an_invalid_declaration_is_an_error_when_the_source_is_opened(
    url: str, options: dict[str, Any], message: str
) -> None:
    pipeline = Pipeline("test")
    pipeline.source(url, **options)
    with pytest.raises(ConfigError, match=message):
        open_source(pipeline.sources[0], context())
