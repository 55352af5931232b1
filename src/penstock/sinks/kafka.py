"""Records on a Kafka topic, `kafka://host:9092/products?key=sku`.

Each record is one message with its key. A removed record is a tombstone.

Without a crash each record is written once: the producer is idempotent, and a message counts when
all in-sync replicas have it. A batch whose position was not recorded is written again, with the
same keys and the same `penstock-id` headers. A reader that upserts by key has the same rows again.
A reader that appends can skip known ids. With `transactions=true` the position is also on the
server and is committed with the messages. Then a reader of committed messages sees each record
once.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import admin as _admin
from confluent_kafka.admin import AdminClient

from penstock.config import units
from penstock.errors import ConfigError, StoreUnavailable
from penstock.ports import Reopen, Row
from penstock.rules.masking import mask
from penstock.sinks.common import PREFIX
from penstock.sinks.kafka_records import TYPES, Shape
from penstock.stores.kafka import Topic, parse, sentence
from penstock.stores.kafka_access import error_of, weightier

_api: Any = _admin  # the library does not export these names to type checkers
# Bytes, for topics that this sink creates: more than all records of a page together.
MAX_MESSAGE = 20 << 20
# Record keys whose last order is cached, so that an older record is not written after a newer one.
_MAX_CACHED_KEYS = 100_000
# Seconds for the list of topics, the first answer of the server. A start waits for it.
_OPEN_TIMEOUT = 5.0
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
_IMPOSSIBLE = (
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.POLICY_VIOLATION,
    KafkaError.INVALID_CONFIG,
    KafkaError.TOPIC_EXCEPTION,
)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    key: tuple[str, ...] = ()
    types: dict[str, str] = {}
    schemas: bool = True
    provenance: bool = False
    mode: str = "upsert"
    transactions: bool = False
    partitions: int = 6
    replication: int = 3
    compact: bool = False
    retention: float | None = 0.0  # seconds. None for unlimited, 0 for the server's default.


def _types(value: object) -> dict[str, str]:
    pairs = (
        value.items()
        if isinstance(value, dict)
        else [pair.rpartition(":")[::2] for pair in units.words(value)]
    )
    found = {str(name): str(kind) for name, kind in pairs}
    if not found or not all(
        name and not name.startswith(PREFIX) and kind in TYPES for name, kind in found.items()
    ):
        raise ValueError(value)
    return found


def _names(value: object) -> tuple[str, ...]:
    found = units.words(value)
    if not found or len(set(found)) < len(found) or any(name.startswith(PREFIX) for name in found):
        raise ValueError(value)
    return found


OPTIONS: dict[str, units.Kind] = {
    "key": units.Kind(
        name="list of fields",
        expected="the field that identifies a record, or several, separated by commas",
        read=_names,
    ),
    "types": units.Kind(
        name="types",
        expected=f"fields with their types: stock:int64,sold:boolean ({', '.join(TYPES)})",
        read=_types,
    ),
    "schemas": units.FLAG,
    "provenance": units.FLAG,
    "mode": units.choices("upsert", "append"),
    "transactions": units.FLAG,
    "partitions": units.counts(1, 4096),
    "replication": units.counts(1, 32),
    "compact": units.FLAG,
    "retention": units.KEEP,
}


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """Recorded with the position: the types on the topic, and the id of the transactions, if any.

    With transactions, the server keeps the position under that id.
    """

    fields: dict[str, str] = {}
    id: str = ""


class KafkaSink:
    def __init__(self, topic: Topic, options: Options) -> None:
        self.topic, self.options, self.notice = topic, options, ""
        self.name = topic.label
        self.shape = Shape(options.key, options.types, provenance=options.provenance)
        self._producer: Producer | None = None
        self._last_error: KafkaError | None = None
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._id = ""
        # Used only for its group id: the transaction commits the position as the group's offset.
        self._group: Consumer | None = None
        self._last_committed = 0  # the last committed row, with transactions

    # -- opening -----------------------------------------------------------------------------------

    def open(self, position: int, mark: str) -> str:
        self.close()
        self.notice = ""
        try:
            recorded = msgspec.json.decode(mark, type=Mark) if mark else Mark()
        except msgspec.MsgspecError:
            recorded = Mark()
        self.shape.restore(recorded.fields)
        self._last_error = None
        client = self.topic.client() | {"error_cb": self._on_error}
        conf = {
            "acks": "all",
            "enable.idempotence": True,
            # The partitioner of Java clients, so that a key has one partition for all.
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "compression.type": "lz4",
            "message.timeout.ms": max(30_000, int(self.topic.timeout * 1000)),
            "message.max.bytes": 64 << 20,  # the limit of the topic applies
            "queue.buffering.max.kbytes": 128 << 10,
            "topic.metadata.propagation.max.ms": 3000,
        }
        admin: Any = None
        try:
            admin = AdminClient(client | self.topic.rdkafka)
            self._create_topic_if_missing(admin)
            if self.options.transactions:
                self._id = recorded.id or secrets.token_hex(8)
                conf |= {"transactional.id": f"penstock-{self._id}"}
            self._producer = Producer(client | conf | self.topic.rdkafka)
            if self.options.transactions:
                self._last_committed = self._resume(self._producer, client, position)
        except KafkaException as e:
            if admin is not None:
                admin.poll(0.1)  # the library reports errors only while it is polled
            raise self._unavailable(error_of(e), "opening") from None
        except (TypeError, ValueError) as e:
            raise ConfigError(
                f"sink {self.name}: {e}",
                hint="check the options of the sink, especially those that begin with rdkafka.",
            ) from None
        return self._mark()

    def _create_topic_if_missing(self, admin: Any) -> None:
        o, topic = self.options, self.topic
        cluster = admin.list_topics(timeout=min(topic.timeout, _OPEN_TIMEOUT))
        if topic.name in cluster.topics and cluster.topics[topic.name].error is None:
            return
        config = {"max.message.bytes": str(MAX_MESSAGE)}
        if o.compact:
            config["cleanup.policy"] = "compact"
        if o.retention != 0.0:
            config["retention.ms"] = "-1" if o.retention is None else str(int(o.retention * 1000))
        new = _api.NewTopic(
            topic.name,
            num_partitions=o.partitions,
            replication_factor=min(o.replication, max(1, len(cluster.brokers))),
            config=config,
        )
        try:
            admin.create_topics([new], operation_timeout=topic.timeout)[topic.name].result(
                topic.timeout + 5
            )
        except TimeoutError:
            raise self._unavailable(
                KafkaError(KafkaError._TIMED_OUT), "creating the topic"
            ) from None
        except KafkaException as e:
            error = error_of(e)
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:  # another process created it
                return
            if error.code() in _IMPOSSIBLE:
                raise ConfigError(
                    f"Kafka refuses to create topic {topic.name} ({error.str()})",
                    hint="check partitions and replication, or create the topic manually",
                ) from None
            raise self._unavailable(error, f"creating the topic {topic.name}") from None

    def _resume(self, producer: Producer, client: Mapping[str, Any], position: int) -> int:
        """Fence other processes with this id, and abort their open transaction.

        Return the last row that was written.
        """
        producer.init_transactions(max(30.0, self.topic.timeout))
        self._group = Consumer(
            {
                **client,
                "group.id": f"penstock-sink-{self._id}",
                "enable.auto.commit": False,
                **self.topic.rdkafka,
            }
        )
        (found,) = self._group.committed(
            [TopicPartition(self.topic.name, 0)], timeout=self.topic.timeout
        )
        # The server deletes the offset after a week without a write. Then the recorded position is
        # used.
        return max(position, found.offset)

    def close(self) -> None:
        producer, self._producer = self._producer, None
        group, self._group = self._group, None
        if group is not None:
            group.close()
        if producer is not None:
            producer.purge()  # unsent messages are not recorded, and are written again
            producer.flush(1.0)

    def probe(self) -> None:
        """See ports.ProbedSink.probe."""
        client = self.topic.client() | {"error_cb": self._on_error}
        try:
            admin: Any = AdminClient(client | self.topic.rdkafka)
            admin.list_topics(timeout=min(self.topic.timeout, _OPEN_TIMEOUT))
        except KafkaException as e:
            raise self._unavailable(error_of(e), "opening") from None

    def _mark(self) -> str:
        return msgspec.json.encode(Mark(self.shape.fields, self._id)).decode()

    # -- writing -----------------------------------------------------------------------------------

    def write(self, rows: Sequence[Row]) -> str:
        producer, group = self._producer, self._group
        if producer is None:
            raise Reopen(f"{self.name} is not open")
        if group is None:
            self._send(producer, rows)
        else:
            try:
                producer.begin_transaction()
                self._send(producer, rows)
                position = [TopicPartition(self.topic.name, 0, rows[-1].n)]
                producer.send_offsets_to_transaction(
                    position, group.consumer_group_metadata(), max(30.0, self.topic.timeout)
                )
                producer.commit_transaction(max(30.0, self.topic.timeout))
            except KafkaException as e:  # the next `open` reads if it was committed
                self._abort(producer)
                raise self._unavailable(error_of(e), "committing") from None
            except BaseException:
                self._abort(producer)
                raise
            self._last_committed = rows[-1].n
        self._last_error = None
        self.notice = f"{self.name}: {self.shape.notice}" if self.shape.notice else self.notice
        return self._mark()

    def _abort(self, producer: Producer) -> None:
        with contextlib.suppress(KafkaException):
            producer.purge()
            producer.abort_transaction(5.0)
        self.close()

    def _send(self, producer: Producer, rows: Sequence[Row]) -> None:
        """Send all rows, and wait until the server has confirmed them."""
        failed: list[tuple[KafkaError, str, int]] = []
        reported = 0

        def report(key: str, error: KafkaError | None, message: Any) -> None:
            nonlocal reported
            reported += 1
            if error is not None:
                failed.append((error, key, len(message.value() or b"")))

        until = time.monotonic() + max(30.0, self.topic.timeout) + 5.0
        newest = dict[str, int]()
        sent = 0
        for row in rows:
            if self.options.mode == "upsert" and row.order < newest.get(
                row.key, self._newest.get(row.key, row.order)
            ):
                continue  # a newer event has already written this record
            newest[row.key] = row.order
            key, value, origin = self.shape.message(row, schemas=self.options.schemas)
            # Already committed, but not recorded. Only its types had to be learned again.
            if row.n <= self._last_committed:
                continue
            headers: list[tuple[str, str | bytes | None]] = [
                ("penstock-id", f"{origin.get(PREFIX + 'event_id') or ''}-{row.n}"),
                ("penstock-order", str(row.order)),
                ("penstock-extractor", str(origin.get(PREFIX + "extractor") or "")),
                ("penstock-trace", str(origin.get(PREFIX + "trace_id") or "")),
            ]
            while True:
                try:
                    producer.produce(
                        self.topic.name,
                        value,
                        key,
                        headers=headers,
                        on_delivery=partial(report, row.key),
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
                    if time.monotonic() > until:
                        raise self._unavailable(
                            self._last_error or KafkaError(KafkaError._TIMED_OUT), "writing"
                        ) from None
                except KafkaException as e:
                    raise self._unavailable(error_of(e), "writing") from None
            sent += 1
            producer.poll(0)
        while reported < sent and time.monotonic() < until and not failed:
            producer.poll(0.1)
        if failed:
            self._raise_rejected(*failed[0])
        if reported < sent:
            raise self._unavailable(
                self._last_error or KafkaError(KafkaError._TIMED_OUT), "writing"
            )
        self._cache_orders(newest)

    def _raise_rejected(self, error: KafkaError, key: str, size: int) -> None:
        if error.code() in _TOO_LARGE:
            raise StoreUnavailable(
                f"{self.name} refuses the record {key[:100]!r}: "
                f"{size} bytes are more than the topic accepts",
                hint="raise its max.message.bytes. Rows wait until then",
            )
        raise self._unavailable(error, "writing")

    def _cache_orders(self, newest: Mapping[str, int]) -> None:
        for key, order in newest.items():
            self._newest[key] = order
            self._newest.move_to_end(key)
        while len(self._newest) > _MAX_CACHED_KEYS:
            self._newest.popitem(last=False)

    # -- errors ------------------------------------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        self._last_error = weightier(self._last_error, error)

    def _unavailable(self, error: KafkaError, doing: str) -> StoreUnavailable:
        message, hint = sentence(self.topic, weightier(self._last_error, error), doing)
        return StoreUnavailable(message, hint=hint)


def open_sink(url: str, options: Mapping[str, Any], base: Path) -> KafkaSink:
    """Create the sink of `kafka://host:9092/products?key=sku`. Does not connect yet.

    Raise ConfigError if the URL or an option is not valid.
    """
    topic, given = parse(url, options, OPTIONS, where=f"sink {mask(url).partition('?')[0]}")
    return KafkaSink(topic, Options(**given))
