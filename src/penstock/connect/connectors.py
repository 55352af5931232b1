"""The kinds of connectors. Each builds a connector's options from a `connect` table and a topic.

No I/O is done here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.connect import catalogue
from penstock.connect.catalogue import Plugin
from penstock.connect.options import ConnectOptions

JSON = "org.apache.kafka.connect.json.JsonConverter"
STRING = "org.apache.kafka.connect.storage.StringConverter"
# Routing hints that a connector may add to a record as headers: penstock-geo, …
HINTS = ("geo", "pool", "account", "priority")
_OPERATIONS = {"insert": "c", "update": "u", "delete": "d"}
_SNAPSHOTS = ("no_data", "initial", "always", "when_needed")


@dataclass(frozen=True, slots=True)
class Target:
    """The pipeline, name and topic of a connector, and the key fields of a sink's records."""

    pipeline: str
    name: str
    topic: str
    key: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    side: Literal["source", "sink"]
    plugin: Plugin
    about: str
    subject: Callable[[ConnectOptions, str], str]  # returns the part of its name after the pipeline
    build: Callable[[ConnectOptions, Target], dict[str, str]]
    example: dict[str, object]  # shown by `connect init`, and the source of deploy/connect
    topic: str


def json_converters(*, schemas: bool) -> dict[str, str]:
    """Return JSON converters for key and value.

    Penstock's Kafka source reads both forms. Its Kafka sink writes with schemas.
    """
    flag = str(schemas).lower()
    return {
        "key.converter": JSON,
        "key.converter.schemas.enable": flag,
        "value.converter": JSON,
        "value.converter.schemas.enable": flag,
    }


def _set_only(options: dict[str, str]) -> dict[str, str]:
    """Return the options that have a value."""
    return {option: value for option, value in options.items() if value}


def hints(table: ConnectOptions, first: list[str]) -> dict[str, str]:
    """Return the transforms of a source: `first`, then one for each routing hint.

    A hint becomes a header, so the payload does not change.
    """
    given = table.pairs("route")
    for hint in given:
        if hint not in HINTS:
            raise table.wrong(f"route.{hint}", "is not a routing hint", ", ".join(HINTS))
    config = {"transforms": ",".join([*first, *given])} if first or given else {}
    for hint, value in given.items():
        config[f"transforms.{hint}.type"] = "org.apache.kafka.connect.transforms.InsertHeader"
        config[f"transforms.{hint}.header"] = f"penstock-{hint}"
        config[f"transforms.{hint}.value.literal"] = value
    return config


# -- sources ---------------------------------------------------------------------------------------


