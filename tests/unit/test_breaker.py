"""The breaker: which share of dead events pauses a host, an extractor or the topic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import ErrorClass
from penstock.rules.breaker import (
    Limits,
    blamed,
    ended_and_dead,
    judge,
    main_cause,
    pauses_topic,
)
from penstock.rules.waiting import waiting

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


@pytest.mark.parametrize(
    ("stage", "error_class", "extractors", "expected"),
    [
        ("fetch", "blocked", (), ["host:h"]),
        ("fetch", "permanent", (), ["host:h"]),
        ("fetch", "not_found", (), []),
        ("extract", "permanent", ("product",), ["extractor:product"]),
        ("extract", "poison", ("a", "b"), ["extractor:a", "extractor:b"]),
        ("extract", "permanent", (), ["host:h"]),  # the stored page was deleted
        ("sink", "ours", (), ["host:h"]),
        ("fetch", "ours", (), ["host:h"]),
    ],
)
def test_a_dead_event_counts_against_its_host_or_its_extractor(
    stage: str, error_class: str, extractors: tuple[str, ...], expected: list[str]
) -> None:
    assert blamed(stage, error_class, "h", extractors) == expected


@given(st.sampled_from(["fetch", "extract", "sink"]), st.sampled_from(list(ErrorClass)))
def test_every_dead_event_counts_against_something_unless_its_url_was_not_found(
    stage: str, kind: ErrorClass
) -> None:
    found = blamed(stage, kind, "h", ("x",) if stage == "extract" else ())
    assert bool(found) is (kind is not ErrorClass.NOT_FOUND)


def test_the_main_cause_is_the_most_frequent_class_of_dead_events() -> None:
    assert main_cause({}) == ""
    assert main_cause({"": 100}) == ""
    assert main_cause({"": 100, "blocked": 3, "transient": 2}) == "blocked"
    assert main_cause({"transient": 2, "blocked": 2}) == "blocked"
    assert ended_and_dead({"": 100, "blocked": 3, "transient": 2}) == (105, 5)


@pytest.mark.parametrize(
    ("causes", "active", "expected"),
    [
        ([], 0, ""),
        (["blocked"], 1, ""),  # a pipeline with one host
        (["blocked"], 2, ""),
        (["blocked"] * 2, 2, "blocked"),
        (["blocked"] * 2, 4, "blocked"),
        (["blocked"] * 2, 5, ""),
        (["blocked"] * 4, 9, ""),
        (["blocked"] * 5, 1000, "blocked"),
        (["blocked", "transient"], 2, ""),  # half of the hosts, but not for the same cause
        (["blocked"] * 4 + ["transient"] * 4, 1000, ""),
        (["blocked"] * 4 + ["transient"] * 5, 1000, "transient"),
    ],
)
def test_five_hosts_or_half_of_the_active_hosts_pause_the_topic(
    causes: list[str], active: int, expected: str
) -> None:
    assert pauses_topic(causes, active) == expected


@given(st.lists(st.sampled_from(["blocked", "transient", "ours"])), st.integers(0, 100))
def test_one_paused_host_never_pauses_the_topic_and_one_more_never_resumes_it(
    causes: list[str], others: int
) -> None:
    active = len(causes) + others
    found = pauses_topic(causes, active)
    if len(causes) < 2:
        assert found == ""
    if found:
        assert causes.count(found) >= 2
        assert pauses_topic([*causes, found], active + 1) != ""


@pytest.mark.parametrize(
    ("cause", "what", "step"),
    [
        ("host:shop.example:8080", "host shop.example:8080", "domains resume shop.example:8080"),
        ("extractor:product", "extractor product", "penstock extractors resume product"),
        ("approval:shop.example", "shop.example", "penstock domains approve shop.example"),
        ("route:pool=residential", "pool=residential", "start a worker"),
        ("render", "renderer", "without render"),
        ("budget:pages:day", "page budget of this UTC day", "raise limits.pages_per_day"),
        ("budget:pages:host:a.example", "host a.example is used up", "limits.pages_per_host"),
        ("something new", "something new", "penstock events"),
    ],
)
def test_each_cause_of_a_delay_has_a_name_and_a_next_step(cause: str, what: str, step: str) -> None:
    found = waiting(cause, 3)
    assert what in found.what
    assert step in found.next_step
