"""Documented options of the connectors: class, version, option names.

Used if the Connect worker does not have the plugin and cannot validate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.config.options import suggest

# ruff: noqa: SIM905 (long lists are easier to read as words)

# Option with the pipeline's name in every connector that Penstock creates. Connect keeps options
# that it does not know.
OWNER_OPTION = "penstock.pipeline"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One connector, as documented by its project."""

    cls: str
    title: str
    side: Literal["source", "sink"]
    version: str  # version of the documentation
    documented: str
    required: frozenset[str]
    options: frozenset[str]  # in addition to the options of all connectors
    prefixes: tuple[str, ...] = ()  # prefixes of options whose names the user completes
    secrets: frozenset[str] = frozenset()
    run: bool = False  # True if the tests of this project run it


class Problem(NamedTuple):
    option: str
    message: str


_EVERY = frozenset(
    (
        "name connector.class connector.plugin.version tasks.max tasks.max.enforce key.converter "
        "key.converter.plugin.version value.converter value.converter.plugin.version "
        "header.converter header.converter.plugin.version transforms predicates "
        "config.action.reload errors.retry.timeout errors.retry.delay.max.ms errors.tolerance "
        "errors.log.enable errors.log.include.messages"
    ).split()
)
_OF_SIDE = {
    "source": frozenset(
        (
            "topic.creation.groups exactly.once.support transaction.boundary "
            "transaction.boundary.interval.ms offsets.storage.topic"
        ).split()
    ),
    "sink": frozenset(
        (
            "topics topics.regex errors.deadletterqueue.topic.name "
            "errors.deadletterqueue.topic.replication.factor "
            "errors.deadletterqueue.context.headers.enable"
        ).split()
    ),
}
_PREFIXES = (
    "key.converter.",
    "value.converter.",
    "header.converter.",
    "transforms.",
    "predicates.",
    "producer.override.",
    "consumer.override.",
    "admin.override.",
    "topic.creation.",
)

DEBEZIUM_POSTGRES = Plugin(
    cls="io.debezium.connector.postgresql.PostgresConnector",
    title="Debezium PostgreSQL source",
    side="source",
    version="3.6",
    documented="Debezium documentation, connector for PostgreSQL",
    required=frozenset("topic.prefix database.hostname database.user database.dbname".split()),
    options=frozenset(
        (
            "topic.prefix database.hostname database.port database.user database.password "
            "database.dbname database.query.timeout.ms plugin.name slot.name publication.name "
            "publication.autocreate.mode replica.identity.autoset.values slot.drop.on.stop "
            "slot.failover slot.stream.params database.initial.statements database.sslmode "
            "database.sslcert database.sslpassword database.sslrootcert database.sslkey "
            "slot.max.retries slot.retry.delay.ms database.sslfactory status.update.interval.ms "
            "lsn.flush.timeout.ms lsn.flush.timeout.action database.tcpKeepAlive "
            "xmin.fetch.interval.ms skipped.operations lsn.flush.mode "
            "event.processing.failure.handling.mode max.batch.size max.queue.size "
            "poll.interval.ms max.queue.size.in.bytes provide.transaction.metadata "
            "snapshot.delay.ms streaming.delay.ms snapshot.include.collection.list "
            "snapshot.fetch.size snapshot.max.threads snapshot.mode snapshot.mode.custom.name "
            "retriable.restart.connector.wait.ms query.fetch.size errors.max.retries "
            "incremental.snapshot.watermarking.strategy incremental.snapshot.chunk.size "
            "connection.validation.timeout.ms executor.shutdown.timeout.ms "
            "extended.headers.enabled guardrail.collections.max "
            "guardrail.collections.limit.action decimal.handling.mode time.precision.mode "
            "snapshot.lock.timeout.ms snapshot.isolation.mode snapshot.query.mode "
            "snapshot.query.mode.custom.name snapshot.locking.mode "
            "snapshot.locking.mode.custom.name hstore.handling.mode binary.handling.mode "
            "schema.name.adjustment.mode interval.handling.mode schema.refresh.mode "
            "unavailable.value.placeholder message.prefix.include.list "
            "message.prefix.exclude.list publish.via.partition.root converters post.processors "
            "tombstones.on.delete heartbeat.interval.ms heartbeat.topics.prefix "
            "heartbeat.action.query signal.data.collection signal.poll.interval.ms "
            "signal.enabled.channels topic.naming.strategy notification.enabled.channels "
            "notification.sink.topic.name transaction.metadata.factory custom.metric.tags "
            "column.include.list column.exclude.list table.include.list table.exclude.list "
            "table.ignore.builtin schema.include.list schema.exclude.list message.key.columns "
            "snapshot.select.statement.overrides include.schema.comments "
            "column.propagate.source.type datatype.propagate.source.type "
            "include.unknown.datatypes sourceinfo.struct.maker"
        ).split()
    ),
    prefixes=(
        "column.mask.",
        "column.truncate.",
        "snapshot.select.statement.overrides.",
        "snapshot.mode.configuration.based.",
        "driver.",
        "signal.",
        "topic.",
        "internal.",
        "openlineage.integration.",
        "errors.max.retries.",
        "message.key.columns.",
    ),
    secrets=frozenset(("database.password", "database.sslpassword")),
    run=True,
)

