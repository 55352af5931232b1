"""Rate limits of a host: slots, blocks and penalties as pure decisions.

Adapters in `claims` store the state for the whole fleet.
"""

from __future__ import annotations

import calendar
import math
import re
from collections.abc import Sequence

import msgspec

from penstock.errors import ConfigError

MAX_RETRY_AFTER = 24 * 3600.0  # seconds
# Seconds. A robots.txt with a longer delay has a mistake, or means that nothing may be fetched and
# should use Disallow.
MAX_CRAWL_DELAY = 3600.0
MAX_PENALTY = 64.0
# Seconds after its slot in which a request may still be sent. A later request must reserve a new
# slot, because the following slots are already assigned.
LATE = 0.1
RECOVERY = 5  # consecutive successes that halve a penalty
# Seconds. Smallest interval that a penalty multiplies, also for a host without a rate limit.
_STEP = 0.5


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the operator for each host.

    `rate` is requests per second, None for unlimited. `jitter` is a share of the interval.
    `concurrency` is the requests in flight in one worker. The others apply to the whole fleet.
    """

    rate: float | None = 1.0
    burst: int = 1
    jitter: float = 0.1
    concurrency: int = 8


class HostState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a host. It is kept, with its penalties, when the queue is empty."""

    tat: float = 0.0  # theoretical arrival time of the next request (GCRA)
    blocked_until: float = 0.0  # no request before: the host throttled (429, 503)
    # No request before: paused by the operator. inf until it is resumed.
    paused_until: float = 0.0
    penalty: float = 1.0  # multiplies the interval
    crawl_delay: float | None = None  # from robots.txt
    # When the host last asked for more time: 429, 503 or a new crawl delay. Slots reserved before
    # that are void.
    slower_since: float = 0.0
    ignores_robots: bool = False  # a recorded exception: the crawl delay is ignored
    rate: float | None = None  # of this host, instead of the general limit. inf for unlimited.
    burst: int | None = None
    concurrency: int | None = None
    successes: int = 0  # consecutive, since the last throttling or recovery
    throttles: int = 0  # all responses 429 and 503
    last_status: int | None = None
    latency: float = 0.0  # smoothed seconds per response


def held_until(state: HostState) -> float:
    """Return the time before which no request is sent, because of a block or a pause."""
    return max(state.blocked_until, state.paused_until)


def limited(
    state: HostState, limits: Limits, rate: float | None, burst: int | None, concurrency: int | None
) -> HostState:
    """Return the state with other limits for this host, None for the general ones.

    The next slot keeps the new interval from the last reserved slot.
    """
    after = msgspec.structs.replace(state, rate=rate, burst=burst, concurrency=concurrency)
    return msgspec.structs.replace(
        after, tat=state.tat - interval(state, limits) + interval(after, limits)
    )


def interval(state: HostState, limits: Limits) -> float:
    """Return the current seconds between two requests, 0 for unlimited."""
    rate = state.rate if state.rate is not None else limits.rate
    gap = 0.0 if rate is None or rate == math.inf else 1.0 / rate
    if state.penalty > 1.0:
        gap = max(gap, _STEP) * state.penalty
    if state.crawl_delay and not state.ignores_robots:
        gap = max(gap, min(state.crawl_delay, MAX_CRAWL_DELAY))
    return gap


def reserve(
    state: HostState,
    limits: Limits,
    now: float,
    n: int,
    jitter: Sequence[float] = (),
    within: float | None = None,
) -> tuple[HostState, list[float]]:
    """Reserve the next `n` slots: at most burst + W / interval of them in any W seconds.

    That limit holds over all calls on the state. `jitter` has numbers in [0, 1), used in turn, or
    none for no jitter. Jitter only delays, and the next slot is counted from the delayed one.

    Slots more than `within` seconds away are returned but not reserved: their events are delayed
    and reserve again, and a second reservation would waste the first.
    """
    spread = limits.jitter * interval(state, limits)
    # Limit the jitter. Otherwise the jitter alone could delay the event each time.
    if within is not None and spread > within / 2:
        jitter = [within / 2 / spread * j for j in jitter]
    after, slots = _next_slots(state, limits, now, n, jitter)
    if within is not None and slots and slots[-1] > now + within:
        after, reserved = _next_slots(
            state, limits, now, sum(slot <= now + within for slot in slots), jitter
        )
        slots[: len(reserved)] = reserved
    return after, slots


def _next_slots(
    state: HostState, limits: Limits, now: float, n: int, jitter: Sequence[float]
) -> tuple[HostState, list[float]]:
    start = max(now, min(held_until(state), now + MAX_RETRY_AFTER))
    gap = interval(state, limits)
    if gap == 0.0:
        return state, [start] * n
    burst = state.burst if state.burst is not None else limits.burst
    # A crawl delay applies between any two requests, and a throttled host gets no bursts.
    slack = (
        0.0
        if (state.crawl_delay and not state.ignores_robots) or state.penalty > 1.0
        else (max(burst, 1) - 1) * gap
    )
    spread = limits.jitter * gap
    tat, slots = state.tat, []
    for i in range(n):
        slot = max(start, tat - slack)
        if jitter:
            slot += spread * jitter[i % len(jitter)]
        tat = max(tat, slot) + gap
        slots.append(slot)
    slots.sort()  # jitter may have changed the order inside a burst
    return (msgspec.structs.replace(state, tat=tat) if n > 0 else state), slots


