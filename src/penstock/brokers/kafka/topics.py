"""Kafka's side of a topic: which server-side topics it is made of, how they are made and compared,
and their offsets. No messages are read here.
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

from penstock.brokers.kafka.url import Settings, running, starting
from penstock.config.units import write_duration
from penstock.errors import ConfigError
from penstock.ports import TopicSpec
from penstock.rules.priority import WEIGHTS, class_of
from penstock.rules.watermark import settled_ahead
from penstock.stores.kafka_access import error_of, weightier

_api: Any = _admin  # the library does not export these names to type checkers
EARLIEST, LATEST = _api.OffsetSpec.earliest(), _api.OffsetSpec.latest()


def at_time(when: float) -> Any:
    """The first message that was published then or later."""
    return _api.OffsetSpec.for_timestamp(int(when * 1000))


NORMAL = 1
DEAD = ".dead"
_CLASSES = {0: ".high", 2: ".low"}  # normal has the bare name, so that other programs find it there
_PARTITION_BITS, _OFFSET_BITS = 12, 46
_NOBODY = frozenset({ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD})


class Place(msgspec.Struct, frozen=True):
    """One server-side topic of a topic of ours."""

    name: str
    slot: int  # its number in positions
    priority: int = NORMAL
    delay: float | None = None  # a retry topic: every message waits this long in it


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as the server sees it. An ordered one is a single topic: any other would let a key
    overtake itself.
    """

    topic: str
    ordered: bool
    classes: tuple[Place, ...]  # by priority; one for ordered topics
    retries: tuple[
        Place, ...
    ]  # shortest delay first; the first waits 0 s and is for what is handed to one group again
    dead: str

    @property
    def places(self) -> tuple[Place, ...]:
        return self.classes + self.retries

    @property
    def names(self) -> tuple[str, ...]:
        """Where what is due goes, by class."""
        return tuple(self.of(priority).name for priority in range(len(WEIGHTS)))

    def of(self, priority: int) -> Place:
        return self.classes[0] if len(self.classes) == 1 else self.classes[class_of(priority)]

    def level(self, delay: float) -> Place | None:
        """The retry topic with the longest wait that is not too long; None: so short a wait is
        spent in the worker.
        """
        return next(
            (
                place
                for place in reversed(self.retries[1:])
                if place.delay is not None and place.delay <= delay
            ),
            None,
        )


def position(slot: int, partition: int, offset: int) -> int:
    """One number below 2**63; for the first partition of the bare topic it is the offset itself."""
    return slot << (_PARTITION_BITS + _OFFSET_BITS) | partition << _OFFSET_BITS | offset


