"""How to get in at a Kafka cluster, whoever asks (broker, source or sink), and how its errors read
to a person. Nothing connects here.
"""

from __future__ import annotations

from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException

from penstock.errors import ConfigError

SASL = {"plain": "PLAIN", "scram-sha-256": "SCRAM-SHA-256", "scram-sha-512": "SCRAM-SHA-512"}
_FILES = {
    "ca": "ssl.ca.location",
    "cert": "ssl.certificate.location",
    "key": "ssl.key.location",
    "key_password": "ssl.key.password",
}
_DENIED = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
_LOGIN = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
)
_TOO_OLD = (KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION)


class Access(msgspec.Struct, frozen=True, kw_only=True):
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
    rdkafka: dict[str, str] = {}  # goes last, over what a client's user sets

    def client(self) -> dict[str, Any]:
        """The properties that every client of ours has."""
        conf: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "client.id": "penstock",
            "security.protocol": ("SASL_" if self.username else "")
            + ("SSL" if self.tls else "PLAINTEXT"),
            "socket.keepalive.enable": True,
            "log.connection.close": False,
            "log_level": 2,  # what matters comes as an error and is told by us
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
                theirs: value for ours, theirs in _FILES.items() if (value := getattr(self, ours))
            }
            if not self.verify:
                conf["enable.ssl.certificate.verification"] = False
        return conf


def server(host: str, where: str, example: str) -> str:
    """`host:port` of one address. Raises ConfigError."""
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not name:
        name, port = host, ""
    if not name or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise ConfigError(f"{where}: {host!r} is no host and port", hint=example)
    return f"{name}:{port or 9092}"


def error_of(e: KafkaException | KafkaError) -> KafkaError:
    return e.args[0] if isinstance(e, KafkaException) else e


def weightier(old: KafkaError | None, new: KafkaError) -> KafkaError:
    """Of several complaints of a client, the one that says most: a refused password also looks like
    servers that are all down.
    """
    telling = (*_LOGIN, *_DENIED, KafkaError._SSL, KafkaError._RESOLVE)
    return old if old is not None and old.code() in telling and new.code() not in telling else new


def told(
    access: Access, error: KafkaError, doing: str, *, url: str, rights: str
) -> tuple[str, str]:
    """What is wrong and what to try, without a password. `url`: where its address is written;
    `rights`: which ones are needed.
    """
    code, text = error.code(), error.str()
    for secret in (access.password, access.key_password):
        text = text.replace(secret, "***") if secret else text
    at = f"Kafka at {access.servers}"
    if code in _LOGIN:
        return f"{at} refuses the login ({text})", f"check user, password and sasl= in {url}"
    if code in _DENIED:
        return f"{at} does not permit us {doing} ({text})", f"give this user {rights}"
    if code == KafkaError._SSL:
        return (
            f"no TLS connection to {at} ({text})",
            "kafka+ssl:// is for TLS ports and kafka:// for plain ones; ca=FILE names the CA of a private certificate",
        )
    if code == KafkaError._RESOLVE:
        return f"the host of {at} is not known ({text})", f"check the spelling of the host in {url}"
    if code in _TOO_OLD:
        return (
            f"{at} is too old for {doing} ({text})",
            "Kafka 2.4 or newer, 4.0 or newer with protocol=consumer",
        )
    return (
        f"{at} cannot be reached for {doing} ({text})",
        "is it running, and are host and port right? A server that wants TLS or a login only hangs up on others: kafka+ssl://, user:password@",
    )