def holds(state: HostState, slot: float) -> bool:
    """Return True if a reserved slot is still valid.

    Called just before sending, because the host may have been blocked after the reservation.
    """
    return slot >= held_until(state)


def report(
    state: HostState,
    limits: Limits,
    now: float,
    status: int | None,
    retry_after: float | None = None,
    seconds: float | None = None,
) -> HostState:
    """Return the host's state after a response.

    `status` is None if there was no response. That is a failure of the event, not a throttling.
    """
    latency = state.latency
    if seconds is not None and seconds >= 0:
        latency = seconds if latency == 0.0 else 0.8 * latency + 0.2 * seconds
    penalty, blocked, successes, throttles = (
        state.penalty,
        state.blocked_until,
        state.successes,
        state.throttles,
    )
    slower = state.slower_since
    if status in (429, 503):
        throttles, successes, slower = throttles + 1, 0, now
        if retry_after:
            blocked = max(blocked, now + min(retry_after, MAX_RETRY_AFTER))
        # If the host is already blocked, this response belongs to the same incident: its request
        # was in flight together with the one that set the block.
        elif blocked <= now:
            penalty = min(penalty * 2.0, MAX_PENALTY)
            blocked = now + interval(msgspec.structs.replace(state, penalty=penalty), limits)
    elif status is None or status >= 500:
        successes = 0
    else:
        successes += 1
        if penalty > 1.0 and successes >= RECOVERY:
            penalty, successes = max(penalty / 2.0, 1.0), 0
    return msgspec.structs.replace(
        state,
        penalty=penalty,
        blocked_until=blocked,
        successes=successes,
        throttles=throttles,
        last_status=status,
        latency=latency,
        slower_since=slower,
    )


# -- parsing ---------------------------------------------------------------------------------------

_MONTHS = {
    m: i
    for i, m in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
_number = re.compile(r"[0-9]+(?:\.[0-9]*)?").fullmatch
# RFC 9110 5.6.7: the fixed format and the one of RFC 850.
_date = re.compile(
    r"(?:[a-z]{3,9},? +)?"
    r"(?P<day>[0-9]{1,2})[ -](?P<month>[a-z]{3})[ -](?P<year>[0-9]{4}|[0-9]{2}) +"
    r"(?P<h>[0-9]{2}):(?P<m>[0-9]{2}):(?P<s>[0-9]{2}) *(?:gmt|utc|z)?"
).fullmatch
_asctime = re.compile(
    r"[a-z]{3} +(?P<month>[a-z]{3}) +(?P<day>[0-9]{1,2}) +"
    r"(?P<h>[0-9]{2}):(?P<m>[0-9]{2}):(?P<s>[0-9]{2}) +(?P<year>[0-9]{4})"
).fullmatch


def parse_retry_after(value: str, now: float) -> float | None:
    """Return the seconds from now, of a number or an HTTP date, at most one day.

    Return 0 for a date in the past, and None for any other text.
    """
    text = value.strip().lower()
    if len(text) > 64:
        text = text[:65] if text.isdecimal() else ""
    if _number(text):
        return min(float(text), MAX_RETRY_AFTER)
    then = parse_date(text)
    return None if then is None else min(max(then - now, 0.0), MAX_RETRY_AFTER)


def parse_date(value: str) -> float | None:
    """Return the epoch seconds of an HTTP date in any of its formats, None for other text."""
    text = value.strip().lower()
    m = _date(text) or _asctime(text)
    if m is None or m["month"] not in _MONTHS:
        return None
    year, day = int(m["year"]), int(m["day"])
    if len(m["year"]) == 2:
        year += 2000 if year < 70 else 1900
    if not (
        year >= 1970
        and 1 <= day <= 31
        and int(m["h"]) < 24
        and int(m["m"]) < 60
        and int(m["s"]) <= 60
    ):
        return None
    return float(
        calendar.timegm((year, _MONTHS[m["month"]], day, int(m["h"]), int(m["m"]), int(m["s"])))
    )


_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_rate = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?: */ *([a-z]+))?").fullmatch


def parse_rate(text: str) -> float | None:
    """Parse requests per second (`2`, `0.5`, `30/m`, `1/h`), or `unlimited` as None.

    Raise ConfigError for other text.
    """
    value = text.strip().lower()
    if value == "unlimited":
        return None
    m = _rate(value)
    unit = _UNITS.get(m[2] or "s") if m else None
    rate = float(m[1]) / unit if m and unit else 0.0
    if not 1e-6 <= rate <= 1e6:
        raise ConfigError(
            f"{text!r} is not a rate",
            hint="write requests per second (2, 0.5), or per minute, hour or day "
            "(30/m, 100/h, 1/d), or unlimited",
        )
    return rate
