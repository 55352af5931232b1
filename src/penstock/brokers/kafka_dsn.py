"""What a `kafka://` DSN says, checked, and how Kafka's errors read to a person. Nothing connects here.

    kafka://host:9092,host2:9092?partitions=24                       plain text
    kafka+ssl://user:password@host:9093?sasl=scram-sha-512&ca=/etc/ca.pem    TLS, and SASL where there is a user

Options stand in the query, or in PENSTOCK_KAFKA_OPTIONS in the same spelling (`sasl=plain&username=…&password=…`); the query wins.

| option | default | meaning |
|---|---|---|
| `partitions` | 12 | partitions of a topic when it is made: at most so many workers share it |
| `replication` | 3, or as many brokers as there are | copies of a topic when it is made |
| `min_insync` | 2, or 1 with fewer than three copies | copies that must have a message before it is `ok` |
| `retention` | 7d | how long a topic keeps messages, read or not; at least what the topic itself asks for |
| `retry_levels` | 5s,30s,2m,10m,1h | one retry topic for each; shorter waits stay in the worker |
| `max_message` | 4MiB | largest message of a topic when it is made |
| `window`, `window_bytes` | 2000, 16MiB | what is held of one partition |
| `session` | the lease, at least 6s | how long a worker may be silent before its partitions go to others |
| `grace` | 3s | how long work in flight may finish when its partition goes to another worker |
| `timeout` | 10s | how long the servers may take to answer; a publish without an answer by then is `unknown` |
| `commit_interval` | 0s | 0: a settle returns when it is committed; else it returns at once and is committed this often |
| `protocol` | classic | `consumer`: the rebalance protocol of Kafka 4 (KIP-848), where the servers decide `session` |
| `sasl` | plain | with a user: `plain`, `scram-sha-256` or `scram-sha-512` |
| `username`, `password` | those of the URL | for the environment |
| `ca`, `cert`, `key`, `key_password` | the system's CAs | files for TLS |
| `verify` | true | false: any certificate will do |
| `rdkafka.NAME` | | any property of librdkafka |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from confluent_kafka import KafkaError, KafkaException

from penstock import units
from penstock.errors import ConfigError, PenstockError, StoreUnavailable, Unreachable

ENVIRONMENT = "PENSTOCK_KAFKA_OPTIONS"
EXAMPLE = "kafka://127.0.0.1:9092"
_SASL = {"plain": "PLAIN", "scram-sha-256": "SCRAM-SHA-256", "scram-sha-512": "SCRAM-SHA-512"}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A DSN, checked. `shown` is what may be printed."""

    shown: str
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
    partitions: int = 12
    replication: int = 3
    min_insync: int = 0  # 0: by the number of copies
    retention: float = 7 * 86400.0
    retry_levels: tuple[float, ...] = (5.0, 30.0, 120.0, 600.0, 3600.0)
    max_message: int = 4 * 2**20
    window: int = 2000
    window_bytes: int = 16 * 2**20
    session: float = 0.0  # 0: by the lease
    grace: float = 3.0
    timeout: float = 10.0
    commit_interval: float = 0.0
    protocol: str = "classic"
    rdkafka: dict[str, str] = {}

    def client(self) -> dict[str, Any]:
        """The properties that every client of ours has."""
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
            files = {"ssl.ca.location": self.ca, "ssl.certificate.location": self.cert, "ssl.key.location": self.key, "ssl.key.password": self.key_password}
            conf |= {name: value for name, value in files.items() if value}
            if not self.verify:
                conf["enable.ssl.certificate.verification"] = False
        return conf | self.rdkafka


def _levels(text: object) -> tuple[float, ...]:
    levels = sorted({units.duration(part.strip()) for part in str(text).split(",")})
    if not levels or levels[0] < 1 or len(levels) > 16:
        raise ValueError(text)
    return tuple(levels)


_READ: dict[str, tuple[Callable[[object], Any], str]] = {
    **{name: (kind.read, kind.expected) for name, kind in {
        "partitions": units.counts(1, 4096), "replication": units.counts(1, 32), "min_insync": units.counts(1, 32), "retention": units.durations(60),
        "max_message": units.sizes(1024), "window": units.counts(1, 10_000), "window_bytes": units.sizes(65536), "session": units.durations(0.5, 1800),
        "grace": units.durations(0, 120), "timeout": units.durations(0.1, 600), "commit_interval": units.durations(0, 60),
        "sasl": units.choices(*_SASL), "protocol": units.choices("classic", "consumer"), "verify": units.FLAG,
    }.items()},
    "retry_levels": (_levels, "up to 16 durations of at least 1s with commas between them (5s,1m,1h)"),
    **dict.fromkeys(("username", "password", "ca", "cert", "key", "key_password"), (str, "a text")),
}  # fmt: skip


