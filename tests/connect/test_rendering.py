"""Rendering of a pipeline's `connect` tables, without a Connect worker.

Options, names, references to secrets, and errors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.authoring.pipeline import Pipeline
from penstock.authoring.toml import compile_toml
from penstock.connect import catalogue
from penstock.connect.catalogue import OWNER_OPTION, PLUGINS, check
from penstock.connect.connectors import KINDS
from penstock.connect.options import is_secret, shown
from penstock.connect.render import Connector, declaration, document, render, template
from penstock.errors import ConfigError

ROOT = Path(__file__).parents[2]
DATABASE = "postgres://shop:hunter2@db.example:5433/shop?sslmode=require"
TABLE = {"kind": "debezium-postgres", "database": DATABASE, "table": "public.scrape_requests"}


def source(
    given: dict[str, Any], topic: str = "shop.public.scrape_requests", **environment: str
) -> Connector:
    shop = Pipeline("shop")
    shop.source(f"kafka://127.0.0.1:9092/{topic}", connect=given)
    return render(shop, environment)[0]


def sink(given: dict[str, Any], url: str = "kafka://127.0.0.1:9092/products?key=sku") -> Connector:
    shop = Pipeline("shop")
    shop.sink(url, connect=given)
    return render(shop, {})[0]


# -- names and marks -------------------------------------------------------------------------------


def test_a_connector_is_named_after_pipeline_and_table_and_has_the_owner_option() -> None:
    made = source(TABLE)
    assert made.name == "shop-scrape-requests"
    assert (made.config["name"], made.config[OWNER_OPTION]) == ("shop-scrape-requests", "shop")
    assert (
        sink({"kind": "jdbc-postgres", "database": DATABASE, "name": "My Rows"}).name
        == "shop-my-rows"
    )


def test_two_connectors_with_the_same_name_are_refused() -> None:
    shop = Pipeline("shop")
    for topic in ("a", "b"):
        shop.source(f"kafka://h:1/{topic}", connect=TABLE)
    with pytest.raises(ConfigError, match="both connectors have the name shop-scrape-requests"):
        render(shop)


def test_a_pipeline_without_connect_tables_renders_no_connector() -> None:
    shop = Pipeline("shop")
    shop.source("kafka://h:1/requests")
    shop.sink("jsonl:products.jsonl")
    assert render(shop) == []


def test_a_toml_pipeline_renders_the_same_connector() -> None:
    text = f"""
    [pipeline]
    name = "shop"
    [[source]]
    url = "kafka://127.0.0.1:9092/shop.public.scrape_requests"
    [source.connect]
    kind = "debezium-postgres"
    database = "{DATABASE}"
    table = "public.scrape_requests"
    """
    assert render(compile_toml(text.encode(), "shop.toml")) == [source(TABLE)]


# -- Debezium's Postgres source --------------------------------------------------------------------


def test_the_postgres_source_has_options_for_streaming_with_low_latency() -> None:
    config = source(TABLE).config
    assert {
        "database.hostname": "db.example",
        "database.port": "5433",
        "database.user": "shop",
        "database.password": "hunter2",
        "database.dbname": "shop",
        "database.sslmode": "require",
        "plugin.name": "pgoutput",
        "slot.name": "penstock_shop_scrape_requests",
        "publication.name": "penstock_shop_scrape_requests",
        "publication.autocreate.mode": "filtered",
        "table.include.list": r"public\.scrape_requests",
        "topic.prefix": "shop",
        "snapshot.mode": "no_data",
        "skipped.operations": "u,d,t",
        "poll.interval.ms": "20",
        "transforms": "unwrap",
        "transforms.unwrap.add.fields": "op,lsn,txId,source.ts_ms",
        "value.converter.schemas.enable": "false",
    }.items() <= config.items()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"snapshot": "initial"}, {"snapshot.mode": "initial"}),
        ({"operations": ["insert", "update"]}, {"skipped.operations": "d,t"}),
        (
            {"operations": ["insert", "delete"]},
            {
                "skipped.operations": "u,t",
                "transforms.unwrap.delete.tombstone.handling.mode": "rewrite",
            },
        ),
        (
            {"poll": "100ms", "heartbeat": "1m"},
            {"poll.interval.ms": "100", "heartbeat.interval.ms": "60000"},
        ),
        ({"slot": "My-Slot"}, {"slot.name": "my_slot", "publication.name": "my_slot"}),
        (
            {"schemas": True},
            {"key.converter.schemas.enable": "true", "value.converter.schemas.enable": "true"},
        ),
        (
            {"partitions": 6, "replication": 3},
            {
                "topic.creation.default.partitions": "6",
                "topic.creation.default.replication.factor": "3",
            },
        ),
        (
            {"config": {"max.batch.size": 4096, "poll.interval.ms": 50}},
            {"max.batch.size": "4096", "poll.interval.ms": "50"},
        ),
        (
            {"route": {"geo": "us", "priority": "high"}},
            {
                "transforms": "unwrap,geo,priority",
                "transforms.geo.type": "org.apache.kafka.connect.transforms.InsertHeader",
                "transforms.geo.header": "penstock-geo",
                "transforms.geo.value.literal": "us",
            },
        ),
    ],
)
def test_each_option_of_the_postgres_source_is_rendered(
    given: dict[str, Any], expected: dict[str, str]
) -> None:
    assert expected.items() <= source({**TABLE, **given}).config.items()


def test_unwrap_false_renders_no_transforms() -> None:
    config = source({**TABLE, "unwrap": False}).config
    assert not [name for name in config if name.startswith("transforms")]


def test_a_topic_with_another_name_is_rendered_as_a_routing_transform() -> None:
    config = source(TABLE, topic="requests").config
    assert config["topic.prefix"] == "shop-scrape-requests"
    assert config["transforms"] == "unwrap,topic"
    assert (config["transforms.topic.regex"], config["transforms.topic.replacement"]) == (
        r"shop\-scrape\-requests\.public\.scrape_requests",
        "requests",
    )


def test_routing_hints_of_a_connector_are_mapped_to_its_events() -> None:
    shop = Pipeline("shop")
    shop.source(
        "kafka://h:1/t",
        connect={**TABLE, "route": {"geo": "us", "pool": "home"}},
        map={"pool": "proxy"},
    )
    assert shop.sources[0].map == {"geo": '_kafka.headers."penstock-geo"', "pool": "proxy"}


# -- sinks -----------------------------------------------------------------------------------------


def test_the_jdbc_sink_upserts_by_the_records_key_and_deletes() -> None:
    made = sink({"kind": "jdbc-postgres", "database": DATABASE, "table": "warehouse.products"})
    assert made.name == "shop-products"
    assert {
        "topics": "products",
        "connection.url": "jdbc:postgresql://db.example:5433/shop?sslmode=require",
        "connection.username": "shop",
        "connection.password": "hunter2",
        "insert.mode": "upsert",
        "delete.enabled": "true",
        "primary.key.mode": "record_key",
        "primary.key.fields": "sku",
        "schema.evolution": "basic",
        "collection.name.format": "warehouse.products",
        "value.converter.schemas.enable": "true",
        "key.converter.schemas.enable": "true",
    }.items() <= made.config.items()
    # A record that cannot be written must stop the connector with an error.
    assert "errors.tolerance" not in made.config


def test_the_option_dead_letters_renders_a_dead_letter_topic() -> None:
    config = sink(
        {"kind": "jdbc-postgres", "database": DATABASE, "dead_letters": "products.bad"}
    ).config
    assert (config["errors.tolerance"], config["errors.deadletterqueue.topic.name"]) == (
        "all",
        "products.bad",
    )


@pytest.mark.parametrize(
    "kind", [k for k in KINDS.values() if k.side == "sink"], ids=lambda k: k.name
)
def test_every_sink_connector_reads_the_format_of_the_kafka_sink(kind: Any) -> None:
    config = template(kind).config
    assert config["topics"] == "products"
    assert config["value.converter"].endswith("JsonConverter")
    assert config["value.converter.schemas.enable"] == "true"


# -- the catalogue ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda k: k.name)
def test_every_rendered_option_is_in_the_catalogue_of_its_connector(kind: Any) -> None:
    assert check(kind.plugin, template(kind).config) == []


def test_a_missing_or_mistyped_option_is_named_with_the_nearest_one() -> None:
    config = {**template(KINDS["snowflake"]).config, "snowflake.shema.name": "X"}
    del config["snowflake.user.name"]
    del config["topics"]
    assert [(p.option, p.message) for p in check(catalogue.SNOWFLAKE, config)] == [
        ("snowflake.user.name", "is required"),
        ("topics", "is required"),
        (
            "snowflake.shema.name",
            "is not an option of this connector, did you mean snowflake.schema.name?",
        ),
    ]


def test_the_catalogue_is_consistent() -> None:
    for plugin in PLUGINS.values():
        assert plugin.required <= plugin.options, plugin.title
        assert plugin.secrets <= plugin.options, plugin.title


# -- templates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda k: k.name)
def test_the_templates_in_deploy_are_what_the_code_renders(kind: Any) -> None:
    file = ROOT / "deploy" / "connect" / f"{kind.name}.json"
    assert json.loads(file.read_text()) == document(template(kind)), (
        f"penstock connect init {kind.name} -C deploy/connect writes the file again"
    )


def test_every_template_in_deploy_belongs_to_an_existing_kind() -> None:
    assert {file.stem for file in (ROOT / "deploy" / "connect").glob("*.json")} == set(KINDS)


@pytest.mark.parametrize("toml", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda k: k.name)
def test_the_declaration_shown_by_init_renders_the_template(kind: Any, toml: bool) -> None:
    lines = "\n".join(declaration(kind, toml=toml))
    if toml:
        shop = compile_toml(f'[pipeline]\nname = "shop"\n{lines}'.encode(), "shop.toml")
    else:
        shop = Pipeline("shop")
        exec(lines, {"shop": shop})  # noqa: S102 (our own text)
    assert render(shop)[0].config == template(kind).config


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda k: k.name)
def test_no_template_contains_a_secret_or_a_masked_value(kind: Any) -> None:
    made = template(kind)
    assert made.clear_secrets() == []
    assert "***" not in json.dumps(document(made))


# -- secrets ---------------------------------------------------------------------------------------


def test_a_password_is_never_shown() -> None:
    for made in (source(TABLE), sink({"kind": "jdbc-postgres", "database": DATABASE})):
        assert "hunter2" in json.dumps(made.config)
        assert "hunter2" not in json.dumps(made.shown())
        assert "hunter2" not in made.where
        assert made.clear_secrets() in (["database.password"], ["connection.password"])


@pytest.mark.parametrize(
    ("given", "password"),
    [
        ({"database": "postgres://shop:${env:PW}@db/shop"}, "${env:PW}"),
        (
            {
                "database": "postgres://shop@db/shop",
                "password": "${file:/run/secrets/db.properties:password}",
            },
            "${file:/run/secrets/db.properties:password}",
        ),
        ({"database": "postgres://shop:p%40ss@db/shop"}, "p@ss"),
        ({"database": "env:DSN"}, "from-env"),
        ({"database": "postgres://shop@db/shop", "password": "env:PW"}, "of-ours"),
    ],
)
def test_a_secret_is_a_reference_an_environment_variable_or_a_plain_value(
    given: dict[str, str], password: str
) -> None:
    made = source({**TABLE, **given}, DSN="postgres://shop:from-env@db/shop", PW="of-ours")
    assert made.config["database.password"] == password
    assert made.clear_secrets() == ([] if password.startswith("${") else ["database.password"])


@pytest.mark.parametrize(
    ("option", "value", "is_one"),
    [
        ("connection.password", "x", True),
        ("http.request.headers", "Authorization: Bearer x", True),
        ("snowflake.private.key", "MIIE", True),
        ("keyfile", "/run/secrets/key.json", False),
        ("keyfile", '{"private_key": "x"}', True),
        ("aws.secret.access.key", "${env:AWS}", False),
        ("topics", "passwords", False),
    ],
)
def test_secret_options_are_recognized_by_name_and_value(
    option: str, value: str, is_one: bool
) -> None:
    secrets = frozenset().union(*(p.secrets for p in PLUGINS.values()))
    assert is_secret(option, value, secrets) is is_one


def test_a_url_with_a_login_is_shown_without_it() -> None:
    assert shown("connection.url", "postgres://u:pw@h/db") == "postgres://u:***@h/db"


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says", "hint"),
    [
        (
            {"kind": "debezium-postgress"},
            "there is no kind of connector 'debezium-postgress'",
            "did you mean debezium-postgres?",
        ),
        ({"kind": "s3"}, "there is no kind of connector 's3'", "s3 is for a sink"),
        ({"table": "scrape_requests"}, "connect.table is 'scrape_requests'", "with its schema"),
        ({"table": 3}, "connect.table is not a line of text", ""),
        ({"database": "mysql://u@h/d"}, "without a user, host or database", "postgres://"),
        ({"database": "postgres://h/d"}, "without a user, host or database", "postgres://"),
        (
            {"database": "env:NOT_SET"},
            "uses the variable NOT_SET, which is not set",
            "export NOT_SET",
        ),
        ({"snapshot": "sometimes"}, "connect.snapshot is 'sometimes'", "no_data"),
        ({"operations": ["upsert"]}, "connect.operations has 'upsert'", "insert, update, delete"),
        ({"poll": "soon"}, "connect.poll is 'soon'", "20ms"),
        ({"partitions": 0.5}, "connect.partitions is 0.5", "whole number"),
        ({"unwrap": "yes"}, "connect.unwrap is 'yes'", "true or false"),
        ({"route": {"planet": "mars"}}, "connect.route.planet is not a routing hint", "geo"),
        ({"slots": "a"}, "connect.slots is not an option of this kind", "did you mean slot?"),
        (
            {"config": {"connector.class": "x"}},
            "connect.config.connector.class cannot be set",
            "",
        ),
        ({"config": {"a": ["b"]}}, "connect.config is not a table of plain values", ""),
    ],
)
def test_an_invalid_option_is_an_error_that_names_the_source_and_the_option(
    given: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as e:
        source({**TABLE, **given})
    assert says in e.value.message
    assert "source 'kafka://127.0.0.1:9092/shop.public.scrape_requests'" in e.value.message
    assert hint in e.value.hint
    assert "hunter2" not in e.value.message + e.value.hint


def test_the_error_for_a_missing_option_has_an_example() -> None:
    with pytest.raises(ConfigError) as e:
        sink({"kind": "bigquery"})
    assert e.value.message == "sink 'kafka://127.0.0.1:9092/products': connect.project is missing"
    assert e.value.hint == '"project": "my-project"'


@pytest.mark.parametrize("how", ["?schemas=false", "option"])
def test_a_connector_for_a_sink_without_schemas_is_refused(how: str) -> None:
    shop = Pipeline("shop")
    connect = {"kind": "jdbc-postgres", "database": DATABASE}
    more: dict[str, Any] = {"schemas": False} if how == "option" else {}
    shop.sink("kafka://h:1/products" + ("" if more else how), connect=connect, **more)
    with pytest.raises(ConfigError, match="cannot read the topic without schemas"):
        render(shop)


def test_a_connector_needs_one_topic() -> None:
    with pytest.raises(ConfigError, match="needs one topic"):
        sink({"kind": "jdbc-postgres", "database": DATABASE}, url="kafka://127.0.0.1:9092")
