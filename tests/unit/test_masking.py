"""Masking of passwords, tokens and cookies in URLs, texts and headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.doubling import grows_linearly

from penstock.rules.masking import (
    hide,
    mask,
    mask_headers,
    mask_headers_to_show,
    mask_text,
    passwords_in,
)

PASSWORD = "hunter2-Zq"
MALFORMED = [
    "amqp:/me:{}@host/",
    "amqp//me:{}@host/",
    "me:{}@host",
    "amqp:me:{}@host",
    "amqp://me:{}",
    "amqp://me:{}/vhost",
    "redis://:{}",
    "kafka://me:{}",
    "kafka://h1:9092,me:{}",
    "amqp://me:{}@",
    "amqp://me:{}@[::1",
    "amqp://me:{}@host:port/",
    "amqp://me:a@{}@host/",
    "amqp://me:a/{}@host/",
    "amqp://me:{}#a@host/",
    "amqp://me:{}?a@host/",
    "https://{}@host/list",
    "postgres:host=db password='{} x' user=me",
    'postgres:host=db password="{} x" user=me',
    "postgres:host=db password = {} user=me",
    "postgres:host=db password=a?{} user=me",
    "postgres:host=db password={} dbname=a?b=c",
    "s3://bucket/p?endpoint=http://me:{}@host:9000&region=x",
    "s3://bucket/p?endpoint=http%3A%2F%2Fme%3A{}%40host",
    "s3://bucket?secret={};x#y",
    "s3://bucket?%73ecret={}",
    "s3://bucket?key=a&secret={}",
    "https://account.blob.host/urls.txt?sv=2024&sig={}",
    "https://host/list?jwt={}",
    "feed:https://me:{}@host/feed.xml",
    "api+https://me:{}@host/items",
]


@pytest.mark.parametrize("form", MALFORMED)
def test_a_malformed_url_shows_no_password(form: str) -> None:
    url = form.format(PASSWORD)
    assert PASSWORD not in mask(url)
    assert PASSWORD in passwords_in(url)
    if "://" in url and " " not in url:
        assert PASSWORD not in mask_text(f"the library cannot read {url!r}, or <{url}>.")


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:6379/0",
        "redis://[::1]:6379/0",
        "kafka://h1:9092,h2:9092/products",
        "postgres://me@host/db",
        "sqlite:./a@b.db",
        "csv:out@home.csv",
        "https://shop.example/a?q=b@c.example",
        "http://localhost:8083",
    ],
)
def test_a_url_without_a_password_stays(url: str) -> None:
    assert mask(url) == url
    assert mask_text(f"see {url}") == f"see {url}"
    assert passwords_in(url) == set()


@given(st.text())
def test_any_text_can_be_masked(text: str) -> None:
    mask(text)
    passwords_in(text)
    assert mask_text(mask_text(text)) == mask_text(text)


def test_known_passwords_are_hidden_as_words_only() -> None:
    known = passwords_in("amqp://penstock:penstock@host/") | passwords_in(
        f"redis://me:{PASSWORD}@h"
    )
    assert known == {PASSWORD}, "a password that is also the user is shown anyway"
    assert hide(f"port {PASSWORD!r} is no number", known) == "port '***' is no number"
    assert hide(f"x{PASSWORD}x", known) == f"x{PASSWORD}x"


HEADERS = {
    "content-type": "text/html",
    "set-cookie": f"sid={PASSWORD}; Path=/; HttpOnly; x={PASSWORD}\n{PASSWORD}",
    "authorization": PASSWORD,
    "proxy-authorization": PASSWORD,
    "cookie": PASSWORD,
    "x-auth-token": PASSWORD,
    "x-api-key": PASSWORD,
    "x-apikey": PASSWORD,
    "x-access-key": PASSWORD,
    "x-csrf-token": PASSWORD,
    "authentication-info": PASSWORD,
    "x-amz-security-token": PASSWORD,
    "x-session": PASSWORD,
    "www-authenticate": 'Basic realm="shop"',
    "x-author": "Ada",
    "link": f'<https://me:{PASSWORD}@h/2?token=next>; rel="next"',
}


def test_headers_keep_their_names_and_no_secret() -> None:
    found = mask_headers(HEADERS)
    assert list(found) == list(HEADERS)
    assert PASSWORD not in str(found)
    assert found["set-cookie"] == "sid=***; Path=/; HttpOnly\n***"
    assert found["link"] == '<https://***@h/2?token=next>; rel="next"'
    for name in ("content-type", "www-authenticate", "x-author"):
        assert found[name] == HEADERS[name]
    assert mask_headers(found) == found
    assert "next" not in mask_headers_to_show(HEADERS)["link"].partition("rel")[0]
    assert mask_headers({"Set-Cookie": PASSWORD, "X-API-Key": PASSWORD}) == {
        "Set-Cookie": "***",
        "X-API-Key": "***",
    }


def test_headers_without_a_secret_are_not_copied() -> None:
    headers = {"content-type": "text/html", "etag": '"1"'}
    assert mask_headers(headers) is headers


@pytest.mark.parametrize("unit", ["a=b; ", "://a:", "@", "?", "//a@", "x=y\n", "%40", "://a:b@c "])
def test_masking_takes_time_linear_in_the_text(unit: str) -> None:
    def work(data: str) -> None:
        mask(data)
        mask_text(data)
        mask_headers({"set-cookie": data, "link": data, data: data})

    # Headers have at most 64 KiB.
    sizes = (32 << 10, 64 << 10)
    grows_linearly(lambda size: unit * (size // len(unit)), work, sizes)
