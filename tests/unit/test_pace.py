"""Slots of a host: the rate limit in every window, blocks, throttling and recovery."""

from __future__ import annotations

import math
from bisect import bisect_right

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.rules.pace import (
    MAX_CRAWL_DELAY,
    MAX_PENALTY,
    MAX_RETRY_AFTER,
    RECOVERY,
    HostState,
    Limits,
    held_until,
    holds,
    interval,
    limited,
    parse_rate,
    parse_retry_after,
    report,
    reserve,
)

NOW = 1_800_000_000.0


def exceeds_rate(slots: list[float], gap: float, burst: int) -> bool:
    """Return True if a window [s, s+W] has more than burst + W/gap slots.

    Only windows that start and end with a slot must be checked.
    """
    s = sorted(slots)
    return any(
        s[j] - s[i] < (j - i + 1 - burst) * gap - 1e-5
        for i in range(len(s))
        for j in range(i, len(s))
    )


calls = st.lists(
    st.tuples(
        st.floats(0, 5), st.integers(0, 6), st.lists(st.floats(0, 1, exclude_max=True), max_size=3)
    ),
    max_size=12,
)


@given(
    calls, st.floats(0.05, 50), st.integers(1, 5), st.floats(0, 1), st.none() | st.floats(0.01, 3)
)
@example([(0.0, 3, [0.9, 0.0]), (0.0, 3, [])], 1.0, 3, 1.0, None)
def test_no_window_has_more_slots_than_rate_and_burst_allow(
    steps: list[tuple[float, int, list[float]]],
    rate: float,
    burst: int,
    spread: float,
    delay: float | None,
) -> None:
    limits, state, now, given_out = (
        Limits(rate=rate, burst=burst, jitter=spread),
        HostState(crawl_delay=delay),
        NOW,
        [],
    )
    for wait, n, jitter in steps:
        now += wait
        state, slots = reserve(state, limits, now, n, jitter)
        assert len(slots) == n
        assert all(slot >= now for slot in slots)
        given_out += slots
    assert not exceeds_rate(given_out, 1 / rate, burst)
    if delay:
        assert not exceeds_rate(given_out, delay, 1)


@given(
    calls,
    st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from([429, 503]), st.none() | st.floats(0, 20)),
        max_size=4,
    ),
)
def test_a_block_delays_later_slots_and_voids_earlier_ones(
    steps: list[tuple[float, int, list[float]]], blows: list[tuple[int, int, float | None]]
) -> None:
    limits, state, now, sent, blocks = Limits(rate=2.0, burst=3), HostState(), NOW, [], []
    for i, (wait, n, jitter) in enumerate(steps):
        now += wait
        for at, status, after in blows:
            if at == i:
                state = report(state, limits, now, status, after)
                blocks.append((now, state.blocked_until))
        state, slots = reserve(state, limits, now, n, jitter)
        assert all(slot >= state.blocked_until for slot in slots)
        assert all(holds(state, slot) for slot in slots)
        sent += [(now, slot) for slot in slots]
    for start, end in blocks:
        for given_at, slot in sent:
            if start < slot < end and given_at < start:
                assert not holds(state, slot)


def test_a_rate_of_two_gives_a_slot_each_half_second_and_jitter_only_delays() -> None:
    limits = Limits(rate=2.0, jitter=0.1)
    state, slots = reserve(HostState(), limits, NOW, 4)
    assert slots == [NOW, NOW + 0.5, NOW + 1.0, NOW + 1.5]
    state, later = reserve(state, limits, NOW, 2, (0.5, 0.0))
    assert later == pytest.approx([NOW + 2.025, NOW + 2.525])
    assert reserve(state, limits, NOW + 60, 1)[1] == [NOW + 60]


def test_a_burst_gets_its_slots_immediately_even_after_a_long_idle_time() -> None:
    limits = Limits(rate=1.0, burst=3)
    state, slots = reserve(HostState(), limits, NOW, 5)
    assert slots == [NOW, NOW, NOW, NOW + 1, NOW + 2]
    assert reserve(state, limits, NOW + 1000, 5)[1] == [NOW + 1000] * 3 + [NOW + 1001, NOW + 1002]


