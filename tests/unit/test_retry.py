"""Decisions after a failure: budgets, back-off and Retry-After."""

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
def test_an_event_is_dead_after_three_retries(stage: str) -> None:
    assert [judge(ErrorClass.TRANSIENT, n, stage=stage).dead for n in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("kind", [ErrorClass.PERMANENT, ErrorClass.NOT_FOUND, ErrorClass.POISON])
def test_permanent_and_poison_failures_are_not_retried(kind: ErrorClass) -> None:
    assert judge(kind, 0).dead


def test_an_internal_failure_is_never_charged_and_never_makes_an_event_dead() -> None:
    for failures in (0, 3, 1000):
        d = judge(ErrorClass.OURS, failures, age=1e9, max_age=1.0)
        assert (d.dead, d.charged) == (False, False)
        assert 0 < d.delay <= 30.0


def test_a_throttled_event_has_a_larger_budget_than_a_failing_one() -> None:
    assert not judge(ErrorClass.THROTTLED, 3).dead
    assert judge(ErrorClass.THROTTLED, 6).dead


def test_a_blocked_event_waits_longer_and_uses_the_next_pool() -> None:
    assert judge(ErrorClass.BLOCKED, 0).delay == 30.0
    assert turns(TABLE, "fetch", {"blocked": 2, "transient": 3, "throttled": 1}) == 2
    assert (
        turns(table(base=10.0, cap=600.0, budget=3, next_pool=False), "fetch", {"blocked": 2}) == 0
    )


def test_the_back_off_doubles_up_to_its_limit() -> None:
    wide = table(base=10.0, cap=600.0, budget=100)
    delays = [
        decide(wide, "fetch", ErrorClass.TRANSIENT, failures=n, after=None, jitter=0.0).delay
        for n in (0, 1, 2, 5, 6, 50, 99)
    ]
    assert delays == [10.0, 20.0, 40.0, 320.0, 600.0, 600.0, 600.0]


def test_a_retry_after_replaces_the_back_off() -> None:
    assert judge(ErrorClass.THROTTLED, 0, after=3600.0).delay == 3600.0
    assert judge(ErrorClass.TRANSIENT, 2, after=0.0).delay == 0.0
    assert judge(ErrorClass.THROTTLED, 0, after=100.0, jitter=0.999).delay >= 100.0, (
        "never before the Retry-After"
    )
    assert judge(ErrorClass.PERMANENT, 0, after=5.0).dead


def test_an_event_older_than_max_age_is_dead() -> None:
    assert not judge(ErrorClass.THROTTLED, 0, age=99.0, max_age=100.0).dead
    assert judge(ErrorClass.THROTTLED, 0, age=101.0, max_age=100.0).dead
    assert not judge(ErrorClass.THROTTLED, 0, age=1e9, max_age=0.0).dead


def test_a_stage_may_have_its_own_policy() -> None:
    policies = {**TABLE, ("extract", ErrorClass.PERMANENT): Policy(budget=1, base=1.0, cap=1.0)}
    assert not decide(
        policies, "extract", ErrorClass.PERMANENT, failures=0, after=None, jitter=0.0
    ).dead
    assert decide(policies, "fetch", ErrorClass.PERMANENT, failures=0, after=None, jitter=0.0).dead


def test_every_error_class_has_a_policy() -> None:
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
