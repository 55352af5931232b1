"""Address and credentials of a Kafka cluster, and explanations of its errors.

For broker, source and sink. No connection is opened here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
from confluent_kafka import KafkaError, KafkaException

from penstock.config import units
from penstock.config.options import query_options
from penstock.errors import ConfigError
from penstock.rules.masking import mask

SASL = {"plain": "PLAIN", "scram-sha-256": "SCRAM-SHA-256", "scram-sha-512": "SCRAM-SHA-512"}
_TLS_PROPERTIES = {
    "ca": "ssl.ca.location",
    "cert": "ssl.certificate.location",
    "key": "ssl.key.location",
    "key_password": "ssl.key.password",
}
_TEXT = units.texts(r"[^\0]*", "a text")
CONNECTION: dict[str, units.Kind] = {
    **dict.fromkeys(("username", "password", *_TLS_PROPERTIES), _TEXT),
    "sasl": units.choices(*SASL),
    "verify": units.FLAG,
    "timeout": units.durations(0.1, 600),
}
RDKAFKA = ("rdkafka.",)  # prefix of options that are properties of librdkafka
_PERMISSION_ERRORS = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
_LOGIN_ERRORS = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
)
_VERSION_ERRORS = (KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION)


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Address, credentials and TLS files of a cluster."""

    servers: str
    tls: bool = False
    username: str = ""
    password: str = ""
    sasl: str = "plain"
    ca: str = ""
    cert: str = ""
    key: str = ""
    key_password: str = ""
    verify: bool = True
    timeout: float = 10.0
    # librdkafka properties from the configuration. The caller applies them last, over its own.
    rdkafka: dict[str, str] = {}

    def client(self) -> dict[str, Any]:
        """Return the librdkafka properties that all Penstock clients share."""
        conf: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "client.id": "penstock",
            "security.protocol": ("SASL_" if self.username else "")
            + ("SSL" if self.tls else "PLAINTEXT"),
            "socket.keepalive.enable": True,
            "log.connection.close": False,
            "log_level": 2,  # critical only: Penstock logs the errors that it gets by callback
            "reconnect.backoff.max.ms": 2000,
        }
        if self.username:
            conf |= {
                "sasl.mechanism": SASL[self.sasl],
                "sasl.username": self.username,
                "sasl.password": self.password,
            }
        if self.tls:
            conf |= {
                name: value
                for field, name in _TLS_PROPERTIES.items()
                if (value := getattr(self, field))
            }
            if not self.verify:
                conf["enable.ssl.certificate.verification"] = False
        return conf


class ClusterUrl(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of `kafka://user:password@host:9092,host2/path?option=value`, not yet checked."""

    where: str  # for messages
    scheme: str
    hosts: str
    path: str
    login: dict[str, str]
    options: dict[str, str]

    def access(self, options: Mapping[str, Any], example: str) -> dict[str, Any]:
        """Return the fields of `Access` for this address and these options. Raises ConfigError."""
        if bool(options.get("username")) != bool(options.get("password")):
            raise ConfigError(
                f"{self.where}: the user or the password is missing",
                hint=f"give both: {self.scheme}://user:password@{self.hosts}",
            )
        properties = {name: value for name, value in options.items() if name.startswith(RDKAFKA)}
        return {
            **{name: value for name, value in options.items() if name not in properties},
            "servers": ",".join(
                _server(host.strip(), self.where, example) for host in self.hosts.split(",")
            ),
            "tls": self.scheme == "kafka+ssl",
            "rdkafka": {n.removeprefix(RDKAFKA[0]): str(v) for n, v in properties.items()},
        }


def split_url(url: str, where: str, example: str) -> ClusterUrl:
    """Raises ConfigError if it is not a Kafka URL. Messages begin with `where`."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("kafka", "kafka+ssl") or not rest:
        raise ConfigError(
            f"{where}: the URL is not a Kafka URL",
            hint=f"write it as {example}, or with TLS as kafka+ssl://user:password@host:9093",
        )
    rest, _, query = rest.partition("?")
    userinfo, _, place = rest.rpartition("@")
    user, _, password = userinfo.partition(":")
    hosts, _, path = place.partition("/")
    return ClusterUrl(
        where=where,
        scheme=scheme,
        hosts=hosts,
        path=unquote(path),
        login={"username": unquote(user), "password": unquote(password)} if user else {},
        options=query_options(query),
    )


def _server(host: str, where: str, example: str) -> str:
    """Return `host:port` of one address. The default port is 9092. Raises ConfigError."""
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not name:
        name, port = host, ""
    if not name or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise ConfigError(
            f"{where}: {mask('kafka://' + host)!r} is not a host and port", hint=example
        )
    return f"{name}:{port or 9092}"


def error_of(e: KafkaException | KafkaError) -> KafkaError:
    return e.args[0] if isinstance(e, KafkaException) else e


def weightier(old: KafkaError | None, new: KafkaError) -> KafkaError:
    """Return the more specific of two errors of a client.

    After a rejected password, the client also reports that all servers are down.
    """
    specific = (*_LOGIN_ERRORS, *_PERMISSION_ERRORS, KafkaError._SSL, KafkaError._RESOLVE)
    return old if old is not None and old.code() in specific and new.code() not in specific else new


def told(
    access: Access, error: KafkaError, doing: str, *, url: str, rights: str
) -> tuple[str, str]:
    """Return the message and the hint for an error. They contain no password.

    `url` names the setting of the address, `rights` the permissions that the user needs.
    """
    code, text = error.code(), error.str()
    for secret in (access.password, access.key_password):
        text = text.replace(secret, "***") if secret else text
    at = f"Kafka at {access.servers}"
    explanations = (
        (
            _LOGIN_ERRORS,
            f"{at} refuses the login ({text})",
            f"check user, password and sasl= in {url}",
        ),
        (
            _PERMISSION_ERRORS,
            f"{at} does not permit {doing} ({text})",
            f"give this user {rights}",
        ),
        (
            (KafkaError._SSL,),
            f"no TLS connection to {at} ({text})",
            "use kafka+ssl:// for TLS ports and kafka:// for plain ports. "
            "Name the CA of a private certificate with ca=FILE",
        ),
        (
            (KafkaError._RESOLVE,),
            f"the host of {at} cannot be resolved ({text})",
            f"check the spelling of the host in {url}",
        ),
        (
            _VERSION_ERRORS,
            f"{at} is too old for {doing} ({text})",
            "use Kafka 2.4 or newer, or with protocol=consumer 4.0 or newer",
        ),
    )
    for codes, message, hint in explanations:
        if code in codes:
            return message, hint
    return (
        f"{at} cannot be reached for {doing} ({text})",
        "check that it runs, and host and port. A server that requires TLS or a login closes other "
        "connections without an error: use kafka+ssl:// and user:password@",
    )
