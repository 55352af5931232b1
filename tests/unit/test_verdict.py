"""The error class of each response and each transport error."""

from __future__ import annotations

import pytest

from penstock.model import ErrorClass, Reason
from penstock.rules.reasons import LIBCURL, sentence
from penstock.rules.verdict import CURL, LIMITS, breach, judge, oversized, transport

HTML = {"content-type": "text/html; charset=utf-8"}
PAGE = b"<html><title>Kettle</title><p>A kettle, and nothing but a kettle.</p></html>"
LONG = PAGE + b"<p>more</p>" * 5000
NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, None),
        (201, None),
        (204, None),
        (206, None),
        (304, None),
        (301, "permanent"),
        (300, "permanent"),
        (100, "transient"),
        (401, "blocked"),
        (403, "blocked"),
        (407, "blocked"),
        (451, "blocked"),
        (999, "blocked"),
        (400, "permanent"),
        (404, "not_found"),
        (405, "permanent"),
        (410, "not_found"),
        (418, "permanent"),
        (408, "transient"),
        (425, "transient"),
        (500, "transient"),
        (502, "transient"),
        (504, "transient"),
        (520, "transient"),
        (429, "throttled"),
        (503, "throttled"),
    ],
)
def test_every_status_has_one_error_class(status: int, kind: str | None) -> None:
    verdict = judge(status, HTML, PAGE, now=NOW)
    assert (verdict.kind if verdict else None) == kind
    if verdict:
        assert verdict.status == status
        assert str(status) in verdict.reason


@pytest.mark.parametrize(
    ("value", "after"),
    [
        ("120", 120.0),
        ("Tue, 14 Nov 2023 22:13:30 GMT", 10.0),
        ("Mon, 13 Nov 2023 00:00:00 GMT", 0.0),
        ("soon", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_read_as_seconds_from_now(
    status: int, value: str, after: float | None
) -> None:
    verdict = judge(status, {"retry-after": value}, b"", now=NOW)
    assert verdict is not None
    assert verdict.kind is ErrorClass.THROTTLED
    assert verdict.after == after


@pytest.mark.parametrize(
    "body",
    [
        b"<html><title>Just a moment...</title><script>window._cf_chl_opt={}</script>",
        b"<html><head><title>shop.test</title></head>"
        b"<script src='https://geo.captcha-delivery.com/x'></script>",
        b"<div id='px-captcha'></div>" + b" " * 5000,
        b"<h1>Access Denied</h1> You don't have permission",
        b"<html>Request unsuccessful. Incapsula incident ID: 42</html>",
        b"<html><head><title>Pardon Our Interruption</title>" + b"<p>x</p>" * 9000,
    ],
)
@pytest.mark.parametrize("status", [200, 202, 403, 503])
def test_a_challenge_page_is_blocked_for_every_status(body: bytes, status: int) -> None:
    verdict = judge(status, HTML, body, now=NOW)
    assert verdict is not None
    assert verdict.kind is ErrorClass.BLOCKED


def test_a_challenge_is_recognised_by_its_header_too() -> None:
    verdict = judge(200, {**HTML, "cf-mitigated": "challenge"}, LONG, now=NOW)
    assert verdict is not None
    assert verdict.kind is ErrorClass.BLOCKED


def test_a_503_with_retry_after_is_throttled_even_with_a_challenge_page() -> None:
    verdict = judge(503, {**HTML, "retry-after": "7"}, b"<title>Just a moment...</title>", now=NOW)
    assert verdict is not None
    assert (verdict.kind, verdict.after) == (ErrorClass.THROTTLED, 7.0)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (HTML, LONG + b"<form><div class='g-recaptcha'></div></form>"),  # a contact form
        (HTML, LONG + b"access denied is what the hero heard"),
        ({"content-type": "application/json"}, b'{"captcha": true}'),
        ({"content-type": "application/json"}, b""),
        ({}, b""),
    ],
)
def test_an_ordinary_page_is_not_taken_for_a_challenge(
    headers: dict[str, str], body: bytes
) -> None:
    assert judge(200, headers, body, now=NOW) is None


@pytest.mark.parametrize("body", [b"", b" \r\n\t "])
def test_an_empty_html_page_is_blocked(body: bytes) -> None:
    verdict = judge(200, HTML, body, now=NOW)
    assert verdict is not None
    assert verdict.kind is ErrorClass.BLOCKED
    assert judge(200, HTML, body, now=NOW, method="HEAD") is None
    assert judge(204, HTML, body, now=NOW) is None


def test_a_304_to_an_unconditional_request_is_transient() -> None:
    verdict = judge(304, {}, b"", now=NOW, conditional=False)
    assert verdict is not None
    assert verdict.kind is ErrorClass.TRANSIENT


def test_soft_404s_are_detected_only_if_the_option_is_set() -> None:
    page = b"<html><title>Sorry</title>Page not found</html>"
    assert judge(200, HTML, page, now=NOW) is None
    verdict = judge(200, HTML, page, now=NOW, soft_404=True)
    assert verdict is not None
    assert verdict.kind is ErrorClass.BLOCKED
    assert judge(200, HTML, LONG + page, now=NOW, soft_404=True) is None


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (6, "", "transient"),
        (7, "", "transient"),
        (28, "", "transient"),
        (52, "", "transient"),
        (56, "", "transient"),
        (18, "", "transient"),
        (60, "", "permanent"),
        (63, "", "permanent"),
        (1, "", "permanent"),
        (27, "", "ours"),
        (77, "", "ours"),
        (9999, "", "transient"),
        (35, "OpenSSL SSL_connect: Connection reset by peer", "transient"),
        (35, "TLS connect error: error:0A00010B:SSL routines::wrong version number", "permanent"),
        (35, "tlsv1 alert protocol version", "permanent"),
    ],
)
def test_every_transport_error_has_one_error_class(code: int, message: str, kind: str) -> None:
    assert transport(code, message).kind == kind


def test_every_error_of_the_tables_has_a_reason() -> None:
    assert CURL.keys() == LIBCURL.keys()
    for code, kind in CURL.items():
        verdict = transport(code)
        assert verdict.kind is kind
        assert verdict.reason
        assert verdict.code is LIBCURL.get(code, (Reason.TRANSFER, ""))[0]
    for limit, kind in LIMITS.items():
        failure = breach(limit, "detail", after=3.0)
        assert (failure.kind, failure.code, failure.after) == (kind, limit, 3.0)
        assert failure.reason == f"{sentence(limit)}: detail"
    assert len({sentence(limit) for limit in LIMITS}) == len(LIMITS)


def test_only_a_response_that_is_too_large_is_oversized() -> None:
    large = {Reason.HEADERS, Reason.BODY, Reason.DECODED, Reason.CODINGS}
    for limit in LIMITS:
        assert oversized(breach(limit, "100 bytes")) is (limit in large)
    for code in LIBCURL:
        assert oversized(transport(code)) is (code in (63, 100))
    not_found = judge(404, {}, b"", now=NOW)
    assert not_found is not None
    assert not oversized(not_found)