DEBEZIUM_JDBC = Plugin(
    cls="io.debezium.connector.jdbc.JdbcSinkConnector",
    title="Debezium JDBC sink",
    side="sink",
    version="3.6",
    documented="Debezium documentation, JDBC sink connector",
    required=frozenset(("connection.url",)),
    options=frozenset(
        (
            "connection.url connection.username connection.password connection.pool.min_size "
            "connection.pool.max_size connection.pool.timeout insert.mode delete.enabled "
            "truncate.enabled collection.name.format table.name.format primary.key.mode "
            "primary.key.fields schema.evolution quote.identifiers collection.naming.strategy "
            "table.naming.strategy column.naming.strategy use.time.zone database.time_zone "
            "dialect.postgres.postgis.schema dialect.postgres.unnest.insert.enabled "
            "dialect.sqlserver.identity.insert batch.size field.include.list field.exclude.list "
            "flush.max.retries flush.retry.delay.ms connection.restart.on.errors "
            "cloud.events.schema.name.pattern"
        ).split()
    ),
    prefixes=("hibernate.", "column.naming.strategy.", "collection.naming.strategy."),
    secrets=frozenset(("connection.password",)),
    run=True,
)

HTTP_SOURCE = Plugin(
    cls="com.github.castorm.kafka.connect.http.HttpSourceConnector",
    title="HTTP source (castorm)",
    side="source",
    version="0.8.11",
    documented="castorm/kafka-connect-http, README and configuration classes",
    required=frozenset(("kafka.topic", "http.request.url")),
    options=frozenset(
        (
            "kafka.topic http.timer http.client http.request.factory http.response.parser "
            "http.record.sorter http.record.filter.factory http.offset.initial http.auth "
            "http.auth.type http.auth.user http.auth.password "
            "http.client.connection.timeout.millis http.client.read.timeout.millis "
            "http.client.ttl.millis http.client.max-idle http.client.proxy.host "
            "http.client.proxy.port http.client.proxy.username http.client.proxy.password "
            "http.client.keystore http.client.keystore.password "
            "http.response.list.order.direction http.request.url http.request.method "
            "http.request.headers http.request.params http.request.body "
            "http.request.template.factory http.response.record.parser "
            "http.response.record.mapper http.response.policy http.response.policy.parser "
            "http.response.policy.codes.process http.response.policy.codes.skip "
            "http.response.record.timestamp.parser http.response.list.pointer "
            "http.response.record.pointer http.response.record.key.pointer "
            "http.response.record.timestamp.pointer http.response.record.offset.pointer "
            "http.response.record.timestamp.parser.pattern "
            "http.response.record.timestamp.parser.zone "
            "http.response.record.timestamp.parser.delegate "
            "http.response.record.timestamp.parser.regex "
            "http.response.record.timestamp.parser.regex.delegate http.timer.interval.millis "
            "http.timer.catchup.interval.millis http.throttler.interval.millis "
            "http.throttler.catchup.interval.millis"
        ).split()
    ),
    secrets=frozenset(
        (
            "http.auth.password",
            "http.client.proxy.password",
            "http.client.keystore.password",
            "http.request.headers",
        )
    ),
)

