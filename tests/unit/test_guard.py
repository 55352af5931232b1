"""Addresses to which requests are allowed, and addresses that are always refused."""

# ruff: noqa: SIM905 (the tables read better as words)

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.model import ErrorClass, Failure
from penstock.net.guard import Allow, Guard, Target, is_own, is_public, parse_allow

SPECIAL_V4 = """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24
    192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24
    198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 255.255.255.255/32
    168.63.129.16/32
""".split()
SPECIAL_V6 = """
    ::/128 ::1/128 ::ffff:0:0/96 ::/96 ::ffff:0:0:0/96 64:ff9b::/96 64:ff9b:1::/48 100::/64
    100:0:0:1::/64 2001::/23 2001::/32 2001:2::/48 2001:10::/28 2001:20::/28 2001:db8::/32
    2002::/16 2620:4f:8000::/48 3fff::/20 5f00::/16 4000::/3 8000::/1 fc00::/7 fd00:ec2::254/128
    fe80::/10 fec0::/10 ff00::/8
""".split()
PUBLIC = """
    1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0
    169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.0 192.0.3.0 192.167.255.255
    192.169.0.0 198.17.255.255 198.20.0.0 203.0.112.255 203.0.114.0 223.255.255.255 168.63.129.15
    168.63.129.17 2606:4700:4700::1111 2a00:1450:4001:81b::200e 2001:200::1 2001:4860:4860::8888
    2003::1 2620:4f:7fff::1 2400:cb00::1
""".split()


def refusal(guard: Guard, url: str) -> Failure:
    with pytest.raises(Failure) as caught:
        guard.check_url(url)
    return caught.value