def _debezium_postgres(table: ConnectOptions, place: Target) -> dict[str, str]:
    target = table.text("table", example="public.scrape_requests")
    if not re.fullmatch(r"[^.\s\"]+\.[^.\s\"]+", target):
        raise table.wrong("table", f"is {target!r}", "with its schema: public.scrape_requests")
    database = table.database()
    slot = re.sub(r"[^a-z0-9_]", "_", table.text("slot", f"penstock_{place.name}").lower())[:63]
    operations = table.names("operations", ("insert",))
    if wrong := [o for o in operations if o not in _OPERATIONS]:
        raise table.wrong("operations", f"has {wrong[0]!r}", "insert, update, delete")
    skipped = [code for name, code in _OPERATIONS.items() if name not in operations]
    # Debezium names its topic PREFIX.SCHEMA.TABLE. A transform changes it to another name.
    prefix, routed = place.topic.removesuffix(f".{target}"), place.topic.endswith(f".{target}")
    if not routed or not re.fullmatch(r"[A-Za-z0-9_.-]+", prefix):
        prefix, routed = place.name, False
    first = ["unwrap"] if table.flag("unwrap", True) else []
    config = {
        "tasks.max": "1",  # a slot has one reader
        "database.hostname": database.host,
        "database.port": str(database.port),
        "database.user": database.user,
        "database.dbname": database.name,
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": slot,
        "publication.autocreate.mode": "filtered",
        "table.include.list": re.sub(r"([$^*+?()|{}\[\]\\])", r"\\\1", target).replace(".", r"\."),
        "topic.prefix": prefix,
        "snapshot.mode": table.choice("snapshot", "no_data", _SNAPSHOTS),
        "skipped.operations": ",".join([*skipped, "t"]),
        "tombstones.on.delete": "false",
        "extended.headers.enabled": "false",  # four headers per record that Penstock does not use
        # The default, 500 ms, would be most of the time from INSERT to topic.
        "poll.interval.ms": table.milliseconds("poll", "20ms"),
        # A heartbeat confirms the position even if the table does not change. Otherwise the slot
        # would keep the WAL of all other tables.
        "heartbeat.interval.ms": table.milliseconds("heartbeat", "10s"),
        # The slot stays in use for a short time after its reader was killed, so the connector
        # retries.
        "slot.retry.delay.ms": "2000",
        "slot.max.retries": "30",
        "retriable.restart.connector.wait.ms": "2000",
        "topic.creation.default.partitions": str(table.number("partitions", -1, -1, 10_000)),
        "topic.creation.default.replication.factor": str(table.number("replication", -1, -1, 100)),
        **json_converters(schemas=table.flag("schemas", False)),
        **_set_only({"database.password": database.password, "database.sslmode": database.sslmode}),
    }
    if first:
        config |= {
            "transforms.unwrap.type": "io.debezium.transforms.ExtractNewRecordState",
            "transforms.unwrap.add.fields": "op,lsn,txId,source.ts_ms",
            "transforms.unwrap.delete.tombstone.handling.mode": "rewrite"
            if "delete" in operations
            else "drop",
        }
    if not routed:
        first.append("topic")
        config |= {
            "transforms.topic.type": "org.apache.kafka.connect.transforms.RegexRouter",
            "transforms.topic.regex": re.escape(f"{prefix}.{target}"),
            "transforms.topic.replacement": place.topic,
        }
    return config | hints(table, first)


def _http_source(table: ConnectOptions, place: Target) -> dict[str, str]:
    config = {
        "tasks.max": "1",
        "kafka.topic": place.topic,
        "http.request.url": table.text("url", example="https://api.example/changes"),
        "http.request.method": "GET",
        "http.timer.interval.millis": table.milliseconds("every", "60s"),
        "http.timer.catchup.interval.millis": table.milliseconds("catch_up", "1s"),
        "http.response.list.pointer": table.text("items", "/"),
        "http.response.record.offset.pointer": table.text(
            "offset", example="key=/id, timestamp=/updated_at"
        ),
        **json_converters(schemas=False),
    }
    config |= _set_only(
        {
            "http.request.params": table.text("params", ""),
            "http.request.headers": table.text("headers", ""),
            "http.response.record.key.pointer": table.text("key", ""),
            "http.response.record.timestamp.pointer": table.text("timestamp", ""),
            "http.offset.initial": table.text("initial", ""),
        }
    )
    if user := table.text("user", ""):
        config |= {
            "http.auth.type": "BASIC",
            "http.auth.user": user,
            "http.auth.password": table.text("password", example="${env:API_PASSWORD}"),
        }
    # The connector's records are structs with the item as text in `value`. The transform writes
    # only the item to the topic.
    config |= {
        "value.converter": STRING,
        "transforms.item.type": "org.apache.kafka.connect.transforms.ExtractField$Value",
        "transforms.item.field": "value",
    }
    del config["value.converter.schemas.enable"]
    return config | hints(table, ["item"])


def _aws(table: ConnectOptions) -> dict[str, str]:
    return _set_only(
        {
            "aws.s3.bucket.name": table.text("bucket", example="shop-data"),
            "aws.s3.region": table.text("region", example="eu-central-1"),
            "aws.s3.prefix": table.text("prefix", ""),
            "aws.s3.endpoint": table.text("endpoint", ""),
            "aws.access.key.id": table.text("key", ""),
            "aws.secret.access.key": table.text("secret", ""),
            "aws.sts.role.arn": table.text("role", ""),
        }
    )


def _s3_source(table: ConnectOptions, place: Target) -> dict[str, str]:
    return {
        "tasks.max": str(table.number("tasks", 1, 1, 1000)),
        "topic": place.topic,
        **_aws(table),
        "input.format": table.choice("format", "jsonl", ("jsonl", "avro", "parquet", "bytes")),
        "file.name.template": table.text("files", ".*"),
        "distribution.type": "object_hash",
        "file.compression.type": table.choice(
            "compression", "none", ("none", "gzip", "snappy", "zstd")
        ),
        **json_converters(schemas=False),
        **hints(table, []),
    }


