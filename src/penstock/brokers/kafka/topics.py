"""Server-side topics of a Penstock topic: their names, creation, configuration and offsets.

Reads no messages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka import admin as _admin
from confluent_kafka.admin import AdminClient

from penstock.brokers.dead_copies import DEAD
from penstock.brokers.kafka.url import Settings, explained
from penstock.config.units import write_duration
from penstock.errors import ConfigError, StoreUnavailable, Unreachable
from penstock.ports import TopicSpec
from penstock.rules.priority import WEIGHTS
from penstock.rules.watermark import settled_ahead
from penstock.stores.kafka_access import error_of, weightier

_api: Any = _admin  # the library does not export these names to type checkers
TopicAndPartition = tuple[str, int]  # server-side name and partition number
NORMAL = 1
# Suffixes of the priority classes. Normal has none, so that other programs find the topic.
_CLASSES = {0: ".high", 2: ".low"}
_PARTITION_BITS, _OFFSET_BITS = 12, 46
DEAD_RETENTION = 30 * 86400.0  # seconds for which a topic of dead letters keeps messages, at least
_NO_MEMBERS = frozenset({ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD})


class ServerTopic(msgspec.Struct, frozen=True):
    """One server-side topic of a Penstock topic."""

    name: str
    topic_index: int  # number of the topic in positions
    priority: int = NORMAL
    delay: float | None = None  # seconds that messages wait in a retry topic, None in other topics


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Server-side topics of one Penstock topic.

    An ordered topic has only one, besides its dead letters. With several, a message could overtake
    an earlier one of its key.
    """

    topic: str
    ordered: bool
    classes: tuple[ServerTopic, ...]  # by priority, or only one for ordered topics
    names: tuple[str, ...]  # server-side topics for messages that are due, by priority class
    # Shortest delay first. The first has a delay of 0 s, for messages replayed to one group.
    retries: tuple[ServerTopic, ...]
    dead: str

    @property
    def server_topics(self) -> tuple[ServerTopic, ...]:
        return self.classes + self.retries

    def retry_topic_for(self, delay: float) -> ServerTopic | None:
        """Return the retry topic with the longest delay that is at most `delay` seconds.

        The retry topic with a delay of 0 s is for replays and is never returned. Return None if
        all others have longer delays. Then the worker holds the message.
        """
        return next(
            (
                server_topic
                for server_topic in reversed(self.retries[1:])
                if server_topic.delay is not None and server_topic.delay <= delay
            ),
            None,
        )


def position(topic_index: int, partition: int, offset: int) -> int:
    """Return the position as one number below 2**63.

    For the first partition of the bare topic it is the offset.
    """
    return topic_index << (_PARTITION_BITS + _OFFSET_BITS) | partition << _OFFSET_BITS | offset


