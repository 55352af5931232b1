"""Kafka URLs: their options, and an error message without the password for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.brokers.kafka.topics import layout, position
from penstock.brokers.kafka.url import ENVIRONMENT, Settings, parse
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("kafka://localhost", {"servers": "localhost:9092", "tls": False, "username": ""}),
        ("kafka://a:1,b,[::1]:9", {"servers": "a:1,b:9092,[::1]:9"}),
        (
            "kafka+ssl://u:p%40ss@h:9093/",
            {
                "servers": "h:9093",
                "tls": True,
                "username": "u",
                "password": "p@ss",
                "sasl": "plain",
            },
        ),
        (
            "kafka://h?partitions=24&retention=2d&window_bytes=1MiB&verify=false",
            {"partitions": 24, "retention": 172800.0, "window_bytes": 1 << 20, "verify": False},
        ),
        (
            "kafka://h?retry_levels=1m,10s&grace=0s&protocol=consumer",
            {"retry_levels": (10.0, 60.0), "grace": 0.0, "protocol": "consumer"},
        ),
        ("kafka://h?rdkafka.socket.timeout.ms=500", {"rdkafka": {"socket.timeout.ms": "500"}}),
    ],
)
def test_a_url_is_parsed_into_settings(url: str, expected: dict[str, Any]) -> None:
    settings = parse(url, {})
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("url", "expected_message"),
    [
        ("kafka:", "is not a Kafka URL"),
        ("kafka+tls://h", "is not a Kafka URL"),
        ("kafka://", "is not a Kafka URL"),
        ("kafka://h:port", "not a host and port"),
        ("kafka://h:0", "not a host and port"),
        ("kafka://,h", "not a host and port"),
        ("kafka://h/shop", "no databases"),
        ("kafka://u@h", "the user or the password is missing"),
        ("kafka://u:hunter2@h?partition=3", "no option 'partition'"),
        ("kafka://u:hunter2@h?partitions=many", "partitions is 'many'"),
        ("kafka://u:hunter2@h?retention=0", "retention is '0'"),
        ("kafka://u:hunter2@h?sasl=gssapi", "sasl is 'gssapi'"),
        ("kafka://u:hunter2@h?retry_levels=", "retry_levels is ''"),
    ],
)
def test_each_mistake_has_its_message_and_a_hint_without_the_password(
    url: str, expected_message: str
) -> None:
    with pytest.raises(ConfigError) as e:
        parse(url, {})
    assert expected_message in e.value.message
    assert e.value.hint
    assert "hunter2" not in e.value.message + e.value.hint


def test_options_may_be_set_in_the_environment_and_the_url_overrides_them() -> None:
    settings = parse(
        "kafka+ssl://h?partitions=3",
        {ENVIRONMENT: "partitions=9&sasl=scram-sha-512&username=u&password=p%2B&ca=/ca.pem"},
    )
    assert (settings.partitions, settings.sasl, settings.username, settings.password) == (
        3,
        "scram-sha-512",
        "u",
        "p+",
    )
    conf = settings.client()
    assert (conf["security.protocol"], conf["sasl.mechanism"], conf["ssl.ca.location"]) == (
        "SASL_SSL",
        "SCRAM-SHA-512",
        "/ca.pem",
    )
    with pytest.raises(ConfigError, match=ENVIRONMENT):
        parse("kafka://h", {ENVIRONMENT: "partitons=9"})


def test_the_table_of_options_in_the_docstring_is_complete() -> None:
    import re

    from penstock.brokers.kafka import url as kafka_dsn

    documented = {
        name
        for row in re.findall(r"^\| (`.*?) \|", kafka_dsn.__doc__ or "", re.M)
        for name in re.findall(r"`([\w.]+)`", row)
    } - {"rdkafka.NAME"}
    assert documented == set(kafka_dsn.OPTIONS)


def test_topics_are_named_after_prefix_topic_class_and_delay() -> None:
    settings = Settings(shown="", servers="h", retry_levels=(5.0, 60.0))
    plan = layout(settings, "shop", "requests", ordered=False)
    assert [place.name for place in plan.classes] == [
        "shop.requests.high",
        "shop.requests",
        "shop.requests.low",
    ]
    assert [place.name for place in plan.retries] == [
        "shop.requests.retry.0s",
        "shop.requests.retry.5s",
        "shop.requests.retry.1m",
    ]
    assert plan.dead == "shop.requests.dead"
    found = [plan.retry_topic_for(delay) for delay in (0.0, 4.9, 5.0, 59.0, 1e6)]
    assert [retry and retry.name for retry in found] == [
        None,
        None,
        "shop.requests.retry.5s",
        "shop.requests.retry.5s",
        "shop.requests.retry.1m",
    ]
    ordered = layout(settings, "shop", "requests", ordered=True)
    assert [place.name for place in ordered.server_topics] == ["shop.requests"]
    assert ordered.retry_topic_for(1e6) is None


def test_positions_are_unique_and_equal_the_offset_in_the_first_partition() -> None:
    assert position(0, 0, 12345) == 12345
    seen = {
        position(slot, partition, offset)
        for slot in (0, 1, 19)
        for partition in (0, 1, 4095)
        for offset in (0, 1, (1 << 46) - 1)
    }
    assert len(seen) == 27
    assert max(seen) < 1 << 63
