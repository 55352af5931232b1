"""Which event may fetch a URL now: the table of cases, and properties for all times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.freshness import Claim, Delay, Duplicate, Take, Verdict, decide

BEGAN = 1000.0
FETCHING, DONE = Claim("o", BEGAN, False), Claim("o", BEGAN, True)
WAITING = Claim("o", 0.0, False)


def judge(
    claim: Claim | None,
    *,
    me: str = "me",
    accepted: float,
    now: float | None = None,
    drop: bool = False,
    other_data: bool = False,
    removed: bool = False,
) -> Verdict:
    return decide(
        claim,
        me,
        accepted=accepted,
        now=accepted if now is None else now,
        window=60.0,
        settle=2.0,
        drop=drop,
        other_data=other_data,
        removed=removed,
    )


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(
    ("claim", "me", "accepted", "verdict"),
    [
        (None, "me", 1.0, Take()),
        (FETCHING, "o", BEGAN + 30, Take()),
        (DONE, "o", BEGAN + 3000, Take()),
        (WAITING, "me", BEGAN + 3000, Duplicate("o")),
        (FETCHING, "me", BEGAN - 1, Duplicate("o")),
        (DONE, "me", BEGAN + 2, Duplicate("o")),
        (DONE, "me", BEGAN + 60, Take()),
        (DONE, "me", BEGAN + 61, Take()),
        (Claim("o", BEGAN, True, "n"), "me", BEGAN + 61, Duplicate("n")),
        (Claim("o", BEGAN, True, "me"), "me", BEGAN + 61, Take()),
    ],
)
def test_before_the_get_and_after_the_window_both_modes_decide_alike(
    claim: Claim | None, me: str, accepted: float, verdict: Verdict, drop: bool
) -> None:
    assert judge(claim, me=me, accepted=accepted, drop=drop) == verdict


@pytest.mark.parametrize(
    ("claim", "after", "delayed", "dropped"),
    [
        (DONE, 2.001, Delay(BEGAN + 60, True), Duplicate("o")),
        (FETCHING, 59.0, Delay(BEGAN + 60, True), Duplicate("o")),
        (FETCHING, 90.0, Delay(BEGAN + 91, True), Duplicate("o")),
        (Claim("o", BEGAN, True, "n"), 30.0, Duplicate("n"), Duplicate("o")),
    ],
)
def test_an_event_inside_the_window_is_delayed_to_its_end_or_dropped(
    claim: Claim, after: float, delayed: Verdict, dropped: Verdict
) -> None:
    assert judge(claim, accepted=BEGAN + after) == delayed
    assert judge(claim, accepted=BEGAN + after, drop=True) == dropped


@pytest.mark.parametrize(
    ("ended", "now", "verdict"),
    [
        (True, BEGAN + 59, Delay(BEGAN + 60, False)),
        (True, BEGAN + 60, Take()),
        (False, BEGAN + 59, Delay(BEGAN + 60, False)),
        (False, BEGAN + 100, Delay(BEGAN + 101, False)),
    ],
)
def test_the_delayed_event_is_fetched_after_the_window_and_the_owner_have_ended(
    ended: bool, now: float, verdict: Verdict
) -> None:
    assert judge(Claim("o", BEGAN, ended, "me"), accepted=BEGAN + 5, now=now) == verdict


claims = st.none() | st.builds(
    Claim,
    st.sampled_from(["o", "me"]),
    st.sampled_from([0.0]) | st.floats(1, 1000),
    st.booleans(),
    st.none() | st.sampled_from(["n", "me"]),
)


@given(claims, st.floats(1, 2000), st.floats(0, 2000), st.floats(0, 100), st.booleans())
def test_a_delay_ends_in_the_future_and_no_event_duplicates_itself(
    claim: Claim | None, accepted: float, later: float, window: float, drop: bool
) -> None:
    verdict = decide(
        claim, "me", accepted=accepted, now=accepted + later, window=window, settle=2.0, drop=drop
    )
    if isinstance(verdict, Delay):
        assert verdict.until > accepted + later
    if isinstance(verdict, Duplicate):
        assert verdict.of != "me"


@given(claims, st.floats(1, 2000), st.floats(0, 2000))
def test_no_other_event_fetches_a_url_before_the_window_has_ended(
    claim: Claim | None, accepted: float, later: float
) -> None:
    now = accepted + later
    if (
        decide(claim, "me", accepted=accepted, now=now, window=60.0, settle=2.0) == Take()
        and claim is not None
        and claim.owner != "me"
    ):
        assert claim.ended
        assert now >= claim.began + 60.0


@pytest.mark.parametrize(
    ("claim", "after", "delayed", "dropped"),
    [
        (DONE, 1.0, Delay(BEGAN + 60, True), Duplicate("o")),
        (DONE, 60.0, Take(), Take()),
        (Claim("o", BEGAN, True, "n"), 1.0, Duplicate("n"), Duplicate("o")),
    ],
)
def test_an_event_with_other_data_than_an_ended_owner_read_is_a_later_event(
    claim: Claim, after: float, delayed: Verdict, dropped: Verdict
) -> None:
    at = BEGAN + after
    assert judge(claim, accepted=at, other_data=True) == delayed
    assert judge(claim, accepted=at, other_data=True, drop=True) == dropped


@pytest.mark.parametrize(
    ("claim", "after", "verdict"),
    [
        (WAITING, -1.0, Duplicate("o")),
        (FETCHING, -1.0, Duplicate("o")),
        (FETCHING, 1.0, Delay(BEGAN + 60, True)),
        (DONE, -1.0, Delay(BEGAN + 60, True)),
        (DONE, 1.0, Delay(BEGAN + 60, True)),
        (Claim("o", BEGAN, True, "n"), 1.0, Duplicate("n")),
    ],
)
def test_a_removal_is_a_duplicate_only_of_a_visit_that_considers_it(
    claim: Claim, after: float, verdict: Verdict
) -> None:
    assert judge(claim, accepted=BEGAN + after, removed=True) == verdict