def server_name(namespace: str, topic: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{namespace}.{topic}")


def layout(settings: Settings, namespace: str, topic: str, *, ordered: bool) -> Layout:
    bare = server_name(namespace, topic)
    # A topic of dead letters has no priority classes and no retries. A dead letter that fails again
    # stays in the same topic.
    dead_letters = topic.endswith(DEAD)
    if ordered or dead_letters:
        return Layout(
            topic=topic,
            ordered=not dead_letters,
            classes=(ServerTopic(bare, 0),),
            names=(bare,) * len(WEIGHTS),
            retries=(),
            dead=bare if dead_letters else bare + DEAD,
        )
    classes = tuple(
        ServerTopic(bare + _CLASSES.get(p, ""), topic_index, p)
        for p, topic_index in ((0, 1), (NORMAL, 0), (2, 2))
    )
    return Layout(
        topic=topic,
        ordered=False,
        classes=classes,
        names=tuple(server_topic.name for server_topic in classes),
        retries=tuple(
            ServerTopic(f"{bare}.retry.{write_duration(d)}", 3 + i, NORMAL, d)
            for i, d in enumerate((0.0, *settings.retry_levels))
        ),
        dead=bare + DEAD,
    )


class PartitionLag(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets of one partition and one consumer group."""

    topic: str
    partition: int
    low: int  # offset of the oldest message that is not deleted
    end: int
    committed: int  # all messages below are settled. -1 if the group never committed
    ahead: frozenset[int]  # settled offsets above `committed`

    @property
    def start(self) -> int:
        return max(self.low, self.committed)

    @property
    def lag(self) -> int:
        return max(0, self.end - self.start - len(self.ahead))


class Topics:
    """Administrative calls to the Kafka servers.

    They block, so the broker runs them in a separate thread, one at a time.
    """

    def __init__(self, settings: Settings, namespace: str) -> None:
        self.settings, self.namespace = settings, namespace
        self.layouts: dict[str, Layout] = {}
        self.groups: dict[str, set[str]] = {}
        self.retention: dict[str, float] = {}  # server-side name -> seconds, if known
        self._admin: AdminClient | None = None
        self._last_error: KafkaError | None = None

    def group_id(self, topic: str, group: str) -> str:
        """Return the Kafka group id of a topic's group.

        Topics do not share groups: a new reader of one topic would rebalance the readers of others.
        """
        return server_name(self.namespace, f"{topic}.{group}")

    # -- requests ----------------------------------------------------------------------------------

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            try:
                self._admin = AdminClient(
                    self.settings.client() | {"error_cb": self._on_error} | self.settings.rdkafka
                )
            except KafkaException as e:
                raise ConfigError(
                    f"the Kafka client rejects {self.settings.shown!r}: {error_of(e).str()}",
                    hint="check the TLS options and rdkafka.NAME",
                ) from e
        return self._admin

    def _on_error(self, error: KafkaError) -> None:
        self._last_error = weightier(self._last_error, error)

    def metadata(self, doing: str, *, first: bool = False) -> Any:
        """Return the cluster metadata.

        If no server answers, raises Unreachable for the `first` request of a process, and
        StoreUnavailable for later requests.
        """
        self._last_error = None
        try:
            return self.admin.list_topics(timeout=self.settings.timeout)
        except KafkaException as e:
            self.admin.poll(0)
            raise explained(
                Unreachable if first else StoreUnavailable,
                self.settings,
                weightier(self._last_error, error_of(e)),
                doing,
            ) from e

    def wait_for(self, futures: Mapping[Any, Future[Any]], doing: str) -> dict[Any, Any]:
        try:
            return {
                key: future.result(self.settings.timeout + 5) for key, future in futures.items()
            }
        except (KafkaException, TimeoutError) as e:
            error = (
                error_of(e) if isinstance(e, KafkaException) else KafkaError(KafkaError._TIMED_OUT)
            )
            raise explained(StoreUnavailable, self.settings, error, doing) from e

    # -- creating topics ---------------------------------------------------------------------------

    def layout(self, topic: str) -> Layout:
        """Return the layout from `ensure`. Without it, read the layout from the server.

        A topic without priority classes on the server is ordered.
        """
        if topic not in self.layouts:
            found = self.metadata(f"looking up topic {topic}").topics
            classed = server_name(self.namespace, topic) + _CLASSES[0] in found
            self.layouts[topic] = layout(self.settings, self.namespace, topic, ordered=not classed)
        return self.layouts[topic]

    def ensure(self, topology: Sequence[TopicSpec]) -> list[str]:
        cluster = self.metadata("creating topics", first=True)
        drift: list[str] = []
        wanted: dict[str, Any] = {}
        last: dict[str, Any] = {}
        for spec in topology:
            bare = server_name(self.namespace, spec.name)
            classed = bare + _CLASSES[0] in cluster.topics
            if spec.ordered and classed:
                drift.append(
                    f"topic {spec.name}: ordered is False on the server and True in the"
                    f" configuration: delete its topics ({bare}, {bare}.*) to change that"
                )
            plan = self.layouts[spec.name] = layout(
                self.settings, self.namespace, spec.name, ordered=spec.ordered and not classed
            )
            self.groups.setdefault(spec.name, set()).update(spec.groups)
            if (
                bare in cluster.topics
                and not classed
                and not spec.ordered
                and len(plan.classes) > 1
            ):
                drift.append(
                    f"topic {spec.name}: {bare} was made by another program, or as an ordered"
                    " topic: separate topics for priority classes and retries are added"
                )
            for server_topic in plan.server_topics:
                new = self._new_topic(
                    server_topic.name, cluster, spec, retry=server_topic.delay is not None
                )
                # A topic of dead letters may also be declared by its own name. It is one topic.
                if server_topic.name not in wanted:
                    (last if server_topic.name == bare else wanted)[server_topic.name] = new
            if plan.dead != bare:
                wanted.setdefault(plan.dead, self._new_topic(plan.dead, cluster, spec, retry=True))
        # Create the bare topic last. If it exists, all topics that belong to it exist.
        for step in (wanted, last):
            self._create([new for name, new in step.items() if name not in cluster.topics])
        drift += self._compare(
            [new for name, new in (wanted | last).items() if name in cluster.topics], cluster
        )
        for name, new in (wanted | last).items():
            self.retention.setdefault(name, int(new.config["retention.ms"]) / 1000)
        return drift

    def _new_topic(self, name: str, cluster: Any, spec: TopicSpec, *, retry: bool) -> Any:
        s = self.settings
        keep = DEAD_RETENTION if name.endswith(DEAD) else 0.0
        copies = min(s.replication, max(1, len(cluster.brokers)))
        small = retry or spec.name.endswith(DEAD)
        return _api.NewTopic(
            name,
            num_partitions=max(1, s.partitions // 4) if small else s.partitions,
            replication_factor=copies,
            config={
                "retention.ms": str(int(max(s.retention, spec.retention, keep) * 1000)),
                "min.insync.replicas": str(min(copies, s.min_insync or (2 if copies > 2 else 1))),
                "max.message.bytes": str(s.max_message),
                "cleanup.policy": "delete",
            },
        )

    def _create(self, topics: list[Any]) -> None:
        if not topics:
            return
        for name, future in self.admin.create_topics(
            topics, operation_timeout=self.settings.timeout
        ).items():
            try:
                future.result(self.settings.timeout + 5)
            except KafkaException as e:
                # another worker created the topic at the same time
                if error_of(e).code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    continue
                if error_of(e).code() in (
                    KafkaError.INVALID_REPLICATION_FACTOR,
                    KafkaError.POLICY_VIOLATION,
                    KafkaError.INVALID_CONFIG,
                    KafkaError.TOPIC_EXCEPTION,
                ):
                    raise ConfigError(
                        f"Kafka refuses to create topic {name} ({error_of(e).str()})",
                        hint="check partitions, replication, min_insync and retention in the URL,"
                        " or create the topic by hand",
                    ) from e
                raise explained(
                    Unreachable, self.settings, error_of(e), f"creating topic {name}"
                ) from e
        until = time.monotonic() + self.settings.timeout
        names = {new.topic for new in topics}
        # A new topic appears in the metadata of different servers at different times.
        while (
            not names <= self.metadata("creating topics").topics.keys() and time.monotonic() < until
        ):
            time.sleep(0.05)

    def _compare(self, topics: Sequence[Any], cluster: Any) -> list[str]:
        """Return a sentence for each difference between the server and the configuration.

        If the settings of a topic cannot be read, only its partitions and copies are compared.
        """
        drift = []
        found = self.configs([new.topic for new in topics])
        for new in topics:
            partitions = cluster.topics[new.topic].partitions
            copies = min((len(p.replicas) for p in partitions.values()), default=0)
            drift += [
                f"topic {new.topic}: {have} {what} on the server and {want} in the"
                " configuration; nothing was changed"
                for what, have, want in (
                    ("partitions", len(partitions), new.num_partitions),
                    ("copies", copies, new.replication_factor),
                )
                if have != want
            ]
            config = found.get(new.topic, {})
            if "retention.ms" in config:
                self.retention[new.topic] = int(config["retention.ms"]) / 1000
            drift += [
                f"topic {new.topic}: {name} is {config[name]} on the server and {value} in"
                " the configuration; nothing was changed"
                for name, value in new.config.items()
                if config.get(name, value) != value
            ]
            if int(config.get("retention.bytes", -1)) >= 0:
                drift.append(
                    f"topic {new.topic}: retention.bytes is {config['retention.bytes']}, so unread"
                    " messages are deleted when the topic grows: set retention.bytes to -1"
                )
        return drift

    def configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        resources = [_api.ConfigResource(_api.ConfigResource.Type.TOPIC, name) for name in names]
        found = {}
        for resource, future in (
            self.admin.describe_configs(resources) if resources else {}
        ).items():
            try:
                found[resource.name] = {
                    name: entry.value
                    for name, entry in future.result(self.settings.timeout + 5).items()
                }
            except (KafkaException, TimeoutError):
                # Not permitted. The comparison is optional, and must not fail the start.
                continue
        return found

    # -- offsets -----------------------------------------------------------------------------------

    def _partitions(self, names: Iterable[str]) -> list[TopicPartition]:
        found = self.metadata("counting partitions").topics
        return [
            TopicPartition(name, p)
            for name in names
            if name in found and found[name].error is None
            for p in sorted(found[name].partitions)
        ]

    def _offsets(
        self, partitions: Iterable[TopicPartition], spec: Any
    ) -> dict[TopicAndPartition, int]:
        request = dict.fromkeys(partitions, spec)
        found = (
            self.wait_for(self.admin.list_offsets(request), "reading offsets") if request else {}
        )
        return {(tp.topic, tp.partition): info.offset for tp, info in found.items()}

    def bounds(self, names: Iterable[str]) -> dict[TopicAndPartition, tuple[int, int]]:
        """Return the offset of the oldest message and the end of each partition, in order."""
        partitions = self._partitions(names)
        low = self._offsets(partitions, _api.OffsetSpec.earliest())
        end = self._offsets(partitions, _api.OffsetSpec.latest())
        return {at: (low[at], end[at]) for at in sorted(end)}

    def first_since(self, names: Iterable[str], when: float) -> dict[TopicAndPartition, int]:
        """Return the offset of the first message published at `when` or later, -1 if none."""
        return self._offsets(
            self._partitions(names), _api.OffsetSpec.for_timestamp(int(when * 1000))
        )

    def read_lags(self, plan: Layout, group: str) -> dict[TopicAndPartition, PartitionLag]:
        """Return the group's offsets in the partitions of the topic, except its dead letters.

        A group that never committed starts at the oldest message.
        """
        bounds = self.bounds(server_topic.name for server_topic in plan.server_topics)
        if not bounds:
            return {}
        request = ConsumerGroupTopicPartitions(
            self.group_id(plan.topic, group), [TopicPartition(*at) for at in bounds]
        )
        (answer,) = self.wait_for(
            self.admin.list_consumer_group_offsets([request]),
            f"reading the offsets of group {group}",
        ).values()
        lags = {}
        for tp in sorted(answer.topic_partitions):
            low, end = bounds[tp.topic, tp.partition]
            ahead = settled_ahead(tp.offset, tp.metadata)
            lags[tp.topic, tp.partition] = PartitionLag(
                topic=tp.topic,
                partition=tp.partition,
                low=low,
                end=end,
                committed=max(-1, tp.offset),
                ahead=frozenset(offset for offset in ahead if low <= offset < end),
            )
        return lags

    def is_active(self, topic: str, group: str) -> bool:
        """Return True if the group has members. Then only they may change its offsets."""
        name = self.group_id(topic, group)
        future = self.admin.describe_consumer_groups([name], request_timeout=self.settings.timeout)[
            name
        ]
        try:
            return future.result(self.settings.timeout + 5).state not in _NO_MEMBERS
        except KafkaException as e:
            if error_of(e).code() == KafkaError.GROUP_ID_NOT_FOUND:
                return False
            raise explained(
                StoreUnavailable,
                self.settings,
                error_of(e),
                f"listing the members of group {group}",
            ) from e

    def set_offsets(self, topic: str, group: str, offsets: Mapping[TopicAndPartition, int]) -> None:
        request = ConsumerGroupTopicPartitions(
            self.group_id(topic, group),
            [TopicPartition(*at, offset) for at, offset in offsets.items()],
        )
        self.wait_for(
            self.admin.alter_consumer_group_offsets([request]),
            f"changing the offsets of group {group}",
        )

    def delete_before(self, offsets: Mapping[TopicAndPartition, int]) -> None:
        request = [TopicPartition(*at, offset) for at, offset in offsets.items()]
        if request:
            self.wait_for(self.admin.delete_records(request), "deleting records")
