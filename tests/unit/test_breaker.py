"""The breaker: which share of dead events pauses a topic, and which only causes an alert."""

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
        (1000, 20, ""),  # exactly 2 %
        (1000, 21, "alert"),
        (1, 1, "alert"),  # all dead, but too few events
        (49, 49, "alert"),
        (50, 50, "open"),
        (250, 50, "alert"),  # exactly 20 %
        (249, 50, "open"),
        (1_000_000, 199_999, "alert"),
        (1_000_000, 200_001, "open"),
    ],
)
def test_over_20_percent_and_50_dead_events_open_the_breaker_and_2_percent_alert(
    ended: int, dead: int, verdict: str
) -> None:
    assert judge(DEFAULT, ended, dead) == verdict


def test_the_limits_of_the_breaker_can_be_set() -> None:
    assert judge(Limits(dead_share=0.5, at_least=1), 2, 1) == "alert"
    assert judge(Limits(dead_share=0.5, at_least=1), 3, 2) == "open"
    assert judge(Limits(alert_share=0.5), 2, 1) == ""


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_one_more_dead_event_never_lowers_the_verdict(ended: int, dead: int) -> None:
    dead = min(dead, ended)
    rank = {"": 0, "alert": 1, "open": 2}
    assert rank[judge(DEFAULT, ended + 1, dead + 1)] >= rank[judge(DEFAULT, ended, dead)]
