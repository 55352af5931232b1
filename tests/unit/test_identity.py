"""URLs: one canonical form, one URL key for all spellings, and BadUrl for invalid URLs."""

from __future__ import annotations

from random import Random

import ada_url
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.rules.identity import (
    DEFAULT_TRACKING,
    MAX_URL,
    Authority,
    BadUrl,
    authority,
    canonical_url,
    dedup_key,
    host_key,
    join,
    origin,
    registrable_domain,
    tracking,
    url_key,
)

# Pieces of text on which URL parsers disagree.
PIECES = [
    "http",
    "https",
    "HTTP",
    "ftp",
    ":",
    "/",
    "//",
    "\\",
    "@",
    "?",
    "#",
    "%",
    "%2e",
    "%2E",
    "%252e",
    "%7e",
    "%c3%A9",
    "%00",
    "..",
    ".",
    "/./",
    "/../",
    "[",
    "]",
    "::1",
    "127.0.0.1",
    "0x7f.1",
    "2130706433",
    "example",
    "Example.COM",
    ".co.uk",
    "xn--",
    "xn--zca",
    "ß",
    "ü",
    "１",
    "。",
    "\u200b",
    "\xad",
    "-",
    "_",
    " ",
    "\t",
    "\n",
    "\x00",
    "\x7f",
    "\ud800",
    "|",
    "^",
    ":80",
    ":443",
    ":8080",
    "é",
    "😀",
    "+",
    "&",
    "=",
    ";",
    '"',
    "'",
    "<",
    ">",
    "`",
    "{",
    "}",
    "a",
    "b",
    "1",
    "utm_source=x",
    "gclid",
    "*",
    "$",
    ",",
    "!",
    "~",
]
fragments = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)
urlish = st.builds(
    lambda a, b, c: a + b + c,
    st.sampled_from(["http://", "https://", "HTTP:\\\\", "http:", "//", ""]),
    st.sampled_from(["a.test", "A.test:80", "[::1]:81", ""]),
    fragments,
)
anything = urlish | fragments | st.text(max_size=40)


def maybe(url: str, base: str | None = None) -> str | None:
    try:
        return canonical_url(url, base)
    except BadUrl:
        return None


def parser_result(url: str, base: str | None = None) -> str | None:
    try:
        href = ada_url.URL(url, base=base) if base else ada_url.URL(url)
    except ValueError:
        return None
    if href.protocol not in ("http:", "https:") or href.username or href.password:
        return None
    return str(href.href).partition("#")[0]


@given(anything)
@example("http://a/%%34%31")
@example("http://a/?")
@example("http://a?x")
@example("http://1.2.3.4../")
@example("http://a.test.:80/%2")
@example("http://a/\ud800")
def test_canonicalisation_is_idempotent_and_raises_only_bad_url(url: str) -> None:
    canonical = maybe(url)
    if canonical is not None:
        assert canonical_url(canonical) == canonical
        assert "#" not in canonical
        assert canonical.isascii()


@given(anything)
@example("http://a.test/x/.")
@example("http://a.test/.")
@example("http://a.test/%2e%2E/b")
@example("http://a.test/a//%2e./b")
@example("http://a.test/a?b/../c'd")
@example("http://@a.test/")
def test_the_fast_path_gives_the_result_of_the_parser(url: str) -> None:
    assert maybe(url) == parser_result(url)


@given(
    anything | fragments.map(lambda t: "/" + t),
    st.sampled_from(
        ["http://a.test/b/c?d#e", "https://a.test:8443", "http://A.test/x/", "HTTP://[::1]/"]
    ),
)
@example("//b.test/x", "http://a.test/")
@example("/\\b.test/x", "http://a.test/")
@example("/.//b", "http://a.test/")
@example("http:x", "http://a.test/y/")
def test_joining_a_link_gives_the_result_of_the_parser(url: str, base: str) -> None:
    assert maybe(url, base) == parser_result(url, base)


@given(anything, st.text(max_size=20))
def test_any_text_and_base_raise_only_bad_url(url: str, base: str) -> None:
    maybe(url, base)
    for ask in (origin, host_key, authority, dedup_key, url_key):
        try:
            ask(url)
        except BadUrl:
            pass


