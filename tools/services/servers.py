"""Servers, one class each: packages, command, check of readiness, URL.

See `control` for start and stop.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from .jars import jars, java, plugins
from .packages import program
from .processes import identity
from .state import Place
from .trouble import ServiceError

HOST = "127.0.0.1"
KAFKA = "4.3.1"
# Kafka uses slf4j 1.7, with which slf4j2-impl logs nothing.
LOGGING = (
    "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3",
    "org.apache.logging.log4j:log4j-core:2.24.3",
)
JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


class Server:
    """One server with its directory.

    `ports` are chosen once and stored. All other settings are written again at each start.
    """

    name: ClassVar[str]
    # Default ports. Clients use the first one. They are also in deploy/compose/compose.yaml.
    usual: ClassVar[Mapping[str, int]]
    needs: ClassVar[tuple[str, ...]] = ()  # servers that must run before it
    heavy: ClassVar[bool] = False  # needs hundreds of megabytes, so tests run one at a time
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    patience: ClassVar[float] = 60.0  # seconds until it must be ready, on a busy machine

    def __init__(self, place: Place, others: Mapping[str, Server]) -> None:
        self.place, self.others = place, others

    @property
    def ports(self) -> Mapping[str, int]:
        return self.place.ports(self.usual)

    @property
    def port(self) -> int:
        return self.ports[next(iter(self.usual))]

    @property
    def user(self) -> str | None:
        """The user that it runs as, or None for the current user."""
        return None

    @property
    def data(self) -> Path:
        return self.place.data(self.user)

    def write(self, name: str, *lines: str) -> str:
        path = self.place.directory / name
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    def get(self, path: str, *, port: str = "", user: str = "", method: str = "GET") -> bytes:
        request = urllib.request.Request(
            f"http://{HOST}:{self.ports[port] if port else self.port}{path}", method=method
        )
        if user:
            request.add_header("Authorization", "Basic " + base64.b64encode(user.encode()).decode())
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=5
        ) as answer:
            return bytes(answer.read())

    def url(self) -> str:
        """The DSN to give to Penstock."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """Install its packages, write its configuration, and return the foreground command."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def version(self) -> str:
        """Return the version, from the server. Raises any exception until the server is ready."""
        raise NotImplementedError


class Postgres(Server):
    name = "postgres"
    usual = {"sql": 25432}
    stop_signal = signal.SIGINT  # closes connections, while SIGTERM would wait for them

    @property
    def user(self) -> str | None:
        return "postgres" if os.geteuid() == 0 else None  # PostgreSQL does not run as root

    @cached_property
    def binary(self) -> str:
        return program(
            "postgres",
            "postgresql",
            "the Postgres broker, ledger and sink are tested on it",
            "/usr/lib/postgresql/*/bin/postgres",
        )

    def url(self) -> str:
        return f"postgres://postgres@{HOST}:{self.port}/penstock"

    def command(self) -> list[str]:
        server, data = self.binary, self.data
        cluster = data / "cluster"
        if not (cluster / "PG_VERSION").exists():
            initdb = [
                str(Path(server).with_name("initdb")),
                "-D",
                str(cluster),
                "-A",
                "trust",
                "-U",
                "postgres",
                "-E",
                "UTF8",
                "--locale=C",
            ]
            made = subprocess.run(
                initdb,
                capture_output=True,
                text=True,
                cwd=data,
                user=self.user,
                group=self.user,
                extra_groups=[] if self.user else None,
                check=False,
            )
            if made.returncode:
                raise ServiceError(
                    f"initdb failed: {(made.stderr or made.stdout).strip().splitlines()[-1]}",
                    f"./dev services down --wipe {self.name}, then run this again",
                )
        lock = cluster / "postmaster.pid"
        if lock.exists() and identity(int(lock.read_text().split()[0])) is None:
            # The file of a killed server. Until that process is reaped, the new server would take
            # it for alive.
            lock.unlink()
        settings = {
            "listen_addresses": HOST,
            "port": self.port,
            "unix_socket_directories": "",
            "wal_level": "logical",
            "max_connections": 200,
            "max_wal_senders": 16,
            "max_replication_slots": 16,
            "shared_buffers": "64MB",
        }
        return [
            server,
            "-D",
            str(cluster),
            *[word for name, value in settings.items() for word in ("-c", f"{name}={value}")],
        ]

    def version(self) -> str:
        import psycopg

        with psycopg.connect(
            f"host={HOST} port={self.port} user=postgres dbname=postgres",
            connect_timeout=5,
            autocommit=True,
        ) as connection:
            if not connection.execute(
                "SELECT 1 FROM pg_database WHERE datname = 'penstock'"
            ).fetchone():
                connection.execute("CREATE DATABASE penstock")
            return str(connection.info.parameter_status("server_version")).split()[0]