# -- sinks -----------------------------------------------------------------------------------------


def _sink(table: ConnectOptions, place: Target) -> dict[str, str]:
    config = {
        "tasks.max": str(table.number("tasks", 1, 1, 1000)),
        "topics": place.topic,
        **json_converters(schemas=True),
    }
    # Without a dead letter topic, a record that cannot be written stops the task, so no record is
    # skipped unnoticed.
    if topic := table.text("dead_letters", ""):
        config |= {
            "errors.tolerance": "all",
            "errors.deadletterqueue.topic.name": topic,
            "errors.deadletterqueue.topic.replication.factor": str(
                table.number("replication", -1, -1, 100)
            ),
            "errors.deadletterqueue.context.headers.enable": "true",
        }
    return config


def _jdbc_postgres(table: ConnectOptions, place: Target) -> dict[str, str]:
    database = table.database()
    target = table.text("table", place.topic.rpartition(".")[2])
    url = f"jdbc:postgresql://{database.host}:{database.port}/{database.name}" + (
        f"?sslmode={database.sslmode}" if database.sslmode else ""
    )
    return {
        **_sink(table, place),
        "connection.url": url,
        "connection.username": database.user,
        "insert.mode": "upsert",
        "delete.enabled": "true",
        "primary.key.mode": "record_key",
        "schema.evolution": table.choice("evolution", "basic", ("basic", "none")),
        "collection.name.format": target,
        "quote.identifiers": "true",  # a field may be called `order`
        "batch.size": str(table.number("batch", 500, 1, 10_000)),
        "connection.pool.min_size": "1",
        "connection.pool.max_size": "4",
        # During an outage of the database, retry 60 times, every 2 s. Then the task fails.
        "flush.max.retries": "60",
        "flush.retry.delay.ms": "2000",
        "connection.restart.on.errors": "true",
        **_set_only(
            {
                "primary.key.fields": ",".join(place.key),
                "connection.password": database.password,
            }
        ),
    }


def _snowflake(table: ConnectOptions, place: Target) -> dict[str, str]:
    target = table.text("table", place.topic.rpartition(".")[2])
    return {
        **_sink(table, place),
        "snowflake.url.name": table.text(
            "account", example="myorg-myaccount.snowflakecomputing.com:443"
        ),
        "snowflake.user.name": table.text("user", example="PENSTOCK"),
        "snowflake.private.key": table.text("private_key", example="${env:SNOWFLAKE_PRIVATE_KEY}"),
        "snowflake.role.name": table.text("role", example="PENSTOCK_ROLE"),
        "snowflake.database.name": table.text("database", example="SHOP"),
        "snowflake.schema.name": table.text("schema", "PUBLIC"),
        "snowflake.topic2table.map": f"{place.topic}:{target}",
        "snowflake.enable.schematization": "true",
        "snowflake.streaming.validate.compatibility.with.classic": "false",
        "behavior.on.null.values": "IGNORE",  # the sink only appends: it cannot apply a tombstone
        **_set_only({"snowflake.private.key.passphrase": table.text("passphrase", "")}),
    }


def _bigquery(table: ConnectOptions, place: Target) -> dict[str, str]:
    target = table.text("table", place.topic.rpartition(".")[2])
    config = {
        **_sink(table, place),
        "project": table.text("project", example="my-project"),
        "defaultDataset": table.text("dataset", example="shop"),
        "keySource": table.choice("key_source", "FILE", ("FILE", "JSON", "APPLICATION_DEFAULT")),
        "topic2TableMap": f"{place.topic}:{target}",
        "autoCreateTables": "true",
        "allowNewBigQueryFields": "true",
        "allowBigQueryRequiredFieldRelaxation": "true",
        "sanitizeTopics": "true",
        "sanitizeFieldNames": "true",
    }
    if config["keySource"] != "APPLICATION_DEFAULT":
        config["keyfile"] = table.text("keyfile", example="/run/secrets/bigquery.json")
    if table.flag("upsert", True):
        config |= {
            "upsertEnabled": "true",
            "deleteEnabled": "true",
            "kafkaKeyFieldName": "_key",
            "mergeIntervalMs": table.milliseconds("merge_every", "60s"),
            "bigQueryPartitionDecorator": "false",
        }
    return config


