"""What a failure leads to: budgets, back-off, and the wishes of the other side."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import ErrorClass
from penstock.rules.retry import Decision, Policy, decide, table, turns

TABLE = table(base=10.0, cap=600.0, budget=3)
RETRIED = (ErrorClass.TRANSIENT, ErrorClass.THROTTLED, ErrorClass.BLOCKED)


def judge(
    kind: ErrorClass,
    failures: int,
    *,
    stage: str = "fetch",
    after: float | None = None,
    jitter: float = 0.0,
    **more: Any,
) -> Decision:
    return decide(TABLE, stage, kind, failures=failures, after=after, jitter=jitter, **more)


@pytest.mark.parametrize("stage", ["fetch", "extract", "sink", "something new"])
def test_three_retries_so_four_attempts(stage: str) -> None:
    assert [judge(ErrorClass.TRANSIENT, n, stage=stage).dead for n in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("kind", [ErrorClass.PERMANENT, ErrorClass.POISON])
def test_what_will_not_get_better_is_not_tried_again(kind: ErrorClass) -> None:
    assert judge(kind, 0).dead


def test_our_own_fault_spends_nobodys_budget_and_never_kills() -> None:
    for failures in (0, 3, 1000):
        d = judge(ErrorClass.OURS, failures, age=1e9, max_age=1.0)
        assert (d.dead, d.charged) == (False, False)
        assert 0 < d.delay <= 30.0


def test_a_host_that_asks_for_patience_gets_more_of_it_than_one_that_fails() -> None:
    assert not judge(ErrorClass.THROTTLED, 3).dead
    assert judge(ErrorClass.THROTTLED, 6).dead


def test_a_block_waits_longer_and_changes_the_route() -> None:
    assert judge(ErrorClass.BLOCKED, 0).delay == 30.0
    assert turns(TABLE, "fetch", {"blocked": 2, "transient": 3, "throttled": 1}) == 2
    assert (
        turns(table(base=10.0, cap=600.0, budget=3, next_pool=False), "fetch", {"blocked": 2}) == 0
    )


def test_the_back_off_doubles_up_to_its_cap() -> None:
    wide = table(base=10.0, cap=600.0, budget=100)
    delays = [
        decide(wide, "fetch", ErrorClass.TRANSIENT, failures=n, after=None, jitter=0.0).delay
        for n in (0, 1, 2, 5, 6, 50, 99)
    ]
    assert delays == [10.0, 20.0, 40.0, 320.0, 600.0, 600.0, 600.0]


def test_the_wish_of_the_other_side_wins_in_both_directions() -> None:
    assert judge(ErrorClass.THROTTLED, 0, after=3600.0).delay == 3600.0
    assert judge(ErrorClass.TRANSIENT, 2, after=0.0).delay == 0.0
    assert judge(ErrorClass.THROTTLED, 0, after=100.0, jitter=0.999).delay >= 100.0, (
        "never before it asked for"
    )
    assert judge(ErrorClass.PERMANENT, 0, after=5.0).dead


def test_an_event_that_was_put_off_too_long_ends() -> None:
    assert not judge(ErrorClass.THROTTLED, 0, age=99.0, max_age=100.0).dead
    assert judge(ErrorClass.THROTTLED, 0, age=101.0, max_age=100.0).dead
    assert not judge(ErrorClass.THROTTLED, 0, age=1e9, max_age=0.0).dead


def test_a_stage_may_have_a_policy_of_its_own() -> None:
    policies = {**TABLE, ("extract", ErrorClass.PERMANENT): Policy(budget=1, base=1.0, cap=1.0)}
    assert not decide(
        policies, "extract", ErrorClass.PERMANENT, failures=0, after=None, jitter=0.0
    ).dead
    assert decide(policies, "fetch", ErrorClass.PERMANENT, failures=0, after=None, jitter=0.0).dead


def test_every_class_has_a_policy() -> None:
    for kind in ErrorClass:
        judge(kind, 0)


@given(
    st.sampled_from(list(ErrorClass)),
    st.integers(0, 10_000),
    st.none() | st.floats(0, 1e6),
    st.floats(0, 1, exclude_max=True),
)
def test_a_delay_is_finite_and_never_negative_and_jitter_takes_at_most_half(
    kind: ErrorClass, failures: int, after: float | None, jitter: float
) -> None:
    d, plain = judge(kind, failures, after=after, jitter=jitter), judge(kind, failures, after=after)
    assert d.dead == plain.dead
    if after is None or kind is ErrorClass.OURS:
        assert plain.delay / 2 <= d.delay <= plain.delay <= 600.0
    elif not d.dead:
        assert after <= d.delay <= after * 1.05
