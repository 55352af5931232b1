"""A topic as sources and sinks name it, `kafka://user:password@host:9092/topic?option=value`, checked, and how Kafka's errors read. Nothing connects here."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from confluent_kafka import KafkaError, KafkaException

from penstock import units
from penstock.errors import ConfigError

EXAMPLE = "kafka://127.0.0.1:9092/products"
_SASL = {"plain": "PLAIN", "scram-sha-256": "SCRAM-SHA-256", "scram-sha-512": "SCRAM-SHA-512"}
_TEXT = units.texts(r"[^\0]+", "a text, or env:NAME for what the variable NAME holds")
# `key` is what names a record, so the client certificate's own key has a longer name here than in a broker's URL.
_FILES = {"ca": "ssl.ca.location", "cert": "ssl.certificate.location", "cert_key": "ssl.key.location", "cert_key_password": "ssl.key.password"}
CONNECTION: dict[str, units.Kind] = {
    **dict.fromkeys(("username", "password", *_FILES), _TEXT),
    "sasl": units.choices(*_SASL),
    "verify": units.FLAG,
    "timeout": units.durations(0.1, 600),
}


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """Where it is and how to get in. `label` is what may be printed."""

    servers: str
    name: str
    tls: bool = False
    username: str = ""
    password: str = ""
    sasl: str = "plain"
    ca: str = ""
    cert: str = ""
    cert_key: str = ""
    cert_key_password: str = ""
    verify: bool = True
    timeout: float = 10.0
    rdkafka: dict[str, str] = {}

    @property
    def label(self) -> str:
        return f"kafka{'+ssl' if self.tls else ''}://{self.servers}/{self.name}"

    def client(self) -> dict[str, Any]:
        """The properties that every client of it has; `rdkafka` goes last, over what its user adds."""
        conf: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "client.id": "penstock",
            "security.protocol": ("SASL_" if self.username else "") + ("SSL" if self.tls else "PLAINTEXT"),
            "socket.keepalive.enable": True,
            "log.connection.close": False,
            "log_level": 2,  # what matters comes as an error and is told by us
            "reconnect.backoff.max.ms": 2000,
        }
        if self.username:
            conf |= {"sasl.mechanism": _SASL[self.sasl], "sasl.username": self.username, "sasl.password": self.password}
        if self.tls:
            conf |= {theirs: value for ours, theirs in _FILES.items() if (value := getattr(self, ours))}
            if not self.verify:
                conf["enable.ssl.certificate.verification"] = False
        return conf


def parse(
    url: str, given: Mapping[str, Any], known: Mapping[str, units.Kind], *, where: str, env: Mapping[str, str] | None = None
) -> tuple[Topic, dict[str, Any]]:
    """The topic, and the caller's own options that were given (`known`), from the query and from beside the URL. Raises ConfigError, never with a password."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("kafka", "kafka+ssl") or not rest:
        raise ConfigError(f"{where}: {units.mask(url)!r} is no Kafka URL", hint=f"{EXAMPLE}, or kafka+ssl://user:password@host:9093/products")
    rest, _, query = rest.partition("?")
    userinfo, _, place = rest.rpartition("@")
    user, _, password = userinfo.partition(":")
    hosts, _, name = place.partition("/")
    name = unquote(name)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name) or name in (".", ".."):
        raise ConfigError(f"{where}: {name!r} cannot be a topic" if name else f"{where}: its URL names no topic", hint=f"{scheme}://{hosts}/products")
    servers = ",".join(_server(host.strip(), where) for host in hosts.split(","))
    found: dict[str, Any] = {}
    rdkafka: dict[str, str] = {}
    both = {"username": unquote(user), **({"password": unquote(password)} if password else {})} if user else {}
    for option, value in {**both, **dict(parse_qsl(query, keep_blank_values=True)), **given}.items():
        if option.startswith("rdkafka."):
            rdkafka[option.removeprefix("rdkafka.")] = str(value)
            continue
        kind = known.get(option) or CONNECTION.get(option)
        if kind is None:
            near = difflib.get_close_matches(option, [*known, *CONNECTION], n=1)
            raise ConfigError(
                f"{where}: there is no option {option!r}", hint=f"did you mean {near[0]}?" if near else f"it has {', '.join([*known, *CONNECTION])}"
            )
        try:
            found[option] = kind.read(_said(value, f"{where}: {option}", os.environ if env is None else env))
        except (ValueError, OverflowError, TypeError):
            shown = "what it is" if "password" in option else repr(value)
            raise ConfigError(f"{where}: {option} cannot be {shown}", hint=f"it is {kind.expected}") from None
    if bool(found.get("username")) != bool(found.get("password")):
        raise ConfigError(f"{where}: a user without a password, or the other way round", hint=f"{scheme}://user:password@{hosts}/{name}")
    ours = {option: value for option, value in found.items() if option in CONNECTION and option not in known}
    return Topic(servers=servers, name=name, tls=scheme == "kafka+ssl", rdkafka=rdkafka, **ours), {o: v for o, v in found.items() if o in known}


def _said(value: Any, where: str, env: Mapping[str, str]) -> Any:
    if not isinstance(value, str) or not value.startswith("env:"):
        return value
    variable = value.removeprefix("env:")
    if not env.get(variable):
        raise ConfigError(f"{where}: the environment has no {variable}", hint=f"set {variable}, or write the value itself")
    return env[variable]


def _server(host: str, where: str) -> str:
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not name:
        name, port = host, ""
    if not name or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise ConfigError(f"{where}: {host!r} is no host and port", hint=EXAMPLE)
    return f"{name}:{port or 9092}"


# -- errors --------------------------------------------------------------------------------------------------------------

_DENIED = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
_LOGIN = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError.UNSUPPORTED_SASL_MECHANISM)
_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)


def error_of(e: KafkaException | KafkaError) -> KafkaError:
    return e.args[0] if isinstance(e, KafkaException) else e


def weightier(old: KafkaError | None, new: KafkaError) -> KafkaError:
    """Of several complaints of a client, the one that says most: a refused password also looks like servers that are all down."""
    telling = (*_LOGIN, *_DENIED, KafkaError._SSL, KafkaError._RESOLVE)
    return old if old is not None and old.code() in telling and new.code() not in telling else new


def sentence(topic: Topic, error: KafkaError, doing: str) -> tuple[str, str]:
    """What is wrong and what to try, without a password."""
    code, text = error.code(), error.str()
    for secret in (topic.password, topic.cert_key_password):
        text = text.replace(secret, "***") if secret else text
    at = f"Kafka at {topic.servers}"
    if code in _LOGIN:
        return f"{at} refuses the login ({text})", "check user, password and sasl= in its URL"
    if code in _DENIED:
        return f"{at} does not permit us {doing} ({text})", f"give this user the rights to Describe and Read, or Write, the topic {topic.name}"
    if code in _MISSING:
        return f"{at} has no topic {topic.name}", "check its name, or make it; a topic that a connector fills is made with its first message"
    if code == KafkaError._SSL:
        return f"no TLS connection to {at} ({text})", "kafka+ssl:// is for TLS ports and kafka:// for plain ones; ca=FILE names the CA of a private certificate"
    if code == KafkaError._RESOLVE:
        return f"the host of {at} is not known ({text})", "check the spelling of the host in its URL"
    return (
        f"{at} cannot be reached for {doing} ({text})",
        "is it running, and are host and port right? A server that wants TLS or a login only hangs up on others: kafka+ssl://, user:password@",
    )