@pytest.mark.parametrize("network", [*SPECIAL_V4, *SPECIAL_V6])
def test_no_special_range_is_public_at_either_end(network: str) -> None:
    n = ipaddress.ip_network(network)
    assert not is_public(n.network_address)
    assert not is_public(str(n.broadcast_address))
    assert not is_public(n.network_address + n.num_addresses // 2)


@pytest.mark.parametrize("address", PUBLIC)
def test_neighbours_of_the_special_ranges_are_public(address: str) -> None:
    assert is_public(address)
    assert is_public(ipaddress.ip_address(address))


@given(st.ip_addresses(v=4))
def test_an_address_that_python_calls_private_is_never_public(
    address: ipaddress.IPv4Address,
) -> None:
    if is_public(address):
        assert not any(
            (
                address.is_private,
                address.is_multicast,
                address.is_reserved,
                address.is_loopback,
                address.is_link_local,
            )
        )


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_inside_an_ipv6_one_is_refused_in_every_form(
    v4: ipaddress.IPv4Address,
) -> None:
    n, nat64, local_nat64, site = (
        int(v4),
        *(int(ipaddress.ip_address(a)) for a in ("64:ff9b::", "64:ff9b:1::", "2606:4700::")),
    )
    mapped, translated, six_to_four, teredo = (
        0xFFFF << 32 | n,
        0xFFFF << 48 | n,
        0x2002 << 112 | n << 80,
        0x20010000 << 96 | n << 64 | (n ^ 0xFFFFFFFF),
    )
    isatap = (site | 0x5EFE << 32 | n, site | 0x02005EFE << 32 | n)
    forms = [n, mapped, translated, six_to_four, teredo, nat64 | n, local_nat64 | n, *isatap]
    assert not any(is_public(ipaddress.IPv6Address(f)) for f in forms)


GARBAGE = [
    "",
    "8.8.8.8 ",
    *(
        "1 1.2.3 08.8.8.8 0x8.8.8.8 8.8.8.8/32 [2606:4700::1] 2606:4700::1%eth0 ８.8.8.8 "
        "example.com"
    ).split(),
]


@given(st.text() | st.sampled_from(GARBAGE))
def test_a_text_that_is_not_an_address_is_not_public(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        assert not is_public(text)


def test_an_address_with_a_zone_id_and_a_value_of_another_type_are_not_public() -> None:
    assert not is_public("2606:4700::1%1")
    assert not is_public(ipaddress.ip_address("2606:4700::1%eth0"))
    not_texts: list[Any] = [134744072, b"\x08\x08\x08\x08", None]
    for address in not_texts:
        assert not is_public(address)


LOOPBACK_SPELLINGS = """
    127.0.0.1 127.1 127.0.1 0x7f.1 0x7f.0x0.0x0.0x1 0x7f000001 0X7F000001 017700000001 0177.0.0.1
    0177.1 2130706433 127.0.0.1. １２７.０.０.１ ①②⑦.0.0.1 127。0。0。1 127．0．0．1 %31%32%37.0.0.1
    %31%32%37%2e0%2e0%2e1 0 0x0 0.0.0.0 [::1] [::] [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1]
    [::ffff:7f00:1] [::127.0.0.1] [64:ff9b::127.0.0.1] [64:ff9b:1::7f00:1] [2002:7f00:1::]
    [2001:0:7f00:1::] [fe80::1] [fe80::5efe:127.0.0.1] [fd00:ec2::254] 169.254.169.254 0xa9fea9fe
    2852039166 0251.0376.0251.0376 [::ffff:a9fe:a9fe] 10.0.0.1 0xa.1 012.1 192.168.0.1 0xc0a80001
    172.16.0.1 172.31.255.255 100.100.100.200 192.0.0.192 168.63.129.16 255.255.255.255 224.0.0.1
""".split()


@pytest.mark.parametrize("host", LOOPBACK_SPELLINGS)
def test_a_private_address_is_refused_in_every_spelling(host: str) -> None:
    guard = Guard(own=lambda ip: False)
    for form in (
        "http://{}/",
        "https://{}:443/x",
        "HTTP:\\\\{}\\",
        "http:{}",
        "\thttp://{}\n",
        "http:////{}//",
    ):
        failure = refusal(guard, form.format(host))
        assert failure.kind is ErrorClass.PERMANENT
        assert failure.reason == "forbidden address: not a public address"


NO_PLAIN_URL = """
    http://u:p4ss@8.8.8.8/ http://8.8.8.8:p4ss@example.com/ ftp://8.8.8.8/ file:///etc/passwd
    gopher://8.8.8.8:70/ http:// x http://a..b/
    http://aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.com/ http://a*b/
    http://[::1%25lo]/ http://1.2.3.256/ data:,p4ss
""".split()


@pytest.mark.parametrize("url", NO_PLAIN_URL)
def test_the_error_of_an_invalid_url_does_not_contain_it(
    url: str,
) -> None:
    failure = refusal(Guard(), url)
    assert failure.kind is ErrorClass.PERMANENT
    assert failure.reason.startswith("bad URL: ")
    assert "p4ss" not in failure.reason + failure.detail


@pytest.mark.parametrize("port", [1, 22, 25, 53, 79, 81, 110, 3306, 5432, 6379, 9200, 11211, 65535])
def test_a_port_that_is_not_allowed_is_refused_for_addresses_and_names(port: int) -> None:
    guard = Guard(own=lambda ip: False)
    for host in ("8.8.8.8", "example.com"):
        assert (
            refusal(guard, f"http://{host}:{port}/").reason
            == f"forbidden address: port {port} is not allowed"
        )
    assert guard.check_url("http://8.8.8.8:8080/") == Target("http", "8.8.8.8", 8080, ("8.8.8.8",))


def test_the_allow_list_reads_addresses_networks_names_and_any_port() -> None:
    entries = parse_allow(
        " 127.0.0.1:8000, [::1]:9000,10.0.0.0/8:443 ,Shop.Test:80,[fd00::/8]:*, 127.1:1,"
    )
    assert [str(e) for e in entries] == [
        "127.0.0.1:8000",
        "[::1]:9000",
        "10.0.0.0/8:443",
        "shop.test:80",
        "[fd00::/8]:*",
        "127.0.0.1:1",
    ]
    assert parse_allow("") == ()
    assert isinstance(entries[0], Allow)
    assert parse_allow(",".join(map(str, entries))) == entries


NOT_EXACT = [
    "a b:80",
    *"""
    127.0.0.1 [::1] ::1:80:x 127.0.0.1: :80 127.0.0.1:0 127.0.0.1:65536 127.0.0.1:http
    10.0.0.1/8:80 10.0.0.0/33:80 u@h:80 [10.0.0.1]:80 *:80 [fe80::1%lo]:80 h/x:80 127.0.0.1:８０
    127.0.0.1:-1
""".split(),
]


@pytest.mark.parametrize("text", NOT_EXACT)
def test_an_inexact_allow_list_entry_is_a_configuration_error_with_a_hint(
    text: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_allow(text)
    assert caught.value.hint


def test_an_allowed_private_address_is_allowed_on_that_port_only() -> None:
    guard = Guard(parse_allow("127.0.0.1:8000,10.0.0.0/8:443,[::1]:9000"))
    assert guard.check_url("http://127.0.0.1:8000/x").ip == "127.0.0.1"
    assert guard.check_url("http://0x7f.1:8000/x").ip == "127.0.0.1"
    assert guard.check_url("https://10.1.2.3/").ip == "10.1.2.3"
    assert guard.check_url("http://[::1]:9000/").ip == "::1"
    for url in (
        "http://127.0.0.1/",
        "http://127.0.0.1:8001/",
        "http://127.0.0.2:8000/",
        "http://10.1.2.3/",
        "https://11.0.0.1:9000/",
        "http://[::1]:8000/",
        "http://[::ffff:127.0.0.1]:8000/",
    ):
        assert refusal(guard, url).reason.startswith("forbidden address: ")


class Names:
    """A resolver with scripted answers. The last answer of a name is repeated."""

    def __init__(self, **script: Sequence[Sequence[str] | BaseException]) -> None:
        self.script = {name.replace("_", "."): list(answers) for name, answers in script.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        await asyncio.sleep(0)
        answers = self.script[host]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def outcome(guard: Guard, url: str) -> Target | Failure:
    try:
        return asyncio.run(guard.resolve(url))
    except Failure as failure:
        return failure


def guarded(names: Names, allow: str = "", **options: Any) -> Guard:
    return Guard(parse_allow(allow), resolver=names, own=lambda ip: ip == "203.0.114.9", **options)


@pytest.mark.parametrize(
    "bad",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "::ffff:8.8.8.8",
        "fe80::1%eth0",
        "0.0.0.0",
        "203.0.114.9",
        "garbage",
        "",
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_name_with_one_forbidden_address_is_refused(bad: str, place: int) -> None:
    answers = ["8.8.8.8", "2606:4700::1"]
    answers.insert(place, bad)
    result = outcome(guarded(Names(shop_test=[answers])), "http://shop.test/")
    assert isinstance(result, Failure)
    assert result.kind is ErrorClass.PERMANENT
    assert result.reason.startswith("forbidden address: ")


def test_a_rebinding_name_keeps_its_checked_address_and_is_refused_after_expiry() -> None:
    now = [0.0]
    names = Names(shop_test=[["8.8.8.8"], ["127.0.0.1"]])
    guard = guarded(names, ttl=30.0, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 29.9):
        result = outcome(guard, "http://shop.test/")
        assert isinstance(result, Target)
        assert result.addresses == ("8.8.8.8",)
    assert names.asked == ["shop.test"]
    now[0] = 30.0
    assert isinstance(outcome(guard, "http://shop.test/"), Failure)


def test_an_ip_address_needs_no_resolver() -> None:
    names = Names()
    assert outcome(guarded(names), "http://8.8.8.8/") == Target("http", "8.8.8.8", 80, ("8.8.8.8",))
    assert names.asked == []


RESOLVER_TROUBLE = [
    socket.gaierror(socket.EAI_NONAME, "no"),
    socket.gaierror(socket.EAI_AGAIN, "later"),
    OSError("broken"),
    UnicodeError("too long"),
]


@pytest.mark.parametrize("error", RESOLVER_TROUBLE)
def test_a_resolver_failure_is_transient_and_cached_for_a_short_time(error: Exception) -> None:
    now = [0.0]
    names = Names(shop_test=[error, ["8.8.8.8"]])
    guard = guarded(names, failure_ttl=3.0, clock=lambda: now[0])
    for now[0] in (0.0, 2.0):
        result = outcome(guard, "http://shop.test/")
        assert isinstance(result, Failure)
        assert result.kind is ErrorClass.TRANSIENT
    now[0] = 3.0
    assert isinstance(outcome(guard, "http://shop.test/"), Target)


def test_a_resolver_that_hangs_times_out_as_transient() -> None:
    async def hang(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    result = outcome(Guard(resolver=hang, timeout=0.01), "http://shop.test/")
    assert isinstance(result, Failure)
    assert result.kind is ErrorClass.TRANSIENT


def test_a_name_without_addresses_is_transient_and_one_with_5000_is_refused() -> None:
    many = [str(ipaddress.IPv4Address(0x08000000 + i)) for i in range(5000)]
    none, flood = (
        outcome(guarded(Names(shop_test=[[]])), "http://shop.test/"),
        outcome(guarded(Names(shop_test=[many])), "http://shop.test/"),
    )
    assert isinstance(none, Failure)
    assert none.kind is ErrorClass.TRANSIENT
    assert isinstance(flood, Failure)
    assert flood.kind is ErrorClass.PERMANENT


def test_an_allowed_name_may_be_private_on_the_allowed_port_only() -> None:
    names = Names(shop_test=[["10.0.0.5"]], shop_test_=[["10.0.0.6"]], other_test=[["10.0.0.5"]])
    guard = guarded(names, "shop.test:8000")
    assert isinstance(outcome(guard, "http://SHOP.test.:8000/"), Target)
    assert names.asked == ["shop.test."]
    for url in ("http://shop.test/", "http://other.test/", "http://other.test:8000/"):
        assert isinstance(outcome(guard, url), Failure)
    good = outcome(guard, "http://shop.test:8000/")
    assert isinstance(good, Target)
    assert good.pin == "shop.test:8000:10.0.0.5"


def test_a_name_that_resolves_into_an_allowed_network_passes_on_that_port_only() -> None:
    guard = guarded(Names(shop_test=[["10.0.0.5"]], far_test=[["8.8.8.8"]]), "10.0.0.0/8:9000")
    assert isinstance(outcome(guard, "http://shop.test:9000/"), Target)
    assert isinstance(outcome(guard, "http://shop.test/"), Failure)
    assert isinstance(outcome(guard, "http://far.test:9000/"), Failure)


def test_callers_share_one_lookup_and_cancelling_one_does_not_affect_the_others() -> None:
    async def scene() -> None:
        release = asyncio.Event()
        asked = 0

        async def slow(host: str, port: int) -> Sequence[str]:
            nonlocal asked
            asked += 1
            await release.wait()
            return ["2606:4700::1", "8.8.8.8"]

        guard = Guard(resolver=slow, own=lambda ip: False)
        callers = [asyncio.create_task(guard.resolve(f"http://shop.test/{i}")) for i in range(10)]
        await asyncio.sleep(0)
        callers[0].cancel()
        await asyncio.sleep(0)
        release.set()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(
            isinstance(r, Target)
            and r.ip == "2606:4700::1"
            and r.pin == "shop.test:80:[2606:4700::1],8.8.8.8"
            for r in results[1:]
        )
        assert asked == 1

    asyncio.run(scene())


def test_the_cache_of_names_is_bounded() -> None:
    names = Names(**{f"h{i}_test": [["8.8.8.8"]] for i in range(20)})
    guard = guarded(names, max_names=5)
    for i in range(20):
        outcome(guard, f"http://h{i}.test/")
    outcome(guard, "http://h19.test/")
    assert len(names.asked) == 20
    outcome(guard, "http://h0.test/")
    assert len(names.asked) == 21


def test_the_peer_must_be_one_of_the_checked_addresses() -> None:
    guard = Guard(parse_allow("127.0.0.1:8000"), own=lambda ip: False)
    target = Target("http", "shop.test", 80, ("8.8.8.8", "2606:4700::1"))
    guard.check_peer("8.8.8.8", 80, target)
    guard.check_peer("2606:4700::1", 80, target)
    guard.check_peer("127.0.0.1", 8000)
    guard.check_peer("1.1.1.1", 443)
    elsewhere = [
        ("8.8.4.4", 80, target),
        ("8.8.8.8", 443, target),
        ("127.0.0.1", 80, target),
        ("127.0.0.1", 80, None),
        ("8.8.8.8", 22, None),
        ("", 80, None),
    ]
    for ip, port, wanted in elsewhere:
        with pytest.raises(Failure, match="forbidden address"):
            guard.check_peer(ip, port, wanted)


def test_a_proxy_may_use_any_port_but_no_private_address() -> None:
    guard = guarded(Names(proxy_test=[["8.8.8.8"]], inside_test=[["10.0.0.1"]]), "127.0.0.1:3128")

    async def scene() -> None:
        assert (await guard.resolve_proxy("proxy.test", 1080, scheme="socks5")).ip == "8.8.8.8"
        assert (await guard.resolve_proxy("127.0.0.1", 3128)).ip == "127.0.0.1"
        for host, port in (
            ("inside.test", 1080),
            ("127.0.0.1", 3129),
            ("::1", 3128),
            ("0x7f.1", 1080),
            ("a b", 1),
        ):
            with pytest.raises(Failure):
                await guard.resolve_proxy(host, port)
        with pytest.raises(Failure):  # the port is allowed for proxies only
            await guard.resolve("http://proxy.test:1080/")

    asyncio.run(scene())


def test_addresses_of_this_machine_are_recognised() -> None:
    assert is_own("127.0.0.1")
    assert not is_own("8.8.8.8")


def test_the_system_resolver_finds_localhost_and_the_guard_refuses_it() -> None:
    guard = Guard()
    try:
        result = outcome(guard, "http://localhost/")
    finally:
        guard.close()
    assert isinstance(result, Failure)
    assert result.reason == "forbidden address: not a public address"
