"""The table of connections: which one is closed when there are too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.intake.connections import Connections

NOW = 100.0


def test_the_oldest_connection_that_waits_is_closed_for_a_new_one() -> None:
    table = Connections(3, 3)
    for n in range(4):
        table.add(n, f"192.0.2.{n}")
        table.wait(n)
    assert table.is_over(3)
    assert table.surplus(3, NOW) == [0]
    assert not table.is_over(3)


def test_a_connection_is_not_closed_while_its_request_is_processed() -> None:
    table = Connections(2, 2)
    for n in range(3):
        table.add(n, f"192.0.2.{n}")
        table.wait(n)
    table.work(0)
    assert table.surplus(2, NOW) == [1]
    table.work(2)
    table.add(3, "192.0.2.3")
    table.wait(3)
    assert table.surplus(3, NOW) == [3], "the others are busy, so the new one is closed"


def test_the_age_counts_from_the_last_response_and_not_from_new_bytes() -> None:
    table = Connections(2, 2)
    for n in range(2):
        table.add(n, f"192.0.2.{n}")
        table.wait(n)
    table.work(0)
    table.wait(0)  # the response is complete
    table.wait(1)  # a byte of a head that began before
    table.add(2, "192.0.2.2")
    table.wait(2)
    assert table.surplus(2, NOW) == [1]


def test_a_connection_just_after_its_response_is_not_closed() -> None:
    table = Connections(2, 2)
    for n in range(2):
        table.add(n, f"192.0.2.{n}")
        table.wait(n, NOW + 1)
    table.add(2, "192.0.2.2")
    table.wait(2)
    assert table.surplus(2, NOW) == [2]
    table.add(3, "192.0.2.3")
    table.wait(3)
    assert table.surplus(3, NOW + 2) == [0]


def test_an_address_at_its_limit_closes_only_its_own_connections() -> None:
    table = Connections(100, 2)
    table.add("healthy", "192.0.2.1")
    table.wait("healthy")
    for n in range(10):
        table.add(n, "192.0.2.2")
        table.wait(n)
        assert table.surplus(n, NOW) == ([n - 2] if n >= 2 else [])
    assert len(table) == 3


def test_a_burst_of_one_address_leaves_room_for_others_before_any_is_closed() -> None:
    table = Connections(256, 64)
    for n in range(1000):
        if not table.is_full("192.0.2.1"):
            table.add(n, "192.0.2.1")
    assert len(table) == 128
    assert not table.is_full("192.0.2.2")
    for n in range(1000, 2000):
        if not table.is_full(f"198.51.{n // 250}.{n % 250}"):
            table.add(n, f"198.51.{n // 250}.{n % 250}")
    assert len(table) == 512
    assert table.is_full("192.0.2.2")


def test_a_burst_closes_half_open_connections_and_none_of_its_own() -> None:
    table = Connections(256, 64)
    for n in range(64):
        table.add(n, "192.0.2.1")
        table.wait(n, NOW - 1)
    closed = []
    for n in range(100, 200):
        if table.is_full("192.0.2.1"):
            closed += table.surplus_of("192.0.2.1", NOW)
        assert not table.is_full("192.0.2.1")
        table.add(n, "192.0.2.1")
        table.wait(n, NOW + 0.01)
    assert closed == list(range(64))


def test_a_64_of_ipv6_counts_as_one_address_and_a_trusted_proxy_has_no_limit() -> None:
    table = Connections(100, 1, is_exempt=lambda address: address == "10.0.0.1")
    for n in range(2):
        table.add(n, f"2001:db8::{n}")
        table.wait(n)
    assert table.surplus(1, NOW) == [0]
    for n in range(10, 20):
        table.add(n, "10.0.0.1")
        table.wait(n)
        assert table.surplus(n, NOW) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "work", "wait", "remove"]),
            st.integers(0, 9),
            st.integers(0, 2),
        ),
        max_size=120,
    )
)
def test_only_busy_connections_exceed_the_limits(steps: list[tuple[str, int, int]]) -> None:
    table = Connections(5, 3)
    group: dict[int, int] = {}
    busy: set[int] = set()
    for what, n, address in steps:
        if what == "add" and n not in group:
            table.add(n, f"192.0.2.{address}")
            table.wait(n)
            group[n] = address
        elif n not in group:
            continue
        elif what == "work":
            table.work(n)
            busy.add(n)
        elif what == "wait":
            table.wait(n)
            busy.discard(n)
        elif what == "remove":
            table.remove(n)
            busy.discard(n)
            del group[n]
            continue
        for victim in table.surplus(n, NOW):
            assert victim not in busy
            del group[victim]
        assert len(table) == len(group)
        assert len(group) <= 5 or set(group) == busy
        own = [m for m in group if group[m] == group.get(n)]
        assert len(own) <= 3 or set(own) <= busy
    for n in group:
        table.remove(n)
    assert len(table) == 0
    assert table._waiting == {None: {}}, "no memory of past addresses"
    assert not table._counts
