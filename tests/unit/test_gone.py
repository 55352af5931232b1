"""Gone pages: the meaning of a 404 or 410 for a URL, and removals that wait."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.gone import (
    HOUR,
    MIN_URLS,
    Absence,
    HostAbsences,
    Limits,
    Past,
    decide,
    judge,
    says_removed,
)

DEFAULT = Limits()
NOW = 1_000_000.0
PAGE, ONCE, TWICE = Past(""), Past("missing", 1), Past("missing", 2)


@pytest.mark.parametrize(
    ("past", "status", "removed", "absence"),
    [
        (None, 404, False, Absence("not_found")),
        (None, 410, False, Absence("not_found")),
        (None, 404, True, Absence("not_found")),
        (PAGE, 404, False, Absence("missing", 1, 2)),
        (ONCE, 404, False, Absence("leaving", 2, 2)),
        (TWICE, 404, False, Absence("leaving", 3, 2)),
        (PAGE, 410, False, Absence("leaving", 1, 1)),
        (ONCE, 410, False, Absence("leaving", 2, 1)),
        (PAGE, 404, True, Absence("leaving", 1, 1)),
        (Past("gone"), 404, False, Absence("gone")),
        (Past("gone", 2), 410, True, Absence("gone")),
    ],
)
def test_an_absent_page_is_judged_by_the_newest_success_of_its_url(
    past: Past | None, status: int, removed: bool, absence: Absence
) -> None:
    assert judge(DEFAULT, past, status=status, removed=removed) == absence


@pytest.mark.parametrize(("after", "visits"), [(1, 1), (2, 2), (5, 5)])
def test_a_url_leaves_at_the_visit_that_gone_after_names(after: int, visits: int) -> None:
    limits, past = Limits(after=after), PAGE
    for visit in range(1, visits + 1):
        found = judge(limits, past, status=404, removed=False)
        assert found == Absence("leaving" if visit == after else "missing", visit, after)
        past = Past("missing", found.visits)


@pytest.mark.parametrize(
    ("data", "removed"),
    [
        ({}, False),
        ({"change": "removed"}, True),
        ({"change": "new"}, False),
        ({"_cdc": {"op": "d"}}, True),
        ({"_cdc": {"op": "delete"}}, True),
        ({"_cdc": {"op": "update"}}, False),
        ({"_cdc": "d"}, False),
        ({"removed": True}, False),
    ],
)
def test_sitemaps_and_deleted_rows_report_a_removal(data: dict[str, Any], removed: bool) -> None:
    assert says_removed(data) is removed


# 20 known URLs, of which 8 are absent. The last visit was a second ago.
BURST = HostAbsences(
    known=20, absent=8, gone=0, newest=NOW - 1, oldest=NOW - 10, held=False, approved_until=0.0
)


@pytest.mark.parametrize(
    ("change", "idle", "decision"),
    [
        ({}, False, "wait"),
        ({"absent": 1}, False, "wait"),
        ({"newest": NOW - 60}, False, "hold"),
        ({}, True, "hold"),
        ({"absent": 6}, True, "remove"),  # exactly 30 %
        ({"absent": 7}, True, "hold"),
        ({"absent": 6, "newest": NOW - 60}, False, "remove"),
        ({"absent": 6, "oldest": NOW - HOUR}, False, "remove"),  # the host never settles
        ({"absent": 7, "oldest": NOW - HOUR}, False, "hold"),
        ({"held": True}, True, "hold"),
        ({"held": True, "absent": 1, "newest": 0.0}, False, "hold"),
        ({"approved_until": NOW + 1}, False, "remove"),
        ({"approved_until": NOW}, True, "hold"),
        ({"known": 13, "absent": 1, "gone": 7}, True, "hold"),  # 8 of 20 in this hour
        ({"known": 14, "absent": 0, "gone": 6}, True, "remove"),
        ({"known": 3, "absent": 3}, True, "remove"),  # too few for a share
        ({"known": MIN_URLS, "absent": MIN_URLS}, True, "hold"),
        ({"known": 0, "absent": MIN_URLS}, True, "hold"),
    ],
)
def test_removals_wait_until_the_host_has_settled_and_are_held_above_the_limit(
    change: dict[str, Any], idle: bool, decision: Literal["wait", "hold", "remove"]
) -> None:
    host = msgspec.structs.replace(BURST, **change)
    assert decide(DEFAULT, host, now=NOW, idle=idle) == decision


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000), st.floats(0, 1))
def test_without_approval_at_most_the_share_is_removed(
    known: int, absent: int, gone: int, share: float
) -> None:
    host = msgspec.structs.replace(BURST, known=known, absent=absent, gone=gone)
    if decide(Limits(share=share), host, now=NOW, idle=True) == "remove":
        assert absent + gone < MIN_URLS or absent + gone <= share * (known + gone)
