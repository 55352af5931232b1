"""The memory of request bodies: the oldest incomplete body is dropped, an untrusted one first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RequestRefused
from penstock.intake.bodies import Body, BodyBudget


class Reading:
    """A request that reads its body."""

    def __init__(self, budget: BodyBudget, trusted: bool, address: str = "192.0.2.1") -> None:
        self.budget, self.dropped = budget, False
        self.body: Body = budget.open(trusted, address, self._drop)

    def _drop(self) -> None:
        self.dropped = True

    def gets(self, size: int) -> bool:
        """Receive bytes. Return whether there is memory for them."""
        try:
            self.budget.add(self.body, b"x" * size)
        except RequestRefused:
            return False
        return True


def test_the_oldest_incomplete_body_is_dropped_for_a_new_one() -> None:
    budget = BodyBudget(100)
    first, second, third = (Reading(budget, True) for _ in range(3))
    assert first.gets(40)
    assert second.gets(40)
    assert third.gets(30)
    assert (first.dropped, second.dropped, third.dropped) == (True, False, False)
    assert budget.held == 70
    assert not first.gets(1)
    assert budget.held == 70, "the dropped body is not counted again"


def test_an_untrusted_body_is_dropped_before_an_older_trusted_one() -> None:
    budget = BodyBudget(100)
    trusted, untrusted, other = Reading(budget, True), Reading(budget, False), Reading(budget, True)
    assert trusted.gets(60)
    assert untrusted.gets(30)
    assert other.gets(20)
    assert (trusted.dropped, untrusted.dropped) == (False, True)


def test_untrusted_bodies_use_at_most_half_of_the_memory() -> None:
    budget = BodyBudget(100)
    trusted = Reading(budget, True)
    assert trusted.gets(10)
    untrusted = [Reading(budget, False) for _ in range(5)]
    assert all(each.gets(20) for each in untrusted)
    assert [each.dropped for each in untrusted] == [True, True, True, False, False]
    assert not trusted.dropped


def test_bodies_of_an_address_above_its_share_are_dropped_first() -> None:
    budget = BodyBudget(1600)  # 800 for untrusted bodies, 100 of them for one address
    sender = Reading(budget, False, "192.0.2.7")
    assert sender.gets(100)
    strangers = [Reading(budget, False) for _ in range(20)]
    assert all(stranger.gets(100) for stranger in strangers)
    assert [stranger.dropped for stranger in strangers] == [True] * 13 + [False] * 7
    assert sender.gets(0)
    assert not sender.dropped
    for each in (sender, *strangers):
        budget.close(each.body)
    assert not budget._addresses, "no memory of past addresses"


def test_the_oldest_body_is_dropped_if_no_address_is_above_its_share() -> None:
    budget = BodyBudget(1600)
    readings = [Reading(budget, False, f"192.0.2.{n}") for n in range(10)]
    assert all(reading.gets(100) for reading in readings)
    assert [reading.dropped for reading in readings] == [True] * 2 + [False] * 8


def test_a_complete_body_is_never_dropped_and_stays_counted() -> None:
    budget = BodyBudget(100)
    complete, late = Reading(budget, True), Reading(budget, True)
    assert complete.gets(80)
    assert budget.complete(complete.body) == b"x" * 80
    assert not late.gets(30)
    assert not complete.dropped
    assert budget.held == 80
    budget.close(complete.body)
    budget.close(complete.body)
    assert budget.held == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "add", "complete", "close"]), st.integers(0, 60)),
        max_size=60,
    )
)
def test_bodies_never_hold_more_than_the_limit(steps: list[tuple[str, int]]) -> None:
    budget, readings = BodyBudget(100), list[Reading]()
    done = set[Reading]()
    for what, n in steps:
        if what == "open" or not readings:
            readings.append(Reading(budget, n % 2 == 0, f"192.0.2.{n % 3}"))
            continue
        reading = readings[n % len(readings)]
        if what == "add" and reading not in done:
            reading.gets(n)
        elif what == "complete" and reading not in done and not reading.dropped:
            budget.complete(reading.body)
            done.add(reading)
        elif what == "close":
            budget.close(reading.body)
            done.add(reading)
        assert budget.held <= 100
        assert budget.held == sum(each.body.size for each in readings)
        assert sum(each.body.size for each in readings if not each.body.trusted) <= 50
    for reading in readings:
        budget.close(reading.body)
    assert budget.held == 0
    assert not budget._addresses


@pytest.mark.parametrize("trusted", [False, True])
def test_a_single_body_over_the_limit_is_dropped_itself(trusted: bool) -> None:
    reading = Reading(BodyBudget(100), trusted)
    assert not reading.gets(101)
    assert reading.dropped
