"""Limits of senders: rates, bounded tables of addresses, and addresses behind proxies."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules import senders
from penstock.rules.senders import (
    ADDRESS_BURST,
    MAX_ADDRESSES,
    TOTAL_BURST,
    TRUSTED_FOR,
    AddressLimits,
    RateLimiter,
    Unverified,
    address_group,
    sender,
)

NOW = 1_000.0
PROXIES = [ip_network("10.1.0.0/16"), ip_network("127.0.0.1"), ip_network("fd00::/8")]


# -- rates -----------------------------------------------------------------------------------------


@given(
    st.floats(0.1, 100),
    st.integers(1, 20),
    st.lists(st.floats(0, 2), min_size=1, max_size=200),
)
def test_no_window_has_more_requests_than_burst_and_rate(
    rate: float, burst: int, gaps: list[float]
) -> None:
    limiter, now, taken = RateLimiter(rate, burst), NOW, []
    for gap in gaps:
        now += gap
        early = limiter.early(now)
        assert limiter.wait(now) == early, "`early` returns what `wait` will return"
        if not early:
            taken.append(now)
    for i, first in enumerate(taken):
        for n, last in enumerate(taken[i:], 1):
            assert n <= burst + rate * (last - first) + 1e-6


def test_a_request_is_allowed_after_the_returned_wait() -> None:
    limiter = RateLimiter(2.0, 3)
    assert [limiter.wait(NOW) for _ in range(4)] == [0, 0, 0, 0.5]
    assert limiter.wait(NOW + 0.5) == 0


def test_one_address_does_not_use_the_rate_of_another() -> None:
    limits = AddressLimits(1.0, 2)
    assert [bool(limits.wait("a", NOW)) for _ in range(3)] == [False, False, True]
    assert limits.early("a", NOW)
    assert not limits.early("b", NOW)
    assert not limits.wait("b", NOW)


def test_a_table_of_addresses_forgets_the_address_that_was_silent_longest() -> None:
    limits = AddressLimits(0.001, 1, most=3)
    for address in ("a", "b", "c", "a", "d"):
        limits.wait(address, NOW)
    assert len(limits) == 3
    assert [bool(limits.early(address, NOW)) for address in "abcd"] == [True, False, True, True]


# -- requests without a valid signature ------------------------------------------------------------


def test_an_address_over_its_limit_does_not_use_the_total() -> None:
    unverified = Unverified()
    for _ in range(10 * TOTAL_BURST):
        unverified.charge("a", NOW)
    assert unverified.early("a", NOW) > 0
    assert unverified.early("b", NOW) == 0


def test_other_addresses_do_not_limit_the_body_of_a_signed_request() -> None:
    unverified = Unverified()
    for n in range(2 * TOTAL_BURST):
        unverified.charge(f"stranger{n}", NOW)
    assert unverified.charge("sender", NOW) > 0, "the total is used up"
    assert unverified.early("another sender", NOW) == 0


def test_all_addresses_together_have_a_limit() -> None:
    unverified = Unverified()
    allowed = [not unverified.charge(f"a{n}", NOW) for n in range(2 * TOTAL_BURST)]
    assert allowed == [True] * TOTAL_BURST + [False] * TOTAL_BURST


def test_an_address_is_known_for_an_hour_and_strangers_cannot_remove_it() -> None:
    unverified = Unverified()
    unverified.verified("a", NOW)
    for n in range(2 * MAX_ADDRESSES):
        unverified.charge(f"stranger{n}", NOW)
    assert unverified.is_known("a", NOW + TRUSTED_FOR - 1)
    assert not unverified.is_known("a", NOW + TRUSTED_FOR)
    assert not unverified.is_known("stranger1", NOW)


def test_many_addresses_use_bounded_memory() -> None:
    unverified = Unverified()
    for n in range(3 * MAX_ADDRESSES):
        unverified.charge(str(n), NOW + n)
        unverified.verified(str(n), NOW + n)
    assert len(unverified._addresses) == len(unverified._known) == MAX_ADDRESSES


def test_a_burst_of_one_address_is_within_the_total() -> None:
    assert ADDRESS_BURST * 2 <= TOTAL_BURST
    assert senders.ADDRESS_RATE * 2 <= senders.TOTAL_RATE


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("testclient", "testclient"),
    ],
)
def test_limits_count_an_ipv4_address_or_a_64_of_ipv6(text: str, group: str) -> None:
    assert address_group(text) == group


@pytest.mark.parametrize(
    ("peer", "forwarded", "found"),
    [
        ("192.0.2.1", ["198.51.100.7"], "192.0.2.1"),  # not a trusted proxy
        ("10.1.0.5", [], "10.1.0.5"),
        ("10.1.0.5", ["198.51.100.7"], "198.51.100.7"),
        ("::ffff:10.1.0.5", ["198.51.100.7"], "198.51.100.7"),
        ("10.1.0.5", ["203.0.113.9, 198.51.100.7"], "198.51.100.7"),  # the first one is a claim
        ("10.1.0.5", ["203.0.113.9", "198.51.100.7"], "198.51.100.7"),
        ("10.1.0.5", ["203.0.113.9, 198.51.100.7, 10.1.9.9"], "198.51.100.7"),
        ("10.1.0.5", ["junk, 198.51.100.7"], "198.51.100.7"),
        ("10.1.0.5", ["198.51.100.7, junk"], "10.1.0.5"),
        ("10.1.0.5", ["198.51.100.7, junk, 10.1.0.6"], "10.1.0.6"),
        ("10.1.0.5", ["10.1.0.6, 10.1.0.7"], "10.1.0.6"),
        ("10.1.0.5", [",,,"], "10.1.0.5"),
        ("fd00::1", ["2001:db8:1:2:3::1"], "2001:db8:1:2::/64"),
        ("", ["198.51.100.7"], ""),
    ],
)
def test_the_sender_is_the_last_address_that_is_not_a_trusted_proxy(
    peer: str, forwarded: list[str], found: str
) -> None:
    assert sender(peer, lambda: forwarded, PROXIES) == found


def test_without_trusted_proxies_the_header_is_not_read() -> None:
    def read() -> list[str]:
        raise AssertionError("the header was read")

    assert sender("127.0.0.1", read, []) == "127.0.0.1"


@given(st.lists(st.text(max_size=40), max_size=5))
def test_any_forwarded_header_gives_an_address(values: list[str]) -> None:
    assert sender("10.1.0.5", lambda: values, PROXIES)