_AIVEN_S3 = frozenset(
    (
        "aws.access.key.id aws.secret.access.key aws.credentials.provider aws.s3.bucket.name "
        "aws.s3.endpoint aws.s3.region aws.s3.prefix aws.sts.role.arn aws.sts.role.external.id "
        "aws.sts.role.session.name aws.sts.role.session.duration aws.sts.config.endpoint "
        "aws.s3.backoff.delay.ms aws.s3.backoff.max.delay.ms aws.s3.backoff.max.retries "
        "file.name.template file.compression.type file.name.timestamp.timezone "
        "file.name.timestamp.source"
    ).split()
)
_AIVEN_SECRETS = frozenset(("aws.access.key.id", "aws.secret.access.key"))

S3_SOURCE = Plugin(
    cls="io.aiven.kafka.connect.s3.source.S3SourceConnector",
    title="S3 source (Aiven)",
    side="source",
    version="3.4",
    documented="Aiven-Open/cloud-storage-connectors-for-apache-kafka, s3-source-connector",
    required=frozenset(("aws.s3.bucket.name", "file.name.template")),
    options=_AIVEN_S3
    | frozenset(
        (
            "topic max.poll.records distribution.type ring.buffer.size native.start.key "
            "input.format schema.registry.url schemas.enable transformer.max.buffer.size "
            "aws.s3.fetch.page.size aws.s3.fetch.buffer.size file.prefix.template"
        ).split()
    ),
    secrets=_AIVEN_SECRETS,
)

S3_SINK = Plugin(
    cls="io.aiven.kafka.connect.s3.AivenKafkaConnectS3SinkConnector",
    title="S3 sink (Aiven)",
    side="sink",
    version="3.4",
    documented="Aiven-Open/cloud-storage-connectors-for-apache-kafka, s3-sink-connector",
    required=frozenset(("aws.s3.bucket.name",)),
    options=_AIVEN_S3
    | frozenset(
        (
            "aws.s3.sse.algorithm aws.s3.part.size.bytes file.max.records format.output.type "
            "format.output.fields format.output.fields.value.encoding format.output.envelope "
            "kafka.retry.backoff.ms timestamp.timezone timestamp.source avro.codec"
        ).split()
    ),
    secrets=_AIVEN_SECRETS,
)

SNOWFLAKE = Plugin(
    cls="com.snowflake.kafka.connector.SnowflakeSinkConnector",
    title="Snowflake sink",
    side="sink",
    version="4.1",
    documented="snowflakedb/snowflake-kafka-connector 4.1, configuration definition",
    required=frozenset(
        (
            "snowflake.url.name snowflake.user.name snowflake.database.name snowflake.schema.name "
            "snowflake.role.name"
        ).split()
    ),
    options=frozenset(
        (
            "snowflake.url.name snowflake.user.name snowflake.private.key "
            "snowflake.private.key.passphrase snowflake.database.name snowflake.schema.name "
            "snowflake.role.name snowflake.authenticator snowflake.oauth.client.id "
            "snowflake.oauth.client.secret snowflake.oauth.refresh.token "
            "snowflake.oauth.token.endpoint snowflake.oauth.include.scope snowflake.oauth.scope "
            "snowflake.topic2table.map snowflake.topic2table.map.regex.replacement "
            "snowflake.jdbc.map snowflake.metadata.all snowflake.metadata.createtime "
            "snowflake.metadata.topic snowflake.metadata.offset.and.partition "
            "snowflake.streaming.metadata.connectorPushTime "
            "snowflake.streaming.client.provider.override.map snowflake.open.channel.io.threads "
            "snowflake.validation snowflake.streaming.classic.offset.migration "
            "snowflake.streaming.classic.offset.migration.include.connector.name "
            "snowflake.streaming.validate.compatibility.with.classic "
            "snowflake.compatibility.enable.autogenerated.table.name.sanitization "
            "snowflake.compatibility.enable.column.identifier.normalization "
            "snowflake.enable.schematization snowflake.autocreate.table.type "
            "snowflake.iceberg.create.table.options snowflake.cache.table.exists "
            "snowflake.cache.table.exists.expire.ms snowflake.cache.pipe.exists "
            "snowflake.cache.pipe.exists.expire.ms behavior.on.null.values jmx "
            "snowflake.streaming.metrics.prometheus.enable "
            "snowflake.streaming.metrics.prometheus.port "
            "snowflake.streaming.metrics.prometheus.host enable.task.fail.on.authorization.errors "
            "enable.mdc.logging jvm.proxy.host jvm.proxy.port jvm.nonProxy.hosts "
            "jvm.proxy.username jvm.proxy.password"
        ).split()
    ),
    prefixes=("snowflake.feature.",),
    secrets=frozenset(
        (
            "snowflake.private.key snowflake.private.key.passphrase snowflake.oauth.client.secret "
            "snowflake.oauth.refresh.token jvm.proxy.password"
        ).split()
    ),
)

