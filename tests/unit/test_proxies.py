"""Rules for proxies (routes, selection, health), the cookie jar, and the configuration of pools."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.files import load, show
from penstock.errors import ConfigError
from penstock.model import ErrorClass, Failure, Reason, Route
from penstock.net.cookies import MAX_PER_DOMAIN, Jar
from penstock.rules import proxies as rules
from penstock.rules import retry
from penstock.rules.proxies import (
    Choice,
    Exhausted,
    Health,
    Pool,
    ProxyFailed,
    parse_member,
    parse_members,
)

NOW = 1_700_000_000.0


def members(n: int, weights: tuple[float, ...] = ()) -> tuple[rules.Member, ...]:
    return parse_members(
        f"http://u{i}:pw@p{i}.test:80 {weights[i] if weights else 1}" for i in range(n)
    )


# -- members ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "label", "weight"),
    [
        ("http://user:secret@proxy.test:8080", "http://***@proxy.test:8080", 1),
        ("HTTPS://apikey:@proxy.test:443/ 2.5", "https://***@proxy.test:443", 2.5),
        ("socks5://[2001:db8::1]:1080", "socks5://[2001:db8::1]:1080", 1),
        ("10.0.0.1:3128", "http://10.0.0.1:3128", 1),
        ("10.0.0.1:3128:user:secret 3", "http://***@10.0.0.1:3128", 3),
    ],
)
def test_the_label_of_a_proxy_has_no_credentials(line: str, label: str, weight: float) -> None:
    member = parse_member(line)
    assert (member.label, member.weight) == (label, weight)
    for shown in (repr(member), str(member), f"{member}", repr(member.__rich_repr__()), member.id):
        assert not any(secret in shown for secret in ("user", "secret", "apikey"))


@pytest.mark.parametrize(
    "line",
    [
        "ftp://user:secret@h:1",
        "socks5h://user:secret@h:1",
        "http://user:secret@h",
        "http://user:secret@h:99999",
        "http://user:secret@h:1/path",
        "user:secret",
        "http://user:secret@h:1 0",
        "http://user:secret@h:1 -1",
        "http://user:secret@h:1 nan",
        "http://user:secret@h:1 x y",
        "http://:1",
    ],
)
def test_the_error_of_an_invalid_proxy_does_not_contain_its_password(line: str) -> None:
    with pytest.raises(ValueError, match=r"proxy 2: ") as caught:
        parse_members(["# list", line])
    assert "secret" not in str(caught.value)


def test_the_same_proxy_counts_once_and_its_id_does_not_depend_on_the_password() -> None:
    once = parse_members(["http://a:1@h:1", "http://a:2@h:1", "http://b:1@h:1"])
    assert len(once) == 2, "another user is another proxy"
    assert parse_member("http://a:1@h:1").id == parse_member("http://a:2@h:1").id


@given(st.text(max_size=60))
def test_any_line_is_a_member_or_a_value_error(line: str) -> None:
    try:
        parse_members([line])
    except ValueError:
        pass


def test_credentials_are_masked_in_every_spelling() -> None:
    dsn = "http://us%40er:p%3Ass@h:1"
    assert (
        rules.scrub("us@er us%40er p:ss p%3Ass http://us%40er:p%3Ass@h:1 h:1", dsn)
        == "*** *** *** *** *** h:1"
    )


# -- routes ----------------------------------------------------------------------------------------

POOLS = {
    p.name: p
    for p in (
        Pool(name="plain", members=members(1), next="de1"),
        Pool(name="de1", members=members(1), geo=("de",), next="de2"),
        Pool(name="de2", members=members(1), geo=("de", "at"), next="plain"),
        Pool(name="hers", members=members(1), geo=("de",), account=("alice",)),
        Pool(name="anyone", members=members(1), account=("*",)),
    )
}


@pytest.mark.parametrize(
    ("route", "names"),
    [
        (Route(pool="plain"), {"plain"}),
        (Route(pool="plain", account="bob"), {"plain"}),
        (Route(pool="hers", account="alice"), {"hers"}),
        (Route(geo="de"), {"de1", "de2"}),
        (Route(geo="AT"), {"de2"}),
        (Route(geo="de", account="alice"), {"de1", "de2", "hers"}),
        (Route(account="alice"), {"hers", "anyone"}),
        (Route(account="bob"), {"anyone"}),
    ],
)
def test_a_route_is_served_by_the_pools_that_match_it(route: Route, names: set[str]) -> None:
    assert {p.name for p in rules.plan(POOLS, route, key="k")} == names


@pytest.mark.parametrize(
    ("route", "expected_message"),
    [
        (Route(pool="x"), "there is no proxy pool 'x'"),
        (Route(pool="plain", geo="de"), "proxy pool 'plain' does not serve geo 'de'"),
        (Route(pool="hers"), "proxy pool 'hers' does not serve a route without an account"),
        (Route(pool="hers", account="bob"), "proxy pool 'hers' does not serve account 'bob'"),
        (Route(geo="fr", account="bob"), "no proxy pool serves geo 'fr' and account 'bob'"),
    ],
)
def test_a_route_without_a_pool_is_permanent_with_a_reason(
    route: Route, expected_message: str
) -> None:
    with pytest.raises(Failure) as caught:
        rules.plan(POOLS, route, key="k")
    assert (caught.value.kind, caught.value.reason) == (ErrorClass.PERMANENT, expected_message)


def test_each_block_selects_the_next_pool_and_the_chain_repeats() -> None:
    assert [rules.plan(POOLS, Route(pool="plain"), key="k", turn=t)[0].name for t in range(5)] == [
        "plain",
        "de1",
        "de2",
        "plain",
        "de1",
    ]
    orders = [
        tuple(p.name for p in rules.plan(POOLS, Route(geo="de"), key="k", turn=t)) for t in range(3)
    ]
    assert orders[0] == orders[2] == orders[1][::-1]


def test_pools_that_serve_the_same_geo_share_the_events_by_weight() -> None:
    pools = {
        n: Pool(name=n, members=members(1), geo=("de",), weight=w)
        for n, w in (("a", 3.0), ("b", 1.0))
    }
    first = Counter(rules.plan(pools, Route(geo="de"), key=str(i))[0].name for i in range(4000))
    assert first["a"] == pytest.approx(3000, abs=120)


def test_only_error_classes_with_next_pool_change_the_route() -> None:
    failures = {"blocked": 2, "transient": 1, "throttled": 4}
    assert retry.turns(retry.table(base=1, cap=1, budget=3), "fetch", failures) == 2
    assert (
        retry.turns(retry.table(base=1, cap=1, budget=3, next_pool=False), "fetch", failures) == 0
    )


# -- selection -------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.5, 10), min_size=1, max_size=5))
def test_proxies_are_selected_in_proportion_to_their_weights(weights: list[float]) -> None:
    pool = Pool(name="p", members=members(len(weights), tuple(weights)))
    n = 2000
    got: Counter[str] = Counter()
    for i in range(n):
        choice = rules.pick([pool], "h", {}, NOW, i / n)
        assert isinstance(choice, Choice)
        got[choice.member.id] += 1
    for member in pool.members:
        assert got[member.id] == pytest.approx(
            n * member.weight / sum(m.weight for m in pool.members), abs=2
        )


@given(
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
    st.floats(0, 1, exclude_max=True),
    st.none() | st.text(min_size=1),
)
def test_a_proxy_in_cooldown_is_never_selected(
    here: set[int], anywhere: set[int], random: float, session: str | None
) -> None:
    pool = Pool(name="p", members=members(6))
    view = {(pool.members[i].id, "h"): Health(failures=1, until=NOW + 10 + i) for i in here}
    view |= {(pool.members[i].id, "*"): Health(failures=1, until=NOW + 20 + i) for i in anywhere}
    view |= {(m.id, "other"): Health(failures=9, until=NOW + 999) for m in pool.members}
    picked = rules.pick([pool], "h", view, NOW, random, session=session)
    if len(here | anywhere) < 6:
        assert isinstance(picked, Choice)
        assert picked.member.id not in {pool.members[i].id for i in here | anywhere}
    else:
        assert isinstance(picked, Exhausted)
        ends = [max((10 + i) * (i in here), (20 + i) * (i in anywhere)) for i in range(6)]
        assert picked.until == NOW + min(ends)
        assert isinstance(rules.pick([pool], "h", view, picked.until, random), Choice), (
            "a proxy is available after its cooldown"
        )


@given(st.text(min_size=1), st.data())
def test_a_session_keeps_its_proxy_and_returns_to_it_after_a_cooldown(
    session: str, data: st.DataObject
) -> None:
    pool = Pool(name="p", members=members(8))

    def picked(view: dict[tuple[str, str], Health], of: Pool = pool) -> str:
        choice = rules.pick(
            [of], "h", view, NOW, data.draw(st.floats(0, 1, exclude_max=True)), session=session
        )
        assert isinstance(choice, Choice)
        return choice.member.id

    home = picked({})
    others = {m.id: Health(failures=1, until=NOW + 9) for m in pool.members if m.id != home}
    assert picked({(m, "h"): h for m, h in others.items()}) == home
    away = picked({(home, "h"): Health(failures=1, until=NOW + 9)})
    assert away != home
    assert picked({}) == home
    assert (
        picked({}, Pool(name="p", members=tuple(m for m in pool.members if m.id != home))) == away
    ), "all workers select the same replacement"


def test_sessions_are_spread_by_weight_and_change_proxies_if_sticky_is_off() -> None:
    pool = Pool(name="p", members=members(2, (3, 1)))

    def label(pool: Pool, random: float, session: str) -> str:
        choice = rules.pick([pool], "h", {}, NOW, random, session=session)
        assert isinstance(choice, rules.Choice)
        return choice.member.label

    got = Counter(label(pool, 0.0, str(i)) for i in range(4000))
    assert got["http://***@p0.test:80"] == pytest.approx(3000, abs=120)
    not_sticky = Pool(name="p", members=members(2), sticky=False)
    assert {label(not_sticky, r, "a") for r in (0.1, 0.9)} == {
        f"http://***@p{i}.test:80" for i in (0, 1)
    }


def test_an_empty_pool_is_exhausted_with_a_reason() -> None:
    found = rules.pick([Pool(name="p", trouble="its list: HTTP 500")], "h", {}, NOW, 0.5)
    assert found == Exhausted(
        NOW + rules.EMPTY_WAIT,
        "proxy pool 'p' exhausted: no proxies (its list: HTTP 500)",
        Reason.POOL_EMPTY,
    )


# -- health ----------------------------------------------------------------------------------------


def fail(health: Health | None, now: float, least: float = 0.0) -> Health:
    return rules.failed(health, now, cooldown=30.0, longest=3600.0, reason="r", least=least)


def test_cooldowns_double_up_to_the_maximum_and_success_halves_the_failures() -> None:
    health, cooldowns, now = Health(), [], NOW
    for _ in range(9):
        health = fail(health, now)
        cooldowns.append(health.until - now)
        now = health.until
    assert cooldowns == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    counts = []
    while health.failures:
        health = rules.worked(health, now)
        counts.append(health.failures)
    assert counts == [4, 2, 1, 0]


def test_failures_of_concurrent_requests_count_once() -> None:
    first = fail(None, NOW)
    assert fail(first, NOW + 1) == first
    assert rules.worked(first, NOW + 1) == first, "a success of an earlier request does not count"
    assert fail(first, NOW + 1, least=100.0).until == NOW + 101, "a Retry-After of the host counts"


def test_old_failures_are_forgotten() -> None:
    old = Health(failures=9, until=NOW, at=NOW)
    assert fail(old, NOW + rules.FORGET).failures == 1
    assert rules.worked(old, NOW + rules.FORGET).failures == 0


@pytest.mark.parametrize(
    ("failure", "scope"),
    [
        (ProxyFailed(ErrorClass.TRANSIENT, "x", own=True), "*"),
        (ProxyFailed(ErrorClass.TRANSIENT, "x", own=False), ""),
        (Failure(ErrorClass.BLOCKED, "x", status=407), "*"),
        (Failure(ErrorClass.BLOCKED, "x", status=403), ""),
        (Failure(ErrorClass.TRANSIENT, "timed out"), ""),
        (Failure(ErrorClass.TRANSIENT, "x", status=500), None),
        (Failure(ErrorClass.THROTTLED, "x", status=429), ""),
        (Failure(ErrorClass.THROTTLED, "x", status=503), None),
        (Failure(ErrorClass.THROTTLED, "held"), None),
        (Failure(ErrorClass.PERMANENT, "x", status=404), None),
        (Failure(ErrorClass.OURS, "x"), None),
    ],
)
def test_a_failure_applies_to_the_proxy_only_if_the_proxy_may_have_caused_it(
    failure: Failure, scope: str | None
) -> None:
    assert rules.failure_scope(failure) == scope


# -- cookies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("set_at", "cookie", "asked", "sent"),
    [
        ("http://a.shop.com/", "n=1", "http://a.shop.com/x", "n=1"),
        ("http://a.shop.com/", "n=1", "http://shop.com/", ""),
        ("http://a.shop.com/", "n=1", "http://b.a.shop.com/", ""),
        ("http://a.shop.com/", "n=1; Domain=shop.com", "http://b.shop.com/", "n=1"),
        ("http://a.shop.com/", "n=1; Domain=.SHOP.com", "http://shop.com/", "n=1"),
        ("http://a.shop.com/", "n=1; Domain=other.com", "http://other.com/", ""),
        ("http://a.shop.com/", "n=1; Domain=b.shop.com", "http://b.shop.com/", ""),
        ("http://shop.co.uk/", "n=1; Domain=co.uk", "http://evil.co.uk/", ""),
        ("http://10.0.0.1/", "n=1; Domain=0.0.1", "http://9.0.0.1/", ""),
        ("http://shop.com/a/b", "n=1", "http://shop.com/a/c", "n=1"),
        ("http://shop.com/a/b", "n=1", "http://shop.com/ab", ""),
        ("http://shop.com/", "n=1; Path=/a", "http://shop.com/a?q", "n=1"),
        ("http://shop.com/", "n=1; Path=/a", "http://shop.com/ab", ""),
        ("https://shop.com/", "n=1; Secure", "http://shop.com/", ""),
        ("https://shop.com/", "n=1; Secure", "https://shop.com/", "n=1"),
        ("http://shop.com/", "n=1; Secure", "https://shop.com/", ""),
        ("http://shop.com/", "n=1; Max-Age=0", "http://shop.com/", ""),
        (
            "http://shop.com/",
            "n=1; Max-Age=60; Expires=Thu, 01-Jan-1970 00:00:01 GMT",
            "http://shop.com/",
            "n=1",
        ),
        ("http://shop.com/", "n=1; Expires=Thu, 01-Jan-1970 00:00:01 GMT", "http://shop.com/", ""),
        (
            "http://shop.com/",
            "n=1; Expires=Wed, 01 Jan 2031 00:00:01 GMT",
            "http://shop.com/",
            "n=1",
        ),
        ("http://shop.com/", "n=1; Expires=whenever", "http://shop.com/", "n=1"),
        ("https://shop.com/", "__Host-n=1; Secure; Path=/", "https://shop.com/", "__Host-n=1"),
        (
            "https://shop.com/",
            "__Host-n=1; Secure; Path=/; Domain=shop.com",
            "https://shop.com/",
            "",
        ),
        ("https://shop.com/", "__Secure-n=1", "https://shop.com/", ""),
        ("http://shop.com/", "n=a\x01b", "http://shop.com/", ""),
        ("http://shop.com/", "n=" + "x" * 5000, "http://shop.com/", ""),
        ("http://shop.com/", "=; a", "http://shop.com/", ""),
    ],
)
def test_a_cookie_is_sent_only_to_matching_urls(
    set_at: str, cookie: str, asked: str, sent: str
) -> None:
    jar = Jar()
    jar.store(set_at, {"set-cookie": cookie}, NOW)
    assert jar.header(asked, NOW) == sent


@pytest.mark.parametrize("domain", ["co.uk", "co.uk.", ".co.uk.", "uk."])
def test_a_final_dot_does_not_let_a_site_set_cookies_for_a_public_suffix(domain: str) -> None:
    jar = Jar()
    jar.store("https://evil.co.uk/", {"set-cookie": f"a=1; Domain={domain}"}, NOW)
    assert len(jar) == 0
    jar.store("https://www.shop.co.uk/", {"set-cookie": "b=2; Domain=shop.co.uk."}, NOW)
    assert jar.header("https://shop.co.uk/", NOW) == "b=2"


def test_a_cookie_jar_replaces_expires_sorts_and_limits_cookies() -> None:
    jar = Jar()
    jar.store(
        "http://shop.com/a/",
        {"set-cookie": "a=1; Path=/\nb=2; Path=/a\nc=3; Path=/; Max-Age=10"},
        NOW,
    )
    jar.store("http://shop.com/a/", {"set-cookie": "a=9; Path=/"}, NOW)
    assert jar.header("http://shop.com/a/x", NOW) == "b=2; a=9; c=3"
    assert jar.header("http://shop.com/a/x", NOW + 10) == "b=2; a=9"
    jar.store("http://shop.com/", {"set-cookie": "a=; Max-Age=-1; Path=/"}, NOW)
    assert jar.header("http://shop.com/", NOW) == ""
    jar.store("http://shop.com/", {"set-cookie": "\n".join(f"k{i}=v" for i in range(200))}, NOW)
    assert len(jar) == MAX_PER_DOMAIN
    for i in range(400):
        jar.store(f"http://s{i}.test/", {"set-cookie": "k=v"}, NOW)
    assert len(jar) == 300


@given(st.text(max_size=80))
def test_any_set_cookie_header_is_stored_or_ignored(value: str) -> None:
    jar = Jar()
    jar.store("https://shop.com/a", {"set-cookie": value}, NOW)
    assert "\n" not in jar.header("https://shop.com/a", NOW)


# -- configuration ---------------------------------------------------------------------------------

TOML = """
[proxies.res-de]
urls = ["http://user:hunter2@p.test:80 2", "socks5://10.0.0.1:1080"]
geo = ["DE", "at"]
next = "backup"
[proxies.backup]
list_url = "https://provider.test/list/TOKEN?key=TOKEN"
account = "*"
cooldown = "1m"
sticky = false
"""


def loaded(
    tmp: Path,
    toml: str = TOML,
    env: dict[str, str] | None = None,
    cli: dict[str, str] | None = None,
) -> Any:
    (tmp / "penstock.toml").write_text(toml)
    return load(cli or {}, env or {}, tmp)


def test_pools_have_names_chosen_by_the_user_and_are_shown_without_secrets(
    tmp_path: Path,
) -> None:
    found = loaded(tmp_path)
    pools = found.config.proxies
    assert list(pools) == ["res-de", "backup"]
    assert (
        pools["res-de"].geo,
        pools["res-de"].next,
        pools["backup"].cooldown,
        pools["backup"].sticky,
    ) == (("DE", "at"), "backup", 60.0, False)
    shown = {row.path: row for row in show(found)}
    assert shown["proxies.res-de.urls"].value == "http://***@p.test:80,socks5://10.0.0.1:1080"
    assert shown["proxies.backup.list_url"].value == "https://provider.test/***"
    assert (shown["proxies.res-de.urls"].origin, shown["proxies.res-de.weight"].origin) == (
        "penstock.toml",
        "default",
    )
    assert not any("hunter2" in row.value or "TOKEN" in row.value for row in shown.values())


def test_variables_and_the_command_line_change_and_create_pools(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("http://u:p@a.test:1\nhttp://u:p@b.test:2 3\n# old\n")
    env = {
        "PENSTOCK_PROXIES_RES_DE_COOLDOWN_MAX": "2h",
        "PENSTOCK_PROXIES_OTHER_URLS_FILE": "secret",
        "PENSTOCK_PROXIES_BACKUP_LIST_URL": "https://x.test/",
    }
    pools = loaded(tmp_path, env=env, cli={"proxies.other.weight": "4"}).config.proxies
    assert pools["res-de"].cooldown_max == 7200
    assert (pools["other"].urls, pools["other"].weight) == (
        ("http://u:p@a.test:1", "http://u:p@b.test:2 3"),
        4.0,
    )
    assert pools["backup"].list_url == "https://x.test/"


@pytest.mark.parametrize(
    ("toml", "expected_message"),
    [
        ("proxies = 1", "proxies: is a section of penstock.toml, not a value"),
        ("[proxies]\nx = 1", "proxies.x: is a section of penstock.toml, not a value"),
        ('[proxies."a b"]\nurls = "h:1"', "proxies.a b: is not a valid pool name"),
        ("[proxies.x]\n", "proxies.x: has neither urls nor list_url"),
        ('[proxies.x]\nurls = "http://u:hunter2@h"', "proxies.x.urls: expected URLs of proxies"),
        (
            '[proxies.x]\nurls = ["socks5h://u:hunter2@h:1"]',
            "proxies.x.urls: expected URLs of proxies",
        ),
        (
            '[proxies.x]\nlist_url = "https://u:hunter2@h/"',
            "proxies.x.list_url: expected an http or https URL",
        ),
        ('[proxies.x]\nurls = "h:1"\nnext = "y"', "proxies.x.next: there is no pool 'y'"),
        ('[proxies.x]\nurls = "h:1"\nweight = 0', "proxies.x.weight: expected a number above 0"),
        (
            '[proxies.x]\nurls = "h:1"\ncooldwon = "1s"',
            "proxies.x.cooldwon: there is no such option",
        ),
        (
            '[proxies.x-y]\nurls = "h:1"\n[proxies.x_y]\nurls = "h:1"',
            "proxies: x-y and x_y would have the same variables",
        ),
    ],
)
def test_the_error_of_an_invalid_pool_names_its_path_and_no_secret(
    tmp_path: Path, toml: str, expected_message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, toml)
    assert caught.value.message.startswith(expected_message)
    assert "hunter2" not in caught.value.message + caught.value.hint
