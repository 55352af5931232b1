"""URL of a Kafka topic, as sources and sinks use it, and explanations of Kafka errors.

The form is `kafka://user:password@host:9092/topic?option=value`. No connection is opened here.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from confluent_kafka import KafkaError

from penstock.config import units
from penstock.errors import ConfigError
from penstock.rules.masking import mask
from penstock.stores.kafka_access import SASL, Access, server, told

EXAMPLE = "kafka://127.0.0.1:9092/products"
_NO_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
_TEXT = units.texts(r"[^\0]+", "a text, or env:NAME for the value of the variable NAME")
# `key` is the option for the record key. So the private key of the client certificate has a longer
# name here than in a broker's URL.
_FILES = {"ca": "ca", "cert": "cert", "cert_key": "key", "cert_key_password": "key_password"}
CONNECTION: dict[str, units.Kind] = {
    **dict.fromkeys(("username", "password", *_FILES), _TEXT),
    "sasl": units.choices(*SASL),
    "verify": units.FLAG,
    "timeout": units.durations(0.1, 600),
}


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
    scheme, _, rest = url.partition("://")
    if scheme not in ("kafka", "kafka+ssl") or not rest:
        raise ConfigError(
            f"{where}: {mask(url)!r} is not a Kafka URL",
            hint=f"write it as {EXAMPLE}, or kafka+ssl://user:password@host:9093/products",
        )
    rest, _, query = rest.partition("?")
    userinfo, _, place = rest.rpartition("@")
    user, _, password = userinfo.partition(":")
    hosts, _, name = place.partition("/")
    name = unquote(name)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name) or name in (".", ".."):
        raise ConfigError(
            f"{where}: {name!r} cannot be a topic" if name else f"{where}: its URL names no topic",
            hint=f"write it as {scheme}://{hosts}/products",
        )
    servers = ",".join(server(host.strip(), where, EXAMPLE) for host in hosts.split(","))
    found: dict[str, Any] = {}
    rdkafka: dict[str, str] = {}
    both = (
        {"username": unquote(user), **({"password": unquote(password)} if password else {})}
        if user
        else {}
    )
    for option, value in {
        **both,
        **dict(parse_qsl(query, keep_blank_values=True)),
        **given,
    }.items():
        if option.startswith("rdkafka."):
            rdkafka[option.removeprefix("rdkafka.")] = str(value)
            continue
        kind = known.get(option) or CONNECTION.get(option)
        if kind is None:
            near = difflib.get_close_matches(option, [*known, *CONNECTION], n=1)
            raise ConfigError(
                f"{where}: there is no option {option!r}",
                hint=f"did you mean {near[0]}?"
                if near
                else f"use one of {', '.join([*known, *CONNECTION])}",
            )
        try:
            found[option] = kind.read(
                _resolve_env(value, f"{where}: {option}", os.environ if env is None else env)
            )
        except (ValueError, OverflowError, TypeError):
            shown = "the given value" if "password" in option else repr(value)
            raise ConfigError(
                f"{where}: {option} cannot be {shown}", hint=f"use {kind.expected}"
            ) from None
    if bool(found.get("username")) != bool(found.get("password")):
        raise ConfigError(
            f"{where}: the user or the password is missing",
            hint=f"give both: {scheme}://user:password@{hosts}/{name}",
        )
    connection = {
        _FILES.get(option, option): value
        for option, value in found.items()
        if option in CONNECTION and option not in known
    }
    return Topic(
        servers=servers, name=name, tls=scheme == "kafka+ssl", rdkafka=rdkafka, **connection
    ), {o: v for o, v in found.items() if o in known}


def _resolve_env(value: Any, where: str, env: Mapping[str, str]) -> Any:
    if not isinstance(value, str) or not value.startswith("env:"):
        return value
    variable = value.removeprefix("env:")
    if not env.get(variable):
        raise ConfigError(
            f"{where}: the environment has no {variable}",
            hint=f"set {variable}, or write the value itself",
        )
    return env[variable]


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
