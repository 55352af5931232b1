"""robots.txt by RFC 9309."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.rules.robots import MAX_BYTES, Robots, from_answer, parse, product_token, ttl

AGENT = "Penstock/0.1 (+https://example.com/bot)"


def allowed(body: str | bytes, path: str, agent: str = AGENT) -> bool:
    return parse(body.encode() if isinstance(body, str) else body).allows(
        agent, "https://shop.test" + path
    )


@pytest.mark.parametrize(
    ("rule", "path", "matches"),
    [
        ("/", "/", True),
        ("/", "/x?y", True),
        ("/fish", "/fish", True),
        ("/fish", "/fish.html", True),
        ("/fish", "/fishheads/yummy.html", True),
        ("/fish", "/fish.php?id=anything", True),
        ("/fish", "/Fish.asp", False),
        ("/fish", "/catfish", False),
        ("/fish*", "/fishheads", True),
        ("/fish/", "/fish", False),
        ("/fish/", "/fish/?id=1", True),
        ("/*.php", "/index.php", True),
        ("/*.php", "/folder/any.php.file.html", True),
        ("/*.php", "/", False),
        ("/*.php", "/windows.PHP", False),
        ("/*.php$", "/filename.php", True),
        ("/*.php$", "/filename.php?x", False),
        ("/*.php$", "/filename.php/", False),
        ("/*.php$", "/a.php.php", True),
        ("/fish*.php", "/fishheads/catfish.php?x", True),
        ("/fish*.php", "/Fish.PHP", False),
        ("*", "/any", True),
        ("*.gif$", "/a/b.gif", True),
        ("/$", "/", True),
        ("/$", "/a", False),
        ("/a$b", "/a$b/c", True),
        ("/a$b", "/a", False),
        ("/a**b", "/axxb", True),
        ("/ab*b$", "/ab", False),
        ("/x*aba*aba$", "/xaba", False),
        ("/x*aba*aba$", "/xabaaba", True),
        # Percent-encoding: the table of the RFC, and spellings that must stay different.
        ("/foo/bar?baz=quz", "/foo/bar?baz=quz", True),
        ("/foo/bar?baz=https://foo.bar", "/foo/bar?baz=https%3A%2F%2Ffoo.bar", True),
        ("/foo/bar?baz=https%3A%2F%2Ffoo.bar", "/foo/bar?baz=https://foo.bar", True),
        ("/*?b=*%2Fc", "/a?b=x/c", True),
        ("/foo/bar/ツ", "/foo/bar/%E3%83%84", True),
        ("/foo/bar/%e3%83%84", "/foo/bar/ツ", True),
        ("/foo/bar/%62%61%7A", "/foo/bar/baz", True),
        ("/foo/bar/baz", "/foo/bar/%62%61%7A", True),
        ("/a%3cd.html", "/a%3Cd.html", True),
        ("/a<d.html", "/a%3Cd.html", True),
        ("/%7ejoe/", "/~joe/index.html", True),
        ("/a%2fb.html", "/a%2Fb.html", True),
        ("/a%2fb.html", "/a/b.html", False),
        ("/a/b.html", "/a%2fb.html", False),
        ("/path/file-with-a-%2A.html", "/path/file-with-a-*.html", True),
        ("/path/file-with-a-%2A.html", "/path/file-with-a-x.html", False),
        ("/path/foo-%24", "/path/foo-$", True),
        ("/path/foo-%24", "/path/foo-", False),
        ("/a b", "/a%20b", True),
        ("fish", "/fish", False),
    ],
)
def test_a_rule_matches_paths_as_rfc_9309_specifies(rule: str, path: str, matches: bool) -> None:
    assert allowed(f"User-agent: *\nDisallow: {rule}\n", path) is not matches


@pytest.mark.parametrize(
    ("rules", "path", "verdict"),
    [
        ("allow: /p\ndisallow: /", "/page", True),
        ("disallow: /\nallow: /p", "/page", True),
        ("allow: /folder\ndisallow: /folder", "/folder/page", True),
        ("disallow: /folder\nallow: /folder", "/folder/page", True),
        ("allow: /page\ndisallow: /*.htm", "/page.htm", False),
        ("allow: /page\ndisallow: /*.ph", "/page.php5", True),
        ("allow: /$\ndisallow: /", "/", True),
        ("allow: /$\ndisallow: /", "/page.htm", False),
        ("disallow: /a*\nallow: /a", "/ab", False),
        ("disallow: /*b\nallow: /ab", "/ab", True),
        ("disallow: /ab\nallow: /*b", "/ab", True),
        ("disallow: /a*c\nallow: /*bc", "/abc", True),
        ("disallow:", "/x", True),
        ("disallow:\ndisallow: /x", "/x", False),
        ("disallow: /\nallow:", "/x", False),
        ("disallow: /", "/robots.txt", True),
    ],
)
def test_the_longest_rule_wins_and_allow_wins_a_tie(rules: str, path: str, verdict: bool) -> None:
    assert allowed("user-agent: *\n" + rules, path) is verdict


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("User-agent: penstock\nDisallow: /x", False),
        ("USER-AGENT: PENSTOCK\nDISALLOW: /x", False),
        ("User-agent: Penstock/2.0\nDisallow: /x", False),
        ("User-agent: penstock-images\nDisallow: /x", True),
        ("User-agent: pen\nDisallow: /x", True),
        ("User-agent: *\nDisallow: /x\n\nUser-agent: penstock\nDisallow: /y", True),
        ("User-agent: penstock\nDisallow:\n\nUser-agent: *\nDisallow: /", True),
        ("User-agent: penstock\n\nUser-agent: *\nDisallow: /", False),
        ("User-agent: a\nUser-agent: penstock\nUser-agent: b\nDisallow: /x", False),
        (
            (
                "User-agent: penstock\nDisallow: /y\nUser-agent: other\nDisallow: /z\n"
                "User-agent: penstock\nDisallow: /x"
            ),
            False,
        ),
        ("User-agent: a\nSitemap: https://s/\nUser-agent: penstock\nDisallow: /x", False),
        ("User-agent: penstock\nCrawl-delay: 3\nUser-agent: b\nDisallow: /x", False),
        ("User-agent: penstock\nNoindex: /\nfoo\n\n\n: \nDisallow: /x", False),
        ("Disallow: /x\nUser-agent: penstock\nDisallow: /y", True),
        ("User-agent: penstock # us\nDisallow: /x # that", False),
        ("User-agent: penstock\n# Disallow: /x", True),
        ("User-agent : penstock\n  Disallow :/x", False),
        ("User-agent penstock\nDisallow /x", False),
        ("User-agent: penstock\rDisallow: /x\r", False),
        ("User-agent: penstock\r\nDisallow: /x\r\n", False),
        ("User-agent: penstock\n\tDisallow:\t/x\x00\n", False),
        ("User agent: *\nDissallow: /x", False),
        ("\ufeffUser-agent: *\nDisallow: /x", False),
        ("<html><title>404</title></html>", True),
        ("", True),
    ],
)
def test_groups_are_found_by_agent_and_merged(body: str, verdict: bool) -> None:
    assert allowed(body, "/x") is verdict


def test_crawl_delays_apply_to_their_agents_and_invalid_ones_are_ignored() -> None:
    r = parse(
        b"User-agent: *\nCrawl-delay: 2.5\nDisallow:\n\nUser-agent: penstock\nCrawl-delay: 1\n"
        b"Crawl-delay: 7\n\nUser-agent: b\nAllow: /\n"
    )
    assert r.crawl_delay("other") == 2.5
    assert r.crawl_delay(AGENT) == 7.0
    assert r.crawl_delay("b") is None
    assert parse(b"").crawl_delay(AGENT) is None
    for text in ("x", "-1", "nan", "inf", "1e999", ""):
        assert parse(f"User-agent: *\nCrawl-delay: {text}".encode()).crawl_delay(AGENT) is None


def test_sitemaps_of_the_complete_file_are_listed_once_in_order() -> None:
    body = (
        "Sitemap: https://a.test/1.xml\nUser-agent: x\nsitemap:https://a.test/ü.xml#c\n"
        "SITEMAP: https://a.test/1.xml\nSitemap:\nSitemap: /3.xml"
    )
    assert parse(body.encode()).sitemaps == (
        "https://a.test/1.xml",
        "https://a.test/ü.xml",
        "/3.xml",
    )


@pytest.mark.parametrize(
    ("user_agent", "token"),
    [
        ("penstock/0.1 (+https://penstock.example/bot)", "penstock"),
        ("Mozilla/5.0 (compatible; Shop-Bot/2.1; +https://shop.example/bot)", "Shop-Bot"),
        ("Mozilla/5.0 (X11; Linux x86_64)", "Mozilla"),
        ("shopbot", "shopbot"),
        ("42bot/1", "42bot"),
        (" ", ""),
    ],
)
def test_the_agent_name_in_robots_is_the_product_of_the_user_agent(
    user_agent: str, token: str
) -> None:
    assert product_token(user_agent) == token


def test_the_deciding_rule_is_returned() -> None:
    found = parse(b"User-agent: *\nDisallow: /a\nAllow: /a/b\nDisallow: /*.php$\n")
    for path, rule in (
        ("/a/x", "Disallow: /a"),
        ("/a/b/c", "Allow: /a/b"),
        ("/x.php", "Disallow: /*.php$"),
        ("/c", ""),
    ):
        assert found.deciding("me", path) == rule
        assert found.allows("me", path) is not rule.startswith("Disallow")


def test_only_the_first_500_kib_are_read_and_a_cut_line_is_ignored() -> None:
    head = b"User-agent: *\nDisallow: /early\n"
    body = head + b"#" * (MAX_BYTES - len(head) - len(b"\nDisallow: /")) + b"\nDisallow: /late\n"
    assert not allowed(body, "/early")
    assert allowed(body, "/late")
    assert allowed(body, "/other")
    assert not allowed(
        head + b"\n" * (MAX_BYTES - len(head) - len(b"Disallow: /late\n")) + b"Disallow: /late\n",
        "/late",
    )


def test_an_invalid_url_is_not_allowed_and_a_path_is_accepted() -> None:
    r = parse(b"User-agent: *\nDisallow: /x")
    assert not r.allows(AGENT, "ftp://shop.test/")
    assert not r.allows(AGENT, "http://a b/")
    assert r.allows(AGENT, "/y")
    assert not r.allows(AGENT, "/z/../x")


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, False),
        (206, False),
        (301, True),
        (304, True),
        (400, True),
        (401, True),
        (403, True),
        (404, True),
        (410, True),
        (429, True),
        (500, False),
        (503, False),
        (599, False),
        (None, False),
        (0, False),
        (100, False),
        (600, False),
    ],
)
def test_a_missing_file_allows_all_and_an_unreachable_one_disallows_all(
    status: int | None, verdict: bool
) -> None:
    r = from_answer(status, b"User-agent: *\nDisallow: /x")
    assert r.allows(AGENT, "https://shop.test/x") is verdict
    assert r.allows(AGENT, "https://shop.test/robots.txt")


def test_robots_is_cached_for_a_day_at_most_and_an_outage_for_less() -> None:
    assert all(0 < ttl(status) <= 86400 for status in (200, 301, 404, 500, None))
    waits = [ttl(None, failures) for failures in range(20)]
    assert waits[0] <= 60
    assert waits == sorted(waits)
    assert waits[-1] <= 3600


# An independent implementation: patterns as regular expressions, over an alphabet that needs no
# normalisation.
patterns = st.text("ab/*", max_size=5).map(lambda t: "/" + t) | st.text("ab/*", max_size=4).map(
    lambda t: "/" + t + "$"
)


@given(st.lists(st.tuples(st.booleans(), patterns), max_size=6), st.text("ab/", max_size=7))
def test_verdicts_equal_those_of_a_simple_independent_implementation(
    rules: list[tuple[bool, str]], rest: str
) -> None:
    best = (-1, True)
    for allow, pattern in rules:
        body, end = (pattern[:-1], r"\Z") if pattern.endswith("$") else (pattern, "")
        if re.match(re.escape(body).replace(r"\*", ".*") + end, "/" + rest):
            best = max(best, (len(pattern), allow))
    text = "User-agent: *\n" + "".join(
        f"{'Allow' if allow else 'Disallow'}: {pattern}\n" for allow, pattern in rules
    )
    assert parse(text.encode()).allows(AGENT, "https://shop.test/" + rest) is best[1]


@given(
    st.binary(max_size=300)
    | st.lists(
        st.sampled_from(
            [
                b"user-agent:",
                b"*",
                b"allow:",
                b"disallow",
                b":",
                b"/",
                b"\n",
                b"\r",
                b"#",
                b"%",
                b"%zz",
                b"$",
                b"\xff",
                b" ",
            ]
        )
    ).map(b"".join)
)
@example(b"\xef\xbb\xbf")
def test_any_bytes_are_parsed_without_an_exception(body: bytes) -> None:
    r = parse(body)
    assert isinstance(r, Robots)
    r.allows(AGENT, "https://shop.test/%ff?%zz")
    r.crawl_delay("")


def test_a_hostile_file_is_parsed_and_queried_in_linear_time() -> None:
    stars = parse(b"User-agent: *\nDisallow: /" + b"*a" * 200_000 + b"b$\n")
    many = parse(
        b"User-agent: *\n" + b"".join(b"Disallow: /*a*%05dz$\n" % i for i in range(20_000))
    )
    start = time.process_time()
    assert stars.allows(AGENT, "https://shop.test/" + "a" * 8000)
    assert many.allows(AGENT, "https://shop.test/" + "a" * 8000)
    assert time.process_time() - start < 20.0


def test_a_delay_applies_to_the_agents_before_it_in_a_shared_group() -> None:
    r = parse(b"User-agent: a\nCrawl-delay: 5\nUser-agent: b\nCrawl-delay: 2\nDisallow: /x\n")
    assert (r.crawl_delay("a"), r.crawl_delay("b")) == (5.0, 2.0)
    assert not r.allows("a", "/x")
    assert not r.allows("b", "/x")


def test_a_url_that_needs_too_much_work_is_forbidden_with_that_reason() -> None:
    rules = "".join(f"Allow: /*a*{n}*b\n" for n in range(20_000))
    r = parse(f"User-agent: *\n{rules}".encode())
    assert not r.allows(AGENT, "/" + "a" * 1900)
    assert r.allows(AGENT, "/short")


def test_rules_for_one_agent_decide_as_the_complete_rules() -> None:
    r = parse(b"User-agent: x\nDisallow: /\nUser-agent: *\nDisallow: /a\nCrawl-delay: 3\n")
    small = r.only_for(AGENT)
    assert small.crawl_delay(AGENT) == 3.0
    assert [small.allows(AGENT, path) for path in ("/a", "/b")] == [False, True]
    assert 0 < small.size < r.size
