"""SQS without a server: URLs, queue names and the encoding of messages."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.brokers.sqs import message as wire
from penstock.brokers.sqs.message import QueueId
from penstock.errors import ConfigError
from penstock.ports import Out

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize(
    ("url", "endpoint", "region"),
    [
        ("sqs://?region=eu-west-1", None, "eu-west-1"),
        ("sqs://", None, None),
        ("sqs://key:s%2Fe%2Bc@?region=eu-west-1", None, "eu-west-1"),
        ("sqs://localhost:9324/?tls=false", "http://localhost:9324", "elasticmq"),
        ("sqs://[::1]:9324/shop?region=x", "https://[::1]:9324", "x"),
        ("sqs://sqs.example/", "https://sqs.example", "elasticmq"),
    ],
)
def test_a_dsn_selects_aws_or_another_server(
    url: str, endpoint: str | None, region: str | None
) -> None:
    address = wire.parse(url, "")
    assert (address.endpoint, address.region) == (endpoint, region)


def test_a_dsn_has_credentials_a_prefix_and_poll_options() -> None:
    address = wire.parse("sqs://key:s%2Fe%2Bc@localhost/my.shop?poll=20&max_receives=0", "ignored")
    assert (address.key, address.secret, address.prefix, address.poll, address.receives) == (
        "key",
        "s/e+c",
        "my-shop",
        20,
        0,
    )
    assert wire.parse("sqs://localhost", "shop").prefix == "shop"
    assert wire.parse("sqs://localhost", "").prefix == "penstock"


@pytest.mark.parametrize(
    ("url", "expected_message"),
    [
        ("sqs://key:sec/ret@localhost/", "is not an SQS URL"),
        ("sqs://key:secret@localhost:port/", "is not an SQS URL"),
        ("sqs://key@localhost/", "half of its credentials"),
        ("sqs://key:secret@localhost/?regoin=x", "no option 'regoin'"),
        ("sqs://key:secret@localhost/?tls=no", "tls is 'no'"),
        ("sqs://key:secret@localhost/?poll=21", "poll is '21'"),
        ("sqs://key:secret@localhost/?max_receives=-1", "max_receives is '-1'"),
    ],
)
def test_the_error_of_a_mistyped_dsn_has_a_hint_and_no_secret(
    url: str, expected_message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        wire.parse(url, "")
    assert expected_message in caught.value.message
    assert caught.value.hint
    assert "secret" not in caught.value.message + caught.value.hint.replace(
        "in a secret as", ""
    ).replace("key:secret@", "")


def test_queues_are_named_after_pipeline_topic_group_and_priority_class() -> None:
    assert [wire.queue_name("shop", w) for w in wire.group_queues("requests", "main")] == [
        "shop-requests-main-high",
        "shop-requests-main",
        "shop-requests-main-low",
    ]
    assert [wire.queue_name("shop", w) for w in wire.group_queues("requests.dead", "main")] == [
        "shop-requests_dead-main"
    ]


def test_queue_names_are_unique_short_and_use_allowed_characters() -> None:
    topics = ["t", "t.dead", "t_dead", "t.x", "t_x", "t-x", "t" * 90, "t" * 91, "é", "T"]
    groups = ["main", "main-high", "high", "g" * 70, "g" * 71, "ma in"]
    names = [
        wire.queue_name("p" * 24, QueueId(t, g, rank))
        for t, g, rank in itertools.product(topics, groups, range(3))
    ]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,80}", name) for name in names)


@given(TEXT.filter(bool), TEXT.filter(bool))
def test_a_group_is_found_by_the_names_of_its_queues(topic: str, group: str) -> None:
    names = [wire.queue_name("shop", w) for w in wire.group_queues(topic, group)]
    (found,) = wire.groups_of([*names, "shop-other-main", "shop"], wire.topic_prefix("shop", topic))
    assert [wire.queue_name("shop", w) for w in wire.group_queues(topic, found)] == names


@given(
    st.binary(max_size=200) | TEXT.map(str.encode),
    st.dictionaries(TEXT, TEXT, max_size=3),
    TEXT,
    TEXT,
)
def test_any_message_is_sent_as_safe_text_and_decoded_unchanged(
    body: bytes, headers: dict[str, str], id_: str, key: str
) -> None:
    packed = wire.pack(
        Out(topic="t", id=id_, key=key, body=body, headers=headers, priority=2), 7, 3.5
    )
    assert packed.body
    assert not wire._UNSAFE.search(packed.body + packed.attributes)
    attributes, back = wire.unpack(
        {
            "MessageId": "m",
            "Body": packed.body,
            "MessageAttributes": {wire.ATTRIBUTE: {"StringValue": packed.attributes}},
        }
    )
    assert (
        attributes.id,
        attributes.key,
        attributes.headers,
        attributes.prio,
        attributes.seq,
        attributes.after,
        back,
    ) == (
        id_,
        key,
        headers,
        2,
        7,
        3.5,
        body,
    )


def test_a_text_body_stays_readable_and_a_large_body_is_compressed() -> None:
    assert (
        wire.pack(
            Out(topic="t", id="i", key="k", body='{"specversion":"1.0", "é":1}'.encode()), 0, 0.0
        ).body
        == '{"specversion":"1.0", "é":1}'
    )
    large = b"<html>" + b"all work and no play " * 50_000
    assert wire.pack(Out(topic="t", id="i", key="k", body=large), 0, 0.0).size < 10_000


@pytest.mark.parametrize(
    "attributes",
    ["", "{}", "no json", '{"id":"i","code":"b"}', '{"id":"i","code":"z"}', '{"id":1}'],
)
def test_a_message_of_another_program_is_delivered_unchanged(attributes: str) -> None:
    message = {
        "MessageId": "m1",
        "Body": "no: base64!",
        "MessageAttributes": {wire.ATTRIBUTE: {"StringValue": attributes}},
    }
    found, body = wire.unpack(message)
    assert (found.id, body) == ("m1", b"no: base64!")


def test_positions_are_unique_and_fit_into_63_bits() -> None:
    found = {wire.position(f"id-{i}") for i in range(1000)}
    assert len(found) == 1000
    assert all(0 <= p < 2**63 for p in found)
