"""SQS: the conformance suite and tests of this adapter, on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from aiobotocore.session import get_session
from tests.brokers.served import Served
from tests.servers import Handle

from penstock.brokers.sqs import message as wire
from penstock.brokers.sqs.broker import SqsBroker
from penstock.brokers.sqs.subscription import PREFETCH_HOLD
from penstock.clock import SystemClock
from penstock.errors import ConfigError, PenstockError, StoreUnavailable, Unreachable
from penstock.model import Dead, Release, Retry
from penstock.ports import Broker, Out, Published, TopicSpec
from penstock.rules import priority

pytestmark = pytest.mark.server("sqs")


def opened(url: str, namespace: str) -> SqsBroker:
    return SqsBroker(wire.parse(url + "&poll=1", namespace), SystemClock())


async def removed(broker: SqsBroker) -> None:
    """Delete the queues of the namespace."""
    for url in (
        await broker.client.call("list_queues", QueueNamePrefix=broker.client.address.prefix + "-")
    ).get("QueueUrls", []):
        await broker.client.call("delete_queue", QueueUrl=url)


class TestSqs(Served):
    name = "sqs"
    volatile = True
    lease = 5.0
    patience = 0.3
    slack = 1.2  # SQS counts whole seconds

    async def open(self) -> Broker:
        self.namespace = "t" + uuid.uuid4().hex[:10]
        self.opened = [opened(self.url, self.namespace)]
        return self.opened[0]

    async def reopen(self, broker: Broker) -> Broker:
        self.opened.append(opened(self.url, self.namespace))
        return self.opened[-1]

    async def shut(self, broker: Broker) -> None:
        await removed(self.opened[-1])
        for each in self.opened:
            await each.close()


# -- guarantees and limits of SQS only -------------------------------------------------------------

Place = Callable[[str], Handle]
NORMAL = wire.QueueId("t", "main", priority.NORMAL)


@contextlib.asynccontextmanager
async def at(url: str, namespace: str = "", *topics: TopicSpec) -> AsyncIterator[SqsBroker]:
    broker = opened(url, namespace or "t" + uuid.uuid4().hex[:10])
    try:
        await broker.ensure(topics or [TopicSpec(name="t")])
        yield broker
    finally:
        if not namespace:
            with contextlib.suppress(StoreUnavailable):
                await removed(broker)
        await broker.close()


def out(id_: str, **more: Any) -> Out:
    fields = {"topic": "t", "key": "k", "body": id_.encode(), **more}
    return Out(id=id_, **fields)


async def test_a_message_of_another_tool_is_delivered_unchanged(server: Place) -> None:
    async with at(server("sqs").url) as broker:
        sent = await broker.client.call_queue(
            NORMAL, "send_message", MessageBody='{"made": "by hand"}'
        )
        (d,) = await broker.subscribe("t", "main", owner="w", lease=30).receive(5, 20.0)
        assert (d.id, d.body, d.headers) == (sent["MessageId"], b'{"made": "by hand"}', {})


async def test_a_body_that_is_too_large_for_sqs_fails_alone(server: Place) -> None:
    async with at(server("sqs").url) as broker:
        noise = b"".join(uuid.uuid4().bytes for _ in range(40_000))
        answers = await broker.publish(
            [
                out("a"),
                out("large", body=noise),
                out("fits", body=noise[: broker.caps.max_body]),
                out("b"),
            ]
        )
        assert list(answers) == [Published.OK, Published.FAILED, Published.OK, Published.OK]
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        got: dict[str, bytes] = {}
        while len(got) < 3 and (some := await sub.receive(10, 10.0)):
            got |= {d.id: d.body for d in some}
        assert got == {"a": b"a", "fits": noise[: broker.caps.max_body], "b": b"b"}


async def test_a_retry_after_more_than_twelve_hours_is_delayed(server: Place) -> None:
    async with at(server("sqs").url) as broker:
        await broker.publish([out("a", priority=0)])
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        (d,) = await sub.receive(5, 20.0)
        assert list(await sub.settle([(d, Retry(20 * 3600.0, "tomorrow"))])) == [True]
        found = await broker.stats("t", "main")
        assert (found.ready, found.delayed, found.in_flight) == (0, 1, 0)


async def test_a_message_received_before_its_due_time_is_delivered_when_due(server: Place) -> None:
    async with at(server("sqs").url) as broker:
        due = time.time() + 3.0
        # SQS delays a new message by at most fifteen minutes. This is the state after that.
        packed = wire.pack(out("a"), 1, due)
        fields = {
            "MessageBody": packed.body,
            "MessageAttributes": {
                wire.ATTRIBUTE: {"DataType": "String", "StringValue": packed.attributes}
            },
        }
        await broker.client.call_queue(NORMAL, "send_message", **fields)
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        early = await sub.receive(5, 0.5)
        assert not early or time.time() >= due
        (d,) = early or await sub.receive(5, 20.0)
        assert d.id == "a"
        assert time.time() >= due


async def test_a_group_declared_by_another_process_gets_the_messages(
    server: Place,
) -> None:
    url = server("sqs").url
    async with at(url, "", TopicSpec(name="t", groups=("main", "archive"))) as elsewhere:
        here = opened(url, elsewhere.client.address.prefix)
        try:
            assert list(await here.publish([out("a")])) == [Published.OK]
        finally:
            await here.close()
        for group in ("main", "archive"):
            assert [
                d.id
                for d in await elsewhere.subscribe("t", group, owner="w", lease=30).receive(5, 20.0)
            ] == ["a"]


async def test_a_queue_with_other_settings_is_reported_and_not_changed(
    server: Place,
) -> None:
    url = server("sqs").url
    async with at(url, "", TopicSpec(name="other")) as broker:
        name = wire.queue_name(broker.client.address.prefix, NORMAL)
        made = await broker.client.call(
            "create_queue", QueueName=name, Attributes={"DelaySeconds": "5"}
        )
        dead = await broker.client.call(
            "get_queue_attributes",
            QueueUrl=await broker.client.declare(wire.dead_queue("t")),
            AttributeNames=["QueueArn"],
        )
        policy = (
            f'{{"deadLetterTargetArn":"{dead["Attributes"]["QueueArn"]}","maxReceiveCount":"3"}}'
        )
        await broker.client.call(
            "set_queue_attributes", QueueUrl=made["QueueUrl"], Attributes={"RedrivePolicy": policy}
        )
        drift = await broker.ensure([TopicSpec(name="t")])
        assert len(drift) == 2
        assert name in drift[0]
        assert "delays every message by 5 s" in drift[0]
        assert "after 3 receives" in drift[1]
        after = await broker.client.call(
            "get_queue_attributes", QueueUrl=made["QueueUrl"], AttributeNames=["DelaySeconds"]
        )
        assert after["Attributes"]["DelaySeconds"] == "5"


async def test_an_ordered_topic_is_refused(server: Place) -> None:
    with pytest.raises(ConfigError, match="needs order per key"):
        async with at(server("sqs").url, "", TopicSpec(name="t", ordered=True)):
            pass


async def test_a_deleted_queue_is_created_again(server: Place) -> None:
    async with at(server("sqs").url) as broker:
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        await removed(broker)
        assert list(await broker.publish([out("a")])) == [Published.OK]
        assert [d.id for d in await sub.receive(5, 20.0)] == ["a"]
        await removed(broker)
        assert list(await sub.receive(5, 0.2)) == []
        assert (await broker.stats("t", "main")).in_flight == 0


async def test_prefetched_messages_that_are_not_requested_are_returned_soon(server: Place) -> None:
    async with at(server("sqs").url) as broker:
        await broker.publish([out(f"a{i}") for i in range(8)])
        one, other = (broker.subscribe("t", "main", owner=o, lease=30) for o in "wx")
        began = time.monotonic()
        assert len(await one.receive(8, 10.0, per_key=2)) == 2
        got = [d.id for d in await other.receive(8, 0.0)]
        assert not got or time.monotonic() >= began + PREFETCH_HOLD
        async with asyncio.timeout(20):  # less than the lease
            while len(got) < 6:
                got += [d.id for d in await other.receive(8, 1.0)]
        assert len(set(got)) == 6


async def test_a_closed_subscription_returns_the_messages_of_its_last_poll(
    server: Place,
) -> None:
    async with at(server("sqs").url) as broker:
        one, other = (broker.subscribe("t", "main", owner=o, lease=30) for o in "wx")
        assert list(await one.receive(5, 0.1)) == []  # the long polls are still in progress
        await broker.publish([out("a")])
        await one.close()
        assert [d.id for d in await other.receive(5, 20.0)] == ["a"]


async def test_a_cancelled_receive_loses_no_message(server: Place) -> None:
    async with at(server("sqs").url) as broker:
        await broker.publish([out(f"a{i}") for i in range(5)])
        one, other = (broker.subscribe("t", "main", owner=o, lease=30) for o in "wx")
        asking = asyncio.ensure_future(one.receive(5, 3.0))
        await asyncio.sleep(0.01)  # the request is in progress
        asking.cancel()
        await asyncio.wait([asking])
        await one.close()
        # The receive may have finished before it was cancelled.
        got = [] if asking.cancelled() else [d.id for d in asking.result()]
        async with asyncio.timeout(20):  # less than the lease
            while len(got) < 5:
                got += [d.id for d in await other.receive(5, 1.0)]
        assert sorted(got) == [f"a{i}" for i in range(5)]


async def test_a_message_over_the_receive_limit_is_a_dead_letter_with_that_reason(
    server: Place,
) -> None:
    async with at(server("sqs").url + "&max_receives=2") as broker:
        await broker.publish([out("a", headers={"h": "1"})])
        sub = broker.subscribe("t", "main", owner="w", lease=30)
        for _ in range(2):
            (d,) = await sub.receive(1, 20.0)
            await sub.settle([(d, Release())])
        assert list(await sub.receive(1, 1.0)) == []
        (dead_letter,) = await broker.subscribe("t.dead", "main", owner="w", lease=30).receive(
            5, 20.0
        )
        assert (dead_letter.id, dead_letter.body) == ("a", b"a")
        assert dead_letter.headers == {
            "h": "1",
            "penstock-reason": "given up by SQS: received too often without an end",
        }


# -- outages ---------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_an_outage_raises_errors_and_the_lost_queues_are_created_again(
    server: Place,
) -> None:
    handle = server("sqs")
    async with at(handle.url) as broker:
        sub = broker.subscribe("t", "main", owner="w", lease=60)
        await broker.publish([out("a"), out("b")])
        (d,) = await sub.receive(1, 20.0)
        await asyncio.to_thread(handle.stop)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await sub.receive(1, 5.0)
        with pytest.raises(StoreUnavailable):
            await sub.settle([(d, Dead("no"))])
        assert list(await broker.publish([out("c")])) == [Published.UNKNOWN], (
            "an earlier retry of the client may have arrived"
        )
        with pytest.raises(StoreUnavailable):
            await broker.stats("t", "main")
        await asyncio.to_thread(handle.start)  # this server keeps its queues in memory
        assert list(await broker.publish([out("c")])) == [Published.OK]
        got: list[str] = []
        async with asyncio.timeout(60):
            while not got:
                with contextlib.suppress(
                    StoreUnavailable
                ):  # from a poll that the outage interrupted
                    got = [d.id for d in await sub.receive(5, 20.0)]
        assert got == ["c"]


# -- errors at the start ---------------------------------------------------------------------------


async def error_of(url: str) -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        async with at(url, "ns"):
            pass
    assert caught.value.hint
    assert "hunter2" not in caught.value.message + caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


async def test_unreachable_server_tls_region_and_credentials_have_different_errors(
    server: Place, monkeypatch: pytest.MonkeyPatch, unused_port: int
) -> None:
    for name in (
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    error = await error_of(f"sqs://x:hunter2@127.0.0.1:{unused_port}/?tls=false")
    assert isinstance(error, Unreachable)
    assert "cannot be reached" in error.message
    assert (
        "does not answer with TLS"
        in (await error_of(f"sqs://x:hunter2@127.0.0.1:{server('sqs').port}/?")).message
    )
    assert "needs a region" in (await error_of("sqs://x:hunter2@/?")).message
    assert "no AWS credentials" in (await error_of("sqs://?region=eu-west-1")).message
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "nobody" in (await error_of("sqs://?region=eu-west-1")).message


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"-ERR what?\r\n",
    ],
)
async def test_a_server_that_is_not_sqs_is_an_error(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        assert (
            "does not answer as SQS does"
            in (await error_of(f"sqs://x:hunter2@127.0.0.1:{port}/?tls=false")).message
        )


@pytest.fixture
def unused_port() -> Iterator[int]:
    with socket.socket() as taken:  # bound without listening, so no server can listen
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


# The S3 server is moto. It also serves SQS, and can check keys and permissions.
@pytest.mark.server("s3")
async def test_wrong_credentials_and_missing_permissions_have_different_errors(
    server: Place,
) -> None:
    address = f"127.0.0.1:{server('s3').port}"

    def checking(after: str) -> None:
        """Make moto check credentials after this many requests."""
        request = urllib.request.Request(
            f"http://{address}/moto-api/reset-auth",
            data=after.encode(),
            headers={"Content-Type": "text/plain"},
        )
        urllib.request.urlopen(request).close()

    async with get_session().create_client(
        "iam",
        region_name="us-east-1",
        endpoint_url=f"http://{address}",
        aws_access_key_id="x",
        aws_secret_access_key="x",
    ) as iam:
        user = uuid.uuid4().hex
        await iam.create_user(UserName=user)
        key = (await iam.create_access_key(UserName=user))["AccessKey"]
        allowed = (
            '{"Version":"2012-10-17","Statement":[{"Effect":"Allow",'
            '"Action":"sqs:GetQueueUrl","Resource":"*"}]}'
        )
        await iam.put_user_policy(UserName=user, PolicyName="p", PolicyDocument=allowed)
    checking("0")
    try:
        assert (
            "does not know these credentials"
            in (
                await error_of(f"sqs://nobody:hunter2@{address}/?tls=false&region=eu-west-1")
            ).message
        )
        assert (
            "does not know these credentials"
            in (
                await error_of(
                    f"sqs://{key['AccessKeyId']}:hunter2@{address}/?tls=false&region=eu-west-1"
                )
            ).message
        )
        error = await error_of(
            f"sqs://{key['AccessKeyId']}:{quote(key['SecretAccessKey'], safe='')}@{address}/?"
            "tls=false&region=eu-west-1"
        )
        assert "does not allow sqs:CreateQueue" in error.message
        assert "ns-*" in error.hint
    finally:
        checking("inf")