class Redis(Server):
    name = "redis"
    usual = {"resp": 26379}

    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def command(self) -> list[str]:
        server = program(
            "redis-server", "redis-server", "the Redis broker and claims are tested on it"
        )
        lines = [
            f"bind {HOST}",
            f"port {self.port}",
            f'dir "{self.data}"',
            "appendonly yes",
            "appendfsync always",
        ]
        lines += ['save ""', "maxmemory-policy noeviction", "daemonize no"]
        return [server, self.write("redis.conf", *lines)]

    def version(self) -> str:
        with socket.create_connection((HOST, self.port), 5) as connection:
            connection.sendall(b"PING\r\nINFO server\r\n")
            answer = b""
            while b"redis_version" not in answer and answer[:1] != b"-":
                more = connection.recv(4096)
                if not more:
                    break
                answer += more
        if not answer.startswith(b"+PONG"):
            raise ConnectionError(answer.decode(errors="replace"))  # still loading
        found = re.search(rb"redis_version:(\S+)", answer)
        return found[1].decode() if found else ""


class Rabbitmq(Server):
    name = "rabbitmq"
    usual = {"amqp": 24672, "management": 27672, "epmd": 24369, "distribution": 26672}
    heavy = True
    patience = 120.0

    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}/"

    def command(self) -> list[str]:
        # Debian's wrapper on PATH requires its own user and directories. The script that it calls
        # does not.
        server = program(
            "rabbitmq-server",
            "rabbitmq-server",
            "the RabbitMQ broker is tested on it",
            "/usr/lib/rabbitmq/bin/rabbitmq-server",
        )
        self.write("enabled_plugins", "[rabbitmq_management].")
        self.write(
            "rabbitmq.conf",
            f"listeners.tcp.1 = {HOST}:{self.port}",
            f"management.tcp.ip = {HOST}",
            f"management.tcp.port = {self.ports['management']}",
            "log.console = true",
            "log.console.level = info",
            "log.file = false",
            "collect_statistics_interval = 1000",
        )
        # Start epmd in the same process group. Otherwise RabbitMQ starts it as a daemon that stays.
        return ["/bin/sh", "-c", 'epmd & exec "$0"', server]

    def environment(self) -> dict[str, str]:
        home = self.place.directory
        return {
            "HOME": str(self.data),  # the cookie
            "RABBITMQ_NODENAME": "penstock@localhost",
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(home / "none"),  # not the machine's file
            "RABBITMQ_MNESIA_BASE": str(self.data / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.data / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(self.data / "pid"),
            "RABBITMQ_DIST_PORT": str(self.ports["distribution"]),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(self.ports["epmd"]),
            "ERL_EPMD_ADDRESS": HOST,
            # With this, the server replaces the script. So the recorded pid is the server's.
            "RUNNING_UNDER_SYSTEMD": "1",
        }

    def version(self) -> str:
        socket.create_connection((HOST, self.port), 5).close()
        return str(
            json.loads(self.get("/api/overview", port="management", user="guest:guest"))[
                "rabbitmq_version"
            ]
        )


class JavaServer(Server):
    """Base of the three servers on the JVM. They log to stdout, which is the log file."""

    heavy = True
    patience = 120.0
    memory: ClassVar[str]

    def java(
        self, classes: Path, main: str, *arguments: str, options: tuple[str, ...] = ()
    ) -> list[str]:
        log4j = self.write(
            "log4j2.properties",
            "appender.out.type = Console",
            "appender.out.name = out",
            "appender.out.layout.type = PatternLayout",
            "appender.out.layout.pattern = %d %p %m (%c)%n",
            "rootLogger.level = warn",
            "rootLogger.appenderRef.out.ref = out",
        )
        return [
            java(),
            f"-Xmx{self.memory}",
            *JVM,
            f"-Dlog4j2.configurationFile={log4j}",
            *options,
            "-cp",
            f"{classes}/*",
            main,
            *arguments,
        ]


def cluster_id(random: bytes) -> str:
    """Return 16 bytes as Kafka writes an id, without the highest bit of the first byte.

    So the id never starts with "-", which Kafka's tool would read as an option.
    """
    made = bytes([random[0] & 0x7F, *random[1:]])
    return base64.urlsafe_b64encode(made).decode().rstrip("=")


class Kafka(JavaServer):
    name = "kafka"
    # Clients connect to the address that a broker advertises. For tests with a proxy, the listener
    # at `behind` advertises the port `proxied`, on which no server listens. The listener at
    # `secure` requires TLS and a login. Its users are `penstock`, and `nobody`, whose permissions
    # tests may remove.
    usual = {
        "clients": 29092,
        "controller": 30092,
        "behind": 30392,
        "proxied": 30692,
        "secure": 30992,
    }
    memory = "512m"

    def url(self) -> str:
        return f"kafka://{HOST}:{self.port}"

    def command(self) -> list[str]:
        classes = jars("kafka", [f"org.apache.kafka:kafka_2.13:{KAFKA}", *LOGGING])
        controller = self.ports["controller"]
        logs = self.data / "logs"
        single = {
            "offsets.topic.": 4,
            "transaction.state.log.": 4,
            "share.coordinator.state.topic.": 4,
        }
        properties = self.write(
            "server.properties",
            "process.roles=broker,controller",
            "node.id=1",
            f"controller.quorum.bootstrap.servers={HOST}:{controller}",
            f"listeners=PLAINTEXT://{HOST}:{self.port},PROXIED://{HOST}:{self.ports['behind']},"
            f"SECURE://{HOST}:{self.ports['secure']},CONTROLLER://{HOST}:{controller}",
            f"advertised.listeners=PLAINTEXT://{HOST}:{self.port},"
            f"PROXIED://{HOST}:{self.ports['proxied']},SECURE://{HOST}:{self.ports['secure']}",
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,"
            "SECURE:SASL_SSL,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name=PLAINTEXT",
            "sasl.enabled.mechanisms=PLAIN",
            "listener.name.secure.plain.sasl.jaas.config="
            "org.apache.kafka.common.security.plain.PlainLoginModule required "
            'user_penstock="secret" user_nobody="secret";',
            f"ssl.keystore.location={self._certificate()}",
            "ssl.keystore.password=penstock",
            "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users=User:ANONYMOUS",
            "allow.everyone.if.no.acl.found=true",
            "controller.listener.names=CONTROLLER",
            f"log.dirs={logs}",
            *[f"{topic}replication.factor=1" for topic in single],
            *[f"{topic}num.partitions={n}" for topic, n in single.items()],
            "transaction.state.log.min.isr=1",
            "share.coordinator.state.topic.min.isr=1",
            "group.initial.rebalance.delay.ms=0",
            # The controller accepts a killed broker again only after its last session has expired.
            "broker.session.timeout.ms=3000",
            "broker.heartbeat.interval.ms=500",
            # Tests need the messages of a killed member again within seconds. These are only the
            # minimums. Each group sets its own timeouts.
            "group.min.session.timeout.ms=1000",
            "group.consumer.min.session.timeout.ms=1000",
            "group.consumer.min.heartbeat.interval.ms=200",
        )
        if not (logs / "meta.properties").exists():
            tool = self.java(
                classes,
                "kafka.tools.StorageTool",
                "format",
                "--standalone",
                "-t",
                cluster_id(uuid.uuid4().bytes),
                "-c",
                properties,
            )
            made = subprocess.run(tool, capture_output=True, text=True, check=False)
            if made.returncode:
                output = [*(made.stdout + made.stderr).strip().splitlines(), "no output"]
                raise ServiceError(
                    f"Kafka's storage could not be formatted: {output[0]}",
                    f"./dev services down --wipe {self.name}, then run this again",
                )
        return self.java(classes, "kafka.Kafka", properties)

    def _certificate(self) -> Path:
        """Return the key store for `secure`, made once. Clients must trust `kafka.pem`."""
        store, trusted = self.data / "kafka.p12", self.data / "kafka.pem"
        tool = [
            str(Path(java()).with_name("keytool")),
            "-alias",
            "kafka",
            "-keystore",
            str(store),
            "-storepass",
            "penstock",
        ]
        if not trusted.exists():
            store.unlink(missing_ok=True)
            made = [
                "-genkeypair",
                "-keyalg",
                "EC",
                "-dname",
                f"CN={HOST}",
                "-ext",
                f"san=ip:{HOST}",
                "-validity",
                "3650",
                "-storetype",
                "PKCS12",
            ]
            for arguments in (made, ["-exportcert", "-rfc", "-file", str(trusted)]):
                done = subprocess.run(tool + arguments, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise ServiceError(
                        f"Kafka's certificate could not be made: {done.stdout.strip()}",
                        f"./dev services down --wipe {self.name}, then run this again",
                    )
        return store

    def version(self) -> str:
        from confluent_kafka.admin import AdminClient

        # A broker that still elects its controller lists itself, but cannot create a topic yet.
        admin = AdminClient(
            {"bootstrap.servers": f"{HOST}:{self.port}", "log_level": 0, "socket.timeout.ms": 3000}
        )
        if (
            not admin.list_topics(timeout=3).brokers
            or admin.describe_cluster(request_timeout=3).result().controller is None
        ):
            raise ConnectionError("no controller yet")
        return KAFKA


class Connect(JavaServer):
    name = "connect"
    usual = {"rest": 28083}
    needs = ("kafka",)
    memory = "512m"
    patience = 180.0
    debezium = (
        "io.debezium:debezium-connector-postgres:3.6.3.Final:tar.gz:plugin",
        "io.debezium:debezium-connector-jdbc:3.6.0.Final:tar.gz:plugin",
    )

    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def command(self) -> list[str]:
        runtime = [
            f"org.apache.kafka:connect-{part}:{KAFKA}"
            for part in ("runtime", "json", "transforms", "file")
        ]
        classes, found = jars("connect", [*runtime, *LOGGING]), plugins("debezium", self.debezium)
        topics = [
            line
            for kind in ("config", "offset", "status")
            for line in (
                f"{kind}.storage.topic=connect-{kind}",
                f"{kind}.storage.replication.factor=1",
            )
        ]
        properties = self.write(
            "connect.properties",
            f"bootstrap.servers={HOST}:{self.others['kafka'].port}",
            "group.id=penstock-connect",
            f"listeners=http://{HOST}:{self.port}",
            f"rest.advertised.host.name={HOST}",
            "key.converter=org.apache.kafka.connect.json.JsonConverter",
            "value.converter=org.apache.kafka.connect.json.JsonConverter",
            *topics,
            "offset.storage.partitions=1",
            "status.storage.partitions=1",
            "offset.flush.interval.ms=1000",
            f"plugin.path={found}",
            # Secrets by reference: ${env:NAME}, ${file:PATH:KEY}.
            "config.providers=env,file",
            "config.providers.env.class="
            "org.apache.kafka.common.config.provider.EnvVarConfigProvider",
            "config.providers.file.class="
            "org.apache.kafka.common.config.provider.FileConfigProvider",
            # A killed Connect worker can rejoin within seconds. Its tasks are restarted without a
            # delay.
            "session.timeout.ms=6000",
            "heartbeat.interval.ms=1000",
            "scheduled.rebalance.max.delay.ms=0",
            "consumer.session.timeout.ms=6000",
            "consumer.heartbeat.interval.ms=1000",
        )
        return self.java(classes, "org.apache.kafka.connect.cli.ConnectDistributed", properties)

    def version(self) -> str:
        classes = {plugin["class"] for plugin in json.loads(self.get("/connector-plugins"))}
        if (
            not {
                "io.debezium.connector.postgresql.PostgresConnector",
                "io.debezium.connector.jdbc.JdbcSinkConnector",
            }
            <= classes
        ):
            raise ConnectionError("the Debezium plugins are not loaded")
        self.get("/connectors")  # answers when the worker has joined its group
        return str(json.loads(self.get("/"))["version"])


class Sqs(JavaServer):
    name = "sqs"
    usual = {"rest": 29324}
    memory = "256m"
    release = "1.6.14"

    def url(self) -> str:
        return f"sqs://x:x@{HOST}:{self.port}/?region=elasticmq&tls=false"

    def command(self) -> list[str]:
        classes = jars("elasticmq", [f"org.elasticmq:elasticmq-server_2.13:{self.release}"])
        config = self.write(
            "elasticmq.conf",
            'include classpath("application.conf")',
            f'node-address {{ protocol = http, host = "{HOST}", '
            f'port = {self.port}, context-path = "" }}',
            f"rest-sqs {{ enabled = true, bind-port = {self.port}, "
            f'bind-hostname = "{HOST}", sqs-limits = strict }}',
            "rest-stats { enabled = false }",
        )
        return self.java(classes, "org.elasticmq.server.Main", options=(f"-Dconfig.file={config}",))

    def version(self) -> str:
        self.get("/?Action=ListQueues")
        return self.release


class S3(Server):
    name = "s3"
    usual = {"rest": 28500}
    bucket = "penstock"

    def url(self) -> str:
        return f"s3://{self.bucket}/pages?endpoint=http://{HOST}:{self.port}&key=x&secret=x"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]

    def version(self) -> str:
        from importlib.metadata import version

        self.get(f"/{self.bucket}", method="PUT")  # a new moto process has no buckets
        return f"moto {version('moto')}"


SERVERS: dict[str, type[Server]] = {
    kind.name: kind for kind in (Postgres, Redis, Rabbitmq, Kafka, Connect, Sqs, S3)
}


def servers(state: Path) -> dict[str, Server]:
    """Return all servers of this state directory."""
    made: dict[str, Any] = {}
    for name, kind in SERVERS.items():
        made[name] = kind(Place(state / name), made)
    return made
