"""Webhook requests without a socket: authentication, bodies and event ids."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.authoring.pipeline import Pipeline
from penstock.clock import SystemClock
from penstock.config import files as config
from penstock.errors import ConfigError, RequestRefused
from penstock.fetching.source_client import SourceWeb
from penstock.intake.mapping import Mapping
from penstock.ports import Finding
from penstock.rules.events import Refused
from penstock.sources.base import SourceContext
from penstock.sources.webhook import Webhook, open_source

NOW = 1_760_000_000.0
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OLD = "whsec_" + base64.b64encode(bytes(range(100, 132))).decode()
TEXT = "a secret of the house, long enough"
BODY = b'{"url": "https://shop.example/p/1", "sku": "S-1"}'
JSON = {"content-type": ["application/json"]}
LOCAL = {"host": ["127.0.0.1:8787"]}


def hook(
    name: str = "shop",
    *,
    called: str | None = None,
    settings: dict[str, str] | None = None,
    **options: Any,
) -> Webhook:
    pipeline = Pipeline("shop")
    pipeline.source(f"webhook:{name}", name=called, **options)
    loaded = config.load(settings or {}, {}, Path.cwd()).config
    return open_source(
        pipeline.sources[0],
        SourceContext(loaded, SystemClock(), random.Random(1), SourceWeb(), Path.cwd()),
    )


def key_of(secret: str) -> bytes:
    return (
        base64.b64decode(secret.removeprefix("whsec_"))
        if secret.startswith("whsec_")
        else secret.encode()
    )


def standard(
    body: bytes = BODY, *, secret: str = SECRET, id_: str = "msg_1", at: float = NOW
) -> dict[str, list[str]]:
    digest = hmac.new(key_of(secret), f"{id_}.{int(at)}.".encode() + body, hashlib.sha256).digest()
    return {
        **JSON,
        "webhook-id": [id_],
        "webhook-timestamp": [str(int(at))],
        "webhook-signature": ["v1," + base64.b64encode(digest).decode()],
    }


def take(
    source: Webhook, method: str, headers: dict[str, list[str]], body: bytes, now: float
) -> list[Finding]:
    """Check a request in the order of the endpoint."""
    claim = source.screen(method, headers, now)
    return source.findings(headers, body, source.verify(claim, body))


def findings_of(
    source: Webhook, headers: dict[str, list[str]], body: bytes = BODY, now: float = NOW
) -> list[Finding]:
    return take(source, "POST", headers, body, now)


def refusal(
    source: Webhook,
    headers: dict[str, list[str]],
    body: bytes = BODY,
    now: float = NOW,
    method: str = "POST",
) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        take(source, method, headers, body, now)
    assert refused.value.message
    assert refused.value.hint
    return refused.value


# -- Standard Webhooks -----------------------------------------------------------------------------


def test_a_request_signed_with_the_secret_is_an_event_with_the_payload() -> None:
    [finding] = findings_of(hook(secret=SECRET), standard())
    assert finding.payload == {"url": "https://shop.example/p/1", "sku": "S-1"}
    assert finding.cause == "msg_1"


def test_a_signature_computed_by_openssl_is_accepted() -> None:
    """openssl signed "msg_p5jX.1760000000.{}" with a key of 32 bytes, 0 to 31."""
    headers = {
        **JSON,
        "webhook-id": ["msg_p5jX"],
        "webhook-timestamp": ["1760000000"],
        "webhook-signature": ["v1,qxoKyAqgAKGmu/o7MSJ89cf1OXqCGT70z7keAieFeF8="],
    }
    assert findings_of(hook(secret=SECRET), headers, b"{}")


def test_each_of_two_secrets_is_accepted_and_so_is_a_request_signed_with_both() -> None:
    both = hook(secrets=[SECRET, OLD])
    assert findings_of(both, standard()) == findings_of(both, standard(secret=OLD))
    headers = standard(secret=OLD)
    headers["webhook-signature"] = [
        (
            f"v1a,{'A' * 20} v2,xyz {headers['webhook-signature'][0]} "
            f"{standard()['webhook-signature'][0]}"
        )
    ]
    assert findings_of(hook(secret=SECRET), headers)


def test_the_svix_names_of_the_headers_are_accepted() -> None:
    headers = {name.replace("webhook-", "svix-"): values for name, values in standard().items()}
    assert findings_of(hook(secret=SECRET), headers)


@pytest.mark.parametrize("late", [-301, -300, 0, 300, 301])
def test_a_signature_is_valid_for_five_minutes_before_and_after_its_time(late: float) -> None:
    if abs(late) > 300:
        assert refusal(hook(secret=SECRET), standard(), now=NOW + late).status == 401
    else:
        assert findings_of(hook(secret=SECRET), standard(), now=NOW + late)


def test_the_tolerance_is_an_option() -> None:
    assert findings_of(hook(secret=SECRET, tolerance="10m"), standard(), now=NOW + 599)
    assert refusal(hook(secret=SECRET, tolerance="10s"), standard(), now=NOW + 11).status == 401


GOOD = standard()["webhook-signature"][0]
BROKEN: dict[str, Callable[[dict[str, list[str]]], Any]] = {
    "no signature": lambda h: h.pop("webhook-signature"),
    "no id": lambda h: h.pop("webhook-id"),
    "no time": lambda h: h.pop("webhook-timestamp"),
    "another id": lambda h: h.update({"webhook-id": ["msg_2"]}),
    "another time": lambda h: h.update({"webhook-timestamp": [str(int(NOW) + 1)]}),
    "two signatures headers": lambda h: h["webhook-signature"].append(GOOD),
    "two ids": lambda h: h["webhook-id"].append("msg_1"),
    "two times": lambda h: h["webhook-timestamp"].append(str(int(NOW))),
    "an empty signature": lambda h: h.update({"webhook-signature": [""]}),
    "no version": lambda h: h.update({"webhook-signature": [GOOD[3:]]}),
    "only other versions": lambda h: h.update({"webhook-signature": ["v1a" + GOOD[2:]]}),
    "junk behind": lambda h: h.update({"webhook-signature": [GOOD + "junk"]}),
    "junk behind the padding": lambda h: h.update({"webhook-signature": [GOOD + "===="]}),
    "junk in it": lambda h: h.update({"webhook-signature": [GOOD[:9] + "!" + GOOD[9:]]}),
    "without padding": lambda h: h.update({"webhook-signature": [GOOD.rstrip("=")]}),
    "bits that do not count": lambda h: h.update(
        {"webhook-signature": [GOOD[:-2] + chr(ord(GOOD[-2]) + 1) + "="]}
    ),
    "half of it": lambda h: h.update({"webhook-signature": [GOOD[:24]]}),
    "two blanks between": lambda h: h.update({"webhook-signature": [GOOD + "  " + GOOD]}),
    "a good one beside a broken one": lambda h: h.update({"webhook-signature": [GOOD + " v1,%%%"]}),
    "seventeen of them": lambda h: h.update({"webhook-signature": [" ".join([GOOD] * 17)]}),
    "not ASCII": lambda h: h.update({"webhook-signature": ["v1,\xfc\xff"]}),
    "a NUL": lambda h: h.update({"webhook-signature": [GOOD + "\0"]}),
    "a time that is no number": lambda h: h.update({"webhook-timestamp": ["soon"]}),
    "a time with a sign": lambda h: h.update({"webhook-timestamp": [f"+{int(NOW)}"]}),
    "a time with blanks": lambda h: h.update({"webhook-timestamp": [f" {int(NOW)}"]}),
    "a time with a fraction": lambda h: h.update({"webhook-timestamp": [f"{int(NOW)}.0"]}),
    "a time in another script": lambda h: h.update({"webhook-timestamp": ["١٧٦٠٠٠٠٠٠٠"]}),
    "a time without end": lambda h: h.update({"webhook-timestamp": ["9" * 4000]}),
    "an id with a blank": lambda h: h.update({"webhook-id": ["msg 1"]}),
    "an id without end": lambda h: h.update({"webhook-id": ["m" * 300]}),
    "an empty id": lambda h: h.update({"webhook-id": [""]}),
}


@pytest.mark.parametrize("breaking", BROKEN.values(), ids=BROKEN.keys())
def test_every_invalid_signature_gets_the_same_401(
    breaking: Callable[[dict[str, list[str]]], Any],
) -> None:
    headers = {name: list(values) for name, values in standard().items()}
    breaking(headers)
    e = refusal(hook(secret=SECRET), headers)
    assert (e.status, e.message) == (401, "the request has no valid signature or token")
    assert SECRET not in e.why
    assert GOOD not in e.why


def test_a_forged_or_changed_body_is_refused() -> None:
    assert refusal(hook(secret=SECRET), standard(secret=OLD)).status == 401
    assert refusal(hook(secret=SECRET), standard(), BODY + b" ").status == 401


def test_a_replayed_request_is_the_same_event_and_is_refused_when_too_old() -> None:
    source = hook(secret=SECRET)
    assert (
        findings_of(source, standard())[0].id
        == findings_of(source, standard(), now=NOW + 299)[0].id
    )
    assert refusal(source, standard(), now=NOW + 301).status == 401


def test_unsigned_headers_do_not_change_the_id_of_a_signed_request() -> None:
    for source, headers in [
        (hook(secret=SECRET), standard()),
        (hook(secret=TEXT, signature="github"), github()),
        (hook(secret=TEXT, signature="stripe"), stripe()),
    ]:
        ids = set()
        for more in [
            {},
            {"idempotency-key": ["x"]},
            {"x-github-delivery": ["y"]},
            {"ce-specversion": ["1.0"], "ce-id": ["z"], "ce-source": ["s"], "ce-type": ["t"]},
        ]:
            ids.add(findings_of(source, {**headers, **more})[0].id)
        assert len(ids) == 1


def test_a_body_over_the_limit_is_refused_before_the_signature_is_checked() -> None:
    assert refusal(hook(secret=SECRET, max_body="40B"), standard(secret=OLD)).status == 413


def test_the_same_message_id_at_two_webhooks_gives_two_event_ids() -> None:
    assert (
        findings_of(hook("a", secret=SECRET), standard())[0].id
        != findings_of(hook("b", secret=SECRET), standard())[0].id
    )


# -- other schemes ---------------------------------------------------------------------------------


def github(body: bytes = BODY, secret: str = TEXT) -> dict[str, list[str]]:
    return {
        **JSON,
        "x-hub-signature-256": [
            "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
        ],
    }


def stripe(body: bytes = BODY, secret: str = TEXT, at: float = NOW) -> dict[str, list[str]]:
    digest = hmac.new(secret.encode(), f"{int(at)}.".encode() + body, hashlib.sha256).hexdigest()
    return {**JSON, "stripe-signature": [f"t={int(at)},v1={digest},v0=ignored"]}


def test_a_github_request_is_identified_by_its_signed_body() -> None:
    source = hook(secret=TEXT, signature="github")
    [first] = findings_of(
        source, {**github(), "x-github-delivery": ["1"], "x-github-event": ["push"]}
    )
    [again] = findings_of(source, {**github(), "x-github-delivery": ["2"]})
    assert first.id == again.id
    assert first.payload["_webhook"] == {"event": "push"}
    assert findings_of(source, github(BODY + b" "), BODY + b" ")[0].id != first.id


def test_a_stripe_signature_covers_time_and_body_and_a_retry_is_the_same_event() -> None:
    source = hook(secret="whsec_of_stripe_is_no_base64_at_all", signature="stripe")
    secret = "whsec_of_stripe_is_no_base64_at_all"
    assert (
        findings_of(source, stripe(secret=secret))[0].id
        == findings_of(source, stripe(secret=secret, at=NOW + 60), now=NOW + 60)[0].id
    )
    assert refusal(source, stripe(secret=secret), now=NOW + 301).status == 401


def test_a_custom_hmac_scheme_is_configured_by_its_options() -> None:
    text = b"v0:1760000000:" + BODY
    given = base64.b64encode(hmac.new(TEXT.encode(), text, hashlib.sha512).digest()).decode()
    source = hook(
        secret=TEXT,
        signature="hmac",
        header="X-Shop-Signature",
        algorithm="sha512",
        encoding="base64",
        prefix="v0=",
        signed="v0:{X-Shop-Time}:{body}",
        timestamp="X-Shop-Time",
    )
    headers = {**JSON, "x-shop-time": ["1760000000"], "x-shop-signature": ["v0=" + given]}
    assert findings_of(source, headers)
    assert refusal(source, {**headers, "x-shop-time": ["1760000001"]}).status == 401
    assert refusal(source, {**headers, "x-shop-signature": [given]}).status == 401
    assert refusal(source, headers, now=NOW + 301).status == 401


def test_only_the_complete_bearer_token_is_accepted() -> None:
    source = hook(secret=TEXT, signature="bearer")
    assert findings_of(source, {**JSON, "authorization": [f"Bearer {TEXT}"]})
    for wrong in (
        "Bearer",
        f"Bearer {TEXT}x",
        f"Bearer {TEXT[:-1]}",
        f"Basic {TEXT}",
        TEXT,
        "Bearer \xff",
        "",
    ):
        assert refusal(source, {**JSON, "authorization": [wrong]}).status == 401


@pytest.mark.parametrize("scheme", ["github", "stripe", "hmac", "bearer"])
@pytest.mark.parametrize(
    "junk",
    [
        "",
        "=",
        "sha256=",
        "sha256=zz",
        "sha256=00",
        "t=,v1=",
        "t=1,t=1",
        "t=99999999999,v1=" + "0" * 64,
        "\xff" * 10,
        "a" * 5000,
    ],
)
def test_an_invalid_header_of_any_signature_scheme_gets_a_401(scheme: str, junk: str) -> None:
    options: dict[str, Any] = {"header": "X-Sig"} if scheme == "hmac" else {}
    source = hook(secret=TEXT, signature=scheme, **options)
    for name in ("x-hub-signature-256", "stripe-signature", "x-sig", "authorization"):
        assert refusal(source, {**JSON, name: [junk]}).status == 401


# -- unsigned --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8787", "localhost:8787", "[::1]:8787", "127.8.9.1"]
)
def test_an_unsigned_webhook_accepts_local_host_names(host: str) -> None:
    assert findings_of(hook(), {**JSON, "host": [host]})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8787",
        "10.0.0.1",
        "0.0.0.0",
        "[::]",
        "",
        "[",
        "user@127.0.0.1@x",
    ],
)
def test_an_unsigned_webhook_refuses_other_host_names(host: str) -> None:
    assert refusal(hook(), {**JSON, "host": [host]}).status == 403
    assert refusal(hook(), JSON).status == 403
    assert refusal(hook(), {**JSON, "host": ["127.0.0.1", host]}).status == 403


@pytest.mark.parametrize(
    "more",
    [
        {"origin": ["https://evil.example"]},
        {"origin": ["null"]},
        {"sec-fetch-site": ["cross-site"]},
        {"origin": ["http://127.0.0.1", "x"]},
    ],
)
def test_an_unsigned_webhook_refuses_cross_origin_requests_of_a_browser(
    more: dict[str, list[str]],
) -> None:
    assert refusal(hook(), {**JSON, **LOCAL, **more}).status == 403
    assert findings_of(hook(), {**JSON, **LOCAL, "origin": ["http://localhost:3000"]})


@pytest.mark.parametrize(
    "name", ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via"]
)
def test_an_unsigned_webhook_refuses_requests_forwarded_by_a_proxy(name: str) -> None:
    assert refusal(hook(), {**JSON, **LOCAL, name: ["203.0.113.7"]}).status == 403


def test_content_types_that_need_no_cors_preflight_are_refused() -> None:
    for kind in (
        {},
        {"content-type": ["text/plain"]},
        {"content-type": ["application/x-www-form-urlencoded"]},
        {"content-type": ["multipart/form-data"]},
    ):
        assert refusal(hook(), {**LOCAL, **kind}).status == 415


def test_unsigned_anywhere_accepts_any_host_name() -> None:
    source = hook(unsigned="anywhere")
    assert not source.local
    assert findings_of(source, {**JSON, "host": ["hooks.example"]})


# -- ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["webhook-id", "x-github-delivery", "idempotency-key"])
def test_the_event_id_is_derived_from_the_senders_id(name: str) -> None:
    source = hook()
    headers = {**JSON, **LOCAL, name: ["7"]}
    assert (
        findings_of(source, headers)[0].id
        == findings_of(source, headers)[0].id
        != findings_of(source, {**headers, name: ["8"]})[0].id
    )
    assert refusal(source, {**headers, name: ["7", "7"]}).status == 400
    assert refusal(source, {**headers, name: [""]}).status == 400


def test_every_request_without_an_id_is_a_new_event() -> None:
    assert (
        findings_of(hook(), {**JSON, **LOCAL})[0].id != findings_of(hook(), {**JSON, **LOCAL})[0].id
    )


def test_items_of_one_body_have_different_ids_that_stay_the_same() -> None:
    headers, body = (
        {**JSON, **LOCAL, "webhook-id": ["7"]},
        b'["https://a.example", "https://b.example", "https://a.example"]',
    )
    ids = [finding.id for finding in findings_of(hook(), headers, body)]
    assert len(set(ids)) == 3
    assert ids == [finding.id for finding in findings_of(hook(), headers, body)]


def test_the_option_id_selects_the_id_in_the_payload() -> None:
    source = hook(id="event.id")
    body = b'{"event": {"id": 17}}'
    assert (
        findings_of(source, {**JSON, **LOCAL}, body)[0].id
        == findings_of(source, {**JSON, **LOCAL}, body)[0].id
    )
    assert refusal(source, {**JSON, **LOCAL}, b'{"event": {"id": {}}}').status == 422
    assert refusal(source, {**JSON, **LOCAL}, b'{"event": {"id": true}}').status == 422


# -- bodies ----------------------------------------------------------------------------------------


def payloads(kind: str, body: bytes, **headers: str) -> list[dict[str, Any]]:
    more = {name.replace("_", "-"): [value] for name, value in headers.items()}
    return [
        finding.payload
        for finding in findings_of(hook(), {**LOCAL, "content-type": [kind], **more}, body)
    ]


def test_json_is_an_object_an_array_or_urls() -> None:
    assert payloads("application/json", b'{"a": 1}') == [{"a": 1}]
    assert payloads("application/json; charset=UTF-8", b' [{"a": 1}, {"a": 2}] ') == [
        {"a": 1},
        {"a": 2},
    ]
    assert payloads("application/vnd.shop.v1+json", b'["https://a.example", {"b": 2}]') == [
        {"url": "https://a.example"},
        {"b": 2},
    ]
    assert payloads("application/json", b"[]") == []


def test_ndjson_is_one_item_on_each_line() -> None:
    assert payloads("application/x-ndjson", b'{"a": 1}\r\n\n{"a": 2}\n"https://a.example"') == [
        {"a": 1},
        {"a": 2},
        {"url": "https://a.example"},
    ]


EVENT = {
    "specversion": "1.0",
    "id": "1",
    "source": "/shop",
    "type": "changed",
    "time": "2025-10-09T08:53:20Z",
    "data": {"url": "https://a.example", "n": 1},
}


def test_a_cloudevent_is_identified_by_source_and_id_in_every_mode() -> None:
    kind = {**LOCAL, "content-type": ["application/cloudevents+json; charset=utf-8"]}
    [one] = findings_of(hook(), kind, json.dumps(EVENT).encode())
    assert one.payload["url"] == "https://a.example"
    assert one.payload["_cloudevent"]["type"] == "changed"
    assert one.at == 1760000000.0
    [other] = findings_of(hook(), kind, json.dumps({**EVENT, "source": "/other"}).encode())
    assert one.id != other.id
    [batched] = findings_of(
        hook(),
        {**LOCAL, "content-type": ["application/cloudevents-batch+json"]},
        json.dumps([EVENT]).encode(),
    )
    binary = {
        **JSON,
        **LOCAL,
        "ce-specversion": ["1.0"],
        "ce-id": ["1"],
        "ce-source": ["/shop"],
        "ce-type": ["changed"],
    }
    [headed] = findings_of(hook(), binary, json.dumps(EVENT["data"]).encode())
    assert one.id == batched.id == headed.id
    assert headed.payload["n"] == 1


def test_the_subject_is_the_url_if_the_data_has_none() -> None:
    event = {**EVENT, "subject": "https://b.example", "data": {"n": 1}}
    [one] = findings_of(
        hook(),
        {**LOCAL, "content-type": ["application/cloudevents+json"]},
        json.dumps(event).encode(),
    )
    assert one.url == "https://b.example"


def test_base64_data_of_a_cloudevent_is_decoded_as_json() -> None:
    event = {name: value for name, value in EVENT.items() if name != "data"} | {
        "data_base64": base64.b64encode(b'{"n": 2}').decode()
    }
    assert payloads("application/cloudevents+json", json.dumps(event).encode())[0]["n"] == 2
    assert (
        refusal(
            hook(),
            {**LOCAL, "content-type": ["application/cloudevents+json"]},
            json.dumps({**event, "data_base64": "%"}).encode(),
        ).status
        == 400
    )


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"", 400),
        ("application/json", b"  \n", 400),
        ("application/json", b"{", 400),
        ("application/json", b"\xff\xfe{\x00}\x00", 400),
        ("application/json", b'{"a": "\xff"}', 400),
        ("application/json", b'"\\ud800"', 400),
        ("application/json", b'{"a": NaN}', 400),
        ("application/json", b"1", 400),
        ("application/json", b"null", 400),
        ("application/json", b'[{"a": 1}, 2]', 400),
        ("application/json", b"[" * 40_000, 400),
        ("application/json", b"[" * 40_000 + b"]" * 40_000, 400),
        ("application/json", b'{"a":' * 40_000 + b"1" + b"}" * 40_000, 400),
        ("application/json", b"[" * 100_000, 413),
        ("application/x-ndjson", b"\n" * 100_000 + b"1", 413),
        ("application/json", b"[1" + b"0" * 5000 + b"]", 400),
        ("application/x-ndjson", b'{"a": 1}\n{"a": ', 400),
        ("application/cloudevents+json", b"[]", 400),
        ("application/cloudevents+json", b"{}", 400),
        (
            "application/cloudevents+json",
            b'{"specversion": "0.3", "id": "1", "source": "s", "type": "t"}',
            400,
        ),
        (
            "application/cloudevents+json",
            b'{"specversion": "1.0", "id": 1, "source": "s", "type": "t"}',
            400,
        ),
        ("application/cloudevents-batch+json", b"{}", 400),
        ("application/cloudevents-batch+json", b"[1]", 400),
        ("application/json; charset=utf-16", b"{}", 415),
        ("text/html", b"{}", 415),
        ("application/xml", b"<a/>", 415),
        ("application/cloudevents+avro", b"{}", 415),
        ("", b"{}", 415),
        ("application/json", b"[" + b",".join([b"{}"] * 1001) + b"]", 413),
        ("application/x-ndjson", b"{}\n" * 1001, 413),
        (
            "application/cloudevents-batch+json",
            b"[" + b",".join([json.dumps(EVENT).encode()] * 1001) + b"]",
            413,
        ),
        ("application/json", b" " * (1 << 20) + b"{}", 413),
    ],
)
def test_an_unreadable_body_is_refused_with_its_status(kind: str, body: bytes, status: int) -> None:
    assert refusal(hook(), {**LOCAL, "content-type": [kind]}, body).status == status


def test_compressed_bodies_several_types_and_other_methods_are_refused() -> None:
    assert refusal(hook(), {**LOCAL, **JSON, "content-encoding": ["gzip"]}).status == 415
    assert (
        refusal(hook(), {**LOCAL, "content-type": ["application/json", "application/json"]}).status
        == 415
    )
    assert refusal(hook(), {**LOCAL, **JSON, "content-length": [str(2 << 20)]}).status == 413
    assert refusal(hook(), {**LOCAL, **JSON, "content-length": ["9" * 50]}).status == 413
    assert refusal(hook(), {**LOCAL, **JSON, "content-length": ["x"]}).status == 400
    assert refusal(hook(), {**LOCAL, **JSON}, method="GET").status == 405


NAMES = [
    "content-type",
    "content-length",
    "host",
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
    "ce-id",
    "ce-specversion",
    "authorization",
    "x-sig",
    "stripe-signature",
]
ATTRIBUTES = [
    "url",
    "id",
    "source",
    "type",
    "specversion",
    "data",
    "data_base64",
    "subject",
    "time",
]
KINDS = [
    "application/json",
    "application/x-ndjson",
    "application/cloudevents+json",
    "application/cloudevents-batch+json",
]
latin = st.text(st.characters(max_codepoint=255), max_size=40)
values = st.one_of(
    latin, st.sampled_from([*KINDS, "127.0.0.1", "1.0", str(int(NOW)), GOOD, "t=1,v1=00"])
)
names = st.sampled_from(ATTRIBUTES) | st.text(max_size=5)
scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=20)
json_like = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6)
)
bodies = st.one_of(st.binary(max_size=200), json_like.map(lambda value: json.dumps(value).encode()))
HOOKS = [
    hook(),
    hook(secret=SECRET),
    hook(secret=TEXT, signature="stripe"),
    hook(secret=TEXT, signature="hmac", header="X-Sig"),
    hook(id="id", unsigned="anywhere"),
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(HOOKS),
    st.dictionaries(st.sampled_from(NAMES), st.lists(values, min_size=1, max_size=2)),
    st.sampled_from(KINDS),
    bodies,
)
def test_any_headers_and_body_give_findings_or_a_refusal(
    source: Webhook, headers: dict[str, list[str]], kind: str, body: bytes
) -> None:
    for more in ({}, {"content-type": [kind], **LOCAL}):
        status, found = 202, list[Finding]()
        try:
            found = take(source, "POST", {**headers, **more}, body, NOW)
        except RequestRefused as e:
            status = e.status
        assert status in (202, 400, 401, 403, 413, 415, 422)
        for finding in found:
            assert isinstance(finding.payload, dict)
            assert len(finding.id) == 32


def test_a_payload_nested_deeper_than_100_levels_makes_no_event() -> None:
    mapping = Mapping(hook().spec)
    for depth, good in [(1, True), (99, True), (100, False), (900, False)]:
        for opening, closing in [("[", "]"), ('{"a":', "}")]:
            body = (
                '{"url": "https://a.example", "wide": [[], [], {}], "deep": '
                + opening * depth
                + "1"
                + closing * depth
                + "}"
            )
            [finding] = findings_of(hook(), {**JSON, **LOCAL}, body.encode())
            if good:
                assert mapping.event(finding) is not None
            else:
                with pytest.raises(Refused, match="nested deeper than 100 levels"):
                    mapping.event(finding)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secret": "short"}, "has 5 bytes, of at least 24"),
        ({"secret": "whsec_" + base64.b64encode(b"x" * 23).decode()}, "has 23 bytes"),
        ({"secret": "whsec_!"}, "not base64"),
        ({"secret": "env:NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE, which is not set"),
        ({"secret": 5}, "is not a text"),
        ({"secrets": []}, "is not a text"),
        ({"secrets": SECRET}, "is not a text"),
        ({"secret": SECRET, "secrets": [OLD]}, "both"),
        ({"signature": "github"}, "needs a secret"),
        ({"secret": TEXT, "signature": "md5"}, "not known"),
        ({"secret": TEXT, "signature": "hmac"}, "is not a header name"),
        ({"secret": TEXT, "signature": "hmac", "header": "X", "algorithm": "md5"}, "not known"),
        (
            {"secret": TEXT, "signature": "hmac", "header": "X", "signed": "{X-Time}"},
            "does not have the body",
        ),
        (
            {"secret": TEXT, "signature": "hmac", "header": "X", "timestamp": "X-Time"},
            "does not have the body or the timestamp",
        ),
        ({"secret": SECRET, "header": "X"}, 'belongs to signature = "hmac"'),
        ({"secret": SECRET, "unsigned": "anywhere"}, "there is a secret"),
        ({"unsigned": "yes"}, "unsigned is 'yes'"),
        ({"tolerance": "soon"}, "tolerance"),
        ({"max_body": "1TB"}, "max_body"),
        ({"rate": 0}, "rate"),
        ({"id": "a["}, "not valid JMESPath"),
        ({"secert": SECRET}, "no option 'secert'"),
        ({"every": "5m"}, "no `every`"),
    ],
)
def test_an_invalid_option_is_an_error_that_does_not_show_a_secret(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        hook(**options)
    assert message in wrong.value.message
    assert wrong.value.hint
    assert not any(
        secret in wrong.value.message + wrong.value.hint for secret in (SECRET, OLD, TEXT)
    )


def test_a_secret_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_SECRET", SECRET)
    assert findings_of(hook(secret="env:SHOP_SECRET"), standard())


def test_history_must_be_kept_longer_than_a_signature_is_valid() -> None:
    with pytest.raises(ConfigError, match=r"history.keep \(5m\) deletes"):
        hook(secret=SECRET, settings={"history.keep": "5m"})
    hook(secret=SECRET, tolerance="2m", settings={"history.keep": "5m"})
    hook(secret=TEXT, signature="github", settings={"history.keep": "5m"})


@pytest.mark.parametrize(
    "url", ["webhook:", "webhook://shop", "webhook:a/b", "webhook:a?secret=x", "webhook:-a"]
)
def test_a_webhook_url_with_more_than_a_name_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a webhook"):
        hook(url.removeprefix("webhook:"), called="x")