def parse(url: str, env: Mapping[str, str]) -> Settings:
    """Raises ConfigError with the place of the mistake; the password is never part of it."""
    shown = units.mask(url)
    scheme, _, rest = url.partition("://")
    if scheme not in ("kafka", "kafka+ssl") or not rest:
        raise ConfigError(f"{shown!r} is not a Kafka URL", hint=f"{EXAMPLE}, or kafka+ssl://user:password@host:9093")
    rest, _, query = rest.partition("?")
    userinfo, _, hosts = rest.rpartition("@")
    user, _, password = userinfo.partition(":")
    hosts, _, path = hosts.partition("/")
    if path:
        raise ConfigError(
            f"{shown!r}: Kafka has no databases, so nothing stands after the host", hint=f"{scheme}://{hosts}; PENSTOCK_NAMESPACE sets the prefix of topics"
        )
    servers = [_server(host.strip(), shown) for host in hosts.split(",")]
    found: dict[str, Any] = {"username": unquote(user), "password": unquote(password)} if user else {}
    rdkafka: dict[str, str] = {}
    for origin, text in ((ENVIRONMENT, env.get(ENVIRONMENT, "")), (shown, query)):
        for name, value in parse_qsl(text, keep_blank_values=True):
            if name.startswith("rdkafka."):
                rdkafka[name.removeprefix("rdkafka.")] = value
                continue
            if name not in _READ:
                raise ConfigError(f"{origin!r}: there is no option {name!r}", hint=f"one of {', '.join(sorted(_READ))}, or rdkafka.NAME")
            read, expected = _READ[name]
            try:
                found[name] = read(value)
            except (ValueError, OverflowError):
                raise ConfigError(f"{origin!r}: {name} must be {expected}", hint=f"…?{name}={_example(name)}") from None
    if bool(found.get("username")) != bool(found.get("password")):
        raise ConfigError(f"{shown!r} has a user without a password, or the other way round", hint=f"{scheme}://user:password@{hosts}")
    return Settings(shown=shown, servers=",".join(servers), tls=scheme == "kafka+ssl", rdkafka=rdkafka, **found)


def _server(host: str, shown: str) -> str:
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not name:
        name, port = host, ""
    if not name or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise ConfigError(f"{shown!r}: {host!r} is no host and port", hint=EXAMPLE)
    return f"{name}:{port or 9092}"


def _example(name: str) -> str:
    default = {field.name: field.default for field in msgspec.structs.fields(Settings)}[name]
    if name == "retry_levels":
        return "5s,30s,2m"
    return "true" if default is True else units.write_duration(default) if isinstance(default, float) else str(default or 2)


# -- errors --------------------------------------------------------------------------------------------------------------

_DENIED = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
_AUTHENTICATION = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError.UNSUPPORTED_SASL_MECHANISM)
_TOO_OLD = (KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION)


def error_of(e: KafkaException | KafkaError) -> KafkaError:
    return e.args[0] if isinstance(e, KafkaException) else e


def weightier(old: KafkaError | None, new: KafkaError) -> KafkaError:
    """Of several complaints of a client, the one that says most: a refused password also looks like servers that are all down."""
    telling = (*_AUTHENTICATION, *_DENIED, KafkaError._SSL, KafkaError._RESOLVE)
    return old if old is not None and old.code() in telling and new.code() not in telling else new


def sentence(settings: Settings, error: KafkaError, doing: str) -> tuple[str, str]:
    """What is wrong and what to try, without a password."""
    code, text = error.code(), error.str()
    if settings.password:
        text = text.replace(settings.password, "***")
    if code in _AUTHENTICATION:
        return f"Kafka at {settings.servers} refuses the login ({text})", "check user, password and sasl= in PENSTOCK_BROKER_URL"
    if code in _DENIED:
        return (
            f"Kafka at {settings.servers} does not permit us {doing} ({text})",
            "give this user the rights Create, Describe, Read, Write and Delete on topics and groups with our prefix",
        )
    if code == KafkaError._SSL:
        return (
            f"no TLS connection to Kafka at {settings.servers} ({text})",
            "kafka+ssl:// is for TLS ports and kafka:// for plain ones; ca=FILE names the CA of a private certificate",
        )
    if code == KafkaError._RESOLVE:
        return f"the host of Kafka at {settings.servers} is not known ({text})", "check the spelling of the host in PENSTOCK_BROKER_URL"
    if code in _TOO_OLD:
        return f"Kafka at {settings.servers} is too old for {doing} ({text})", "Kafka 2.4 or newer, 4.0 or newer with protocol=consumer"
    return (
        f"Kafka at {settings.servers} cannot be reached for {doing} ({text})",
        "is it running, and are host and port right? A server that wants TLS or a login only hangs up on others: kafka+ssl://, user:password@",
    )


def starting(settings: Settings, error: KafkaError, doing: str) -> PenstockError:
    message, hint = sentence(settings, error, doing)
    return Unreachable(message, hint=hint)


def running(settings: Settings, error: KafkaError, doing: str) -> StoreUnavailable:
    message, hint = sentence(settings, error, doing)
    return StoreUnavailable(message, hint=hint)
