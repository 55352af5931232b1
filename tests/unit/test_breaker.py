"""When a topic is paused, and when its deaths are only worth an alert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.breaker import Limits, judge

DEFAULT = Limits()


@pytest.mark.parametrize(
    ("ended", "dead", "verdict"),
    [
        (0, 0, ""),
        (1000, 0, ""),
        (1000, 20, ""),  # two in a hundred exactly
        (1000, 21, "alert"),
        (1, 1, "alert"),  # everything, but too little to say
        (49, 49, "alert"),
        (50, 50, "open"),
        (250, 50, "alert"),  # a fifth exactly
        (249, 50, "open"),
        (1_000_000, 199_999, "alert"),
        (1_000_000, 200_001, "open"),
    ],
)
def test_more_than_a_fifth_and_at_least_fifty_open_it_and_two_in_a_hundred_alert(
    ended: int, dead: int, verdict: str
) -> None:
    assert judge(DEFAULT, ended, dead) == verdict


def test_the_limits_can_be_set() -> None:
    assert judge(Limits(dead_share=0.5, at_least=1), 2, 1) == "alert"
    assert judge(Limits(dead_share=0.5, at_least=1), 3, 2) == "open"
    assert judge(Limits(alert_share=0.5), 2, 1) == ""


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_one_more_death_never_calms_it(ended: int, dead: int) -> None:
    dead = min(dead, ended)
    rank = {"": 0, "alert": 1, "open": 2}
    assert rank[judge(DEFAULT, ended + 1, dead + 1)] >= rank[judge(DEFAULT, ended, dead)]
