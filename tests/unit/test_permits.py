"""Shares of permits by registrable domain, and the lowest accepted speed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.permits import Turns, reserved, reserved_from_slow
from penstock.rules.speed import HIGHEST, LONGEST, LOWEST, SHORTEST, Scarcity, scarcity

totals = st.integers(2, 300)


def fill(
    total: int,
    demand: Mapping[str, int],
    slow: Collection[str] = (),
    held: Counter[str] | None = None,
) -> Counter[str]:
    """Start requests that never end, until no domain may start another. Return the permits."""
    held = Counter() if held is None else held
    left = {domain: n for domain, n in demand.items() if n}
    turns = Turns(total, held, left, slow)
    while (domain := turns.next(total - held.total())) is not None:
        turns.start(domain)
        held[domain] += 1
        left[domain] -= 1
        if left[domain]:
            turns.again(domain)
    return held


@pytest.mark.parametrize(("hosts", "each"), [(34, 8), (1, 272), (100, 8), (224, 1)])
def test_endless_requests_leave_permits_for_a_domain_without_requests(
    hosts: int, each: int
) -> None:
    held = fill(256, {f"slow{n}": each for n in range(hosts)})
    assert fill(256, {"healthy": 8}, held=held)["healthy"] >= 1


@given(totals, st.integers(1, 300), st.integers(1, 50))
def test_a_domain_without_requests_finds_a_permit(total: int, domains: int, each: int) -> None:
    domains = min(domains, total - reserved(total))
    held = fill(total, {str(n): each for n in range(domains)})
    assert held.total() <= total
    assert fill(total, {"new": 1}, held=held)["new"] == 1


@given(totals, st.integers(1, 1000), st.integers(1, 50))
def test_slow_domains_leave_a_quarter_of_the_permits(total: int, domains: int, each: int) -> None:
    demand = {str(n): each for n in range(domains)}
    held = fill(total, demand, slow=demand)
    assert total - held.total() >= reserved_from_slow(total)


@given(totals, st.dictionaries(st.text("abcdefgh", max_size=2), st.integers(1, 300), min_size=1))
def test_permits_beyond_the_reserve_are_used_and_shared_evenly(
    total: int, demand: dict[str, int]
) -> None:
    held = fill(total, demand)
    unfinished = [domain for domain, n in demand.items() if held[domain] < n]
    if unfinished:
        assert total - held.total() <= reserved(total)
        fewest = min(held[domain] for domain in unfinished)
        assert max(held.values()) <= fewest + 1


def test_slow_domains_that_hold_their_limit_do_not_stop_others() -> None:
    slow = [f"slow{n}" for n in range(34)]
    held = fill(256, dict.fromkeys(slow, 8), slow=slow)
    assert held.total() == 192
    demand = {**dict.fromkeys(slow, 8), "healthy": 8}
    assert fill(256, demand, slow=slow, held=held)["healthy"] == 8


@pytest.mark.parametrize("total", [1, 2, 3, 8])
def test_few_permits_still_start_requests(total: int) -> None:
    for slow in ((), ("a", "b")):
        assert fill(total, {"a": 9, "b": 9}, slow=slow).total() >= 1


def test_34_subdomains_share_the_permits_of_one_domain_when_others_wait() -> None:
    """The subdomains are one domain, which gets a permit as often as the other one."""
    held = fill(256, {"big": 1000})
    waiting = deque(["big"] * 1000 + ["other"] * 1000)
    for _ in range(500):  # the longest requests of the big domain end, and permits are given again
        held["big"] -= 1
        held = fill(256, Counter(waiting), held=held)
    assert abs(held["big"] - held["other"]) <= 1


# -- speed -----------------------------------------------------------------------------------------

others = frozenset({"other.test", "third.test"})


def test_a_slow_request_is_accepted_while_permits_are_free_or_no_domain_waits() -> None:
    assert scarcity(256, 33, 32, 223, others) is None
    assert scarcity(256, 0, 32, 256, frozenset()) is None
    assert scarcity(256, 0, 32, 128, others) is None, "most permits belong to fast requests"


def test_only_requests_of_other_domains_than_the_waiting_one_are_affected() -> None:
    alone = Scarcity(1000, 5, frozenset({"big.test"}))
    assert not alone.affects("big.test")
    assert alone.affects("slow.test")
    assert Scarcity(1000, 5, others).affects("other.test")


def test_34_hosts_with_300_bytes_a_second_are_too_slow() -> None:
    found = scarcity(256, 32, 32, 224, others)
    assert found is not None
    assert found.speed > 300
    assert found.span < 10
    assert found.needed == 1, "one more than the reserved permits"


@given(totals, st.data())
def test_the_lowest_speed_rises_with_the_share_of_long_requests(
    total: int, data: st.DataObject
) -> None:
    kept = reserved(total)
    fewer, more = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    a, b = (scarcity(total, 0, kept, long, others) for long in (fewer, more))
    for found in (a, b):
        if found is not None:
            assert LOWEST <= found.speed <= HIGHEST + 0.01
            assert SHORTEST - 0.01 <= found.span <= LONGEST
    if a is not None:
        assert b is not None
        assert b.speed >= a.speed
        assert b.span <= a.span