@given(anything)
def test_the_dedup_key_is_idempotent_and_the_same_for_url_and_canonical_url(url: str) -> None:
    canonical = maybe(url)
    if canonical is not None:
        key = dedup_key(url)
        assert dedup_key(key) == dedup_key(canonical) == dedup_key(canonical, canonical=True) == key
        assert url_key(url) == url_key(key)


@given(anything)
def test_the_host_key_and_origin_of_a_url_are_those_of_its_canonical_form(url: str) -> None:
    canonical = maybe(url)
    if canonical is not None:
        assert origin(url) == origin(canonical)
        assert authority(url) == authority(canonical)
        for by in ("host", "domain"):
            assert host_key(url, by) == host_key(canonical, by)
        assert canonical.startswith(origin(url) + "/")


names = st.text("abcdef", min_size=1, max_size=3)
pairs = st.lists(st.tuples(names, st.integers(0, 9).map(str)), max_size=5, unique_by=lambda p: p[0])


@given(
    pairs,
    st.randoms(use_true_random=False),
    st.sampled_from(["utm_source=1", "UTM_Medium=x", "gclid=abc", "fbclid", "%75tm_term=2", ""]),
)
def test_spellings_of_one_url_have_the_same_key(
    query: list[tuple[str, str]], random: Random, noise: str
) -> None:
    plain = "http://shop.test/p/~a" + (
        "?" + "&".join(f"{k}={v}" for k, v in query) if query else ""
    )
    shuffled = [f"%{ord(k[0]):02x}{k[1:]}={v}" for k, v in query]
    shuffled.insert(random.randint(0, len(shuffled)), noise)
    random.shuffle(shuffled)
    messy = "HTTP://SHOP.test.:80/x/../p/%7ea?" + "&".join(shuffled) + "#part"
    assert dedup_key(messy) == dedup_key(plain)
    assert url_key(messy) == url_key(plain)
    assert len(url_key(plain)) == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://a.test/", "https://a.test/"),
        ("http://a.test/", "http://a.test:8080/"),
        ("http://a.test/a", "http://a.test/A"),
        ("http://a.test/a", "http://a.test/a/"),
        ("http://a.test/?a=1&a=2", "http://a.test/?a=2&a=1"),
        ("http://a.test/?a=1", "http://a.test/?a=2"),
        ("http://a.test/a%2Fb", "http://a.test/a/b"),
        ("http://a.test/?a=%26b", "http://a.test/?a=&b"),
        ("http://a.test/", "http://b.test/"),
        ("http://1.2.3.4../", "http://1.2.3.4/"),
        ("http://a.test/?ref=1", "http://a.test/"),
    ],
)
def test_different_urls_have_different_keys(one: str, other: str) -> None:
    assert dedup_key(one) != dedup_key(other)


def test_the_default_tracking_parameters_can_be_extended_and_reduced() -> None:
    names = tracking(("ref", "aff_*", "-gclid", "-utm_*"))
    assert (
        dedup_key("http://shop.test/?gclid=1&utm_x=2&ref=3&AFF_a=4&fbclid=5", tracking=names)
        == "http://shop.test/?gclid=1&utm_x=2"
    )
    assert tracking(()) == DEFAULT_TRACKING


