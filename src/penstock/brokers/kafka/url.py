"""Parser of `kafka://` URLs, and explanations of Kafka errors. Opens no connection.

    kafka://host:9092,host2:9092?partitions=24                       plain text
    kafka+ssl://user:password@host:9093?sasl=scram-sha-512&ca=/etc/ca.pem    TLS, SASL with a user

Options are set in the query, or in PENSTOCK_KAFKA_OPTIONS in the same spelling
(`sasl=plain&username=…&password=…`). The query takes precedence.

| option | default | meaning |
|---|---|---|
| `partitions` | 12 | partitions of a new topic. At most this many workers share it |
| `replication` | 3, or the number of brokers if lower | copies of a new topic |
| `min_insync` | 2, or 1 with fewer than three copies | copies needed before a message is `ok` |
| `retention` | 7d | how long a topic keeps messages, even unread ones. A topic may ask for more |
| `retry_levels` | 5s,30s,2m,10m,1h | one retry topic each. The worker holds shorter delays |
| `max_message` | 4MiB | largest message of a new topic |
| `window`, `window_bytes` | 2000, 16MiB | unsettled messages that a worker holds of one partition |
| `session` | the lease, at least 6s | silence after which a worker loses its partitions |
| `grace` | 3s | time in which deliveries may be settled while their partition is revoked |
| `timeout` | 10s | longest wait for an answer. A publish without an answer is `unknown` |
| `commit_interval` | 0s | time between commits. A settle waits for its commit only if this is 0 |
| `protocol` | classic | `consumer`: Kafka 4 rebalance protocol (KIP-848), servers set `session` |
| `sasl` | plain | with a user: `plain`, `scram-sha-256` or `scram-sha-512` |
| `username`, `password` | those of the URL | for use in the environment variable |
| `ca`, `cert`, `key`, `key_password` | the system's CAs | files for TLS |
| `verify` | true | false: accept any certificate |
| `rdkafka.NAME` | | any property of librdkafka |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError

from penstock.config import units
from penstock.config.options import query_options, read_options
from penstock.errors import ConfigError, PenstockError
from penstock.rules.masking import mask
from penstock.stores.kafka_access import CONNECTION, RDKAFKA, Access, split_url, told

ENVIRONMENT = "PENSTOCK_KAFKA_OPTIONS"
EXAMPLE = "kafka://127.0.0.1:9092"


class Settings(Access, frozen=True, kw_only=True):
    """A parsed and checked URL. `shown` is the URL with its password masked."""

    shown: str
    partitions: int = 12
    replication: int = 3
    min_insync: int = 0  # 0: chosen by the number of copies
    retention: float = 7 * 86400.0
    retry_levels: tuple[float, ...] = (5.0, 30.0, 120.0, 600.0, 3600.0)
    max_message: int = 4 * 2**20
    window: int = 2000
    window_bytes: int = 16 * 2**20
    session: float = 0.0  # 0: chosen by the lease
    grace: float = 3.0
    commit_interval: float = 0.0
    protocol: str = "classic"

    def client(self) -> dict[str, Any]:
        return super().client() | self.rdkafka


def _levels(text: object) -> tuple[float, ...]:
    levels = sorted({units.duration(part.strip()) for part in str(text).split(",")})
    if not levels or levels[0] < 1 or len(levels) > 16:
        raise ValueError(text)
    return tuple(levels)


OPTIONS: dict[str, units.Kind] = {
    **CONNECTION,
    "partitions": units.counts(1, 4096),
    "replication": units.counts(1, 32),
    "min_insync": units.counts(1, 32),
    "retention": units.durations(60),
    "retry_levels": units.Kind(
        name="list of durations",
        expected="up to 16 durations of at least 1s with commas between them (5s,1m,1h)",
        read=_levels,
    ),
    "max_message": units.sizes(1024),
    "window": units.counts(1, 10_000),
    "window_bytes": units.sizes(65536),
    "session": units.durations(0.5, 1800),
    "grace": units.durations(0, 120),
    "commit_interval": units.durations(0, 60),
    "protocol": units.choices("classic", "consumer"),
}


def parse(url: str, env: Mapping[str, str]) -> Settings:
    """Parse a URL and its options. Raises ConfigError, which never shows the password."""
    shown = mask(url)
    address = split_url(url, repr(shown), EXAMPLE)
    if address.path:
        raise ConfigError(
            f"{shown!r}: Kafka has no databases, so a path after the host is not allowed",
            hint=f"{address.scheme}://{address.hosts}, "
            "and set PENSTOCK_NAMESPACE for a prefix of topics",
        )
    from_environment = query_options(env.get(ENVIRONMENT, ""))
    found = {
        **address.login,
        **read_options(ENVIRONMENT, from_environment, OPTIONS, unchecked=RDKAFKA),
        **read_options(repr(shown), address.options, OPTIONS, unchecked=RDKAFKA),
    }
    return Settings(shown=shown, **address.access(found, EXAMPLE))


# -- errors ----------------------------------------------------------------------------------------


def explained(
    kind: type[PenstockError], settings: Settings, error: KafkaError, doing: str
) -> PenstockError:
    """Return an error of this kind, with its cause and a next step."""
    rights = (
        "the rights Create, Describe, Read, Write and Delete"
        " on topics and groups with the prefix of the namespace"
    )
    message, hint = told(settings, error, doing, url="PENSTOCK_BROKER_URL", rights=rights)
    return kind(message, hint=hint)