def server_name(namespace: str, topic: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{namespace}.{topic}")


def layout(settings: Settings, namespace: str, topic: str, *, ordered: bool) -> Layout:
    bare = server_name(namespace, topic)
    if topic.endswith(
        DEAD
    ):  # letters: no classes, no retries, and their own dead letters stay with them
        return Layout(topic=topic, ordered=False, classes=(Place(bare, 0),), retries=(), dead=bare)
    if ordered:
        return Layout(
            topic=topic, ordered=True, classes=(Place(bare, 0),), retries=(), dead=bare + DEAD
        )
    classes = tuple(
        Place(bare + _CLASSES.get(p, ""), slot, p) for p, slot in ((0, 1), (NORMAL, 0), (2, 2))
    )
    retries = tuple(
        Place(f"{bare}.retry.{write_duration(d)}", 3 + i, NORMAL, d)
        for i, d in enumerate((0.0, *settings.retry_levels))
    )
    return Layout(topic=topic, ordered=False, classes=classes, retries=retries, dead=bare + DEAD)


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A server-side topic as it is to be made."""

    name: str
    partitions: int
    copies: int
    config: dict[str, str]


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """One partition as a group has it."""

    topic: str
    partition: int
    low: int  # the oldest message that is still there
    end: int
    committed: int  # everything below is settled; -1: the group never said
    ahead: frozenset[int]  # settled above it

    @property
    def start(self) -> int:
        return max(self.low, self.committed)

    @property
    def lag(self) -> int:
        return max(0, self.end - self.start - len(self.ahead))


class Topics:
    """All calls wait for the server: they run in a thread of their own, one at a time."""

    def __init__(self, settings: Settings, namespace: str) -> None:
        self.settings, self.namespace = settings, namespace
        self.layouts: dict[str, Layout] = {}
        self.groups: dict[str, set[str]] = {}
        self.retention: dict[str, float] = {}  # by server-side name, where it is known
        self._admin: AdminClient | None = None
        self._complaint: KafkaError | None = None

    def group(self, topic: str, group: str) -> str:
        """Each topic has groups of its own: in a shared one, readers of different topics would
        rebalance each other.
        """
        return server_name(self.namespace, f"{topic}.{group}")

    # -- asking ------------------------------------------------------------------------------------

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            try:
                self._admin = AdminClient(
                    self.settings.client() | {"error_cb": self._complain} | self.settings.rdkafka
                )
            except KafkaException as e:
                raise ConfigError(
                    f"Kafka's client refuses {self.settings.shown!r}: {error_of(e).str()}",
                    hint="check the options of TLS and rdkafka.NAME",
                ) from e
        return self._admin

    def _complain(self, error: KafkaError) -> None:
        self._complaint = weightier(self._complaint, error)

    def metadata(self, doing: str, *, first: bool = False) -> Any:
        """Raises Unreachable for the first question of a process, StoreUnavailable later."""
        self._complaint = None
        try:
            return self.admin.list_topics(timeout=self.settings.timeout)
        except KafkaException as e:
            self.admin.poll(0)
            raise (starting if first else running)(
                self.settings, weightier(self._complaint, error_of(e)), doing
            ) from e

    def answers(self, futures: Mapping[Any, Future[Any]], doing: str) -> dict[Any, Any]:
        try:
            return {
                key: future.result(self.settings.timeout + 5) for key, future in futures.items()
            }
        except (KafkaException, TimeoutError) as e:
            error = (
                error_of(e) if isinstance(e, KafkaException) else KafkaError(KafkaError._TIMED_OUT)
            )
            raise running(self.settings, error, doing) from e

    # -- making topics -----------------------------------------------------------------------------

    def layout(self, topic: str) -> Layout:
        """As `ensure` was told, else as it is on the server: a topic that has no classes is
        ordered.
        """
        if topic not in self.layouts:
            found = self.metadata(f"looking for topic {topic}").topics
            plain = layout(self.settings, self.namespace, topic, ordered=False)
            there = plain.classes[0].name in found
            self.layouts[topic] = (
                plain
                if there or topic.endswith(DEAD)
                else layout(self.settings, self.namespace, topic, ordered=True)
            )
        return self.layouts[topic]

    def ensure(self, topology: Sequence[TopicSpec]) -> list[str]:
        cluster = self.metadata("making topics", first=True)
        drift: list[str] = []
        wanted: dict[str, _Plan] = {}
        last: dict[str, _Plan] = {}
        for spec in topology:
            bare = server_name(self.namespace, spec.name)
            classed = bare + _CLASSES[0] in cluster.topics
            ordered = spec.ordered and not classed
            if spec.ordered and classed:
                drift.append(
                    f"topic {spec.name}: ordered is False on the server and True in the configuration; delete its topics ({bare}, {bare}.*) to change that"
                )
            plan = self.layouts[spec.name] = layout(
                self.settings, self.namespace, spec.name, ordered=ordered
            )
            self.groups.setdefault(spec.name, set()).update(spec.groups)
            if (
                bare in cluster.topics
                and not classed
                and not spec.ordered
                and len(plan.classes) > 1
            ):
                drift.append(
                    f"topic {spec.name}: {bare} was made by another program, or as an ordered topic; priority classes and retries are added beside it"
                )
            for place in plan.places:
                new = self._new(place.name, cluster, spec, retry=place.delay is not None)
                (last if place.name == bare else wanted)[place.name] = new
            if plan.dead != bare:
                wanted.setdefault(
                    plan.dead, self._new(plan.dead, cluster, spec, retry=True, keep=30 * 86400.0)
                )
        # The bare topic last: where it is there, all that belongs to it is.
        for step in (wanted, last):
            self._create([new for name, new in step.items() if name not in cluster.topics])
        drift += self._compare(
            [new for name, new in (wanted | last).items() if name in cluster.topics], cluster
        )
        for name, new in (wanted | last).items():
            self.retention.setdefault(name, int(new.config["retention.ms"]) / 1000)
        return drift

    def _new(
        self, name: str, cluster: Any, spec: TopicSpec, *, retry: bool, keep: float = 0.0
    ) -> _Plan:
        s = self.settings
        copies = min(s.replication, max(1, len(cluster.brokers)))
        small = retry or spec.name.endswith(DEAD)
        config = {
            "retention.ms": str(int(max(s.retention, spec.retention, keep) * 1000)),
            "min.insync.replicas": str(min(copies, s.min_insync or (2 if copies > 2 else 1))),
            "max.message.bytes": str(s.max_message),
            "cleanup.policy": "delete",
        }
        return _Plan(
            name=name,
            partitions=max(1, s.partitions // 4) if small else s.partitions,
            copies=copies,
            config=config,
        )

    def _create(self, topics: Sequence[_Plan]) -> None:
        if not topics:
            return
        made = [
            _api.NewTopic(
                new.name,
                num_partitions=new.partitions,
                replication_factor=new.copies,
                config=new.config,
            )
            for new in topics
        ]
        for name, future in self.admin.create_topics(
            made, operation_timeout=self.settings.timeout
        ).items():
            try:
                future.result(self.settings.timeout + 5)
            except KafkaException as e:
                if (
                    error_of(e).code() == KafkaError.TOPIC_ALREADY_EXISTS
                ):  # another worker was quicker
                    continue
                if error_of(e).code() in (
                    KafkaError.INVALID_REPLICATION_FACTOR,
                    KafkaError.POLICY_VIOLATION,
                    KafkaError.INVALID_CONFIG,
                    KafkaError.TOPIC_EXCEPTION,
                ):
                    raise ConfigError(
                        f"Kafka refuses to make topic {name} ({error_of(e).str()})",
                        hint="check partitions, replication, min_insync and retention in the URL, or make the topic by hand",
                    ) from e
                raise starting(self.settings, error_of(e), f"making topic {name}") from e
        until = time.monotonic() + self.settings.timeout
        names = {new.name for new in topics}
        while (
            not names <= self.metadata("making topics").topics.keys() and time.monotonic() < until
        ):  # every server hears of a new topic in its own time
            time.sleep(0.05)

    def _compare(self, topics: Sequence[_Plan], cluster: Any) -> list[str]:
        """What the server has otherwise than the configuration, in sentences. Where reading the
        settings of topics is not permitted, what can be seen.
        """
        drift = []
        found = self.configs([new.name for new in topics])
        for new in topics:
            there = cluster.topics[new.name]
            for what, have, want in (
                ("partitions", len(there.partitions), new.partitions),
                (
                    "copies",
                    min((len(p.replicas) for p in there.partitions.values()), default=0),
                    new.copies,
                ),
            ):
                if have != want:
                    drift.append(
                        f"topic {new.name}: {have} {what} on the server and {want} in the configuration; nothing was changed"
                    )
            config = found.get(new.name, {})
            if "retention.ms" in config:
                self.retention[new.name] = int(config["retention.ms"]) / 1000
            for name, value in new.config.items():
                if name in config and config[name] != value:
                    drift.append(
                        f"topic {new.name}: {name} is {config[name]} on the server and {value} in the configuration; nothing was changed"
                    )
            if int(config.get("retention.bytes", -1)) >= 0:
                drift.append(
                    f"topic {new.name}: retention.bytes is {config['retention.bytes']}, so unread messages are deleted when it grows; set it to -1"
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
            except (
                KafkaException,
                TimeoutError,
            ):  # not permitted: a look is not worth a failed start
                continue
        return found

    # -- offsets -----------------------------------------------------------------------------------

    def partitions(self, names: Iterable[str]) -> list[TopicPartition]:
        found = self.metadata("counting partitions").topics
        return [
            TopicPartition(name, p)
            for name in names
            if name in found and found[name].error is None
            for p in sorted(found[name].partitions)
        ]

    def offsets(
        self, partitions: Sequence[TopicPartition], spec: Any
    ) -> dict[tuple[str, int], Any]:
        if not partitions:
            return {}
        found = self.answers(
            self.admin.list_offsets(
                {TopicPartition(tp.topic, tp.partition): spec for tp in partitions}
            ),
            "asking for offsets",
        )
        return {(tp.topic, tp.partition): info for tp, info in found.items()}

    def reach(self, topic: str, group: str, names: Iterable[str]) -> list[Reach]:
        """Where a group stands in these server-side topics. A group that never committed begins
        with the oldest message.
        """
        partitions = self.partitions(names)
        low, end = self.offsets(partitions, EARLIEST), self.offsets(partitions, LATEST)
        committed: dict[tuple[str, int], TopicPartition] = {}
        if partitions:
            request = [ConsumerGroupTopicPartitions(self.group(topic, group), list(partitions))]
            (answer,) = self.answers(
                self.admin.list_consumer_group_offsets(request),
                f"asking where group {group} stands",
            ).values()
            committed = {(tp.topic, tp.partition): tp for tp in answer.topic_partitions}
        found = []
        for at in sorted(end):
            tp = committed.get(at)
            offset = tp.offset if tp is not None and tp.offset >= 0 else -1
            ahead = (
                settled_ahead(offset, tp.metadata)
                if tp is not None and offset >= 0
                else frozenset()
            )
            alive = frozenset(o for o in ahead if low[at].offset <= o < end[at].offset)
            found.append(
                Reach(
                    topic=at[0],
                    partition=at[1],
                    low=low[at].offset,
                    end=end[at].offset,
                    committed=offset,
                    ahead=alive,
                )
            )
        return found

    def is_active(self, topic: str, group: str) -> bool:
        """Has it members now? Then its offsets are theirs to move."""
        name = self.group(topic, group)
        future = self.admin.describe_consumer_groups([name], request_timeout=self.settings.timeout)[
            name
        ]
        try:
            return future.result(self.settings.timeout + 5).state not in _NOBODY
        except KafkaException as e:
            if error_of(e).code() == KafkaError.GROUP_ID_NOT_FOUND:
                return False
            raise running(
                self.settings, error_of(e), f"asking for the members of group {group}"
            ) from e

    def move(self, topic: str, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        request = [
            ConsumerGroupTopicPartitions(
                self.group(topic, group),
                [TopicPartition(name, p, offset) for (name, p), offset in offsets.items()],
            )
        ]
        self.answers(self.admin.alter_consumer_group_offsets(request), f"moving group {group}")

    def truncate(self, offsets: Mapping[tuple[str, int], int]) -> None:
        request = [TopicPartition(name, p, offset) for (name, p), offset in offsets.items()]
        if request:
            self.answers(self.admin.delete_records(request), "deleting records")