def test_without_a_rate_slots_are_immediate_unless_the_host_limits_them() -> None:
    free = Limits(rate=None)
    assert reserve(HostState(), free, NOW, 3, (0.5,)) == (HostState(), [NOW] * 3)
    assert reserve(HostState(rate=math.inf), Limits(), NOW, 2)[1] == [NOW] * 2
    assert reserve(HostState(crawl_delay=2.0), free, NOW, 3)[1] == [NOW, NOW + 2, NOW + 4]
    assert reserve(HostState(blocked_until=NOW + 5), free, NOW, 2)[1] == [NOW + 5] * 2
    slow = report(HostState(), free, NOW, 429)
    slots = reserve(slow, free, NOW, 3)[1]
    assert slots[0] > NOW
    assert slots[2] > slots[1] > slots[0]


def test_host_limits_override_defaults_and_a_crawl_delay_only_lengthens_them() -> None:
    assert interval(HostState(rate=4.0), Limits(rate=1.0)) == 0.25
    assert interval(HostState(rate=4.0, crawl_delay=10.0), Limits()) == 10.0
    assert interval(HostState(crawl_delay=0.1), Limits(rate=1.0)) == 1.0
    assert interval(HostState(crawl_delay=1e9), Limits()) == MAX_CRAWL_DELAY
    assert reserve(HostState(burst=2), Limits(), NOW, 2)[1] == [NOW, NOW]
    assert reserve(HostState(burst=9, crawl_delay=5.0), Limits(), NOW, 2)[1] == [NOW, NOW + 5]


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_blocks_the_host_and_never_shortens_a_block(
    status: int,
) -> None:
    limits = Limits()
    state, early = reserve(HostState(), limits, NOW, 3)
    state = report(state, limits, NOW, status, 5.0)
    assert state.blocked_until == NOW + 5
    assert state.penalty == 1.0
    assert not any(holds(state, slot) for slot in early)
    assert report(state, limits, NOW + 1, status, 1.0).blocked_until == NOW + 5
    assert report(state, limits, NOW + 1, 200).blocked_until == NOW + 5
    assert min(reserve(state, limits, NOW + 1, 3)[1]) >= NOW + 5
    assert report(state, limits, NOW, status, 1e12).blocked_until == NOW + MAX_RETRY_AFTER


def test_a_throttle_without_retry_after_doubles_the_interval_up_to_a_limit() -> None:
    limits, state, now = Limits(rate=1.0), HostState(), NOW
    state = report(state, limits, now, 429)
    assert state.penalty == 2.0
    assert state.blocked_until == now + 2.0
    for _ in range(7):  # other requests in flight
        state = report(state, limits, now + 0.1, 503)
    assert state.penalty == 2.0
    penalties = []
    for _ in range(10):
        now = state.blocked_until
        state = report(state, limits, now, 429, 0.0)
        penalties.append(state.penalty)
    assert penalties[:3] == [4.0, 8.0, 16.0]
    assert penalties[-1] == MAX_PENALTY
    assert interval(state, limits) == MAX_PENALTY


def test_successes_restore_the_rate_in_steps_and_time_alone_does_not() -> None:
    limits, state = Limits(rate=1.0), HostState(penalty=4.0)
    assert interval(msgspec.structs.replace(state, tat=NOW - 1e6), limits) == 4.0
    steps = []
    for i in range(3 * RECOVERY):
        state = report(state, limits, NOW + i, 200, None, 0.1)
        steps.append(state.penalty)
    assert steps[RECOVERY - 2] == 4.0
    assert steps[RECOVERY - 1] == 2.0
    assert steps[2 * RECOVERY - 1] == 1.0
    assert steps[-1] == 1.0
    broken = msgspec.structs.replace(HostState(penalty=4.0), successes=RECOVERY - 1)
    for status in (500, 502, None):
        assert report(broken, limits, NOW, status).successes == 0
        assert report(broken, limits, NOW, status).penalty == 4.0
    assert report(broken, limits, NOW, 404).penalty == 2.0


def test_a_pause_and_a_retry_after_apply_independently() -> None:
    state = report(HostState(paused_until=math.inf), Limits(rate=None), NOW, 429, 5.0)
    assert held_until(state) == math.inf
    assert reserve(state, Limits(rate=None), NOW, 1)[1] == [NOW + MAX_RETRY_AFTER], (
        "a slot is at most one day ahead"
    )
    assert not holds(state, NOW + 1e9)
    resumed = msgspec.structs.replace(state, paused_until=0.0)
    assert reserve(resumed, Limits(rate=None), NOW, 1)[1] == [NOW + 5.0]


def test_a_crawl_delay_is_ignored_if_robots_is_ignored() -> None:
    state = HostState(crawl_delay=30.0, ignores_robots=True)
    assert interval(state, Limits(rate=2.0)) == 0.5
    assert reserve(state, Limits(rate=2.0, burst=2, jitter=0.0), NOW, 2)[1] == [NOW, NOW]