def _s3_sink(table: ConnectOptions, place: Target) -> dict[str, str]:
    return {
        **_sink(table, place),
        **_aws(table),
        "format.output.type": table.choice(
            "format", "jsonl", ("jsonl", "json", "csv", "parquet", "avro")
        ),
        "format.output.fields": "value",
        "format.output.envelope": "false",
        "file.compression.type": table.choice(
            "compression", "gzip", ("none", "gzip", "snappy", "zstd")
        ),
        "file.max.records": str(table.number("records", 0, 0, 100_000_000)),
        "file.name.template": table.text(
            "files", "{{topic}}-{{partition:padding=true}}-{{start_offset:padding=true}}.jsonl.gz"
        ),
    }


# -- the list --------------------------------------------------------------------------------------


def _table_name(table: ConnectOptions, topic: str) -> str:
    return table.text("table", topic).rpartition(".")[2]


def _topic_name(table: ConnectOptions, topic: str) -> str:
    return topic.rpartition(".")[2]


_SHOP = "postgres://shop:${env:SHOP_DB_PASSWORD}@db.example:5432/shop"
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "debezium-postgres",
            "source",
            catalogue.DEBEZIUM_POSTGRES,
            "rows of a Postgres table, by its write-ahead log",
            _table_name,
            _debezium_postgres,
            {
                "database": _SHOP,
                "table": "public.scrape_requests",
                "route": {"geo": "us", "pool": "residential"},
            },
            "shop.public.scrape_requests",
        ),
        Kind(
            "http-source",
            "source",
            catalogue.HTTP_SOURCE,
            "items of a JSON API, polled regularly",
            _topic_name,
            _http_source,
            {
                "url": "https://api.example/changes",
                "every": "60s",
                "items": "/items",
                "offset": "key=/id, timestamp=/updated_at",
            },
            "shop.api",
        ),
        Kind(
            "s3-source",
            "source",
            catalogue.S3_SOURCE,
            "lines of objects in a bucket: seed lists",
            _topic_name,
            _s3_source,
            {
                "bucket": "shop-seeds",
                "region": "eu-central-1",
                "prefix": "lists/",
                "key": "${env:AWS_ACCESS_KEY_ID}",
                "secret": "${env:AWS_SECRET_ACCESS_KEY}",
            },
            "shop.seeds",
        ),
        Kind(
            "jdbc-postgres",
            "sink",
            catalogue.DEBEZIUM_JDBC,
            "rows of a Postgres table, one for each key, deletions too",
            _table_name,
            _jdbc_postgres,
            {
                "database": "postgres://shop:${env:WAREHOUSE_PASSWORD}"
                "@warehouse.example:5432/warehouse",
                "table": "products",
            },
            "products",
        ),
        Kind(
            "snowflake",
            "sink",
            catalogue.SNOWFLAKE,
            "rows of a Snowflake table, appended",
            _table_name,
            _snowflake,
            {
                "account": "myorg-myaccount.snowflakecomputing.com:443",
                "user": "PENSTOCK",
                "private_key": "${env:SNOWFLAKE_PRIVATE_KEY}",
                "role": "PENSTOCK_ROLE",
                "database": "SHOP",
                "table": "PRODUCTS",
            },
            "products",
        ),
        Kind(
            "bigquery",
            "sink",
            catalogue.BIGQUERY,
            "rows of a BigQuery table, merged by key",
            _table_name,
            _bigquery,
            {"project": "my-project", "dataset": "shop", "keyfile": "/run/secrets/bigquery.json"},
            "products",
        ),
        Kind(
            "s3",
            "sink",
            catalogue.S3_SINK,
            "objects of JSON lines in a bucket",
            _topic_name,
            _s3_sink,
            {
                "bucket": "shop-products",
                "region": "eu-central-1",
                "prefix": "products/",
                "key": "${env:AWS_ACCESS_KEY_ID}",
                "secret": "${env:AWS_SECRET_ACCESS_KEY}",
            },
            "products",
        ),
    )
}
