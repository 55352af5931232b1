"""Client libraries without Penstock, for `bench brokers`.

A batch is published, confirmed, received and acknowledged.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

Turn = Callable[[int], Awaitable[None]]


def _name() -> str:
    return f"raw{os.urandom(4).hex()}"


@asynccontextmanager
async def sqlite(url: str, scratch: Path, body: bytes) -> AsyncIterator[Turn]:
    """Use a table with a lease column and full durability: three transactions a batch."""
    import apsw

    db = apsw.Connection(str(scratch / f"{_name()}.db"))
    db.execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL")
    db.execute(
        "CREATE TABLE q(n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT, key TEXT, body BLOB, lease"
        " REAL NOT NULL DEFAULT 0)"
    )

    async def turn(n: int) -> None:
        with db:
            db.executemany(
                "INSERT INTO q(id, key, body) VALUES(?,?,?)",
                [(f"{i:032x}", f"h{i % 50}.test", body) for i in range(n)],
            )
        with db:
            got = db.execute(
                "SELECT n, id, key, body FROM q WHERE lease=0 ORDER BY n LIMIT ?", (n,)
            ).fetchall()
            db.executemany("UPDATE q SET lease=1 WHERE n=?", [(row[0],) for row in got])
        with db:
            db.executemany("DELETE FROM q WHERE n=? AND lease=1", [(row[0],) for row in got])
        assert len(got) == n

    yield turn
    db.close()


@asynccontextmanager
async def postgres(url: str, scratch: Path, body: bytes) -> AsyncIterator[Turn]:
    """Use a table and SKIP LOCKED: three transactions a batch, each with one statement."""
    import psycopg

    table = _name()
    db = psycopg.connect(url, autocommit=True)
    db.execute(
        f"CREATE TABLE {table}(n BIGSERIAL PRIMARY KEY, id TEXT, key TEXT, body BYTEA, lease"
        f" DOUBLE PRECISION NOT NULL DEFAULT 0)"
    )
    lease = (
        f"UPDATE {table} SET lease=1 WHERE n IN (SELECT n FROM {table} WHERE lease=0"
        f" ORDER BY n LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING n, id, key, body"
    )

    async def turn(n: int) -> None:
        rows = ([f"{i:032x}" for i in range(n)], [f"h{i % 50}.test" for i in range(n)], [body] * n)
        db.execute(
            f"INSERT INTO {table}(id, key, body) SELECT *"
            f" FROM unnest(%s::text[], %s::text[], %s::bytea[])",
            rows,
        )
        got = db.execute(lease, (n,)).fetchall()
        db.execute(f"DELETE FROM {table} WHERE n=ANY(%s) AND lease=1", ([row[0] for row in got],))
        assert len(got) == n

    yield turn
    db.execute(f"DROP TABLE {table}")
    db.close()


@asynccontextmanager
async def redis(url: str, scratch: Path, body: bytes) -> AsyncIterator[Turn]:
    import redis.asyncio as client

    connection, stream = client.Redis.from_url(url, protocol=2), _name()
    await connection.xgroup_create(stream, "g", mkstream=True)

    async def turn(n: int) -> None:
        pipe = connection.pipeline(transaction=False)
        for i in range(n):
            pipe.xadd(stream, {"id": f"{i:032x}", "key": f"h{i % 50}.test", "body": body})
        await pipe.execute()
        got = (await connection.xreadgroup("g", "w", {stream: ">"}, count=n))[0][1]
        await connection.xack(stream, "g", *[entry for entry, _ in got])
        assert len(got) == n

    yield turn
    await connection.delete(stream)
    await connection.aclose()


@asynccontextmanager
async def rabbitmq(url: str, scratch: Path, body: bytes) -> AsyncIterator[Turn]:
    import aiormq
    from aiormq.abc import DeliveredMessage

    connection = await aiormq.connect(url)
    channel, taking = await connection.channel(publisher_confirms=True), await connection.channel()
    queue = _name()
    await taking.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    await taking.basic_qos(prefetch_count=2000)
    arrived: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
    await taking.basic_consume(queue, arrived.put)

    def properties(i: int) -> aiormq.spec.Basic.Properties:
        return aiormq.spec.Basic.Properties(
            message_id=f"{i:032x}", headers={"key": f"h{i % 50}.test"}, delivery_mode=2
        )

    async def turn(n: int) -> None:
        await asyncio.gather(
            *[
                channel.basic_publish(body, routing_key=queue, properties=properties(i))
                for i in range(n)
            ]
        )
        for _ in range(n):
            message = await arrived.get()
            assert message.delivery_tag is not None
            await taking.basic_ack(message.delivery_tag)

    yield turn
    await taking.queue_delete(queue)
    await connection.close()


@asynccontextmanager
async def kafka(url: str, scratch: Path, body: bytes) -> AsyncIterator[Turn]:
    """Use a topic with the partitions, durability, linger and fetch settings of Penstock."""
    import confluent_kafka
    from confluent_kafka.admin import AdminClient, NewTopic

    servers, topic = url.partition("://")[2].rstrip("/"), _name()
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic(topic, 12, 1)]).values():
        future.result()
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": servers, "enable.idempotence": True, "acks": "all", "linger.ms": 1}
    )
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": topic,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 100,
        }
    )
    consumer.subscribe([topic])

    confirmed = 0

    def report(error: object, message: object) -> None:
        nonlocal confirmed
        confirmed += error is None

    async def turn(n: int) -> None:
        """Wait for the confirmation of each message, and read each message, as a user must."""
        nonlocal confirmed
        confirmed = 0
        for i in range(n):
            producer.produce(
                topic, body, f"h{i % 50}.test", headers={"id": f"{i:032x}"}, on_delivery=report
            )
        producer.flush()
        assert confirmed == n
        left = n
        while left:
            got = [
                (m.partition(), m.offset(), m.key(), m.value(), m.headers())
                for m in consumer.consume(left, 5.0)
                if m.error() is None
            ]
            left -= len(got)
            if got:
                ends = {partition: offset + 1 for partition, offset, *_ in got}
                consumer.commit(
                    offsets=[confluent_kafka.TopicPartition(topic, p, o) for p, o in ends.items()],
                    asynchronous=False,
                )

    yield turn
    consumer.close()
    admin.delete_topics([topic])


@asynccontextmanager
async def sqs(url: str, scratch: Path, body: bytes) -> AsyncIterator[Turn]:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    parts, options = urlsplit(url), dict(parse_qsl(urlsplit(url).query))
    scheme = "http" if options.get("tls") == "false" else "https"
    settings = {
        "region_name": options.get("region", "elasticmq"),
        "endpoint_url": f"{scheme}://{parts.hostname}:{parts.port}",
    }
    keys = {
        "aws_access_key_id": parts.username or "x",
        "aws_secret_access_key": parts.password or "x",
    }
    async with get_session().create_client(
        "sqs", **settings, **keys, config=AioConfig(max_pool_connections=60)
    ) as client:
        queue, text = (await client.create_queue(QueueName=_name()))["QueueUrl"], body.decode()

        def attributes(i: int) -> dict[str, dict[str, str]]:
            return {
                "id": {"DataType": "String", "StringValue": f"{i:032x}"},
                "key": {"DataType": "String", "StringValue": f"h{i % 50}.test"},
            }

        async def send(first: int, n: int) -> None:
            entries = [
                {"Id": str(i), "MessageBody": text, "MessageAttributes": attributes(first + i)}
                for i in range(n)
            ]
            await client.send_message_batch(QueueUrl=queue, Entries=entries)

        async def take(n: int) -> int:
            answer = await client.receive_message(
                QueueUrl=queue,
                MaxNumberOfMessages=n,
                VisibilityTimeout=60,
                MessageAttributeNames=["All"],
            )
            got = answer.get("Messages", [])
            if got:
                done = [
                    {"Id": str(i), "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(got)
                ]
                await client.delete_message_batch(QueueUrl=queue, Entries=done)
            return len(got)

        async def turn(n: int) -> None:
            await asyncio.gather(*[send(first, min(10, n - first)) for first in range(0, n, 10)])
            left = n
            while left:
                left -= sum(
                    await asyncio.gather(
                        *[take(min(10, left - first)) for first in range(0, left, 10)]
                    )
                )

        yield turn
        await client.delete_queue(QueueUrl=queue)


RAW: dict[str, Callable[[str, Path, bytes], AbstractAsyncContextManager[Turn]]] = {
    "sqlite": sqlite,
    "postgres": postgres,
    "redis": redis,
    "rabbitmq": rabbitmq,
    "kafka": kafka,
    "sqs": sqs,
}
