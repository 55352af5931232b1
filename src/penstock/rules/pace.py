"""When a host may be asked next: slots, blocks and slow-downs as pure decisions. Storing the state
fleet-wide is an adapter's work.
"""

from __future__ import annotations

import calendar
import math
import re
from collections.abc import Sequence

import msgspec

from penstock.errors import ConfigError

MAX_RETRY_AFTER = 24 * 3600.0
MAX_CRAWL_DELAY = (
    3600.0  # a file that asks for more has a typing slip, or means "not at all" and should say that
)
MAX_PENALTY = 64.0
# seconds after its slot, beyond which a request needs a new one: those behind it have theirs
LATE = 0.1
RECOVERY = 5  # successes in a row that halve a penalty
_STEP = (
    0.5  # seconds: what a penalty multiplies where the rate alone would give less, or is unlimited
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator allows per host. `rate` is requests a second, None for unlimited; `jitter`
    is a share of the interval.

    `concurrency` is requests in flight in one worker; all else is for the whole fleet.
    """

    rate: float | None = 1.0
    burst: int = 1
    jitter: float = 0.1
    concurrency: int = 8


class HostState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that is remembered about a host, as one value. It stays when the queue is empty, and so
    do the penalties.
    """

    tat: float = 0.0  # theoretical arrival time of the next request (GCRA)
    blocked_until: float = 0.0  # nothing is sent before: the host's own wish
    paused_until: float = (
        0.0  # nothing is sent before: the operator's wish; inf until it is resumed
    )
    penalty: float = 1.0  # multiplies the interval
    crawl_delay: float | None = None  # from robots.txt
    # when it was last found to want more time: a slot given out before that is not to be used
    slower_since: float = 0.0
    ignores_robots: bool = False  # a recorded exception: the crawl delay does not count
    rate: float | None = None  # this host's own, over the limits'; inf for unlimited
    burst: int | None = None
    concurrency: int | None = None
    successes: int = 0  # in a row, since the last throttling or recovery
    throttles: int = 0  # 429 and 503, in all
    last_status: int | None = None
    latency: float = 0.0  # smoothed seconds per answer


def held_until(state: HostState) -> float:
    """Before this moment nothing is sent, whoever wished it."""
    return max(state.blocked_until, state.paused_until)


def limited(
    state: HostState, limits: Limits, rate: float | None, burst: int | None, concurrency: int | None
) -> HostState:
    """With limits of its own (None: the usual ones) from now on: the next slot keeps the new
    distance from the last one given out.
    """
    after = msgspec.structs.replace(state, rate=rate, burst=burst, concurrency=concurrency)
    return msgspec.structs.replace(
        after, tat=state.tat - interval(state, limits) + interval(after, limits)
    )


def interval(state: HostState, limits: Limits) -> float:
    """Seconds between two requests now; 0 is unlimited."""
    rate = state.rate if state.rate is not None else limits.rate
    gap = 0.0 if rate is None or rate == math.inf else 1.0 / rate
    if state.penalty > 1.0:
        gap = max(gap, _STEP) * state.penalty
    if state.crawl_delay and not state.ignores_robots:
        gap = max(gap, min(state.crawl_delay, MAX_CRAWL_DELAY))
    return gap


def reserve(
    state: HostState, limits: Limits, now: float, n: int, jitter: Sequence[float] = (), within: float | None = None
) -> tuple[HostState, list[float]]:  # fmt: skip
    """The next `n` slots: in any window of W seconds never more than burst + W / interval of them,
    over all calls on the state.

    `jitter` holds numbers in [0, 1), used in turn; none, no jitter. It only delays, and the next
    slot counts from the delayed one. Slots more than `within` seconds away are told but not given:
    who is sent away until then asks again, and a slot given twice is one lost.
    """
    spread = limits.jitter * interval(state, limits)
    if within is not None and spread > within / 2:  # or the jitter alone would send it away again
        jitter = [within / 2 / spread * j for j in jitter]
    after, slots = _next(state, limits, now, n, jitter)
    if within is not None and slots and slots[-1] > now + within:
        after, given = _next(
            state, limits, now, sum(slot <= now + within for slot in slots), jitter
        )
        slots[: len(given)] = given
    return after, slots


def _next(
    state: HostState, limits: Limits, now: float, n: int, jitter: Sequence[float]
) -> tuple[HostState, list[float]]:
    start = max(now, min(held_until(state), now + MAX_RETRY_AFTER))
    gap = interval(state, limits)
    if gap == 0.0:
        return state, [start] * n
    burst = state.burst if state.burst is not None else limits.burst
    # A crawl delay is a delay between any two requests, and a host that asked us to slow down gets
    # no bursts.
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
    slots.sort()  # jitter may have swapped the members of a burst
    return (msgspec.structs.replace(state, tat=tat) if n > 0 else state), slots


def holds(state: HostState, slot: float) -> bool:
    """Is a slot that was given out earlier still good? Asked just before sending: a block may have
    come in between.
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
    """What an answer changes for the host, for every worker. `status` None: no answer came (that is
    the event's trouble, not a throttle).
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
        elif (
            blocked <= now
        ):  # else the same incident, seen by the requests that were under way together
            penalty = min(penalty * 2.0, MAX_PENALTY)
            blocked = now + interval(msgspec.structs.replace(state, penalty=penalty), limits)
    elif status is None or status >= 500:
        successes = 0
    else:
        successes += 1
        if penalty > 1.0 and successes >= RECOVERY:
            penalty, successes = max(penalty / 2.0, 1.0), 0
    return msgspec.structs.replace(
        state, penalty=penalty, blocked_until=blocked, successes=successes, throttles=throttles, last_status=status, latency=latency,
        slower_since=slower,
    )  # fmt: skip


# -- reading ---------------------------------------------------------------------------------------

_MONTHS = {
    m: i
    for i, m in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
_number = re.compile(r"[0-9]+(?:\.[0-9]*)?").fullmatch
_date = re.compile(  # RFC 9110 5.6.7: the fixed form and RFC 850's
    r"(?:[a-z]{3,9},? +)?(?P<day>[0-9]{1,2})[ -](?P<month>[a-z]{3})[ -](?P<year>[0-9]{4}|[0-9]{2}) +"
    r"(?P<h>[0-9]{2}):(?P<m>[0-9]{2}):(?P<s>[0-9]{2}) *(?:gmt|utc|z)?"
).fullmatch
_asctime = re.compile(
    r"[a-z]{3} +(?P<month>[a-z]{3}) +(?P<day>[0-9]{1,2}) +(?P<h>[0-9]{2}):(?P<m>[0-9]{2}):(?P<s>[0-9]{2}) +(?P<year>[0-9]{4})"
).fullmatch  # fmt: skip


def parse_retry_after(value: str, now: float) -> float | None:
    """Seconds from now, of a number or an HTTP date; a past date is 0, more than a day is a day,
    nonsense is None.
    """
    text = value.strip().lower()
    if len(text) > 64:
        text = text[:65] if text.isdecimal() else ""
    if _number(text):
        return min(float(text), MAX_RETRY_AFTER)
    then = parse_date(text)
    return None if then is None else min(max(then - now, 0.0), MAX_RETRY_AFTER)


def parse_date(value: str) -> float | None:
    """Epoch seconds of an HTTP date, in any of its forms; nonsense is None."""
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
    """`unlimited` (None), or requests a second: `2`, `0.5`, `30/m`, `1/h`. Raises ConfigError."""
    word = text.strip().lower()
    if word == "unlimited":
        return None
    m = _rate(word)
    unit = _UNITS.get(m[2] or "s") if m else None
    rate = float(m[1]) / unit if m and unit else 0.0
    if not 1e-6 <= rate <= 1e6:
        raise ConfigError(
            f"{text!r} is not a rate",
            hint="write requests a second (2, 0.5), or per minute, hour or day (30/m, 100/h, 1/d), or unlimited",
        )
    return rate
