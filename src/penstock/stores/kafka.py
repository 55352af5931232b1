"""URL of a Kafka topic, as sources and sinks use it, and explanations of Kafka errors.

The form is `kafka://user:password@host:9092/topic?option=value`. No connection is opened here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError

from penstock.config import units
from penstock.config.options import read_options, resolve_env
from penstock.errors import ConfigError
from penstock.stores import kafka_access
from penstock.stores.kafka_access import RDKAFKA, Access, split_url, told

EXAMPLE = "kafka://127.0.0.1:9092/products"
_NO_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
# `key` is the option for the record key. So the private key of the client certificate has a longer
# name here than in a broker's URL.
_RENAMED = {"cert_key": "key", "cert_key_password": "key_password"}
CONNECTION = {
    name: kind for name, kind in kafka_access.CONNECTION.items() if name not in _RENAMED.values()
} | {name: kafka_access.CONNECTION[field] for name, field in _RENAMED.items()}


class Topic(Access, frozen=True, kw_only=True):
    """Address and credentials of a topic. `label` has no secrets and may be printed."""

    name: str

    @property
    def label(self) -> str:
        return f"kafka{'+ssl' if self.tls else ''}://{self.servers}/{self.name}"


def parse(
    url: str,
    given: Mapping[str, Any],
    known: Mapping[str, units.Kind],
    *,
    where: str,
    env: Mapping[str, str] | None = None,
) -> tuple[Topic, dict[str, Any]]:
    """Return the topic, and the given options that are in `known`, the caller's own options.

    Options come from the URL's query and from `given`, which has priority. Raises ConfigError. The
    message never has a password.
    """
    address = split_url(url, where, EXAMPLE)
    name = address.path
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name) or name in (".", ".."):
        raise ConfigError(
            f"{where}: {name!r} cannot be a topic" if name else f"{where}: its URL names no topic",
            hint=f"write it as {address.scheme}://{address.hosts}/products",
        )

    def resolve(option: str, value: object) -> object:
        return resolve_env(f"{where}: {option}", value, env) if isinstance(value, str) else value

    found = read_options(
        where,
        {**address.login, **address.options, **given},
        {**CONNECTION, **known},
        unchecked=RDKAFKA,
        resolve=resolve,
    )
    own = {option: found.pop(option) for option in known if option in found}
    connection = {_RENAMED.get(option, option): value for option, value in found.items()}
    return Topic(name=name, **address.access(connection, EXAMPLE)), own


def sentence(topic: Topic, error: KafkaError, doing: str) -> tuple[str, str]:
    """Return the message and the hint for an error. They contain no password."""
    if error.code() in _NO_TOPIC:
        return (
            f"Kafka at {topic.servers} has no topic {topic.name}",
            "check its name, or create it. A connector creates its topic with the first message",
        )
    return told(
        topic,
        error,
        doing,
        url="its URL",
        rights=f"the rights to Describe and Read, or Write, the topic {topic.name}",
    )