BIGQUERY = Plugin(
    cls="com.wepay.kafka.connect.bigquery.BigQuerySinkConnector",
    title="BigQuery sink (Aiven, once WePay)",
    side="sink",
    version="2.14",
    documented="Aiven-Open/bigquery-connector-for-apache-kafka, sink-connector-config-options",
    required=frozenset(("project", "defaultDataset")),
    options=frozenset(
        (
            "defaultDataset project autoCreateTables bigQueryMessageTimePartitioning "
            "bigQueryPartitionDecorator gcsBucketName queueSize "
            "allowBigQueryRequiredFieldRelaxation allowNewBigQueryFields allowSchemaUnionization "
            "autoCreateBucket bigQueryRetry bigQueryRetryWait gcsFolderName keySource keyfile "
            "max.retries sanitizeFieldNames sanitizeTopics schemaRetriever threadPoolSize "
            "useStorageWriteApi useProjectFromCreds allBQFieldsNullable avroDataCacheSize "
            "batchLoadIntervalSec clusteringPartitionFieldNames commitInterval "
            "convertDoubleSpecialValues deleteEnabled enableBatchLoad enableBatchMode "
            "intermediateTableSuffix kafkaDataFieldName kafkaKeyFieldName mergeIntervalMs "
            "mergeRecordsThreshold partitionExpirationMs timestampPartitionFieldName "
            "topic2TableMap upsertEnabled preserveKafkaTopicPartitionOffset timePartitioningType"
        ).split()
    ),
    secrets=frozenset(("keyfile",)),
)

PLUGINS = {
    p.cls: p
    for p in (
        DEBEZIUM_POSTGRES,
        DEBEZIUM_JDBC,
        HTTP_SOURCE,
        S3_SOURCE,
        S3_SINK,
        SNOWFLAKE,
        BIGQUERY,
    )
}


def check(plugin: Plugin, config: Mapping[str, str]) -> list[Problem]:
    """Return missing and unknown options, according to the documentation."""
    missing = [
        Problem(name, "is required") for name in sorted(plugin.required) if not config.get(name)
    ]
    if plugin.side == "sink" and not (config.get("topics") or config.get("topics.regex")):
        missing.append(Problem("topics", "is required"))
    return missing + unknown(
        config, plugin.options | _EVERY | _OF_SIDE[plugin.side], plugin.prefixes
    )


def unknown(
    config: Mapping[str, str], known: Collection[str], prefixes: tuple[str, ...] = ()
) -> list[Problem]:
    """Return the options that the connector would ignore silently, which are mostly typos."""
    found = []
    for name in config:
        if name in known or name == OWNER_OPTION or name.startswith(_PREFIXES + prefixes):
            continue
        hint = suggest(name, known, cutoff=0.75)
        found.append(
            Problem(name, "is not an option of this connector" + (f", {hint}" if hint else ""))
        )
    return found