def test_the_list_of_tracking_parameters_can_be_replaced() -> None:
    url = "http://a.test/?sid=1&utm_source=2&track_a=3&b=4"
    assert dedup_key(url) == "http://a.test/?b=4&sid=1&track_a=3"
    assert dedup_key(url, tracking=("SID", "track_*")) == "http://a.test/?b=4&utm_source=2"
    assert dedup_key(url, tracking=()) == "http://a.test/?b=4&sid=1&track_a=3&utm_source=2"


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("HTTP://Example.COM:80/a/./b/../c?x=1#y", "http://example.com/a/c?x=1"),
        ("https://example.com:443", "https://example.com/"),
        ("  http://a.test/b c\n", "http://a.test/b%20c"),
        ("http:\\\\a.test\\b", "http://a.test/b"),
        ("http://bücher.test/ß?ä", "http://xn--bcher-kva.test/%C3%9F?%C3%A4"),
        ("http://0x7f.1/", "http://127.0.0.1/"),
        ("http://[0:0::1]:80/", "http://[::1]/"),
        ("http://a.test/?", "http://a.test/?"),
        ("http://a.test/\x00", "http://a.test/"),
        ("http://@a.test/", "http://a.test/"),
    ],
)
def test_a_url_has_one_canonical_form(url: str, canonical: str) -> None:
    assert canonical_url(url) == canonical


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("x", "not a URL"),
        ("/a/b", "not a URL"),
        ("http://", "not a URL"),
        ("http://a:99999/", "not a URL"),
        ("http://a b/", "not a URL"),
        ("http://1.2.3.256/", "not a URL"),
        ("http://a/\ud800", "not a URL"),
        ("ftp://a/", "scheme"),
        ("javascript:alert(1)", "scheme"),
        ("mailto:a@b", "scheme"),
        ("data:,x", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("http://me:s3cret@a/", "password"),
        ("http://me@a/", "user name"),
        ("http://a/" + "x" * MAX_URL, "longer"),
        ("http://a/" + "ü" * 2000, "longer"),
        ("http://" + "a" * 261 + "/", "host name longer"),
        ("http://" + "a." * 200 + "test:8080/", "host name longer"),
        ("http://" + "a" * 6000 + "/", "host name longer"),
    ],
)
def test_the_error_of_a_bad_url_has_a_reason_and_no_password(url: str, reason: str) -> None:
    with pytest.raises(BadUrl) as caught:
        canonical_url(url)
    assert reason in caught.value.reason
    assert "s3cret" not in str(caught.value)


def test_a_host_name_of_the_length_that_dns_allows_is_accepted() -> None:
    name = ".".join(["a" * 62] * 4) + "a"
    assert len(name) == 252
    assert canonical_url(f"http://{name}a.:65535/x") == f"http://{name}a.:65535/x"


def test_a_link_is_joined_with_the_page_url_and_a_base_with_password_is_refused() -> None:
    assert join("https://a.test/b/c?d", "../e#f") == "https://a.test/e"
    assert join("https://a.test/b/c?d", "?x=1") == "https://a.test/b/c?x=1"
    assert join("https://a.test/b", "//c.test/d") == "https://c.test/d"
    assert (
        join("no url at all", "https://c.test/d/../e")
        == join("no url at all", "https://c.test/e")
        == "https://c.test/e"
    )
    with pytest.raises(BadUrl):
        join("https://me:s3cret@a.test/b", "/c")


@pytest.mark.parametrize(
    ("url", "host", "domain"),
    [
        ("https://www.Example.co.uk/x", "www.example.co.uk", "example.co.uk"),
        ("http://a.b.example.com:8080/", "a.b.example.com:8080", "example.com"),
        ("http://a.example.com.:80/", "a.example.com", "example.com"),
        ("http://me.github.io/", "me.github.io", "me.github.io"),
        ("http://127.1:81/", "127.0.0.1:81", "127.0.0.1"),
        ("http://[::1]:81/", "[::1]:81", "::1"),
        ("https://[::1]/", "[::1]", "::1"),
        ("http://localhost/", "localhost", "localhost"),
        ("http://co.uk/", "co.uk", "co.uk"),
        ("http://食狮.公司.cn/", "xn--85x722f.xn--55qx5d.cn", "xn--85x722f.xn--55qx5d.cn"),
        ("http://a..b/", "a..b", "a..b"),
        ("http://x.y.unheard-of/", "x.y.unheard-of", "y.unheard-of"),
    ],
)
def test_the_host_key_is_the_host_or_the_registrable_domain(
    url: str, host: str, domain: str
) -> None:
    assert host_key(url) == host
    assert host_key(url, by="domain") == domain


def test_the_authority_is_scheme_host_and_port() -> None:
    assert authority("https://A.test/x") == Authority("https", "a.test", 443)
    assert authority("http://[::1]:81/x") == Authority("http", "::1", 81)
    assert authority("http://[2606::1]") == Authority("http", "2606::1", 80)
    assert registrable_domain("[::1]") == "::1"


def test_the_public_suffix_list_is_read_from_the_package() -> None:
    assert registrable_domain("a.b.c.blogspot.com") in ("c.blogspot.com", "blogspot.com")
    assert registrable_domain("a.b.kawasaki.jp") == "a.b.kawasaki.jp"
    assert registrable_domain("city.kawasaki.jp") == "city.kawasaki.jp"