def test_after_a_limit_change_the_next_slot_keeps_the_new_interval() -> None:
    limits = Limits(rate=1.0, jitter=0.0)
    state, _ = reserve(HostState(rate=1 / 3600), limits, NOW, 1)
    faster = limited(state, limits, 2.0, None, None)
    assert reserve(faster, limits, NOW + 0.1, 2)[1] == [NOW + 0.5, NOW + 1.0]
    assert limited(faster, limits, None, None, None).rate is None
    given_out, _ = reserve(HostState(), limits, NOW, 3)
    slower = limited(given_out, limits, 0.1, None, 3)
    assert (reserve(slower, limits, NOW, 2)[1], slower.concurrency) == ([NOW + 12, NOW + 22], 3)


def test_a_host_state_is_stored_and_loaded_unchanged() -> None:
    state = report(HostState(crawl_delay=2.0, rate=0.5), Limits(), NOW, 429, 3.0, 0.2)
    assert msgspec.json.decode(msgspec.json.encode(state), type=HostState) == state
    assert msgspec.json.encode(HostState()) == b"{}"


def test_latency_is_smoothed_and_statuses_are_counted() -> None:
    state = report(HostState(), Limits(), NOW, 200, None, 1.0)
    assert state.latency == 1.0
    state = report(state, Limits(), NOW, 503, None, 2.0)
    assert state.latency == pytest.approx(1.2)
    assert (state.throttles, state.last_status, state.successes) == (1, 503, 0)


DAY = "Fri, 15 Jan 2027 08:00:{:02d} GMT"  # NOW is 08:00:00


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("5", 5.0),
        (" 120 ", 120.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("99999999", MAX_RETRY_AFTER),
        ("9" * 5000, MAX_RETRY_AFTER),
        (DAY.format(30), 30.0),
        (DAY.format(0), 0.0),
        ("Fri, 15 Jan 2027 07:00:00 GMT", 0.0),
        ("Friday, 15-Jan-27 08:00:30 GMT", 30.0),
        ("Fri Jan 15 08:00:30 2027", 30.0),
        ("fri, 15 jan 2027 08:00:30 gmt", 30.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", MAX_RETRY_AFTER),
        ("", None),
        ("-5", None),
        ("+5", None),
        ("soon", None),
        ("5 minutes", None),
        ("nan", None),
        ("inf", None),
        ("1e9", None),
        ("５", None),
        ("Fri, 99 Jan 2027 08:00:30 GMT", None),
        ("Fri, 15 Foo 2027 08:00:30 GMT", None),
        ("Fri, 15 Jan 2027 25:00:30 GMT", None),
        ("Fri, 15 Jan 2027 08:00:30 +0900", None),
        ("x" * 100_000, None),
    ],
)
def test_retry_after_is_read_as_seconds_or_a_date_and_capped(
    value: str, seconds: float | None
) -> None:
    assert parse_retry_after(value, NOW) == (None if seconds is None else pytest.approx(seconds))


@given(st.text())
def test_any_retry_after_text_is_parsed_without_an_exception(value: str) -> None:
    answer = parse_retry_after(value, NOW)
    assert answer is None or 0 <= answer <= MAX_RETRY_AFTER


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("unlimited", None),
        (" Unlimited ", None),
        ("2", 2.0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("30/m", 0.5),
        ("30/min", 0.5),
        ("10/s", 10.0),
        ("3600 / h", 1.0),
        ("86400/d", 1.0),
    ],
)
def test_a_rate_is_a_number_with_or_without_a_unit(text: str, rate: float | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    ["", "0", "0/m", "-1", "fast", "1/y", "1/", "/m", "nan", "inf", "1e5", "1 2", "99999999999"],
)
def test_an_invalid_rate_is_a_configuration_error_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate(text)
    assert caught.value.hint


def test_ten_thousand_slots_have_the_configured_rate() -> None:
    _, slots = reserve(
        HostState(),
        Limits(rate=10.0, burst=5, jitter=0.2),
        NOW,
        10_000,
        [i * 0.37 % 1 for i in range(97)],
    )
    assert slots == sorted(slots)
    assert max(bisect_right(slots, s + 10.0) - i for i, s in enumerate(slots)) <= 105
    # The burst absorbs the jitter. Without a burst, the mean of the jitter is added.
    assert slots[-1] - NOW == pytest.approx(1000, rel=0.02)
